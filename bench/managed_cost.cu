// SPDX-License-Identifier: Apache-2.0
// What managed memory costs, and host memory that kernels use, one row after another, as one JSON object on stdout. The
// program is an ordinary CUDA program: it is run natively and under cuda-remote, and the results are compared. What was
// computed is checked.
//
// The host touches managed memory only while the GPU is idle, as devices without concurrentManagedAccess ask for.
//
// Usage: managed_cost [--quick] [--mb N (2048)] [--only TEXT: rows whose names contain it]
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace {

// The error of the row being measured; set by TRY, which leaves the row.
struct RowError {
  std::string text;
};

#define TRY(call)                                                                                        \
  do {                                                                                                   \
    cudaError_t try_error = (call);                                                                      \
    if (try_error != cudaSuccess) throw RowError{std::string(#call ": ") + cudaGetErrorName(try_error)}; \
  } while (0)

bool quick = false;
const char* only = "";
bool first_row = true;

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void Check(bool good) {
  if (!good) throw RowError{"wrong contents"};
}

// Runs `sample` (which returns the value of one repetition) and prints the median.
void Row(const char* name, const char* unit, int repetitions, const std::function<double()>& sample) {
  if (!strstr(name, only)) return;
  std::vector<double> values;
  std::string error;
  try {
    for (int i = 0; i < (quick ? 1 : repetitions); ++i) values.push_back(sample());
  } catch (const RowError& e) {
    error = e.text;
    cudaGetLastError();
  }
  printf("%s\n    {\"name\": \"%s\", \"unit\": \"%s\", ", first_row ? "" : ",", name, unit);
  first_row = false;
  if (!error.empty()) {
    printf("\"error\": \"%s\"}", error.c_str());
    return;
  }
  std::sort(values.begin(), values.end());
  printf("\"value\": %.6g}", values[values.size() / 2]);
  fflush(stdout);
}

struct Managed {
  explicit Managed(size_t bytes) { TRY(cudaMallocManaged(&memory, bytes)); }
  ~Managed() { cudaFree(memory); }
  uint64_t* words() const { return static_cast<uint64_t*>(memory); }
  float* floats() const { return static_cast<float*>(memory); }
  void* memory = nullptr;
};

__global__ void Saxpy(float* y, const float* x, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    y[i] += 2 * x[i];
  }
}

__global__ void Advance(uint64_t* words, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    words[i] = words[i] * 3 + i;
  }
}

int Blocks() { return quick ? 4 : 1024; }

// Kernels on memory that they have used before.
double Bandwidth(size_t bytes) {
  const size_t count = bytes / 2 / sizeof(float);
  const Managed x(bytes / 2), y(bytes / 2);
  for (size_t i = 0; i < count; ++i) x.floats()[i] = 1, y.floats()[i] = 2;
  const int warm_up = quick ? 1 : 3, rounds = quick ? 1 : 10;
  for (int i = 0; i < warm_up; ++i) Saxpy<<<Blocks(), 256>>>(y.floats(), x.floats(), count);
  TRY(cudaDeviceSynchronize());
  const double start = Now();
  for (int i = 0; i < rounds; ++i) Saxpy<<<Blocks(), 256>>>(y.floats(), x.floats(), count);
  TRY(cudaDeviceSynchronize());
  const double seconds = Now() - start;
  const float expected = float(2 + 2 * (warm_up + rounds));
  Check(y.floats()[0] == expected && y.floats()[count - 1] == expected);
  return rounds * 1.5 * double(bytes) / seconds / 1e9;
}

// The host fills memory, a kernel uses it, the host reads it: GB/s of the kernel, or of the host's reads.
double FirstTouch(size_t bytes, bool of_host) {
  const size_t count = bytes / sizeof(uint64_t);
  const Managed managed(bytes);
  uint64_t* const words = managed.words();
  for (size_t i = 0; i < count; ++i) words[i] = i;
  const double start = Now();
  Advance<<<Blocks(), 256>>>(words, count);
  TRY(cudaDeviceSynchronize());
  const double middle = Now();
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += words[i];
  const double end = Now();
  Check(sum == uint64_t(count) * (count - 1) / 2 * 4);
  return double(bytes) / (of_host ? end - middle : middle - start) / 1e9;
}

// Microseconds of a round: the host changes all words, then a kernel does.
double Alternate(size_t bytes, int rounds) {
  if (quick) rounds = 2;
  const size_t count = bytes / sizeof(uint64_t);
  const Managed managed(bytes);
  uint64_t* const words = managed.words();
  for (size_t i = 0; i < count; ++i) words[i] = 0;
  uint64_t expected = 0;
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    const double start = Now();
    for (size_t i = 0; i < count; ++i) words[i] += 1;
    Advance<<<std::min(Blocks(), 256), 256>>>(words, count);
    TRY(cudaDeviceSynchronize());
    times.push_back((Now() - start) * 1e6);
    expected = (expected + 1) * 3 + (count - 1);
  }
  Check(words[count - 1] == expected);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

double AllocateAndFree(size_t bytes, bool managed, int rounds) {
  if (quick) rounds = 2;
  const double start = Now();
  for (int i = 0; i < rounds; ++i) {
    void* memory;
    TRY(managed ? cudaMallocManaged(&memory, bytes) : cudaMallocHost(&memory, bytes));
    TRY(managed ? cudaFree(memory) : cudaFreeHost(memory));
  }
  return (Now() - start) / rounds * 1e6;
}

// Host memory that kernels use, filled before.
struct Mapped {
  Mapped(size_t bytes, bool registered) : registered(registered) {
    if (registered) {
      memory = aligned_alloc(4096, bytes);
      memset(memory, 1, bytes);
      TRY(cudaHostRegister(memory, bytes, cudaHostRegisterMapped));
    } else {
      TRY(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped));
      memset(memory, 1, bytes);
    }
    TRY(cudaHostGetDevicePointer(&device, memory, 0));
  }
  ~Mapped() {
    if (!registered) {
      cudaFreeHost(memory);
      return;
    }
    cudaHostUnregister(memory);
    free(memory);
  }
  const bool registered;
  void *memory = nullptr, *device = nullptr;
};

// Microseconds of a round: kernels change 64 KB, and the host waits and looks at one word.
double UseLittle(size_t bytes, bool registered, int launches, int rounds) {
  if (quick) rounds = 2;
  const size_t count = (64 << 10) / sizeof(uint64_t), middle = bytes / 2 / sizeof(uint64_t);
  const Mapped mapped(bytes, registered);
  volatile uint64_t* const words = static_cast<uint64_t*>(mapped.memory) + middle;
  uint64_t expected = words[5];
  double start = 0;
  for (int round = -1; round < rounds; ++round) {
    if (round == 0) start = Now();
    for (int i = 0; i < launches; ++i, expected = expected * 3 + 5) {
      Advance<<<std::min(Blocks(), 8), 256>>>(static_cast<uint64_t*>(mapped.device) + middle, count);
    }
    TRY(cudaDeviceSynchronize());
    Check(words[5] == expected);
  }
  return (Now() - start) / rounds * 1e6;
}

// Microseconds of a copy that has nothing to do with the mapped memory.
double CopyBeside(size_t bytes, int rounds) {
  if (quick) rounds = 2;
  const Mapped mapped(bytes, false);
  constexpr size_t kBytes = 4096;
  char from[kBytes] = {1};
  void* device;
  TRY(cudaMalloc(&device, kBytes));
  TRY(cudaMemcpy(device, from, kBytes, cudaMemcpyHostToDevice));
  TRY(cudaDeviceSynchronize());
  const double start = Now();
  for (int i = 0; i < rounds; ++i) TRY(cudaMemcpy(device, from, kBytes, cudaMemcpyHostToDevice));
  const double seconds = Now() - start;
  TRY(cudaFree(device));
  return seconds / rounds * 1e6;
}

// Microseconds to register memory that has been written to, and to end that.
double RegisterAndEnd(size_t bytes, int rounds) {
  if (quick) rounds = 2;
  void* const memory = aligned_alloc(4096, bytes);
  memset(memory, 1, bytes);
  double start = 0;
  for (int i = -1; i < rounds; ++i) {
    if (i == 0) start = Now();
    TRY(cudaHostRegister(memory, bytes, cudaHostRegisterDefault));
    TRY(cudaHostUnregister(memory));
  }
  const double seconds = Now() - start;
  free(memory);
  return seconds / rounds * 1e6;
}

// Gigabytes in a second.
double CopyRegistered(size_t bytes, cudaMemcpyKind kind) {
  const Mapped mapped(bytes, true);
  void* device;
  TRY(cudaMalloc(&device, bytes));
  const bool to_device = kind == cudaMemcpyHostToDevice;
  constexpr int kRounds = 5;
  double start = 0;
  for (int i = -1; i < kRounds; ++i) {
    if (i == 0) start = Now();
    TRY(cudaMemcpyAsync(to_device ? device : mapped.memory, to_device ? mapped.memory : device, bytes, kind));
    TRY(cudaDeviceSynchronize());
  }
  const double seconds = Now() - start;
  TRY(cudaFree(device));
  return double(bytes) * kRounds / seconds / 1e9;
}

// Whole programs, in seconds.

// The host fills two vectors, kernels add one to the other, the host looks at all of the sum.
double SaxpyProgram(size_t bytes) {
  const double start = Now();
  const size_t count = bytes / 2 / sizeof(float);
  const int rounds = quick ? 2 : 20;
  const Managed x(bytes / 2), y(bytes / 2);
  for (size_t i = 0; i < count; ++i) x.floats()[i] = float(i % 7), y.floats()[i] = 1;
  for (int i = 0; i < rounds; ++i) {
    Saxpy<<<Blocks(), 256>>>(y.floats(), x.floats(), count);
    TRY(cudaDeviceSynchronize());
  }
  bool good = true;
  for (size_t i = 0; i < count; ++i) good &= y.floats()[i] == 1 + 2 * float(rounds) * float(i % 7);
  Check(good);
  return Now() - start;
}

constexpr int kNeighbours = 32;

// A spring to each neighbour.
__global__ void Forces(float4* force, const float4* position, const int* neighbours, int count, float* energy) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float4 here = position[i];
  float4 sum = {0, 0, 0, 0};
  for (int k = 0; k < kNeighbours; ++k) {
    const float4 there = position[neighbours[i * kNeighbours + k]];
    const float x = there.x - here.x, y = there.y - here.y, z = there.z - here.z;
    sum.x += x, sum.y += y, sum.z += z, sum.w += x * x + y * y + z * z;
  }
  force[i] = sum;
  atomicAdd(energy, sum.w);
}

__global__ void Move(float4* position, float4* speed, const float4* force, int count, float step) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float4 v = speed[i], p = position[i];
  v.x += step * force[i].x, v.y += step * force[i].y, v.z += step * force[i].z;
  p.x += step * v.x, p.y += step * v.y, p.z += step * v.z;
  speed[i] = v, position[i] = p;
}

// Molecular dynamics in small: 1000 launches, and the host reads and clears the energy now and then.
double MoleculesProgram() {
  const double start = Now();
  const int count = quick ? 256 : 65536, launches = quick ? 4 : 1000, look = quick ? 1 : 25;
  const size_t bytes = size_t(count) * sizeof(float4);
  const Managed position(bytes), speed(bytes), force(bytes), list(size_t(count) * kNeighbours * sizeof(int)),
      energy(4096);
  float4* const positions = static_cast<float4*>(position.memory);
  int* const neighbours = static_cast<int*>(list.memory);
  for (int i = 0; i < count; ++i) {
    positions[i] = {float(i % 64), float(i / 64 % 64), float(i / 4096), 0};
    for (int k = 0; k < kNeighbours; ++k) neighbours[i * kNeighbours + k] = (i + 1 + k * k) % count;
  }
  memset(speed.memory, 0, bytes);
  *energy.floats() = 0;
  float before = 0;
  for (int i = 0; i < launches / 2; ++i) {
    float4* const forces = static_cast<float4*>(force.memory);
    Forces<<<(count + 127) / 128, 128>>>(forces, positions, neighbours, count, energy.floats());
    Move<<<(count + 127) / 128, 128>>>(positions, static_cast<float4*>(speed.memory), forces, count, 1e-5f);
    if ((i + 1) % look != 0) continue;
    TRY(cudaDeviceSynchronize());
    const float now = *energy.floats();
    Check(now > 0 && (before == 0 || (now < 1.1f * before && now > 0.5f * before)));
    before = now;
    *energy.floats() = 0;
  }
  return Now() - start;
}

constexpr int kTile = 16;

__global__ void Multiply(float* c, const float* a, const float* b, int n) {
  __shared__ float left[kTile][kTile], right[kTile][kTile];
  const int row = blockIdx.y * kTile + threadIdx.y, column = blockIdx.x * kTile + threadIdx.x;
  float sum = 0;
  for (int k = 0; k < n; k += kTile) {
    left[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
    right[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
    __syncthreads();
    for (int i = 0; i < kTile; ++i) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
    __syncthreads();
  }
  c[row * n + column] = sum;
}

// Products of matrices, each of which the host fills before and sums up after.
double ProductsProgram() {
  const double start = Now();
  const int n = quick ? 32 : 2048, rounds = quick ? 2 : 20;
  const size_t count = size_t(n) * size_t(n);
  const Managed a(count * sizeof(float)), b(count * sizeof(float)), c(count * sizeof(float));
  for (size_t i = 0; i < count; ++i) b.floats()[i] = i % size_t(n) == i / size_t(n) ? 2 : 0;
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < count; ++i) a.floats()[i] = float(i % 13) + float(round);
    Multiply<<<dim3(n / kTile, n / kTile), dim3(kTile, kTile)>>>(c.floats(), a.floats(), b.floats(), n);
    TRY(cudaDeviceSynchronize());
    bool good = true;
    for (size_t i = 0; i < count; ++i) good &= c.floats()[i] == 2 * (float(i % 13) + float(round));
    Check(good);
  }
  return Now() - start;
}

// Pinned and managed memory of many sizes, a hundred pieces at a time, of which the host uses a little.
double AllocationsProgram() {
  const double start = Now();
  constexpr int kLive = 100;
  void* pieces[kLive] = {};
  const int all = quick ? 200 : 9000;
  for (int i = 0; i < all + kLive; ++i) {
    void*& piece = pieces[i % kLive];
    const bool managed = i % 2 == 0;
    if (piece) TRY(managed ? cudaFree(piece) : cudaFreeHost(piece));
    piece = nullptr;
    if (i >= all) continue;
    const size_t bytes = size_t{64} << (i * 7 % 13);
    TRY(managed ? cudaMallocManaged(&piece, bytes) : cudaMallocHost(&piece, bytes));
    static_cast<char*>(piece)[bytes - 1] = char(i);
  }
  return Now() - start;
}

}  // namespace

int main(int argc, char** argv) {
  size_t mb = 2048;
  for (int i = 1; i < argc; ++i) {
    if (!strcmp(argv[i], "--quick")) quick = true;
    if (!strcmp(argv[i], "--mb") && i + 1 < argc) mb = size_t(atoi(argv[++i]));
    if (!strcmp(argv[i], "--only") && i + 1 < argc) only = argv[++i];
  }
  cudaDeviceProp properties = {};
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) return 1;
  printf("{\n  \"gpu\": \"%s\",\n  \"rows\": [", properties.name);
  const size_t large = quick ? size_t{2} << 20 : mb << 20;
  Row("managed: kernel bandwidth", "GB/s", 1, [=] { return Bandwidth(large); });
  Row("managed: first use by a kernel", "GB/s", 3, [=] { return FirstTouch(large, false); });
  Row("managed: read by the host after a kernel", "GB/s", 3, [=] { return FirstTouch(large, true); });
  Row("managed: host and kernel in turn, 64 KB", "us", 1, [] { return Alternate(64 << 10, 300); });
  Row("managed: host and kernel in turn, 1 MB", "us", 1, [] { return Alternate(1 << 20, 100); });
  Row("managed: host and kernel in turn, 64 MB", "us", 1, [] { return Alternate(quick ? 4 << 20 : 64 << 20, 7); });
  for (const bool managed : {true, false}) {
    const std::string kind = managed ? "managed" : "pinned";
    Row((kind + ": allocate + free 4 KB").c_str(), "us", 3, [=] { return AllocateAndFree(4096, managed, 300); });
    Row((kind + ": allocate + free 1 MB").c_str(), "us", 3, [=] { return AllocateAndFree(1 << 20, managed, 100); });
    Row((kind + ": allocate + free 16 MB").c_str(), "us", 3, [=] { return AllocateAndFree(16 << 20, managed, 10); });
  }
  const size_t mapped = quick ? size_t{1} << 20 : size_t{256} << 20;
  for (const bool registered : {false, true}) {
    const std::string kind = registered ? "registered" : "pinned";
    Row((kind + ": kernel on 64 KB of 256 MB + wait").c_str(), "us", 1,
        [=] { return UseLittle(mapped, registered, 1, 40); });
    Row((kind + ": 10 kernels on 64 KB of 256 MB + wait").c_str(), "us", 1,
        [=] { return UseLittle(mapped, registered, 10, 10); });
  }
  Row("pinned: copy 4 KB beside 256 MB", "us", 1, [=] { return CopyBeside(mapped, 100); });
  Row("registered: register + unregister 4 KB", "us", 3, [=] { return RegisterAndEnd(4096, 300); });
  Row("registered: register + unregister 1 MB", "us", 3, [=] { return RegisterAndEnd(1 << 20, 50); });
  Row("registered: register + unregister 1 GB", "us", 1,
      [=] { return RegisterAndEnd(quick ? size_t{1} << 20 : size_t{1} << 30, 3); });
  Row("registered copy to device", "GB/s", 3, [=] { return CopyRegistered(mapped, cudaMemcpyHostToDevice); });
  Row("registered copy to host", "GB/s", 3, [=] { return CopyRegistered(mapped, cudaMemcpyDeviceToHost); });
  Row("managed program: saxpy", "s", 1, [=] { return SaxpyProgram(large); });
  Row("managed program: molecular dynamics", "s", 1, [] { return MoleculesProgram(); });
  Row("managed program: products of matrices", "s", 1, [] { return ProductsProgram(); });
  Row("managed program: 9000 allocations and frees", "s", 1, [] { return AllocationsProgram(); });
  printf("\n  ]\n}\n");
  return 0;
}
