// SPDX-License-Identifier: Apache-2.0
#include "host/sets.h"

#include <errno.h>
#include <grpcpp/grpcpp.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "ckptfmt/file.h"
#include "ckptfmt/folder.h"
#include "ckptfmt/image_store.h"
#include "host/exchange.h"
#include "host/move.grpc.pb.h"
#include "host/move_source.h"
#include "host/wire.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::host {
namespace {

// A host may have large images to remove.
constexpr auto kLookDeadline = std::chrono::seconds(30), kRemoveDeadline = std::chrono::seconds(600);

std::string MemberName(uint32_t part) { return "member-" + std::to_string(part); }

// Frees what no image of the part needs any more in data files that several have. Only what is signed is believed.
absl::Status FreeSpace(const checkpoint::Account& account, const Key& key, const std::string& folder, uint32_t part) {
  CR_ASSIGN_OR_RETURN(const ckptfmt::OpenedFolder opened, ckptfmt::OpenedFolder::Open(ckptfmt::ImagePath(folder)));
  CR_ASSIGN_OR_RETURN(const std::vector<std::string> names, ckptfmt::NamesIn(opened));
  ckptfmt::UnusedSpace unused;
  for (const std::string& name : names) {
    if (!ckptfmt::IsStoreImage(name)) continue;
    const auto set = opened.OpenBelow(name);
    if (!set.ok()) continue;
    const auto image = set->OpenBelow(MemberName(part));
    if (!image.ok()) continue;
    const auto statement = ReadStatement(image->fd(), image->path(), account, key);
    if (!statement.ok() || statement->chunks().empty()) continue;
    const auto index = ReadSignedIndex(image->fd(), image->path(), account, *statement);
    if (index.ok()) unused.Keep(*image, *index);
  }
  return unused.Free();
}

}  // namespace

SetsReply ListSets(const checkpoint::Account& account, const Key& key, const std::string& folder, uint32_t part) {
  const checkpoint::ActAs user(&account);
  SetsReply reply;
  reply.set_is_one(ckptfmt::IsImage(folder + "/" + MemberName(part)));
  const auto opened = ckptfmt::OpenedFolder::Open(ckptfmt::ImagePath(folder));
  const auto names =
      opened.ok() ? ckptfmt::NamesIn(*opened) : absl::StatusOr<std::vector<std::string>>(opened.status());
  if (!names.ok()) return reply;
  std::map<uint64_t, std::string> sets;
  bool partial = false;
  for (const std::string& name : *names) {
    const uint64_t number = ckptfmt::StoreImageNumber(name, &partial);
    if (number != 0 && !partial) sets[number] = name;
  }
  for (const auto& [number, name] : sets) {
    ImageSet* const set = reply.add_sets();
    set->set_number(number);
    const auto image = opened->OpenBelow(name + "/" + MemberName(part));
    if (!image.ok() || !ckptfmt::IsImage(image->path())) continue;
    const auto statement = ReadStatement(image->fd(), image->path(), account, key);
    if (!statement.ok()) continue;
    set->set_id(statement->group());
    set->set_whole_job(statement->whole_job());
  }
  return reply;
}

absl::Status RemoveSets(const checkpoint::Account& account, const Key& key, const std::string& folder, uint32_t part,
                        const std::vector<uint64_t>& numbers) {
  const checkpoint::ActAs user(&account);
  for (const uint64_t number : numbers) {
    const std::string set = folder + "/" + ckptfmt::StoreImageName(number);
    for (const std::string& name : {MemberName(part), MemberName(part) + ".partial"}) {
      auto image = ckptfmt::OpenedFolder::Open(set + "/" + name);
      if (image.ok()) CR_RETURN_IF_ERROR(ckptfmt::RemoveUnused(&*image).status());
    }
    rmdir(set.c_str());  // with the last part
  }
  return numbers.empty() ? absl::OkStatus() : FreeSpace(account, key, folder, part);
}

std::vector<std::string> EarlierInSets(const std::string& image, const std::vector<uint64_t>& numbers) {
  const size_t member = image.rfind('/'), set = member == 0 ? member : image.rfind('/', member - 1);
  std::vector<std::string> paths;
  for (const uint64_t number : numbers) {
    paths.push_back(image.substr(0, set + 1) + ckptfmt::StoreImageName(number) + image.substr(member));
  }
  return paths;
}

std::vector<uint64_t> CompleteSets(const std::vector<SetsReply>& hosts, const std::string& job) {
  std::vector<uint64_t> complete;
  if (hosts.empty()) return complete;
  for (const ImageSet& set : hosts[0].sets()) {
    const auto has_it = [&](const SetsReply& host) {
      return std::any_of(host.sets().begin(), host.sets().end(),
                         [&](const ImageSet& one) { return one.number() == set.number() && one.id() == set.id(); });
    };
    const bool is_of_job = job.empty() || set.whole_job() == job;
    if (!set.id().empty() && is_of_job && std::all_of(hosts.begin(), hosts.end(), has_it))
      complete.push_back(set.number());
  }
  return complete;
}

std::vector<uint64_t> OldSets(const SetsReply& host, const std::vector<uint64_t>& complete, const std::string& job,
                              size_t keep) {
  std::vector<uint64_t> old;
  if (complete.size() < keep) return old;
  const uint64_t oldest = complete[complete.size() - keep];
  for (const ImageSet& set : host.sets()) {
    if (set.number() < oldest && (set.id().empty() || set.whole_job() == job)) old.push_back(set.number());
  }
  return old;
}

absl::Status Sets::Ask(size_t part, const std::vector<uint64_t>& remove) {
  const std::string& host = parts_[part].host;
  CR_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, HostsChannel(host, tls_));
  SetsBegin begin;
  begin.set_version(kVersion);
  *begin.mutable_user() = user_;
  begin.set_folder(folder_);
  begin.set_part(uint32_t(part + 1));
  *begin.mutable_remove() = {remove.begin(), remove.end()};
  SignedSets request;
  request.set_begin(begin.SerializeAsString());
  request.set_code(key_.CodeOf(kSetsText + request.begin()));
  grpc::ClientContext context;
  context.set_deadline(WallNow() + (remove.empty() ? kLookDeadline : kRemoveDeadline));
  const grpc::Status status = Hosts::NewStub(channel)->Sets(&context, request, &hosts_[part]);
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      return absl::OkStatus();
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::FAILED_PRECONDITION:
      return absl::FailedPreconditionError(host + ": " + status.error_message());
    case grpc::StatusCode::UNIMPLEMENTED:
      return absl::UnimplementedError(host +
                                      ": its cr-hostd knows no sets of images; install the same version on all hosts");
    default:
      return absl::UnavailableError("the cr-hostd of " + host + " does not answer: " + status.error_message());
  }
}

absl::Status Sets::Look() {
  hosts_.assign(parts_.size(), {});
  for (size_t i = 0; i < parts_.size(); ++i) CR_RETURN_IF_ERROR(Ask(i, {}));
  return absl::OkStatus();
}

bool Sets::IsOne() const {
  return std::any_of(hosts_.begin(), hosts_.end(), [](const SetsReply& host) { return host.is_one(); });
}

absl::StatusOr<std::string> Sets::Next() const {
  if (IsOne()) {
    return absl::FailedPreconditionError(
        folder_ +
        " has the images of one checkpoint (member-1, ...); choose another folder to keep several in, or "
        "leave out --keep");
  }
  uint64_t last = 0;
  for (const SetsReply& host : hosts_) {
    for (const ImageSet& set : host.sets()) last = std::max(last, set.number());
  }
  return folder_ + "/" + ckptfmt::StoreImageName(last + 1);
}

absl::StatusOr<std::string> Sets::Newest() const {
  const std::vector<uint64_t> complete = CompleteSets(hosts_, "");
  if (IsOne()) return folder_;
  if (!complete.empty()) return folder_ + "/" + ckptfmt::StoreImageName(complete.back());
  std::string what;
  bool any = false;
  for (size_t i = 0; i < hosts_.size(); ++i) {
    std::string numbers;
    for (const ImageSet& set : hosts_[i].sets()) {
      if (!set.id().empty()) numbers += " " + ckptfmt::StoreImageName(set.number());
    }
    any = any || !numbers.empty();
    what += (i > 0 ? "; " : "") + parts_[i].host + " has" + (numbers.empty() ? " none" : numbers);
  }
  if (!any) return folder_;
  return absl::NotFoundError("no set of images in " + folder_ + " is complete on these hosts: " + what);
}

absl::Status Sets::Prune(const std::string& job, size_t keep) {
  CR_RETURN_IF_ERROR(Look());
  const std::vector<uint64_t> complete = CompleteSets(hosts_, job);
  for (size_t i = 0; i < parts_.size(); ++i) {
    const std::vector<uint64_t> old = OldSets(hosts_[i], complete, job, keep);
    if (!old.empty()) CR_RETURN_IF_ERROR(Ask(i, old));
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::host
