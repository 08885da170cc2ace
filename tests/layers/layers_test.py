#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the shape of the source tree: who includes whom, what the client library may use, that tools/setup installs
the packages whose headers are used, and that folders explain themselves.

Reads the sources only; builds nothing. Exit code 0 and "ok" lines if everything holds, else every violation with file and
line, and exit code 1.

Usage: layers_test.py [ROOT]    ROOT: the workspace (default: the one that this file, links followed, is in)
"""

import os
import re
import sys

# A folder may include itself and what stands here; `tests` may include everything.
MAY_INCLUDE = {
    "proto": set(),
    "ckptfmt": {"proto"},
    "replay": {"proto", "ckptfmt"},
    "checkpoint": {"proto", "ckptfmt", "replay"},
    "host": {"proto", "ckptfmt", "checkpoint"},
    "programs": {"proto", "ckptfmt", "replay", "checkpoint", "host"},
    "client": {"proto", "replay"},
    "server": {"proto", "ckptfmt", "replay"},
    "softgpu": {"proto", "replay"},
}
MAY_INCLUDE["tests"] = {*MAY_INCLUDE, "tests"}
MAY_INCLUDE["bench"] = {*MAY_INCLUDE, "bench"}
# What a test beside the code may use, too.
TESTS_MAY_INCLUDE = {"client": {"checkpoint"}, "softgpu": {"server"}}

# The folders in some of these, and which others of the same top folder each may include.
MAY_INCLUDE_INSIDE = {
    "checkpoint": {
        "job": set(),
        "agent": {"job"},
        "gpu": {"job"},
        "engine": {"job"},
        "transaction": {"agent", "job", "gpu", "engine"},
    },
    "server": {
        "driver": set(),
        "worker_link": set(),
        "dispatch": {"driver"},
        "worker": {"dispatch", "driver", "worker_link"},
        "nvml": {"worker", "worker_link"},
        "supervisor": {"nvml", "worker_link"},
    },
}

# Folders whose code is linked into libcuda-remote.so, and what may not appear in it.
IN_LIBRARY = (
    "proto/agent",
    "proto/base",
    "proto/frame",
    "proto/machine",
    "proto/ring",
    "proto/channel",
    "proto/codec",
    "proto/driverabi",
    "proto/folder",
    "proto/nvml",
    "proto/threads",
    "replay/handles",
    "replay/log",
    "client/agent",
    "client/core",
    "client/memory",
    "client/graphs",
    "client/calls",
    "client/entry",
    "client/nvml",
    "client/preload",
    "client/trace",
)
HEAVY = re.compile(r"^(absl|grpc|grpcpp|google/protobuf|spdlog|fmt|CLI)/|\.pb\.h$")

# Which package's headers these are; tools/setup must install it.
PACKAGE_OF = {
    "absl": "libabsl-dev",
    "CLI": "libcli11-dev",
    "fmt": "libfmt-dev",
    "gmock": "libgmock-dev",
    "google": "libprotobuf-dev",
    "grpc": "libgrpc++-dev",
    "grpcpp": "libgrpc++-dev",
    "gtest": "libgtest-dev",
    "lz4.h": "liblz4-dev",
    "openssl": "libssl-dev",
    "prometheus": "prometheus-cpp-dev",
    "protozero": "libprotozero-dev",
    "spdlog": "libspdlog-dev",
    "valgrind": "valgrind",
    "xxhash.h": "libxxhash-dev",
    "zstd.h": "libzstd-dev",
}
# Folders of the C library's, the kernel's and the CUDA toolkit's headers.
ALWAYS_THERE = {"arpa", "asm", "cooperative_groups", "cuda", "linux", "net", "netinet", "sys", "thrust", "cub"}

# In the library a call that ends the process would end the application.
ENDS_PROCESS = re.compile(r"(?<![\w.:>])(?:std::)?(abort|terminate|exit|_exit|quick_exit)\s*\(")

# Of one engine, which nothing else may know.
ENGINE = re.compile(r"^checkpoint/engine/(?!testing/)[^/]+/")
# Nor its name, in code or in what people read.
ENGINES_NAME = re.compile(r"criu", re.I)
KNOWS_ENGINES = ("checkpoint/engine/criu/", "checkpoint/engine/engines.cc", "tests/", "bench/")

SOURCE = (".h", ".cc", ".cpp", ".cu", ".inc")
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
SKIP = {".git", ".cache", "third_party", "node_modules"}


def workspace():
    if len(sys.argv) > 1:
        return os.path.abspath(sys.argv[1])
    folder = os.path.dirname(os.path.realpath(__file__))
    while folder != "/" and not os.path.exists(os.path.join(folder, "WORKSPACE")):
        folder = os.path.dirname(folder)
    return folder


def files(root, tops):
    for top in tops:
        for folder, names, leaves in os.walk(os.path.join(root, top)):
            names[:] = sorted(n for n in names if n not in SKIP and not n.startswith("bazel-"))
            for leaf in sorted(leaves):
                yield os.path.relpath(os.path.join(folder, leaf), root)


def lines_without_comments(path):
    """Yields (number, line) with comments and string literals blanked, well enough for the checks here."""
    text = open(path, encoding="utf-8", errors="replace").read()
    blank = lambda match: re.sub(r"[^\n]", " ", match.group(0))
    text = re.sub(r"/\*.*?\*/", blank, text, flags=re.S)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.lstrip().startswith("#"):
            line = re.sub(r'"(?:[^"\\]|\\.)*"', '""', line)
        yield number, re.sub(r"//.*", "", line)


TOKEN = re.compile(r'R"(?P<end>[^(\s]*)\(.*?\)(?P=end)"|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|(?P<comment>//[^\n]*|/\*.*?\*/)', re.S)


def lines_with_strings(path):
    """Yields (number, line) with comments blanked, and string literals as they are."""
    text = open(path, encoding="utf-8", errors="replace").read()
    blank = lambda match: re.sub(r"[^\n]", " ", match.group(0)) if match.group("comment") else match.group(0)
    yield from enumerate(TOKEN.sub(blank, text).split("\n"), 1)


def is_test(path):
    name = os.path.basename(path)
    return bool(re.search(r"(_test|_fuzz|_fuzzer|_benchmark|_testing|_tool)\.", name)) or "/testing" in path


def forbidden(path, target, test):
    """Says in one sentence why the file `path` must not use the file or package `target`; None if it may."""
    parts, target_parts = path.split("/"), target.split("/")
    top, target_top = parts[0], target_parts[0]
    if target_top not in MAY_INCLUDE:
        return None
    if target_top != top:
        if target_top in MAY_INCLUDE[top] or (test and target_top in TESTS_MAY_INCLUDE.get(top, set()) | {"tests"}):
            return None
        return f"{top} must not include {target}"
    if top not in MAY_INCLUDE_INSIDE or parts[1] == target_parts[1] or test:
        return None
    if target_parts[1] in MAY_INCLUDE_INSIDE[top].get(parts[1], set()):
        return None
    return f"{top}/{parts[1]} must not include {target}"


def check_includes(root, problems):
    count = 0
    for path in files(root, MAY_INCLUDE):
        if not path.endswith(SOURCE):
            continue
        in_library = path.startswith(tuple(folder + "/" for folder in IN_LIBRARY)) and not is_test(path)
        for number, line in lines_without_comments(os.path.join(root, path)):
            match = INCLUDE.match(line)
            if match:
                count += 1
                target = match.group(2)
                problem = forbidden(path, target, is_test(path))
                if problem:
                    problems.append(f"{path}:{number}: {problem}")
                engine = ENGINE.match(target)
                if engine and not path.startswith("checkpoint/engine/"):
                    problems.append(f"{path}:{number}: what an engine is made of is its own: use checkpoint/engine/engines.h, not {target}")
                if in_library and HEAVY.search(target):
                    problems.append(f"{path}:{number}: the client library must not use {target}")
                if match.group(1) == '"' and "/" not in target and os.path.dirname(path) and not path.startswith("tests/apps"):
                    problems.append(f"{path}:{number}: include {target} by its path from the root of the workspace")
            elif in_library and ENDS_PROCESS.search(line):
                problems.append(f"{path}:{number}: the client library must never end the application: {line.strip()}")
    return f"{count} includes"


# A rule of a BUILD file, from its kind to the parenthesis that closes it, and the labels that its deps list.
RULE = re.compile(r"^(\w+)\(\n(.*?)^\)", re.M | re.S)
DEPS = re.compile(r"\bdeps = \[(.*?)\]", re.S)
LABEL = re.compile(r'"//([^":]+)')


def check_deps(root, problems):
    """The same rules for Bazel's dependencies: generated sources include what this test does not see."""
    count = 0
    for path in files(root, MAY_INCLUDE):
        if os.path.basename(path) != "BUILD.bazel":
            continue
        text = re.sub(r"#.*", "", open(os.path.join(root, path), encoding="utf-8").read())
        for rule in RULE.finditer(text):
            test = rule.group(1).endswith("_test") or "testonly = True" in rule.group(2)
            for deps in DEPS.finditer(rule.group(2)):
                for label in LABEL.finditer(deps.group(1)):
                    count += 1
                    problem = forbidden(path, label.group(1), test)
                    if problem:
                        line = text.count("\n", 0, rule.start(2) + deps.start(1) + label.start()) + 1
                        problems.append(f"{path}:{line}: {problem}")
    return f"{count} dependencies"


def check_engine(root, problems):
    """Who names an engine would have to be changed for the next one."""
    count = 0
    for path in files(root, MAY_INCLUDE):
        if not path.endswith(SOURCE) or path.startswith(KNOWS_ENGINES) or is_test(path):
            continue
        count += 1
        for number, line in lines_with_strings(os.path.join(root, path)):
            if ENGINES_NAME.search(line) and not INCLUDE.match(line):
                problems.append(f"{path}:{number}: only the engine may know its name; ask SnapshotEngine: {line.strip()}")
    return f"{count} files"


def check_packages(root, problems):
    """A header that is here because somebody once installed its package would be missing on the next machine."""
    setup = open(os.path.join(root, "tools/setup"), encoding="utf-8").read()
    kinds = {kind: set(text.split()) for kind, text in re.findall(r"^(\w+)_packages=\((.*?)\)$", setup, re.S | re.M)}
    found = set()
    for path in files(root, MAY_INCLUDE):
        if not path.endswith(SOURCE):
            continue
        for number, line in lines_without_comments(os.path.join(root, path)):
            match = INCLUDE.match(line)
            if not match or match.group(1) != "<":
                continue
            folder = match.group(2).split("/")[0]
            package = PACKAGE_OF.get(folder)
            if package:
                found.add(package)
                only_tests = is_test(path) or path.startswith(("tests/", "bench/"))
                if package not in kinds["build"] | (kinds["test"] if only_tests else set()):
                    problems.append(
                        f"{path}:{number}: <{match.group(2)}> is of {package}, which tools/setup "
                        f"{'--test' if only_tests else '--build'} does not install")
            elif "/" in match.group(2) and folder not in ALWAYS_THERE:
                problems.append(f"{path}:{number}: PACKAGE_OF in layers_test.py does not say whose <{match.group(2)}> is")
    return f"{len(found)} packages"


def check_readmes(root, problems):
    count = 0
    for top in list(MAY_INCLUDE) + ["docs"]:
        if not os.path.isdir(os.path.join(root, top)):
            continue
        for folder, names, leaves in os.walk(os.path.join(root, top)):
            names[:] = [n for n in names if n not in SKIP]
            relative = os.path.relpath(folder, root)
            # The top folder and each of its parts say what they are for; deeper ones may leave it to them.
            if relative.count("/") > 1 or relative.endswith("/testing") or relative.startswith("docs/") or not leaves:
                continue
            count += 1
            if not any(leaf.endswith(".md") for leaf in leaves) and relative != "docs":
                problems.append(f"{relative}: has no README.md")
    return f"{count} folders"


# Ids of calls and of our own operations.
CALL_INFO = re.compile(r"\bCallInfo\s+\w+\s*\{\s*k(Call_|Op)")
CALL_COMPARED = re.compile(r"[=!]=\s*(?:\w+::)*(kCall_\w+)|\b(kCall_\w+)\s*[=!]=")
CALL_CASE = re.compile(r"\bcase\s+(?:\w+\s*::\s*)*(kCall_\w+|kOp(\w+))")


def check_call_facts(root, problems):
    """A switch over call ids is a list of calls that somebody adding one would have to find."""
    table = open(os.path.join(root, "proto/api/operations.textproto"), encoding="utf-8").read()
    operations = set(re.findall(r'^\s*number: \d+ name: "(\w+)"', table, re.M))
    if not operations:
        problems.append("proto/api/operations.textproto: found no operation in it")
    count = 0
    for path in files(root, MAY_INCLUDE):
        if not path.endswith(SOURCE):
            continue
        count += 1
        for number, line in lines_without_comments(os.path.join(root, path)):
            if CALL_INFO.search(line):
                problems.append(f"{path}:{number}: proto/api says what a call is: use info::k_cuX, or Under(info::k_cuX, name)")
            compared = CALL_COMPARED.search(line) if not is_test(path) else None
            if compared:
                problems.append(
                    f"{path}:{number}: compares with {compared.group(1) or compared.group(2)}: a fact about calls is a field of `Traits` in "
                    "proto/api; a request of one call is read with wire::DecodeAs (proto/codec/decode_as.h)")
            for case in CALL_CASE.finditer(line):
                if case.group(2) is None or case.group(2) in operations:
                    problems.append(
                        f"{path}:{number}: `case {case.group(1)}`: facts about calls stand in proto/api alone. Add a field to `Traits` in "
                        "schema.proto, set it in semantics.textproto or operations.textproto, and look it up with TraitsOf")
    return f"{count} files"


# Clang cannot check what the standard library's mutexes guard.
STANDARD_MUTEX = re.compile(r"std::(\w*_)?(mutex|lock_guard|unique_lock|shared_lock|scoped_lock|condition_variable\w*)\b")
OWN_MUTEX = "proto/threads/"
# What is locked there guards no member: one thread at a time makes a context, a mapping or a connection.
ONE_AT_A_TIME = (
    "client/calls/context.cc",
    "client/calls/ipc.cc",
    "client/calls/mapped_memory.cc",
    "client/calls/module.cc",
    "client/core/call.cc",
    "client/memory/managed_pages.cc",
    "client/memory/managed_pages.h",
    "client/core/own_calls.cc",
    "client/core/session.cc",
)
# The library for logs wants one; and a lock of another kind, which changes hands.
MAY_USE_STANDARD_MUTEX = re.compile(r"spdlog::|<(ring::)?TurnLock>")


def check_mutexes(root, problems):
    """proto/threads/mutex.h has the project's mutexes. Tests may use others."""
    count = 0
    for path in files(root, MAY_INCLUDE):
        if not path.endswith(SOURCE) or is_test(path) or path.startswith((OWN_MUTEX, "tests/", "bench/", *ONE_AT_A_TIME)):
            continue
        count += 1
        for number, line in lines_without_comments(os.path.join(root, path)):
            found = STANDARD_MUTEX.search(line)
            if found and not line.lstrip().startswith("#") and not MAY_USE_STANDARD_MUTEX.search(line):
                problems.append(f"{path}:{number}: {found.group(0)}: use proto/threads/mutex.h, and say with CR_GUARDED_BY what the mutex guards")
    return f"{count} files"


# A library in a set-user-ID program must not obey the caller's variables: TrustedVariable knows whether it is in one.
READS_ENVIRONMENT = re.compile(r"(?<![\w.>])(?:std::|::)?(?:(?:__)?(?:secure_)?getenv|environ)\b")
ENVIRONMENT = "proto/base/environment.h"
# What else is loaded into programs that are not ours.
OTHER_LIBRARIES = ("checkpoint/engine/criu/criu_preload.cc",)
# These pass the environment on to programs that they start, and believe nothing of it.
PASS_ENVIRONMENT_ON = ("client/preload/calls.cc", "client/core/relay_process.cc")


def check_environment(root, problems):
    count = 0
    for path in files(root, MAY_INCLUDE):
        in_library = path.startswith(tuple(folder + "/" for folder in IN_LIBRARY)) or path in OTHER_LIBRARIES
        if not path.endswith(SOURCE) or not in_library or is_test(path) or path == ENVIRONMENT:
            continue
        count += 1
        for number, line in lines_without_comments(os.path.join(root, path)):
            found = READS_ENVIRONMENT.search(line)
            if found and not (found.group(0).endswith("environ") and path in PASS_ENVIRONMENT_ON):
                problems.append(f"{path}:{number}: {found.group(0)}: libraries read variables with TrustedVariable ({ENVIRONMENT})")
    missing = [path for path in (ENVIRONMENT, *OTHER_LIBRARIES) if not os.path.exists(os.path.join(root, path))]
    problems += [f"{path}: check_environment names it, and it is not there" for path in missing]
    return f"{count} files"


LICENSE = "SPDX-License-Identifier: Apache-2.0"


# Besides sources, what says its licence in its first or second line.
LICENSED = re.compile(r"(^|/)(BUILD\.bazel|WORKSPACE|\.bazelrc|\.clang-format|\.clang-tidy)$|\.(sh|textproto|yml|yaml|conf|service)$")

NOT_SOURCES = {"generated", "golden", "packages", "site", "third_party"}


def check_text(root, problems):
    count = 0
    for folder, names, leaves in os.walk(root):
        names[:] = sorted(n for n in names if not n.startswith((".", "bazel-", "__")) and n not in NOT_SOURCES)
        for leaf in leaves:
            full = os.path.join(folder, leaf)
            path = os.path.relpath(full, root)
            if os.path.islink(full) or path == ".bazelrc.local":
                continue
            with open(full, encoding="utf-8", errors="replace") as f:
                first = [f.readline(), f.readline()]
            if not (LICENSED.search(path) or first[0].startswith("#!")):
                continue
            count += 1
            if not any(LICENSE in line for line in first):
                problems.append(f"{path}:1: must begin with a comment that says {LICENSE}")
    for path in files(root, MAY_INCLUDE):
        if not path.endswith(SOURCE + (".py", ".bzl", ".proto")) or "/golden/" in path or "generated" in path:
            continue
        count += 1
        full = os.path.join(root, path)
        lines = open(full, encoding="utf-8", errors="replace").read().split("\n")
        if lines[0].startswith("#!"):
            del lines[0]
        if not lines[0].endswith(f" {LICENSE}"):
            problems.append(f"{path}:1: must begin with a comment that says {LICENSE}")
        for number, line in enumerate(lines, 1):
            if len(line) > 140 and path.endswith((".h", ".cc")):
                problems.append(f"{path}:{number}: {len(line)} columns; the limit is 120")
        if path.endswith(".h"):
            guard = "CUDA_REMOTE_" + re.sub(r"[^A-Z0-9]", "_", path.upper()) + "_"
            if not any(line.startswith(f"#ifndef {guard}") for line in lines):
                problems.append(f"{path}:1: the include guard must be {guard}")
        explained = path.endswith(".cc") and (
            os.path.exists(full[:-3] + ".h") or os.path.exists(full.replace("_test.cc", ".h")))
        if path.endswith((".h", ".cc", ".cu", ".cpp")) and not explained and not "".join(lines[1:2]).startswith("//"):
            problems.append(f"{path}:2: must start with a comment that says what the file is for")
    return f"{count} files"


def main():
    root = workspace()
    if not os.path.exists(os.path.join(root, "WORKSPACE")):
        sys.exit(f"layers_test: no WORKSPACE in {root}; give the workspace's folder as argument")
    problems = []
    for check in (check_includes, check_deps, check_engine, check_packages, check_readmes, check_call_facts, check_mutexes, check_environment, check_text):
        before = len(problems)
        looked_at = check(root, problems)
        if looked_at.startswith("0 "):
            problems.append(f"{check.__name__}: found nothing to look at in {root}")
        print(f"{'ok  ' if len(problems) == before else 'FAIL'} {check.__name__}: {looked_at}")
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
