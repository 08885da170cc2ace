#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the code does not grow unnoticed: lines of product code by room (a folder of the second level), functions of more
than 60 lines, and the largest class by members and by public functions. sizes.json has the most that each may be.

Usage: sizes_test.py [ROOT]             ROOT: the workspace (default: the one that this file, links followed, is in)
       sizes_test.py --record [ROOT]    writes today's numbers into sizes.json

A number that has fallen is recorded, too, so that it stays there. One that rises is recorded in the commit that raises it, whose
message says why: which feature that users name needs it.
Exit code 0 if nothing has grown, else what has and exit code 1.
"""

import json
import os
import re
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import style_test  # noqa: E402

PRODUCT = (".h", ".cc", ".cu", ".py", ".proto", ".textproto")
# Tests, what only tests use, and programs that measure.
NOT_PRODUCT = re.compile(r"^(tests|bench)/|(^|/)testing/|_test\.\w+$|_fuzz\.\w+$|^proto/gen/testdata/")
LONG = 60
LIMITS = os.path.join(os.path.dirname(os.path.realpath(__file__)), "sizes.json")


def room(path):
    """The folder that a file counts for: two levels, or one for files that lie directly in a top folder."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def functions(text):
    """Yields (first line's number, lines) of the functions that are defined outside of classes; the sources are formatted, so
    such a function ends with the first line that is a closing brace alone, and begins after the last line that was empty or
    ended something."""
    begin, inside, kind = 1, False, ""
    for number, line in enumerate(text.split("\n"), 1):
        if inside:
            if line.startswith("}"):
                if kind == "function" and line == "}":
                    yield begin, number - begin + 1
                inside, begin = False, number + 1
            continue
        if not line or line.startswith(("#", "//", "}")) or line.endswith(";"):
            begin = number + 1
        elif line.endswith("{") and not line.startswith("namespace") and not line.startswith('extern "C"'):
            head = " ".join(text.split("\n")[begin - 1:number])
            kind = "other" if re.match(r"(template\s*<.*>\s*)?(class|struct|enum|union)\b", head) or re.search(r"=\s*\{$", head) else "function"
            inside = True


def classes(text):
    """Yields (name, members, public functions) of the classes that are declared outside of others."""
    for match in re.finditer(r"^(class|struct) (?:CR_\w+(?:\([^)]*\))? )?(\w+)[^;{\n]*\{$(.*?)^\};", text, re.M | re.S):
        public = match.group(1) == "struct"
        members = functions_ = 0
        statement = ""
        for line in match.group(3).split("\n"):
            if re.match(r" (public|private|protected):", line):
                public = line.strip() == "public:"
                statement = ""
                continue
            code = line.split("//")[0].rstrip()
            if not code.startswith("  ") or (code.startswith("   ") and not statement):
                continue
            statement += code
            if not code.endswith((";", "{", "}")):
                continue
            declaration = re.sub(r"CR_\w+\([^()]*\)", "", statement)
            statement = ""
            if re.match(r"\s*(using|friend|typedef|static_assert|enum|class|struct)\b", declaration):
                continue
            if re.search(r"\w+_(\[[^\]]*\])?\s*(=[^=].*|\{.*\})?;$", declaration):
                members += 1
            elif "(" in declaration and public:
                functions_ += 1
        yield match.group(2), members, functions_


def measure(root):
    """Today's numbers, as sizes.json has them, and how many files they are of."""
    rooms, long_functions, most_members, most_functions, count = {}, 0, (0, ""), (0, ""), 0
    for path in style_test.sources(root, PRODUCT):
        if NOT_PRODUCT.search(path):
            continue
        with open(os.path.join(root, path), encoding="utf-8") as f:
            text = f.read()
        count += 1
        rooms[room(path)] = rooms.get(room(path), 0) + text.count("\n")
        if path.endswith((".cc", ".h")):
            long_functions += sum(lines > LONG for _, lines in functions(text))
            for name, members, public in classes(text):
                most_members = max(most_members, (members, name))
                most_functions = max(most_functions, (public, name))
    sizes = {
        "lines": dict(sorted(rooms.items())),
        "functions of more than 60 lines": long_functions,
        "members of the largest class": most_members[0],
        "public functions of the largest class": most_functions[0],
    }
    return sizes, {"members of the largest class": most_members[1], "public functions of the largest class": most_functions[1]}, count


def flat(sizes):
    """One name for each number."""
    return {**{f"lines of {name}": lines for name, lines in sizes["lines"].items()}, **{k: v for k, v in sizes.items() if k != "lines"}}


def grown(limits, sizes, where):
    """What is more than sizes.json allows, as sentences."""
    most = flat(limits)
    found = []
    for name, value in flat(sizes).items():
        if value > most.get(name, 0):
            of = f" ({where[name]})" if name in where else ""
            found.append(f"{name}: {value}{of}, at most {most.get(name, 0)}. Delete something, or raise it with tests/style/sizes_test.py --record "
                         "and say in the commit which feature needs it")  # fmt: skip
    return found


def problems(root):
    """How many files there are, and what has grown."""
    with open(LIMITS, encoding="utf-8") as f:
        limits = json.load(f)
    sizes, where, count = measure(root)
    if not count:
        raise RuntimeError(f"found no sources in {root}")
    return count, grown(limits, sizes, where)


def main(arguments):
    if arguments[:1] != ["--record"]:
        return style_test.main(arguments, problems, "sizes_test")
    root = os.path.abspath(arguments[1]) if arguments[1:] else os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    sizes, _, _ = measure(root)
    with open(LIMITS, "w", encoding="utf-8") as f:
        json.dump(sizes, f, indent=1)
        f.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
