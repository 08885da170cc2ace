// SPDX-License-Identifier: Apache-2.0
// Tensor maps as programs for Hopper use them: encoded once by the driver, found through its table of entry points,
// given to kernels as parameters, in device memory and in constant memory, and used at every step. Boxes of one, two,
// three and five dimensions are loaded and stored by cp.async.bulk.tensor, with and without swizzling, with parts
// outside of the tensor (zeros or NaNs come, nothing goes), with every second row alone, and added to what is there.
// First, what the driver answers to maps that cannot be.
#include <cuda.h>

#include <vector>

#include "tests/apps/support/app.h"

namespace {

// ---------------------------------------------------------------------------------------------------------- on the GPU

__device__ uint32_t Shared(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// A barrier for one arrival and the bytes that it announces.
__device__ void Init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(Shared(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ void Expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(Shared(barrier)), "r"(bytes) : "memory");
}
__device__ void Wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@!over bra again;\n"
      "}\n" ::"r"(Shared(barrier)),
      "r"(parity)
      : "memory");
}
__device__ void Prefetch(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// What was written to a map in device memory is seen by the copies.
__device__ void AcquireMap(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}
// What this thread wrote to shared memory is seen by the copies.
__device__ void FenceForCopies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void Commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ void WaitUntilRead() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ void WaitUntilWritten() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ void Load(const CUtensorMap* map, void* to, uint64_t* barrier, int x) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];" ::"r"(
          Shared(to)),
      "l"(map), "r"(Shared(barrier)), "r"(x)
      : "memory");
}
__device__ void Load(const CUtensorMap* map, void* to, uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          Shared(to)),
      "l"(map), "r"(Shared(barrier)), "r"(x), "r"(y)
      : "memory");
}
__device__ void Load(const CUtensorMap* map, void* to, uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(Shared(to)),
      "l"(map), "r"(Shared(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ void Load(const CUtensorMap* map, void* to, uint64_t* barrier, const int (&at)[5]) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(Shared(to)),
      "l"(map), "r"(Shared(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
      : "memory");
}
__device__ void Store(const CUtensorMap* map, const void* from, int x) {
  asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%2}], [%1];" ::"l"(map),
               "r"(Shared(from)), "r"(x)
               : "memory");
}
__device__ void Store(const CUtensorMap* map, const void* from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(Shared(from)), "r"(x), "r"(y)
               : "memory");
}
__device__ void Store(const CUtensorMap* map, const void* from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(Shared(from)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ void Add(const CUtensorMap* map, const void* from, int x, int y) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(Shared(from)), "r"(x), "r"(y)
               : "memory");
}

// The next field from the last: tiles with a rim, which is zero outside of the field.
// Boxes begin at multiples of 16 bytes in the first dimension, so the rim is wider there than it needs to be.
constexpr int kTileX = 32, kTileY = 16, kRimLeft = 4, kRimX = kTileX + 2 * kRimLeft, kRimY = kTileY + 2;

__global__ void Stencil(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
                        uint32_t salt) {
  __shared__ alignas(128) uint32_t in[kRimY][kRimX];
  __shared__ alignas(128) uint32_t out[kTileY][kTileX];
  __shared__ alignas(8) uint64_t full;
  const int x0 = blockIdx.x * kTileX, y0 = blockIdx.y * kTileY;
  if (threadIdx.x == 0) {
    Prefetch(&from);
    Prefetch(&to);
    Init(&full);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    Expect(&full, sizeof in);
    Load(&from, in, &full, x0 - kRimLeft, y0 - 1);
  }
  Wait(&full, 0);
  for (int i = threadIdx.x; i < kTileX * kTileY; i += blockDim.x) {
    const int y = i / kTileX + 1, x = i % kTileX + kRimLeft;
    out[y - 1][x - kRimLeft] =
        in[y][x] * 5u + in[y - 1][x] + in[y + 1][x] * 3u + in[y][x - 1] * 7u + in[y][x + 1] * 11u + salt;
  }
  FenceForCopies();
  __syncthreads();
  if (threadIdx.x == 0) {
    Store(&to, out, x0, y0);
    Commit();
    WaitUntilWritten();
  }
}

// Transposes the field, through square tiles whose rows are kSpan bytes and swizzled in shared memory.
template <int kSpan>
__global__ void Turn(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to, int tiles_x,
                     int tiles, uint32_t salt) {
  constexpr int kSide = kSpan / 4;
  __shared__ alignas(1024) uint32_t in[kSide * kSide];
  __shared__ alignas(1024) uint32_t out[kSide * kSide];
  __shared__ alignas(8) uint64_t full;
  // Pieces of 16 bytes change places within a row, depending on the address.
  const auto at = [](int row, int column) {
    const int byte = (row * kSide + column) * 4;
    return (byte ^ ((byte >> 7 & (kSpan / 16 - 1)) << 4)) / 4;
  };
  if (threadIdx.x == 0) Init(&full);
  __syncthreads();
  uint32_t parity = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int x0 = tile % tiles_x * kSide, y0 = tile / tiles_x * kSide;
    if (threadIdx.x == 0) {
      Expect(&full, sizeof in);
      Load(&from, in, &full, x0, y0);
    }
    Wait(&full, parity);
    parity ^= 1;
    for (int i = threadIdx.x; i < kSide * kSide; i += blockDim.x) {
      const int row = i / kSide, column = i % kSide;
      out[at(column, row)] = in[at(row, column)] + salt;
    }
    FenceForCopies();
    __syncthreads();
    if (threadIdx.x == 0) {
      Store(&to, out, y0, x0);
      Commit();
      WaitUntilRead();
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) WaitUntilWritten();
}

// Adds every second row of what was transposed to the sums.
constexpr int kBandX = 16, kBandRows = 8;

__global__ void AddRows(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to) {
  __shared__ alignas(128) uint32_t band[kBandRows * kBandX];
  __shared__ alignas(8) uint64_t full;
  if (threadIdx.x == 0) Init(&full);
  __syncthreads();
  if (threadIdx.x == 0) {
    Expect(&full, sizeof band);
    Load(&from, band, &full, blockIdx.x * kBandX, blockIdx.y * 2 * kBandRows);
  }
  Wait(&full, 0);
  band[threadIdx.x] ^= threadIdx.x;
  FenceForCopies();
  __syncthreads();
  if (threadIdx.x == 0) {
    Add(&to, band, blockIdx.x * kBandX, blockIdx.y * kBandRows);
    Commit();
    WaitUntilWritten();
  }
}

// Three dimensions of small numbers. The map to load with is in device memory, that to store with in constant memory.
constexpr int kBoxX = 16, kBoxY = 4, kBoxZ = 3, kWideLeft = 8, kWideX = kBoxX + 2 * kWideLeft, kWideY = 6, kWideZ = 5;
__constant__ CUtensorMap volume_stores[2];

__global__ void Volume(const CUtensorMap* from, int to, uint32_t salt) {
  __shared__ alignas(128) uint16_t in[kWideZ][kWideY][kWideX];
  __shared__ alignas(128) uint16_t out[kBoxZ][kBoxY][kBoxX];
  __shared__ alignas(8) uint64_t full;
  const int x0 = blockIdx.x * kBoxX, y0 = blockIdx.y * kBoxY, z0 = blockIdx.z * kBoxZ;
  if (threadIdx.x == 0) {
    AcquireMap(from);
    Init(&full);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    Expect(&full, sizeof in);
    Load(from, in, &full, x0 - kWideLeft, y0 - 1, z0 - 1);
  }
  Wait(&full, 0);
  for (int i = threadIdx.x; i < kBoxX * kBoxY * kBoxZ; i += blockDim.x) {
    const int x = i % kBoxX + kWideLeft, y = i / kBoxX % kBoxY + 1, z = i / (kBoxX * kBoxY) + 1;
    out[z - 1][y - 1][x - kWideLeft] = in[z][y][x] * 3 + in[z][y][x - 1] + in[z][y][x + 1] + in[z][y - 1][x] +
                                       in[z][y + 1][x] + in[z - 1][y][x] + in[z + 1][y][x] + salt;
  }
  FenceForCopies();
  __syncthreads();
  if (threadIdx.x == 0) {
    Store(&volume_stores[to], out, x0, y0, z0);
    Commit();
    WaitUntilWritten();
  }
}

// One dimension of bytes, in place.
constexpr int kPiece = 256;

__global__ void Ribbon(const __grid_constant__ CUtensorMap map, uint32_t salt) {
  __shared__ alignas(128) uint8_t piece[kPiece];
  __shared__ alignas(8) uint64_t full;
  if (threadIdx.x == 0) Init(&full);
  __syncthreads();
  if (threadIdx.x == 0) {
    Expect(&full, sizeof piece);
    Load(&map, piece, &full, blockIdx.x * kPiece);
  }
  Wait(&full, 0);
  piece[threadIdx.x] = piece[threadIdx.x] * 5 + salt + threadIdx.x;
  FenceForCopies();
  __syncthreads();
  if (threadIdx.x == 0) {
    Store(&map, piece, blockIdx.x * kPiece);
    Commit();
    WaitUntilWritten();
  }
}

// Five dimensions of floats; outside of them there are NaNs.
constexpr int kFiveDim[5] = {8, 3, 3, 2, 2}, kFiveBox[5] = {4, 2, 3, 2, 2};
constexpr int kFiveElements = 4 * 2 * 3 * 2 * 2;

struct Corner {
  int at[5];
};

__global__ void Five(const __grid_constant__ CUtensorMap map, Corner corner, unsigned long long* counts) {
  __shared__ alignas(128) float box[kFiveElements];
  __shared__ alignas(8) uint64_t full;
  if (threadIdx.x == 0) Init(&full);
  __syncthreads();
  if (threadIdx.x == 0) {
    Expect(&full, sizeof box);
    Load(&map, box, &full, corner.at);
  }
  Wait(&full, 0);
  for (int i = threadIdx.x; i < kFiveElements; i += blockDim.x) {
    if (box[i] != box[i]) {
      atomicAdd(&counts[0], 1ull);
    } else {
      atomicAdd(&counts[1], static_cast<unsigned long long>(box[i]) * (i + 1));
    }
  }
}

// ---------------------------------------------------------------------------------------------------------- on the
// host

// The driver's functions, found as programs that are linked with the runtime alone find them.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
using ReplaceAddress = CUresult (*)(CUtensorMap*, void*);
using GetProcAddress = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
using GetErrorName = CUresult (*)(CUresult, const char**);

EncodeTiled g_encode;
ReplaceAddress g_replace;
GetErrorName g_error_name;

const char* NameOf(CUresult result) {
  const char* name = "unknown";
  g_error_name(result, &name);
  return name;
}

#define MAP_CHECK(call)                                                                                   \
  do {                                                                                                    \
    const CUresult map_check_result = (call);                                                             \
    if (map_check_result != CUDA_SUCCESS) app::Fail(__FILE__, __LINE__, #call, NameOf(map_check_result)); \
  } while (0)

template <typename F>
void FindByRuntime(const char* name, F* function) {
  cudaDriverEntryPointQueryResult status;
  void* found = nullptr;
  CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status));
  APP_CHECK(status == cudaDriverEntryPointSuccess && found);
  *function = reinterpret_cast<F>(found);
}

void FindFunctions() {
  GetProcAddress get;
  FindByRuntime("cuGetProcAddress", &get);
  FindByRuntime("cuGetErrorName", &g_error_name);
  FindByRuntime("cuTensorMapEncodeTiled", &g_encode);
  void* found = nullptr;
  CUdriverProcAddressQueryResult status;
  MAP_CHECK(get("cuTensorMapReplaceAddress", &found, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status));
  APP_CHECK(status == CU_GET_PROC_ADDRESS_SUCCESS && found);
  g_replace = reinterpret_cast<ReplaceAddress>(found);
}

// What a map is made of: a plain one of two dimensions unless something is changed.
struct Description {
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_UINT32;
  cuuint32_t rank = 2;
  void* address = nullptr;
  cuuint64_t dim[6] = {};
  cuuint64_t strides[6] = {};
  cuuint32_t box[6] = {};
  cuuint32_t steps[6] = {1, 1, 1, 1, 1, 1};
  CUtensorMapInterleave interleave = CU_TENSOR_MAP_INTERLEAVE_NONE;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_NONE;
  CUtensorMapFloatOOBfill fill = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;

  CUresult Try(CUtensorMap* map) const {
    return g_encode(map, type, rank, address, dim, strides, box, steps, interleave, swizzle, promotion, fill);
  }
  // Not returned: compilers forget that temporaries of such types must be aligned.
  void Map(CUtensorMap* map) const { MAP_CHECK(Try(map)); }
};

// A matrix of 32-bit numbers in device memory; rows are multiples of 16 bytes.
struct Matrix {
  uint32_t* data = nullptr;
  int width = 0, height = 0;
  size_t pitch = 0;

  void Make(int w, int h) {
    width = w;
    height = h;
    pitch = (w + 3) / 4 * 16 + 16;
    CUDA_CHECK(cudaMalloc(&data, pitch * h));
    CUDA_CHECK(cudaMemset(data, 0xee, pitch * h));
  }
  void Put(const std::vector<uint32_t>& from) const {
    CUDA_CHECK(cudaMemcpy2D(data, pitch, from.data(), width * 4, width * 4, height, cudaMemcpyHostToDevice));
  }
  // What is between the rows belongs to nobody. A box is written in pieces of 16 bytes, so up to there it may change.
  std::vector<uint32_t> Get() const {
    std::vector<uint32_t> to(width * height), all(pitch / 4 * height);
    CUDA_CHECK(cudaMemcpy(all.data(), data, pitch * height, cudaMemcpyDeviceToHost));
    for (int y = 0; y < height; ++y) {
      const uint32_t* row = &all[y * pitch / 4];
      for (size_t x = 0; x < pitch / 4; ++x) {
        if (int(x) < width) {
          to[y * width + x] = row[x];
        } else if (int(x) >= (width + 3) / 4 * 4) {
          APP_CHECK(row[x] == 0xeeeeeeeeu);
        }
      }
    }
    return to;
  }
  Description Describe(cuuint32_t box_x, cuuint32_t box_y) const {
    Description d;
    d.address = data;
    d.dim[0] = width;
    d.dim[1] = height;
    d.strides[0] = pitch;
    d.box[0] = box_x;
    d.box[1] = box_y;
    return d;
  }
};

// Maps that cannot be, and what the driver says.
void TryWrongMaps(const Matrix& matrix) {
  CUtensorMap map;
  const Description good = matrix.Describe(32, 16);
  const auto say = [&](const char* what, const Description& d) { printf("%s: %s\n", what, NameOf(d.Try(&map))); };
  Description d = good;
  say("plain", d);
  d.rank = 0;
  say("rank 0", d);
  d.rank = 6;
  say("rank 6", d);
  d = good;
  d.address = reinterpret_cast<char*>(d.address) + 8;
  say("address", d);
  d = good;
  d.dim[1] = 0;
  say("no rows", d);
  d = good;
  d.strides[0] += 8;
  say("stride", d);
  d = good;
  d.box[1] = 0;
  say("empty box", d);
  d.box[1] = 257;
  say("large box", d);
  d = good;
  d.box[0] = 30;
  say("width of box", d);
  d = good;
  d.steps[1] = 9;
  say("step", d);
  d = good;
  d.swizzle = CU_TENSOR_MAP_SWIZZLE_64B;
  say("swizzle", d);
  d = good;
  d.fill = CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
  say("NaN in integers", d);
  d = good;
  d.interleave = CU_TENSOR_MAP_INTERLEAVE_16B;
  say("interleaved in two dimensions", d);
  d = good;
  d.type = static_cast<CUtensorMapDataType>(77);
  say("type", d);
  // Of a map that is good.
  MAP_CHECK(good.Try(&map));
  printf("replaced by a wrong address: %s\n", NameOf(g_replace(&map, reinterpret_cast<char*>(matrix.data) + 8)));
}

// The same work on the host.
struct Model {
  int width, height;
  std::vector<uint32_t> field, turned, sums;
  int depth_x = 40, depth_y = 10, depth_z = 7;
  std::vector<uint16_t> volume;
  std::vector<uint8_t> ribbon;
  std::vector<float> five;
  unsigned long long counts[2] = {0, 0};

  uint32_t Field(int x, int y) const { return x < 0 || y < 0 || x >= width || y >= height ? 0 : field[y * width + x]; }
  uint32_t VolumeAt(int x, int y, int z) const {
    if (x < 0 || y < 0 || z < 0 || x >= depth_x || y >= depth_y || z >= depth_z) return 0;
    return volume[(z * depth_y + y) * depth_x + x];
  }

  void Step(uint32_t salt, const Corner& corner) {
    std::vector<uint32_t> next(field.size());
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) {
        next[y * width + x] = Field(x, y) * 5u + Field(x, y - 1) + Field(x, y + 1) * 3u + Field(x - 1, y) * 7u +
                              Field(x + 1, y) * 11u + salt;
      }
    }
    field = next;
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) turned[x * height + y] = field[y * width + x] + salt;
    }
    const int rows = (width + 1) / 2;
    for (int y = 0; y < rows; ++y) {
      for (int x = 0; x < height; ++x) {
        const uint32_t thread = y % kBandRows * kBandX + x % kBandX;
        sums[y * height + x] += turned[2 * y * height + x] ^ thread;
      }
    }
    std::vector<uint16_t> grown(volume.size());
    for (int z = 0; z < depth_z; ++z) {
      for (int y = 0; y < depth_y; ++y) {
        for (int x = 0; x < depth_x; ++x) {
          grown[(z * depth_y + y) * depth_x + x] = static_cast<uint16_t>(
              VolumeAt(x, y, z) * 3 + VolumeAt(x - 1, y, z) + VolumeAt(x + 1, y, z) + VolumeAt(x, y - 1, z) +
              VolumeAt(x, y + 1, z) + VolumeAt(x, y, z - 1) + VolumeAt(x, y, z + 1) + salt);
        }
      }
    }
    volume = grown;
    for (size_t i = 0; i < ribbon.size(); ++i) ribbon[i] = static_cast<uint8_t>(ribbon[i] * 5 + salt + i % kPiece);
    for (int i = 0; i < kFiveElements; ++i) {
      int rest = i, index = 0, factor = 1;
      bool inside = true;
      for (int k = 0; k < 5; ++k) {
        const int at = corner.at[k] + rest % kFiveBox[k];
        rest /= kFiveBox[k];
        inside &= at >= 0 && at < kFiveDim[k];
        index += at * factor;
        factor *= kFiveDim[k];
      }
      if (inside) {
        counts[1] += static_cast<unsigned long long>(five[index]) * (i + 1);
      } else {
        ++counts[0];
      }
    }
  }
};

template <typename T>
std::vector<T> FromDevice(const T* data, size_t count) {
  std::vector<T> to(count);
  CUDA_CHECK(cudaMemcpy(to.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
  return to;
}

template <typename T>
uint64_t DigestOf(const std::vector<T>& values) {
  app::Digest digest;
  digest.Add(values.data(), values.size() * sizeof(T));
  return digest.value();
}

unsigned Tiles(int length, int tile) { return (length + tile - 1) / tile; }

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {16, 75});
  CUDA_CHECK(cudaFree(nullptr));
  FindFunctions();

  Model model;
  model.width = options.size;
  model.height = options.size / 2 + 8;
  Matrix field[2], turned, sums;
  field[0].Make(model.width, model.height);
  field[1].Make(model.width, model.height);
  turned.Make(model.height, model.width);
  sums.Make(model.height, (model.width + 1) / 2);
  TryWrongMaps(field[0]);

  // Everything as it is at first.
  model.field.resize(model.width * model.height);
  for (size_t i = 0; i < model.field.size(); ++i) model.field[i] = static_cast<uint32_t>(i * 2654435761u);
  model.turned.assign(model.field.size(), 0);
  model.sums.assign(sums.width * sums.height, 7);
  model.volume.resize(model.depth_x * model.depth_y * model.depth_z);
  for (size_t i = 0; i < model.volume.size(); ++i) model.volume[i] = static_cast<uint16_t>(i * 40503u);
  model.ribbon.resize(1000);
  for (size_t i = 0; i < model.ribbon.size(); ++i) model.ribbon[i] = static_cast<uint8_t>(i * 31);
  model.five.resize(8 * 3 * 3 * 2 * 2);
  for (size_t i = 0; i < model.five.size(); ++i) model.five[i] = static_cast<float>(i + 1);
  field[0].Put(model.field);
  turned.Put(model.turned);
  sums.Put(model.sums);
  uint16_t* volume[2];
  uint8_t* ribbon;
  float* five;
  unsigned long long* counts;
  for (auto& v : volume) CUDA_CHECK(cudaMalloc(&v, model.volume.size() * 2));
  CUDA_CHECK(cudaMalloc(&ribbon, model.ribbon.size()));
  CUDA_CHECK(cudaMalloc(&five, model.five.size() * 4));
  CUDA_CHECK(cudaMalloc(&counts, sizeof model.counts));
  CUDA_CHECK(cudaMemcpy(volume[0], model.volume.data(), model.volume.size() * 2, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(ribbon, model.ribbon.data(), model.ribbon.size(), cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(five, model.five.data(), model.five.size() * 4, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemset(counts, 0, sizeof model.counts));

  // The maps, made once. Those of the second field and volume are the first ones' with another address.
  const CUtensorMapSwizzle kSwizzles[3] = {CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_SWIZZLE_64B,
                                           CU_TENSOR_MAP_SWIZZLE_32B};
  CUtensorMap stencil_loads[2], stencil_stores[2], turn_loads[3][2], turn_stores[3];
  const auto pair = [](CUtensorMap* maps, const Description& description, void* other) {
    description.Map(&maps[0]);
    maps[1] = maps[0];
    MAP_CHECK(g_replace(&maps[1], other));
  };
  Description d = field[0].Describe(kRimX, kRimY);
  d.promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  pair(stencil_loads, d, field[1].data);
  pair(stencil_stores, field[0].Describe(kTileX, kTileY), field[1].data);
  for (int i = 0; i < 3; ++i) {
    const cuuint32_t side = 32 >> i;
    d = field[0].Describe(side, side);
    d.swizzle = kSwizzles[i];
    pair(turn_loads[i], d, field[1].data);
    d = turned.Describe(side, side);
    d.swizzle = kSwizzles[i];
    d.Map(&turn_stores[i]);
  }
  d = turned.Describe(kBandX, 2 * kBandRows);
  d.steps[1] = 2;
  CUtensorMap rows_load, rows_add;
  d.Map(&rows_load);
  sums.Describe(kBandX, kBandRows).Map(&rows_add);

  Description v;
  v.type = CU_TENSOR_MAP_DATA_TYPE_UINT16;
  v.rank = 3;
  v.address = volume[0];
  v.dim[0] = model.depth_x;
  v.dim[1] = model.depth_y;
  v.dim[2] = model.depth_z;
  v.strides[0] = model.depth_x * 2;
  v.strides[1] = model.depth_x * model.depth_y * 2;
  const auto box = [](Description d, cuuint32_t x, cuuint32_t y, cuuint32_t z) {
    d.box[0] = x;
    d.box[1] = y;
    d.box[2] = z;
    return d;
  };
  CUtensorMap volume_maps[2], *volume_loads;
  pair(volume_maps, box(v, kWideX, kWideY, kWideZ), volume[1]);
  CUDA_CHECK(cudaMalloc(&volume_loads, sizeof volume_maps));
  CUDA_CHECK(cudaMemcpy(volume_loads, volume_maps, sizeof volume_maps, cudaMemcpyHostToDevice));
  pair(volume_maps, box(v, kBoxX, kBoxY, kBoxZ), volume[1]);
  CUDA_CHECK(cudaMemcpyToSymbol(volume_stores, volume_maps, sizeof volume_maps));

  d = Description();
  d.type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  d.rank = 1;
  d.address = ribbon;
  d.dim[0] = model.ribbon.size();
  d.box[0] = kPiece;
  CUtensorMap ribbon_map;
  d.Map(&ribbon_map);
  d = Description();
  d.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  d.rank = 5;
  d.address = five;
  cuuint64_t stride = 4;
  for (int k = 0; k < 5; ++k) {
    d.dim[k] = kFiveDim[k];
    d.box[k] = kFiveBox[k];
    stride *= kFiveDim[k];
    d.strides[k] = stride;
  }
  d.fill = CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
  CUtensorMap five_map;
  d.Map(&five_map);

  for (int step = 1; step <= options.steps; ++step) {
    const uint32_t salt = step * 0x9e3779b9u;
    const int from = (step + 1) % 2, to = step % 2;
    const Corner corner = {{4 * (step % 4) - 4, step % 3 - 1, step % 4 - 2, 1 - step % 2, step % 3 - 1}};
    const dim3 tiles(Tiles(model.width, kTileX), Tiles(model.height, kTileY));
    Stencil<<<tiles, 128>>>(stencil_loads[from], stencil_stores[to], salt);
    LAUNCH_CHECK();
    const int kind = step % 3, side = 32 >> kind;
    const int tiles_x = Tiles(model.width, side), count = tiles_x * Tiles(model.height, side);
    const auto turn = kind == 0 ? Turn<128> : kind == 1 ? Turn<64> : Turn<32>;
    turn<<<4, 64>>>(turn_loads[kind][to], turn_stores[kind], tiles_x, count, salt);
    LAUNCH_CHECK();
    AddRows<<<dim3(Tiles(sums.width, kBandX), Tiles(sums.height, kBandRows)), kBandX * kBandRows>>>(rows_load,
                                                                                                    rows_add);
    LAUNCH_CHECK();
    const dim3 boxes(Tiles(model.depth_x, kBoxX), Tiles(model.depth_y, kBoxY), Tiles(model.depth_z, kBoxZ));
    Volume<<<boxes, 64>>>(&volume_loads[from], to, salt);
    LAUNCH_CHECK();
    Ribbon<<<Tiles(model.ribbon.size(), kPiece), kPiece>>>(ribbon_map, salt);
    LAUNCH_CHECK();
    Five<<<1, 32>>>(five_map, corner, counts);
    LAUNCH_CHECK();
    model.Step(salt, corner);
    app::Step(step);
  }

  const int last = options.steps % 2;
  const auto got_field = field[last].Get(), got_turned = turned.Get(), got_sums = sums.Get();
  const auto got_volume = FromDevice(volume[last], model.volume.size());
  const auto got_ribbon = FromDevice(ribbon, model.ribbon.size());
  const auto got_counts = FromDevice(counts, 2);
  APP_CHECK(got_field == model.field);
  APP_CHECK(got_turned == model.turned);
  APP_CHECK(got_sums == model.sums);
  APP_CHECK(got_volume == model.volume);
  APP_CHECK(got_ribbon == model.ribbon);
  APP_CHECK(got_counts[0] == model.counts[0] && got_counts[1] == model.counts[1]);
  printf("tensor_maps size=%d steps=%d field=%016" PRIx64 " turned=%016" PRIx64 " sums=%016" PRIx64
         " volume=%016" PRIx64 " ribbon=%016" PRIx64 " outside=%llu inside=%llu\n",
         options.size, options.steps, DigestOf(got_field), DigestOf(got_turned), DigestOf(got_sums),
         DigestOf(got_volume), DigestOf(got_ribbon), got_counts[0], got_counts[1]);
  for (Matrix* m : {&field[0], &field[1], &turned, &sums}) CUDA_CHECK(cudaFree(m->data));
  for (auto* p : volume) CUDA_CHECK(cudaFree(p));
  CUDA_CHECK(cudaFree(ribbon));
  CUDA_CHECK(cudaFree(five));
  CUDA_CHECK(cudaFree(counts));
  CUDA_CHECK(cudaFree(volume_loads));
  return 0;
}
