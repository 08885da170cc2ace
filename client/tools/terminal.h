// A terminal for a job that had one, where there is none now.
#ifndef CUDA_REMOTE_CLIENT_TOOLS_TERMINAL_H_
#define CUDA_REMOTE_CLIENT_TOOLS_TERMINAL_H_

#include <sys/types.h>

#include <string>

namespace cuda_remote::client::tools {

// The first of the standard streams that is a terminal; -1 if none is.
int OwnTerminal();

// A pseudo-terminal whose output a process copies to standard output, with plain line ends.
struct TerminalCopy {
  int terminal = -1;  // for the job; the caller closes it once the job has it
  pid_t copier = 0;   // a child that ends when nobody has the terminal open any more
};
bool CopyTerminal(TerminalCopy* copy, std::string* error);

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_CLIENT_TOOLS_TERMINAL_H_
