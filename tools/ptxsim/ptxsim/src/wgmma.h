// wgmma: what the core must know of it.
#pragma once

#include <deque>

#include "core.h"

namespace ptxsim {

// One wgmma.mma_async; it may take effect when all four warps have issued it and those before it have.
struct WgmmaOperation {
  const Instr* in;
  uint64_t a, b;           // descriptors
  bool accumulate;
  int at;                  // the instruction, for reports
  int arrived = 0;
  uint32_t mark;
};

struct Warpgroup {
  std::array<Warp*, 4> warps{};
  std::array<uint64_t, 4> issued{};  // by warp
  uint64_t finished = 0;
  bool scheduled = false;            // the first of `operations` has been handed to the scheduler
  std::deque<WgmmaOperation> operations;
  uint32_t agent = 0;
};

// Whether the instruction may execute: registers that a wgmma still owns must not be touched, and throw; those that a
// tcgen05.ld has yet to fill make the warp wait, as the hardware's scoreboard does.
bool registers_ready(Warp& w, const Instr& in);

}  // namespace ptxsim
