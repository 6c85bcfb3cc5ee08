#include "memory.h"

#include <algorithm>

namespace ptxsim {

const char* bounds_prefix(uint32_t checks, Check bounds) {
  if (!(checks & bounds)) return "can not carry on: ";
  return bounds == kLocalBounds ? "local_bounds: " : bounds == kSharedBounds ? "shared_bounds: " : "tensor_bounds: ";
}

TrackedMemory::TrackedMemory(const char* kind, Check bounds, uint32_t first, uint32_t end, uint32_t unit, const Clusters* clusters, uint32_t cluster, uint32_t checks)
    : kind_(kind), bounds_(bounds), first_(first), end_(end), unit_(unit), checks_(checks), tracked_(checks & (kUninitialized | kOrderChecks)),
      history_(tracked_ ? (end - first) / unit : 0, false), rules_(kind, checks, clusters, cluster, unit, bounds == kTensorBounds) {
  uint32_t size = end - first;
  // What nothing wrote must not pass for a sensible value: NaN in float32, far out of range as an integer.
  static const uint8_t poison[] = {0xad, 0xde, 0xff, 0x7f};
  bytes_.resize(size);
  for (uint32_t i = 0; i < size; ++i) bytes_[i] = poison[i % 4];
}

void TrackedMemory::reject(uint32_t address, uint32_t n, uint32_t align) {
  if (address & (align - 1)) {
    if (checks_ & kAlignment) throw SimError(format("alignment: %s address 0x%x is not a multiple of %u", kind_, address, align));
    if (contains(address, n)) return;
  }
  throw SimError(format("%s%u bytes at %s address 0x%x, outside the CTA's [0x%x, 0x%x)", bounds_prefix(checks_, bounds_), n, kind_, address, first_, end_));
}

void TrackedMemory::guard(uint32_t address, uint32_t n, bool on) {
  if (!tracked_) return;
  for (size_t i = unit_of(address), end = i + units(address, n); i < end; ++i) {
    if (on) history_.flags[i] |= Flags::guarded;
    else history_.flags[i] &= static_cast<uint8_t>(~Flags::guarded);
  }
}

void TrackedMemory::forget(uint32_t address, uint32_t n) {
  if (!tracked_) return;
  std::fill_n(history_.writer.begin() + static_cast<long>(unit_of(address)), units(address, n), 0);
  std::fill_n(history_.reader.begin() + static_cast<long>(unit_of(address)), units(address, n), 0);
}

bool TrackedMemory::written(uint32_t address, uint32_t n) const {
  if (!tracked_) return true;
  for (size_t i = unit_of(address), end = i + units(address, n); i < end; ++i)
    if (history_.writer[i]) return true;
  return false;
}

GlobalMemory::GlobalMemory(uint32_t checks, Stream& stream)
    : checks_(checks), tracked_(checks & (kOrderChecks & ~kTensorFence)), stream_(stream) {
  stream.rules.start_launch(checks, static_cast<uint32_t>(stream.clusters.size()));
}

void GlobalMemory::add(const void* data, uint64_t bytes, const std::string& name, bool tracked) {
  uint64_t begin = reinterpret_cast<uint64_t>(data);
  if (bytes == 0) return;
  buffers_.push_back({begin, begin + bytes, name, tracked});
  std::sort(buffers_.begin(), buffers_.end(), [](const Buffer& a, const Buffer& b) { return a.begin < b.begin; });
  last_ = &none_;
}

void GlobalMemory::misaligned(uint64_t address, uint32_t align) const {
  if (checks_ & kAlignment)
    throw SimError(format("alignment: global address 0x%llx is not a multiple of %u", static_cast<unsigned long long>(address), align));
}

void GlobalMemory::note(uint64_t address, uint32_t n, const Actor& actor, bool writing) {
  while (n) {
    uint64_t number = address / Stream::kPage, offset = address % Stream::kPage;
    uint32_t here = static_cast<uint32_t>(std::min<uint64_t>(n, Stream::kPage - offset));
    if (number != last_number_) {
      auto& page = stream_.pages[number];
      if (!page) page = std::make_unique<History>(Stream::kPage, true);
      last_number_ = number;
      last_page_ = page.get();
    }
    if (writing) stream_.rules.write(*last_page_, address - offset, offset, here, actor);
    else stream_.rules.read(*last_page_, address - offset, offset, here, actor);
    address += here;
    n -= here;
  }
}

uint8_t* GlobalMemory::find(uint64_t address, uint32_t n) {
  auto it = std::upper_bound(buffers_.begin(), buffers_.end(), address, [](uint64_t a, const Buffer& b) { return a < b.begin; });
  // Buffers may be views of one another: any that holds the whole access will do.
  for (auto b = it; b != buffers_.begin();) {
    --b;
    if (address >= b->begin && address + n <= b->end) { last_ = &*b; return reinterpret_cast<uint8_t*>(address); }
  }
  if (checks_ & kGlobalBounds) {
    std::string near = "no buffer lies below";
    if (it != buffers_.begin()) {
      const Buffer& b = *(it - 1);
      near = format("nearest: %s of %llu bytes, offset %lld", b.name.c_str(), static_cast<unsigned long long>(b.end - b.begin),
                    static_cast<long long>(address - b.begin));
    }
    throw SimError(format("global_bounds: %u bytes at global address 0x%llx, outside every buffer (%s)", n,
                          static_cast<unsigned long long>(address), near.c_str()));
  }
  last_ = &none_;
  scratch_.assign(n, 0);
  return scratch_.data();
}

}  // namespace ptxsim
