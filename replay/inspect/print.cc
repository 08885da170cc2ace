// SPDX-License-Identifier: Apache-2.0
#include "replay/inspect/print.h"

#include <time.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ckptfmt/needs.h"
#include "proto/base/text.h"
#include "proto/codec/json.h"
#include "proto/codec/text.h"

namespace cuda_remote::replay::inspect {
namespace {

// Lists longer than this are cut, unless all is asked for.
constexpr size_t kShort = 20;

std::string Time(int64_t unix_ms) {
  const time_t seconds = time_t(unix_ms / 1000);
  struct tm parts;
  char text[64] = "?";
  if (gmtime_r(&seconds, &parts)) strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text;
}

std::string Uuid(const std::string& bytes) { return bytes.size() == 16 ? UuidName(bytes) : "unknown"; }

std::string Version(int32_t version) { return absl::StrCat(version / 1000, ".", version % 1000 / 10); }

const char* KindName(ckptfmt::RegionKind kind) {
  switch (kind) {
    case ckptfmt::RegionKind::kAllocation:
      return "allocation";
    case ckptfmt::RegionKind::kModuleSymbol:
      return "module variable";
    case ckptfmt::RegionKind::kHeap:
      return "kernel heap";
    case ckptfmt::RegionKind::kArray:
      return "array";
    case ckptfmt::RegionKind::kLibrarySymbol:
      return "library variable";
  }
  return "?";
}

std::string Row(const std::string& name, const std::string& value) {
  return absl::StrCat("  ", name, std::string(name.size() < 10 ? 10 - name.size() : 1, ' '), value, "\n");
}

// What a restart needs of the machine, a line for each file.
std::string Needs(const ckptfmt::ImageInfo& info, bool all) {
  const ckptfmt::Needs& needs = info.needs;
  std::string out;
  std::vector<std::string> system;
  if (!needs.kernel.empty()) system.push_back(absl::StrCat("Linux ", Printable(needs.kernel)));
  if (!needs.engine_version.empty())
    system.push_back(absl::StrCat(Printable(info.engine), " ", Printable(needs.engine_version)));
  if (!system.empty()) out += Row("made with", absl::StrJoin(system, ", "));
  size_t shown = 0;
  for (const ckptfmt::NeededFile& file : needs.files) {
    if (!file.kept.empty()) {
      out += Row("has", absl::StrCat(Printable(file.path), ", as ", Printable(file.kept)));
    } else if (all || shown++ < kShort) {
      out += Row("needs",
                 absl::StrCat(Printable(file.path), ", ",
                              file.build_id.empty() ? ByteText(file.bytes)
                                                    : absl::StrCat("build id ", ckptfmt::PrintBuildId(file.build_id)),
                              file.written ? " (written by the job)" : ""));
    }
  }
  if (!all && shown > kShort) out += Row("", absl::StrCat("... and ", shown - kShort, " files more (--all)"));
  return out;
}

void AddTexts(const char* key, const std::vector<std::string>& texts, JsonWriter* json) {
  json->Begin(key, '[');
  for (const std::string& text : texts) json->Value(text);
  json->End(']');
}

// The answer to --verify about one image.
void AddVerify(const absl::Status& found, JsonWriter* json) {
  json->Begin("verify", '{');
  json->Member("undamaged", found.ok());
  if (!found.ok()) json->Member("problem", std::string(found.message()));
  json->End('}');
}

std::string Entries(const Module& module) {
  std::vector<std::string> names;
  for (const ImageEntry& entry : module.entries) names.push_back(NameOf(entry));
  return names.empty() ? "no code" : absl::StrJoin(names, ", ");
}

}  // namespace

std::string PrintText(const Summary& summary, bool all) {
  const ckptfmt::ImageReader& reader = *summary.reader;
  const ckptfmt::ImageInfo& info = reader.info();
  const ckptfmt::ImageSizes& sizes = reader.sizes();
  std::string out = absl::StrCat("checkpoint image ", reader.dir(), "\n");
  out += Row("created", absl::StrCat(Time(info.created_unix_ms), " on ", Printable(info.host), " by cuda-remote ",
                                     Printable(info.product_version), ", format ", info.format_version));
  out += Row("job", absl::StrCat(Printable(info.job), " (", Printable(info.program), ", pid ", info.pid, ")"));
  for (size_t p = 0; p < info.processes.size(); ++p) {
    const ckptfmt::ProcessInfo& process = info.processes[p];
    const Log& log = summary.logs[p];
    out += Row("process", absl::StrCat(process.pid, " (", Printable(process.program), "), ", log.records(),
                                       " records, ", log.images(), " module images"));
    out += Row("server", absl::StrCat(Printable(process.server),
                                      process.shared_memory ? " (same machine)" : " (over the network)", ", driver ",
                                      Version(process.driver_version), process.driver_settings.empty() ? "" : ", with ",
                                      Printable(process.driver_settings)));
    for (size_t i = 0; i < process.devices.size(); ++i) {
      const ckptfmt::DeviceFacts& device = process.devices[i];
      out += Row(absl::StrCat("GPU ", i), absl::StrCat(Printable(device.name), ", compute ", device.compute_major, ".",
                                                       device.compute_minor, ", ", ByteText(device.total_memory), ", ",
                                                       Uuid(device.uuid), ", ", Printable(device.pci_bus_id)));
    }
  }
  out += Row("engine", info.engine == "none" ? "none (GPU side only)" : Printable(info.engine));
  // What the engine and the tools have noted for themselves.
  if (all) {
    for (const auto& [key, value] : info.client_info)
      out += Row("", absl::StrCat(Printable(key), " = ", Printable(value)));
  }
  out += Row("size", absl::StrCat(ByteText(sizes.total_bytes), " in ", reader.files().size() + 1, " files: memory ",
                                  ByteText(sizes.stored_bytes), ", client ", ByteText(sizes.client_bytes), ", log ",
                                  ByteText(sizes.log_bytes)));
  if (sizes.linked_bytes > 0) {
    out += Row("", absl::StrCat(ByteText(sizes.linked_bytes), " of memory in files that other images have, too"));
  }
  out += Needs(info, all);
  const auto& regions = reader.regions();
  out += Row("memory", absl::StrCat(ByteText(sizes.region_bytes), " in ", regions.size(),
                                    " regions; not stored: ", ByteText(sizes.zero_bytes), " of zeros, ",
                                    ByteText(sizes.shared_bytes), " equal to other chunks"));
  for (size_t i = 0; i < regions.size() && (all || i < kShort); ++i) {
    const ckptfmt::Region& region = regions[i];
    out += absl::StrCat("    ", Hex(region.address), "  ", ByteText(region.bytes), "  ", KindName(region.kind));
    if (!region.symbol.empty()) absl::StrAppend(&out, " ", Printable(region.symbol), " of ", Hex(region.object));
    absl::StrAppend(&out, ", GPU ", region.device, "\n");
  }
  if (!all && regions.size() > kShort)
    absl::StrAppend(&out, "    ... and ", regions.size() - kShort, " more (--all)\n");
  uint64_t records = 0, images = 0;
  for (const Log& log : summary.logs) {
    records += log.records();
    images += log.images();
  }
  out += Row("log", absl::StrCat(records, " records, ", images, " module images"));
  std::vector<std::pair<std::string, uint64_t>> calls(summary.records_by_call.begin(), summary.records_by_call.end());
  std::stable_sort(calls.begin(), calls.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  for (const auto& [name, count] : calls) absl::StrAppend(&out, "    ", count, "  ", name, "\n");
  out += Row("modules", absl::StrCat(summary.modules.size()));
  for (size_t i = 0; i < summary.modules.size() && (all || i < kShort); ++i) {
    const Module& module = summary.modules[i];
    absl::StrAppend(&out, "    ", Hex(module.object.id), "  ", ByteText(module.bytes), "  ", Entries(module), "; ",
                    module.variables, " variables, ", ByteText(module.data_bytes));
    if (!module.problem.empty()) absl::StrAppend(&out, "; ", Printable(module.problem));
    out += "\n";
  }
  if (!all && summary.modules.size() > kShort) {
    absl::StrAppend(&out, "    ... and ", summary.modules.size() - kShort, " more (--all)\n");
  }
  for (const std::string& name : summary.not_replayable) out += Row("warning", name + " cannot be replayed");
  if (all) {
    out += Row("files", "");
    for (const ckptfmt::FileFacts& file : reader.files()) {
      absl::StrAppend(&out, "    ", file.hash, "  ", file.bytes, "  ", Printable(file.path), "\n");
    }
  }
  return out;
}

std::string PrintStore(const ckptfmt::StoreListing& store, int64_t now_ms) {
  std::string out =
      absl::StrCat("store ", store.path, ": ", store.images.size(), store.images.size() == 1 ? " image, " : " images, ",
                   ByteText(store.total_bytes), "\n");
  std::vector<std::vector<std::string>> rows = {{"image", "created", "age", "size", "own", "job", "folder"}};
  for (const ckptfmt::StoredImage& image : store.images) {
    std::vector<std::string> row = {image.path.substr(image.path.rfind('/') + 1)};
    if (image.status.ok()) {
      row.insert(row.end(), {Time(image.info.created_unix_ms), AgeText(now_ms - image.info.created_unix_ms),
                             ByteText(image.sizes.total_bytes), ByteText(image.own_bytes), Printable(image.info.job),
                             Printable(image.info.job_folder)});
    } else {
      row.push_back(std::string(image.status.message()));
    }
    rows.push_back(std::move(row));
  }
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (size_t i = 0; row.size() == widths.size() && i < row.size(); ++i)
      widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line = " ";
    for (size_t i = 0; i < row.size(); ++i) {
      line += " " + row[i];
      if (i + 1 < row.size()) line += std::string(widths[i] - std::min(widths[i], row[i].size()) + 1, ' ');
    }
    out += line + "\n";
  }
  return out + "own: what would be free without this image; the rest of its size is shared with others\n";
}

std::string PrintStoreJson(const ckptfmt::StoreListing& store, int64_t now_ms,
                           const std::map<std::string, absl::Status>& verified) {
  JsonWriter json;
  json.BeginOutput();
  json.Member("store", store.path);
  json.Member("total_bytes", store.total_bytes);
  json.Begin("images", '[');
  for (const ckptfmt::StoredImage& image : store.images) {
    json.Begin('{');
    json.Member("image", image.path);
    if (image.status.ok()) {
      json.MemberIf("job", image.info.job);
      json.MemberIf("job_folder", image.info.job_folder);
      json.MemberIf("host", image.info.host);
      json.Member("created_unix_ms", image.info.created_unix_ms);
      json.Member("age_seconds", (now_ms - image.info.created_unix_ms) / 1000);
      json.Member("total_bytes", image.sizes.total_bytes);
      json.Member("own_bytes", image.own_bytes);
      json.Member("shared_bytes", image.sizes.total_bytes - image.own_bytes);
    } else {
      json.Member("problem", std::string(image.status.message()));
    }
    const auto answer = verified.find(image.path);
    if (answer != verified.end()) AddVerify(answer->second, &json);
    json.End('}');
  }
  json.End(']');
  json.End('}');
  return json.text() + "\n";
}

std::string PrintFits(const Summary& summary, uint32_t arch, bool* all_run) {
  std::string out;
  *all_run = true;
  for (const Module& module : summary.modules) {
    const Fit fit = FitOf(module, arch);
    *all_run = *all_run && fit.runs;
    absl::StrAppend(&out, fit.runs ? "yes  " : "NO   ", Hex(module.object.id), "  ",
                    fit.runs ? absl::StrCat("with ", fit.with) : absl::StrCat("has only ", Entries(module)), "\n");
  }
  absl::StrAppend(&out, *all_run ? "all " : "not all ", summary.modules.size(), " modules can run on sm_", arch, "\n");
  return out;
}

std::string PrintDamagedJson(const std::string& image, const absl::Status& damage) {
  JsonWriter json;
  json.BeginOutput();
  json.Member("image", image);
  AddVerify(damage, &json);
  json.End('}');
  return json.text() + "\n";
}

std::string PrintExportJson(const std::string& image, const std::string& exported) {
  JsonWriter json;
  json.BeginOutput();
  json.Member("image", image);
  json.Begin("export", '{');
  json.Member("image", exported);
  json.Member("undamaged", true);
  json.End('}');
  json.End('}');
  return json.text() + "\n";
}

std::string PrintJson(const Summary& summary, const Answers& answers) {
  const ckptfmt::ImageReader& reader = *summary.reader;
  const ckptfmt::ImageInfo& info = reader.info();
  const ckptfmt::ImageSizes& sizes = reader.sizes();
  JsonWriter json;
  json.BeginOutput();
  json.Member("image", reader.dir());
  json.Member("format_version", info.format_version);
  json.MemberIf("product_version", info.product_version);
  json.MemberIf("created_unix_ms", info.created_unix_ms);
  json.MemberIf("host", info.host);
  json.MemberIf("job", info.job);
  json.MemberIf("program", info.program);
  json.MemberIf("pid", info.pid);
  json.MemberIf("job_folder", info.job_folder);
  if (info.engine != "none") json.Member("engine", info.engine);
  json.Begin("needs", '{');
  json.MemberIf("kernel", info.needs.kernel);
  json.MemberIf("engine_version", info.needs.engine_version);
  json.Begin("files", '[');
  for (const ckptfmt::NeededFile& file : info.needs.files) {
    json.Begin('{');
    json.Member("path", file.path);
    json.Member("bytes", file.bytes);
    json.MemberIf("build_id", ckptfmt::PrintBuildId(file.build_id));
    json.MemberIf("kept", file.kept);
    json.Member("written", file.written);
    json.End('}');
  }
  json.End(']');
  json.End('}');
  json.Begin("processes", '[');
  for (size_t p = 0; p < info.processes.size(); ++p) {
    const ckptfmt::ProcessInfo& process = info.processes[p];
    json.Begin('{');
    json.Member("pid", process.pid);
    json.Member("program", process.program);
    json.MemberIf("server", process.server);
    json.Member("shared_memory", process.shared_memory);
    json.MemberIf("driver_settings", process.driver_settings);
    json.MemberIf("driver_version", process.driver_version);
    json.Begin("devices", '[');
    for (const ckptfmt::DeviceFacts& device : process.devices) {
      json.Begin('{');
      json.Member("name", device.name);
      if (device.uuid.size() == 16) json.Member("uuid", UuidName(device.uuid));
      json.Member("compute_capability", absl::StrCat(device.compute_major, ".", device.compute_minor));
      json.Member("total_memory_bytes", device.total_memory);
      json.MemberIf("pci_bus_id", device.pci_bus_id);
      json.End('}');
    }
    json.End(']');
    json.Member("records", summary.logs[p].records());
    json.End('}');
  }
  json.End(']');
  json.Begin("sizes", '{');
  json.Member("total_bytes", sizes.total_bytes);
  json.Member("memory_bytes", sizes.region_bytes);
  json.Member("memory_zero_bytes", sizes.zero_bytes);
  json.Member("memory_shared_bytes", sizes.shared_bytes);
  json.Member("memory_stored_bytes", sizes.stored_bytes);
  json.Member("memory_linked_bytes", sizes.linked_bytes);
  json.Member("client_bytes", sizes.client_bytes);
  json.Member("log_bytes", sizes.log_bytes);
  json.End('}');
  json.Begin("regions", '[');
  for (const ckptfmt::Region& region : reader.regions()) {
    json.Begin('{');
    json.Member("kind", KindName(region.kind));
    json.Member("process", region.process);
    json.HexMember("address", region.address);
    json.Member("bytes", region.bytes);
    json.Member("device", region.device);
    if (region.kind != ckptfmt::RegionKind::kAllocation) {
      json.MemberIf("symbol", region.symbol);
      json.HexMember("object", region.object);
    }
    json.End('}');
  }
  json.End(']');
  uint64_t records = 0;
  for (const Log& log : summary.logs) records += log.records();
  json.Member("records", records);
  json.Begin("records_by_call", '{');
  for (const auto& [name, count] : summary.records_by_call) json.Member(name, count);
  json.End('}');
  AddTexts("not_replayable", summary.not_replayable, &json);
  bool all_run = true;
  json.Begin("modules", '[');
  for (const Module& module : summary.modules) {
    json.Begin('{');
    json.HexMember("object", module.object.id);
    json.Member("process", module.process);
    json.Member("call", module.call);
    json.Member("hash", module.hash);
    json.Member("bytes", module.bytes);
    json.Begin("code", '[');
    for (const ImageEntry& entry : module.entries) json.Value(NameOf(entry));
    json.End(']');
    json.Member("variables", module.variables);
    json.Member("variable_bytes", module.data_bytes);
    if (!module.problem.empty()) json.Member("problem", module.problem);
    if (answers.arch != 0) {
      const Fit fit = FitOf(module, answers.arch);
      all_run = all_run && fit.runs;
      json.Member("runs", fit.runs);
      if (fit.runs) json.Member("runs_with", fit.with);
    }
    json.End('}');
  }
  json.End(']');
  json.Begin("files", '[');
  for (const ckptfmt::FileFacts& file : reader.files()) {
    json.Begin('{');
    json.Member("path", file.path);
    json.Member("bytes", file.bytes);
    json.MemberIf("xxh3_128", file.hash);
    json.End('}');
  }
  json.End(']');
  if (answers.verified) AddVerify(*answers.verified, &json);
  if (answers.arch != 0) {
    json.Begin("can_run_on", '{');
    json.Member("architecture", absl::StrCat("sm_", answers.arch));
    json.Member("all_modules", all_run);
    json.End('}');
  }
  if (answers.missing) {
    json.Begin("files_here", '{');
    json.Member("all", answers.missing->empty());
    AddTexts("problems", *answers.missing, &json);
    json.End('}');
  }
  if (answers.differences) AddTexts("differences", *answers.differences, &json);
  json.End('}');
  return json.text() + "\n";
}

}  // namespace cuda_remote::replay::inspect
