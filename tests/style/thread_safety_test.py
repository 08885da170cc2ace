#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks with clang that what is guarded by a mutex is only used with that mutex held.

Looks at each source that includes the annotations (client/session/guarded.h), and at the .cc file beside such a header.
These sources may not need generated headers, so that the check needs no build.

Usage: thread_safety_test.py [ROOT]    ROOT: the workspace (default: the one that this file, links followed, is in)
Exit code 0 if everything holds, else what clang says and exit code 1.
"""

import concurrent.futures
import os
import re
import subprocess
import sys

# The version that formats the sources, too.
CLANG = "clang++-14"
ANNOTATIONS = "client/session/guarded.h"
# cuda.h; repositories.bzl names the same place.
CUDA = "/usr/local/cuda/include"
TOPS = ("proto", "replay", "client", "server", "checkpoint", "host")
INCLUDES = re.compile(rf'^#include "{re.escape(ANNOTATIONS)}"', re.M)


def sources(root):
    """Sources that use the annotations themselves, or whose header does."""
    found = set()
    for top in TOPS:
        for folder, names, leaves in os.walk(os.path.join(root, top)):
            names[:] = sorted(n for n in names if not n.startswith((".", "bazel-")))
            for leaf in leaves:
                path = os.path.join(folder, leaf)
                if not leaf.endswith((".h", ".cc")):
                    continue
                with open(path, encoding="utf-8", errors="replace") as f:
                    uses = INCLUDES.search(f.read())
                if uses:
                    found.add(os.path.relpath(path, root))
                    own = path[:-2] + ".cc" if leaf.endswith(".h") else path
                    if os.path.exists(own):
                        found.add(os.path.relpath(own, root))
    return sorted(found)


def complaints(root, path):
    """What clang says about one source."""
    done = subprocess.run([CLANG, "-fsyntax-only", "-std=c++17", "-x", "c++", "-I", root, "-isystem", CUDA, "-Wthread-safety", "-Wthread-safety-beta",
                           "-Wno-pragma-once-outside-header", "-Werror", path], cwd=root, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode != 0 else ""


def problems(root):
    """How many sources there are, and what is wrong."""
    paths = sources(root)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return len(paths), [text for text in pool.map(lambda path: complaints(root, path), paths) if text]


def main(arguments):
    root = os.path.abspath(arguments[0]) if arguments else os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    try:
        count, found = problems(root)
    except FileNotFoundError as error:
        sys.exit(f"thread_safety_test: there is no {error.filename}; tools/setup installs clang-14")
    if count == 0:
        sys.exit(f"thread_safety_test: no source in {root} includes {ANNOTATIONS}")
    for text in found:
        print(text, file=sys.stderr)
    print(f"{'FAIL' if found else 'ok  '} {count} sources")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
