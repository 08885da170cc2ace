// SPDX-License-Identifier: Apache-2.0
// The tools that cr-hostd starts for users, and what users may say of them.
#include <algorithm>

#include "host/requests/host_request.h"

namespace cuda_remote::host {
namespace {

using Names = std::set<std::string>;

constexpr char kSave[] = "cr-checkpoint", kRestart[] = "cr-restart";

Tool Of(const char* name, std::unique_ptr<HostRequest> (*make)(Asked), Names flags, Names values, Names own = {}) {
  Tool tool;
  tool.name = name;
  tool.make = make;
  tool.flags = std::move(flags);
  tool.values = std::move(values);
  tool.own = std::move(own);
  return tool;
}

Tool Started(Tool tool, const char* program, Asker asker = Asker::kUser) {
  tool.program = program;
  tool.asker = asker;
  return tool;
}

Tool RunsJob(Tool tool, bool takes_image) {
  tool.runs_job = true;
  tool.takes_image = takes_image;
  return tool;
}

}  // namespace

const Tool* FindTool(const std::string& name) {
  static const auto* const tools = new std::vector<Tool>{
      RunsJob(Of("run", NewPlain, {"append", "io-uring", "adopt", "no-check"},
                 {"server", "gpu", "name", "output", "error", "address"}),
              false),
      Of("checkpoint", NewSave, {"stop", "tcp-close", "json", "times", "quiet"},
         {"every", "timeout", "compress", "pool"}, {"keep"}),
      RunsJob(Of("restart", NewRestart, {"append", "cut-back", "times", "quiet"},
                 {"server", "gpu", "map", "cut", "output", "error"}),
              true),
      Of("migrate", NewPlain, {"json", "quiet"}, {"to", "gpu", "map", "timeout"}),
      Started(Of("move", NewMove, {}, {"timeout"}, {"to-host", "to", "gpu", "output", "error", "json", "quiet"}),
              kSave),
      Started(Of("group", NewGroup, {}, {}, {"hosts", "json", "quiet", "every", "keep"}), kSave),
      Started(Of("regroup", NewGroup, {}, {}, {"hosts", "quiet"}), kRestart),
      Started(RunsJob(Of(kRejoinTool, NewRestartPart, {"append", "cut-back"}, {"server", "gpu", "map", "cut"},
                         {"output", "error"}),
                      true),
              kRestart, Asker::kGroup),
      Started(Of(kMemberTool, NewSavePart, {"stop", "tcp-close"}, {"timeout", "compress", "pool"}), kSave,
              Asker::kGroup),
      Started(RunsJob(Of(kArriveTool, NewArrival, {}, {"server", "gpu", "output", "error"}), true), kRestart,
              Asker::kMove),
      Started(Of(kGpusTool, NewGpus, {}, {"server", "gpu"}), kRestart, Asker::kMove),
      Of(kDrainTool, NewDrain, {"undo", "dry-run"}, {"to-host", "to", "save", "reason", "timeout"}),
      Of(kHostsTool, NewHosts, {}, {"hosts"}),
  };
  const auto found = std::find_if(tools->begin(), tools->end(), [&](const Tool& tool) { return tool.name == name; });
  return found != tools->end() ? &*found : nullptr;
}

}  // namespace cuda_remote::host
