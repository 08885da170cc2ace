#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds second ones of what the project has once: clocks, hashes, hexadecimal texts, owners of descriptors, readers of
/proc/PID/maps and /proc/PID/stat, searches of /proc, readers of links, progress bars, the addresses of a job's memory, and
types of errors.

Usage: one_test.py [ROOT]     ROOT: the workspace (default: the one that this file, links followed, is in)
Exit code 0 if there is one of each, else every violation and exit code 1.
"""

import os
import re
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import style_test  # noqa: E402

# Programs that are built without this project's libraries, with nvcc or for a run without cuda-remote.
STAND_ALONE = ("bench/", "tests/apps/", "tests/conformance/", "tests/faults/", "tests/fuzz/standalone.cc", "tests/nvml/")

# What it is | what finds it in a line without comments | who may have it: the one place, and exceptions with their reason |
# what to do.
ONE = (
    (
        "clock",
        re.compile(r"\bclock_gettime\s*\(|[Cc]lock\w*::now\s*\(|\bgettimeofday\s*\(|(?<![\w:.>])time\s*\(\s*(nullptr|NULL|0)\s*\)"),
        (
            "proto/base/clock.h",
            "checkpoint/engine/criu/process_state_test.cc",  # the kernel's clocks are what these two test
            "checkpoint/engine/criu/tree_test.cc",
        ) + STAND_ALONE,
        "use proto/base/clock.h",
    ),
    (
        "hash",
        re.compile(
            r"(?i:0xcbf29ce484222325|14695981039346656037|1099511628211|0x0*100000001b3|2166136261|\b16777619|0x811c9dc5|0x0*1000193\b)|"
            r"\bXXH(3|32|64|128)_\w+|<xxhash\.h>|\bstd::hash\s*<|\bcrc32\w*\s*\("),
        (
            "proto/base/hash.cc",
            "proto/base/hash_avx2.cc",
            "proto/base/hash_test.cc",
            "softgpu/ptx/cuda_matrix_test.cc",  # a real GPU's results are kept as this hash
        ) + STAND_ALONE,
        "use proto/base/hash.h, which also says which hashes have another purpose",
    ),
    (
        "hexadecimal text",
        re.compile(r'%02x|0x%l*x|%#l*x|= *"0123456789abcdef|\babsl::Hex\s*\('),
        ("proto/base/text.cc",) + STAND_ALONE,
        "use Hex and HexBytes of proto/base/text.h",
    ),
    (
        "reader of /proc/PID/maps",
        re.compile(r'/maps"|/self/maps'),
        (
            "proto/base/mappings.cc",
            "checkpoint/engine/criu/criu_preload.cc",  # in CRIU, with nothing but the C library
        ) + STAND_ALONE,
        "use proto/base/mappings.h",
    ),
    (
        "reader of /proc/PID/stat",
        re.compile(r'"/stat"|/self/stat"'),
        (
            "proto/base/proc.cc",
            "checkpoint/transaction/give_way.cc",  # of threads, and by an open folder: the number may be another's by now
        ) + STAND_ALONE,
        "use StatOf of proto/base/proc.h",
    ),
    (
        "search of /proc",
        re.compile(r'(?:opendir|directory_iterator)\s*\(\s*"/proc"'),
        STAND_ALONE,
        "use AllProcesses of proto/base/proc.h",
    ),
    (
        "reader of links",
        re.compile(r"(?<![\w.>])readlink\s*\("),
        (
            "proto/base/proc.cc",
            "bench/instructions/own_ring.h",  # counts instructions: without the project's libraries
            "checkpoint/engine/criu/criu_preload.cc",  # in CRIU, with nothing but the C library
            "softgpu/api/vmm.cc",  # the software GPU has none of the project's libraries but proto/driverabi
        ) + STAND_ALONE,
        "use ReadLink of proto/base/proc.h",
    ),
    (
        "test for a number",
        re.compile(r"\bbool IsNumber\("),
        ("proto/base/proc.h", "proto/base/proc.cc") + STAND_ALONE,
        "use IsNumber of proto/base/proc.h",
    ),
    (
        "progress bar",
        re.compile(r"\\(x1b|033|e)\[K"),
        (
            "programs/tools/cr_ps.cc",  # writes its table over the one before
            "proto/cli/progress.cc",
            "proto/cli/progress_test.cc",
        ) + STAND_ALONE,
        "use proto/cli/progress.h",
    ),
)

# Whether the ranges of addresses are other ones must be seen in one place.
ADDRESSES = "proto/driverabi/job_addresses.h"
ADDRESS = re.compile(r"k(?:Host|Managed|Reservation|Snapshot)Base\s*=\s*(0x[0-9a-f]+)")

OWNER = "proto/base/unique_fd.h"
DESTRUCTOR = re.compile(r"~(\w+)\s*\(\s*\)[^;{}]*\{")
CLOSES = re.compile(r"(?<![\w.>])(?:::)?close\s*\(")

# A parameter, not a member or a variable: those end with a semicolon.
ERROR_TEXT = re.compile(r"\bstd::string\s*\*\s*(?:error|problem|why)\s*(?=[,)=])")

TOKEN = re.compile(r'R"(?P<end>[^(\s]*)\(.*?\)(?P=end)"|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|(?P<comment>//[^\n]*|/\*.*?\*/)', re.S)


def without_comments(text):
    """The text with comments blanked, so that places stay the same."""
    return TOKEN.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)) if m.group("comment") else m.group(0), text)


def line_of(text, at):
    return text.count("\n", 0, at) + 1


def body_from(text, at):
    """What follows the opening brace before `at`, up to its end."""
    depth, end = 1, at
    while depth > 0 and end < len(text):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[at:end]


def owners(path, text):
    """Classes that close a descriptor in their destructor."""
    for match in DESTRUCTOR.finditer(text):
        if CLOSES.search(body_from(text, match.end())):
            yield f"{path}:{line_of(text, match.start())}: a second owner of a descriptor: {match.group(1)} closes one in its destructor. " \
                  f"Give it a UniqueFd ({OWNER})"


def error_texts(path, text):
    """Functions of a header that give the text of an error in a parameter."""
    for match in ERROR_TEXT.finditer(text):
        yield f"{path}:{line_of(text, match.start())}: a second error text ({match.group(0)}): return a status " \
              "(proto/errors/README.md)"


def problems(root):
    """How many files there are, and what is wrong."""
    texts = {}
    for path in style_test.sources(root):
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as f:
            texts[path] = without_comments(f.read())
    if not texts:
        raise RuntimeError(f"found no sources in {root}")
    found = []
    addresses = set(ADDRESS.findall(texts.get(ADDRESSES, "")))
    if not addresses:
        raise RuntimeError(f"found no addresses in {ADDRESSES}")
    address = re.compile(r"\b(" + "|".join(sorted(addresses)) + r")\b", re.I)
    for path, text in texts.items():
        for what, pattern, allowed, instead in ONE:
            if path.startswith(allowed):
                continue
            for match in pattern.finditer(text):
                found.append(f"{path}:{line_of(text, match.start())}: a second {what} ({match.group(0)}): {instead}")
        if not path.startswith(("tests/", "bench/")) and path != ADDRESSES:
            for match in address.finditer(text):
                found.append(f"{path}:{line_of(text, match.start())}: {match.group(0)} has a name in {ADDRESSES}")
        if path != OWNER:
            found.extend(owners(path, text))
        if path.endswith(".h") and not path.startswith(STAND_ALONE):
            found.extend(error_texts(path, text))
    return len(texts), found


if __name__ == "__main__":
    sys.exit(style_test.main(sys.argv[1:], problems, "one_test"))
