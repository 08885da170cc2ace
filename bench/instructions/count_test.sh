#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compares the counts of what Bazel built with the recorded ones; and a record that is off must be noticed.
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../../tests/matrix/product/cr-run")")"
exec /usr/bin/python3 "$here/count.py" --product "$product" --programs "$here" --check "$here/counts.json"
