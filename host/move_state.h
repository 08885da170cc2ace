// SPDX-License-Identifier: Apache-2.0
// How a move stands at its destination, kept in a folder of root's beyond the life of every process: a link NAME ->
// STATE, which is made or exchanged in one step.
//
// Thread-safe; no state.
#ifndef CUDA_REMOTE_HOST_MOVE_STATE_H_
#define CUDA_REMOTE_HOST_MOVE_STATE_H_

#include <string>

namespace cuda_remote::host {

inline constexpr char kMoveGoesOn[] = "goes-on";  // the source has said so
inline constexpr char kMoveRuns[] = "runs";
inline constexpr char kMoveFailed[] = "failed";

// The name of a move's link: its id as digits.
std::string MoveName(const std::string& id);

// Makes it, if the move has no state yet. False: it has one, or there is no room.
bool BeginMoveState(const std::string& folder, const std::string& id, const char* state);
// Exchanges it.
bool SetMoveState(const std::string& folder, const std::string& id, const char* state);
// Empty: it has none.
std::string MoveStateOf(const std::string& folder, const std::string& id);

// Removes states that are so old that nobody asks for them any more.
void CleanMoveStates(const std::string& folder);

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_MOVE_STATE_H_
