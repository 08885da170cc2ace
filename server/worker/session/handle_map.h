// SPDX-License-Identifier: Apache-2.0
// From the client's virtual handles to the driver's real ones, and back.
//
// The client chooses the handles (proto/frame/handle.h), so the table trusts none of them: a slot is bound once, is
// found only by exactly the handle that it was bound with, and falls free with its object or the object's ancestor.
//
// Not thread-safe: the executor's own.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_HANDLE_MAP_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_HANDLE_MAP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "proto/frame/handle.h"

namespace cuda_remote::server {

class HandleMap {
 public:
  struct Entry {
    uint64_t handle = 0;  // virtual; 0: the slot is free
    uint64_t real = 0;
    uint64_t parent = 0;       // virtual; 0: none
    uint32_t first_child = 0;  // slots
    uint32_t next_sibling = 0;
    uint32_t previous_sibling = 0;
    uint32_t next_of_kind = 0;
    uint32_t previous_of_kind = 0;
  };

  // The entry of a live handle of `kind`; null for any other number.
  Entry* Find(Kind kind, uint64_t handle);
  const Entry* Find(Kind kind, uint64_t handle) const { return const_cast<HandleMap*>(this)->Find(kind, handle); }

  // The live entry in a slot, whatever its kind; null if the slot is free.
  const Entry* At(uint32_t slot) const;

  // The virtual handle of a real object; 0 if it has none.
  uint64_t Virtual(Kind kind, uint64_t real) const;

  // Whether `handle` is a well-formed handle of `kind` whose slot is free.
  bool MayBind(Kind kind, uint64_t handle) const;

  // Binds a handle that MayBind accepted. A parent that is not live counts as none.
  void Bind(Kind kind, uint64_t handle, uint64_t real, uint64_t parent);
  // A bound handle, which has no descendants yet, stands for another real one from now on.
  void Rebind(Kind kind, uint64_t handle, uint64_t real);

  // Whether `handle` is `ancestor` or dies with it.
  bool IsUnder(uint64_t handle, uint64_t ancestor) const;
  // A bound handle dies with `parent` from now on, which must not be under it.
  void SetParent(Kind kind, uint64_t handle, uint64_t parent);

  // Forgets the handle and its descendants, deepest first; `gone` is told of each. Unknown handles are ignored.
  void Unbind(uint64_t handle, const std::function<void(const Entry&)>& gone);

  size_t size() const { return live_; }

  // How many live entries of `kind` there are.
  size_t Count(Kind kind) const { return of_kind_[uint8_t(kind)].count; }

  // Calls `each` with every live entry of `kind`, in the order of slots. Looks at no entries of other kinds, of which a
  // session may have very many.
  void ForEach(Kind kind, const std::function<void(const Entry&)>& each) const;

 private:
  static constexpr uint32_t kChunk = 256;

  Entry* Slot(uint32_t slot);
  void LinkTo(Entry* entry, uint64_t parent);
  void Unlink(Entry* entry);
  void DropChildren(uint32_t slot, const std::function<void(const Entry&)>& gone);
  void Drop(uint32_t slot, const std::function<void(const Entry&)>& gone);
  void LinkToKind(Entry* entry);
  void UnlinkFromKind(Entry* entry);

  std::vector<std::unique_ptr<Entry[]>> chunks_;
  // By kind, so that equal numbers of different kinds do not meet.
  std::unordered_map<uint64_t, uint64_t> virtual_[256];
  // The live entries of a kind: the newest one's slot, and how many.
  struct OfKind {
    uint32_t first = 0;
    size_t count = 0;
  };
  OfKind of_kind_[256];
  size_t live_ = 0;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_HANDLE_MAP_H_
