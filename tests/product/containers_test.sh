#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Containers: the images of packaging/containers, made from the tarball on a small base image, without a network.
# A server and a job in containers of their own; a checkpoint of the job from outside; a restart in a new container; a
# program in an image that has nothing of cuda-remote, by the CDI specification.
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin
fail() {
  echo "$*"
  for name in server job restarted; do echo "== $name"; pod logs "$name" 2>&1 | tail -n 20; done
  exit 1
}
[[ $(id -u) == 0 ]] || { echo "containers_test needs root"; exit 1; }
command -v podman runc >/dev/null || { echo "podman or runc is missing: tools/setup installs them"; exit 1; }
if [[ ${1:-} != inside ]]; then
  criu=$(tools/setup-criu --check) || { echo "no CRIU works here"; exit 1; }
  exec unshare --mount --propagation private "$0" inside "$criu"
fi
criu=$2

product=$(realpath "$(dirname "$(find -L . -name cr-run -type f | head -n 1)")")
top=$PWD
work=$(mktemp -d)
pod() { podman --root "$work/storage" --runroot "$work/state" --storage-driver overlay --runtime runc --cgroup-manager cgroupfs "$@"; }
finish() {
  cd /
  pod rm --force --all >/dev/null 2>&1
  umount -l /run/cdi
  umount -R -l "$work"
  rmdir "$work"
}
trap finish EXIT
mount -t tmpfs tmpfs "$work" && mkdir -p /run/cdi && mount -t tmpfs tmpfs /run/cdi || { echo "cannot mount a tmpfs"; exit 1; }
mkdir -p "$work"/{out,base,gpu,images,host}

"$top/tools/package" --no-debs --product "$product" "$work/out" >/dev/null || fail "tools/package failed"

# The C library and what RUN needs.
for program in bash mkdir ln; do
  install -D "/bin/$program" "$work/base/bin/$program"
  while read -r library; do install -D "$library" "$work/base$library"; done < <(ldd "/bin/$program" | grep -oE '/[^ ]+')
done
ln -s bash "$work/base/bin/sh"
for library in libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libresolv.so.2; do
  install -D "/lib/x86_64-linux-gnu/$library" "$work/base/lib/x86_64-linux-gnu/$library"
done
mkdir "$work"/base/{etc,tmp,run}
echo root:x:0:0::/root:/bin/bash >"$work/base/etc/passwd"
tar --create --directory "$work/base" . | pod import --quiet - localhost/base >/dev/null || fail "cannot import the base image"
# Limits that any machine allows; the rest as docs/containers.md says.
limits=(--network none --ulimit nofile=4096:4096 --ulimit nproc=4096:4096)
# A machine without control groups of its own, as inside of another container, starts none. Who knows that says so.
if ! pod run --rm "${limits[@]}" localhost/base /bin/bash -c : >"$work/first" 2>&1; then
  echo "podman cannot start any container on this machine: $(cat "$work/first")"
  [[ ${CUDA_REMOTE_NO_PODMAN:-} == 1 ]] && { echo "not tested, as CUDA_REMOTE_NO_PODMAN=1 says"; exit 0; }
  echo "if that is as it should be here, set CUDA_REMOTE_NO_PODMAN=1"
  exit 1
fi
for target in server client; do
  pod build --quiet --network none --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 --build-arg BASE=localhost/base --target "$target" --tag "localhost/$target" \
    --file "$top/packaging/containers/Dockerfile" "$work/out" >/dev/null || fail "cannot build the image $target"
done

demo=$(pod run --rm "${limits[@]}" --entrypoint bash localhost/client -c 'echo /opt/cuda-remote-*/lib/cuda-remote/demo/program')

echo "== a server and a job"
pod run --detach --name server "${limits[@]}" --security-opt seccomp=unconfined --volume "$work/gpu:/run/gpu" \
  localhost/server --dir /run/gpu >/dev/null || fail "the server does not start"
for _ in $(seq 100); do [[ -S $work/gpu/session.sock ]] && break; sleep 0.1; done
pod run --rm "${limits[@]}" --volume "$work/gpu:/run/gpu" localhost/client --server unix:/run/gpu -- "$demo" --steps 60 \
  >"$work/expected" || fail "a job in a container fails"
[[ $(cat "$work/expected") == "driver_ptx "*" steps=60 "* ]] || fail "a job in a container prints: $(cat "$work/expected")"

echo "== a checkpoint from outside, a restart in a new container"
job=("${limits[@]}" --privileged --volume "$work/gpu:/run/gpu" --volume "$work/images:/images"
  --volume "$(dirname "$criu"):/opt/criu:ro" --env "CUDA_REMOTE_CRIU=/opt/criu/$(basename "$criu")")
pod run --detach --name job "${job[@]}" --env CR_TEST_STEP_MS=150 localhost/client --name train --server unix:/run/gpu -- \
  "$demo" --steps 60 >/dev/null || fail "the job does not start"
for _ in $(seq 100); do pod logs server 2>&1 | grep -q 'job train' && break; sleep 0.1; done
sleep 1
pod exec job cr-checkpoint train /images/train || fail "the checkpoint fails"
pod kill job >/dev/null || fail "the job had ended before the checkpoint"
pod run --name restarted "${job[@]}" --entrypoint cr-restart localhost/client /images/train --server unix:/run/gpu \
  >"$work/restarted" || fail "the restart fails"
cmp "$work/expected" "$work/restarted" || fail "the result differs"

echo "== an image without cuda-remote, by CDI"
tar xzf "$work"/out/*.tar.gz --directory "$work/host"
folder=$(echo "$work"/host/cuda-remote-*/lib/cuda-remote)
"$top/packaging/containers/make-cdi" --folder "$folder" --server "unix:$work/gpu" >/run/cdi/cuda-remote.json || fail "make-cdi fails"
cp "$folder/demo/program" "$work/images/"
cp "$folder"/libs/lib{stdc++,gcc_s}.so.* "$work/images/"
pod run --rm "${limits[@]}" --device cuda-remote/gpu=all --volume "$work/images:/app" localhost/base \
  /bin/bash -c 'LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/app /app/program --steps 60' >"$work/cdi" || fail "the program fails with the CDI device"
cmp "$work/expected" "$work/cdi" || fail "the result differs"
pod stop --time 10 server >/dev/null
[[ $(pod inspect --format '{{.State.ExitCode}}' server) == 0 ]] || fail "the server does not end cleanly on SIGTERM"
echo ok
