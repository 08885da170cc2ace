// SPDX-License-Identifier: Apache-2.0
// Writes an image as format version 1 had it, as the releases of that time did: version1 IMAGE OUT
// IMAGE is of a job with one process that uses CUDA. ckptfmt/FORMAT.md and replay/log/README.md specify version 1.
#include <stdio.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

#include "ckptfmt/envelope.h"
#include "ckptfmt/image_reader.h"
#include "ckptfmt/index.h"
#include "ckptfmt/manifest.h"
#include "ckptfmt/manifest.pb.h"
#include "proto/frame/frame.h"
#include "replay/log/log.pb.h"

namespace {

namespace fs = std::filesystem;
using cuda_remote::FrameHeader;
using namespace cuda_remote::ckptfmt;

constexpr size_t kBlock = 2 << 20;
constexpr uint32_t kManifestMagic = 0x4d465243;

void Check(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(what);
}

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  Check(bool(file), path.c_str());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void WriteFile(const fs::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  Check(bool(file.write(bytes.data(), std::streamsize(bytes.size())).flush()), path.c_str());
}

template <typename... Numbers>
void Put(std::string* out, Numbers... numbers) {
  (out->append(reinterpret_cast<const char*>(&numbers), sizeof(numbers)), ...);
}

void Pad(std::string* out) { out->append((8 - out->size() % 8) % 8, '\0'); }

// The trailer of logs and indexes: the low half first.
void PutHash(std::string* out) {
  const XXH128_hash_t hash = XXH3_128bits(out->data(), out->size());
  Put(out, hash.low64, hash.high64);
}

// Reads a log of version 2.
class LogReader {
 public:
  explicit LogReader(const std::string& bytes) : bytes_(bytes) {}
  std::string Take(size_t count) {
    Check(bytes_.size() - at_ >= count, "the log is too short");
    at_ += count;
    return bytes_.substr(at_ - count, count);
  }
  std::string TakePadded(size_t count) {
    std::string taken = Take(count);
    Take((8 - at_ % 8) % 8);
    return taken;
  }
  template <typename Message>
  Message TakeHeader() {
    uint32_t size = 0;
    memcpy(&size, Take(sizeof(size)).data(), sizeof(size));
    Message message;
    Check(message.ParseFromString(TakePadded(size)), "a header of the log");
    return message;
  }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
};

std::string LogOfVersion1(const std::string& bytes) {
  LogReader reader(bytes);
  std::string out = reader.Take(8);  // CRREPLAY
  reader.Take(4);
  const auto header = reader.TakeHeader<cuda_remote::replay::LogHeader>();
  Put(&out, uint32_t(1), uint32_t(0), header.images(), header.records(), header.next_order());
  const size_t size_at = out.size();
  Put(&out, uint64_t(0));
  for (uint64_t i = 0; i < header.images(); ++i) {
    const auto image = reader.TakeHeader<cuda_remote::replay::ImageHeader>();
    out += image.hash();
    Put(&out, image.bytes());
    out += reader.TakePadded(size_t(image.bytes()));
    Pad(&out);
  }
  for (uint64_t i = 0; i < header.records(); ++i) {
    const auto record = reader.TakeHeader<cuda_remote::replay::RecordHeader>();
    Put(&out, uint8_t(record.kind()), uint8_t(record.modifies()), uint8_t(!record.image().empty()), uint8_t(0),
        uint32_t(record.dependencies_size()), record.id(), record.key(), record.order());
    out += record.image().empty() ? std::string(16, '\0') : record.image();
    Put(&out, record.reply_bytes(), uint32_t(0));
    for (const auto& one : record.dependencies()) Put(&out, uint64_t(one.kind()), one.id());
    FrameHeader frame;
    frame.call = record.call();
    frame.context_or_result = record.context();
    frame.message_bytes = record.message_bytes();
    Put(&out, frame);
    out += reader.TakePadded(record.message_bytes());
    Pad(&out);
    out += reader.TakePadded(record.reply_bytes());
    Pad(&out);
  }
  const uint64_t size = out.size() + 16;
  memcpy(&out[size_at], &size, sizeof(size));
  PutHash(&out);
  return out;
}

std::string IndexOfVersion1(const Index& index) {
  std::string out = "CRMEMIDX";
  Put(&out, uint32_t(1), uint32_t(kBlock), uint64_t(index.chunks.size()), uint64_t(index.regions.size()),
      uint32_t(index.data_files.size()), uint32_t(0));
  const size_t size_at = out.size();
  Put(&out, uint64_t(0));
  for (const StoredChunk& chunk : index.chunks) {
    Put(&out, chunk.hash.low, chunk.hash.high, chunk.offset, chunk.file, uint32_t(chunk.encoding), chunk.stored_bytes,
        chunk.bytes);
  }
  for (const IndexedRegion& one : index.regions) {
    const Region& region = one.region;
    Put(&out, region.address, region.bytes, region.object, region.context, region.flags, uint32_t(region.kind),
        int32_t(region.device), uint32_t(region.module_index), uint32_t(region.symbol.size()));
    out += region.symbol;
    Pad(&out);
    for (const uint32_t chunk : one.chunks) Put(&out, chunk);
    Pad(&out);
  }
  const uint64_t size = out.size() + 16;
  memcpy(&out[size_at], &size, sizeof(size));
  PutHash(&out);
  return out;
}

// The job's facts had those of CRIU among them.
std::string JobOfVersion1(const std::string& job, const std::string& engine) {
  Check(job.size() > 2 && job.back() == '}' && engine.size() > 2 && engine[0] == '{', "the image's facts");
  return job.substr(0, job.size() - 1) + "," + engine.substr(1);
}

std::string ManifestOfVersion1(const std::string& bytes, const fs::path& folder) {
  ManifestFile file;
  Manifest manifest;
  Check(file.ParseFromString(bytes) && manifest.ParseFromString(file.manifest()), "the manifest");
  Check(manifest.processes_size() == 1, "it has not one process with CUDA");
  const Process process = manifest.processes(0);
  manifest.set_server(process.server());
  manifest.set_driver_version(process.driver_version());
  *manifest.mutable_devices() = process.devices();
  manifest.set_next_sequence(process.next_sequence());
  manifest.set_wire_version(process.wire_version());
  manifest.set_session(process.session());
  manifest.set_shared_memory(process.shared_memory());
  manifest.set_log_records(process.log_records());
  manifest.set_log_images(process.log_images());
  auto& said = *manifest.mutable_client_info();
  const std::string job = JobOfVersion1(said["job"], said[manifest.engine()]);
  said.clear();
  said["job"] = job;
  manifest.clear_processes();
  manifest.clear_needs();
  manifest.clear_job_folder();
  manifest.clear_files();
  std::map<std::string, fs::path> files;
  for (const auto& one : fs::recursive_directory_iterator(folder)) {
    if (one.is_regular_file()) files[fs::relative(one.path(), folder)] = one.path();
  }
  for (const auto& [name, path] : files) {
    const std::string contents = ReadFile(path);
    struct stat facts;
    Check(stat(path.c_str(), &facts) == 0, path.c_str());
    File* const listed = manifest.add_files();
    listed->set_path(name);
    listed->set_bytes(contents.size());
    XXH128_canonical_t hash;
    XXH128_canonicalFromHash(&hash, XXH3_128bits(contents.data(), contents.size()));
    listed->set_hash(hash.digest, sizeof(hash.digest));
    listed->set_mode(facts.st_mode & 07777);
    for (size_t at = 0; at < contents.size(); at += kBlock) {
      listed->add_blocks(XXH3_64bits(contents.data() + at, std::min(kBlock, contents.size() - at)));
    }
  }
  file.set_format_version(1);
  file.set_manifest(Serialize(manifest));
  std::string sealed;
  Put(&sealed, kManifestMagic, uint32_t(1));
  sealed += file.manifest();
  XXH128_canonical_t hash;
  XXH128_canonicalFromHash(&hash, XXH3_128bits(sealed.data(), sealed.size()));
  file.set_hash(hash.digest, sizeof(hash.digest));
  return Serialize(file);
}

void Convert(const fs::path& from, const fs::path& to) {
  const auto image = ImageReader::Open(from);
  Check(image.ok(), "this is no image");
  const auto log = (*image)->ReadLog();
  Check(log.ok(), "its log cannot be read");
  fs::create_directories(to / "memory");
  fs::copy(from / "client", to / "client", fs::copy_options::recursive);
  const Index& index = (*image)->index();
  for (size_t i = 0; i < index.data_files.size(); ++i) {
    fs::copy(from / index.data_files[i], to / DataFileName(uint32_t(i)));
  }
  WriteFile(to / "memory/index", IndexOfVersion1(index));
  WriteFile(to / "log", LogOfVersion1(*log));
  WriteFile(to / "manifest.pb", ManifestOfVersion1(ReadFile(from / "manifest.pb"), to));
}

}  // namespace

int main(int argc, char** argv) try {
  Check(argc == 3, "usage: version1 IMAGE OUT");
  Convert(argv[1], argv[2]);
  return 0;
} catch (const std::exception& error) {
  fprintf(stderr, "version1: %s\n", error.what());
  return 1;
}
