// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/save_job.h"

#include <errno.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "checkpoint/gpu/chunk_pool.h"
#include "checkpoint/gpu/gpu_snapshot.h"
#include "checkpoint/gpu/shared_buffers.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/job/ranks.h"
#include "checkpoint/transaction/at_step.h"
#include "checkpoint/transaction/give_way.h"
#include "checkpoint/transaction/live_job.h"
#include "ckptfmt/image_store.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/base/unique_fd.h"
#include "proto/codec/text.h"
#include "proto/errors/absl_status.h"
#include "proto/errors/annotate.h"
#include "proto/frame/frame.h"
#include "proto/frame/version.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr uint64_t kStopPool = uint64_t{1} << 30;
// Requests to the session of a process that has ended are far from those that it has sent.
constexpr uint64_t kBehindGap = uint64_t{1} << 40;
// Of the pool, for what is read in the pause.
constexpr uint64_t kPausePool = uint64_t{256} << 20;
// Of host memory, for the memory of processes, before the pool is used for it.
constexpr uint64_t kProcessesBesidePool = uint64_t{256} << 20;

std::string CommandOf(const Job& job) {
  std::string text;
  for (const std::string& word : job.command()) text += (text.empty() ? "" : " ") + word;
  return text;
}

// Host memory for the GPU memory of the job; none of it is ready to be written to yet. *processes: how much the engine
// can use for the memory of processes, and then how much it may use: kProcessesBesidePool, and more at the pool's cost.
absl::StatusOr<std::unique_ptr<ChunkPool>> MakePool(const SaveJobOptions& options, uint64_t* processes) {
  uint64_t limit = options.pool ? *options.pool : SpareMemory();
  // A job that ends does not wait for anything: then more memory saves no time.
  if (options.stop && !options.pool) limit = std::min(limit, kStopPool);
  const uint64_t beside = std::min(*processes, kProcessesBesidePool);
  const uint64_t inside = options.stop ? 0 : std::min(*processes - beside, limit / 4);
  *processes = beside + inside;
  limit -= inside;
  auto pool = std::make_unique<ChunkPool>(limit);
  if (!pool->ok()) return absl::ResourceExhaustedError("out of memory: no buffer to save GPU memory with");
  return pool;
}

// Copies of the job's GPU memory that are made while it runs, by session.
using Precopies = std::map<uint64_t, std::unique_ptr<Precopy>>;

// Looks at the job's memory while it runs. A process that cannot be asked has no copies; its memory is read in the
// pause.
Precopies LookBefore(const Job& job, const std::string& directory, const ckptfmt::ImageWriter& image, ChunkPool* pool,
                     const std::function<bool()>& cancelled) {
  // Without earlier images nothing is known, and no look needs whole hashes for that.
  IsKnown is_known;
  if (image.keeps_gpu_hashes()) {
    is_known = [&image](const ckptfmt::Region& region, uint64_t index, const ChunkHash& hash) {
      return image.Has(region, index, {hash.low, hash.high});
    };
  }
  Precopies copies;
  for (const CudaProcess& process : FindCudaProcesses(job, directory)) {
    const auto running = RunningProcess::Connect(process, directory);
    if (!running.ok()) continue;
    auto& copy = copies[(*running)->session()];
    copy = std::make_unique<Precopy>(pool, is_known);
    copy->Look(running->get(), cancelled).IgnoreError();
  }
  return copies;
}

// Makes as much of the pool ready as the job needs now.
void PreparePool(const Job& job, const std::string& directory, const Precopies& copies, ChunkPool* pool,
                 const std::function<bool()>& cancelled) {
  uint64_t held = AskHeldBytes(job, directory);
  uint64_t taken = 0;
  for (const auto& [session, copy] : copies) {
    held -= std::min(held, copy->known_bytes());
    taken += copy->pool_bytes();
  }
  // Regions end within a slot, and not all processes may have been looked at.
  held = std::max(held, taken);
  if (held > 0) pool->Prepare(held + held / 16, cancelled);
}

void CopyBefore(const Job& job, const std::string& directory, const Precopies& copies, ChunkPool* pool,
                SharedBuffers* shared, const std::function<bool()>& cancelled) {
  // The pause needs room for what is read then.
  const uint64_t room = pool->limit() - std::min(pool->limit(), std::max(kPausePool, pool->limit() / 8));
  for (const CudaProcess& process : FindCudaProcesses(job, directory)) {
    const auto running = RunningProcess::Connect(process, directory);
    const auto copy = running.ok() ? copies.find((*running)->session()) : copies.end();
    if (copy == copies.end() || pool->limit() - pool->free_bytes() >= room) continue;
    copy->second->Run(running->get(), shared, room, cancelled).IgnoreError();  // the copies so far are right
  }
}

// What was taken on the GPU of one process, and how it is reached when the job runs again.
struct Behind {
  GpuSnapshot snapshot;
  UseChunk use;
  CudaProcess process;
  // The session, should the process end before it has been read.
  UniqueFd socket, ring;
  uint64_t next_sequence = 0;
  Welcome welcome;
};

absl::Status ReadBehind(Behind* behind, const std::string& directory, SharedBuffers* shared, ChunkPool* pool,
                        const Continue& go_on) {
  if (behind->snapshot.bytes() == 0) return absl::OkStatus();
  const auto read = [&](SideRequests* requests) {
    return behind->snapshot.Read(requests, shared, pool, behind->use, go_on);
  };
  absl::Status status;
  {
    const auto running = RunningProcess::Connect(behind->process, directory);
    status = running.status();
    // Who answers may be another program by now, with another session.
    if (running.ok() && HasEnded(behind->process)) status = absl::UnavailableError("it has ended");
    if (status.ok()) status = read(running->get());
  }
  if (status.ok() || !EndsNow(behind->process)) return status;
  // It has ended. Its session has not: the tool still holds it.
  CR_ASSIGN_OR_RETURN(const auto channel,
                      ToAbsl(ClientChannel::Adopt({behind->socket.Release(), behind->ring.Release()},
                                                  behind->next_sequence, behind->welcome)));
  ChannelRequests requests(channel.get());
  return read(&requests);
}

// What the image says of a process that is held, and which memory it has.
absl::Status DescribeHeld(const LiveJob& live, LiveProcess* process, ckptfmt::ProcessInfo* facts,
                          std::vector<ckptfmt::Region>* regions) {
  ClientChannel* const channel = process->channel();
  CR_RETURN_IF_ERROR(Drain(channel));
  CR_RETURN_IF_ERROR(DescribeServer(channel, facts));
  CR_ASSIGN_OR_RETURN(*regions, ListRegions(channel, live.SessionsAt(process->info().server)));
  facts->pid = uint32_t(process->process().inner_pid);
  facts->program = process->process().program;
  facts->server = process->info().server;
  facts->next_sequence = process->next_sequence();
  facts->wire_version = kWireVersion;
  facts->session = process->info().session;
  facts->shared_memory = process->info().shared_memory;
  facts->driver_settings = process->info().driver_settings;
  facts->log_records = process->log().records();
  facts->log_images = process->log().images();
  return absl::OkStatus();
}

// The rank of each process, for cr-restart --map: "0,1,-1".
std::string RanksText(const LiveJob& live) {
  std::vector<int> pids;
  for (const auto& process : live.processes()) pids.push_back(process->process().pid);
  std::string text;
  for (const int rank : RanksOf(pids)) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text;
}

// For cr-restart: which programs the sessions are of. "140731,140732".
std::string MarksText(const LiveJob& live) {
  std::string text;
  for (const auto& process : live.processes()) {
    text += (text.empty() ? "" : ",") + std::to_string(process->process().mark);
  }
  return text;
}

struct DeleteAsRoot {
  template <typename T>
  void operator()(T* object) const {
    const AsRoot root;
    delete object;
  }
};

// One checkpoint. Its steps are in the order in which they are declared.
class Saving {
 public:
  Saving(const SaveJobOptions& options, const Job& job, const std::string& directory, SnapshotEngine* engine,
         SessionKeeper* keeper, JobReport* report, SaveJobOutcome* outcome)
      : options_(options),
        job_(job),
        directory_(directory),
        engine_(*engine),
        keeper_(keeper),
        report_(*report),
        outcome_(outcome),
        live_(job, directory, claim_, &images_),
        transaction_(job_, &live_, engine, keeper) {
    save_.close_tcp = options.close_tcp;
    save_.cancelled = cancelled_;
  }
  ~Saving() { DropSnapshots(); }

  absl::Status Run();
  // The path by which the job's user knows the image.
  std::string ImagePath() const;
  // The path by which the engine knows its part of the image; empty: it has none yet.
  std::string inside() const { return image_ ? image_->client_dir() : std::string(); }
  // At most how many bytes the image has, without compression.
  uint64_t needed() const { return memory_bytes_ + processes_bytes_; }

 private:
  // While the job runs.
  absl::Status Claim();
  absl::Status BeginImage();
  absl::Status CopyWhileItRuns();
  // In the pause.
  absl::Status Hold();
  absl::Status ListMemory();
  absl::Status ReadMemory();
  absl::Status ReadMemoryOf(size_t index, const Continue& go_on);
  absl::Status SaveProcesses();
  absl::Status GoOn();
  // Behind it.
  absl::Status WriteLogs();
  absl::Status ReadSnapshots();
  absl::Status Finish();
  void End();
  void RemoveOldImages();
  void NoteSaved();

  // Of a checkpoint that fails before the job continues.
  void DropSnapshots();
  absl::Status Of(const LiveProcess& process, const absl::Status& status) const {
    return AnnotateOneOf(live_.processes().size(), process.Name(), status);
  }
  // Fails if the person who waits has had enough.
  absl::Status CheckNotCancelled() const {
    return cancelled_() ? absl::CancelledError("interrupted") : absl::OkStatus();
  }

  const SaveJobOptions& options_;
  const Job& job_;
  const std::string& directory_;
  SnapshotEngine& engine_;
  SessionKeeper* const keeper_;
  JobReport& report_;
  SaveJobOutcome* const outcome_;
  const std::function<bool()> cancelled_ = [this] { return report_.Cancelled(); };
  const Moment start_ = Now();

  // In the order in which they were made; they go in the opposite one.
  GiveWay give_way_;  // to the end: much memory is given back
  SaveOptions save_;
  std::string facts_;  // the engine's
  JobClaim claim_;
  uint64_t process_bytes_ = 0;       // of host memory, for the memory of processes
  uint64_t processes_bytes_ = 0;     // of the memory of processes
  std::unique_ptr<ChunkPool> pool_;  // outlives the image, whose threads write out of it
  std::string given_;  // where cr-hostd puts the image for its user; empty: nowhere, or there is no cr-hostd
  std::unique_ptr<ckptfmt::ImageStore, DeleteAsRoot> store_;
  std::unique_ptr<ckptfmt::ImageWriter, DeleteAsRoot> image_;
  Precopies copies_;
  std::unique_ptr<SharedBuffers> shared_;
  ImagesAhead images_;
  LiveJob live_;
  JobTransaction transaction_;
  bool goes_on_ = false;
  ckptfmt::ImageInfo info_;
  std::vector<std::vector<ckptfmt::Region>> regions_;  // of each process
  uint64_t memory_bytes_ = 0;                          // of all
  std::vector<std::unique_ptr<Behind>> behind_;        // of each process
  std::shared_ptr<void> upkeep_;                       // beside the writing
};

absl::Status Saving::Run() {
  CR_RETURN_IF_ERROR(Claim());
  CR_RETURN_IF_ERROR(BeginImage());
  CR_RETURN_IF_ERROR(CopyWhileItRuns());
  CR_RETURN_IF_ERROR(Hold());
  CR_RETURN_IF_ERROR(ListMemory());
  CR_RETURN_IF_ERROR(ReadMemory());
  CR_RETURN_IF_ERROR(SaveProcesses());
  if (!options_.stop) CR_RETURN_IF_ERROR(GoOn());
  CR_RETURN_IF_ERROR(WriteLogs());
  CR_RETURN_IF_ERROR(ReadSnapshots());
  CR_RETURN_IF_ERROR(Finish());
  outcome_->sizes = image_->sizes();
  if (options_.stop) End();
  RemoveOldImages();
  if (!options_.stop) NoteSaved();
  outcome_->seconds = SecondsSince(start_);
  return absl::OkStatus();
}

absl::Status Saving::Claim() {
  if (!options_.gate) engine_.KeepLogs(Absolute(options_.image));
  if (engine_.Capabilities().needs_root && job_.no_checkpoint().empty()) {
    const AsRoot root;
    if (geteuid() != 0) {
      std::string refusal = "saving processes needs root";
      if (job_.users_own()) refusal += ", who can save this job: cr-checkpoint " + job_.directory() + " DIR";
      return absl::PermissionDeniedError(refusal);
    }
  }
  // First the claim: another tool may be at work on the job's processes, or an engine may be that outlived one.
  if (JobIsAlive(job_)) CR_RETURN_IF_ERROR(claim_.Take(directory_, report_.Tool(), cancelled_));
  CR_RETURN_IF_ERROR(engine_.Describe(job_, save_, &facts_));
  return engine_.CheckUsable();
}

absl::Status Saving::BeginImage() {
  ckptfmt::WriterOptions writer_options;
  writer_options.zstd_level = options_.compress;
  writer_options.job_folder = job_.directory();
  AtStep("begin the image");
  if (options_.gate) {
    CR_ASSIGN_OR_RETURN(given_, options_.gate->Pass(IMAGE_BEGINS));
  }
  {
    // The image is root's also where this tool acts as the job's user.
    const AsRoot root;
    if (options_.keep > 0) {
      CR_ASSIGN_OR_RETURN(auto opened, ckptfmt::ImageStore::Open(options_.image));
      store_.reset(opened.release());
    }
    CR_ASSIGN_OR_RETURN(auto created, store_ ? store_->Create(writer_options)
                                             : ckptfmt::ImageWriter::Create(options_.image, writer_options));
    image_.reset(created.release());
  }
  outcome_->image = !given_.empty() ? given_ : store_ ? image_->dir() : options_.image;
  if (store_ && !store_->sharing().ok()) {
    report_.Say("the image shares nothing with earlier ones: " + std::string(store_->sharing().message()));
  }
  process_bytes_ = processes_bytes_ = engine_.PreparedBytes(job_);
  CR_ASSIGN_OR_RETURN(pool_, MakePool(options_, &process_bytes_));
  return absl::OkStatus();
}

absl::Status Saving::CopyWhileItRuns() {
  const bool ends = options_.stop;  // a job that ends waits for nothing
  if (!ends) {
    give_way_.Begin();
    AtStep("look at GPU memory while the job runs");
    copies_ = LookBefore(job_, directory_, *image_, pool_.get(), cancelled_);
  }
  report_.Done("looking at GPU memory while the job runs");
  const Moment preparing = Now();
  if (!ends) PreparePool(job_, directory_, copies_, pool_.get(), cancelled_);
  CR_RETURN_IF_ERROR(CheckNotCancelled());
  shared_ = SharedBuffers::Make();
  outcome_->preparing = SecondsSince(preparing);
  outcome_->prepared_bytes = pool_->prepared();
  if (!ends) engine_.PrepareDump(job_, process_bytes_);
  report_.Done("making host memory ready");
  if (!ends) {
    AtStep("copy GPU memory while the job runs");
    CopyBefore(job_, directory_, copies_, pool_.get(), shared_.get(), cancelled_);
  }
  CR_RETURN_IF_ERROR(CheckNotCancelled());
  report_.Done("copying GPU memory while the job runs");
  if (options_.waits) CR_RETURN_IF_ERROR(options_.gate->Pass(JOB_READY).status());
  if (!ends) {
    AtStep("read module images");
    images_.Read(job_, directory_);
    report_.Done("reading module images while the job runs");
  }
  return absl::OkStatus();
}

absl::Status Saving::Hold() {
  give_way_.End();
  keeper_->Watch(&live_);
  agent::LockOptions lock;
  lock.timeout_ms = int(options_.timeout * 1000);
  lock.cancelled = cancelled_;
  CR_RETURN_IF_ERROR(transaction_.Begin(lock));
  report_.Done("locking the job");
  if (!options_.waits) return absl::OkStatus();
  AtStep("wait for the other hosts to lock");
  return options_.gate->Pass(JOB_LOCKED).status();
}

absl::Status Saving::ListMemory() {
  AtStep("list GPU memory");
  for (const auto& process : live_.processes()) {
    ckptfmt::ProcessInfo facts;
    std::vector<ckptfmt::Region> regions;
    CR_RETURN_IF_ERROR(Of(*process, DescribeHeld(live_, process.get(), &facts, &regions)));
    for (ckptfmt::Region& region : regions) {
      region.process = uint32_t(regions_.size());
      memory_bytes_ += region.bytes;
    }
    info_.processes.push_back(std::move(facts));
    regions_.push_back(std::move(regions));
  }
  // The processor and the disk are for the job until it goes on.
  if (!options_.stop) image_->HoldChunks();
  return absl::OkStatus();
}

absl::Status Saving::ReadMemory() {
  const Moment reading = Now();
  {
    const auto progress = report_.Begin("saving GPU memory");
    uint64_t before = 0;
    for (size_t i = 0; i < regions_.size(); ++i) {
      const auto go_on = [&](uint64_t done, uint64_t) {
        progress->Update(before + done, memory_bytes_);
        return !cancelled_();
      };
      AtStep("read GPU memory", i, regions_.size());
      CR_RETURN_IF_ERROR(Of(*live_.processes()[i], ReadMemoryOf(i, go_on)));
      for (const ckptfmt::Region& region : regions_[i]) before += region.bytes;
    }
  }
  outcome_->reading = SecondsSince(reading);
  report_.Done(kStepReading);
  return absl::OkStatus();
}

absl::Status Saving::ReadMemoryOf(size_t index, const Continue& go_on) {
  LiveProcess& process = *live_.processes()[index];
  const auto found = copies_.find(process.info().session);
  Precopy* const copy = found == copies_.end() ? nullptr : found->second.get();
  Behind* behind = nullptr;
  if (!options_.stop) {
    behind_.push_back(std::make_unique<Behind>());
    behind = behind_.back().get();
    behind->process = process.process();
  }
  CR_RETURN_IF_ERROR(SaveMemory(process.channel(), regions_[index], image_.get(), pool_.get(), !options_.stop,
                                shared_.get(), copy, behind ? &behind->snapshot : nullptr,
                                behind ? &behind->use : nullptr, go_on, &outcome_->saving));
  if (behind && behind->snapshot.bytes() != 0) {
    const ChannelFds fds = process.channel()->DupFds();
    behind->socket.Reset(fds.socket);
    behind->ring.Reset(fds.ring);
    behind->next_sequence = process.next_sequence() + kBehindGap;
    behind->welcome = process.channel()->welcome();
    outcome_->behind_bytes += behind->snapshot.bytes();
  }
  if (copy) outcome_->precopy.Add(copy->times());
  return absl::OkStatus();
}

absl::Status Saving::SaveProcesses() {
  // Once more: threads, files and processes may have come since.
  CR_RETURN_IF_ERROR(engine_.Describe(job_, save_, &facts_));
  report_.Done("looking at the job's processes again");
  CR_RETURN_IF_ERROR(CheckNotCancelled());
  info_.product_version = kVersion;
  info_.job = live_.processes().empty() ? job_.name() : Printable(live_.processes()[0]->info().job);
  info_.program = CommandOf(job_);
  info_.pid = uint32_t(job_.inner_pid());
  info_.job_folder = job_.directory();
  info_.engine = engine_.Name();
  info_.client_info["job"] = JobToJson(job_, /*one_line=*/true);
  info_.client_info[info_.engine] = facts_;
  info_.client_info["ranks"] = RanksText(live_);
  info_.client_info["programs"] = MarksText(live_);

  const Moment dumping = Now();
  if (options_.waits) {
    engine_.OnStill([this] {
      AtStep("wait for the other hosts to stand still");
      return options_.gate->Pass(JOB_STILL).status();
    });
  }
  const auto after = options_.stop || options_.waits ? SnapshotEngine::After::kStop : SnapshotEngine::After::kRun;
  CR_RETURN_IF_ERROR(transaction_.Snapshot(facts_, image_->client_dir(), directory_, after));
  CR_RETURN_IF_ERROR(engine_.ListNeeds(job_, facts_, image_->client_dir(), &info_.needs));
  outcome_->dumping = SecondsSince(dumping);
  report_.Done("saving the process");
  if (!options_.waits) return absl::OkStatus();
  AtStep("wait for the other hosts to be saved");
  return options_.gate->Pass(JOB_DUMPED).status();
}

absl::Status Saving::GoOn() {
  goes_on_ = true;
  CR_RETURN_IF_ERROR(transaction_.Resume());
  outcome_->paused = transaction_.HeldSeconds();
  give_way_.Begin();
  image_->ReleaseChunks();
  report_.Done("giving the job its session back");
  return absl::OkStatus();
}

void Saving::DropSnapshots() {
  for (size_t i = 0; !goes_on_ && i < behind_.size(); ++i) {
    if (ClientChannel* const channel = live_.processes()[i]->channel()) behind_[i]->snapshot.Drop(channel);
  }
}

absl::Status Saving::WriteLogs() {
  AtStep("write the logs");
  for (const auto& process : live_.processes()) {
    std::string log;
    process->log().Serialize(&log);
    const AsRoot root;
    CR_RETURN_IF_ERROR(image_->WriteLog(log));
  }
  report_.Done("writing the log");
  return absl::OkStatus();
}

absl::Status Saving::ReadSnapshots() {
  if (options_.stop) return absl::OkStatus();
  AtStep("read what was kept on the GPU");
  const Moment reading = Now();
  uint64_t before = 0;
  {
    const auto progress = report_.Begin("reading what was kept on the GPU");
    for (const auto& one : behind_) {
      const auto go_on = [&](uint64_t done, uint64_t) {
        progress->Update(before + done, outcome_->behind_bytes);
        return !cancelled_();
      };
      CR_RETURN_IF_ERROR(ReadBehind(one.get(), directory_, shared_.get(), pool_.get(), go_on));
      before += one->snapshot.bytes();
    }
    outcome_->behind = SecondsSince(reading);
  }
  if (before != 0) report_.Done("reading what was kept on the GPU");
  return absl::OkStatus();
}

// Once all is in memory or in files: the files are written, and the image is complete.
absl::Status Saving::Finish() {
  upkeep_ = engine_.BeginUpkeep();
  AtStep("write GPU memory");
  absl::Status written;
  {
    const auto progress = report_.Begin("writing GPU memory");
    written = image_->WaitForChunks([&](uint64_t done, uint64_t total) {
      progress->Update(done, total);
      return !cancelled_();
    });
  }
  report_.Done("hashing and writing GPU memory");
  CR_RETURN_IF_ERROR(written);
  CR_RETURN_IF_ERROR(CheckNotCancelled());
  AtStep("write the memory of processes");
  CR_RETURN_IF_ERROR(engine_.FinishFiles());
  report_.Done("writing the memory of processes");
  AtStep("commit the image");
  {
    const auto progress = report_.Begin("writing to the disk");
    const AsRoot root;
    const auto show = [&](uint64_t done, uint64_t total) { progress->Update(done, total); };
    CR_RETURN_IF_ERROR(image_->Commit(info_, show));
  }
  report_.Done("flushing to the disk");
  if (!options_.gate) return absl::OkStatus();
  AtStep("give the image to its user");
  CR_RETURN_IF_ERROR(options_.gate->Pass(IMAGE_COMPLETE).status());
  report_.Done("giving the image to its user");
  return absl::OkStatus();
}

void Saving::End() {
  // It may have been killed, and another one runs in its folder.
  if (JobIsAlive(job_)) NoteStopped(directory_, ImagePath());
  for (const auto& process : live_.processes()) {
    const ActAs user(AccountOf(job_));
    TellStopped(process->server(), process->info().session, UnixMs(), outcome_->sizes.total_bytes);
  }
  if (!transaction_.End()) report_.Say("the job could not be ended; it is stopped");
  outcome_->paused = transaction_.HeldSeconds();
  report_.Done("ending the job");
}

void Saving::RemoveOldImages() {
  // What cr-hostd has given to its user it has removed here, and there it removes old ones.
  if (!store_ || !given_.empty()) return;
  AtStep("remove old images");
  const AsRoot root;
  const absl::StatusOr<size_t> pruned = store_->Prune(options_.keep);
  if (!pruned.ok()) {
    report_.Say("the image is complete, but old images could not be removed: " +
                std::string(pruned.status().message()) + "; the next checkpoint tries again");
  }
  report_.Done("removing old images");
}

std::string Saving::ImagePath() const {
  if (!given_.empty()) return given_;
  return Absolute(outcome_->image.empty() ? options_.image : outcome_->image);
}

// For cr-ps, now and after a move.
void Saving::NoteSaved() {
  // An image that cr-hostd sends to another host is nothing that the job could be restarted from later.
  if (options_.gate && given_.empty()) return;
  absl::StatusOr<Job> told = ReadJob(directory_);
  if (!told.ok() || !IsSameRun(*told, job_)) return;
  told->set_saved_unix_ms(UnixMs());
  told->set_saved_bytes(outcome_->sizes.total_bytes);
  told->set_saved_image(ImagePath());
  const absl::Status written = WriteJob(directory_, *told);
  if (!written.ok()) report_.Say(std::string(written.message()));
  for (const auto& process : live_.processes()) {
    const ActAs user(AccountOf(job_));
    TellSaved(process->server(), process->info().session, told->saved_unix_ms(), told->saved_bytes());
  }
}

}  // namespace

absl::Status OfImage(const absl::Status& status, const std::string& inside, const std::string& image, uint64_t needed,
                     const std::string& folder) {
  std::string text(status.message());
  if (!inside.empty()) text = absl::StrReplaceAll(text, {{inside, image + "/client"}});
  const auto says = [&text](int error) { return text.find(strerror(error)) != std::string::npos; };
  if (says(ENOSPC) || says(EDQUOT)) {
    struct statvfs facts;
    absl::StrAppend(&text, ". The image ", image, " needs up to ", ByteText(double(needed)));
    if (statvfs(folder.c_str(), &facts) == 0) {
      const double free = double(facts.f_bavail) * double(facts.f_frsize);
      absl::StrAppend(&text, ", and ", folder, " has ", ByteText(free), " free");
    }
  }
  return absl::Status(status.code(), text);
}

absl::Status SaveJob(const SaveJobOptions& options, const Job& job, const std::string& directory,
                     SnapshotEngine* engine, SessionKeeper* keeper, JobReport* report, SaveJobOutcome* outcome) {
  std::string inside, image;
  uint64_t needed = 0;
  absl::Status saved;
  {
    Saving saving(options, job, directory, engine, keeper, report, outcome);
    saved = saving.Run();
    if (saved.ok()) return saved;
    inside = saving.inside();
    image = saving.ImagePath();
    needed = saving.needed();
  }
  // What was written is gone again, and its room is free.
  const std::string written = Absolute(options.image);
  return OfImage(saved, inside, image, needed, written.substr(0, std::max<size_t>(written.rfind('/'), 1)));
}

}  // namespace cuda_remote::checkpoint
