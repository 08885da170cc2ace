// SPDX-License-Identifier: Apache-2.0
// The GPU side of mpi_stencil, which nvcc compiles; the rest is compiled by the MPI's own compiler.
#ifndef CUDA_REMOTE_TESTS_APPS_MPI_STENCIL_H_
#define CUDA_REMOTE_TESTS_APPS_MPI_STENCIL_H_

#include <cuda_runtime.h>

// One step of heat diffusion: `rows` rows of `width`, with a halo row above and one below. Adds to *sum the bits of
// what it has written, and puts the greatest change into *change (as an integer: floats that are not negative are
// ordered so).
cudaError_t LaunchDiffuse(const float* in, float* out, int width, int rows, unsigned long long* sum, unsigned* change,
                          cudaStream_t stream);

#endif  // CUDA_REMOTE_TESTS_APPS_MPI_STENCIL_H_
