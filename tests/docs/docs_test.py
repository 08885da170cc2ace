#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the Markdown pages of the whole tree: every link leads to a file and, if it has one, to a heading that exist; each
code span that is a path of the tree, as `proto/frame/handle.h`, names something that exists, and so does each file in the
first column of a folder README's table of files; a source that a name of the code links to has that name; every page of docs/
is in the README's table and in mkdocs.yml; prose lines are not longer than 100 columns; a paragraph has at most six lines; the
idioms of IDIOMS are in no page; docs/gpu-results.md is what tests/gpu/results.py makes of docs/gpu-results.json.

docs/build then makes the site in strict mode, for which mkdocs has to be there (tools/setup installs it).

Usage: docs_test.py [ROOT]    ROOT: the workspace (default: the one that this file, links followed, is in)
"""

import glob
import os
import re
import subprocess
import sys
import tempfile

LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()]*\)[^()\s]*)?)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^\s*(```|~~~)")
WIDTH = 100
SKIP = {".git", ".cache", "node_modules", "packages"}
# Made by proto/gen; each of its rows is a line.
GENERATED = {"proto/api/COVERAGE.md"}
# Folders of the tree: a code span that begins with one of them is a path.
FOLDERS = ("bench", "checkpoint", "ckptfmt", "client", "docs", "host", "packaging", "programs", "proto", "replay", "server", "softgpu", "tests", "tools")
SPAN = re.compile(r"`((?:" + "|".join(FOLDERS) + r")/[\w./-]+)`")
# A link from a name of the code to the source that has it.
NAMED = re.compile(r"\[`(\w+)`\]\(([^()\s]+\.(?:cc|h|py|proto|textproto))\)")
# CHANGELOG.md tells of files of its time. What the build makes is not in the tree.
MAY_BE_GONE = {"CHANGELOG.md"}
# A paragraph or a list item with more lines than this wants to be a list, a table or two paragraphs.
MOST_LINES = 6
# What plain words say better: the same, recreated, nevertheless.
IDIOMS = re.compile(r"\b(likewise|made again|all the same)\b", re.IGNORECASE)
NOT_IN_TREE = re.compile(r"\.gen\.|NAME|\.pb\.h$")


def workspace():
    if len(sys.argv) > 1:
        return os.path.abspath(sys.argv[1])
    folder = os.path.dirname(os.path.realpath(__file__))
    while folder != "/" and not os.path.exists(os.path.join(folder, "WORKSPACE")):
        folder = os.path.dirname(folder)
    return folder


def pages(root):
    for folder, names, leaves in os.walk(root):
        names[:] = sorted(n for n in names if n not in SKIP and not n.startswith(("bazel-", ".")))
        for leaf in sorted(leaves):
            if leaf.endswith(".md"):
                yield os.path.relpath(os.path.join(folder, leaf), root)


def prose(text):
    """Yields (number, line) of the lines that are not code."""
    fenced = indented = False
    before = ""
    in_list = False
    for number, line in enumerate(text.split("\n"), 1):
        if FENCE.match(line):
            fenced = not fenced
            continue
        if fenced:
            continue
        if not line.strip():
            before = ""
            indented = False
            continue
        if not line.startswith(" "):
            in_list = bool(re.match(r"([-*+]|\d+\.)\s", line))
        # Four spaces after an empty line are code, unless they continue a list.
        if line.startswith("    ") and not in_list and (not before or indented):
            indented = True
            continue
        indented = False
        before = line
        yield number, line


def paragraphs(text):
    """Yields (number of the first line, lines) of paragraphs and list items."""
    first, lines = 0, []
    for number, line in prose(text):
        own = re.match(r"\s*(#|\||<|>|\[[^\]]+\]:)", line)
        if lines and (own or number != first + len(lines) or re.match(r"\s*([-*+]|\d+\.)\s", line)):
            yield first, lines
            lines = []
        if not own:
            first, lines = (first, lines + [line]) if lines else (number, [line])
    if lines:
        yield first, lines


def idioms(text):
    """Yields (number, idiom); one may be broken between two lines."""
    joined, starts, before = "", [], 0
    for number, line in prose(text):
        joined += " " if number == before + 1 else "\n"
        starts.append((len(joined), number))
        joined += line.strip()
        before = number
    for match in IDIOMS.finditer(joined):
        yield max(number for start, number in starts if start <= match.start()), match.group().lower()


def slug(heading):
    """The anchor that GitHub makes of a heading."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    heading = re.sub(r"[`*]", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def anchors(text):
    found = {}
    for _, line in prose(text):
        match = re.match(r"#{1,6}\s+(.*?)\s*#*$", line)
        if match:
            name = slug(match.group(1))
            found[name] = found.get(name, -1) + 1
            if found[name]:
                found[f"{name}-{found[name]}"] = 0
        for name in re.findall(r'<a (?:name|id)="([^"]+)"', line):
            found.setdefault(name, 0)
    return set(found)


def listed_files(text):
    """The names in the first columns of tables whose first heading is File or Folder."""
    in_files = before = False
    for _, line in prose(text):
        row = line.startswith("|")
        cell = line.split("|")[1].strip() if row else ""
        if row and not before:
            in_files = cell.lower() in ("file", "folder")
        elif row and in_files:
            yield from re.findall(r"`([^`]+)`", cell)
        before = row


def exists(root, folder, name):
    """Whether a file is there, in the folder or by its path; a suffix may be left out, `{a,b}` means both."""
    braces = re.search(r"\{([^}]*)\}", name)
    if braces:
        return all(exists(root, folder, name.replace(braces.group(), part)) for part in braces.group(1).split(","))
    return any(glob.glob(os.path.join(root, place, name + suffix)) for place in (folder, "") for suffix in ("", ".*"))


def check(root):
    problems = []
    texts = {path: open(os.path.join(root, path), encoding="utf-8").read() for path in pages(root)}
    links = 0
    for path, text in texts.items():
        for number, line in prose(text):
            if len(line) > WIDTH and not line.lstrip().startswith(("|", "#")) and path not in GENERATED:
                # A link or a name alone cannot be broken.
                if " " in line.strip(" -*>"):
                    problems.append(f"{path}:{number}: {len(line)} columns; prose is wrapped at {WIDTH}")
        for number, lines in paragraphs(text):
            if len(lines) > MOST_LINES:
                problems.append(f"{path}:{number}: a paragraph of {len(lines)} lines; at most {MOST_LINES} are easy to read")
        for number, idiom in idioms(text):
            problems.append(f"{path}:{number}: write plainer words than '{idiom}'")
        for span in SPAN.findall("\n".join(line for _, line in prose(text))) if path not in MAY_BE_GONE else ():
            name = os.path.join(root, span.rstrip("."))
            # A file may be named without its suffix, for a header and its source.
            if not NOT_IN_TREE.search(span) and not os.path.exists(name) and not os.path.exists(name + ".h"):
                problems.append(f"{path}: there is no {span}")
        if os.path.basename(path) == "README.md":
            for name in listed_files(text):
                if not NOT_IN_TREE.search(name) and not exists(root, os.path.dirname(path), name):
                    problems.append(f"{path}: the table lists {name}, which is not there")
        for name, file in NAMED.findall("\n".join(line for _, line in prose(text))):
            there = os.path.join(root, os.path.dirname(path), file)
            if os.path.isfile(there) and not re.search(rf"\b{re.escape(name)}\b", open(there, encoding="utf-8").read()):
                problems.append(f"{path}: {file} has no {name}")
        # A link's text may go on in the next line.
        plain = "\n".join(re.sub(r"`[^`\n]*`", "``", line) for _, line in prose(text))
        for target in LINK.findall(plain):
            if re.match(r"[a-z]+:", target):
                continue
            links += 1
            file, _, anchor = target.partition("#")
            there = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
            if there.startswith("..") or not os.path.exists(os.path.join(root, there)):
                problems.append(f"{path}: the link to {target} leads nowhere")
            elif anchor and there in texts and anchor not in anchors(texts[there]):
                problems.append(f"{path}: {there} has no heading #{anchor}")
            elif anchor and there not in texts:
                problems.append(f"{path}: the link to {target} names a heading of what is no page")
    readme = texts["README.md"]
    site = open(os.path.join(root, "docs/mkdocs.yml"), encoding="utf-8").read()
    for path in texts:
        if path.startswith("docs/"):
            if not re.search(rf"\({re.escape(path)}[)#]", readme):
                problems.append(f"{path} is not in the table of README.md")
            if f" {path}\n" not in site:
                problems.append(f"{path} is not in docs/mkdocs.yml")
    results = os.path.join(root, "tests/gpu/results.py")
    if os.path.exists(results):
        made = subprocess.run([sys.executable, results, "--root", root, "--print"], capture_output=True, text=True)
        if made.returncode != 0 or made.stdout != texts["docs/gpu-results.md"]:
            problems.append(f"docs/gpu-results.md is not what tests/gpu/results.py makes of docs/gpu-results.json: run it {made.stderr}")
    if links < 40:
        problems.append(f"only {links} links were found")
    print(f"{len(texts)} pages, {links} links")
    return problems


def self_test():
    """A tree with one of each mistake: each must be found."""
    with tempfile.TemporaryDirectory() as root:
        os.mkdir(root + "/docs")
        good = "# Title\n\n" + "".join(f"[here](docs/a.md#the-part) {n}\n\n" for n in range(60)) + "[b](docs/b.md)\n"
        wrong = "[x](gone.md) [y](docs/a.md#none) `docs/a.md` `docs/gone.h`\n\n[`Here`](docs/code.cc) [`There`](docs/code.cc)\n\n| File | |\n| --- | --- |\n| `lost.cc`, `README` | |\n\n" + "word " * 30 + "\n\n    " + "code " * 30 + "\n\n```\n" + "code " * 30 + "\n```\n"
        # Six lines each, and a list of items with as many: nothing is wrong with these.
        short = "line\n" * 6 + "\n" + "- line\n" * 3 + "- line\n" + "  line\n" * 5 + "\n" + "| row |\n" * 9
        long = "\n" + "line\n" * 7 + "\n1. first\n2. line\n" + "   line\n" * 6
        phrases = "\nIt works all\nthe same, and is Made again.\n\nInstall the same; `x` likewise; for all\n\nthe same.\n"
        for name, text in (("README.md", good + wrong), ("docs/a.md", "# A\n\n## The `part`\n"),
                           ("docs/b.md", "# B\n\n" + short + long + phrases), ("docs/c.md", "# C\n"),
                           ("docs/code.cc", "int Here();\n"), ("docs/mkdocs.yml", "nav:\n  - a: docs/a.md\n  - b: docs/b.md\n")):
            with open(os.path.join(root, name), "w", encoding="utf-8") as f:
                f.write(text)
        found = "\n".join(check(root))
        for expected in ("gone.md leads nowhere", "no heading #none", "150 columns", "docs/c.md is not in the table",
                         "docs/c.md is not in docs/mkdocs.yml", "there is no docs/gone.h", "docs/code.cc has no There", "lists lost.cc",
                         "docs/b.md:30: a paragraph of 7 lines", "docs/b.md:39: a paragraph of 7 lines",
                         "docs/b.md:47: write plainer words than 'all the same'", "docs/b.md:48: write plainer words than 'made again'",
                         "docs/b.md:50: write plainer words than 'likewise'"):
            if expected not in found:
                sys.exit(f"the check itself is wrong: it does not find '{expected}' but: {found}")
        if len(found.split("\n")) != 13:
            sys.exit(f"the check itself is wrong: it finds too much: {found}")


def main():
    self_test()
    root = workspace()
    problems = check(root)
    for problem in problems:
        print(problem)
    with tempfile.TemporaryDirectory() as out:
        built = subprocess.run([os.path.join(root, "docs/build"), out], capture_output=True, text=True)
        if built.returncode != 0 or not os.path.exists(out + "/index.html"):
            problems.append("docs/build failed")
            print(built.stdout + built.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
