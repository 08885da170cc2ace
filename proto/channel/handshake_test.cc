// SPDX-License-Identifier: Apache-2.0
#include "proto/channel/handshake.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "proto/base/unique_fd.h"
#include "proto/folder/this_job.h"

namespace cuda_remote {
namespace {

struct Sockets {
  int fd[2];
  Sockets() {
    EXPECT_TRUE(SocketPair(fd));
    for (int i = 0; i < 2; ++i) owners[i].Reset(fd[i]);
  }

 private:
  UniqueFd owners[2];
};

// A server that refuses at once closes the socket before it has read the Hello.
TEST(Packets, ARefusalArrivesThoughTheHelloWasNotRead) {
  int sockets[2];
  ASSERT_TRUE(SocketPair(sockets));
  std::string hello, welcome;
  EncodeHello(Hello(), &hello);
  ASSERT_EQ(SendPacket(sockets[0], PacketType::kHello, hello, -1), ChannelStatus::kOk);
  Welcome refusal;
  refusal.error = "not you";
  EncodeWelcome(refusal, &welcome);
  ASSERT_EQ(SendPacket(sockets[1], PacketType::kWelcome, welcome, -1), ChannelStatus::kOk);
  close(sockets[1]);
  Packet packet;
  ASSERT_EQ(ReceivePacket(sockets[0], &packet, 1000), ChannelStatus::kOk);
  Welcome got;
  EXPECT_TRUE(DecodeWelcome(packet.body, &got));
  EXPECT_EQ(got.error, "not you");
  EXPECT_EQ(ReceivePacket(sockets[0], &packet, 1000), ChannelStatus::kClosed);
  close(sockets[0]);
}

TEST(Handshake, HelloAndWelcomeComeBack) {
  Hello hello;
  hello.pid = 77;
  hello.program = "/usr/bin/python3";
  hello.job = "training";
  hello.gpu = -1;
  hello.resume_token = std::string("\0\1\2", 3);
  hello.replaying = true;
  hello.driver_settings = "CUDA_MODULE_LOADING=EAGER";
  std::string bytes;
  EncodeHello(hello, &bytes);
  Hello got;
  ASSERT_TRUE(DecodeHello(bytes, &got));
  EXPECT_EQ(got.wire_version, kWireVersion);
  EXPECT_EQ(got.pid, 77u);
  EXPECT_EQ(got.driver_settings, hello.driver_settings);
  EXPECT_EQ(got.program, hello.program);
  EXPECT_EQ(got.job, "training");
  EXPECT_EQ(got.gpu, -1);
  EXPECT_EQ(got.resume_token, hello.resume_token);
  EXPECT_TRUE(got.replaying);

  Welcome welcome;
  welcome.session = uint64_t{1} << 40;
  welcome.shared_memory = true;
  welcome.server = "gpu7";
  bytes.clear();
  EncodeWelcome(welcome, &bytes);
  Welcome back;
  ASSERT_TRUE(DecodeWelcome(bytes, &back));
  EXPECT_EQ(back.session, welcome.session);
  EXPECT_TRUE(back.shared_memory);
  EXPECT_EQ(back.server, "gpu7");
  EXPECT_EQ(back.error, "");
}

TEST(Handshake, FieldsOfANewerPeerAreSkipped) {
  std::string bytes;
  EncodeHello(Hello(), &bytes);
  bytes += std::string(
      "\xf8\x01\x05\xfa\x01\x03"
      "abc",
      9);  // fields 31 (varint) and 31 (bytes)
  Hello got;
  EXPECT_TRUE(DecodeHello(bytes, &got));
}

// They are shown to others, in protobuf strings among other places.
TEST(Handshake, NamesArriveAsText) {
  Hello hello;
  hello.program = "/home/jos\xe9/a.out";
  hello.job = "clear\x1b[2J";
  std::string bytes;
  EncodeHello(hello, &bytes);
  Hello got;
  ASSERT_TRUE(DecodeHello(bytes, &got));
  EXPECT_EQ(got.program, "/home/jos?/a.out");
  EXPECT_EQ(got.job, "clear?[2J");
}

TEST(Handshake, GarbageIsRefusedNotBelieved) {
  std::mt19937 random(4);
  std::string good;
  Hello hello;
  hello.program = "program";
  EncodeHello(hello, &good);
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = good;
    for (int k = 0; k < 3; ++k) bytes[random() % bytes.size()] = char(random());
    bytes.resize(random() % (bytes.size() + 1));
    Hello got;
    Welcome welcome;
    uint64_t tag;
    std::string reason;
    DecodeHello(bytes, &got);
    DecodeWelcome(bytes, &welcome);
    DecodeTag(bytes, &tag);
    DecodeEnd(bytes, &reason);
    EXPECT_LE(got.program.size(), kMaxHandshakeString);
  }
}

TEST(Handshake, OtherWireVersionIsRefusedByName) {
  EXPECT_EQ(CheckWireVersion(kWireVersion), "");
  for (const uint32_t other : {kWireVersion - 1, kWireVersion + 1}) {
    const std::string why = CheckWireVersion(other);
    EXPECT_NE(why.find("wire version " + std::to_string(other)), std::string::npos) << why;
    EXPECT_NE(why.find("install the same release"), std::string::npos) << why;
    Sockets s;
    std::string body;
    Welcome welcome;
    welcome.wire_version = other;
    EncodeWelcome(welcome, &body);
    ASSERT_EQ(SendPacket(s.fd[1], PacketType::kWelcome, body, s.fd[1]), ChannelStatus::kOk);
    const std::string error = ClientHandshake(s.fd[0], Hello(), 1000, &welcome).status().message();
    EXPECT_NE(error.find("the server speaks wire version " + std::to_string(other)), std::string::npos) << error;
  }
}

TEST(Handshake, PacketsWithAndWithoutDescriptors) {
  Sockets s;
  ASSERT_EQ(SendPacket(s.fd[0], PacketType::kEnd, "body", -1), ChannelStatus::kOk);
  Packet packet;
  ASSERT_EQ(ReceivePacket(s.fd[1], &packet, 1000), ChannelStatus::kOk);
  EXPECT_EQ(packet.body, "body");
  EXPECT_FALSE(packet.fd.ok());
  ASSERT_EQ(SendPacket(s.fd[0], PacketType::kFd, "", s.fd[0]), ChannelStatus::kOk);
  ASSERT_EQ(ReceivePacket(s.fd[1], &packet, 1000), ChannelStatus::kOk);
  ASSERT_TRUE(packet.fd.ok());
  EXPECT_TRUE(fcntl(packet.fd.get(), F_GETFD) & FD_CLOEXEC);
  EXPECT_EQ(ReceivePacket(s.fd[1], &packet, 10), ChannelStatus::kTimeout);
}

int OpenDescriptors() {
  int count = 0;
  for (int fd = 0; fd < 200; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

TEST(Handshake, SmuggledDescriptorsAreClosed) {
  Sockets s;
  const int before = OpenDescriptors();
  int many[20];
  for (int& fd : many) fd = s.fd[0];
  for (int count : {2, 8, 20}) {
    char byte = 1;
    iovec piece{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(many))] = {};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * size_t(count));
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * size_t(count));
    memcpy(CMSG_DATA(rights), many, sizeof(int) * size_t(count));
    ASSERT_EQ(sendmsg(s.fd[0], &message, 0), 1);
    Packet packet;
    EXPECT_EQ(ReceivePacket(s.fd[1], &packet, 1000), ChannelStatus::kProtocolError) << count;
    EXPECT_EQ(OpenDescriptors(), before) << count;
  }
  // Where there must be none, the first one is too many, and the next packet is read as ever.
  Packet packet;
  ASSERT_EQ(SendPacket(s.fd[0], PacketType::kHello, "", s.fd[0]), ChannelStatus::kOk);
  ASSERT_EQ(SendPacket(s.fd[0], PacketType::kHello, "", -1), ChannelStatus::kOk);
  EXPECT_EQ(ReceivePacket(s.fd[1], &packet, 1000, false), ChannelStatus::kProtocolError);
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_EQ(ReceivePacket(s.fd[1], &packet, 1000, false), ChannelStatus::kOk);
}

TEST(Handshake, PacketsThatAreNone) {
  Sockets s;
  Packet packet;
  for (size_t size : {size_t{1}, size_t{7}, size_t{8}, size_t{64}, kMaxPacketBytes, kMaxPacketBytes + 1}) {
    const std::string noise(size, 'z');
    ASSERT_EQ(send(s.fd[0], noise.data(), size, 0), ssize_t(size));
    EXPECT_EQ(ReceivePacket(s.fd[1], &packet, 1000), ChannelStatus::kProtocolError) << size;
  }
  EXPECT_EQ(SendPacket(s.fd[0], PacketType::kHello, std::string(kMaxPacketBytes, 'x'), -1), ChannelStatus::kTooLarge);
}

void SendRefusal(int fd, const std::string& why, bool of_relay) {
  Welcome welcome;
  welcome.error = why;
  welcome.of_relay = of_relay;
  std::string body;
  EncodeWelcome(welcome, &body);
  SendPacket(fd, PacketType::kWelcome, body, -1);
}

TEST(Handshake, ClientExplainsEveryWayToFail) {
  struct Case {
    const char* expect;
    void (*server)(int);
  };
  const Case cases[] = {
      {"without an answer", [](int) {}},
      {"not a Welcome", [](int fd) { send(fd, "what?", 5, 0); }},
      {"full up", [](int fd) { SendRefusal(fd, "full up", false); }},
      {"wire version 9",
       [](int fd) {
         Welcome welcome;
         welcome.wire_version = 9;
         std::string body;
         EncodeWelcome(welcome, &body);
         SendPacket(fd, PacketType::kWelcome, body, fd);
       }},
      {"without shared memory",
       [](int fd) {
         std::string body;
         EncodeWelcome(Welcome(), &body);
         SendPacket(fd, PacketType::kWelcome, body, -1);
       }},
      {"the server refused: the server is going down",
       [](int fd) {
         std::string body;
         EncodeEnd("the server is going down", &body);
         SendPacket(fd, PacketType::kEnd, body, -1);
       }},
  };
  const int before = OpenDescriptors();
  for (const Case& c : cases) {
    int fd[2];
    ASSERT_TRUE(SocketPair(fd));
    c.server(fd[1]);
    close(fd[1]);
    Welcome welcome;
    const std::string error = ClientHandshake(fd[0], Hello(), 1000, &welcome).status().message();
    EXPECT_NE(error.find(c.expect), std::string::npos) << error;
    close(fd[0]);
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

// However the reason begins.
TEST(Handshake, ARefusalNamesWhoRefuses) {
  const auto refused = [](const char* why, bool of_relay) {
    Sockets s;
    SendRefusal(s.fd[1], why, of_relay);
    Welcome welcome;
    return ClientHandshake(s.fd[0], Hello(), 1000, &welcome).status().message();
  };
  EXPECT_EQ(refused("the server is full", false), "the server refused: the server is full");
  EXPECT_EQ(refused("full", false), "the server refused: full");
  EXPECT_EQ(refused("cr-relay has no room", true), "cr-relay has no room");
  EXPECT_EQ(refused("cannot reach the server gpu8:7070", true), "cannot reach the server gpu8:7070");
}

TEST(Handshake, AServerIsNamedByItsSocketOrItsFolder) {
  char folder[] = "/tmp/cr-handshake-XXXXXX";
  ASSERT_TRUE(mkdtemp(folder));
  const std::string path = folder;
  EXPECT_EQ(SocketPathOf("unix:" + path), path + "/session.sock");
  EXPECT_EQ(SocketPathOf("unix:" + path + "/relay.sock"), path + "/relay.sock");
  EXPECT_EQ(SocketPathOf("gpu8:7070"), std::nullopt);
  EXPECT_EQ(SocketPathOf(path), std::nullopt);
  rmdir(folder);
}

// The user has given a relay's server, and has never seen the socket.
TEST(Handshake, ARelaysServerIsNamedAsItsUserGaveIt) {
  char folder[] = "/tmp/cr-handshake-XXXXXX";
  ASSERT_TRUE(mkdtemp(folder));
  const std::string path = folder + std::string("/relay2.sock"), file = ServerNameFile(path);
  EXPECT_EQ(NamedServer("unix:" + path), "unix:" + path);
  EXPECT_EQ(ConnectServer(path).status().message().find("cr-relay"), std::string::npos);
  std::ofstream(file) << "gpu7:7070\n";
  EXPECT_EQ(NamedServer("unix:" + path), "gpu7:7070");
  for (const char* other : {"unix:/none/session.sock", "unix:/none", "gpu7:7070", "unix:.sock", ""})
    EXPECT_EQ(NamedServer(other), other);
  const std::string told = ConnectServer(path).status().message();
  EXPECT_NE(told.find("cr-relay, which connected this machine with gpu7:7070, has ended"), std::string::npos) << told;
  unlink(file.c_str());
  rmdir(folder);
}

// As a program of an ordinary user under cr-run: root has no number there, and anybody can make a folder in /tmp.
TEST(Handshake, AServerWhoseUserCannotBeToldInAUserNamespace) {
  ASSERT_EQ(geteuid(), 0u) << "this test plays two users, which needs root";
  char folder[] = "/tmp/cr-handshake-XXXXXX";
  ASSERT_TRUE(mkdtemp(folder));
  const std::string path = folder + std::string("/session.sock");
  StatusOr<UniqueFd> listener = ListenUnix(path);
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  ASSERT_EQ(chmod(folder, 0755) + chmod(path.c_str(), 0666), 0);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto write_to = [](const char* file, const char* text) {
      const int fd = open(file, O_WRONLY);
      return fd >= 0 && write(fd, text, strlen(text)) == ssize_t(strlen(text));
    };
    std::string told = "no user namespace";
    if (setresuid(51234, 51234, 51234) == 0 && prctl(PR_SET_DUMPABLE, 1) == 0 && unshare(CLONE_NEWUSER) == 0 &&
        write_to("/proc/self/uid_map", "51234 51234 1")) {
      told = ConnectServer(path).status().message();
    }
    _exit(write(ends[1], told.data(), told.size()) == ssize_t(told.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string told(4096, '\0');
  told.resize(size_t(std::max<ssize_t>(0, read(ends[0], told.data(), told.size()))));
  close(ends[0]);
  waitpid(child, nullptr, 0);
  EXPECT_NE(told.find("user namespace, in which root has no number"), std::string::npos) << told;
  EXPECT_NE(told.find("cr-server --dir /run/cuda-remote"), std::string::npos) << told;
  EXPECT_NE(told.find("cr-run --plain"), std::string::npos) << told;
  EXPECT_EQ(told.find("65534"), std::string::npos) << told;
  unlink(path.c_str());
  rmdir(folder);
}

// Whoever listens may be stopped, or mean harm.
TEST(Handshake, AListenerThatNeverAcceptsIsNotWaitedForForever) {
  char folder[] = "/tmp/cr-handshake-XXXXXX";
  ASSERT_TRUE(mkdtemp(folder));
  const std::string path = std::string(folder) + "/s.sock";
  StatusOr<UniqueFd> listener = ListenUnix(path);
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  ASSERT_EQ(listen(listener->get(), 2), 0);
  std::vector<UniqueFd> waiting;
  int failure = 0;
  StatusOr<UniqueFd> one = ConnectUnix(path, &failure, 0);
  for (; one.ok() && waiting.size() < 100; one = ConnectUnix(path, &failure, 0)) waiting.push_back(*std::move(one));
  EXPECT_EQ(waiting.size(), 3u);
  EXPECT_EQ(failure, EAGAIN);
  EXPECT_EQ(one.status().message(), "cannot connect to " + path + ": nobody accepts connections there");
  // Those that got through wait for what they read, as before.
  EXPECT_EQ(fcntl(waiting[0].get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_EQ(ListenUnix(path).status().message(), "another process is listening on " + path);
  // One that accepts a little later is reached.
  std::thread accepting([&] {
    usleep(50000);
    const UniqueFd first(accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC));
    EXPECT_TRUE(first.ok());
  });
  EXPECT_EQ(ConnectUnix(path, &failure, 20000).status().message(), "");
  accepting.join();
  unlink(path.c_str());
  rmdir(folder);
}

TEST(Handshake, ListenReplacesADeadSocketOnly) {
  char folder[] = "/tmp/cr-handshake-XXXXXX";
  ASSERT_TRUE(mkdtemp(folder));
  const std::string path = std::string(folder) + "/s.sock";
  // The question about cr-server is for a server's socket only.
  int failure = 0;
  const std::string none = ConnectUnix(path, &failure).status().message();
  EXPECT_EQ(none, "cannot connect to " + path + ": No such file or directory");
  EXPECT_EQ(failure, ENOENT);
  EXPECT_EQ(ConnectServer(path).status().message(), none + "; is cr-server running, with this --dir?");
  StatusOr<UniqueFd> first = ListenUnix(path);
  ASSERT_TRUE(first.ok()) << first.status().message();
  struct stat status;
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(ListenUnix(path).status().message(), "another process is listening on " + path);
  EXPECT_EQ(ConnectUnix(path).status().message(), "");
  first->Close();
  EXPECT_FALSE(ConnectUnix(path, &failure).ok());
  EXPECT_EQ(failure, ECONNREFUSED);
  EXPECT_EQ(ListenUnix(path).status().message(), "");
  unlink(path.c_str());
  const int file = open(path.c_str(), O_CREAT | O_WRONLY, 0600);
  close(file);
  EXPECT_EQ(ListenUnix(path).status().message(), path + " exists and is not a socket");
  unlink(path.c_str());
  rmdir(folder);
  const std::string long_path(200, 'x');
  EXPECT_EQ(ListenUnix(long_path).status().message(), "the socket path " + long_path + " is longer than 107 bytes");
}

TEST(Handshake, PeerUserIsTold) {
  Sockets s;
  uint32_t uid = 1, pid = 0;
  ASSERT_TRUE(PeerUser(s.fd[0], &uid, &pid));
  EXPECT_EQ(uid, getuid());
  EXPECT_EQ(pid, uint32_t(getpid()));
}

}  // namespace
}  // namespace cuda_remote
