// SPDX-License-Identifier: Apache-2.0
// Sharing with other processes that have sessions on the same server. What goes from one to the other is a key of the
// server's (64 bytes), in the driver's own handle types; where the driver gives a file descriptor, it is a sealed
// memory file with the key in it, so it can be passed on, kept and closed as the driver's can.
//
// In the log, what is shared has a setting with its key, so that a replay shares it under the same key: the application
// may have sent the key anywhere. What was opened is an object like others, made by opening it again.

#include "client/calls/ipc.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

constexpr size_t kKeyBytes = 64;

// Whether this process has ever opened memory of another one's pool.
std::atomic<bool> g_pool_imports{false};

// Memory is opened and closed by one thread at a time, so that the log has that in the server's order.
std::mutex g_opening;

// Adds the request to the log as a setting of `object`. The object may outlive the current context: the record is of
// `context`, 0: of none.
void Record(Call& call, replay::ObjectKey object, uint64_t key, uint64_t context) {
  FrameHeader header = call.header();
  header.flags = 0;
  header.context_or_result = SlotOf(context);
  std::vector<replay::ObjectKey> needs;
  if (context != 0) needs.push_back({Kind::kContext, context});
  WriterLock lock(&call.session().objects().mutex());
  call.session().objects().log().Modify(object, key, header, call.message(), needs);
}

// Records that `object` is shared under the key of the reply. `request` is what was sent. The record stays where it is
// if it is shared once more: others may have opened it since, and this process what they have shared then, so that
// their replays would wait for each other.
template <typename Request, typename Reply>
void RecordShared(Call& call, replay::ObjectKey object, uint64_t context, Request* request, const Reply& reply) {
  {
    ReaderLock lock(&call.session().objects().mutex());
    if (call.session().objects().log().FindSetting(object, call.info().id, 0)) return;
  }
  request->key = reply.key;
  call.message().clear();
  request->Encode(&call.message());
  Record(call, object, 0, context);
}

template <typename T>
std::string_view BytesOf(const T& value) {
  static_assert(sizeof(T) == kKeyBytes, "the driver's handles have the size of a key");
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

template <typename T>
CUresult TakeKey(Call& call, std::string_view key, T* to) {
  static_assert(sizeof(T) == kKeyBytes, "the driver's handles have the size of a key");
  if (key.size() != kKeyBytes) return call.session().Lose(ChannelStatus::kProtocolError);
  memcpy(to, key.data(), kKeyBytes);
  return CUDA_SUCCESS;
}

// Only file descriptors can be carried over: a fabric handle is for the GPU's own network.
CUresult CheckHandleType(const char* name, CUmemAllocationHandleType type) {
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_SUCCESS;
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
    return Call::Unsupported(name,
                             "fabric handles are for the server's network; "
                             "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED is 0");
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult KeyToDescriptor(Call& call, std::string_view key, void* out) {
  if (key.size() != kKeyBytes) return call.session().Lose(ChannelStatus::kProtocolError);
  const int fd = memfd_create("cuda-remote-shared", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  if (pwrite(fd, key.data(), key.size(), 0) != ssize_t(key.size()) ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    close(fd);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  *static_cast<int*>(out) = fd;
  return CUDA_SUCCESS;
}

// The key in a descriptor that KeyToDescriptor made, here or in another process.
CUresult KeyOfDescriptor(const char* name, void* os_handle, std::string* key) {
  const int fd = int(reinterpret_cast<intptr_t>(os_handle));
  if (fcntl(fd, F_GETFD) < 0) return CUDA_ERROR_INVALID_VALUE;
  key->assign(kKeyBytes, 0);
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_WRITE) || pread(fd, &(*key)[0], kKeyBytes, 0) != ssize_t(kKeyBytes)) {
    return Call::Unsupported(name, "only descriptors that another program under cuda-remote exported can be imported");
  }
  return CUDA_SUCCESS;
}

// Memory of another session is there: pointer attributes and copies know it.
void NoteImport(Call& call, uint64_t address, uint64_t bytes, int device, DeviceRange::Source source,
                uint64_t pool = 0) {
  Session& session = call.session();
  WriterLock lock(&session.memory().mutex());
  DeviceRange range;
  range.source = source;
  range.device = device;
  range.context = call.thread().current_context();
  range.buffer_id = session.memory().NextBufferIdLocked();
  range.pool = pool;
  if (source == DeviceRange::kPoolImported) {
    session.memory().pools().Created(pool, device);
    session.memory().InsertPoolMemoryLocked(address, bytes, range);
  } else {
    session.memory().device_ranges().Insert(address, bytes, range);
  }
}

// From now on another process may record this event, or has done so. Returns the event's context.
uint64_t NoteShared(Session& session, uint64_t event) {
  session.ShareEvents();
  WriterLock lock(&session.objects().mutex());
  Object* const object = session.objects().handles().Find(Kind::kEvent, event);
  if (!object) return 0;
  object->between_processes = true;
  return KindOf(object->parent) == Kind::kContext ? object->parent : 0;
}

// Where the allocation begins that `address` lies in.
uint64_t AllocationOf(Session& session, uint64_t address) {
  ReaderLock lock(&session.memory().mutex());
  const auto* const range = session.memory().device_ranges().Find(address);
  return range ? range->start : address;
}

// Whether memory was opened, of another process's pool or not.
bool IsImport(Session& session, uint64_t address, bool* of_pool) {
  ReaderLock lock(&session.memory().mutex());
  const auto* const range = session.memory().device_ranges().At(address);
  *of_pool = range && range->value.source == DeviceRange::kPoolImported;
  return *of_pool || (range && range->value.source == DeviceRange::kImported);
}

// After the first time that memory was opened it has a record; then each time counts.
template <typename Request, typename Reply>
void RecordOpened(Call& call, Request* request, const Reply& reply, DeviceRange::Source source, uint64_t pool = 0) {
  const replay::ObjectKey object{Kind::kDeviceMemory, reply.address};
  if (reply.opened > 1) {
    uint64_t context = 0;
    {
      ReaderLock lock(&call.session().memory().mutex());
      const auto* const range = call.session().memory().device_ranges().At(reply.address);
      // Memory of pools outlives contexts.
      if (range && source != DeviceRange::kPoolImported) context = range->value.context;
    }
    Record(call, object, reply.opened, context);
    return;
  }
  NoteImport(call, reply.address, reply.bytes, reply.device, source, pool);
  request->at = reply.address;
  call.message().clear();
  request->Encode(&call.message());
  call.Created(object);
}

CUresult Close(const CallInfo& info, CUdeviceptr address, bool pools_too) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  call.set_id(kCall_cuIpcCloseMemHandle);
  bool of_pool = false;
  if (!IsImport(call.session(), address, &of_pool) || (of_pool && !pools_too)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> opening(g_opening);
  wire::cuIpcCloseMemHandle_Request request;
  request.address = address;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuIpcCloseMemHandle_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  if (reply.left != 0) {
    const uint32_t opened_by = of_pool ? kCall_cuMemPoolImportPointer : kCall_cuIpcOpenMemHandle_v2;
    call.Undone({Kind::kDeviceMemory, address}, opened_by, reply.left + 1);
  } else {
    WriterLock lock(&call.session().objects().mutex());
    // What was made of it (textures, nodes of graphs) is good for nothing any more, and cannot be made again.
    call.session().objects().DropLocked({Kind::kDeviceMemory, address});
  }
  return CUDA_SUCCESS;
}

}  // namespace

bool IsPoolImport(CUdeviceptr address) {
  // Freeing is a hot call, and hardly any program imports.
  if (!g_pool_imports.load(std::memory_order_relaxed)) return false;
  Session* const session = Session::Get();
  if (!session || address == 0) return false;
  ReaderLock lock(&session->memory().mutex());
  const auto* const range = session->memory().device_ranges().At(address);
  return range && range->value.source == DeviceRange::kPoolImported;
}

CUresult CloseImport(CUdeviceptr address) { return Close(info::k_cuMemFree_v2, address, true); }

CUresult Custom_cuIpcGetMemHandle(CUipcMemHandle* pHandle, CUdeviceptr dptr) {
  if (!pHandle) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuIpcGetMemHandle);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuIpcGetMemHandle_Request request;
  request.address = dptr;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuIpcGetMemHandle_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  RecordShared(call, {Kind::kDeviceMemory, AllocationOf(call.session(), dptr)}, 0, &request, reply);
  return TakeKey(call, reply.key, pHandle);
}

CUresult Custom_cuIpcOpenMemHandle_v2(CUdeviceptr* pdptr, CUipcMemHandle handle, unsigned int Flags) {
  if (!pdptr) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuIpcOpenMemHandle_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuIpcOpenMemHandle_v2_Request request;
  request.key = BytesOf(handle);
  request.flags = Flags;
  std::lock_guard<std::mutex> opening(g_opening);
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuIpcOpenMemHandle_v2_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  RecordOpened(call, &request, reply, DeviceRange::kImported);
  *pdptr = reply.address;
  return CUDA_SUCCESS;
}

CUresult Custom_cuIpcCloseMemHandle(CUdeviceptr dptr) { return Close(info::k_cuIpcCloseMemHandle, dptr, false); }

CUresult Custom_cuIpcGetEventHandle(CUipcEventHandle* pHandle, CUevent event) {
  if (!pHandle || !event) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuIpcGetEventHandle);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuIpcGetEventHandle_Request request;
  request.event = reinterpret_cast<uint64_t>(event);
  if (!call.Valid(Kind::kEvent, request.event)) return CUDA_ERROR_INVALID_HANDLE;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuIpcGetEventHandle_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  RecordShared(call, {Kind::kEvent, request.event}, NoteShared(call.session(), request.event), &request, reply);
  return TakeKey(call, reply.key, pHandle);
}

CUresult Custom_cuIpcOpenEventHandle(CUevent* phEvent, CUipcEventHandle handle) {
  if (!phEvent) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuIpcOpenEventHandle);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuIpcOpenEventHandle_Request request;
  request.event = call.NewHandle(Kind::kEvent, 0);
  if (!request.event) return CUDA_ERROR_OUT_OF_MEMORY;
  request.key = BytesOf(handle);
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Created({Kind::kEvent, request.event});
  NoteShared(call.session(), request.event);
  *phEvent = reinterpret_cast<CUevent>(request.event);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemExportToShareableHandle(void* shareableHandle, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType handleType, unsigned long long flags) {
  const CallInfo& kInfo = info::k_cuMemExportToShareableHandle;
  if (!shareableHandle || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckHandleType(kInfo.name, handleType); result != CUDA_SUCCESS) return result;
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(Kind::kPhysicalMemory, handle)) return CUDA_ERROR_INVALID_VALUE;
  wire::cuMemExportToShareableHandle_Request request;
  request.handle = handle;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuMemExportToShareableHandle_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  RecordShared(call, {Kind::kPhysicalMemory, handle}, 0, &request, reply);
  return KeyToDescriptor(call, reply.key, shareableHandle);
}

CUresult Custom_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* osHandle,
                                               CUmemAllocationHandleType shHandleType) {
  const CallInfo& kInfo = info::k_cuMemImportFromShareableHandle;
  if (!handle) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckHandleType(kInfo.name, shHandleType); result != CUDA_SUCCESS) return result;
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  std::string key;
  if (const CUresult result = KeyOfDescriptor(kInfo.name, osHandle, &key); result != CUDA_SUCCESS) return result;
  wire::cuMemImportFromShareableHandle_Request request;
  request.handle = call.NewHandle(Kind::kPhysicalMemory, kNoParent);
  if (!request.handle) return CUDA_ERROR_OUT_OF_MEMORY;
  request.key = key;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuMemImportFromShareableHandle_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  // Its owner may be gone by the time of a restart.
  request.bytes = reply.bytes;
  request.prop = reply.prop;
  call.message().clear();
  request.Encode(&call.message());
  call.Created({Kind::kPhysicalMemory, request.handle});
  *handle = request.handle;
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemPoolExportToShareableHandle(void* handle_out, CUmemoryPool pool,
                                                 CUmemAllocationHandleType handleType, unsigned long long flags) {
  const CallInfo& kInfo = info::k_cuMemPoolExportToShareableHandle;
  if (!handle_out || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckHandleType(kInfo.name, handleType); result != CUDA_SUCCESS) return result;
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuMemPoolExportToShareableHandle_Request request;
  request.pool = reinterpret_cast<uint64_t>(pool);
  if (!call.Valid(Kind::kMemoryPool, request.pool)) return CUDA_ERROR_INVALID_VALUE;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuMemPoolExportToShareableHandle_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  RecordShared(call, {Kind::kMemoryPool, request.pool}, 0, &request, reply);
  return KeyToDescriptor(call, reply.key, handle_out);
}

CUresult Custom_cuMemPoolImportFromShareableHandle(CUmemoryPool* pool_out, void* handle,
                                                   CUmemAllocationHandleType handleType, unsigned long long flags) {
  const CallInfo& kInfo = info::k_cuMemPoolImportFromShareableHandle;
  if (!pool_out || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckHandleType(kInfo.name, handleType); result != CUDA_SUCCESS) return result;
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  std::string key;
  if (const CUresult result = KeyOfDescriptor(kInfo.name, handle, &key); result != CUDA_SUCCESS) return result;
  wire::cuMemPoolImportFromShareableHandle_Request request;
  request.pool = call.NewHandle(Kind::kMemoryPool, kNoParent);
  if (!request.pool) return CUDA_ERROR_OUT_OF_MEMORY;
  request.key = key;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Created({Kind::kMemoryPool, request.pool});
  *pool_out = reinterpret_cast<CUmemoryPool>(request.pool);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemPoolExportPointer(CUmemPoolPtrExportData* shareData_out, CUdeviceptr ptr) {
  if (!shareData_out) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuMemPoolExportPointer);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuMemPoolExportPointer_Request request;
  request.address = ptr;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuMemPoolExportPointer_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  RecordShared(call, {Kind::kDeviceMemory, AllocationOf(call.session(), ptr)}, 0, &request, reply);
  return TakeKey(call, reply.key, shareData_out);
}

CUresult Custom_cuMemPoolImportPointer(CUdeviceptr* ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData* shareData) {
  if (!ptr_out || !shareData) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuMemPoolImportPointer);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuMemPoolImportPointer_Request request;
  request.pool = reinterpret_cast<uint64_t>(pool);
  if (!call.Valid(Kind::kMemoryPool, request.pool)) return CUDA_ERROR_INVALID_VALUE;
  request.key = BytesOf(*shareData);
  std::lock_guard<std::mutex> opening(g_opening);
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuMemPoolImportPointer_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  g_pool_imports.store(true, std::memory_order_relaxed);
  RecordOpened(call, &request, reply, DeviceRange::kPoolImported, request.pool);
  *ptr_out = reply.address;
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
