// SPDX-License-Identifier: Apache-2.0
// A program with its own libprotobuf and gRPC that also uses the driver, loaded with dlopen and its symbols made
// global: both sides must go on working in one process. It runs a gRPC server and client of its own, before, between
// and after driver calls.
//
// Usage: guest LIBRARY
#include <cuda.h>
#include <dlfcn.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <cstdio>
#include <memory>
#include <string>

#include "tests/faults/guest.grpc.pb.h"
#include "tests/faults/guest.pb.h"

namespace {

class EchoService final : public guest::Echo::Service {
  grpc::Status Say(grpc::ServerContext*, const guest::Note* in, guest::Note* out) override {
    *out = *in;
    out->set_text(in->text() + " back");
    return grpc::Status::OK;
  }
};

bool UseProtobuf() {
  guest::Note note;
  note.set_text("hello");
  for (uint64_t i = 0; i < 1000; ++i) note.add_numbers(i * i);
  (*note.mutable_labels())["key"] = "value";
  std::string bytes, json;
  guest::Note parsed;
  return note.SerializeToString(&bytes) && parsed.ParseFromString(bytes) && parsed.numbers(999) == 998001 &&
         google::protobuf::util::MessageToJsonString(parsed, &json).ok() && json.find("998001") != std::string::npos &&
         google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName("guest.Note") != nullptr;
}

bool UseGrpc() {
  EchoService service;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (!server) return false;
  auto stub = guest::Echo::NewStub(
      grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials()));
  guest::Note request, reply;
  request.set_text("there and");
  grpc::ClientContext context;
  grpc::Status status = stub->Say(&context, request, &reply);
  server->Shutdown();
  return status.ok() && reply.text() == "there and back";
}

#define STEP(condition)                                                        \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "guest: line %d: not true: %s\n", __LINE__, #condition); \
      return 1;                                                                \
    }                                                                          \
  } while (0)

template <typename F>
F Find(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  if (!symbol) fprintf(stderr, "guest: %s is not in the library\n", name);
  return reinterpret_cast<F>(symbol);
}

}  // namespace

int main(int argc, char** argv) {
  STEP(argc == 2);
  STEP(UseProtobuf() && UseGrpc());
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
  if (!library) fprintf(stderr, "guest: %s\n", dlerror());
  STEP(library);
  auto init = Find<CUresult (*)(unsigned)>(library, "cuInit");
  auto device_get = Find<CUresult (*)(CUdevice*, int)>(library, "cuDeviceGet");
  auto retain = Find<CUresult (*)(CUcontext*, CUdevice)>(library, "cuDevicePrimaryCtxRetain");
  auto set_current = Find<CUresult (*)(CUcontext)>(library, "cuCtxSetCurrent");
  auto alloc = Find<CUresult (*)(CUdeviceptr*, size_t)>(library, "cuMemAlloc_v2");
  auto to_device = Find<CUresult (*)(CUdeviceptr, const void*, size_t)>(library, "cuMemcpyHtoD_v2");
  auto to_host = Find<CUresult (*)(void*, CUdeviceptr, size_t)>(library, "cuMemcpyDtoH_v2");
  auto free_memory = Find<CUresult (*)(CUdeviceptr)>(library, "cuMemFree_v2");
  STEP(init && device_get && retain && set_current && alloc && to_device && to_host && free_memory);
  CUdevice device;
  CUcontext context;
  CUdeviceptr memory;
  STEP(init(0) == CUDA_SUCCESS);
  STEP(device_get(&device, 0) == CUDA_SUCCESS);
  STEP(retain(&context, device) == CUDA_SUCCESS);
  STEP(set_current(context) == CUDA_SUCCESS);
  for (int round = 0; round < 3; ++round) {
    std::string sent(100000, static_cast<char>('a' + round)), got(sent.size(), '-');
    STEP(alloc(&memory, sent.size()) == CUDA_SUCCESS);
    STEP(to_device(memory, sent.data(), sent.size()) == CUDA_SUCCESS);
    STEP(UseProtobuf() && UseGrpc());
    STEP(to_host(&got[0], memory, got.size()) == CUDA_SUCCESS);
    STEP(got == sent);
    STEP(free_memory(memory) == CUDA_SUCCESS);
  }
  printf("guest ok\n");
  return 0;
}
