#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the entry points are built on does not use them: neither the session nor the bodies of calls need an exported
# name, and the session needs no body.
set -euo pipefail
exports=$1 session=$2 custom=$3
failed=0

# refuse ARCHIVE PATTERN ADVICE: no object of the archive may need a symbol that PATTERN matches.
refuse() {
  local archive=$1 pattern=$2 advice=$3 found
  found=$(nm --undefined-only --demangle --print-file-name "$archive" | grep --extended-regexp " U ($pattern)" || true)
  if [[ -n $found ]]; then
    echo "$found" >&2
    echo "$archive must not need these symbols: $advice" >&2
    failed=1
  fi
}

for archive in "$session" "$custom"; do
  if [[ $(nm --defined-only --print-file-name "$archive" | grep --count ' T ') -lt 20 ]]; then
    echo "$archive: found hardly any function in it" >&2
    exit 1
  fi
done
names=$(paste --serial --delimiters='|' "$exports")
refuse "$session" "($names)$" "make the call through client/session/own_calls.h"
refuse "$session" "cuda_remote::client::(Custom|Call)_cu" "make the call through client/session/own_calls.h"
refuse "$custom" "($names)$" "call the body instead: Call_cuX or Custom_cuX of client/custom/bodies.gen.h"
[[ $failed == 0 ]] && echo "neither the session nor the bodies need an exported name"
exit $failed
