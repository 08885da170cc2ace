# SPDX-License-Identifier: Apache-2.0
"""Rules that run the generator."""

# Families of calls, as in proto/api/structs.textproto (a test compares).
FAMILIES = [
    "init", "device", "context", "green", "module", "library", "function", "launch", "memory", "copy", "memset", "pool",
    "virtual", "stream", "event", "graph", "array", "texture", "tensor", "external", "tools",
]

def generate(name, emit, outs, visibility = None, lock = False, suffix = "", arguments = None):
    """Runs one emitter of //proto/gen:generate; `outs` are its files."""
    native.genrule(
        name = name,
        srcs = ["//proto/api:tables"] + (["//proto/calls:LOCK"] if lock else []) + ([arguments] if arguments else []),
        outs = outs,
        cmd = "/usr/bin/python3 $(location //proto/gen:generate.py) --api $$(dirname $(location //proto/api:schema.proto))" +
              " --emit %s --out $(RULEDIR)" % emit + (" --suffix " + suffix if suffix else "") + (" --lock $(location //proto/calls:LOCK)" if lock else "") +
              (" --arguments $(location %s)" % arguments if arguments else ""),
        tools = ["//proto/gen:generate.py", "//proto/gen:sources", "//proto/api:schema.proto"],
        visibility = visibility,
    )
