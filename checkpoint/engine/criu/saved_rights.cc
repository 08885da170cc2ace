// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/saved_rights.h"

#include <dirent.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "checkpoint/engine/criu/criu_image.h"

namespace cuda_remote::checkpoint {
namespace {

using protozero::pbf_wire_type;

constexpr uint32_t kCoreMagic = 0x55053847, kIdsMagic = 0x54432030, kFsMagic = 0x51403912;
// Of a CoreEntry (CRIU's images/core.proto), its ThreadCoreEntry and the CredsEntry in that (images/creds.proto).
constexpr protozero::pbf_tag_type kIdsField = 4, kThreadField = 5, kCredsField = 10;
// Of a CoreEntry, its TaskCoreEntry, and of that the state; a process that has ended and waits for its parent
// (TASK_DEAD) executes nothing any more, and CRIU saves no credentials of it.
constexpr protozero::pbf_tag_type kTaskField = 3, kStateField = 1;
constexpr uint64_t kDead = 2;
constexpr protozero::pbf_tag_type kFirstUser = 1, kLastNumber = 8, kFirstCapabilities = 9, kBounding = 12,
                                  kSecureBits = 13, kGroups = 14, kAmbient = 19;
// Of a TaskKobjIdsEntry (images/core.proto): the namespaces, and where an InventoryEntry has the root task's.
constexpr protozero::pbf_tag_type kFirstNamespace = 5, kLastNamespace = 12, kRootIds = 3;
// Of an FsEntry (images/fs.proto) the number of the root's entry in files.img, and of that (images/regfile.proto) its
// number and name.
constexpr protozero::pbf_tag_type kRootField = 2, kFileNumber = 1, kFileName = 6;
// Files about namespaces other than those that CRIU is in, and credentials where old versions had them.
constexpr const char* kForeign[] = {"userns-", "netns-", "utsns-", "ipcns-", "pidns-", "mountpoints-", "creds-"};

bool StartsWith(const std::string& text, const std::string& start) { return text.compare(0, start.size(), start) == 0; }

// What is wrong with a thread's credentials; empty: nothing.
std::string WrongIn(protozero::pbf_reader creds, const Account& account) {
  std::vector<gid_t> groups;
  size_t numbers = 0;
  while (creds.next()) {
    const protozero::pbf_tag_type tag = creds.tag();
    const bool known = tag <= kGroups || tag == kAmbient;
    if (!known) {
      creds.skip();
      continue;
    }
    for (const uint64_t number : NumbersIn(&creds)) {
      if (tag >= kFirstUser && tag <= kLastNumber) {
        // User and group take turns.
        const bool user = tag % 2 == 1;
        if (number != (user ? account.user : account.group)) {
          return (user ? "user " : "group ") + std::to_string(number);
        }
        ++numbers;
      } else if ((tag >= kFirstCapabilities && tag < kBounding) || tag == kAmbient) {
        if (number != 0) return "capabilities";
      } else if (tag == kSecureBits) {
        if (number != 0) return "secure bits";
      } else if (tag == kGroups) {
        groups.push_back(gid_t(number));
        if (groups.back() != number || !std::binary_search(account.groups.begin(), account.groups.end(), groups.back()))
          return "group " + std::to_string(number);
      }
    }
  }
  return numbers >= kLastNumber ? std::string() : "credentials that are not complete";
}

using Namespaces = std::map<protozero::pbf_tag_type, uint64_t>;

// False if a number of a namespace differs from what is there already.
bool AddNamespaces(protozero::pbf_reader ids, Namespaces* all) {
  while (ids.next()) {
    const protozero::pbf_tag_type tag = ids.tag();
    if (tag < kFirstNamespace || tag > kLastNamespace || ids.wire_type() != pbf_wire_type::varint) {
      ids.skip();
      continue;
    }
    const uint64_t number = ids.get_uint64();
    if (all->emplace(tag, number).first->second != number) return false;
  }
  return true;
}

bool HasOnly(protozero::pbf_reader ids, const Namespaces& own) {
  Namespaces found;
  return AddNamespaces(ids, &found) && found == own;
}

// As WrongIn, for the threads of a core-*.img. Its process may be in the namespaces `own`.
std::string WrongInCore(std::string_view image, const Account& account, const Namespaces& own) {
  std::string wrong;
  size_t found = 0, dead = 0, alive = 0;
  const bool read = ReadEntries(image, kCoreMagic, [&](protozero::pbf_reader core) {
    while (core.next()) {
      // Old versions have them here.
      if (core.tag() == kIdsField && core.wire_type() == pbf_wire_type::length_delimited) {
        if (!HasOnly(core.get_message(), own)) wrong = "namespaces that are not the job's";
        continue;
      }
      if (core.tag() == kTaskField && core.wire_type() == pbf_wire_type::length_delimited) {
        protozero::pbf_reader task = core.get_message();
        while (task.next()) {
          if (task.tag() != kStateField) {
            task.skip();
            continue;
          }
          // The last of several counts.
          for (const uint64_t state : NumbersIn(&task)) ++(state == kDead ? dead : alive);
        }
        continue;
      }
      if (core.tag() != kThreadField || core.wire_type() != pbf_wire_type::length_delimited) {
        core.skip();
        continue;
      }
      protozero::pbf_reader thread = core.get_message();
      while (thread.next()) {
        if (thread.tag() != kCredsField || thread.wire_type() != pbf_wire_type::length_delimited) {
          thread.skip();
          continue;
        }
        ++found;
        const std::string one = WrongIn(thread.get_message(), account);
        if (!one.empty()) wrong = one;
      }
    }
  });
  if (!read) return "credentials that are not understood";
  return found == 0 && (dead == 0 || alive > 0) ? "no credentials" : wrong;
}

// The namespaces that CRIU was in: inventory.img has one magic number, and one entry.
bool ReadInventory(const std::string& image, Namespaces* own) {
  constexpr size_t kHead = 8;
  if (image.size() < kHead) return false;
  try {
    for (protozero::pbf_reader inventory(image.data() + kHead, image.size() - kHead); inventory.next();) {
      if (inventory.tag() != kRootIds || inventory.wire_type() != pbf_wire_type::length_delimited) {
        inventory.skip();
      } else if (!AddNamespaces(inventory.get_message(), own)) {
        return false;
      }
    }
  } catch (const protozero::exception&) {
    return false;
  }
  return !own->empty();
}

// Adds the numbers that a fs-*.img has of its process's root folder. False if it has none.
bool AddRoots(std::string_view image, std::set<uint64_t>* roots) {
  size_t found = 0;
  const bool read = ReadEntries(image, kFsMagic, [&](protozero::pbf_reader fs) {
    while (fs.next()) {
      if (fs.tag() != kRootField || fs.wire_type() != pbf_wire_type::varint) {
        fs.skip();
        continue;
      }
      roots->insert(fs.get_uint64());
      ++found;
    }
  });
  return read && found > 0;
}

// Whether these entries of files.img are all the job's own root folder. In another one, which CRIU has the right to
// enter, programs would find other files in the place of the system's.
bool AreJobsRoot(const std::string& folder, const std::set<uint64_t>& roots) {
  std::string image;
  std::set<uint64_t> named;
  bool others = false;
  if (!ReadImageFile(folder + "/files.img", &image)) return false;
  const bool read = ReadFilesImage(image, FileKind::kRegular, [&](protozero::pbf_reader file) {
    uint64_t number = 0;
    std::string name;
    while (file.next()) {
      if (file.tag() == kFileNumber && file.wire_type() == pbf_wire_type::varint)
        number = file.get_uint64();
      else if (file.tag() == kFileName && file.wire_type() == pbf_wire_type::length_delimited)
        name = file.get_string();
      else
        file.skip();
    }
    if (roots.count(number) == 0) return;
    named.insert(number);
    others = others || name != "/";
  });
  return read && !others && named == roots;
}

}  // namespace

absl::Status CheckSavedRights(const std::string& folder, const Account& account) {
  std::vector<std::string> names;
  DIR* const list = opendir(folder.c_str());
  while (const dirent* const entry = list ? readdir(list) : nullptr) names.push_back(entry->d_name);
  if (list) closedir(list);
  std::string image;
  Namespaces own;
  if (!ReadImageFile(folder + "/inventory.img", &image) || !ReadInventory(image, &own)) {
    return absl::DataLossError("cannot read from the image in which namespaces its processes were");
  }
  size_t cores = 0;
  std::set<uint64_t> roots;
  for (const std::string& name : names) {
    for (const char* foreign : kForeign) {
      if (!StartsWith(name, foreign)) continue;
      return absl::PermissionDeniedError("the image has " + name +
                                         ": its processes would have namespaces or rights that no job has");
    }
    const bool core = StartsWith(name, "core-"), ids = StartsWith(name, "ids-"), fs = StartsWith(name, "fs-");
    if (!core && !ids && !fs) continue;
    if (!ReadImageFile(folder + "/" + name, &image)) {
      return absl::DataLossError("cannot read the image's file " + name);
    }
    if (core) {
      ++cores;
      const std::string wrong = WrongInCore(image, account, own);
      if (wrong.empty()) continue;
      return absl::PermissionDeniedError("the image asks for rights that " + NameOf(account) +
                                         " does not have: " + wrong + " (" + name + ")");
    }
    if (fs) {
      if (AddRoots(image, &roots)) continue;
      return absl::DataLossError("cannot read from the image in which root folder its processes were (" + name + ")");
    }
    bool same = true;
    const bool read =
        ReadEntries(image, kIdsMagic, [&](protozero::pbf_reader entry) { same = same && HasOnly(entry, own); });
    if (read && same) continue;
    return absl::PermissionDeniedError("the image asks for namespaces that are not the job's (" + name + ")");
  }
  if (!AreJobsRoot(folder, roots)) {
    return absl::PermissionDeniedError("the image asks for a root folder that is not the job's");
  }
  if (cores > 0) return absl::OkStatus();
  return absl::DataLossError("the image has no processes");
}

}  // namespace cuda_remote::checkpoint
