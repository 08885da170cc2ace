#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs json_test.py on what Bazel built.
here=$(dirname "$0")
[ "$(id -u)" = 0 ] || { echo "json_test needs root"; exit 1; }
product=$(dirname "$(readlink -f "$here/../matrix/product/cr-run")")
# One job runs as another user, who may not enter root's folders.
copy=$(mktemp -d /tmp/json-test-XXXXXX)
trap 'rm -rf "$copy"' EXIT
chmod 755 "$copy"
cp -L "$product"/* "$copy/"
/usr/bin/python3 "$here/json_test.py" --product "$copy" --program "$here/../apps/globals" --sample "$here/sample_image"
