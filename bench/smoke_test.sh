#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs all of the benchmark on what Bazel built, with the software GPU, as short as it gets: every row must come out.
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../tests/matrix/product/cr-run")")"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
/usr/bin/python3 "$here/run.py" --product "$product" --programs "$here" --smoke --out "$out" || exit 1
for file in results.json table.md plot.svg; do
  [ -s "$out/$file" ] || { echo "FAIL: no $file" >&2; exit 1; }
done
# A plot of the same JSON by itself; and what is missing must fail the run.
/usr/bin/python3 "$here/plot.py" "$out/results.json" "$out/again.svg" && cmp "$out/plot.svg" "$out/again.svg" || exit 1
if /usr/bin/python3 "$here/run.py" --product "$product" --programs "$here" --smoke --stages tcp,calls --budget 1 >/dev/null 2>&1; then
  echo "FAIL: a run without time for its rows must not succeed" >&2
  exit 1
fi
