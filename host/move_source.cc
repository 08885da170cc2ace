// SPDX-License-Identifier: Apache-2.0
#include "host/move_source.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string_view>
#include <thread>

#include "ckptfmt/folder.h"
#include "ckptfmt/manifest.h"
#include "host/signature.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/control/status_text.h"

namespace cuda_remote::host {
namespace {

using std::chrono::seconds;

constexpr size_t kPart = 1u << 20;  // a multiple of kPageBytes
constexpr int kMostPieces = 4096;   // in a message
// How long a destination that has been told to go on, and has fallen silent, is asked what became of it.
constexpr seconds kSettleTime(60), kOneQuestion(5);

// Tests do not wait so long.
seconds SettleTime() {
  const char* const given = getenv("CR_TEST_SETTLE_SECONDS");
  return given ? seconds(atoi(given)) : kSettleTime;
}

bool ReadAll(const ckptfmt::OpenedFolder& folder, const std::string& path, uint64_t most, std::string* bytes) {
  const auto file = ckptfmt::OpenForReading(folder, path);
  if (!file.ok()) return false;
  std::string part(kPart, '\0');
  ssize_t got;
  while ((got = read(file->get(), &part[0], part.size())) > 0 && bytes->size() <= most)
    bytes->append(part, 0, size_t(got));
  return got == 0;
}

}  // namespace

SettleReply::State Settled(Hosts::Stub* stub, const std::string& id, bool decide) {
  SettleRequest request;
  request.set_id(id);
  request.set_decide(decide);
  const auto give_up = Now() + SettleTime();
  while (Now() < give_up) {
    grpc::ClientContext context;
    context.set_deadline(WallNow() + kOneQuestion);
    SettleReply reply;
    if (stub->Settle(&context, request, &reply).ok() &&
        (reply.state() == SettleReply::RUNNING || reply.state() == SettleReply::FAILED)) {
      return reply.state();
    }
    std::this_thread::sleep_for(seconds(1));
  }
  return SettleReply::NONE;
}

std::shared_ptr<grpc::Channel> HostsChannel(const std::string& address,
                                            const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  const size_t colon = address.rfind(':'), bracket = address.rfind(']');
  const bool has_port = colon != std::string::npos && (bracket == std::string::npos || colon > bracket);
  const std::string target = has_port ? address : address + ":" + kHostsPort;
  control::SendGrpcLogTo([](bool, const char*) {});  // the call's status says the same
  return grpc::CreateCustomChannel(target, credentials, control::ClientArguments());
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> HostsChannel(const std::string& address, const control::TlsFiles& tls) {
  CR_ASSIGN_OR_RETURN(const auto credentials, control::ClientTls(tls));
  return HostsChannel(address, credentials);
}

SaveDecision AskDecision(const std::string& address, const std::string& id, const control::TlsFiles& tls) {
  const auto channel = HostsChannel(address, tls);
  if (!channel.ok()) return SaveDecision::kUnknown;
  const auto stub = Hosts::NewStub(*channel);
  const SettleReply::State state = Settled(stub.get(), id, /*decide=*/false);
  return state == SettleReply::RUNNING  ? SaveDecision::kCounts
         : state == SettleReply::FAILED ? SaveDecision::kGivenUp
                                        : SaveDecision::kUnknown;
}

absl::StatusOr<std::unique_ptr<MoveSource>> MoveSource::Open(const std::string& address, const control::TlsFiles& tls) {
  CR_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, HostsChannel(address, tls));
  std::unique_ptr<MoveSource> move(new MoveSource(address));
  move->stub_ = Hosts::NewStub(channel);
  move->stream_ = move->stub_->Move(&move->context_);
  return move;
}

MoveSource::~MoveSource() {
  // The destination ends what it has of a job that it was not told to let run.
  context_.TryCancel();
  if (!finished_) stream_->Finish();
}

// After something failed: what the other side says of it.
absl::Status MoveSource::Explain() {
  const absl::Status ended = absl::AbortedError(address_ + " has ended the move");
  if (finished_) return ended;
  MoveDown down;
  std::string failed;
  while (stream_->Read(&down)) {
    if (down.kind_case() != MoveDown::kFailed) continue;
    failed_there_ = true;
    failed = address_ + ": " + down.failed();
  }
  const grpc::Status status = stream_->Finish();
  finished_ = true;
  if (failed_there_) return failed.empty() ? ended : absl::AbortedError(failed);
  if (status.error_code() == grpc::StatusCode::CANCELLED) return absl::CancelledError("interrupted");
  if (status.error_code() == grpc::StatusCode::PERMISSION_DENIED)
    return absl::PermissionDeniedError(address_ + ": " + status.error_message());
  if (status.ok()) return ended;
  return absl::UnavailableError("the cr-hostd of " + address_ + " does not answer: " + control::StatusText(status));
}

absl::Status MoveSource::Write(const MoveUp& up) {
  if (!finished_ && stream_->Write(up)) return absl::OkStatus();
  return Explain();
}

absl::StatusOr<MoveDown> MoveSource::Await(MoveDown::KindCase wanted) {
  MoveDown down;
  if (finished_ || !stream_->Read(&down)) return Explain();
  if (down.kind_case() == wanted) return down;
  failed_there_ = down.kind_case() == MoveDown::kFailed;
  if (failed_there_) return absl::AbortedError(address_ + ": " + down.failed());
  return absl::DataLossError(address_ +
                             ": its cr-hostd sent an answer that this one cannot read; install the "
                             "same version on both hosts");
}

absl::StatusOr<MoveChecked> MoveSource::Begin(const MoveBegin& begin) {
  id_ = begin.id();
  MoveUp up;
  *up.mutable_begin() = begin;
  CR_RETURN_IF_ERROR(Write(up));
  CR_ASSIGN_OR_RETURN(MoveDown down, Await(MoveDown::kChecked));
  return std::move(*down.mutable_checked());
}

// Its pages come to *pages.
absl::Status MoveSource::SendFile(const ckptfmt::OpenedFolder& folder, const SignedFile& file, uint32_t number,
                                  SentPages* pages) {
  CR_ASSIGN_OR_RETURN(const UniqueFd opened, ckptfmt::OpenForReading(folder, file.path()));
  // GPU memory that has not changed is in files that are the same.
  const std::string folder_of_processes = std::string(ckptfmt::kClientFolder) + "/";
  const bool by_page = file.path().compare(0, folder_of_processes.size(), folder_of_processes) == 0;
  MoveUp up;
  MovedData* const out = up.mutable_data();
  const auto send = [&] {
    if (out->pieces().empty()) return absl::OkStatus();
    CR_RETURN_IF_ERROR(Write(up));
    sent_bytes_ += out->data().size();
    out->Clear();
    return absl::OkStatus();
  };
  const auto add = [&](uint64_t bytes, uint32_t from, uint64_t offset) {
    MovedPiece* last = out->pieces().empty() ? nullptr : out->mutable_pieces(out->pieces_size() - 1);
    if (!last || last->file() != from || (from != 0 && last->offset() + last->bytes() != offset)) {
      last = out->add_pieces();
      last->set_file(from);
      last->set_offset(offset);
    }
    last->set_bytes(last->bytes() + bytes);
  };
  std::string part(kPart, '\0');
  const SentPages::Page* last = nullptr;
  for (uint64_t at = 0; at < file.bytes();) {
    const size_t bytes = size_t(std::min<uint64_t>(file.bytes() - at, kPart));
    if (!ckptfmt::ReadAt(opened.get(), folder.FullPath(file.path()), at, &part[0], bytes).ok())
      return absl::DataLossError("cannot read the image's file " + file.path());
    for (size_t begin = 0; begin < bytes;) {
      const std::string_view piece(&part[begin], by_page ? std::min(kPageBytes, bytes - begin) : bytes);
      const SentPages::Page* same = nullptr;
      if (by_page && piece.size() == kPageBytes) {
        pages->Add(SentPages::Describe(piece, number, at + begin));
        last = same = pages_.Find(pages->last(), last);
      }
      add(piece.size(), same ? same->file : 0, same ? uint64_t(same->number) * kPageBytes : 0);
      if (!same) out->mutable_data()->append(piece);
      begin += piece.size();
      if (out->pieces_size() >= kMostPieces) CR_RETURN_IF_ERROR(send());
    }
    at += bytes;
    if (out->data().size() >= kPart) CR_RETURN_IF_ERROR(send());
  }
  return send();
}

absl::Status MoveSource::SendImage(const ckptfmt::OpenedFolder& folder) {
  MoveUp up;
  SignatureFile signature;
  Statement statement;
  if (!ReadAll(folder, ckptfmt::kSignatureName, kMostSignatureBytes, up.mutable_image()) ||
      !signature.ParseFromString(up.image()) || !statement.ParseFromString(signature.statement())) {
    return absl::DataLossError("cannot read the signature of the image");
  }
  CR_RETURN_IF_ERROR(Write(up));
  std::map<std::string, uint32_t> files;
  std::set<uint32_t> kept;
  SentPages pages;
  for (const SignedFile& one : statement.files()) {
    if (files.count(one.hash()) != 0) continue;
    const auto known = files_.find(one.hash());
    const uint32_t number = known != files_.end() ? known->second : ++numbered_;
    files.emplace(one.hash(), number);
    if (known != files_.end()) {
      kept.insert(number);
    } else {
      CR_RETURN_IF_ERROR(SendFile(folder, one, number, &pages));
    }
  }
  pages.AddFilesOf(pages_, kept);
  pages.Sort();
  files_ = std::move(files);
  pages_ = std::move(pages);
  return Await(MoveDown::kTaken).status();
}

absl::Status MoveSource::Restore(const MoveRestore& restore) {
  MoveUp up;
  *up.mutable_restore() = restore;
  CR_RETURN_IF_ERROR(Write(up));
  return Await(MoveDown::kRestored).status();
}

absl::Status MoveSource::GoOn() {
  MoveUp up;
  up.set_go_on(true);
  absl::Status status = Write(up);
  if (status.ok()) status = Await(MoveDown::kRunning).status();
  if (status.ok()) return status;
  const absl::Status failed = absl::AbortedError(status.message());
  if (failed_there_) return failed;
  // It may have arrived all the same.
  const SettleReply::State state = Settled(stub_.get(), id_, /*decide=*/false);
  if (state == SettleReply::RUNNING) return absl::OkStatus();
  return state == SettleReply::FAILED ? failed : absl::UnavailableError(status.message());
}

}  // namespace cuda_remote::host
