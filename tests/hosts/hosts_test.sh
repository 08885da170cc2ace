#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs cases of hosts.py on what Bazel built: hosts_test.sh CASE,CASE...
here=$(dirname "$0")
[[ $(id -u) == 0 ]] || { echo "hosts_test needs root"; exit 1; }
product=$(dirname "$(readlink -f "$here/../matrix/product/cr-run")")
exec /usr/bin/python3 "$here/hosts.py" --product "$product" --apps "$here/../apps" --only "$1"
