// SPDX-License-Identifier: Apache-2.0
// What CRIU's files.img says of a job's files, and giving them other names.

#include "checkpoint/engine/criu/needs.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <map>
#include <string>

#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/testing/files_image.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr uint32_t kPlain = S_IFREG | 0644;

void Add(std::string* image, const std::string& name, int flags, uint64_t size, const std::vector<uint32_t>& build_id,
         bool external = false, uint32_t mode = kPlain, uint32_t id = 7) {
  std::string facts;
  protozero::pbf_writer reg(facts);
  reg.add_uint32(1, id);
  reg.add_uint32(2, uint32_t(flags));
  reg.add_uint64(3, 5);
  reg.add_string(6, name);
  if (size != 0) reg.add_uint64(8, size);
  if (external) reg.add_bool(9, true);
  reg.add_uint32(10, mode);
  for (const uint32_t word : build_id) reg.add_uint32(11, word);
  reg.add_fixed32(15, 0x12345678);  // what is not known here
  AddFile(image, 1, 3, facts);
}

std::string SampleImage() {
  std::string image = EmptyFilesImage();
  Add(&image, "/usr/lib/libc.so.6", O_RDONLY, 100, {0x04030201, 0x08070605});
  Add(&image, "/out", O_WRONLY, 17, {});
  Add(&image, "/log", O_WRONLY | O_APPEND, 0, {});
  Add(&image, "file[1a:2b]", O_RDONLY, 9, {}, true);
  Add(&image, "file[1a:2c]", O_RDONLY, 9, {}, true);
  Add(&image, "/gone", O_RDWR, 3, {});
  Add(&image, "/dev/null", O_RDWR, 0, {}, false, S_IFCHR | 0666);
  Add(&image, "/usr/lib/libc.so.6", O_RDONLY, 100, {0x04030201, 0x08070605});
  AddFile(&image, 2, 4, "not a plain file");
  return image;
}

TEST(Needs, AreTheFilesThatMustBeThere) {
  const Job job;
  ProcessFacts facts;
  InheritedFile* const file = facts.add_files();
  file->set_id("file[1a:2b]");
  file->set_path("/in");
  ckptfmt::Needs needs;
  const auto exists = [](const Job&, const std::string& path) { return path != "/gone"; };
  ASSERT_TRUE(ReadNeeds(SampleImage(), "", job, facts, exists, &needs));
  EXPECT_FALSE(needs.kernel.empty());
  ASSERT_EQ(needs.files.size(), 4u);
  EXPECT_EQ(needs.files[0].path, "/usr/lib/libc.so.6");
  EXPECT_EQ(needs.files[0].build_id, "\x01\x02\x03\x04\x05\x06\x07\x08");
  EXPECT_EQ(needs.files[1].path, "/out");
  EXPECT_TRUE(needs.files[1].written);
  EXPECT_EQ(needs.files[1].bytes, 17u);
  EXPECT_EQ(needs.files[2].path, "/log");
  EXPECT_TRUE(needs.files[2].written);
  EXPECT_EQ(needs.files[3].path, "/in");
  EXPECT_FALSE(needs.files[3].written);
}

// Open MPI's processes all make /dev/shm/open_mpi.0000, delete it and keep it open: while one does so, the name is
// there for all others, too.
TEST(Needs, ADeletedFileIsNotNeededWhereAnotherHasItsName) {
  std::string image = EmptyFilesImage();
  Add(&image, "/dev/shm/a", O_RDWR, 0, {}, false, kPlain, 1);
  Add(&image, "/tmp/b", O_RDWR, 3, {}, false, kPlain, 2);
  Add(&image, "/tmp/link_remap.3", O_RDWR, 3, {}, false, kPlain, 3);
  Add(&image, "/proc/12/status", O_RDONLY, 0, {}, false, kPlain, 4);
  Add(&image, "/dev/shm/a", O_RDWR, 5, {}, false, kPlain, 5);
  std::string remaps = EmptyRemapsImage();
  AddRemap(&remaps, 1, 11, kGhostRemap);
  AddRemap(&remaps, 2, 3, kLinkedRemap);
  AddRemap(&remaps, 4, 12, kProcRemap);
  const auto needed = [&image](const std::string& nameless) {
    ckptfmt::Needs needs;
    EXPECT_TRUE(ReadNeeds(image, nameless, Job(), ProcessFacts(), nullptr, &needs));
    std::map<std::string, uint64_t> bytes;
    for (const ckptfmt::NeededFile& file : needs.files) bytes[file.path] = file.bytes;
    return bytes;
  };
  using Bytes = std::map<std::string, uint64_t>;
  EXPECT_EQ(needed(remaps), (Bytes{{"/tmp/link_remap.3", 3}, {"/dev/shm/a", 5}}));
  const Bytes all = {{"/dev/shm/a", 0}, {"/tmp/b", 3}, {"/tmp/link_remap.3", 3}};
  EXPECT_EQ(needed(EmptyRemapsImage()), all);
  EXPECT_EQ(needed(""), all);
  ckptfmt::Needs needs;
  EXPECT_FALSE(ReadNeeds(image, "no image of CRIU's", Job(), ProcessFacts(), nullptr, &needs));
}

TEST(Needs, AProcessOfTheJobBringsItsOwnFiles) {
  std::string image = EmptyFilesImage();
  Add(&image, "/proc/57/status", O_RDONLY, 0, {});
  Add(&image, "/proc/stat", O_RDONLY, 0, {});
  ckptfmt::Needs needs;
  ASSERT_TRUE(ReadNeeds(image, "", Job(), ProcessFacts(), nullptr, &needs));
  ASSERT_EQ(needs.files.size(), 1u);
  EXPECT_EQ(needs.files[0].path, "/proc/stat");
}

// A program that was just starting had it mapped. The job has one of its own, which this machine need not have.
TEST(Needs, TheLoadersCacheIsTheJobsOwn) {
  std::string image = EmptyFilesImage();
  Add(&image, "/etc/ld.so.cache", O_RDONLY, 100, {});
  Job job;
  ckptfmt::Needs needs;
  ASSERT_TRUE(ReadNeeds(image, "", job, ProcessFacts(), nullptr, &needs));
  EXPECT_EQ(needs.files.size(), 1u);
  ProcessFacts facts;
  facts.set_own_loader_cache(true);
  ckptfmt::Needs without;
  ASSERT_TRUE(ReadNeeds(image, "", job, facts, nullptr, &without));
  EXPECT_TRUE(without.files.empty());
}

// A process that was about to connect to its server had it open. A restart makes one before it restores the processes.
TEST(Needs, TheLockOfConnectionsIsTheJobsOwn) {
  std::string image = EmptyFilesImage();
  Add(&image, "/run/job/connect.lock", O_RDWR, 0, {});
  Add(&image, "/run/other/connect.lock", O_RDWR, 0, {});
  Job job;
  job.set_directory("/run/job");
  ckptfmt::Needs needs;
  ASSERT_TRUE(ReadNeeds(image, "", job, ProcessFacts(), nullptr, &needs));
  ASSERT_EQ(needs.files.size(), 1u);
  EXPECT_EQ(needs.files[0].path, "/run/other/connect.lock");
}

TEST(Needs, FilesGetOtherNamesAndNothingElseChanges) {
  std::string image = SampleImage();
  const auto rename = [](std::string_view path, FileChange* change) {
    change->path = "/somewhere/else/entirely/libc.so.6";
    return path == "/usr/lib/libc.so.6";
  };
  ASSERT_TRUE(ChangeFiles(&image, rename));
  const auto back = [](std::string_view path, FileChange* change) {
    change->path = "/usr/lib/libc.so.6";
    return path == "/somewhere/else/entirely/libc.so.6";
  };
  std::vector<std::string> names;
  const auto list = [&](protozero::pbf_reader entry) {
    while (entry.next(6)) names.push_back(entry.get_string());
  };
  ASSERT_TRUE(ReadFilesImage(image, FileKind::kRegular, list));
  ASSERT_EQ(names.size(), 8u);
  EXPECT_EQ(names[0], "/somewhere/else/entirely/libc.so.6");
  EXPECT_EQ(names[1], "/out");
  ASSERT_TRUE(ChangeFiles(&image, back));
  EXPECT_EQ(image, SampleImage());
}

TEST(Needs, AnotherFileBeginsWhereItIsTold) {
  std::string image = SampleImage();
  const auto change = [](std::string_view path, FileChange* wanted) {
    wanted->other = true;
    wanted->position = 12;
    return path == "/out";
  };
  ASSERT_TRUE(ChangeFiles(&image, change));
  int seen = 0;
  ASSERT_TRUE(ReadFilesImage(image, FileKind::kRegular, [&](protozero::pbf_reader entry) {
    std::string name;
    uint64_t position = 0;
    bool has_size = false;
    while (entry.next()) {
      if (entry.tag() == 6) {
        name = entry.get_string();
      } else if (entry.tag() == 3) {
        position = entry.get_uint64();
      } else {
        has_size = has_size || entry.tag() == 8;
        entry.skip();
      }
    }
    EXPECT_EQ(position, name == "/out" ? 12u : 5u) << name;
    EXPECT_EQ(has_size, name != "/out" && name != "/log" && name != "/dev/null") << name;
    seen += name == "/out";
  }));
  EXPECT_EQ(seen, 1);
}

TEST(Needs, DamagedImagesAreRefused) {
  const std::string image = SampleImage();
  const auto rename = [](std::string_view, FileChange* change) {
    *change = {"/x", 0, true, 5};
    return true;
  };
  ckptfmt::Needs needs;
  for (size_t cut = 0; cut < image.size(); ++cut) {
    std::string bad = image.substr(0, cut);
    ReadNeeds(bad, "", Job(), ProcessFacts(), nullptr, &needs);
    ChangeFiles(&bad, rename);
  }
  for (size_t at = 0; at < image.size(); ++at) {
    std::string bad = image;
    bad[at] = char(bad[at] ^ 0x55);
    ReadNeeds(bad, "", Job(), ProcessFacts(), nullptr, &needs);
    ChangeFiles(&bad, rename);
  }
  std::string other = "something else";
  EXPECT_FALSE(ReadNeeds(other, "", Job(), ProcessFacts(), nullptr, &needs));
  EXPECT_FALSE(ChangeFiles(&other, rename));
}

}  // namespace
}  // namespace cuda_remote::checkpoint
