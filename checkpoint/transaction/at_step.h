// SPDX-License-Identifier: Apache-2.0
// Where a test can stop a tool, to see what becomes of a job if something goes wrong just then.
//
//   CR_TEST_STEPS=FILE     each step appends a line "NUMBER NAME" to FILE; numbers begin at 1
//   CR_TEST_STOP_AT=N      before step N, a number or a name, the tool waits until FILE.go exists, a minute at most
//
// Without CR_TEST_STEPS nothing happens. Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_AT_STEP_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_AT_STEP_H_

#include <cstddef>

namespace cuda_remote::checkpoint {

// `name`: of the step that begins now.
void AtStep(const char* name);

// The same for one of `count` processes: "NAME I/COUNT", with I from 1.
void AtStep(const char* name, size_t index, size_t count);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_AT_STEP_H_
