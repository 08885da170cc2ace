#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs incremental.py on the software GPU: space must be what has changed, and the restarted job must find its memory. Once
# as root, and once as another user, who needs a copy of the programs.
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../tests/matrix/product/cr-run")")"
out="$(mktemp -d)"
# A number that no machine gives to its users, as in tests/users.
user=$((1600000000 + $$))
trap 'rm -rf "$out" "/tmp/cuda-remote-$user"' EXIT
/usr/bin/python3 "$here/incremental.py" --product "$product" --programs "$here" --driver "$product/libsoftgpu.so" \
  --mib 64 --folder "$out" --check || exit 1
cp -rL "$product" "$out/product" && cp -L "$here/incremental_job" "$out/product/" && chmod -R a+rX "$out" || exit 1
/usr/bin/python3 "$here/incremental.py" --product "$out/product" --programs "$out/product" \
  --driver "$out/product/libsoftgpu.so" --mib 64 --folder "$out" --check --user "$user"
