// SPDX-License-Identifier: Apache-2.0
// cr-inspect: prints, verifies and compares checkpoint images. README.md describes its output and exit codes.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <map>
#include <set>
#include <string>

#include "ckptfmt/folder.h"
#include "ckptfmt/image_reader.h"
#include "ckptfmt/image_store.h"
#include "ckptfmt/needs.h"
#include "proto/base/clock.h"
#include "proto/base/text.h"
#include "proto/cli/help.h"
#include "proto/cli/progress.h"
#include "replay/inspect/print.h"
#include "replay/inspect/summary.h"

namespace cuda_remote::replay::inspect {
namespace {

enum ExitCode { kFine = 0, kFailed = 1, kUsage = 2, kNo = 3 };

struct Options {
  std::string dir;
  std::string other;  // the image to compare with, or the one to write
  std::string arch;
  bool verify = false;
  bool here = false;
  bool export_ = false;
  bool json = false;
  bool all = false;
  bool quiet = false;
};

int Fail(const absl::Status& status) {
  fprintf(stderr, "cr-inspect: %s\n", std::string(status.message()).c_str());
  return kFailed;
}

int Finish(int code) {
  if (fflush(stdout) == 0) return code;
  perror("cr-inspect: cannot write the output");
  return kFailed;
}

int Export(const Options& options) {
  const auto image = ckptfmt::ImageReader::Open(options.dir);
  if (!image.ok()) return Fail(image.status());
  absl::Status status;
  {
    cli::Progress line("exporting", options.quiet || options.json);
    status =
        ckptfmt::ExportImage(**image, options.other, [&](uint64_t done, uint64_t total) { line.Update(done, total); });
  }
  if (!status.ok()) return Fail(status);
  if (options.json) fputs(PrintExportJson((*image)->dir(), options.other).c_str(), stdout);
  return Finish(kFine);
}

absl::Status VerifyOne(const Options& options, const std::string& path) {
  const auto image = ckptfmt::ImageReader::Open(path);
  if (!image.ok()) return image.status();
  cli::Progress line("verifying " + path, options.quiet || options.json);
  return (*image)->Verify([&](uint64_t done, uint64_t total) { line.Update(done, total); });
}

int RunOnStore(const Options& options, ckptfmt::StoreListing store) {
  int code = kFine;
  std::set<std::string> seen;
  std::map<std::string, absl::Status> verified;
  for (bool again = true; again;) {
    again = false;
    for (const ckptfmt::StoredImage& image : store.images) {
      if (!seen.insert(image.path).second) continue;
      absl::Status status = image.status;
      if (options.verify && status.ok()) status = VerifyOne(options, image.path);
      if (options.verify) verified[image.path] = status;
      if (status.ok()) continue;
      // A checkpoint that keeps the last few may have removed it meanwhile: there are newer ones to look at.
      if (!ckptfmt::IsImage(image.path)) {
        again = true;
      } else {
        code = Fail(status);
      }
    }
    if (!again) break;
    absl::StatusOr<ckptfmt::StoreListing> now = ckptfmt::ListStore(options.dir);
    if (!now.ok()) return Fail(now.status());
    store = *std::move(now);
  }
  const int64_t now = UnixMs();
  if (options.json) {
    fputs(PrintStoreJson(store, now, verified).c_str(), stdout);
  } else if (options.verify && code == kFine) {
    printf("%s: %zu images, complete and undamaged\n", store.path.c_str(), store.images.size());
  } else if (!options.verify) {
    fputs(PrintStore(store, now).c_str(), stdout);
  }
  return Finish(code);
}

int Run(const Options& options) {
  const uint32_t arch = options.arch.empty() ? 0 : ParseArch(options.arch);
  if (!options.arch.empty() && arch == 0) {
    fprintf(stderr, "cr-inspect: %s is not a GPU architecture; write it as sm_90 or 9.0\n", options.arch.c_str());
    return kUsage;
  }
  if (options.export_) return Export(options);
  // Of a store, all that is not about one image.
  if (options.other.empty() && arch == 0 && !options.all && !options.here) {
    absl::StatusOr<ckptfmt::StoreListing> store = ckptfmt::ListStore(options.dir);
    if (store.ok()) return RunOnStore(options, *std::move(store));
  }
  absl::StatusOr<Summary> summary = Load(options.dir);
  if (!summary.ok()) {
    if (options.verify && options.json && absl::IsDataLoss(summary.status()))
      fputs(PrintDamagedJson(options.dir, summary.status()).c_str(), stdout);
    return Finish(Fail(summary.status()));
  }
  absl::Status verified;
  if (options.verify) {
    cli::Progress line("verifying", options.quiet || options.json);
    verified = Verify(*summary, [&](uint64_t done, uint64_t total) { line.Update(done, total); });
  }
  if (!verified.ok()) {
    Fail(verified);
    if (!options.json) return kFailed;
  }
  bool all_run = true;
  const std::string fits = arch ? PrintFits(*summary, arch, &all_run) : "";
  std::vector<std::string> differences;
  if (!options.other.empty()) {
    absl::StatusOr<Summary> other = Load(options.other);
    if (!other.ok()) return Fail(other.status());
    differences = Compare(*summary, *other);
  }
  std::vector<std::string> missing;
  if (options.here) missing = ckptfmt::MissingHere(summary->reader->info().needs);
  if (options.json) {
    Answers answers;
    answers.arch = arch;
    if (options.verify) answers.verified = &verified;
    if (options.here) answers.missing = &missing;
    if (!options.other.empty()) answers.differences = &differences;
    fputs(PrintJson(*summary, answers).c_str(), stdout);
  } else if (options.here && !arch && options.other.empty()) {
    for (const std::string& sentence : missing) printf("%s\n", sentence.c_str());
    if (missing.empty()) printf("all files that the image needs are here\n");
  } else if (options.verify && !arch && options.other.empty()) {
    printf("%s: complete and undamaged, %s in %zu files\n", summary->reader->dir().c_str(),
           ByteText(summary->reader->sizes().total_bytes).c_str(), summary->reader->files().size() + 1);
  } else if (arch || !options.other.empty()) {
    fputs(fits.c_str(), stdout);
    for (const std::string& difference : differences) printf("%s\n", difference.c_str());
    if (!options.other.empty()) printf("%zu differences\n", differences.size());
  } else {
    fputs(PrintText(*summary, options.all).c_str(), stdout);
  }
  if (!verified.ok()) return Finish(kFailed);
  return Finish(all_run && differences.empty() && missing.empty() ? kFine : kNo);
}

int Main(int argc, char** argv) {
  CLI::App app("Prints, verifies and compares checkpoint images.", "cr-inspect");
  SetUpProgram(&app);
  Options options;
  app.add_option("DIR", options.dir, "the image, or a folder of images (cr-checkpoint --keep)")->required();
  app.add_option("DIR2", options.other, "another image: list what differs in it (--export: the image to write)");
  app.add_flag("--verify", options.verify, "compare every file with its checksums");
  app.add_flag("--export", options.export_,
               "write the image once more to DIR2, as one that shares nothing with others");
  app.add_option("--can-run-on", options.arch, "say for each module whether such a GPU can run it")->type_name("sm_XX");
  app.add_flag("--files-here", options.here, "list the files that a restart needs and this machine lacks");
  app.add_flag("--json", options.json, "print JSON");
  app.add_flag("--all", options.all, "print all regions, modules and files, and what the tools noted for themselves");
  app.add_flag("-q,--quiet", options.quiet, "no progress");
  app.footer(
      "Examples:\n"
      "  cr-inspect /backup/job-7                    what is in it\n"
      "  cr-inspect --verify /backup/job-7           is it undamaged?\n"
      "  cr-inspect --can-run-on sm_120 /backup/job-7\n"
      "  cr-inspect --files-here /backup/job-7       are its program and libraries here?\n"
      "  cr-inspect /backup/job-7 /backup/job-8      what differs\n"
      "  cr-inspect /backup/train                    the images in a folder: sizes, ages, what is shared\n"
      "  cr-inspect --export /backup/train/image-000007 /mnt/usb/job-7\n"
      "\nIf you name a folder of images where one image is needed, cr-inspect uses the newest one.\n"
      "\nExit codes: 0 no problem; 1 the image is damaged, or cannot be read; 2 wrong use;\n"
      "3 the images differ, a module cannot run on that GPU, or files are missing.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kFine : kUsage;
  }
  if (options.export_ && options.other.empty()) {
    fprintf(stderr, "cr-inspect: --export needs the name of the image to write\n");
    return kUsage;
  }
  return Run(options);
}

}  // namespace
}  // namespace cuda_remote::replay::inspect

int main(int argc, char** argv) {
  try {
    return cuda_remote::replay::inspect::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-inspect: %s\n", error.what());
    return 1;
  }
}
