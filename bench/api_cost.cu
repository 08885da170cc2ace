// SPDX-License-Identifier: Apache-2.0
// Measures what driver calls cost the caller, one row after another, and prints one JSON object to stdout.
//
// Every row has its own warm-up and is repeated; the value is the median of the repetitions. A row that the driver
// cannot do carries "error" instead of a value, and the rest goes on. The program is an ordinary CUDA program: it is
// run natively and under cuda-remote and the results are compared (see bench/run).
//
// Usage: api_cost [--quick] [--copy-mb N (256)] [--only SUBSTRING]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace {

__global__ void Nothing() {}

__global__ void Eight(int* out, int a, float b, double c, unsigned long long d, short e, int f, int g) {
  if (out && a == 1 && b == 2.0f && c == 3.0 && d == 4 && e == 5 && f == 6) *out = g;
}

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Settings {
  bool quick = false;
  size_t copy_mb = 256;
  const char* only = "";
};

Settings settings;
cudaStream_t stream;
bool first_row = true;

// The error of the row being measured; set by TRY, which leaves the row.
struct RowError {
  std::string text;
};

#define TRY(call)                                                                                        \
  do {                                                                                                   \
    cudaError_t try_error = (call);                                                                      \
    if (try_error != cudaSuccess) throw RowError{std::string(#call ": ") + cudaGetErrorName(try_error)}; \
  } while (0)

// Runs `sample` (which returns the value of one repetition) and prints the row.
void Row(const char* name, const char* unit, int repetitions, const std::function<double()>& sample) {
  if (!strstr(name, settings.only)) return;
  if (settings.quick) repetitions = std::min(repetitions, 3);
  std::vector<double> values;
  std::string error;
  try {
    for (int i = 0; i < repetitions; ++i) values.push_back(sample());
  } catch (const RowError& e) {
    error = e.text;
    cudaGetLastError();
  }
  printf("%s\n    {\"name\": \"%s\", \"unit\": \"%s\", ", first_row ? "" : ",", name, unit);
  first_row = false;
  if (!error.empty()) {
    printf("\"error\": \"%s\"}", error.c_str());
  } else {
    std::sort(values.begin(), values.end());
    printf("\"value\": %.6g, \"low\": %.6g, \"high\": %.6g, \"repetitions\": %zu}", values[values.size() / 2],
           values.front(), values.back(), values.size());
  }
  fflush(stdout);
}

int Scaled(int count) { return settings.quick ? std::max(1, count / 20) : count; }

// Mean time of one `body` in microseconds over `count` runs; `after` is waited for inside the measured time.
double Microseconds(int count, const std::function<void()>& body, const std::function<void()>& after = nullptr) {
  double start = Now();
  for (int i = 0; i < count; ++i) body();
  if (after) after();
  return (Now() - start) / count * 1e6;
}

// Calls of a row about issuing: few enough that no queue on the way fills up.
constexpr int kIssued = 400;

void Synchronize() { TRY(cudaStreamSynchronize(stream)); }

void Launches() {
  int* none = nullptr;
  auto launch0 = [] {
    Nothing<<<1, 1, 0, stream>>>();
    TRY(cudaGetLastError());
  };
  auto launch8 = [none] {
    Eight<<<1, 1, 0, stream>>>(none, 1, 2.0f, 3.0, 4, 5, 6, 7);
    TRY(cudaGetLastError());
  };
  struct Kind {
    const char* issue;
    const char* sustained;
    std::function<void()> launch;
  };
  for (const Kind& kind : {Kind{"launch, no arguments: issue", "launch, no arguments: sustained", launch0},
                           Kind{"launch, 8 arguments: issue", "launch, 8 arguments: sustained", launch8}}) {
    Row(kind.issue, "us", 15, [&] {
      Synchronize();
      double value = Microseconds(Scaled(kIssued), kind.launch);
      Synchronize();
      return value;
    });
    Row(kind.sustained, "us", 7, [&] { return Microseconds(Scaled(20000), kind.launch, Synchronize); });
  }
  Row("launch + stream synchronize", "us", 7, [&] {
    return Microseconds(Scaled(2000), [&] {
      launch0();
      Synchronize();
    });
  });
}

void SmallCopies() {
  int* device = nullptr;
  int host = 0;
  Row("memcpy 4 B device to host", "us", 7, [&] {
    if (!device) TRY(cudaMalloc(&device, 4));
    return Microseconds(Scaled(2000), [&] { TRY(cudaMemcpy(&host, device, 4, cudaMemcpyDeviceToHost)); });
  });
  Row("memcpy 4 B host to device", "us", 7, [&] {
    if (!device) TRY(cudaMalloc(&device, 4));
    return Microseconds(
        Scaled(2000), [&] { TRY(cudaMemcpy(device, &host, 4, cudaMemcpyHostToDevice)); }, Synchronize);
  });
  Row("memset 4 B", "us", 7, [&] {
    if (!device) TRY(cudaMalloc(&device, 4));
    return Microseconds(
        Scaled(2000), [&] { TRY(cudaMemsetAsync(device, 0, 4, stream)); }, Synchronize);
  });
  if (device) cudaFree(device);
}

// What frameworks copy between steps: batches, scalars of many kinds, pieces of a checkpoint.
void MiddleCopies() {
  char* device = nullptr;
  char* pinned = nullptr;
  std::vector<char> pageable(1 << 20, 1);
  struct Size {
    const char* name;
    size_t bytes;
    int count;
  };
  for (const Size& size : {Size{"64 KB", 64 << 10, 400}, Size{"1 MB", 1 << 20, 100}}) {
    for (const bool is_pinned : {false, true}) {
      for (const bool to_device : {true, false}) {
        const std::string name = std::string(is_pinned ? "pinned copy " : "pageable copy ") + size.name +
                                 (to_device ? " to device" : " to host");
        Row(name.c_str(), "us", 7, [&] {
          if (!device) TRY(cudaMalloc(&device, 1 << 20));
          if (!pinned) TRY(cudaMallocHost(&pinned, 1 << 20));
          char* const host = is_pinned ? pinned : pageable.data();
          return Microseconds(Scaled(size.count), [&] {
            if (to_device) {
              TRY(cudaMemcpyAsync(device, host, size.bytes, cudaMemcpyHostToDevice, stream));
            } else {
              TRY(cudaMemcpyAsync(host, device, size.bytes, cudaMemcpyDeviceToHost, stream));
            }
            Synchronize();
          });
        });
      }
    }
  }
  if (device) cudaFree(device);
  if (pinned) cudaFreeHost(pinned);
}

void EventsAndQueries() {
  cudaEvent_t event = nullptr;
  auto made = [&] {
    if (!event) TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  };
  Row("event query", "us", 7, [&] {
    made();
    TRY(cudaEventRecord(event, stream));
    Synchronize();
    return Microseconds(Scaled(5000), [&] {
      cudaError_t result = cudaEventQuery(event);
      if (result != cudaSuccess && result != cudaErrorNotReady) TRY(result);
    });
  });
  if (event) cudaEventDestroy(event);
  struct Kind {
    const char* issue;
    const char* sustained;
    unsigned flags;
  };
  for (const Kind& kind :
       {Kind{"event record: issue", "event record: sustained", cudaEventDisableTiming},
        Kind{"event record, with timing: issue", "event record, with timing: sustained", cudaEventDefault}}) {
    TRY(cudaEventCreateWithFlags(&event, kind.flags));
    const auto record = [&] { TRY(cudaEventRecord(event, stream)); };
    Row(kind.issue, "us", 15, [&] {
      Synchronize();
      const double value = Microseconds(Scaled(kIssued), record);
      Synchronize();
      return value;
    });
    Row(kind.sustained, "us", 7, [&] { return Microseconds(Scaled(20000), record, Synchronize); });
    TRY(cudaEventDestroy(event));
  }
  Row("cudaGetDevice", "us", 7, [&] {
    int device;
    return Microseconds(Scaled(100000), [&] { TRY(cudaGetDevice(&device)); });
  });
  char* memory = nullptr;
  Row("pointer attributes", "us", 7, [&] {
    if (!memory) TRY(cudaMalloc(&memory, 1 << 20));
    cudaPointerAttributes attributes;
    return Microseconds(Scaled(50000), [&] { TRY(cudaPointerGetAttributes(&attributes, memory + 4096)); });
  });
  if (memory) cudaFree(memory);
}

void MakeAndDestroy() {
  struct Size {
    const char* name;
    size_t bytes;
    int count;
  };
  // Programs have other small allocations; without one, each 1 KB would open and close a page of the driver's.
  void* company = nullptr;
  if (cudaMalloc(&company, 1024) != cudaSuccess) company = nullptr;
  for (const Size& size : {Size{"malloc+free 2 MB", 2u << 20, 500}, Size{"malloc+free 1 KB", 1024, 2000}}) {
    Row(size.name, "us", 7, [&] {
      return Microseconds(Scaled(size.count), [&] {
        void* p;
        TRY(cudaMalloc(&p, size.bytes));
        TRY(cudaFree(p));
      });
    });
  }
  Row("mallocAsync+freeAsync 1 KB", "us", 7, [&] {
    return Microseconds(
        Scaled(2000),
        [&] {
          void* p;
          TRY(cudaMallocAsync(&p, 1024, stream));
          TRY(cudaFreeAsync(p, stream));
        },
        Synchronize);
  });
  if (company) cudaFree(company);
  Row("stream create+destroy", "us", 7, [&] {
    return Microseconds(Scaled(500), [&] {
      cudaStream_t s;
      TRY(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
      TRY(cudaStreamDestroy(s));
    });
  });
}

void Graphs() {
  cudaGraphExec_t executable = nullptr;
  Row("graph of 100 kernels, launch + synchronize", "us", 7, [&] {
    if (!executable) {
      cudaGraph_t graph;
      TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < 100; ++i) Nothing<<<1, 1, 0, stream>>>();
      TRY(cudaStreamEndCapture(stream, &graph));
      TRY(cudaGraphInstantiate(&executable, graph, 0));
      TRY(cudaGraphDestroy(graph));
    }
    return Microseconds(Scaled(500), [&] {
      TRY(cudaGraphLaunch(executable, stream));
      Synchronize();
    });
  });
  if (executable) cudaGraphExecDestroy(executable);
}

void BigCopies() {
  const size_t bytes = settings.copy_mb << 20;
  char* device = nullptr;
  std::vector<char> pageable;
  char* pinned = nullptr;
  auto rate = [&](void* to, const void* from, cudaMemcpyKind kind) {
    double start = Now();
    TRY(cudaMemcpyAsync(to, from, bytes, kind, stream));
    Synchronize();
    return bytes / (Now() - start) / 1e9;
  };
  auto ready = [&](bool want_pinned) {
    if (!device) TRY(cudaMalloc(&device, bytes));
    if (want_pinned) {
      if (!pinned) {
        TRY(cudaMallocHost(&pinned, bytes));
        memset(pinned, 1, bytes);
        rate(device, pinned, cudaMemcpyHostToDevice);  // warm-up
      }
    } else if (pageable.empty()) {
      pageable.assign(bytes, 1);
      rate(device, pageable.data(), cudaMemcpyHostToDevice);
    }
  };
  Row("pageable copy to device", "GB/s", 7, [&] {
    ready(false);
    return rate(device, pageable.data(), cudaMemcpyHostToDevice);
  });
  Row("pageable copy to host", "GB/s", 7, [&] {
    ready(false);
    return rate(pageable.data(), device, cudaMemcpyDeviceToHost);
  });
  Row("pinned copy to device", "GB/s", 7, [&] {
    ready(true);
    return rate(device, pinned, cudaMemcpyHostToDevice);
  });
  Row("pinned copy to host", "GB/s", 7, [&] {
    ready(true);
    return rate(pinned, device, cudaMemcpyDeviceToHost);
  });
  if (device) cudaFree(device);
  if (pinned) cudaFreeHost(pinned);
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (!strcmp(argv[i], "--quick")) {
      settings.quick = true;
    } else if (!strcmp(argv[i], "--copy-mb") && i + 1 < argc) {
      settings.copy_mb = std::max(1, atoi(argv[++i]));
    } else if (!strcmp(argv[i], "--only") && i + 1 < argc) {
      settings.only = argv[++i];
    } else {
      fprintf(stderr, "usage: %s [--quick] [--copy-mb N] [--only SUBSTRING]\n", argv[0]);
      return 2;
    }
  }
  double start = Now();
  Nothing<<<1, 1>>>();
  cudaError_t error = cudaDeviceSynchronize();
  double first = (Now() - start) * 1e3;
  if (error != cudaSuccess) {
    fprintf(stderr, "api_cost: the first kernel failed: %s\n", cudaGetErrorName(error));
    return 1;
  }
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) strcpy(properties.name, "unknown");
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
    fprintf(stderr, "api_cost: no stream\n");
    return 1;
  }
  printf("{\n  \"gpu\": \"%s\",\n  \"rows\": [", properties.name);
  if (strstr("first kernel, from cuInit", settings.only)) {
    printf("\n    {\"name\": \"first kernel, from cuInit\", \"unit\": \"ms\", \"value\": %.6g}", first);
    first_row = false;
  }
  for (int i = 0; i < 100; ++i) Nothing<<<1, 1, 0, stream>>>();
  cudaStreamSynchronize(stream);
  Launches();
  SmallCopies();
  MiddleCopies();
  EventsAndQueries();
  MakeAndDestroy();
  BigCopies();
  Graphs();
  printf("\n  ]\n}\n");
  cudaStreamDestroy(stream);
  return 0;
}
