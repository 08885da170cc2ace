// SPDX-License-Identifier: Apache-2.0
#include "client/core/thread_state.h"

#include <pthread.h>

#include <atomic>
#include <new>

#include "client/core/gate.h"
#include "client/core/session.h"

namespace cuda_remote::client {
namespace {

// A plain pointer has no destructor, so it stays valid through the exit handlers of the main thread.
thread_local ThreadState* t_state = nullptr;

void DestroyState(void* state) {
  t_state = static_cast<ThreadState*>(state);  // the session's farewell may look it up
  Session::ThreadEnds(t_state);
  delete t_state;
  t_state = nullptr;
}

pthread_key_t StateKey() {
  static const pthread_key_t key = [] {
    pthread_key_t new_key;
    pthread_key_create(&new_key, DestroyState);
    return new_key;
  }();
  return key;
}

}  // namespace

ThreadState* ThreadState::Get() {
  if (!t_state) {
    static std::atomic<unsigned> threads{0};
    t_state = new (std::nothrow) ThreadState;
    if (t_state) t_state->lane = threads.fetch_add(1, std::memory_order_relaxed) % Gate::kLanes;
    // The key's only job is to run DestroyState when a thread other than the main one ends.
    if (t_state) pthread_setspecific(StateKey(), t_state);
  }
  return t_state;
}

}  // namespace cuda_remote::client
