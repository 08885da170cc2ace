#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the entry points are built on does not use them: neither the session nor the bodies of calls need an exported
# name, and the session needs no body.
set -euo pipefail
exports=$1 bodies=$3
read -ra session <<<"$2"
failed=0

# refuse PATTERN ADVICE ARCHIVE...: no object of the archives may need a symbol that PATTERN matches.
refuse() {
  local pattern=$1 advice=$2 found
  found=$(nm --undefined-only --demangle --print-file-name "${@:3}" | grep --extended-regexp " U ($pattern)" || true)
  if [[ -n $found ]]; then
    echo "$found" >&2
    echo "${*:3} must not need these symbols: $advice" >&2
    failed=1
  fi
}

# enough LEAST ARCHIVE...: they define at least so many functions.
enough() {
  if [[ $(nm --defined-only --print-file-name "${@:2}" | grep --count ' T ') -lt $1 ]]; then
    echo "${*:2}: found hardly any function" >&2
    exit 1
  fi
}

enough 20 "${session[@]}"
enough 20 "$bodies"
for archive in "${session[@]}"; do enough 1 "$archive"; done
names=$(paste --serial --delimiters='|' "$exports")
refuse "($names)$" "make the call through client/core/own_calls.h" "${session[@]}"
refuse "cuda_remote::client::(Custom|Call)_cu" "make the call through client/core/own_calls.h" "${session[@]}"
refuse "($names)$" "call the body instead: Call_cuX or Custom_cuX of client/calls/bodies.gen.h" "$bodies"
[[ $failed == 0 ]] && echo "neither the session nor the bodies need an exported name"
exit $failed
