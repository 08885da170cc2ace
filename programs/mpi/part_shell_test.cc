// SPDX-License-Identifier: Apache-2.0
#include "programs/mpi/part_shell.h"

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
    const absl::Status made = MakePartsKey(Path("key"));
    ASSERT_TRUE(made.ok()) << made;
    const absl::StatusOr<std::string> key = ReadPartsKey(Path("key"));
    ASSERT_TRUE(key.ok()) << key.status();
    key_ = *key;
    const absl::StatusOr<UniqueFd> listening = ListenForParts("127.0.0.1", &port_);
    ASSERT_TRUE(listening.ok()) << listening.status();
    server_ = fork();
    if (server_ == 0) ServeParts(listening->get(), key_);
  }
  void TearDown() override {
    kill(server_, SIGKILL);
    waitpid(server_, nullptr, 0);
    for (const char* name : {"key", "out", "began", "ended"}) unlink(Path(name).c_str());
    rmdir(folder_);
  }
  std::string Path(const std::string& name) const { return std::string(folder_) + "/" + name; }
  absl::StatusOr<int> Run(const std::string& key, const std::string& command, std::string* said) {
    FILE* const out = fopen(Path("out").c_str(), "w+");
    absl::StatusOr<int> code = RunInPart("127.0.0.1", port_, key, command, kSeconds, fileno(out));
    rewind(out);
    said->clear();
    for (int c; (c = fgetc(out)) != EOF;) *said += char(c);
    fclose(out);
    return code;
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
  std::string said;
  EXPECT_EQ(Run(key_, "echo 'it works'; echo too >&2", &said).value(), 0);
  EXPECT_EQ(said, "it works\ntoo\n");
  EXPECT_EQ(Run(key_, "exit 7", &said).value(), 7);
  EXPECT_EQ(Run(key_, "kill -9 $$", &said).value(), 128 + SIGKILL);
  EXPECT_TRUE(Run(key_, "yes | head -c 300000; cat", &said).ok());
  EXPECT_EQ(said.size(), 300000u);
}

TEST_F(PartShell, RefusesWhoDoesNotKnowTheKey) {
  std::string said, other = key_;
  other[0] = char(other[0] ^ 1);
  EXPECT_EQ(Run(other, "echo no; touch " + Path("began"), &said).status().message(),
            "the part at 127.0.0.1 has ended the connection");
  EXPECT_EQ(said, "");
  EXPECT_NE(access(Path("began").c_str(), F_OK), 0);
}

TEST_F(PartShell, EndsACommandWhoseAskerHasEnded) {
  const pid_t asker = fork();
  if (asker == 0) {
    const std::string command =
        "trap 'touch " + Path("ended") + "; exit' TERM; touch " + Path("began") + "; while :; do sleep 0.05; done";
    _exit(RunInPart("127.0.0.1", port_, key_, command, kSeconds, STDOUT_FILENO).ok() ? 0 : 1);
  }
  WaitFor(Path("began"));
  kill(asker, SIGKILL);
  waitpid(asker, nullptr, 0);
  WaitFor(Path("ended"));
}

TEST_F(PartShell, TakesNoKeyThatOthersCanRead) {
  ASSERT_EQ(chmod(Path("key").c_str(), 0640), 0);
  const std::string error(ReadPartsKey(Path("key")).status().message());
  EXPECT_NE(error.find(Path("key")), std::string::npos) << error;
  std::ofstream(Path("key")) << "short";
  ASSERT_EQ(chmod(Path("key").c_str(), 0600), 0);
  EXPECT_FALSE(ReadPartsKey(Path("key")).ok());
}

}  // namespace
}  // namespace cuda_remote::client::mpi
