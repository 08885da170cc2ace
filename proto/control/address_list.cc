// SPDX-License-Identifier: Apache-2.0
#include "proto/control/address_list.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace cuda_remote::control {
namespace {

constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

bool IsMapped(const IpAddress& address) { return memcmp(address.data(), kMapped, sizeof(kMapped)) == 0; }

IpAddress Masked(IpAddress address, unsigned bits) {
  for (unsigned i = 0; i < address.size(); ++i) {
    const unsigned kept = std::min(8u, bits > i * 8 ? bits - i * 8 : 0u);
    address[i] &= uint8_t(0xff00u >> kept);
  }
  return address;
}

}  // namespace

bool ParseIpAddress(std::string_view text, IpAddress* address) {
  const std::string copy(text);
  if (copy.find('\0') != std::string::npos) return false;
  memcpy(address->data(), kMapped, sizeof(kMapped));
  if (inet_pton(AF_INET, copy.c_str(), address->data() + sizeof(kMapped)) == 1) return true;
  return inet_pton(AF_INET6, copy.c_str(), address->data()) == 1;
}

bool ReadSocketAddress(const sockaddr* from, socklen_t length, IpAddress* address, uint16_t* port) {
  if (length >= sizeof(sockaddr_in) && from->sa_family == AF_INET) {
    sockaddr_in in;
    memcpy(&in, from, sizeof(in));
    memcpy(address->data(), kMapped, sizeof(kMapped));
    memcpy(address->data() + sizeof(kMapped), &in.sin_addr, sizeof(in.sin_addr));
    *port = ntohs(in.sin_port);
    return true;
  }
  if (length >= sizeof(sockaddr_in6) && from->sa_family == AF_INET6) {
    sockaddr_in6 in;
    memcpy(&in, from, sizeof(in));
    memcpy(address->data(), &in.sin6_addr, sizeof(in.sin6_addr));
    *port = ntohs(in.sin6_port);
    return true;
  }
  return false;
}

// The name, "ipv4:10.1.2.3:555" or "ipv6:%5Bfd00::1%5D:555", is a URI.
bool ReadPeer(std::string_view name, IpAddress* address, uint16_t* port) {
  constexpr size_t kScheme = 5;
  std::string text;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '%' && i + 2 < name.size()) {
      text += char(strtol(std::string(name.substr(i + 1, 2)).c_str(), nullptr, 16));
      i += 2;
    } else {
      text += name[i];
    }
  }
  if (text.compare(0, kScheme, "ipv4:") != 0 && text.compare(0, kScheme, "ipv6:") != 0) return false;
  std::string_view host = std::string_view(text).substr(kScheme);
  const size_t colon = host.rfind(':');
  if (colon == std::string_view::npos) return false;
  *port = uint16_t(atoi(std::string(host.substr(colon + 1)).c_str()));
  host = host.substr(0, colon);
  if (!host.empty() && host.front() == '[') host = host.substr(1, host.find(']') - 1);
  return ParseIpAddress(host.substr(0, host.find('%')), address);  // without a zone
}

std::string IpAddressText(const IpAddress& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (IsMapped(address)) {
    inet_ntop(AF_INET, address.data() + sizeof(kMapped), text, sizeof(text));
  } else {
    inet_ntop(AF_INET6, address.data(), text, sizeof(text));
  }
  return text;
}

IpAddress HostOf(const IpAddress& address) { return IsMapped(address) ? address : Masked(address, 64); }

absl::Status AddressList::Add(std::string_view text) {
  const size_t slash = text.find('/');
  Range range;
  const auto wrong = [&](const char* why) {
    return absl::InvalidArgumentError("\"" + std::string(text) +
                                      "\" is not an address or a network, such as 10.1.2.3, 10.1.2.0/24 or fd00::/8" +
                                      why);
  };
  if (!ParseIpAddress(text.substr(0, slash), &range.first)) return wrong("; host names are not accepted");
  const bool mapped = IsMapped(range.first) && text.find(':') == std::string_view::npos;
  const unsigned most = mapped ? 32 : 128;
  unsigned bits = most;
  if (slash != std::string_view::npos) {
    const std::string_view digits = text.substr(slash + 1);
    if (digits.empty() || digits.size() > 3 || digits.find_first_not_of("0123456789") != std::string_view::npos)
      return wrong("");
    bits = 0;
    for (const char digit : digits) bits = bits * 10 + unsigned(digit - '0');
    if (bits > most) return wrong("");
  }
  range.bits = bits + 128 - most;
  if (Masked(range.first, range.bits) != range.first) return wrong("; it has bits behind its prefix");
  ranges_.push_back(range);
  return absl::OkStatus();
}

bool AddressList::Contains(const IpAddress& address) const {
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [&](const Range& range) { return Masked(address, range.bits) == range.first; });
}

}  // namespace cuda_remote::control
