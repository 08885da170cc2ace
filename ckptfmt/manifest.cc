// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/manifest.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ckptfmt/envelope.h"
#include "ckptfmt/manifest.pb.h"

namespace cuda_remote::ckptfmt {
namespace {

constexpr uint32_t kMagic = 0x4d465243;  // "CRFM"

bool SafePath(const std::string& path) {
  if (path.size() > 4096 || path.find('\0') != std::string::npos) return false;
  if (!absl::StartsWith(path, "processes/") && !absl::StartsWith(path, "memory/") &&
      !absl::StartsWith(path, "client/")) {
    return false;
  }
  for (const absl::string_view part : absl::StrSplit(path, '/')) {
    if (part.empty() || part == "." || part == "..") return false;
  }
  return true;
}

void EncodeDevice(const DeviceFacts& from, Device* device) {
  device->set_name(from.name);
  device->set_uuid(from.uuid);
  device->set_compute_major(from.compute_major);
  device->set_compute_minor(from.compute_minor);
  device->set_total_memory(from.total_memory);
  device->set_pci_bus_id(from.pci_bus_id);
}

ProcessInfo DecodeProcess(const Process& from) {
  ProcessInfo process;
  process.pid = from.pid();
  process.program = from.program();
  process.server = from.server();
  process.driver_version = from.driver_version();
  for (const Device& one : from.devices()) {
    DeviceFacts device;
    device.name = one.name();
    device.uuid = one.uuid();
    device.compute_major = one.compute_major();
    device.compute_minor = one.compute_minor();
    device.total_memory = one.total_memory();
    device.pci_bus_id = one.pci_bus_id();
    process.devices.push_back(std::move(device));
  }
  process.next_sequence = from.next_sequence();
  process.wire_version = from.wire_version();
  process.session = from.session();
  process.shared_memory = from.shared_memory();
  process.log_records = from.log_records();
  process.driver_settings = from.driver_settings();
  process.log_images = from.log_images();
  return process;
}

}  // namespace

bool IsDataFile(std::string_view path) {
  constexpr std::string_view kStart = "memory/data-";
  return path.size() > kStart.size() && path.substr(0, kStart.size()) == kStart &&
         path.find_first_not_of("0123456789", kStart.size()) == std::string_view::npos;
}

std::string LogName(size_t process) { return absl::StrCat(kProcessesFolder, "/", process, "/log"); }

std::string EncodeManifest(const ImageInfo& info, std::vector<FileRecord> files) {
  Manifest manifest;
  manifest.set_product_version(info.product_version);
  manifest.set_created_unix_ms(info.created_unix_ms);
  manifest.set_host(info.host);
  manifest.set_job(info.job);
  manifest.set_program(info.program);
  manifest.set_pid(info.pid);
  manifest.set_job_folder(info.job_folder);
  for (const ProcessInfo& from : info.processes) {
    Process* const process = manifest.add_processes();
    process->set_pid(from.pid);
    process->set_program(from.program);
    process->set_server(from.server);
    process->set_driver_version(from.driver_version);
    for (const DeviceFacts& device : from.devices) EncodeDevice(device, process->add_devices());
    process->set_next_sequence(from.next_sequence);
    process->set_wire_version(from.wire_version);
    process->set_session(from.session);
    process->set_shared_memory(from.shared_memory);
    process->set_driver_settings(from.driver_settings);
    process->set_log_records(from.log_records);
    process->set_log_images(from.log_images);
  }
  manifest.set_engine(info.engine);
  for (const auto& [key, value] : info.client_info) (*manifest.mutable_client_info())[key] = value;
  if (!info.needs.kernel.empty() || !info.needs.engine_version.empty() || !info.needs.files.empty()) {
    Needed* const needs = manifest.mutable_needs();
    needs->set_kernel(info.needs.kernel);
    needs->set_engine_version(info.needs.engine_version);
    for (const NeededFile& from : info.needs.files) {
      NeededPath* const file = needs->add_files();
      file->set_path(from.path);
      file->set_bytes(from.bytes);
      file->set_build_id(from.build_id);
      file->set_kept(from.kept);
      file->set_written(from.written);
    }
  }
  std::sort(files.begin(), files.end(), [](const FileRecord& a, const FileRecord& b) { return a.path < b.path; });
  for (const FileRecord& from : files) {
    File* file = manifest.add_files();
    file->set_path(from.path);
    file->set_bytes(from.bytes);
    if (from.has_hash) file->set_hash(ToBytes(from.hash));
    file->set_mode(from.mode);
    for (const uint64_t block : from.blocks) file->add_blocks(block);
  }
  return Seal<ManifestFile>(kMagic, Serialize(manifest),
                            [](ManifestFile* file, const std::string& contents) { file->set_manifest(contents); });
}

absl::Status DecodeManifest(std::string_view bytes, const std::string& name, ImageInfo* info,
                            std::vector<FileRecord>* files) {
  const auto damaged = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat(name, " is damaged: ", what));
  };
  if (bytes.size() > kMaxManifestBytes) return damaged("too long");
  uint32_t version = 0;
  ManifestFile in;
  const absl::Status status = Unseal<ManifestFile>(
      bytes, name, kMagic, [](const ManifestFile& file) -> const std::string& { return file.manifest(); }, &in,
      &version);
  if (!status.ok()) return status;
  Manifest manifest;
  if (!manifest.ParseFromString(in.manifest())) return damaged("its contents cannot be parsed");

  *info = {};
  info->format_version = version;
  info->product_version = manifest.product_version();
  info->created_unix_ms = manifest.created_unix_ms();
  info->host = manifest.host();
  info->job = manifest.job();
  info->program = manifest.program();
  info->pid = manifest.pid();
  info->job_folder = manifest.job_folder();
  for (const Process& from : manifest.processes()) info->processes.push_back(DecodeProcess(from));
  info->engine = manifest.engine();
  info->client_info = {manifest.client_info().begin(), manifest.client_info().end()};
  info->needs.kernel = manifest.needs().kernel();
  info->needs.engine_version = manifest.needs().engine_version();
  for (const NeededPath& from : manifest.needs().files()) {
    if (!from.kept().empty() && !SafePath(from.kept())) return damaged("a copy's path is not allowed");
    info->needs.files.push_back({from.path(), from.bytes(), from.build_id(), from.kept(), from.written()});
  }
  files->clear();
  for (const File& from : manifest.files()) {
    FileRecord file;
    file.path = from.path();
    file.bytes = from.bytes();
    file.mode = from.mode() & 07777;
    file.blocks = {from.blocks().begin(), from.blocks().end()};
    if (!SafePath(file.path)) return damaged("it lists a file with a path that is not allowed");
    if (!files->empty() && files->back().path >= file.path) return damaged("its files are not in order");
    file.has_hash = !IsDataFile(file.path);
    if (file.has_hash ? !FromBytes(from.hash(), &file.hash) : !from.hash().empty()) return damaged("a file's checksum");
    if (!file.has_hash) {
      if (!file.blocks.empty()) return damaged("a file's block checksums");
    } else if (file.blocks.size() != file.bytes / kBlockBytes + (file.bytes % kBlockBytes != 0)) {
      return damaged("a file's block checksums");
    }
    files->push_back(std::move(file));
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::ckptfmt
