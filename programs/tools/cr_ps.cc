// SPDX-License-Identifier: Apache-2.0
// cr-ps: what a cr-server is doing, and this user's jobs here. See --help.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/hostd_places.h"
#include "host/client.h"
#include "programs/tools/hosts_list.h"
#include "programs/tools/local_jobs.h"
#include "programs/tools/table_text.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/cli/help.h"
#include "proto/codec/json.h"
#include "proto/codec/text.h"
#include "proto/control/server_control.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/private_folder.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

constexpr int kExitNoServer = 1;
constexpr int kExitUsage = 2;
constexpr int kExitNoSession = 4;

constexpr char kExamples[] = R"(
Examples:
  cr-ps                                     this user's jobs here, and the sessions of this user's cr-server here
  cr-ps --watch 2                           the same every two seconds, until Ctrl-C
  cr-ps --server gpu7:7070 --json
  cr-ps --server unix:/run/cuda-remote      your sessions of root's server here, if it admits you
  cr-ps --end 12 --reason "node goes down"  end session 12
  cr-ps --hosts                             this host and those that its cr-hostd knows: jobs, GPU servers, free space
  cr-ps --hosts node7,node8:7071
  cr-ps --prune                             remove what killed jobs of this user have left here

For your jobs on this machine, PID is the PID on this machine, and cr-checkpoint accepts it. For other jobs, PID is the
one inside the job. STATE is running, unsaved (it cannot be saved), saving, moving or restarting (a tool works on the
job), stopped (by a signal), or killed.

cr-ps shows and ends your own sessions: those of your user or of your client certificate. Operators of the server (its
own user, root, and cr-server --operator) see and end all sessions. With --hosts, this host's cr-hostd asks the cr-hostd
of each other host. It lists your jobs; root and operators (cr-hostd --operator) see all jobs.

Exit codes: 0 ok, 1 no answer from the server or from a host, 2 wrong use, 4 no such session.
)";

// The sessions' processes as far as they are of jobs here, in the order of the list.
std::vector<LocalProcess> ProcessesHere(const std::string& address, const std::vector<LocalJob>& jobs,
                                        const control::ListSessionsReply& list) {
  std::vector<LocalProcess> processes;
  for (const control::SessionInfo& s : list.sessions()) {
    processes.push_back(FindSession(jobs, address, s.id(), int(s.pid()), s.program()));
  }
  return processes;
}

// Of a process of this machine: its session with a GPU server; 0: it has none.
uint64_t SessionOf(const LocalJob& job, int pid) {
  for (const LocalSession& one : job.sessions) {
    if (one.pid == pid) return one.session;
  }
  return 0;
}

void AddJobs(const std::vector<LocalJob>& jobs, JsonWriter* json) {
  json->Line(2);
  json->Begin("jobs", '[');
  for (const LocalJob& job : jobs) {
    json->Line(4);
    json->Begin('{');
    json->Member("directory", job.directory);
    json->Member("name", job.job.name());
    json->MemberIf("pid", job.job.pid());
    if (job.job.has_user()) json->Member("user", uint64_t(job.job.user().id()));
    json->Member("running", job.alive);
    json->MemberIf("server", job.server);
    json->Member("processes", uint64_t(job.processes.size()));
    json->Begin("process_list", '[');
    for (const auto& [inner, pid] : job.processes) {
      json->Begin('{');
      json->Member("pid", pid);
      json->Member("pid_in_job", inner);
      json->Member("program", CommandNameOf(pid));
      json->MemberIf("session", SessionOf(job, pid));
      json->End('}');
    }
    json->End(']');
    json->Member("started_unix_ms", uint64_t(job.job.started_unix_ms()));
    json->MemberIf("saved_unix_ms", job.job.saved_unix_ms());
    json->MemberIf("saved_image", job.job.saved_image());
    json->MemberIf("restarted_from", job.job.image());
    json->MemberIf("no_checkpoint", job.job.no_checkpoint());
    json->Begin("machine_gpu", '[');
    for (const DeviceUser& user : job.device_users) {
      json->Begin('{');
      json->Member("pid", user.pid);
      json->Member("program", user.program);
      json->Member("device", user.device);
      json->End('}');
    }
    json->End(']');
    json->End('}');
  }
  json->End(']');
}

const char* StateText(const LocalJob& job) {
  if (!job.alive) return "killed";
  for (const auto& [tool, state] : {std::pair("cr-checkpoint", "saving"), std::pair("cr-migrate", "moving"),
                                    std::pair("cr-restart", "restarting")}) {
    if (job.tool.compare(0, strlen(tool), tool) == 0) return state;
  }
  if (job.stopped) return "stopped";
  return job.job.no_checkpoint().empty() ? "running" : "unsaved";
}

// This user's jobs on this machine.
void PrintJobs(const std::vector<LocalJob>& jobs) {
  if (jobs.empty()) {
    printf("no jobs of this user on this machine\n");
    return;
  }
  Table table({{"JOB", true},
               {"STATE", true},
               {"PID"},
               {"PROCESSES"},
               {"SAVED"},
               {"AGE"},
               {"SERVER", true},
               {"LAST IMAGE", true},
               {"PROGRAM", true}});
  for (const LocalJob& job : jobs) {
    std::string program;
    for (const std::string& word : job.job.command()) program += (program.empty() ? "" : " ") + Printable(word);
    const std::string image = job.job.saved_image().empty() ? "-" : Printable(job.job.saved_image());
    table.Add({Printable(job.job.name()), StateText(job), std::to_string(job.job.pid()),
               std::to_string(job.processes.size()), Ago(job.job.saved_unix_ms()),
               Age(uint64_t(job.job.started_unix_ms())), job.server.empty() ? "-" : job.server, image, program});
    if (job.processes.size() < 2) continue;
    for (const auto& [inner, pid] : job.processes) {
      const uint64_t session = SessionOf(job, pid);
      // A process that a tool works on is not asked.
      const std::string gpu = !job.tool.empty() ? Printable(job.tool) + " works on the job"
                              : session         ? "session " + std::to_string(session)
                                                : "no GPU session";
      table.Add({"", "", std::to_string(pid)}, CommandNameOf(pid) + ", " + gpu);
    }
  }
  fputs(table.Text().c_str(), stdout);
}

// What a person must know of jobs here besides their sessions.
void PrintWarnings(const std::vector<LocalJob>& jobs) {
  for (const LocalJob& job : jobs) {
    if (!job.alive) printf("%s is left of a job that was killed; cr-ps --prune removes it\n", job.directory.c_str());
    for (const DeviceUser& user : job.device_users) {
      printf("job %s: %s\n", job.job.name().c_str(), ToText(user).c_str());
    }
  }
}

template <typename Numbers>
void AddNumbers(const char* name, const Numbers& numbers, JsonWriter* json) {
  json->Begin(name, '[');
  for (const auto number : numbers) json->Value(number);
  json->End(']');
}

template <typename Numbers>
std::string Listed(const Numbers& numbers) {
  std::string text;
  for (const auto number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

// "2 of 64", or "2" without a limit.
std::string OfLimit(const std::string& used, uint64_t limit, const std::string& most) {
  return limit == 0 ? used : used + " of " + most;
}

// What a session may have, and what each identity has of what it may have.
void PrintLimits(const control::ServerInfo& server) {
  const control::Limits& limits = server.limits();
  std::string one;
  if (limits.session_memory() != 0) one = ByteText(double(limits.session_memory())) + " of GPU memory";
  if (limits.session_gpus() != 0)
    one += (one.empty() ? "" : " and ") + std::to_string(limits.session_gpus()) + " GPU" +
           (limits.session_gpus() == 1 ? "" : "s");
  if (!one.empty()) printf("limit for each session: %s\n", one.c_str());
  for (const control::Usage& usage : server.usage()) {
    if (!usage.limited() && server.usage_size() == 1) continue;  // the list of sessions says it all
    const bool limited = usage.limited();
    const std::string sessions = OfLimit(std::to_string(usage.sessions()), limited ? limits.user_sessions() : 0,
                                         std::to_string(limits.user_sessions()));
    const std::string memory = OfLimit(ByteText(double(usage.device_bytes())), limited ? limits.user_memory() : 0,
                                       ByteText(double(limits.user_memory())));
    const std::string gpus = OfLimit(std::to_string(usage.gpus_size()), limited ? limits.user_gpus() : 0,
                                     std::to_string(limits.user_gpus()));
    printf("%s: sessions %s, GPU memory %s, GPUs %s%s\n", usage.identity().c_str(), sessions.c_str(), memory.c_str(),
           gpus.c_str(), usage.gpus_size() == 0 ? "" : (" (" + Listed(usage.gpus()) + ")").c_str());
  }
}

// The server, its limits and what is used of them.
void AddServer(const control::ServerInfo& server, JsonWriter* json) {
  json->Line(2);
  json->Begin("server", '{');
  json->Member("name", server.name());
  json->Member("pid", server.pid());
  json->Member("wire_version", server.wire_version());
  json->Member("warm_workers", server.warm_workers());
  json->Member("sessions", server.sessions());
  json->Member("sessions_ever", server.sessions_ever());
  json->RealMember("seconds", server.seconds(), 3);
  json->MemberIf("driver", server.driver());
  json->Member("software_gpu", server.software_gpu());
  json->MemberIf("worker_error", server.worker_error());
  json->End('}');
  const control::Limits& limits = server.limits();
  json->Line(2);
  json->Begin("limits", '{');
  json->MemberIf("sessions", limits.sessions());
  json->MemberIf("session_memory_bytes", limits.session_memory());
  json->MemberIf("session_gpus", limits.session_gpus());
  json->MemberIf("user_sessions", limits.user_sessions());
  json->MemberIf("user_memory_bytes", limits.user_memory());
  json->MemberIf("user_gpus", limits.user_gpus());
  json->End('}');
  json->Line(2);
  json->Begin("usage", '[');
  for (const control::Usage& usage : server.usage()) {
    json->Line(4);
    json->Begin('{');
    json->Member("identity", usage.identity());
    json->Member("limited", usage.limited());
    json->Member("sessions", usage.sessions());
    json->Member("device_bytes", usage.device_bytes());
    AddNumbers("gpus", usage.gpus(), json);
    json->End('}');
  }
  json->End(']');
}

void PrintJson(const control::ServerInfo& server, const control::ListSessionsReply& list,
               const std::vector<LocalProcess>& processes, const std::vector<LocalJob>& jobs) {
  JsonWriter json(JsonWriter::kSpaced);
  json.BeginOutput();
  // Without a server there are only jobs.
  if (server.pid() != 0) AddServer(server, &json);
  json.Line(2);
  json.Begin("sessions", '[');
  for (int i = 0; i < list.sessions_size(); ++i) {
    const control::SessionInfo& s = list.sessions(i);
    const LocalProcess& here = processes[size_t(i)];
    json.Line(4);
    json.Begin('{');
    json.Member("id", s.id());
    json.Member("pid", s.pid());
    json.Member("program", s.program());
    json.MemberIf("job", s.job());
    json.Member("transport", s.transport());
    json.MemberIf("peer", s.peer());
    json.MemberIf("worker_pid", s.worker_pid());
    json.Member("gpu", s.gpu());
    json.MemberIf("driver", s.driver());
    json.RealMember("seconds", s.seconds(), 3);
    json.Member("device_bytes", s.device_bytes());
    json.Member("calls", s.calls());
    json.Member("bytes_in", s.bytes_in());
    json.Member("bytes_out", s.bytes_out());
    json.RealMember("calls_per_second", s.calls_per_second(), 1);
    json.RealMember("bytes_per_second", s.bytes_per_second(), 1);
    json.Member("replaying", s.replaying());
    json.MemberIf("saved_unix_ms", s.saved_unix_ms());
    json.MemberIf("saved_bytes", s.saved_bytes());
    json.Member("owner", s.owner());
    AddNumbers("gpus", s.gpus(), &json);
    json.MemberIf("host_pid", here.pid);
    if (here.job) json.Member("directory", here.job->directory);
    json.End('}');
  }
  json.End(']');
  AddJobs(jobs, &json);
  json.End('}');
  puts(json.text().c_str());
}

void PrintTable(const control::ServerInfo& server, const control::ListSessionsReply& list,
                const std::vector<LocalProcess>& processes) {
  printf("%s: %s, %u session%s, %u warm worker%s, up %.0f s\n", server.name().c_str(),
         server.driver().empty() ? "no worker was ready yet" : server.driver().c_str(), server.sessions(),
         server.sessions() == 1 ? "" : "s", server.warm_workers(), server.warm_workers() == 1 ? "" : "s",
         server.seconds());
  if (!server.worker_error().empty()) printf("workers cannot start: %s\n", server.worker_error().c_str());
  PrintLimits(server);
  if (list.sessions_size() == 0) return;
  Table table({{"SESSION"},
               {"PID"},
               {"WORKER"},
               {"GPU"},
               {"WAY"},
               {"MEMORY"},
               {"CALLS/S"},
               {"BYTES/S"},
               {"SAVED"},
               {"SECONDS"},
               {"PROGRAM (OWNER)", true}});
  const auto rounded = [](double number) { return std::to_string(std::llround(number)); };
  for (int i = 0; i < list.sessions_size(); ++i) {
    const control::SessionInfo& s = list.sessions(i);
    const LocalProcess& here = processes[size_t(i)];
    const std::string job =
        (s.job().empty() ? "" : " [" + s.job() + "]") + (here.job ? " in " + here.job->directory : "");
    table.Add({std::to_string(s.id()), std::to_string(here.job ? unsigned(here.pid) : s.pid()),
               s.worker_pid() ? std::to_string(s.worker_pid()) : "waits",
               s.gpus().empty() ? std::to_string(s.gpu()) : Listed(s.gpus()), s.transport(),
               ByteText(double(s.device_bytes())), rounded(s.calls_per_second()), ByteText(s.bytes_per_second()),
               Ago(s.saved_unix_ms()), rounded(s.seconds()),
               s.program() + job + (s.peer().empty() ? "" : " from " + s.peer()) + " (" + s.owner() + ")"});
  }
  fputs(table.Text().c_str(), stdout);
}

// Prints what has failed, and gives the exit code back.
int Fail(const absl::Status& failure, int code) {
  fprintf(stderr, "cr-ps: %s\n", std::string(failure.message()).c_str());
  return code;
}

int End(control::ServerControl* control, uint64_t session, const std::string& reason) {
  const absl::StatusOr<bool> found = control->End(session, reason);
  if (!found.ok()) return Fail(found.status(), kExitNoServer);
  if (*found) return 0;
  fprintf(stderr, "cr-ps: there is no session %" PRIu64 " of yours (the server's operators can end others, too)\n",
          session);
  return kExitNoSession;
}

// Fills in what the server has answered, also on failure.
absl::Status Ask(control::ServerControl* control, control::ServerInfo* server, control::ListSessionsReply* list) {
  CR_ASSIGN_OR_RETURN(*server, control->Info());
  CR_ASSIGN_OR_RETURN(*list, control->List());
  return absl::OkStatus();
}

// Shows all once. `here`: no server was named, so this shows the user's jobs, and the user's server on this machine if
// it runs.
int Show(const std::string& address, bool here, const control::TlsFiles& tls, bool json) {
  control::ServerInfo server;
  control::ListSessionsReply list;
  bool answers = false;
  if (!here || access(address.substr(strlen("unix:")).c_str(), F_OK) == 0) {
    const auto control = control::ServerControl::Open(address, tls);
    const absl::Status asked = control.ok() ? Ask(control->get(), &server, &list) : control.status();
    answers = asked.ok();
    if (!answers) {
      const int code = Fail(asked, control.ok() ? kExitNoServer : kExitUsage);
      // A socket that a killed server has left does not hide the jobs.
      if (!here) return code;
    }
  }
  const std::vector<LocalJob> jobs = LocalJobs();
  const std::vector<LocalProcess> processes = ProcessesHere(address, jobs, list);
  if (json) {
    PrintJson(server, list, processes, jobs);
    return 0;
  }
  if (here) PrintJobs(jobs);
  if (answers) {
    if (here) printf("\n");
    PrintTable(server, list, processes);
  }
  PrintWarnings(jobs);
  return 0;
}

// What there is at hosts, through this one's cr-hostd.
int ShowHosts(const std::string& hosts, bool json) {
  const auto hostd = host::Hostd::Connect();
  if (!hostd.ok()) return Fail(hostd.status(), kExitNoServer);
  if (!*hostd) {
    return Fail(absl::NotFoundError("--hosts asks other hosts through the cr-hostd of this one, and none runs here (" +
                                    HostdSocket() + ")"),
                kExitNoServer);
  }
  const absl::StatusOr<host::HostReports> reports = (*hostd)->AskForHosts(hosts);
  if (!reports.ok()) return Fail(reports.status(), kExitNoServer);
  if (json) PrintHostsAsJson(*reports);
  if (!json) PrintHosts(*reports);
  for (const host::HostReport& one : reports->hosts()) {
    if (!one.error().empty()) return kExitNoServer;
  }
  return 0;
}

// Runs `show`, and puts what it prints in the place of what the terminal shows, as far as there is room.
void ShowOnScreen(const std::function<int()>& show) {
  fflush(stdout);
  const int terminal = dup(STDOUT_FILENO), printed = memfd_create("cr-ps", MFD_CLOEXEC);
  if (terminal < 0 || printed < 0 || dup2(printed, STDOUT_FILENO) < 0) {
    show();
  } else {
    show();
    fflush(stdout);
    dup2(terminal, STDOUT_FILENO);
    std::string text(size_t(lseek(printed, 0, SEEK_END)), '\0');
    text.resize(size_t(std::max<ssize_t>(pread(printed, text.data(), text.size(), 0), 0)));
    winsize size = {};
    ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    // Home, each line up to its end, and what is below: nothing scrolls, and nothing flickers.
    std::string screen = "\033[H";
    for (const char c : FitToScreen(text, size.ws_row, size.ws_col))
      screen += c == '\n' ? "\033[K\n" : std::string(1, c);
    fputs((screen + "\033[J").c_str(), stdout);
  }
  fflush(stdout);
  for (const int fd : {terminal, printed}) {
    if (fd >= 0) close(fd);
  }
}

int Main(int argc, char** argv) {
  std::string address, reason, hosts;
  control::TlsFiles tls;
  bool json = false, prune = false;
  double watch = 0;
  uint64_t end = 0;
  CLI::App app("Shows this user's jobs on this machine, or the sessions of a cr-server.", "cr-ps");
  SetUpProgram(&app);
  app.footer(kExamples);
  app.add_option("--server", address,
                 "unix:PATH of the server's socket or folder, or HOST:PORT (default: $CUDA_REMOTE_SERVER, "
                 "else this user's jobs here, and the sessions of this user's server here, if one runs)")
      ->type_name("ADDR");
  CLI::Option* const all_hosts =
      app.add_option("--hosts", hosts,
                     "show other hosts, HOST or HOST:PORT, through this host's cr-hostd; without a list this host and "
                     "those that its cr-hostd knows (cr-hostd --known-host)")
          ->type_name("[HOST,...]")
          ->expected(0, 1)
          ->excludes("--server");
  app.add_flag("--json", json, "print JSON");
  app.add_option("--watch", watch, "show everything again and again, after this time")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.1, 86400.0));
  app.add_option("--end", end, "end this session")->type_name("SESSION")->excludes("--watch")->excludes(all_hosts);
  app.add_flag("--prune", prune,
               "remove the folders of this user's jobs here whose cr-run was killed, and print their names");
  app.add_option("--reason", reason, "with --end: text for the program's error message");
  app.add_option("--tls-cert", tls.cert, "own certificate, PEM (or CUDA_REMOTE_TLS_CERT)")->type_name("FILE");
  app.add_option("--tls-key", tls.key, "its key (or CUDA_REMOTE_TLS_KEY)")->type_name("FILE");
  app.add_option("--tls-ca", tls.ca, "who signs the server's certificate (or CUDA_REMOTE_TLS_CA)")->type_name("FILE");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (prune) {
    for (const std::string& directory : RemoveStaleJobs()) printf("removed %s\n", directory.c_str());
    return 0;
  }
  if (address.empty() && getenv("CUDA_REMOTE_SERVER")) address = getenv("CUDA_REMOTE_SERVER");
  const bool here = address.empty();
  if (!here) {
    const absl::Status checked = checkpoint::CheckServerAddress(address);
    if (!checked.ok()) return Fail(checked, kExitUsage);
  }
  if (here) {
    const std::string folder = RuntimeFolders().front();
    // Not a server that somebody else has put in its place.
    if (access(folder.c_str(), F_OK) == 0) {
      const absl::Status checked = ToAbsl(CheckFolder(folder, FolderUse::kLook));
      if (!checked.ok()) return Fail(checked, kExitNoServer);
    }
    address = "unix:" + folder + "/session.sock";
  }
  if (end != 0) {
    const auto control = control::ServerControl::Open(address, tls);
    return control.ok() ? End(control->get(), end, reason) : Fail(control.status(), kExitUsage);
  }
  const auto show = [&] { return *all_hosts ? ShowHosts(hosts, json) : Show(address, here, tls, json); };
  if (watch <= 0) return show();
  for (;;) {
    if (!json && isatty(STDOUT_FILENO)) {
      ShowOnScreen(show);
    } else {
      show();
      if (!json) printf("\n");
      fflush(stdout);
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(watch));
  }
}

}  // namespace
}  // namespace cuda_remote::client::tools

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::tools::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-ps: %s\n", error.what());
    return 1;
  }
}
