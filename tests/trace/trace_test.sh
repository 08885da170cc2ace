#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs trace_cases.py on what Bazel built.
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../matrix/product/cr-run")")"
exec /usr/bin/python3 "$here/trace_cases.py" --product "$product" --program "$here/calls"
