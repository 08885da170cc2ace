#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds the packages and the tarball from the programs that Bazel made, installs the programs under a prefix and removes
# them, and installs each of the packages in a fresh system that has neither compiler, CUDA toolkit, Bazel nor sources
# (fresh_root): there the demo and, with systemd, the units run. Nothing may be left when the packages are removed.
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin
fail() { echo "$*"; exit 1; }
[[ $(id -u) == 0 ]] || fail "packages_test starts systems of its own, which needs root"

top=$PWD
product=$(realpath "$(dirname "$(find -L . -name cr-run -type f | head -n 1)")")
roots=$("$top/tools/setup-roots" --check) || fail "tools/setup makes the root file systems"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work"/{out,prefix}
own=$(. /etc/os-release && echo "$ID$VERSION_ID")

echo "== packages"
"$top/tools/package" --product "$product" "$work/out" || fail "tools/package failed"
lintian --allow-root --fail-on error,warning "$work"/out/*/*.deb || fail "lintian complains of the packages"

# is_in_ubuntu PACKAGES: each dependency is one that Ubuntu 24.04 satisfies. The table is of its archive, 2026-11: names
# and the least versions.
is_in_ubuntu() {
  local -A has=([libc6]=2.39 [libgcc-s1]=14 [libstdc++6]=14 [liblz4-1]=1.9.4 [libzstd1]=1.5.5 [zlib1g]=1:1.3
    [libssl3t64]=3.0.13 [adduser]=3.137)
  local deb name version count=0
  for deb; do
    # The first of alternatives; "NAME (RELATION VERSION)" or "NAME".
    while read -r name _ version; do
      [[ $name != cuda-remote-* ]] || continue
      [[ ${has[$name]:-} ]] || fail "$deb needs $name, which Ubuntu 24.04 does not have by this name"
      dpkg --compare-versions "${has[$name]}" ge "${version:-0}" || fail "$deb needs $name $version; Ubuntu 24.04 has ${has[$name]}"
      count=$((count + 1))
    done < <(dpkg-deb --field "$deb" Pre-Depends Depends | sed 's/^[A-Za-z-]*: //' | tr ',' '\n' | sed 's/|.*//; s/[()]//g')
  done
  [[ $count -ge 10 ]] || fail "found only $count dependencies in $*"
}
if [[ $own == debian12 ]]; then is_in_ubuntu "$work"/out/ubuntu24.04/*.deb; fi

echo "== installation under a prefix"
"$top/tools/install" --product "$product" "$work/prefix/cr" >/dev/null || fail "tools/install failed"
"$work/prefix/cr/bin/cr-run" --version || fail "cr-run does not run from the prefix"
grep -q "ExecStart=$work/prefix/cr/bin/cr-server --config $work/prefix/cr/etc/cuda-remote/server.conf" \
  "$work/prefix/cr/lib/systemd/system/cr-server.service" || fail "the unit does not start what was installed"
cp -a "$work/prefix/cr" "$work/kept"
"$top/tools/install" --uninstall "$work/prefix/cr" || fail "tools/install --uninstall failed"
left=$(find "$work/prefix" ! -type d)
[[ -z $left ]] || fail "left by --uninstall: $left"
rm -rf "$work/prefix/cr"
mv "$work/kept" "$work/prefix/cr"
echo 'max-sessions = 3' >>"$work/prefix/cr/etc/cuda-remote/server.conf"
"$top/tools/install" --uninstall "$work/prefix/cr" || fail "tools/install --uninstall failed"
[[ $(find "$work/prefix" ! -type d) == "$work/prefix/cr/etc/cuda-remote/server.conf" ]] ||
  fail "--uninstall must keep a changed server.conf and nothing else"

# Each system waits for its jobs most of the time, so all run at once. Packages for another release run in Debian 13.
jobs=()
# try NAME PACKAGES ROOT
try() {
  "$top/tests/product/fresh_root" "$2" "$3" >"$work/$1.log" 2>&1 &
  jobs+=("$1" $!)
}
for packages in "$work"/out/*/; do
  release=$(basename "$packages")
  if [[ $release == "$own" ]]; then
    try "$release" "$packages" "$roots/$(. /etc/os-release && echo "$VERSION_CODENAME").tar"
  else
    try "$release" "$packages" "$roots/trixie.tar"
  fi
done
others=("$roots"/*.tar)
try tarball "$work"/out/*.tar.gz "${others[-1]}"
status=0
set -- "${jobs[@]}"
while [[ $# -gt 0 ]]; do
  wait "$2" || status=1
  echo "== $1 in a fresh system"
  cat "$work/$1.log"
  shift 2
done
exit $status
