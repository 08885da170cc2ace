#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Rewrites what is generated and checked in: proto/calls/LOCK, proto/api/COVERAGE.md.
set -e
cd "$(dirname "$0")/../.."
lock=
[ -f proto/calls/LOCK ] && lock="--lock proto/calls/LOCK"
/usr/bin/python3 proto/gen/generate.py --api proto/api --emit lock $lock --out proto/calls
/usr/bin/python3 proto/gen/generate.py --api proto/api --emit coverage --out proto/api
