#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every request of many threads is in the ring once, in order; also with a reader that is slower than they are.
here="$(dirname "$0")"
product="$(dirname "$(readlink -f "$here/../../tests/matrix/product/cr-run")")"
for work in 0 2000; do
  /usr/bin/python3 "$here/producers.py" --product "$product" --program "$here/producers" --threads 1,4,32 --calls 20000 \
    --work $work || exit 1
done
