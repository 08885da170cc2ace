#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Each option that a program's --help names is in its manual page and in its completion for bash, and the page is one
# that man can read.
set -u
product=$(dirname "$(find -L . -name cr-run -type f | head -n 1)")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0
problem() { echo "$*"; status=1; }

# complete PROGRAM WORD...: what bash proposes for the last word
complete_words() {
  (
    # shellcheck disable=SC1090
    source "$work/$1.bash"
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    "_${1//-/_}"
    printf '%s\n' "${COMPREPLY[@]}"
  )
}

for name in cr-run cr-server cr-hostd cr-checkpoint cr-restart cr-migrate cr-drain cr-inspect cr-ps cr-trace cr-mpirun cr-sbatch cr-slurm-run; do
  program=$product/$name
  python3 packaging/from_help.py man "$program" >"$work/$name.1" || problem "no manual page for $name"
  python3 packaging/from_help.py completion "$program" >"$work/$name.bash" || problem "no completion for $name"
  options=$("$program" --help | sed -n '/^Options:/,/^$/p' | grep -oE '^  -\S+' | tr ',' '\n' | grep -oE -- '--?[a-z][a-z-]*')
  [[ $(wc -w <<<"$options") -ge 4 ]] || problem "found only these options of $name: $options"
  page=$(sed 's/\\-/-/g' "$work/$name.1")
  for option in $options; do
    grep -qE -- "^(.*, )?\\\\fB$option\\\\fR" <<<"$page" || problem "$name.1 lacks $option"
    complete_words "$name" "$option" | grep -qx -- "$option" || problem "the completion of $name lacks $option"
  done
  chapter=1
  case $name in cr-server | cr-hostd) chapter=8 ;; esac
  grep -q "^\.TH ${name^^} $chapter " "$work/$name.1" || problem "the manual page of $name is not in section $chapter"
  for section in NAME SYNOPSIS DESCRIPTION OPTIONS EXAMPLES "EXIT STATUS"; do
    grep -qx ".SH $section" "$work/$name.1" || problem "$name.1 has no section $section"
  done
  # Text that begins with a dot would be taken for a command and left out.
  grep -vE '^\.(TH|SH|PP|TP|nf|fi)\b' "$work/$name.1" | grep '^\.' && problem "$name.1 has a line that roff would not print"
done

[[ $(complete_words cr-server --log-level w) == warn ]] || problem "cr-server --log-level w is not completed"
mkdir -p "$work/runtime/cuda-remote/jobs/train"
[[ $(XDG_RUNTIME_DIR=$work/runtime complete_words cr-checkpoint tra) == train ]] || problem "names of jobs are not completed"
# cr-hostd's are beside its socket.
mkdir -p "$work/hostd/users/$UID/cuda-remote/jobs/heat"
[[ $(CUDA_REMOTE_HOSTD=$work/hostd/hostd.sock complete_words cr-migrate hea) == heat ]] ||
  problem "names of cr-hostd's jobs are not completed"
grep -q 'fBcr\\-server\\fR(8)' "$work/cr-run.1" || problem "cr-run.1 does not refer to cr-server(8)"
complete_words cr-run --server unix:x bas | grep -qx bash || problem "cr-run does not complete names of programs"
grep -q 'Serves this machine' "$work/cr-server.1" || problem "cr-server.1 does not say what cr-server does"

# Each option of cr-server can stand in its configuration file: reading stops at the first unknown name, the last one.
"$product/cr-server" --help | sed -n '/^Options:/,/^$/p' | grep -oE '^  -\S+( [A-Z]+)?' |
  while read -r names kind; do
    name=${names##*--}
    case $name:$kind in
      help:* | version:* | config:*) ;;
      log-level:*) echo "$name = \"warn\"" ;;
      *:N | *:SIZE | *:SECONDS | *:DAYS | *:FD) echo "$name = 40" ;; # in the range of each
      *:?*) echo "$name = \"x\"" ;;
      *) echo "$name = true" ;;
    esac
  done >"$work/all.conf"
[[ $(wc -l <"$work/all.conf") -ge 20 ]] || problem "found only $(wc -l <"$work/all.conf") options for the configuration file"
echo 'no-such-option = 1' >>"$work/all.conf"
said=$("$product/cr-server" --config "$work/all.conf" 2>&1) && problem "cr-server starts with an unknown option in its file"
grep -q 'no-such-option' <<<"$said" || problem "cr-server does not take all of its options from a file: $said"
exit $status
