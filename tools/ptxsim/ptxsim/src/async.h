// What asynchronous copies, stores, reductions and requests share: how they complete, their operands, their reductions.
#pragma once

#include "sync.h"

namespace ptxsim {

// What an operation signals when it takes effect: an mbarrier, or a bulk group of the issuing warp.
struct Completion {
  Mbarrier* barrier = nullptr;
  uint32_t address = 0;
  int lane = 0;
  uint32_t mark = 0;
};
Completion barrier_of(Warp& w, SharedPlace p);
void signal(Warp& w, const Completion& c, uint32_t bytes);
// Accesses through the async proxy that are over when the operation completes, which the lane w.lane issues. reads: of
// what a bulk group reads, which may be waited for apart from its result.
Actor async_actor(Warp& w, const Completion& c, bool reads = false);

// A lane's address operand whose offset stands elsewhere than in the instruction's `imm`.
uint64_t operand_address(Warp& w, Slot slot, bool wide, int lane, int64_t offset);

// The number of a reduction, and of its element type (a CUtensorMapDataType); 0 is a plain copy. Fails where the ISA has
// no such reduction into that memory.
int take_reduction(Decoder& d);
int take_reduction_type(Decoder& d, int reduction, bool shared);
// Moves or reduces `bytes`.
void deliver(int reduction, int type, uint8_t* to, const uint8_t* from, uint32_t bytes);

// Stops where the tensor map at `address` was changed and the warp can not know yet that its CTA has acquired the change.
void check_map_acquired(Warp& w, uint64_t address);
void decode_tensormap_fence(Decoder& d);  // fence.proxy.tensormap::generic; ops_tensormap

// st.async and red.async; ops_remote.
void decode_remote(Decoder& d, bool reduce);

}  // namespace ptxsim
