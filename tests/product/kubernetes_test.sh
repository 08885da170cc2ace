#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The manifests of packaging/kubernetes. There is no cluster: their structure is checked, and the example job's script runs
# here, is killed after an image, and goes on from it.
set -u
fail() {
  echo "$*"
  tail -n 30 "$work"/*.log "$work"/output/* 2>/dev/null
  exit 1
}
[[ $(id -u) == 0 ]] || { echo "kubernetes_test needs root"; exit 1; }
criu=$(tools/setup-criu --check) || { echo "no CRIU works here"; exit 1; }
here=$(dirname "$0")
product=$(realpath "$(dirname "$(find -L . -name cr-run -type f | head -n 1)")")
program=$(realpath tests/apps/driver_ptx)
work=$(mktemp -d)
pids=()
finish() {
  for pid in "${pids[@]}"; do kill -9 -- "-$pid" "$pid" 2>/dev/null; done
  wait
  rm -rf "$work"
}
trap finish EXIT
/usr/bin/python3 "$here/kubernetes_check.py" packaging "$product" || exit 1
# The check finds mistakes of each kind.
mkdir -p "$work/changed/docs"
cp docs/containers.md "$work/changed/docs/"
for change in 's/volumeMounts:/volumeMount:/' 's/containerPort: 7071/containerPort: 7072/' 's/--tls-ca=/--tls-car=/' \
  's/--every 10m/--evry 10m/' 's|hosts/ca.crt|hosts/ca.pem|' 's/defaultMode: 0400/defaultMode: 0444/' 's/SYS_PTRACE, //' \
  's/cuda-remote-host:/cuda-remote-hosts:/' 's/host:[0-9.]*$/host:0.0.1/' 's/claimName: jobs/claimName: job/' 's/secretName: cr-hostd/secretName: hostd/' \
  's/type: Unconfined/type: RuntimeDefault/' 's/namespace: cuda-remote/namespace: cuda/' 's|mountPath: /jobs|mountPath: /job|'; do
  rm -rf "$work/changed/packaging"
  cp -rL packaging "$work/changed/packaging"
  sed -i "$change" "$work"/changed/packaging/kubernetes/*hostd.yaml
  ! /usr/bin/python3 "$here/kubernetes_check.py" "$work/changed/packaging" "$product" >/dev/null 2>"$work/mistake.log" || fail "not found: $change"
  grep -q '^kubernetes_check: ' "$work/mistake.log" || fail "another error after $change"
done
script=$(/usr/bin/python3 "$here/kubernetes_check.py" packaging "$product" --show job.yaml script) || exit 1

mkdir "$work"/{images,output}
mkdir -m 700 "$work/gpu" "$work/run"
# Where the pod has its volumes; a program; and less time between images.
script=${script//\/images/$work/images}
script=${script//\/output/$work/output}
script=${script//\/run\/cuda-remote/$work/gpu}
script=${script//.\/train/$program --steps 60}
script=${script//--every 10m/--every 0.5s}
export PATH=$product:/usr/sbin:/usr/bin:/sbin:/bin CUDA_REMOTE_CRIU=$criu XDG_RUNTIME_DIR=$work/run
export CR_TEST_SYNC_FILE=$work/steps
setsid cr-server --dir "$work/gpu" >"$work/server.log" 2>&1 &
pids+=($!)
for _ in $(seq 100); do [[ -S $work/gpu/session.sock ]] && break; sleep 0.1; done
cr-run --server "unix:$work/gpu" -- "$program" --steps 60 >"$work/want" || fail "the program does not run"
rm "$work/steps"

# The container's first start, and its end together with all of its processes.
CR_TEST_STEP_MS=150 setsid unshare --pid --mount-proc --fork --kill-child bash -c "$script" >"$work/first.log" 2>&1 &
first=$!
pids+=("$first")
for _ in $(seq 300); do compgen -G "$work/images/image-*[0-9]" >/dev/null && break; sleep 0.1; done
compgen -G "$work/images/image-*[0-9]" >/dev/null || fail "no image"
kill -0 "$first" || fail "the job ended before it was killed"
kill -9 "$first"
wait "$first" 2>/dev/null
bash -c "$script" >"$work/second.log" 2>&1 || fail "the job has not gone on to its end"
cmp "$work/output/train.log" "$work/want" || fail "the result is another one"
grep -q . "$work/output/train.log" || fail "there is no result"
