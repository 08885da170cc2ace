# SPDX-License-Identifier: Apache-2.0
"""server/driver/driver_table.gen.{h,cc}: the real driver as a struct of function pointers."""

from proto_gen import text


def emit(model, args):
    head = ["// Functions of the driver, by exported symbol. Where cuda.h defines a macro of a symbol's name, the",
            "// member for the first version is called SYMBOL_v1; the plain name is what the macro makes of it.",
            "struct DriverTable {"]
    for c in model.calls:
        head.append(text.wrap(f"  CUresult (CUDAAPI* {c.member})(", [f"{p.type} {p.name}" for p in c.params], ");", "      "))
    head += ["};", "",
             "// One entry of the table, for the loader.",
             "struct DriverFunction {",
             "  const char* symbol;",
             "  size_t offset;   // of the pointer in DriverTable",
             "  void* missing;   // stands in if the driver does not export the symbol",
             "};",
             f"inline constexpr size_t kDriverFunctions = {len(model.calls)};",
             "extern const DriverFunction kDriverFunctionTable[kDriverFunctions];", ""]
    body = ["// Logs the name of a function that the driver lacks, once (driver_table.cc).",
            "CUresult ReportMissingFunction(size_t index);", "", "namespace {", ""]
    for i, c in enumerate(model.calls):
        body.append(text.wrap(f"CUresult CUDAAPI Missing_{c.symbol}(", [p.type for p in c.params],
                              f") {{ return ReportMissingFunction({i}); }}"))
    body += ["", "}  // namespace", "", "const DriverFunction kDriverFunctionTable[kDriverFunctions] = {"]
    for c in model.calls:
        body.append(f"    {{{text.c_string(c.symbol)}, offsetof(DriverTable, {c.member}), "
                    f"reinterpret_cast<void*>(&Missing_{c.symbol})}},")
    body += ["};", ""]
    return {
        "driver_table.gen.h": text.header("server/driver/driver_table.gen.h",
                                          ["<cstddef>", '"proto/api/cuda_versions.h"'], "\n".join(head), "cuda_remote::server"),
        "driver_table.gen.cc": text.source(['"server/driver/driver_table.gen.h"'], "\n".join(body), "cuda_remote::server"),
    }
