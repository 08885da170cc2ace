# SPDX-License-Identifier: Apache-2.0
"""Every external repository of cuda-remote, in one place. Nothing here downloads anything."""

def cuda_remote_repositories():
    # The distribution's libraries: headers are on the compiler's default path, so a target is only its link options.
    native.new_local_repository(
        name = "system",
        path = "/usr",
        build_file = "//third_party:system.BUILD",
    )

    # The CUDA toolkit: headers, and nvcc for the worker's kernel and the tests.
    native.new_local_repository(
        name = "cuda",
        path = "/usr/local/cuda",
        build_file = "//third_party:cuda.BUILD",
    )
