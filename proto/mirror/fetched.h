// SPDX-License-Identifier: Apache-2.0
// What the one byte of a reply to a request that waits for the GPU says of the pages of managed memory that the
// request's payload asks for.
#ifndef CUDA_REMOTE_PROTO_MIRROR_FETCHED_H_
#define CUDA_REMOTE_PROTO_MIRROR_FETCHED_H_

namespace cuda_remote::mirror {

// They are in the file.
constexpr char kFetched = 1;
// The same, and kernels that are launched next use the file's pages themselves.
constexpr char kFetchedInPlace = 2;

}  // namespace cuda_remote::mirror

#endif  // CUDA_REMOTE_PROTO_MIRROR_FETCHED_H_
