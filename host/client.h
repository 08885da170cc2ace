// SPDX-License-Identifier: Apache-2.0
// An ordinary user's tool asks cr-hostd to do its work (README.md).
//
// For single-threaded tools.
#ifndef CUDA_REMOTE_HOST_CLIENT_H_
#define CUDA_REMOTE_HOST_CLIENT_H_

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "host/request.pb.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::host {

// The options that the user has given to a tool, but --name and --job-dir, which are for Request::job. `tool` as in
// Request::tool.
Request RequestOf(const CLI::App& app, const std::string& tool);
void AddOption(const std::string& name, const std::string& value, Request* request);

class Hostd {
 public:
  // Null if there is no cr-hostd on this machine. Fails if there is one that cannot be used.
  static absl::StatusOr<std::unique_ptr<Hostd>> Connect();
  Hostd(const Hostd&) = delete;
  Hostd& operator=(const Hostd&) = delete;

  // Has cr-hostd do it, with this process's streams, working folder, environment and umask, and passes signals on.
  // Returns the tool's exit code; `failed` if cr-hostd refuses, or ends. `name` is for messages. `elsewhere`, if not
  // null, is set if cr-hostd does nothing for a process like this one; then everything is as before, and nothing was
  // said but *elsewhere.
  int Run(const char* name, Request request, int failed, std::string* elsewhere = nullptr);

  // What there is at these hosts ("HOST,HOST:PORT"; empty: at this one and at those that it knows). Hosts that do not
  // answer are in the reports.
  absl::StatusOr<HostReports> AskForHosts(const std::string& hosts);

 private:
  explicit Hostd(UniqueFd socket) : socket_(std::move(socket)) {}
  const UniqueFd socket_;
};

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_CLIENT_H_
