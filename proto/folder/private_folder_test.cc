// SPDX-License-Identifier: Apache-2.0
// Folders that others may have prepared. Needs root: other users are played by children with their numbers.

#include "proto/folder/private_folder.h"

#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>

namespace cuda_remote {
namespace {

constexpr uid_t kVictim = 51234, kAttacker = 65534;

// Runs `body` as `user`, in a process of its own. Returns what it returned.
int As(uid_t user, const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    if (setgroups(0, nullptr) != 0 || setresgid(user, user, user) != 0 || setresuid(user, user, user) != 0) _exit(99);
    umask(0);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

mode_t ModeOf(const std::string& path) {
  struct stat facts;
  return lstat(path.c_str(), &facts) == 0 ? facts.st_mode & 07777 : 0;
}

class PrivateFolderTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(geteuid(), 0u) << "this test plays several users, which needs root";
    char name[] = "/tmp/folder-test-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    top_ = name;
    ASSERT_EQ(chmod(name, 0755), 0);
    // A folder as /tmp is.
    shared_ = top_ + "/tmp";
    ASSERT_EQ(mkdir(shared_.c_str(), 0700), 0);
    ASSERT_EQ(chmod(shared_.c_str(), 01777), 0);
  }
  void TearDown() override { ASSERT_EQ(system(("rm -rf " + top_).c_str()), 0); }

  // What the victim is told when it opens `path`; empty if it may use it.
  std::string Told(const std::string& path, FolderUse use = FolderUse::kMake, uid_t user = kVictim) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const int code = As(user, [&] {
      const Status checked = CheckFolder(path, use);
      const std::string& why = checked.message();
      if (write(ends[1], why.data(), why.size()) != ssize_t(why.size())) return 98;
      return checked.ok() ? 0 : 1;
    });
    close(ends[1]);
    std::string text(4096, '\0');
    text.resize(size_t(std::max<ssize_t>(0, read(ends[0], text.data(), text.size()))));
    close(ends[0]);
    EXPECT_EQ(code, text.empty() ? 0 : 1) << text;
    return text;
  }

  std::string top_, shared_;
};

TEST_F(PrivateFolderTest, MadeForItsUserOnly) {
  const std::string path = shared_ + "/cuda-remote/jobs/train";
  EXPECT_EQ(Told(path), "");
  for (const char* part : {"/cuda-remote", "/cuda-remote/jobs", "/cuda-remote/jobs/train"}) {
    EXPECT_EQ(ModeOf(shared_ + part), 0700u) << part;
  }
  EXPECT_EQ(Told(path, FolderUse::kLook), "");
  EXPECT_NE(Told(path, FolderUse::kMake, kAttacker), "");
  // Root's tools do nothing for others.
  EXPECT_NE(Told(path, FolderUse::kLook, 0).find("belongs to user 51234"), std::string::npos);
}

TEST_F(PrivateFolderTest, AFolderOfAnotherUserIsNotOneToRemove) {
  const std::string path = shared_ + "/train";
  EXPECT_EQ(Told(path), "");
  const std::string looked = Told(path, FolderUse::kLook, 0), made = Told(path, FolderUse::kMake, kAttacker);
  EXPECT_NE(looked.find(path + " belongs to user 51234"), std::string::npos) << looked;
  EXPECT_NE(looked.find("run this program as that user"), std::string::npos) << looked;
  EXPECT_NE(made.find("choose another folder"), std::string::npos) << made;
}

TEST_F(PrivateFolderTest, LookingMakesNothing) {
  const std::string path = shared_ + "/none";
  EXPECT_NE(Told(path, FolderUse::kLook).find("No such file"), std::string::npos);
  EXPECT_EQ(ModeOf(path), 0u);
}

TEST_F(PrivateFolderTest, FoldersOfOthersOnTheWay) {
  const std::string base = shared_ + "/cuda-remote-51234";
  ASSERT_EQ(As(kAttacker, [&] { return mkdir(base.c_str(), 0777) + mkdir((base + "/jobs").c_str(), 0777); }), 0);
  const std::string told = Told(base + "/jobs/train");
  EXPECT_NE(told.find(base + " belongs to user 65534"), std::string::npos) << told;
  EXPECT_EQ(ModeOf(base + "/jobs/train"), 0u);
  // Also if what the other user left below is the victim's own.
  ASSERT_EQ(mkdir((base + "/jobs/train").c_str(), 0700), 0);
  ASSERT_EQ(chown((base + "/jobs/train").c_str(), kVictim, kVictim), 0);
  EXPECT_NE(Told(base + "/jobs/train"), "");
  EXPECT_NE(Told(base + "/jobs/train", FolderUse::kLook), "");
}

TEST_F(PrivateFolderTest, OwnFoldersThatOthersMayWrite) {
  const std::string base = shared_ + "/base", path = base + "/jobs/train";
  EXPECT_EQ(Told(path), "");
  for (const mode_t mode : {0777, 0770, 0707}) {
    for (const std::string& folder : {base, base + "/jobs"}) {
      ASSERT_EQ(chmod(folder.c_str(), mode), 0);
      const std::string told = Told(path);
      EXPECT_NE(told.find(folder + " may be written by other users"), std::string::npos) << told;
      ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
    }
  }
  // Sticky is enough: nobody else can rename what is in it.
  ASSERT_EQ(chmod((base + "/jobs").c_str(), 01777), 0);
  EXPECT_EQ(Told(path), "");
}

TEST_F(PrivateFolderTest, TheLastFolderIsClosed) {
  const std::string path = shared_ + "/job";
  ASSERT_EQ(As(kVictim, [&] { return mkdir(path.c_str(), 0755); }), 0);
  std::ofstream(path + "/own") << "x";
  EXPECT_EQ(Told(path, FolderUse::kServe), "");
  EXPECT_EQ(ModeOf(path), 0755u);
  EXPECT_EQ(Told(path), "");
  EXPECT_EQ(ModeOf(path), 0700u);
}

TEST_F(PrivateFolderTest, TheLastFolderMayHoldWhatOthersPutThere) {
  const std::string path = shared_ + "/job";
  ASSERT_EQ(As(kVictim, [&] { return mkdir(path.c_str(), 0777); }), 0);
  EXPECT_NE(Told(path, FolderUse::kServe), "");
  ASSERT_EQ(As(kAttacker, [&] { return mkdir((path + "/lib").c_str(), 0777); }), 0);
  EXPECT_NE(Told(path), "");
  EXPECT_NE(Told(path), "") << "the second attempt must not find it good";
  ASSERT_EQ(rmdir((path + "/lib").c_str()), 0);
  EXPECT_EQ(Told(path), "");
  EXPECT_EQ(ModeOf(path), 0700u);
}

TEST_F(PrivateFolderTest, Links) {
  const std::string real = shared_ + "/real", mine = shared_ + "/mine", others = shared_ + "/others";
  ASSERT_EQ(As(kVictim, [&] { return mkdir(real.c_str(), 0700) + symlink("real", mine.c_str()); }), 0);
  ASSERT_EQ(As(kAttacker, [&] { return symlink("real", others.c_str()); }), 0);
  EXPECT_EQ(Told(mine + "/job"), "");
  EXPECT_EQ(ModeOf(real + "/job"), 0700u);
  EXPECT_NE(Told(others + "/job").find("symbolic link " + others + " belongs to user 65534"), std::string::npos);
  // Also where an own link leads through somebody else's.
  ASSERT_EQ(As(kVictim, [&] { return symlink((others + "/.").c_str(), (shared_ + "/through").c_str()); }), 0);
  EXPECT_NE(Told(shared_ + "/through/job"), "");
  // The folder itself is none.
  EXPECT_NE(Told(mine).find("is a symbolic link"), std::string::npos);
  ASSERT_EQ(As(kVictim, [&] { return symlink("loop", (shared_ + "/loop").c_str()); }), 0);
  EXPECT_NE(Told(shared_ + "/loop/job").find("too many"), std::string::npos);
  ASSERT_EQ(As(kVictim, [&] { return symlink("../tmp/real", (shared_ + "/up").c_str()); }), 0);
  EXPECT_EQ(Told(shared_ + "/up/job"), "");
}

TEST_F(PrivateFolderTest, FromTheCurrentFolder) {
  ASSERT_EQ(chdir(shared_.c_str()), 0);
  EXPECT_EQ(Told("a/b"), "");
  EXPECT_EQ(ModeOf(shared_ + "/a/b"), 0700u);
  ASSERT_EQ(chdir("/"), 0);
}

TEST_F(PrivateFolderTest, WhatIsNoFolder) {
  ASSERT_EQ(As(kVictim,
               [&] {
                 std::ofstream(shared_ + "/file") << "x";
                 return 0;
               }),
            0);
  EXPECT_NE(Told(shared_ + "/file").find("is not a folder"), std::string::npos);
  EXPECT_NE(Told(shared_ + "/file/below").find("is not a folder"), std::string::npos);
  EXPECT_NE(Told(""), "");
  EXPECT_NE(Told("/"), "");
}

// The other user prepares and swaps folders and links all the time; whatever the victim accepts is the victim's own.
TEST_F(PrivateFolderTest, Races) {
  const std::string base = shared_ + "/base", trap = shared_ + "/trap";
  ASSERT_EQ(As(kAttacker, [&] { return mkdir(trap.c_str(), 0777); }), 0);
  const pid_t attacker = fork();
  if (attacker == 0) {
    _exit(As(kAttacker, [&] {
      while (true) {
        if (mkdir(base.c_str(), 0777) == 0) rename(base.c_str(), (shared_ + "/away").c_str());
        rmdir((shared_ + "/away").c_str());
        if (symlink("trap", base.c_str()) == 0) unlink(base.c_str());
        if (getppid() == 1) return 0;
      }
    }));
  }
  int accepted = 0;
  for (int i = 0; i < 300; ++i) {
    const int code = As(kVictim, [&] {
      const StatusOr<UniqueFd> folder = OpenFolder(base + "/jobs", FolderUse::kMake);
      if (!folder.ok()) return 1;
      struct stat opened, named, above;
      if (fstat(folder->get(), &opened) != 0 || opened.st_uid != kVictim || (opened.st_mode & 077)) return 2;
      // It stays where it is.
      if (stat((base + "/jobs").c_str(), &named) != 0 || named.st_ino != opened.st_ino) return 3;
      if (lstat(base.c_str(), &above) != 0 || !S_ISDIR(above.st_mode) || above.st_uid != kVictim) return 4;
      rmdir((base + "/jobs").c_str());
      rmdir(base.c_str());
      return 0;
    });
    ASSERT_TRUE(code == 0 || code == 1) << code;
    accepted += code == 0;
  }
  // The child of the child has the attacker's number.
  ASSERT_EQ(system(("kill -9 $(cat /proc/" + std::to_string(attacker) + "/task/" + std::to_string(attacker) +
                    "/children) " + std::to_string(attacker))
                       .c_str()),
            0);
  waitpid(attacker, nullptr, 0);
  RecordProperty("accepted", accepted);
}

TEST_F(PrivateFolderTest, TrustedFiles) {
  const auto told = [&](const std::string& path) {
    return As(kVictim, [&] {
      const StatusOr<UniqueFd> file = OpenTrustedFile(path);
      if (!file.ok() && file.status().message().empty()) return 9;
      return file.ok() ? 0 : 1;
    });
  };
  const std::string own = shared_ + "/own", others = shared_ + "/others", roots = shared_ + "/roots";
  ASSERT_EQ(As(kVictim, [&] { return close(open(own.c_str(), O_CREAT | O_WRONLY, 0644)); }), 0);
  ASSERT_EQ(As(kAttacker, [&] { return close(open(others.c_str(), O_CREAT | O_WRONLY, 0644)); }), 0);
  ASSERT_EQ(close(open(roots.c_str(), O_CREAT | O_WRONLY, 0644)), 0);
  EXPECT_EQ(told(own), 0);
  EXPECT_EQ(told(roots), 0);
  EXPECT_EQ(told(others), 1);
  EXPECT_EQ(told(shared_ + "/none"), 1);
  EXPECT_EQ(told(shared_), 1);
  ASSERT_EQ(chmod(own.c_str(), 0666), 0);
  EXPECT_EQ(told(own), 1);
  ASSERT_EQ(As(kAttacker, [&] { return symlink(roots.c_str(), (shared_ + "/link").c_str()); }), 0);
  EXPECT_EQ(told(shared_ + "/link"), 1);
  ASSERT_EQ(As(kAttacker, [&] { return mkfifo((shared_ + "/pipe").c_str(), 0666); }), 0);
  EXPECT_EQ(told(shared_ + "/pipe"), 1);
}

// A path without a slash is in the working folder.
TEST_F(PrivateFolderTest, TrustedFilesOfTheWorkingFolder) {
  const std::string own = shared_ + "/own";
  ASSERT_EQ(mkdir(own.c_str(), 0700), 0);
  std::ofstream(own + "/tokens") << "x";
  char before[4096];
  ASSERT_TRUE(getcwd(before, sizeof(before)));
  ASSERT_EQ(chdir(own.c_str()), 0);
  EXPECT_EQ(OpenTrustedFile("tokens").status().message(), "");
  EXPECT_EQ(OpenTrustedFile("./tokens").status().message(), "");
  EXPECT_FALSE(OpenTrustedFile("none").ok());
  ASSERT_EQ(chmod(own.c_str(), 0777), 0);
  EXPECT_FALSE(OpenTrustedFile("tokens").ok());
  ASSERT_EQ(chdir(before), 0);
}

TEST_F(PrivateFolderTest, RuntimeFoldersOfThisUserOnly) {
  const std::string of_others = top_ + "/others";
  ASSERT_EQ(mkdir(of_others.c_str(), 0700), 0);
  ASSERT_EQ(chown(of_others.c_str(), kAttacker, kAttacker), 0);
  const auto first = [&](uid_t user, const std::string& variable) {
    std::string text(200, '\0');
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    As(user, [&] {
      setenv("XDG_RUNTIME_DIR", variable.c_str(), 1);
      const std::string folder = RuntimeFolders().front();
      return write(ends[1], folder.data(), folder.size()) == ssize_t(folder.size()) ? 0 : 1;
    });
    close(ends[1]);
    text.resize(size_t(std::max<ssize_t>(0, read(ends[0], text.data(), text.size()))));
    close(ends[0]);
    return text;
  };
  EXPECT_EQ(first(0, top_ + "/"), top_ + "/cuda-remote");
  EXPECT_EQ(first(kAttacker, of_others), of_others + "/cuda-remote");
  // su keeps the variable of the user before.
  EXPECT_EQ(first(kVictim, of_others), "/tmp/cuda-remote-51234");
  EXPECT_EQ(first(kVictim, ""), "/tmp/cuda-remote-51234");
  EXPECT_EQ(first(0, "/run/user/0"), "/run/cuda-remote");
  EXPECT_EQ(first(0, of_others), "/run/cuda-remote");
}

}  // namespace
}  // namespace cuda_remote
