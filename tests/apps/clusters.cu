// SPDX-License-Identifier: Apache-2.0
// Clusters of blocks and the other attributes of launches: cluster dimensions from the code and from the launch, also
// larger than portable, shared memory of other blocks (read, added to, copied to, multicast to), barriers of the
// cluster at once and in two halves, scheduling policies, priorities, kernels that start before the one ahead of them
// has ended, cooperative launches. All of them one by one and in a graph that was captured from them, whose nodes and
// edges are asked for what they know before the first step and after the last. First, questions of occupancy, and what
// the driver answers to clusters that cannot be.
#include <cooperative_groups.h>
#include <cuda.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/apps/support/driver.h"

namespace cg = cooperative_groups;

constexpr unsigned kThreads = 64, kBins = 256, kPortable = 8, kTeam = 4;

// ---------------------------------------------------------------------------------------------------------- on the GPU

// Pairs of blocks: every thread combines what it has with what a thread of the other block has.
__global__ void __cluster_dims__(2, 1, 1) Exchange(unsigned* data, unsigned salt) {
  __shared__ unsigned mine[kThreads];
  cg::cluster_group cluster = cg::this_cluster();
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  mine[threadIdx.x] = data[i] * 3 + salt;
  cluster.sync();
  const unsigned* other = cluster.map_shared_rank(mine, cluster.block_rank() ^ 1);
  const unsigned got = other[kThreads - 1 - threadIdx.x];
  cluster.sync();
  data[i] = mine[threadIdx.x] ^ (got << 5 | got >> 27);
}

// A histogram whose bins are spread over the blocks of a cluster, which may have any shape. Each block also says where
// it is.
__global__ void Histogram(const unsigned* data, unsigned* bins, unsigned* places) {
  __shared__ unsigned part[kBins];
  cg::cluster_group cluster = cg::this_cluster();
  const unsigned each = (kBins + cluster.num_blocks() - 1) / cluster.num_blocks(), rank = cluster.block_rank();
  for (unsigned i = threadIdx.x; i < each; i += blockDim.x) part[i] = 0;
  cluster.barrier_arrive();
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned bin = data[block * kThreads + threadIdx.x] >> 24;
  if (threadIdx.x == 0) {
    const dim3 at = cluster.block_index(), dim = cluster.dim_blocks();
    places[block] = rank | at.x << 8 | at.y << 12 | at.z << 16 | dim.x << 20 | dim.y << 24 | dim.z << 28;
  }
  cluster.barrier_wait();
  atomicAdd(cluster.map_shared_rank(&part[bin % each], bin / each), 1u);
  cluster.sync();
  for (unsigned i = threadIdx.x; i < each && rank * each + i < kBins; i += blockDim.x) {
    atomicAdd(&bins[rank * each + i], part[i]);
  }
}

__device__ uint32_t Shared(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
// The same place in another block's shared memory.
__device__ uint32_t InBlock(uint32_t shared, unsigned rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}
__device__ void InitBarrier(const uint64_t* barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(Shared(barrier)), "r"(count) : "memory");
}
__device__ void Expect(const uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(Shared(barrier)), "r"(bytes) : "memory");
}
__device__ void WaitForPhase(const uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%0], %1;\n"
      "@!over bra again;\n"
      "}\n" ::"r"(Shared(barrier)),
      "r"(parity)
      : "memory");
}

// Teams of four blocks. Each fetches a quarter of the team's data for all four, then sends what it has made of it and
// one word more to the next one, and tells the first one that it is done.
__global__ void Team(const unsigned* data, unsigned* out, unsigned salt) {
  __shared__ alignas(128) unsigned all[kTeam * kThreads];
  __shared__ alignas(128) unsigned made[kThreads], parcel[kThreads];
  __shared__ alignas(16) unsigned letter;
  __shared__ alignas(8) uint64_t fetched, sent, done;
  cg::cluster_group cluster = cg::this_cluster();
  const unsigned rank = cluster.block_rank(), next = (rank + 1) % kTeam;
  const unsigned first = blockIdx.x / kTeam * kTeam * kThreads;
  if (threadIdx.x == 0) {
    InitBarrier(&fetched, 1);
    InitBarrier(&sent, 1);
    InitBarrier(&done, kTeam);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    Expect(&fetched, sizeof all);
    Expect(&sent, sizeof parcel + sizeof letter);
  }
  cluster.sync();
  if (threadIdx.x == 0) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(Shared(all + rank * kThreads)),
        "l"(data + first + rank * kThreads), "r"(unsigned(kThreads * sizeof *data)), "r"(Shared(&fetched)),
        "h"(static_cast<uint16_t>((1 << kTeam) - 1))
        : "memory");
  }
  WaitForPhase(&fetched, 0);
  unsigned sum = salt + rank;
  for (unsigned r = 0; r < kTeam; ++r) sum = sum * 31 + all[r * kThreads + (threadIdx.x + r) % kThreads];
  made[threadIdx.x] = sum;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t barrier = InBlock(Shared(&sent), next);
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     InBlock(Shared(parcel), next)),
                 "r"(Shared(made)), "r"(unsigned(sizeof parcel)), "r"(barrier)
                 : "memory");
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     InBlock(Shared(&letter), next)),
                 "r"(rank * 1000 + salt), "r"(barrier)
                 : "memory");
  }
  WaitForPhase(&sent, 0);
  out[first + rank * kThreads + threadIdx.x] = parcel[threadIdx.x] + letter;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(InBlock(Shared(&done), 0))
                 : "memory");
  }
  if (rank == 0) WaitForPhase(&done, 0);
  cluster.sync();  // nobody's shared memory goes while somebody may still use it
}

// One cluster sums up what all its blocks have.
__global__ void Wide(const unsigned* data, unsigned* sums) {
  __shared__ unsigned total;
  cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x == 0) total = 0;
  cluster.sync();
  unsigned* first = cluster.map_shared_rank(&total, 0);
  atomicAdd(first, data[blockIdx.x * kThreads + threadIdx.x] ^ cluster.block_rank());
  cluster.sync();
  if (cluster.block_rank() == 0 && threadIdx.x == 0) sums[blockIdx.x / cluster.num_blocks()] += total;
}

// Lets the next kernel start before its own work is done.
__global__ void Produce(const unsigned* data, unsigned* between, unsigned salt) {
  cudaTriggerProgrammaticLaunchCompletion();
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  between[i] = data[i] * 7 + salt;
}
__global__ void Consume(const unsigned* between, unsigned* data, unsigned count) {
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  cudaGridDependencySynchronize();
  data[i] = between[i] ^ (between[count - 1 - i] >> 3);
}

// The whole grid, in rounds.
__global__ void Together(unsigned* data, unsigned* other, unsigned count, unsigned rounds) {
  cg::grid_group grid = cg::this_grid();
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  for (unsigned round = 0; round < rounds; ++round) {
    other[i] = data[(i + kThreads + 1) % count] + round;
    grid.sync();
    data[i] = data[i] * 5 + other[(i + 3 * kThreads) % count];
    grid.sync();
  }
}

// ---------------------------------------------------------------------------------------------------------- on the
// host

namespace {

// A launch with attributes that are added one after the other.
struct Config {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[4] = {};

  Config(dim3 grid, cudaStream_t stream, unsigned threads = kThreads) {
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = attributes;
  }
  Config(const Config&) = delete;
  const cudaLaunchConfig_t* Get() const { return &config; }
  cudaLaunchAttributeValue& Add(cudaLaunchAttributeID id) {
    attributes[config.numAttrs].id = id;
    return attributes[config.numAttrs++].val;
  }
  Config& Cluster(unsigned x, unsigned y = 1, unsigned z = 1) {
    Add(cudaLaunchAttributeClusterDimension).clusterDim = {x, y, z};
    return *this;
  }
  Config& Policy(cudaClusterSchedulingPolicy policy) {
    Add(cudaLaunchAttributeClusterSchedulingPolicyPreference).clusterSchedulingPolicyPreference = policy;
    return *this;
  }
  Config& Priority(int priority) {
    Add(cudaLaunchAttributePriority).priority = priority;
    return *this;
  }
  Config& Cooperative() {
    Add(cudaLaunchAttributeCooperative).cooperative = 1;
    return *this;
  }
};

CUfunction FunctionOf(const void* symbol) {
  cudaFunction_t function;
  CUDA_CHECK(cudaGetFuncBySymbol(&function, symbol));
  return reinterpret_cast<CUfunction>(function);
}

const char* NameOf(CUresult result) {
  const char* name = "unknown";
  cuGetErrorName(result, &name);
  return name;
}

// What is launched at every step, straight or into a capture.
struct Work {
  unsigned blocks, count, wide;
  int priority;
  CUfunction consume;
  unsigned *data, *between, *bins, *places, *sums;

  void Launch(cudaStream_t stream, unsigned salt) const {
    CUDA_CHECK(cudaLaunchKernelEx(Config(blocks, stream).Priority(priority).Get(), Exchange, data, salt));
    CUDA_CHECK(cudaLaunchKernelEx(
        Config(dim3(blocks / 4, 2, 2), stream).Cluster(2, 2, 2).Policy(cudaClusterSchedulingPolicySpread).Get(),
        Histogram, static_cast<const unsigned*>(data), bins, places));
    CUDA_CHECK(cudaLaunchKernelEx(Config(blocks, stream).Cluster(kTeam).Get(), Team, static_cast<const unsigned*>(data),
                                  between, salt));
    CUDA_CHECK(
        cudaLaunchKernelEx(Config(blocks, stream).Cluster(wide).Policy(cudaClusterSchedulingPolicyLoadBalancing).Get(),
                           Wide, static_cast<const unsigned*>(between), sums));
    Produce<<<blocks, kThreads, 0, stream>>>(between, data, salt);
    LAUNCH_CHECK();
    // The driver's own way, with the attribute that lets it start early.
    CUlaunchAttribute early = {};
    early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    early.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config = {};
    config.gridDimX = blocks;
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = kThreads;
    config.blockDimY = config.blockDimZ = 1;
    config.hStream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    unsigned n = count;
    const unsigned* from = data;
    unsigned* to = between;
    void* params[] = {&from, &to, &n};
    CU_CHECK(cuLaunchKernelEx(&config, consume, params, nullptr));
    CUDA_CHECK(cudaLaunchKernelEx(Config(blocks, stream).Cooperative().Get(), Together, between, data, count, 2u));
  }
};

// The same on the host.
struct Model {
  unsigned blocks, count, wide;
  std::vector<unsigned> data, between, bins, sums;

  void Exchange(unsigned salt) {
    std::vector<unsigned> mine(count);
    for (unsigned i = 0; i < count; ++i) mine[i] = data[i] * 3 + salt;
    for (unsigned i = 0; i < count; ++i) {
      const unsigned got = mine[(i / kThreads ^ 1) * kThreads + kThreads - 1 - i % kThreads];
      data[i] = mine[i] ^ (got << 5 | got >> 27);
    }
  }
  void Together(std::vector<unsigned>* a, std::vector<unsigned>* b, unsigned rounds) const {
    for (unsigned round = 0; round < rounds; ++round) {
      for (unsigned i = 0; i < count; ++i) (*b)[i] = (*a)[(i + kThreads + 1) % count] + round;
      for (unsigned i = 0; i < count; ++i) (*a)[i] = (*a)[i] * 5 + (*b)[(i + 3 * kThreads) % count];
    }
  }
  void Launch(unsigned salt) {
    Exchange(salt);
    for (unsigned value : data) ++bins[value >> 24];
    for (unsigned block = 0; block < blocks; ++block) {
      const unsigned first = block / kTeam * kTeam * kThreads, rank = block % kTeam, from = (rank + kTeam - 1) % kTeam;
      for (unsigned t = 0; t < kThreads; ++t) {
        unsigned sum = salt + from;
        for (unsigned r = 0; r < kTeam; ++r) sum = sum * 31 + data[first + r * kThreads + (t + r) % kThreads];
        between[block * kThreads + t] = sum + from * 1000 + salt;
      }
    }
    for (unsigned i = 0; i < count; ++i) sums[i / kThreads / wide] += between[i] ^ (i / kThreads % wide);
    for (unsigned i = 0; i < count; ++i) data[i] = between[i] * 7 + salt;
    for (unsigned i = 0; i < count; ++i) between[i] = data[i] ^ (data[count - 1 - i] >> 3);
    Together(&between, &data, 2);
  }
};

void Questions(unsigned blocks, unsigned* wide) {
  int cluster_launch = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&cluster_launch, cudaDevAttrClusterLaunch, 0));
  APP_CHECK(cluster_launch == 1);
  for (unsigned size : {1u, 2u, 4u, kPortable}) {
    int clusters = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, Histogram, Config(blocks, nullptr).Cluster(size).Get()));
    printf("clusters of %u: %d\n", size, clusters);
  }
  int largest = 0;
  CUDA_CHECK(cudaOccupancyMaxPotentialClusterSize(&largest, Wide, Config(16, nullptr).Get()));
  printf("largest cluster: %d\n", largest);
  CUDA_CHECK(cudaFuncSetAttribute(Wide, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  CUDA_CHECK(cudaOccupancyMaxPotentialClusterSize(&largest, Wide, Config(16, nullptr).Get()));
  printf("largest cluster if it need not be portable: %d\n", largest);
  *wide = largest >= 16 ? 16 : kPortable;
  int clusters = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, Wide, Config(16, nullptr).Cluster(*wide).Get()));
  printf("clusters of %u: %d\n", *wide, clusters);
  CUDA_CHECK(cudaFuncSetAttribute(Histogram, cudaFuncAttributeClusterSchedulingPolicyPreference,
                                  cudaClusterSchedulingPolicySpread));
}

void Attributes(const char* when) {
  const struct {
    const char* name;
    const void* symbol;
  } kFunctions[] = {{"Exchange", reinterpret_cast<const void*>(Exchange)},
                    {"Histogram", reinterpret_cast<const void*>(Histogram)},
                    {"Wide", reinterpret_cast<const void*>(Wide)}};
  for (const auto& f : kFunctions) {
    printf("%s %s:", when, f.name);
    for (CUfunction_attribute which :
         {CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
          CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH,
          CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
          CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE}) {
      int value = -1;
      CU_CHECK(cuFuncGetAttribute(&value, which, FunctionOf(f.symbol)));
      printf(" %d", value);
    }
    printf("\n");
  }
}

// Launches that cannot be; the driver says why, and goes on. The kernels would do no harm if they ran.
template <typename... Params, typename... Args>
void TryWrong(const char* what, const Config& config, void (*kernel)(Params...), Args... args) {
  const cudaError_t result = cudaLaunchKernelEx(config.Get(), kernel, args...);
  const cudaError_t last = cudaGetLastError();
  printf("%s: %s, %s\n", what, cudaGetErrorName(result), cudaGetErrorName(last));
}
void TryWrongHistogram(const char* what, const Work& work, dim3 grid, dim3 cluster) {
  CUlaunchAttribute attribute = {};
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim.x = cluster.x;
  attribute.value.clusterDim.y = cluster.y;
  attribute.value.clusterDim.z = cluster.z;
  CUlaunchConfig config = {};
  config.gridDimX = grid.x;
  config.gridDimY = grid.y;
  config.gridDimZ = grid.z;
  config.blockDimX = kThreads;
  config.blockDimY = config.blockDimZ = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const unsigned* data = work.data;
  unsigned *bins = work.bins, *places = work.places;
  void* params[] = {&data, &bins, &places};
  const CUfunction function = FunctionOf(reinterpret_cast<const void*>(Histogram));
  printf("%s: %s\n", what, NameOf(cuLaunchKernelEx(&config, function, params, nullptr)));
  TryWrong(what, Config(grid, nullptr).Cluster(cluster.x, cluster.y, cluster.z), Histogram, data, bins, places);
  int clusters = -1;
  const CUresult result = cuOccupancyMaxActiveClusters(&clusters, function, &config);
  printf("%s, how many: %s %d\n", what, NameOf(result), clusters);
}

void WrongLaunches(const Work& work) {
  TryWrongHistogram("6 blocks in fours", work, dim3(6), dim3(4));
  TryWrongHistogram("clusters larger than the grid", work, dim3(4), dim3(8));
  TryWrongHistogram("y in threes", work, dim3(2, 4), dim3(1, 3));
  TryWrongHistogram("clusters of 9", work, dim3(9), dim3(9));
  TryWrongHistogram("clusters of 16", work, dim3(16), dim3(16));
  TryWrongHistogram("clusters of none", work, dim3(4), dim3(1, 0));
  TryWrong("clusters of 32", Config(32, nullptr).Cluster(32), Wide, static_cast<const unsigned*>(work.data), work.sums);
  TryWrong("fours of what is made for pairs", Config(8, nullptr).Cluster(4), Exchange, work.data, 1u);
  TryWrong("odd blocks in pairs", Config(3, nullptr).Priority(0), Exchange, work.data, 1u);
  TryWrong("too many together", Config(1 << 20, nullptr).Cooperative(), Together, work.data, work.between, 64u, 1u);
  Exchange<<<5, kThreads>>>(work.data, 1);
  printf("five blocks in pairs: %s\n", cudaGetErrorName(cudaGetLastError()));
  CUDA_CHECK(cudaDeviceSynchronize());
}

// What the nodes of the graph say of themselves, and of the edges between them.
void Describe(const char* when, cudaGraph_t graph) {
  size_t count = 0;
  CU_CHECK(cuGraphGetNodes(graph, nullptr, &count));
  std::vector<CUgraphNode> nodes(count);
  CU_CHECK(cuGraphGetNodes(graph, nodes.data(), &count));
  std::vector<std::string> lines;
  for (CUgraphNode node : nodes) {
    CUDA_KERNEL_NODE_PARAMS params = {};
    CU_CHECK(cuGraphKernelNodeGetParams(node, &params));
    CUfunction function = params.func;
    if (!function) CU_CHECK(cuKernelGetFunction(&function, params.kern));
    const char* name = nullptr;
    CU_CHECK(cuFuncGetName(&name, function));
    CUkernelNodeAttrValue cluster = {}, policy = {}, priority = {}, cooperative = {};
    CU_CHECK(cuGraphKernelNodeGetAttribute(node, CU_KERNEL_NODE_ATTRIBUTE_CLUSTER_DIMENSION, &cluster));
    CU_CHECK(
        cuGraphKernelNodeGetAttribute(node, CU_KERNEL_NODE_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, &policy));
    CU_CHECK(cuGraphKernelNodeGetAttribute(node, CU_KERNEL_NODE_ATTRIBUTE_PRIORITY, &priority));
    CU_CHECK(cuGraphKernelNodeGetAttribute(node, CU_KERNEL_NODE_ATTRIBUTE_COOPERATIVE, &cooperative));
    char line[256];
    snprintf(line, sizeof line, "%s: cluster %u %u %u policy %d priority %d cooperative %d", name, cluster.clusterDim.x,
             cluster.clusterDim.y, cluster.clusterDim.z, policy.clusterSchedulingPolicyPreference, priority.priority,
             cooperative.cooperative);
    lines.push_back(line);
  }
  std::sort(lines.begin(), lines.end());
  for (const auto& line : lines) printf("%s, %s\n", when, line.c_str());
  size_t edges = 0;
  CUDA_CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
  std::vector<cudaGraphNode_t> from(edges), to(edges);
  std::vector<cudaGraphEdgeData> edge_data(edges);
  CUDA_CHECK(cudaGraphGetEdges(graph, from.data(), to.data(), edge_data.data(), &edges));
  int kinds[2] = {0, 0}, ports = 0;
  for (const auto& edge : edge_data) {
    ++kinds[edge.type == cudaGraphDependencyTypeProgrammatic];
    ports += edge.from_port;
  }
  printf("%s, edges: %d full, %d programmatic, ports %d\n", when, kinds[0], kinds[1], ports);
}

template <typename T>
std::vector<T> FromDevice(const T* data, size_t count) {
  std::vector<T> to(count);
  CUDA_CHECK(cudaMemcpy(to.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
  return to;
}

uint64_t DigestOf(const std::vector<unsigned>& values) {
  app::Digest digest;
  digest.Add(values.data(), values.size() * sizeof values[0]);
  return digest.value();
}

// Where each block of the histogram said it was.
void CheckPlaces(const std::vector<unsigned>& places, unsigned blocks) {
  for (unsigned block = 0; block < blocks; ++block) {
    const unsigned x = block % (blocks / 4) % 2, y = block / (blocks / 4) % 2, z = block / (blocks / 4) / 2;
    APP_CHECK(places[block] == ((x + 2 * y + 4 * z) | x << 8 | y << 12 | z << 16 | 2u << 20 | 2u << 24 | 2u << 28));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {16, 16});
  CUDA_CHECK(cudaFree(nullptr));
  Work work = {};
  Model model = {};
  model.blocks = work.blocks = (options.size + 15) / 16 * 16;
  model.count = work.count = work.blocks * kThreads;
  int least, greatest;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  work.priority = greatest;
  work.consume = FunctionOf(reinterpret_cast<const void*>(Consume));
  const size_t bytes = work.count * sizeof(unsigned);
  CUDA_CHECK(cudaMalloc(&work.data, bytes));
  CUDA_CHECK(cudaMalloc(&work.between, bytes));
  CUDA_CHECK(cudaMalloc(&work.bins, kBins * sizeof(unsigned)));
  CUDA_CHECK(cudaMalloc(&work.places, work.blocks * sizeof(unsigned)));
  CUDA_CHECK(cudaMalloc(&work.sums, work.blocks * sizeof(unsigned)));

  Questions(work.blocks, &work.wide);
  model.wide = work.wide;
  Attributes("at first");
  WrongLaunches(work);

  model.data.resize(work.count);
  for (unsigned i = 0; i < work.count; ++i) model.data[i] = i * 2654435761u;
  model.between.assign(work.count, 0);
  model.bins.assign(kBins, 0);
  model.sums.assign(work.blocks, 0);
  CUDA_CHECK(cudaMemcpy(work.data, model.data.data(), bytes, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemset(work.between, 0, bytes));
  CUDA_CHECK(cudaMemset(work.bins, 0, kBins * sizeof(unsigned)));
  CUDA_CHECK(cudaMemset(work.sums, 0, work.blocks * sizeof(unsigned)));
  CUDA_CHECK(cudaDeviceSynchronize());  // the stream below does not wait for the default one

  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, least));
  const unsigned graph_salt = 12345;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  work.Launch(stream, graph_salt);
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  Describe("at first", graph);

  for (int step = 1; step <= options.steps; ++step) {
    if (step % 2) {
      CUDA_CHECK(cudaGraphLaunch(exec, stream));
      model.Launch(graph_salt);
    } else {
      work.Launch(stream, step);
      model.Launch(step);
    }
    // The old ways to launch, too.
    Exchange<<<work.blocks, kThreads, 0, stream>>>(work.data, step);
    LAUNCH_CHECK();
    unsigned rounds = 1;
    void* params[] = {&work.data, &work.between, &work.count, &rounds};
    CUDA_CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(Together), dim3(work.blocks), dim3(kThreads),
                                           params, 0, stream));
    model.Exchange(step);
    model.Together(&model.data, &model.between, 1);
    app::Step(step);
  }
  CUDA_CHECK(cudaStreamSynchronize(stream));
  Attributes("at last");
  Describe("at last", graph);

  const auto data = FromDevice(work.data, work.count), between = FromDevice(work.between, work.count);
  const auto bins = FromDevice(work.bins, kBins), sums = FromDevice(work.sums, work.blocks / work.wide);
  model.sums.resize(work.blocks / work.wide);
  APP_CHECK(data == model.data);
  APP_CHECK(between == model.between);
  APP_CHECK(bins == model.bins);
  APP_CHECK(sums == model.sums);
  CheckPlaces(FromDevice(work.places, work.blocks), work.blocks);
  printf("clusters blocks=%u wide=%u steps=%d data=%016" PRIx64 " between=%016" PRIx64 " bins=%016" PRIx64
         " sums=%016" PRIx64 "\n",
         work.blocks, work.wide, options.steps, DigestOf(data), DigestOf(between), DigestOf(bins), DigestOf(sums));
  CUDA_CHECK(cudaGraphExecDestroy(exec));
  CUDA_CHECK(cudaGraphDestroy(graph));
  CUDA_CHECK(cudaStreamDestroy(stream));
  for (unsigned* p : {work.data, work.between, work.bins, work.places, work.sums}) CUDA_CHECK(cudaFree(p));
  return 0;
}
