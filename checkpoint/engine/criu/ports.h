// SPDX-License-Identifier: Apache-2.0
// The TCP ports that a saved job needs free at its restart.
//
// When a connection ends, the kernel keeps its port for a minute (TIME_WAIT), so that packets of the old connection do
// not reach a new one. A job that is stopped and restarted at once would find ports of its own taken in that way, and a
// socket that was made without SO_REUSEADDR cannot be bound then. Where both ends were on this machine no packet is on
// its way any more, and the kernel is asked to let go of the port; for others the restart waits.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PORTS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PORTS_H_

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>

namespace cuda_remote::checkpoint {

// The local ports of the TCP sockets in CRIU's files.img. False if `image` is not such a file. Any input is safe.
bool SavedPorts(std::string_view image, std::set<uint16_t>* ports);

// Returns when no connection that has ended holds one of the ports of this network namespace any more. `waiting` is
// called with such a port, again and again, while one does; false from it ends the wait. False then, or if the kernel
// cannot be asked. Ports that are in use otherwise do not count: the restore finds them, and says so. Needs
// CAP_NET_ADMIN to free a port at once.
bool FreePorts(const std::set<uint16_t>& ports, const std::function<bool(uint16_t port)>& waiting);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PORTS_H_
