// SPDX-License-Identifier: Apache-2.0
#include "client/trace/trace.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "client/trace/control.h"
#include "client/trace/recorder.h"
#include "proto/base/clock.h"

namespace cuda_remote::client::trace {
namespace {

std::string Contents(int fd) {
  std::string text;
  char piece[4096];
  for (off_t at = 0; true;) {
    const ssize_t got = pread(fd, piece, sizeof(piece), at);
    if (got <= 0) return text;
    text.append(piece, size_t(got));
    at += got;
  }
}

uint32_t NumberOf(const std::string& name) {
  for (uint32_t i = 0; i < kNameCount; ++i) {
    if (name == kNames[i]) return i;
  }
  ADD_FAILURE() << name;
  return 0;
}

const Row Find(const std::string& name) {
  for (const Row& row : Totals()) {
    if (row.name == name) return row;
  }
  ADD_FAILURE() << name;
  return {};
}

CUresult OneCall(uint32_t number, CUresult result = CUDA_SUCCESS, size_t sent = 0, size_t received = 0) {
  const auto body = [&] {
    if (On()) {
      Sent(sent, sent);
      Received(received);
      if (result == CUDA_ERROR_NOT_SUPPORTED) Unsupported();
    }
    return result;
  };
  CR_RETURN_TRACED(number, body());
}

class TraceTest : public testing::Test {
 protected:
  void SetUp() override {
    ForgetAfterFork();
    g_recording.store(kTotals);
  }
  void TearDown() override { g_recording.store(0); }
};

TEST_F(TraceTest, CountsWhatACallDoes) {
  const uint32_t number = NumberOf("cuMemcpyHtoD_v2");
  OneCall(number, CUDA_SUCCESS, 100, 32);
  EXPECT_EQ(OneCall(number, CUDA_ERROR_INVALID_VALUE, 10, 0), CUDA_ERROR_INVALID_VALUE);
  OneCall(number, CUDA_ERROR_NOT_SUPPORTED);
  OneCall(number, CUDA_ERROR_NOT_READY);
  const Row row = Find("cuMemcpyHtoD_v2");
  EXPECT_EQ(row.count, 4u);
  EXPECT_EQ(row.errors, 2u);
  EXPECT_EQ(row.unsupported, 1u);
  EXPECT_EQ(row.sent, 110u);
  EXPECT_EQ(row.received, 32u);
  EXPECT_GE(row.total_ns, row.max_ns);
  EXPECT_GT(row.max_ns, 0u);
  EXPECT_EQ(TotalCalls(), 4u);
}

TEST_F(TraceTest, OffMeansNothing) {
  g_recording.store(0);
  OneCall(NumberOf("cuInit"));
  EXPECT_EQ(TotalCalls(), 0u);
}

TEST_F(TraceTest, InnerCallsCountForTheOuterOne) {
  const auto outer = [] {
    OneCall(NumberOf("cuStreamCreate"), CUDA_SUCCESS, 7, 5);
    return CUDA_SUCCESS;
  };
  const uint32_t number = NumberOf("cuLaunchKernel");
  [&]() -> CUresult { CR_RETURN_TRACED(number, outer()); }();
  EXPECT_EQ(Find("cuStreamCreate").count, 0u);
  EXPECT_EQ(Find("cuLaunchKernel").count, 1u);
  EXPECT_EQ(Find("cuLaunchKernel").sent, 7u);
  EXPECT_EQ(Find("cuLaunchKernel").received, 5u);
}

TEST_F(TraceTest, ThreadsAddUpAlsoAfterTheirEnd) {
  const uint32_t number = NumberOf("cuCtxGetCurrent");
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([number] {
        for (int j = 0; j < 1000; ++j) OneCall(number);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(Find("cuCtxGetCurrent").count, 24000u);
}

TEST_F(TraceTest, OtherFunctionsGetNumbers) {
  const uint32_t number = Register("private table x[1]");
  EXPECT_EQ(Register("private table x[1]"), number);
  EXPECT_NE(Register("private table x[2]"), number);
  OneCall(number);
  EXPECT_EQ(Find("private table x[1]").count, 1u);
  for (int i = 0; i < 5000; ++i) Register(("more " + std::to_string(i)).c_str());
  OneCall(Register("one too many"));
  uint64_t others = 0;
  for (const Row& row : Totals()) others += row.name == "other functions of private tables" ? row.count : 0;
  EXPECT_EQ(others, 1u);
  EXPECT_EQ(TotalCalls(), 2u);
}

TEST_F(TraceTest, AForkedChildBeginsAnew) {
  OneCall(NumberOf("cuInit"));
  const pid_t child = fork();
  if (child == 0) {
    ForgetAfterFork();
    OneCall(NumberOf("cuDriverGetVersion"));
    _exit(TotalCalls() == 1 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(TotalCalls(), 1u);
}

class FakeServer : public Server {
 public:
  bool BeginTimeline(uint64_t capacity) override {
    begun = capacity;
    return true;
  }
  void EndTimeline(WorkerEvents* events) override {
    events->pid = 99;
    events->names[12] = "cuLaunch\"Kernel";
    const uint64_t now = uint64_t(NowNs());
    events->events.push_back({now - 5000, now, 42, 12, 99, 0});
    events->events.push_back({now, now + 10, 4711, 13, 100, 1});
  }
  uint64_t begun = 0;
};

TEST_F(TraceTest, SliceHasCallsAndRequestsAndATable) {
  const uint32_t number = NumberOf("cuLaunchKernel");
  OneCall(number);           // before the slice
  static FakeServer server;  // for the tests that follow, too
  SetServer(&server);
  ASSERT_EQ(BeginSlice(100, 60).message(), "");
  EXPECT_EQ(server.begun, 100u);
  EXPECT_FALSE(BeginSlice(100, 60).ok());
  OneCall(number, CUDA_SUCCESS, 42, 0);
  std::thread([number] { OneCall(number); }).join();
  const int timeline = memfd_create("timeline", 0), table = memfd_create("table", 0);
  ASSERT_EQ(EndSlice(timeline, table, true).message(), "");
  EXPECT_FALSE(EndSlice(timeline, table, true).ok());
  OneCall(number);  // after it: nobody wants totals, so nothing is on any more
  const std::string text = Contents(timeline), counts = Contents(table);
  EXPECT_NE(counts.find("\"name\": \"cuLaunchKernel\", \"count\": 2"), std::string::npos) << counts;
  EXPECT_NE(text.find("\"name\":\"cuLaunch\\\"Kernel\""), std::string::npos) << text;
  EXPECT_NE(text.find("\"name\":\"call 13\""), std::string::npos) << text;
  // An arrow from the call to its request, and none to the request that is nobody's.
  EXPECT_NE(text.find("{\"ph\":\"s\",\"cat\":\"request\",\"name\":\"request\",\"id\":42"), std::string::npos) << text;
  EXPECT_NE(text.find("{\"ph\":\"f\",\"bp\":\"e\",\"cat\":\"request\",\"name\":\"request\",\"id\":42"),
            std::string::npos);
  EXPECT_EQ(text.find("\"id\":4711"), std::string::npos);
  close(timeline);
  close(table);
}

TEST_F(TraceTest, SliceEndsByItselfAndAnotherCanBegin) {
  ASSERT_EQ(BeginSlice(100, 0.05).message(), "");
  usleep(100000);
  OneCall(NumberOf("cuInit"));
  EXPECT_EQ(g_recording.load() & kTimeline, 0u);
  ASSERT_EQ(BeginSlice(100, 60).message(), "");
  const int files = memfd_create("files", 0);
  ASSERT_EQ(EndSlice(files, files, false).message(), "");
  close(files);
}

TEST(EventBufferTest, DropsWhatHasNoRoom) {
  EventBuffer buffer;
  uint64_t dropped = 0;
  buffer.Add({});
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(buffer.Begin(1000));
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&buffer] {
        for (uint64_t j = 1; j <= 300; ++j) {
          ClientEvent event;
          event.sequence = j;
          buffer.Add(event);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    const std::vector<ClientEvent> events = buffer.Take(&dropped);
    EXPECT_EQ(events.size(), 1000u);
    EXPECT_EQ(dropped, 200u);
    for (const ClientEvent& event : events) EXPECT_NE(event.sequence, 0u);
  }
}

TEST(ReportTest, SortsAndSums) {
  Report report;
  report.pid = 7;
  report.program = "a \"b\"\\\n\xff";
  report.rows = {{"cuCheap", 10, 1, 0, 5, 6, 1000, 200}, {"cuDear", 1, 0, 0, 0, 0, 9000000, 9000000}};
  const std::string text = TextReport(report);
  EXPECT_LT(text.find("cuDear"), text.find("cuCheap"));
  EXPECT_NE(text.find("so far"), std::string::npos);
  const std::string last = text.substr(text.rfind('\n', text.size() - 2));
  EXPECT_NE(last.find(" 11 "), std::string::npos) << last;
  EXPECT_NE(last.find("9.001"), std::string::npos) << last;
  const std::string json = JsonReport(report);
  EXPECT_NE(json.find(R"("program": "a \"b\"\\\u000a\u00ff",)"), std::string::npos) << json;
  EXPECT_NE(json.find("\"mean_us\": 0.100, \"max_us\": 0.200"), std::string::npos) << json;
}

TEST(ReportTest, PathsNameTheProcess) {
  EXPECT_EQ(ExpandPath("/t/%p.txt", "/here", "job", 12), "/t/12.txt");
  EXPECT_EQ(ExpandPath("t-%j-%p", "/here", "job", 12), "/here/t-job-12");
  EXPECT_EQ(ExpandPath("t.json", "/here", "", 12), "/here/t.12.json");
  EXPECT_EQ(ExpandPath("/a.b/t", "/here", "job", 12), "/a.b/t.job.12");
  EXPECT_EQ(ExpandPath("/a/.t", "/here", "", 12), "/a/.t.12");
  EXPECT_EQ(ExpandPath("100%%.txt", "", "", 12), "100%.12.txt");
}

}  // namespace
}  // namespace cuda_remote::client::trace
