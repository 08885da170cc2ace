#include "client/entry/runtime.h"

#include "client/session/thread_state.h"

namespace cuda_remote::client {

replay::ObjectKey CurrentContextKey(Call& call) { return {Kind::kContext, call.thread().current_context()}; }

}  // namespace cuda_remote::client
