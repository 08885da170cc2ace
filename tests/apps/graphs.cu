// SPDX-License-Identifier: Apache-2.0
// CUDA graphs in all the ways that programs make them: captured over two streams that wait for each other, built node
// by node, cloned, updated, with host functions and a user object inside; graphs that are gone while their executables
// live. Everything is made once and launched at every step, but for one graph that is edited all the time.
#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "tests/apps/support/app.h"

__global__ void Advance(unsigned* data, int n, unsigned salt) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] = data[i] * 1664525u + salt + i;
}

__global__ void Fold(unsigned* into, const unsigned* from, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) into[i] = (into[i] << 7 | into[i] >> 25) ^ from[i];
}

static unsigned AdvanceOnHost(unsigned value, int i, unsigned salt) { return value * 1664525u + salt + i; }
static unsigned FoldOnHost(unsigned into, unsigned from) { return (into << 7 | into >> 25) ^ from; }

struct Counter {
  int calls = 0;
  int after_other = 0;  // calls that found `other` further on
  Counter* other = nullptr;
};

static void CUDART_CB Count(void* user) {
  Counter* counter = static_cast<Counter*>(user);
  ++counter->calls;
  if (counter->other && counter->other->calls > counter->after_other) ++counter->after_other;
}

static std::atomic<int> g_destroyed{0};
static void CUDART_CB Destroyed(void* user) { g_destroyed += *static_cast<int*>(user); }

struct Buffers {
  unsigned *a, *b, *zero;
  int n;
  dim3 grid, block;
  size_t bytes() const { return n * sizeof(unsigned); }
};

static int HighestPriority() {
  int lowest, highest;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  return highest;
}

// Two streams: the second one does its part between two events of the first. Every other time it is one that waits for
// the legacy stream. Streams and events that are only needed while capturing are destroyed before this returns, and
// every other time as soon as the capture needs them no more. The second stream's kernels have its priority.
static cudaGraph_t CaptureTwoStreams(cudaStream_t stream, const Buffers& x, unsigned salt, Counter* counter) {
  cudaStream_t side;
  cudaEvent_t fork, join;
  CUDA_CHECK(
      cudaStreamCreateWithPriority(&side, salt % 2 ? cudaStreamDefault : cudaStreamNonBlocking, HighestPriority()));
  CUDA_CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CUDA_CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  cudaGraph_t graph = nullptr;
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CUDA_CHECK(cudaMemsetAsync(x.zero, 0, x.bytes(), stream));
  CUDA_CHECK(cudaEventRecord(fork, stream));
  CUDA_CHECK(cudaStreamWaitEvent(side, fork, 0));
  Advance<<<x.grid, x.block, 0, stream>>>(x.a, x.n, salt);
  cudaLaunchConfig_t config = {};
  config.gridDim = x.grid;
  config.blockDim = x.block;
  config.stream = side;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributePriority;
  attribute.val.priority = 0;
  config.attrs = &attribute;
  config.numAttrs = 1;
  CUDA_CHECK(cudaLaunchKernelEx(&config, Advance, x.b, x.n, salt + 1));
  CUDA_CHECK(cudaLaunchHostFunc(side, Count, counter));
  Advance<<<x.grid, x.block, 0, side>>>(x.zero, x.n, salt + 2);
  LAUNCH_CHECK();
  CUDA_CHECK(cudaEventRecord(join, side));
  CUDA_CHECK(cudaStreamWaitEvent(stream, join, 0));
  cudaStreamCaptureStatus status;
  CUDA_CHECK(cudaStreamIsCapturing(side, &status));
  APP_CHECK(status == cudaStreamCaptureStatusActive);
  const auto destroy = [&] {
    CUDA_CHECK(cudaStreamDestroy(side));
    CUDA_CHECK(cudaEventDestroy(fork));
    CUDA_CHECK(cudaEventDestroy(join));
  };
  const bool early = salt / 4 % 2;
  if (early) destroy();
  Fold<<<x.grid, x.block, 0, stream>>>(x.a, x.b, x.n);
  Fold<<<x.grid, x.block, 0, stream>>>(x.b, x.zero, x.n);
  LAUNCH_CHECK();
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  if (!early) destroy();
  return graph;
}

// A capture that comes to nothing. Every error is that of the call that makes it, and when the capture has ended the
// stream is as good as any.
static void CaptureInVain(cudaStream_t stream, const Buffers& x) {
  cudaGraph_t graph = nullptr;
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  Advance<<<x.grid, x.block, 0, stream>>>(x.zero, x.n, 1);
  LAUNCH_CHECK();
  Advance<<<x.grid, x.block>>>(x.zero, x.n, 2);  // the legacy stream, which the captured one would wait for
  APP_CHECK(cudaGetLastError() == cudaErrorStreamCaptureImplicit);
  Advance<<<x.grid, x.block, 0, stream>>>(x.zero, x.n, 3);
  APP_CHECK(cudaGetLastError() == cudaErrorStreamCaptureInvalidated);
  APP_CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated && graph == nullptr);
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  APP_CHECK(cudaStreamSynchronize(stream) == cudaErrorStreamCaptureUnsupported);
  APP_CHECK(cudaMemsetAsync(x.zero, 0, x.bytes(), stream) == cudaErrorStreamCaptureInvalidated);
  APP_CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated && graph == nullptr);
  APP_CHECK(cudaGetLastError() == cudaErrorStreamCaptureInvalidated);
  Advance<<<x.grid, x.block, 0, stream>>>(x.zero, x.n, 4);
  LAUNCH_CHECK();
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

static void TwoStreamsOnHost(std::vector<unsigned>* a, std::vector<unsigned>* b, unsigned salt) {
  for (int i = 0; i < int(a->size()); ++i) {
    const unsigned zero = AdvanceOnHost(0, i, salt + 2);
    (*a)[i] = AdvanceOnHost((*a)[i], i, salt);
    (*b)[i] = AdvanceOnHost((*b)[i], i, salt + 1);
    (*a)[i] = FoldOnHost((*a)[i], (*b)[i]);
    (*b)[i] = FoldOnHost((*b)[i], zero);
  }
}

static Buffers Make(int n, int fill) {
  Buffers x;
  x.n = n;
  x.grid = dim3((n + 127) / 128);
  x.block = dim3(128);
  for (unsigned** p : {&x.a, &x.b, &x.zero}) {
    CUDA_CHECK(cudaMalloc(p, x.bytes()));
    CUDA_CHECK(cudaMemset(*p, fill, x.bytes()));
  }
  return x;
}

// What differs from what the host has computed, for whoever must find out why.
static void Compare(int g, const char* name, const std::vector<unsigned>& got, const std::vector<unsigned>& want) {
  size_t wrong = 0, first = 0;
  for (size_t i = got.size(); i-- > 0;) {
    if (got[i] == want[i]) continue;
    ++wrong;
    first = i;
  }
  if (wrong == 0) return;
  fprintf(stderr, "graph %d: %zu of %zu elements of %s are wrong, from %zu on: %08x, should be %08x\n", g, wrong,
          got.size(), name, first, got[first], want[first]);
}

// Of what is in the buffers, which must be `a` and `b`.
static uint64_t DigestOf(int g, const Buffers& x, const std::vector<unsigned>& a, const std::vector<unsigned>& b) {
  std::vector<unsigned> got_a(x.n), got_b(x.n);
  CUDA_CHECK(cudaMemcpy(got_a.data(), x.a, x.bytes(), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(got_b.data(), x.b, x.bytes(), cudaMemcpyDeviceToHost));
  Compare(g, "a", got_a, a);
  Compare(g, "b", got_b, b);
  APP_CHECK(got_a == a && got_b == b);
  app::Digest digest;
  digest.Add(a.data(), a.size() * sizeof(unsigned));
  digest.Add(b.data(), b.size() * sizeof(unsigned));
  return digest.value();
}

static cudaKernelNodeParams AdvanceNode(const Buffers& x, void** arguments) {
  cudaKernelNodeParams params = {};
  params.func = reinterpret_cast<void*>(Advance);
  params.gridDim = x.grid;
  params.blockDim = x.block;
  params.kernelParams = arguments;
  return params;
}

static std::vector<cudaGraphNode_t> NodesOf(cudaGraph_t graph) {
  size_t count = 0;
  CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
  return nodes;
}

// Captures two kernels into `graph` and adds one behind the first; then removes `nodes`, which did that before. Two
// nodes that stay get an edge for the executable before this one, and lose it.
static void Recapture(cudaStream_t stream, const Buffers& x, cudaGraph_t graph, unsigned salt, cudaGraphNode_t* ends,
                      std::vector<cudaGraphNode_t>* nodes, cudaGraphExec_t* exec) {
  const std::vector<cudaGraphNode_t> before = NodesOf(graph);
  std::vector<cudaGraphNode_t> behind(*nodes);
  behind.push_back(ends[0]);
  CUDA_CHECK(cudaStreamBeginCaptureToGraph(stream, graph, behind.data(), nullptr, behind.size(),
                                           cudaStreamCaptureModeThreadLocal));
  Advance<<<x.grid, x.block, 0, stream>>>(x.a, x.n, salt);
  Advance<<<x.grid, x.block, 0, stream>>>(x.a, x.n, salt + 1);
  cudaGraph_t same;
  CUDA_CHECK(cudaStreamEndCapture(stream, &same));
  APP_CHECK(same == graph);
  std::vector<cudaGraphNode_t> made;
  for (const cudaGraphNode_t node : NodesOf(graph)) {
    if (std::find(before.begin(), before.end(), node) == before.end()) made.push_back(node);
  }
  APP_CHECK(made.size() == 2);
  unsigned* data = x.b;
  int n = x.n;
  void* arguments[] = {&data, &n, &salt};
  cudaKernelNodeParams params = AdvanceNode(x, arguments);
  cudaGraphNode_t own;
  CUDA_CHECK(cudaGraphAddKernelNode(&own, graph, &made[0], 1, &params));
  made.push_back(own);
  if (salt % 3 == 0) CUDA_CHECK(cudaGraphAddDependencies(graph, &ends[0], &ends[1], nullptr, 1));
  if (salt % 3 == 1 && salt > 1) CUDA_CHECK(cudaGraphRemoveDependencies(graph, &ends[0], &ends[1], nullptr, 1));
  for (const cudaGraphNode_t node : *nodes) CUDA_CHECK(cudaGraphDestroyNode(node));
  *nodes = made;
  if (*exec) CUDA_CHECK(cudaGraphExecDestroy(*exec));
  CUDA_CHECK(cudaGraphInstantiate(exec, graph, 0));
}

// Captured in two streams of a green context, of which the second one is destroyed as soon as it is not needed.
class Green {
 public:
  explicit Green(const Buffers& x) : x_(x) {
    CUdevice device;
    CUdevResource all;
    CUdevResourceDesc described;
    CUgreenCtx green;
    CUstream side;
    cudaEvent_t event;
    APP_CHECK(cuDeviceGet(&device, 0) == CUDA_SUCCESS);
    APP_CHECK(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS);
    APP_CHECK(cuDevResourceGenerateDesc(&described, &all, 1) == CUDA_SUCCESS);
    APP_CHECK(cuGreenCtxCreate(&green, described, device, CU_GREEN_CTX_DEFAULT_STREAM) == CUDA_SUCCESS);
    for (CUstream* one : {&stream_, &side}) {
      APP_CHECK(cuGreenCtxStreamCreate(one, green, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
    }
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    Advance<<<x.grid, x.block, 0, stream_>>>(x.a, x.n, kSalt);
    CUDA_CHECK(cudaEventRecord(event, stream_));
    CUDA_CHECK(cudaStreamWaitEvent(side, event, 0));
    Advance<<<x.grid, x.block, 0, side>>>(x.b, x.n, kSalt);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaEventRecord(event, side));
    CUDA_CHECK(cudaStreamWaitEvent(stream_, event, 0));
    CUDA_CHECK(cudaStreamDestroy(side));
    Fold<<<x.grid, x.block, 0, stream_>>>(x.a, x.b, x.n);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
    CUDA_CHECK(cudaEventDestroy(event));
    CUDA_CHECK(cudaGraphInstantiate(&exec_, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    a_.resize(x.n);
    CUDA_CHECK(cudaMemcpy(a_.data(), x.a, x.bytes(), cudaMemcpyDeviceToHost));
    b_.resize(x.n);
    CUDA_CHECK(cudaMemcpy(b_.data(), x.b, x.bytes(), cudaMemcpyDeviceToHost));
  }

  void Step() {
    CUDA_CHECK(cudaGraphLaunch(exec_, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    std::vector<unsigned> now(x_.n);
    CUDA_CHECK(cudaMemcpy(now.data(), x_.a, x_.bytes(), cudaMemcpyDeviceToHost));
    for (int i = 0; i < x_.n; ++i) {
      b_[i] = AdvanceOnHost(b_[i], i, kSalt);
      a_[i] = FoldOnHost(AdvanceOnHost(a_[i], i, kSalt), b_[i]);
    }
    APP_CHECK(now == a_);
  }

 private:
  static constexpr unsigned kSalt = 4242;

  const Buffers x_;
  std::vector<unsigned> a_, b_;
  CUstream stream_;
  cudaGraphExec_t exec_;
};

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {24, 600});
  const int n = options.size;
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));

  // 1: captured; the graph is destroyed at once. A user object keeps it company.
  Buffers one = Make(n, 1);
  Counter one_counter;
  int one_mark = 1;
  cudaGraph_t graph = CaptureTwoStreams(stream, one, 17, &one_counter);
  cudaUserObject_t object;
  CUDA_CHECK(cudaUserObjectCreate(&object, &one_mark, Destroyed, 1, cudaUserObjectNoDestructorSync));
  CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  cudaGraphExec_t one_exec;
  CUDA_CHECK(cudaGraphInstantiate(&one_exec, graph, 0));
  CUDA_CHECK(cudaGraphDestroy(graph));

  // 2: captured again at every step, with other parameters, into the same executable.
  Buffers two = Make(n, 2);
  Counter two_counter;
  graph = CaptureTwoStreams(stream, two, 1000, &two_counter);
  cudaGraphExec_t two_exec;
  CUDA_CHECK(cudaGraphInstantiate(&two_exec, graph, 0));
  CUDA_CHECK(cudaGraphDestroy(graph));

  Green green(Make(n, 6));

  // 3: captured and kept; its kernels are found among its nodes, and one of them gets other parameters in the
  // executable.
  Buffers three = Make(n, 3);
  Counter three_counter;
  cudaGraph_t three_graph = CaptureTwoStreams(stream, three, 500, &three_counter);
  size_t count = 0;
  CUDA_CHECK(cudaGraphGetNodes(three_graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  CUDA_CHECK(cudaGraphGetNodes(three_graph, nodes.data(), &count));
  cudaGraphNode_t changed = nullptr, prior = nullptr;
  int kernels = 0, hosts = 0, memsets = 0;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    CUDA_CHECK(cudaGraphNodeGetType(node, &type));
    kernels += type == cudaGraphNodeTypeKernel;
    hosts += type == cudaGraphNodeTypeHost;
    memsets += type == cudaGraphNodeTypeMemset;
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams params;
    CUDA_CHECK(cudaGraphKernelNodeGetParams(node, &params));
    if (params.func != reinterpret_cast<void*>(Advance)) continue;
    if (*static_cast<unsigned**>(params.kernelParams[0]) == three.a) changed = node;
    if (*static_cast<unsigned**>(params.kernelParams[0]) == three.zero) prior = node;
  }
  APP_CHECK(changed != nullptr && prior != nullptr);
  printf("graphs nodes=%zu kernels=%d hosts=%d memsets=%d\n", count, kernels, hosts, memsets);
  cudaGraphExec_t three_exec;
  int n_argument = n;
  // The executable does what the node said when it was made.
  for (unsigned salt : {123u, 400u, 31337u, 31338u}) {
    void* arguments[] = {&three.a, &n_argument, &salt};
    cudaKernelNodeParams params = AdvanceNode(three, arguments);
    CUDA_CHECK(cudaGraphKernelNodeSetParams(changed, &params));
    if (salt == 400) CUDA_CHECK(cudaGraphInstantiate(&three_exec, three_graph, 0));
  }

  // 4: built by hand: host function, then a kernel, then the captured graph as a child, then a node that is taken away
  // again.
  Buffers four = Make(n, 4);
  Counter four_counter, inner_counter;
  four_counter.other = &inner_counter;
  cudaGraph_t four_graph, inner = CaptureTwoStreams(stream, four, 900, &inner_counter);
  CUDA_CHECK(cudaGraphCreate(&four_graph, 0));
  cudaGraphNode_t kernel_node, child_node, host_node, gone_node, clear_node;
  unsigned four_salt = 77;
  {
    void* arguments[] = {&four.a, &n_argument, &four_salt};
    cudaKernelNodeParams params = AdvanceNode(four, arguments);
    CUDA_CHECK(cudaGraphAddKernelNode(&kernel_node, four_graph, nullptr, 0, &params));
  }
  cudaMemsetParams clear = {};
  clear.dst = four.zero;
  clear.value = 0xff;
  clear.elementSize = 4;
  clear.width = n;
  clear.height = 1;
  CUDA_CHECK(cudaGraphAddMemsetNode(&clear_node, four_graph, nullptr, 0, &clear));
  CUDA_CHECK(cudaGraphAddEmptyNode(&gone_node, four_graph, &kernel_node, 1));
  cudaGraphNode_t before_child[] = {gone_node, kernel_node};
  CUDA_CHECK(cudaGraphAddChildGraphNode(&child_node, four_graph, before_child, 2, inner));
  CUDA_CHECK(cudaGraphDestroyNode(gone_node));
  CUDA_CHECK(cudaGraphAddDependencies(four_graph, &clear_node, &child_node, nullptr, 1));
  CUDA_CHECK(cudaGraphDestroy(inner));
  cudaHostNodeParams host = {Count, &four_counter};
  CUDA_CHECK(cudaGraphAddHostNode(&host_node, four_graph, &child_node, 1, &host));
  cudaHostNodeParams host_again = {};
  CUDA_CHECK(cudaGraphHostNodeGetParams(host_node, &host_again));
  APP_CHECK(host_again.fn == Count && host_again.userData == &four_counter);
  cudaGraph_t clone;
  CUDA_CHECK(cudaGraphClone(&clone, four_graph));
  CUDA_CHECK(cudaGraphDestroy(four_graph));
  cudaGraphExec_t four_exec;
  CUDA_CHECK(cudaGraphInstantiate(&four_exec, clone, 0));

  // 5: a graph that is captured into at each step, and loses the nodes of the step before. Two of its nodes stay.
  Buffers five = Make(n, 5);
  cudaGraph_t five_graph;
  cudaGraphExec_t five_exec = nullptr;
  cudaGraphNode_t five_ends[2];
  std::vector<cudaGraphNode_t> five_nodes;
  CUDA_CHECK(cudaGraphCreate(&five_graph, 0));
  for (cudaGraphNode_t& node : five_ends) CUDA_CHECK(cudaGraphAddEmptyNode(&node, five_graph, nullptr, 0));

  // The same on the host.
  std::vector<unsigned> a[6], b[6];
  for (int g = 1; g <= 5; ++g) {
    a[g].assign(n, 0x01010101u * g);
    b[g].assign(n, 0x01010101u * g);
  }

  for (int step = 1; step <= options.steps; ++step) {
    if (step == 2) CaptureInVain(stream, one);
    green.Step();
    CUDA_CHECK(cudaGraphLaunch(one_exec, stream));
    TwoStreamsOnHost(&a[1], &b[1], 17);

    if (step % 3 == 0) {
      graph = CaptureTwoStreams(stream, two, 1000 + step, &two_counter);
      cudaGraphExecUpdateResultInfo info;
      CUDA_CHECK(cudaGraphExecUpdate(two_exec, graph, &info));
      APP_CHECK(info.result == cudaGraphExecUpdateSuccess);
      CUDA_CHECK(cudaGraphDestroy(graph));
    }
    CUDA_CHECK(cudaGraphLaunch(two_exec, stream));
    TwoStreamsOnHost(&a[2], &b[2], 1000 + step / 3 * 3);

    cudaKernelNodeAttrValue priority = {};
    CUDA_CHECK(cudaGraphKernelNodeGetAttribute(prior, cudaKernelNodeAttributePriority, &priority));
    APP_CHECK(priority.priority == HighestPriority());
    unsigned salt = 400;
    if (step > options.steps / 3) {
      salt = 9000 + step / 2;
      void* arguments[] = {&three.a, &n_argument, &salt};
      cudaKernelNodeParams params = AdvanceNode(three, arguments);
      if (step % 2 == 0 || step == options.steps / 3 + 1) {
        CUDA_CHECK(cudaGraphExecKernelNodeSetParams(three_exec, changed, &params));
      }
    }
    CUDA_CHECK(cudaGraphLaunch(three_exec, stream));
    for (int i = 0; i < n; ++i) {
      const unsigned zero = AdvanceOnHost(0, i, 502);
      a[3][i] = AdvanceOnHost(a[3][i], i, salt);
      b[3][i] = AdvanceOnHost(b[3][i], i, 501);
      a[3][i] = FoldOnHost(a[3][i], b[3][i]);
      b[3][i] = FoldOnHost(b[3][i], zero);
    }

    CUDA_CHECK(cudaGraphLaunch(four_exec, stream));
    for (int i = 0; i < n; ++i) a[4][i] = AdvanceOnHost(a[4][i], i, 77);
    TwoStreamsOnHost(&a[4], &b[4], 900);

    // What was made in the step before, and what is made now.
    for (const unsigned now : {0u, 1u}) {
      const unsigned of_step = unsigned(step) - 1 + now;
      if (now == 1) Recapture(stream, five, five_graph, of_step, five_ends, &five_nodes, &five_exec);
      if (!five_exec) continue;
      CUDA_CHECK(cudaGraphLaunch(five_exec, stream));
      for (int i = 0; i < n; ++i) {
        a[5][i] = AdvanceOnHost(AdvanceOnHost(a[5][i], i, of_step), i, of_step + 1);
        b[5][i] = AdvanceOnHost(b[5][i], i, of_step);
      }
    }
    app::Step(step);
  }
  CUDA_CHECK(cudaStreamSynchronize(stream));
  const Buffers* all[] = {nullptr, &one, &two, &three, &four, &five};
  for (int g = 1; g <= 5; ++g) {
    printf("graphs %d digest=%016" PRIx64 "\n", g, DigestOf(g, *all[g], a[g], b[g]));
  }
  APP_CHECK(one_counter.calls == options.steps && two_counter.calls == options.steps);
  APP_CHECK(three_counter.calls == options.steps && four_counter.calls == options.steps);
  APP_CHECK(inner_counter.calls == options.steps && four_counter.after_other == options.steps);
  APP_CHECK(g_destroyed == 0);
  CUDA_CHECK(cudaGraphExecDestroy(one_exec));
  for (int i = 0; i < 2000 && g_destroyed == 0; ++i) usleep(5000);
  printf("graphs n=%d steps=%d host calls=%d destroyed=%d\n", n, options.steps, one_counter.calls, g_destroyed.load());
  CUDA_CHECK(cudaGraphExecDestroy(two_exec));
  CUDA_CHECK(cudaGraphExecDestroy(three_exec));
  CUDA_CHECK(cudaGraphExecDestroy(four_exec));
  CUDA_CHECK(cudaGraphExecDestroy(five_exec));
  CUDA_CHECK(cudaGraphDestroy(five_graph));
  CUDA_CHECK(cudaGraphDestroy(three_graph));
  CUDA_CHECK(cudaGraphDestroy(clone));
  CUDA_CHECK(cudaStreamDestroy(stream));
  return 0;
}
