#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The preloaded library in programs: what they start has it, whatever starts it; and what dlopen finds.
# preload_test.sh LIBRARY PROBE
set -uo pipefail
folder=$(mktemp -d /tmp/preload-test-XXXXXX)
trap 'rm -rf "$folder"' EXIT
# The folder of a job. system and popen must quote it.
lib="$folder/job's/lib"
mkdir -p "$lib"
cp "$1" "$lib/libcuda-remote-preload.so"
probe=$(realpath "$2")
ours="LD_LIBRARY_PATH=$lib
LD_PRELOAD=$lib/libcuda-remote-preload.so"
failures=0

expect() {
  local what=$1 want=$2 got=$3
  if [[ $got != "$want" ]]; then
    echo "FAIL: $what: expected '$want', got '$got'"
    failures=$((failures + 1))
  fi
}
with() { LD_PRELOAD="$lib/libcuda-remote-preload.so" "$@"; }
loader_variables() { grep '^LD_' | LC_ALL=C sort; }

for function in execve execvpe execle fexecve execveat posix_spawn posix_spawnp vfork execv execvp execl execlp \
  execl-arguments system popen; do
  expect "$function with an empty environment" "$ours" "$(with "$probe" "$function" | loader_variables)"
  expect "$function with another environment" "LD_LIBRARY_PATH=$lib:/x:/y
LD_PRELOAD=$lib/libcuda-remote-preload.so
PATH=/usr/bin:/bin" \
    "$(with "$probe" "$function" PATH=/usr/bin:/bin LD_LIBRARY_PATH=/x:/y | grep -v '^PWD=\|^_=\|^SHLVL=\|^OLDPWD=\|one line\|^a b c$' | LC_ALL=C sort)"
done
expect "execve without an environment" "$ours" "$(with "$probe" null | loader_variables)"
expect "an empty environment has nothing else" "$ours" "$(with "$probe" execve | LC_ALL=C sort)"
expect "arguments" "a b c" "$(with "$probe" execl-arguments | grep -v =)"
for function in system popen; do
  expect "$function's command" "it's one line" "$(with "$probe" "$function" | head -1)"
done
expect "env -i, twice" "$ours" "$(with env -i env -i env | LC_ALL=C sort)"
expect "another job's program" "CUDA_REMOTE_JOB_DIR=/else" "$(with "$probe" execve CUDA_REMOTE_JOB_DIR=/else)"

# The caller's RUNPATH and RTLD_NOLOAD are as without the library, and names of the driver lead to ours.
cd "$folder" || exit 1
mkdir inner outer
echo 'int inner(void) { return 42; }' >inner.c
gcc -shared -fPIC -o inner/libinner.so inner.c || exit 1
cat >outer.c <<'END'
#include <dlfcn.h>
#include <stddef.h>
void* outer(void) { void* volatile found = dlopen("libinner.so", RTLD_NOW); return found; }
END
gcc -shared -fPIC -o outer/libouter.so outer.c -Wl,--enable-new-dtags,-rpath,"$folder/inner" -ldl || exit 1
cat >finds.c <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
int main(int count, char** words) {
  if (strcmp(words[1], "outer") == 0) {
    void* library = dlopen(words[2], RTLD_NOW);
    void* (*outer)(void) = library ? (void* (*)(void))dlsym(library, "outer") : NULL;
    puts(outer && outer() ? "found" : "lost");
    return 0;
  }
  void* library = strcmp(words[1], "dlmopen") == 0 ? dlmopen(LM_ID_BASE, words[2], RTLD_NOW) : dlopen(words[2], RTLD_NOW);
  struct link_map* map = NULL;
  if (library && dlinfo(library, RTLD_DI_LINKMAP, &map) == 0) puts(map->l_name);
  else puts(dlerror());
  return count == 0;
}
END
gcc -o finds finds.c -ldl || exit 1
expect "a caller's RUNPATH, without the library" found "$(./finds outer "$folder/outer/libouter.so")"
expect "a caller's RUNPATH" found "$(with ./finds outer "$folder/outer/libouter.so")"
cp inner/libinner.so "$lib/libcuda.so.1"
cp inner/libinner.so "$lib/libnvidia-ml.so.1"
for call in dlopen dlmopen; do
  for name in libcuda.so libcuda.so.1 /usr/lib/libcuda.so.1 /none/libcuda.so /none/libcuda.so.580.65.06; do
    expect "$call of $name" "$lib/libcuda.so.1" "$(with ./finds $call $name)"
  done
  for name in libnvidia-ml.so.1 /none/libnvidia-ml.so; do
    expect "$call of $name" "$lib/libnvidia-ml.so.1" "$(with ./finds $call $name)"
  done
  for name in libcuda.sox.1 /none/mylibcuda.so.1 /libcuda.so.1/other.so; do
    expect "$call of $name" 1 "$(with ./finds $call $name | grep -c "^$name: cannot open shared object file")"
  done
done

# When the job's folder is gone, what is left of the job works on, and the loader says nothing.
cat >later.sh <<'END'
rm "$1"
env -i env
END
expect "after the job" "" "$(with bash later.sh "$lib/libcuda-remote-preload.so" 2>&1 | grep -v '^PATH=')"

[[ $failures == 0 ]] && echo "all passed"
exit $((failures != 0))
