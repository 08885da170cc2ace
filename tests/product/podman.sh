# SPDX-License-Identifier: Apache-2.0
# For tests with podman, which source this first: containers of their own, and images that are built without a network.
#
#   $criu           a CRIU that works here; $work/out/criu is a copy that does in a container
#   $product $top   the programs; the top of the sources
#   $work           a folder in memory, with $work/out for the tarball
#   ${limits[@]}    options for pod run: limits that any machine allows, and no network
#   pod ...         podman with storage of the test's own
#   make_images TARGET...   localhost/base, a root file system of little more than bash, and the Dockerfile's targets upon it
#   fail TEXT       ends the test, and prints the end of what the containers in $containers have said
PATH=/usr/sbin:/usr/bin:/sbin:/bin
containers=
fail() {
  echo "$*"
  for name in $containers; do echo "== $name"; pod logs "$name" 2>&1 | tail -n 20; done
  exit 1
}
[[ $(id -u) == 0 ]] || { echo "this test needs root"; exit 1; }
command -v podman runc >/dev/null || { echo "podman or runc is missing: tools/setup installs them"; exit 1; }
if [[ ${1:-} != inside ]]; then
  criu=$(tools/setup-criu --check) || { echo "no CRIU works here"; exit 1; }
  exec unshare --mount --propagation private "$0" inside "$criu"
fi
criu=$2

product=$(realpath "$(dirname "$(find -L . -name cr-run -type f | head -n 1)")")
top=$PWD
# In this test's own mounts. What podman starts ends some time after the containers, and would find no other place there.
work=/run/cuda-remote-test
pod() { podman --root "$work/storage" --runroot "$work/state" --storage-driver overlay --runtime runc --cgroup-manager cgroupfs "$@"; }
finish() {
  cd /
  pod rm --force --all >/dev/null 2>&1
  grep -o " $work/[^ ]*" /proc/self/mountinfo | tac | xargs --no-run-if-empty umount --lazy
  rm -rf --one-file-system "${work:?}"/*
}
trap finish EXIT
for folder in "$work" /run/cdi; do
  mkdir -p "$folder" && mount -t tmpfs tmpfs "$folder" || { echo "cannot mount a tmpfs at $folder"; exit 1; }
done
mkdir -p "$work"/{out,base}
# Neither locks nor a state in common with another test's podman.
printf '[engine]\nlock_type = "file"\ntmp_dir = "%s/tmp"\n' "$work" >"$work/containers.conf"
export CONTAINERS_CONF=$work/containers.conf
limits=(--network none --ulimit nofile=4096:4096 --ulimit nproc=4096:4096)

# copy_criu FOLDER: CRIU with what it needs, as setup-criu has it in a folder; the distribution's likewise.
copy_criu() {
  local library
  if [[ -e ${criu%/*}/usr/sbin/criu ]]; then
    cp -a "${criu%/*}" "$1"
    return
  fi
  mkdir -p "$1/libs"
  cp "$criu" "$1/libs/"
  while read -r library; do cp "$library" "$1/libs/"; done < <(ldd "$criu" | grep -oE '/[^ ]+')
  # shellcheck disable=SC2016  # the script's
  printf '#!/bin/sh\nexec "${0%%/*}"/libs/ld-linux-x86-64.so.2 --library-path "${0%%/*}/libs" "${0%%/*}/libs/criu" "$@"\n' >"$1/criu"
  chmod 755 "$1/criu"
}

make_images() {
  local program library target
  "$top/tools/package" --no-debs --product "$product" "$work/out" >/dev/null || fail "tools/package failed"
  # The C library, what RUN needs, and what the tests start.
  for program in bash mkdir ln sleep setpriv; do
    program=$(command -v "$program")
    install -D "$program" "$work/base/bin/$(basename "$program")"
    while read -r library; do install -D "$library" "$work/base$library"; done < <(ldd "$program" | grep -oE '/[^ ]+')
  done
  ln -s bash "$work/base/bin/sh"
  for library in libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libresolv.so.2; do
    install -D "/lib/x86_64-linux-gnu/$library" "$work/base/lib/x86_64-linux-gnu/$library"
  done
  mkdir "$work"/base/{etc,run} && mkdir -m 1777 "$work/base/tmp"
  printf '%s\n' root:x:0:0::/root:/bin/bash nobody:x:65534:65534::/nonexistent:/bin/false anna:x:1000:1000::/jobs:/bin/bash >"$work/base/etc/passwd"
  printf '%s\n' root:x:0: nogroup:x:65534: anna:x:1000: >"$work/base/etc/group"
  tar --create --directory "$work/base" . | pod import --quiet - localhost/base >/dev/null || fail "cannot import the base image"
  # A machine without control groups of its own, as inside of another container, starts none. Who knows that says so.
  if ! pod run --rm "${limits[@]}" localhost/base /bin/bash -c : >"$work/first" 2>&1; then
    echo "podman cannot start any container on this machine: $(cat "$work/first")"
    [[ ${CUDA_REMOTE_NO_PODMAN:-} == 1 ]] && { echo "not tested, as CUDA_REMOTE_NO_PODMAN=1 says"; exit 0; }
    echo "if that is as it should be here, set CUDA_REMOTE_NO_PODMAN=1"
    exit 1
  fi
  copy_criu "$work/out/criu"
  for target in "$@"; do
    pod build --quiet --network none --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 --build-arg BASE=localhost/base --target "$target" \
      --tag "localhost/$target" --file "$top/packaging/containers/Dockerfile" "$work/out" >/dev/null || fail "cannot build the image $target"
  done
}
