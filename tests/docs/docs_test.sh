#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Bazel's runfiles are links: the real place of this script is in the workspace.
exec /usr/bin/python3 "$(dirname "$(readlink -f "$0")")/docs_test.py"
