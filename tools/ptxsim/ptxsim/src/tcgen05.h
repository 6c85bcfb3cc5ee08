// tcgen05 and tensor memory: what the core must know of them.
#pragma once

#include "core.h"

namespace ptxsim {

constexpr uint32_t kTensorLanes = 128, kTensorColumns = 512, kAllocationColumns = 32, kLaneBytes = kTensorColumns * 4;

// 128 lanes of 512 columns of 32 bits. Tracked as one linear memory, lane after lane.
struct TensorMemory {
  std::unique_ptr<TrackedMemory> memory;  // made at the first allocation
  uint32_t allocated[kTensorColumns / kAllocationColumns] = {};  // by unit: columns of the allocation that it starts, 1: within one
  bool relinquished = false;
  // The warp that has come to allocate, or free, with a warp of the peer CTA, for which it waits. The one that comes
  // second does it for both.
  struct Meeting {
    Warp* warp = nullptr;
    uint32_t columns = 0, column = 0;
    bool over = false;
  } allocating, freeing;
};

// Throws if nothing was allocated.
TrackedMemory& tensor_memory(Cta& cta);
// Linear address of a lane's columns, all of them allocated.
uint32_t tensor_place(Cta& cta, uint32_t lane, uint32_t column, uint32_t columns);
uint32_t* tensor_words(Cta& cta, uint32_t lane, uint32_t column, uint32_t columns);

// The warp waits until a load of tensor memory takes effect, and repeats its instruction. Returns false.
bool wait_for_load(Warp& w);

// Throws unless all tcgen05 instructions of a kernel name the same .cta_group.
void check_cta_groups(const Program& program);

// At the exit of a CTA's last warp.
void check_tensor_memory_freed(Cta& cta);

}  // namespace ptxsim
