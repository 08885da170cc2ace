// SPDX-License-Identifier: Apache-2.0
#include "proto/metrics/exporter.h"

#include <fcntl.h>
#include <poll.h>
#include <prometheus/text_serializer.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "proto/base/clock.h"
#include "proto/base/unique_fd.h"
#include "proto/control/listener.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::metrics {
namespace {

constexpr size_t kMostConnections = 256;
constexpr size_t kMostRequestBytes = 16 << 10;
// How long a client may take to send its question, and then to read the answer.
constexpr int64_t kPatienceMs = 10000;

std::string Answer(const char* status, const char* type, const std::string& body, bool with_body) {
  return std::string("HTTP/1.1 ") + status + "\r\nContent-Type: " + type +
         "\r\nContent-Length: " + std::to_string(body.size()) + "\r\nConnection: close\r\n\r\n" +
         (with_body ? body : "");
}

}  // namespace

MetricFamily Family(const std::string& name, const std::string& help, MetricType type) {
  MetricFamily family;
  family.name = "cuda_remote_" + name;
  family.help = help;
  family.type = type;
  return family;
}

void Add(double value, Labels labels, MetricFamily* family) {
  ClientMetric metric;
  metric.label = std::move(labels);
  (family->type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  family->metric.push_back(std::move(metric));
}

void AddOne(const std::string& name, const std::string& help, MetricType type, double value,
            std::vector<MetricFamily>* families) {
  families->push_back(Family(name, help, type));
  Add(value, {}, &families->back());
}

// One thread answers all clients, and none of them keeps it waiting: whoever neither asks nor reads is left after a
// while, and at once if there are many such clients (Listener).
class Exporter::Server {
 public:
  explicit Server(std::function<std::vector<MetricFamily>()> collect)
      : collect_(std::move(collect)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  ~Server() {
    listener_.Stop();
    {
      MutexLock lock(&mutex_);
      stop_ = true;
    }
    Wake();
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Start(const std::string& address) {
    if (const absl::Status listens = listener_.Listen(address); !listens.ok()) return listens;
    thread_ = std::thread([this] { Loop(); });
    listener_.Start(kMostConnections, [this](int fd) {
      MutexLock lock(&mutex_);
      arrived_.emplace_back(fd);
      Wake();
    });
    return absl::OkStatus();
  }

  int port() const { return listener_.port(); }

 private:
  struct Client {
    UniqueFd fd;
    int64_t deadline_ms = 0;
    std::string request, answer;  // what has come, and what is still to be sent
    bool answered = false;
    bool sent() const { return answered && answer.empty(); }
  };

  void Wake() {
    const uint64_t one = 1;
    const ssize_t ignored = write(wake_.get(), &one, sizeof(one));
    static_cast<void>(ignored);
  }

  std::string Respond(const std::string& request) {
    const size_t method = request.find(' '), path = request.find_first_of(" ?\r\n", method + 1);
    constexpr char kPlain[] = "text/plain; charset=utf-8";
    if (method == std::string::npos || path == std::string::npos)
      return Answer("400 Bad Request", kPlain, "this is not a question in HTTP\n", true);
    const bool is_get = request.compare(0, method + 1, "GET ") == 0;
    if (!is_get && request.compare(0, method + 1, "HEAD ") != 0)
      return Answer("405 Method Not Allowed", kPlain, "only GET\n", true);
    if (request.compare(method + 1, path - method - 1, "/metrics") != 0)
      return Answer("404 Not Found", kPlain, "there is only /metrics\n", is_get);
    try {
      return Answer("200 OK", "text/plain; version=0.0.4; charset=utf-8",
                    prometheus::TextSerializer().Serialize(collect_()), is_get);
    } catch (const std::exception& problem) {
      return Answer("500 Internal Server Error", kPlain, std::string(problem.what()) + "\n", is_get);
    }
  }

  // False: the client is done, or gone.
  bool Advance(Client* client) {
    char bytes[4096];
    ssize_t count = 0;
    while ((count = read(client->fd.get(), bytes, sizeof(bytes))) > 0) {
      if (client->answered) continue;  // it is not asked anything more
      client->request.append(bytes, size_t(count));
      const bool whole = client->request.find("\r\n\r\n") != std::string::npos;
      if (!whole && client->request.size() <= kMostRequestBytes) continue;
      client->answer = Respond(whole ? client->request : "");
      client->answered = true;
      client->deadline_ms = NowMs() + kPatienceMs;
    }
    if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
      // Who has sent all may have said so.
      if (!client->answered || count != 0 || client->sent()) return false;
    }
    while (!client->answer.empty()) {
      count = send(client->fd.get(), client->answer.data(), client->answer.size(), MSG_NOSIGNAL);
      if (count < 0) return errno == EAGAIN || errno == EINTR;
      client->answer.erase(0, size_t(count));
      if (client->answer.empty()) shutdown(client->fd.get(), SHUT_WR);
    }
    return true;
  }

  void Loop() {
    std::vector<Client> clients;
    while (true) {
      std::vector<pollfd> waiting = {{wake_.get(), POLLIN, 0}};
      int64_t next_ms = NowMs() + kPatienceMs;
      for (const Client& client : clients) {
        waiting.push_back({client.fd.get(), short(client.answer.empty() ? POLLIN : POLLOUT), 0});
        next_ms = std::min(next_ms, client.deadline_ms);
      }
      poll(waiting.data(), waiting.size(), int(std::max<int64_t>(0, next_ms - NowMs())));
      for (size_t i = clients.size(); i > 0; --i) {
        const bool stays = waiting[i].revents == 0 || Advance(&clients[i - 1]);
        if (!stays || NowMs() >= clients[i - 1].deadline_ms) clients.erase(clients.begin() + ptrdiff_t(i - 1));
      }
      uint64_t ignored;
      while (read(wake_.get(), &ignored, sizeof(ignored)) > 0) {
      }
      MutexLock lock(&mutex_);
      if (stop_) return;
      for (UniqueFd& fd : arrived_) {
        Client client;
        client.fd = std::move(fd);
        client.deadline_ms = NowMs() + kPatienceMs;
        clients.push_back(std::move(client));
      }
      arrived_.clear();
    }
  }

  const std::function<std::vector<MetricFamily>()> collect_;
  const UniqueFd wake_;
  // Whoever may connect may also keep others away, so that is no news.
  control::Listener listener_{[](bool, const std::string&) {}};
  std::thread thread_;
  Mutex mutex_;
  bool stop_ CR_GUARDED_BY(mutex_) = false;
  std::vector<UniqueFd> arrived_ CR_GUARDED_BY(mutex_);
};

Exporter::Exporter(std::unique_ptr<Server> server) : server_(std::move(server)) {}
Exporter::~Exporter() = default;

absl::StatusOr<std::unique_ptr<Exporter>> Exporter::Start(const std::string& address,
                                                          std::function<std::vector<MetricFamily>()> collect) {
  auto server = std::make_unique<Server>(std::move(collect));
  if (!server->Start(address).ok()) {
    return absl::InvalidArgumentError(
        "cannot listen at " + address +
        " (--metrics): this is not an address of this machine (such as 127.0.0.1:9400), or another program listens "
        "there");
  }
  return std::unique_ptr<Exporter>(new Exporter(std::move(server)));
}

int Exporter::port() const { return server_->port(); }

}  // namespace cuda_remote::metrics
