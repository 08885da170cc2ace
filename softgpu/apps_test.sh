#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs the test programs (tests/apps) on the software GPU as they are: the library stands in for libcuda.so.1. Every program
# compares its results with a reference of its own; programs that must print the same are compared with each other.
set -u
library=$1
apps=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
ln -s "$(readlink -f "$library")" "$folder/libcuda.so.1"
failed=0
for app in clusters driver_ptx globals globals_plain histogram managed mathmix matmul memory nbody no_context pipeline \
           pools printer reduce stencil stencil_fat tensor_maps texture_memory textures threads threads_ptds vmm; do
  if ! LD_LIBRARY_PATH=$folder timeout 120 "$apps/$app" > "$folder/$app.out" 2> "$folder/$app.err"; then
    echo "FAILED: $app"
    tail -5 "$folder/$app.out" "$folder/$app.err"
    failed=1
  fi
done
for pair in "stencil stencil_fat" "globals globals_plain" "threads threads_ptds"; do
  set -- $pair
  cmp "$folder/$1.out" "$folder/$2.out" || failed=1
done
# Device printf between the host's own lines, in order.
if [ "$(grep -n . "$folder/printer.out" | grep -E 'device step=|host step=' | sed -E 's/.*(device|host) step=([0-9]+).*/\1\2/' |
        tr '\n' ' ')" != "$(for i in $(seq 12); do printf 'device%d host%d ' "$i" "$i"; done)" ]; then
  echo "FAILED: order of printer's output"
  cat "$folder/printer.out"
  failed=1
fi
exit $failed
