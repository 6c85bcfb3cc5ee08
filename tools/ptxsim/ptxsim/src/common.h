// Small things that every unit needs: the error type, bit casts, the random generator.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptxsim {

constexpr int kLanes = 32;
constexpr uint32_t kFullMask = 0xffffffffu;

// Stops the run. `what()` is the complete report; the machine adds kernel, CTA, warp and PTX line to it.
struct SimError : std::runtime_error {
  explicit SimError(const std::string& text) : std::runtime_error(text) {}
};

std::string format(const char* fmt, ...) __attribute__((format(printf, 1, 2)));

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast between different sizes");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// SplitMix64: one multiply-xor chain a draw, good enough for picking interleavings and fully determined by the seed.
struct Rng {
  uint64_t state;
  explicit Rng(uint64_t seed) : state(seed) {}
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
};

// Bytes that a kernel sees as global memory: aligned as device allocations are.
template <class T>
struct DeviceAllocator {
  using value_type = T;
  DeviceAllocator() = default;
  template <class U> DeviceAllocator(const DeviceAllocator<U>&) {}
  T* allocate(size_t n) {
    void* p = std::aligned_alloc(256, (n * sizeof(T) + 255) / 256 * 256);
    if (!p) throw std::bad_alloc();
    return static_cast<T*>(p);
  }
  void deallocate(T* p, size_t) { std::free(p); }
  template <class U> bool operator==(const DeviceAllocator<U>&) const { return true; }
  template <class U> bool operator!=(const DeviceAllocator<U>&) const { return false; }
};
using DeviceBytes = std::vector<uint8_t, DeviceAllocator<uint8_t>>;

}  // namespace ptxsim
