// SPDX-License-Identifier: Apache-2.0
#include "proto/agent/message.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <vector>

namespace cuda_remote::agent {
namespace {

// The form that older builds, whose libraries are in images, read and write; spelled out here once more.
class Bytes {
 public:
  Bytes& Number(uint64_t value) {
    char bytes[8];
    std::memcpy(bytes, &value, 8);
    out_.append(bytes, 8);
    return *this;
  }
  Bytes& Text(const std::string& value) {
    Number(value.size());
    out_ += value;
    return *this;
  }
  const std::string& str() const { return out_; }

 private:
  std::string out_;
};

// Every shorter form is refused, but for those in `whole`, and so is a longer one.
template <typename T>
void RefusesOtherLengths(const std::string& good, bool (*decode)(std::string_view, T*),
                         std::initializer_list<size_t> whole = {}) {
  T message;
  EXPECT_TRUE(decode(good, &message));
  for (size_t length = 0; length < good.size(); ++length) {
    const bool is_whole = std::find(whole.begin(), whole.end(), length) != whole.end();
    EXPECT_EQ(decode(good.substr(0, length), &message), is_whole) << length << " of " << good.size() << " bytes";
  }
  EXPECT_FALSE(decode(good + std::string(8, 0), &message));
  EXPECT_FALSE(decode(good + "x", &message));
}

TEST(AgentMessages, Info) {
  Info info, got;
  info.pid = 4711;
  info.server = "unix:/run/s";
  info.job = "training";
  info.session = uint64_t(1) << 40;
  info.shared_memory = true;
  info.log_records = 12;
  info.log_bytes = 3456;
  info.released = true;
  info.driver_settings = "CUDA_MODULE_LOADING=EAGER";
  const std::string expected = Bytes()
                                   .Number(4711)
                                   .Text("unix:/run/s")
                                   .Text("training")
                                   .Number(uint64_t(1) << 40)
                                   .Number(1)
                                   .Number(12)
                                   .Number(3456)
                                   .Number(1)
                                   .Text("CUDA_MODULE_LOADING=EAGER")
                                   .str();
  std::string bytes;
  EncodeInfo(info, &bytes);
  EXPECT_EQ(bytes, expected);
  ASSERT_TRUE(DecodeInfo(bytes, &got));
  EXPECT_EQ(got.job, "training");
  EXPECT_TRUE(got.released);
  EXPECT_EQ(got.driver_settings, info.driver_settings);
  RefusesOtherLengths(bytes, &DecodeInfo);
  // A PID has 32 bits.
  bytes[4] = 1;
  EXPECT_FALSE(DecodeInfo(bytes, &got));
}

TEST(AgentMessages, Activity) {
  Activity activity, got;
  activity.quiet = true;
  activity.inside = 2;
  activity.held_bytes = 1 << 20;
  activity.contexts = {{11, 1, true, false}, {0, 3, false, true}};
  const std::string expected = Bytes()
                                   .Number(1)
                                   .Number(0)
                                   .Number(0)
                                   .Number(2)
                                   .Number(0)
                                   .Number(0)
                                   .Number(0)
                                   .Number(0)
                                   .Number(1 << 20)
                                   .Number(2)
                                   .Number(11)
                                   .Number(1)
                                   .Number(1)
                                   .Number(0)
                                   .Number(0)
                                   .Number(3)
                                   .Number(0)
                                   .Number(1)
                                   .str();
  std::string bytes;
  EncodeActivity(activity, &bytes);
  EXPECT_EQ(bytes, expected);
  RefusesOtherLengths(bytes, &DecodeActivity);
  // More contexts than fit: those that do are written, and more are refused.
  activity.contexts.assign(300, {1, 1, true, true});
  bytes.clear();
  EncodeActivity(activity, &bytes);
  ASSERT_TRUE(DecodeActivity(bytes, &got));
  EXPECT_EQ(got.contexts.size(), 256u);
  const uint64_t many = 257;
  std::memcpy(&bytes[9 * 8], &many, 8);
  EXPECT_FALSE(DecodeActivity(bytes + std::string(32, 0), &got));
}

TEST(AgentMessages, Channels) {
  Given given, got;
  given.next_sequence = 9;
  given.new_worker = true;
  given.server = "tcp:gpu7:1";
  given.welcome.session = 5;
  given.welcome.shared_memory = true;
  given.welcome.server = "gpu7";
  given.fds = {7, 8};
  Message message;
  EncodeGiven(given, &message);
  EXPECT_EQ(message.body,
            Bytes().Number(9).Number(1).Text("tcp:gpu7:1").Number(kWireVersion).Number(5).Number(1).Text("gpu7").str());
  EXPECT_EQ(message.fds, (std::vector<int>{7, 8}));
  ASSERT_TRUE(DecodeGiven(message, &got));
  EXPECT_EQ(got.welcome.server, "gpu7");
  EXPECT_EQ(got.fds.ring, 8);
  RefusesOtherLengths(message.body, &DecodeGivenBody);
  message.fds.pop_back();
  EXPECT_FALSE(DecodeGiven(message, &got)) << "a descriptor is missing";

  Taken taken, back;
  taken.next_sequence = 3;
  taken.log_fd = 4;
  taken.fds = {5, 6};
  taken.welcome = given.welcome;
  Message other;
  EncodeTaken(taken, &other);
  EXPECT_EQ(other.body, Bytes().Number(3).Number(kWireVersion).Number(5).Number(1).Text("gpu7").str());
  EXPECT_EQ(other.fds, (std::vector<int>{4, 5, 6}));
  ASSERT_TRUE(DecodeTaken(other, &back));
  EXPECT_EQ(back.welcome.session, 5u);
  RefusesOtherLengths(other.body, &DecodeTakenBody);
}

// Not a peer that talks nonsense: this process is at its limit.
TEST(AgentMessages, NoDescriptorsForWhatCame) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  Message message, got;
  message.type = Type::kOk;
  message.fds = {STDERR_FILENO, STDERR_FILENO};
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{64, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<int> all;
  for (int fd; (fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)) >= 0;) all.push_back(fd);
  close(all.back());
  all.pop_back();
  ASSERT_TRUE(SendMessage(ends[0], message));
  EXPECT_EQ(ReceiveMessage(ends[1], 1000, &got), ReceiveStatus::kNoDescriptors);
  EXPECT_TRUE(got.fds.empty());
  const int free_again = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
  EXPECT_GE(free_again, 0) << "the one that came is still open";
  all.push_back(free_again);
  for (const int fd : all) close(fd);
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_TRUE(SendMessage(ends[0], message));
  EXPECT_EQ(ReceiveMessage(ends[1], 1000, &got), ReceiveStatus::kOk);
  EXPECT_EQ(got.fds.size(), 2u);
  for (const int fd : got.fds) close(fd);
  for (const int fd : ends) close(fd);
}

TEST(AgentMessages, Requests) {
  std::string bytes;
  EncodeAdmission({false, 77}, &bytes);
  EXPECT_EQ(bytes, Bytes().Number(0).Number(77).str());
  RefusesOtherLengths(bytes, &DecodeAdmission);
  bytes.clear();
  EncodeAskRequest({0x10003, 4, 1000, "hello"}, &bytes);
  EXPECT_EQ(bytes, Bytes().Number(0x10003).Number(4).Number(1000).Text("hello").str());
  RefusesOtherLengths(bytes, &DecodeAskRequest);
  bytes.clear();
  EncodeAnswerReply({}, &bytes);
  EXPECT_EQ(bytes, Bytes().Number(0).str());
  AnswerReply reply, got;
  reply.answered = reply.has_result = true;
  reply.result = {700, 2, 3, "abcde"};
  bytes.clear();
  EncodeAnswerReply(reply, &bytes);
  EXPECT_EQ(bytes, Bytes().Number(1).Number(700).Number(2).Number(3).Text("abcde").str());
  RefusesOtherLengths(bytes, &DecodeAnswerReply, {8});
  // A text that claims to be longer than the message.
  const uint64_t huge = ~uint64_t(0);
  std::memcpy(&bytes[32], &huge, 8);
  EXPECT_FALSE(DecodeAnswerReply(bytes, &got));
}

}  // namespace
}  // namespace cuda_remote::agent
