// What other units need of barriers: finding an mbarrier and completing asynchronous transactions on it.
#pragma once

#include "access.h"

namespace ptxsim {

// The initialised mbarrier at `place`; throws if there is none, or if the warp can not know yet that there is.
Mbarrier& find_mbarrier(Warp& w, SharedPlace place);
// Shared memory that an operand names: 32-bit shared address or 64-bit generic one.
SharedPlace mbarrier_place(Warp& w, uint64_t address, Space space);
// `bytes` of an asynchronous operation have arrived.
void complete_transactions(Machine& machine, Mbarrier& barrier, uint32_t address, int64_t bytes);
// One arrival that an asynchronous mechanism makes (cp.async.mbarrier.arrive, tcgen05.commit).
void arrive_asynchronously(Machine& machine, Mbarrier& barrier, uint32_t address);
// Epoch that bytes get which an operation completing on this mbarrier in its current phase writes or reads.
inline uint32_t completion_epoch(const Mbarrier& b) { return epoch(b.agent, b.phase + 1); }

}  // namespace ptxsim
