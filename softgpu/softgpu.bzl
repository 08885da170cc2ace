# SPDX-License-Identifier: Apache-2.0
"""How the library's sources are compiled: nothing but what is marked is exported."""

SOFTGPU_COPTS = [
    "-fvisibility=hidden",
    "-fno-semantic-interposition",
]

# cuda.h makes no macros of the names that are exported here, in whatever order headers are included.
SOFTGPU_DEFINES = ["__CUDA_API_VERSION_INTERNAL"]
