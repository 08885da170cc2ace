// SPDX-License-Identifier: Apache-2.0
// Arrays, textures and surfaces: 1D, 2D, 3D, layered and mipmapped arrays, cubes and layered cubes, whose elements
// kernels change through surfaces and read through texture objects (points and linear filtering, normalised
// coordinates, all address modes, integers mapped to floats), textures over plain and pitched memory, copies between
// arrays and memory. Objects come and go, so that the numbers of those that stay have gaps; some are kept in device
// memory. The host computes everything as well; coordinates are multiples of a quarter element, so filtering is exact.
#include <vector>

#include "tests/apps/support/app.h"

struct Handles {  // in device memory
  cudaTextureObject_t linear2d, point_wrap, bytes, volume, layers, mipmap, fetch, pitched, cube, cubes;
  cudaSurfaceObject_t surface2d, surface3d, surface_layers, surface_cube, surface_cubes;
};
__device__ Handles handles;

constexpr int kWidth = 24, kHeight = 10, kDepth = 4, kLayers = 3, kLevels = 3;
constexpr int kSide = 8, kCubes = 2;  // of the cubes, and how many the layered one has

// The direction in which the middle of an element of a cube's face lies. What a coordinate on the face means: CUDA C++
// Programming Guide, "Cubemap Textures".
__device__ float3 Towards(int face, int x, int y) {
  const float s = (2 * x + 1) / float(kSide) - 1, t = (2 * y + 1) / float(kSide) - 1;
  switch (face) {
    case 0:
      return make_float3(1, -t, -s);
    case 1:
      return make_float3(-1, -t, s);
    case 2:
      return make_float3(s, 1, t);
    case 3:
      return make_float3(s, -1, -t);
    case 4:
      return make_float3(s, -t, 1);
    default:
      return make_float3(-s, -t, -1);
  }
}

// Changes elements through surfaces.
__global__ void Stir(unsigned step) {
  const int x = threadIdx.x, y = blockIdx.x;
  float value = surf2Dread<float>(handles.surface2d, x * 4, y);
  surf2Dwrite(value * 0.5f + float((x * 3 + y * 7 + step) % 16), handles.surface2d, x * 4, y);
  if (x < 8 && y < 6) {
    for (int z = 0; z < kDepth; ++z) {
      short2 pair = surf3Dread<short2>(handles.surface3d, x * 4, y, z);
      pair.x += short(step + z);
      pair.y = short(pair.y * 3 - x);
      surf3Dwrite(pair, handles.surface3d, x * 4, y, z);
    }
  }
  if (x < 6 && y < kLayers) {
    unsigned word = surf1DLayeredread<unsigned>(handles.surface_layers, x * 4, y);
    surf1DLayeredwrite(word * 5 + step, handles.surface_layers, x * 4, y);
  }
  if (x < kSide && y < kSide) {
    for (int f = 0; f < 6 * kCubes; ++f) {
      unsigned word = surfCubemapLayeredread<unsigned>(handles.surface_cubes, x * 4, y, f);
      surfCubemapLayeredwrite(word * 3 + step + f, handles.surface_cubes, x * 4, y, f);
      if (f >= 6) continue;
      word = surfCubemapread<unsigned>(handles.surface_cube, x * 4, y, f);
      surfCubemapwrite(word * 7 + step + f, handles.surface_cube, x * 4, y, f);
    }
  }
}

// Reads through textures; `out` has 16 floats for each thread.
__global__ void Look(float* out, int n, float shift) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i >= n) return;
  const float x = i % kWidth + shift, y = i / kWidth + shift;
  float* mine = out + 16 * i;
  mine[0] = tex2D<float>(handles.linear2d, x, y);
  mine[1] = tex2D<float>(handles.linear2d, x - 3, y + 1);
  mine[2] = tex2D<float>(handles.point_wrap, (x + 20) / kWidth, (y - 8) / kHeight);
  const float4 color = tex2D<float4>(handles.bytes, x / 16 - 0.5f, y / 16);
  mine[3] = color.x + color.y;
  mine[4] = color.z + color.w;
  const short2 pair = tex3D<short2>(handles.volume, x, y, float(i % kDepth));
  mine[5] = pair.x;
  mine[6] = pair.y;
  mine[7] = float(tex1DLayered<unsigned>(handles.layers, x, i % kLayers) % 4096u);
  mine[8] = tex2DLod<float>(handles.mipmap, x / kWidth, y / kHeight, float(i % kLevels));
  mine[9] = tex2DLod<float>(handles.mipmap, x / kWidth, y / kHeight, 0.25f);
  mine[10] = tex1Dfetch<float>(handles.fetch, i);
  mine[11] = tex1Dfetch<float>(handles.fetch, -1 - i);
  const uchar2 small = tex2D<uchar2>(handles.pitched, x, y);
  mine[12] = small.x;
  mine[13] = small.y;
  const float3 to = Towards(i % 6, i / 6 % kSide, i / 48 % kSide);
  const float far = 1 << (i % 3);  // how far does not matter
  mine[14] = float(texCubemap<unsigned>(handles.cube, far * to.x, far * to.y, far * to.z) % 4096u);
  mine[15] = float(texCubemapLayered<unsigned>(handles.cubes, to.x, to.y, to.z, i % kCubes) % 4096u);
}

// The host's idea of it all.
struct Model {
  std::vector<float> plane = std::vector<float>(kWidth * kHeight);
  std::vector<short2> volume = std::vector<short2>(8 * 6 * kDepth);
  std::vector<unsigned> layers = std::vector<unsigned>(6 * kLayers);
  std::vector<uchar4> bytes = std::vector<uchar4>(16 * 16);
  std::vector<float> levels[kLevels];
  std::vector<float> fetch = std::vector<float>(200);
  std::vector<uchar2> pitched = std::vector<uchar2>(20 * 7);
  std::vector<unsigned> cube = std::vector<unsigned>(6 * kSide * kSide);
  std::vector<unsigned> cubes = std::vector<unsigned>(kCubes * 6 * kSide * kSide);
};

int Clamp(int i, int n) { return i < 0 ? 0 : i >= n ? n - 1 : i; }
int Wrap(int i, int n) { return ((i % n) + n) % n; }
int Mirror(int i, int n) {
  i = Wrap(i, 2 * n);
  return i < n ? i : 2 * n - 1 - i;
}

// Linear filtering, clamped in x and with a border in y.
float Linear(const Model& m, float x, float y) {
  const float bx = x - 0.5f, by = y - 0.5f;
  const int i = int(floorf(bx)), j = int(floorf(by));
  const float a = bx - i, b = by - j;
  const auto at = [&](int u, int v) {
    return v < 0 || v >= kHeight || u < 0 || u >= kWidth ? 2.0f : m.plane[v * kWidth + u];
  };
  return (1 - a) * (1 - b) * at(i, j) + a * (1 - b) * at(i + 1, j) + (1 - a) * b * at(i, j + 1) +
         a * b * at(i + 1, j + 1);
}

void Expect(const Model& m, int i, float shift, float* mine) {
  const float x = i % kWidth + shift, y = i / kWidth + shift;
  mine[0] = Linear(m, x, y);
  mine[1] = Linear(m, x - 3, y + 1);
  mine[2] = m.plane[Mirror(int(floorf(y - 8)), kHeight) * kWidth + Wrap(int(floorf(x + 20)), kWidth)];
  const uchar4 color = m.bytes[Clamp(int(floorf(y)), 16) * 16 + Clamp(int(floorf(x - 8)), 16)];
  mine[3] = color.x / 255.0f + color.y / 255.0f;
  mine[4] = color.z / 255.0f + color.w / 255.0f;
  const short2 pair = m.volume[((i % kDepth) * 6 + Clamp(int(y), 6)) * 8 + Clamp(int(x), 8)];
  mine[5] = pair.x;
  mine[6] = pair.y;
  mine[7] = float(m.layers[(i % kLayers) * 6 + Clamp(int(x), 6)] % 4096u);
  const auto level = [&](int l) {
    const int w = 16 >> l, h = 8 >> l;
    return m.levels[l][Clamp(int(floorf(y / kHeight * h)), h) * w + Clamp(int(floorf(x / kWidth * w)), w)];
  };
  mine[8] = level(i % kLevels);
  mine[9] = level(0) * 0.75f + level(1) * 0.25f;
  mine[10] = i < 200 ? m.fetch[i] : 0;
  mine[11] = 0;
  const uchar2 small = m.pitched[Clamp(int(y), 7) * 20 + Clamp(int(x), 20)];
  mine[12] = small.x;
  mine[13] = small.y;
  const int on_face = i / 48 % kSide * kSide + i / 6 % kSide;
  mine[14] = float(m.cube[i % 6 * kSide * kSide + on_face] % 4096u);
  mine[15] = float(m.cubes[(i % kCubes * 6 + i % 6) * kSide * kSide + on_face] % 4096u);
}

cudaTextureObject_t MakeTexture(const cudaResourceDesc& resource, cudaTextureFilterMode filter,
                                cudaTextureReadMode read, bool normalized, cudaTextureAddressMode x,
                                cudaTextureAddressMode y, float border = 0, bool mipmap = false) {
  cudaTextureDesc texture = {};
  texture.filterMode = filter;
  texture.readMode = read;
  texture.normalizedCoords = normalized;
  texture.addressMode[0] = x;
  texture.addressMode[1] = y;
  texture.addressMode[2] = cudaAddressModeClamp;
  for (float& channel : texture.borderColor) channel = border;
  if (mipmap) {
    texture.mipmapFilterMode = cudaFilterModeLinear;
    texture.maxMipmapLevelClamp = kLevels - 1;
  }
  cudaTextureObject_t object;
  CUDA_CHECK(cudaCreateTextureObject(&object, &resource, &texture, nullptr));
  return object;
}

cudaResourceDesc OfArray(cudaArray_t array) {
  cudaResourceDesc resource = {};
  resource.resType = cudaResourceTypeArray;
  resource.res.array.array = array;
  return resource;
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {16, 240});
  const int n = options.size;
  Model m;
  for (int i = 0; i < kWidth * kHeight; ++i) m.plane[i] = float(i % 13);
  for (size_t i = 0; i < m.volume.size(); ++i) m.volume[i] = make_short2(short(i * 3), short(-int(i)));
  for (size_t i = 0; i < m.layers.size(); ++i) m.layers[i] = unsigned(i * 77);
  for (int i = 0; i < 256; ++i) m.bytes[i] = make_uchar4(i, 255 - i, i * 3, i * 7);
  for (int l = 0; l < kLevels; ++l) {
    for (int i = 0; i < (16 >> l) * (8 >> l); ++i) m.levels[l].push_back(float((i * 5 + l * 100) % 64));
  }
  for (int i = 0; i < 200; ++i) m.fetch[i] = i * 0.5f;
  for (int i = 0; i < 140; ++i) m.pitched[i] = make_uchar2(i, 200 - i);
  for (size_t i = 0; i < m.cube.size(); ++i) m.cube[i] = unsigned(i * 5);
  for (size_t i = 0; i < m.cubes.size(); ++i) m.cubes[i] = unsigned(i * 11);

  // Arrays and their first contents, by different copies.
  const auto floats = cudaCreateChannelDesc<float>();
  cudaArray_t plane, volume, layers, bytes;
  CUDA_CHECK(cudaMallocArray(&plane, &floats, kWidth, kHeight, cudaArraySurfaceLoadStore));
  CUDA_CHECK(cudaMemcpy2DToArray(plane, 0, 0, m.plane.data(), kWidth * 4, kWidth * 4, kHeight, cudaMemcpyHostToDevice));
  const auto shorts = cudaCreateChannelDesc<short2>();
  CUDA_CHECK(cudaMalloc3DArray(&volume, &shorts, make_cudaExtent(8, 6, kDepth), cudaArraySurfaceLoadStore));
  cudaMemcpy3DParms copy = {};
  copy.srcPtr = make_cudaPitchedPtr(m.volume.data(), 8 * sizeof(short2), 8, 6);
  copy.dstArray = volume;
  copy.extent = make_cudaExtent(8, 6, kDepth);
  copy.kind = cudaMemcpyHostToDevice;
  CUDA_CHECK(cudaMemcpy3D(&copy));
  const auto words = cudaCreateChannelDesc<unsigned>();
  CUDA_CHECK(
      cudaMalloc3DArray(&layers, &words, make_cudaExtent(6, 0, kLayers), cudaArrayLayered | cudaArraySurfaceLoadStore));
  copy = {};
  copy.srcPtr = make_cudaPitchedPtr(m.layers.data(), 6 * 4, 6, 1);
  copy.dstArray = layers;
  copy.extent = make_cudaExtent(6, 1, kLayers);
  copy.kind = cudaMemcpyHostToDevice;
  CUDA_CHECK(cudaMemcpy3D(&copy));
  cudaArray_t cube, cubes;
  const auto make_cubes = [&words](cudaArray_t* array, unsigned flags, std::vector<unsigned>* contents, int faces) {
    const cudaExtent extent = make_cudaExtent(kSide, kSide, faces);
    CUDA_CHECK(cudaMalloc3DArray(array, &words, extent, flags | cudaArrayCubemap | cudaArraySurfaceLoadStore));
    cudaMemcpy3DParms filling = {};
    filling.srcPtr = make_cudaPitchedPtr(contents->data(), kSide * 4, kSide, kSide);
    filling.dstArray = *array;
    filling.extent = extent;
    filling.kind = cudaMemcpyHostToDevice;
    CUDA_CHECK(cudaMemcpy3D(&filling));
  };
  make_cubes(&cube, 0, &m.cube, 6);
  make_cubes(&cubes, cudaArrayLayered, &m.cubes, 6 * kCubes);
  const auto colors = cudaCreateChannelDesc<uchar4>();
  CUDA_CHECK(cudaMallocArray(&bytes, &colors, 16, 16));
  uchar4* staging;
  CUDA_CHECK(cudaMalloc(&staging, 256 * sizeof(uchar4)));
  CUDA_CHECK(cudaMemcpy(staging, m.bytes.data(), 256 * sizeof(uchar4), cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy2DToArray(bytes, 0, 0, staging, 64, 64, 16, cudaMemcpyDeviceToDevice));
  cudaMipmappedArray_t mipmap;
  CUDA_CHECK(cudaMallocMipmappedArray(&mipmap, &floats, make_cudaExtent(16, 8, 0), kLevels));
  for (int l = 0; l < kLevels; ++l) {
    cudaArray_t level;
    CUDA_CHECK(cudaGetMipmappedArrayLevel(&level, mipmap, l));
    const int w = 16 >> l;
    CUDA_CHECK(cudaMemcpy2DToArray(level, 0, 0, m.levels[l].data(), w * 4, w * 4, 8 >> l, cudaMemcpyHostToDevice));
  }
  float* fetch;
  CUDA_CHECK(cudaMalloc(&fetch, 200 * 4));
  CUDA_CHECK(cudaMemcpy(fetch, m.fetch.data(), 200 * 4, cudaMemcpyHostToDevice));
  uchar2* pitched;
  size_t pitch;
  CUDA_CHECK(cudaMallocPitch(&pitched, &pitch, 20 * 2, 7));
  CUDA_CHECK(cudaMemcpy2D(pitched, pitch, m.pitched.data(), 40, 40, 7, cudaMemcpyHostToDevice));

  // Objects, with some in between that do not stay.
  const auto clamp = cudaAddressModeClamp, border = cudaAddressModeBorder;
  const auto element = cudaReadModeElementType;
  Handles h = {};
  const cudaTextureObject_t gap1 = MakeTexture(OfArray(bytes), cudaFilterModePoint, element, false, clamp, clamp);
  h.linear2d = MakeTexture(OfArray(plane), cudaFilterModeLinear, element, false, border, border, 2.0f);
  const cudaTextureObject_t gap2 = MakeTexture(OfArray(plane), cudaFilterModePoint, element, false, clamp, clamp);
  h.point_wrap =
      MakeTexture(OfArray(plane), cudaFilterModePoint, element, true, cudaAddressModeWrap, cudaAddressModeMirror);
  h.bytes = MakeTexture(OfArray(bytes), cudaFilterModePoint, cudaReadModeNormalizedFloat, true, clamp, clamp);
  CUDA_CHECK(cudaDestroyTextureObject(gap1));
  CUDA_CHECK(cudaDestroyTextureObject(gap2));
  h.volume = MakeTexture(OfArray(volume), cudaFilterModePoint, element, false, clamp, clamp);
  h.layers = MakeTexture(OfArray(layers), cudaFilterModePoint, element, false, clamp, clamp);
  h.cube = MakeTexture(OfArray(cube), cudaFilterModePoint, element, true, clamp, clamp);
  h.cubes = MakeTexture(OfArray(cubes), cudaFilterModePoint, element, true, clamp, clamp);
  cudaResourceDesc resource = {};
  resource.resType = cudaResourceTypeMipmappedArray;
  resource.res.mipmap.mipmap = mipmap;
  h.mipmap = MakeTexture(resource, cudaFilterModePoint, element, true, clamp, clamp, 0, true);
  resource = {};
  resource.resType = cudaResourceTypeLinear;
  resource.res.linear.devPtr = fetch;
  resource.res.linear.desc = floats;
  resource.res.linear.sizeInBytes = 200 * 4;
  h.fetch = MakeTexture(resource, cudaFilterModePoint, element, false, clamp, clamp);
  resource = {};
  resource.resType = cudaResourceTypePitch2D;
  resource.res.pitch2D.devPtr = pitched;
  resource.res.pitch2D.desc = cudaCreateChannelDesc<uchar2>();
  resource.res.pitch2D.width = 20;
  resource.res.pitch2D.height = 7;
  resource.res.pitch2D.pitchInBytes = pitch;
  h.pitched = MakeTexture(resource, cudaFilterModePoint, element, false, clamp, clamp);
  cudaResourceDesc back;
  CUDA_CHECK(cudaGetTextureObjectResourceDesc(&back, h.linear2d));
  APP_CHECK(back.resType == cudaResourceTypeArray && back.res.array.array == plane);
  resource = OfArray(plane);
  CUDA_CHECK(cudaCreateSurfaceObject(&h.surface2d, &resource));
  resource = OfArray(volume);
  CUDA_CHECK(cudaCreateSurfaceObject(&h.surface3d, &resource));
  resource = OfArray(layers);
  CUDA_CHECK(cudaCreateSurfaceObject(&h.surface_layers, &resource));
  resource = OfArray(cube);
  CUDA_CHECK(cudaCreateSurfaceObject(&h.surface_cube, &resource));
  resource = OfArray(cubes);
  CUDA_CHECK(cudaCreateSurfaceObject(&h.surface_cubes, &resource));
  CUDA_CHECK(cudaMemcpyToSymbol(handles, &h, sizeof(h)));

  float* out;
  CUDA_CHECK(cudaMalloc(&out, n * 16 * sizeof(float)));
  std::vector<float> got(n * 16), want(n * 16), read_back(kWidth * kHeight);
  for (int step = 1; step <= options.steps; ++step) {
    Stir<<<kHeight, kWidth>>>(step);
    LAUNCH_CHECK();
    for (int y = 0; y < kHeight; ++y) {
      for (int x = 0; x < kWidth; ++x) {
        float& value = m.plane[y * kWidth + x];
        // Few bits, so that everything stays exact.
        value = value * 0.5f + float((x * 3 + y * 7 + step) % 16);
      }
    }
    for (int z = 0; z < kDepth; ++z) {
      for (int y = 0; y < 6; ++y) {
        for (int x = 0; x < 8; ++x) {
          short2& pair = m.volume[(z * 6 + y) * 8 + x];
          pair.x += short(step + z);
          pair.y = short(pair.y * 3 - x);
        }
      }
    }
    for (int i = 0; i < 6 * kLayers; ++i) m.layers[i] = m.layers[i] * 5 + step;
    const int face = kSide * kSide;
    for (int i = 0; i < 6 * face; ++i) m.cube[i] = m.cube[i] * 7 + step + i / face;
    for (int i = 0; i < 6 * kCubes * face; ++i) m.cubes[i] = m.cubes[i] * 3 + step + i / face;
    if (step % 4 == 0) {
      // Whole steps of the halving would run out of bits: begin again, through a copy into the array.
      for (float& value : m.plane) value = floorf(value);
      CUDA_CHECK(
          cudaMemcpy2DToArray(plane, 0, 0, m.plane.data(), kWidth * 4, kWidth * 4, kHeight, cudaMemcpyHostToDevice));
    }
    // Never on the border of two texels, where hardware may round either way.
    const float shift = 0.25f * (1 + step % 3);
    Look<<<(n + 63) / 64, 64>>>(out, n, shift);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemcpy(got.data(), out, got.size() * sizeof(float), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; ++i) Expect(m, i, shift, &want[16 * i]);
    for (size_t i = 0; i < got.size(); ++i) {
      if (!app::Near(got[i], want[i], 1e-6)) {
        fprintf(stderr, "step %d thread %d value %d: %.9g instead of %.9g\n", step, int(i / 16), int(i % 16), got[i],
                want[i]);
        return 1;
      }
    }
    CUDA_CHECK(
        cudaMemcpy2DFromArray(read_back.data(), kWidth * 4, plane, 0, 0, kWidth * 4, kHeight, cudaMemcpyDeviceToHost));
    APP_CHECK(memcmp(read_back.data(), m.plane.data(), read_back.size() * 4) == 0);
    if (step % 4 == 0) {
      app::Digest digest;
      digest.Add(read_back.data(), read_back.size() * 4);
      digest.Add(m.volume.data(), m.volume.size() * sizeof(short2));
      digest.Add(m.layers.data(), m.layers.size() * 4);
      digest.Add(m.cube.data(), m.cube.size() * 4);
      digest.Add(m.cubes.data(), m.cubes.size() * 4);
      printf("step %d %016" PRIx64 " %.9g %.9g\n", step, digest.value(), got[0], got[16 * (n / 2) + 9]);
      fflush(stdout);
    }
    app::Step(step);
  }
  CUDA_CHECK(cudaDestroyTextureObject(h.linear2d));
  CUDA_CHECK(cudaDestroySurfaceObject(h.surface2d));
  CUDA_CHECK(cudaFreeArray(plane));
  CUDA_CHECK(cudaFreeMipmappedArray(mipmap));
  return 0;
}
