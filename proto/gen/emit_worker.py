# SPDX-License-Identifier: Apache-2.0
"""server/worker/calls: the declarations of the hand-written handlers, and the table of them for server/dispatch."""

from proto_gen import text
from proto_gen.emit_server import custom_handlers, signature


def function(message):
    return message if message.startswith("Op") else "Custom_" + message


def emit(model, args):
    handlers = custom_handlers(model)
    lines = ["// Hand-written handlers, defined in the files beside this one; a missing one is a link error. What they are given",
             "// and what they fill in: server/dispatch/custom_handlers.gen.h."]
    lines += [signature(f"CUresult {function(message)}(", message, ");") for _, message in handlers]
    lines += ["", "// All of them.", "extern const CustomHandlers kCustomHandlers;"]
    table = ["const CustomHandlers kCustomHandlers = {"] + [f"    {function(message)}," for _, message in handlers] + ["};"]
    header = "server/worker/calls/handlers.gen.h"
    return {
        "handlers.gen.h": text.header(header, ["<cuda.h>", '"server/dispatch/custom_handlers.gen.h"'], "\n".join(lines), "cuda_remote::server"),
        "handlers.gen.cc": text.source([f'"{header}"'], "\n".join(table), "cuda_remote::server"),
    }
