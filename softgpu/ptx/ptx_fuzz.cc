// SPDX-License-Identifier: Apache-2.0
// Any text: Parse, Bind, Image, Check, and a short launch must come back.
#include <atomic>
#include <cstdlib>
#include <map>

#include "softgpu/ptx/ptx.h"
#include "tests/fuzz/seeds.h"

namespace {

using namespace cuda_remote::softgpu::ptx;  // NOLINT

const char kSeed[] = R"(.version 8.7
.target sm_90
.address_size 64
.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.global .align 8 .u64 state = 88172645463325252;
.global .u64 table[2] = {generic(state)+8, f};
.global .align 1 .b8 text[6] = {37, 100, 32, 37, 115, 0};
.shared .align 16 .b8 tile[256];
.func (.param .b32 r) f(.param .b32 a) {
  .reg .b32 %r<4>; ld.param.b32 %r1, [a]; add.s32 %r2, %r1, 1; st.param.b32 [r], %r2; ret; }
.visible .entry k(.param .u64 p, .param .u32 n, .param .align 4 .b8 s[12]) .maxntid 64, 1, 1
{
  .local .align 8 .b8 depot[16];
  .reg .pred %p<5>; .reg .b16 %h<5>; .reg .b32 %r<20>; .reg .f32 %f<5>; .reg .f64 %fd<5>;
  .reg .b64 %rd<20>; .reg .b128 %q<2>;
  ld.param.u64 %rd1, [p];
  ld.param.u32 %r1, [s+4];
  mov.u32 %r2, %tid.x;
  cvta.to.global.u64 %rd2, %rd1;
  mul.wide.u32 %rd3, %r2, 8;
  add.s64 %rd4, %rd2, %rd3;
  mov.u64 %rd5, depot;
  cvta.local.u64 %rd6, %rd5;
  st.local.v2.u32 [%rd5], {%r1, %r2};
  ld.u64 %rd7, [%rd6];
  st.global.u64 [%rd4], %rd7;
  setp.lt.and.s32 %p1|%p2, %r1, %r2, %p3;
  @%p1 bra A;
  shfl.sync.bfly.b32 %r3|%p3, %r2, 1, 31, -1;
  atom.global.add.u32 %r4, [%rd2], %r3;
  fma.rn.f32 %f1, %f2, %f3, 0f3F800000;
  cvt.rzi.s32.f32 %r5, %f1;
  lop3.b32 %r6, %r5, %r4, %r3, 0x96;
  mov.b64 {%r7, %r8}, %rd7;
A:
  bar.sync 0;
  brx_: .branchtargets A, B;
  and.b32 %r9, %r2, 1;
  { .param .b32 a; .param .b32 r; st.param.b32 [a], %r9; call.uni (r), f, (a); ld.param.b32 %r10, [r]; }
  { .param .b64 a; .param .b64 b; .param .b32 r; mov.u64 %rd9, text;
    st.param.b64 [a], %rd9; st.param.b64 [b], %rd6; call.uni (r), vprintf, (a, b); }
  ld.global.u64 %rd10, [table+8];
  { .param .b32 a; .param .b32 r; st.param.b32 [a], %r9; call (r), %rd10, (a), proto; }
  proto: .callprototype (.param .b32 _) _ (.param .b32 _);
  @!%p1 brx.idx %r9, brx_;
B:
  barrier.cluster.arrive.release;
  barrier.cluster.wait.acquire;
  mov.u32 %r11, tile;
  mapa.shared::cluster.u32 %r12, %r11, 0;
  ld.shared::cluster.u32 %r13, [%r12+4];
  @%p3 bra C;
  mbarrier.init.shared.b64 [tile], 1;
  st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r12+16], %r9, [%r12];
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r11], [%rd2], 16, [tile], %h1;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [tile], [%rd2, {%r1, %r2}], [tile];
  cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd2, {%r1, %r2}], [tile];
C:
  ret;
}
)";

// A little memory, and nothing else.
class Memory : public MemoryMap {
 public:
  bool Lookup(uint64_t address, Interval* interval) override {
    const uint64_t begin = reinterpret_cast<uint64_t>(bytes_);
    if (address < begin || address >= begin + sizeof bytes_) return false;
    *interval = {begin, begin + sizeof bytes_, true};
    return true;
  }
  uint64_t base() const { return reinterpret_cast<uint64_t>(bytes_); }

 private:
  alignas(256) uint8_t bytes_[65536] = {};
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 1 << 16) return 0;
  auto parsed = Module::Parse(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!parsed.ok()) {
    if (parsed.status().message().empty()) std::abort();
    return 0;
  }
  const std::unique_ptr<Module> module = *std::move(parsed);
  Memory memory;
  SymbolAddresses addresses;
  uint64_t at = memory.base();
  for (const auto& global : module->globals()) {
    addresses[global.name] = at;
    at += 256;
    if (global.size < 1 << 20) module->Image(global);
  }
  if (!module->Bind(addresses).ok()) std::abort();
  for (const auto& kernel : module->kernels()) {
    if (const auto runs = module->Check(kernel.name); !runs.ok()) {
      if (runs.message().empty()) std::abort();
      continue;
    }
    if (kernel.param_bytes > 4096) continue;
    LaunchOptions options;
    options.block.x = 33;
    if (kernel.required_block[0] != 0) {
      options.block = {kernel.required_block[0], kernel.required_block[1], kernel.required_block[2]};
    }
    std::string params(kernel.param_bytes, '\0');
    const uint64_t base = memory.base() + 4096;
    if (params.size() >= 8) params.replace(0, 8, reinterpret_cast<const char*>(&base), 8);
    options.params = params;
    options.memory = &memory;
    options.host_threads = 1;
    options.stack_bytes = 1 << 16;
    options.instruction_limit = 200000;
    options.print = [](std::string_view) {};
    module->Launch(kernel.name, options);
  }
  return 0;
}

std::vector<std::string> FuzzSeeds() { return {kSeed}; }
