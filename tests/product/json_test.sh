#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs json_test.py on what Bazel built.
here=$(dirname "$0")
[ "$(id -u)" = 0 ] || { echo "json_test needs root"; exit 1; }
product=$(dirname "$(readlink -f "$here/../matrix/product/cr-run")")
exec /usr/bin/python3 "$here/json_test.py" --product "$product" --program "$here/../apps/globals" --sample "$here/sample_image"
