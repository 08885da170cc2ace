// SPDX-License-Identifier: Apache-2.0
// PTX on the host: parse a module's text, place its variables, run its kernels.
//
// The library knows nothing of the driver API. A driver (softgpu) parses a module, gives every variable a host
// address, copies the initial bytes there after Bind() and launches kernels; a device address is a host address of this
// process, and every access of a kernel is checked against the driver's own map of what is allocated (MemoryMap).
// Shared and local memory are seen through generic addresses above the 47-bit user space (kSharedWindow,
// kLocalWindow), where no host address lies.
//
// Thread-safety: a bound Module is immutable for its users; any number of threads may launch kernels of it at the same
// time. Parse and Bind are for one thread. Errors name the kernel, the line and the text of the line;
// hostile text and faulting kernels give errors, never a crash. No exceptions leave the library.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_PTX_H_
#define CUDA_REMOTE_SOFTGPU_PTX_PTX_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "proto/base/status.h"

namespace cuda_remote::softgpu::ptx {

// Generic addresses of a block's shared and a thread's local memory and of a kernel's parameters.
constexpr uint64_t kSharedWindow = 0x0001000000000000;
constexpr uint64_t kLocalWindow = 0x0002000000000000;
constexpr uint64_t kParamWindow = 0x0003000000000000;
constexpr uint64_t kWindowBytes = 0x0001000000000000;

struct ParamInfo {
  std::string name;
  uint32_t offset = 0;  // in the parameter block
  uint32_t size = 0;
  uint32_t align = 1;
};

struct KernelInfo {
  std::string name;
  std::vector<ParamInfo> params;
  uint32_t param_bytes = 0;                  // end of the last parameter
  uint32_t static_shared_bytes = 0;          // of the kernel and the functions that it can reach
  uint32_t local_bytes = 0;                  // the kernel's own frame
  uint32_t register_estimate = 16;           // something plausible for CU_FUNC_ATTRIBUTE_NUM_REGS
  uint32_t max_threads = 1024;               // product of .maxntid or .reqntid, else 1024
  uint32_t required_block[3] = {0, 0, 0};    // .reqntid; zeros: none
  uint32_t required_cluster[3] = {0, 0, 0};  // .reqnctapercluster; zeros: none
  bool needs_cluster = false;                // .explicitcluster: a launch has to give a size if the code does not
  uint32_t max_cluster = 0;                  // .maxclusterrank; 0: not given
  uint32_t line = 0;
};

enum class Space : uint8_t { kGlobal, kConst };

// A place in a variable's initial bytes that holds an address.
struct Relocation {
  uint32_t offset = 0;
  uint32_t bytes = 8;  // 1, 4 or 8 bytes are written
  std::string symbol;  // a variable or a function
  int64_t addend = 0;
  uint32_t shift = 0;  // bits by which the address is shifted right (mask() operands)
};

// What a variable refers to, if it is a .texref or a .surfref. Its address is then the handle under which a launch asks
// for the texture or the surface (texture.h), and its bytes mean nothing.
enum class Reference : uint8_t { kNone, kTexture, kSurface };

struct GlobalInfo {
  std::string name;
  Space space = Space::kGlobal;
  uint64_t size = 0;
  uint32_t align = 1;
  bool visible = false;   // .visible, .weak or .common: the host may ask for it by name
  bool external = false;  // .extern: some other module defines it
  bool managed = false;   // .attribute(.managed)
  Reference reference = Reference::kNone;
  std::string initial;  // shorter than size: the rest is zero
  std::vector<Relocation> relocations;
};

struct Interval {
  uint64_t begin = 0;
  uint64_t end = 0;  // one past the last byte
  bool writable = true;
};

// The driver's map of device memory, and anything else kernels may touch. Called from several threads at a time.
// What a lookup returned must stay valid until the launch has ended (results are cached within a launch).
class MemoryMap {
 public:
  virtual ~MemoryMap() = default;
  // The allocation that holds `address`; false: none. The host memory [begin, end) must be accessible.
  virtual bool Lookup(uint64_t address, Interval* interval) = 0;
};

// Variable or function name -> host address.
using SymbolAddresses = std::unordered_map<std::string, uint64_t>;

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

class TextureUnit;

// Blocks of a cluster at most; more than kPortableCluster not on every GPU.
constexpr uint32_t kMaxCluster = 16, kPortableCluster = 8;

struct LaunchOptions {
  Dim3 grid, block;
  Dim3 cluster;                   // of blocks; the grid consists of whole ones. Its blocks run together
  bool explicit_cluster = false;  // somebody asked for this size: %is_explicit_cluster
  uint32_t dynamic_shared_bytes = 0;
  std::string_view params;  // the parameter block, at least KernelInfo::param_bytes
  MemoryMap* memory = nullptr;
  TextureUnit* textures = nullptr;  // texture.h; absent: no handle is known
  // Text of printf. Called by one thread at a time, whole messages.
  std::function<void(std::string_view)> print;
  // Texts of failed assertions; absent: print gets them.
  std::function<void(std::string_view)> complain;
  const std::atomic<bool>* cancel = nullptr;  // set: the launch ends soon with kCancelled
  bool cooperative = false;                   // all blocks are resident (grid.sync())
  uint32_t host_threads = 0;                  // 0: as many as the machine has
  uint32_t stack_bytes = 1 << 20;             // local memory of one thread, call frames included
  uint32_t max_shared_bytes = 227 * 1024;
  uint64_t grid_id = 0;
  uint64_t instruction_limit = 0;  // not 0: about so many on one host thread, then kCancelled (tests)
  // In-kernel malloc and free; absent: malloc returns null. Called from several threads at a time.
  std::function<uint64_t(uint64_t bytes)> device_malloc;
  std::function<void(uint64_t address)> device_free;
  // cudaGraphSetConditional; absent: nothing happens. Called from several threads at a time.
  std::function<void(uint64_t handle, uint32_t value)> set_conditional;
};

enum class Fault : uint8_t {
  kNone,
  kIllegalAddress,      // CUDA_ERROR_ILLEGAL_ADDRESS
  kMisaligned,          // CUDA_ERROR_MISALIGNED_ADDRESS
  kIllegalInstruction,  // a copy that the hardware cannot make: CUDA_ERROR_ILLEGAL_INSTRUCTION
  kTrap,                // trap, brkpt: CUDA_ERROR_LAUNCH_FAILED
  kAssert,              // __assertfail: CUDA_ERROR_ASSERT
  kUnsupported,         // an instruction or a function that is not implemented: CUDA_ERROR_NOT_SUPPORTED
  kDeadlock,            // threads wait at barriers that cannot complete
  kStackOverflow,       // CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES or LAUNCH_FAILED
  kInvalidLaunch,       // CUDA_ERROR_INVALID_VALUE: dimensions, parameters, shared memory
  kInvalidCode,         // branch or call to nowhere: CUDA_ERROR_INVALID_PC
  kCancelled,
};

struct LaunchResult {
  Fault fault = Fault::kNone;
  std::string message;        // kernel, PTX line, block and thread
  uint64_t instructions = 0;  // executed in all threads
  bool ok() const { return fault == Fault::kNone; }
};

struct Program;  // the parsed module, ptx-internal

class Module {
 public:
  // A failure says what is wrong in which line, with the line.
  static StatusOr<std::unique_ptr<Module>> Parse(std::string_view text);
  ~Module();

  const std::vector<KernelInfo>& kernels() const;
  const KernelInfo* FindKernel(std::string_view name) const;
  const std::vector<GlobalInfo>& globals() const;
  int version_major() const;  // of .version
  int version_minor() const;
  int target() const;  // of .target: 75, 80, ...

  // Gives the functions that other modules could see (not kernels) addresses: `place` gets how many instructions one
  // has. Once, before Image, Check and Launch. The others keep the numbers that they have. Returns the addresses.
  std::vector<uint64_t> PlaceFunctions(const std::function<uint64_t(uint64_t instructions)>& place);
  // How many instructions a kernel has.
  uint64_t KernelInstructions(std::string_view kernel) const;

  // Gives every variable of globals() its address (those of `external` ones from other modules). Once, before Image,
  // Check and Launch. Several modules linked together: see LinkWith.
  Status Bind(const SymbolAddresses& addresses);

  // Functions that this module declares and does not define are taken from `others`, which must outlive it. Before the
  // first Check or Launch.
  void LinkWith(std::vector<const Module*> others);

  // The bytes of a variable with its relocations applied, `size` long.
  std::string Image(const GlobalInfo& global) const;

  // Prepares a kernel and everything that it can call. A failure names the first unsupported instruction.
  Status Check(std::string_view kernel) const;

  LaunchResult Launch(std::string_view kernel, const LaunchOptions& options) const;

 private:
  Module();
  std::unique_ptr<Program> program_;
};

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_PTX_H_
