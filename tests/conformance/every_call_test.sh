#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs every_call.py on what Bazel built.
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../matrix/product/cr-run")")"
exec /usr/bin/python3 "$here/every_call.py" --product "$product" --program "$here/every_call"
