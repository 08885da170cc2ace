// SPDX-License-Identifier: Apache-2.0
#include "server/nvml/answerer.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <string.h>

#include <random>

#include "proto/codec/wire.h"

namespace cuda_remote::server {
namespace {

using nvml::Question;

constexpr char kFake[] = "server/nvml/libfake_nvml.so";

LoadedDriver MakeDriver() {
  LoadedDriver driver;
  driver.software = true;
  driver.version = 13000;
  for (int i = 0; i < 2; ++i) {
    DeviceFacts facts;
    facts.name = i == 0 ? "First" : "Second";
    facts.uuid = std::string(16, char(0xa0 + i));
    facts.total_memory = 1000 + i;
    facts.pci_bus_id = i == 0 ? "0000:10:00.0" : "0000:20:00.0";
    facts.attributes.assign(CU_DEVICE_ATTRIBUTE_MAX, kRefusedAttribute);
    facts.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = 9;
    facts.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR] = 0;
    facts.attributes[CU_DEVICE_ATTRIBUTE_CLOCK_RATE] = 1980000;
    facts.peers = {uint32_t(i != 0), uint32_t(i != 1)};
    driver.devices.push_back(facts);
  }
  return driver;
}

Ask MakeAsk(const Question& question) {
  Ask ask;
  EncodeQuestion(question, &ask.question);
  ask.sessions = {
      {41, 5001, 0, "/bin/trainer", {300, 50}}, {42, 5002, 1, "/bin/other", {0, 7}}, {43, 0, 0, "/waits", {}}};
  return ask;
}

Question Make(const std::string& call, uint32_t device = 0, int gpu = -1) {
  Question question;
  question.call = call;
  question.device = device;
  question.gpu = gpu;
  return question;
}

template <typename T>
T Value(const nvml::Answer& answer, size_t index = 0) {
  T value = {};
  EXPECT_GE(answer.output.size(), sizeof(T) * (index + 1));
  if (answer.output.size() >= sizeof(T) * (index + 1))
    memcpy(&value, answer.output.data() + sizeof(T) * index, sizeof(T));
  return value;
}

class FromDriverFacts : public ::testing::Test {
 protected:
  nvml::Answer Answer(const Question& question) { return answerer_.Answer(MakeAsk(question)); }
  LoadedDriver driver_ = MakeDriver();
  std::unique_ptr<NvmlSource> source_ = MakeDriverFacts(driver_);
  Answerer answerer_{source_.get(), 2, -1};
};

TEST_F(FromDriverFacts, TellsWhatTheDriverApiKnows) {
  EXPECT_EQ(Value<uint32_t>(Answer(Make(nvml::kCount))), 2u);
  EXPECT_EQ(Answer(Make("nvmlDeviceGetName", 1)).output, "Second");
  EXPECT_EQ(Answer(Make("nvmlDeviceGetUUID")).output, "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0");
  EXPECT_EQ(Answer(Make("nvmlSystemGetDriverVersion")).output, "580.0");
  EXPECT_EQ(Value<int>(Answer(Make("nvmlSystemGetCudaDriverVersion_v2"))), 13000);
  const nvml::Answer capability = Answer(Make("nvmlDeviceGetCudaComputeCapability"));
  EXPECT_EQ(Value<int>(capability, 0), 9);
  EXPECT_EQ(Value<int>(capability, 1), 0);
  EXPECT_EQ(Value<uint32_t>(Answer(Make("nvmlDeviceGetArchitecture"))), uint32_t(nvml::kHopper));
  const auto pci = Value<nvml::PciInfo>(Answer(Make("nvmlDeviceGetPciInfo_v3", 1)));
  EXPECT_EQ(pci.bus, 0x20u);
  EXPECT_STREQ(pci.bus_id, "00000000:20:00.0");
  EXPECT_STREQ(pci.bus_id_legacy, "0000:20:00.0");
  nvml::PciInfoExt in = {};
  in.version = nvml::VersionWord(sizeof(in), 1);
  Question ext = Make("nvmlDeviceGetPciInfoExt", 1);
  ext.input.assign(reinterpret_cast<const char*>(&in), sizeof(in));
  const auto more = Value<nvml::PciInfoExt>(Answer(ext));
  EXPECT_EQ(more.version, in.version);
  EXPECT_EQ(more.bus, 0x20u);
  EXPECT_STREQ(more.bus_id, "00000000:20:00.0");
  EXPECT_EQ(Value<uint32_t>(Answer(Make("nvmlDeviceGetMaxMigDeviceCount"))), 0u);
  Question clock = Make("nvmlDeviceGetMaxClockInfo");
  clock.a = nvml::kSmClock;
  EXPECT_EQ(Value<uint32_t>(Answer(clock)), 1980u);
  clock.a = 17;
  EXPECT_EQ(Answer(clock).result, nvml::kInvalidArgument);
}

TEST_F(FromDriverFacts, WhatItDoesNotKnowIsNotSupported) {
  for (const char* call :
       {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEccMode", "nvmlDeviceGetMigMode",
        "nvmlDeviceGetSerial", "nvmlDeviceGetNvLinkState", "nvmlDeviceValidateInforom"}) {
    const nvml::Answer answer = Answer(Make(call));
    EXPECT_EQ(answer.result, nvml::kNotSupported) << call;
    EXPECT_TRUE(answer.output.empty()) << call;
  }
}

TEST_F(FromDriverFacts, MemoryIsWhatTheSessionsHold) {
  const auto memory = Value<nvml::Memory>(Answer(Make("nvmlDeviceGetMemoryInfo")));
  EXPECT_EQ(memory.total, 1000u);
  EXPECT_EQ(memory.used, 300u);
  EXPECT_EQ(memory.free, 700u);
  Question second = Make("nvmlDeviceGetMemoryInfo_v2", 1);
  nvml::MemoryV2 in = {};
  in.version = nvml::VersionWord(sizeof(in), 2);
  second.input.assign(reinterpret_cast<const char*>(&in), sizeof(in));
  const auto v2 = Value<nvml::MemoryV2>(Answer(second));
  EXPECT_EQ(v2.version, in.version);
  EXPECT_EQ(v2.used, 57u);
  EXPECT_EQ(v2.total, 1001u);
}

// Somebody else's session: its memory is used, and that is all that is told.
TEST_F(FromDriverFacts, SessionsOfOthersAreHidden) {
  const auto answer = [this](const Question& question) {
    Ask ask = MakeAsk(question), arrived;
    ask.sessions[0].hidden = true;
    std::string bytes;
    EncodeAsk(ask, &bytes);
    EXPECT_TRUE(DecodeAsk(bytes, &arrived));
    return answerer_.Answer(arrived);
  };
  EXPECT_EQ(Value<nvml::Memory>(answer(Make("nvmlDeviceGetMemoryInfo"))).used, 300u);
  EXPECT_TRUE(answer(Make(nvml::kComputeProcesses, 0)).output.empty());
  const nvml::Answer second = answer(Make(nvml::kComputeProcesses, 1));
  ASSERT_EQ(second.output.size(), sizeof(nvml::ProcessInfo));
  EXPECT_EQ(Value<nvml::ProcessInfo>(second).pid, 42u);
  Question name = Make(nvml::kProcessName);
  name.a = 41;
  EXPECT_EQ(answer(name).result, nvml::kNotFound);
  name.a = 42;
  EXPECT_EQ(answer(name).output, "/bin/other");
}

TEST_F(FromDriverFacts, ProcessesAreTheClients) {
  const nvml::Answer first = Answer(Make(nvml::kComputeProcesses, 0));
  ASSERT_EQ(first.output.size(), sizeof(nvml::ProcessInfo));
  EXPECT_EQ(Value<nvml::ProcessInfo>(first).pid, 41u);
  EXPECT_EQ(Value<nvml::ProcessInfo>(first).used_bytes, 300u);
  EXPECT_EQ(Value<nvml::ProcessInfo>(first).gpu_instance, nvml::kNoInstance);
  const nvml::Answer second = Answer(Make(nvml::kComputeProcesses, 1));
  ASSERT_EQ(second.output.size(), 2 * sizeof(nvml::ProcessInfo));
  EXPECT_EQ(Value<nvml::ProcessInfo>(second, 1).pid, 42u);
  EXPECT_EQ(Answer(Make(nvml::kGraphicsProcesses, 0)).result, nvml::kSuccess);
  EXPECT_TRUE(Answer(Make(nvml::kGraphicsProcesses, 0)).output.empty());
  Question name = Make(nvml::kProcessName);
  name.a = 42;
  EXPECT_EQ(Answer(name).output, "/bin/other");
  name.a = 77;
  EXPECT_EQ(Answer(name).result, nvml::kNotFound);
}

TEST_F(FromDriverFacts, OneGpuOnlyIsTheFirst) {
  EXPECT_EQ(Value<uint32_t>(Answer(Make(nvml::kCount, 0, 1))), 1u);
  EXPECT_EQ(Answer(Make("nvmlDeviceGetName", 0, 1)).output, "Second");
  EXPECT_EQ(Answer(Make("nvmlDeviceGetName", 1, 1)).result, nvml::kGpuIsLost);
  EXPECT_EQ(Value<uint32_t>(Answer(Make(nvml::kCount, 0, 2))), 0u);
  Answerer second(source_.get(), 2, 1);  // cr-server --gpu 1
  EXPECT_EQ(second.Answer(MakeAsk(Make("nvmlDeviceGetName"))).output, "Second");
  EXPECT_EQ(Value<uint32_t>(second.Answer(MakeAsk(Make(nvml::kCount)))), 1u);
  EXPECT_EQ(second.Answer(MakeAsk(Make("nvmlDeviceGetName", 0, 1))).result, nvml::kGpuIsLost);
}

TEST_F(FromDriverFacts, ALimitedSessionSeesItsGpusOnly) {
  Answerer answerer(source_.get(), 2, -1);
  const auto answer = [&](const Question& question) {
    Ask ask = MakeAsk(question);
    ask.gpus = {1};
    return answerer.Answer(ask);
  };
  EXPECT_EQ(Value<uint32_t>(answer(Make(nvml::kCount))), 1u);
  EXPECT_EQ(answer(Make("nvmlDeviceGetName", 0)).output, "Second");
  EXPECT_EQ(answer(Make("nvmlDeviceGetName", 1)).result, nvml::kGpuIsLost);
  // The next question is another process's.
  EXPECT_EQ(Value<uint32_t>(answerer.Answer(MakeAsk(Make(nvml::kCount)))), 2u);
}

TEST_F(FromDriverFacts, Pairs) {
  Question pair = Make(nvml::kP2PStatus, 0);
  pair.a = 1;
  pair.b = nvml::kP2PRead;
  EXPECT_EQ(Value<uint32_t>(Answer(pair)), uint32_t(nvml::kP2POk));
  pair.b = nvml::kP2PNvlink;
  EXPECT_EQ(Value<uint32_t>(Answer(pair)), uint32_t(nvml::kP2PNotSupported));
  pair.a = 9;
  EXPECT_EQ(Answer(pair).result, nvml::kGpuIsLost);
}

TEST_F(FromDriverFacts, RefusesWhatIsNoQuestion) {
  Ask ask;
  ask.question = "garbage";
  EXPECT_EQ(answerer_.Answer(ask).result, nvml::kInvalidArgument);
  Question other = Make("nvmlDeviceGetName");
  other.wire_version = kWireVersion + 1;
  EXPECT_EQ(Answer(other).result, nvml::kLibraryVersionMismatch);
  // Neither what changes the GPU nor what exists nowhere.
  for (const char* call : {"nvmlDeviceSetComputeMode", "nvmlInit_v2", "nvmlShutdown", "system", "x"})
    EXPECT_EQ(Answer(Make(call)).result, nvml::kFunctionNotFound) << call;
  EXPECT_EQ(Answer(Make("nvmlDeviceGetName", 0xffffffff)).result, nvml::kGpuIsLost);
  EXPECT_EQ(Answer(Make("nvmlDeviceGetGpuFabricInfoV")).result, nvml::kArgumentVersionMismatch);
  Question fields = Make(nvml::kFieldValues);
  EXPECT_EQ(Answer(fields).result, nvml::kInvalidArgument);
  fields.input = std::string(sizeof(nvml::FieldValue) + 1, 'x');
  EXPECT_EQ(Answer(fields).result, nvml::kInvalidArgument);
  Question affinity = Make(nvml::kCpuAffinity);
  affinity.b = nvml::kMaxAffinityWords + 1;
  EXPECT_EQ(Answer(affinity).result, nvml::kInvalidArgument);
}

TEST_F(FromDriverFacts, RandomQuestionsDoNoHarm) {
  std::mt19937_64 random(7);
  std::vector<std::string> calls = {nvml::kCount,       nvml::kP2PStatus,   nvml::kComputeProcesses,
                                    nvml::kFieldValues, nvml::kCpuAffinity, nvml::kMemoryAffinity,
                                    nvml::kProcessName, "nonsense"};
  for (const nvml::Call* call = nvml::AllCalls(); call->name; ++call) calls.push_back(call->name);
  for (int round = 0; round < 20000; ++round) {
    Question question = Make(calls[random() % calls.size()], random() % 3, int(random() % 4) - 1);
    question.a = uint32_t(random() % 4 ? random() % 4 : random());
    question.b = uint32_t(random() % 4 ? random() % 4 : random());
    question.input.resize(random() % 200);
    for (char& c : question.input) c = char(random());
    if (question.input.size() >= 4 && random() % 2) {
      const uint32_t word = nvml::VersionWord(question.input.size(), 1 + random() % 3);
      memcpy(&question.input[0], &word, 4);
    }
    const nvml::Answer answer = Answer(question);
    EXPECT_LE(answer.output.size(), nvml::kMaxOutputBytes);
    if (answer.result != nvml::kSuccess) {
      EXPECT_TRUE(answer.output.empty()) << question.call;
    }
  }
}

TEST(Asks, ComeBack) {
  Ask ask = MakeAsk(Make("nvmlDeviceGetName"));
  ask.remote = true;
  ask.gpus = {0, 5};
  ask.sessions[0].program = std::string(500, 'p') + "end";
  std::string bytes;
  EncodeAsk(ask, &bytes);
  Ask got;
  ASSERT_TRUE(DecodeAsk(bytes, &got));
  EXPECT_EQ(got.question, ask.question);
  EXPECT_EQ(got.gpus, ask.gpus);
  EXPECT_TRUE(got.remote);
  ASSERT_EQ(got.sessions.size(), 3u);
  EXPECT_EQ(got.sessions[0].program.size(), kMaxAskedProgram);
  EXPECT_EQ(got.sessions[1].device_bytes, (std::vector<uint64_t>{0, 7}));
  EXPECT_FALSE(DecodeAsk("\xff\xff", &got));
}

class FromRealNvml : public ::testing::Test {
 protected:
  void SetUp() override {
    driver_.software = false;
    source_ = *OpenRealNvml(driver_, kFake);
    answerer_ = std::make_unique<Answerer>(source_.get(), 2, -1);
  }
  nvml::Answer Answer(const Question& question) { return answerer_->Answer(MakeAsk(question)); }
  LoadedDriver driver_ = MakeDriver();
  std::unique_ptr<NvmlSource> source_;
  std::unique_ptr<Answerer> answerer_;
};

TEST_F(FromRealNvml, DevicesAreInCudasOrder) {
  EXPECT_EQ(Answer(Make("nvmlDeviceGetName", 0)).output, "Fake GPU A");
  EXPECT_EQ(Answer(Make("nvmlDeviceGetName", 1)).output, "Fake GPU B");
  EXPECT_EQ(Value<uint32_t>(Answer(Make("nvmlDeviceGetPowerUsage", 1))), 222u);
}

TEST_F(FromRealNvml, EveryShapeGoesThrough) {
  EXPECT_EQ(Value<uint64_t>(Answer(Make("nvmlDeviceGetTotalEnergyConsumption"))), uint64_t{1} << 40);
  EXPECT_EQ(Answer(Make("nvmlDeviceGetFanSpeed")).result, nvml::kNotSupported);
  EXPECT_EQ(Answer(Make("nvmlDeviceGetSerial")).result, nvml::kFunctionNotFound);  // the library lacks it
  const nvml::Answer rows = Answer(Make("nvmlDeviceGetRemappedRows"));
  for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(Value<uint32_t>(rows, i), i + 1);
  EXPECT_EQ(Answer(Make("nvmlDeviceValidateInforom", 0)).result, nvml::kSuccess);
  EXPECT_EQ(Answer(Make("nvmlDeviceValidateInforom", 1)).result, nvml::kCorruptedInforom);
  Question clocks = Make("nvmlDeviceGetMinMaxClockOfPState");
  clocks.a = 2;
  clocks.b = 5;
  EXPECT_EQ(Value<uint32_t>(Answer(clocks), 0), 200u);
  EXPECT_EQ(Value<uint32_t>(Answer(clocks), 1), 500u);
  Question fabric = Make("nvmlDeviceGetGpuFabricInfoV");
  nvml::FabricInfoV2 in = {};
  in.version = nvml::VersionWord(sizeof(in), 2);
  fabric.input.assign(reinterpret_cast<const char*>(&in), sizeof(in));
  const nvml::Answer answer = Answer(fabric);
  ASSERT_EQ(answer.output.size(), sizeof(in));
  EXPECT_EQ(Value<nvml::FabricInfoV2>(answer).clique, 7u);
  EXPECT_EQ(Value<nvml::FabricInfoV2>(answer).health_mask, 0x1234u);
  Question fields = Make(nvml::kFieldValues);
  const nvml::FieldValue ask[2] = {{83, 1, 5, 5, 5, 5, 5}, {999, 0, 0, 0, 0, 0, 0}};
  fields.input.assign(reinterpret_cast<const char*>(ask), sizeof(ask));
  const nvml::Answer values = Answer(fields);
  EXPECT_EQ(Value<nvml::FieldValue>(values, 0).value, 831u);
  EXPECT_EQ(Value<nvml::FieldValue>(values, 0).timestamp_us, 0);
  EXPECT_EQ(Value<nvml::FieldValue>(values, 1).result, nvml::kNotSupported);
  Question pair = Make(nvml::kP2PStatus, 0);
  pair.a = 1;
  pair.b = 3;
  EXPECT_EQ(Value<uint32_t>(Answer(pair)), 3u);
  Question affinity = Make(nvml::kCpuAffinity);
  affinity.b = 3;
  EXPECT_EQ(Value<uint64_t>(Answer(affinity), 2), 3u);
  Ask remote = MakeAsk(affinity);
  remote.remote = true;
  EXPECT_EQ(answerer_->Answer(remote).result, nvml::kNotSupported);
}

TEST_F(FromRealNvml, WorkersAreTheirClients) {
  const nvml::Answer first = Answer(Make(nvml::kComputeProcesses, 0));
  // 9999 is nobody's worker.
  ASSERT_EQ(first.output.size(), sizeof(nvml::ProcessInfo));
  EXPECT_EQ(Value<nvml::ProcessInfo>(first).pid, 41u);
  EXPECT_EQ(Value<nvml::ProcessInfo>(first).used_bytes, 1000u);
  // The kernel driver knows none of the workers here: what they say themselves.
  const nvml::Answer second = Answer(Make(nvml::kComputeProcesses, 1));
  ASSERT_EQ(second.output.size(), 2 * sizeof(nvml::ProcessInfo));
  EXPECT_EQ(Value<nvml::ProcessInfo>(second, 0).used_bytes, 50u);
}

TEST(RealNvml, SaysWhyItCannotBeUsed) {
  LoadedDriver driver = MakeDriver();
  const auto why = [&](const char* library) { return std::string(OpenRealNvml(driver, library).status().message()); };
  EXPECT_NE(why("/nowhere/libnvidia-ml.so.1").find("/nowhere"), std::string::npos);
  driver.devices[1].pci_bus_id = "0000:99:00.0";
  EXPECT_EQ(why(kFake), std::string(kFake) + " cannot be used: it does not know the GPU at 0000:99:00.0");
  setenv("FAKE_NVML_BROKEN", "1", 1);
  EXPECT_EQ(why(kFake), std::string(kFake) + " cannot be used: nvmlInit_v2 fails with 9");
  unsetenv("FAKE_NVML_BROKEN");
}

}  // namespace
}  // namespace cuda_remote::server
