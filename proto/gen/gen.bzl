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

def messages(name, proto, deps = [], copts = [], imports = [], visibility = None):
    """A library with structs and codecs for the messages of the hand-written file `proto` (messages.py).

    `deps` are what its headers need; `imports` are .proto files of other packages. NAME.descriptors is for tests."""
    stem = proto[:-len(".proto")]
    native.genrule(
        name = name + "_descriptors",
        srcs = [proto, "//proto/gen:options.proto"] + imports,
        outs = [stem + ".descriptors"],
        cmd = "protoc -I. --include_imports --include_source_info --descriptor_set_out=$@ $(location %s) " % proto +
              "$(location //proto/gen:options.proto)",
    )
    native.genrule(
        name = name + "_gen",
        srcs = [proto, stem + ".descriptors"],
        outs = [stem + ".gen.h", stem + ".gen.cc"],
        cmd = "/usr/bin/python3 $(location //proto/gen:messages.py) --descriptors $(location %s.descriptors)" % stem +
              " --proto $(location %s) --out $(RULEDIR)" % proto,
        tools = ["//proto/gen:messages.py"],
    )
    native.cc_library(
        name = name,
        srcs = [stem + ".gen.cc"],
        hdrs = [stem + ".gen.h"],
        copts = copts,
        linkstatic = True,
        visibility = visibility,
        deps = deps + ["//proto/codec:in_order", "//proto/codec:text", "//proto/codec:wire"],
    )
