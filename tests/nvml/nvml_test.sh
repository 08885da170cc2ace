#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs nvml_test.py on what Bazel built: nvml_test.sh CASE,CASE...
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../matrix/product/cr-run")")"
exec /usr/bin/python3 "$here/nvml_test.py" --product "$product" --probe "$here/probe" --ask "$here/ask.py" --only "$1"
