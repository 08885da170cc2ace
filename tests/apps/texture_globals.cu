// SPDX-License-Identifier: Apache-2.0
// Textures over variables of modules, also over places in the middle of one: linear and pitched memory, of the
// program's own module, of a module that the driver loaded from PTX, and over a __managed__ variable. Surfaces and
// copies between such variables and arrays of all kinds: levels of mipmaps, layers, cubes. Kernels change the variables
// and write through the surfaces, objects come and go, and the module from PTX comes again with a texture over it that
// has stayed. Everything is compared with the host's own account of it.
#include <string>
#include <vector>

#include "tests/apps/support/driver.h"

namespace {

constexpr int kAlign = 512;  // what a texture's address must be a multiple of
constexpr int kWords = 640, kShown = 160;
constexpr int kPitch = 128, kWidth = 24, kHeight = 6;
constexpr int kSide = 16, kLevels = 3, kLayers = 2;

__device__ unsigned big[kWords];
__device__ unsigned char plane[kAlign + kPitch * kHeight + 64];
__managed__ unsigned shared_words[kWords];

struct Handles {
  cudaTextureObject_t linear, pitched, managed, guest, mipmap, cube;
  cudaSurfaceObject_t levels[kLevels], layers, cube_faces;
};
__device__ Handles handles;  // kernels find the objects in a variable

// The first multiple of kAlign inside `bytes`.
size_t Middle(const void* bytes) {
  const auto address = reinterpret_cast<uintptr_t>(bytes);
  return (kAlign - address % kAlign) % kAlign;
}

__global__ void Stir(unsigned* words, unsigned char* rows, unsigned* managed, unsigned* guest, unsigned step) {
  const unsigned i = threadIdx.x;
  if (i < kShown) {
    words[i] = words[i] * 3 + i + step;
    managed[i] = managed[i] * 5 + step;
  }
  if (i < kWidth) {
    for (int y = 0; y < kHeight; ++y) rows[y * kPitch + i] = (unsigned char)(rows[y * kPitch + i] + i * y + step);
  }
  if (i < 32) guest[i] = guest[i] * 7 + step;
}

__global__ void Surfaces(unsigned step) {
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  for (int l = 0; l < kLevels; ++l) {
    if (x >= kSide >> l || y >= kSide >> l) continue;
    const unsigned before = surf2Dread<unsigned>(handles.levels[l], x * 4, y);
    surf2Dwrite(before * 3 + step + l, handles.levels[l], x * 4, y);
  }
  for (int l = 0; l < kLayers; ++l) {
    const unsigned before = surf2DLayeredread<unsigned>(handles.layers, x * 4, y, l);
    surf2DLayeredwrite(before + step * (l + 1), handles.layers, x * 4, y, l);
  }
  for (int f = 0; f < 6; ++f) {
    const unsigned before = surf2DLayeredread<unsigned>(handles.cube_faces, x * 4, y, f);
    surf2DLayeredwrite(before ^ (step << f), handles.cube_faces, x * 4, y, f);
  }
}

struct Seen {
  unsigned linear[kShown], managed[kShown], guest[32];
  unsigned char pitched[kWidth * kHeight];
  unsigned levels[kLevels][kSide * kSide];
  unsigned cube[6];
};

__global__ void Look(Seen* seen) {
  const int i = threadIdx.x;
  if (i < kShown) {
    seen->linear[i] = tex1Dfetch<unsigned>(handles.linear, i);
    seen->managed[i] = tex1Dfetch<unsigned>(handles.managed, i);
  }
  if (i < 32) seen->guest[i] = tex1Dfetch<unsigned>(handles.guest, i);
  if (i < kWidth) {
    for (int y = 0; y < kHeight; ++y) {
      seen->pitched[y * kWidth + i] = tex2D<unsigned char>(handles.pitched, float(i) + 0.5f, float(y) + 0.5f);
    }
  }
  const int x = i % kSide, y = i / kSide;
  for (int l = 0; l < kLevels; ++l) {
    const int side = kSide >> l;
    if (x >= side || y >= side) continue;
    seen->levels[l][y * side + x] =
        tex2DLod<unsigned>(handles.mipmap, (x + 0.5f) / float(side), (y + 0.5f) / float(side), float(l));
  }
  if (i == 0) {
    // The middles of the faces, about.
    const float e = 1.0f / 64;
    seen->cube[0] = texCubemap<unsigned>(handles.cube, 1, e, e);
    seen->cube[1] = texCubemap<unsigned>(handles.cube, -1, e, e);
    seen->cube[2] = texCubemap<unsigned>(handles.cube, e, 1, e);
    seen->cube[3] = texCubemap<unsigned>(handles.cube, e, -1, e);
    seen->cube[4] = texCubemap<unsigned>(handles.cube, e, e, 1);
    seen->cube[5] = texCubemap<unsigned>(handles.cube, e, e, -1);
  }
}

// 1024 bytes, so that a multiple of 512 is inside with 128 bytes behind it: NVIDIA's driver (580) does not give a
// variable the alignment of 512 that its PTX asks for. All words are kFirst.
constexpr unsigned kFirst = 7;
const std::string kGuest = [] {
  std::string words;
  for (int i = 0; i < 256; ++i) words += (i == 0 ? "7" : ", 7");
  return R"(
.version 7.0
.target sm_52
.address_size 64
.visible .global .align 512 .u32 guest[256] = {)" +
         words + R"(};
.visible .entry nothing()
{
  ret;
}
)";
}();

cudaTextureObject_t Texture(const cudaResourceDesc& resource, bool normalized = false) {
  cudaTextureDesc how = {};
  how.normalizedCoords = normalized;
  how.addressMode[0] = how.addressMode[1] = how.addressMode[2] = cudaAddressModeClamp;
  how.maxMipmapLevelClamp = kLevels - 1;
  cudaTextureObject_t object;
  CUDA_CHECK(cudaCreateTextureObject(&object, &resource, &how, nullptr));
  return object;
}

cudaTextureObject_t Linear(void* memory, size_t bytes) {
  cudaResourceDesc resource = {};
  resource.resType = cudaResourceTypeLinear;
  resource.res.linear.devPtr = memory;
  resource.res.linear.desc = cudaCreateChannelDesc<unsigned>();
  resource.res.linear.sizeInBytes = bytes;
  return Texture(resource);
}

cudaTextureObject_t Pitched(void* memory) {
  cudaResourceDesc resource = {};
  resource.resType = cudaResourceTypePitch2D;
  resource.res.pitch2D.devPtr = memory;
  resource.res.pitch2D.desc = cudaCreateChannelDesc<unsigned char>();
  resource.res.pitch2D.width = kWidth;
  resource.res.pitch2D.height = kHeight;
  resource.res.pitch2D.pitchInBytes = kPitch;
  return Texture(resource);
}

cudaSurfaceObject_t Surface(cudaArray_t array) {
  cudaResourceDesc resource = {};
  resource.resType = cudaResourceTypeArray;
  resource.res.array.array = array;
  cudaSurfaceObject_t object;
  CUDA_CHECK(cudaCreateSurfaceObject(&object, &resource));
  return object;
}

// The host's account.
struct Model {
  std::vector<unsigned> linear = std::vector<unsigned>(kShown), managed = std::vector<unsigned>(kShown);
  std::vector<unsigned> guest = std::vector<unsigned>(32);
  std::vector<unsigned char> pitched = std::vector<unsigned char>(kWidth * kHeight);
  std::vector<unsigned> levels[kLevels], layers[kLayers], faces[6];

  void Step(unsigned step) {
    for (unsigned i = 0; i < kShown; ++i) {
      linear[i] = linear[i] * 3 + i + step;
      managed[i] = managed[i] * 5 + step;
    }
    for (int y = 0; y < kHeight; ++y) {
      for (int x = 0; x < kWidth; ++x) {
        unsigned char& byte = pitched[y * kWidth + x];
        byte = (unsigned char)(byte + x * y + step);
      }
    }
    for (unsigned& word : guest) word = word * 7 + step;
    for (int l = 0; l < kLevels; ++l) {
      for (unsigned& word : levels[l]) word = word * 3 + step + l;
    }
    for (int l = 0; l < kLayers; ++l) {
      for (unsigned& word : layers[l]) word += step * (l + 1);
    }
    for (int f = 0; f < 6; ++f) {
      for (unsigned& word : faces[f]) word ^= step << f;
    }
  }
};

#define SAME(got, want, bytes)                                                         \
  do {                                                                                 \
    if (memcmp(got, want, bytes) != 0) {                                               \
      fprintf(stderr, "step %d: ", step);                                              \
      app::Fail(__FILE__, __LINE__, #got " == " #want, "a kernel saw something else"); \
    }                                                                                  \
  } while (0)

void* AddressOf(const void* symbol) {
  void* address;
  CUDA_CHECK(cudaGetSymbolAddress(&address, symbol));
  return address;
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {16, 1});
  Model m;
  Handles h = {};

  // Variables, each with a texture over its middle. (A driver decides where a variable begins.)
  auto* const words_begin = static_cast<unsigned char*>(AddressOf(big));
  auto* const words = reinterpret_cast<unsigned*>(words_begin + Middle(words_begin));
  auto* const rows_begin = static_cast<unsigned char*>(AddressOf(plane));
  unsigned char* const rows = rows_begin + Middle(rows_begin);
  auto* const managed_begin = reinterpret_cast<unsigned char*>(shared_words);
  auto* const managed = reinterpret_cast<unsigned*>(managed_begin + Middle(managed_begin));
  for (int i = 0; i < kShown; ++i) {
    m.linear[i] = i * 2654435761u;
    m.managed[i] = managed[i] = i * 40503u;
  }
  for (int i = 0; i < kWidth * kHeight; ++i) m.pitched[i] = (unsigned char)(i * 7);
  CUDA_CHECK(cudaMemcpy(words, m.linear.data(), kShown * 4, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy2D(rows, kPitch, m.pitched.data(), kWidth, kWidth, kHeight, cudaMemcpyHostToDevice));
  h.linear = Linear(words, kShown * 4);
  const cudaTextureObject_t gap = Linear(words, 64);
  h.pitched = Pitched(rows);
  h.managed = Linear(managed, kShown * 4);
  CUDA_CHECK(cudaDestroyTextureObject(gap));

  CUmodule module;
  CUdeviceptr guest;
  const auto load_guest = [&] {
    size_t bytes;
    CU_CHECK(cuModuleLoadData(&module, kGuest.c_str()));
    CU_CHECK(cuModuleGetGlobal(&guest, &bytes, module, "guest"));
    APP_CHECK(bytes == 1024);
    guest += Middle(reinterpret_cast<void*>(guest));
    std::vector<unsigned> words(32);
    CU_CHECK(cuMemcpyDtoH(words.data(), guest, 128));
    for (int i = 0; i < 32; ++i) {
      m.guest[i] = 11 * (i + 1);
      APP_CHECK(words[i] == kFirst);
    }
    CU_CHECK(cuMemcpyHtoD(guest, m.guest.data(), 128));
  };
  load_guest();
  h.guest = Linear(reinterpret_cast<void*>(guest), 128);

  // Arrays: a mipmap whose levels have surfaces, layers, a cube. Their first contents are copied from the middle of a
  // variable.
  const auto word = cudaCreateChannelDesc<unsigned>();
  cudaMipmappedArray_t mipmap;
  CUDA_CHECK(
      cudaMallocMipmappedArray(&mipmap, &word, make_cudaExtent(kSide, kSide, 0), kLevels, cudaArraySurfaceLoadStore));
  cudaArray_t levels[kLevels], layers, cube;
  for (int l = 0; l < kLevels; ++l) {
    const int side = kSide >> l;
    CUDA_CHECK(cudaGetMipmappedArrayLevel(&levels[l], mipmap, l));
    m.levels[l].assign(side * side, 0);
    for (int y = 0; y < side; ++y) {
      for (int x = 0; x < side; ++x) m.levels[l][y * side + x] = m.linear[(8 + y * 5 + x + l) % kShown];
    }
    for (int y = 0; y < side; ++y) {
      std::vector<unsigned> row(m.levels[l].begin() + y * side, m.levels[l].begin() + (y + 1) * side);
      unsigned* const middle = words + kShown + 5;  // not aligned: copies need no alignment
      CUDA_CHECK(cudaMemcpy(middle, row.data(), side * 4, cudaMemcpyHostToDevice));
      CUDA_CHECK(cudaMemcpy2DToArray(levels[l], 0, y, middle, side * 4, side * 4, 1, cudaMemcpyDeviceToDevice));
    }
    h.levels[l] = Surface(levels[l]);
  }
  cudaResourceDesc resource = {};
  resource.resType = cudaResourceTypeMipmappedArray;
  resource.res.mipmap.mipmap = mipmap;
  h.mipmap = Texture(resource, true);
  const auto make = [&](cudaArray_t* array, int count, unsigned flags, std::vector<unsigned>* model) {
    CUDA_CHECK(cudaMalloc3DArray(array, &word, make_cudaExtent(kSide, kSide, count), flags));
    std::vector<unsigned> all;
    for (int l = 0; l < count; ++l) {
      for (int i = 0; i < kSide * kSide; ++i) model[l].push_back(i * 31 + l * 1009);
      all.insert(all.end(), model[l].begin(), model[l].end());
    }
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = make_cudaPitchedPtr(all.data(), kSide * 4, kSide, kSide);
    copy.dstArray = *array;
    copy.extent = make_cudaExtent(kSide, kSide, count);
    copy.kind = cudaMemcpyHostToDevice;
    CUDA_CHECK(cudaMemcpy3D(&copy));
  };
  make(&layers, kLayers, cudaArrayLayered | cudaArraySurfaceLoadStore, m.layers);
  make(&cube, 6, cudaArrayCubemap | cudaArraySurfaceLoadStore, m.faces);
  h.layers = Surface(layers);
  h.cube_faces = Surface(cube);
  resource = {};
  resource.resType = cudaResourceTypeArray;
  resource.res.array.array = cube;
  h.cube = Texture(resource, true);
  CUDA_CHECK(cudaMemcpyToSymbol(handles, &h, sizeof(h)));

  Seen* seen;
  CUDA_CHECK(cudaMalloc(&seen, sizeof(Seen)));
  std::vector<Seen> got(1);
  for (int step = 1; step <= options.steps; ++step) {
    Stir<<<1, 256>>>(words, rows, managed, reinterpret_cast<unsigned*>(guest), unsigned(step));
    LAUNCH_CHECK();
    Surfaces<<<1, kSide * kSide>>>(unsigned(step));
    LAUNCH_CHECK();
    m.Step(unsigned(step));
    CUDA_CHECK(cudaMemset(seen, 0, sizeof(Seen)));
    Look<<<1, kSide * kSide>>>(seen);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemcpy(got.data(), seen, sizeof(Seen), cudaMemcpyDeviceToHost));
    const Seen& s = got[0];
    SAME(s.linear, m.linear.data(), sizeof(s.linear));
    SAME(s.managed, m.managed.data(), sizeof(s.managed));
    SAME(s.guest, m.guest.data(), sizeof(s.guest));
    SAME(s.pitched, m.pitched.data(), sizeof(s.pitched));
    for (int l = 0; l < kLevels; ++l) SAME(s.levels[l], m.levels[l].data(), m.levels[l].size() * 4);
    // Just beside the middle of a face: on which side of it is the face's own rule.
    app::Digest digest;
    digest.Add(s);
    for (int f = 0; f < 6; ++f) {
      bool found = false;
      for (int y = kSide / 2 - 1; y <= kSide / 2; ++y) {
        for (int x = kSide / 2 - 1; x <= kSide / 2; ++x) found = found || s.cube[f] == m.faces[f][y * kSide + x];
      }
      APP_CHECK(found);
    }
    // An array's contents in the middle of a variable, and from there to the host.
    std::vector<unsigned> layer(kSide * kSide);
    const int l = step % kLayers;
    cudaMemcpy3DParms copy = {};
    copy.srcArray = layers;
    copy.srcPos = make_cudaPos(0, 0, l);
    copy.dstPtr = make_cudaPitchedPtr(words + kShown + 3, kSide * 4, kSide, kSide);
    copy.extent = make_cudaExtent(kSide, kSide, 1);
    copy.kind = cudaMemcpyDeviceToDevice;
    CUDA_CHECK(cudaMemcpy3D(&copy));
    CUDA_CHECK(cudaMemcpy(layer.data(), words + kShown + 3, layer.size() * 4, cudaMemcpyDeviceToHost));
    SAME(layer.data(), m.layers[l].data(), layer.size() * 4);
    digest.Add(layer.data(), layer.size() * 4);
    printf("step %d: %016" PRIx64 "\n", step, digest.value());
    fflush(stdout);
    app::Step(step);
    if (step % 5 == 0) {
      // The object stays over the variable's place while the module is gone. Its successor may lie elsewhere.
      CU_CHECK(cuModuleUnload(module));
      const CUdeviceptr before = guest;
      load_guest();
      if (guest != before) {
        CUDA_CHECK(cudaDestroyTextureObject(h.guest));
        h.guest = Linear(reinterpret_cast<void*>(guest), 128);
      }
      // One object goes, and another one, for another part of a variable, may get its number.
      CUDA_CHECK(cudaDestroyTextureObject(h.pitched));
      h.pitched = Pitched(rows);
      CUDA_CHECK(cudaMemcpyToSymbol(handles, &h, sizeof(h)));
    }
  }
}
