// SPDX-License-Identifier: Apache-2.0
#include "client/core/recorded_objects.h"

namespace cuda_remote::client {

int RecordedObjects::DeviceOf(uint64_t context) {
  ReaderLock lock(&mutex_);
  const Object* object = handles_.Find(Kind::kContext, context);
  return object ? object->device : -1;
}

uint64_t RecordedObjects::ContextOf(uint64_t handle) {
  ReaderLock lock(&mutex_);
  return ContextOfLocked(handle);
}

uint64_t RecordedObjects::WholeContextOf(uint64_t handle) {
  ReaderLock lock(&mutex_);
  const uint64_t context = ContextOfLocked(handle);
  const Object* const object = handles_.Find(KindOf(context), context);
  if (!object) return 0;
  const bool is_green = KindOf(context) == Kind::kGreenContext || object->green != 0;
  return is_green ? primary_contexts_.Find(object->device) : context;
}

uint64_t RecordedObjects::ContextOfLocked(uint64_t handle) const {
  while (handle != 0 && KindOf(handle) != Kind::kContext && KindOf(handle) != Kind::kGreenContext) {
    const Object* const object = handles_.Find(KindOf(handle), handle);
    if (!object) return 0;
    handle = object->context ? object->context : object->parent;
  }
  return handle;
}

uint64_t RecordedObjects::SomeContextOn(int device) {
  ReaderLock lock(&mutex_);
  uint64_t found = 0;
  handles_.ForEach(Kind::kContext, [&](uint64_t handle, const Object& context) {
    if (!found && context.active && context.device == device) found = handle;
  });
  return found;
}

uint64_t RecordedObjects::PrimaryContextLocked(int device) {
  if (const uint64_t handle = primary_contexts_.Find(device)) return handle;
  const uint64_t handle = handles_.New(Kind::kContext, 0);
  if (handle == 0) return 0;
  primary_contexts_.Name(device, handle);
  Object* const object = handles_.Find(Kind::kContext, handle);
  object->device = device;
  object->primary = true;
  SetActiveLocked(handle, object, false);
  return handle;
}

Object* RecordedObjects::LivePrimaryContextLocked(int device) {
  const uint64_t handle = primary_contexts_.Find(device);
  if (handle == 0) return nullptr;
  Object* const object = handles_.Find(Kind::kContext, handle);
  return object && object->active ? object : nullptr;
}

uint64_t RecordedObjects::ChildLocked(Kind kind, uint64_t owner, const std::string& name) const {
  const Object* const object = handles_.Find(kind, owner);
  if (!object || !object->children) return 0;
  const auto child = object->children->find(name);
  return child != object->children->end() ? child->second : 0;
}

Object* RecordedObjects::NameChildLocked(Kind kind, uint64_t owner, const std::string& name, uint64_t child) {
  Object* const object = handles_.Find(kind, owner);
  if (!object) return nullptr;
  if (!object->children) object->children = std::make_unique<NamedChildren>();
  (*object->children)[name] = child;
  return object;
}

std::string RecordedObjects::NameOf(const NamedChildren& children, uint64_t child) {
  for (const auto& [name, one] : children) {
    if (one == child) return name;
  }
  return {};
}

uint64_t RecordedObjects::KernelOfLocked(uint64_t function) const {
  const Object* const object = handles_.Find(Kind::kFunction, function);
  if (!object || KindOf(object->owner) == Kind::kKernel) return object ? object->owner : 0;
  const Object* const module = handles_.Find(Kind::kModule, object->owner);
  if (!module || !module->children) return 0;
  return ChildLocked(Kind::kLibrary, module->owner, NameOf(*module->children, function));
}

void RecordedObjects::AppendSettings(uint64_t function, std::string* out) {
  ReaderLock lock(&mutex_);
  const uint64_t kernel = KindOf(function) == Kind::kFunction ? KernelOfLocked(function) : 0;
  const Object* const object =
      kernel != 0 ? handles_.Find(Kind::kKernel, kernel) : handles_.Find(KindOf(function), function);
  if (object && object->settings) out->append(object->settings->text);
}

uint64_t RecordedObjects::RetainedForLocked(uint64_t user, uint64_t used) const {
  if (KindOf(used) != Kind::kGraphNode) return used;
  uint64_t graph = used;
  for (const Object* node = handles_.Find(KindOf(used), used); node && node->parent;) {
    graph = node->parent;
    node = handles_.Find(KindOf(graph), graph);
  }
  return IsUnderLocked(user, graph) ? used : graph;
}

bool RecordedObjects::IsEmbeddedLocked(uint64_t graph) const {
  const Object* const object = handles_.Find(Kind::kGraph, graph);
  return object && KindOf(object->parent) == Kind::kGraphNode;
}

void RecordedObjects::ForgetLocked(const replay::ObjectKey& dead) {
  gone_(dead);
  switch (dead.kind) {
    // What an address names has no handle.
    case Kind::kDeviceMemory:
    case Kind::kVariable:
    case Kind::kTexture:
    case Kind::kSurface:
    case Kind::kHostMemory:
    case Kind::kReservation:
    case Kind::kMapping:
      break;
    case Kind::kGraph:
      user_object_records_.GraphGone(dead.id);
      [[fallthrough]];
    case Kind::kGraphExec:
    case Kind::kGraphNode:
    case Kind::kCapture:
      handles_.Drop(dead.id);
      graph_records_.Forget(dead.id);
      break;
    case Kind::kContext:
      if (Object* const object = handles_.Find(dead.kind, dead.id); object && object->primary) {
        handles_.DropChildren(dead.id);
        SetActiveLocked(dead.id, object, false);
        break;
      }
      [[fallthrough]];
    default:
      handles_.Drop(dead.id);
  }
}

bool RecordedObjects::MarkDestroyedLocked(replay::ObjectKey object) {
  if (!graph_records_.MarkDestroyed(object)) return false;
  if (Object* const found = handles_.Find(object.kind, object.id)) SetActiveLocked(object.id, found, false);
  return true;
}

bool RecordedObjects::IsUnderLocked(uint64_t handle, uint64_t ancestor) const {
  while (handle != 0 && handle != ancestor) {
    const Object* const object = handles_.Find(KindOf(handle), handle);
    handle = object ? object->parent : 0;
  }
  return handle != 0;
}

void RecordedObjects::RemoveDeadLocked(replay::ObjectKey root, std::vector<replay::ObjectKey> dead) {
  bool graphs = false;
  for (const replay::ObjectKey& one : dead) graphs = graphs || GraphRecords::IsOf(one.kind);
  if (!graphs) {
    for (const replay::ObjectKey& one : dead) ForgetLocked(one);
    return;
  }
  const auto more = [&](replay::ObjectKey key) CR_REQUIRES(mutex_) {
    for (const replay::ObjectKey& one : log_.Destroy(key)) dead.push_back(one);
  };
  std::vector<replay::ObjectKey> to_forget;
  for (size_t i = 0; i < dead.size(); ++i) {  // it grows
    const replay::ObjectKey one = dead[i];
    if (!GraphRecords::IsOf(one.kind) || IsUnderLocked(one.id, root.id)) {
      to_forget.push_back(one);
      continue;
    }
    // A graph without one of its nodes would be another graph.
    const Object* const object = handles_.Find(one.kind, one.id);
    if (one.kind != Kind::kGraph && object && object->parent) more({KindOf(object->parent), object->parent});
    for (const uint64_t user : graph_records_.UsersOf(one.id)) more({KindOf(user), user});
  }
  for (const replay::ObjectKey& one : to_forget) ForgetLocked(one);
}

void RecordedObjects::DropLocked(replay::ObjectKey key) {
  std::vector<replay::ObjectKey> dead = log_.Destroy(key);
  // An object that needs no record has no entry in the log, but it has a handle.
  if (dead.empty()) dead.push_back(key);
  RemoveDeadLocked(key, std::move(dead));
}

void RecordedObjects::DropDependentsLocked(replay::ObjectKey key) {
  RemoveDeadLocked(key, log_.DestroyDependents(key));
  handles_.DropChildren(key.id);
}

void RecordedObjects::UserObjectGone(uint64_t user_object) {
  WriterLock lock(&mutex_);
  user_object_records_.ObjectGone(user_object);
  DropLocked({Kind::kUserObject, user_object});
}

}  // namespace cuda_remote::client
