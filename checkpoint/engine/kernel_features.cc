// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/kernel_features.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "proto/driverabi/job_addresses.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kTimeNamespace[] = "/proc/self/ns/time", kUserfaultDevice[] = "/dev/userfaultfd";
// Managed memory whose home is the GPU: while the process runs, the kernel asks it about accesses there, also of system
// calls.
bool HasManagedMemory(const std::vector<Mapping>& mappings) {
  using driverabi::kManagedBase, driverabi::kManagedBytes;
  return std::any_of(mappings.begin(), mappings.end(), [](const Mapping& mapping) {
    return mapping.begin >= kManagedBase && mapping.begin - kManagedBase < kManagedBytes;
  });
}

bool MayUseUserfaultfd() {
  int fd = int(syscall(SYS_userfaultfd, O_CLOEXEC));
  if (fd < 0) fd = open(kUserfaultDevice, O_RDWR | O_CLOEXEC);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

// An instance of the job's own, which this mounts nowhere.
bool HasDevpts() {
#ifdef SYS_fsopen
  const int fd = int(syscall(SYS_fsopen, "devpts", 1u /* FSOPEN_CLOEXEC */));
  if (fd >= 0) {
    const bool made = syscall(SYS_fsconfig, fd, 6u /* FSCONFIG_CMD_CREATE */, nullptr, nullptr, 0) == 0;
    close(fd);
    return made;
  }
  if (errno != ENOSYS && errno != EPERM) return false;
#endif
  return true;  // not known; a restore finds out
}

struct Feature {
  const char* name;
  std::function<bool(const std::vector<Mapping>& mappings)> used;
  bool of_user;  // whether processes of the user may use it; else whether the kernel has it
  std::function<bool()> here;
  const char* missing;
};

const std::vector<Feature>& Features() {
  static const auto* const features = new std::vector<Feature>{
      {"userfaultfd", HasManagedMemory, true, MayUseUserfaultfd,
       "leave to use userfaultfd, which the job's managed memory needs (access to /dev/userfaultfd, or "
       "vm.unprivileged_userfaultfd=1)"},
      {"time-namespaces", [](const std::vector<Mapping>&) { return access(kTimeNamespace, F_OK) == 0; }, false,
       [] { return access(kTimeNamespace, F_OK) == 0; }, "time namespaces in the kernel (Linux 5.6, CONFIG_TIME_NS)"},
      {"devpts-instances", [](const std::vector<Mapping>&) { return true; }, false, HasDevpts,
       "pseudo-terminals of the job's own (devpts with newinstance, Linux 4.7)"},
  };
  return *features;
}

}  // namespace

std::set<std::string> KernelFeaturesOf(const std::vector<Mapping>& mappings) {
  std::set<std::string> found;
  for (const Feature& feature : Features()) {
    if (feature.used(mappings)) found.insert(feature.name);
  }
  return found;
}

std::vector<std::string> MissingKernelFeatures(const std::set<std::string>& wanted, const Account& user) {
  std::vector<std::string> missing;
  std::set<std::string> unknown = wanted;
  for (const Feature& feature : Features()) {
    if (unknown.erase(feature.name) == 0) continue;
    const auto here = [&] {
      const ActAs rights(feature.of_user ? &user : nullptr);
      return feature.here();
    };
    if (!here()) missing.push_back(feature.missing);
  }
  for (const std::string& name : unknown) missing.push_back("the kernel's feature " + name + ", unknown here");
  return missing;
}

}  // namespace cuda_remote::checkpoint
