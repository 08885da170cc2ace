# SPDX-License-Identifier: Apache-2.0
"""client/entry: one exported function for each entry point, and the lists of them."""

from proto_gen import text
from proto_gen.emit_bodies import body_name


def entry_body(model, call, per_thread):
    args = [f"VirtualExec({p.name})" if p.type == "CUgraphExec" else p.name for p in call.params]
    if call.status == "unsupported":
        return f"Call::Unsupported({text.c_string(call.symbol)}, {text.c_string(call.reason)})"
    target = call
    if call.status == "forward":
        target = model.by_symbol(call.row.forward)
        if target.status == "unsupported":
            return f"Call::Unsupported({text.c_string(call.symbol)}, {text.c_string(target.reason)})"
    if target.per_thread:
        args.append("true" if per_thread else "false")
    return f"{body_name(target)}({', '.join(args)})"


def exported(model, call, numbers):
    lines = []
    suffixes = [("", False)] + ([("_" + call.per_thread, True)] if call.per_thread else [])
    for suffix, per_thread in suffixes:
        lines.append(text.wrap(f"CR_EXPORT CUresult CUDAAPI {call.symbol}{suffix}(", [f"{p.type} {p.name}" for p in call.params],
                               ") {", "    "))
        lines.append(f"  CR_RETURN_TRACED({numbers[call.symbol + suffix]}, {entry_body(model, call, per_thread)});")
        lines.append("}")
    return lines


def family_file(model, family, numbers):
    lines = ['extern "C" {', ""]
    for c in model.family_calls(family.name):
        lines += exported(model, c, numbers)
    lines += ["", '}  // extern "C"']
    includes = ["<cuda.h>", "<cudaProfiler.h>", '"client/calls/bodies.gen.h"', '"client/entry/export.h"']
    return text.source(includes, "\n".join(lines), "cuda_remote::client", ["__CUDA_API_VERSION_INTERNAL  // no macros over the exported names"])


def emit(model, args):
    symbols = exports(model)
    # The number by which client/trace knows each entry point.
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    out = {}
    for family in model.families:
        out[f"entry_{family.name}.gen.cc"] = family_file(model, family, numbers)
    lines = ['extern "C" {', ""]
    for u in model.undocumented:
        lines.append(f"CR_EXPORT CUresult CUDAAPI {u.symbol}() {{")
        lines.append(f"  CR_RETURN_TRACED({numbers[u.symbol]}, "
                     f"Call::Unsupported({text.c_string(u.symbol)}, \"no description of this entry point\"));")
        lines.append("}")
    lines += ["", '}  // extern "C"']
    out["entry_undocumented.gen.cc"] = text.source(['"client/entry/export.h"'], "\n".join(lines),
                                                   "cuda_remote::client", ["__CUDA_API_VERSION_INTERNAL"])
    # Declared first, or constants would be this file's own.
    lines = ["extern const uint32_t kNameCount;", "extern const char* const kNames[];", "",
             f"const uint32_t kNameCount = {len(symbols)};", "const char* const kNames[] = {"]
    lines += [f"    {text.c_string(symbol)}," for symbol in symbols] + ["};"]
    out["trace_names.gen.cc"] = text.source(["<cstdint>"], "\n".join(lines), "cuda_remote::client::trace")
    out["libcuda.lds"] = "{\n  global:\n" + "".join(f"    {s};\n" for s in symbols) + "  local:\n    *;\n};\n"
    out["exports.txt"] = "".join(s + "\n" for s in symbols)
    return out


def exports(model):
    symbols = []
    for c in model.calls:
        symbols.append(c.symbol)
        if c.per_thread:
            symbols.append(c.symbol + "_" + c.per_thread)
    return sorted(symbols + [u.symbol for u in model.undocumented])
