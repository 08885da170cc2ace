# SPDX-License-Identifier: Apache-2.0
"""proto/api/entry_points.gen.h: every entry point as macro lists, and the table of addresses by name."""

from proto_gen import text


def emit(model, args):
    lines = [text.BANNER + "// Every symbol that the driver exports, as lists for macros X, and a table of them by name and version.",
             "// Define __CUDA_API_VERSION_INTERNAL before cuda.h where the lists are used: its macros would rewrite the names.",
             "#ifndef CUDA_REMOTE_PROTO_API_ENTRY_POINTS_GEN_H_", "#define CUDA_REMOTE_PROTO_API_ENTRY_POINTS_GEN_H_", "",
             '#include "proto/api/proc_address.h"', "",
             "// X(symbol, return type, (parameters), (arguments)) for every symbol with a known signature.",
             "#define CUDA_REMOTE_ENTRY_POINTS(X) \\"]
    for c in model.calls:
        declared = "(" + (", ".join(f"{p.type} {p.name}" for p in c.params) or "void") + ")"
        arguments = "(" + c.arguments() + ")"
        lines.append(f"  X({c.symbol}, CUresult, {declared}, {arguments}) \\")
        if c.per_thread:
            lines.append(f"  X({c.symbol}_{c.per_thread}, CUresult, {declared}, {arguments}) \\")
    lines += ["", "// X(symbol) for the exported names of which no header says more.",
              "#define CUDA_REMOTE_UNDOCUMENTED_ENTRY_POINTS(X) \\"]
    lines += [f"  X({u.symbol}) \\" for u in model.undocumented]
    lines += [""]
    # The table, sorted by name, newest version first.
    rows = []
    for c in model.calls:
        rows.append((c.sig.name, c.sig.since, 0, c.symbol))
        if c.per_thread:
            rows.append((c.sig.name, c.sig.per_thread.since, 1, c.symbol + "_" + c.per_thread))
    for u in model.undocumented:
        if u.name:
            per_thread = 1 if u.symbol.endswith(("_ptsz", "_ptds")) else 0
            rows.append((u.name, u.since, per_thread, u.symbol))
    rows.sort(key=lambda r: (r[0], -r[1], r[2]))
    lines += ["// X(name, CUDA version from which on, 1 for the per-thread variant, symbol), sorted by name, newest first.",
              "#define CUDA_REMOTE_PROC_ADDRESSES(X) \\"]
    lines += [f"  X({text.c_string(r[0])}, {r[1]}, {r[2]}, {r[3]}) \\" for r in rows]
    lines += ["", "#endif  // CUDA_REMOTE_PROTO_API_ENTRY_POINTS_GEN_H_", ""]
    return {"entry_points.gen.h": "\n".join(lines)}
