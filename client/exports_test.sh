#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The client library exports the driver's names and nothing else, and needs no library beyond libc's own.
set -euo pipefail
library=$1 wanted=$2
exported=$(nm --dynamic --defined-only --format=posix "$library" | awk '{print $1}' | sed 's/@.*//' | sort -u)
if ! diff <(sort -u "$wanted") <(echo "$exported") >&2; then
  echo "the library's exports (>) differ from the driver's names (<)" >&2
  exit 1
fi
needed=$(readelf --dynamic "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -vE '^(libc|libm|libpthread|libdl|librt|ld-linux-x86-64)\.so' || true)
if [[ -n $needed ]]; then
  echo "the library needs more than libc: $needed" >&2
  exit 1
fi
echo "$(echo "$exported" | wc -l) names exported"
