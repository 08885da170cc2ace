// SPDX-License-Identifier: Apache-2.0
// CRIU images made by hand, as a user would who wants more rights from a restore.
#include "checkpoint/engine/criu/saved_rights.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <protozero/pbf_writer.hpp>

namespace cuda_remote::checkpoint {
namespace {

using protozero::pbf_writer;

constexpr uint32_t kMagic = 0x54564319, kCore = 0x55053847, kIds = 0x54432030, kInventory = 0x58313116,
                   kFs = 0x51403912, kFiles = 0x56303138;
constexpr uint32_t kUser = 1000, kGroup = 1001;

std::string Word(uint32_t word) { return std::string(reinterpret_cast<const char*>(&word), sizeof(word)); }

std::string Entry(const std::string& bytes) { return Word(uint32_t(bytes.size())) + bytes; }

std::string Ids(uint64_t user_namespace) {
  std::string bytes;
  pbf_writer ids(bytes);
  for (uint32_t tag = 1; tag <= 12; ++tag) ids.add_uint32(tag, tag == 9 ? uint32_t(user_namespace) : tag);
  return bytes;
}

// A CredsEntry; `change` replaces a field's number.
std::string Creds(uint32_t changed = 0, uint32_t number = 0) {
  std::string bytes;
  pbf_writer creds(bytes);
  for (uint32_t tag = 1; tag <= 8; ++tag) {
    creds.add_uint32(tag, tag == changed ? number : tag % 2 == 1 ? kUser : kGroup);
  }
  for (const uint32_t tag : {9, 10, 11, 12, 13, 19})
    creds.add_uint32(tag, tag == changed ? number : tag == 12 ? ~0u : 0);
  creds.add_uint32(14, changed == 14 ? number : 27);
  return bytes;
}

std::string Core(const std::vector<std::string>& creds) {
  std::string thread_bytes, core_bytes;
  pbf_writer thread(thread_bytes), core(core_bytes);
  thread.add_uint64(1, 0);
  for (const std::string& one : creds) thread.add_message(10, one);
  core.add_uint32(1, 1);
  core.add_message(5, thread_bytes);
  return core_bytes;
}

// A FileEntry of a regular file, and an FsEntry.
std::string File(uint32_t number, const std::string& name) {
  std::string file_bytes, bytes;
  pbf_writer file(file_bytes), entry(bytes);
  file.add_uint32(1, number);
  file.add_string(6, name);
  entry.add_uint32(1, 1);
  entry.add_uint32(2, number);
  entry.add_message(3, file_bytes);
  return bytes;
}

std::string Fs(uint32_t folder, uint32_t root) {
  std::string bytes;
  pbf_writer fs(bytes);
  fs.add_uint32(1, folder);
  fs.add_uint32(2, root);
  return bytes;
}

class SavedRightsTest : public testing::Test {
 protected:
  SavedRightsTest() {
    char name[] = "/tmp/saved-rights-XXXXXX";
    folder_ = mkdtemp(name);
    account_.name = "anna";
    account_.user = kUser;
    account_.group = kGroup;
    account_.groups = {27, kGroup};
    std::string inventory;
    pbf_writer(inventory).add_message(3, Ids(9));
    Write("inventory.img", Word(kInventory) + Entry(inventory));
    Write("ids-7.img", Word(kMagic) + Word(kIds) + Entry(Ids(9)));
    WriteCore(Core({Creds()}));
    WriteFs(Fs(21, 22));
    WriteFiles({File(21, "/home/anna"), File(22, "/")});
  }
  ~SavedRightsTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << bytes;
  }
  void WriteCore(const std::string& core) { Write("core-7.img", Word(kMagic) + Word(kCore) + Entry(core)); }
  void WriteFs(const std::string& fs) { Write("fs-7.img", Word(kMagic) + Word(kFs) + Entry(fs)); }
  void WriteFiles(const std::vector<std::string>& files) {
    std::string bytes = Word(kMagic) + Word(kFiles);
    for (const std::string& file : files) bytes += Entry(file);
    Write("files.img", bytes);
  }
  // What is said of the image; empty: it is good.
  std::string Said() { return std::string(CheckSavedRights(folder_, account_).message()); }

  std::string folder_;
  Account account_;
};

TEST_F(SavedRightsTest, TakesWhatTheUserHas) { EXPECT_EQ(Said(), ""); }

TEST_F(SavedRightsTest, RefusesEveryNumberThatIsNotTheUsers) {
  for (uint32_t tag = 1; tag <= 8; ++tag) {
    WriteCore(Core({Creds(tag, 0)}));
    EXPECT_NE(Said().find(tag % 2 == 1 ? "user 0" : "group 0"), std::string::npos) << tag << ": " << Said();
  }
  WriteCore(Core({Creds(14, 0)}));
  EXPECT_NE(Said().find("group 0"), std::string::npos) << Said();
}

TEST_F(SavedRightsTest, RefusesCapabilitiesAndSecureBits) {
  for (const uint32_t tag : {9, 10, 11, 19}) {
    WriteCore(Core({Creds(tag, 1 << 21)}));
    EXPECT_NE(Said().find("capabilities"), std::string::npos) << tag << ": " << Said();
  }
  WriteCore(Core({Creds(13, 1)}));
  EXPECT_NE(Said().find("secure bits"), std::string::npos) << Said();
}

// Whoever reads a message takes the last of several numbers, also of one that is written as a list.
TEST_F(SavedRightsTest, RefusesNumbersThatAreSaidAgain) {
  std::string again = Creds(), packed = Creds();
  pbf_writer(again).add_uint32(1, 0);
  const uint32_t zero[] = {0};
  pbf_writer(packed).add_packed_uint32(1, std::begin(zero), std::end(zero));
  for (const std::string& creds : {again, packed}) {
    WriteCore(Core({creds}));
    EXPECT_NE(Said().find("user 0"), std::string::npos) << Said();
  }
  WriteCore(Core({Creds(), Creds(1, 0)}));
  EXPECT_NE(Said().find("user 0"), std::string::npos) << Said();
  std::string more = Core({Creds()});
  WriteCore(more + Core({Creds(3, 0)}));
  EXPECT_NE(Said().find("user 0"), std::string::npos) << Said();
}

TEST_F(SavedRightsTest, RefusesWhatSaysNothing) {
  WriteCore(Core({}));
  EXPECT_NE(Said().find("no credentials"), std::string::npos) << Said();
  WriteCore(Core({""}));
  EXPECT_NE(Said().find("not complete"), std::string::npos) << Said();
  Write("core-7.img", "nothing");
  EXPECT_NE(Said().find("not understood"), std::string::npos) << Said();
  unlink((folder_ + "/core-7.img").c_str());
  EXPECT_NE(Said().find("no processes"), std::string::npos) << Said();
}

// As a program leaves it that does not wait for its children.
TEST_F(SavedRightsTest, TakesProcessesThatHaveEnded) {
  const auto with_states = [](const std::vector<uint32_t>& states) {
    std::string bytes;
    pbf_writer core(bytes);
    for (const uint32_t state : states) {
      std::string task;
      pbf_writer(task).add_uint32(1, state);
      core.add_message(3, task);
    }
    return bytes;
  };
  WriteCore(with_states({2}));
  EXPECT_EQ(Said(), "");
  for (const std::vector<uint32_t>& states : {std::vector<uint32_t>{1}, {2, 1}, {1, 2}, {3}, {6}}) {
    WriteCore(with_states(states));
    EXPECT_NE(Said().find("no credentials"), std::string::npos) << Said();
  }
  WriteCore(with_states({2}) + Core({Creds(1, 0)}));
  EXPECT_NE(Said().find("user 0"), std::string::npos) << Said();
}

TEST_F(SavedRightsTest, RefusesOtherNamespaces) {
  Write("ids-7.img", Word(kMagic) + Word(kIds) + Entry(Ids(77)));
  EXPECT_NE(Said().find("not the job's (ids-7.img)"), std::string::npos) << Said();
  Write("ids-7.img", Word(kMagic) + Word(kIds) + Entry(Ids(9)));
  EXPECT_EQ(Said(), "");
  for (const char* name : {"userns-9.img", "mountpoints-12.img", "netns-7.img", "creds-7.img"}) {
    Write(name, "x");
    EXPECT_NE(Said().find(name), std::string::npos) << Said();
    unlink((folder_ + "/" + name).c_str());
  }
  Write("inventory.img", "x");
  EXPECT_NE(Said().find("namespaces"), std::string::npos) << Said();
}

TEST_F(SavedRightsTest, RefusesOtherRootFolders) {
  const auto refused = [&] { return Said().find("a root folder that is not the job's") != std::string::npos; };
  WriteFs(Fs(21, 21));
  EXPECT_TRUE(refused()) << Said();
  WriteFs(Fs(21, 23));  // which no file is
  EXPECT_TRUE(refused()) << Said();
  WriteFs(Fs(21, 22) + Fs(21, 21));
  EXPECT_TRUE(refused()) << Said();
  WriteFs(Fs(21, 22));
  WriteFiles({File(21, "/home/anna"), File(22, "/"), File(22, "/home/anna")});
  EXPECT_TRUE(refused()) << Said();
  Write("files.img", "x");
  EXPECT_TRUE(refused()) << Said();
  WriteFiles({File(22, "/")});
  EXPECT_EQ(Said(), "");
  Write("fs-8.img", "x");
  EXPECT_NE(Said().find("(fs-8.img)"), std::string::npos) << Said();
}

}  // namespace
}  // namespace cuda_remote::checkpoint
