#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A program without a usable GPU server gets the error that docs/settings.md names, and its user one line that says why.
#
# Usage: unserved_test.sh LIBRARY PROGRAM CR_SERVER WORKER
set -euo pipefail
library=$(readlink -f "$1") program=$2 server=$3 worker=$4
folder=$(mktemp -d /tmp/cr-unserved-XXXXXX)
server_pid=
trap '[[ -z $server_pid ]] || kill "$server_pid"; rm -rf "$folder"' EXIT
ln -s "$library" "$folder/libcuda.so.1"

# What the program prints must be `expected`, and standard error one line with `says` in it.
check() {
  local name=$1 address=$2 error=$3 code=$4 says=$5
  LD_LIBRARY_PATH=$folder CUDA_REMOTE_SERVER=$address CUDA_REMOTE_JOB_DIR='' "$program" >"$folder/out" 2>"$folder/err"
  printf 'count %s\nmalloc %s\nversion fits\ninit %s\n' "$error" "$error" "$code" >"$folder/expected"
  if ! diff "$folder/expected" "$folder/out" >&2; then
    echo "$name: the program saw something else (>) than it should (<)" >&2
    cat "$folder/err" >&2
    exit 1
  fi
  if [[ $(wc -l <"$folder/err") != 1 ]] || ! grep -q "$says" "$folder/err"; then
    echo "$name: standard error is not one line with \"$says\":" >&2
    cat "$folder/err" >&2
    exit 1
  fi
}

check "no server" "" cudaErrorNoDevice 100 "cr-run"
check "no socket" "unix:$folder/nowhere.sock" cudaErrorSystemNotReady 802 "cannot connect to $folder/nowhere.sock"
check "no host" "127.0.0.1:1" cudaErrorSystemNotReady 802 "GPU server 127.0.0.1:1: cannot reach the server 127.0.0.1:1: connection refused; is cr-server running there"

"$server" --dir "$folder/server" --worker "$worker" --driver broken --workers 0 --log-level error >"$folder/ready" 2>"$folder/log" &
server_pid=$!
for _ in $(seq 200); do
  if grep -q ready "$folder/ready"; then break; fi
  sleep 0.05
done
check "refused" "unix:$folder/server/session.sock" cudaErrorSystemNotReady 802 "the server refused: .*the driver is broken"
check "refused, named by its folder" "unix:$folder/server" cudaErrorSystemNotReady 802 "the driver is broken"
echo passed
