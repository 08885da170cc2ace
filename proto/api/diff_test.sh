#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compares each generated file (NAME.gen) of this folder with the checked-in NAME.
cd "$TEST_SRCDIR/$TEST_WORKSPACE/$(dirname "$TEST_BINARY")" || exit 1
status=0
found=0
for new in *.gen; do
  found=$((found + 1))
  diff -u "${new%.gen}" "$new" || status=1
done
[ "$found" -gt 0 ] || { echo "nothing to compare" >&2; exit 1; }
[ "$status" = 0 ] || echo "the checked-in files are not what the tables say; run proto/gen/update.sh" >&2
exit $status
