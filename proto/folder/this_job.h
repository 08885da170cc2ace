// SPDX-License-Identifier: Apache-2.0
// How a process of a job finds the job when its environment does not say: after `env -i`, `su -`, or a script that sets
// all variables anew.
//
// In a job that has mounts of its own, the folder "lib" of the job's folder is also seen at JobMountPoint: the
// libraries, and the file "job", two lines with the job's folder and its name. Which server the job uses stands in the
// job's folder (gpu-server). Outside of jobs that place is an empty folder, or is not there.
//
// In other jobs cr-run preloads a library from the folder "lib" (client/preload), which says where that is.
//
// Part of the client library: libc only. Any thread.
#ifndef CUDA_REMOTE_PROTO_FOLDER_THIS_JOB_H_
#define CUDA_REMOTE_PROTO_FOLDER_THIS_JOB_H_

#include <string>

namespace cuda_remote {

// Where jobs of this user see their folder "lib". Does not depend on the environment. Root's is for all users, since
// processes of a job of root's may be other users'.
std::string JobMountPoint();

// A library of cr-run's in the folder "lib" of the job's folder, which programs of jobs without mounts have in
// LD_PRELOAD; and the function in it that returns its path, without arguments, as a const char* that may be null.
inline constexpr char kPreloadedLibrary[] = "libcuda-remote-preload.so";
inline constexpr char kPreloadedLibraryPath[] = "cuda_remote_preloaded";

// The job that this process belongs to by its preloaded library, or by what it sees at a mount point. False if there is
// none.
bool FindThisJob(std::string* directory, std::string* name);

// Where processes of the job in `directory` put their sockets: its folder "user", which is the job's user's, if root
// has started the job for that user; else `directory` itself.
std::string SocketFolder(const std::string& directory);

// The text of the file "job".
std::string ThisJobText(const std::string& directory, const std::string& name);

// The server that the job in `directory` uses now (its file gpu-server), and its only GPU, -1: all. False if that
// cannot be read.
bool ReadGpuServer(const std::string& directory, std::string* address, int* gpu);

// The file beside a relay's socket that names the server behind it: "relay.server" for "relay.sock".
std::string ServerNameFile(const std::string& socket_path);

// The server at `address` (as in CUDA_REMOTE_SERVER) as its user named it: HOST:PORT for the socket of a relay that a
// tool has started (ServerNameFile), else `address` itself.
std::string NamedServer(const std::string& address);

// The scope in which sessions of the job share (kOpShareIn), 32 hexadecimal digits, written when the job is restarted
// or moved: from the third line of its file gpu-server, so that server and scope change in one step. False if there
// is none.
bool ReadSharingScope(const std::string& directory, std::string* scope);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_FOLDER_THIS_JOB_H_
