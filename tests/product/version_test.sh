#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every program prints the same version, and the change log begins with it.
set -u
product=$(dirname "$(find -L . -name cr-run -type f | head -n 1)")
status=0 count=0 first=
for program in "$product"/cr-*; do
  name=$(basename "$program")
  [ "$name" = cr-hold ] && continue # started by CRIU, with no arguments
  line=$("$program" --version) || { echo "$name --version failed: $line"; status=1; }
  case $line in
    "$name "[0-9]*.[0-9]*.[0-9]*" (wire version "[0-9]*")") ;;
    *) echo "$name --version printed: $line"; status=1 ;;
  esac
  version=${line#"$name "}
  : "${first:=$version}"
  [ "$version" = "$first" ] || { echo "$name says $version, others $first"; status=1; }
  count=$((count + 1))
done
[ "$count" -ge 10 ] || { echo "only $count programs in $product"; status=1; }
newest=$(sed -n 's/^## \([0-9.]*\).*/\1/p' CHANGELOG.md | head -n 1)
[ "$newest" = "${first%% *}" ] || { echo "CHANGELOG.md begins with $newest, the programs are ${first%% *}"; status=1; }
exit $status
