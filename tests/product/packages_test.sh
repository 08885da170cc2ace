#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds the packages and the tarball from the programs that Bazel made, installs each in a root file system that is a
# copy of this machine's, without compiler, CUDA toolkit, Bazel and sources, and runs a CUDA program there on the
# software GPU. Nothing may be left when they are removed.
#
# The copy is an overlay whose changes are in memory, so it costs no time and no network. tests/product/fresh_root does
# the same in a root of Debian's own.
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin
fail() { echo "$*"; exit 1; }
[[ $(id -u) == 0 ]] || fail "packages_test mounts file systems, which needs root"

if [[ ${1:-} != inside ]]; then
  # Mounts of its own, which end with it.
  exec unshare --mount --propagation private "$0" inside
fi

top=$PWD
product=$(realpath "$(dirname "$(find -L . -name cr-run -type f | head -n 1)")")
work=$(mktemp -d)
trap 'cd /; umount -l "$work"; rmdir "$work"' EXIT
mount -t tmpfs tmpfs "$work" || fail "cannot mount a tmpfs"
mkdir "$work"/{up,work,root,out,prefix}

echo "== packages"
"$top/tools/package" --product "$product" "$work/out" || fail "tools/package failed"
lintian --allow-root --fail-on error,warning "$work"/out/*.deb || fail "lintian complains of the packages"

echo "== installation under a prefix"
"$top/tools/install" --product "$product" "$work/prefix/cr" >/dev/null || fail "tools/install failed"
"$work/prefix/cr/bin/cr-run" --version || fail "cr-run does not run from the prefix"
grep -q "ExecStart=$work/prefix/cr/bin/cr-server --config $work/prefix/cr/etc/cuda-remote/server.conf" \
  "$work/prefix/cr/lib/systemd/system/cr-server.service" || fail "the unit does not start what was installed"
"$top/tools/install" --uninstall "$work/prefix/cr" || fail "tools/install --uninstall failed"
left=$(find "$work/prefix" ! -type d)
[[ -z $left ]] || fail "left by --uninstall: $left"
"$top/tools/install" --product "$product" "$work/prefix/cr" >/dev/null || fail "tools/install failed"
echo 'max-sessions = 3' >>"$work/prefix/cr/etc/cuda-remote/server.conf"
"$top/tools/install" --uninstall "$work/prefix/cr" || fail "tools/install --uninstall failed"
[[ $(find "$work/prefix" ! -type d) == "$work/prefix/cr/etc/cuda-remote/server.conf" ]] ||
  fail "--uninstall must keep a changed server.conf and nothing else"

# fresh_root: a new copy of this machine's root in $root.
fresh_root() {
  umount -R "$work/root" 2>/dev/null
  rm -rf "$work/up" "$work/work"
  mkdir "$work/up" "$work/work"
  root=$work/root
  mount -t overlay -o "lowerdir=/,upperdir=$work/up,workdir=$work/work" overlay "$root" || fail "cannot mount an overlay"
  mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev" || fail "cannot mount /proc and /dev"
  for folder in tmp run root usr/local home; do mount -t tmpfs -o mode=755 tmpfs "$root/$folder" || fail "cannot hide $folder"; done
  chmod 1777 "$root/tmp"
  # No new index of all manual pages for each dpkg.
  rm -f "$root/var/lib/man-db/auto-update"
  # Only in the overlay.
  [[ $(stat -f -c %T "$root") == overlayfs ]] || fail "$root is not an overlay"
  rm -f "$root"/usr/bin/{bazel,cc,c++,g++,gcc,nvcc}* "$root"/usr/bin/x86_64-linux-gnu-g{cc,++}*
}
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"; }

# runs_here LIB BIN: the demo's program gives the same result natively and under cr-run.
runs_here() {
  local lib=$1 bin=$2
  inside mkdir -p /tmp/native
  inside ln -sf "$lib/libsoftgpu.so" /tmp/native/libcuda.so.1
  inside env LD_LIBRARY_PATH="/tmp/native:$lib/libs" "$lib/demo/program" --steps 4 >"$work/native.out" ||
    fail "the demo's program fails natively"
  inside "$bin/cr-run" -- "$lib/demo/program" --steps 4 >"$work/remote.out" 2>"$work/remote.err" ||
    fail "the demo's program fails under cr-run: $(cat "$work/remote.err")"
  [[ -s $work/native.out ]] && cmp "$work/native.out" "$work/remote.out" || fail "the results differ"
}

echo "== tarball, without the libraries that it brings"
fresh_root
rm -f "$root"/usr/lib/x86_64-linux-gnu/lib{grpc,gpr,absl,protobuf,zstd,lz4,ssl,cares}*
tar xzf "$work"/out/*.tar.gz -C "$root/tmp"
unpacked=$(cd "$root" && echo tmp/cuda-remote-*)
runs_here "/$unpacked/lib/cuda-remote" "/$unpacked/bin"

echo "== .debs"
fresh_root
cp "$work"/out/*.deb "$root/tmp/"
inside sh -c 'DEBIAN_FRONTEND=noninteractive dpkg --install /tmp/*.deb' || fail "dpkg cannot install the packages"
for name in cr-run cr-server cr-hostd cr-checkpoint cr-restart cr-migrate cr-drain cr-inspect cr-ps cr-trace cr-mpirun cr-sbatch cr-slurm-run; do
  inside "$name" --version >/dev/null || fail "$name does not run"
  [[ -s $root/usr/share/man/man1/$name.1.gz && -s $root/usr/share/bash-completion/completions/$name ]] ||
    fail "$name has no manual page or no completion"
done
runs_here /usr/lib/cuda-remote /usr/bin

echo "== cr-server as the unit starts it"
unit=$root/lib/systemd/system/cr-server.service
command=$(sed -n 's/^ExecStart=//p' "$unit")
capabilities=$(sed -n 's/^CapabilityBoundingSet=//p' "$unit" | tr 'A-Z\n' 'a-z ' | sed 's/cap_/+/g; s/ \+/,/g; s/,$//')
# What tmpfiles.d says about /run/cuda-remote.
read -r kind folder mode _ < <(grep -v '^#' "$root/usr/lib/tmpfiles.d/cuda-remote.conf")
[[ "$kind $folder" == "d /run/cuda-remote" ]] || fail "tmpfiles.d does not make /run/cuda-remote"
[[ -d $root$folder ]] || mkdir -m "$mode" "$root$folder" # dpkg made it if systemd-tmpfiles is installed
printf '%s\n' 'session-user = "cuda-remote"' 'allow-user = "nobody"' >>"$root/etc/cuda-remote/server.conf"
# systemd's end of Type=notify.
python3 - "$root/run/notify" "$work/notified" <<'PYTHON' &
import socket, sys
end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
end.bind(sys.argv[1])
end.settimeout(60)
open(sys.argv[2], "wb").write(end.recv(100))
PYTHON
notify=$!
for _ in $(seq 100); do [[ -S $root/run/notify ]] && break; sleep 0.05; done
# shellcheck disable=SC2086  # words of the unit
inside env NOTIFY_SOCKET=/run/notify setpriv --bounding-set "-all,$capabilities" --no-new-privs $command \
  >"$work/server.out" 2>"$work/server.err" &
wait "$notify"
[[ $(cat "$work/notified" 2>/dev/null) == READY=1 ]] || fail "cr-server did not say that it is ready: $(cat "$work/server.err")"
server=$(pgrep -f -x "$command") || fail "cr-server has ended: $(cat "$work/server.err")"
as_nobody=(setpriv --reuid nobody --regid nogroup --clear-groups)
inside "${as_nobody[@]}" cr-run --server unix:/run/cuda-remote -- /usr/lib/cuda-remote/demo/program --steps 4 \
  >"$work/remote.out" || fail "another user's job fails: $(cat "$work/server.err")"
cmp "$work/native.out" "$work/remote.out" || fail "the results differ"
kill "$server"
for _ in $(seq 100); do kill -0 "$server" 2>/dev/null || break; sleep 0.1; done
kill -0 "$server" 2>/dev/null && fail "cr-server does not end"
echo 'max-sesions = 3' >>"$root/etc/cuda-remote/server.conf"
# shellcheck disable=SC2086
inside timeout 10 $command 2>"$work/wrong.err"
[[ $? == 2 ]] && grep -q max-sesions "$work/wrong.err" || fail "a misspelled option in server.conf is not refused"

echo "== removal"
inside dpkg --purge cuda-remote-tools cuda-remote-client cuda-remote-server || fail "dpkg cannot remove the packages"
left=$(cd "$root" && find etc lib/systemd usr/bin usr/lib usr/share -xdev \( -name '*cuda-remote*' -o -name 'cr-[a-z]*' \) -newer "$work/native.out")
[[ -z $left ]] || fail "left by the packages: $left"
inside getent passwd cuda-remote && fail "the packages left their user"
echo "ok"
