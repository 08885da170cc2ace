# SPDX-License-Identifier: Apache-2.0
"""server/worker/calls: the declarations of the hand-written handlers, and how server/dispatch calls them."""

from proto_gen import text
from proto_gen.emit_server import custom_handlers, parameters

HEADER = "server/worker/calls/handlers.gen.h"


def function(message):
    return message if message.startswith("Op") else "Custom_" + message


def emit(model, args):
    handlers = custom_handlers(model)
    lines = ["// Hand-written handlers, defined in the files beside this one; a missing one is a link error. What they are given",
             "// and what they fill in: server/dispatch/custom_calls.gen.h."]
    lines += [text.wrap(f"CUresult {function(message)}(", ["WorkerSession& session", *parameters(message)], ");") for _, message in handlers]
    lines += ["", "// All of them, for this session, which outlives what it gives.",
              "std::unique_ptr<CustomCalls> CallsOf(WorkerSession& session);"]
    includes = ["<cuda.h>", "<memory>", '"server/dispatch/custom_calls.gen.h"', '"server/worker/session/worker_session.h"']
    calls = ["namespace {", "", "class WorkerCalls final : public CustomCalls {", " public:",
             "  explicit WorkerCalls(WorkerSession& session) : session_(session) {}"]
    for member, message in handlers:
        calls += ["  " + text.wrap(f"CUresult {member}(", parameters(message), ") override {").replace("\n", "\n  "),
                  f"    return server::{function(message)}(session_, request, in, out, reply);", "  }"]
    calls += ["", " private:", "  WorkerSession& session_;", "};", "", "}  // namespace", "",
              "std::unique_ptr<CustomCalls> CallsOf(WorkerSession& session) { return std::make_unique<WorkerCalls>(session); }"]
    return {
        "handlers.gen.h": text.header(HEADER, includes, "\n".join(lines), "cuda_remote::server"),
        "handlers.gen.cc": text.source([f'"{HEADER}"'], "\n".join(calls), "cuda_remote::server"),
    }
