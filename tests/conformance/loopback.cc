// SPDX-License-Identifier: Apache-2.0
#include "tests/conformance/loopback.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "client/calls/runtime.h"
#include "client/core/call.h"
#include "client/core/thread_state.h"
#include "server/dispatch/malformed.h"
#include "server/dispatch/session.h"

namespace cuda_remote {
namespace loopback {

int g_driver_calls = 0;
int g_modified = 0;
std::map<uint64_t, uint64_t> g_bound;
std::set<uint64_t> g_created, g_destroyed, g_unbound;
bool g_null = false;
uint32_t g_next_slot = 5000;
constexpr uint64_t kRealBase = 0x550000000000;

server::DriverTable& Driver() {
  static server::DriverTable table;
  return table;
}

// A driver that refuses every call.
void RefuseEverything() {
  for (const server::DriverFunction& f : server::kDriverFunctionTable) {
    std::memcpy(reinterpret_cast<char*>(&Driver()) + f.offset, &f.missing, sizeof f.missing);
  }
}

void Reset() {
  g_driver_calls = g_modified = 0;
  g_bound.clear();
  g_created.clear();
  g_destroyed.clear();
  g_unbound.clear();
}

uint64_t VirtualFor(Kind kind, int index) { return MakeHandle(kind, uint32_t(100 + index), 1); }
uint64_t RealFor(uint64_t handle) { return kRealBase + SlotOf(handle) * 64; }

void Pattern(void* memory, size_t bytes, int seed) {
  for (size_t i = 0; i < bytes; ++i) static_cast<uint8_t*>(memory)[i] = uint8_t(seed * 31 + i * 7 + 1);
}

bool HasPattern(const void* memory, size_t bytes, int seed) {
  for (size_t i = 0; i < bytes; ++i) {
    if (static_cast<const uint8_t*>(memory)[i] != uint8_t(seed * 31 + i * 7 + 1)) return false;
  }
  return true;
}

bool Untouched(const void* memory, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if (static_cast<const uint8_t*>(memory)[i] != 0x5a) return false;
  }
  return true;
}

// The worker's side: real handles are a function of virtual ones.
class FakeSession : public server::Session {
 public:
  FakeSession() { custom_ = server::StandInCalls(); }
  const server::DriverTable& driver() const override { return Driver(); }
  bool Real(Kind kind, uint64_t handle, uint64_t* real) const override {
    if (KindOf(handle) != kind || SlotOf(handle) < 100 || GenerationOf(handle) != 1) return false;
    *real = RealFor(handle);
    return true;
  }
  bool RealStream(uint64_t wire, CUstream* real) const override {
    if (wire <= 2) {
      *real = reinterpret_cast<CUstream>(wire);
      return true;
    }
    uint64_t value;
    if (!Real(Kind::kStream, wire, &value)) return false;
    *real = reinterpret_cast<CUstream>(value);
    return true;
  }
  uint64_t Virtual(Kind kind, uint64_t real) const override {
    return real < kRealBase ? 0 : MakeHandle(kind, uint32_t((real - kRealBase) / 64), 1);
  }
  bool MayBind(Kind kind, uint64_t handle) const override { return KindOf(handle) == kind; }
  void Bind(Kind, uint64_t handle, uint64_t real, uint64_t) override { g_bound[handle] = real; }
  void Unbind(uint64_t handle) override { g_unbound.insert(handle); }
  bool IsUnder(uint64_t, uint64_t) const override { return false; }
  void SetParent(Kind, uint64_t, uint64_t) override {}
  bool OwnsDeviceRange(CUdeviceptr, uint64_t) const override { return true; }
  bool MayUse(CUdeviceptr, uint64_t) const override { return true; }
  uint64_t CurrentContext() const override { return 0; }
  void Defer(server::ReplyBuilder*, std::function<CUresult(std::string*, std::string*)>) override {}
};

CUresult Execute(uint32_t call, std::string_view message, std::string* reply) {
  static FakeSession session;
  server::Request request;
  request.header.call = call;
  request.message = message;
  server::ReplyBuilder builder;
  const server::Handler handler = server::FindHandler(call);
  if (handler == nullptr) return CUDA_ERROR_NOT_FOUND;
  const CUresult result = handler(session, request, &builder);
  *reply = builder.message;
  return result;
}

// Whatever bytes come, a handler answers; it neither crashes nor calls on with what it did not understand.
TEST(HostileRequests, EveryHandlerSurvivesAnyBytes) {
  Reset();
  RefuseEverything();
  std::mt19937_64 random(7);
  std::string reply;
  int handlers = 0;
  for (uint32_t call = 0; call < 0x10040; ++call) {
    if (call == 1000) call = kFirstOperation;
    if (server::FindHandler(call) == nullptr) continue;
    ++handlers;
    EXPECT_STRNE(server::CallName(call), "?");
    Execute(call, "", &reply);
    EXPECT_EQ(Execute(call, std::string("\x0b", 1), &reply), server::kMalformedRequest) << server::CallName(call);
    for (int round = 0; round < 40; ++round) {
      std::string message;
      for (int field = 0; field < 8; ++field) {
        message.push_back(char(1 + random() % 16) << 3 | (random() % 3 == 0 ? 2 : 0));
        if (message.back() & 2) {
          const size_t length = random() % 64;
          message.push_back(char(length));
          for (size_t i = 0; i < length; ++i) message.push_back(char(random()));
        } else {
          for (int i = int(random() % 9); i > 0; --i) message.push_back(char(random() | 0x80));
          message.push_back(char(random() % 2));
        }
      }
      Execute(call, message, &reply);
    }
  }
  EXPECT_GT(handlers, 200);
}

TEST(HostileRequests, UnknownCallsHaveNoHandler) {
  EXPECT_EQ(server::FindHandler(0), nullptr);
  EXPECT_EQ(server::FindHandler(0xffff), nullptr);
  EXPECT_EQ(server::FindHandler(kFirstOperation + 1000), nullptr);
  EXPECT_EQ(server::FindHandler(0xffffffff), nullptr);
  EXPECT_STREQ(server::CallName(0xffffffff), "?");
}

}  // namespace loopback

namespace client {

ThreadState* ThreadState::Get() {
  static ThreadState state;
  return &state;
}

struct Call::ManagedBuffers {};
Call::Call(const CallInfo& info)
    : info_(info), thread_(ThreadState::Get()), message_(new std::string), reply_(new std::string) {}
Call::~Call() {
  delete message_;
  delete reply_;
}
CUresult Call::Enter() { return CUDA_SUCCESS; }
std::string& Call::message() { return *message_; }
std::string_view Call::reply() const { return *reply_; }
bool Call::Valid(Kind kind, const void* handle) { return KindOf(reinterpret_cast<uint64_t>(handle)) == kind; }
bool Call::Valid(Kind kind, uint64_t handle) { return KindOf(handle) == kind; }
CUresult Call::StreamToWire(CUstream stream, bool, uint64_t* wire) {
  *wire = reinterpret_cast<uint64_t>(stream);
  return CUDA_SUCCESS;
}
uint64_t Call::NewHandle(Kind kind, uint64_t) { return MakeHandle(kind, loopback::g_next_slot++, 1); }
bool KnowsDeviceRange(Call&, CUdeviceptr address, uint64_t) { return address % 2 == 0; }
CUresult NameNodesOf(Call&, uint64_t) { return CUDA_SUCCESS; }
CUresult PrepareCapture(Call&, uint64_t) { return CUDA_SUCCESS; }
CUresult PrepareDestruction(Call&, uint64_t) { return CUDA_SUCCESS; }
CUresult CheckWithoutMemoryNodes(Call&, uint64_t) { return CUDA_SUCCESS; }
CUresult CheckFill(Call&, const CUDA_MEMSET_NODE_PARAMS_v1&) { return CUDA_SUCCESS; }
CUresult CheckChildGraph(Call&, uint64_t) { return CUDA_SUCCESS; }
replay::ObjectKey CurrentContextKey(Call&) { return {Kind::kContext, 0}; }
replay::ObjectKey StreamKey(Call&, uint64_t stream) { return ObjectOf(stream); }
replay::ObjectKey MemoryKey(Call&, CUdeviceptr address) { return {Kind::kDeviceMemory, address}; }
uint64_t Call::ExecOfDriver(uint64_t driver_handle) { return driver_handle; }
CUresult Call::Send() { return loopback::Execute(info_.id, *message_, reply_); }
CUresult Call::Transact() { return loopback::Execute(info_.id, *message_, reply_); }
void Call::Created(replay::ObjectKey object, std::initializer_list<replay::ObjectKey>) {
  loopback::g_created.insert(object.id);
}
void Call::Destroyed(replay::ObjectKey object) { loopback::g_destroyed.insert(object.id); }
CUresult Call::Recall(uint64_t) { return Transact(); }
void Call::Undone(replay::ObjectKey, uint32_t, uint64_t) { ++loopback::g_modified; }
void Call::Modified(replay::ObjectKey, uint64_t, std::initializer_list<replay::ObjectKey>) { ++loopback::g_modified; }
CUresult Call::Unsupported(const char*, const char*) { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace client
}  // namespace cuda_remote
