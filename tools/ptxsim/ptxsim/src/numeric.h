// Number formats of the PTX data types, one element at a time. Rounding is to nearest even unless a name says otherwise.
#pragma once

#include <cmath>

#include "common.h"

namespace ptxsim {

inline float from_bits(uint32_t b) { return bit_cast<float>(b); }
inline uint32_t to_bits(float f) { return bit_cast<uint32_t>(f); }
inline bool is_nan(float f) { return f != f; }

// Subnormals to zero of the same sign (`.ftz`).
inline float flush(float f) {
  uint32_t b = to_bits(f);
  return (b & 0x7f800000u) == 0 ? from_bits(b & 0x80000000u) : f;
}

// stochastic: away from zero where adding random bits to the discarded ones carries
enum class Round { nearest, zero, down, up, away, stochastic };

// A binary floating-point format narrower than float32.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool has_inf;        // exponent all ones is Inf/NaN as in IEEE 754
  uint32_t nan;        // canonical NaN, without sign; 0: the format has no NaN
  uint32_t max_finite; // largest finite magnitude
};

constexpr Format kF16{5, 10, 15, true, 0x7fff, 0x7bff};
constexpr Format kBf16{8, 7, 127, true, 0x7fff, 0x7f7f};
constexpr Format kTf32{8, 10, 127, true, 0x3ffff, 0x3fbff};  // in a register 13 more bits follow
constexpr Format kE4m3{4, 3, 7, false, 0x7f, 0x7e};
constexpr Format kE5m2{5, 2, 15, true, 0x7f, 0x7b};
constexpr Format kE2m1{2, 1, 1, false, 0, 0x7};
constexpr Format kE3m2{3, 2, 3, false, 0, 0x1f};
constexpr Format kE2m3{2, 3, 1, false, 0, 0x1f};

inline uint32_t sign_bit(const Format& f) { return 1u << (f.exponent_bits + f.mantissa_bits); }

// Exact value of a narrow float.
inline float decode(const Format& f, uint32_t bits) {
  uint32_t sign = bits & sign_bit(f);
  uint32_t magnitude = bits & (sign_bit(f) - 1);
  uint32_t exponent = magnitude >> f.mantissa_bits;
  uint32_t mantissa = magnitude & ((1u << f.mantissa_bits) - 1);
  uint32_t top = (1u << f.exponent_bits) - 1;
  float value;
  if (f.has_inf && exponent == top) {
    value = mantissa ? from_bits(0x7fffffffu) : from_bits(0x7f800000u);
  } else if (f.nan && !f.has_inf && magnitude == f.nan) {
    value = from_bits(0x7fffffffu);
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), 1 - f.bias - f.mantissa_bits);
  } else {
    value = from_bits(((exponent + 127 - f.bias) << 23) | (mantissa << (23 - f.mantissa_bits)));
  }
  return sign ? -value : value;
}

// Narrow float of `value`. With `saturate`, what is too large becomes the largest finite number (NaN stays NaN where
// the format has one); without it, it becomes Inf, or NaN where the format has no Inf. Of stochastic rounding `random`
// holds the random bits, `random_bits` of them, which are added to the highest discarded bits.
inline uint32_t encode(const Format& f, float value, Round round, bool saturate, uint32_t random = 0, int random_bits = 0) {
  uint32_t bits = to_bits(value);
  uint32_t sign = bits >> 31 ? sign_bit(f) : 0;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return f.nan ? f.nan : f.max_finite;
  uint32_t overflow = f.has_inf ? ((1u << f.exponent_bits) - 1) << f.mantissa_bits : (f.nan ? f.nan : f.max_finite);
  if (magnitude == 0x7f800000u) return sign | (saturate ? f.max_finite : overflow);
  // Work on an integer significand so that subnormal results round once.
  int exponent = static_cast<int>(magnitude >> 23);
  uint64_t significand = magnitude & 0x7fffffu;
  if (exponent == 0) exponent = 1; else significand |= 0x800000u;
  int target = exponent - 127 + f.bias;  // biased exponent in the narrow format, before rounding
  int shift = 23 - f.mantissa_bits;
  if (target < 1) { shift += 1 - target; target = 1; }
  uint64_t kept, rest, half;
  if (shift > 40) { kept = 0; rest = significand ? 1 : 0; half = 2; }
  else { kept = significand >> shift; rest = significand & ((1ull << shift) - 1); half = 1ull << (shift - 1); }
  bool increment = false;
  switch (round) {
    case Round::nearest: increment = rest > half || (rest == half && (kept & 1)); break;
    case Round::away: increment = rest >= half && rest; break;
    case Round::zero: break;
    case Round::up: increment = rest && !sign; break;
    case Round::down: increment = rest && sign; break;
    case Round::stochastic: increment = shift <= 40 && (rest + (uint64_t{random} << (shift - random_bits))) >> shift; break;
  }
  kept += increment;
  // `kept` holds the implicit one at bit mantissa_bits when normal, so adding it carries into the exponent by itself.
  uint64_t result = (static_cast<uint64_t>(target - 1) << f.mantissa_bits) + kept;
  if (result > f.max_finite) {
    bool towards_zero = round == Round::zero || (round == Round::up && sign) || (round == Round::down && !sign);
    return sign | (saturate || towards_zero ? f.max_finite : overflow);
  }
  return sign | static_cast<uint32_t>(result);
}

inline float bf16_to_float(uint16_t b) { return from_bits(static_cast<uint32_t>(b) << 16); }

inline uint16_t float_to_bf16(float f) {
  uint32_t b = to_bits(f);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1)) >> 16);
}

inline float f16_to_float(uint16_t h) { return decode(kF16, h); }
inline uint16_t float_to_f16(float f) { return static_cast<uint16_t>(encode(kF16, f, Round::nearest, false)); }

// Unsigned power-of-two scale, 2^(bits - 127); 0xff is NaN.
inline float ue8m0_to_float(uint8_t b) { return b == 0xff ? from_bits(0x7fffffffu) : std::ldexp(1.0f, b - 127); }

// What a sum of integers becomes in 32 bits: the nearest number, or the low bits.
inline int32_t integer_sum(int64_t v, bool saturate) {
  if (saturate) v = v < INT32_MIN ? INT32_MIN : v > INT32_MAX ? INT32_MAX : v;
  return static_cast<int32_t>(v);
}

}  // namespace ptxsim
