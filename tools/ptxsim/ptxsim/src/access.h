// Address spaces: from an operand's address to host memory, with the checks on the way.
#pragma once

#include "decode.h"

namespace ptxsim {

enum class Space { generic, global, shared, local };  // parameters and constants live in global memory here

struct SharedPlace {
  Cta* cta;
  uint32_t address;  // within the CTA
};

// Which CTA's shared memory a shared or shared::cluster address names.
inline SharedPlace shared_place(Warp& w, uint32_t address) {
  uint32_t rank = address >> kRankShift;
  if (rank == w.cta->rank) return {w.cta, address & kRankMask};
  auto& ctas = w.cta->cluster->ctas;
  if (rank >= ctas.size()) throw SimError(format("shared_bounds: shared address 0x%x names CTA %u of a cluster of %zu", address, rank, ctas.size()));
  return {ctas[rank].get(), address & kRankMask};
}

inline Space resolve(Space space, uint64_t& address) {
  if (space != Space::generic) return space;
  if (address >= kLocalWindow) { address -= kLocalWindow; return Space::local; }
  if (address >= kSharedWindow) { address -= kSharedWindow; return Space::shared; }
  return Space::global;
}

uint8_t* local_place(Warp& w, int lane, uint64_t address, uint32_t n, uint32_t align);

// A lane's address operand: base register (32 or 64 bits) plus the instruction's offset.
inline uint64_t lane_address(Warp& w, const Instr& in, Slot base, bool wide, int lane) {
  return wide ? w.reg<uint64_t>(base)[lane] + in.imm : w.reg<uint32_t>(base)[lane] + static_cast<uint32_t>(in.imm);
}

// The space named by the modifiers, generic if there is none.
Space take_space(Decoder& d);

// The scope named by the modifiers.
inline Scope take_scope(Decoder& d, Scope otherwise) {
  std::string s = d.take_one({"cta", "cluster", "gpu", "sys"});
  return s.empty() ? otherwise : s == "cta" ? kCtaScope : s == "cluster" ? kClusterScope : kGpuScope;
}

}  // namespace ptxsim
