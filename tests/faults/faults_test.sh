#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs cases of faults.py on what Bazel built: faults_test.sh CASE,CASE...
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../matrix/product/cr-run")")"
exec /usr/bin/python3 "$here/faults.py" --product "$product" --apps "$here/../apps" --programs "$here" --only "$1"
