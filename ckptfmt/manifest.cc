#include "ckptfmt/manifest.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ckptfmt/manifest.pb.h"

namespace cuda_remote::ckptfmt {
namespace {

constexpr uint32_t kMagic = 0x4d465243;

template <typename Message>
std::string Serialize(const Message& message) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    message.SerializeToCodedStream(&coded);
  }
  return bytes;
}

// The version is part of what the checksum covers, so damage to it does not pass for a newer image.
Hash HashOfManifest(uint32_t version, const std::string& manifest) {
  Hasher hasher;
  std::string head;
  for (const uint32_t number : {kMagic, version}) {
    for (int shift = 0; shift < 32; shift += 8) head += char(number >> shift);
  }
  hasher.Add(head);
  hasher.Add(manifest);
  return hasher.Get();
}

bool SafePath(const std::string& path) {
  if (path.size() > 4096 || path.find('\0') != std::string::npos) return false;
  if (path != kLogName && !absl::StartsWith(path, "memory/") && !absl::StartsWith(path, "client/")) return false;
  for (const absl::string_view part : absl::StrSplit(path, '/')) {
    if (part.empty() || part == "." || part == "..") return false;
  }
  return true;
}

}  // namespace

std::string EncodeManifest(const ImageInfo& info, std::vector<FileRecord> files) {
  Manifest manifest;
  manifest.set_product_version(info.product_version);
  manifest.set_created_unix_ms(info.created_unix_ms);
  manifest.set_host(info.host);
  manifest.set_job(info.job);
  manifest.set_program(info.program);
  manifest.set_pid(info.pid);
  manifest.set_server(info.server);
  manifest.set_driver_version(info.driver_version);
  for (const DeviceFacts& from : info.devices) {
    Device* device = manifest.add_devices();
    device->set_name(from.name);
    device->set_uuid(from.uuid);
    device->set_compute_major(from.compute_major);
    device->set_compute_minor(from.compute_minor);
    device->set_total_memory(from.total_memory);
    device->set_pci_bus_id(from.pci_bus_id);
  }
  manifest.set_next_sequence(info.next_sequence);
  manifest.set_wire_version(info.wire_version);
  manifest.set_session(info.session);
  manifest.set_shared_memory(info.shared_memory);
  manifest.set_log_records(info.log_records);
  manifest.set_log_images(info.log_images);
  manifest.set_engine(info.engine);
  for (const auto& [key, value] : info.client_info) (*manifest.mutable_client_info())[key] = value;
  std::sort(files.begin(), files.end(), [](const FileRecord& a, const FileRecord& b) { return a.path < b.path; });
  for (const FileRecord& from : files) {
    File* file = manifest.add_files();
    file->set_path(from.path);
    file->set_bytes(from.bytes);
    file->set_hash(ToBytes(from.hash));
    file->set_mode(from.mode);
    for (const uint64_t block : from.blocks) file->add_blocks(block);
  }
  ManifestFile out;
  out.set_magic(kMagic);
  out.set_format_version(kFormatVersion);
  out.set_manifest(Serialize(manifest));
  out.set_hash(ToBytes(HashOfManifest(kFormatVersion, out.manifest())));
  return Serialize(out);
}

absl::Status DecodeManifest(std::string_view bytes, const std::string& name, ImageInfo* info,
                            std::vector<FileRecord>* files) {
  const auto damaged = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat(name, " is damaged: ", what));
  };
  if (bytes.size() > kMaxManifestBytes) return damaged("too long");
  ManifestFile in;
  if (!in.ParseFromArray(bytes.data(), int(bytes.size()))) return damaged("it cannot be parsed");
  if (in.magic() != kMagic) return damaged("it does not start as a manifest");
  Hash expected;
  if (!FromBytes(in.hash(), &expected) || HashOfManifest(in.format_version(), in.manifest()) != expected) {
    return damaged("its checksum is wrong");
  }
  if (in.format_version() != kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        name, ": the image has format version ", in.format_version(), ", this program reads version ", kFormatVersion,
        in.format_version() > kFormatVersion ? "; use the cuda-remote that wrote it, or a newer one" : ""));
  }
  // There is one way to write the file: what else the parser accepts is damage that it did not see.
  in.DiscardUnknownFields();
  if (Serialize(in) != bytes) return damaged("it has bytes that do not belong there");
  Manifest manifest;
  if (!manifest.ParseFromString(in.manifest())) return damaged("its contents cannot be parsed");

  *info = {};
  info->product_version = manifest.product_version();
  info->created_unix_ms = manifest.created_unix_ms();
  info->host = manifest.host();
  info->job = manifest.job();
  info->program = manifest.program();
  info->pid = manifest.pid();
  info->server = manifest.server();
  info->driver_version = manifest.driver_version();
  for (const Device& from : manifest.devices()) {
    DeviceFacts device;
    device.name = from.name();
    device.uuid = from.uuid();
    device.compute_major = from.compute_major();
    device.compute_minor = from.compute_minor();
    device.total_memory = from.total_memory();
    device.pci_bus_id = from.pci_bus_id();
    info->devices.push_back(std::move(device));
  }
  info->next_sequence = manifest.next_sequence();
  info->wire_version = manifest.wire_version();
  info->session = manifest.session();
  info->shared_memory = manifest.shared_memory();
  info->log_records = manifest.log_records();
  info->log_images = manifest.log_images();
  info->engine = manifest.engine();
  info->client_info = {manifest.client_info().begin(), manifest.client_info().end()};
  files->clear();
  for (const File& from : manifest.files()) {
    FileRecord file;
    file.path = from.path();
    file.bytes = from.bytes();
    file.mode = from.mode() & 07777;
    file.blocks = {from.blocks().begin(), from.blocks().end()};
    if (!SafePath(file.path)) return damaged("it lists a file with a path that is not allowed");
    if (!files->empty() && files->back().path >= file.path) return damaged("its files are not in order");
    if (!FromBytes(from.hash(), &file.hash)) return damaged("a file's checksum");
    if (file.blocks.size() != file.bytes / kBlockBytes + (file.bytes % kBlockBytes != 0)) {
      return damaged("a file's block checksums");
    }
    files->push_back(std::move(file));
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::ckptfmt
