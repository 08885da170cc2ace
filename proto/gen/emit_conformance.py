# SPDX-License-Identifier: Apache-2.0
"""tests/conformance: each generated call from stub to handler to a fake driver and back, with every value checked."""

import re

from proto_gen import emit_server, text

KIND = "Kind::k"


def words(expression):
    return set(re.findall(r"[A-Za-z_]\w*", expression))


def count_names(call):
    """Parameters that array lengths are made of."""
    names = set()
    for p in call.params:
        if p.role in ("array", "handles", "bytes"):
            names |= words(p.count)
    return names


def case(model, call):
    counts = count_names(call)
    setup, checks, fills, after, args, nulls = [], [], [], [], [], []
    for p in call.params:
        n, i, t = p.name, p.index, p.base
        a = f"a_{n}"
        out = f"  static {t} {a};"
        if p.role == "scalar":
            value = "3" if n in counts and "attr" not in n else "1" if n in counts else str(41 + i)
            if p.stars:
                setup.append(f"  static void* {a} = reinterpret_cast<void*>(uintptr_t(0x70001000));")
            else:
                setup.append(f"  static const auto {a} = ({t}){value};")
            checks.append(f"    EXPECT_EQ({n}, {a});")
            args.append(a)
        elif p.role in ("handle", "stream"):
            setup.append(f"  static const auto {a} = ({t})VirtualFor({KIND}{p.kind}, {i});")
            checks.append(f"    EXPECT_EQ({n}, ({t})RealFor((uint64_t){a}));")
            args.append(a)
        elif p.role == "string":
            setup.append(f'  static const char* {a} = "text {i}";')
            guard = f"if (g_null) {{ EXPECT_EQ({n}, nullptr); }} else " if p.optional else ""
            checks.append(f"    {guard}EXPECT_STREQ({n}, {a});")
            args.append(nullable(p, a))
        elif p.role in ("struct", "inout") and p.cls == "STRUCT":
            setup += [f"  static {t} {a}, expected_{n};", f"  Pattern(&{a}, sizeof {a}, {i});"]
            for m in p.struct.null:
                setup.append(f"  {a}.{m} = nullptr;")
            if p.struct.handle:
                h = p.struct.handle[0]
                setup.append(f"  std::memset(&{a}, 0, sizeof {a});")
                setup.append(f"  {a}.{h.member} = (decltype({a}.{h.member}))VirtualFor({KIND}{h.kind}, {i});")
            setup.append(f"  expected_{n} = {a};")
            if p.struct.handle:
                setup.append(f"  expected_{n}.{h.member} = (decltype({a}.{h.member}))RealFor((uint64_t){a}.{h.member});")
            got = n if p.stars else f"&{n}"
            guard = f"if (g_null) {{ EXPECT_EQ({n}, nullptr); }} else " if p.optional and p.stars else ""
            checks.append(f"    {guard}EXPECT_EQ(std::memcmp({got}, &expected_{n}, sizeof expected_{n}), 0);")
            args.append(nullable(p, "&" + a) if p.stars else a)
            if p.role == "inout":
                fills.append(f"    Pattern({n}, sizeof *{n}, {i + 64});")
                after.append(f"  EXPECT_TRUE(HasPattern(&{a}, sizeof {a}, {i + 64}));")
            if p.stars and not p.optional:
                nulls.append(len(args) - 1)
        elif p.role in ("value", "inout"):
            setup += [out, f"  {a} = ({t}){41 + i};"]
            checks.append(f"    EXPECT_EQ(*{n}, ({t}){41 + i});")
            args.append(nullable(p, "&" + a))
            if p.role == "inout":
                fills.append(f"    *{n} = ({t}){81 + i};")
                after.append(f"  EXPECT_EQ({a}, ({t}){81 + i});")
        elif p.role == "count":
            setup += [out, f"  {a} = 3;"]
            fills.append(f"    *{n} = 2;")
            after.append(f"  EXPECT_EQ({a}, ({t})2);")
            args.append("&" + a)
        elif p.role in ("array", "handles"):
            expression = p.count.replace("*", "")
            setup.append(f"  static {t} {a}[8];")
            if p.direction == "in":
                if p.role == "handles":
                    setup.append(f"  for (int i = 0; i < 8; ++i) {a}[i] = ({t})VirtualFor({KIND}{p.kind}, {i} + 10 * i);")
                    check = f"for (size_t i = 0; i < size_t({expression}); ++i) EXPECT_EQ({n}[i], ({t})RealFor((uint64_t){a}[i]));"
                else:
                    setup.append(f"  Pattern({a}, sizeof {a}, {i});")
                    check = f"EXPECT_EQ(std::memcmp({n}, {a}, size_t({expression}) * sizeof *{n}), 0);"
                checks.append(f"    if (g_null && {'true' if p.optional else 'false'}) {{ EXPECT_EQ({n}, nullptr); }} else {{ {check} }}")
                args.append(nullable(p, a))
            else:
                setup.append(f"  std::memset({a}, 0x5a, sizeof {a});")
                filled = "2" if p.count.startswith("*") else f"size_t({expression})"
                if p.role == "handles":
                    fills.append(f"    if ({n} != nullptr) for (size_t i = 0; i < {filled}; ++i) "
                                 f"{n}[i] = ({t})RealFor(VirtualFor({KIND}{p.kind}, {i} + 10 * int(i)));")
                    expect = f"EXPECT_EQ({a}[i], ({t})VirtualFor({KIND}{p.kind}, {i} + 10 * int(i)))"
                else:
                    fills.append(f"    if ({n} != nullptr) Pattern({n}, {filled} * sizeof *{n}, {i});")
                    expect = f"EXPECT_TRUE(HasPattern({a}, {('2' if p.count.startswith('*') else 'LENGTH')} * sizeof *{a}, {i}))"
                size = "2" if p.count.startswith("*") else None
                if size is None:
                    size = expression if not words(expression) else re.sub(r"([A-Za-z_]\w*)", r"a_\1", expression)
                expect = expect.replace("LENGTH", f"size_t({size})")
                loop = f"for (size_t i = 0; i < size_t({size}); ++i) " if p.role == "handles" else ""
                after.append(f"  if (!(g_null && {'true' if p.optional else 'false'})) {{ {loop}{expect}; }}")
                end = size
                if p.role == "handles" and p.count.startswith("*"):
                    end = "3"  # what was offered and not needed is NULL
                    after.append(f"  if (!(g_null && {'true' if p.optional else 'false'})) {{ EXPECT_EQ({a}[2], nullptr); }}")
                after.append(f"  EXPECT_TRUE(Untouched({a} + size_t({end}), sizeof *{a}));")
                args.append(nullable(p, a))
        elif p.role == "bytes":
            size = emit_server.size_expression(p)
            here = re.sub(r"\(([a-z]\w*)\)", r"(a_\1)", size)
            setup.append(f"  static char {a}[32];")
            if p.direction == "in":
                setup.append(f"  Pattern({a}, sizeof {a}, {i});")
                checks.append(f"    EXPECT_EQ(std::memcmp({n}, {a}, size_t({size})), 0);")
            else:
                setup.append(f"  std::memset({a}, 0x5a, sizeof {a});")
                fills.append(f"    Pattern({n}, size_t({size}), {i});")
                after += [f"  EXPECT_TRUE(HasPattern({a}, size_t({here}), {i}));", f"  EXPECT_TRUE(Untouched({a} + size_t({here}), 8));"]
            args.append(a)
            nulls.append(len(args) - 1)
        elif p.role == "out":
            setup += [out, f"  {a} = {{}};"]
            fills.append(f"    *{n} = ({t}){81 + i};")
            after.append((f"  if (!g_null) {{ EXPECT_EQ({a}, ({t}){81 + i}); }}" if p.optional else f"  EXPECT_EQ({a}, ({t}){81 + i});"))
            args.append(nullable(p, "&" + a))
            if not p.optional:
                nulls.append(len(args) - 1)
        elif p.role == "out_struct":
            setup += [out, f"  std::memset(&{a}, 0, sizeof {a});"]
            if p.struct.handle:
                h = p.struct.handle[0]
                fills += [f"    std::memset({n}, 0, sizeof *{n});",
                          f"    {n}->{h.member} = (decltype({n}->{h.member}))RealFor(VirtualFor({KIND}{h.kind}, {i}));"]
                after.append(f"  EXPECT_EQ({a}.{h.member}, (decltype({a}.{h.member}))VirtualFor({KIND}{h.kind}, {i}));")
            else:
                fills.append(f"    Pattern({n}, sizeof *{n}, {i});")
                check = f"EXPECT_TRUE(HasPattern(&{a}, sizeof {a}, {i}));"
                after.append(f"  if (!g_null) {{ {check} }}" if p.optional else "  " + check)
            args.append(nullable(p, "&" + a))
            if not p.optional:
                nulls.append(len(args) - 1)
        elif p.role == "creates":
            setup += [out, f"  {a} = {{}};"]
            fills.append(f"    *{n} = ({t})(uintptr_t(0x660000000000) + {i});")
            after += [f"  EXPECT_EQ(KindOf((uint64_t){a}), {KIND}{p.kind});",
                      f"  EXPECT_EQ(g_bound[(uint64_t){a}], 0x660000000000u + {i});",
                      f"  EXPECT_EQ(g_created.count((uint64_t){a}), 1u);"]
            args.append("&" + a)
            nulls.append(len(args) - 1)
        elif p.role == "refers":
            setup += [out, f"  {a} = {{}};"]
            fills.append(f"    *{n} = ({t})RealFor(VirtualFor({KIND}{p.kind}, {i}));")
            after.append(f"  EXPECT_EQ({a}, ({t})VirtualFor({KIND}{p.kind}, {i}));")
            args.append("&" + a)
            nulls.append(len(args) - 1)
        elif p.role == "null":
            args.append("{}")
    row = call.row
    if row.HasField("destroys"):
        after.append(f"  EXPECT_EQ(g_unbound.count((uint64_t)a_{row.destroys.param}), 1u);")
        after.append(f"  EXPECT_EQ(g_destroyed.count((uint64_t)a_{row.destroys.param}), 1u);")
    if row.HasField("modifies"):
        after.append("  EXPECT_EQ(g_modified, 1);")
    has_optional = any(p.optional and p.stars for p in call.params)
    lines = [f"TEST(Conformance, {call.symbol}) {{", "  Reset();"]
    lines += setup
    lines.append(text.wrap(f"  Driver().{call.member} = [](", [f"{p.type} {p.name}" for p in call.params], ") -> CUresult {", "      "))
    lines += ["    ++g_driver_calls;"] + checks + fills
    lines += ["    return CUDA_SUCCESS;", "  };"]
    if not has_optional:
        lines.append("  g_null = false;")
        body = [text.wrap(f"  ASSERT_EQ({call.symbol}(", args, "), CUDA_SUCCESS);", "      "), "  ASSERT_EQ(g_driver_calls, 1);"] + after
        lines += body
    else:
        lines.append("  for (bool null : {false, true}) {")
        lines.append("  Reset();")
        lines.append("  g_null = null;")
        lines += [re.sub(r"^  static .*$", "", s) for s in setup if not s.startswith("  static")]
        lines += [text.wrap(f"  ASSERT_EQ({call.symbol}(", args, "), CUDA_SUCCESS);", "      "), "  ASSERT_EQ(g_driver_calls, 1);"] + after
        lines.append("  }")
    if nulls:
        lines += ["  // A missing result or argument is refused before anything is sent.", "  Reset();"]
        for index in nulls:
            changed = list(args)
            changed[index] = "nullptr"
            lines.append(text.wrap(f"  EXPECT_EQ({call.symbol}(", changed, "), CUDA_ERROR_INVALID_VALUE);", "      "))
        lines.append("  EXPECT_EQ(g_driver_calls, 0);")
    lines += ["}", ""]
    return [line for line in lines if line.strip() or not line]


def nullable(p, argument):
    return f"g_null ? nullptr : {argument}" if p.optional and p.stars else argument


def emit(model, args):
    out = {}
    for family in model.families:
        lines = []
        for call in model.family_calls(family.name):
            if call.status == "generated":
                lines += case(model, call)
        out[f"conformance_{family.name}.gen.cc"] = text.source(
            ["<cuda.h>", "<cudaProfiler.h>", "<gtest/gtest.h>", '"tests/conformance/loopback.h"'],
            "namespace {\n\nusing namespace loopback;\n\n" + "\n".join(lines) + "\n}  // namespace", "cuda_remote",
            ["__CUDA_API_VERSION_INTERNAL  // no macros over the exported names"])
    client = []
    for c in model.calls:
        if c.client_custom:
            types = [p.type for p in c.params] + (["bool"] if c.per_thread else [])
            client.append(text.wrap(f"CUresult __attribute__((weak)) Custom_{c.symbol}(", types, ") { return CUDA_ERROR_NOT_SUPPORTED; }"))
    out["client_stand_ins.gen.cc"] = text.source(['"client/calls/bodies.gen.h"'], "\n".join(client), "cuda_remote::client")
    server = ["namespace {", "", "class StandIns final : public CustomCalls {", " public:"]
    for member, message in emit_server.custom_handlers(model):
        types = ["const Request&", f"const wire::{message}_Request&", f"wire::{message}_Reply*", "ReplyBuilder*"]
        server.append("  " + text.wrap(f"CUresult {member}(", types, ") override {").replace("\n", "\n  "))
        server += ["    return CUDA_ERROR_NOT_SUPPORTED;", "  }"]
    server += ["};", "", "}  // namespace", "", "CustomCalls* StandInCalls() {", "  static StandIns calls;", "  return &calls;", "}"]
    out["server_stand_ins.gen.cc"] = text.source(
        ['"server/dispatch/custom_calls.gen.h"', '"tests/conformance/loopback.h"'], "\n".join(server), "cuda_remote::server")
    return out
