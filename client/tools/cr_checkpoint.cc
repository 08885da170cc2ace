// SPDX-License-Identifier: Apache-2.0
// cr-checkpoint: saves a running job. See --help.

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "checkpoint/engine/engines.h"
#include "checkpoint/gpu/gpu_state.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/job/own_job.h"
#include "checkpoint/job/ranks.h"
#include "checkpoint/transaction/at_step.h"
#include "checkpoint/transaction/live_job.h"
#include "checkpoint/transaction/session_keeper.h"
#include "ckptfmt/image_store.h"
#include "ckptfmt/image_writer.h"
#include "client/tools/background.h"
#include "client/tools/foreground.h"
#include "client/tools/progress.h"
#include "client/tools/steps.h"
#include "client/tools/through_hostd.h"
#include "proto/cli/wrong_use.h"
#include "proto/codec/json.h"
#include "proto/codec/text.h"
#include "proto/frame/frame.h"
#include "proto/frame/version.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kTool[] = "cr-checkpoint";
// Besides those of job.h.
constexpr int kExitInterrupted = 3;
constexpr uint64_t kStopPool = uint64_t{1} << 30;
// Requests to the session of a process that has ended are far from those that it has sent.
constexpr uint64_t kBehindGap = uint64_t{1} << 40;
// Of the pool, for what is read in the pause.
constexpr uint64_t kPausePool = uint64_t{256} << 20;

constexpr char kExamples[] = R"(
Examples:
  cr-checkpoint train /data/train.image           saves the job; it goes on
  cr-checkpoint --stop train /data/train.image    saves it and ends it; later: cr-restart /data/train.image
  cr-checkpoint --every 10m train /data/train.image   again and again; each whole image replaces the one before
  cr-checkpoint --hosts node1,node2 train /data/train  one job on two hosts; then on each: cr-restart /data/train/member-N
  cr-checkpoint --hosts node1,node2 --every 10m --keep 3 train /data/train   again and again, the last three of both
  cr-checkpoint --every 10m --keep 3 train /data/train   keeps the last three images, which share what is the same in them

GPU memory that the job does not write to all the time is copied to host memory while the job runs. Then the job stands
still while the rest follows and its processes are saved; what must be hashed, compressed and written is done behind it,
while the job goes on. That takes as much host memory as the job has GPU
memory, if that is there (--pool); of a job with more than that, the rest goes through it while the job stands still.
With --stop the memory is written as it comes, through a small pool. A checkpoint that fails, or is interrupted or
killed, leaves the job running and no new image. Needs CRIU (tools/setup-criu) and root; where cr-hostd runs, an ordinary
user saves jobs that her own cr-run has started. Where it does not run, root saves jobs that users have started with
cr-run --plain.

With --keep N, DIR holds the last N images of the job (image-000001, ...). What an earlier one has of the GPU memory is not
written again. cr-restart DIR takes the newest, cr-restart DIR/image-000007 that one; cr-inspect DIR lists them.

With --hosts and --keep, DIR/image-N/member-M is the image on the host M. An image is removed only when all hosts have
newer ones of one moment, as many as are kept. cr-restart DIR --hosts takes the newest that all hosts have.

With --every, a checkpoint that fails is reported with the time, the last image stays, and the next try follows at the
next interval.

Exit codes: 0 saved (--every: the job has ended, and was saved at least once), 1 failed (--every: the job has ended and was
never saved), 2 wrong use, 3 interrupted (the job goes on; with --every the last image stays), 4 no such job.
)";

struct Options {
  std::string job, image, hosts;
  bool stop = false, tcp_close = false, json = false, quiet = false, times = false;
  double every = 0, timeout = 60;
  int compress = -1;  // what is faster
  size_t keep = 0;    // 0: DIR is the image
  std::optional<uint64_t> pool;
};

struct Outcome {
  std::string image;
  double seconds = 0, paused = 0;
  // Parts of it: making memory ready beforehand, then reading GPU memory and the engine's dump in the pause.
  double preparing = 0, reading = 0, dumping = 0;
  uint64_t prepared_bytes = 0;
  // Copying GPU memory while the job runs.
  PrecopyTimes precopy;
  SaveTimes saving;
  // Kept on the GPU in the pause and read behind it.
  uint64_t behind_bytes = 0;
  double behind = 0;
  ckptfmt::ImageSizes sizes;
};

// As the person knows the job: cr-hostd says its folder, which ends with its name.
std::string NameFor(const Options& options) {
  return Caller::Get() ? options.job.substr(options.job.rfind('/') + 1) : options.job;
}

double Since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

uint64_t NowMs() {
  using std::chrono::duration_cast, std::chrono::milliseconds, std::chrono::system_clock;
  return uint64_t(duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count());
}

std::string CommandOf(const Job& job) {
  std::string text;
  for (const std::string& word : job.command()) text += (text.empty() ? "" : " ") + word;
  return text;
}

// Host memory for the GPU memory of the job; none of it is ready to be written to yet.
std::unique_ptr<ChunkPool> MakePool(const Options& options, std::string* error) {
  uint64_t limit = options.pool ? *options.pool : SpareMemory();
  // A job that ends does not wait for anything: then more memory saves no time.
  if (options.stop && !options.pool) limit = std::min(limit, kStopPool);
  auto pool = std::make_unique<ChunkPool>(limit);
  if (!pool->ok()) {
    *error = "there is no memory to save GPU memory through";
    return nullptr;
  }
  return pool;
}

// Copies of the job's GPU memory that are made while it runs, by session.
using Precopies = std::map<uint64_t, std::unique_ptr<Precopy>>;

// Looks at the job's memory while it runs. A process that cannot be asked has no copies; its memory is read in the
// pause.
Precopies LookBefore(const Job& job, const std::string& directory, const ckptfmt::ImageWriter& image, ChunkPool* pool,
                     const std::function<bool()>& cancelled) {
  const auto is_known = [&image](const ckptfmt::Region& region, uint64_t index, const ChunkHash& hash) {
    return image.Has(region, index, {hash.low, hash.high});
  };
  Precopies copies;
  for (const CudaProcess& process : FindCudaProcesses(job, directory)) {
    std::string ignored;
    const auto running = RunningProcess::Connect(process, directory, &ignored);
    if (!running) continue;
    auto& copy = copies[running->session()];
    copy = std::make_unique<Precopy>(pool, is_known);
    copy->Look(running.get(), cancelled, &ignored);
  }
  return copies;
}

// Makes as much of the pool ready as the job needs now.
void PreparePool(const Job& job, const std::string& directory, const Precopies& copies, ChunkPool* pool,
                 const std::function<bool()>& cancelled) {
  uint64_t held = AskHeldBytes(job, directory);
  for (const auto& [session, copy] : copies) held -= std::min(held, copy->known_bytes());
  // Regions end within a slot.
  if (held > 0) pool->Prepare(held + held / 16, cancelled);
}

void CopyBefore(const Job& job, const std::string& directory, const Precopies& copies, ChunkPool* pool,
                SharedBuffers* shared, const std::function<bool()>& cancelled) {
  // The pause needs room for what is read then.
  uint64_t room = pool->limit() - std::min(pool->limit(), std::max(kPausePool, pool->limit() / 8));
  for (const CudaProcess& process : FindCudaProcesses(job, directory)) {
    std::string ignored;
    const auto running = RunningProcess::Connect(process, directory, &ignored);
    const auto copy = running ? copies.find(running->session()) : copies.end();
    if (copy == copies.end() || room == 0) continue;
    copy->second->Run(running.get(), shared, room, cancelled, &ignored);
    room -= std::min(room, copy->second->held_bytes());
  }
}

// What was taken on the GPU of one process, and how it is reached when the job runs again.
struct Behind {
  GpuSnapshot snapshot;
  UseChunk use;
  CudaProcess process;
  // The session, should the process end before it has been read.
  ChannelFds fds;
  uint64_t next_sequence = 0;
  Welcome welcome;

  Behind() = default;
  Behind(const Behind&) = delete;
  Behind& operator=(const Behind&) = delete;
  ~Behind() {
    for (const int fd : {fds.socket, fds.ring}) {
      if (fd >= 0) close(fd);
    }
  }
};

bool ReadBehind(Behind* behind, const std::string& directory, SharedBuffers* shared, ChunkPool* pool,
                const Continue& go_on, std::string* error) {
  if (behind->snapshot.bytes() == 0) return true;
  if (const auto running = RunningProcess::Connect(behind->process, directory, error)) {
    if (behind->snapshot.Read(running.get(), shared, pool, behind->use, go_on, error)) return true;
    if (!EndsNow(behind->process.pid)) return false;
  } else if (!EndsNow(behind->process.pid)) {
    return false;
  }
  // It has ended. Its session has not: the tool still holds it.
  const auto channel = ClientChannel::Adopt(behind->fds, behind->next_sequence, behind->welcome, error);
  behind->fds = ChannelFds();
  if (!channel) return false;
  ChannelRequests requests(channel.get());
  return behind->snapshot.Read(&requests, shared, pool, behind->use, go_on, error);
}

void TellTransfer(const TransferTimes& times, Steps* steps) {
  const auto count = [](uint64_t chunks, uint64_t bytes) {
    return std::to_string(chunks) + " chunks, " + Bytes(double(bytes));
  };
  steps->Part(times.slots, "for room in host memory (this and what follows: of " + std::to_string(times.threads) +
                               " threads together; " + std::to_string(times.page_faults) + " page faults)");
  steps->Part(times.requests, "sending requests for " + std::to_string(times.regions) + " regions");
  steps->Part(times.channel,
              "waiting for " + count(times.channel_chunks, times.channel_bytes) + " through the channel");
  steps->Part(times.copies,
              "waiting for " + count(times.shared_chunks, times.shared_bytes) + " through shared buffers");
  steps->Part(times.emptying, "copying out of shared buffers");
  steps->Part(times.using_, "handing chunks to the image");
  if (times.longest > 0) steps->Part(times.longest, "the longest wait, for " + times.longest_chunk);
}

// Says which process it was about, of several. False.
bool Of(const LiveProcess& process, size_t count, std::string* error) {
  if (count > 1) *error = process.Name() + ": " + *error;
  return false;
}

// What the image says of each process, and which memory each has.
bool DescribeHeld(LiveJob* live, ckptfmt::ImageInfo* info, std::vector<std::vector<ckptfmt::Region>>* regions,
                  std::string* error) {
  const size_t count = live->processes().size();
  for (size_t i = 0; i < count; ++i) {
    LiveProcess& process = *live->processes()[i];
    ckptfmt::ProcessInfo facts;
    if (!Drain(process.channel(), error) || !DescribeServer(process.channel(), &facts, error) ||
        !ListRegions(process.channel(), &(*regions)[i], error, live->SessionsAt(process.info().server))) {
      return Of(process, count, error);
    }
    for (ckptfmt::Region& region : (*regions)[i]) region.process = uint32_t(i);
    facts.pid = uint32_t(process.process().inner_pid);
    facts.program = process.process().program;
    facts.server = process.info().server;
    facts.next_sequence = process.next_sequence();
    facts.wire_version = kWireVersion;
    facts.session = process.info().session;
    facts.shared_memory = process.info().shared_memory;
    facts.driver_settings = process.info().driver_settings;
    facts.address_layout = process.info().address_layout;
    facts.log_records = process.log().records();
    facts.log_images = process.log().images();
    info->processes.push_back(std::move(facts));
  }
  return true;
}

// The rank of each process, for cr-restart --map: "0,1,-1".
std::string RanksText(LiveJob& live) {
  std::vector<int> pids;
  for (const auto& process : live.processes()) pids.push_back(process->process().pid);
  std::string text;
  for (const int rank : RanksOf(pids)) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text;
}

struct DeleteAsRoot {
  template <typename T>
  void operator()(T* object) const {
    const AsRoot root;
    delete object;
  }
};

// One checkpoint. False and *error: there is no image, and the job goes on.
bool Checkpoint(const Options& options, const std::string& directory, Job job, SessionKeeper* keeper,
                const std::function<bool()>& cancelled, Outcome* outcome, std::string* error) {
  const Clock::time_point start = Clock::now();
  Steps steps(kTool, options.times);
  const std::unique_ptr<SnapshotEngine> made = NewEngine();
  SnapshotEngine& engine = *made;
  // Of cr-hostd's, which gives the image to its user when it is complete.
  const Caller* const caller = Caller::Get();
  if (!caller) engine.KeepLogs(Absolute(options.image));
  SaveOptions save;
  save.close_tcp = options.tcp_close;
  std::string facts;
  JobClaim claim;
  // First the claim: another tool may be at work on the job's processes, or an engine may be that outlived one.
  if ((JobIsAlive(job) && !claim.Take(directory, kTool, cancelled, error)) ||
      !engine.Describe(job, save, &facts, error) || !engine.CheckUsable(error)) {
    return false;
  }
  ckptfmt::WriterOptions writer_options;
  writer_options.zstd_level = options.compress;
  writer_options.job_folder = job.directory();
  // Outlives the image, whose threads write out of it.
  std::unique_ptr<ChunkPool> pool;
  const auto failed = [error](const absl::Status& status) {
    *error = std::string(status.message());
    return false;
  };
  AtStep("begin the image");
  std::string given;  // as the user is to know the image
  if (caller && !caller->Announce(kImageBegins, error, &given)) return false;
  // The image is root's also where this tool acts as the job's user.
  auto image_rights = std::make_unique<AsRoot>();
  std::unique_ptr<ckptfmt::ImageStore, DeleteAsRoot> store;
  if (options.keep > 0) {
    auto opened = ckptfmt::ImageStore::Open(options.image);
    if (!opened.ok()) return failed(opened.status());
    store.reset(opened->release());
  }
  auto created = store ? store->Create(writer_options) : ckptfmt::ImageWriter::Create(options.image, writer_options);
  if (!created.ok()) return failed(created.status());
  const std::unique_ptr<ckptfmt::ImageWriter, DeleteAsRoot> image(created->release());
  image_rights.reset();
  outcome->image = !given.empty() ? given : store ? image->dir() : options.image;
  if (store && !store->sharing().ok()) {
    Say(kTool, "the image shares nothing with earlier ones: " + std::string(store->sharing().message()));
  }
  pool = MakePool(options, error);
  if (!pool) return false;
  Precopies copies;
  // A job that ends waits for nothing.
  if (!options.stop) AtStep("look at GPU memory while the job runs");
  if (!options.stop) copies = LookBefore(job, directory, *image, pool.get(), cancelled);
  steps.Done("looking at GPU memory while the job runs");
  const Clock::time_point preparing = Clock::now();
  if (!options.stop) PreparePool(job, directory, copies, pool.get(), cancelled);
  if (cancelled()) {
    *error = "interrupted";
    return false;
  }
  const std::unique_ptr<SharedBuffers> shared = SharedBuffers::Make();
  outcome->preparing = Since(preparing);
  outcome->prepared_bytes = pool->prepared();
  if (!options.stop) engine.Prepare(job);
  steps.Done("making host memory ready");
  if (!options.stop) AtStep("copy GPU memory while the job runs");
  if (!options.stop) CopyBefore(job, directory, copies, pool.get(), shared.get(), cancelled);
  if (cancelled()) {
    *error = "interrupted";
    return false;
  }
  steps.Done("copying GPU memory while the job runs");
  // Over several hosts: all come so far, and stand still until all are saved.
  const bool waits = caller && caller->waits();
  if (waits && !caller->Announce(kJobReady, error)) return false;
  ImagesAhead images;
  // A job that ends waits for nothing.
  if (!options.stop) {
    AtStep("read module images");
    images.Read(job, directory);
    steps.Done("reading module images while the job runs");
  }
  LiveJob live(job, directory, claim, &images);
  keeper->Watch(&live);
  JobTransaction transaction(job, &live, &engine, keeper);
  agent::LockOptions lock;
  lock.timeout_ms = int(options.timeout * 1000);
  lock.cancelled = cancelled;
  if (!transaction.Begin(lock, error)) return false;
  steps.Done("locking the job");
  if (waits) AtStep("wait for the other hosts to lock");
  if (waits && !caller->Announce(kJobLocked, error)) return false;

  ckptfmt::ImageInfo info;
  std::vector<std::vector<ckptfmt::Region>> regions(live.processes().size());
  AtStep("list GPU memory");
  if (!DescribeHeld(&live, &info, &regions, error)) return false;
  // The processor and the disk are for the job until it goes on.
  uint64_t pool_bytes = 0, memory_bytes = 0;
  for (const std::vector<ckptfmt::Region>& of_one : regions) {
    pool_bytes += PoolBytesFor(of_one);
    for (const ckptfmt::Region& region : of_one) memory_bytes += region.bytes;
  }
  const bool fits = pool_bytes <= pool->limit();
  if (!options.stop && fits) image->HoldChunks();
  std::vector<std::unique_ptr<Behind>> behind;
  // Of a checkpoint that fails before the job goes on.
  struct Dropper {
    LiveJob* live;
    std::vector<std::unique_ptr<Behind>>* behind;
    ~Dropper() {
      for (size_t i = 0; live && i < behind->size(); ++i) {
        if (ClientChannel* const channel = live->processes()[i]->channel()) (*behind)[i]->snapshot.Drop(channel);
      }
    }
  } dropper{&live, &behind};
  {
    Progress progress("saving GPU memory", options.quiet);
    const Clock::time_point reading = Clock::now();
    uint64_t before = 0;
    for (size_t i = 0; i < regions.size(); ++i) {
      const auto go_on = [&](uint64_t done, uint64_t) {
        progress.Update(before + done, memory_bytes);
        return !cancelled();
      };
      LiveProcess& process = *live.processes()[i];
      AtStep("read GPU memory", i, regions.size());
      const auto found = copies.find(process.info().session);
      Precopy* const copy = found == copies.end() ? nullptr : found->second.get();
      GpuSnapshot* snapshot = nullptr;
      UseChunk* later = nullptr;
      if (!options.stop) {
        behind.push_back(std::make_unique<Behind>());
        behind.back()->process = process.process();
        snapshot = &behind.back()->snapshot;
        later = &behind.back()->use;
      }
      if (!SaveMemory(process.channel(), regions[i], image.get(), pool.get(), fits, shared.get(), copy, snapshot, later,
                      go_on, &outcome->saving, error)) {
        return Of(process, regions.size(), error);
      }
      if (snapshot && snapshot->bytes() != 0) {
        behind.back()->fds = process.channel()->DupFds();
        behind.back()->next_sequence = process.next_sequence() + kBehindGap;
        behind.back()->welcome = process.channel()->welcome();
        outcome->behind_bytes += snapshot->bytes();
      }
      if (copy) outcome->precopy.Add(copy->times());
      for (const ckptfmt::Region& region : regions[i]) before += region.bytes;
    }
    outcome->reading = Since(reading);
  }
  steps.Done("reading GPU memory");
  if (outcome->saving.hashing > 0) {
    steps.Part(outcome->saving.hashing, "of it, hashing on the GPU: earlier images have " +
                                            Bytes(double(outcome->saving.unread_bytes)) + ", and " +
                                            Bytes(double(outcome->precopy.kept_bytes)) + " of " +
                                            Bytes(double(outcome->precopy.copied_bytes)) + " copied before are right");
  }
  steps.Part(outcome->saving.taking, "of it, copying " + Bytes(double(outcome->behind_bytes)) + " inside the GPU");
  steps.Part(outcome->saving.attaching, "of it, letting the GPU server map the buffers");
  TellTransfer(outcome->saving.reading, &steps);
  steps.Part(outcome->saving.detaching, "of it, taking the buffers back");
  // Once more: threads, files and processes may have come since.
  if (!engine.Describe(job, save, &facts, error)) return false;
  steps.Done("looking at the job's processes again");
  if (cancelled()) {
    *error = "interrupted";
    return false;
  }
  info.product_version = kVersion;
  info.job = live.processes().empty() ? job.name() : Printable(live.processes()[0]->info().job);
  info.program = CommandOf(job);
  info.pid = uint32_t(job.inner_pid());
  info.job_folder = job.directory();
  info.engine = engine.Name();
  info.client_info["job"] = JobToJson(job, /*one_line=*/true);
  info.client_info[info.engine] = facts;
  info.client_info["ranks"] = RanksText(live);

  const Clock::time_point dumping = Clock::now();
  if (waits) {
    engine.OnStill([caller](std::string* problem) {
      AtStep("wait for the other hosts to stand still");
      return caller->Announce(kJobStill, problem);
    });
  }
  const auto after = options.stop || waits ? SnapshotEngine::After::kStop : SnapshotEngine::After::kRun;
  if (!transaction.Snapshot(facts, image->client_dir(), directory, after, error) ||
      !engine.ListNeeds(job, facts, image->client_dir(), &info.needs, error)) {
    return false;
  }
  outcome->dumping = Since(dumping);
  steps.Done("saving the process");
  if (waits) AtStep("wait for the other hosts to be saved");
  if (waits && !caller->Announce(kJobDumped, error)) return false;
  std::string problem;
  if (!options.stop) {
    dropper.live = nullptr;
    if (!transaction.Resume(error)) return false;
    outcome->paused = transaction.HeldSeconds();
    steps.Done("giving the job its session back");
  }
  AtStep("write the logs");
  for (const auto& process : live.processes()) {
    std::string log;
    process->log().Serialize(&log);
    const AsRoot root;
    const absl::Status logged = image->WriteLog(log);
    if (!logged.ok()) return failed(logged);
  }
  steps.Done("writing the log");
  if (!options.stop) AtStep("read what was kept on the GPU");
  {
    Progress progress("reading what was kept on the GPU", options.quiet);
    const Clock::time_point reading = Clock::now();
    uint64_t before = 0;
    for (const auto& one : behind) {
      const auto go_on = [&](uint64_t done, uint64_t) {
        progress.Update(before + done, outcome->behind_bytes);
        return !cancelled();
      };
      if (!ReadBehind(one.get(), directory, shared.get(), pool.get(), go_on, error)) return false;
      before += one->snapshot.bytes();
    }
    outcome->behind = Since(reading);
    if (before != 0) steps.Done("reading what was kept on the GPU");
  }
  const std::shared_ptr<void> upkeep = engine.BeginUpkeep();  // beside the writing
  absl::Status committed;
  AtStep("write GPU memory");
  {
    Progress progress("writing GPU memory", options.quiet);
    committed = image->WaitForChunks([&](uint64_t done, uint64_t total) {
      progress.Update(done, total);
      return !cancelled();
    });
  }
  steps.Done("hashing and writing GPU memory");
  if (committed.ok() && cancelled()) committed = absl::CancelledError("interrupted");
  AtStep("write the memory of processes");
  if (committed.ok() && !engine.FinishFiles(error)) return false;
  steps.Done("writing the memory of processes");
  if (committed.ok()) {
    AtStep("commit the image");
    Progress progress("writing to the disk", options.quiet);
    const AsRoot root;
    committed = image->Commit(info, [&](uint64_t done, uint64_t total) { progress.Update(done, total); });
  }
  if (!committed.ok()) return failed(committed);
  steps.Done("flushing to the disk");
  if (caller) {
    AtStep("give the image to its user");
    if (!caller->Announce(kImageComplete, error)) return false;
    steps.Done("giving the image to its user");
  }
  if (options.stop) {
    NoteStopped(directory, given.empty() ? Absolute(outcome->image) : given);
    if (!transaction.End()) Say(kTool, "the job could not be ended; it stands still");
    outcome->paused = transaction.HeldSeconds();
    steps.Done("ending the job");
  }
  outcome->sizes = image->sizes();
  if (store) {
    AtStep("remove old images");
    const AsRoot root;
    const absl::StatusOr<size_t> pruned = store->Prune(options.keep);
    if (!pruned.ok()) {
      Say(kTool, "the image is complete, but old images could not be removed: " +
                     std::string(pruned.status().message()) + "; the next checkpoint tries again");
    }
    steps.Done("removing old images");
  }
  // For cr-ps, now and after a move.
  Job told;
  if (!options.stop && ReadJob(directory, &told, &problem)) {
    told.set_saved_unix_ms(NowMs());
    told.set_saved_bytes(outcome->sizes.total_bytes);
    if (!WriteJob(directory, told, &problem)) Say(kTool, problem);
    for (const auto& process : live.processes()) {
      const ActAs user(AccountOf(job));
      TellSaved(GpuServerOf(directory), process->info().session, told.saved_unix_ms(), told.saved_bytes());
    }
  }
  outcome->seconds = Since(start);
  return true;
}

// A moment as people write it, here.
std::string TimeText(std::chrono::system_clock::time_point moment) {
  const time_t seconds = std::chrono::system_clock::to_time_t(moment);
  tm parts{};
  char text[32];
  if (!localtime_r(&seconds, &parts) || strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &parts) == 0) return "?";
  return text;
}

void Tell(const Options& options, const Outcome& outcome) {
  const ckptfmt::ImageSizes& sizes = outcome.sizes;
  const TransferTimes& reading = outcome.saving.reading;
  if (options.json) {
    JsonWriter json(JsonWriter::kSpaced);
    json.Begin('{');
    json.Member("image", outcome.image);
    json.RealMember("seconds", outcome.seconds, 3);
    json.RealMember("paused_seconds", outcome.paused, 3);
    json.RealMember("preparing_seconds", outcome.preparing, 3);
    json.RealMember("reading_seconds", outcome.reading, 3);
    json.RealMember("dumping_seconds", outcome.dumping, 3);
    json.Member("prepared_bytes", outcome.prepared_bytes);
    json.Member("gpu_bytes", sizes.region_bytes);
    json.Member("client_bytes", sizes.client_bytes);
    json.Member("total_bytes", sizes.total_bytes);
    json.Member("linked_bytes", sizes.linked_bytes);
    json.Member("unread_bytes", outcome.saving.unread_bytes);
    json.RealMember("hashing_seconds", outcome.saving.hashing, 3);
    json.Key("before");
    json.Begin('{');
    json.RealMember("seconds", outcome.precopy.seconds, 3);
    json.Member("rounds", outcome.precopy.rounds);
    json.Member("copied_bytes", outcome.precopy.copied_bytes);
    json.Member("kept_bytes", outcome.precopy.kept_bytes);
    json.End('}');
    json.Key("behind");
    json.Begin('{');
    json.RealMember("taking_seconds", outcome.saving.taking, 3);
    json.Member("bytes", outcome.behind_bytes);
    json.RealMember("seconds", outcome.behind, 3);
    json.End('}');
    json.Key("reading");
    json.Begin('{');
    json.RealMember("attaching_seconds", outcome.saving.attaching, 3);
    json.RealMember("detaching_seconds", outcome.saving.detaching, 3);
    json.Member("threads", uint64_t(reading.threads));
    json.Member("regions", reading.regions);
    json.Member("page_faults", reading.page_faults);
    json.Member("channel_chunks", reading.channel_chunks);
    json.Member("channel_bytes", reading.channel_bytes);
    json.Member("shared_chunks", reading.shared_chunks);
    json.Member("shared_bytes", reading.shared_bytes);
    json.RealMember("slot_seconds", reading.slots, 3);
    json.RealMember("request_seconds", reading.requests, 3);
    json.RealMember("channel_seconds", reading.channel, 3);
    json.RealMember("copy_seconds", reading.copies, 3);
    json.RealMember("emptying_seconds", reading.emptying, 3);
    json.RealMember("using_seconds", reading.using_, 3);
    json.RealMember("longest_seconds", reading.longest, 3);
    json.End('}');
    json.End('}');
    puts(json.text().c_str());
  } else if (!options.quiet) {
    const std::string time = options.every > 0 ? TimeText(std::chrono::system_clock::now()) + ": " : std::string();
    const std::string shared =
        sizes.linked_bytes > 0 ? ", of which earlier images have " + Bytes(double(sizes.linked_bytes)) : std::string();
    fprintf(stderr,
            "%s: %s%s in %.1f s (the job stood still for %.1f s): GPU memory %s, processes %s, on the disk %s%s\n",
            kTool, time.c_str(), outcome.image.c_str(), outcome.seconds, outcome.paused,
            Bytes(double(sizes.region_bytes)).c_str(), Bytes(double(sizes.client_bytes)).c_str(),
            Bytes(double(sizes.total_bytes)).c_str(), shared.c_str());
  }
  fflush(stdout);
}

// --every: what goes wrong once is said, and tried again at the next time.
int Repeat(const Options& options, const std::string& directory, const Job& job, SessionKeeper* keeper,
           const std::function<bool()>& cancelled) {
  using std::chrono::milliseconds, std::chrono::system_clock;
  const milliseconds interval(int64_t(options.every * 1000));
  // What is wrong for good.
  if (std::string error; !NewEngine()->CheckUsable(&error)) {
    Say(kTool, error);
    return kExitFailure;
  }
  std::string saved, last;  // when the last image was complete, and where it is
  const auto ended = [&] {
    if (saved.empty()) Say(kTool, "the job has ended, and there is no image of it from this run");
    return saved.empty() ? kExitFailure : 0;
  };
  while (true) {
    Outcome outcome;
    std::string error;
    const bool ok = Checkpoint(options, directory, job, keeper, cancelled, &outcome, &error);
    const Clock::time_point next = Clock::now() + interval;
    const system_clock::time_point now = system_clock::now();
    if (ok) {
      saved = TimeText(now);
      last = outcome.image;
      Tell(options, outcome);
    } else if (!JobIsAlive(job)) {
      return ended();
    } else if (!cancelled()) {
      Say(kTool,
          TimeText(now) + ": no checkpoint of " + NameFor(options) + ": " + error + "; the job goes on. " +
              (saved.empty() ? "There is no image from this run yet" : last + " is still the image of " + saved) +
              "; the next try is at " + TimeText(now + interval));
    }
    do {
      if (!JobIsAlive(job)) return ended();
      if (cancelled()) return kExitInterrupted;
      std::this_thread::sleep_for(std::min<Clock::duration>(milliseconds(100), interval));
    } while (Clock::now() < next);
  }
}

int Work(const Options& options, const Background& background) {
  const std::function<bool()>& cancelled = background.cancelled;
  std::string directory, error;
  Job job;
  const OwnersRights rights(options.job);
  if (!FindJob(options.job, &directory, &job, &error) || !rights.Check(directory, &job, &error)) {
    Say(kTool, error);
    return kExitNoJob;
  }
  const std::unique_ptr<SnapshotEngine> made = NewEngine();
  SnapshotEngine& engine = *made;
  const std::unique_ptr<SessionKeeper> keeper =
      SessionKeeper::Start(job, directory, kTool, &engine, background.helper_messages, &error);
  if (!keeper) {
    Say(kTool, error);
    return kExitFailure;
  }
  if (options.every <= 0) {
    Outcome outcome;
    if (!Checkpoint(options, directory, job, keeper.get(), cancelled, &outcome, &error)) {
      const char* const state = JobIsAlive(job) ? "; the job goes on" : "";
      Say(kTool, "no checkpoint of " + NameFor(options) + ": " + error + state);
      return cancelled() ? kExitInterrupted : kExitFailure;
    }
    Tell(options, outcome);
    return 0;
  }
  return Repeat(options, directory, job, keeper.get(), cancelled);
}

int Main(int argc, char** argv) {
  Options options;
  int caller = -1;
  CLI::App app("Saves a running job: its processes, their GPU objects and their GPU memory.", kTool);
  app.failure_message(WrongUse);
  app.footer(std::string(kWhichJob) + kExamples);
  app.set_version_flag("--version", VersionLine("cr-checkpoint"));
  app.add_option("JOB", options.job, "which job")->required();
  app.add_option("DIR", options.image,
                 "the image, a folder; an older image there is replaced (--keep: the folder of the images)")
      ->required();
  app.add_flag("--stop", options.stop, "end the job once it is saved");
  app.add_flag("--tcp-close", options.tcp_close,
               "save a job that has TCP connections with others; after a restart it finds those closed");
  app.add_option("--every", options.every, "repeat after this time (as in 30s, 10m, 2h) until the job ends")
      ->transform(CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}, {"m", 60}, {"h", 3600}},
                                        CLI::AsNumberWithUnit::CASE_INSENSITIVE));
  app.add_option("--keep", options.keep,
                 "keep the last N images in the folder DIR; they share data files where they are the same")
      ->type_name("N")
      ->check(CLI::Range(size_t{1}, size_t{10000}));
  app.add_option("--timeout", options.timeout, "seconds to wait for CUDA calls that are in progress")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86400.0));
  app.add_option(
         "--compress", options.compress,
         "Zstandard level for GPU memory; 0: none (default: the fastest one, where it makes the checkpoint faster)")
      ->check(CLI::Range(0, 19));
  app.add_option(
         "--pool", options.pool,
         "host memory for GPU memory that waits to be written, as in 16G; of more than this the job waits for the "
         "files (default: half of what this machine and control group have left; with --stop 1 GiB at most)")
      ->transform(CLI::AsSizeValue(false));
  app.add_option(
      "--hosts", options.hosts,
      "HOST,HOST,...: the user's jobs of this name on these hosts, as one: all are saved at the same moment or none "
      "is; by their cr-hostds, each into DIR/member-N of its host (N: which one in this list, from 1). HOST/NAME is "
      "a job of another name on that host");
  app.add_flag("--json", options.json, "print times and sizes as JSON");
  app.add_flag("--times", options.times, "tell how long each step took");
  app.add_flag("--quiet", options.quiet, "print errors only");
  app.add_option("--caller", caller, "used by cr-hostd")->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (options.stop && options.every > 0) {
    Say(kTool, "--stop and --every exclude each other");
    return kExitUsage;
  }
  std::string error;
  if (!options.hosts.empty()) {
    if (options.times) {
      Say(kTool, "--hosts excludes --times");
      return kExitUsage;
    }
    host::Request request = host::RequestOf(app, "group");
    for (host::Option& option : *request.mutable_options()) {
      if (option.name() == "every") option.set_value(std::to_string(options.every));
    }
    request.set_job(options.job);
    request.set_image(Absolute(options.image));
    return ThroughHostd(kTool, std::move(request), kExitFailure);
  }
  if (caller >= 0 && !Caller::Take(caller, &error)) {
    Say(kTool, error);
    return kExitFailure;
  }
  if (const std::string name = JobOfHostd(options.job); !name.empty()) {
    host::Request request = host::RequestOf(app, "checkpoint");
    request.set_job(name);
    request.set_image(Absolute(options.image));
    return ThroughHostd(kTool, std::move(request), kExitFailure);
  }
  return RunInBackground([&](const Background& background) { return Work(options, background); });
}

}  // namespace
}  // namespace cuda_remote::client::tools

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::tools::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-checkpoint: %s\n", error.what());
    return 1;
  }
}
