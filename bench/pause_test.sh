#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs pause.py on the software GPU: a row for each checkpoint and move, of both kinds of jobs, and a plot.
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../tests/matrix/product/cr-run")")"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
export CUDA_REMOTE_DRIVER="$product/libsoftgpu.so" CR_PAUSE_DIR="$out"
/usr/bin/python3 "$here/pause.py" --product "$product" --programs "$here" --mib 8 --changing 5 --moves --far --seconds 1 \
  --step-ms 0 --checkpoint-option=--pool --checkpoint-option=512M --json "$out/jobs.json" >"$out/jobs" || exit 1
/usr/bin/python3 "$here/pause.py" --product "$product" --program "$here/pause_job 8 100 20 1000" --checkpoints 2 --seconds 1 \
  --json "$out/program.json" >"$out/program" || exit 1
cat "$out/jobs" "$out/program"
[ "$(grep -c '^| 8 | 5% |' "$out/jobs")" = 3 ] && [ "$(grep -c '^| [12] |' "$out/program")" = 2 ] || exit 1
for name in jobs program; do
  /usr/bin/python3 "$here/pause_plot.py" "$out/$name.json" "$out/$name.svg" && grep -q '</svg>' "$out/$name.svg" || exit 1
done
