// Memories: where bytes live, and the histories of accesses that order.h judges.
#pragma once

#include "order.h"

namespace ptxsim {

// What a report of an access starts with that there is no memory for: it stops the run even where it is not checked.
const char* bounds_prefix(uint32_t checks, Check bounds);

// Shared or tensor memory of a CTA.
class TrackedMemory {
 public:
  // `kind` names the memory in reports; `bounds` is the check for accesses outside; `unit`: bytes that share a history.
  TrackedMemory(const char* kind, Check bounds, uint32_t first, uint32_t end, uint32_t unit, const Clusters* clusters, uint32_t cluster, uint32_t checks);
  // Where `n` bytes at `address` live. Throws unless they lie within [first, end) and `address` is a multiple of `align`.
  uint8_t* at(uint32_t address, uint32_t n, uint32_t align) {
    if (((address & (align - 1)) != 0) | (address < first_) | (address + n > end_)) reject(address, n, align);
    return bytes_.data() + (address - first_);
  }
  bool contains(uint32_t address, uint32_t n) const { return address >= first_ && address + n <= end_; }
  void note_read(uint32_t address, uint32_t n, const Actor& actor) { if (tracked_) rules_.read(history_, first_, unit_of(address), units(address, n), actor); }
  void note_write(uint32_t address, uint32_t n, const Actor& actor) { if (tracked_) rules_.write(history_, first_, unit_of(address), units(address, n), actor); }
  // Bytes that hold an mbarrier are for mbarrier operations only.
  void guard(uint32_t address, uint32_t n, bool on);
  // As if nothing had been written there.
  void forget(uint32_t address, uint32_t n);
  // Whether anything wrote to any of these bytes; true when that is not tracked.
  bool written(uint32_t address, uint32_t n) const;

 private:
  void reject(uint32_t address, uint32_t n, uint32_t align);
  size_t unit_of(uint32_t address) const { return (address - first_) / unit_; }
  size_t units(uint32_t address, uint32_t n) const { return unit_of(address + n - 1) - unit_of(address) + 1; }

  const char* kind_;
  Check bounds_;
  uint32_t first_, end_, unit_, checks_;
  bool tracked_;
  std::vector<uint8_t> bytes_;
  History history_;
  OrderRules rules_;
};

// What launches leave behind for those that may start before they have ended (see Launch::dependent).
struct Stream {
  static constexpr uint64_t kPage = 1024;
  Clusters clusters{nullptr};   // number 0: what was there before every launch
  std::unordered_map<uint64_t, std::unique_ptr<History>> pages;
  uint32_t settled = 0;         // clusters below have ended when the next launch starts, a dependent one too
  OrderRules rules{"global", 0, &clusters, kAnyCluster, 1, false};
  Stream() = default;
  Stream(const Stream&) = delete;
};

class GlobalMemory {
 public:
  struct Buffer {
    uint64_t begin, end;
    std::string name;
    bool tracked;
  };
  GlobalMemory(uint32_t checks, Stream& stream);
  void add(const void* data, uint64_t bytes, const std::string& name, bool tracked = true);
  // Host pointer for `n` bytes at `address`; throws unless they lie within one buffer and `address` is aligned. With the
  // bounds check off, accesses outside read zeros and write nowhere.
  uint8_t* at(uint64_t address, uint32_t n, uint32_t align) {
    if ((address & (align - 1)) != 0) misaligned(address, align);
    if (address >= last_->begin && address + n <= last_->end) return reinterpret_cast<uint8_t*>(address);
    return find(address, n);
  }
  // After at() has found the place.
  void note_read(uint64_t address, uint32_t n, const Actor& actor) { if (tracked_ && last_->tracked) note(address, n, actor, false); }
  void note_write(uint64_t address, uint32_t n, const Actor& actor) { if (tracked_ && last_->tracked) note(address, n, actor, true); }

 private:
  uint8_t* find(uint64_t address, uint32_t n);
  void misaligned(uint64_t address, uint32_t align) const;
  void note(uint64_t address, uint32_t n, const Actor& actor, bool writing);
  uint32_t checks_;
  bool tracked_;
  Stream& stream_;
  std::vector<Buffer> buffers_;  // sorted by address
  Buffer none_{1, 0, "", false};
  const Buffer* last_ = &none_;
  uint64_t last_number_ = ~0ull;
  History* last_page_ = nullptr;
  std::vector<uint8_t> scratch_;  // what an access outside of every buffer gets when that is not checked
};

}  // namespace ptxsim
