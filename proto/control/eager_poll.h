// SPDX-License-Identifier: Apache-2.0
// Lets gRPC look at its sockets for a moment before it sleeps, in processes that carry tunnels.
//
// A thread that waits for the next message sleeps in epoll_wait, and waking it takes 10 to 30 us on a machine whose
// processors are idle: more than all the work of a round trip. gRPC has no setting for this, so these processes bring
// an epoll_wait of their own, which libgrpc finds before the C library's. It looks again and again for a bounded,
// adaptive time, by the rule of the rings (proto/ring/spin.h): not at all on one or two processors, and a quiet
// connection costs nothing. Were libgrpc to sleep in another way, everything would still work, only slower.
//
// Not part of the client library: there epoll_wait is the application's.
#ifndef CUDA_REMOTE_PROTO_CONTROL_EAGER_POLL_H_
#define CUDA_REMOTE_PROTO_CONTROL_EAGER_POLL_H_

namespace cuda_remote::control {

// From here on epoll_wait looks before it sleeps. Call it in main; cannot fail.
void PollEagerly();

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_EAGER_POLL_H_
