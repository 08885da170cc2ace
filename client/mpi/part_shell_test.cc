// SPDX-License-Identifier: Apache-2.0
#include "client/mpi/part_shell.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

namespace cuda_remote::client::mpi {
namespace {

constexpr int kSeconds = 30;

class PartShell : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(mkdtemp(folder_), nullptr);
    std::string error;
    ASSERT_TRUE(MakePartsKey(Path("key"), &error)) << error;
    ASSERT_TRUE(ReadPartsKey(Path("key"), &key_, &error)) << error;
    const int listening = ListenForParts("127.0.0.1", &port_, &error);
    ASSERT_GE(listening, 0) << error;
    server_ = fork();
    if (server_ == 0) ServeParts(listening, key_);
    close(listening);
  }
  void TearDown() override {
    kill(server_, SIGKILL);
    waitpid(server_, nullptr, 0);
    for (const char* name : {"key", "out", "began", "ended"}) unlink(Path(name).c_str());
    rmdir(folder_);
  }
  std::string Path(const std::string& name) const { return std::string(folder_) + "/" + name; }
  bool Run(const std::string& key, const std::string& command, int* code, std::string* said) {
    std::string error;
    FILE* const out = fopen(Path("out").c_str(), "w+");
    const bool ran = RunInPart("127.0.0.1", port_, key, command, kSeconds, fileno(out), code, &error);
    EXPECT_EQ(ran, error.empty()) << error;
    rewind(out);
    said->clear();
    for (int c; (c = fgetc(out)) != EOF;) *said += char(c);
    fclose(out);
    return ran;
  }
  void WaitFor(const std::string& path) {
    for (int i = 0; i < kSeconds * 100 && access(path.c_str(), F_OK) != 0; ++i) usleep(10000);
    EXPECT_EQ(access(path.c_str(), F_OK), 0) << path;
  }

  char folder_[32] = "/tmp/cr-shell-XXXXXX";
  std::string key_;
  int port_ = 0;
  pid_t server_ = 0;
};

TEST_F(PartShell, RunsCommands) {
  int code = -1;
  std::string said;
  ASSERT_TRUE(Run(key_, "echo 'it works'; echo too >&2", &code, &said));
  EXPECT_EQ(said, "it works\ntoo\n");
  EXPECT_EQ(code, 0);
  ASSERT_TRUE(Run(key_, "exit 7", &code, &said));
  EXPECT_EQ(code, 7);
  ASSERT_TRUE(Run(key_, "kill -9 $$", &code, &said));
  EXPECT_EQ(code, 128 + SIGKILL);
  ASSERT_TRUE(Run(key_, "yes | head -c 300000; cat", &code, &said));
  EXPECT_EQ(said.size(), 300000u);
}

TEST_F(PartShell, RefusesWhoDoesNotKnowTheKey) {
  int code = -1;
  std::string said, other = key_;
  other[0] = char(other[0] ^ 1);
  EXPECT_FALSE(Run(other, "echo no; touch " + Path("began"), &code, &said));
  EXPECT_EQ(said, "");
  EXPECT_NE(access(Path("began").c_str(), F_OK), 0);
}

TEST_F(PartShell, EndsACommandWhoseAskerHasEnded) {
  const pid_t asker = fork();
  if (asker == 0) {
    int code;
    std::string error;
    const std::string command =
        "trap 'touch " + Path("ended") + "; exit' TERM; touch " + Path("began") + "; while :; do sleep 0.05; done";
    RunInPart("127.0.0.1", port_, key_, command, kSeconds, STDOUT_FILENO, &code, &error);
    _exit(0);
  }
  WaitFor(Path("began"));
  kill(asker, SIGKILL);
  waitpid(asker, nullptr, 0);
  WaitFor(Path("ended"));
}

TEST_F(PartShell, TakesNoKeyThatOthersCanRead) {
  std::string key, error;
  ASSERT_EQ(chmod(Path("key").c_str(), 0640), 0);
  EXPECT_FALSE(ReadPartsKey(Path("key"), &key, &error));
  EXPECT_NE(error.find(Path("key")), std::string::npos) << error;
  std::ofstream(Path("key")) << "short";
  ASSERT_EQ(chmod(Path("key").c_str(), 0600), 0);
  EXPECT_FALSE(ReadPartsKey(Path("key"), &key, &error));
}

}  // namespace
}  // namespace cuda_remote::client::mpi
