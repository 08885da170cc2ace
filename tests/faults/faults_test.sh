#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs cases of a script on what Bazel built: faults_test.sh faults.py CASE,CASE...
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../matrix/product/cr-run")")"
exec /usr/bin/python3 "$here/$1" --product "$product" --apps "$here/../apps" --programs "$here" --only "$2"
