// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/socket_state.h"

#include <dirent.h>
#include <errno.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "checkpoint/engine/criu/connections.h"
#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/descriptors.h"
#include "checkpoint/job/job.h"
#include "proto/base/unique_fd.h"
#include "proto/codec/text.h"

namespace cuda_remote::checkpoint {
namespace {

// What CRIU says of a socket that it cannot save, with the socket's inode behind it, as a number to this base.
const struct {
  const char* words;
  int base;
  const char* what;
  const char* advice;
} kRefusals[] = {
    {"In-flight connection (l) for ", 16, "has a TCP socket with connections that it has not accepted yet",
     "have the program accept them, or try again"},
    {"Found a closed in-flight socket to ", 16,
     "has a Unix socket with a connection that it has not accepted yet, and whose other end is closed",
     "have the program accept it, or try again"},
    {"Non-empty write queue on an in-flight socket ", 16,
     "has sent data through a Unix socket to a program that has not accepted the connection yet",
     "have that program accept it, or try again"},
    {"Dangling connection ", 10, "has a Unix socket whose connection has no other end",
     "close it before the checkpoint, or try again"},
    {"Unix socket ", 10, "has a Unix socket that is connected to one without a name, which is not of the job",
     "close it before the checkpoint, or start the other program in the same job"},
    {"Unknown inet socket ", 16, "has a TCP connection that is being made or that ends", "try again"},
};

// "PROGRAM (PID n)" of one of these processes that has the socket or terminal; empty: none has.
std::string UserOf(uint64_t inode, const std::vector<int>& pids) {
  const auto is_wanted = [&](int pid) { return std::find(pids.begin(), pids.end(), pid) != pids.end(); };
  const auto is_it = [&](const std::string& process, const std::string& number) {
    struct stat open;
    return stat((process + "/fd/" + number).c_str(), &open) == 0 && open.st_ino == inode &&
           (S_ISSOCK(open.st_mode) || S_ISCHR(open.st_mode));
  };
  return Printable(FindUserOfFile(is_wanted, is_it));
}

std::string NameOfOption(const SocketFact& fact) {
  if (fact.kind == SocketFact::kMembership) return "the membership of a multicast group";
  if (fact.kind == SocketFact::kAddress) return "the address of a raw socket";
  for (const SocketOption& option : kSocketOptions) {
    if (option.level == fact.level && option.option == fact.option) return option.name;
  }
  return "option " + std::to_string(fact.option) + " of level " + std::to_string(fact.level);
}

// Whether a value is the kernel's own, and cannot be set.
bool IsKernels(int socket, const NotedFact& noted) {
  int value = 0, type = 0;
  socklen_t bytes = sizeof(type);
  sockaddr_storage address;
  if (noted.value.size() == sizeof(value)) memcpy(&value, noted.value.data(), sizeof(value));
  if (noted.fact.level == kLevelIp && noted.fact.option == kIpMulticastTtl)
    return getsockopt(socket, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0 && type == SOCK_STREAM;
  bytes = sizeof(address);
  return noted.fact.level == kLevelTcp && noted.fact.option == kTcpMaxSeg &&
         (value > kMostMaxSeg || getpeername(socket, reinterpret_cast<sockaddr*>(&address), &bytes) == 0);
}

// Returns false, and errno, if it cannot be set.
bool SetOption(int socket, const NotedFact& noted) {
  const SocketFact& fact = noted.fact;
  std::string now(std::max<size_t>(noted.value.size(), 64), '\0');
  auto bytes = socklen_t(now.size());
  if (getsockopt(socket, fact.level, fact.option, now.data(), &bytes) == 0 &&
      std::string_view(now.data(), bytes) == noted.value) {
    return true;
  }
  if (IsKernels(socket, noted)) return true;
  std::string value = noted.value;
  if (fact.level == kLevelSocket && fact.option == kTxRehash && value == std::string("\xff\0\0\0", 4))
    value.assign(4, '\xff');
  return setsockopt(socket, fact.level, fact.option, value.data(), socklen_t(value.size())) == 0;
}

bool Join(int socket, const NotedFact& noted) {
  const std::string& value = noted.value;
  if (value.size() < kInterfaceBytes + GROUP_FILTER_SIZE(0)) return true;
  ifreq interface = {};
  memcpy(interface.ifr_name, value.data(), sizeof(interface.ifr_name) - 1);
  // In the socket's network, which may be another than this program's.
  if (ioctl(socket, SIOCGIFINDEX, &interface) != 0) return false;
  std::string filter = value.substr(kInterfaceBytes);
  group_filter header;
  memcpy(&header, filter.data(), GROUP_FILTER_SIZE(0));
  header.gf_interface = uint32_t(interface.ifr_ifindex);
  memcpy(filter.data(), &header, GROUP_FILTER_SIZE(0));
  group_req group = {};
  group.gr_interface = header.gf_interface;
  group.gr_group = header.gf_group;
  if (setsockopt(socket, noted.fact.level, MCAST_JOIN_GROUP, &group, sizeof(group)) != 0 && errno != EADDRINUSE)
    return false;
  if (header.gf_fmode == MCAST_EXCLUDE && header.gf_numsrc == 0) return true;
  return setsockopt(socket, noted.fact.level, MCAST_MSFILTER, filter.data(), socklen_t(filter.size())) == 0;
}

bool SetAddress(int socket, const NotedFact& noted) {
  const bool peer = noted.fact.option == 1;
  sockaddr_storage now = {}, wanted = {};
  socklen_t bytes = sizeof(now);
  auto* const name = reinterpret_cast<sockaddr*>(&now);
  memcpy(&wanted, noted.value.data(), std::min(noted.value.size(), sizeof(wanted)));
  const bool has = (peer ? getpeername(socket, name, &bytes) : getsockname(socket, name, &bytes)) == 0;
  if (has && std::string_view(reinterpret_cast<const char*>(&now), bytes) == noted.value) return true;
  const auto* const address = reinterpret_cast<const sockaddr*>(&wanted);
  bytes = socklen_t(std::min(noted.value.size(), sizeof(wanted)));
  return (peer ? connect(socket, address, bytes) : bind(socket, address, bytes)) == 0;
}

bool Set(int socket, const NotedFact& noted) {
  switch (noted.fact.kind) {
    case SocketFact::kMembership:
      return Join(socket, noted);
    case SocketFact::kAddress:
      return SetAddress(socket, noted);
    case SocketFact::kOption:
      return SetOption(socket, noted);
    default:
      return true;
  }
}

// The inodes of the sockets in files.img, by their numbers in it.
std::map<uint32_t, uint64_t> SavedSockets(const std::string& image_folder) {
  std::map<uint32_t, uint64_t> found;
  std::string image;
  if (!ReadImageFile(image_folder + "/files.img", &image)) return found;
  for (const FileKind kind : {FileKind::kInternetSocket, FileKind::kUnixSocket, FileKind::kNetlinkSocket}) {
    // All of their entries begin with these two.
    ReadFilesImage(image, kind, [&](protozero::pbf_reader fields) {
      uint32_t number = 0;
      uint64_t inode = 0;
      while (fields.next()) {
        if (fields.wire_type() == protozero::pbf_wire_type::varint && fields.tag() == 1) {
          number = fields.get_uint32();
        } else if (fields.wire_type() == protozero::pbf_wire_type::varint && fields.tag() == 2) {
          inode = fields.get_uint32();
        } else {
          fields.skip();
        }
      }
      found[number] = inode;
    });
  }
  return found;
}

// What CRIU would have to make for a queue alone, and cannot (CRIU 4.2: prepare_timerfds, prepare_tcp_socks and
// add_fake_unix_queuers).
struct Unrestorable {
  std::map<uint32_t, const char*> files;  // by number in files.img: what they are
  std::map<uint32_t, uint64_t> sockets;   // inodes of Unix sockets
};

bool FindUnrestorable(std::string_view image, Unrestorable* found) {
  struct UnixSocket {
    uint32_t number = 0, type = 0, state = 0;
    uint64_t inode = 0, peer = 0;
  };
  std::vector<UnixSocket> all;
  std::set<uint64_t> peers;
  const bool read = ReadFilesImage(image, FileKind::kUnixSocket, [&](protozero::pbf_reader fields) {
    // A UnixSkEntry (CRIU's images/sk-unix.proto).
    UnixSocket one;
    while (fields.next()) {
      const bool number = fields.wire_type() == protozero::pbf_wire_type::varint;
      if (number && fields.tag() == 1) {
        one.number = fields.get_uint32();
      } else if (number && fields.tag() == 2) {
        one.inode = fields.get_uint32();
      } else if (number && fields.tag() == 3) {
        one.type = fields.get_uint32();
      } else if (number && fields.tag() == 4) {
        one.state = fields.get_uint32();
      } else if (number && fields.tag() == 8) {
        one.peer = fields.get_uint32();
      } else {
        fields.skip();
      }
    }
    all.push_back(one);
    peers.insert(one.peer);
  });
  constexpr uint32_t kEstablished = 1;
  for (const UnixSocket& one : all) {
    found->sockets[one.number] = one.inode;
    if (peers.count(one.inode) != 0) continue;
    if (one.type == SOCK_DGRAM) found->files[one.number] = "a datagram socket to which none is connected";
    if (one.type != SOCK_DGRAM && one.state == kEstablished && one.peer == 0)
      found->files[one.number] = "a socket whose other end is closed";
  }
  std::vector<Connection> connections;
  if (!SavedConnections(image, &connections)) return false;
  for (const Connection& connection : connections) found->files[connection.number] = "an end of a TCP connection";
  return read && ReadFilesImage(image, FileKind::kTimer, [&](protozero::pbf_reader fields) {
           while (fields.next(1, protozero::pbf_wire_type::varint)) found->files[fields.get_uint32()] = "a timerfd";
         });
}

// What a process had open: numbers in files.img by descriptor. `number`: as the job numbers the process.
std::map<int, uint32_t> SavedDescriptors(const std::string& image_folder, int number) {
  std::map<int, uint32_t> files;
  std::string image;
  uint32_t table = 0;
  if (ReadImageFile(image_folder + "/ids-" + std::to_string(number) + ".img", &image) &&
      ReadDescriptorTable(image, &table) &&
      ReadImageFile(image_folder + "/fdinfo-" + std::to_string(table) + ".img", &image)) {
    ReadDescriptors(image, &files);
  }
  return files;
}

}  // namespace

bool ParseSocketFacts(std::string_view file, std::map<uint64_t, std::vector<NotedFact>>* facts) {
  for (size_t at = 0; at < file.size();) {
    NotedFact noted;
    if (file.size() - at < sizeof(noted.fact)) return false;
    memcpy(&noted.fact, file.data() + at, sizeof(noted.fact));
    at += sizeof(noted.fact);
    if (noted.fact.bytes > file.size() - at) return false;
    noted.value = file.substr(at, noted.fact.bytes);
    at += noted.fact.bytes;
    (*facts)[noted.fact.inode].push_back(std::move(noted));
  }
  return true;
}

absl::Status CheckLosses(const std::string& image_folder, const std::vector<int>& pids) {
  std::string file;
  std::map<uint64_t, std::vector<NotedFact>> facts;
  if (!ReadImageFile(image_folder + "/" + kSocketFactsName, &file)) return absl::OkStatus();  // the job has none
  if (!ParseSocketFacts(file, &facts)) return absl::DataLossError("cannot read what was noted of the job's sockets");
  for (const auto& [inode, all] : facts) {
    for (const NotedFact& noted : all) {
      if (noted.fact.kind != SocketFact::kLoss) continue;
      const std::string user = UserOf(inode, pids);
      const size_t line = std::min(noted.value.find('\n'), noted.value.size());
      return absl::UnavailableError((user.empty() ? "the job" : user) + " " + noted.value.substr(0, line) +
                                    ", which cannot be saved; " +
                                    noted.value.substr(std::min(line + 1, noted.value.size())));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckQueues(const std::string& image_folder, const std::vector<int>& pids) {
  std::string queues, files;
  if (!ReadImageFile(image_folder + "/sk-queues.img", &queues)) return absl::OkStatus();
  std::set<uint64_t> open;
  const std::unique_ptr<DIR, int (*)(DIR*)> list(opendir(image_folder.c_str()), closedir);
  while (const dirent* const entry = list ? readdir(list.get()) : nullptr) {
    std::string table;
    std::map<int, uint32_t> some;
    if (strncmp(entry->d_name, "fdinfo-", 7) != 0) continue;
    if (ReadImageFile(image_folder + "/" + entry->d_name, &table)) ReadDescriptors(table, &some);
    for (const auto& [descriptor, file] : some) open.insert(file);
  }
  Unrestorable found;
  std::string said;
  const bool read = ReadImageFile(image_folder + "/files.img", &files) && FindUnrestorable(files, &found) &&
                    ReadMessages(queues, [&](uint32_t socket, const std::vector<uint64_t>& sent) {
                      for (const uint64_t file : sent) {
                        const auto what = found.files.find(uint32_t(file));
                        if (what == found.files.end() || open.count(file) != 0 || !said.empty()) continue;
                        const std::string user = UserOf(found.sockets[socket], pids);
                        said =
                            (user.empty() ? "the job" : user) + " has a Unix socket in whose queue is " + what->second +
                            " that no process has open (SCM_RIGHTS), which cannot be saved; have the program receive "
                            "it before the checkpoint";
                      }
                    });
  if (!read) return absl::UnimplementedError("cannot read this CRIU version's image of the queues of Unix sockets");
  return said.empty() ? absl::OkStatus() : absl::UnavailableError(said);
}

std::string NameRefusal(const std::string& errors, const std::vector<int>& pids) {
  for (const auto& known : kRefusals) {
    const size_t at = errors.find(known.words);
    if (at == std::string::npos) continue;
    const std::string user = UserOf(strtoul(errors.c_str() + at + strlen(known.words), nullptr, known.base), pids);
    if (!user.empty()) return user + " " + known.what + ", which cannot be saved; " + known.advice;
  }
  return "";
}

absl::Status SettleQueues(const std::string& image_folder) {
  const std::string path = image_folder + "/sk-queues.img";
  const std::string_view mark(kEmptyDatagram, kEmptyDatagramBytes);
  std::string image;
  if (!ReadImageFile(path, &image) || image.find(mark) == std::string::npos) return absl::OkStatus();
  if (EmptyMessages(&image, mark)) return WriteImageFile(path, image);
  return absl::UnimplementedError("cannot read from this CRIU version's image which datagrams are empty");
}

std::vector<std::string> RestoreSockets(const std::string& image_folder, const std::vector<int>& pids,
                                        const std::optional<Account>& account) {
  std::string file;
  std::map<uint64_t, std::vector<NotedFact>> facts;
  if (!ReadImageFile(image_folder + "/" + kSocketFactsName, &file) || !ParseSocketFacts(file, &facts)) return {};
  const std::map<uint32_t, uint64_t> sockets = SavedSockets(image_folder);
  std::vector<std::string> failures;
  std::set<std::string> said;  // each once
  for (const int pid : pids) {
    for (const auto& [descriptor, number] : SavedDescriptors(image_folder, InnerPid(pid))) {
      const auto socket = sockets.find(number);
      const auto noted = socket == sockets.end() ? facts.end() : facts.find(socket->second);
      if (noted == facts.end()) continue;
      const UniqueFd duplicate(DuplicateOf(pid, descriptor));
      if (!duplicate.ok()) continue;
      // The image may be the user's own.
      const ActAs user(account);
      for (const NotedFact& fact : noted->second) {
        const bool set = Set(duplicate.get(), fact);
        const std::string why = set ? "" : strerror(errno);
        const std::string name = NameOfOption(fact.fact);
        if (set || !said.insert(name).second) continue;
        failures.push_back("a socket of the job cannot have " + name + " as before here: " + why);
      }
      facts.erase(noted);  // processes may share it
    }
  }
  return failures;
}

}  // namespace cuda_remote::checkpoint
