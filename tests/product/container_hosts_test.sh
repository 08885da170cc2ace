#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Containers as hosts, started as the pods of packaging/kubernetes/cr-hostd.yaml are: each has a cr-hostd and a network of its
# own. An ordinary user's job is saved and restarted in one, and moves to the other. Then job-hostd.yaml's script, in a container
# that is killed and started again. And what users are told in containers whose requests cr-hostd refuses.
set -u
# shellcheck source=tests/product/podman.sh
. tests/product/podman.sh
containers="gpu-a gpu-b a b train"
make_images server host

shown() { /usr/bin/python3 tests/product/kubernetes_check.py packaging "$product" --show "$@" || fail "kubernetes_check.py failed"; }
# wait_until WHAT COMMAND...
wait_until() {
  local what=$1
  shift
  for _ in $(seq 600); do "$@" && return; sleep 0.1; done
  fail "$what: $(cat "$work"/*.said 2>/dev/null)"
}
demo=$(pod run --rm "${limits[@]}" --entrypoint bash localhost/host -c 'echo /opt/cuda-remote-*/lib/cuda-remote/demo/program')
jobs=$work/jobs
mkdir -p "$jobs/train" "$work"/{gpu-a,gpu-b,state-a,state-b,hosts/..v1}
chown 1000:1000 "$jobs/train"

# The Secret, with links as Kubernetes makes them.
(
  cd "$work/hosts/..v1" || exit 1
  head -c 32 /dev/urandom >hostd.key
  curve=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
  openssl req -x509 "${curve[@]}" -days 2 -keyout ../../ca.key -out ca.crt -subj /CN=hosts &&
    openssl req "${curve[@]}" -keyout tls.key -out ../../tls.csr -subj /CN=node &&
    openssl x509 -req -in ../../tls.csr -CA ca.crt -CAkey ../../ca.key -CAcreateserial -CAserial ../../ca.srl -out tls.crt -days 2 \
      -extfile <(echo subjectAltName=IP:10.99.0.1,IP:10.99.0.2) && chmod 400 ./*
) >"$work/openssl" 2>&1 || fail "openssl: $(cat "$work/openssl")"
ln -s ..v1 "$work/hosts/..data"
for name in hostd.key tls.crt tls.key ca.crt; do ln -s "..data/$name" "$work/hosts/$name"; done

mapfile -t server_args < <(shown cr-server.yaml args)
mapfile -t hostd_args < <(shown cr-hostd.yaml args)
[[ ${#server_args[@]} -gt 0 && ${#hostd_args[@]} -gt 0 ]] || fail "the manifests have no options"
rights() { echo "--cap-add=$(shown "$1" capabilities) --security-opt=seccomp=unconfined"; }
# What both manifests mount.
mounts() { echo "--volume=$work/gpu-$1:/run/gpu --volume=$work/hosts:/etc/cuda-remote/hosts:ro --volume=$jobs:/jobs"; }
hostd_rights=$(rights cr-hostd.yaml) job_rights=$(rights job-hostd.yaml)
for one in a b; do
  pod run --detach --name "gpu-$one" "${limits[@]}" --security-opt seccomp=unconfined --volume "$work/gpu-$one:/run/cuda-remote" \
    localhost/server "${server_args[@]}" >/dev/null || fail "the server does not start"
  # shellcheck disable=SC2046,SC2086  # words
  pod run --detach --name "$one" --hostname "$one" "${limits[@]}" $hostd_rights $(mounts "$one") --volume "$work/state-$one:/var/lib/cuda-remote" \
    --env CUDA_REMOTE_SERVER=unix:/run/gpu localhost/host "${hostd_args[@]}" >/dev/null || fail "cr-hostd does not start"
done
network() { nsenter --target "$(pod inspect --format '{{.State.Pid}}' "$1")" --net ip "${@:2}"; }
ip link add cr-a netns "$(pod inspect --format '{{.State.Pid}}' a)" type veth peer name cr-b netns "$(pod inspect --format '{{.State.Pid}}' b)" &&
  network a address add 10.99.0.1/24 dev cr-a && network b address add 10.99.0.2/24 dev cr-b &&
  network a link set cr-a up && network b link set cr-b up || fail "no network between the containers"
for one in a b; do
  wait_until "no GPU server $one" test -S "$work/gpu-$one/session.sock"
  serves() { pod logs "$one" 2>&1 | grep -q "serving"; }
  wait_until "cr-hostd does not serve" serves
  mapfile -t probe < <(shown cr-hostd.yaml probe)
  pod exec "$one" "${probe[@]}" >"$work/probe.said" 2>&1 || fail "the readiness probe fails: $(cat "$work/probe.said")"
done

echo "== a user's job is saved, restarted and moved"
# user HOST COMMAND...: in her folder. The streams are podman's: a /dev/null of another /dev, and pipes.
user() { pod exec --user anna --workdir /jobs/train --env CR_TEST_SYNC_FILE=/jobs/train/sync --env CR_TEST_PAUSE_AT=3,9 "$@"; }
stands() { grep -qx "paused $1" "$jobs/train/sync" 2>/dev/null; }
go() { touch "$jobs/train/sync.go.$1"; }
pod exec --user anna a cr-run --plain -- "$demo" --steps 20 >"$work/want" || fail "the program does not run"
[[ $(cat "$work/want") == "driver_ptx "*" steps=20 "* ]] || fail "the program prints: $(cat "$work/want")"
user a cr-run --name hers --output log -- "$demo" --steps 20 >"$work/run.said" 2>&1 &
run=$!
wait_until "the job does not begin" stands 3
[[ $(user a cr-ps --json) == *'"running": true'* ]] || fail "cr-ps does not show the running job: $(user a cr-ps --json)"
user a cr-checkpoint hers image >"$work/save.said" 2>&1 || fail "not saved while it runs: $(cat "$work/save.said")"
user a cr-checkpoint --stop hers image >"$work/save.said" 2>&1 || fail "not saved: $(cat "$work/save.said")"
wait "$run"
[[ $? == 121 ]] || fail "cr-run ended otherwise: $(cat "$work/run.said")"
[[ $(stat -c '%u %a' "$jobs/train/image") == "1000 700" ]] || fail "the image is not the user's: $(ls -ld "$jobs/train/image")"
user a cr-restart image >"$work/restart.said" 2>&1 &
restart=$!
is_on() { [[ $(user "$1" cr-ps --json 2>&1) == *'"name": "hers"'* ]]; }
wait_until "the job is not restarted" is_on a
go 3
wait_until "the restarted job does not go on" stands 9
user a cr-migrate hers --whole --to-host 10.99.0.2 --to unix:/run/gpu --output log-2 --error log-2 >"$work/move.said" 2>&1 || fail "not moved: $(cat "$work/move.said")"
wait "$restart"
[[ $? == 121 ]] || fail "cr-restart ended otherwise: $(cat "$work/restart.said")"
is_on b || fail "the job is not on b: $(user b cr-ps)"
is_on a && fail "the job is still on a"
# shellcheck disable=SC2016  # the inner shell's
facts=$(pod exec b bash -c 'for one in /proc/[0-9]*; do read -r name <"$one/comm" && [[ $name == program ]] && while read -r line; do
  [[ $line == Uid:* || $line == CapPrm:* ]] && echo $line; done <"$one/status"; done 2>/dev/null')
[[ $facts == $'Uid: 1000 1000 1000 1000\nCapPrm: 0000000000000000' ]] || fail "the moved job has other rights than the user: $facts"
pod logs gpu-b 2>&1 | grep -q "session 1 of uid:1000 started" || fail "the moved job is not with b's GPU server: $(pod logs gpu-b 2>&1)"
go 9
has_ended() { ! is_on b; }
wait_until "the moved job does not end" has_ended
cat "$jobs"/train/log{,-2} | cmp - "$work/want" || fail "the result differs"

echo "== job-hostd.yaml, killed and started again"
rm -rf "$jobs/train"/*
script=$(shown job-hostd.yaml script)
[[ $script == *"-- ./train "* && $script == *"--every 10m"* ]] || fail "job-hostd.yaml has another script"
script=${script/-- .\/train/-- $demo --steps 20}
script=${script//--every 10m/--every 0.5s}
pod_of_job() {
  # shellcheck disable=SC2046,SC2086  # words
  pod run "$@" "${limits[@]}" $job_rights $(mounts a) --env CUDA_REMOTE_SERVER=unix:/run/gpu \
    --env CR_TEST_SYNC_FILE=/jobs/train/sync --env CR_TEST_PAUSE_AT=3 --entrypoint /bin/bash localhost/host -c "$script"
}
pod_of_job --detach --name train >/dev/null || fail "the job does not start"
wait_until "the job does not begin" stands 3
has_image() { compgen -G "$jobs/train/images/image-*[0-9]" >/dev/null; }
wait_until "no image" has_image
pod kill train >/dev/null || fail "the job had ended before"
pod rm --force train >/dev/null
go 3
pod_of_job --name train >"$work/second.said" 2>&1 || fail "the job has not gone on to its end: $(cat "$work/second.said")"
cmp "$jobs/train/log" "$work/want" || fail "the result differs"

echo "== refusals"
# tells WORDS OPTIONS...: what a user is told in such a container.
tells() {
  local words=$1
  shift
  pod run --rm --user 1000 "${limits[@]}" "$@" >"$work/refused.said" 2>&1
  grep -q -- "$words" "$work/refused.said" || fail "another message than \"$words\": $(cat "$work/refused.said")"
}
mkdir -p "$work/run"
pod rm --force train >/dev/null
# Without a filter's exception.
pod run --detach --name train "${limits[@]}" --cap-add SYS_ADMIN,SYS_PTRACE --volume "$work/run:/run/cuda-remote" localhost/host >/dev/null ||
  fail "cr-hostd does not start"
wait_until "cr-hostd does not start" test -S "$work/run/hostd.sock"
tells "start a cr-hostd in the same container; the job runs without it, and cannot be checkpointed" \
  --volume "$work/run:/run/cuda-remote" --entrypoint cr-run localhost/host -- "$demo" --steps 2
tells "start a cr-hostd in the same container" --volume "$work/run:/run/cuda-remote" --entrypoint cr-restart localhost/host /jobs
pod exec --user anna train cr-run -- "$demo" --steps 2 >"$work/refused.said" 2>&1
grep -q -- "--security-opt seccomp=unconfined" "$work/refused.said" || fail "another message: $(cat "$work/refused.said")"
tells "cr-hostd needs the capability CAP_SYS_PTRACE.*--cap-add SYS_PTRACE" --user 0 --security-opt seccomp=unconfined --cap-add SYS_ADMIN localhost/host
echo ok
