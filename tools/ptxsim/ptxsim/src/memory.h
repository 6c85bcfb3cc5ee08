// Memories and what is known about every byte of shared and tensor memory.
//
// Order between warps is tracked with vector clocks. An *agent* is a warp, or a channel through which asynchronous
// operations complete (an mbarrier, a warp's bulk groups, a warpgroup's wgmma groups). An *epoch* is (agent, clock).
// Each byte remembers the epoch of its last write and of the reads since; an access is ordered after
// an epoch when the accessing warp's clock has seen it. `Clock::fenced` is the part of `seen` that a
// fence.proxy.async lies behind of: the async proxy may only rely on that.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "common.h"

namespace ptxsim {

enum Check : uint32_t {
  kGlobalBounds = 1u << 0,
  kSharedBounds = 1u << 1,
  kLocalBounds = 1u << 2,
  kAlignment = 1u << 3,
  kUninitialized = 1u << 4,
  kRace = 1u << 5,
  kAsyncEarly = 1u << 6,
  kProxyFence = 1u << 7,
  kMbarrier = 1u << 8,
  kDeadlock = 1u << 9,
  kDescriptor = 1u << 10,
  kSharedLimit = 1u << 11,
  kInFlightRegisters = 1u << 12,
  kConvergence = 1u << 13,
  kBarrier = 1u << 14,
  kTensorBounds = 1u << 15,
  kTensorLeak = 1u << 16,
  kScaleFactors = 1u << 17,
  kCtaGroup = 1u << 18,
  kRegisters = 1u << 19,
};
extern const char* const kCheckNames[];  // in bit order, ends with nullptr

// What a report of an access starts with that there is no memory for: it stops the run even where it is not checked.
const char* bounds_prefix(uint32_t checks, Check bounds);

constexpr int kEpochClockBits = 22;
constexpr uint32_t kMaxAgents = (1u << (32 - kEpochClockBits)) - 1;  // the last number marks a set of readers

inline uint32_t epoch(uint32_t agent, uint32_t clock) { return agent << kEpochClockBits | clock; }
inline uint32_t epoch_agent(uint32_t e) { return e >> kEpochClockBits; }
inline uint32_t epoch_clock(uint32_t e) { return e & ((1u << kEpochClockBits) - 1); }

struct Clock {
  std::vector<uint32_t> seen, fenced;
  void join(const Clock& other);
  void see(uint32_t agent, uint32_t clock, bool async_proxy);  // a completion; what the async proxy did needs no proxy fence
  bool has_seen(uint32_t e) const { return epoch_agent(e) < seen.size() && epoch_clock(e) <= seen[epoch_agent(e)]; }
  bool has_fenced(uint32_t e) const { return epoch_agent(e) < fenced.size() && epoch_clock(e) <= fenced[epoch_agent(e)]; }
};

// The agents of one cluster.
struct Agents {
  struct Agent {
    std::string name;
    bool asynchronous;  // writes through the async proxy
  };
  std::vector<Agent> list;
  uint32_t add(const std::string& name, bool asynchronous);
};

// Who accesses tracked memory and what it may rely on.
struct Actor {
  uint32_t tag;        // epoch that the bytes will remember
  const Clock* clock;  // of the warp that issued the access
  bool async_proxy = false;
  bool strong = false;  // atomic, volatile, relaxed or stronger: no race with another strong access
  int line = 0;
  bool in_order = false;  // operations of the tag's agent follow one another
};

class TrackedMemory {
 public:
  // `kind` names the memory in reports; `bounds` is the check for accesses outside.
  TrackedMemory(const char* kind, Check bounds, uint32_t first, uint32_t end, const Agents* agents, uint32_t checks);
  // Where `n` bytes at `address` live. Throws unless they lie within [first, end) and `address` is a multiple of `align`.
  uint8_t* at(uint32_t address, uint32_t n, uint32_t align) {
    if (((address & (align - 1)) != 0) | (address < first_) | (address + n > end_)) reject(address, n, align);
    return bytes_.data() + (address - first_);
  }
  bool contains(uint32_t address, uint32_t n) const { return address >= first_ && address + n <= end_; }
  void note_read(uint32_t address, uint32_t n, const Actor& actor) { if (tracked_) read(address - first_, n, actor); }
  void note_write(uint32_t address, uint32_t n, const Actor& actor) { if (tracked_) write(address - first_, n, actor); }
  // Bytes that hold an mbarrier are for mbarrier operations only.
  void guard(uint32_t address, uint32_t n, bool on);
  // Whether anything wrote to any of these bytes; true when that is not tracked.
  bool written(uint32_t address, uint32_t n) const;

 private:
  void reject(uint32_t address, uint32_t n, uint32_t align);
  void read(uint32_t offset, uint32_t n, const Actor& actor);
  void write(uint32_t offset, uint32_t n, const Actor& actor);
  void check_order(uint32_t offset, const Actor& actor, bool writing) const;
  void check_readers(uint32_t offset, const Actor& actor) const;
  uint32_t add_reader(uint32_t readers, const Actor& actor);
  uint32_t join_readers(uint32_t readers, const Actor& actor);
  [[noreturn]] void report(uint32_t offset, const char* what, uint32_t other, uint32_t other_line) const;

  const char* kind_;
  Check bounds_;
  uint32_t first_, end_;
  const Agents* agents_;
  uint32_t checks_;
  bool tracked_;
  std::vector<uint8_t> bytes_;
  std::vector<uint32_t> writer_, reader_;        // epochs; a reader of agent kMaxAgents indexes sets_
  std::vector<uint8_t> strong_;                  // bit 0: the last write was strong, bit 1: all reads since were, bit 2: guarded
  std::vector<uint32_t> writer_line_, reader_line_;
  std::vector<std::vector<uint32_t>> sets_;
  std::map<std::vector<uint32_t>, uint32_t> set_numbers_;
  uint32_t last_readers_ = 0, last_tag_ = 0, last_set_ = 0;
};

class GlobalMemory {
 public:
  struct Buffer {
    uint64_t begin, end;
    std::string name;
  };
  explicit GlobalMemory(uint32_t checks) : checks_(checks) {}
  void add(const void* data, uint64_t bytes, const std::string& name);
  // Host pointer for `n` bytes at `address`; throws unless they lie within one buffer and `address` is aligned. With the
  // bounds check off, accesses outside read zeros and write nowhere.
  uint8_t* at(uint64_t address, uint32_t n, uint32_t align) {
    if ((address & (align - 1)) != 0) misaligned(address, align);
    if (address >= last_->begin && address + n <= last_->end) return reinterpret_cast<uint8_t*>(address);
    return find(address, n);
  }

 private:
  uint8_t* find(uint64_t address, uint32_t n);
  void misaligned(uint64_t address, uint32_t align) const;
  uint32_t checks_;
  std::vector<Buffer> buffers_;  // sorted by address
  Buffer none_{1, 0, ""};
  const Buffer* last_ = &none_;
  std::vector<uint8_t> scratch_;  // what an access outside of every buffer gets when that is not checked
};

}  // namespace ptxsim
