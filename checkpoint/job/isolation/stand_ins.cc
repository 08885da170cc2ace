// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/isolation/stand_ins.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "checkpoint/job/isolation/loader_cache.h"
#include "proto/base/read_file.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/private_folder.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kOwnLoaderCache[] = "/lib/ld.so.cache";  // in a job's folder

constexpr char kNvml[] = "libnvidia-ml.so";
// What programs ask for; those with a version are what they cannot do without.
constexpr const char* kNames[] = {"libcuda.so.1", "libnvidia-ml.so.1", "libcuda.so", "libnvidia-ml.so"};
constexpr size_t kNeededNames = 2;
// Where drivers, containers and toolkits put the libraries.
constexpr const char* kFolders[] = {"/usr/lib/x86_64-linux-gnu",
                                    "/usr/lib/x86_64-linux-gnu/nvidia/current",
                                    "/usr/lib64",
                                    "/usr/lib64/nvidia",
                                    "/usr/lib",
                                    "/usr/lib/nvidia",
                                    "/usr/local/lib",
                                    "/usr/local/lib64",
                                    "/usr/local/nvidia/lib",
                                    "/usr/local/nvidia/lib64",
                                    "/usr/local/cuda/compat",
                                    "/usr/lib/wsl/lib",
                                    "/run/opengl-driver/lib"};
// Variables with the folder of an installation that may have libraries of its own.
constexpr const char* kInstallations[] = {"CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"};

std::string ReadBytes(const std::string& path) {
  std::string bytes;
  ReadWholeFile(path, &bytes);
  return bytes;
}

// The library of ours for a driver library called `name`.
std::string OursFor(const std::string& name) {
  return FindCompanion(name.compare(0, sizeof(kNvml) - 1, kNvml) == 0 ? kNvmlLibrary : kClientLibrary);
}

std::string RealPath(const std::string& path) {
  char* const real = realpath(path.c_str(), nullptr);
  const std::string found = real ? real : "";
  free(real);
  return found;
}

bool IsPlainFile(const std::string& path) {
  struct stat facts;
  return stat(path.c_str(), &facts) == 0 && S_ISREG(facts.st_mode);
}

std::vector<std::string> Folders() {
  std::vector<std::string> folders(std::begin(kFolders), std::end(kFolders));
  for (const char* name : kInstallations) {
    const char* const value = getenv(name);
    if (!value || *value != '/') continue;
    for (const char* below : {"/lib", "/lib64", "/compat"}) folders.push_back(std::string(value) + below);
  }
  const char* const path = getenv("LD_LIBRARY_PATH");
  std::istringstream list(path ? path : "");
  for (std::string folder; std::getline(list, folder, ':');) {
    if (!folder.empty() && folder[0] == '/') folders.push_back(folder);
  }
  return folders;
}

// Collects what is to be covered.
class Covers {
 public:
  Covers(const std::string& directory, Job* job, std::vector<Mount>* mounts)
      : own_folder_(RealPath(directory) + "/"), job_(job), mounts_(mounts) {}

  // `path` may be a link, or not be there. Returns whether it is there.
  bool Add(const std::string& path, const std::string& name) {
    const std::string target = RealPath(path), ours = OursFor(name);
    if (target.empty() || !IsPlainFile(target)) return false;
    // Links of ours, and of another job's that this one was started in.
    if (target == OursFor("libcuda.so.1") || target == OursFor(kNvml)) return true;
    if (target.compare(0, own_folder_.size(), own_folder_) == 0 || !known_.insert(target).second) return true;
    mounts_->push_back({ours, target});
    StandIn* const noted = job_->add_stand_ins();
    noted->set_path(target);
    noted->set_nvml(ours == OursFor(kNvml));
    return true;
  }

 private:
  const std::string own_folder_;
  Job* const job_;
  std::vector<Mount>* const mounts_;
  std::set<std::string> known_;
};

// The place where the job sees its folder "lib".
absl::Status MakeMountPoint(const std::string& place) {
  if (geteuid() != 0 || place.compare(0, 5, "/run/") != 0) return ToAbsl(CheckFolder(place, FolderUse::kMake));
  struct stat facts;
  if (mkdir(place.c_str(), 0755) != 0 && errno != EEXIST) return ErrnoStatus("cannot make the folder " + place);
  if (lstat(place.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode) && WhyNotTrusted(facts).empty()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(place + " is not a folder of root's own");
}

}  // namespace

absl::Status PlanStandIns(const std::string& directory, Job* job, std::vector<Mount>* mounts) {
  mounts->clear();
  const auto noted = job->stand_ins();
  job->clear_stand_ins();
  const std::string place = JobMountPoint();
  CR_RETURN_IF_ERROR(MakeMountPoint(place));
  mounts->push_back({directory + "/lib", place});

  Covers covers(directory, job, mounts);
  const std::string cache = ReadBytes(kLoaderCache);
  std::vector<CachedLibrary> cached;
  const bool known_cache = ReadLoaderCache(cache, &cached);
  std::set<std::string> found;
  for (const CachedLibrary& library : cached) {
    for (const char* name : kNames) {
      if (library.name == name && covers.Add(library.path, name)) found.insert(name);
    }
  }
  for (const std::string& folder : Folders()) {
    for (const char* name : kNames) covers.Add(folder + "/" + name, name);
  }
  for (const StandIn& stand_in : noted) covers.Add(stand_in.path(), stand_in.nvml() ? kNvml : kNames[0]);

  bool missing = false;
  for (size_t i = 0; i < kNeededNames; ++i) missing = missing || !found.count(kNames[i]);
  if (!missing || !known_cache) return absl::OkStatus();
  std::vector<CachedLibrary> more;
  for (const char* name : kNames) {
    if (!found.count(name)) more.push_back({name, place + "/" + name});
  }
  std::string text;
  if (!AddToLoaderCache(cache, more, &text)) return absl::OkStatus();
  const std::string path = directory + kOwnLoaderCache;
  unlink(path.c_str());
  std::ofstream out(path, std::ios::binary);
  if (!out.write(text.data(), std::streamsize(text.size())).flush() || chmod(path.c_str(), 0644) != 0) {
    return ErrnoStatus("cannot write " + path);
  }
  mounts->push_back({path, kLoaderCache});
  return absl::OkStatus();
}

bool HasOwnLoaderCache(const Job& job) {
  return !job.directory().empty() && access((job.directory() + kOwnLoaderCache).c_str(), F_OK) == 0;
}

std::string SeenByJob(const Job& job, const std::string& path) {
  for (const StandIn& stand_in : job.stand_ins()) {
    if (stand_in.path() == path) return OursFor(stand_in.nvml() ? kNvml : kNames[0]);
  }
  return path;
}

}  // namespace cuda_remote::checkpoint
