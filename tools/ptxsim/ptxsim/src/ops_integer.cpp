// Integer arithmetic, logic, shifts, bit fields.
#include <limits>

#include "lanes.h"

namespace ptxsim {
namespace {

template <class T> using Unsigned = std::make_unsigned_t<T>;
template <class T> struct WideOf;
template <> struct WideOf<uint16_t> { using type = uint32_t; };
template <> struct WideOf<int16_t> { using type = int32_t; };
template <> struct WideOf<uint32_t> { using type = uint64_t; };
template <> struct WideOf<int32_t> { using type = int64_t; };
template <> struct WideOf<uint64_t> { using type = unsigned __int128; };
template <> struct WideOf<int64_t> { using type = __int128; };
template <class T> using Wide = typename WideOf<T>::type;

struct Add { template <class T> static T of(T a, T b) { return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b)); } };
struct Sub { template <class T> static T of(T a, T b) { return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b)); } };
struct MulLo { template <class T> static T of(T a, T b) { return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); } };
struct MulHi { template <class T> static T of(T a, T b) { return static_cast<T>((static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b)) >> (8 * sizeof(T))); } };
struct MulWide { template <class T> static Wide<T> of(T a, T b) { return static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b); } };
struct MadLo { template <class T> static T of(T a, T b, T c) { return Add::of(MulLo::of(a, b), c); } };
struct MadHi { template <class T> static T of(T a, T b, T c) { return Add::of(MulHi::of(a, b), c); } };
struct MadWide { template <class T> static Wide<T> of(T a, T b, Wide<T> c) { return Add::of(MulWide::of(a, b), c); } };
struct AddSat { static int32_t of(int32_t a, int32_t b) { int64_t s = int64_t{a} + b; return static_cast<int32_t>(s > INT32_MAX ? INT32_MAX : s < INT32_MIN ? INT32_MIN : s); } };
struct SubSat { static int32_t of(int32_t a, int32_t b) { int64_t s = int64_t{a} - b; return static_cast<int32_t>(s > INT32_MAX ? INT32_MAX : s < INT32_MIN ? INT32_MIN : s); } };
// Division by zero gives an unspecified value in PTX; here all ones, and INT_MIN / -1 wraps.
struct Div { template <class T> static T of(T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  if (std::is_signed<T>::value && b == static_cast<T>(-1)) return static_cast<T>(Unsigned<T>(0) - static_cast<Unsigned<T>>(a));
  return static_cast<T>(a / b);
} };
struct Rem { template <class T> static T of(T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  if (std::is_signed<T>::value && b == static_cast<T>(-1)) return 0;
  return static_cast<T>(a % b);
} };
struct Min { template <class T> static T of(T a, T b) { return a < b ? a : b; } };
struct Max { template <class T> static T of(T a, T b) { return a > b ? a : b; } };
template <class Op> struct Relu { static int32_t of(int32_t a, int32_t b) { int32_t v = Op::of(a, b); return v > 0 ? v : 0; } };
struct Abs { template <class T> static T of(T a) { return a < 0 ? static_cast<T>(Unsigned<T>(0) - static_cast<Unsigned<T>>(a)) : a; } };
struct Neg { template <class T> static T of(T a) { return static_cast<T>(Unsigned<T>(0) - static_cast<Unsigned<T>>(a)); } };
struct Sad { template <class T> static T of(T a, T b, T c) { return Add::of(c, a < b ? Sub::of(b, a) : Sub::of(a, b)); } };
struct And { template <class T> static T of(T a, T b) { return static_cast<T>(a & b); } };
struct Or { template <class T> static T of(T a, T b) { return static_cast<T>(a | b); } };
struct Xor { template <class T> static T of(T a, T b) { return static_cast<T>(a ^ b); } };
struct Not { template <class T> static T of(T a) { return static_cast<T>(~a); } };
struct Cnot { template <class T> static T of(T a) { return a == 0; } };
// Shift amounts are clamped to the width.
struct Shl { template <class T> static T of(T a, uint32_t n) { return n >= 8 * sizeof(T) ? T(0) : static_cast<T>(static_cast<uint64_t>(a) << n); } };
struct Shr { template <class T> static T of(T a, uint32_t n) {
  if (n >= 8 * sizeof(T)) return a < 0 ? static_cast<T>(-1) : T(0);
  return static_cast<T>(a >> n);
} };
struct Popc { template <class T> static uint32_t of(T a) { return static_cast<uint32_t>(__builtin_popcountll(a)); } };
struct Clz { template <class T> static uint32_t of(T a) { return a ? static_cast<uint32_t>(__builtin_clzll(a)) - (64 - 8 * sizeof(T)) : 8 * sizeof(T); } };
struct Brev { template <class T> static T of(T a) {
  T r = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i) r = static_cast<T>(r << 1 | (a >> i & 1));
  return r;
} };
template <bool kShift> struct Bfind { template <class T> static uint32_t of(T a) {
  constexpr int width = 8 * sizeof(T);
  Unsigned<T> u = a < 0 ? static_cast<Unsigned<T>>(~a) : static_cast<Unsigned<T>>(a);
  if (u == 0) return 0xffffffffu;
  uint32_t bit = 63 - static_cast<uint32_t>(__builtin_clzll(u));
  return kShift ? width - 1 - bit : bit;
} };
struct Bfe { template <class T> static T of(T a, uint32_t position, uint32_t length) {
  constexpr uint32_t width = 8 * sizeof(T);
  using U = Unsigned<T>;
  position &= 0xff;
  length &= 0xff;
  if (length == 0) return 0;
  U bits = static_cast<U>(a);
  bool sign = std::is_signed<T>::value && (bits >> std::min(position + length - 1, width - 1) & 1);
  U fill = sign ? ~U(0) : U(0);
  if (position >= width) return static_cast<T>(fill);
  uint32_t taken = std::min(length, width - position);
  U low = taken >= width ? ~U(0) : (U(1) << taken) - 1;
  return static_cast<T>((bits >> position & low) | (fill & ~low));
} };

template <class T>
void bfi(Warp& w, const Instr& in, uint32_t mask) {
  const T* a = w.reg<T>(in.a[1]);
  const T* b = w.reg<T>(in.a[2]);
  const uint32_t* position = w.reg<uint32_t>(in.a[3]);
  const uint32_t* length = w.reg<uint32_t>(in.a[4]);
  constexpr uint32_t width = 8 * sizeof(T);
  T t[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    uint32_t p = position[l] & 0xff, n = length[l] & 0xff;
    T field = p >= width || n == 0 ? T(0) : static_cast<T>((n >= width ? ~T(0) : (T(1) << n) - 1) << p);
    t[l] = static_cast<T>((b[l] & ~field) | ((p < width ? a[l] << p : T(0)) & field));
  }
  w.put(in.a[0], t, mask);
}

// Funnel shifts of b:a.
template <bool kLeft, bool kWrap>
struct Shf { static uint32_t of(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t n = kWrap ? c & 31 : (c > 32 ? 32 : c);
  uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  return static_cast<uint32_t>(kLeft ? both << n >> 32 : both >> n);
} };

struct Bmsk { template <bool kWrap> struct Mode { static uint32_t of(uint32_t a, uint32_t b) {
  uint32_t p = kWrap ? a & 31 : a, n = kWrap ? b & 31 : b;
  if (p >= 32 || n == 0) return 0;
  return (n >= 32 ? kFullMask : (1u << n) - 1) << p;
} }; };

void lop3(Warp& w, const Instr& in, uint32_t mask) {
  const uint32_t* a = w.reg<uint32_t>(in.a[1]);
  const uint32_t* b = w.reg<uint32_t>(in.a[2]);
  const uint32_t* c = w.reg<uint32_t>(in.a[3]);
  uint32_t table[8], t[kLanes];
  for (int i = 0; i < 8; ++i) table[i] = in.imm >> i & 1 ? kFullMask : 0;
  for (int l = 0; l < kLanes; ++l) {
    uint32_t x = a[l], y = b[l], z = c[l];
    t[l] = (table[0] & ~x & ~y & ~z) | (table[1] & ~x & ~y & z) | (table[2] & ~x & y & ~z) | (table[3] & ~x & y & z) |
           (table[4] & x & ~y & ~z) | (table[5] & x & ~y & z) | (table[6] & x & y & ~z) | (table[7] & x & y & z);
  }
  w.put(in.a[0], t, mask);
}

void prmt(Warp& w, const Instr& in, uint32_t mask) {
  const uint32_t* a = w.reg<uint32_t>(in.a[1]);
  const uint32_t* b = w.reg<uint32_t>(in.a[2]);
  const uint32_t* c = w.reg<uint32_t>(in.a[3]);
  uint32_t t[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    uint64_t both = static_cast<uint64_t>(b[l]) << 32 | a[l];
    uint32_t r = 0, selector = c[l];
    for (int i = 0; i < 4; ++i) {
      uint32_t s;
      switch (in.kind) {
        case 1: s = ((selector & 3) + static_cast<uint32_t>(i)) & 7; break;                                        // f4e
        case 2: s = ((selector & 3) - static_cast<uint32_t>(i)) & 7; break;                                        // b4e
        case 3: s = selector & 3; break;                                                                     // rc8
        case 4: s = std::max<uint32_t>(selector & 3, static_cast<uint32_t>(i)); break;                       // ecl
        case 5: s = std::min<uint32_t>(selector & 3, static_cast<uint32_t>(i)); break;                       // ecr
        case 6: s = (selector & 1) * 2 + (static_cast<uint32_t>(i) & 1); break;                              // rc16
        default: s = selector >> (4 * i) & 15;
      }
      uint32_t byte = static_cast<uint32_t>(both >> (8 * (s & 7))) & 0xff;
      if (s & 8) byte = byte & 0x80 ? 0xff : 0;
      r |= byte << (8 * i);
    }
    t[l] = r;
  }
  w.put(in.a[0], t, mask);
}

// Logic on predicates works on the whole word of lanes.
template <class Op>
void predicate_binary(Warp& w, const Instr& in, uint32_t mask) {
  w.put_pred(in.a[0], Op::template of<uint32_t>(w.pred(in.a[1]), w.pred(in.a[2])), mask);
}
void predicate_not(Warp& w, const Instr& in, uint32_t mask) { w.put_pred(in.a[0], ~w.pred(in.a[1]), mask); }

// add.cc and its kind: the carry is a predicate word per warp, kept in a register of its own.
template <bool kSubtract, bool kIn, bool kOut, class T>
void carry_add(Warp& w, const Instr& in, uint32_t mask) {
  const T* a = w.reg<T>(in.a[1]);
  const T* b = w.reg<T>(in.a[2]);
  uint32_t carry_in = kIn ? w.pred(in.a[3]) : (kSubtract ? kFullMask : 0), carry_out = 0;
  T t[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    unsigned __int128 s = static_cast<unsigned __int128>(a[l]) + static_cast<T>(kSubtract ? ~b[l] : b[l]) + (carry_in >> l & 1);
    t[l] = static_cast<T>(s);
    carry_out |= static_cast<uint32_t>(s >> (8 * sizeof(T)) & 1) << l;
  }
  w.put(in.a[0], t, mask);
  if (kOut) w.put_pred(in.a[3], carry_out, mask);
}

template <class Op>
Handler integer_binary(Decoder& d, const Type& t) {
  bool s = t.cls == Type::signed_int;
  switch (t.bytes) {
    case 2: return s ? binary<Op, int16_t, int16_t, int16_t> : binary<Op, uint16_t, uint16_t, uint16_t>;
    case 4: return s ? binary<Op, int32_t, int32_t, int32_t> : binary<Op, uint32_t, uint32_t, uint32_t>;
    case 8: return s ? binary<Op, int64_t, int64_t, int64_t> : binary<Op, uint64_t, uint64_t, uint64_t>;
    default: d.fail("type ." + t.name);
  }
}

template <class Op>
Handler integer_ternary(Decoder& d, const Type& t) {
  bool s = t.cls == Type::signed_int;
  switch (t.bytes) {
    case 2: return s ? ternary<Op, int16_t, int16_t, int16_t, int16_t> : ternary<Op, uint16_t, uint16_t, uint16_t, uint16_t>;
    case 4: return s ? ternary<Op, int32_t, int32_t, int32_t, int32_t> : ternary<Op, uint32_t, uint32_t, uint32_t, uint32_t>;
    case 8: return s ? ternary<Op, int64_t, int64_t, int64_t, int64_t> : ternary<Op, uint64_t, uint64_t, uint64_t, uint64_t>;
    default: d.fail("type ." + t.name);
  }
}

template <class Op>
Handler integer_unary_signed(Decoder& d, const Type& t) {
  if (t.cls != Type::signed_int) d.fail("type ." + t.name);
  switch (t.bytes) {
    case 2: return unary<Op, int16_t, int16_t>;
    case 4: return unary<Op, int32_t, int32_t>;
    case 8: return unary<Op, int64_t, int64_t>;
    default: d.fail("type ." + t.name);
  }
}

template <class Op>
Handler bits_unary(Decoder& d, const Type& t) {
  switch (t.bytes) {
    case 2: return unary<Op, uint16_t, uint16_t>;
    case 4: return unary<Op, uint32_t, uint32_t>;
    case 8: return unary<Op, uint64_t, uint64_t>;
    default: d.fail("type ." + t.name);
  }
}

template <bool kSubtract>
void decode_carry(Decoder& d, bool in) {
  bool out = d.take("cc");
  Type t = d.type();
  same_type_operands(d, t, 2);
  d.in.a[3] = d.carry();
  if (t.bytes == 4)
    d.in.fn = in ? (out ? carry_add<kSubtract, true, true, uint32_t> : carry_add<kSubtract, true, false, uint32_t>) : carry_add<kSubtract, false, true, uint32_t>;
  else if (t.bytes == 8)
    d.in.fn = in ? (out ? carry_add<kSubtract, true, true, uint64_t> : carry_add<kSubtract, true, false, uint64_t>) : carry_add<kSubtract, false, true, uint64_t>;
  else
    d.fail("type ." + t.name);
}

void decode_mul(Decoder& d) {
  std::string part = d.take_one({"lo", "hi", "wide"});
  Type t = d.type();
  bool s = t.cls == Type::signed_int;
  if (part == "wide") {
    d.expect(3, 3);
    d.in.a[0] = d.destination(0, 2 * t.bytes);
    d.in.a[1] = d.source_slot(1, t);
    d.in.a[2] = d.source_slot(2, t);
    if (t.bytes == 2) d.in.fn = s ? binary<MulWide, int32_t, int16_t, int16_t> : binary<MulWide, uint32_t, uint16_t, uint16_t>;
    else if (t.bytes == 4) d.in.fn = s ? binary<MulWide, int64_t, int32_t, int32_t> : binary<MulWide, uint64_t, uint32_t, uint32_t>;
    else d.fail("type ." + t.name);
    return;
  }
  same_type_operands(d, t, 2);
  if (part == "lo") d.in.fn = integer_binary<MulLo>(d, t);
  else if (part == "hi") d.in.fn = integer_binary<MulHi>(d, t);
  else d.fail("mul without .lo, .hi or .wide");
}

void decode_mad(Decoder& d) {
  std::string part = d.take_one({"lo", "hi", "wide"});
  Type t = d.type();
  bool s = t.cls == Type::signed_int;
  if (part == "wide") {
    d.expect(4, 4);
    const Type wide = *find_type((s ? "s" : "u") + std::to_string(16 * t.bytes));
    d.in.a = {d.destination(0, wide.bytes), d.source_slot(1, t), d.source_slot(2, t), d.source_slot(3, wide), -1, -1};
    if (t.bytes == 2) d.in.fn = s ? ternary<MadWide, int32_t, int16_t, int16_t, int32_t> : ternary<MadWide, uint32_t, uint16_t, uint16_t, uint32_t>;
    else if (t.bytes == 4) d.in.fn = s ? ternary<MadWide, int64_t, int32_t, int32_t, int64_t> : ternary<MadWide, uint64_t, uint32_t, uint32_t, uint64_t>;
    else d.fail("type ." + t.name);
    return;
  }
  same_type_operands(d, t, 3);
  if (part == "lo") d.in.fn = integer_ternary<MadLo>(d, t);
  else if (part == "hi") d.in.fn = integer_ternary<MadHi>(d, t);
  else d.fail("mad without .lo, .hi or .wide");
}

template <class Op>
void decode_logic(Decoder& d) {
  Type t = d.type();
  same_type_operands(d, t, 2);
  d.in.fn = t.bytes == 0 ? predicate_binary<Op> : integer_binary<Op>(d, t);
}

template <class Op>
void decode_shift(Decoder& d) {
  Type t = d.type();
  d.expect(3, 3);
  d.in.a[0] = d.destination(0, t.bytes);
  d.in.a[1] = d.source_slot(1, t);
  d.in.a[2] = d.source_slot(2, *find_type("u32"));
  bool s = t.cls == Type::signed_int;
  switch (t.bytes) {
    case 2: d.in.fn = s ? binary<Op, int16_t, int16_t, uint32_t> : binary<Op, uint16_t, uint16_t, uint32_t>; break;
    case 4: d.in.fn = s ? binary<Op, int32_t, int32_t, uint32_t> : binary<Op, uint32_t, uint32_t, uint32_t>; break;
    case 8: d.in.fn = s ? binary<Op, int64_t, int64_t, uint32_t> : binary<Op, uint64_t, uint64_t, uint32_t>; break;
    default: d.fail("type ." + t.name);
  }
}

template <class Op>
void decode_count(Decoder& d) {  // popc, clz: a 32-bit result of any width
  Type t = d.type();
  d.expect(2, 2);
  d.in.a[0] = d.destination(0, 4);
  d.in.a[1] = d.source_slot(1, t);
  d.in.fn = t.bytes == 4 ? unary<Op, uint32_t, uint32_t> : unary<Op, uint32_t, uint64_t>;
}

}  // namespace

// Integer forms of opcodes that floating point shares; ops_float.cpp calls them for integer types.
void integer_add(Decoder& d, const Type& t, bool subtract) {
  bool saturate = d.take("sat");
  same_type_operands(d, t, 2);
  if (saturate) {
    if (t.name != "s32") d.fail("`.sat` on type ." + t.name);
    d.in.fn = subtract ? binary<SubSat, int32_t, int32_t, int32_t> : binary<AddSat, int32_t, int32_t, int32_t>;
  } else {
    d.in.fn = subtract ? integer_binary<Sub>(d, t) : integer_binary<Add>(d, t);
  }
}
void carry_sum(Decoder& d, bool subtract) { subtract ? decode_carry<true>(d, false) : decode_carry<false>(d, false); }
void integer_multiply(Decoder& d) { decode_mul(d); }
void integer_min_max(Decoder& d, const Type& t, bool max) {
  bool relu = d.take("relu");
  same_type_operands(d, t, 2);
  if (relu && t.name != "s32") d.fail("`.relu` on type ." + t.name);
  if (relu) d.in.fn = max ? binary<Relu<Max>, int32_t, int32_t, int32_t> : binary<Relu<Min>, int32_t, int32_t, int32_t>;
  else d.in.fn = max ? integer_binary<Max>(d, t) : integer_binary<Min>(d, t);
}
void integer_divide(Decoder& d, const Type& t) { same_type_operands(d, t, 2); d.in.fn = integer_binary<Div>(d, t); }
void integer_abs(Decoder& d, const Type& t) { same_type_operands(d, t, 1); d.in.fn = integer_unary_signed<Abs>(d, t); }
void integer_neg(Decoder& d, const Type& t) { same_type_operands(d, t, 1); d.in.fn = integer_unary_signed<Neg>(d, t); }

void register_integer(OpcodeTable& table) {
  table["mad"] = decode_mad;
  table["rem"] = [](Decoder& d) { Type t = d.type(); same_type_operands(d, t, 2); d.in.fn = integer_binary<Rem>(d, t); };
  table["sad"] = [](Decoder& d) { Type t = d.type(); same_type_operands(d, t, 3); d.in.fn = integer_ternary<Sad>(d, t); };
  table["addc"] = [](Decoder& d) { decode_carry<false>(d, true); };
  table["subc"] = [](Decoder& d) { decode_carry<true>(d, true); };
  table["and"] = decode_logic<And>;
  table["or"] = decode_logic<Or>;
  table["xor"] = decode_logic<Xor>;
  table["not"] = [](Decoder& d) {
    Type t = d.type();
    same_type_operands(d, t, 1);
    d.in.fn = t.bytes == 0 ? predicate_not : bits_unary<Not>(d, t);
  };
  table["cnot"] = [](Decoder& d) { Type t = d.type(); same_type_operands(d, t, 1); d.in.fn = bits_unary<Cnot>(d, t); };
  table["shl"] = decode_shift<Shl>;
  table["shr"] = decode_shift<Shr>;
  table["popc"] = decode_count<Popc>;
  table["clz"] = decode_count<Clz>;
  table["brev"] = [](Decoder& d) { Type t = d.type(); same_type_operands(d, t, 1); d.in.fn = bits_unary<Brev>(d, t); };
  table["bfind"] = [](Decoder& d) {
    bool shift = d.take("shiftamt");
    Type t = d.type();
    d.expect(2, 2);
    d.in.a[0] = d.destination(0, 4);
    d.in.a[1] = d.source_slot(1, t);
    bool s = t.cls == Type::signed_int;
    if (t.bytes == 4) d.in.fn = shift ? (s ? unary<Bfind<true>, uint32_t, int32_t> : unary<Bfind<true>, uint32_t, uint32_t>) : (s ? unary<Bfind<false>, uint32_t, int32_t> : unary<Bfind<false>, uint32_t, uint32_t>);
    else d.in.fn = shift ? (s ? unary<Bfind<true>, uint32_t, int64_t> : unary<Bfind<true>, uint32_t, uint64_t>) : (s ? unary<Bfind<false>, uint32_t, int64_t> : unary<Bfind<false>, uint32_t, uint64_t>);
  };
  table["bfe"] = [](Decoder& d) {
    Type t = d.type();
    const Type& u32 = *find_type("u32");
    d.expect(4, 4);
    d.in.a = {d.destination(0, t.bytes), d.source_slot(1, t), d.source_slot(2, u32), d.source_slot(3, u32), -1, -1};
    bool s = t.cls == Type::signed_int;
    if (t.bytes == 4) d.in.fn = s ? ternary<Bfe, int32_t, int32_t, uint32_t, uint32_t> : ternary<Bfe, uint32_t, uint32_t, uint32_t, uint32_t>;
    else d.in.fn = s ? ternary<Bfe, int64_t, int64_t, uint32_t, uint32_t> : ternary<Bfe, uint64_t, uint64_t, uint32_t, uint32_t>;
  };
  table["bfi"] = [](Decoder& d) {
    Type t = d.type();
    const Type& u32 = *find_type("u32");
    d.expect(5, 5);
    d.in.a = {d.destination(0, t.bytes), d.source_slot(1, t), d.source_slot(2, t), d.source_slot(3, u32), d.source_slot(4, u32), -1};
    d.in.fn = t.bytes == 4 ? bfi<uint32_t> : bfi<uint64_t>;
  };
  table["shf"] = [](Decoder& d) {
    bool left = std::string(d.take_one({"l", "r"})) == "l";
    bool wrap = std::string(d.take_one({"wrap", "clamp"})) == "wrap";
    Type t = d.type();
    same_type_operands(d, t, 3);
    d.in.fn = left ? (wrap ? ternary<Shf<true, true>, uint32_t, uint32_t, uint32_t, uint32_t> : ternary<Shf<true, false>, uint32_t, uint32_t, uint32_t, uint32_t>)
                   : (wrap ? ternary<Shf<false, true>, uint32_t, uint32_t, uint32_t, uint32_t> : ternary<Shf<false, false>, uint32_t, uint32_t, uint32_t, uint32_t>);
  };
  table["bmsk"] = [](Decoder& d) {
    bool wrap = std::string(d.take_one({"wrap", "clamp"})) == "wrap";
    Type t = d.type();
    same_type_operands(d, t, 2);
    d.in.fn = wrap ? binary<Bmsk::Mode<true>, uint32_t, uint32_t, uint32_t> : binary<Bmsk::Mode<false>, uint32_t, uint32_t, uint32_t>;
  };
  table["lop3"] = [](Decoder& d) {
    Type t = d.type();
    d.expect(5, 5);
    d.in.a = {d.destination(0, t.bytes), d.source_slot(1, t), d.source_slot(2, t), d.source_slot(3, t), -1, -1};
    d.in.imm = d.immediate(4);
    d.in.fn = lop3;
  };
  table["prmt"] = [](Decoder& d) {
    static const char* const modes[] = {"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
    for (int i = 0; i < 6; ++i)
      if (d.take(modes[i])) d.in.kind = i + 1;
    Type t = d.type();
    same_type_operands(d, t, 3);
    d.in.fn = prmt;
  };
}

}  // namespace ptxsim
