#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The certificates that the lines of docs/two-hosts.md make are those that cr-hostd needs: two of them, on this machine, with
# the options of the page, know each other by the names of its hosts. Needs root.
set -u
product=$(realpath "$(dirname "$(find -L . -name cr-hostd -type f | head -n 1)")")
page=$(realpath docs/two-hosts.md)
[[ $(id -u) == 0 ]] || { echo "two_hosts_test needs root"; exit 1; }
# Names of the page's hosts, for this test alone.
if [[ ${1:-} != inside ]]; then exec unshare --mount --propagation private "$0" inside; fi
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; umount /etc/hosts; rm -rf "$work"' EXIT
fail() { echo "$*"; tail -n 20 "$work"/*.log; exit 1; }
{ cat /etc/hosts; echo 127.0.0.1 node7 node8; } >"$work/names"
mount --bind "$work/names" /etc/hosts || fail "cannot name hosts"

hosts=$work/hosts
awk '/^## /{ take = ($2 == "2.") } take && /^    /{ print substr($0, 5) }' "$page" | grep -vE '^(ssh|scp) ' |
  sed "s|/etc/cuda-remote/hosts|$hosts|g" >"$work/typed"
[[ $(wc -l <"$work/typed") -ge 9 ]] || fail "found only $(wc -l <"$work/typed") lines in the page"
(set -e; source "$work/typed") >"$work/typed.log" 2>&1 || fail "the lines of the page fail"

options=$(grep -o 'cr-hostd --listen .*node7.key$' "$page") || fail "the page has no line with cr-hostd's options"
start() {
  local line=${options//node7/$1}
  line=${line//\/etc\/cuda-remote\/hosts/$hosts}
  # shellcheck disable=SC2086  # words
  "$product"/${line/0.0.0.0:7071/127.0.0.1:$2} --socket "$work/$1/hostd.sock" --state "$work/$1-state" 2>"$work/$1.log" &
}
mapfile -t ports < <(python3 -c '
import socket
both = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
for one in both: print(one.getsockname()[1])')
start node7 "${ports[0]}"
start node8 "${ports[1]}"
for name in node7 node8; do
  until grep -q ' serving ' "$work/$name.log"; do
    [[ $(jobs -rp | wc -l) == 2 ]] || fail "cr-hostd of $name has ended"
    sleep 0.1
  done
done
for asks in node7 node8; do
  CUDA_REMOTE_HOSTD=$work/$asks/hostd.sock "$product/cr-ps" --hosts "node7:${ports[0]},node8:${ports[1]}" >"$work/asked.log" 2>&1 ||
    fail "$asks does not reach both hosts"
  [[ $(grep -cE '^node[78]:[0-9]+ +open ' "$work/asked.log") == 2 ]] || fail "both hosts are not open"
done
exit 0
