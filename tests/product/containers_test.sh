#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Containers: the images of packaging/containers, made from the tarball on a small base image, without a network.
# A server and a job in containers of their own; a checkpoint of the job from outside; a restart in a new container; a
# program in an image that has nothing of cuda-remote, by the CDI specification.
set -u
# shellcheck source=tests/product/podman.sh
. tests/product/podman.sh
containers="server job restarted"
make_images server client
mkdir "$work"/{gpu,images,host}

demo=$(pod run --rm "${limits[@]}" --entrypoint bash localhost/client -c 'echo /opt/cuda-remote-*/lib/cuda-remote/demo/program')

echo "== a server and a job"
pod run --detach --name server "${limits[@]}" --security-opt seccomp=unconfined --volume "$work/gpu:/run/gpu" \
  localhost/server --dir /run/gpu >/dev/null || fail "the server does not start"
for _ in $(seq 100); do [[ -S $work/gpu/session.sock ]] && break; sleep 0.1; done
pod run --rm "${limits[@]}" --volume "$work/gpu:/run/gpu" localhost/client --server unix:/run/gpu -- "$demo" --steps 60 \
  >"$work/expected" || fail "a job in a container fails"
[[ $(cat "$work/expected") == "driver_ptx "*" steps=60 "* ]] || fail "a job in a container prints: $(cat "$work/expected")"

echo "== a checkpoint from outside, a restart in a new container"
job=("${limits[@]}" --cap-add SYS_ADMIN,SYS_PTRACE,NET_ADMIN,SYS_TIME --security-opt seccomp=unconfined --volume "$work/gpu:/run/gpu" --volume "$work/images:/images"
  --volume "$work/out/criu:/opt/cuda-remote/criu:ro")
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
