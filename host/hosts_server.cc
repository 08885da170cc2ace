// SPDX-License-Identifier: Apache-2.0
#include "host/hosts_server.h"

#include <errno.h>
#include <fcntl.h>
#include <grpc/grpc_security_constants.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/engines.h"
#include "checkpoint/engine/instruction_sets.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/isolation/network.h"
#include "checkpoint/job/isolation/stand_ins.h"
#include "checkpoint/job/job.h"
#include "ckptfmt/file.h"
#include "ckptfmt/folder.h"
#include "ckptfmt/manifest.h"
#include "ckptfmt/needs.h"
#include "host/exchange.h"
#include "host/group.h"
#include "host/metrics.h"
#include "host/move.grpc.pb.h"
#include "host/move_rounds.h"
#include "host/move_source.h"
#include "host/move_state.h"
#include "host/places.h"
#include "host/report.h"
#include "host/request.pb.h"
#include "host/sets.h"
#include "host/wire.h"
#include "proto/base/descriptor_limit.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/codec/text.h"
#include "proto/control/credentials.h"
#include "proto/control/listener.h"
#include "proto/errors/absl_status.h"
#include "proto/logging/log.h"

namespace cuda_remote::host {
namespace {

using checkpoint::Account;
using Stream = grpc::ServerReaderWriter<MoveDown, MoveUp>;

constexpr size_t kIdBytes = 16;
constexpr int kLookMs = 200;
constexpr size_t kMostToldBytes = 2000;
constexpr size_t kCopyBytes = 1u << 20;
constexpr char kLog[] = "log";
constexpr char kNotSigned[] =
    "the request is not signed with the key of this host; the hosts of a cluster need the same one (--key)";
constexpr char kNoPlace[] =
    "too many jobs, of this user or of all, come or are saved at the same time; try again later";
constexpr char kCancelled[] = "the host that asked for it has cancelled";
// Part of the descriptors that connections may take.
constexpr size_t kConnectionShare = 4;
constexpr int kListenAttempts = 20, kListenPauseUs = 100000;

// The user whom the source vouches for must be the same one here.
absl::StatusOr<Account> FindUser(const MovedUser& user) {
  if (user.id() == 0 || user.id() == uid_t(-1))
    return absl::PermissionDeniedError("jobs of root are not taken from other hosts");
  CR_ASSIGN_OR_RETURN(Account account, checkpoint::FindAccount(std::to_string(user.id())));
  const auto named = [](const std::string& name) { return name.empty() ? "has no name" : "is " + name; };
  if (account.user != user.id() || account.name != user.name()) {
    return absl::FailedPreconditionError("user " + std::to_string(user.id()) + " " + named(user.name()) +
                                         " at the source, and here this number " + named(account.name) +
                                         "; the hosts of a cluster must have the same users");
  }
  std::vector<gid_t> groups(user.groups().begin(), user.groups().end());
  groups.push_back(user.group());
  for (const gid_t group : groups) {
    if (group == account.group || std::binary_search(account.groups.begin(), account.groups.end(), group)) continue;
    return absl::PermissionDeniedError("the job has the rights of group " + std::to_string(group) + ", of which " +
                                       NameOf(account) + " is not a member on this host");
  }
  groups.pop_back();
  std::sort(groups.begin(), groups.end());
  account.group = user.group();
  account.groups = groups;
  return account;
}

// What the tool has written to its log.
std::string ToldIn(int log) {
  std::string text(kMostToldBytes, '\0');
  const ssize_t got = pread(log, &text[0], text.size(), 0);
  text.resize(size_t(std::max<ssize_t>(got, 0)));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// Asks this host's cr-hostd over the new `socket`. The streams and the working folder are the tool's; -1: none.
absl::Status AskHostd(const Settings& settings, int socket, const Request& request, int output, int log, int folder) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, settings.socket.c_str(), std::min(settings.socket.size(), sizeof(address.sun_path) - 1));
  const UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC)), root(open("/", O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (socket >= 0 && null.get() >= 0 && root.get() >= 0 && log >= 0 &&
      connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
      Send(socket, request, {null.get(), output >= 0 ? output : null.get(), log, folder >= 0 ? folder : root.get()})) {
    return absl::OkStatus();
  }
  return ErrnoStatus("cr-hostd cannot be asked");
}

// The next word of cr-hostd's worker. Fails if it has died (`died` says what it did), or if the host that asked over
// `context` has cancelled; null: that does not matter any more. The caller then closes the socket, which tells the
// worker.
absl::Status Next(int socket, const grpc::ServerContext* context, const std::string& died, Reply* reply) {
  pollfd waiting = {socket, POLLIN, 0};
  while (poll(&waiting, 1, kLookMs) <= 0) {
    if (context && context->IsCancelled()) return absl::CancelledError(kCancelled);
  }
  if (Receive(socket, reply)) return absl::OkStatus();
  return absl::UnavailableError("the process of cr-hostd that " + died + " has died");
}

// Whom a tool of cr-hostd's is to work for.
void SetArrived(const MoveBegin& begin, const Account& account, Request* request) {
  request->set_version(kVersion);
  *request->mutable_environment() = begin.environment();
  const auto add = [&](const char* name, const std::string& value) {
    Option* const option = request->add_options();
    option->set_name(name);
    option->set_value(value);
  };
  if (!begin.server().empty()) add("server", begin.server());
  if (begin.gpu() >= 0) add("gpu", std::to_string(begin.gpu()));
  ArrivedJob* const arrived = request->mutable_arrived();
  arrived->set_id(begin.id());
  arrived->set_user(account.user);
  arrived->set_group(account.group);
  for (const gid_t group : account.groups) arrived->add_groups(group);
}

// The GPUs that the job would see here. Fails if there are none.
absl::StatusOr<HostGpus> FindGpus(const MoveBegin& begin, const Account& account, const Settings& settings,
                                  const grpc::ServerContext& context) {
  Request request;
  request.set_tool(kGpusTool);
  SetArrived(begin, account, &request);
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const UniqueFd output(memfd_create("gpus", MFD_CLOEXEC)), log(memfd_create("log", MFD_CLOEXEC));
  CR_RETURN_IF_ERROR(AskHostd(settings, socket.get(), request, output.get(), log.get(), -1));
  while (true) {
    Reply reply;
    // The server is the user's choice, and may never answer.
    CR_RETURN_IF_ERROR(Next(socket.get(), &context, "asks for the GPUs", &reply));
    if (reply.kind() == Reply::REFUSED || reply.kind() == Reply::ELSEWHERE)
      return absl::FailedPreconditionError(reply.text());
    if (reply.kind() != Reply::ENDED) continue;
    HostGpus gpus;
    if (reply.value() == 0 && lseek(output.get(), 0, SEEK_SET) == 0 && gpus.ParseFromFileDescriptor(output.get()))
      return gpus;
    return absl::FailedPreconditionError(ToldIn(log.get()));
  }
}

// What this machine lacks for the job, a sentence each.
MoveChecked Check(const MoveBegin& begin, const Account& account, const Settings& settings,
                  const grpc::ServerContext& context) {
  MoveChecked checked;
  if (const std::string reason = checkpoint::DrainingReason(settings.socket); !reason.empty())
    checked.add_missing("a host that accepts jobs at present: " + Printable(reason));
  const std::string folder = checkpoint::UserJobsFolder(settings.socket, account.user) + "/" + begin.job();
  checkpoint::Job job;
  if (!IsJobName(begin.job())) {
    checked.add_missing("another name for the job: \"" + Printable(begin.job()) + "\" cannot be one");
  } else if (const auto running = checkpoint::ReadJob(folder); running.ok() && checkpoint::JobIsAlive(*running)) {
    checked.add_missing("a free name: a job " + begin.job() + " of this user runs there");
  }
  if (!job.ParseFromString(begin.about_job())) checked.add_missing("cannot read the description of the job");
  if (job.has_network()) {
    const absl::Status possible = checkpoint::CheckNetwork(job.mutable_network(), &settings.addresses);
    if (!possible.ok()) checked.add_missing(std::string(possible.message()));
  }
  if (!HasRoom(settings.spool, begin.bytes())) {
    checked.add_missing("room for the image (" + std::to_string(begin.bytes() >> 20) + " MiB) in " + settings.spool);
  }
  const auto engine = checkpoint::NewEngine();
  const absl::Status usable = engine->CheckUsable();
  if (!usable.ok()) {
    checked.add_missing(std::string(usable.message()));
  } else if (const std::string version = engine->Version();
             strverscmp(version.c_str(), begin.engine_version().c_str()) < 0) {
    checked.add_notes("the job is saved with " + engine->Name() + " " + begin.engine_version() + "; there it is " +
                      version + ", which may not be able to read it");
  }
  if (usable.ok()) {
    for (std::string& one :
         engine->MissingFeatures({begin.kernel_features().begin(), begin.kernel_features().end()}, account))
      checked.add_missing(std::move(one));
  }
  utsname system;
  if (uname(&system) == 0 && strverscmp(system.release, begin.kernel().c_str()) < 0) {
    checked.add_notes("the job is saved on Linux " + begin.kernel() + "; there it is " + system.release +
                      ", which may lack something that the job uses");
  }
  const std::set<std::string> sets(begin.instruction_sets().begin(), begin.instruction_sets().end());
  const std::string lacks = checkpoint::MissingInstructionSets(sets, checkpoint::InstructionSetsHere());
  if (!lacks.empty()) checked.add_missing("the processor's instruction sets " + lacks);
  if (begin.uses_gpus()) {
    absl::StatusOr<HostGpus> gpus = FindGpus(begin, account, settings, context);
    if (gpus.ok()) {
      *checked.mutable_gpus() = *std::move(gpus);
    } else {
      checked.add_missing("GPUs for the job: " + std::string(gpus.status().message()));
    }
  }
  ckptfmt::Needs needs;
  for (const MovedNeed& one : begin.needs()) {
    ckptfmt::NeededFile file;
    file.path = one.path();
    file.bytes = one.bytes();
    file.build_id = one.build_id();
    file.written = one.written();
    needs.files.push_back(std::move(file));
  }
  const checkpoint::ActAs user(&account);
  for (std::string& one :
       ckptfmt::MissingHere(needs, [&](const std::string& path) { return checkpoint::SeenByJob(job, path); })) {
    checked.add_missing(std::move(one));
  }
  return checked;
}

// One move: what has come of it, and where that lies.
class Arrival {
 public:
  Arrival(const grpc::ServerContext& context, Stream* stream, const Settings& settings, const Key& key, Places* places)
      : context_(context), stream_(stream), settings_(settings), key_(key), places_(places) {}
  ~Arrival() {
    if (!handed_over_ && !folder_.empty()) RemoveOwnFolder(folder_);
  }
  Arrival(const Arrival&) = delete;
  Arrival& operator=(const Arrival&) = delete;

  // To its end. If it fails, nothing of the job runs here, unless IsUnknown.
  absl::Status Run();
  bool IsUnknown() const { return unknown_; }

 private:
  bool Say(const MoveDown& down) { return stream_->Write(down); }
  absl::Status MakeFolder();
  absl::Status TakeImage(const std::string& signature);
  absl::Status TakeFile(const ckptfmt::OpenedFolder& folder, const SignedFile& file);
  absl::Status Restore(const MoveRestore& restore);

  const grpc::ServerContext& context_;
  Stream* const stream_;
  const Settings& settings_;
  const Key& key_;
  Places* const places_;
  MoveBegin begin_;
  Account account_;
  std::string folder_;
  UniqueFd lock_;
  size_t images_ = 0;
  std::string image_;                      // the last one's folder, below folder_
  std::map<std::string, uint32_t> files_;  // of that image: the number of the file with this hash
  std::vector<std::string> paths_;         // below folder_; of the file number N at N - 1; empty: that image lacks it
  bool handed_over_ = false, unknown_ = false;
};

absl::Status Arrival::MakeFolder() {
  std::string name = settings_.spool + "/" + std::to_string(account_.user) + "-XXXXXX";
  if (mkdtemp(&name[0])) {
    folder_ = name;
    lock_.Reset(open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (chmod(name.c_str(), 0711) == 0 && lock_.get() >= 0 && flock(lock_.get(), LOCK_EX | LOCK_NB) == 0)
      return absl::OkStatus();
  }
  return ErrnoStatus("cannot make a folder in " + settings_.spool);
}

// One that the image before does not have as a whole.
absl::Status Arrival::TakeFile(const ckptfmt::OpenedFolder& folder, const SignedFile& file) {
  const absl::Status incomplete = absl::UnavailableError("the source host has not sent all of the image");
  auto out = ckptfmt::OutputFile::Create(folder, file.path(), /*hashed=*/false);
  if (!out.ok()) return out.status();
  Digest digest;
  absl::Status status;
  const auto append = [&](std::string_view bytes) {
    digest.Add(bytes.data(), bytes.size());
    status = out->Append(bytes);
  };
  uint64_t left = file.bytes();
  std::string part;
  UniqueFd opened;
  uint32_t number = 0;  // of the opened file
  for (MoveUp up; status.ok() && left > 0;) {
    if (!stream_->Read(&up) || up.kind_case() != MoveUp::kData || up.data().pieces().empty()) return incomplete;
    std::string_view data = up.data().data();
    for (int i = 0; status.ok() && i < up.data().pieces_size(); ++i) {
      const MovedPiece& piece = up.data().pieces(i);
      if (piece.bytes() == 0 || piece.bytes() > left) return incomplete;
      if (!HasRoom(folder_, piece.bytes()))
        return absl::ResourceExhaustedError("there is no room left in " + settings_.spool);
      left -= piece.bytes();
      if (piece.file() == 0) {
        if (piece.bytes() > data.size()) return incomplete;
        append(data.substr(0, piece.bytes()));
        data.remove_prefix(piece.bytes());
        continue;
      }
      if (piece.file() > paths_.size()) return incomplete;
      const std::string& path = paths_[piece.file() - 1];
      if (number != piece.file()) {
        opened.Reset(openat(lock_.get(), path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
        number = piece.file();
        if (opened.get() < 0) return ckptfmt::SystemError("read", path, errno);
      }
      for (uint64_t done = 0; status.ok() && done < piece.bytes(); done += part.size()) {
        part.resize(size_t(std::min<uint64_t>(piece.bytes() - done, kCopyBytes)));
        status = ckptfmt::ReadAt(opened.get(), path, piece.offset() + done, &part[0], part.size());
        if (status.ok()) append(part);
      }
    }
  }
  if (status.ok()) status = out->Finish().status();
  if (status.ok() && digest.Finish() != file.hash())
    status = absl::DataLossError(file.path() + " has not arrived as it was signed");
  return status;
}

absl::Status Arrival::TakeImage(const std::string& signature) {
  CR_ASSIGN_OR_RETURN(const Statement statement, ReadSignature(signature, key_, "the job's image"));
  if (statement.user() != account_.user) {
    return absl::PermissionDeniedError("the image is of a job of user " + std::to_string(statement.user()) +
                                       ", not of " + NameOf(account_));
  }
  const std::string name = "image-" + std::to_string(++images_);
  if (images_ > MoveRounds::kMost + 1) return absl::ResourceExhaustedError("there are too many images");
  if (mkdirat(lock_.get(), name.c_str(), 0700) != 0) return ErrnoStatus("cannot make a folder in " + folder_);
  CR_ASSIGN_OR_RETURN(const ckptfmt::OpenedFolder folder, ckptfmt::OpenedFolder::Open(folder_ + "/" + name));
  for (const char* below : {ckptfmt::kClientFolder, ckptfmt::kMemoryFolder, ckptfmt::kProcessesFolder}) {
    if (mkdirat(folder.fd(), below, 0700) != 0) return ckptfmt::SystemError("create", below, errno);
  }
  std::map<std::string, uint32_t> files;
  std::vector<std::string> paths(paths_.size());
  for (const SignedFile& one : statement.files()) {
    if (one.by_chunk()) return absl::InvalidArgumentError("the image is not one of a move");
    const std::string path = name + "/" + one.path();
    CR_RETURN_IF_ERROR(MakeFoldersFor(folder, one.path()));
    const auto again = files.find(one.hash()), before = files_.find(one.hash());
    if (again == files.end() && before == files_.end()) {
      CR_RETURN_IF_ERROR(TakeFile(folder, one));
      paths.push_back(path);
      files.emplace(one.hash(), uint32_t(paths.size()));
      continue;
    }
    const uint32_t number = again != files.end() ? again->second : before->second;
    const std::string& there = again != files.end() ? paths[number - 1] : paths_[number - 1];
    if (linkat(lock_.get(), there.c_str(), lock_.get(), path.c_str(), 0) != 0)
      return ckptfmt::SystemError("link", one.path(), errno);
    files.emplace(one.hash(), number);
    paths[number - 1] = path;
  }
  CR_ASSIGN_OR_RETURN(ckptfmt::OutputFile out,
                      ckptfmt::OutputFile::Create(folder, ckptfmt::kSignatureName, /*hashed=*/false));
  CR_RETURN_IF_ERROR(out.Append(signature));
  CR_RETURN_IF_ERROR(out.Finish().status());
  if (!image_.empty()) RemoveOwnFolder(folder_ + "/" + image_);
  image_ = name;
  files_ = std::move(files);
  paths_ = std::move(paths);
  return absl::OkStatus();
}

absl::Status Arrival::Restore(const MoveRestore& restore) {
  if (images_ == 0) return absl::FailedPreconditionError("there is no image");
  if (renameat(lock_.get(), image_.c_str(), lock_.get(), "image") != 0) return ErrnoStatus("cannot rename the image");
  Request request;
  request.set_tool(kArriveTool);
  request.set_job(begin_.job());
  request.set_image("from " + Printable(begin_.host()));
  request.set_umask(restore.umask());
  SetArrived(begin_, account_, &request);
  const auto add = [&](const char* name, const std::string& value) {
    Option* const option = request.add_options();
    option->set_name(name);
    option->set_value(value);
  };
  if (!restore.output().empty()) add("output", restore.output());
  if (!restore.error().empty()) add("error", restore.error());
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const UniqueFd log(openat(lock_.get(), kLog, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
  CR_RETURN_IF_ERROR(AskHostd(settings_, socket.get(), request, -1, log.get(), lock_.get()));
  MoveDown down;
  bool going = false;
  while (true) {
    Reply reply;
    // Once the job was let go on, it stays here.
    const absl::Status next = Next(socket.get(), going ? nullptr : &context_, "restored the job", &reply);
    unknown_ = going && !next.ok();
    CR_RETURN_IF_ERROR(next);
    switch (reply.kind()) {
      case Reply::STARTED:
        handed_over_ = true;
        break;
      case Reply::RESTORED: {
        down.set_restored(true);
        MoveUp up;
        // Else the socket closes, and the worker gives up.
        if (!Say(down) || !stream_->Read(&up) || !up.go_on())
          return absl::CancelledError("the source host has not released the job");
        Control control;
        control.set_go_on(true);
        Send(socket.get(), control);
        going = true;
        break;
      }
      case Reply::RUNNING:
        down.set_running(true);
        Say(down);  // if that fails, the source asks again
        return absl::OkStatus();
      case Reply::ENDED:
      case Reply::REFUSED:
      case Reply::ELSEWHERE: {
        const std::string why = reply.kind() == Reply::ENDED ? ToldIn(log.get()) : reply.text();
        return absl::FailedPreconditionError(why.empty() ? "the restart has failed" : why);
      }
      default:
        break;
    }
  }
}

absl::Status Arrival::Run() {
  MoveUp up;
  if (!stream_->Read(&up) || up.kind_case() != MoveUp::kBegin)
    return absl::InvalidArgumentError("the source host has not sent a request");
  begin_ = up.begin();
  if (begin_.version() != kVersion || begin_.id().size() != kIdBytes) {
    return absl::UnimplementedError("its cr-hostd speaks version " + std::to_string(kVersion) +
                                    ", and the source's version " + std::to_string(begin_.version()) +
                                    "; install the same version on both hosts");
  }
  CR_ASSIGN_OR_RETURN(account_, FindUser(begin_.user()));
  const Places::Place place(places_, account_.user);
  if (!place.taken()) return absl::ResourceExhaustedError(kNoPlace);
  logging::Info("{}, job {}: it comes from {}", NameOf(account_), Printable(begin_.job()), Printable(begin_.host()));
  MoveDown down;
  *down.mutable_checked() = Check(begin_, account_, settings_, context_);
  const bool fits = down.checked().missing().empty();
  const bool said = Say(down);
  if (!fits) return absl::FailedPreconditionError("the job cannot go there");
  if (!said) return absl::UnavailableError("the source host does not answer");
  CR_RETURN_IF_ERROR(MakeFolder());
  while (stream_->Read(&up)) {
    if (up.kind_case() == MoveUp::kRestore) return Restore(up.restore());
    if (up.kind_case() != MoveUp::kImage)
      return absl::InvalidArgumentError("the source host has sent an unexpected message");
    CR_RETURN_IF_ERROR(TakeImage(up.image()));
    down.set_taken(true);
    if (!Say(down)) break;
  }
  return absl::CancelledError("the source host has cancelled");
}

// One host's part of a checkpoint or a restart over several.
class Saving {
 public:
  Saving(const grpc::ServerContext& context, grpc::ServerReaderWriter<SaveDown, SaveUp>* stream,
         const Settings& settings, const Key& key, Places* places)
      : context_(context), stream_(stream), settings_(settings), key_(key), places_(places) {}

  // If it fails, there is no image, or nothing of the restarted part runs, unless the worker finds out otherwise
  // (Settle).
  absl::Status Run() {
    SaveUp up;
    if (!stream_->Read(&up) || up.kind_case() != SaveUp::kBegin ||
        !key_.HasMade(up.begin().code(), kSaveText + up.begin().begin()) ||
        !begin_.ParseFromString(up.begin().begin())) {
      return absl::PermissionDeniedError(kNotSigned);
    }
    if (begin_.version() != kVersion || begin_.id().size() != kIdBytes) {
      return absl::UnimplementedError("its cr-hostd speaks version " + std::to_string(kVersion) +
                                      ", and the coordinator's version " + std::to_string(begin_.version()) +
                                      "; install the same version on all hosts");
    }
    CR_ASSIGN_OR_RETURN(const Account account, FindUser(begin_.user()));
    const Places::Place place(places_, account.user);
    if (!place.taken()) return absl::ResourceExhaustedError(kNoPlace);
    CR_RETURN_IF_ERROR(Ask(account));
    return Follow();
  }

 private:
  absl::Status Ask(const Account& account) {
    Request request;
    request.set_version(kVersion);
    request.set_tool(begin_.restart() ? kRejoinTool : kMemberTool);
    *request.mutable_environment() = begin_.environment();
    request.set_job(begin_.job());
    request.set_image(begin_.image());
    request.set_umask(begin_.umask());
    for (const SaveOption& one : begin_.options()) {
      Option* const option = request.add_options();
      option->set_name(one.name());
      option->set_value(one.value());
      option->set_flag(one.flag());
    }
    GroupMember* const member = request.mutable_member();
    member->set_id(begin_.id());
    member->set_user(account.user);
    member->set_group(account.group);
    for (const gid_t group : account.groups) member->add_groups(group);
    member->set_decider(begin_.decider());
    member->set_whole_job(begin_.whole_job());
    member->set_in_set(begin_.in_set());
    *member->mutable_earlier() = begin_.earlier();
    return AskHostd(settings_, socket_.get(), request, -1, log_.get(), -1);
  }

  // From step to step. What ends it early closes the worker's socket, and the worker gives up.
  absl::Status Follow() {
    Reply reply;
    while (true) {
      CR_RETURN_IF_ERROR(
          Next(socket_.get(), &context_, begin_.restart() ? "restarted the job" : "saved the job", &reply));
      SaveDown down;
      SaveUp up;
      switch (reply.kind()) {
        case Reply::REACHED: {
          Control control;
          control.set_go_on(true);
          down.set_reached(SaveStep(reply.value()));
          down.set_checkpoint(reply.text());
          if (stream_->Write(down) && stream_->Read(&up) && up.kind_case() == SaveUp::kGoOn &&
              up.go_on() == down.reached()) {
            Send(socket_.get(), control);
            break;
          }
          return absl::CancelledError(kCancelled);
        }
        case Reply::RUNNING:
          return absl::OkStatus();
        case Reply::NOTE:
          down.set_note(reply.text());
          stream_->Write(down);
          break;
        case Reply::ENDED: {
          // A restarted part would run.
          if (!begin_.restart() && reply.value() == 0) return absl::OkStatus();
          const std::string told = ToldIn(log_.get());
          if (!told.empty()) return absl::FailedPreconditionError(told);
          return absl::FailedPreconditionError(begin_.restart() ? "cr-restart has failed" : "cr-checkpoint has failed");
        }
        case Reply::REFUSED:
        case Reply::ELSEWHERE:
          return absl::FailedPreconditionError(reply.text());
        default:
          break;
      }
    }
  }

  const grpc::ServerContext& context_;
  grpc::ServerReaderWriter<SaveDown, SaveUp>* const stream_;
  const Settings& settings_;
  const Key& key_;
  Places* const places_;
  SaveBegin begin_;
  const UniqueFd socket_{socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  const UniqueFd log_{memfd_create("cr-checkpoint", MFD_CLOEXEC)};
};

class Service final : public Hosts::Service {
 public:
  Service(const Settings& settings, const Key& key, control::Listener* listener)
      : settings_(settings), key_(key), listener_(listener) {}

  grpc::Status Move(grpc::ServerContext* context, Stream* stream) override {
    if (const grpc::Status status = Admit(*context); !status.ok()) return status;
    absl::Status status;
    bool unknown = false;
    try {
      Arrival arrival(*context, stream, settings_, key_, &places_);
      status = arrival.Run();
      unknown = arrival.IsUnknown();
    } catch (const std::exception& problem) {
      status = absl::InternalError(problem.what());
    }
    if (status.ok()) return grpc::Status::OK;
    const std::string error(status.message());
    logging::Warn("a move from {} has failed: {}", Printable(context->peer()), Printable(error));
    // The source goes on with the job if it hears that nothing of it runs here.
    if (unknown) return grpc::Status(grpc::StatusCode::UNAVAILABLE, error);
    MoveDown down;
    down.set_failed(error);
    stream->Write(down);
    return grpc::Status::OK;
  }

  grpc::Status Describe(grpc::ServerContext* context, const DescribeRequest* request, HostReport* report) override {
    if (const grpc::Status status = Admit(*context); !status.ok()) return status;
    if (request->version() != kVersion) return Refused(OtherVersion(request->version()));
    if (request->user().id() != 0) {
      if (const auto account = FindUser(request->user()); !account.ok()) return Refused(account.status());
    }
    *report = DescribeHost(settings_, request->user().id());
    return grpc::Status::OK;
  }

  grpc::Status Save(grpc::ServerContext* context, grpc::ServerReaderWriter<SaveDown, SaveUp>* stream) override {
    if (const grpc::Status status = Admit(*context); !status.ok()) return status;
    absl::Status status;
    try {
      status = Saving(*context, stream, settings_, key_, &places_).Run();
    } catch (const std::exception& problem) {
      status = absl::InternalError(problem.what());
    }
    SaveDown down;
    if (status.ok()) {
      down.set_done(true);
    } else {
      const std::string error(status.message());
      down.set_failed(error);
      logging::Warn("a checkpoint or restart over hosts, for {}, has failed: {}", Printable(context->peer()),
                    Printable(error));
    }
    stream->Write(down);
    return grpc::Status::OK;
  }

  grpc::Status Sets(grpc::ServerContext* context, const SignedSets* request, SetsReply* reply) override {
    if (const grpc::Status status = Admit(*context); !status.ok()) return status;
    SetsBegin begin;
    if (!key_.HasMade(request->code(), kSetsText + request->begin()) || !begin.ParseFromString(request->begin()))
      return Refused(absl::PermissionDeniedError(kNotSigned));
    if (begin.version() != kVersion) return Refused(OtherVersion(begin.version()));
    const absl::StatusOr<Account> account = FindUser(begin.user());
    if (!account.ok()) return Refused(account.status());
    try {
      const absl::Status removed =
          RemoveSets(*account, key_, begin.folder(), begin.part(), {begin.remove().begin(), begin.remove().end()});
      if (!removed.ok()) return Refused(removed);
      *reply = ListSets(*account, key_, begin.folder(), begin.part());
    } catch (const std::exception& problem) {
      return Refused(absl::InternalError(problem.what()));
    }
    return grpc::Status::OK;
  }

  grpc::Status Settle(grpc::ServerContext* context, const SettleRequest* request, SettleReply* reply) override {
    if (const grpc::Status status = Admit(*context); !status.ok()) return status;
    if (request->id().size() != kIdBytes) return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no such move");
    // Whichever of this and go_on, or of a question and a decision, comes first counts.
    BeginMoveState(settings_.moves, request->id(), request->decide() ? kMoveRuns : kMoveFailed);
    const std::string state = MoveStateOf(settings_.moves, request->id());
    reply->set_state(state == kMoveFailed ? SettleReply::FAILED
                     : state == kMoveRuns ? SettleReply::RUNNING
                                          : SettleReply::UNDERWAY);
    return grpc::Status::OK;
  }

 private:
  static grpc::Status Refused(const absl::Status& why) {
    return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, std::string(why.message()));
  }
  static absl::Status OtherVersion(uint32_t version) {
    return absl::UnimplementedError("its cr-hostd speaks version " + std::to_string(kVersion) +
                                    ", and the asking one version " + std::to_string(version) +
                                    "; install the same version on both hosts");
  }

  // TLS has looked at the certificate. Not every one of the authority's may be a host's.
  grpc::Status Admit(const grpc::ServerContext& context) const {
    const auto facts = context.auth_context();
    const auto subjects = facts && facts->IsPeerAuthenticated()
                              ? facts->FindPropertyValues(GRPC_X509_SUBJECT_PROPERTY_NAME)
                              : std::vector<grpc::string_ref>();
    const std::string subject = subjects.size() == 1 ? std::string(subjects[0].data(), subjects[0].size()) : "";
    const auto& hosts = settings_.hosts;
    control::IpAddress address;
    uint16_t port;
    const bool known = control::ReadPeer(context.peer(), &address, &port);
    if (!subject.empty() && (hosts.empty() || std::find(hosts.begin(), hosts.end(), subject) != hosts.end())) {
      if (known) listener_->Proven(address, port);
      return grpc::Status::OK;
    }
    if (known) listener_->Refused(address, port);
    logging::Warn("refused {} with the certificate of {}", Printable(context.peer()), Printable(subject));
    return grpc::Status(grpc::StatusCode::PERMISSION_DENIED,
                        "it accepts nothing from a host with the certificate of \"" + subject + "\" (--allow-host)");
  }

  const Settings& settings_;
  const Key& key_;
  control::Listener* const listener_;
  Places places_;
};

// Serves what the listener accepts. `tls` gets the certificates, which gRPC looks at again and again: they must live as
// long as the server.
absl::StatusOr<std::unique_ptr<grpc::Server>> Listen(const Settings& settings, Service* service,
                                                     std::unique_ptr<control::ServerTls>* tls,
                                                     control::Listener* listener) {
  CR_ASSIGN_OR_RETURN(*tls, control::ServerTls::Create(settings.tls));
  const auto credentials = (*tls)->Credentials(/*tokens=*/false);
  if (!credentials) return absl::FailedPreconditionError("gRPC does not take the certificates");
  // The one of a cr-hostd that was killed a moment ago may still be there.
  absl::Status listens = listener->Listen(settings.listen);
  for (int attempt = 1; absl::IsFailedPrecondition(listens) && attempt < kListenAttempts; ++attempt) {
    usleep(kListenPauseUs);
    listens = listener->Listen(settings.listen);
  }
  CR_RETURN_IF_ERROR(listens);
  grpc::ServerBuilder builder;
  control::SetServerArguments(&builder);
  const std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor =
      builder.experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials);
  builder.RegisterService(service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (!server) return absl::UnavailableError("gRPC does not serve " + settings.listen);
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  listener->Start(size_t(limit.rlim_cur) / kConnectionShare, [acceptor](int fd) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.fd = fd;
    acceptor->HandleNewConnection(&connection);
  });
  return server;
}

}  // namespace

int ServeHosts(const Settings& settings, const Key& key, int ready) {
  const auto say = [ready](const std::string& line) {
    const ssize_t ignored = write(ready, line.data(), line.size());
    static_cast<void>(ignored);
    close(ready);
  };
  control::SendGrpcLogTo([](bool error, const char* line) {
    if (error) logging::Warn("gRPC: {}", line);
  });
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigprocmask(SIG_BLOCK, &ends, nullptr);  // before there are threads
  const auto fail = [&say](const absl::Status& status) {
    say(std::string(status.message()));
    return 1;
  };
  // A connection from another host takes one, and so does each file of a job that comes.
  RaiseDescriptorLimit();
  control::Listener listener(
      [](bool error, const std::string& line) { error ? logging::Error("{}", line) : logging::Info("{}", line); });
  Service service(settings, key, &listener);
  std::unique_ptr<control::ServerTls> tls;
  absl::StatusOr<std::unique_ptr<grpc::Server>> server = nullptr;
  if (!settings.listen.empty()) server = Listen(settings, &service, &tls, &listener);
  if (!server.ok()) return fail(server.status());
  absl::StatusOr<std::unique_ptr<metrics::Exporter>> exporter = nullptr;
  if (!settings.metrics.empty()) exporter = ServeMetrics(settings);
  if (!exporter.ok()) return fail(exporter.status());
  say(*exporter ? "ready " + std::to_string((*exporter)->port()) : "ready");
  int signal = 0;
  sigwait(&ends, &signal);
  // Moves that are in progress break off here, and the source and the worker see that.
  _exit(0);
}

}  // namespace cuda_remote::host
