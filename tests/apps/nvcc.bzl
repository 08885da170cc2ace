# SPDX-License-Identifier: Apache-2.0
"""nvcc_binary: a CUDA program built the way a user would build it."""

def nvcc_binary(name, srcs, hdrs = [], nvccopts = [], archs = [], **kwargs):
    """Builds `srcs` with nvcc into one executable.

    Without `nvccopts` and `archs` these are nvcc's defaults: static CUDA runtime, machine code and PTX of the toolkit's
    oldest architecture.

    Args:
      name: the executable.
      srcs: .cu and .cpp files.
      hdrs: headers that they include, from the root of the workspace.
      nvccopts: more arguments for nvcc, e.g. ["-lcuda"].
      archs: values for -gencode; empty: nvcc's default.
      **kwargs: for the genrule (tags, visibility, testonly).
    """
    flags = nvccopts + ["-gencode " + arch for arch in archs]
    native.genrule(
        name = name + "_nvcc",
        srcs = srcs + hdrs + ["@cuda//:nvcc", "@cuda//:nvcc_inputs"],
        outs = [name],
        # nvcc finds its own parts from where it really is, so the link that Bazel made is followed first.
        cmd = "$$(readlink -f $(location @cuda//:nvcc)) -I. -o $@ {srcs} {flags}".format(
            srcs = " ".join(["$(location {})".format(src) for src in srcs]),
            flags = " ".join(flags),
        ),
        executable = True,
        message = "Compiling CUDA program",
        **kwargs
    )
