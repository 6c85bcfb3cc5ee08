// Approximate functions with the errors that the PTX ISA allows (accuracy "chip"): results are displaced by as much as
// the documented bound, in a way that depends on the input alone, and are exact otherwise.
#include "ops_approximate.h"

#include <cmath>

#include "numeric.h"

namespace ptxsim {
namespace {

double value(Approximate f, double x) {
  switch (f) {
    case Approximate::ex2: return std::exp2(x);
    case Approximate::lg2: return std::log2(x);
    case Approximate::rcp: return 1 / x;
    case Approximate::sqrt: return std::sqrt(x);
    case Approximate::rsqrt: return 1 / std::sqrt(x);
    case Approximate::sin: return std::sin(x);
    case Approximate::cos: return std::cos(x);
    default: return std::tanh(x);
  }
}

// The largest error of f(x) = y that sections 9.7.3 and 9.7.4 allow.
double bound(Approximate f, ApproximateType type, double x, double y) {
  auto ulps = [&](int n) { return std::ldexp(n, std::max(std::ilogb(y), -126) - 23); };
  bool f16 = type == ApproximateType::f16;
  if (type != ApproximateType::f32) return f == Approximate::ex2 ? y * std::exp2(f16 ? -9.9 : -7) : std::exp2(f16 ? -10.987 : -8);
  switch (f) {
    case Approximate::ex2: return ulps(2);
    case Approximate::rcp: return ulps(1);
    case Approximate::lg2: return std::exp2(-22) * (x > 0.5 && x < 2 ? 1 : std::fabs(y));
    case Approximate::sqrt: return std::exp2(-23) * y;
    case Approximate::rsqrt: return std::exp2(-22.9) * y;
    case Approximate::tanh: return std::exp2(-11) * std::fabs(y);
    default: return std::exp2(std::fabs(x) <= 2 * M_PI ? -20.5 : -14.7);
  }
}

// A number in [-1, 1] that the bits of the input choose.
double displacement(Approximate f, uint32_t bits) {
  uint64_t h = (bits + (static_cast<uint64_t>(f) << 32) + 1) * 0x9e3779b97f4a7c15ull;
  h = (h ^ (h >> 31)) * 0xbf58476d1ce4e5b9ull;
  return static_cast<double>(static_cast<int64_t>(h ^ (h >> 29))) / 9223372036854775808.0;
}

// The bits of f of the number with these bits.
uint32_t approximated(Approximate f, ApproximateType type, bool ftz, uint32_t bits) {
  auto load = [&](uint32_t b) { return type == ApproximateType::f32 ? from_bits(b) : type == ApproximateType::f16 ? f16_to_float(static_cast<uint16_t>(b)) : bf16_to_float(static_cast<uint16_t>(b)); };
  auto store = [&](double v) -> uint32_t {
    float r = ftz ? flush(static_cast<float>(v)) : static_cast<float>(v);
    return type == ApproximateType::f32 ? to_bits(r) : type == ApproximateType::f16 ? float_to_f16(r) : float_to_bf16(r);
  };
  double x = ftz ? flush(load(bits)) : load(bits), y = value(f, x);
  uint32_t exact = store(y);
  // Zeros, infinities and NaN are listed as exact, and so is 2^0.
  if (y == 0 || !std::isfinite(y) || !std::isfinite(load(exact)) || x == 0) return exact;
  double most = bound(f, type, x, y);
  uint32_t displaced = store(y + displacement(f, bits) * most);
  bool limited = f == Approximate::tanh || f == Approximate::sin || f == Approximate::cos;
  return std::fabs(load(displaced) - y) > most || (limited && std::fabs(load(displaced)) > 1) ? exact : displaced;
}

// in.imm: the exact handler; in.kind: function | type << 4 | ftz << 8; in.size: bytes of the registers
void approximate(Warp& w, const Instr& in, uint32_t mask) {
  if (!w.machine->launch.chip_accuracy) return reinterpret_cast<Handler>(in.imm)(w, in, mask);
  Approximate f = static_cast<Approximate>(in.kind & 15);
  ApproximateType type = static_cast<ApproximateType>(in.kind >> 4 & 15);
  bool ftz = in.kind >> 8;
  uint32_t bits = type == ApproximateType::f32 ? 32 : 16, low = type == ApproximateType::f32 ? ~0u : 0xffffu;
  for (int l = 0; l < kLanes; ++l) {
    if (!(mask >> l & 1)) continue;
    uint32_t x = 0, y = 0;
    std::memcpy(&x, w.file.data() + in.a[1] + l * in.size, static_cast<size_t>(in.size));
    for (uint32_t at = 0; at < static_cast<uint32_t>(8 * in.size); at += bits) y |= approximated(f, type, ftz, x >> at & low) << at;
    std::memcpy(w.file.data() + in.a[0] + l * in.size, &y, static_cast<size_t>(in.size));
  }
}

}  // namespace

void allow_errors(Decoder& d, Approximate f, const Type& t, bool ftz) {
  ApproximateType type = t.name == "f32" ? ApproximateType::f32 : t.name[0] == 'f' ? ApproximateType::f16 : ApproximateType::bf16;
  d.in.kind = static_cast<int>(f) | static_cast<int>(type) << 4 | ftz << 8;
  d.in.size = t.bytes;
  d.in.imm = reinterpret_cast<uint64_t>(d.in.fn);
  d.in.fn = approximate;
}

}  // namespace ptxsim
