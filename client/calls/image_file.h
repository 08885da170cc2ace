// SPDX-License-Identifier: Apache-2.0
// Files that driver calls name: they are the application's, so they are read on its side.
#ifndef CUDA_REMOTE_CLIENT_CALLS_IMAGE_FILE_H_
#define CUDA_REMOTE_CLIENT_CALLS_IMAGE_FILE_H_

#include <cuda.h>

#include <string>

namespace cuda_remote::client {

// A whole file, as cuModuleLoad, cuLibraryLoadFromFile and cuLinkAddFile take it; one zero byte follows, so that PTX
// text ends. CUDA_ERROR_FILE_NOT_FOUND if it cannot be read.
CUresult ReadImageFile(const char* path, std::string* image);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_IMAGE_FILE_H_
