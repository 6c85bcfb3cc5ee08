// tcgen05 and tensor memory: what the core must know of them.
#pragma once

#include "core.h"

namespace ptxsim {

constexpr uint32_t kTensorLanes = 128, kTensorColumns = 512, kAllocationColumns = 32;

// 128 lanes of 512 columns of 32 bits. Tracked as one linear memory, lane after lane.
struct TensorMemory {
  std::unique_ptr<TrackedMemory> memory;  // made at the first allocation
  uint32_t allocated[kTensorColumns / kAllocationColumns] = {};  // by unit: columns of the allocation that it starts, 1: within one
  bool relinquished = false;
};

// The warp waits until a load of tensor memory takes effect, and repeats its instruction. Returns false.
bool wait_for_load(Warp& w);

// At the exit of a CTA's last warp.
void check_tensor_memory_freed(Cta& cta);

}  // namespace ptxsim
