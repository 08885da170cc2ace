// SPDX-License-Identifier: Apache-2.0
// What the kernel keeps for a process, tells nobody else, and lets nobody else change, and CRIU does not know: how it
// is killed for broken memory, that its memory is merged (KSM) or may not become executable (prctl(2)), that memory
// which it maps later is locked (mlockall(2)), and its personality(2). Also which memory is locked only when it is
// used, which CRIU would lock whole.
//
// The library in CRIU has each process ask while CRIU saves it, and set it again before CRIU lets it go. One line for
// each: "PID NAME VALUE", with numbers in hexadecimal; what is as in a new process is left out.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_OWN_SETTINGS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_OWN_SETTINGS_H_

namespace cuda_remote::checkpoint {

// In a dump: the environment variable with the number of the descriptor that the lines are written to.
constexpr char kNoteSettingsVariable[] = "CUDA_REMOTE_NOTE_SETTINGS";
// In a restore: with the number of the one that they are read from.
constexpr char kOwnSettingsVariable[] = "CUDA_REMOTE_OWN_SETTINGS";
// Where an image has the lines, beside CRIU's files.
constexpr char kOwnSettingsFile[] = "own-settings";

// For the library in CRIU. `thread` is the first one of a process, CRIU traces it, and it stands still.
void NoteOwnSettings(int thread);
void RestoreOwnSettings(int thread);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_OWN_SETTINGS_H_
