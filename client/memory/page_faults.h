// SPDX-License-Identifier: Apache-2.0
// The kernel's userfaultfd for mappings of a memory file: accesses of this process to pages that are not mapped, and
// writes to protected ones, wait until this process's own thread has dealt with them. That holds for system calls too,
// which with memory protection (mprotect) and a signal handler would fail with EFAULT.
//
// It needs CAP_SYS_PTRACE, access to /dev/userfaultfd, or vm.unprivileged_userfaultfd=1, and Linux 6.4; or somebody who
// passes /dev/userfaultfd to this process. Without any of these, a process may still watch the accesses of its own
// code, but those of its system calls fail with EFAULT. Registered ranges are ordinary memory again after Close.
//
// Not thread-safe, except that one thread may use Next while others use the rest.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_PAGE_FAULTS_H_
#define CUDA_REMOTE_CLIENT_MEMORY_PAGE_FAULTS_H_

#include <cstdint>
#include <functional>
#include <utility>

namespace cuda_remote::client {

class PageFaults {
 public:
  static constexpr uint64_t kPage = 4096;

  // Gets /dev/userfaultfd from somebody who may open it; -1 if there is nobody.
  using DeviceSource = std::function<int()>;

  // Which accesses must be reported.
  enum class Accesses {
    kAll,      // those of system calls, too
    kProgram,  // if those of system calls cannot be, only the program's own
  };

  // Whether this process may use it and the kernel can do all of the below: tries it out.
  static bool Supported(const DeviceSource& source = nullptr, Accesses accesses = Accesses::kAll);

  // A descriptor for these accesses, -1 if this process may not have one. `flags`: O_CLOEXEC, O_NONBLOCK.
  static int OpenDescriptor(const DeviceSource& source, Accesses accesses, int flags);

  explicit PageFaults(DeviceSource source = nullptr, Accesses accesses = Accesses::kAll)
      : source_(std::move(source)), accesses_(accesses) {}
  ~PageFaults() { Close(); }
  PageFaults(const PageFaults&) = delete;
  PageFaults& operator=(const PageFaults&) = delete;

  // Who is asked for the device if this process may not open it itself, and what must be reported. Before Open.
  void SetSource(DeviceSource source, Accesses accesses) {
    source_ = std::move(source);
    accesses_ = accesses;
  }
  bool Open();
  // Ends all waiting. The ranges that are registered must be unregistered first: a child made by fork may have the
  // descriptor still.
  void Close();
  bool open() const { return fd_ >= 0; }

  // From now on, faults in the range are reported. It must be a shared mapping of a memory file.
  bool Register(uint64_t address, uint64_t bytes);
  // Not any more; whoever waits goes on.
  void Unregister(uint64_t address, uint64_t bytes);

  struct Fault {
    uint64_t page;  // its address
    bool is_write;  // the access is one
    bool protect;   // the page is mapped, but protected against writes
  };
  // Waits for the next fault. False after Interrupt. `look` is called before each attempt to take one, so that what it
  // sees is not newer than the fault.
  bool Next(Fault* fault, const std::function<void()>& look = nullptr);
  void Interrupt();

  // Maps pages that the file has, protected against writes or not, and lets those that wait for them go on. Pages that
  // are mapped already stay as they are. False if the file does not have one of them.
  bool Map(uint64_t address, uint64_t bytes, bool protect);
  // Takes the protection away, and lets those go on that wait.
  void Unprotect(uint64_t address, uint64_t bytes);
  // Lets those go on that wait for a page.
  void Wake(uint64_t address, uint64_t bytes);
  // Takes the mapping of pages away; the file keeps them.
  static void Unmap(uint64_t address, uint64_t bytes);

 private:
  DeviceSource source_;
  Accesses accesses_;
  int fd_ = -1;
  int event_ = -1;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_PAGE_FAULTS_H_
