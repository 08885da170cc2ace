#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the sources are as clang-format would write them, by the workspace's .clang-format, and that pyflakes finds
nothing in the Python programs: names that are not defined, or not used.

Usage: style_test.py [ROOT]     ROOT: the workspace (default: the one that this file, links followed, is in)
Exit code 0 if everything holds, else every violation and exit code 1.
"""

import concurrent.futures
import os
import re
import subprocess
import sys

# Each version has a style of its own; Debian 12 and Ubuntu 24.04 both have this one.
CLANG_FORMAT = "clang-format-14"
PYFLAKES = "pyflakes3"
TOPS = ("proto", "ckptfmt", "replay", "checkpoint", "host", "programs", "client", "server", "softgpu", "tests", "bench", "packaging")
SOURCE = (".h", ".cc", ".cu", ".cpp")
WARNING = re.compile(r"(.*?):\d+:\d+: warning: code should be clang-formatted")


def sources(root, endings=SOURCE):
    for top in TOPS:
        for folder, names, leaves in os.walk(os.path.join(root, top)):
            names[:] = sorted(n for n in names if not n.startswith((".", "bazel-")) and n != "third_party")
            for leaf in sorted(leaves):
                if leaf.endswith(endings):
                    yield os.path.relpath(os.path.join(folder, leaf), root)


def unformatted_of(root, paths):
    """Those of the paths that clang-format would change."""
    done = subprocess.run([CLANG_FORMAT, "--style=file", "--dry-run", *paths], cwd=root, capture_output=True, text=True, check=False)
    found = {match.group(1) for match in map(WARNING.match, done.stderr.split("\n")) if match}
    if done.returncode != 0 or (done.stderr and not found):
        raise RuntimeError(f"{CLANG_FORMAT}: {done.stderr.strip()}")
    return found


def unformatted(root):
    """How many sources there are, and which of them are not formatted."""
    paths = list(sources(root))
    if not paths:
        raise RuntimeError(f"found no sources in {root}")
    # Starting the program takes longer than reading a file.
    parts = [paths[i:i + 50] for i in range(0, len(paths), 50)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return len(paths), set().union(*pool.map(lambda part: unformatted_of(root, part), parts))


def mistakes_in_python(root):
    """How many Python programs there are, and what pyflakes says of them."""
    paths = list(sources(root, ".py"))
    if not paths:
        return 0, []
    done = subprocess.run([PYFLAKES, *paths], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0 and not done.stdout and not done.stderr:
        raise RuntimeError(f"{PYFLAKES} ended with {done.returncode}")
    return len(paths), (done.stdout + done.stderr).splitlines()


def problems(root):
    """How many files there are, and what is wrong."""
    count, wrong = unformatted(root)
    programs, mistakes = mistakes_in_python(root)
    return count + programs, [f"{path}: is not formatted. Run: {CLANG_FORMAT} -i {path}" for path in sorted(wrong)] + mistakes


def main(arguments, problems=problems, name="style_test"):
    """Prints what problems(root) finds, with how many sources; the exit code. For other tests of the sources, too."""
    root = os.path.abspath(arguments[0]) if arguments else os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    try:
        count, found = problems(root)
    except FileNotFoundError as error:
        sys.exit(f"{name}: there is no {error.filename}; tools/setup installs {CLANG_FORMAT} and {PYFLAKES}")
    except RuntimeError as error:
        sys.exit(f"{name}: {error}")
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{'FAIL' if found else 'ok  '} {count} sources")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
