#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs cases of slurm.py on what Bazel built: slurm_test.sh CASE,CASE...
here=$(dirname "$0")
[[ $(id -u) == 0 ]] || { echo "slurm_test needs root"; exit 1; }
slurm=$(tools/setup-slurm --check) || { echo "Slurm is missing: tools/setup-slurm unpacks it"; exit 1; }
product=$(dirname "$(readlink -f "$here/../matrix/product/cr-run")")
exec /usr/bin/python3 "$here/slurm.py" --product "$product" --apps "$here/../apps" --slurm "$slurm" --only "$1"
