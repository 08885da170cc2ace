#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# How tools/setup-cuda finds a CUDA toolkit, or installs one from a package repository, and that tools/demo, tools/install and
# tools/test do so first, and set up what they need and no more. Each case has a copy of this machine's root (an overlay in memory) without the machine's own toolkit. The
# toolkits and the packages are stand-ins: an nvcc that prints a version, and empty headers and libraries. So is bazel.
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin
fail() { echo "$*"; [[ -s ${work:-}/log ]] && cat "$work/log"; exit 1; }
[[ $(id -u) == 0 ]] || fail "setup_cuda_test mounts file systems, which needs root"
if [[ ${1:-} != inside ]]; then exec unshare --mount --propagation private "$0" inside; fi

work=$(mktemp -d)
trap 'cd /; umount -l "$work"; rmdir "$work"' EXIT
mount -t tmpfs tmpfs "$work" || fail "cannot mount a tmpfs"
mkdir -p "$work"/{up,work,root,parts,repository,source/tools,source/proto/api}
cp -L tools/{demo,install,setup,setup-cuda,test} "$work/source/tools/"
# What tools/setup does after the toolkit.
for other in setup-criu setup-roots setup-slurm setup-torch; do
  printf '#!/bin/sh\necho %s >>/tmp/set-up\n' "$other" >"$work/source/tools/$other"
  chmod 755 "$work/source/tools/$other"
done
cat >"$work/bazel" <<'END'
#!/bin/sh
case $1 in
  --version) echo "bazel 4.2.3" ;;
  test)
    for option; do
      case $option in --build_event_json_file=*) events=${option#*=} ;; esac
    done
    echo '{"id":{"testSummary":{"label":"//stand:in_test"}},"testSummary":{"overallStatus":"PASSED"}}' >"$events"
    ;;
esac
echo "bazel $*" >>/tmp/bazel.log
END
chmod 755 "$work/bazel"
cp -L proto/api/signatures.textproto "$work/source/proto/api/"
distribution=$(. /etc/os-release && echo "$ID${VERSION_ID/./}")

# new_root: a copy of this machine's root in $root, with the sources in /source and the repository in /repository.
new_root() {
  umount -R "$work/root" 2>/dev/null
  rm -rf "$work/up" "$work/work"
  mkdir "$work/up" "$work/work"
  root=$work/root
  mount -t overlay -o "lowerdir=/,upperdir=$work/up,workdir=$work/work" overlay "$root" || fail "cannot mount an overlay"
  mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev" || fail "cannot mount /proc and /dev"
  for folder in tmp usr/local home opt; do mount -t tmpfs -o mode=755 tmpfs "$root/$folder" || fail "cannot hide $folder"; done
  chmod 1777 "$root/tmp"
  [[ $(stat -f -c %T "$root") == overlayfs ]] || fail "$root is not an overlay"
  # Nothing but the test's own repository, and no network.
  rm -rf "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/* "$root"/usr/bin/nvcc
  mkdir "$root/source" "$root/repository"
  mount --bind "$work/source" "$root/source"
  mount --bind "$work/repository" "$root/repository"
}
# setup_cuda [VARIABLE=VALUE...] -- [OPTION...]: runs it, or $tool, in the root; its output goes to $work/log.
setup_cuda() {
  local variables=()
  while [[ $1 != -- ]]; do variables+=("$1"); shift; done
  shift
  chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "${variables[@]}" \
    CUDA_REMOTE_NVIDIA_REPOSITORY="${repository:-copy:/repository}" "/source/tools/${tool:-setup-cuda}" "$@" >"$work/log" 2>&1
}
# toolkit FOLDER VERSION [LIB]: a stand-in
toolkit() {
  local lib=${3:-lib64}
  mkdir -p "$1/bin" "$1/include" "$1/$lib/stubs"
  printf '#!/bin/sh\necho "Cuda compilation tools, release %s, V%s.1"\n' "$2" "$2" >"$1/bin/nvcc"
  chmod 755 "$1/bin/nvcc"
  touch "$1/include/cuda.h" "$1/$lib/libcudart_static.a" "$1/$lib/libcudart.so" "$1/$lib/stubs/libcuda.so"
}
# package NAME FOLDER [DEPENDS]: a .debs of the folder in the repository
package() {
  mkdir -p "$2/DEBIAN"
  printf '%s\n' "Package: $1" "Version: 13.0.1-1" "Architecture: amd64" "Maintainer: test <test@test.invalid>" \
    ${3:+"Depends: $3"} "Description: stands in" >"$2/DEBIAN/control"
  dpkg-deb --build -Zgzip "$2" "$packages/$1_13.0.1-1_amd64.deb" >/dev/null || fail "cannot build the package $1"
}
as_found() { [[ $(readlink "$root/usr/local/cuda") == "$1" ]] || fail "/usr/local/cuda does not lead to $1: $(ls -l "$root/usr/local/cuda")"; }
unchanged() { [[ ! -e $root/usr/local/cuda && ! -L $root/usr/local/cuda ]] || fail "/usr/local/cuda was made"; }
has_commands() {
  grep -q "apt-get install --no-install-recommends cuda-nvcc-13-0 .*cuda-cudart-dev-13-0" "$work/log" &&
    grep -q "$distribution/$(uname -m)/cuda-keyring_1.1-1_all.deb" "$work/log" || fail "the commands are not printed"
}

packages=$work/repository/$distribution/$(uname -m)
mkdir -p "$packages"
mkdir -p "$work/parts/keyring/etc/apt/sources.list.d"
echo "deb [trusted=yes] copy:/repository/$distribution/$(uname -m) ./" >"$work/parts/keyring/etc/apt/sources.list.d/cuda.list"
package cuda-keyring "$work/parts/keyring"
mv "$packages/cuda-keyring_13.0.1-1_amd64.deb" "$packages/cuda-keyring_1.1-1_all.deb"
toolkit "$work/parts/all/usr/local/cuda-13.0" 13.0
mkdir -p "$work/parts/nvcc/usr/local/cuda-13.0" "$work/parts/crt"
mv "$work/parts/all/usr/local/cuda-13.0/bin" "$work/parts/nvcc/usr/local/cuda-13.0/"
package cuda-nvcc-13-0 "$work/parts/nvcc" cuda-crt-13-0
package cuda-cudart-dev-13-0 "$work/parts/all"
package cuda-crt-13-0 "$work/parts/crt"
(cd "$packages" && dpkg-scanpackages --multiversion . >Packages 2>/dev/null) || fail "cannot make the repository"

echo "== installed from the repository"
new_root
setup_cuda -- || fail "nothing was installed"
as_found /usr/local/cuda-13.0
grep -qE 'installing cuda-nvcc-13-0 .*cuda-cudart-dev-13-0 .*from .*to download.*on the disk' "$work/log" ||
  fail "it does not say what it installs and how much"
setup_cuda -- || fail "a second time fails"
[[ -s $work/log ]] && fail "a second time does something"

echo "== --no-cuda, --check, and a repository that cannot be reached"
new_root
setup_cuda -- --no-cuda && fail "--no-cuda succeeds without a toolkit"
has_commands
unchanged
setup_cuda -- --check && fail "--check succeeds without a toolkit"
unchanged
repository=copy:/nowhere setup_cuda -- && fail "succeeds without a repository"
has_commands
unchanged
[[ -e $root/usr/bin/nvcc || -n $(ls "$root/etc/apt/sources.list.d") ]] && fail "something was installed"

echo "== tools/demo and tools/test, with and without --no-cuda"
for tool in demo test; do
  new_root
  rm -f "$root"/usr/bin/bazel*
  cp "$work/bazel" "$root/usr/bin/bazel"
  setup_cuda -- --no-cuda && fail "tools/$tool --no-cuda succeeds without a toolkit"
  has_commands
  unchanged
  grep -q 'bazel \(build\|test\)' "$root/tmp/bazel.log" 2>/dev/null && fail "tools/$tool --no-cuda builds without a toolkit"
  # The stand-in for bazel builds nothing, so there is nothing that the demo could show then.
  setup_cuda -- || [[ $tool == demo ]] || fail "tools/$tool fails"
  as_found /usr/local/cuda-13.0
  grep -q 'installing cuda-nvcc-13-0 .*to download' "$work/log" || fail "tools/$tool does not say what it installs"
  grep -q 'bazel \(build\|test\)' "$root/tmp/bazel.log" || fail "tools/$tool does not build"
done
unset tool

echo "== what each tool sets up: tools/demo and tools/install not what only tests need"
new_root
cp "$work/bazel" "$root/usr/bin/bazel"
toolkit "$root/usr/local/cuda" 13.0
# As on a machine on which nobody has tested or packed anything.
only_for_tests='lintian|podman|mmdebstrap|mpich|clang-tidy-14|valgrind'
sed -i -E "/^Package: ($only_for_tests|debhelper)\$/,/^\$/s/^Status: .*/Status: deinstall ok config-files/" "$root/var/lib/dpkg/status"
sets_up() {
  rm -f "$root/tmp/set-up"
  tool=$1 setup_cuda "${@:3}"
  [[ $(sort "$root/tmp/set-up" 2>/dev/null | paste -sd' ') == "$2" ]] || fail "tools/$1 has set up $(cat "$root/tmp/set-up"), not $2"
}
sets_up demo setup-criu --
sets_up install setup-criu -- /opt/installed
grep -qE "installing: .*($only_for_tests)" "$work/log" && fail "tools/install installs what only tests need"
tool=setup setup_cuda -- --build --check || fail "tools/setup --build wants more than the build needs"
for kind in --test --package ''; do
  tool=setup setup_cuda -- ${kind:+$kind} --check && fail "tools/setup $kind misses nothing"
  grep -q 'missing packages: .*debhelper' "$work/log" || fail "tools/setup $kind does not miss debhelper"
  grep -q 'missing packages: .*lintian' "$work/log"
  [[ $? == $([[ $kind == --package ]] && echo 1 || echo 0) ]] || fail "tools/setup $kind and the packages of tests"
done
new_root
cp "$work/bazel" "$root/usr/bin/bazel"
toolkit "$root/usr/local/cuda" 13.0
sets_up test 'setup-criu setup-roots setup-slurm setup-torch' --

echo "== a toolkit elsewhere: CUDA_HOME, a version beside, conda, wheels; an old one"
new_root
toolkit "$root/opt/cuda-13" 13.1
toolkit "$root/opt/old" 12.9
setup_cuda CUDA_HOME=/opt/old -- --no-cuda && fail "CUDA 12.9 is taken"
unchanged
setup_cuda CUDA_HOME=/opt/cuda-13 -- --no-cuda || fail "CUDA_HOME is not taken"
as_found /opt/cuda-13
setup_cuda -- --check || fail "--check fails"

new_root
toolkit "$root/usr/local/cuda-12.9" 12.9
toolkit "$root/usr/local/cuda-13.0" 13.0
setup_cuda -- --no-cuda || fail "/usr/local/cuda-13.0 is not found"
as_found /usr/local/cuda-13.0

new_root
toolkit "$root/usr/local/cuda" 12.9
setup_cuda -- && fail "an old toolkit in /usr/local/cuda is taken"
grep -q "version 12" "$work/log" || fail "it does not say which version is there"

new_root
toolkit "$root/opt/conda" 13.0
mkdir -p "$root/opt/conda/targets/$(uname -m)-linux"
mv "$root/opt/conda/include" "$root/opt/conda/lib64" "$root/opt/conda/targets/$(uname -m)-linux/"
mv "$root/opt/conda/targets/$(uname -m)-linux/lib64" "$root/opt/conda/targets/$(uname -m)-linux/lib"
setup_cuda CONDA_PREFIX=/opt/conda -- --no-cuda || fail "conda's toolkit is not found"
for file in bin/nvcc include/cuda.h lib64/libcudart_static.a lib64/stubs/libcuda.so; do
  chroot "$root" test -e "/usr/local/cuda/$file" || fail "conda: no $file"
done

new_root
site=$(chroot "$root" python3 -c 'import sys; print(sys.path[-1])')/nvidia/cu13
toolkit "$root$site" 13.0 lib
rm -r "$root$site/lib/stubs"
mv "$root$site/lib/libcudart.so" "$root$site/lib/libcudart.so.13"
setup_cuda -- --no-cuda || fail "the wheels' toolkit is not found"
chroot "$root" test -e /usr/local/cuda/lib64/libcudart.so || fail "wheels: no libcudart.so"
nm -D "$root/usr/local/cuda/lib64/stubs/libcuda.so" | grep -q ' T cuMemAlloc_v2$' || fail "wheels: no library in the driver's place"
echo ok
