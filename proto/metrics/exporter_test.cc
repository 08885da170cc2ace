// SPDX-License-Identifier: Apache-2.0
// What the exporter answers, also while others say and read nothing.

#include "proto/metrics/exporter.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/base/unique_fd.h"

namespace cuda_remote::metrics {
namespace {

constexpr size_t kLarge = 4 << 20;

class ExporterTest : public testing::Test {
 protected:
  void SetUp() override {
    auto started = Exporter::Start("127.0.0.1:0", [] {
      std::vector<MetricFamily> families;
      AddOne("answer", std::string(kLarge, 'x'), MetricType::Gauge, 42, &families);
      return families;
    });
    ASSERT_TRUE(started.ok()) << started.status();
    exporter_ = *std::move(started);
  }

  // Connected from 127.1.0.`host`.
  UniqueFd Connect(int host) {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in from{}, to{};
    from.sin_family = to.sin_family = AF_INET;
    from.sin_addr.s_addr = htonl(0x7f010000u + uint32_t(host));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(uint16_t(exporter_->port()));
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&from), sizeof(from)), 0);
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    return fd;
  }

  std::string Ask(const std::string& request, int host = 1) {
    const UniqueFd fd = Connect(host);
    // In pieces, as networks deliver it.
    for (size_t at = 0; at < request.size(); at += 7) {
      const std::string piece = request.substr(at, 7);
      EXPECT_EQ(send(fd.get(), piece.data(), piece.size(), MSG_NOSIGNAL), ssize_t(piece.size()));
    }
    std::string text;
    char bytes[4096];
    for (ssize_t n; (n = read(fd.get(), bytes, sizeof(bytes))) > 0;) text.append(bytes, size_t(n));
    return text;
  }

  std::unique_ptr<Exporter> exporter_;
};

bool Begins(const std::string& text, const std::string& with) { return text.compare(0, with.size(), with) == 0; }

TEST_F(ExporterTest, AnswersInHttp) {
  const std::string text = Ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(Begins(text, "HTTP/1.1 200 OK\r\n")) << text.substr(0, 200);
  EXPECT_NE(text.find("\ncuda_remote_answer 42\n"), std::string::npos);
  const size_t body = text.find("\r\n\r\n") + 4;
  EXPECT_NE(text.find("Content-Length: " + std::to_string(text.size() - body) + "\r\n"), std::string::npos);
  EXPECT_TRUE(Begins(Ask("GET /metrics?a=b HTTP/1.0\r\n\r\n"), "HTTP/1.1 200 OK\r\n"));
  const std::string head = Ask("HEAD /metrics HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(Begins(head, "HTTP/1.1 200 OK\r\n"));
  EXPECT_EQ(head.find("\r\n\r\n") + 4, head.size());
  EXPECT_TRUE(Begins(Ask("GET /else HTTP/1.1\r\n\r\n"), "HTTP/1.1 404 "));
  EXPECT_TRUE(Begins(Ask("POST /metrics HTTP/1.1\r\n\r\n"), "HTTP/1.1 405 "));
  EXPECT_TRUE(Begins(Ask("\r\n\r\n"), "HTTP/1.1 400 "));
  EXPECT_TRUE(Begins(Ask("GET " + std::string(20000, 'x')), "HTTP/1.1 400 "));
  EXPECT_FALSE(Exporter::Start("127.0.0.1:" + std::to_string(exporter_->port()), nullptr).ok());
}

// Two threads served the connections one after another: 1000 silent ones kept everybody waiting.
TEST_F(ExporterTest, WhoIsSilentOrDoesNotReadKeepsNobodyWaiting) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 500; ++i) {
    silent.push_back(Connect(1 + i % 8));
    if (i % 2 != 0) continue;
    // Asks, and reads nothing of an answer that fits into no socket.
    const std::string request = "GET /metrics HTTP/1.1\r\n\r\n";
    send(silent.back().get(), request.data(), request.size(), MSG_NOSIGNAL);
  }
  for (int i = 0; i < 5; ++i) {
    const std::string text = Ask("GET /metrics HTTP/1.1\r\n\r\n", 100 + i);
    EXPECT_NE(text.find("\ncuda_remote_answer 42\n"), std::string::npos) << text.substr(0, 200);
  }
}

}  // namespace
}  // namespace cuda_remote::metrics
