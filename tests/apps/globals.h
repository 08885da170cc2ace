// SPDX-License-Identifier: Apache-2.0
// What the two halves of the globals program share.
#ifndef CUDA_REMOTE_TESTS_APPS_GLOBALS_H_
#define CUDA_REMOTE_TESTS_APPS_GLOBALS_H_

// Runs one step of the second half's module; its counters are static and have the same names as the first half's.
void OtherHalfStep(int step);

// Copies the second half's sums out through a kernel: the host never names its variables.
void OtherHalfReport(unsigned long long out[4]);

#endif  // CUDA_REMOTE_TESTS_APPS_GLOBALS_H_
