#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs ranks.py for two ranks: a row must come out for one host and for two, and a plot.
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../tests/matrix/product/cr-run")")"
plot="$(mktemp)"
trap 'rm -f "$plot"' EXIT
/usr/bin/python3 "$here/ranks.py" --product "$product" --apps "$here/../tests/apps" --ranks 2 --hosts 1,2 --rounds 1 \
  --plot "$plot" | tee "$plot.rows"
rows=$(grep -cE '^\| 2 \| [12] (\| [0-9]+\.[0-9]+ ){4}\|$' "$plot.rows")
rm -f "$plot.rows"
[ "$rows" = 2 ] && grep -q '</svg>' "$plot"
