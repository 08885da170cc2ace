#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Programs that are used wrongly print one line that names the program, what is wrong and with what, and end with the
# documented exit code.
set -u
product=$(dirname "$(find -L . -name cr-run -type f | head -n 1)")
product=$(realpath "$product")
cuda_program=$(realpath "$(find -L . -name driver_ptx -type f | head -n 1)")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset CUDA_REMOTE_SERVER CUDA_REMOTE_JOB_DIR
export XDG_RUNTIME_DIR=$work/run
mkdir -m 700 "$XDG_RUNTIME_DIR"
status=0 count=0
# says CODE TEXT PROGRAM ARGUMENTS...
says() {
  local code=$1 text=$2 name=$3 line ended
  line=$(timeout 60 "$product/$name" "${@:4}" 2>&1 >/dev/null </dev/null)
  ended=$?
  count=$((count + 1))
  if [[ $ended != "$code" || $line != *"$name"*"$text"* || $line == *$'\n'* ]]; then
    echo "${*:3}: ended with $ended, not $code, or did not say in one line '$text' but: $line"
    status=1
  fi
}
for program in "$product"/cr-*; do
  name=$(basename "$program")
  case $name in
    cr-hold) continue ;; # started by CRIU, with no arguments
    cr-mpi-agent) continue ;; # started by mpirun, with a host and a command
    cr-srun) says 2 "cannot have the option --bogus" "$name" --bogus ;;
    cr-run | cr-restart | cr-mpirun) says 125 "unknown option --bogus" "$name" --bogus ;;
    cr-sbatch) says 2 "unknown option --checkpoint-bogus" "$name" --checkpoint-bogus ;; # others are sbatch's
    *) says 2 "unknown option --bogus" "$name" --bogus ;;
  esac
done
says 125 "no program given" cr-run
says 125 "--gpu: Value x not in range 0 to 255" cr-run --gpu x -- /bin/true
says 125 "--name a/b: a job's name cannot contain a slash" cr-run --name a/b -- /bin/true
says 127 "/nowhere/program: No such file or directory" cr-run --no-check --server unix:/nowhere -- /nowhere/program
says 125 "the GPU server unix:/nowhere cannot be reached: cannot connect to /nowhere: No such file or directory" \
  cr-run --server unix:/nowhere -- /bin/true
for address in garbage localhost:99999 localhost: :7070 localhost:0; do
  says 125 "\"$address\" is not a server address: write unix:PATH, or HOST:PORT" cr-run --server "$address" -- /bin/true
  says 2 "\"$address\" is not a server address" cr-ps --server "$address"
done
says 1 "cannot connect to /nowhere/session.sock: No such file or directory; is cr-server running" \
  cr-ps --server unix:/nowhere/session.sock
says 1 "no answer from the server at localhost:1: connection refused; is cr-server running there with --listen" \
  cr-ps --server localhost:1
says 2 "JOB is required" cr-checkpoint
says 2 '--pool: unknown unit "q"; a size is a number' cr-checkpoint --pool 3Q train image
says 2 '--every: unknown unit "x"; it is one of h,m,s' cr-checkpoint --every 10x train image
says 2 "no server given: name it with --to" cr-migrate train
for command in "cr-checkpoint train image" "cr-migrate train --to unix:/nowhere" "cr-trace train"; do
  # shellcheck disable=SC2086  # a program and its arguments
  says 4 'there is no job "train": name its folder' $command
done
mkdir "$work/empty"
says 125 "there is no checkpoint image /nowhere/image" cr-restart /nowhere/image
says 1 "$work/empty is not a checkpoint image: it has no manifest.pb" cr-inspect "$work/empty"
says 2 "wrong value: --end = x" cr-ps --end x
echo "bogus = 3" >"$work/server.conf"
says 2 "unknown option bogus in the configuration file" cr-server --config "$work/server.conf"
says 2 "cannot read the file $work/none.conf" cr-server --config "$work/none.conf"
# Where no driver works, a job's own server says once what computes instead.
mkdir "$work/broken"
echo "no library" >"$work/broken/libcuda.so.1"
line=$(unset CUDA_REMOTE_DRIVER && LD_LIBRARY_PATH=$work/broken timeout 60 "$product/cr-run" -- "$cuda_program" --steps 1 2>&1 >/dev/null)
if [[ $line != *"no usable GPU on this machine: programs compute with the software GPU"* || $line == *$'\n'* ]]; then
  echo "cr-run without a GPU did not say in one line that it uses the software GPU but: $line"
  status=1
fi
[[ $count -ge 30 ]] || { echo "only $count cases"; status=1; }
exit $status
