// SPDX-License-Identifier: Apache-2.0
// For functions that give a Status or an absl::Status, and go on only if what they call succeeds.
//
// Part of the client library.
#ifndef CUDA_REMOTE_PROTO_BASE_STATUS_MACROS_H_
#define CUDA_REMOTE_PROTO_BASE_STATUS_MACROS_H_

#include <utility>

// Returns the status that `expression` gives if it is a failure.
#define CR_RETURN_IF_ERROR(expression)                                    \
  do {                                                                    \
    if (auto cr_status = (expression); !cr_status.ok()) return cr_status; \
  } while (false)

// Gives `variable`, which may be a declaration, the value of the StatusOr that `expression` gives, or returns its
// status.
#define CR_ASSIGN_OR_RETURN(variable, expression) \
  CR_ASSIGN_OR_RETURN_NAMED(CR_STATUS_NAME(cr_status_or_, __LINE__), variable, expression)

#define CR_ASSIGN_OR_RETURN_NAMED(name, variable, expression) \
  auto name = (expression);                                   \
  if (!name.ok()) return name.status();                       \
  variable = *std::move(name)

#define CR_STATUS_NAME(prefix, line) CR_STATUS_NAME_OF(prefix, line)
#define CR_STATUS_NAME_OF(prefix, line) prefix##line

#endif  // CUDA_REMOTE_PROTO_BASE_STATUS_MACROS_H_
