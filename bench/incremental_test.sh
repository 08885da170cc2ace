#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs incremental.py on the software GPU: space must be what has changed, and the restarted job must find its memory.
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../tests/matrix/product/cr-run")")"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
/usr/bin/python3 "$here/incremental.py" --product "$product" --programs "$here" --driver "$product/libsoftgpu.so" \
  --mib 64 --folder "$out" --check
