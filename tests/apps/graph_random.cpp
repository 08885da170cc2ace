// SPDX-License-Identifier: Apache-2.0
// Graphs at random, compared with a model on the host. Nodes of every kind: kernels, copies in one, two and three
// dimensions of device, pinned and pageable memory, fills, host functions, empty nodes, child graphs, events, memory
// that a graph allocates and frees, conditional nodes (IF, WHILE, SWITCH) and writes of single values. Graphs are built
// node by node and captured from two streams, changed, cloned and destroyed; executables are launched over and over,
// changed, updated from other graphs, and outlive their graphs. Each of the --steps steps is 40 operations.
//
// Nodes that touch the same memory depend on each other in the order in which they were made, so the model runs them in
// that order. CR_TEST_SEED=N chooses the operations (1 by default). A failure names the seed and the operation.
#include <cuda.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "tests/apps/support/driver.h"

extern "C" const unsigned char graph_random_image[];

namespace {

constexpr int kOperations = 40;
constexpr unsigned kWords = 64;  // of a buffer
constexpr int kDevice = 5;       // buffers of device memory; then a pinned one, and a pageable one
constexpr int kPinned = kDevice, kPageable = kDevice + 1, kBuffers = kDevice + 2;
// What nodes share besides buffers.
constexpr unsigned kCounterBit = 1u << kBuffers, kEventBit = 2u << kBuffers;
constexpr size_t kMostGraphs = 6, kMostExecs = 6;

enum Op { kMix, kCopy, kFill, kHost, kEmpty, kChild, kRecord, kWait, kMemory, kIf, kWhile, kSwitch, kWrite, kOps };
const char* const kNames[kOps] = {"kernel",      "copy",         "fill",        "host function", "empty",
                                  "child graph", "record event", "wait for it", "memory",        "IF",
                                  "WHILE",       "SWITCH",       "write"};

struct Node {
  Op op = kEmpty;
  int to = 0, from = 0;
  unsigned to_at = 0, from_at = 0;
  unsigned width = 1, height = 1, depth = 1;  // of a copy or fill, in words, rows and layers
  unsigned pitch = kWords, rows = 1;          // words of a row, rows of a layer
  unsigned salt = 0;
  bool enabled = true;
  bool captured = false;
  std::vector<std::vector<Node>> bodies;
  CUgraph moved = nullptr;                      // a child graph that was moved into its node
  CUgraphNode first = nullptr, last = nullptr;  // the one that has the parameters; the one that others wait for
  unsigned Uses() const {
    switch (op) {
      case kEmpty:
        return 0;
      case kRecord:
      case kWait:
        return kEventBit;
      case kFill:
      case kWrite:
      case kHost:
        return 1u << to;
      default:
        break;
    }
    unsigned uses = 1u << to | (op == kChild ? 0 : 1u << from) | (op == kWhile ? kCounterBit : 0);
    for (const auto& body : bodies) {
      for (const Node& node : body) uses |= node.Uses();
    }
    return uses;
  }
};
using Nodes = std::vector<Node>;

struct Graph {
  CUgraph graph = nullptr;
  Nodes nodes;
  bool memory = false, conditional = false;
  int number = 0, shape = 0;  // the shape changes with the nodes and edges
};

struct Exec {
  CUgraphExec exec = nullptr;
  Nodes nodes;
  int graph = 0, shape = 0;
  bool memory = false, conditional = false, changed = false;  // some nodes are off, or other than the graph's
};

unsigned g_seed = 1;
long g_operation = 0;
const char* g_name = "start";

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      fprintf(stderr, "seed %u, operation %ld (%s)\n", g_seed, g_operation, g_name); \
      app::Fail(__FILE__, __LINE__, #condition, "not true");                         \
    }                                                                                \
  } while (0)
#define CU(call)                                                                                               \
  do {                                                                                                         \
    const CUresult cu_result = (call);                                                                         \
    if (cu_result != CUDA_SUCCESS) {                                                                           \
      fprintf(stderr, "seed %u, operation %ld (%s): error %d\n", g_seed, g_operation, g_name, int(cu_result)); \
      app::Fail(__FILE__, __LINE__, #call, "failed");                                                          \
    }                                                                                                          \
  } while (0)

struct HostWork {
  unsigned* word;
  unsigned salt;
};
void Host(void* data) {
  const HostWork* const work = static_cast<const HostWork*>(data);
  *work->word = *work->word * 3 + work->salt;
}

class Random {
 public:
  Random() : numbers_(g_seed) {
    CU(cuInit(0));
    CU(cuDeviceGet(&device_, 0));
    CU(cuDevicePrimaryCtxRetain(&context_, device_));
    CU(cuCtxSetCurrent(context_));
    CUmodule module;
    CU(cuModuleLoadData(&module, graph_random_image));
    CU(cuModuleGetFunction(&mix_, module, "Mix"));
    CU(cuModuleGetFunction(&decide_, module, "Decide"));
    CU(cuModuleGetFunction(&arm_, module, "Arm"));
    CU(cuModuleGetFunction(&count_down_, module, "CountDown"));
    for (CUstream& stream : streams_) CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (CUevent& event : joins_) CU(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CU(cuEventCreate(&event_, CU_EVENT_DISABLE_TIMING));
    CU(cuEventRecord(event_, streams_[0]));
    CU(cuMemAlloc(&left_, sizeof(unsigned)));
    for (int i = 0; i < kBuffers; ++i) {
      model_[i].resize(kWords);
      for (unsigned k = 0; k < kWords; ++k) model_[i][k] = unsigned(i) * 1000 + k;
      void* host = nullptr;
      if (i == kPinned) CU(cuMemAllocHost(&host, kWords * 4));
      if (i == kPageable) host = malloc(kWords * 4);
      if (host) {
        memcpy(host, model_[i].data(), kWords * 4);
        buffers_[i] = reinterpret_cast<CUdeviceptr>(host);
      } else {
        CU(cuMemAlloc(&buffers_[i], kWords * 4));
        CU(cuMemcpyHtoD(buffers_[i], model_[i].data(), kWords * 4));
      }
    }
    // Pageable memory may still be on its way when the copy has returned, and the streams do not wait for it.
    CU(cuCtxSynchronize());
    // Not every GPU has these nodes.
    CUgraph probe;
    CU(cuGraphCreate(&probe, 0));
    Node node;
    CUstreamBatchMemOpParams write = {};
    CUDA_BATCH_MEM_OP_NODE_PARAMS batch = {};
    MakeWrite(node, &write, &batch);
    const CUresult result = cuGraphAddBatchMemOpNode(&node.last, probe, nullptr, 0, &batch);
    CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_SUPPORTED);
    writes_ = result == CUDA_SUCCESS;
    CU(cuGraphDestroy(probe));
  }

  void Operation() {
    ++g_operation;
    switch (Pick(22)) {
      case 0:
      case 1:
        return Name("build"), Build();
      case 2:
      case 3:
        return Name("capture"), Capture();
      case 4:
        return Name("clone"), Clone();
      case 5:
        return Name("destroy graph"), DestroyGraph();
      case 6:
      case 7:
        return Name("instantiate"), Instantiate();
      case 8:
        return Name("destroy executable"), DestroyExec();
      case 9:
        return Name("add node"), AddNode();
      case 10:
        return Name("destroy node"), DestroyNode();
      case 11:
        return Name("change node"), ChangeNode();
      case 12:
        return Name("change node of executable"), ChangeExec();
      case 13:
        return Name("switch node"), SwitchNode();
      case 14:
        return Name("update"), Update();
      case 15:
        return Name("child graph's node"), ChangeInChild();
      default:
        return Name("launch"), Launch();
    }
  }

  uint64_t Compare() {
    Name("compare");
    CU(cuCtxSynchronize());
    app::Digest digest;
    for (int i = 0; i < kBuffers; ++i) {
      std::vector<unsigned> got(kWords);
      if (i < kDevice) {
        CU(cuMemcpyDtoH(got.data(), buffers_[i], kWords * 4));
      } else {
        memcpy(got.data(), reinterpret_cast<void*>(buffers_[i]), kWords * 4);
      }
      for (unsigned k = 0; k < kWords; ++k) {
        if (got[k] == model_[i][k]) continue;
        fprintf(stderr, "word %u of buffer %d is %u, not %u; launched last:\n", k, i, got[k], model_[i][k]);
        Show(launched_, 1);
        CHECK(!"the buffers are what the model says");
      }
      digest.Add(got.data(), kWords * 4);
    }
    return digest.value();
  }

 private:
  static void Name(const char* name) { g_name = name; }
  unsigned Pick(size_t most) { return unsigned(numbers_() % most); }
  template <typename T>
  T& Any(std::vector<T>& list) {
    return list[Pick(list.size())];
  }

  static void Show(const Nodes& nodes, int depth) {
    for (const Node& node : nodes) {
      fprintf(stderr, "%*s%s%s to %d+%u from %d+%u, %ux%ux%u pitch %u, salt %u\n", depth * 2, "", kNames[node.op],
              node.enabled ? "" : " (off)", node.to, node.to_at, node.from, node.from_at, node.width, node.height,
              node.depth, node.pitch, node.salt);
      for (const Nodes& body : node.bodies) Show(body, depth + 1);
    }
  }

  // What the nodes do.
  void Run(const Nodes& nodes) {
    for (const Node& node : nodes) {
      if (!node.enabled) continue;
      std::vector<unsigned>& to = model_[node.to];
      const std::vector<unsigned> from = node.from == kPageable ? pageable_ : model_[node.from];
      const unsigned word = from[node.from_at];
      switch (node.op) {
        case kMix:
          for (unsigned i = 0; i < kWords; ++i) to[i] = to[i] * 1664525u + from[i] + node.salt + i;
          break;
        case kCopy:
          for (unsigned z = 0; z < node.depth; ++z) {
            for (unsigned y = 0; y < node.height; ++y) {
              const unsigned row = (z * node.rows + y) * node.pitch;
              for (unsigned x = 0; x < node.width; ++x) to[node.to_at + row + x] = from[node.from_at + row + x];
            }
          }
          break;
        case kFill:
          for (unsigned y = 0; y < node.height; ++y) {
            for (unsigned x = 0; x < node.width; ++x) to[node.to_at + y * node.pitch + x] = node.salt;
          }
          break;
        case kHost:
          to[node.to_at] = to[node.to_at] * 3 + node.salt;
          break;
        case kWrite:
          to[node.to_at] = node.salt;
          break;
        case kChild:
          Run(node.bodies[0]);
          break;
        case kMemory:
          // Filled, mixed with one buffer, and copied to the other.
          for (unsigned i = 0; i < kWords; ++i) to[i] = node.salt * 1664525u + from[i] + node.salt + i;
          break;
        case kIf:
          if (word % 2 != 0) Run(node.bodies[0]);
          if (word % 2 == 0 && node.bodies.size() > 1) Run(node.bodies[1]);
          break;
        case kWhile:
          for (unsigned left = word % 4; left != 0; --left) Run(node.bodies[0]);
          break;
        case kSwitch:
          if (word % (node.bodies.size() + 1) < node.bodies.size()) Run(node.bodies[word % (node.bodies.size() + 1)]);
          break;
        default:
          break;
      }
    }
  }

  // A part of two buffers: a run of words, a rectangle, or a box.
  void Shape(Node* node, unsigned dimensions) {
    node->height = node->depth = node->rows = 1;
    node->pitch = dimensions == 1 ? kWords : dimensions == 2 ? 8 : 4;
    if (dimensions == 3) node->rows = 4;
    node->width = 1 + Pick(node->pitch);
    if (dimensions >= 2) node->height = 1 + Pick(dimensions == 2 ? 8 : 4);
    if (dimensions == 3) node->depth = 1 + Pick(4);
    const unsigned end = ((node->depth - 1) * node->rows + node->height - 1) * node->pitch + node->width;
    node->to_at = Pick(kWords - end + 1);
    node->from_at = Pick(kWords - end + 1);
  }

  // `level`: how deep in other graphs; `captured`: by a stream; `body`: of a conditional node, where only kernels,
  // copies and fills of device memory, empty nodes, child graphs and other conditional nodes may be.
  Node Make(int level, bool captured, bool memory, bool conditional, bool body = false) {
    Node node;
    do {
      node.op = Op(Pick(kOps));
      if (Pick(3) == 0) node.op = Pick(2) ? kMix : kCopy;
    } while ((node.op == kChild && (captured || level > 1)) || (node.op == kMemory && (!memory || level > 0)) ||
             ((node.op == kIf || node.op == kWhile || node.op == kSwitch) && (!conditional || captured || level > 1)) ||
             (node.op == kWhile && level > 0) ||  // there is one counter
             (node.op == kWrite && (!writes_ || captured)) ||
             (body && (node.op == kHost || node.op == kRecord || node.op == kWait || node.op == kWrite)));
    node.salt = Pick(100000);
    node.to = int(Pick(kDevice));
    do node.from = int(Pick(kDevice));
    while (node.from == node.to);
    node.from_at = Pick(kWords);
    if (node.op == kCopy) {
      if (!body && Pick(4) == 0) (Pick(2) ? node.to : node.from) = Pick(3) == 0 && !captured ? kPageable : kPinned;
      Shape(&node, 1 + Pick(3));
    }
    if (node.op == kFill) Shape(&node, 1 + Pick(2));
    if (node.op == kHost) node.to = kPinned;
    if (node.op == kHost || node.op == kWrite) node.to_at = Pick(kWords);
    size_t bodies = node.op == kChild || node.op == kWhile ? 1 : 0;
    if (node.op == kIf) bodies = 1 + Pick(2);
    if (node.op == kSwitch) bodies = 1 + Pick(3);
    for (size_t i = 0; i < bodies; ++i) {
      node.bodies.emplace_back();
      // A child graph with conditional nodes is none that may be cloned.
      for (unsigned k = 1 + Pick(3); k-- > 0;) {
        const bool child = node.op == kChild;
        node.bodies.back().push_back(Make(level + 1, false, false, !child && conditional, body || !child));
      }
    }
    return node;
  }

  CUDA_MEMCPY3D CopyOf(const Node& node) const {
    CUDA_MEMCPY3D copy = {};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = buffers_[node.from] + node.from_at * 4;
    copy.dstDevice = buffers_[node.to] + node.to_at * 4;
    if (node.from >= kPinned) {
      copy.srcMemoryType = CU_MEMORYTYPE_HOST;
      copy.srcHost = reinterpret_cast<void*>(copy.srcDevice);
    }
    if (node.to >= kPinned) {
      copy.dstMemoryType = CU_MEMORYTYPE_HOST;
      copy.dstHost = reinterpret_cast<void*>(copy.dstDevice);
    }
    copy.srcPitch = copy.dstPitch = node.pitch * 4;
    copy.srcHeight = copy.dstHeight = node.rows > 1 ? node.rows : node.height;
    copy.WidthInBytes = node.width * 4;
    copy.Height = node.height;
    copy.Depth = node.depth;
    return copy;
  }
  CUDA_MEMSET_NODE_PARAMS FillOf(const Node& node) const {
    CUDA_MEMSET_NODE_PARAMS fill = {};
    fill.dst = buffers_[node.to] + node.to_at * 4;
    fill.pitch = node.pitch * 4;
    fill.value = node.salt;
    fill.elementSize = 4;
    fill.width = node.width;
    fill.height = node.height;
    return fill;
  }
  CUDA_HOST_NODE_PARAMS HostOf(const Node& node) {
    host_work_.push_back(std::make_unique<HostWork>());
    *host_work_.back() = {reinterpret_cast<unsigned*>(buffers_[kPinned]) + node.to_at, node.salt};
    CUDA_HOST_NODE_PARAMS params = {};
    params.fn = Host;
    params.userData = host_work_.back().get();
    return params;
  }
  template <typename Use>
  void WithKernel(CUfunction function, std::vector<void*> arguments, unsigned threads, Use use) {
    CUDA_KERNEL_NODE_PARAMS params = {};
    params.func = function;
    params.gridDimX = params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1;
    params.blockDimX = threads;
    params.kernelParams = arguments.data();
    use(&params);
  }
  template <typename Use>
  void WithMix(const Node& node, Use use) {
    CUdeviceptr to = buffers_[node.to], from = buffers_[node.from];
    unsigned salt = node.salt;
    WithKernel(mix_, {&to, &from, &salt}, kWords, use);
  }

  // Adds a node that waits for `after`.
  void Add(CUgraph graph, Node* node, std::vector<CUgraphNode> after) {
    const auto add_kernel = [&](CUfunction function, std::vector<void*> arguments) {
      WithKernel(function, std::move(arguments), 1, [&](CUDA_KERNEL_NODE_PARAMS* params) {
        CU(cuGraphAddKernelNode(&node->last, graph, after.data(), after.size(), params));
      });
      after = {node->last};
    };
    switch (node->op) {
      case kMix:
        WithMix(*node, [&](CUDA_KERNEL_NODE_PARAMS* params) {
          CU(cuGraphAddKernelNode(&node->last, graph, after.data(), after.size(), params));
        });
        break;
      case kCopy: {
        const CUDA_MEMCPY3D copy = CopyOf(*node);
        CU(cuGraphAddMemcpyNode(&node->last, graph, after.data(), after.size(), &copy, context_));
        break;
      }
      case kFill: {
        const CUDA_MEMSET_NODE_PARAMS fill = FillOf(*node);
        CU(cuGraphAddMemsetNode(&node->last, graph, after.data(), after.size(), &fill, context_));
        break;
      }
      case kHost: {
        const CUDA_HOST_NODE_PARAMS params = HostOf(*node);
        CU(cuGraphAddHostNode(&node->last, graph, after.data(), after.size(), &params));
        break;
      }
      case kEmpty:
        CU(cuGraphAddEmptyNode(&node->last, graph, after.data(), after.size()));
        break;
      case kRecord:
        CU(cuGraphAddEventRecordNode(&node->last, graph, after.data(), after.size(), event_));
        break;
      case kWait:
        CU(cuGraphAddEventWaitNode(&node->last, graph, after.data(), after.size(), event_));
        break;
      case kChild: {
        CUgraph child;
        CU(cuGraphCreate(&child, 0));
        AddAll(child, &node->bodies[0]);
        if (Pick(3) == 0) {
          CUgraphNodeParams params = {};
          params.type = CU_GRAPH_NODE_TYPE_GRAPH;
          params.graph.graph = child;
          params.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
          CU(cuGraphAddNode(&node->last, graph, after.data(), nullptr, after.size(), &params));
          // It is the parent's now; what is changed in it, is changed there.
          CHECK(cuGraphDestroy(child) == CUDA_ERROR_INVALID_VALUE);
          node->moved = child;
          break;
        }
        CU(cuGraphAddChildGraphNode(&node->last, graph, after.data(), after.size(), child));
        CU(cuGraphDestroy(child));
        break;
      }
      case kMemory: {
        CUDA_MEM_ALLOC_NODE_PARAMS params = {};
        params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        params.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        params.bytesize = kWords * 4;
        CU(cuGraphAddMemAllocNode(&node->last, graph, after.data(), after.size(), &params));
        CUDA_MEMSET_NODE_PARAMS fill = {};
        fill.dst = params.dptr;
        fill.value = node->salt;
        fill.elementSize = 4;
        fill.width = kWords;
        fill.height = 1;
        CUgraphNode next;
        CU(cuGraphAddMemsetNode(&next, graph, &node->last, 1, &fill, context_));
        CUdeviceptr from = buffers_[node->from];
        WithKernel(mix_, {&params.dptr, &from, &node->salt}, kWords,
                   [&](CUDA_KERNEL_NODE_PARAMS* mix) { CU(cuGraphAddKernelNode(&node->last, graph, &next, 1, mix)); });
        CUDA_MEMCPY3D copy = {};
        copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = params.dptr;
        copy.dstDevice = buffers_[node->to];
        copy.WidthInBytes = kWords * 4;
        copy.Height = copy.Depth = 1;
        CU(cuGraphAddMemcpyNode(&next, graph, &node->last, 1, &copy, context_));
        CU(cuGraphAddMemFreeNode(&node->last, graph, &next, 1, params.dptr));
        break;
      }
      case kIf:
      case kWhile:
      case kSwitch: {
        CUgraph root = graph_ ? graph_ : graph;
        CUgraphConditionalHandle handle;
        CU(cuGraphConditionalHandleCreate(&handle, root, context_, 0, CU_GRAPH_COND_ASSIGN_DEFAULT));
        CUdeviceptr word = buffers_[node->from] + node->from_at * 4, left = left_;
        unsigned most = node->op == kIf ? 2 : unsigned(node->bodies.size()) + 1;
        if (node->op == kWhile) {
          add_kernel(arm_, {&handle, &word, &left});
        } else {
          add_kernel(decide_, {&handle, &word, &most});
        }
        CUgraphNodeParams params = {};
        params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
        params.conditional.handle = handle;
        params.conditional.type = node->op == kIf      ? CU_GRAPH_COND_TYPE_IF
                                  : node->op == kWhile ? CU_GRAPH_COND_TYPE_WHILE
                                                       : CU_GRAPH_COND_TYPE_SWITCH;
        params.conditional.size = unsigned(node->bodies.size());
        params.conditional.ctx = context_;
        CU(cuGraphAddNode(&node->last, graph, after.data(), nullptr, after.size(), &params));
        const std::vector<CUgraph> bodies(params.conditional.phGraph_out,
                                          params.conditional.phGraph_out + node->bodies.size());
        for (size_t i = 0; i < bodies.size(); ++i) {
          std::vector<CUgraphNode> all = AddAll(bodies[i], &node->bodies[i]);
          if (node->op != kWhile) continue;
          CUgraphNode counted;
          WithKernel(count_down_, {&handle, &left}, 1, [&](CUDA_KERNEL_NODE_PARAMS* down) {
            CU(cuGraphAddKernelNode(&counted, bodies[i], all.data(), all.size(), down));
          });
        }
        break;
      }
      case kWrite: {
        CUstreamBatchMemOpParams write = {};
        write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        write.writeValue.address = buffers_[node->to] + node->to_at * 4;
        write.writeValue.value = node->salt;
        CUDA_BATCH_MEM_OP_NODE_PARAMS params = {};
        params.ctx = context_;
        params.count = 1;
        params.paramArray = &write;
        CU(cuGraphAddBatchMemOpNode(&node->last, graph, after.data(), after.size(), &params));
        break;
      }
      default:
        CHECK(!"a node of a known kind");
    }
    node->first = node->last;
  }

  // Those before the one at `index` that it must wait for, and some more.
  std::vector<CUgraphNode> Before(const Nodes& nodes, size_t index) {
    std::vector<CUgraphNode> before;
    for (size_t i = 0; i < index; ++i) {
      if ((nodes[i].Uses() & nodes[index].Uses()) != 0 || Pick(5) == 0) before.push_back(nodes[i].last);
    }
    return before;
  }
  std::vector<CUgraphNode> AddAll(CUgraph graph, Nodes* nodes) {
    std::vector<CUgraphNode> all;
    for (size_t i = 0; i < nodes->size(); ++i) {
      Add(graph, &(*nodes)[i], Before(*nodes, i));
      all.push_back((*nodes)[i].last);
    }
    return all;
  }

  void Build() {
    if (graphs_.size() == kMostGraphs) return;
    Graph made;
    made.number = ++numbered_;
    made.memory = Pick(4) == 0;
    made.conditional = Pick(3) == 0;
    CU(cuGraphCreate(&made.graph, 0));
    graph_ = made.graph;
    for (unsigned i = 1 + Pick(9); i-- > 0;) made.nodes.push_back(Make(0, false, made.memory, made.conditional));
    AddAll(made.graph, &made.nodes);
    graph_ = nullptr;
    NoteKinds(&made);
    graphs_.push_back(made);
  }

  // What keeps a graph from being cloned and updated.
  static void NoteKinds(Graph* graph) {
    graph->memory = graph->conditional = false;
    for (const Node& node : graph->nodes) {
      graph->memory = graph->memory || node.op == kMemory;
      graph->conditional = graph->conditional || node.op == kIf || node.op == kWhile || node.op == kSwitch;
    }
  }

  void Capture() {
    if (graphs_.size() == kMostGraphs) return;
    Graph made;
    made.number = ++numbered_;
    const bool memory = Pick(4) == 0;
    for (unsigned i = 1 + Pick(9); i-- > 0;) made.nodes.push_back(Make(0, true, memory, false));
    const auto mode = Pick(2) ? CU_STREAM_CAPTURE_MODE_RELAXED : CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    CU(cuStreamBeginCapture(streams_[0], mode));
    const auto join = [&](int from, int to) {
      CU(cuEventRecord(joins_[from], streams_[from]));
      CU(cuStreamWaitEvent(streams_[to], joins_[from], 0));
    };
    bool forked = false;
    unsigned alone[2] = {0, 0};  // what each stream uses of which the other does not know
    for (Node& node : made.nodes) {
      const int mine = int(Pick(3) == 0), other = 1 - mine;
      if (mine == 1 && !forked) {
        join(0, 1);
        forked = true;
        alone[0] = 0;
      }
      if ((alone[other] & node.Uses()) != 0) {
        join(other, mine);
        alone[other] = 0;
      }
      alone[mine] |= node.Uses();
      Record(streams_[mine], &node);
    }
    if (forked) join(1, 0);
    CU(cuStreamEndCapture(streams_[0], &made.graph));
    NoteKinds(&made);
    graphs_.push_back(made);
  }

  void Record(CUstream stream, Node* node) {
    const CUDA_MEMCPY3D copy = CopyOf(*node);
    switch (node->op) {
      case kMix:
        WithMix(*node, [&](CUDA_KERNEL_NODE_PARAMS* params) {
          CU(cuLaunchKernel(mix_, 1, 1, 1, kWords, 1, 1, 0, stream, params->kernelParams, nullptr));
        });
        break;
      case kCopy: {
        if (node->rows > 1 || node->depth > 1) {
          CU(cuMemcpy3DAsync(&copy, stream));
        } else if (node->height > 1) {
          CUDA_MEMCPY2D flat = {};
          flat.srcMemoryType = copy.srcMemoryType;
          flat.dstMemoryType = copy.dstMemoryType;
          flat.srcDevice = copy.srcDevice;
          flat.dstDevice = copy.dstDevice;
          flat.srcHost = copy.srcHost;
          flat.dstHost = const_cast<void*>(copy.dstHost);
          flat.srcPitch = copy.srcPitch;
          flat.dstPitch = copy.dstPitch;
          flat.WidthInBytes = copy.WidthInBytes;
          flat.Height = copy.Height;
          CU(cuMemcpy2DAsync(&flat, stream));
        } else {
          CU(cuMemcpyAsync(buffers_[node->to] + node->to_at * 4, buffers_[node->from] + node->from_at * 4,
                           node->width * 4, stream));
        }
        break;
      }
      case kFill:
        if (node->height > 1) {
          CU(cuMemsetD2D32Async(buffers_[node->to] + node->to_at * 4, node->pitch * 4, node->salt, node->width,
                                node->height, stream));
        } else {
          CU(cuMemsetD32Async(buffers_[node->to] + node->to_at * 4, node->salt, node->width, stream));
        }
        break;
      case kHost: {
        const CUDA_HOST_NODE_PARAMS params = HostOf(*node);
        CU(cuLaunchHostFunc(stream, params.fn, params.userData));
        break;
      }
      case kRecord:
        CU(cuEventRecordWithFlags(event_, stream, CU_EVENT_RECORD_EXTERNAL));
        break;
      case kWait:
        CU(cuStreamWaitEvent(stream, event_, CU_EVENT_WAIT_EXTERNAL));
        break;
      case kMemory: {
        CUdeviceptr memory, from = buffers_[node->from];
        CU(cuMemAllocAsync(&memory, kWords * 4, stream));
        CU(cuMemsetD32Async(memory, node->salt, kWords, stream));
        void* arguments[] = {&memory, &from, &node->salt};
        CU(cuLaunchKernel(mix_, 1, 1, 1, kWords, 1, 1, 0, stream, arguments, nullptr));
        CU(cuMemcpyDtoDAsync(buffers_[node->to], memory, kWords * 4, stream));
        CU(cuMemFreeAsync(memory, stream));
        return;
      }
      default:
        return;
    }
    CUstreamCaptureStatus status;
    CUgraph graph;
    const CUgraphNode* nodes;
    const CUgraphEdgeData* edges;
    size_t count = 0;
    cuuint64_t id;
    CU(cuStreamGetCaptureInfo(stream, &status, &id, &graph, &nodes, &edges, &count));
    CHECK(status == CU_STREAM_CAPTURE_STATUS_ACTIVE && count == 1);
    node->first = node->last = nodes[0];
    node->captured = true;
  }

  void Clone() {
    if (graphs_.empty() || graphs_.size() == kMostGraphs) return;
    Graph& from = Any(graphs_);
    if (from.memory || from.conditional) return;
    Graph made = from;
    made.number = ++numbered_;
    CU(cuGraphClone(&made.graph, from.graph));
    for (Node& node : made.nodes) {
      if (!node.first) continue;
      CU(cuGraphNodeFindInClone(&node.first, node.first, made.graph));
      node.last = node.first;
      node.moved = nullptr;
    }
    // As far as updates go they are alike.
    graphs_.push_back(made);
  }

  void DestroyGraph() {
    if (graphs_.empty()) return;
    Graph& one = Any(graphs_);
    CU(cuGraphDestroy(one.graph));
    std::swap(one, graphs_.back());
    graphs_.pop_back();
  }

  void Instantiate() {
    if (graphs_.empty() || execs_.size() == kMostExecs) return;
    Graph& from = Any(graphs_);
    Exec made;
    made.nodes = from.nodes;
    made.graph = from.number;
    made.shape = from.shape;
    made.memory = from.memory;
    made.conditional = from.conditional;
    const bool has = std::any_of(execs_.begin(), execs_.end(), [&](const Exec& e) { return e.graph == from.number; });
    const CUresult result = cuGraphInstantiate(&made.exec, from.graph, 0);
    if ((from.memory || from.conditional) && has) {
      CHECK(result == CUDA_ERROR_NOT_SUPPORTED);
      return;
    }
    CU(result);
    execs_.push_back(made);
  }

  void DestroyExec() {
    if (execs_.empty()) return;
    Exec& one = Any(execs_);
    CU(cuGraphExecDestroy(one.exec));
    std::swap(one, execs_.back());
    execs_.pop_back();
  }

  Graph* GraphOf(const Exec& exec) {
    for (Graph& graph : graphs_) {
      if (graph.number == exec.graph && graph.shape == exec.shape) return &graph;
    }
    return nullptr;
  }

  void AddNode() {
    if (graphs_.empty()) return;
    Graph& graph = Any(graphs_);
    if (graph.nodes.size() > 12) return;
    for (const Node& node : graph.nodes) {
      if (!node.last && node.op != kEmpty) return;  // captured, and of several nodes
    }
    graph_ = graph.graph;
    graph.nodes.push_back(Make(0, false, false, false));
    std::vector<CUgraphNode> before = Before(graph.nodes, graph.nodes.size() - 1);
    before.erase(std::remove(before.begin(), before.end(), nullptr), before.end());
    Add(graph.graph, &graph.nodes.back(), before);
    graph_ = nullptr;
    graph.shape = ++shapes_;
  }

  void DestroyNode() {
    if (graphs_.empty()) return;
    Graph& graph = Any(graphs_);
    if (graph.nodes.empty() || graph.memory) return;
    const size_t index = Pick(graph.nodes.size());
    Node& node = graph.nodes[index];
    if (!node.first || node.op == kIf || node.op == kWhile || node.op == kSwitch) return;
    // Those before it stay before those behind it.
    const std::vector<CUgraphNode> before = Neighbours(cuGraphNodeGetDependencies, node.first);
    for (CUgraphNode behind : Neighbours(cuGraphNodeGetDependentNodes, node.first)) {
      const std::vector<CUgraphNode> known = Neighbours(cuGraphNodeGetDependencies, behind);
      for (CUgraphNode one : before) {
        if (std::find(known.begin(), known.end(), one) != known.end()) continue;
        CU(cuGraphAddDependencies(graph.graph, &one, &behind, nullptr, 1));
      }
    }
    CU(cuGraphDestroyNode(node.first));
    graph.nodes.erase(graph.nodes.begin() + long(index));
    graph.shape = ++shapes_;
  }

  template <typename Get>
  static std::vector<CUgraphNode> Neighbours(Get get, CUgraphNode node) {
    size_t count = 0;
    CU(get(node, nullptr, nullptr, &count));
    std::vector<CUgraphNode> nodes(count);
    if (count != 0) CU(get(node, nodes.data(), nullptr, &count));
    return nodes;
  }

  // A node with other parameters that touches no more than it did.
  bool Change(Node* node) {
    if (!node->first) return false;
    switch (node->op) {
      case kMix:
      case kHost:
      case kWrite:
        break;
      case kFill:
      case kCopy:
        // An executable cannot be updated with others.
        if (node->height > 1 || node->depth > 1) return false;
        if (node->op == kCopy) node->width = 1 + Pick(node->width);
        break;
      default:
        return false;
    }
    node->salt = Pick(100000);
    return true;
  }

  void ChangeNode() {
    if (graphs_.empty()) return;
    Graph& graph = Any(graphs_);
    if (graph.nodes.empty()) return;
    Node& node = Any(graph.nodes);
    if (!Change(&node)) return;
    Set(node);
  }

  void Set(const Node& node) {
    const CUDA_MEMCPY3D copy = CopyOf(node);
    const CUDA_MEMSET_NODE_PARAMS fill = FillOf(node);
    CUDA_HOST_NODE_PARAMS host = {};
    CUstreamBatchMemOpParams write = {};
    CUDA_BATCH_MEM_OP_NODE_PARAMS batch = {};
    switch (node.op) {
      case kMix:
        return WithMix(node,
                       [&](CUDA_KERNEL_NODE_PARAMS* params) { CU(cuGraphKernelNodeSetParams(node.first, params)); });
      case kCopy:
        CU(cuGraphMemcpyNodeSetParams(node.first, &copy));
        return;
      case kFill:
        CU(cuGraphMemsetNodeSetParams(node.first, &fill));
        return;
      case kHost:
        host = HostOf(node);
        CU(cuGraphHostNodeSetParams(node.first, &host));
        return;
      default:
        MakeWrite(node, &write, &batch);
        CU(cuGraphBatchMemOpNodeSetParams(node.first, &batch));
    }
  }
  void MakeWrite(const Node& node, CUstreamBatchMemOpParams* write, CUDA_BATCH_MEM_OP_NODE_PARAMS* batch) {
    write->operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    write->writeValue.address = buffers_[node.to] + node.to_at * 4;
    write->writeValue.value = node.salt;
    batch->ctx = context_;
    batch->count = 1;
    batch->paramArray = write;
  }

  void ChangeExec() {
    if (execs_.empty()) return;
    Exec& exec = Any(execs_);
    if (exec.nodes.empty() || !GraphOf(exec)) return;
    Node& node = Any(exec.nodes);
    // What a stream has captured need not name its memory as a node's parameters do; the driver then refuses.
    if (node.op == kCopy && (node.captured || node.to >= kPinned || node.from >= kPinned)) return;
    if (!Change(&node)) return;
    exec.changed = true;
    const CUDA_MEMCPY3D copy = CopyOf(node);
    const CUDA_MEMSET_NODE_PARAMS fill = FillOf(node);
    CUDA_HOST_NODE_PARAMS host = {};
    CUstreamBatchMemOpParams write = {};
    CUDA_BATCH_MEM_OP_NODE_PARAMS batch = {};
    switch (node.op) {
      case kMix:
        return WithMix(node, [&](CUDA_KERNEL_NODE_PARAMS* params) {
          CU(cuGraphExecKernelNodeSetParams(exec.exec, node.first, params));
        });
      case kCopy:
        CU(cuGraphExecMemcpyNodeSetParams(exec.exec, node.first, &copy, context_));
        return;
      case kFill:
        CU(cuGraphExecMemsetNodeSetParams(exec.exec, node.first, &fill, context_));
        return;
      case kHost:
        host = HostOf(node);
        CU(cuGraphExecHostNodeSetParams(exec.exec, node.first, &host));
        return;
      default:
        MakeWrite(node, &write, &batch);
        CU(cuGraphExecBatchMemOpNodeSetParams(exec.exec, node.first, &batch));
    }
  }

  void SwitchNode() {
    if (execs_.empty()) return;
    Exec& exec = Any(execs_);
    if (exec.nodes.empty() || !GraphOf(exec)) return;
    Node& node = Any(exec.nodes);
    if (!node.first || (node.op != kMix && node.op != kCopy && node.op != kFill)) return;
    // One of pageable memory with several rows stays enabled (README.md).
    const bool pageable = node.op == kCopy && (node.to == kPageable || node.from == kPageable);
    if (pageable && (node.height > 1 || node.depth > 1)) return;
    node.enabled = !node.enabled;
    exec.changed = true;
    CU(cuGraphNodeSetEnabled(exec.exec, node.first, node.enabled));
    unsigned enabled;
    CU(cuGraphNodeGetEnabled(exec.exec, node.first, &enabled));
    CHECK((enabled != 0) == node.enabled);
  }

  // From its own graph, whose nodes may have changed meanwhile, or a clone of that.
  void Update() {
    if (execs_.empty()) return;
    Exec& exec = Any(execs_);
    Graph* const graph = GraphOf(exec);
    if (!graph || exec.changed || exec.memory || exec.conditional) return;
    CUgraph from = graph->graph;
    const bool clone = Pick(2) == 0;
    if (clone) CU(cuGraphClone(&from, graph->graph));
    CUgraphExecUpdateResultInfo info = {};
    CU(cuGraphExecUpdate(exec.exec, from, &info));
    CHECK(info.result == CU_GRAPH_EXEC_UPDATE_SUCCESS);
    if (clone) CU(cuGraphDestroy(from));
    exec.nodes = graph->nodes;
  }

  // The graph in a child node is the parent's own, and can be changed there.
  void ChangeInChild() {
    if (graphs_.empty()) return;
    Graph& graph = Any(graphs_);
    for (Node& node : graph.nodes) {
      if (node.op != kChild || !node.first) continue;
      CUgraph child;
      CU(cuGraphChildGraphNodeGetGraph(node.first, &child));
      if (node.moved) CHECK(child == node.moved);
      size_t count = 0;
      CU(cuGraphGetNodes(child, nullptr, &count));
      CHECK(count >= node.bodies[0].size());
      for (Node& inner : node.bodies[0]) {
        if (inner.op != kMix) continue;
        std::vector<CUgraphNode> nodes(count);
        CU(cuGraphGetNodes(child, nodes.data(), &count));
        // The one with these parameters, if there is just one.
        CUgraphNode found = nullptr;
        int many = 0;
        for (CUgraphNode one : nodes) {
          CUgraphNodeType type;
          CU(cuGraphNodeGetType(one, &type));
          if (type != CU_GRAPH_NODE_TYPE_KERNEL) continue;
          CUDA_KERNEL_NODE_PARAMS params;
          CU(cuGraphKernelNodeGetParams(one, &params));
          const bool same = params.func == mix_ && params.blockDimX == kWords &&
                            *static_cast<CUdeviceptr*>(params.kernelParams[0]) == buffers_[inner.to] &&
                            *static_cast<CUdeviceptr*>(params.kernelParams[1]) == buffers_[inner.from] &&
                            *static_cast<unsigned*>(params.kernelParams[2]) == inner.salt;
          many += same;
          if (same) found = one;
        }
        CHECK(many >= 1);
        if (many > 1) return;
        inner.salt = Pick(100000);
        WithMix(inner, [&](CUDA_KERNEL_NODE_PARAMS* params) { CU(cuGraphKernelNodeSetParams(found, params)); });
        return;
      }
    }
  }

  static bool ReadsPageable(const Nodes& nodes) {
    for (const Node& node : nodes) {
      if (node.enabled && node.op == kCopy && node.from == kPageable) return true;
      for (const Nodes& body : node.bodies) {
        if (ReadsPageable(body)) return true;
      }
    }
    return false;
  }

  void Launch() {
    if (execs_.empty()) return;
    Exec& exec = Any(execs_);
    const int stream = int(Pick(2));
    // Graphs share buffers: another stream goes on when this one has ended.
    if (stream != last_stream_) CU(cuStreamSynchronize(streams_[last_stream_]));
    last_stream_ = stream;
    if (Pick(6) == 0) CU(cuGraphUpload(exec.exec, streams_[stream]));
    for (unsigned times = 1 + Pick(3); times-- > 0;) {
      // The launch reads pageable memory (docs/driver-notes.md), which an earlier one may be about to write.
      if (ReadsPageable(exec.nodes)) CU(cuStreamSynchronize(streams_[stream]));
      pageable_ = model_[kPageable];
      CU(cuGraphLaunch(exec.exec, streams_[stream]));
      Run(exec.nodes);
    }
    launched_ = exec.nodes;
    if (Pick(4) == 0 || getenv("ALWAYS")) Compare();
  }

  std::mt19937 numbers_;
  CUdevice device_;
  CUcontext context_;
  CUfunction mix_, decide_, arm_, count_down_;
  CUstream streams_[2];
  CUevent joins_[2], event_;
  CUdeviceptr buffers_[kBuffers], left_;
  std::vector<unsigned> model_[kBuffers];
  std::vector<unsigned> pageable_;  // what the pageable buffer had at the launch
  bool writes_ = false;
  std::vector<Graph> graphs_;
  std::vector<Exec> execs_;
  std::vector<std::unique_ptr<HostWork>> host_work_;
  Nodes launched_;
  CUgraph graph_ = nullptr;  // to which conditional handles belong
  int numbered_ = 0, shapes_ = 0, last_stream_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {20, 1});
  if (const char* const seed = getenv("CR_TEST_SEED")) g_seed = unsigned(strtoul(seed, nullptr, 10));
  Random random;
  uint64_t digest = 0;
  for (int step = 1; step <= options.steps; ++step) {
    app::Step(step);
    for (int i = 0; i < kOperations * options.size; ++i) random.Operation();
    digest = digest * 31 + random.Compare();
  }
  printf("graph_random seed=%u steps=%d digest=%016" PRIx64 "\n", g_seed, options.steps, digest);
  return 0;
}
