// SPDX-License-Identifier: Apache-2.0
// Copy nodes between pageable memory and the GPU in graphs that are built node by node, and captured copies of
// rectangles: they read and write the program's memory at every launch. The nodes are asked about, cloned, and changed
// in the graph and in executables. In executables they are also disabled and enabled, given other memory meanwhile, and
// updated from other graphs: nodes of all shapes and of all kinds of memory.
//
// Launches take what pageable memory has when they are called: the program writes to it again while they wait.
#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr int kRows = 12, kSlices = 3;

__global__ void Mix(unsigned* state, const unsigned* line, const unsigned* rectangle, int width, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) state[i] = state[i] * 22695477u + line[i] + 3 * rectangle[i % (width * kRows)];
}

// A rectangle of `width` numbers and kRows rows, in rows of twice that, beginning in row 1 at number 3.
cudaMemcpy3DParms Rectangle(std::vector<unsigned>* from, unsigned* to, int width) {
  cudaMemcpy3DParms copy = {};
  copy.srcPtr = make_cudaPitchedPtr(from->data(), 2 * width * 4, 2 * width * 4, kRows + 1);
  copy.srcPos = make_cudaPos(12, 1, 0);
  copy.dstPtr = make_cudaPitchedPtr(to, width * 4, width * 4, kRows);
  copy.extent = make_cudaExtent(width * 4, kRows, 1);
  copy.kind = cudaMemcpyHostToDevice;
  return copy;
}

// All of the state, as slices whose rows have a gap behind them.
cudaMemcpy3DParms Out(const unsigned* from, std::vector<unsigned>* to, int width) {
  cudaMemcpy3DParms copy = {};
  copy.srcPtr = make_cudaPitchedPtr(const_cast<unsigned*>(from), width * 4, width * 4, kRows);
  copy.dstPtr = make_cudaPitchedPtr(to->data(), (width + 5) * 4, (width + 5) * 4, kRows + 2);
  copy.extent = make_cudaExtent(width * 4, kRows, kSlices);
  copy.kind = cudaMemcpyDeviceToHost;
  return copy;
}

// An executable of a line that comes in, a kernel, and a result that goes out, whose copies are disabled and enabled
// and given other memory in turn. `phase` is the step of that to begin with.
class Switched {
 public:
  Switched(int phase, int width) : phase_(phase), width_(width), n_(width * kRows) {
    for (std::vector<unsigned>& one : in_) one.assign(n_, 0);
    out_.assign(n_, 0);
    expected_.assign(n_, 0);
    CUDA_CHECK(cudaMallocHost(&pinned_, n_ * 4));
    CUDA_CHECK(cudaMalloc(&state_, n_ * 4));
    CUDA_CHECK(cudaMalloc(&line_, n_ * 4));
    CUDA_CHECK(cudaMemset(state_, 0, n_ * 4));
    CUDA_CHECK(cudaMemset(line_, 0, n_ * 4));
    CUDA_CHECK(cudaDeviceSynchronize());  // the stream does not wait for the default one
    graph_ = Build(in_[0], &to_line_, &to_host_);
    CUDA_CHECK(cudaGraphInstantiate(&exec_, graph_, 0));
    came_.assign(n_, 0);
    CheckEnabled();
  }
  ~Switched() {
    CUDA_CHECK(cudaGraphExecDestroy(exec_));
    CUDA_CHECK(cudaGraphDestroy(graph_));
    CUDA_CHECK(cudaFree(line_));
    CUDA_CHECK(cudaFree(state_));
    CUDA_CHECK(cudaFreeHost(pinned_));
  }

  void Step(int step, cudaStream_t stream, app::Digest* digest) {
    // The pinned memory has what in_[1] has: a driver may refuse to go on to memory of that kind.
    for (int i = 0; i < n_; ++i) {
      in_[0][i] = step * 2246822519u + i * 13 + phase_;
      pinned_[i] = in_[1][i] = step * 3266489917u ^ (i * 17 + phase_);
    }
    switch ((step + phase_) % 9) {
      case 0:
        Enable(to_line_, &comes_, false);
        break;
      case 1:
        From(in_[1].data(), 1);
        break;
      case 3:
        Enable(to_line_, &comes_, true);
        break;
      case 4:
        From(pinned_, 1);
        Enable(to_host_, &goes_, false);
        break;
      case 5:
        Update(graph_, 0);
        Enable(to_line_, &comes_, false);
        break;
      case 6: {
        cudaGraphNode_t in, out;
        cudaGraph_t other = Build(in_[1], &in, &out);
        Update(other, 1);
        CUDA_CHECK(cudaGraphDestroy(other));
        Enable(to_host_, &goes_, true);
        break;
      }
      case 7:
        Enable(to_line_, &comes_, true);
        break;
      case 8:
        From(in_[0].data(), 0);
        break;
    }
    CheckEnabled();
    if (comes_) came_ = in_[from_];
    for (int i = 0; i < n_; ++i) expected_[i] = expected_[i] * 22695477u + 4 * came_[i];
    std::fill(out_.begin(), out_.end(), 12345u);
    CUDA_CHECK(cudaGraphLaunch(exec_, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < n_; ++i) APP_CHECK(out_[i] == (goes_ ? expected_[i] : 12345u));
    digest->Add(out_.data(), n_ * 4);
  }

 private:
  cudaGraph_t Build(const std::vector<unsigned>& in, cudaGraphNode_t* to_line, cudaGraphNode_t* to_host) {
    cudaGraph_t graph;
    cudaGraphNode_t kernel;
    CUDA_CHECK(cudaGraphCreate(&graph, 0));
    CUDA_CHECK(cudaGraphAddMemcpyNode1D(to_line, graph, nullptr, 0, line_, in.data(), n_ * 4, cudaMemcpyHostToDevice));
    void* arguments[] = {&state_, &line_, &line_, &width_, &n_};
    cudaKernelNodeParams launch = {};
    launch.func = reinterpret_cast<void*>(Mix);
    launch.gridDim = dim3((n_ + 63) / 64);
    launch.blockDim = dim3(64);
    launch.kernelParams = arguments;
    CUDA_CHECK(cudaGraphAddKernelNode(&kernel, graph, to_line, 1, &launch));
    CUDA_CHECK(
        cudaGraphAddMemcpyNode1D(to_host, graph, &kernel, 1, out_.data(), state_, n_ * 4, cudaMemcpyDeviceToHost));
    return graph;
  }
  void Enable(cudaGraphNode_t node, bool* enabled, bool enable) {
    CUDA_CHECK(cudaGraphNodeSetEnabled(exec_, node, enable));
    *enabled = enable;
  }
  // Whether they are is seen in what they copy, too.
  void CheckEnabled() {
    unsigned comes = 2, goes = 2;
    CUDA_CHECK(cudaGraphNodeGetEnabled(exec_, to_line_, &comes));
    CUDA_CHECK(cudaGraphNodeGetEnabled(exec_, to_host_, &goes));
    APP_CHECK(comes == comes_ && goes == goes_);
  }
  void From(const unsigned* memory, int from) {
    const cudaError_t result =
        cudaGraphExecMemcpyNodeSetParams1D(exec_, to_line_, line_, memory, n_ * 4, cudaMemcpyHostToDevice);
    if (memory == pinned_ && result == cudaErrorInvalidValue) {
      cudaGetLastError();
      memory = in_[from].data();
      CUDA_CHECK(cudaGraphExecMemcpyNodeSetParams1D(exec_, to_line_, line_, memory, n_ * 4, cudaMemcpyHostToDevice));
    } else {
      CUDA_CHECK(result);
    }
    from_ = from;
  }
  void Update(cudaGraph_t graph, int from) {
    cudaGraphExecUpdateResultInfo info;
    CUDA_CHECK(cudaGraphExecUpdate(exec_, graph, &info));
    APP_CHECK(info.result == cudaGraphExecUpdateSuccess);
    from_ = from;
  }

  const int phase_;
  int width_, n_;
  std::vector<unsigned> in_[2], out_, came_, expected_;
  unsigned *pinned_ = nullptr, *state_ = nullptr, *line_ = nullptr;
  cudaGraph_t graph_;
  cudaGraphExec_t exec_;
  cudaGraphNode_t to_line_, to_host_;
  bool comes_ = true, goes_ = true;
  int from_ = 0;
};

// Nodes of each shape and kind of memory, which are disabled and enabled in turn: rows, an array, memory of a pool,
// memory that the program maps, and rows between two places of the host.
class Shapes {
 public:
  Shapes(int phase, cudaStream_t stream) : phase_(phase) {
    CUDA_CHECK(cudaMalloc(&rows_, kCount * 4));
    CUDA_CHECK(cudaMallocAsync(&pool_, kCount * 4, stream));
    CUDA_CHECK(cudaMemsetAsync(rows_, 0, kCount * 4, stream));
    CUDA_CHECK(cudaMemsetAsync(pool_, 0, kCount * 4, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    Map();
    CUDA_CHECK(cudaMemset(mapped_, 0, kCount * 4));
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<unsigned>();
    CUDA_CHECK(cudaMallocArray(&array_, &format, kSide, kSide));
    CUDA_CHECK(cudaMemcpy2DToArray(array_, 0, 0, zeros_.data(), kSide * 4, kSide * 4, kSide, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaGraphCreate(&graph_, 0));
    const void* const device[] = {rows_, nullptr, pool_, mapped_};
    for (int i = 0; i < kNodes; ++i) {
      cudaMemcpy3DParms copy = {};
      const bool is_row = i == 2 || i == 3;
      const size_t width = is_row ? kCount : kSide, height = is_row ? 1 : kSide;
      copy.srcPtr = make_cudaPitchedPtr(in_[i].data(), width * 4, width * 4, height);
      copy.extent = make_cudaExtent(width * 4, height, 1);
      copy.kind = i == kNodes - 1 ? cudaMemcpyHostToHost : cudaMemcpyHostToDevice;
      if (i == 1) {
        copy.dstArray = array_;
        copy.extent.width = kSide;
      } else {
        void* const to = i == kNodes - 1 ? static_cast<void*>(out_[i].data()) : const_cast<void*>(device[i]);
        copy.dstPtr = make_cudaPitchedPtr(to, width * 4, width * 4, height);
      }
      CUDA_CHECK(cudaGraphAddMemcpyNode(&to_[i], graph_, nullptr, 0, &copy));
      if (i == kNodes - 1) continue;
      copy.srcArray = copy.dstArray;
      copy.srcPtr = copy.dstPtr;
      copy.dstArray = nullptr;
      copy.dstPtr = make_cudaPitchedPtr(out_[i].data(), width * 4, width * 4, height);
      copy.kind = cudaMemcpyDeviceToHost;
      CUDA_CHECK(cudaGraphAddMemcpyNode(&back_[i], graph_, &to_[i], 1, &copy));
    }
    CUDA_CHECK(cudaGraphInstantiate(&exec_, graph_, 0));
  }
  ~Shapes() {
    CUDA_CHECK(cudaGraphExecDestroy(exec_));
    CUDA_CHECK(cudaGraphDestroy(graph_));
    CUDA_CHECK(cudaFreeArray(array_));
    CUDA_CHECK(cudaFree(pool_));
    CUDA_CHECK(cudaFree(rows_));
  }

  void Step(int step, cudaStream_t stream, app::Digest* digest) {
    for (int i = 0; i < kNodes; ++i) {
      for (int k = 0; k < kCount; ++k) in_[i][k] = step * 2654435761u + i * 40503u + k * 7u + phase_;
      std::fill(out_[i].begin(), out_[i].end(), 12345u);
      Enable(to_[i], &comes_[i], (step + phase_ + i) % 3 != 0);
      if (i < kNodes - 1) Enable(back_[i], &goes_[i], (step + phase_ + i) % 4 != 0);
      if (comes_[i]) has_[i] = in_[i];
    }
    CUDA_CHECK(cudaGraphLaunch(exec_, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < kNodes; ++i) {
      const bool written = i < kNodes - 1 ? goes_[i] : comes_[i];
      for (int k = 0; k < kCount; ++k) APP_CHECK(out_[i][k] == (written ? has_[i][k] : 12345u));
      digest->Add(out_[i].data(), kCount * 4);
    }
  }

 private:
  static constexpr int kNodes = 5, kSide = 24, kCount = kSide * kSide;
  using Numbers = std::vector<unsigned>;

  void Map() {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address = 0;
    CUmemAccessDesc access = {};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    constexpr size_t kBytes = 2 << 20;
    APP_CHECK(cuMemCreate(&handle, kBytes, &prop, 0) == CUDA_SUCCESS);
    APP_CHECK(cuMemAddressReserve(&address, kBytes, 0, 0, 0) == CUDA_SUCCESS);
    APP_CHECK(cuMemMap(address, kBytes, 0, handle, 0) == CUDA_SUCCESS);
    APP_CHECK(cuMemSetAccess(address, kBytes, &access, 1) == CUDA_SUCCESS);
    APP_CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
    mapped_ = reinterpret_cast<unsigned*>(address);
  }
  void Enable(cudaGraphNode_t node, bool* enabled, bool enable) {
    unsigned is_enabled = 2;
    CUDA_CHECK(cudaGraphNodeSetEnabled(exec_, node, enable));
    CUDA_CHECK(cudaGraphNodeGetEnabled(exec_, node, &is_enabled));
    APP_CHECK(is_enabled == enable);
    *enabled = enable;
  }

  const int phase_;
  unsigned *rows_ = nullptr, *pool_ = nullptr, *mapped_ = nullptr;
  cudaArray_t array_;
  const Numbers zeros_ = Numbers(kCount);
  std::vector<Numbers> in_ = std::vector<Numbers>(kNodes, zeros_), out_ = in_, has_ = in_;
  cudaGraph_t graph_;
  cudaGraphExec_t exec_;
  cudaGraphNode_t to_[kNodes], back_[kNodes - 1];
  bool comes_[kNodes], goes_[kNodes - 1];
};

// An executable whose graph is gone, with a disabled node: updates leave that disabled.
class WithoutGraph {
 public:
  explicit WithoutGraph(bool comes) : comes_(comes) {
    CUDA_CHECK(cudaMalloc(&memory_, kCount * 4));
    CUDA_CHECK(cudaMemset(memory_, 0, kCount * 4));
    CUDA_CHECK(cudaDeviceSynchronize());
    cudaGraphNode_t to, back;
    const cudaGraph_t graph = Build(0, &to, &back);
    CUDA_CHECK(cudaGraphInstantiate(&exec_, graph, 0));
    CUDA_CHECK(cudaGraphNodeSetEnabled(exec_, comes ? back : to, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
  }
  ~WithoutGraph() {
    CUDA_CHECK(cudaGraphExecDestroy(exec_));
    CUDA_CHECK(cudaFree(memory_));
  }

  void Step(int step, cudaStream_t stream, app::Digest* digest) {
    const int which = step / 2 % 2;
    for (int i = 0; i < 2; ++i) {
      for (int k = 0; k < kCount; ++k) in_[i][k] = step * 2246822519u + k * (i + 3);
      std::fill(out_[i].begin(), out_[i].end(), 12345u);
    }
    if (step % 2 == 0) {
      cudaGraphNode_t to, back;
      const cudaGraph_t graph = Build(which, &to, &back);
      cudaGraphExecUpdateResultInfo info;
      CUDA_CHECK(cudaGraphExecUpdate(exec_, graph, &info));
      CUDA_CHECK(cudaGraphDestroy(graph));
      from_ = which;
    }
    CUDA_CHECK(cudaGraphLaunch(exec_, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    std::vector<unsigned> now(kCount);
    CUDA_CHECK(cudaMemcpy(now.data(), memory_, kCount * 4, cudaMemcpyDeviceToHost));
    for (int k = 0; k < kCount; ++k) {
      APP_CHECK(now[k] == (comes_ ? in_[from_][k] : 0));
      APP_CHECK(out_[from_][k] == (comes_ ? 12345u : 0) && out_[1 - from_][k] == 12345u);
    }
    digest->Add(now.data(), kCount * 4);
  }

 private:
  static constexpr int kCount = 600;

  cudaGraph_t Build(int which, cudaGraphNode_t* to, cudaGraphNode_t* back) {
    cudaGraph_t graph;
    CUDA_CHECK(cudaGraphCreate(&graph, 0));
    CUDA_CHECK(cudaGraphAddMemcpyNode1D(to, graph, nullptr, 0, memory_, in_[which].data(), kCount * 4,
                                        cudaMemcpyHostToDevice));
    CUDA_CHECK(
        cudaGraphAddMemcpyNode1D(back, graph, to, 1, out_[which].data(), memory_, kCount * 4, cudaMemcpyDeviceToHost));
    return graph;
  }

  const bool comes_;  // else it goes
  int from_ = 0;
  unsigned* memory_ = nullptr;
  std::vector<unsigned> in_[2] = {std::vector<unsigned>(kCount), std::vector<unsigned>(kCount)},
                        out_[2] = {std::vector<unsigned>(kCount), std::vector<unsigned>(kCount)};
  cudaGraphExec_t exec_;
};

__global__ void Nothing() {}

__global__ void Fold(unsigned* state, const unsigned* line, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) state[i] = state[i] * 22695477u + line[i];
}

// Launches that wait behind a stream memory operation, while the memory that they copy from is filled anew for each of
// them: of one executable, of two of one graph, of graphs with that graph inside, of a clone, of a captured launch, and
// of ones whose nodes were disabled or given other memory.
class Refilled {
 public:
  Refilled() {
    for (cudaStream_t* one : {&held_, &free_, &third_}) {
      CUDA_CHECK(cudaStreamCreateWithFlags(one, cudaStreamNonBlocking));
    }
    CUDA_CHECK(cudaHostAlloc(&gate_, 4, cudaHostAllocMapped));
    CUDA_CHECK(cudaHostGetDevicePointer(&gate_there_, gate_, 0));
    *gate_ = 0;
    for (unsigned** one : {&state_, &line_}) {
      CUDA_CHECK(cudaMalloc(one, kCount * 4));
      CUDA_CHECK(cudaMemset(*one, 0, kCount * 4));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    cudaGraphNode_t inside, copy;
    graph_ = Build(in_[0].data(), &to_);
    CUDA_CHECK(cudaGraphInstantiate(&execs_[kFirst], graph_, 0));
    CUDA_CHECK(cudaGraphInstantiate(&execs_[kSecond], graph_, 0));
    CUDA_CHECK(cudaGraphInstantiate(&execs_[kDisabled], graph_, 0));
    CUDA_CHECK(cudaGraphNodeSetEnabled(execs_[kDisabled], to_, 0));
    CUDA_CHECK(cudaGraphInstantiate(&execs_[kSet], graph_, 0));
    CUDA_CHECK(cudaGraphExecMemcpyNodeSetParams1D(execs_[kSet], to_, line_, in_[1].data(), kCount * 4,
                                                  cudaMemcpyHostToDevice));
    // The graph inside another one, in which there is a copy back, too; and a clone of that.
    CUDA_CHECK(cudaGraphCreate(&parent_, 0));
    CUDA_CHECK(cudaGraphAddChildGraphNode(&inside, parent_, nullptr, 0, graph_));
    CUDA_CHECK(
        cudaGraphAddMemcpyNode1D(&copy, parent_, &inside, 1, out_.data(), state_, kCount * 4, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaGraphInstantiate(&execs_[kParent], parent_, 0));
    cudaGraph_t clone;
    CUDA_CHECK(cudaGraphClone(&clone, parent_));
    CUDA_CHECK(cudaGraphInstantiate(&execs_[kClone], clone, 0));
    CUDA_CHECK(cudaGraphDestroy(clone));
    // Another graph in the place of the one inside.
    cudaGraphNode_t other_to;
    cudaGraph_t other = Build(in_[1].data(), &other_to), captured;
    CUDA_CHECK(cudaGraphInstantiate(&execs_[kOther], other, 0));
    CUDA_CHECK(cudaGraphInstantiate(&execs_[kUpdated], graph_, 0));
    cudaGraphExecUpdateResultInfo info;
    CUDA_CHECK(cudaGraphExecUpdate(execs_[kUpdated], other, &info));
    CUDA_CHECK(cudaGraphInstantiate(&execs_[kOtherChild], parent_, 0));
    CUDA_CHECK(cudaGraphExecChildGraphNodeSetParams(execs_[kOtherChild], inside, other));
    CUDA_CHECK(cudaGraphDestroy(other));
    // Driver 580 refuses to capture a launch. Then the captured one is an executable like the first.
    CUDA_CHECK(cudaStreamBeginCapture(free_, cudaStreamCaptureModeThreadLocal));
    const cudaError_t launched = cudaGraphLaunch(execs_[kFirst], free_);
    const cudaError_t ended = cudaStreamEndCapture(free_, &captured);
    if (launched == cudaSuccess) {
      CUDA_CHECK(ended);
      CUDA_CHECK(cudaGraphInstantiate(&execs_[kCaptured], captured, 0));
      CUDA_CHECK(cudaGraphDestroy(captured));
    } else {
      APP_CHECK(launched == cudaErrorStreamCaptureUnsupported);
      APP_CHECK(ended == cudaErrorStreamCaptureInvalidated);
      cudaGetLastError();
      CUDA_CHECK(cudaGraphInstantiate(&execs_[kCaptured], graph_, 0));
    }
    FindWhetherLaunchesWait();
  }
  ~Refilled() {
    for (cudaGraphExec_t exec : execs_) CUDA_CHECK(cudaGraphExecDestroy(exec));
    for (cudaGraph_t graph : {graph_, parent_}) CUDA_CHECK(cudaGraphDestroy(graph));
    for (unsigned* one : {state_, line_}) CUDA_CHECK(cudaFree(one));
    CUDA_CHECK(cudaFreeHost(gate_));
    for (cudaStream_t one : {held_, free_, third_}) CUDA_CHECK(cudaStreamDestroy(one));
  }

  void Step(int step, app::Digest* digest) {
    launches_ = unsigned(step) * 1000;
    Round({kFirst, kFirst, kDisabled}, kSecond);
    Round({kParent, kSet, kParent}, kOther);
    Round({kUpdated, kClone, kFirst}, kOther);
    Round({kOtherChild, kCaptured, kCaptured}, kUpdated);
    Round({kParent, kClone}, kFirst);
    CheckState(state_, expected_);
    digest->Add(expected_.data(), kCount * 4);
  }

 private:
  using Numbers = std::vector<unsigned>;
  enum { kFirst, kSecond, kDisabled, kSet, kParent, kClone, kOtherChild, kUpdated, kOther, kCaptured, kExecs };
  static constexpr int kCount = 700;

  // What is in the `which`th piece of memory at a launch.
  static Numbers Taken(unsigned launch, int which) {
    Numbers numbers(kCount);
    for (int k = 0; k < kCount; ++k) numbers[k] = (launch * 3 + unsigned(which)) * 2654435761u ^ unsigned(k) * 40503u;
    return numbers;
  }
  // By the host's memory: a launch may hold the driver's locks until the stream goes on. A checkpoint lets single calls
  // through while streams wait for them: not many, so few are made meanwhile.
  void Hold() {
    APP_CHECK(cuStreamWaitValue32(held_, reinterpret_cast<CUdeviceptr>(gate_there_), ++holds_,
                                  CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS);
  }
  void LetGo() {
    *static_cast<volatile unsigned*>(gate_) = holds_;
    // A server on another machine hears of that with the next launch.
    Nothing<<<1, 1, 0, third_>>>();
    LAUNCH_CHECK();
    for (cudaStream_t one : {third_, held_, free_}) CUDA_CHECK(cudaStreamSynchronize(one));
  }
  static bool IsFromOther(int which) {
    return which == kSet || which == kUpdated || which == kOtherChild || which == kOther;
  }
  // A driver may let a launch wait until the executable's last one is done, or for a copy to pageable memory. Then
  // nothing is held up here, which leaves the order of the work as it is otherwise. Tried with all launches that are
  // held up below, and with those that come while they are.
  void FindWhetherLaunchesWait() {
    launches_ = 1000000;
    std::atomic<bool> done{false};
    Hold();
    std::thread launcher([&] {
      for (int one : {kFirst, kFirst, kDisabled, kSet, kParent, kParent, kUpdated, kClone, kOtherChild, kCaptured}) {
        Launch(execs_[one], held_, launches_++);
      }
      for (int one : {kSecond, kOther}) Launch(execs_[one], third_, launches_++);
      CUDA_CHECK(cudaStreamSynchronize(third_));
      done = true;
    });
    for (int i = 0; i < 5000 && !done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    launches_wait_ = !done;
    LetGo();
    launcher.join();
    LetGo();
    // What was launched may have come in any order.
    CUDA_CHECK(cudaMemsetAsync(state_, 0, kCount * 4, held_));
    CUDA_CHECK(cudaStreamSynchronize(held_));
  }
  // Launches that wait, and another executable, which need not wait for them.
  void Round(const std::vector<int>& held, int other) {
    const unsigned first = launches_;
    launches_ += unsigned(held.size()) + 1;
    std::fill(out_.begin(), out_.end(), 12345u);
    const auto launch_other = [&] {
      Launch(execs_[other], free_, launches_ - 1);
      CUDA_CHECK(cudaStreamSynchronize(free_));
      APP_CHECK(out_[0] == 12345u && out_[kCount - 1] == 12345u);
    };
    if (launches_wait_) launch_other();
    if (!launches_wait_) Hold();
    for (size_t i = 0; i < held.size(); ++i) Launch(execs_[held[i]], held_, first + unsigned(i));
    if (!launches_wait_) launch_other();
    LetGo();
    Numbers there = Taken(launches_ - 1, IsFromOther(other));
    Follow(there, &expected_);
    Numbers out = out_;
    for (size_t i = 0; i < held.size(); ++i) {
      if (held[i] != kDisabled) there = Taken(first + unsigned(i), IsFromOther(held[i]));
      Follow(there, &expected_);
      if (held[i] == kParent || held[i] == kClone || held[i] == kOtherChild) out = expected_;
    }
    APP_CHECK(out_ == out);
    CheckState(state_, expected_);
  }
  // Fills the memory, launches, and writes to the memory as soon as the call is over.
  void Launch(cudaGraphExec_t exec, cudaStream_t stream, unsigned number) {
    for (int i = 0; i < 2; ++i) Fill(number, i);
    CUDA_CHECK(cudaGraphLaunch(exec, stream));
    for (int i = 0; i < 2; ++i) Fill(~number, i);
  }
  // In place: graphs know the addresses.
  void Fill(unsigned number, int which) {
    const Numbers numbers = Taken(number, which);
    std::copy(numbers.begin(), numbers.end(), in_[size_t(which)].begin());
  }
  static void Follow(const Numbers& line, Numbers* state) {
    for (int k = 0; k < kCount; ++k) (*state)[k] = (*state)[k] * 22695477u + line[k];
  }
  void CheckState(const unsigned* memory, const Numbers& expected) {
    Numbers now(kCount);
    CUDA_CHECK(cudaMemcpyAsync(now.data(), memory, kCount * 4, cudaMemcpyDeviceToHost, cudaStreamPerThread));
    CUDA_CHECK(cudaStreamSynchronize(cudaStreamPerThread));
    for (int k = 0; k < kCount; ++k) APP_CHECK(now[k] == expected[k]);
  }
  static void AddFold(cudaGraph_t graph, cudaGraphNode_t after, void** arguments, cudaGraphNode_t* kernel) {
    cudaKernelNodeParams launch = {};
    launch.func = reinterpret_cast<void*>(Fold);
    launch.gridDim = dim3((kCount + 63) / 64);
    launch.blockDim = dim3(64);
    launch.kernelParams = arguments;
    CUDA_CHECK(cudaGraphAddKernelNode(kernel, graph, &after, 1, &launch));
  }
  cudaGraph_t Build(const unsigned* from, cudaGraphNode_t* to) {
    void* arguments[] = {&state_, &line_, const_cast<int*>(&kCount)};
    cudaGraph_t graph;
    cudaGraphNode_t kernel;
    CUDA_CHECK(cudaGraphCreate(&graph, 0));
    CUDA_CHECK(cudaGraphAddMemcpyNode1D(to, graph, nullptr, 0, line_, from, kCount * 4, cudaMemcpyHostToDevice));
    AddFold(graph, *to, arguments, &kernel);
    return graph;
  }

  cudaStream_t held_, free_, third_;
  unsigned *gate_, *gate_there_, *state_, *line_;
  std::vector<Numbers> in_ = std::vector<Numbers>(2, Numbers(kCount));
  Numbers out_ = in_[0], expected_ = in_[0];
  unsigned launches_ = 0, holds_ = 0;
  bool launches_wait_ = false;
  cudaGraph_t graph_, parent_;
  cudaGraphNode_t to_;
  cudaGraphExec_t execs_[kExecs];
};

// A child graph of a host function and a copy of pinned memory, which is what cuda-remote makes of the nodes above:
// what it relies on, natively. Neither an update nor another child graph enables the copy.
class Inside {
 public:
  Inside() {
    CUDA_CHECK(cudaMallocHost(&pinned_, kCount * 4));
    memset(pinned_, 0, kCount * 4);
    CUDA_CHECK(cudaMalloc(&memory_, kCount * 4));
    CUDA_CHECK(cudaMemset(memory_, 0, kCount * 4));
    CUDA_CHECK(cudaDeviceSynchronize());
    cudaGraphNode_t first, second;
    CUDA_CHECK(cudaGraphCreate(&child_, 0));
    CUDA_CHECK(cudaGraphCreate(&graph_, 0));
    const cudaHostNodeParams function = {Fill, this};
    CUDA_CHECK(cudaGraphAddHostNode(&first, child_, nullptr, 0, &function));
    CUDA_CHECK(
        cudaGraphAddMemcpyNode1D(&second, child_, &first, 1, memory_, pinned_, kCount * 4, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaGraphAddChildGraphNode(&node_, graph_, nullptr, 0, child_));
    cudaGraph_t inside;
    size_t count = 2;
    cudaGraphNode_t nodes[2];
    cudaGraphNodeType type;
    CUDA_CHECK(cudaGraphChildGraphNodeGetGraph(node_, &inside));
    CUDA_CHECK(cudaGraphGetNodes(inside, nodes, &count));
    CUDA_CHECK(cudaGraphNodeGetType(nodes[0], &type));
    host_ = nodes[type == cudaGraphNodeTypeHost ? 0 : 1];
    copy_ = nodes[type == cudaGraphNodeTypeHost ? 1 : 0];
    CUDA_CHECK(cudaGraphInstantiate(&exec_, graph_, 0));
  }
  ~Inside() {
    CUDA_CHECK(cudaGraphExecDestroy(exec_));
    CUDA_CHECK(cudaGraphDestroy(graph_));
    CUDA_CHECK(cudaGraphDestroy(child_));
    CUDA_CHECK(cudaFree(memory_));
    CUDA_CHECK(cudaFreeHost(pinned_));
  }

  void Step(int step, cudaStream_t stream) {
    const cudaHostNodeParams nothing = {[](void*) {}, nullptr};
    step_ = step;
    cudaGraphExecUpdateResultInfo info;
    switch (step % 6) {
      case 0:
      case 3:
        CUDA_CHECK(cudaGraphNodeSetEnabled(exec_, copy_, 0));
        CUDA_CHECK(cudaGraphExecHostNodeSetParams(exec_, host_, &nothing));
        fills_ = copies_ = false;
        break;
      case 1:
        CUDA_CHECK(cudaGraphExecUpdate(exec_, graph_, &info));
        fills_ = true;
        break;
      case 4:
        CUDA_CHECK(cudaGraphExecChildGraphNodeSetParams(exec_, node_, child_));
        fills_ = true;
        break;
      default:
        CUDA_CHECK(cudaGraphNodeSetEnabled(exec_, copy_, 1));
        copies_ = true;
        break;
    }
    if (fills_) filled_ = step;
    if (copies_) copied_ = filled_;
    CUDA_CHECK(cudaGraphLaunch(exec_, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    std::vector<unsigned> now(kCount);
    CUDA_CHECK(cudaMemcpy(now.data(), memory_, now.size() * 4, cudaMemcpyDeviceToHost));
    for (size_t k = 0; k < now.size(); ++k) {
      APP_CHECK(pinned_[k] == Number(filled_, k) && now[k] == Number(copied_, k));
    }
  }

 private:
  static constexpr int kCount = 400;

  static unsigned Number(int step, size_t k) { return step * (2654435761u + unsigned(k)); }
  static void Fill(void* data) {
    Inside* const inside = static_cast<Inside*>(data);
    for (size_t k = 0; k < kCount; ++k) inside->pinned_[k] = Number(inside->step_, k);
  }

  int step_ = 0, filled_ = 0, copied_ = 0;
  bool fills_ = true, copies_ = true;
  unsigned *pinned_ = nullptr, *memory_ = nullptr;
  cudaGraph_t child_, graph_;
  cudaGraphExec_t exec_;
  cudaGraphNode_t node_, host_, copy_;
};

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {18, 96});
  const int width = options.size, n = width * kRows * kSlices;
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  unsigned *state, *line, *rectangle;
  CUDA_CHECK(cudaMalloc(&state, n * 4));
  CUDA_CHECK(cudaMalloc(&line, n * 4));
  CUDA_CHECK(cudaMalloc(&rectangle, width * kRows * 4));
  CUDA_CHECK(cudaMemset(state, 0, n * 4));
  CUDA_CHECK(cudaDeviceSynchronize());  // the stream does not wait for the default one

  // Two of each buffer: what the nodes name changes.
  std::vector<unsigned> in[2], field[2], out[2], expected(n);
  for (int i = 0; i < 2; ++i) {
    in[i].assign(n, 0);
    field[i].assign(2 * width * (kRows + 1), 0);
    out[i].assign((width + 5) * (kRows + 2) * kSlices, 0);
  }

  cudaGraph_t graph;
  CUDA_CHECK(cudaGraphCreate(&graph, 0));
  cudaGraphNode_t to_line, to_rectangle, kernel, to_host, both[2];
  CUDA_CHECK(cudaGraphAddMemcpyNode1D(&to_line, graph, nullptr, 0, line, in[0].data(), n * 4, cudaMemcpyHostToDevice));
  const cudaMemcpy3DParms first = Rectangle(&field[0], rectangle, width);
  CUDA_CHECK(cudaGraphAddMemcpyNode(&to_rectangle, graph, nullptr, 0, &first));
  both[0] = to_line;
  both[1] = to_rectangle;
  void* arguments[] = {&state, &line, &rectangle, const_cast<int*>(&width), const_cast<int*>(&n)};
  cudaKernelNodeParams launch = {};
  launch.func = reinterpret_cast<void*>(Mix);
  launch.gridDim = dim3((n + 63) / 64);
  launch.blockDim = dim3(64);
  launch.kernelParams = arguments;
  CUDA_CHECK(cudaGraphAddKernelNode(&kernel, graph, both, 2, &launch));
  cudaMemcpy3DParms last = Out(state, &out[0], width);
  CUDA_CHECK(cudaGraphAddMemcpyNode(&to_host, graph, &kernel, 1, &last));

  for (cudaGraphNode_t node : {to_line, to_rectangle, to_host}) {
    cudaGraphNodeType type;
    CUDA_CHECK(cudaGraphNodeGetType(node, &type));
    APP_CHECK(type == cudaGraphNodeTypeMemcpy);
  }
  cudaMemcpy3DParms seen = {};
  CUDA_CHECK(cudaGraphMemcpyNodeGetParams(to_rectangle, &seen));
  APP_CHECK(seen.srcPtr.ptr == field[0].data() && seen.srcPos.x == 12 && seen.extent.height == kRows);
  size_t count = 0;
  CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
  APP_CHECK(count == 4);

  // Executables: of the graph; of the graph with other buffers; of a clone from before that.
  cudaGraphExec_t execs[4];
  cudaGraph_t clone;
  CUDA_CHECK(cudaGraphInstantiate(&execs[0], graph, 0));
  CUDA_CHECK(cudaGraphClone(&clone, graph));
  cudaGraphNode_t cloned;
  cudaGraphNodeType type;
  CUDA_CHECK(cudaGraphNodeFindInClone(&cloned, to_line, clone));
  CUDA_CHECK(cudaGraphNodeGetType(cloned, &type));
  APP_CHECK(type == cudaGraphNodeTypeMemcpy);
  CUDA_CHECK(cudaGraphMemcpyNodeSetParams1D(to_line, line, in[1].data(), n * 4, cudaMemcpyHostToDevice));
  const cudaMemcpy3DParms second = Rectangle(&field[1], rectangle, width);
  CUDA_CHECK(cudaGraphMemcpyNodeSetParams(to_rectangle, &second));
  last = Out(state, &out[1], width);
  CUDA_CHECK(cudaGraphMemcpyNodeSetParams(to_host, &last));
  CUDA_CHECK(cudaGraphInstantiate(&execs[1], graph, 0));
  CUDA_CHECK(cudaGraphInstantiate(&execs[2], clone, 0));
  CUDA_CHECK(cudaGraphDestroy(clone));

  // Captured: the rectangle and the result go by copies of rectangles.
  cudaGraph_t captured;
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CUDA_CHECK(cudaMemcpyAsync(line, in[0].data(), n * 4, cudaMemcpyHostToDevice, stream));
  CUDA_CHECK(cudaMemcpy2DAsync(rectangle, width * 4, field[1].data() + 2 * width + 3, 2 * width * 4, width * 4, kRows,
                               cudaMemcpyHostToDevice, stream));
  Mix<<<(n + 63) / 64, 64, 0, stream>>>(state, line, rectangle, width, n);
  LAUNCH_CHECK();
  last = Out(state, &out[0], width);
  CUDA_CHECK(cudaMemcpy3DAsync(&last, stream));
  CUDA_CHECK(cudaStreamEndCapture(stream, &captured));
  count = 0;
  CUDA_CHECK(cudaGraphGetNodes(captured, nullptr, &count));
  APP_CHECK(count == 4);
  CUDA_CHECK(cudaGraphInstantiate(&execs[3], captured, 0));
  CUDA_CHECK(cudaGraphDestroy(captured));

  // Wherever the program is stopped, there are nodes of all kinds.
  std::vector<std::unique_ptr<Switched>> switched;
  for (int phase = 0; phase < 9; phase += 2) switched.push_back(std::make_unique<Switched>(phase, width));
  Shapes shapes(0, stream), others(1, stream);
  WithoutGraph coming(true), going(false);

  Inside inside;
  Refilled refilled;

  app::Digest digest;
  for (int step = 1; step <= options.steps; ++step) {
    for (int i = 0; i < 2; ++i) {
      for (size_t k = 0; k < in[i].size(); ++k) in[i][k] = step * 40503u + unsigned(k) * (7 + i);
      for (size_t k = 0; k < field[i].size(); ++k) field[i][k] = step * 2654435761u ^ unsigned(k) * (11 + i);
    }
    const int which = step % 4;
    int line_from = which == 1 ? 1 : 0;
    const int field_from = which == 1 || which == 3 ? 1 : 0, to = which == 1 ? 1 : 0;
    if (which == 0) {
      // The first one is changed all the time. (Only copies of one row can be changed in an executable.)
      line_from = step / 4 % 2;
      CUDA_CHECK(cudaGraphExecMemcpyNodeSetParams1D(execs[0], to_line, line, in[line_from].data(), n * 4,
                                                    cudaMemcpyHostToDevice));
    }
    for (int i = 0; i < n; ++i) {
      const int at = i % (width * kRows);
      const unsigned here = field[field_from][(1 + at / width) * 2 * width + 3 + at % width];
      expected[i] = expected[i] * 22695477u + in[line_from][i] + 3 * here;
    }
    std::fill(out[to].begin(), out[to].end(), 12345u);
    CUDA_CHECK(cudaGraphLaunch(execs[which], stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int z = 0; z < kSlices; ++z) {
      for (int y = 0; y < kRows + 2; ++y) {
        for (int x = 0; x < width + 5; ++x) {
          const unsigned got = out[to][(z * (kRows + 2) + y) * (width + 5) + x];
          const bool inside = y < kRows && x < width;
          APP_CHECK(got == (inside ? expected[(z * kRows + y) * width + x] : 12345u));
        }
      }
    }
    digest.Add(out[to].data(), out[to].size() * 4);
    for (const std::unique_ptr<Switched>& one : switched) one->Step(step, stream, &digest);
    for (Shapes* one : {&shapes, &others}) one->Step(step, stream, &digest);
    for (WithoutGraph* one : {&coming, &going}) one->Step(step, stream, &digest);
    inside.Step(step, stream);
    refilled.Step(step, &digest);
    app::Step(step);
  }
  printf("graph_pageable width=%d steps=%d digest=%016" PRIx64 "\n", width, options.steps, digest.value());
  for (cudaGraphExec_t exec : execs) CUDA_CHECK(cudaGraphExecDestroy(exec));
  CUDA_CHECK(cudaGraphDestroy(graph));
  return 0;
}
