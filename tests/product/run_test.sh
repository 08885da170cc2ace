#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# cr-run as a shell sees it: exit codes, streams, signals, what it leaves behind. There is no server, so that most cases
# do without the question whether it can be reached.
set -uo pipefail
checked=$(realpath "$(find -L . -name cr-run -type f | head -n 1)")
folder=$(mktemp -d /tmp/run-test-XXXXXX)
trap 'rm -rf "$folder"' EXIT
run=$folder/run
printf '#!/bin/sh\nexec %s --no-check "$@"\n' "$checked" >"$run"
chmod +x "$run"
export XDG_RUNTIME_DIR=$folder CUDA_REMOTE_SERVER=unix:$folder/none.sock
unset CUDA_REMOTE_JOB_DIR CUDA_REMOTE_JOB
failures=0

expect() {
  local what=$1 want=$2 got=$3
  if [[ $got != "$want" ]]; then
    echo "FAIL: $what: expected '$want', got '$got'"
    failures=$((failures + 1))
  fi
}

code() { "$run" "$@" >"$folder/out" 2>"$folder/err" </dev/null; echo $?; }

expect "a program's exit code" 7 "$(code -- bash -c 'exit 7')"
expect "without --" 3 "$(code bash -c 'exit 3')"
expect "killed by a signal" 137 "$(code -- bash -c 'kill -9 $$')"
expect "not there" 127 "$(code -- no-such-program)"
expect "no program" 126 "$(code -- /etc/passwd)"
expect "no command" 125 "$(code)"
expect "unknown option" 125 "$(code --no-such-option x -- true)"
expect "the message names it" 1 "$(grep -c -e --no-such-option "$folder/err")"
expect "unknown option before a program" 125 "$(code --bogus ./x)"
expect "the message names it and not the program" "1 0" "$(grep -c -e --bogus "$folder/err") $(grep -c ./x "$folder/err")"
expect "a server that is none" 125 "$(code --server nonsense -- true)"
grep -q nonsense "$folder/err" || expect "the message names it" nonsense "$(cat "$folder/err")"

# The program does not start if its server cannot be reached: it would compute without the GPU, or for a part of the way.
for server in "unix:$folder/none.sock" "unix:$folder" 127.0.0.1:1 nohost.invalid:7070; do
  expect "$server cannot be reached" 125 "$("$checked" --server "$server" -- touch "$folder/started" 2>"$folder/err"; echo $?)"
  expect "$server is named" 1 "$(grep -c "GPU server $server cannot be reached" "$folder/err")"
  expect "$server: what to do is said" 1 "$(grep -c -e --no-check "$folder/err")"
  expect "relay.sock is not named" 0 "$(grep -c relay.sock "$folder/err")"
done
expect "the server of the environment cannot be reached" 125 "$("$checked" -- touch "$folder/started" 2>/dev/null; echo $?)"
expect "no program was started" "" "$(ls "$folder/started" 2>/dev/null)"
expect "without the question" 0 "$("$checked" --no-check -- touch "$folder/started"; echo $?)"
[[ -e $folder/started ]] || expect "it starts" started ""
# A server that takes connections and is silent. cr-run says so, and a signal ends it.
python3 -c 'import socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[1])
s.listen(8)
time.sleep(600)' "$folder/silent.sock" &
silent=$!
until [[ -e $folder/silent.sock ]]; do sleep 0.05; done
"$checked" --server "unix:$folder/silent.sock" -- touch "$folder/silent" 2>"$folder/err" &
child=$!
until grep -q "waiting for the GPU server unix:$folder/silent.sock" "$folder/err"; do sleep 0.05; done
kill -TERM $child
wait $child
expect "a signal while cr-run waits" 143 $?
expect "no program was started for a silent server" "" "$(ls "$folder/silent" 2>/dev/null)"
kill $silent
wait $silent 2>/dev/null
expect "help" 0 "$(code --help)"
expect "plain" 5 "$(code --plain -- bash -c 'exit 5')"
expect "standard streams" "in-out" "$(echo -n in- | "$run" -- bash -c 'cat; echo out; echo err >&2' 2>"$folder/err")"
expect "standard error" err "$(cat "$folder/err")"
expect "arguments" "a b|--server|" "$("$run" -- printf '%s|' 'a b' --server)"
expect "a descriptor of the caller's" "mine" "$("$run" -- cat /proc/self/fd/7 7< <(echo mine))"
expect "job folder" "train" "$("$run" --name train -- bash -c 'basename "$CUDA_REMOTE_JOB_DIR"')"
expect "named job folder" "$folder/else" "$("$run" --job-dir "$folder/else" -- bash -c 'echo $CUDA_REMOTE_JOB_DIR')"
expect "the library is the driver" "libcuda-remote.so" \
  "$("$run" -- bash -c 'basename "$(readlink "${LD_LIBRARY_PATH%%:*}/libcuda.so.1")"')"
expect "the search path goes on" "/x:/y" "$(LD_LIBRARY_PATH=/x:/y "$run" -- bash -c 'echo "${LD_LIBRARY_PATH#*:}"')"
expect "job.json" 1 "$("$run" -- bash -c 'sleep 0.3; grep -c "\"command\"" "$CUDA_REMOTE_JOB_DIR/job.json"')"
expect "a gpu" 2 "$("$run" --server "$CUDA_REMOTE_SERVER" --gpu 2 -- bash -c 'echo $CUDA_REMOTE_GPU')"

# Signals go to the program, once.
"$run" --name signals -- bash -c 'trap "echo term; exit 9" TERM; trap "echo usr1" USR1; echo ready; while :; do sleep 0.05; done' \
  >"$folder/signals" &
child=$!
until grep -q ready "$folder/signals"; do sleep 0.05; done
kill -USR1 $child
until grep -q usr1 "$folder/signals"; do sleep 0.05; done
# One job per folder.
expect "a job that runs already" 125 "$(code --name signals -- true)"
kill -TERM $child
wait $child
expect "after a signal" 9 $?
expect "signals" "ready usr1 term" "$(tr '\n' ' ' <"$folder/signals" | sed 's/ $//')"

# A cr-run in a job starts one more process of that job.
expect "nested" "same" "$("$run" -- bash -c "outer=\$CUDA_REMOTE_JOB_DIR; '$run' -- bash -c \"[[ \\\$CUDA_REMOTE_JOB_DIR == '\$outer' ]] && echo same\"")"
expect "nested, exit code" 7 "$("$run" -- "$run" -- bash -c 'exit 7'; echo $?)"
expect "nested, with other wishes" 125 "$("$run" -- "$run" --gpu 0 -- true 2>/dev/null; echo $?)"
expect "nested, with other outputs" 125 "$("$run" -- "$run" --output "$folder/none" -- true 2>/dev/null; echo $?)"
expect "nested, with another environment" 1 \
  "$("$run" -- bash -c "readlink /proc/self/ns/pid; env -i '$run' -- readlink /proc/self/ns/pid" | uniq | wc -l)"
expect "cr-ps in a job, of that job" running \
  "$("$run" --name inside -- bash -c "sleep 0.5; env -u CUDA_REMOTE_SERVER '$(dirname "$checked")/cr-ps'" | awk '$1 == "inside" { print $2 }')"
expect "nested, no such program" 127 "$("$run" -- "$run" -- /no/such/program 2>/dev/null; echo $?)"

if [[ $(id -u) == 0 ]]; then
  setpriv --bounding-set -sys_admin --inh-caps -sys_admin "$run" -- true 2>"$folder/err"
  expect "a missing capability is named" 1 "$(grep -c CAP_SYS_ADMIN "$folder/err")"
  # They begin anywhere, so that two jobs do not name their files alike; none of ours is among them.
  expect "own process numbers" "" "$("$run" -- bash -c "ls /proc | grep -x $$")"
  expect "own processes" few "$("$run" -- bash -c '(($(ls -d /proc/[0-9]* | wc -l) < 8)) && echo few')"
  expect "own /proc" "bash" "$("$run" -- bash -c 'cat /proc/$$/comm; true')"
  # The namespace's setup fails, here since the root folder is no mount point: the program runs without one.
  root=$(mktemp -d /tmp/run-test-root-XXXXXX)
  unshare --mount bash -c 'cd "$0"; for d in /*; do
      if [[ -L $d ]]; then cp -a "$d" .; elif [[ -d $d ]]; then mkdir ".$d"; mount --rbind "$d" ".$d"; fi
    done; exec /usr/sbin/chroot . "$@"' "$root" "$(realpath "$run")" --name unmounted -- bash -c '
      until [[ -e $CUDA_REMOTE_JOB_DIR/job.json ]]; do sleep 0.05; done
      grep -c "^ \"init_pid\"" "$CUDA_REMOTE_JOB_DIR/job.json"; exit 5' >"$folder/out" 2>"$folder/err"
  expect "without a namespace, exit code" 5 $?
  expect "without a namespace, no init process" 0 "$(cat "$folder/out")"
  expect "without a namespace, why" 1 "$(grep -c 'the mounts of the job its own.*cannot be checkpointed' "$folder/err")"
  find "$root" -type l -delete
  rmdir "$root"/* "$root"
  # What the program leaves behind ends with it, and all ends with cr-run.
  "$run" -- bash -c "sleep 4711 & echo started" >/dev/null
  "$run" -- sleep 4712 &
  child=$!
  sleep 0.5
  kill -9 $child
  wait $child 2>/dev/null
  sleep 0.3
  expect "processes left behind" "" "$(pgrep -f 'sleep 471[12]$')"
fi
expect "job folders left behind" "$child" "$(ls "$folder/cuda-remote/jobs" | tr -d '\n')"

[[ $failures == 0 ]] && echo "all passed"
exit $((failures != 0))
