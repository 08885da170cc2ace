// SPDX-License-Identifier: Apache-2.0
// Tests of what may go wrong while an image is written: full disks, crashes at every step, other writers, other
// people's files.

#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "ckptfmt/file.h"
#include "ckptfmt/folder.h"
#include "ckptfmt/testing.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::ckptfmt {
namespace {

using testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

// The image's job, to tell one image from another.
std::string JobOf(const std::string& dir) {
  if (absl::Status status = ReadAll(dir); !status.ok()) return "error: " + Message(status);
  return (*ImageReader::Open(dir))->info().job;
}

absl::Status WriteJob(const std::string& dir, const std::string& job) {
  auto writer = ImageWriter::Create(dir);
  if (!writer.ok()) return writer.status();
  CR_RETURN_IF_ERROR(FillSample(**writer, true));
  ImageInfo info = SampleInfo();
  info.job = job;
  return (*writer)->Commit(info);
}

TEST(Commit, AnImageTakesAnOldOnesPlace) {
  TestFolder folder;
  ASSERT_TRUE(WriteJob(folder / "image", "old").ok());
  ASSERT_TRUE(WriteJob(folder / "image", "new").ok());
  EXPECT_EQ(JobOf(folder / "image"), "new");
  EXPECT_FALSE(std::filesystem::exists(folder / "image.partial"));
  EXPECT_FALSE(std::filesystem::exists(folder / "image.old"));
}

TEST(Commit, OtherThingsAreNotTouched) {
  TestFolder folder;
  WriteFile(folder / "file", "mine");
  std::filesystem::create_directory(folder / "folder");
  WriteFile(folder / "folder/file", "mine");
  for (const char* name : {"file", "folder"}) {
    const absl::Status status = WriteJob(folder / name, "new");
    EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
  }
  // Nor is a DIR.partial that is somebody's.
  std::filesystem::create_directory(folder / "image.partial");
  WriteFile(folder / "image.partial/thesis.tex", "mine");
  EXPECT_THAT(Message(WriteJob(folder / "image", "new")), HasSubstr("thesis.tex"));
  EXPECT_EQ(ReadFile(folder / "file"), "mine");
  EXPECT_EQ(ReadFile(folder / "folder/file"), "mine");
  EXPECT_EQ(ReadFile(folder / "image.partial/thesis.tex"), "mine");
  // A link that leads nowhere is refused at once, not when the image is complete.
  std::filesystem::create_symlink("nowhere", folder / "link");
  const absl::Status link = ImageWriter::Create(folder / "link").status();
  EXPECT_TRUE(absl::IsAlreadyExists(link)) << link;
  // An empty folder may become an image; a folder that is not there is an error.
  std::filesystem::create_directory(folder / "empty");
  EXPECT_TRUE(WriteJob(folder / "empty", "new").ok());
  EXPECT_EQ(JobOf(folder / "empty"), "new");
  const absl::Status status = WriteJob(folder / "no/such/image", "new");
  EXPECT_THAT(Message(status), HasSubstr("does not exist"));
  // A folder that is there, and takes nothing.
  const std::string refused = Message(WriteJob("/proc/image", "new"));
  EXPECT_THAT(refused, HasSubstr("nothing can be created in /proc"));
  EXPECT_THAT(refused, Not(HasSubstr("does not exist")));
}

TEST(Commit, OneWriterAtATime) {
  TestFolder folder;
  auto first = ImageWriter::Create(folder / "image");
  ASSERT_TRUE(first.ok());
  EXPECT_TRUE(absl::IsUnavailable(ImageWriter::Create(folder / "image").status()));
  ASSERT_TRUE(FillSample(**first, true).ok());
  ASSERT_TRUE((*first)->Commit(SampleInfo()).ok());
  first->reset();
  EXPECT_TRUE(ImageWriter::Create(folder / "image").ok());
  EXPECT_EQ(JobOf(folder / "image"), "job-1") << "a writer that gives up leaves the image there";
}

TEST(Commit, OneWriterAtATimeOnAllHosts) {
  const OtherHosts hosts;
  TestFolder folder;
  const std::string image = folder / "image", lock = image + ".partial/" + kLockName;
  {
    auto first = ImageWriter::Create(image);
    ASSERT_TRUE(first.ok());
    EXPECT_EQ(AccessTo(lock), O_RDWR);
    EXPECT_TRUE(absl::IsUnavailable(ImageWriter::Create(image).status()));
    ASSERT_TRUE(FillSample(**first, true).ok());
    ASSERT_TRUE((*first)->Commit(SampleInfo()).ok());
  }
  EXPECT_EQ(JobOf(image), "job-1");
  std::vector<pid_t> children;
  for (const char* job : {"a", "b", "c"}) {
    const pid_t child = fork();
    if (child == 0) {
      for (int i = 0; i < 8;) {
        const absl::Status status = WriteJob(image, job);
        i += status.ok();
        if (status.ok() || absl::IsUnavailable(status)) continue;
        fprintf(stderr, "%s\n", Message(status).c_str());
        _exit(1);
      }
      _exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int result = 0;
    waitpid(child, &result, 0);
    EXPECT_EQ(result, 0);
  }
  EXPECT_EQ(JobOf(image).size(), 1u) << JobOf(image);
  EXPECT_FALSE(std::filesystem::exists(image + ".partial"));
  EXPECT_FALSE(std::filesystem::exists(image + "/" + kLockName));
}

TEST(Commit, AWriterThatIsAboutToEndIsWaitedFor) {
  TestFolder folder;
  auto first = ImageWriter::Create(folder / "image");
  ASSERT_TRUE(first.ok());
  std::thread ends([&] {
    usleep(50000);
    first->reset();
  });
  EXPECT_TRUE(ImageWriter::Create(folder / "image").ok());
  ends.join();
}

TEST(Commit, ALinkToAnImageIsFollowed) {
  TestFolder folder;
  ASSERT_TRUE(WriteJob(folder / "image-1", "old").ok());
  std::filesystem::create_directory_symlink("image-1", folder / "latest");
  ASSERT_TRUE(WriteJob(folder / "latest", "new").ok());
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "latest"));
  EXPECT_EQ(JobOf(folder / "image-1"), "new");
}

std::atomic<int64_t> g_room{0};

ssize_t FullDisk(int fd, const void* data, size_t bytes) {
  if (g_room <= 0) {
    errno = ENOSPC;
    return -1;
  }
  const size_t fits = size_t(std::min<int64_t>(g_room, int64_t(bytes)));
  g_room -= int64_t(fits);
  return write(fd, data, fits);
}

TEST(Commit, AFullDiskAtAnyMoment) {
  TestFolder folder;
  ASSERT_TRUE(WriteJob(folder / "image", "old").ok());
  g_write_for_testing = &FullDisk;
  bool finished = false;
  int failures = 0;
  for (int64_t room = 0; !finished; room += 97) {
    g_room = room;
    const absl::Status status = WriteJob(folder / "image", "new");
    finished = status.ok();
    if (finished) break;
    ++failures;
    ASSERT_TRUE(absl::IsResourceExhausted(status)) << status;
    ASSERT_THAT(Message(status), HasSubstr("No space left"));
    ASSERT_THAT(Message(status), HasSubstr("image.partial/"));
    ASSERT_FALSE(std::filesystem::exists(folder / "image.partial"));
  }
  g_write_for_testing = nullptr;
  EXPECT_GT(failures, 30);
  EXPECT_EQ(JobOf(folder / "image"), "new");
}

TEST(Commit, AFileSizeLimitOfTheSystem) {
  TestFolder folder;
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &limit);
    const absl::Status status = WriteSample(folder / "image");
    _exit(absl::IsResourceExhausted(status) ? 0 : 1);
  }
  int result = 0;
  waitpid(child, &result, 0);
  EXPECT_EQ(result, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

int g_syncs_left = 0;

int SyncOrFail(int fd) {
  if (g_syncs_left-- != 0) return fsync(fd);
  errno = EIO;
  return -1;
}

TEST(Commit, ADiskThatCannotFlushAtAnyMoment) {
  for (const bool exchange : {true, false}) {
    g_no_exchange_for_testing = !exchange;
    TestFolder folder;
    ASSERT_TRUE(WriteJob(folder / "image", "old").ok());
    for (const char* name : {"first", "image"}) {
      const std::string image = folder / name, before = JobOf(image);
      int syncs = 0;
      for (;; ++syncs) {
        g_syncs_left = syncs;
        g_sync_for_testing = &SyncOrFail;
        const absl::Status status = WriteJob(image, "new");
        g_sync_for_testing = nullptr;
        if (status.ok()) break;
        ASSERT_TRUE(absl::IsDataLoss(status)) << status;
        ASSERT_EQ(JobOf(image), before) << "at flush " << syncs;
        ASSERT_FALSE(std::filesystem::exists(image + ".partial")) << "at flush " << syncs;
        ASSERT_FALSE(std::filesystem::exists(image + ".old")) << "at flush " << syncs;
      }
      EXPECT_GT(syncs, 8);
      EXPECT_EQ(JobOf(image), "new");
    }
  }
  g_no_exchange_for_testing = false;
}

TEST(Commit, AFolderThatMayBeWrittenButNotRead) {
  TestFolder folder;
  ASSERT_EQ(mkdir((folder / "box").c_str(), 0300), 0);
  const pid_t child = fork();
  if (child == 0) {
    // Root would be allowed to read it.
    __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    const __user_cap_data_struct none[2] = {};
    syscall(SYS_capset, &header, none);
    const std::string image = folder / "box/image";
    for (const char* job : {"old", "new", "newest"}) {
      // As a crash can leave it where names cannot be exchanged.
      if (strcmp(job, "newest") == 0) rename(image.c_str(), (image + ".old").c_str());
      const absl::Status status = WriteJob(image, job);
      if (status.ok()) continue;
      fprintf(stderr, "%s\n", Message(status).c_str());
      _exit(1);
    }
    _exit(JobOf(image) == "newest" ? 0 : 2);
  }
  int result = 0;
  waitpid(child, &result, 0);
  EXPECT_EQ(result, 0);
  chmod((folder / "box").c_str(), 0700);
}

int g_steps_left = 0;

void CrashAtStep(const char*) {
  if (g_steps_left-- == 0) _exit(42);
}

// Ends a writer in the middle of `step` steps, as kill -9 would. False once it ran to its end.
bool CrashWhileWriting(const std::string& dir, int step) {
  const pid_t child = fork();
  if (child == 0) {
    g_steps_left = step;
    g_step_for_testing = &CrashAtStep;
    _exit(WriteJob(dir, "new").ok() ? 0 : 1);
  }
  int result = 0;
  waitpid(child, &result, 0);
  EXPECT_TRUE(WIFEXITED(result));
  EXPECT_NE(WEXITSTATUS(result), 1);
  return WEXITSTATUS(result) == 42;
}

TEST(Commit, ACrashAtAnyStepLeavesNoneOrAWholeImage) {
  TestFolder folder;
  int step = 0;
  int news = 0;
  for (;; ++step) {
    const std::string dir = folder / ("image" + std::to_string(step));
    if (!CrashWhileWriting(dir, step)) break;
    const bool there = std::filesystem::exists(dir);
    if (there) {
      EXPECT_EQ(JobOf(dir), "new") << step;
      ++news;
    } else {
      EXPECT_TRUE(absl::IsNotFound(ImageReader::Open(dir).status()));
    }
    ASSERT_TRUE(WriteJob(dir, "after").ok()) << "what the crash left is in the way";
    EXPECT_EQ(JobOf(dir), "after");
  }
  EXPECT_GE(step, 6);
  EXPECT_EQ(news, 1);
}

void CrashWhileReplacing() {
  TestFolder folder;
  const std::string dir = folder / "image";
  int step = 0;
  int news = 0;
  for (;; ++step) {
    ASSERT_TRUE(WriteJob(dir, "old").ok());
    if (!CrashWhileWriting(dir, step)) break;
    const std::string job = JobOf(dir);
    EXPECT_TRUE(job == "old" || job == "new") << job << " at step " << step;
    news += job == "new";
  }
  EXPECT_GE(step, 6);
  EXPECT_GE(news, 1);
  EXPECT_EQ(JobOf(dir), "new");
}

TEST(Commit, ACrashAtAnyStepLeavesTheOldOrTheNewImage) { CrashWhileReplacing(); }

TEST(Commit, AlsoWhereNamesCannotBeExchanged) {
  g_no_exchange_for_testing = true;
  CrashWhileReplacing();
  TestFolder folder;
  // What a crash left as DIR.old behind a complete new image is in nobody's way.
  ASSERT_TRUE(WriteJob(folder / "image.old", "older").ok());
  ASSERT_TRUE(WriteJob(folder / "image", "old").ok());
  ASSERT_TRUE(WriteJob(folder / "image", "new").ok());
  EXPECT_EQ(JobOf(folder / "image"), "new");
  EXPECT_FALSE(std::filesystem::exists(folder / "image.old"));
  g_no_exchange_for_testing = false;
}

TEST(Commit, AnImageThatWasMovedAsideComesBack) {
  // Where names cannot be exchanged, a crash may leave the old image under DIR.old.
  TestFolder folder;
  ASSERT_TRUE(WriteJob(folder / "image", "old").ok());
  std::filesystem::rename(folder / "image", folder / "image.old");
  EXPECT_EQ(JobOf(folder / "image"), "old");
  std::filesystem::rename(folder / "image", folder / "image.old");
  EXPECT_TRUE(ImageWriter::Create(folder / "image").ok());
  EXPECT_EQ(JobOf(folder / "image"), "old");
}

}  // namespace
}  // namespace cuda_remote::ckptfmt
