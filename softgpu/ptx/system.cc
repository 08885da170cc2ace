// SPDX-License-Identifier: Apache-2.0
// Functions that the device runtime offers to kernels: vprintf, __assertfail, malloc, free, cudaGraphSetConditional.
#include <algorithm>
#include <cstdio>

#include "proto/threads/mutex.h"
#include "softgpu/ptx/machine.h"

namespace cuda_remote::softgpu::ptx {
namespace {

constexpr size_t kMaxString = 1 << 20;
constexpr int kMaxWidth = 4096;

// The i-th argument of the call as a number.
uint64_t Argument(const Thread* t, const CallInfo& call, size_t i) {
  if (i >= call.args.size()) return 0;
  const Passed& arg = call.args[i];
  if (arg.slot >= 0) return t->r[arg.slot];
  uint64_t value = 0;
  std::memcpy(&value, t->local.data() + t->frames.back().local_base + arg.offset, std::min<uint32_t>(arg.bytes, 8));
  return value;
}

void GiveResult(Thread* t, const CallInfo& call, uint64_t value) {
  if (call.results.empty()) return;
  const Passed& result = call.results[0];
  if (result.slot >= 0) {
    t->r[result.slot] = value;
  } else {
    std::memcpy(t->local.data() + t->frames.back().local_base + result.offset, &value,
                std::min<uint32_t>(result.bytes, 8));
  }
}

bool ReadString(Thread* t, const Op* op, uint64_t address, std::string* out) {
  out->clear();
  while (out->size() < kMaxString) {
    const uint8_t* at = Pointer<Where::kGeneric>(t, op, address++, 1, false);
    if (at == nullptr) return false;
    if (*at == 0) return true;
    out->push_back(char(*at));
  }
  return true;
}

// Walks over the argument buffer of vprintf.
class Args {
 public:
  Args(Thread* t, const Op* op, uint64_t at) : t_(t), op_(op), at_(at) {}
  template <class T>
  bool Next(T* value) {
    at_ = (at_ + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    const uint8_t* from = Pointer<Where::kGeneric>(t_, op_, at_, sizeof(T), false);
    if (from == nullptr) return false;
    std::memcpy(value, from, sizeof(T));
    at_ += sizeof(T);
    return true;
  }

 private:
  Thread* t_;
  const Op* op_;
  uint64_t at_;
};

template <class T>
void Append(std::string* out, const std::string& spec, T value) {
  char small[256];
  const int length = std::snprintf(small, sizeof small, spec.c_str(), value);
  if (length < 0) return;
  if (size_t(length) < sizeof small) {
    out->append(small, size_t(length));
    return;
  }
  std::string large(size_t(length) + 1, '\0');
  std::snprintf(&large[0], large.size(), spec.c_str(), value);
  out->append(large.c_str(), size_t(length));
}

// A number in the format, or the next argument for '*'.
bool Number(const std::string& format, size_t* at, Args* args, int* value) {
  if (*at < format.size() && format[*at] == '*') {
    ++*at;
    int32_t given = 0;
    if (!args->Next(&given)) return false;
    *value = std::max(-kMaxWidth, std::min(kMaxWidth, int(given)));
    return true;
  }
  int number = 0;
  while (*at < format.size() && format[*at] >= '0' && format[*at] <= '9') {
    number = std::min(kMaxWidth, number * 10 + (format[(*at)++] - '0'));
  }
  *value = number;
  return true;
}

const Op* Assert(const Op* op, Thread* t, const CallInfo& call) {
  std::string message, file, function;
  if (!ReadString(t, op, Argument(t, call, 0), &message) || !ReadString(t, op, Argument(t, call, 1), &file) ||
      !ReadString(t, op, Argument(t, call, 3), &function)) {
    return nullptr;
  }
  const Block& block = *t->block;
  char place[160];
  std::snprintf(place, sizeof place, "block: [%u,%u,%u], thread: [%u,%u,%u]", block.ctaid[0], block.ctaid[1],
                block.ctaid[2], t->tid[0], t->tid[1], t->tid[2]);
  const std::string text = file + ":" + std::to_string(uint32_t(Argument(t, call, 2))) + ": " + function + ": " +
                           place + " Assertion `" + message + "` failed.";
  LaunchState* launch = t->block->launch;
  {
    MutexLock lock(&launch->mutex);
    const auto& print = launch->options->complain ? launch->options->complain : launch->options->print;
    if (print) print(text + "\n");
  }
  return Raise(t, op, Fault::kAssert, text);
}

}  // namespace

bool FormatPrintf(Thread* t, const Op* op, uint64_t format_address, uint64_t args_address, std::string* out,
                  int* count) {
  std::string format;
  if (!ReadString(t, op, format_address, &format)) return false;
  Args args(t, op, args_address);
  size_t at = 0;
  *count = 0;
  while (at < format.size()) {
    const char c = format[at++];
    if (c != '%' || at >= format.size()) {
      out->push_back(c);
      continue;
    }
    std::string flags;
    while (at < format.size() && std::strchr("-+ #0", format[at]) != nullptr) {
      if (flags.size() < 8) flags.push_back(format[at]);
      ++at;
    }
    int width = 0, precision = -1;
    if (!Number(format, &at, &args, &width)) return false;
    if (width < 0) {
      flags.push_back('-');
      width = -width;
    }
    if (at < format.size() && format[at] == '.') {
      ++at;
      if (!Number(format, &at, &args, &precision)) return false;
    }
    bool wide = false;
    while (at < format.size() && std::strchr("hlLzjtq", format[at]) != nullptr) {
      if (format[at] != 'h') wide = true;
      ++at;
    }
    if (at >= format.size()) break;
    if (format[at] != '%') ++*count;
    const char conversion = format[at++];
    std::string spec = "%" + flags;
    if (width > 0) spec += std::to_string(width);
    if (precision >= 0) spec += "." + std::to_string(precision);
    switch (conversion) {
      case '%':
        out->push_back('%');
        break;
      case 'd':
      case 'i':
      case 'u':
      case 'x':
      case 'X':
      case 'o': {
        int64_t value = 0;
        if (wide) {
          if (!args.Next(&value)) return false;
        } else {
          int32_t narrow = 0;
          if (!args.Next(&narrow)) return false;
          value = conversion == 'd' || conversion == 'i' ? narrow : int64_t(uint32_t(narrow));
        }
        Append(out, spec + "ll" + conversion, static_cast<long long>(value));
        break;
      }
      case 'c': {
        int32_t value = 0;
        if (!args.Next(&value)) return false;
        if (width == 0) {
          out->push_back(char(value));  // a zero byte too
        } else {
          Append(out, spec + "c", int(value));
        }
        break;
      }
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G':
      case 'a':
      case 'A': {
        double value = 0;
        if (!args.Next(&value)) return false;
        Append(out, spec + conversion, value);
        break;
      }
      case 's': {
        uint64_t address = 0;
        std::string text = "(null)";
        if (!args.Next(&address)) return false;
        if (address != 0 && !ReadString(t, op, address, &text)) return false;
        Append(out, spec + "s", text.c_str());
        break;
      }
      case 'p': {
        uint64_t value = 0;
        if (!args.Next(&value)) return false;
        Append(out, spec + "p", reinterpret_cast<void*>(value));
        break;
      }
      default:  // unknown: as it stands
        out->push_back('%');
        out->push_back(conversion);
        break;
    }
    if (out->size() > 4 * kMaxString) break;
  }
  return true;
}

const Op* RunSystemCall(const Op* op, Thread* t, const CallInfo& call) {
  LaunchState* launch = t->block->launch;
  switch (call.system) {
    case SystemCall::kPrintf: {
      std::string text;
      int count = -1;  // what CUDA's printf returns: how many arguments it took, -1 without a format
      const uint64_t format = Argument(t, call, 0);
      if (format != 0 && !FormatPrintf(t, op, format, Argument(t, call, 1), &text, &count)) return nullptr;
      if (launch->options->print) {
        MutexLock lock(&launch->mutex);
        launch->options->print(text);
      }
      GiveResult(t, call, uint32_t(count));
      return op + 1;
    }
    case SystemCall::kAssert:
      return Assert(op, t, call);
    case SystemCall::kMalloc: {
      const auto& allocate = launch->options->device_malloc;
      GiveResult(t, call, allocate ? allocate(Argument(t, call, 0)) : 0);
      return op + 1;
    }
    case SystemCall::kFree: {
      const auto& release = launch->options->device_free;
      const uint64_t address = Argument(t, call, 0);
      if (release && address != 0) release(address);
      return op + 1;
    }
    case SystemCall::kSetConditional: {
      const auto& set = launch->options->set_conditional;
      if (set) set(Argument(t, call, 0), uint32_t(Argument(t, call, 1)));
      return op + 1;
    }
    default:
      return Raise(t, op, Fault::kUnsupported, "unknown system function");
  }
}

}  // namespace cuda_remote::softgpu::ptx
