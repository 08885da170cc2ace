// SPDX-License-Identifier: Apache-2.0
// Module: parsing, binding, preparing and launching; what a kernel can reach.
#include <algorithm>
#include <new>
#include <set>

#include "proto/base/hash.h"
#include "proto/threads/mutex.h"
#include "softgpu/ptx/decoder.h"
#include "softgpu/ptx/parser.h"

namespace cuda_remote::softgpu::ptx {

void RunLaunch(LaunchState* launch);  // exec.cc

namespace {

// Pointers to functions that no other module can see are numbers, as a compiler of whole programs makes them: they lie
// above every memory window and depend on the module's text and the function's position alone. The others are addresses
// (PlaceFunctions).
constexpr uint64_t kCodeWindow = 0x0004000000000000;

constexpr uint64_t kMaxThreadMemory = uint64_t{8} << 30;

void NamesIn(const Operand& operand, std::set<std::string>* names) {
  if (operand.kind == Operand::Kind::kName) names->insert(operand.name);
  for (const auto& element : operand.elements) NamesIn(element, names);
}

std::vector<const Program*> Linked(const Program& program) {
  std::vector<const Program*> all = {&program};
  for (const Program* other : program.others) all.push_back(other);
  return all;
}

}  // namespace

Program::Program() = default;
Program::~Program() = default;

std::string_view Program::LineText(uint32_t line) const {
  if (line == 0 || line > line_starts.size()) return {};
  const size_t begin = line_starts[line - 1];
  size_t end = text.find('\n', begin);
  if (end == std::string::npos) end = text.size();
  std::string_view found = std::string_view(text).substr(begin, std::min<size_t>(end - begin, 200));
  while (!found.empty() && (found.front() == ' ' || found.front() == '\t')) found.remove_prefix(1);
  while (!found.empty() && (uint8_t(found.back()) <= ' ')) found.remove_suffix(1);
  return found;
}

const Function* Program::FindFunction(const std::string& name, const Program** owner) const {
  for (const Program* program : Linked(*this)) {
    const auto it = program->function_names.find(name);
    if (it != program->function_names.end() && it->second->defined) {
      *owner = program;
      return it->second;
    }
  }
  return nullptr;
}

Reachable Reach(const Program& program, const Function& kernel) {
  Reachable reach;
  std::set<const Function*> seen = {&kernel};
  reach.functions.emplace_back(&kernel, &program);
  reach.direct.insert(&kernel);
  bool indirect = false;
  uint32_t dynamic_align = 16;
  std::vector<const SharedVar*> dynamic;
  auto place = [&](const SharedVar* var) {
    if (reach.shared.offsets.count(var) != 0) return;
    if (var->external) {
      dynamic_align = std::max(dynamic_align, var->align);
      dynamic.push_back(var);
      reach.shared.offsets[var] = 0;
      return;
    }
    const uint64_t at = (uint64_t(reach.shared.static_bytes) + var->align - 1) / var->align * var->align;
    const uint64_t end = std::min<uint64_t>(at + var->size, UINT32_MAX / 2);
    reach.shared.offsets[var] = uint32_t(std::min<uint64_t>(at, end));
    reach.shared.static_bytes = uint32_t(end);
  };
  for (size_t i = 0; i < reach.functions.size(); ++i) {
    const Function* function = reach.functions[i].first;
    const Program* owner = reach.functions[i].second;
    const bool direct = reach.direct.count(function) != 0;
    for (const auto& var : function->shared) place(var.get());
    std::set<std::string> names;
    for (const auto& instruction : function->code) {
      for (const auto& operand : instruction.operands) NamesIn(operand, &names);
      if (instruction.opcode != "call") continue;
      for (const auto& operand : instruction.operands) {
        if (operand.kind == Operand::Kind::kReg && !indirect) {
          indirect = true;
          for (const Program* linked : Linked(program)) {
            for (const Function* taken : linked->address_taken) {
              if (taken->defined && !taken->entry && seen.insert(taken).second) {
                reach.functions.emplace_back(taken, linked);
              }
            }
          }
        }
        if (operand.kind != Operand::Kind::kName) continue;
        const Program* home = nullptr;
        const Function* callee = owner->FindFunction(operand.name, &home);
        if (callee == nullptr || callee->entry) continue;
        if (seen.insert(callee).second) reach.functions.emplace_back(callee, home);
        if (direct && reach.direct.insert(callee).second) {
          // It may have been seen as an indirect one; what it calls must be looked at again.
          for (size_t k = 0; k <= i; ++k) {
            if (reach.functions[k].first == callee) {
              reach.functions.emplace_back(callee, home);
              break;
            }
          }
        }
      }
    }
    for (const auto& name : names) {
      const auto shared = owner->shared_names.find(name);
      if (shared != owner->shared_names.end()) place(shared->second);
    }
  }
  // Those looked at twice are listed once.
  std::set<const Function*> listed;
  std::vector<std::pair<const Function*, const Program*>> unique;
  for (const auto& entry : reach.functions) {
    if (listed.insert(entry.first).second) unique.push_back(entry);
  }
  reach.functions = std::move(unique);
  reach.shared.dynamic_offset = (reach.shared.static_bytes + dynamic_align - 1) / dynamic_align * dynamic_align;
  for (const SharedVar* var : dynamic) reach.shared.offsets[var] = reach.shared.dynamic_offset;
  return reach;
}

std::shared_ptr<const Prepared> Prepare(const Program& program, const Function& kernel) {
  MutexLock lock(&program.mutex);
  auto& cached = program.prepared[kernel.name];
  if (cached != nullptr) return cached;
  auto prepared = std::make_shared<Prepared>();
  prepared->reach = Reach(program, kernel);
  for (const auto& [function, owner] : prepared->reach.functions) {
    auto code = std::make_unique<Code>();
    code->function = function;
    code->program = owner;
    prepared->by_function[function] = code.get();
    prepared->by_address[function->code_address] = code.get();
    prepared->codes.push_back(std::move(code));
  }
  for (const auto& code : prepared->codes) {
    Decoder decoder(prepared.get(), code.get());
    if (decoder.Run()) continue;
    code->unsupported = decoder.error();
    if (prepared->error.empty() && prepared->reach.direct.count(code->function) != 0) {
      prepared->error =
          (code->function == &kernel ? "kernel " : "function ") + code->function->name + ": " + decoder.error();
    }
  }
  cached = prepared;
  return cached;
}

Module::Module() : program_(std::make_unique<Program>()) {}
Module::~Module() = default;

StatusOr<std::unique_ptr<Module>> Module::Parse(std::string_view text) {
  std::unique_ptr<Module> module(new Module);
  Program& program = *module->program_;
  program.text = std::string(text);
  program.line_starts.push_back(0);
  for (size_t i = 0; i < program.text.size(); ++i) {
    if (program.text[i] == '\n') program.line_starts.push_back(uint32_t(i + 1));
  }
  Parser parser(&program);
  bool parsed = false;
  try {
    parsed = parser.Parse();
  } catch (const std::bad_alloc&) {
    return Error("not enough memory to parse the PTX");
  }
  if (!parsed) return Error(parser.error().empty() ? "the PTX is not understood" : parser.error());
  const uint64_t hash = Hash64Of(program.text) & 0xfffffff;
  uint64_t index = 0;
  for (auto& function : program.functions) {
    function->code_address = kCodeWindow + (hash << 20 | (++index & 0xffff) << 4);
  }
  for (auto& kernel : program.kernels) {
    kernel.static_shared_bytes = Reach(program, *program.function_names[kernel.name]).shared.static_bytes;
  }
  return module;
}

std::vector<uint64_t> Module::PlaceFunctions(const std::function<uint64_t(uint64_t)>& place) {
  std::vector<uint64_t> addresses;
  for (auto& function : program_->functions) {
    if (!function->defined || !function->visible || function->entry) continue;
    function->code_address = place(function->code.size());
    addresses.push_back(function->code_address);
  }
  return addresses;
}

uint64_t Module::KernelInstructions(std::string_view kernel) const {
  const auto it = program_->function_names.find(std::string(kernel));
  return it == program_->function_names.end() ? 0 : it->second->code.size();
}

const std::vector<KernelInfo>& Module::kernels() const { return program_->kernels; }
const KernelInfo* Module::FindKernel(std::string_view name) const {
  const auto it = program_->kernel_names.find(std::string(name));
  return it == program_->kernel_names.end() ? nullptr : &program_->kernels[it->second];
}
const std::vector<GlobalInfo>& Module::globals() const { return program_->globals; }
int Module::version_major() const { return program_->version_major; }
int Module::version_minor() const { return program_->version_minor; }
int Module::target() const { return program_->target; }

Status Module::Bind(const SymbolAddresses& addresses) {
  for (const auto& global : program_->globals) {
    if (addresses.count(global.name) == 0) return Error("variable '" + global.name + "' has no address");
  }
  program_->addresses = addresses;
  return OkStatus();
}

void Module::LinkWith(std::vector<const Module*> others) {
  program_->others.clear();
  for (const Module* other : others) {
    if (other != this) program_->others.push_back(other->program_.get());
  }
  for (auto& kernel : program_->kernels) {
    kernel.static_shared_bytes = Reach(*program_, *program_->function_names[kernel.name]).shared.static_bytes;
  }
}

std::string Module::Image(const GlobalInfo& global) const {
  std::string image = global.initial;
  image.resize(global.size, '\0');
  for (const auto& relocation : global.relocations) {
    uint64_t value = 0;
    const auto variable = program_->addresses.find(relocation.symbol);
    const Program* owner = nullptr;
    const Function* function = program_->FindFunction(relocation.symbol, &owner);
    if (variable != program_->addresses.end()) {
      value = variable->second;
    } else if (function != nullptr) {
      value = function->code_address;
    }
    value = (value + uint64_t(relocation.addend)) >> (relocation.shift & 63);
    if (uint64_t(relocation.offset) + relocation.bytes <= image.size()) {
      std::memcpy(&image[relocation.offset], &value, std::min<uint32_t>(relocation.bytes, 8));
    }
  }
  return image;
}

Status Module::Check(std::string_view kernel) const {
  if (FindKernel(kernel) == nullptr) return Error("no kernel '" + std::string(kernel) + "'");
  const auto prepared = Prepare(*program_, *program_->function_names.at(std::string(kernel)));
  return prepared->error.empty() ? OkStatus() : Error(prepared->error);
}

LaunchResult Module::Launch(std::string_view kernel, const LaunchOptions& options) const {
  LaunchResult result;
  const KernelInfo* info = FindKernel(kernel);
  auto invalid = [&](const std::string& what) {
    result.fault = Fault::kInvalidLaunch;
    result.message = "kernel " + std::string(kernel) + ": " + what;
    return result;
  };
  if (info == nullptr) return invalid("not in this module");
  const Dim3 &grid = options.grid, &block = options.block;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535) {
    return invalid("grid dimensions out of range");
  }
  if (block.x == 0 || block.y == 0 || block.z == 0 || block.x > 1024 || block.y > 1024 || block.z > 64 ||
      uint64_t(block.x) * block.y * block.z > info->max_threads) {
    return invalid("block dimensions out of range");
  }
  const uint32_t* required = info->required_block;
  if (required[0] != 0 && (required[0] != block.x || required[1] != block.y || required[2] != block.z)) {
    return invalid("the kernel is compiled for another block size");
  }
  const Dim3& cluster = options.cluster;
  if (cluster.x == 0 || cluster.y == 0 || cluster.z == 0 || cluster.x > kMaxCluster || cluster.y > kMaxCluster ||
      cluster.z > kMaxCluster || cluster.x * cluster.y * cluster.z > kMaxCluster) {
    return invalid("cluster dimensions out of range");
  }
  if (grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || grid.z % cluster.z != 0) {
    return invalid("the grid does not consist of whole clusters");
  }
  const uint32_t* asked = info->required_cluster;
  if (asked[0] != 0 && (asked[0] != cluster.x || asked[1] != cluster.y || asked[2] != cluster.z)) {
    return invalid("the kernel is compiled for another cluster size");
  }
  if (options.params.size() < info->param_bytes) return invalid("parameters missing");
  const auto prepared = Prepare(*program_, *program_->function_names.at(std::string(kernel)));
  if (!prepared->error.empty()) {
    result.fault = Fault::kUnsupported;
    result.message = prepared->error;
    return result;
  }
  const uint64_t shared = uint64_t(prepared->reach.shared.dynamic_offset) + options.dynamic_shared_bytes;
  if (shared > options.max_shared_bytes) return invalid("too much shared memory");

  // Memory of the threads that exist at a time; a hostile or mistaken kernel must not take the process down.
  const uint64_t in_cluster = uint64_t(cluster.x) * cluster.y * cluster.z;
  const uint64_t resident = options.cooperative ? uint64_t(grid.x) * grid.y * grid.z : in_cluster;
  const Code& code = *prepared->codes[0];
  const uint64_t per_thread = sizeof(Thread) + code.frame.size() * 8 + code.frame_bytes;
  if (uint64_t(block.x) * block.y * block.z * per_thread > kMaxThreadMemory / resident) {
    return invalid("the threads need too much memory");
  }

  LaunchState state;
  state.prepared = prepared.get();
  state.kernel = prepared->codes[0].get();
  state.options = &options;
  // Aligned for every access, and a little longer for names at the very end.
  std::vector<uint64_t> params(info->param_bytes / 8 + 4);
  std::memcpy(params.data(), options.params.data(), info->param_bytes);
  state.params = reinterpret_cast<const uint8_t*>(params.data());
  state.param_bytes = info->param_bytes;
  state.shared_total = uint32_t(prepared->reserved_shared ? (shared + 15) / 16 * 16 : shared);
  state.clusters = uint64_t(grid.x) * grid.y * grid.z / in_cluster;
  RunLaunch(&state);
  MutexLock lock(&state.mutex);
  return state.result;
}

}  // namespace cuda_remote::softgpu::ptx
