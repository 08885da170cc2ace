# SPDX-License-Identifier: Apache-2.0
"""The fields of docs/json.md, and a comparison of what tools print with them."""

import json
import os
import re

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../docs/json.md")


class Wrong(Exception):
    """An output and the page disagree."""


def documented():
    """The fields of each section of the page: {"cr-ps": {"sessions[].pid", ...}, ...}."""
    sections = {}
    for line in open(PAGE, encoding="utf-8"):
        if heading := re.match(r"## (.*)", line):
            fields = sections.setdefault(heading.group(1).strip(), set())
        elif row := re.match(r"\| (`[^|]*`) \|", line):
            fields.update(re.findall(r"`([^`]*)`", row.group(1)))
    return {name: fields for name, fields in sections.items() if fields}


def leaves(value, path=""):
    """Yields (path, value) of all values that are neither objects nor lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, path + "[]")
    else:
        yield path, value


def is_json(text):
    try:
        return isinstance(json.loads(text), (dict, list))
    except ValueError:
        return False


class Section:
    """One section of the page, and what has been seen of its fields."""

    def __init__(self, name):
        self.name = name
        self.fields = documented()[name]
        self.open = [field[:-1] for field in self.fields if field.endswith(".*")]
        self.seen = set()

    def check(self, text):
        """Takes one output of the tool, and gives it back parsed. Wrong, if it has a field that is not in the page, a text that
        contains JSON, or an empty text or -1, which would stand for what is unknown."""
        output = json.loads(text)
        if not isinstance(output, dict) or list(output)[:1] != ["version"] or output["version"] != 1:
            raise Wrong(f"{self.name}: not an object that begins with version 1: {text}")
        for path, value in leaves(output):
            within = [start for start in self.open if path.startswith(start)]
            if value in ("", -1) or value is None:
                raise Wrong(f"{self.name}: {path} is {value!r}, where an unknown field is to be left out: {text}")
            if isinstance(value, str) and is_json(value):
                raise Wrong(f"{self.name}: {path} has JSON in a text: {value}")
            if not within and path not in self.fields:
                raise Wrong(f"{self.name}: {path} is not in docs/json.md: {text}")
            self.seen.add(within[0] + "*" if within else path)
        return output

    def complete(self):
        """To be called at the end. Wrong, if a field of the page was in no output."""
        if missing := sorted(self.fields - self.seen):
            raise Wrong(f"{self.name}: no output has these fields of docs/json.md: {', '.join(missing)}")
