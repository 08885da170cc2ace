#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# How tools/test counts: tests that passed and that failed; those that did not run are in neither number, and are named.
# A stand-in for bazel reports the events of the real one, in its form.
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "$*"; cat "$work/log"; exit 1; }
mkdir "$work/tools" "$work/bin"
cp -L tools/test "$work/tools/"
printf '#!/bin/sh\n' >"$work/tools/setup"
# The stand-in for id keeps tools/test from becoming root.
printf '#!/bin/sh\necho 0\n' >"$work/bin/id"
cat >"$work/bin/bazel" <<'END'
#!/bin/sh
for option; do
  case $option in --build_event_json_file=*) cp "$EVENTS" "${option#*=}" ;; esac
done
echo "//a:cached_test  (1/3 cached) PASSED in 6.1s"
echo "//a:bad_test     FAILED in 2 out of 2 in 0.1s"
exit "$CODE"
END
chmod 755 "$work"/bin/* "$work/tools/setup"

# configured NAME, built NAME, aborted NAME REASON, result NAME STATUS: events
configured() { echo '{"id":{"targetConfigured":{"label":"'"$1"'"}},"configured":{"targetKind":"sh_test rule","testSize":"SMALL"}}'; }
built() { echo '{"id":{"targetCompleted":{"label":"'"$1"'"}},"completed":{"success":true}}'; }
aborted() { echo '{"id":{"'"$1"'":{"label":"'"$2"'"}},"aborted":{"reason":"'"$3"'"}}'; }
result() { echo '{"id":{"testSummary":{"label":"'"$1"'"}},"testSummary":{"totalRunCount":1,"overallStatus":"'"$2"'"}}'; }
# counts CODE LAST: what tools/test ends with for the events in $work/events
counts() {
  local code
  EVENTS=$work/events CODE=$1 PATH=$work/bin:$PATH "$work/tools/test" //a/... >"$work/log" 2>&1
  code=$?
  [[ $(tail -n 1 "$work/log") == "$2" ]] || fail "the last line is not '$2'"
  return "$code"
}
not_run() { [[ $(grep '^not run: //' "$work/log" | sort) == "$1" ]] || fail "what did not run is not: $1"; }

{
  for name in cached flaky; do configured "//a:${name}_test"; built "//a:${name}_test"; done
  echo '{"id":{"targetConfigured":{"label":"//a:library"}},"configured":{"targetKind":"cc_library rule"}}'
  configured //a:left_out_test
  result //a:cached_test PASSED
  result //a:flaky_test FLAKY
} >"$work/events"
counts 0 "2 passed, 0 failed" || fail "exit code $?"
not_run ""
grep -q 'failed once.*//a:flaky_test' "$work/log" || fail "the flaky test is not named"
grep -q '^//a:cached_test' "$work/log" && fail "tests that passed are shown"
grep -q '^//a:bad_test' "$work/log" || fail "tests that failed are not shown"

{
  for name in bad cached interrupted partly slow unbuilt unknown; do configured "//a:${name}_test"; done
  for name in bad cached interrupted partly slow; do built "//a:${name}_test"; done
  result //a:bad_test FAILED
  result //a:slow_test TIMEOUT
  result //a:cached_test PASSED
  result //a:partly_test INCOMPLETE
  result //a:unbuilt_test FAILED_TO_BUILD
  aborted targetCompleted //a:unknown_test ANALYSIS_FAILURE
  aborted testSummary //a:interrupted_test USER_INTERRUPTED
  printf '{"id":{"testSummary":{"la'
} >"$work/events"
counts 8 "1 passed, 2 failed" && fail "what did not run is no failure"
not_run "not run: //a:interrupted_test (interrupted)
not run: //a:partly_test (interrupted)
not run: //a:unbuilt_test (it could not be built)
not run: //a:unknown_test (it could not be built)"

configured //a:one_test >"$work/events"
counts 1 "0 passed, 0 failed" && fail "no test is no failure"
not_run "not run: //a:one_test (it could not be built)"
: >"$work/events"
counts 0 "0 passed, 0 failed" && fail "no test is no failure"
grep -q 'no test ran' "$work/log" || fail "it does not say that no test ran"
exit 0
