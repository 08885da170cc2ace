// SPDX-License-Identifier: Apache-2.0
// Records of the references to user objects that the program and its graphs have.
//
// The log keeps sums, not calls, so that it does not grow where a program takes references and gives them back over and
// over. A replay gives the program all references that it ever had at once. It takes back what the program released
// after the last record that names the object: until then the object cannot go, whatever graphs of that time are gone
// from the log. Executables and clones have references from their graph, as it was when they were made, so a graph's
// own calls stay while something made between them is alive.
//
// Not thread-safe: part of RecordedObjects, under its lock, as the log is.
#ifndef CUDA_REMOTE_CLIENT_GRAPHS_USER_OBJECT_RECORDS_H_
#define CUDA_REMOTE_CLIENT_GRAPHS_USER_OBJECT_RECORDS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "proto/frame/frame.h"
#include "replay/log/log.h"

namespace cuda_remote::client {

class UserObjectRecords {
 public:
  // Whether something alive was made from a graph between two records, by their orders in the log.
  using CopiedBetween = std::function<bool(uint64_t graph, uint64_t after, uint64_t before)>;
  UserObjectRecords(replay::Log* log, CopiedBetween copied_between)
      : log_(log), copied_between_(std::move(copied_between)) {}

  // Records one of the four calls that take and give back references. `object` is the graph, or the user object itself.
  // False for another call: nothing happens. The record is left out if the user object is gone: if the call took the
  // last reference, the destructor's thread may have been first.
  bool Modify(replay::ObjectKey object, const FrameHeader& header, std::string_view message,
              const std::vector<replay::ObjectKey>& needs);

  // The last reference is gone. A graph's record can outlive the object, if something was made from the graph and is
  // another thing now; a replay leaves out what names an object that is gone.
  void ObjectGone(uint64_t user_object);
  void GraphGone(uint64_t graph);

 private:
  // One record about a graph and a user object.
  struct Reference {
    bool retains;
    uint64_t key;    // in the log
    uint64_t order;  // in the log
    uint32_t count;
  };

  void ProgramRetains(uint64_t user_object, uint32_t count);
  void ProgramReleases(uint64_t user_object, uint32_t count);
  void GraphChanges(replay::ObjectKey graph, uint64_t user_object, bool retains, uint32_t count,
                    const FrameHeader& header, const std::vector<replay::ObjectKey>& needs);
  // Writes down a reference's count, or forgets it at 0.
  void Write(replay::ObjectKey graph, uint64_t user_object, const Reference& reference);
  // What the program has released, in its record.
  uint32_t ReleasedCount(uint64_t user_object) const;
  // What the program ever had, in the record of the object.
  uint32_t CreatedCount(uint64_t user_object) const;
  void SetReleasedCount(uint64_t user_object, uint32_t count);

  replay::Log* const log_;
  const CopiedBetween copied_between_;
  // By graph and user object; oldest first.
  std::unordered_map<uint64_t, std::map<uint64_t, std::vector<Reference>>> of_graphs_;
  std::unordered_map<uint64_t, std::set<uint64_t>> graphs_;  // in of_graphs_, by user object
  uint64_t next_key_ = 1;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_GRAPHS_USER_OBJECT_RECORDS_H_
