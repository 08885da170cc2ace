#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Types the lines of docs/tutorial.md: its own CUDA program, servers, checkpoint and restart, a move, TLS. Without the
# installation (the product is on the path already) and PyTorch, which needs a GPU.
set -u
product=$(realpath "$(dirname "$(find -L . -name cr-run -type f | head -n 1)")")
tutorial=$(realpath docs/tutorial.md)
work=$(mktemp -d)
# Folders and a port of the test's own.
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
awk '/^## /{ take = ($2 ~ /^[234568]\.$/) } take && /^    /{ print substr($0, 5) }' "$tutorial" |
  sed "s|/tmp/|$work/|g; s|localhost:7070|localhost:$port|g" >"$work/typed"
[[ $(wc -l <"$work/typed") -ge 45 ]] || { echo "found only $(wc -l <"$work/typed") lines in the tutorial"; exit 1; }
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
# Each command must succeed. A job that a checkpoint has stopped ends with 121.
cat >"$work/checked" - "$work/typed" <<'END'
trap 'code=$?; [[ $BASH_COMMAND == "wait \$job" && $code == 121 ]] || echo "failed: $BASH_COMMAND ($code)"' ERR
END
HOME=$work PATH=$product:/usr/local/cuda/bin:$PATH XDG_RUNTIME_DIR=$work/runtime bash -u "$work/checked" >"$work/out" 2>&1
status=$?
same=$(grep -c '^same result$' "$work/out")
if [[ $status != 0 || $same != 3 ]] || grep '^failed: ' "$work/out" || ! grep -q '^step 40 sum 26240$' "$work/out"; then
  cat "$work/out"
  tail -n 20 "$work"/cuda-remote-tutorial/*.{log,err} 2>/dev/null
  echo "the tutorial does not do what it says: exit code $status, $same of 3 same results"
  exit 1
fi
