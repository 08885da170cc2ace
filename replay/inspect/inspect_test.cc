// SPDX-License-Identifier: Apache-2.0
// Tests of cr-inspect: its parts, and the program itself.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <thread>

#include "ckptfmt/image_store.h"
#include "ckptfmt/testing.h"
#include "proto/api/call_ids.gen.h"
#include "proto/base/proc.h"
#include "replay/inspect/print.h"
#include "replay/inspect/summary.h"

namespace cuda_remote::replay::inspect {
namespace {

using ckptfmt::TestFolder;
using testing::HasSubstr;
using testing::Not;

constexpr char kPtx80[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n.global .b8 table[100];\n.const .u32 c;\n"
    ".visible .entry k() { ret; }\n";
constexpr char kPtx90[] = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k() { ret; }\n";

FrameHeader Frame(uint32_t call) {
  FrameHeader header;
  header.call = call;
  return header;
}

Log SampleLog() {
  Log log;
  log.Create({Kind::kContext, 0x10}, {}, Frame(kCall_cuCtxCreate_v4), "context", "", std::nullopt);
  log.Create({Kind::kModule, 0x20}, {}, Frame(kCall_cuModuleLoadData), "module", "", log.AddImage(kPtx80));
  for (uint64_t i = 0; i < 3; ++i) {
    log.Create({Kind::kStream, 0x100 + (i << 4)}, {}, Frame(kCall_cuStreamCreate), "stream", "", std::nullopt);
  }
  return log;
}

void Write(const std::string& dir, const Log& log, const std::string& memory = "memory") {
  auto writer = ckptfmt::ImageWriter::Create(dir);
  ASSERT_TRUE(writer.ok()) << writer.status();
  ckptfmt::Region region;
  region.address = 0x100000000000;
  region.bytes = memory.size();
  ASSERT_TRUE((*writer)->BeginRegion(region).ok());
  ASSERT_TRUE((*writer)->AddData(memory).ok());
  ASSERT_TRUE((*writer)->EndRegion().ok());
  region.kind = ckptfmt::RegionKind::kModuleSymbol;
  region.address = 0x7000;
  region.object = 0x20;
  region.symbol = "table";
  region.bytes = 100;
  ASSERT_TRUE((*writer)->BeginRegion(region).ok());
  ASSERT_TRUE((*writer)->AddData(std::string(100, '\0')).ok());
  ASSERT_TRUE((*writer)->EndRegion().ok());
  std::string bytes;
  log.Serialize(&bytes);
  ASSERT_TRUE((*writer)->WriteLog(bytes).ok());
  ASSERT_TRUE((*writer)->Commit(ckptfmt::SampleInfo()).ok());
}

struct Result {
  int code;
  std::string out;
};

Result Inspect(const std::string& arguments) {
  FILE* pipe = popen(("replay/inspect/cr-inspect " + arguments + " 2>&1").c_str(), "r");
  std::string out;
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) out.append(buffer, n);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, out};
}

TEST(Inspect, PrintsWhatIsInTheImage) {
  TestFolder folder;
  Write(folder / "image", SampleLog());
  const Result result = Inspect(folder / "image");
  EXPECT_EQ(result.code, 0) << result.out;
  for (const char* text :
       {"job-1", "/usr/bin/program", "2023-11-14 22:13:20 UTC", "compute 9.0", "141 GiB",
        "GPU-01020004-7575-7575-7575-757575757575", "driver 13.0", "0x100000000000", "table", "cuStreamCreate",
        "3  cuStreamCreate", "PTX compute_80", "2 variables, 104 B", "5 records", "engine    criu"}) {
    EXPECT_THAT(result.out, HasSubstr(text));
  }
  EXPECT_THAT(result.out, Not(HasSubstr("root_pid")));
  const std::string all = Inspect("--all " + folder / "image").out;
  EXPECT_THAT(all, HasSubstr("memory/index"));
  EXPECT_THAT(all, HasSubstr("root_pid = 4242"));
}

TEST(Inspect, WhatARestartNeeds) {
  TestFolder folder;
  Write(folder / "image", SampleLog());
  const Result result = Inspect(folder / "image");
  for (const char* text : {"Linux 6.1.0-amd64, criu 4.2.1", "needs     /lib/libc.so.6, build id 8f001a\n",
                           "has       /opt/libcuda-remote.so, as client/kept/libcuda-remote.so\n",
                           "needs     /data/log, 17 B (written by the job)\n"}) {
    EXPECT_THAT(result.out, HasSubstr(text));
  }
  const Result here = Inspect("--files-here " + (folder / "image"));
  EXPECT_EQ(here.code, 3);
  EXPECT_THAT(here.out, HasSubstr("/data/log is not on this machine"));
  EXPECT_THAT(here.out, Not(HasSubstr("/opt/libcuda-remote.so")));
  const Result json = Inspect("--json " + (folder / "image"));
  EXPECT_THAT(json.out, HasSubstr("8f001a"));
}

TEST(Inspect, Verify) {
  TestFolder folder;
  Write(folder / "image", SampleLog());
  EXPECT_EQ(Inspect("--verify " + (folder / "image")).code, 0);
  EXPECT_THAT(Inspect("--verify " + (folder / "image")).out, HasSubstr("undamaged"));
  const std::string data = folder / "image/memory/data-00000";
  ckptfmt::WriteFile(data, "mEmory");
  const Result result = Inspect("--verify " + (folder / "image"));
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, HasSubstr(data));
  EXPECT_THAT(result.out, HasSubstr("offset 0"));
  EXPECT_EQ(Inspect(folder / "image").code, 0) << "printing needs no memory";
}

TEST(Inspect, ThingsThatAreNoImage) {
  TestFolder folder;
  ckptfmt::WriteFile(folder / "file", "x");
  std::filesystem::create_directory(folder / "empty");
  for (const char* name : {"file", "empty", "nothing"}) {
    const Result result = Inspect(folder / name);
    EXPECT_EQ(result.code, 1) << result.out;
    EXPECT_THAT(result.out, HasSubstr(folder / name));
  }
  EXPECT_EQ(Inspect("").code, 2);
  EXPECT_EQ(Inspect("--no-such-option x").code, 2);
  EXPECT_EQ(Inspect("--help").code, 0);
  ASSERT_TRUE(ckptfmt::WriteSample(folder / "bad-log", true).ok());
  EXPECT_THAT(Inspect(folder / "bad-log").out, HasSubstr("/log"));
}

TEST(Inspect, CanRunOn) {
  TestFolder folder;
  Log log = SampleLog();
  Write(folder / "image", log);
  EXPECT_EQ(Inspect("--can-run-on sm_90 " + (folder / "image")).code, 0);
  EXPECT_EQ(Inspect("--can-run-on 7.5 " + (folder / "image")).code, 3);
  EXPECT_EQ(Inspect("--can-run-on fast " + (folder / "image")).code, 2);
  log.Create({Kind::kModule, 0x30}, {}, Frame(kCall_cuModuleLoadData), "module", "", log.AddImage(kPtx90));
  Write(folder / "image", log);
  const Result result = Inspect("--can-run-on sm_120 " + (folder / "image"));
  EXPECT_EQ(result.code, 3);
  EXPECT_THAT(result.out, HasSubstr("yes  0x20  with PTX compute_80"));
  EXPECT_THAT(result.out, HasSubstr("NO   0x30  has only PTX compute_90a"));
}

TEST(Inspect, Compare) {
  TestFolder folder;
  Write(folder / "a", SampleLog());
  Write(folder / "b", SampleLog());
  EXPECT_EQ(Inspect((folder / "a") + " " + (folder / "b")).code, 0);
  Log log = SampleLog();
  log.Destroy({Kind::kStream, 0x110});
  log.Modify({Kind::kContext, 0x10}, 1, Frame(kCall_cuCtxSetLimit), "limit");
  Write(folder / "b", log, "mEmory");
  Result result = Inspect((folder / "a") + " " + (folder / "b"));
  EXPECT_EQ(result.code, 3);
  EXPECT_THAT(result.out, HasSubstr("memory at 0x100000000000 (6 bytes): 1 of 1 chunks differ"));
  EXPECT_THAT(result.out, HasSubstr("record cuStreamCreate of 0x110: only in the first"));
  EXPECT_THAT(result.out, HasSubstr("record cuCtxSetLimit (setting) of 0x10: only in the second"));
  EXPECT_THAT(result.out, HasSubstr("3 differences"));
  EXPECT_THAT(result.out, Not(HasSubstr("table")));
  Write(folder / "b", SampleLog(), "longer memory");
  result = Inspect((folder / "a") + " " + (folder / "b"));
  EXPECT_THAT(result.out, HasSubstr("6 bytes, 13 in the second"));
  EXPECT_EQ(Inspect((folder / "a") + " " + (folder / "nothing")).code, 1);
}

TEST(Inspect, AStore) {
  TestFolder folder;
  const std::string store = folder / "store";
  for (int i = 0; i < 2; ++i) {
    auto opened = ckptfmt::ImageStore::Open(store);
    ASSERT_TRUE(opened.ok()) << opened.status();
    auto writer = (*opened)->Create({});
    ASSERT_TRUE(writer.ok()) << writer.status();
    ckptfmt::Region region;
    region.bytes = 1 << 20;
    ASSERT_TRUE((*writer)->BeginRegion(region).ok());
    ASSERT_TRUE((*writer)->AddData(ckptfmt::Noise(1 << 20, 1)).ok());
    ASSERT_TRUE((*writer)->EndRegion().ok());
    std::string log;
    SampleLog().Serialize(&log);
    ASSERT_TRUE((*writer)->WriteLog(log).ok());
    ckptfmt::ImageInfo info = ckptfmt::SampleInfo();
    info.job = "train\n";
    ASSERT_TRUE((*writer)->Commit(info).ok());
  }
  Result result = Inspect(store);
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, HasSubstr(store + ": 2 images, 1.0 MiB"));
  EXPECT_THAT(result.out, HasSubstr("image-000001  2023-11-14 22:13:20 UTC  "));
  EXPECT_THAT(result.out, HasSubstr(" days  1.0 MiB  "));
  EXPECT_THAT(result.out, Not(HasSubstr("train\n\n")));
  EXPECT_THAT(Inspect("--verify " + store).out, HasSubstr("2 images, complete and undamaged"));
  // Where one image is needed, it is the newest.
  EXPECT_THAT(Inspect("--all " + store).out, HasSubstr("checkpoint image " + store + "/image-000002"));
  EXPECT_EQ(Inspect(store + " " + store + "/image-000001").code, 0);

  EXPECT_EQ(Inspect("--export " + store).code, 2);
  EXPECT_EQ(Inspect("--quiet --export " + store + " " + (folder / "copy")).code, 0);
  EXPECT_EQ(Inspect(store + " " + (folder / "copy")).code, 0) << "nothing differs";

  const std::string data = store + "/image-000002/memory/data-00000";
  std::string bytes = ckptfmt::ReadFile(data);
  bytes[1000] ^= 1;
  ckptfmt::WriteFile(data, bytes);
  EXPECT_EQ(Inspect("--verify " + store).code, 1) << "both images have the file";
  ckptfmt::WriteFile(folder / "out.json", Inspect("--json " + store).out);
  const std::string check =
      "python3 -c \"import json,sys; d=json.load(open(sys.argv[1])); a,b=d['images'];"
      "assert a['shared_bytes']==b['shared_bytes']==1<<20 and 0<a['own_bytes']<10000;"
      "assert d['total_bytes']==(1<<20)+a['own_bytes']+b['own_bytes'];"
      "assert b['image'].endswith('/image-000002') and b['age_seconds']>0\" " +
      (folder / "out.json");
  EXPECT_EQ(system(check.c_str()), 0);
}

// Whether some process has the folder open, besides this one.
bool IsOpenElsewhere(const std::string& folder) {
  std::error_code gone;
  for (const int process : AllProcesses()) {
    if (process == getpid()) continue;
    for (const int fd : NumbersIn(process, "fd")) {
      const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(fd);
      if (std::filesystem::equivalent(path, folder, gone)) return true;
    }
  }
  return false;
}

TEST(Inspect, AStoreWhoseOldImagesAreRemovedMeanwhile) {
  TestFolder folder;
  const std::string store = folder / "store";
  const auto image = [&](int number) { return store + "/image-00000" + std::to_string(number); };
  ASSERT_EQ(mkdir(store.c_str(), 0700), 0);
  for (int number = 1; number <= 3; ++number) Write(image(number), SampleLog());
  std::filesystem::rename(image(3), folder / "next");
  // Its list has the first image, and waits for the second one, while a checkpoint makes a third and removes the first.
  const int held = open(image(2).c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(flock(held, LOCK_EX), 0);
  Result result;
  std::thread inspects([&] { result = Inspect("--verify " + store); });
  while (!IsOpenElsewhere(image(2))) usleep(10000);
  std::filesystem::rename(folder / "next", image(3));
  std::filesystem::remove_all(image(1));
  flock(held, LOCK_UN);
  inspects.join();
  close(held);
  EXPECT_EQ(result.code, 0) << result.out;
  EXPECT_THAT(result.out, HasSubstr("2 images, complete and undamaged"));
  // What is damaged is no image that was removed.
  std::filesystem::remove(image(3) + "/memory/data-00000");
  result = Inspect("--verify " + store);
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, HasSubstr("data-00000"));
}

TEST(Inspect, JsonIsJson) {
  TestFolder folder;
  Write(folder / "a", SampleLog());
  Write(folder / "b", SampleLog(), "mEmory");
  const std::string command = "--json --verify --can-run-on sm_90 " + (folder / "a") + " " + (folder / "b");
  const Result result = Inspect(command);
  EXPECT_EQ(result.code, 3);
  const std::string file = folder / "out.json";
  ckptfmt::WriteFile(file, result.out);
  const std::string check =
      "python3 -c \"import json,sys; d=json.load(open(sys.argv[1]));"
      "assert d['records_by_call']['cuStreamCreate']==3 and d['modules'][0]['code']==['PTX compute_80'];"
      "assert d['modules'][0]['runs'] and len(d['differences'])==1 and d['sizes']['memory_bytes']==106 and "
      "d['verify']=={'undamaged': True}"
      " and d['can_run_on']=={'architecture': 'sm_90', 'all_modules': True}\" " +
      file;
  EXPECT_EQ(system(check.c_str()), 0) << result.out;
}

TEST(ParseArch, Spellings) {
  EXPECT_EQ(ParseArch("sm_90"), 90u);
  EXPECT_EQ(ParseArch("sm_90a"), 90u);
  EXPECT_EQ(ParseArch("compute_120"), 120u);
  EXPECT_EQ(ParseArch("12.0"), 120u);
  EXPECT_EQ(ParseArch("75"), 75u);
  for (const char* text : {"", "sm_", "9", "sm_x", "9.00", "sm_90b", "1234"}) EXPECT_EQ(ParseArch(text), 0u) << text;
}

}  // namespace
}  // namespace cuda_remote::replay::inspect
