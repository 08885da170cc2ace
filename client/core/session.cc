// SPDX-License-Identifier: Apache-2.0
#include "client/core/session.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "client/core/call.h"
#include "client/core/devices.h"
#include "client/core/log.h"
#include "client/core/own_calls.h"
#include "client/core/relay_process.h"
#include "client/trace/control.h"
#include "client/trace/trace.h"
#include "proto/base/environment.h"
#include "proto/base/proc.h"
#include "proto/base/text.h"
#include "proto/channel/handshake.h"
#include "proto/codec/operations.gen.h"
#include "proto/driverabi/visible_devices.h"
#include "proto/folder/connection_lock.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::client {
namespace {

std::mutex g_connect_mutex;
std::atomic<bool> g_forked{false};
CUresult g_connect_result = CUDA_SUCCESS;

std::string ProgramName() {
  const std::string name = ReadLink("/proc/self/exe");
  return name.empty() ? "?" : name;
}

}  // namespace

std::atomic<Session*> Session::g_session{nullptr};

bool Session::InForkedChild() { return g_forked.load(std::memory_order_acquire); }

CUresult Session::Connect(Session** session) {
  *session = Get();
  if (*session) return (*session)->lost();
  // As the native driver: what a fork copied is unusable, and there is no second start in the same process.
  if (InForkedChild()) return CUDA_ERROR_NOT_INITIALIZED;
  std::lock_guard<std::mutex> lock(g_connect_mutex);
  *session = Get();
  if (*session) return (*session)->lost();
  if (g_connect_result != CUDA_SUCCESS) return g_connect_result;
  if (HasMoreRightsThanCaller()) {
    LogLine(
        "no GPU for this program: it runs with rights that its caller does not have (set-user-ID, set-group-ID or file "
        "capabilities), and the caller would choose its GPU server; start it as the user that it is to run as");
    return g_connect_result = CUDA_ERROR_NO_DEVICE;
  }
  Session* const opened = new (std::nothrow) Session;
  if (!opened) return CUDA_ERROR_OUT_OF_MEMORY;
  opened->settings_ = ReadSettings();
  // Until the agent is there: a tool that stops the job waits for this, or this for the tool. Settings again, since the
  // job may have another server by then.
  const ConnectionLock connecting(opened->settings_.job_dir);
  opened->settings_ = ReadSettings();
  g_connect_result = opened->Open();
  if (g_connect_result != CUDA_SUCCESS) {
    delete opened;
    return g_connect_result;
  }
  g_session.store(opened, std::memory_order_release);
  pthread_atfork(nullptr, nullptr, [] {
    if (!Get()) return;
    g_forked.store(true, std::memory_order_release);
    g_session.store(nullptr, std::memory_order_release);
  });
  trace::SetServer(opened);
  // The agent may be asked for a checkpoint at once, so it starts last.
  if (!opened->settings_.job_dir.empty()) {
    StatusOr<std::unique_ptr<agent::Agent>> agent =
        agent::Agent::Start(SocketFolder(opened->settings_.job_dir), &opened->checkpoint_);
    if (agent.ok()) {
      opened->agent_ = *std::move(agent);
    } else {
      LogLine("this process cannot be saved or moved: %s", agent.status().message().c_str());
    }
  }
  *session = opened;
  return CUDA_SUCCESS;
}

CUresult Session::Open() {
  if (settings_.sync) waits_ = Waits::kAll;
  memory_.staging().SetThreads(settings_.copy_threads);
  if (settings_.server.empty()) {
    LogLine("no GPU server: run the program with cr-run, or set CUDA_REMOTE_SERVER");
    return CUDA_ERROR_NO_DEVICE;
  }
  std::string path;
  if (std::optional<std::string> socket = SocketPathOf(settings_.server)) {
    path = *std::move(socket);
  } else {
    StatusOr<std::string> relay = StartRelay(settings_.server);
    if (!relay.ok()) {
      LogLine("cannot reach the GPU server %s: %s", settings_.server.c_str(), relay.status().message().c_str());
      return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    path = *std::move(relay);
  }
  if (const CUresult result = OpenChannel(path, ""); result != CUDA_SUCCESS) return result;
  if (const CUresult result = FetchDevices(); result != CUDA_SUCCESS || !settings_.has_visible_devices) return result;
  std::vector<std::string> uuids;
  for (const Device& device : devices_) uuids.emplace_back(device.uuid.bytes, sizeof(device.uuid.bytes));
  bool twice = false;
  const std::vector<int> visible = driverabi::VisibleDevices(settings_.visible_devices, uuids, &twice);
  if (twice) return CUDA_ERROR_INVALID_DEVICE;
  visible_devices_ = int(visible.size());
  bool first_ones = true;
  for (size_t i = 0; i < visible.size(); ++i) first_ones = first_ones && visible[i] == int(i);
  if (first_ones) {
    devices_.resize(visible.size());
    return CUDA_SUCCESS;
  }
  // Others, or in another order: a session that has been told so, since the order is the driver's own.
  std::string names;
  for (const int index : visible) {
    // Parts of a GPU have names of their own.
    std::string name = UuidName(uuids[size_t(index)]);
    if (devices_[size_t(index)].name.find(" MIG ") != std::string::npos) name.replace(0, 3, "MIG");
    names += (names.empty() ? "" : ",") + name;
  }
  host_functions_.SetChannel(nullptr);
  connection_.Replace(nullptr);
  if (const CUresult result = OpenChannel(path, names); result != CUDA_SUCCESS) return result;
  if (const CUresult result = FetchDevices(); result != CUDA_SUCCESS) return result;
  bool as_asked = devices_.size() == visible.size();
  for (size_t i = 0; as_asked && i < visible.size(); ++i) {
    as_asked = memcmp(devices_[i].uuid.bytes, uuids[size_t(visible[i])].data(), sizeof(devices_[i].uuid.bytes)) == 0;
  }
  if (as_asked) return CUDA_SUCCESS;
  LogLine("the GPU server %s does not give the GPUs that CUDA_VISIBLE_DEVICES=%s asks for",
          NamedServer(settings_.server).c_str(), settings_.visible_devices.c_str());
  return CUDA_ERROR_SYSTEM_NOT_READY;
}

CUresult Session::OpenChannel(const std::string& path, const std::string& visible_devices) {
  Hello hello;
  hello.wire_version = kWireVersion;
  hello.pid = uint32_t(getpid());
  hello.program = ProgramName();
  hello.job = settings_.job;
  hello.gpu = settings_.gpu;
  hello.visible_devices = visible_devices;
  hello.driver_settings = settings_.driver_settings;
  Welcome welcome;
  StatusOr<std::unique_ptr<ClientChannel>> channel = ClientChannel::Connect(path, hello, &welcome);
  if (!channel.ok()) {
    LogLine("cannot open a session with the GPU server %s: %s", NamedServer(settings_.server).c_str(),
            channel.status().message().c_str());
    return CUDA_ERROR_SYSTEM_NOT_READY;
  }
  connection_.Replace(*std::move(channel));
  // A host function may use managed memory that earlier work in its stream has written, and later work what it writes.
  host_functions_.SetAround(
      [this](ClientChannel* channel) {
        memory_.managed_home().pages().EnterHostFunction();
        memory_.managed_mirror().HostFunctionBegins();
        if (memory_.managed_mirror().active()) memory_.managed_mirror().Pull(channel);
      },
      [this](ClientChannel* channel) {
        memory_.managed_mirror().HostFunctionEnds();
        if (memory_.managed_mirror().active()) memory_.managed_mirror().Push(channel);
        memory_.managed_home().pages().sending().lock_shared();
        memory_.managed_home().pages().HandOver(channel);
        memory_.managed_home().pages().LeaveHostFunction();
      },
      [this] { memory_.managed_home().pages().sending().unlock_shared(); });
  host_functions_.SetChannel(connection_.get());
  // A process that joins a job which was restarted or moved finds what the others share.
  wire::OpShareIn_Request share;
  std::string scope, message;
  if (settings_.job_dir.empty() || !ReadSharingScope(settings_.job_dir, &scope)) return CUDA_SUCCESS;
  share.scope = scope;
  share.Encode(&message);
  Reply reply;
  return requests_.Operate(kOpShareIn, message, &reply);
}

CUresult Session::FetchDevices() {
  std::string message;
  wire::OpSessionInfo_Request{}.Encode(&message);
  Reply reply;
  const CUresult result = requests_.Operate(kOpSessionInfo, message, &reply);
  if (result != CUDA_SUCCESS) return result;
  wire::OpSessionInfo_Reply info;
  if (!info.Decode(reply.message)) {
    LogLine("the GPU server's answer about its devices is malformed");
    return CUDA_ERROR_SYSTEM_NOT_READY;
  }
  driver_version_ = info.driver_version;
  devices_ = ReadDevices(info, visible_devices_);
  return CUDA_SUCCESS;
}

void Session::ThreadEnds(ThreadState* thread) {
  if (!Get() || thread->hidden_streams.empty()) return;
  for (const auto& [context, stream] : thread->hidden_streams) {
    thread->context_stack.assign(1, context);
    DestroyStream(stream);
  }
  thread->context_stack.clear();
}

void Session::ForgetGone(const replay::ObjectKey& dead) {
  if (AnswersName(dead.kind)) answers_.Forget();
  switch (dead.kind) {
    case Kind::kDeviceMemory:
      graphs_.disguised_nodes().ForgetMemory(dead.id);
      [[fallthrough]];
    case Kind::kVariable:
      memory_.managed_mirror().Remove(dead.id);
      memory_.Forget(dead.id);
      break;
    case Kind::kMemoryPool:
      memory_.PoolDestroyed(dead.id);
      break;
    case Kind::kTexture:
    case Kind::kSurface:
      objects().resource_objects(dead.kind).Erase(dead.id);
      break;
    case Kind::kStream:
    case Kind::kEvent:
      // A capture in progress concerns events, too.
      if (!graphs_.captures().concern_events()) break;
      [[fallthrough]];
    default:
      graphs_.ForgetGoneLocked(objects(), dead);
      break;
  }
}

}  // namespace cuda_remote::client
