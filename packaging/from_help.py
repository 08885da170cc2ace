#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a program's manual page or its bash completion from what the program prints with --help and --version.

Usage: from_help.py man|completion PROGRAM > FILE    PROGRAM: path of an installed or built program

That text (proto/cli/help.h) has five parts, which this script tells apart: one line that says what the program is for, the
usage, the positional arguments, the options, and a text with examples and exit codes.
"""

import os
import re
import subprocess
import sys

DAEMONS = ("cr-server", "cr-hostd")
OPTION = re.compile(r"^  (-{1,2}[A-Za-z]\S*)(?: (.*?))?(?:\s{2,}(\S.*))?$")
POSITIONAL = re.compile(r"^  ([A-Z]\S*)(?: (.*?))?(?:\s{2,}(\S.*))?$")


def section_of(name):
    """Of the manual: 8 has what the system's administrator starts, 1 what users call."""
    return 8 if name in DAEMONS else 1


class Item:
    """An option or a positional argument: its names, a word for its value (none: a flag), and its description."""

    def __init__(self, names, value, text):
        self.names, self.value, self.text = names.split(","), value or "", text or ""

    def choices(self):
        """The values that it can have, if there are only some: a word such as `debug|info`."""
        return self.value.split("|") if "|" in self.value else []


class Help:
    def __init__(self, program):
        self.name = os.path.basename(program)
        self.version = output(program, "--version")
        lines = output(program, "--help").split("\n")
        self.summary = lines.pop(0).strip()
        self.usage = self.name
        self.positionals, self.options, self.rest = [], [], []
        part = None
        for line in lines:
            if line.startswith("Usage: "):
                self.usage = self.name + " " + line.split(" ", 2)[2]
            elif line in ("Positionals:", "Options:"):
                part = line
            elif part and not self.rest and line.startswith("  "):
                items, form = (self.options, OPTION) if part == "Options:" else (self.positionals, POSITIONAL)
                match = form.match(line)
                if match:
                    items.append(Item(*match.groups()))
                elif items:
                    items[-1].text = (items[-1].text + " " + line.strip()).strip()
            elif line or self.rest:
                self.rest.append(line)
        if not self.options:
            sys.exit(f"{self.name} --help has no options that this script can read")


def output(program, option):
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
    done = subprocess.run([program, option], capture_output=True, text=True, env=environment, check=True, timeout=60)
    return done.stdout.strip("\n")


def roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return "\\&" + text if text.startswith((".", "\\(aq")) else text


def manual(helped):
    version = helped.version.split()[1]
    description, examples, exits = [helped.summary], [], []
    paragraph = []
    for line in helped.rest + [""]:
        if line.startswith("  "):
            examples.append(line)
        elif line.startswith("Exit code"):
            description.append(" ".join(paragraph))
            paragraph, exits = [], [line.split(":", 1)[1].strip()]
        elif exits and line:
            exits.append(line)
        elif line and line != "Examples:":
            paragraph.append(line)
        else:
            description.append(" ".join(paragraph))
            paragraph = []
    others = ("cr-run", "cr-server", "cr-hostd", "cr-ps", "cr-checkpoint", "cr-restart", "cr-migrate", "cr-drain", "cr-inspect", "cr-trace",
              "cr-mpirun", "cr-sbatch", "cr-slurm-run")
    short = helped.summary.rstrip(".")
    out = [f'.TH {helped.name.upper()} {section_of(helped.name)} "" "cuda-remote {version}" "cuda-remote"',
           ".SH NAME", f"{roff(helped.name)} \\- {roff(short[0].lower() + short[1:])}",
           ".SH SYNOPSIS", roff(helped.usage),
           ".SH DESCRIPTION"]
    for text in filter(None, description):
        out += [".PP", roff(text)]
    del out[out.index(".PP")]
    for title, items in (("ARGUMENTS", helped.positionals), ("OPTIONS", helped.options)):
        if items:
            out.append(f".SH {title}")
        for item in items:
            out += [".TP", ", ".join(f"\\fB{roff(one)}\\fR" for one in item.names) + (f" \\fI{roff(item.value)}\\fR" if item.value else ""),
                    roff(item.text)]
    out += [".SH EXAMPLES", ".nf"] + [roff(line) for line in examples] + [".fi"]
    if exits:
        out += [".SH EXIT STATUS", roff(" ".join(exits))]
    out += [".SH SEE ALSO", ", ".join(f"\\fB{roff(name)}\\fR({section_of(name)})" for name in others if name != helped.name)]
    return "\n".join(out) + "\n"


def completion(helped):
    function = "_" + helped.name.replace("-", "_")
    options = " ".join(name for item in helped.options for name in item.names)
    valued = [item for item in helped.options if item.value]
    cases = []
    for item in valued:
        if item.choices():
            words = " ".join(item.choices())
            cases.append(f'    {"|".join(item.names)}) mapfile -t COMPREPLY < <(compgen -W "{words}" -- "$current"); return ;;')
    others = "|".join(name for item in valued if not item.choices() for name in item.names)
    if others:
        cases.append(f'    {others}) mapfile -t COMPREPLY < <(compgen -f -- "$current"); return ;;')
    takes_program = helped.name == "cr-run"
    takes_job = any("JOB" in item.names for item in helped.positionals)
    lines = [f"# bash completion for {helped.name}, made from its --help.", f"{function}() {{",
             '  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}']
    if takes_program:
        lines += ["  local at=1",
                  "  while ((at < COMP_CWORD)); do",
                  '    case ${COMP_WORDS[at]} in',
                  "      --) at=$((at + 1)); break ;;",
                  f"      {others}) at=$((at + 2)) ;;",
                  "      -*) at=$((at + 1)) ;;",
                  "      *) break ;;",
                  "    esac",
                  "  done",
                  '  if ((at < COMP_CWORD)) || [[ $at == "$COMP_CWORD" && $current != -* ]]; then',
                  '    if [[ $(type -t _command_offset) == function ]]; then _command_offset "$at"; return; fi',
                  '    mapfile -t COMPREPLY < <(compgen -c -f -- "$current")',
                  "    return",
                  "  fi"]
    if cases:
        lines += ['  case $previous in'] + cases + ["  esac"]
    lines += [f'  if [[ $current == -* ]]; then mapfile -t COMPREPLY < <(compgen -W "{options}" -- "$current"); return; fi']
    if takes_job:
        lines += ['  local jobs folder',
                  '  for folder in "${XDG_RUNTIME_DIR:-/run/user/$UID}" /run "/run/user/$UID"; do',
                  '    jobs+=" $(ls "$folder/cuda-remote/jobs" 2>/dev/null)"',
                  "  done",
                  '  jobs+=" $(ls "/tmp/cuda-remote-$UID/jobs" 2>/dev/null)"',
                  "  # Those that cr-hostd has started.",
                  "  folder=${CUDA_REMOTE_HOSTD:-/run/cuda-remote/hostd.sock}",
                  '  jobs+=" $(ls "${folder%/*}/users/$UID/cuda-remote/jobs" 2>/dev/null)"',
                  '  mapfile -t COMPREPLY < <(compgen -W "$jobs" -- "$current"; compgen -f -- "$current")']
    else:
        lines += ['  mapfile -t COMPREPLY < <(compgen -f -- "$current")']
    return "\n".join(lines + ["}", f"complete -o filenames -F {function} {helped.name}", ""])


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("man", "completion"):
        sys.exit(__doc__)
    helped = Help(sys.argv[2])
    sys.stdout.write(manual(helped) if sys.argv[1] == "man" else completion(helped))


if __name__ == "__main__":
    main()
