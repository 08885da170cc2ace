#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the options in the pages for users and operators with those that the programs have (--help): each option of a
command in a page must exist, and each option of a program must be in a page.

Usage: options_check.py PRODUCT PAGE...    PRODUCT: folder of the programs
"""

import os
import re
import subprocess
import sys

PROGRAMS = ("cr-run", "cr-checkpoint", "cr-restart", "cr-migrate", "cr-ps", "cr-trace", "cr-drain", "cr-inspect", "cr-server", "cr-hostd",
            "cr-mpirun", "cr-sbatch", "cr-slurm-run")
# For an installation in which cr-worker is not beside cr-server.
NOT_IN_PAGES = {"cr-server": {"--worker"}}
OPTION = re.compile(r"--[a-z][a-z-]*")
# A command: up to another one, a comment, the output's file, or the end of a code span. Not the name of a Secret for kubectl.
COMMAND = re.compile(r"(?<![\w./-])(?<!generic )(cr-[a-z]+(?:-[a-z]+)?)((?: [^`|;&>\n]*)?)")


def options_of(program):
    """The options in the list that --help prints: not those in its examples."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    listed = text[text.index("\nOptions:\n"):].split("\n\n")[0]
    found = {option for line in re.findall(r"^  (-\S+)", listed, re.MULTILINE) for option in OPTION.findall(line)}
    if len(found) < 4:
        sys.exit(f"found only these options of {program}: {found}")
    return found


def commands(text):
    """Yields (program, options) of each command in a page."""
    for program, words in COMMAND.findall(re.sub(r"\\\n\s*", " ", text)):
        own = re.split(r" -- |   |  #", words)[0]
        yield program, OPTION.findall(re.sub(r"[\[\]()]", " ", own))


def problems_of(options, pages):
    """options: of each program; pages: texts by name."""
    problems, seen = [], 0
    for name, text in pages.items():
        for program, used in commands(text):
            seen += len(used)
            for option in used:
                # cr-sbatch hands all others on.
                if program == "cr-sbatch" and not option.startswith("--checkpoint-"):
                    continue
                if program in options and option not in options[program] and option not in ("--help", "--version"):
                    problems.append(f"{name}: {program} has no option {option}")
    everything = "\n".join(pages.values())
    for program, has in options.items():
        for option in sorted(has - {"--help", "--version"} - NOT_IN_PAGES.get(program, set())):
            # An option of cr-server can stand in its configuration file, without the dashes.
            name = rf"(?:--|`){option[2:]}" if program == "cr-server" else option
            if not re.search(rf"{name}(?![\w-])", everything):
                problems.append(f"no page has {program} {option}")
    return problems, seen


def self_test():
    options = {"cr-run": {"--gpu", "--name"}, "cr-server": {"--dir", "--grace"}, "cr-sbatch": {"--checkpoint-keep"}}
    page = ("    cr-run --gpu 1 -- prog --its own\n    cr-run --nane x \\\n      --gpus 2 ./prog   # --no-option\n\n"
            "`cr-sbatch --time=4 --checkpoint-keep 2 --checkpoint-kept 3` | `dir` | [--other]\n"
            "/usr/bin/cr-server --wrong\n")
    found = problems_of(options, {"page": page})[0]
    expected = ["page: cr-run has no option --nane", "page: cr-run has no option --gpus",
                "page: cr-sbatch has no option --checkpoint-kept", "no page has cr-run --name", "no page has cr-server --grace"]
    if found != expected:
        sys.exit(f"the check itself is wrong: it finds {found}")


def main():
    self_test()
    product, names = sys.argv[1], sys.argv[2:]
    pages = {name: open(name, encoding="utf-8").read() for name in names}
    problems, seen = problems_of({name: options_of(os.path.join(product, name)) for name in PROGRAMS}, pages)
    if seen < 100:
        problems.append(f"found only {seen} options in the pages")
    print("\n".join(problems) or f"{seen} options in {len(pages)} pages")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
