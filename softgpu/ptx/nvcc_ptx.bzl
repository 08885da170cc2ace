# SPDX-License-Identifier: Apache-2.0
"""nvcc_ptx: the PTX that nvcc makes of a CUDA file."""

def nvcc_ptx(name, src, arch, nvccopts = []):
    """Makes NAME.ptx of `src` for the virtual architecture `arch`.

    Args:
      name: of the target; the file is NAME.ptx.
      src: a .cu file without own headers.
      arch: "compute_75" and so on.
      nvccopts: more arguments for nvcc.
    """
    native.genrule(
        name = name,
        srcs = [src, "@cuda//:nvcc", "@cuda//:nvcc_inputs"],
        outs = [name + ".ptx"],
        cmd = "$$(readlink -f $(location @cuda//:nvcc)) -ptx -arch={} {} -o $@ $(location {})".format(
            arch,
            " ".join(nvccopts),
            src,
        ),
        message = "Compiling CUDA to PTX",
        testonly = True,
    )
