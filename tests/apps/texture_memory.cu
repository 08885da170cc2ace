// SPDX-License-Identifier: Apache-2.0
// Textures over plain memory: every format and number of channels, over linear and pitched memory, at places inside an
// allocation; over managed and pinned memory; over a large padded FFT buffer, linear and pitched; reaching beyond their
// allocation, as such buffers have them, too; and over memory that is freed before they are. The host computes
// everything as well.
#include <cuda_fp16.h>

#include <algorithm>
#include <vector>

#include "tests/apps/support/app.h"

constexpr int kElements = 37, kLooks = 45;  // linear: elements, and places that are looked at, from -4 on
constexpr int kWidth = 13, kHeight = 5, kPitch = 224;
constexpr int kPart = 2048;  // bytes of each texture's memory, a multiple of the alignment

// The four components as they are, whatever their type.
__global__ void Fetch(cudaTextureObject_t texture, uint4* out) {
  uint4 v;
  const int at = int(threadIdx.x) - 4;
  asm volatile("tex.1d.v4.u32.s32 {%0,%1,%2,%3}, [%4, {%5}];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(texture), "r"(at));
  out[threadIdx.x] = v;
}

__global__ void Sample(cudaTextureObject_t texture, float scale_x, float scale_y, uint4* out) {
  uint4 v;
  const float x = (int(threadIdx.x) - 2 + 0.5f) * scale_x, y = (int(threadIdx.y) - 2 + 0.5f) * scale_y;
  asm volatile("tex.2d.v4.u32.f32 {%0,%1,%2,%3}, [%4, {%5,%6}];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(texture), "f"(x), "f"(y));
  out[threadIdx.y * blockDim.x + threadIdx.x] = v;
}

// New contents that are numbers whatever the format: the upper exponent bit of each half and float stays clear.
__global__ void Stir(unsigned* words, int count, unsigned step) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) words[i] = (words[i] * 1664525u + 1013904223u + step) & 0xbfffbfffu;
}

// An image of 2048 x 2048 pairs whose rows are padded for a transform in place.
constexpr int kImage = 2048, kRow = kImage + 16;

// Where the image is looked at: at its corners, and beyond them.
struct Corner {
  int x, y;
};
constexpr Corner kCorners[] = {{0, 0},
                               {kRow - 1, 0},
                               {0, kImage - 1},
                               {kImage, kImage - 1},
                               {kRow - 1, kImage - 1},
                               {kRow + 2, kImage - 1},
                               {kRow - 1, kImage + 3}};
constexpr int kInside = 5, kAll = 7;  // of the corners
__constant__ Corner corners[kAll];

__global__ void StirCorners(float2* image, unsigned step) {
  const Corner at = corners[threadIdx.x];
  float2& pair = image[size_t(at.y) * kRow + at.x];
  pair = make_float2(pair.x * 0.5f + float(step), pair.y + float(threadIdx.x));
}

// The pairs there in the linear texture, and in the pitched one, which repeats its edge.
__global__ void LookAtCorners(cudaTextureObject_t linear, cudaTextureObject_t pitched, float2* out) {
  const Corner at = corners[threadIdx.x];
  out[threadIdx.x] = tex1Dfetch<float2>(linear, at.y * kRow + at.x);
  out[kAll + threadIdx.x] = tex2D<float2>(pitched, float(at.x) + 0.5f, float(at.y) + 0.5f);
}

struct Format {
  cudaChannelFormatKind kind;
  int bits;
};
constexpr Format kFormats[] = {{cudaChannelFormatKindUnsigned, 8},  {cudaChannelFormatKindSigned, 8},
                               {cudaChannelFormatKindUnsigned, 16}, {cudaChannelFormatKindSigned, 16},
                               {cudaChannelFormatKindFloat, 16},    {cudaChannelFormatKindUnsigned, 32},
                               {cudaChannelFormatKindSigned, 32},   {cudaChannelFormatKindFloat, 32}};

enum Mode { kClamp, kBorder, kWrap };
constexpr float kBorderValue = 0.25f;

struct Case {
  Format format;
  int channels;
  bool fractions;  // integers are read as numbers from 0 or -1 to 1
  bool pitched;
  Mode mode;
  size_t offset;  // of its memory
  cudaTextureObject_t object;
};

uint32_t Bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// A component of the element at `element`.
uint32_t Component(const Case& c, const unsigned char* element, int index) {
  if (index >= c.channels) return 0;
  const unsigned char* at = element + index * c.format.bits / 8;
  uint32_t bits = 0;
  memcpy(&bits, at, c.format.bits / 8);
  if (c.format.bits == 32) return bits;
  if (c.format.kind == cudaChannelFormatKindFloat) {
    __half_raw half;
    half.x = uint16_t(bits);
    return Bits(__half2float(half));
  }
  const float most = c.format.kind == cudaChannelFormatKindUnsigned ? float((1 << c.format.bits) - 1)
                                                                    : float((1 << (c.format.bits - 1)) - 1);
  if (c.format.kind == cudaChannelFormatKindUnsigned) return c.fractions ? Bits(float(bits) / most) : bits;
  const int value = c.format.bits == 8 ? int(int8_t(bits)) : int(int16_t(bits));
  return c.fractions ? Bits(std::max(float(value) / most, -1.0f)) : uint32_t(value);
}

cudaTextureObject_t Make(const Case& c, void* memory, size_t bytes) {
  cudaResourceDesc resource = {};
  const int b = c.format.bits;
  const cudaChannelFormatDesc desc =
      cudaCreateChannelDesc(b, c.channels > 1 ? b : 0, c.channels > 2 ? b : 0, c.channels > 2 ? b : 0, c.format.kind);
  if (c.pitched) {
    resource.resType = cudaResourceTypePitch2D;
    resource.res.pitch2D.devPtr = memory;
    resource.res.pitch2D.desc = desc;
    resource.res.pitch2D.width = kWidth;
    resource.res.pitch2D.height = kHeight;
    resource.res.pitch2D.pitchInBytes = kPitch;
  } else {
    resource.resType = cudaResourceTypeLinear;
    resource.res.linear.devPtr = memory;
    resource.res.linear.desc = desc;
    resource.res.linear.sizeInBytes = bytes;
  }
  cudaTextureDesc texture = {};
  texture.readMode = c.fractions ? cudaReadModeNormalizedFloat : cudaReadModeElementType;
  texture.normalizedCoords = c.mode == kWrap;
  for (cudaTextureAddressMode& mode : texture.addressMode) {
    mode = c.mode == kWrap ? cudaAddressModeWrap : c.mode == kBorder ? cudaAddressModeBorder : cudaAddressModeClamp;
  }
  texture.borderColor[0] = c.mode == kBorder ? kBorderValue : 0;
  cudaTextureObject_t object;
  CUDA_CHECK(cudaCreateTextureObject(&object, &resource, &texture, nullptr));
  return object;
}

// What a kernel finds in a texture whose memory is `memory`.
std::vector<uint4> Expect(const Case& c, const unsigned char* memory) {
  std::vector<uint4> all;
  const int bytes = c.format.bits / 8 * c.channels;
  const auto element = [&](const unsigned char* at) {
    all.push_back(make_uint4(Component(c, at, 0), Component(c, at, 1), Component(c, at, 2), Component(c, at, 3)));
  };
  if (!c.pitched) {
    for (int i = -4; i < kLooks - 4; ++i) {
      if (i < 0 || i >= kElements) {
        all.push_back(make_uint4(0, 0, 0, 0));
      } else {
        element(memory + i * bytes);
      }
    }
    return all;
  }
  for (int y = -2; y < kHeight + 2; ++y) {
    for (int x = -2; x < kWidth + 2; ++x) {
      int u = x, v = y;
      if (c.mode == kWrap) {
        u = (x + kWidth) % kWidth, v = (y + kHeight) % kHeight;
      } else if (c.mode == kClamp) {
        u = std::min(std::max(x, 0), kWidth - 1), v = std::min(std::max(y, 0), kHeight - 1);
      }
      if (u < 0 || u >= kWidth || v < 0 || v >= kHeight) {
        all.push_back(make_uint4(Bits(kBorderValue), 0, 0, 0));
      } else {
        element(memory + v * kPitch + u * bytes);
      }
    }
  }
  return all;
}

class Image {
 public:
  Image() {
    const size_t bytes = size_t(kRow) * kImage * sizeof(float2);
    CUDA_CHECK(cudaMemcpyToSymbol(corners, kCorners, sizeof kCorners));
    CUDA_CHECK(cudaMalloc(&image_, bytes));
    CUDA_CHECK(cudaMemset(image_, 0, bytes));
    CUDA_CHECK(cudaMalloc(&out_, 2 * kAll * sizeof(float2)));
    cudaResourceDesc resource = {};
    cudaTextureDesc texture = {};
    for (cudaTextureAddressMode& mode : texture.addressMode) mode = cudaAddressModeClamp;
    resource.resType = cudaResourceTypeLinear;
    resource.res.linear.devPtr = image_;
    resource.res.linear.desc = cudaCreateChannelDesc<float2>();
    resource.res.linear.sizeInBytes = bytes;
    CUDA_CHECK(cudaCreateTextureObject(&linear_, &resource, &texture, nullptr));
    resource = {};
    resource.resType = cudaResourceTypePitch2D;
    resource.res.pitch2D.devPtr = image_;
    resource.res.pitch2D.desc = cudaCreateChannelDesc<float2>();
    resource.res.pitch2D.width = kRow;
    resource.res.pitch2D.height = kImage;
    resource.res.pitch2D.pitchInBytes = kRow * sizeof(float2);
    CUDA_CHECK(cudaCreateTextureObject(&pitched_, &resource, &texture, nullptr));
  }
  void Step(int step, app::Digest* digest) {
    StirCorners<<<1, kInside>>>(image_, unsigned(step));
    LookAtCorners<<<1, kAll>>>(linear_, pitched_, out_);
    LAUNCH_CHECK();
    float2 got[2 * kAll];
    CUDA_CHECK(cudaMemcpy(got, out_, sizeof got, cudaMemcpyDeviceToHost));
    for (int i = 0; i < kInside; ++i) want_[i] = make_float2(want_[i].x * 0.5f + float(step), want_[i].y + float(i));
    for (int i = 0; i < kAll; ++i) {
      const float2 last = want_[std::min(i, kInside - 1)], none = make_float2(0, 0);
      // Behind its last element the linear texture has zeros.
      const float2 linear = i < kInside ? last : none;
      APP_CHECK(got[i].x == linear.x && got[i].y == linear.y);
      APP_CHECK(got[kAll + i].x == last.x && got[kAll + i].y == last.y);
    }
    digest->Add(got, sizeof got);
  }

 private:
  float2 *image_, *out_;
  cudaTextureObject_t linear_, pitched_;
  float2 want_[kInside] = {};
};

class Checker {
 public:
  Checker() { CUDA_CHECK(cudaMalloc(&out_, 256 * sizeof(uint4))); }
  // `memory`: what the host thinks is there.
  void Check(const Case& c, const unsigned char* memory, int step, app::Digest* digest) {
    const std::vector<uint4> want = Expect(c, memory);
    std::vector<uint4> got(want.size());
    if (c.pitched) {
      const bool normalized = c.mode == kWrap;
      Sample<<<1, dim3(kWidth + 4, kHeight + 4)>>>(c.object, normalized ? 1.0f / kWidth : 1.0f,
                                                   normalized ? 1.0f / kHeight : 1.0f, out_);
    } else {
      Fetch<<<1, kLooks>>>(c.object, out_);
    }
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemcpy(got.data(), out_, got.size() * sizeof(uint4), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < got.size(); ++i) {
      if (memcmp(&got[i], &want[i], sizeof(uint4)) == 0) continue;
      fprintf(stderr, "step %d: %d channels of kind %d, %d bits, %s: at %d %x,%x,%x,%x instead of %x,%x,%x,%x\n", step,
              c.channels, int(c.format.kind), c.format.bits, c.pitched ? "pitched" : "linear", int(i), got[i].x,
              got[i].y, got[i].z, got[i].w, want[i].x, want[i].y, want[i].z, want[i].w);
      exit(1);
    }
    digest->Add(got.data(), got.size() * sizeof(uint4));
  }

 private:
  uint4* out_ = nullptr;
};

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {8, 1});
  std::vector<Case> cases;
  for (const bool pitched : {false, true}) {
    for (const Format& format : kFormats) {
      for (const int channels : {1, 2, 4}) {
        Case c = {};
        c.format = format;
        c.channels = channels;
        c.pitched = pitched;
        const bool integer = format.kind != cudaChannelFormatKindFloat;
        c.fractions = integer && format.bits < 32 && channels != 2;
        // A border of integers is no number that the documentation names.
        const Mode modes[] = {kClamp, integer && !c.fractions ? kClamp : kBorder, kWrap};
        c.mode = pitched ? modes[cases.size() % 3] : kClamp;
        c.offset = cases.size() * kPart + 512;
        cases.push_back(c);
      }
    }
  }
  const size_t bytes = cases.size() * kPart + 4096;
  std::vector<unsigned> words(bytes / 4);
  for (size_t i = 0; i < words.size(); ++i) words[i] = unsigned(i * 2654435761u) & 0xbfffbfffu;
  unsigned *memory, *managed, *pinned;
  CUDA_CHECK(cudaMalloc(&memory, bytes));
  CUDA_CHECK(cudaMemcpy(memory, words.data(), bytes, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMallocManaged(&managed, kPart));
  CUDA_CHECK(cudaHostAlloc(&pinned, kPart, cudaHostAllocMapped));
  for (Case& c : cases) {
    const size_t size = kElements * c.format.bits / 8 * c.channels;
    // One more in between, so that the numbers of those that stay have gaps.
    const cudaTextureObject_t gap = Make(c, reinterpret_cast<char*>(memory) + c.offset, size);
    c.object = Make(c, reinterpret_cast<char*>(memory) + c.offset, size);
    CUDA_CHECK(cudaDestroyTextureObject(gap));
  }
  Case floats = {};
  floats.format = {cudaChannelFormatKindFloat, 32};
  floats.channels = 2;
  Case on_managed = floats, on_pinned = floats, padded = floats;
  on_managed.object = Make(on_managed, managed, kElements * 8);
  on_pinned.object = Make(on_pinned, pinned, kElements * 8);
  // A transform's spectrum, 512 rows of 512 pairs, and a texture whose rows are thought to be 16 pairs longer.
  float2* spectrum;
  const size_t pairs = 512 * 512;
  CUDA_CHECK(cudaMalloc(&spectrum, pairs * sizeof(float2)));
  CUDA_CHECK(cudaMemset(spectrum, 0, pairs * sizeof(float2)));
  padded.object = Make(padded, spectrum, 512 * (512 + 16) * sizeof(float2));
  std::vector<unsigned> head(kPart / 4);
  CUDA_CHECK(cudaMemcpy(spectrum, head.data(), kPart, cudaMemcpyHostToDevice));

  Image image;
  Checker checker;
  std::vector<uint4> beyond(kLooks);
  for (int step = 1; step <= options.steps; ++step) {
    Stir<<<unsigned(words.size() + 255) / 256, 256>>>(memory, int(words.size()), unsigned(step));
    Stir<<<2, 256>>>(reinterpret_cast<unsigned*>(spectrum), kPart / 4, unsigned(step));
    LAUNCH_CHECK();
    const auto stir = [step](unsigned& word) { word = (word * 1664525u + 1013904223u + step) & 0xbfffbfffu; };
    std::for_each(words.begin(), words.end(), stir);
    std::for_each(head.begin(), head.end(), stir);
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < kPart / 4; ++i) {
      managed[i] = unsigned(i * 77 + step) & 0xbfffffffu;
      pinned[i] = unsigned(i * 99 - step) & 0xbfffffffu;
    }
    app::Digest digest;
    image.Step(step, &digest);
    for (const Case& c : cases)
      checker.Check(c, reinterpret_cast<unsigned char*>(words.data()) + c.offset, step, &digest);
    checker.Check(on_managed, reinterpret_cast<unsigned char*>(managed), step, &digest);
    checker.Check(on_pinned, reinterpret_cast<unsigned char*>(pinned), step, &digest);
    // Only what lies within an element's reach is looked at here; the rest of the texture has no memory.
    std::vector<unsigned> there(head.begin(), head.end());
    Fetch<<<1, kLooks>>>(padded.object, reinterpret_cast<uint4*>(memory) + 16);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemcpy(beyond.data(), reinterpret_cast<uint4*>(memory) + 16, kLooks * sizeof(uint4),
                          cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(memory, words.data(), 4096, cudaMemcpyHostToDevice));
    for (int i = 4; i < kLooks; ++i) {
      APP_CHECK(beyond[i].x == there[2 * (i - 4)] && beyond[i].y == there[2 * (i - 4) + 1]);
    }
    digest.Add(beyond.data(), beyond.size() * sizeof(uint4));
    // Memory that is gone before its texture is; the next texture may have its number.
    void* passing;
    CUDA_CHECK(cudaMalloc(&passing, kPart));
    const cudaTextureObject_t orphan = Make(floats, passing, kPart);
    CUDA_CHECK(cudaFree(passing));
    CUDA_CHECK(cudaDestroyTextureObject(orphan));
    printf("step %d %016" PRIx64 "\n", step, digest.value());
    fflush(stdout);
    app::Step(step);
  }
  for (const Case& c : cases) CUDA_CHECK(cudaDestroyTextureObject(c.object));
  return 0;
}
