// SPDX-License-Identifier: Apache-2.0
#include "replay/inspect/summary.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/api/call_names.gen.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "replay/replayer/replayer.h"

namespace cuda_remote::replay::inspect {
namespace {

Module Describe(const Record& record, const std::string& image) {
  Module module;
  module.object = record.object;
  module.call = CallIdName(record.header.call);
  module.hash = ToHex(*record.image);
  module.bytes = image.size();
  StatusOr<ParsedImage> parsed = ListEntries(image);
  if (!parsed.ok()) {
    module.problem = parsed.status().message();
    return module;
  }
  module.entries = std::move(parsed->entries);
  std::vector<DataSymbol> symbols;
  if (const Status found = DataSymbols(image, {}, &symbols); !found.ok()) {
    module.problem = found.message();
    return module;
  }
  for (const DataSymbol& symbol : symbols) {
    if (symbol.literal) continue;
    ++module.variables;
    module.data_bytes += symbol.size;
  }
  return module;
}

// How a region is found again in another image.
using RegionName = std::tuple<uint32_t, uint32_t, uint64_t, uint64_t, std::string, uint64_t, uint32_t>;

RegionName NameOfRegion(const ckptfmt::Region& region) {
  const bool by_address = region.kind == ckptfmt::RegionKind::kAllocation;
  return {region.process, uint32_t(region.kind), by_address ? region.address : 0, region.object, region.symbol,
          region.context, region.module_index};
}

std::string Print(const ckptfmt::Region& region) {
  if (region.kind == ckptfmt::RegionKind::kAllocation) return absl::StrCat("memory at ", Hex(region.address));
  if (region.kind == ckptfmt::RegionKind::kHeap) {
    return absl::StrCat("the kernels' heap at ", Hex(region.address));
  }
  if (region.kind == ckptfmt::RegionKind::kArray) return absl::StrCat("array ", Hex(region.object));
  return absl::StrCat("variable ", region.symbol, " of ", Hex(region.object));
}

void CompareRegions(const Summary& a, const Summary& b, std::vector<std::string>* differences) {
  std::map<RegionName, size_t> in_b;
  const auto& regions_a = a.reader->regions();
  const auto& regions_b = b.reader->regions();
  for (size_t i = 0; i < regions_b.size(); ++i) in_b.emplace(NameOfRegion(regions_b[i]), i);
  for (size_t i = 0; i < regions_a.size(); ++i) {
    const auto found = in_b.find(NameOfRegion(regions_a[i]));
    const std::string name = Print(regions_a[i]);
    if (found == in_b.end()) {
      differences->push_back(absl::StrCat(name, " (", regions_a[i].bytes, " bytes): only in the first"));
      continue;
    }
    const size_t j = found->second;
    in_b.erase(found);
    if (regions_a[i].bytes != regions_b[j].bytes) {
      differences->push_back(
          absl::StrCat(name, ": ", regions_a[i].bytes, " bytes, ", regions_b[j].bytes, " in the second"));
      continue;
    }
    const auto chunks_a = a.reader->ChunksOf(i);
    const auto chunks_b = b.reader->ChunksOf(j);
    size_t different = 0;
    uint64_t first = 0;
    for (size_t c = 0; c < chunks_a.size(); ++c) {
      if (chunks_a[c].zero == chunks_b[c].zero && chunks_a[c].hash == chunks_b[c].hash) continue;
      if (different++ == 0) first = chunks_a[c].offset;
    }
    if (different) {
      differences->push_back(absl::StrCat(name, " (", regions_a[i].bytes, " bytes): ", different, " of ",
                                          chunks_a.size(), " chunks differ, the first at offset ", first));
    }
  }
  for (const auto& [name, j] : in_b) {
    differences->push_back(absl::StrCat(Print(regions_b[j]), " (", regions_b[j].bytes, " bytes): only in the second"));
  }
}

// A record without what depends on the run: its order number.
std::string Essence(const Record& record) {
  std::string text =
      absl::StrCat(CallIdName(record.header.call), record.modifies ? " (setting) of " : " of ", Hex(record.object.id));
  text += '\0';
  text += absl::StrCat(record.header.context_or_result, "/", record.key, "/", record.image ? ToHex(*record.image) : "",
                       "/");
  return text + record.message + '\0' + record.reply;
}

void CompareLogs(const Log& a, const Log& b, std::vector<std::string>* differences) {
  std::multiset<std::string> in_b;
  for (const Record* record : b.InOrder()) in_b.insert(Essence(*record));
  const auto add = [&](const std::string& essence, const char* where) {
    differences->push_back(absl::StrCat("record ", essence.substr(0, essence.find('\0')), ": only in the ", where));
  };
  for (const Record* record : a.InOrder()) {
    const std::string essence = Essence(*record);
    const auto found = in_b.find(essence);
    if (found == in_b.end()) {
      add(essence, "first");
    } else {
      in_b.erase(found);
    }
  }
  for (const std::string& essence : in_b) add(essence, "second");
}

// The versions of the drivers that the processes used.
std::string Drivers(const ckptfmt::ImageInfo& info) {
  std::string text;
  for (const ckptfmt::ProcessInfo& process : info.processes) {
    absl::StrAppend(&text, text.empty() ? "" : " ", process.driver_version);
  }
  return text;
}

}  // namespace

absl::StatusOr<Summary> Load(const std::string& dir) {
  Summary summary;
  absl::StatusOr<std::unique_ptr<ckptfmt::ImageReader>> reader = ckptfmt::ImageReader::Open(dir);
  if (!reader.ok()) return reader.status();
  summary.reader = *std::move(reader);
  const ckptfmt::ImageInfo& info = summary.reader->info();
  summary.logs.resize(info.processes.size());
  for (size_t i = 0; i < info.processes.size(); ++i) {
    CR_ASSIGN_OR_RETURN(const std::string bytes, summary.reader->ReadLog(i));
    StatusOr<Log> parsed = Log::Parse(bytes);
    if (!parsed.ok()) {
      return absl::DataLossError(
          absl::StrCat(summary.reader->dir(), "/", summary.reader->LogPath(i), ": ", parsed.status().message()));
    }
    summary.logs[i] = *std::move(parsed);
    const Log& log = summary.logs[i];
    for (const Record* record : log.InOrder()) {
      ++summary.records_by_call[CallIdName(record->header.call)];
      // What a captured graph consists of is kept as an image too.
      if (record->image && record->header.call != kOpGraphCapture) {
        summary.modules.push_back(Describe(*record, *log.FindImage(*record->image)));
        summary.modules.back().process = i;
      }
    }
    for (const std::string& call : NotReplayable(log)) {
      summary.not_replayable.push_back(
          info.processes.size() == 1 ? call : absl::StrCat(call, " of process ", info.processes[i].pid));
    }
  }
  return summary;
}

absl::Status Verify(const Summary& summary, const ckptfmt::Progress& progress) {
  return summary.reader->Verify(progress);
}

Fit FitOf(const Module& module, uint32_t arch) {
  Fit fit;
  uint32_t best = 0;
  for (const ImageEntry& entry : module.entries) {
    if (!CanRun(entry, arch)) continue;
    const uint32_t rank = entry.arch + (entry.kind == ImageEntry::kSass ? 1u << 16 : 0);
    if (fit.runs && rank <= best) continue;
    best = rank;
    fit = {true, NameOf(entry)};
  }
  return fit;
}

uint32_t ParseArch(const std::string& text) {
  std::string digits = text;
  for (const char* prefix : {"sm_", "compute_"}) {
    if (digits.compare(0, std::string(prefix).size(), prefix) == 0) digits.erase(0, std::string(prefix).size());
  }
  if (const size_t dot = digits.find('.'); dot != std::string::npos) {
    if (digits.size() != dot + 2) return 0;
    digits.erase(dot, 1);
  }
  if (digits.size() > 2 && (digits.back() == 'a' || digits.back() == 'f')) digits.pop_back();
  if (digits.size() < 2 || digits.size() > 3 || digits.find_first_not_of("0123456789") != std::string::npos) return 0;
  return uint32_t(atoi(digits.c_str()));
}

std::vector<std::string> Compare(const Summary& a, const Summary& b) {
  std::vector<std::string> differences;
  const auto statement = [&](const char* what, const std::string& in_a, const std::string& in_b) {
    if (in_a != in_b) differences.push_back(absl::StrCat(what, ": ", in_a, ", ", in_b, " in the second"));
  };
  const ckptfmt::ImageInfo& info_a = a.reader->info();
  const ckptfmt::ImageInfo& info_b = b.reader->info();
  statement("program", info_a.program, info_b.program);
  statement("engine", info_a.engine, info_b.engine);
  statement("processes", absl::StrCat(info_a.processes.size()), absl::StrCat(info_b.processes.size()));
  statement("driver version", Drivers(info_a), Drivers(info_b));
  CompareRegions(a, b, &differences);
  for (size_t i = 0; i < a.logs.size() && i < b.logs.size(); ++i) CompareLogs(a.logs[i], b.logs[i], &differences);
  return differences;
}

}  // namespace cuda_remote::replay::inspect
