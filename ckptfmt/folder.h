// The folders that an image is written in: making DIR.partial, giving it the image's name, and what crashes leave
// behind.
#ifndef CUDA_REMOTE_CKPTFMT_FOLDER_H_
#define CUDA_REMOTE_CKPTFMT_FOLDER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/file.h"

namespace cuda_remote::ckptfmt {

// DIR without trailing slashes, and with symbolic links resolved if it exists.
std::string ImagePath(const std::string& dir);

// Whether `dir` is an image: a folder with a manifest.
bool IsImage(const std::string& dir);

// If a crash left the image that was to be replaced under DIR.old and nothing under DIR, puts it back.
absl::Status PutBackOldImage(const std::string& dir);

// Makes an empty DIR.partial, locked until the descriptor is closed. Removes a dead one first.
absl::StatusOr<Fd> MakePartial(const std::string& dir);

// Gives DIR.partial the name DIR, in place of an image or an empty folder that has it. On the disk when it returns.
absl::Status Publish(const std::string& dir);

// Removes DIR.partial with all in it; only its own kind of files.
absl::Status RemovePartial(const std::string& dir);

// Plain files below `folder`/`sub`, as paths from `folder`, sorted. Fails for anything that is neither file nor folder.
absl::StatusOr<std::vector<std::string>> ListFiles(const std::string& folder, const std::string& sub,
                                                   std::vector<std::string>* folders);

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_FOLDER_H_
