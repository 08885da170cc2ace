#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs cases of hostd.py on what Bazel built: hostd_test.sh CASE,CASE...
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../matrix/product/cr-run")")"
exec /usr/bin/python3 "$here/hostd.py" --product "$product" --apps "$here/../apps" --only "$1"
