// cvt in all its forms, mov with packing and unpacking, cvta.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <limits>

#include "lanes.h"
#include "numeric.h"

namespace ptxsim {
namespace {

// ---- cvt between scalars ----
// Operands of cvt may be wider than the type, so lanes are read and written at the register's own stride.

// Of .rn, .rni and so on; to the nearest where there is none.
Round direction(const std::string& modifier) {
  if (modifier == "rna") return Round::away;
  switch (modifier.empty() ? 'n' : modifier[1]) {
    case 'z': return Round::zero;
    case 'm': return Round::down;
    case 'p': return Round::up;
    case 's': return Round::stochastic;
    default: return Round::nearest;
  }
}

double round_to_integer(double v, Round round) {
  switch (round) {
    case Round::zero: return std::trunc(v);
    case Round::down: return std::floor(v);
    case Round::up: return std::ceil(v);
    default: return std::nearbyint(v);
  }
}

// A float32 from a float64 (or an integer that float64 holds exactly) under any rounding.
float narrow(double v, Round round) {
  if (round == Round::nearest) return static_cast<float>(v);
  int saved = std::fegetround();
  std::fesetround(round == Round::zero ? FE_TOWARDZERO : round == Round::down ? FE_DOWNWARD : FE_UPWARD);
  volatile double in = v;
  volatile float out = static_cast<float>(in);
  std::fesetround(saved);
  return out;
}

// NaN becomes zero, or the top bit alone where either side has 64 bits.
template <class I>
I saturate_to(double v, bool from_f64) {
  if (v != v) return from_f64 || sizeof(I) == 8 ? static_cast<I>(1ull << (8 * sizeof(I) - 1)) : I(0);
  if (v <= static_cast<double>(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  // max() of a 64-bit type is not a float64: 2^63 and 2^64 are already too large.
  if (v >= static_cast<double>(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
  return static_cast<I>(v);
}

// in.kind: rounding | these flags; in.size: destination stride | source stride << 8
constexpr int kFtz = 1 << 8, kSat = 1 << 9, kRelu = 1 << 10, kIntegral = 1 << 11, kSatfinite = 1 << 12, kScaled = 1 << 13;
struct Half16 { uint16_t bits; };
struct Brain16 { uint16_t bits; };

template <class T> struct IsFloat : std::integral_constant<bool, !std::is_integral<T>::value> {};

inline double widen(float v) { return v; }
inline double widen(double v) { return v; }
inline double widen(Half16 v) { return f16_to_float(v.bits); }
inline double widen(Brain16 v) { return bf16_to_float(v.bits); }

template <class D> D from_double(double v, Round round, bool saturate_finite);
template <> double from_double<double>(double v, Round, bool) { return v; }
template <> float from_double<float>(double v, Round r, bool) { return narrow(v, r); }
template <> Half16 from_double<Half16>(double v, Round r, bool s) { return {static_cast<uint16_t>(encode(kF16, narrow(v, r == Round::nearest ? r : Round::zero), r, s))}; }
template <> Brain16 from_double<Brain16>(double v, Round r, bool s) { return {static_cast<uint16_t>(encode(kBf16, narrow(v, r == Round::nearest ? r : Round::zero), r, s))}; }

template <class D, class S>
D convert(S s, int kind) {
  Round round = static_cast<Round>(kind & 0xff);
  bool ftz = kind & kFtz, sat = kind & kSat;
  if constexpr (IsFloat<S>::value) {
    double v = widen(s);
    if (ftz && sizeof(S) == 4) v = flush(static_cast<float>(v));
    if constexpr (IsFloat<D>::value) {
      if (kind & kIntegral) v = round_to_integer(v, round);
      if (kind & kRelu && v < 0) v = 0;
      if (sat) v = v > 1 ? 1 : v > 0 ? v : 0;
      D r = from_double<D>(v, round, kind & kSatfinite);
      if constexpr (std::is_same<D, float>::value) { if (ftz) r = flush(r); }
      return r;
    } else {
      return saturate_to<D>(round_to_integer(v, round), sizeof(S) == 8);
    }
  } else if constexpr (IsFloat<D>::value) {
    if constexpr (std::is_same<D, float>::value) {
      if (round == Round::nearest) return static_cast<float>(s);  // one rounding, 64-bit integers too
    }
    return from_double<D>(static_cast<double>(s), round, false);
  } else {
    if (sat) {
      __int128 v = s;
      if (v < std::numeric_limits<D>::min()) return std::numeric_limits<D>::min();
      if (v > std::numeric_limits<D>::max()) return std::numeric_limits<D>::max();
    }
    return static_cast<D>(s);
  }
}

template <class D, class S>
void cvt(Warp& w, const Instr& in, uint32_t mask) {
  int to_stride = in.size & 0xff, from_stride = in.size >> 8;
  uint8_t* to = w.file.data() + in.a[0];
  const uint8_t* from = w.file.data() + in.a[1];
  if (to_stride == sizeof(D) && from_stride == sizeof(S)) {
    D t[kLanes];
    const S* s = reinterpret_cast<const S*>(from);
    for (int l = 0; l < kLanes; ++l) t[l] = convert<D, S>(s[l], in.kind);
    w.put(in.a[0], t, mask);
    return;
  }
  for (int l = 0; l < kLanes; ++l) {
    if (!(mask >> l & 1)) continue;
    S s;
    std::memcpy(&s, from + l * from_stride, sizeof(S));
    D v = convert<D, S>(s, in.kind);
    // A destination wider than the type is extended as its type says.
    uint64_t fill = 0;
    if constexpr (std::is_signed<D>::value && std::is_integral<D>::value) fill = v < 0 ? ~0ull : 0;
    uint64_t bits = fill;
    std::memcpy(&bits, &v, sizeof(D));
    std::memcpy(to + l * to_stride, &bits, static_cast<size_t>(to_stride));
  }
}

template <class D>
Handler cvt_from(Decoder& d, const Type& s) {
  if (s.name == "u8") return cvt<D, uint8_t>;
  if (s.name == "s8") return cvt<D, int8_t>;
  if (s.name == "u16") return cvt<D, uint16_t>;
  if (s.name == "s16") return cvt<D, int16_t>;
  if (s.name == "u32") return cvt<D, uint32_t>;
  if (s.name == "s32") return cvt<D, int32_t>;
  if (s.name == "u64") return cvt<D, uint64_t>;
  if (s.name == "s64") return cvt<D, int64_t>;
  if (s.name == "f16") return cvt<D, Half16>;
  if (s.name == "bf16") return cvt<D, Brain16>;
  if (s.name == "f32") return cvt<D, float>;
  if (s.name == "f64") return cvt<D, double>;
  d.fail("conversion from type ." + s.name);
}

Handler cvt_handler(Decoder& d, const Type& t, const Type& s) {
  if (t.name == "u8") return cvt_from<uint8_t>(d, s);
  if (t.name == "s8") return cvt_from<int8_t>(d, s);
  if (t.name == "u16") return cvt_from<uint16_t>(d, s);
  if (t.name == "s16") return cvt_from<int16_t>(d, s);
  if (t.name == "u32") return cvt_from<uint32_t>(d, s);
  if (t.name == "s32") return cvt_from<int32_t>(d, s);
  if (t.name == "u64") return cvt_from<uint64_t>(d, s);
  if (t.name == "s64") return cvt_from<int64_t>(d, s);
  if (t.name == "f16") return cvt_from<Half16>(d, s);
  if (t.name == "bf16") return cvt_from<Brain16>(d, s);
  if (t.name == "f32") return cvt_from<float>(d, s);
  if (t.name == "f64") return cvt_from<double>(d, s);
  d.fail("conversion to type ." + t.name);
}

// ---- cvt of packed formats ----
struct Packed {
  const char* name;
  enum Family { half, f8, f6, f4, ue8m0, s2f6 } family;
  const Format* format;  // nullptr: ue8m0 and s2f6
  int count;
  int bits;              // of one element in the register
};
constexpr Packed kPacked[] = {
    {"f16x2", Packed::half, &kF16, 2, 16},     {"bf16x2", Packed::half, &kBf16, 2, 16},   {"e4m3x2", Packed::f8, &kE4m3, 2, 8},
    {"e5m2x2", Packed::f8, &kE5m2, 2, 8},      {"e2m3x2", Packed::f6, &kE2m3, 2, 8},      {"e3m2x2", Packed::f6, &kE3m2, 2, 8},
    {"e2m1x2", Packed::f4, &kE2m1, 2, 4},      {"ue8m0x2", Packed::ue8m0, nullptr, 2, 8}, {"s2f6x2", Packed::s2f6, nullptr, 2, 8},
    {"e4m3x4", Packed::f8, &kE4m3, 4, 8},      {"e5m2x4", Packed::f8, &kE5m2, 4, 8},      {"e2m3x4", Packed::f6, &kE2m3, 4, 8},
    {"e3m2x4", Packed::f6, &kE3m2, 4, 8},      {"e2m1x4", Packed::f4, &kE2m1, 4, 4},
};
const Packed* find_packed(const std::string& name) {
  for (const Packed& p : kPacked)
    if (name == p.name) return &p;
  return nullptr;
}

// Power-of-two scale, 2^-127 to 2^127, rounded towards zero or up.
uint32_t encode_ue8m0(float v, Round round, bool saturate) {
  uint32_t b = to_bits(v) & 0x7fffffffu;
  if (b > 0x7f800000u) return 0xff;
  if (b <= 0x400000u) return 0;  // 2^-127, which float32 holds as a subnormal
  uint32_t e = (b >> 23) + (round == Round::up && (b & 0x7fffffu) ? 1 : 0);
  return e <= 0xfe ? e : saturate ? 0xfe : 0xff;
}

// Two's complement with six fractional bits, to the nearest; always saturating, NaN to the largest.
uint32_t encode_s2f6(float v) {
  if (is_nan(v)) return 0x7f;
  return static_cast<uint32_t>(static_cast<int>(std::nearbyint(std::min(127.0f, std::max(-128.0f, v * 64))))) & 0xff;
}

float decode_packed(const Packed& p, uint32_t bits) {
  switch (p.family) {
    case Packed::ue8m0: return ue8m0_to_float(static_cast<uint8_t>(bits));
    case Packed::s2f6: return static_cast<float>(static_cast<int8_t>(bits)) / 64;
    default: return decode(*p.format, bits);
  }
}

uint64_t read_lane(Warp& w, Slot slot, int l, int bytes) {
  uint64_t v = 0;
  std::memcpy(&v, w.file.data() + slot + l * bytes, static_cast<size_t>(bytes));
  return v;
}
void write_lane(Warp& w, Slot slot, int l, int bytes, uint64_t v) { std::memcpy(w.file.data() + slot + l * bytes, &v, static_cast<size_t>(bytes)); }

uint32_t reversed16(uint32_t v) {
  uint32_t r = 0;
  for (int i = 0; i < 16; ++i) r |= (v >> i & 1) << (15 - i);
  return r;
}

// Which of the 32 random bits the element `e` gets, counted from the lowest, and how many. Two elements have a half of
// the bits each. Of four, a pair shares a half: its upper element takes it in reverse. Four-bit elements have a byte each.
uint32_t random_of(const Packed& p, uint32_t rbits, int e, int* n) {
  if (p.count == 2) {
    *n = p.format == &kF16 ? 13 : 16;
    return rbits >> (16 * e) & ((1u << *n) - 1);
  }
  if (p.bits == 4) {
    *n = 8;
    return rbits >> (16 * (e & 1) + 8 * (e >> 1)) & 0xff;
  }
  *n = 16;
  uint32_t pair = rbits >> (16 * (e >> 1)) & 0xffff;
  return e & 1 ? reversed16(pair) : pair;
}

// in.n: index of the destination format | of the source format << 8 (0xff: float32s); a[5]: random bits or scale factors
void cvt_packed(Warp& w, const Instr& in, uint32_t mask) {
  const Packed& to = kPacked[in.n & 0xff];
  const Packed* from = in.n >> 8 == 0xff ? nullptr : &kPacked[in.n >> 8];
  Round round = static_cast<Round>(in.kind & 0xff);
  bool saturate = in.kind & kSatfinite;
  int to_bytes = in.size & 0xff, from_bytes = in.size >> 8;
  for (int l = 0; l < kLanes; ++l) {
    if (!(mask >> l & 1)) continue;
    uint64_t r = 0;
    for (int e = 0; e < to.count; ++e) {
      float v;
      if (from) v = decode_packed(*from, static_cast<uint32_t>(read_lane(w, in.a[1], l, from_bytes) >> (from->bits * e)) & ((1u << from->bits) - 1));
      else v = w.reg<float>(in.a[static_cast<size_t>(to.count - e)])[l];  // the first source is the highest element
      if (in.kind & kScaled) {
        float scale = ue8m0_to_float(static_cast<uint8_t>(w.reg<uint16_t>(in.a[5])[l] >> (8 * e)));
        v = to.family == Packed::s2f6 ? v / scale : v * scale;
      }
      if (in.kind & kRelu && v < 0) v = 0;
      uint32_t random = 0;
      int random_bits = 0;
      if (round == Round::stochastic) random = random_of(to, w.reg<uint32_t>(in.a[5])[l], e, &random_bits);
      uint32_t bits = to.family == Packed::ue8m0  ? encode_ue8m0(v, round, saturate)
                      : to.family == Packed::s2f6 ? encode_s2f6(v)
                                                  : encode(*to.format, v, round, saturate, random, random_bits);
      r |= static_cast<uint64_t>(bits) << (to.bits * e);
    }
    write_lane(w, in.a[0], l, to_bytes, r);
  }
}

// The hot one of the packed conversions.
void cvt_bf16x2(Warp& w, const Instr& in, uint32_t mask) {
  const float* hi = w.reg<float>(in.a[1]);
  const float* lo = w.reg<float>(in.a[2]);
  uint32_t t[kLanes];
  for (int l = 0; l < kLanes; ++l) t[l] = static_cast<uint32_t>(float_to_bf16(hi[l])) << 16 | float_to_bf16(lo[l]);
  w.put(in.a[0], t, mask);
}

// Which conversions and roundings there are (section 9.7.9.21; those to bf16x2 from 4 to 8 bits are of ISA 9.2).
bool packed_conversion_exists(const Packed& to, const Packed* from, const std::string& round, int kind) {
  bool narrow = to.family == Packed::f8 || to.family == Packed::f6 || to.family == Packed::f4;
  if (kind & (kSat | kFtz) || (kind & kRelu && to.family == Packed::ue8m0)) return false;
  if ((narrow || to.family == Packed::s2f6) && !(kind & kSatfinite)) return false;
  if (kind & kScaled && to.family != Packed::s2f6 && !(to.format == &kBf16 && from && from->family != Packed::ue8m0)) return false;
  if (!from) {
    if (to.family == Packed::ue8m0) return round == "rz" || round == "rp";
    if (to.count == 4) return round == "rs";
    return round == "rn" || (to.family == Packed::half && (round == "rz" || round == "rs"));
  }
  if (from->count != 2 || to.count != 2) return false;
  if (to.family == Packed::ue8m0) return from->format == &kBf16 && (round == "rz" || round == "rp");
  if (round != "rn") return false;
  if (to.family == Packed::s2f6) return from->format == &kBf16;
  if (narrow) return from->family == Packed::half;
  if (from->family == Packed::half) return false;
  return to.format == &kBf16 || (!(kind & kSatfinite) && from->format);
}

void decode_cvt_packed(Decoder& d, const Packed& to, const Packed* from, const std::string& round) {
  d.take(to.name);
  if (from) d.take(from->name);
  else d.take("f32");
  if (d.take("scaled::n2::ue8m0")) d.in.kind |= kScaled;
  if (!packed_conversion_exists(to, from, round, d.in.kind)) d.fail("no such packed conversion");
  int bytes = std::max(1, to.count * to.bits / 8), source_bytes = 4;
  d.in.a[0] = d.register_of(d.operand(0), &bytes);
  if (d.operand(0).kind == Operand::sink) d.fail("the destination is not a register");
  size_t sources = from || to.count == 4 ? 1 : 2;
  bool more = d.in.kind & kScaled || round == "rs";
  d.expect(1 + sources + more, 1 + sources + more);
  const Type& f32 = *find_type("f32");
  if (from) {
    source_bytes = std::max(1, from->count * from->bits / 8);
    d.in.a[1] = d.register_of(d.operand(1), &source_bytes);
  } else if (sources == 1) {
    const Operand& four = d.operand(1);
    if (four.kind != Operand::vector || four.items.size() != 4) d.fail("the source is not a vector of four registers");
    for (size_t i = 0; i < 4; ++i) d.in.a[1 + i] = d.value(four.items[i], f32);
  } else {
    for (size_t i = 1; i <= 2; ++i) d.in.a[i] = d.source_slot(i, f32);
  }
  if (more) d.in.a[5] = d.source_slot(1 + sources, *find_type(round == "rs" ? "b32" : "b16"));
  d.in.size = bytes | source_bytes << 8;
  d.in.n = static_cast<int>(&to - kPacked) | (from ? static_cast<int>(from - kPacked) : 0xff) << 8;
  d.in.fn = cvt_packed;
  bool plain = !from && to.format == &kBf16 && round == "rn" && !(d.in.kind & (kRelu | kSatfinite)) && bytes == 4;
  if (plain) d.in.fn = cvt_bf16x2;
}

void cvt_tf32(Warp& w, const Instr& in, uint32_t mask) {
  const float* a = w.reg<float>(in.a[1]);
  uint32_t t[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    float v = in.kind & kRelu && a[l] < 0 ? 0 : a[l];
    t[l] = encode(kTf32, v, static_cast<Round>(in.kind & 0xff), in.kind & kSatfinite) << 13;
  }
  w.put(in.a[0], t, mask);
}

void decode_cvt_tf32(Decoder& d, const std::string& round) {
  d.take("tf32");
  Type f = d.type();
  d.expect(2, 2);
  bool rounds = round == "rn" || round == "rz" || (round == "rna" && !(d.in.kind & kRelu));
  if (f.name != "f32" || !rounds || d.in.kind & (kSat | kFtz)) d.fail("no such conversion to tf32");
  d.in.a[0] = d.destination(0, 4);
  d.in.a[1] = d.source_slot(1, f);
  d.in.fn = cvt_tf32;
}

void decode_cvt(Decoder& d) {
  const auto& opcode = d.source->opcode;
  const Packed *to = nullptr, *from = nullptr;
  std::string last = opcode.back(), before = opcode.size() > 2 ? opcode[opcode.size() - 2] : "";
  to = find_packed(before);
  from = find_packed(last);
  std::string round = d.take_one({"rni", "rzi", "rmi", "rpi"});
  if (!round.empty()) d.in.kind |= kIntegral;
  else round = d.take_one({"rn", "rz", "rm", "rp", "rna", "rs"});
  d.in.kind |= static_cast<int>(direction(round));
  static const std::pair<const char*, int> flags[] = {{"ftz", kFtz}, {"sat", kSat}, {"satfinite", kSatfinite}, {"relu", kRelu}};
  for (auto& flag : flags)
    if (d.take(flag.first)) d.in.kind |= flag.second;
  if (to) return decode_cvt_packed(d, *to, from, round);
  if (before == "tf32") return decode_cvt_tf32(d, round);
  d.expect(2, 2);
  Type t = d.type(), s = d.type();
  if (round == "rna" || round == "rs") d.fail("rounding ." + round);
  if (d.in.kind & kSatfinite && (t.bytes != 2 || t.cls != Type::real)) d.fail("`.satfinite` with type ." + t.name);
  int to_bytes = t.bytes, from_bytes = s.bytes;
  d.in.a[0] = d.target_of(d.operand(0), &to_bytes);
  d.in.a[1] = d.register_of(d.operand(1), &from_bytes);
  if (to_bytes < t.bytes || from_bytes < s.bytes) d.fail("register is narrower than the type");
  d.in.size = to_bytes | from_bytes << 8;
  d.in.fn = cvt_handler(d, t, s);
}

// ---- mov ----
template <class T>
void mov(Warp& w, const Instr& in, uint32_t mask) {
  w.put(in.a[0], w.reg<T>(in.a[1]), mask);
}
struct Wide128 { uint64_t half[2]; };

void mov_predicate(Warp& w, const Instr& in, uint32_t mask) { w.put_pred(in.a[0], in.kind ? ~w.pred(in.a[1]) : w.pred(in.a[1]), mask); }

// in.a[0] <- lists[list .. list + n), in.size bytes each, lowest first
void mov_pack(Warp& w, const Instr& in, uint32_t mask) {
  const int32_t* parts = w.program->lists.data() + in.list;
  int whole = in.size * in.n;
  for (int l = 0; l < kLanes; ++l) {
    if (!(mask >> l & 1)) continue;
    uint8_t value[16];
    for (int p = 0; p < in.n; ++p) std::memcpy(value + p * in.size, w.file.data() + parts[p] + l * in.size, static_cast<size_t>(in.size));
    std::memcpy(w.file.data() + in.a[0] + l * whole, value, static_cast<size_t>(whole));
  }
}
void mov_unpack(Warp& w, const Instr& in, uint32_t mask) {
  const int32_t* parts = w.program->lists.data() + in.list;
  int whole = in.size * in.n;
  for (int l = 0; l < kLanes; ++l) {
    if (!(mask >> l & 1)) continue;
    uint8_t value[16];
    std::memcpy(value, w.file.data() + in.a[1] + l * whole, static_cast<size_t>(whole));
    for (int p = 0; p < in.n; ++p) std::memcpy(w.file.data() + parts[p] + l * in.size, value + p * in.size, static_cast<size_t>(in.size));
  }
}

// Clocks: instructions executed so far, so that differences are sensible and runs repeatable.
void mov_clock(Warp& w, const Instr& in, uint32_t mask) {
  uint64_t now = w.machine->steps;
  if (in.kind == 1) now >>= 32;
  for (int l = 0; l < kLanes; ++l)
    if (mask >> l & 1) write_lane(w, in.a[0], l, in.size, now);
}

void decode_mov(Decoder& d) {
  Type t = d.type();
  d.expect(2, 2);
  const Operand& to = d.operand(0);
  const Operand& from = d.operand(1);
  const Operand* parts = to.kind == Operand::vector ? &to : from.kind == Operand::vector ? &from : nullptr;
  if (parts) {
    d.in.n = static_cast<int>(parts->items.size());
    if (d.in.n == 0 || t.bytes % d.in.n) d.fail("mov of a vector that does not fit its type");
    d.in.size = t.bytes / d.in.n;
    Type part{"b" + std::to_string(8 * d.in.size), d.in.size, Type::bits};
    for (const Operand& o : parts->items) d.list(parts == &to ? d.target(o, d.in.size) : d.value(o, part));
    if (parts == &to) d.in.a[1] = d.source_slot(1, t);
    else d.in.a[0] = d.destination(0, t.bytes);
    d.in.fn = parts == &to ? mov_unpack : mov_pack;
    return;
  }
  d.in.a[0] = d.destination(0, t.bytes);
  if (t.bytes == 0) {
    Operand p = from;
    d.in.kind = p.negated;
    p.negated = false;
    d.in.a[1] = d.value(p, t);
    d.in.fn = mov_predicate;
    return;
  }
  if (from.kind == Operand::special) {
    bool high = from.name == "%clock_hi" || from.name == "%globaltimer_hi";
    if (high || from.name == "%clock" || from.name == "%clock64" || from.name == "%globaltimer" || from.name == "%globaltimer_lo") {
      d.in.kind = high;
      d.in.size = t.bytes;
      d.in.fn = mov_clock;
      return;
    }
  }
  d.in.a[1] = d.source_slot(1, t);
  d.in.fn = t.bytes == 2 ? mov<uint16_t> : t.bytes == 4 ? mov<uint32_t> : t.bytes == 8 ? mov<uint64_t> : mov<Wide128>;
}

// ---- addresses ----
// Global and parameter addresses are generic addresses already; the shared and local windows are an offset away.
struct AddShared64 { static uint64_t of(uint64_t a) { return a + kSharedWindow; } };
struct SubShared64 { static uint64_t of(uint64_t a) { return a - kSharedWindow; } };
struct AddLocal64 { static uint64_t of(uint64_t a) { return a + kLocalWindow; } };
struct SubLocal64 { static uint64_t of(uint64_t a) { return a - kLocalWindow; } };

void decode_cvta(Decoder& d) {
  bool to = d.take("to");
  std::string space = d.take_one({"global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const"});
  Type t = d.type();
  if (t.bytes != 8) d.fail("32-bit generic addresses");
  same_type_operands(d, t, 1);
  if (space.compare(0, 6, "shared") == 0) d.in.fn = to ? unary<SubShared64, uint64_t, uint64_t> : unary<AddShared64, uint64_t, uint64_t>;
  else if (space == "local") d.in.fn = to ? unary<SubLocal64, uint64_t, uint64_t> : unary<AddLocal64, uint64_t, uint64_t>;
  else if (!space.empty()) d.in.fn = mov<uint64_t>;
  else d.fail("no known state space");
}

}  // namespace

void register_convert(OpcodeTable& table) {
  table["cvt"] = decode_cvt;
  table["mov"] = decode_mov;
  table["cvta"] = decode_cvta;
}

}  // namespace ptxsim
