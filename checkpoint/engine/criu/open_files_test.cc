// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/open_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "checkpoint/engine/criu/testing/files_image.h"

namespace cuda_remote::checkpoint {
namespace {

void Add(std::string* image, const std::string& name, int flags, bool has_size, uint64_t size, bool external,
         int type = 1, uint32_t id = 7) {
  std::string facts;
  protozero::pbf_writer reg(facts);
  reg.add_uint32(1, id);
  reg.add_uint32(2, uint32_t(flags));
  reg.add_uint64(3, 0);
  reg.add_string(6, name);
  if (has_size) reg.add_uint64(8, size);
  if (external) reg.add_bool(9, true);
  AddFile(image, type, 3, facts);
}

TEST(OpenFilesTest, Parses) {
  std::string image = EmptyFilesImage();
  Add(&image, "/a", O_RDONLY, true, 5, false);
  Add(&image, "/log", O_WRONLY | O_APPEND, false, 0, false);
  Add(&image, "file[1a:2b]", O_WRONLY, true, 9, true);
  Add(&image, "file[1a:2c]", O_WRONLY, true, 9, true);
  Add(&image, "/socket", O_RDWR, true, 1, false, 2);
  Add(&image, "/a", O_RDONLY, true, 5, false);
  ProcessFacts job;
  InheritedFile* const file = job.add_files();
  file->set_id("file[1a:2b]");
  file->set_path("/out");
  std::vector<SavedFile> files;
  ASSERT_TRUE(ParseFiles(image, "", job, &files));
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].path, "/a");
  EXPECT_EQ(files[0].bytes, 5u);
  EXPECT_FALSE(files[0].written);
  EXPECT_EQ(files[1].path, "/out");
  EXPECT_TRUE(files[1].written);
  // Nothing that is damaged is more than refused.
  for (size_t cut = 0; cut < image.size(); ++cut) ParseFiles(image.substr(0, cut), "", job, &files);
  for (size_t at = 0; at < image.size(); ++at) {
    std::string bad = image;
    bad[at] = char(bad[at] ^ 0x55);
    ParseFiles(bad, "", job, &files);
  }
  EXPECT_FALSE(ParseFiles("", "", job, &files));
  EXPECT_FALSE(ParseFiles("something else", "", job, &files));
}

// What is there under such a name now is another file, which is not to be compared, and not to be cut back.
TEST(OpenFilesTest, FilesWithoutNamesAreLeftOut) {
  std::string image = EmptyFilesImage(), remaps = EmptyRemapsImage();
  Add(&image, "/data", O_RDWR, true, 5, false, 1, 1);    // replaced by rename
  Add(&image, "/data", O_RDONLY, true, 9, false, 1, 2);  // the new one
  Add(&image, "/log", O_RDWR, true, 3, false, 1, 3);     // deleted
  AddRemap(&remaps, 1, 1, kGhostRemap);
  AddRemap(&remaps, 3, 4, kLinkedRemap);
  std::vector<SavedFile> files;
  ASSERT_TRUE(ParseFiles(image, remaps, {}, &files));
  ASSERT_EQ(files.size(), 1u);
  EXPECT_EQ(files[0].path, "/data");
  EXPECT_EQ(files[0].bytes, 9u);
  EXPECT_FALSE(files[0].written);
  EXPECT_FALSE(ParseFiles(image, "something else", {}, &files));
}

// A program that was just starting had it open. A restart makes it again, perhaps of another length.
TEST(OpenFilesTest, TheLoadersCacheIsTheJobsOwn) {
  std::string image = EmptyFilesImage();
  Add(&image, "/etc/ld.so.cache", O_RDONLY, true, 5, false);
  ProcessFacts job;
  std::vector<SavedFile> files;
  ASSERT_TRUE(ParseFiles(image, "", job, &files));
  EXPECT_EQ(files.size(), 1u);
  job.set_own_loader_cache(true);
  ASSERT_TRUE(ParseFiles(image, "", job, &files));
  EXPECT_TRUE(files.empty());
}

TEST(OpenFilesTest, ComparesAndCutsBack) {
  char folder[] = "/tmp/open-files-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/out";
  std::ofstream(path) << "0123456789";
  absl::StatusOr<std::vector<SavedFile>> longer =
      CompareFiles({{path, 10, true}, {std::string(folder) + "/gone", 3, true}});
  ASSERT_EQ(longer.status(), absl::OkStatus());
  EXPECT_TRUE(longer->empty());
  EXPECT_EQ(CompareFiles({{path, 11, true}}).status(),
            absl::FailedPreconditionError("the file " + path +
                                          ", which the job has open, has changed: 11 bytes at the checkpoint, 10 now"));
  EXPECT_FALSE(CompareFiles({{path, 4, false}}).ok()) << "a file that is only read has grown";
  longer = CompareFiles({{path, 4, true}});
  ASSERT_EQ(longer.status(), absl::OkStatus());
  ASSERT_EQ(longer->size(), 1u);
  ASSERT_EQ(CutBack(*longer), absl::OkStatus());
  struct stat now;
  ASSERT_EQ(stat(path.c_str(), &now), 0);
  EXPECT_EQ(now.st_size, 4);
  ASSERT_EQ(system((std::string("rm -r ") + folder).c_str()), 0);
}

}  // namespace
}  // namespace cuda_remote::checkpoint
