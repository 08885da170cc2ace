// SPDX-License-Identifier: Apache-2.0
// The messages of all calls and operations. In a file that needs few of them, prefer the family's header.
#ifndef CUDA_REMOTE_PROTO_CODEC_CODEC_H_
#define CUDA_REMOTE_PROTO_CODEC_CODEC_H_

#include "proto/codec/calls.gen.h"
#include "proto/codec/operations.gen.h"

#endif  // CUDA_REMOTE_PROTO_CODEC_CODEC_H_
