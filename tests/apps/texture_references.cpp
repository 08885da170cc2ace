// SPDX-License-Identifier: Apache-2.0
// Texture and surface references of a module, which the driver API still has: bound to linear memory, also in the
// middle of an allocation, to pitched memory and to arrays, and bound anew from time to time. Kernels read through them
// and change what they show. Everything is compared with the host's own account of it, and what the references say of
// themselves with what they said when they were set.
#include <cuda.h>

#include <cstring>
#include <utility>
#include <vector>

#include "tests/apps/support/driver.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace {

constexpr unsigned kSide = 16, kCount = kSide * kSide;

// look(out, offset, step): thread x of block y writes what the references show at (x, y), in five parts.
// change(words, floats, pitch, step) changes the memory behind two of them.
const char kModule[] = R"(
.version 7.0
.target sm_75
.address_size 64
.global .texref line;
.global .texref plane;
.global .texref colours;
.global .surfref canvas;

.visible .entry look(.param .u64 out, .param .u32 offset, .param .u32 step)
{
  .reg .b32 %r<20>;
  .reg .f32 %f<20>;
  .reg .b64 %d<6>;
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mad.lo.u32 %r3, %r2, 16, %r1;
  ld.param.u64 %d1, [out];
  mul.wide.u32 %d2, %r3, 4;
  add.u64 %d1, %d1, %d2;

  ld.param.u32 %r4, [offset];
  add.u32 %r4, %r4, %r3;
  tex.1d.v4.u32.s32 {%r5, %r6, %r7, %r8}, [line, {%r4}];
  st.global.u32 [%d1], %r5;

  // Elements themselves one period further on, and what lies in the middle between two of them.
  cvt.rn.f32.u32 %f1, %r1;
  cvt.rn.f32.u32 %f2, %r2;
  add.f32 %f3, %f1, 0f3F000000;
  add.f32 %f4, %f2, 0f3F000000;
  mul.f32 %f5, %f3, 0f3D800000;
  mul.f32 %f6, %f4, 0f3D800000;
  add.f32 %f5, %f5, 0f3F800000;
  tex.2d.v4.f32.f32 {%f8, %f9, %f10, %f11}, [plane, {%f5, %f6}];
  st.global.f32 [%d1+1024], %f8;
  add.f32 %f7, %f3, 0f3F000000;
  mul.f32 %f7, %f7, 0f3D800000;
  tex.2d.v4.f32.f32 {%f8, %f9, %f10, %f11}, [plane, {%f7, %f6}];
  st.global.f32 [%d1+2048], %f8;

  // Beyond the right edge the last element is read.
  add.f32 %f3, %f3, 0f40800000;
  tex.2d.v4.f32.f32 {%f12, %f13, %f14, %f15}, [colours, {%f3, %f4}];
  mul.f32 %f12, %f12, 0f437F0000;
  mul.f32 %f13, %f13, 0f437F0000;
  mul.f32 %f14, %f14, 0f437F0000;
  mul.f32 %f15, %f15, 0f437F0000;
  cvt.rni.u32.f32 %r9, %f12;
  cvt.rni.u32.f32 %r10, %f13;
  cvt.rni.u32.f32 %r11, %f14;
  cvt.rni.u32.f32 %r12, %f15;
  mad.lo.u32 %r9, %r10, 256, %r9;
  mad.lo.u32 %r9, %r11, 65536, %r9;
  mad.lo.u32 %r9, %r12, 16777216, %r9;
  st.global.u32 [%d1+3072], %r9;

  shl.b32 %r13, %r1, 2;
  suld.b.2d.b32.trap {%r14}, [canvas, {%r13, %r2}];
  st.global.u32 [%d1+4096], %r14;
  ld.param.u32 %r15, [step];
  mad.lo.u32 %r14, %r14, 3, %r15;
  add.u32 %r14, %r14, %r3;
  sust.b.2d.b32.trap [canvas, {%r13, %r2}], {%r14};
  ret;
}

.visible .entry change(.param .u64 words, .param .u64 floats, .param .u32 pitch, .param .u32 step)
{
  .reg .b32 %r<9>;
  .reg .f32 %f<4>;
  .reg .b64 %d<6>;
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mad.lo.u32 %r3, %r2, 16, %r1;
  ld.param.u32 %r4, [step];
  ld.param.u64 %d1, [words];
  mul.wide.u32 %d2, %r3, 4;
  add.u64 %d1, %d1, %d2;
  ld.global.u32 %r5, [%d1];
  mad.lo.u32 %r5, %r5, 5, %r4;
  add.u32 %r5, %r5, %r3;
  st.global.u32 [%d1], %r5;
  ld.param.u64 %d3, [floats];
  ld.param.u32 %r6, [pitch];
  mul.wide.u32 %d4, %r6, %r2;
  add.u64 %d3, %d3, %d4;
  mul.wide.u32 %d5, %r1, 4;
  add.u64 %d3, %d3, %d5;
  ld.global.f32 %f1, [%d3];
  cvt.rn.f32.u32 %f2, %r4;
  add.f32 %f1, %f1, %f2;
  st.global.f32 [%d3], %f1;
  ret;
}
)";

struct Program {
  CUmodule module;
  CUfunction look, change;
  CUtexref line, plane, colours;
  CUsurfref canvas;
  CUdeviceptr memory, floats, out;
  size_t pitch;
  CUarray plain, painted, canvases[2];
  unsigned offset = 0;  // of the line, in elements

  // The host's account.
  std::vector<uint32_t> words = std::vector<uint32_t>(4 * kCount), colour = std::vector<uint32_t>(kCount);
  std::vector<float> pitched = std::vector<float>(kCount), array = std::vector<float>(kCount);
  std::vector<uint32_t> canvas_words[2] = {std::vector<uint32_t>(kCount), std::vector<uint32_t>(kCount)};
  unsigned line_at = 0;  // the first element that the line shows
  bool shows_array = false;
  int canvas_is = 0;
};

CUarray Array(CUarray_format format, unsigned channels, unsigned flags, const void* elements, size_t bytes) {
  CUDA_ARRAY3D_DESCRIPTOR facts = {};
  facts.Width = facts.Height = kSide;
  facts.Format = format;
  facts.NumChannels = channels;
  facts.Flags = flags;
  CUarray array;
  CU_CHECK(cuArray3DCreate(&array, &facts));
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = elements;
  copy.srcPitch = copy.WidthInBytes = bytes / kSide;
  copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
  copy.dstArray = array;
  copy.Height = kSide;
  CU_CHECK(cuMemcpy2D(&copy));
  return array;
}

// The line begins at a multiple of 64 words in the allocation: of 256 bytes, which is half of what a texture needs.
void BindLine(Program* program, unsigned at) {
  size_t offset = 0;
  CU_CHECK(cuTexRefSetAddress(&offset, program->line, program->memory + 4 * at, 4 * kCount));
  APP_CHECK(offset % 4 == 0);
  program->offset = unsigned(offset / 4);
  program->line_at = at;
}

void BindPlane(Program* program, bool to_array) {
  if (to_array) {
    CU_CHECK(cuTexRefSetArray(program->plane, program->plain, CU_TRSA_OVERRIDE_FORMAT));
  } else {
    CUDA_ARRAY_DESCRIPTOR facts = {kSide, kSide, CU_AD_FORMAT_FLOAT, 1};
    CU_CHECK(cuTexRefSetAddress2D(program->plane, &facts, program->floats, program->pitch));
  }
  program->shows_array = to_array;
}

void BindCanvas(Program* program, int which) {
  CU_CHECK(cuSurfRefSetArray(program->canvas, program->canvases[which], 0));
  program->canvas_is = which;
}

void Begin(Program* program) {
  CU_CHECK(cuModuleLoadData(&program->module, kModule));
  CU_CHECK(cuModuleGetFunction(&program->look, program->module, "look"));
  CU_CHECK(cuModuleGetFunction(&program->change, program->module, "change"));
  CU_CHECK(cuModuleGetTexRef(&program->line, program->module, "line"));
  CU_CHECK(cuModuleGetTexRef(&program->plane, program->module, "plane"));
  CU_CHECK(cuModuleGetTexRef(&program->colours, program->module, "colours"));
  CU_CHECK(cuModuleGetSurfRef(&program->canvas, program->module, "canvas"));
  for (size_t i = 0; i < program->words.size(); ++i) program->words[i] = uint32_t(i * 7);
  for (unsigned i = 0; i < kCount; ++i) {
    program->pitched[i] = float(i);
    program->array[i] = float(2 * i + 1000);
    program->colour[i] = i * 0x01030507u;
    for (int k = 0; k < 2; ++k) program->canvas_words[k][i] = i + 100 * unsigned(k);
  }
  CU_CHECK(cuMemAlloc(&program->out, 5 * 4 * kCount));
  CU_CHECK(cuMemAlloc(&program->memory, 4 * program->words.size()));
  CU_CHECK(cuMemcpyHtoD(program->memory, program->words.data(), 4 * program->words.size()));
  CU_CHECK(cuMemAllocPitch(&program->floats, &program->pitch, 4 * kSide, kSide, 4));
  for (unsigned y = 0; y < kSide; ++y) {
    CU_CHECK(cuMemcpyHtoD(program->floats + y * program->pitch, &program->pitched[y * kSide], 4 * kSide));
  }
  program->plain = Array(CU_AD_FORMAT_FLOAT, 1, 0, program->array.data(), 4 * kCount);
  program->painted = Array(CU_AD_FORMAT_UNSIGNED_INT8, 4, 0, program->colour.data(), 4 * kCount);
  for (int k = 0; k < 2; ++k) {
    program->canvases[k] =
        Array(CU_AD_FORMAT_UNSIGNED_INT32, 1, CUDA_ARRAY3D_SURFACE_LDST, program->canvas_words[k].data(), 4 * kCount);
  }
  CU_CHECK(cuTexRefSetFormat(program->line, CU_AD_FORMAT_UNSIGNED_INT32, 1));
  CU_CHECK(cuTexRefSetFlags(program->line, CU_TRSF_READ_AS_INTEGER));
  for (int axis = 0; axis < 2; ++axis) {
    CU_CHECK(cuTexRefSetAddressMode(program->plane, axis, CU_TR_ADDRESS_MODE_WRAP));
    CU_CHECK(cuTexRefSetAddressMode(program->colours, axis, CU_TR_ADDRESS_MODE_CLAMP));
  }
  CU_CHECK(cuTexRefSetFilterMode(program->plane, CU_TR_FILTER_MODE_LINEAR));
  CU_CHECK(cuTexRefSetFlags(program->plane, CU_TRSF_NORMALIZED_COORDINATES));
  CU_CHECK(cuTexRefSetArray(program->colours, program->painted, CU_TRSA_OVERRIDE_FORMAT));
  CU_CHECK(cuTexRefSetFilterMode(program->colours, CU_TR_FILTER_MODE_POINT));
  BindLine(program, 0);
  BindPlane(program, false);
  BindCanvas(program, 0);
}

// What the references say: results and values.
std::vector<uint64_t> Ask(const Program& program) {
  std::vector<uint64_t> all;
  const auto add = [&all](CUresult result, uint64_t value) {
    all.push_back(uint64_t(result));
    all.push_back(result == CUDA_SUCCESS ? value : 0);
  };
  for (const CUtexref reference : {program.line, program.plane, program.colours}) {
    CUdeviceptr address = 0;
    CUresult result = cuTexRefGetAddress(&address, reference);
    add(result, address);
    CUarray array = nullptr;
    result = cuTexRefGetArray(&array, reference);
    add(result, reinterpret_cast<uint64_t>(array));
    CUarray_format format = {};
    int channels = 0;
    result = cuTexRefGetFormat(&format, &channels, reference);
    add(result, uint64_t(format) * 8 + uint64_t(channels));
    CUfilter_mode filter = {};
    result = cuTexRefGetFilterMode(&filter, reference);
    add(result, uint64_t(filter));
    unsigned flags = 0;
    result = cuTexRefGetFlags(&flags, reference);
    add(result, flags);
    for (int axis = 0; axis < 2; ++axis) {
      CUaddress_mode mode = {};
      result = cuTexRefGetAddressMode(&mode, reference, axis);
      add(result, uint64_t(mode));
    }
  }
  CUarray array = nullptr;
  const CUresult result = cuSurfRefGetArray(&array, program.canvas);
  add(result, reinterpret_cast<uint64_t>(array));
  return all;
}

void Launch(CUfunction function, void** parameters) {
  CU_CHECK(cuLaunchKernel(function, kSide, 1, 1, kSide, 1, 1, 0, nullptr, parameters, nullptr));
}

void Change(Program* program, unsigned step) {
  // Other words in each step.
  const unsigned first = step % 3 * kCount;
  CUdeviceptr words = program->memory + 4 * first;
  auto pitch = unsigned(program->pitch);
  void* parameters[] = {&words, &program->floats, &pitch, &step};
  Launch(program->change, parameters);
  for (unsigned i = 0; i < kCount; ++i) {
    program->words[first + i] = program->words[first + i] * 5 + step + i;
    program->pitched[i] += float(step);
  }
}

// Launches what looks and compares; what was seen goes into the digest.
void Look(Program* program, unsigned step, app::Digest* digest) {
  void* parameters[] = {&program->out, &program->offset, &step};
  Launch(program->look, parameters);
  std::vector<uint32_t> seen(5 * kCount);
  CU_CHECK(cuMemcpyDtoH(seen.data(), program->out, 4 * seen.size()));
  const std::vector<float>& plane = program->shows_array ? program->array : program->pitched;
  std::vector<uint32_t>& canvas = program->canvas_words[program->canvas_is];
  const auto as_float = [&seen](unsigned at) {
    float value;
    memcpy(&value, &seen[at], sizeof value);
    return value;
  };
  for (unsigned i = 0; i < kCount; ++i) {
    const unsigned x = i % kSide, row = i - x;
    APP_CHECK(seen[i] == program->words[program->line_at + i]);
    APP_CHECK(as_float(kCount + i) == plane[i]);
    APP_CHECK(as_float(2 * kCount + i) == (plane[i] + plane[row + (x + 1) % kSide]) / 2);
    APP_CHECK(seen[3 * kCount + i] == program->colour[row + (x + 4 < kSide ? x + 4 : kSide - 1)]);
    APP_CHECK(seen[4 * kCount + i] == canvas[i]);
    canvas[i] = canvas[i] * 3 + step + i;
  }
  digest->Add(seen.data(), 4 * seen.size());
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {10, 1});
  CU_CHECK(cuInit(0));
  CUdevice device;
  CUcontext context;
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CU_CHECK(cuCtxSetCurrent(context));
  Program program;
  Begin(&program);
  std::vector<uint64_t> said = Ask(program);
  for (int step = 1; step <= options.steps; ++step) {
    app::Digest digest;
    Change(&program, unsigned(step));
    Look(&program, unsigned(step), &digest);
    APP_CHECK(Ask(program) == said);
    // Bound anew while the kernel may still run, which goes on with what they were bound to.
    Change(&program, unsigned(step));
    if (step % 3 == 0) BindLine(&program, 64 * unsigned(step) % (3 * kCount));
    if (step % 4 == 1) BindPlane(&program, step % 8 == 1);
    if (step % 5 == 2) BindCanvas(&program, step % 2);
    said = Ask(program);
    Look(&program, unsigned(step), &digest);
    printf("step %d %016" PRIx64 "\n", step, digest.value());
    app::Step(step);  // a restart here must bring the references back
  }
  return 0;
}
