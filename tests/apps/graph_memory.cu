// SPDX-License-Identifier: Apache-2.0
// Memory that graphs allocate: nodes and captured cudaMallocAsync, freed in the graph, by the application, by another
// graph, by the next launch, or long after the graph is gone. Random graphs of several kinds are made, launched,
// updated and destroyed, and captures come to nothing in between; what graphs have left in memory is carried from step
// to step and compared with a model on the host.
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

__global__ void Fill(uint32_t* data, int count, const uint32_t* seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) data[i] = *seed * 2654435761u + uint32_t(i) * 40503u;
}

__global__ void Change(uint32_t* data, int count, uint32_t by) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) data[i] = data[i] * 5u + by;
}

__global__ void Sum(const uint32_t* data, int count, uint32_t* sum) {
  uint32_t mine = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) mine += data[i];
  atomicAdd(sum, mine);
}

constexpr int kThreads = 64;
int Blocks(int count) { return (count + kThreads - 1) / kThreads; }

uint32_t g_random = 12345;
uint32_t Random(uint32_t below) {
  g_random = g_random * 1664525u + 1013904223u;
  return (g_random >> 8) % below;
}

// Memory that is alive, and what must be in it.
struct Piece {
  uint32_t* device = nullptr;
  std::vector<uint32_t> host;
};

enum Kind { kTemporary, kCaptured, kKeeps, kKeepsAutomatically, kKinds };

struct Graph {
  int number;
  Kind kind;
  int count;
  uint32_t add;           // what the graph's second kernel adds
  uint32_t* seed;         // on the device, of this graph
  uint32_t* sum;          // the same
  uint32_t host_sum = 0;  // what must be in it
  uint32_t launches = 0;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  uint32_t* kept = nullptr;  // of the kinds that keep
  bool alive = false;
};

std::vector<uint32_t> Expected(const Graph& graph, uint32_t seed) {
  std::vector<uint32_t> data(graph.count);
  for (int i = 0; i < graph.count; ++i) data[i] = (seed * 2654435761u + uint32_t(i) * 40503u) * 5u + graph.add;
  return data;
}

cudaGraphNode_t AddKernel(cudaGraph_t graph, cudaGraphNode_t after, void* kernel, int count, void** arguments) {
  cudaKernelNodeParams params = {};
  params.func = kernel;
  params.gridDim = dim3(kernel == reinterpret_cast<void*>(Sum) ? 1 : Blocks(count));
  params.blockDim = dim3(kThreads);
  params.kernelParams = arguments;
  cudaGraphNode_t node;
  CUDA_CHECK(cudaGraphAddKernelNode(&node, graph, &after, 1, &params));
  return node;
}

// allocate -> Fill -> Change -> Sum (-> free)
void Build(Graph* g, cudaStream_t stream) {
  const bool keeps = g->kind == kKeeps || g->kind == kKeepsAutomatically;
  if (g->kind == kCaptured) {
    uint32_t* data;
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CUDA_CHECK(cudaMallocAsync(&data, g->count * 4, stream));
    Fill<<<Blocks(g->count), kThreads, 0, stream>>>(data, g->count, g->seed);
    Change<<<Blocks(g->count), kThreads, 0, stream>>>(data, g->count, g->add);
    Sum<<<1, kThreads, 0, stream>>>(data, g->count, g->sum);
    CUDA_CHECK(cudaFreeAsync(data, stream));
    CUDA_CHECK(cudaStreamEndCapture(stream, &g->graph));
    size_t count = 0;
    CUDA_CHECK(cudaGraphGetNodes(g->graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    CUDA_CHECK(cudaGraphGetNodes(g->graph, nodes.data(), &count));
    int allocations = 0, frees = 0;
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type;
      CUDA_CHECK(cudaGraphNodeGetType(node, &type));
      allocations += type == cudaGraphNodeTypeMemAlloc;
      frees += type == cudaGraphNodeTypeMemFree;
    }
    APP_CHECK(count == 5 && allocations == 1 && frees == 1);
  } else {
    CUDA_CHECK(cudaGraphCreate(&g->graph, 0));
    cudaMemAllocNodeParams params = {};
    params.poolProps.allocType = cudaMemAllocationTypePinned;
    params.poolProps.location.type = cudaMemLocationTypeDevice;
    params.bytesize = size_t(g->count) * 4;
    cudaGraphNode_t node, allocation;
    CUDA_CHECK(cudaGraphAddMemAllocNode(&allocation, g->graph, nullptr, 0, &params));
    uint32_t* data = static_cast<uint32_t*>(params.dptr);
    void* fill[] = {&data, &g->count, &g->seed};
    node = AddKernel(g->graph, allocation, reinterpret_cast<void*>(Fill), g->count, fill);
    void* change[] = {&data, &g->count, &g->add};
    node = AddKernel(g->graph, node, reinterpret_cast<void*>(Change), g->count, change);
    void* sum[] = {&data, &g->count, &g->sum};
    node = AddKernel(g->graph, node, reinterpret_cast<void*>(Sum), g->count, sum);
    if (!keeps) {
      cudaGraphNode_t last;
      CUDA_CHECK(cudaGraphAddMemFreeNode(&last, g->graph, &node, 1, data));
      void* freed = nullptr;
      CUDA_CHECK(cudaGraphMemFreeNodeGetParams(last, &freed));
      APP_CHECK(freed == data);
      APP_CHECK(cudaGraphAddMemFreeNode(&last, g->graph, &last, 1, data) == cudaErrorInvalidValue);
    }
    cudaMemAllocNodeParams again = {};
    CUDA_CHECK(cudaGraphMemAllocNodeGetParams(allocation, &again));
    APP_CHECK(again.dptr == data && again.bytesize == params.bytesize);
    if (keeps) g->kept = data;
    // What such graphs do not allow.
    cudaGraph_t clone;
    APP_CHECK(cudaGraphClone(&clone, g->graph) == cudaErrorNotSupported);
    APP_CHECK(cudaGraphDestroyNode(node) == cudaErrorNotSupported);
  }
  CUDA_CHECK(cudaGraphInstantiate(&g->exec, g->graph,
                                  g->kind == kKeepsAutomatically ? cudaGraphInstantiateFlagAutoFreeOnLaunch : 0));
  cudaGraphExec_t second;
  APP_CHECK(cudaGraphInstantiate(&second, g->graph, 0) == cudaErrorNotSupported);
  cudaGetLastError();
}

// Captures with memory nodes that a call invalidates, and others that follow, whose graphs may be where theirs were.
void CaptureInVain(cudaStream_t stream) {
  for (int round = 0; round < 6; ++round) {
    uint32_t *memory, host = 0;
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CUDA_CHECK(cudaMallocAsync(&memory, 1000, stream));
    CUDA_CHECK(cudaMemsetAsync(memory, round + 1, 1000, stream));
    CUDA_CHECK(cudaMemcpyAsync(&host, memory, sizeof host, cudaMemcpyDeviceToHost, stream));
    const bool in_vain = round % 2 == 0;
    if (in_vain) APP_CHECK(cudaStreamSynchronize(stream) == cudaErrorStreamCaptureUnsupported);
    if (!in_vain) CUDA_CHECK(cudaFreeAsync(memory, stream));
    cudaGraph_t graph;
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    APP_CHECK(ended == (in_vain ? cudaErrorStreamCaptureInvalidated : cudaSuccess));
    cudaGetLastError();
    if (in_vain) continue;
    size_t nodes = 0;
    CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    APP_CHECK(nodes == 4);
    cudaGraphExec_t exec;
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaGraphLaunch(exec, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    APP_CHECK(host == 0x01010101u * unsigned(round + 1));
    CUDA_CHECK(cudaGraphExecDestroy(exec));
  }
}

// Temporaries of one graph, each of which is filled, added up and freed. What is allocated behind the node that frees
// another one may have its address, and nothing else may.
class Temporaries {
 public:
  enum How { kInARow, kInARowCaptured, kTangled };

  Temporaries(How how, cudaStream_t stream) : how_(how) {
    CUDA_CHECK(cudaMalloc(&seed_, 4));
    CUDA_CHECK(cudaMalloc(&sum_, 4));
    CUDA_CHECK(cudaMemset(sum_, 0, 4));
    CUDA_CHECK(cudaDeviceSynchronize());
    Make(stream);
  }
  ~Temporaries() {
    Destroy();
    CUDA_CHECK(cudaFree(seed_));
    CUDA_CHECK(cudaFree(sum_));
  }

  void Launch(uint32_t seed, cudaStream_t stream) {
    if (how_ == kTangled && Random(3) == 0) {
      Destroy();
      Make(stream);
    }
    CUDA_CHECK(cudaMemcpyAsync(seed_, &seed, 4, cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaGraphLaunch(exec_, stream));
    for (const int count : counts_) {
      for (int i = 0; i < count; ++i) host_sum_ += seed * 2654435761u + uint32_t(i) * 40503u;
    }
  }
  // After a wait for the stream.
  void Check() {
    uint32_t sum;
    CUDA_CHECK(cudaMemcpy(&sum, sum_, 4, cudaMemcpyDeviceToHost));
    APP_CHECK(sum == host_sum_);
  }

 private:
  static constexpr int kCount = 24;
  // A node, those that must be done before it (a bit each), and what it frees.
  struct Node {
    cudaGraphNode_t node;
    std::vector<bool> before;
    uint32_t* freed = nullptr;
  };

  void Make(cudaStream_t stream) {
    counts_.clear();
    nodes_.clear();
    if (how_ == kInARowCaptured) {
      CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < kCount; ++i) {
        uint32_t* data;
        const int count = 5000 - i;
        CUDA_CHECK(cudaMallocAsync(&data, count * 4, stream));
        Fill<<<Blocks(count), kThreads, 0, stream>>>(data, count, seed_);
        Sum<<<1, kThreads, 0, stream>>>(data, count, sum_);
        CUDA_CHECK(cudaFreeAsync(data, stream));
        counts_.push_back(count);
        addresses_.insert(data);
      }
      LAUNCH_CHECK();
      CUDA_CHECK(cudaStreamEndCapture(stream, &graph_));
    } else {
      CUDA_CHECK(cudaGraphCreate(&graph_, 0));
      for (int i = 0; i < kCount; ++i) AddOne(how_ == kTangled ? 4000 + int(Random(2000)) : 5000);
      while (!live_.empty()) FreeOne();
    }
    CUDA_CHECK(cudaGraphInstantiate(&exec_, graph_, 0));
    // A driver need not use memory again, but 580 does.
    APP_CHECK(how_ == kTangled || addresses_.size() < kCount / 2);
    addresses_.clear();
  }
  void Destroy() {
    CUDA_CHECK(cudaGraphExecDestroy(exec_));
    CUDA_CHECK(cudaGraphDestroy(graph_));
  }
  // One more, behind the latest node, or behind up to two others.
  void AddOne(int count) {
    std::vector<size_t> behind;
    if (how_ == kInARow && !nodes_.empty()) behind.push_back(nodes_.size() - 1);
    for (uint32_t i = Random(3); how_ == kTangled && !nodes_.empty() && i != 0; --i) {
      const size_t one = Random(uint32_t(nodes_.size()));
      if (std::find(behind.begin(), behind.end(), one) == behind.end()) behind.push_back(one);
    }
    cudaMemAllocNodeParams params = {};
    params.poolProps.allocType = cudaMemAllocationTypePinned;
    params.poolProps.location.type = cudaMemLocationTypeDevice;
    params.bytesize = size_t(count) * 4;
    std::vector<cudaGraphNode_t> dependencies;
    for (const size_t one : behind) dependencies.push_back(nodes_[one].node);
    cudaGraphNode_t node;
    CUDA_CHECK(cudaGraphAddMemAllocNode(&node, graph_, dependencies.data(), dependencies.size(), &params));
    uint32_t* data = static_cast<uint32_t*>(params.dptr);
    const size_t allocation = Add(node, behind);
    // Whatever has had the address is freed by a node before this one.
    for (const uint32_t* one : live_data_) APP_CHECK(one != data);
    for (size_t i = 0; i < allocation; ++i) {
      APP_CHECK(nodes_[i].freed != data || nodes_[allocation].before[i]);
    }
    void* fill[] = {&data, &count, &seed_};
    const size_t filled = Add(AddKernel(graph_, node, reinterpret_cast<void*>(Fill), count, fill), {allocation});
    void* sum[] = {&data, &count, &sum_};
    node = AddKernel(graph_, nodes_[filled].node, reinterpret_cast<void*>(Sum), count, sum);
    live_.push_back(Add(node, {filled}));
    live_data_.push_back(data);
    counts_.push_back(count);
    addresses_.insert(data);
    if (how_ == kInARow || (live_.size() > 3 && Random(2) == 0)) FreeOne();
  }
  void FreeOne() {
    const size_t which = Random(uint32_t(live_.size()));
    cudaGraphNode_t node;
    CUDA_CHECK(cudaGraphAddMemFreeNode(&node, graph_, &nodes_[live_[which]].node, 1, live_data_[which]));
    nodes_[Add(node, {live_[which]})].freed = live_data_[which];
    live_.erase(live_.begin() + long(which));
    live_data_.erase(live_data_.begin() + long(which));
  }
  size_t Add(cudaGraphNode_t node, const std::vector<size_t>& behind) {
    Node one{node, std::vector<bool>(nodes_.size()), nullptr};
    for (const size_t other : behind) {
      one.before[other] = true;
      for (size_t i = 0; i < nodes_[other].before.size(); ++i) one.before[i] = one.before[i] || nodes_[other].before[i];
    }
    nodes_.push_back(std::move(one));
    return nodes_.size() - 1;
  }

  const How how_;
  uint32_t *seed_, *sum_;
  uint32_t host_sum_ = 0;
  std::vector<int> counts_;
  std::vector<Node> nodes_;
  std::vector<size_t> live_;  // the last node that uses it
  std::vector<uint32_t*> live_data_;
  std::set<uint32_t*> addresses_;
  cudaGraph_t graph_;
  cudaGraphExec_t exec_;
};

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {16, 3000});
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Temporaries row(Temporaries::kInARow, stream), captured_row(Temporaries::kInARowCaptured, stream),
      tangled(Temporaries::kTangled, stream);
  std::vector<std::unique_ptr<Graph>> graphs;
  int made = 0;

  const auto check = [](const Piece& piece) {
    std::vector<uint32_t> now(piece.host.size());
    CUDA_CHECK(cudaMemcpy(now.data(), piece.device, now.size() * 4, cudaMemcpyDeviceToHost));
    APP_CHECK(now == piece.host);
  };
  std::vector<Piece> pieces;  // alive, of graphs that are there: by address
  const auto piece_of = [&pieces](uint32_t* device) {
    return std::find_if(pieces.begin(), pieces.end(), [device](const Piece& one) { return one.device == device; });
  };

  for (int step = 1; step <= options.steps; ++step) {
    if (step % 2 == 1) CaptureInVain(stream);
    if (graphs.size() < 6) {
      auto g = std::make_unique<Graph>();
      g->number = ++made;
      g->kind = Kind(Random(kKinds));
      g->count = int(Random(uint32_t(options.size))) + 1;
      g->add = Random(1000);
      CUDA_CHECK(cudaMalloc(&g->seed, 4));
      CUDA_CHECK(cudaMalloc(&g->sum, 4));
      CUDA_CHECK(cudaMemset(g->sum, 0, 4));
      CUDA_CHECK(cudaDeviceSynchronize());  // the stream does not wait for the default one
      Build(g.get(), stream);
      graphs.push_back(std::move(g));
    }
    uint32_t digest = 0;
    for (const std::unique_ptr<Graph>& g : graphs) {
      if (Random(4) == 0) continue;
      const uint32_t seed = uint32_t(step * 100 + g->number);
      CUDA_CHECK(cudaMemcpyAsync(g->seed, &seed, 4, cudaMemcpyHostToDevice, stream));
      const cudaError_t launched = cudaGraphLaunch(g->exec, stream);
      if (g->kind == kKeeps && g->alive) {
        // What it allocates is still alive.
        APP_CHECK(launched == cudaErrorInvalidValue);
        cudaGetLastError();
        continue;
      }
      CUDA_CHECK(launched);
      const std::vector<uint32_t> data = Expected(*g, seed);
      for (const uint32_t one : data) g->host_sum += one;
      if (g->kept) {
        auto piece = piece_of(g->kept);
        if (piece == pieces.end()) piece = pieces.insert(pieces.end(), Piece{g->kept, {}});
        piece->host = data;
        g->alive = true;
      }
      ++g->launches;
    }
    // Memory that is alive is like any other.
    for (Piece& piece : pieces) {
      if (Random(2) == 0) continue;
      const int count = int(piece.host.size());
      Change<<<Blocks(count), kThreads, 0, stream>>>(piece.device, count, uint32_t(step));
      LAUNCH_CHECK();
      for (uint32_t& one : piece.host) one = one * 5u + uint32_t(step);
    }
    for (Temporaries* one : {&row, &captured_row, &tangled}) one->Launch(uint32_t(step) * 7919u, stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (Temporaries* one : {&row, &captured_row, &tangled}) one->Check();
    for (const std::unique_ptr<Graph>& g : graphs) {
      uint32_t sum;
      CUDA_CHECK(cudaMemcpy(&sum, g->sum, 4, cudaMemcpyDeviceToHost));
      APP_CHECK(sum == g->host_sum);
      digest = digest * 31 + sum;
    }
    for (const Piece& piece : pieces) {
      check(piece);
      digest = digest * 31 + piece.host.back();
    }
    app::Step(step);

    // Frees, in one of the ways; and graphs go, their memory alive or not.
    for (size_t i = 0; i < pieces.size();) {
      const uint32_t way = Random(6);
      uint32_t* const device = pieces[i].device;
      if (way > 2) {
        ++i;
        continue;
      }
      if (way == 0) CUDA_CHECK(cudaFreeAsync(device, stream));
      if (way == 1) CUDA_CHECK(cudaFree(device));
      if (way == 2) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        cudaGraphNode_t node;
        CUDA_CHECK(cudaGraphCreate(&graph, 0));
        CUDA_CHECK(cudaGraphAddMemFreeNode(&node, graph, nullptr, 0, device));
        CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CUDA_CHECK(cudaGraphLaunch(exec, stream));
        APP_CHECK(cudaGraphLaunch(exec, stream) == cudaErrorInvalidValue);
        cudaGetLastError();
        CUDA_CHECK(cudaGraphExecDestroy(exec));
        CUDA_CHECK(cudaGraphDestroy(graph));
      }
      for (const std::unique_ptr<Graph>& g : graphs) {
        if (g->kept == device) g->alive = false;
      }
      // A second free is an error.
      pieces.erase(pieces.begin() + long(i));
      APP_CHECK(cudaFreeAsync(device, stream) == cudaErrorInvalidValue);
      cudaGetLastError();
    }
    for (size_t i = 0; i < graphs.size();) {
      if (Random(5) != 0) {
        ++i;
        continue;
      }
      Graph& g = *graphs[i];
      const bool graph_first = Random(2) != 0;
      if (graph_first) CUDA_CHECK(cudaGraphDestroy(g.graph));
      CUDA_CHECK(cudaGraphExecDestroy(g.exec));
      if (!graph_first) CUDA_CHECK(cudaGraphDestroy(g.graph));
      CUDA_CHECK(cudaFree(g.seed));
      CUDA_CHECK(cudaFree(g.sum));
      graphs.erase(graphs.begin() + long(i));  // its memory lives on, if it is alive
    }
    printf("step %d: %zu graphs, %zu pieces, digest %08x\n", step, graphs.size(), pieces.size(), digest);
  }
  for (const Piece& piece : pieces) CUDA_CHECK(cudaFreeAsync(piece.device, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  CUDA_CHECK(cudaDeviceGraphMemTrim(0));
  uint64_t used = 1;
  for (cudaGraphMemAttributeType attribute : {cudaGraphMemAttrUsedMemCurrent, cudaGraphMemAttrReservedMemCurrent}) {
    CUDA_CHECK(cudaDeviceGetGraphMemAttribute(0, attribute, &used));
    APP_CHECK(used == 0);
  }
  printf("done, %d graphs made\n", made);
  return 0;
}
