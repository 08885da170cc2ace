// SPDX-License-Identifier: Apache-2.0
#include "proto/control/status_text.h"

#include <grpcpp/support/status.h>

#include <cctype>
#include <cstring>
#include <string>

namespace cuda_remote::control {
namespace {

// Takes all up to the last place of `part` off the text.
bool CutThrough(const std::string& part, std::string* text) {
  const size_t at = text->rfind(part);
  if (at == std::string::npos) return false;
  text->erase(0, at + part.size());
  return true;
}

std::string Lower(std::string text) {
  // Not abbreviations.
  if (text.size() > 1 && islower(static_cast<unsigned char>(text[1])))
    text[0] = char(tolower(static_cast<unsigned char>(text[0])));
  return text;
}

}  // namespace

std::string StatusText(const grpc::Status& status) {
  if (status.ok()) return "";
  std::string text = status.error_message();
  if (text.compare(0, 25, "DNS resolution failed for") == 0) {
    CutThrough(": ", &text);
    return "the address has no known host: " + Lower(text);
  }
  // "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote host: ..."
  const bool of_connecting = CutThrough("; last error: ", &text);
  if (of_connecting) {
    CutThrough("UNKNOWN: ", &text) || CutThrough("UNAVAILABLE: ", &text) || CutThrough("INTERNAL: ", &text);
    if (text.compare(0, 2, "ip") == 0 || text.compare(0, 5, "unix:") == 0) {
      const size_t end = text.find(": ");
      if (end != std::string::npos) text.erase(0, end + 2);
    }
  }
  if (CutThrough("Failed to connect to remote host: ", &text)) return Lower(text);
  if (text.find("handshake failed") != std::string::npos || text.find("SSL_ERROR") != std::string::npos) {
    const bool has_reason = CutThrough(":", &text);
    while (!text.empty() && text[0] == ' ') text.erase(0, 1);
    return "the TLS handshake failed" + (has_reason && !text.empty() ? ": " + Lower(text) : std::string());
  }
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) return "it did not answer in time";
  const bool closed = text == "Socket closed" || text == "failed to connect to all addresses";
  if (closed || status.error_code() == grpc::StatusCode::CANCELLED) return "the connection was closed";
  if (text.empty()) return "no reason given";
  return of_connecting ? Lower(text) : text;
}

std::string WhatToCheck(const std::string& problem) {
  // The rest are the server's own answers.
  for (const char* const complete : {"the address", "the server", "too many tunnels"})
    if (problem.compare(0, strlen(complete), complete) == 0) return "";
  if (problem.compare(0, 17, "the TLS handshake") == 0) {
    return "; has the authority in CUDA_REMOTE_TLS_CA signed the server's certificate, and does that name this host?";
  }
  return "; is cr-server running there with --listen, and do both sides use TLS with certificates that the other side "
         "accepts, or does it list this host with --insecure-tcp?";
}

}  // namespace cuda_remote::control
