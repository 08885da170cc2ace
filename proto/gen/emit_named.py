# SPDX-License-Identifier: Apache-2.0
"""proto/codec/named.gen.h: walks over what a request names."""

from proto_gen import text
from proto_gen.emit_traits import constant
from proto_gen.lint import HELD_IN


def names_of(model, one):
    values = model.schema.Names.DESCRIPTOR.enum_types_by_name["Holds"].values_by_number
    return [(names.field, values[names.holds].name) for names in one.traits.names] if one.traits is not None else []


def method(held):
    """MEMORY_OPERATIONS: MemoryOperations."""
    return constant(held)[1:]


def emit(model, args):
    held = model.schema.Names.DESCRIPTOR.enum_types_by_name["Holds"].values
    types = {"bytes": "std::string_view", "NodeParams": "const NodeParams&", "uint64": "uint64_t", "uint32": "uint32_t"}
    lines = ["// What requests name: addresses, functions, events. Which fields of which requests: `names` in the tables of proto/api.",
             "// A visitor has these functions. One that derives from IgnoreNamed defines those that it wants; one that must not",
             "// overlook anything does not derive from it, and does not compile once there is something new.", "struct IgnoreNamed {"]
    lines += [f"  void {method(h.name)}({types[HELD_IN[h.name]]}) {{}}" for h in held]
    lines += ["};", "", "// Hands what the request names to the visitor. False, and nothing handed over, for a request that names nothing or",
              "// is malformed.",
              "template <typename Visitor>", "bool VisitNamed(uint32_t call, std::string_view message, Visitor* visitor) {",
              "  switch (call) {"]
    families = set()
    for one in model.requests():
        names = names_of(model, one)
        if not names:
            continue
        families.add(one.family.name if hasattr(one, "family") else "operations")
        lines += [f"    case {'kCall_' if hasattr(one, 'family') else 'k'}{one.symbol}: {{", f"      {one.symbol}_Request request;",
                  "      if (!request.Decode(message)) return false;"]
        lines += [f"      visitor->{method(held_in)}(request.{field});" for field, held_in in names]
        lines += ["      return true;", "    }"]
    lines += ["    default:", "      return false;", "  }", "}"]
    includes = ["<cstdint>", "<string_view>", "", '"proto/api/call_ids.gen.h"']
    includes += [f'"proto/codec/{family}.gen.h"' for family in sorted(families | {"operations"})]
    out = text.header("proto/codec/named.gen.h", includes, "\n".join(lines), "cuda_remote::wire").replace("#include \n", "\n")
    return {"named.gen.h": out}
