# SPDX-License-Identifier: Apache-2.0
"""tests/conformance: each handled call with valid arguments and with wrong ones, on a live driver, every result shown.

What the arguments are is in --arguments (tests/conformance/arguments.txt says how to read it); what is live, and how results
are shown, in tests/conformance/fixture.h.
"""

import fnmatch
import re

from proto_gen import text
from proto_gen.emit_coverage import effective


class Arguments:
    """The lines of the arguments' file."""

    def __init__(self, path):
        self.path = path
        self.lines = []   # (key, operator, text, number)
        self.used = set()
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                line = line.rstrip("\n")
                if not line.strip() or line.startswith("#"):
                    continue
                match = re.match(r"(.*?) (=|!-|!|<|>)(?: (.*))?$", line)
                if match is None:
                    raise SystemExit(f"{path}:{number}: not KEY OPERATOR TEXT")
                self.lines.append((match.group(1).strip(), match.group(2), (match.group(3) or "").strip(), number))

    def _level(self, key, call, p):
        """How closely `key` fits the parameter: 3 call and name, 2 type and name, 1 type, 0 not at all."""
        if " : " in key:
            kind, name = key.split(" : ")
            return 2 if kind == p.type and fnmatch.fnmatchcase(p.name, name) else 0
        if "." in key:
            symbol, name = key.split(".")
            return 3 if fnmatch.fnmatchcase(call.symbol, symbol) and fnmatch.fnmatchcase(p.name, name) else 0
        return 1 if key == p.type else 0

    def _find(self, call, p, operators):
        """The lines of the most specific key that has any; of several that are as specific, the last one's."""
        best, found = 0, []
        for line in self.lines:
            if line[1] in operators:
                level = self._level(line[0], call, p)
                if level == 0 or level < best:
                    continue
                if level > best or line[0] != found[-1][0]:
                    best, found = level, []
                found.append(line)
                self.used.add(line[3])
        return found

    def value(self, call, p):
        found = self._find(call, p, ("=",))
        return found[-1][2].replace("$", p.name) if found else None

    def others(self, call, p):
        """Other values, and whether the generator's own are wanted."""
        found = self._find(call, p, ("!", "!-"))
        values = []
        for _, operator, value, _ in found:
            span = re.match(r"(\d+) \.\. (\d+)$", value)
            if span:
                values += [str(i) for i in range(int(span.group(1)), int(span.group(2)) + 1)]
            elif operator == "!":
                values += alternatives(value.replace("$", p.name))
        return values, all(line[1] != "!-" for line in found)

    def statements(self, call, operator):
        found = [line for line in self.lines if line[1] == operator and fnmatch.fnmatchcase(call.symbol, line[0])]
        self.used.update(line[3] for line in found)
        return [line[2] for line in found]

    def check(self):
        unused = [f"{self.path}:{line[3]}: fits no parameter: {line[0]}" for line in self.lines if line[3] not in self.used]
        if unused:
            raise SystemExit("\n".join(unused))


def alternatives(value):
    """The values that one with {A|B} in it stands for: one with A, one with B."""
    choice = re.search(r"\{([^{}]*\|[^{}]*)\}", value)
    if choice is None:
        return [value]
    before, after = value[:choice.start()], value[choice.end():]
    return [whole for one in choice.group(1).split("|") for whole in alternatives(before + one + after)]


def is_async(model, call):
    while call.status == "forward":
        call = model.by_symbol(call.row.forward)
    return getattr(call.row, "async")


def shown(expression):
    """An expression as the name of a case."""
    return re.sub(r"\bc\.|\"|<[^>]*>|[{}]", lambda m: "'" if m.group(0) == '"' else "", expression).replace(" ", "")


def case(model, arguments, call):
    """The function that makes the call, and the names of its variations after the valid one."""
    declared, switched, names = [], [], []

    def other(p, label, statement):
        names.append(f"{p.name}={label}")
        switched.append(f"    case {len(names)}: {statement} break;")

    for p in call.params:
        kind = model.handles[p.base].kind if p.stars == 0 and p.base in model.handles else ""
        value = arguments.value(call, p)
        if value is None and kind:
            value = f"c.{kind}()"
        if value is None and p.stars == 1 and not p.const and p.cls != "VOID":
            value = f'c.Out<{p.base}>("{p.name}")'
        if value is None:
            raise SystemExit(f"{arguments.path}: no argument for {call.symbol}.{p.name} ({p.type})")
        declared.append(f"  {p.type} {p.name} = ({p.type})({value});")
        values, own = arguments.others(call, p)
        if own and (kind or p.stars or p.cls == "CALLBACK"):
            other(p, "NULL", f"{p.name} = {{}};")
        if own and kind:
            other(p, "destroyed", f"c.Destroy{kind}({p.name});")
        for v in values:
            other(p, shown(v), f"{p.name} = ({p.type})({v});")
    lines = [f"void Call_{call.symbol}(Case& c) {{"] + declared
    lines += ["  " + s for s in arguments.statements(call, "<")]
    if switched:
        lines += ["  switch (c.variation()) {"] + switched + ["    default: break;", "  }"]
    if is_async(model, call):
        lines.append("  c.ErrorsMayComeLater();")
    lines.append(text.wrap(f"  c.Called({call.symbol}(", [p.name for p in call.params], "));", "      "))
    after = arguments.statements(call, ">")
    if after:
        lines += ["  if (c.ok()) {"] + ["    " + s for s in after] + ["  }"]
    return lines + ["}", ""], names


def emit(model, args):
    arguments = Arguments(args.arguments)
    out, tables = {}, []
    for family in model.families:
        body, rows = [], []
        for call in model.family_calls(family.name):
            if effective(model, call)[0] == "unsupported":
                continue
            lines, names = case(model, arguments, call)
            body += lines
            changes = call.row.modifies.param == "context"
            rows.append(f'    {{"{family.name}", "{call.symbol}", {"true" if changes else "false"}, &Call_{call.symbol}, {{{", ".join(text.c_string(n) for n in names)}}}}},')
        body = ["namespace {", ""] + body + ["}  // namespace", ""]
        body += [f"extern const std::vector<CallCases> k_{family.name};", f"const std::vector<CallCases> k_{family.name} = {{"] + rows + ["};"]
        tables.append(family.name)
        out[f"cases_{family.name}.gen.cc"] = text.source(
            ["<cuda.h>", "<cudaProfiler.h>", '"tests/conformance/fixture.h"'], "\n".join(body), "cuda_remote::conformance",
            ["__CUDA_API_VERSION_INTERNAL  // no macros over the exported names"])
    arguments.check()
    lines = [f"extern const std::vector<CallCases> k_{name};" for name in tables]
    lines += ["", "const std::vector<const std::vector<CallCases>*> kAllCases = {"]
    lines += [f"    &k_{name}," for name in tables] + ["};"]
    out["all_cases.gen.cc"] = text.source(['"tests/conformance/fixture.h"'], "\n".join(lines), "cuda_remote::conformance")
    return out
