// SPDX-License-Identifier: Apache-2.0
// What CRIU has found out about this kernel, kept for its next start.
//
// CRIU tries the kernel's features each time it starts, some of them in network namespaces of their own: 0.04 s, more
// than half of a small restore. It keeps what it finds in /run/criu.kdat, but only where /run is a tmpfs, which ends
// with the system; in containers it often is none. There, a CRIU is started once where /run is a tmpfs of its own, what
// it writes is kept in /run under a name that no other boot, container start or CRIU has, and is shown as
// /run/criu.kdat in a job's mount namespace.
//
// All of this is for speed only: what goes wrong leaves CRIU to find out by itself. Needs root.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_FACTS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_FACTS_H_

#include <sys/types.h>

#include <string>

namespace cuda_remote::checkpoint {

// Where what `criu` found out is kept; empty where CRIU keeps it itself, and where nothing can be kept. Call it outside
// of a job's namespaces. Thread-safe.
std::string CriuFactsPath(const std::string& criu);

// In a mount namespace of the job's own: shows what is kept at `path`, if there is something, to a CRIU that starts
// there from now on. Does nothing for an empty path.
void ShowCriuFacts(const std::string& path);

// Makes what the next CRIU can be shown, or lets CRIU make its own file, in a process of its own, unless it is there:
// once after the start of a system or container. Made before the pause of a live checkpoint, and after a dump or
// restore, beside whatever comes then. The end of it waits for that process (0.2 s).
class CriuFacts {
 public:
  CriuFacts();
  ~CriuFacts();
  CriuFacts(const CriuFacts&) = delete;
  CriuFacts& operator=(const CriuFacts&) = delete;

 private:
  pid_t maker_ = 0;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_FACTS_H_
