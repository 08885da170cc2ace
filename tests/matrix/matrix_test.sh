#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs matrix.py on what Bazel built: matrix_test.sh APP MODE,MODE...
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/product/cr-run")")"
exec /usr/bin/python3 "$here/matrix.py" --product "$product" --apps "$here/.." --only "$1" --modes "$2" --case-limit 90
