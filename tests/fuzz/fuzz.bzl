# SPDX-License-Identifier: Apache-2.0
"""fuzz_test: a fuzz target run for a bounded time."""

def fuzz_test(name, srcs, deps, seconds = 5, linkopts = []):
    """A test that gives `srcs` (LLVMFuzzerTestOneInput and FuzzSeeds) random input for `seconds`."""
    native.cc_test(
        name = name,
        srcs = srcs + ["//tests/fuzz:standalone.cc", "//tests/fuzz:seeds.h"],
        args = ["--seconds", str(seconds)],
        linkopts = linkopts,
        deps = deps,
    )
