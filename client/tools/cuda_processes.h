// The processes of a job that have a session with a GPU server. So far a job is saved or moved with one of them at most;
// with more, the tools refuse by naming them.
#ifndef CUDA_REMOTE_CLIENT_TOOLS_CUDA_PROCESSES_H_
#define CUDA_REMOTE_CLIENT_TOOLS_CUDA_PROCESSES_H_

#include <string>
#include <vector>

#include "client/tools/job.pb.h"

namespace cuda_remote::client::tools {

struct CudaProcess {
  int pid = 0;  // as seen from here
  std::string program;
};

// In the order of their numbers. `directory`: the job's folder. Processes that this user may not look at are not found.
std::vector<CudaProcess> FindCudaProcesses(const Job& job, const std::string& directory);

// False and *error if there are several. `what`: "saved", "moved".
bool CheckOneCudaProcess(const Job& job, const std::string& directory, const char* what, std::string* error);

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_CLIENT_TOOLS_CUDA_PROCESSES_H_
