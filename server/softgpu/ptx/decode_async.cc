// Asynchronous copies, carried out at once.
#include "server/softgpu/ptx/decoder.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// [a + imm] in shared memory from [b + c's constant]; n bytes, more[0] the number of bytes to read, the rest zero.
const Op* CopyAsync(const Op* op, uint64_t* r, Thread* t) {
  uint32_t bytes = op->n, read = op->n;
  if (op->more[0] >= 0) read = std::min<uint32_t>(bytes, uint32_t(r[op->more[0]]));
  uint8_t* to = Pointer<Where::kShared>(t, op, r[op->a] + uint64_t(op->imm), bytes, true);
  if (to == nullptr) return nullptr;
  if (read != 0) {
    const uint8_t* from = Pointer<Where::kGlobal>(t, op, r[op->b] + r[op->c], bytes, false);
    if (from == nullptr) return nullptr;
    std::memcpy(to, from, read);
  }
  std::memset(to + read, 0, bytes - read);
  return op + 1;
}

bool DecodeCpAsync(Decoder& d) {
  if (!d.Has("async") || d.Has("bulk") || d.Has("reduce") || d.Has("mbarrier")) return d.Unsupported();
  if (d.Has("commit_group") || d.Has("wait_group") || d.Has("wait_all")) return true;
  if (!d.Allow("async ca cg shared shared::cta shared::cluster global L2::cache_hint L2::64B L2::128B L2::256B") ||
      !d.Operands(3, 5)) {
    return false;
  }
  Decoder::Address to, from;
  if (!d.ResolveAddress(d.in().operands[0], Where::kShared, false, &to) ||
      !d.ResolveAddress(d.in().operands[1], Where::kGlobal, false, &from)) {
    return false;
  }
  const Operand& size = d.in().operands[2];
  if (size.kind != Operand::Kind::kImm || (size.bits != 4 && size.bits != 8 && size.bits != 16)) {
    return d.Unsupported();
  }
  const size_t extra = d.in().operands.size() - 3 - (d.Has("L2::cache_hint") ? 1 : 0);
  if (extra > 1) return d.Unsupported();
  const int32_t read = extra == 1 ? d.Src(3, Type::kU32) : -1;
  const int32_t offset = d.Const(uint64_t(from.offset));
  const int32_t* more = d.List({read});
  Op& op = d.Emit(CopyAsync, 0, to.slot, from.slot, offset);
  op.imm = to.offset;
  op.n = uint16_t(size.bits);
  op.more = more;
  op.cache = d.NextCache();
  return true;
}

}  // namespace

void AddAsyncOps(DecodeTable* table) { (*table)["cp"] = DecodeCpAsync; }

}  // namespace cuda_remote::softgpu::ptx
