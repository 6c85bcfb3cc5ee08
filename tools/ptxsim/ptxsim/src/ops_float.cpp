// Floating-point arithmetic in every width, and the opcodes that it shares with integers.
// The 16-bit formats compute in float32 (fma in float64) and round once. Approximate functions (ex2.approx, rcp.approx,
// ...) are computed as well as the host can: the hardware's few units in the last place are not modelled.
#include <algorithm>
#include <cfenv>
#include <cmath>

#include "ops_approximate.h"
#include "lanes.h"
#include "numeric.h"

namespace ptxsim {

void integer_add(Decoder& d, const Type& t, bool subtract);
void carry_sum(Decoder& d, bool subtract);
void integer_multiply(Decoder& d);
void integer_min_max(Decoder& d, const Type& t, bool max);
void integer_divide(Decoder& d, const Type& t);
void integer_abs(Decoder& d, const Type& t);
void integer_neg(Decoder& d, const Type& t);

namespace {

constexpr uint32_t kCanonicalNan = 0x7fffffffu;

// ---- operations, on float and double ----
struct Add { template <class T> static T of(T a, T b) { return a + b; } };
struct Sub { template <class T> static T of(T a, T b) { return a - b; } };
struct Mul { template <class T> static T of(T a, T b) { return a * b; } };
struct Div { template <class T> static T of(T a, T b) { return a / b; } };
struct Fma { template <class T> static T of(T a, T b, T c) { return std::fma(a, b, c); } };
template <bool kMax> struct Extreme { template <class T> static T of(T a, T b) {
  T picked = kMax ? (a > b ? a : b) : (a < b ? a : b);
  if (a == b) picked = std::signbit(a) != kMax ? a : b;  // -0 is below +0
  return a != a ? b : b != b ? a : picked;
} };
template <bool kMax> struct ExtremeNan { template <class T> static T of(T a, T b) {
  if (a != a || b != b) return static_cast<T>(from_bits(kCanonicalNan));
  return Extreme<kMax>::of(a, b);
} };
template <class Op> struct XorSign { template <class T> static T of(T a, T b) {
  T m = Op::of(std::fabs(a), std::fabs(b));
  return std::copysign(m, std::signbit(a) != std::signbit(b) ? T(-1) : T(1));
} };
template <class Op> struct Three { template <class T> static T of(T a, T b, T c) { return Op::of(Op::of(a, b), c); } };
struct Neg { template <class T> static T of(T a) { return -a; } };
struct Abs { template <class T> static T of(T a) { return std::fabs(a); } };
struct Rcp { template <class T> static T of(T a) { return T(1) / a; } };
struct Sqrt { template <class T> static T of(T a) { return std::sqrt(a); } };
struct Rsqrt { template <class T> static T of(T a) { return T(1) / std::sqrt(a); } };
struct Ex2 { template <class T> static T of(T a) { return std::exp2(a); } };
struct Lg2 { template <class T> static T of(T a) { return std::log2(a); } };
struct Sin { template <class T> static T of(T a) { return std::sin(a); } };
struct Cos { template <class T> static T of(T a) { return std::cos(a); } };
struct Tanh { template <class T> static T of(T a) { return std::tanh(a); } };
struct CopySign { template <class T> static T of(T a, T b) { return std::copysign(b, a); } };

// ---- wrappers that fit an operation to a register type ----
template <class Op> struct F32Ftz {
  static float of(float a) { return flush(Op::of(flush(a))); }
  static float of(float a, float b) { return flush(Op::of(flush(a), flush(b))); }
  static float of(float a, float b, float c) { return flush(Op::of(flush(a), flush(b), flush(c))); }
};
template <class Op> struct Sat {
  static float clamp(float v) { return v > 1 ? 1.0f : v > 0 ? v : 0.0f; }  // NaN becomes +0
  static float of(float a) { return clamp(Op::of(a)); }
  static float of(float a, float b) { return clamp(Op::of(a, b)); }
  static float of(float a, float b, float c) { return clamp(Op::of(a, b, c)); }
};

struct Bf16 {
  static float load(uint16_t h) { return bf16_to_float(h); }
  static uint16_t store(float f) { return float_to_bf16(f); }
};
struct F16 {
  static float load(uint16_t h) { return f16_to_float(h); }
  static uint16_t store(float f) { return float_to_f16(f); }
};
template <class Op, class H, bool kRelu = false> struct Half {
  static uint16_t finish(float f) { return H::store(kRelu && !(f > 0) && f == f ? 0.0f : f); }
  static uint16_t of(uint16_t a) { return finish(Op::of(H::load(a))); }
  static uint16_t of(uint16_t a, uint16_t b) { return finish(Op::of(H::load(a), H::load(b))); }
  static uint16_t of(uint16_t a, uint16_t b, uint16_t c) {
    return finish(static_cast<float>(Op::of(double{H::load(a)}, double{H::load(b)}, double{H::load(c)})));
  }
};
template <class HalfOp> struct Pair {
  static uint32_t join(uint16_t lo, uint16_t hi) { return static_cast<uint32_t>(hi) << 16 | lo; }
  static uint16_t lo(uint32_t v) { return static_cast<uint16_t>(v); }
  static uint16_t hi(uint32_t v) { return static_cast<uint16_t>(v >> 16); }
  static uint32_t of(uint32_t a) { return join(HalfOp::of(lo(a)), HalfOp::of(hi(a))); }
  static uint32_t of(uint32_t a, uint32_t b) { return join(HalfOp::of(lo(a), lo(b)), HalfOp::of(hi(a), hi(b))); }
  static uint32_t of(uint32_t a, uint32_t b, uint32_t c) { return join(HalfOp::of(lo(a), lo(b), lo(c)), HalfOp::of(hi(a), hi(b), hi(c))); }
};
template <class Op> struct FloatPair {  // .f32x2
  static float lo(uint64_t v) { return from_bits(static_cast<uint32_t>(v)); }
  static float hi(uint64_t v) { return from_bits(static_cast<uint32_t>(v >> 32)); }
  static uint64_t join(float lo, float hi) { return static_cast<uint64_t>(to_bits(hi)) << 32 | to_bits(lo); }
  static uint64_t of(uint64_t a, uint64_t b) { return join(Op::of(lo(a), lo(b)), Op::of(hi(a), hi(b))); }
  static uint64_t of(uint64_t a, uint64_t b, uint64_t c) { return join(Op::of(lo(a), lo(b), lo(c)), Op::of(hi(a), hi(b), hi(c))); }
};

// Rounding as told: the host's rounding mode around the whole warp. in.imm: the mode; in.kind: 1 = ftz, 2 = sat.
template <class Op, class T, int kSources>
__attribute__((noinline)) void rounded(const Instr& in, const std::array<const T*, kSources>& x, T* out, int n) {
  int saved = std::fegetround();
  std::fesetround(static_cast<int>(in.imm));
  bool ftz = in.kind & 1;
  for (int i = 0; i < n; ++i) {
    volatile T v[kSources];
    for (size_t k = 0; k < kSources; ++k) v[k] = ftz ? static_cast<T>(flush(static_cast<float>(x[k][i]))) : x[k][i];
    volatile T r;
    if constexpr (kSources == 1) r = Op::of(T(v[0]));
    else if constexpr (kSources == 2) r = Op::of(T(v[0]), T(v[1]));
    else r = Op::of(T(v[0]), T(v[1]), T(v[2]));
    out[i] = ftz ? static_cast<T>(flush(static_cast<float>(r))) : T(r);
  }
  std::fesetround(saved);
  if (in.kind & 2)
    for (int i = 0; i < n; ++i) out[i] = static_cast<T>(Sat<Op>::clamp(static_cast<float>(out[i])));
}

// kPer numbers of type T are in a register: two in one of .f32x2.
template <class Op, class T, int kSources, int kPer = 1>
void directed(Warp& w, const Instr& in, uint32_t mask) {
  std::array<const T*, kSources> x;
  for (size_t k = 0; k < kSources; ++k) x[k] = w.reg<T>(in.a[1 + k]);
  struct Register { T part[kPer]; };
  Register out[kLanes];
  rounded<Op, T, kSources>(in, x, out[0].part, kPer * kLanes);
  w.put(in.a[0], out, mask);
}

// All sources but the last are of the 16-bit type H, and float32 thereafter.
template <class Op, int kSources, class H>
void mixed(Warp& w, const Instr& in, uint32_t mask) {
  float wide[kSources - 1][kLanes], out[kLanes];
  std::array<const float*, kSources> x;
  for (size_t k = 0; k + 1 < kSources; ++k) {
    for (int l = 0; l < kLanes; ++l) wide[k][l] = H::load(w.reg<uint16_t>(in.a[1 + k])[l]);
    x[k] = wide[k];
  }
  x[kSources - 1] = w.reg<float>(in.a[kSources]);
  rounded<Op, float, kSources>(in, x, out, kLanes);
  w.put(in.a[0], out, mask);
}

template <int kSources, class Op, class T>
constexpr Handler arity() {
  if constexpr (kSources == 1) return unary<Op, T, T>;
  else if constexpr (kSources == 2) return binary<Op, T, T, T>;
  else return ternary<Op, T, T, T, T>;
}

int host_mode(const std::string& round) {
  return round == "rz" ? FE_TOWARDZERO : round == "rm" ? FE_DOWNWARD : round == "rp" ? FE_UPWARD : FE_TONEAREST;
}

// add, sub and fma .f32 with operands of 16 bits: d = convert(a) + c, d = convert(a) * convert(b) + c.
template <class Op, int kSources>
void mixed_precision(Decoder& d, bool bf16) {
  if (d.take("sat")) d.in.kind = 2;
  d.in.imm = static_cast<uint64_t>(host_mode(d.take_one({"rn", "rz", "rm", "rp"})));
  d.expect(kSources + 1, kSources + 1);
  d.in.a[0] = d.destination(0, 4);
  for (size_t i = 1; i < kSources; ++i) d.in.a[i] = d.source_slot(i, *find_type("b16"));
  d.in.a[kSources] = d.source_slot(kSources, *find_type("f32"));
  d.in.fn = bf16 ? mixed<Op, kSources, Bf16> : mixed<Op, kSources, F16>;
}

// The f32 and f64 forms, with the rounding and saturation modifiers that go with them.
template <class Op, int kSources>
void full_width(Decoder& d, const Type& t) {
  bool ftz = d.take("ftz"), sat = d.take("sat");
  std::string round = d.take_one({"rn", "rz", "rm", "rp", "approx", "full"});
  same_type_operands(d, t, kSources);
  d.in.kind = ftz | sat << 1;
  d.in.imm = static_cast<uint64_t>(host_mode(round));
  bool directed_rounding = d.in.imm != FE_TONEAREST;
  if (t.name == "f64") {
    if (ftz || sat) d.fail("modifier of a .f64 operation");
    d.in.fn = directed_rounding ? directed<Op, double, kSources> : arity<kSources, Op, double>();
  } else if (t.name == "f32") {
    if (directed_rounding) d.in.fn = directed<Op, float, kSources>;
    else if (ftz) d.in.fn = sat ? arity<kSources, Sat<F32Ftz<Op>>, float>() : arity<kSources, F32Ftz<Op>, float>();
    else d.in.fn = sat ? arity<kSources, Sat<Op>, float>() : arity<kSources, Op, float>();
  } else {
    d.fail("type ." + t.name);
  }
}

template <class Op, int kSources, bool kRelu = false>
void half_width(Decoder& d, const Type& t) {
  same_type_operands(d, t, kSources);
  if (t.name == "bf16") d.in.fn = arity<kSources, Half<Op, Bf16, kRelu>, uint16_t>();
  else if (t.name == "f16") d.in.fn = arity<kSources, Half<Op, F16, kRelu>, uint16_t>();
  else if (t.name == "bf16x2") d.in.fn = arity<kSources, Pair<Half<Op, Bf16, kRelu>>, uint32_t>();
  else if (t.name == "f16x2") d.in.fn = arity<kSources, Pair<Half<Op, F16, kRelu>>, uint32_t>();
  else d.fail("type ." + t.name);
}

bool is_half(const Type& t) { return t.cls == Type::real && (t.bytes == 2 || (t.bytes == 4 && t.name != "f32")); }

template <class Op, int kSources>
void arithmetic(Decoder& d, const Type& t) {
  if constexpr (!std::is_same<Op, Mul>::value) {
    std::string half = t.name == "f32" ? d.take_one({"f16", "bf16"}) : "";
    if (!half.empty()) return mixed_precision<Op, kSources>(d, half == "bf16");
  }
  if (is_half(t)) {
    if (d.take("ftz")) d.fail("`.ftz` on type ." + t.name);
    d.take("rn");
    half_width<Op, kSources>(d, t);
  } else if (t.name == "f32x2") {
    bool ftz = d.take("ftz");
    d.in.kind = ftz;
    d.in.imm = static_cast<uint64_t>(host_mode(d.take_one({"rn", "rz", "rm", "rp"})));
    same_type_operands(d, t, kSources);
    if (d.in.imm != FE_TONEAREST) d.in.fn = directed<Op, float, kSources, 2>;
    else d.in.fn = ftz ? arity<kSources, FloatPair<F32Ftz<Op>>, uint64_t>() : arity<kSources, FloatPair<Op>, uint64_t>();
  } else {
    full_width<Op, kSources>(d, t);
  }
}

template <bool kMax>
void min_max(Decoder& d) {
  Type t = d.type();
  if (t.cls != Type::real) return integer_min_max(d, t, kMax);
  bool ftz = d.take("ftz"), nan = d.take("NaN"), sign = d.take("xorsign");
  if (sign && !d.take("abs")) d.fail("`.xorsign` without `.abs`");
  using E = Extreme<kMax>;
  using N = ExtremeNan<kMax>;
  if (is_half(t)) {
    if (ftz || sign) d.fail("modifier on type ." + t.name);
    nan ? half_width<N, 2>(d, t) : half_width<E, 2>(d, t);
  } else if (t.name == "f64") {
    if (ftz || sign || nan) d.fail("modifier on type .f64");
    same_type_operands(d, t, 2);
    d.in.fn = binary<E, double, double, double>;
  } else if (d.count() == 4) {
    if (sign) d.fail("`.xorsign` of three numbers");
    same_type_operands(d, t, 3);
    if (nan) d.in.fn = ftz ? ternary<F32Ftz<Three<N>>, float, float, float, float> : ternary<Three<N>, float, float, float, float>;
    else d.in.fn = ftz ? ternary<F32Ftz<Three<E>>, float, float, float, float> : ternary<Three<E>, float, float, float, float>;
  } else {
    same_type_operands(d, t, 2);
    if (sign) d.in.fn = nan ? binary<XorSign<N>, float, float, float> : binary<XorSign<E>, float, float, float>;
    else if (nan) d.in.fn = ftz ? binary<F32Ftz<N>, float, float, float> : binary<N, float, float, float>;
    else d.in.fn = ftz ? binary<F32Ftz<E>, float, float, float> : binary<E, float, float, float>;
  }
}

void add_sub(Decoder& d, bool subtract) {
  const auto& opcode = d.source->opcode;
  for (const std::string& m : opcode)
    if (m == "cc") return carry_sum(d, subtract);
  Type t = d.type();
  if (t.cls != Type::real) integer_add(d, t, subtract);
  else if (subtract) arithmetic<Sub, 2>(d, t);
  else arithmetic<Add, 2>(d, t);
}

void neg_abs(Decoder& d, bool absolute) {
  // The sign bit alone changes: right for NaN and subnormals too.
  Type t = d.type();
  if (t.cls != Type::real) return absolute ? integer_abs(d, t) : integer_neg(d, t);
  bool ftz = d.take("ftz");
  same_type_operands(d, t, 1);
  struct Neg16 { static uint16_t of(uint16_t a) { return a ^ 0x8000u; } };
  struct Abs16 { static uint16_t of(uint16_t a) { return a & 0x7fffu; } };
  struct Neg32 { static uint32_t of(uint32_t a) { return a ^ 0x80008000u; } };
  struct Abs32 { static uint32_t of(uint32_t a) { return a & 0x7fff7fffu; } };
  if (t.name == "f32") d.in.fn = ftz ? (absolute ? unary<F32Ftz<Abs>, float, float> : unary<F32Ftz<Neg>, float, float>) : (absolute ? unary<Abs, float, float> : unary<Neg, float, float>);
  else if (t.name == "f64") d.in.fn = absolute ? unary<Abs, double, double> : unary<Neg, double, double>;
  else if (t.bytes == 2) d.in.fn = absolute ? unary<Abs16, uint16_t, uint16_t> : unary<Neg16, uint16_t, uint16_t>;
  else d.in.fn = absolute ? unary<Abs32, uint32_t, uint32_t> : unary<Neg32, uint32_t, uint32_t>;
}

template <class Op, Approximate kFunction>
void function(Decoder& d) {
  Type t = d.type();
  const auto& opcode = d.source->opcode;
  auto has = [&](const char* modifier) { return std::find(opcode.begin(), opcode.end(), modifier) != opcode.end(); };
  if (is_half(t)) {
    if (kFunction != Approximate::ex2 && kFunction != Approximate::tanh) d.fail("type ." + t.name);
    d.drop({"approx", "ftz"});
    half_width<Op, 1>(d, t);
  } else {
    full_width<Op, 1>(d, t);
  }
  if (has("approx") && t.name != "f64") allow_errors(d, kFunction, t, has("ftz"));
}

// ---- comparison ----
enum Compare { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan_ };

template <class T>
uint32_t compare_lanes(const T* a, const T* b, int how) {
  uint32_t r = 0;
  auto each = [&](auto test) { for (int l = 0; l < kLanes; ++l) r |= static_cast<uint32_t>(test(a[l], b[l])) << l; };
  switch (how) {
    case eq: each([](T x, T y) { return x == y; }); break;
    case ne: each([](T x, T y) { return x == x && y == y && x != y; }); break;
    case lt: each([](T x, T y) { return x < y; }); break;
    case le: each([](T x, T y) { return x <= y; }); break;
    case gt: each([](T x, T y) { return x > y; }); break;
    case ge: each([](T x, T y) { return x >= y; }); break;
    case equ: each([](T x, T y) { return x == y || x != x || y != y; }); break;
    case neu: each([](T x, T y) { return x != y; }); break;
    case ltu: each([](T x, T y) { return !(x >= y); }); break;
    case leu: each([](T x, T y) { return !(x > y); }); break;
    case gtu: each([](T x, T y) { return !(x <= y); }); break;
    case geu: each([](T x, T y) { return !(x < y); }); break;
    case num: each([](T x, T y) { return x == x && y == y; }); break;
    default: each([](T x, T y) { return x != x || y != y; });
  }
  return r;
}

// in.kind: comparison | Boolean operator << 8 | negated third operand << 16
template <class T, class Load>
void setp_with(Warp& w, const Instr& in, uint32_t mask, Load load) {
  T a[kLanes], b[kLanes];
  load(in.a[2], a);
  load(in.a[3], b);
  uint32_t r = compare_lanes(a, b, in.kind & 0xff), q = ~r;
  if (int op = in.kind >> 8 & 0xff) {
    uint32_t c = w.pred(in.a[4]);
    if (in.kind >> 16) c = ~c;
    r = op == 1 ? r & c : op == 2 ? r | c : r ^ c;
    q = op == 1 ? q & c : op == 2 ? q | c : q ^ c;
  }
  w.put_pred(in.a[0], r, mask);
  if (in.a[1] >= 0) w.put_pred(in.a[1], q, mask);
}
template <class T>
void setp(Warp& w, const Instr& in, uint32_t mask) {
  setp_with<T>(w, in, mask, [&](Slot s, T* to) { std::memcpy(to, w.reg<T>(s), sizeof(T) * kLanes); });
}
void setp_ftz(Warp& w, const Instr& in, uint32_t mask) {
  setp_with<float>(w, in, mask, [&](Slot s, float* to) { for (int l = 0; l < kLanes; ++l) to[l] = flush(w.reg<float>(s)[l]); });
}
template <class H>
void setp_half(Warp& w, const Instr& in, uint32_t mask) {
  setp_with<float>(w, in, mask, [&](Slot s, float* to) { for (int l = 0; l < kLanes; ++l) to[l] = H::load(w.reg<uint16_t>(s)[l]); });
}

int take_comparison(Decoder& d, const Type& t) {
  static const char* const names[] = {"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
  static const std::pair<const char*, int> unsigned_names[] = {{"lo", lt}, {"ls", le}, {"hi", gt}, {"hs", ge}};
  for (int i = 0; i < 14; ++i)
    if (d.take(names[i])) return i;
  for (auto& u : unsigned_names)
    if (d.take(u.first)) {
      if (t.cls == Type::signed_int || t.cls == Type::real) d.fail("unsigned comparison of type ." + t.name);
      return u.second;
    }
  d.fail("no known comparison");
}

Handler compare_handler(Decoder& d, const Type& t, bool ftz) {
  if (t.name == "f32") return ftz ? setp_ftz : setp<float>;
  if (t.name == "f64") return setp<double>;
  if (t.name == "bf16") return setp_half<Bf16>;
  if (t.name == "f16") return setp_half<F16>;
  bool s = t.cls == Type::signed_int;
  if (t.bytes == 2) return s ? setp<int16_t> : setp<uint16_t>;
  if (t.bytes == 4) return s ? setp<int32_t> : setp<uint32_t>;
  if (t.bytes == 8) return s ? setp<int64_t> : setp<uint64_t>;
  d.fail("type ." + t.name);
}

void decode_setp(Decoder& d) {
  Type t = d.type();
  d.in.kind = take_comparison(d, t);
  bool ftz = d.take("ftz");
  int op = d.take("and") ? 1 : d.take("or") ? 2 : d.take("xor") ? 3 : 0;
  d.expect(op ? 4 : 3, op ? 4 : 3);
  d.in.a[0] = d.predicate_destination(0);
  if (d.operand(0).second >= 0) {
    Operand q = d.operand(0);
    q.index = q.second;
    d.in.a[1] = d.target(q, 0);
  }
  d.in.a[2] = d.source_slot(1, t);
  d.in.a[3] = d.source_slot(2, t);
  if (op) {
    Operand c = d.operand(3);
    d.in.kind |= op << 8 | (c.negated ? 1 << 16 : 0);
    c.negated = false;
    d.in.a[4] = d.value(c, *find_type("pred"));
  }
  d.in.fn = compare_handler(d, t, ftz);
}

// set: the comparison of setp with 1.0 or all ones instead of a predicate.
void set_value(Warp& w, const Instr& in, uint32_t mask) {
  Instr test = in;
  test.a[0] = in.a[5];
  test.a[1] = -1;
  reinterpret_cast<Handler>(in.imm)(w, test, kFullMask);
  uint32_t r = w.pred(in.a[5]), t[kLanes];
  for (int l = 0; l < kLanes; ++l) t[l] = r >> l & 1 ? static_cast<uint32_t>(in.size) : 0;
  w.put(in.a[0], t, mask);
}

void decode_set(Decoder& d) {
  Type result = d.type();
  Type t = d.type();
  d.in.kind = take_comparison(d, t);
  bool ftz = d.take("ftz");
  d.expect(3, 3);
  d.in.a[0] = d.destination(0, 4);
  if (result.bytes != 4) d.fail("set of a result that is not 32 bits wide");
  d.in.a[2] = d.source_slot(1, t);
  d.in.a[3] = d.source_slot(2, t);
  d.in.a[5] = d.scratch();
  d.in.size = result.name == "f32" ? 0x3f800000 : -1;
  d.in.imm = reinterpret_cast<uint64_t>(compare_handler(d, t, ftz));
  d.in.fn = set_value;
}

template <class T>
void selp(Warp& w, const Instr& in, uint32_t mask) {
  const T* a = w.reg<T>(in.a[1]);
  const T* b = w.reg<T>(in.a[2]);
  uint32_t p = w.pred(in.a[3]);
  if (in.kind) p = ~p;
  T t[kLanes];
  for (int l = 0; l < kLanes; ++l) t[l] = p >> l & 1 ? a[l] : b[l];
  w.put(in.a[0], t, mask);
}

void decode_selp(Decoder& d) {
  Type t = d.type();
  d.expect(4, 4);
  Operand p = d.operand(3);
  d.in.kind = p.negated;
  p.negated = false;
  d.in.a = {d.destination(0, t.bytes), d.source_slot(1, t), d.source_slot(2, t), d.value(p, *find_type("pred")), -1, -1};
  d.in.fn = t.bytes == 2 ? selp<uint16_t> : t.bytes == 4 ? selp<uint32_t> : selp<uint64_t>;
}

template <class T>
void slct(Warp& w, const Instr& in, uint32_t mask) {
  const T* a = w.reg<T>(in.a[1]);
  const T* b = w.reg<T>(in.a[2]);
  T t[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    bool first = in.kind ? w.reg<float>(in.a[3])[l] >= 0 : w.reg<int32_t>(in.a[3])[l] >= 0;
    t[l] = first ? a[l] : b[l];
  }
  w.put(in.a[0], t, mask);
}

void testp(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t r = 0;
  for (int l = 0; l < kLanes; ++l) {
    int c = std::fpclassify(w.reg<float>(in.a[1])[l]);
    bool yes = in.kind == 0 ? c != FP_NAN && c != FP_INFINITE : in.kind == 1 ? c == FP_INFINITE : in.kind == 2 ? c != FP_NAN
               : in.kind == 3 ? c == FP_NAN : in.kind == 4 ? c == FP_NORMAL : c == FP_SUBNORMAL;
    r |= static_cast<uint32_t>(yes) << l;
  }
  w.put_pred(in.a[0], r, mask);
}

}  // namespace

void register_float(OpcodeTable& table) {
  table["add"] = [](Decoder& d) { add_sub(d, false); };
  table["sub"] = [](Decoder& d) { add_sub(d, true); };
  table["mul"] = [](Decoder& d) {
    for (const std::string& m : d.source->opcode)
      if (m == "lo" || m == "hi" || m == "wide") return integer_multiply(d);
    arithmetic<Mul, 2>(d, d.type());
  };
  table["fma"] = [](Decoder& d) {
    Type t = d.type();
    if (is_half(t) && d.take("relu")) {
      d.take("rn");
      half_width<Fma, 3, true>(d, t);
    } else {
      arithmetic<Fma, 3>(d, t);
    }
  };
  table["div"] = [](Decoder& d) {
    Type t = d.type();
    if (t.cls == Type::real) full_width<Div, 2>(d, t);
    else integer_divide(d, t);
  };
  table["min"] = min_max<false>;
  table["max"] = min_max<true>;
  table["neg"] = [](Decoder& d) { neg_abs(d, false); };
  table["abs"] = [](Decoder& d) { neg_abs(d, true); };
  table["rcp"] = function<Rcp, Approximate::rcp>;
  table["sqrt"] = function<Sqrt, Approximate::sqrt>;
  table["rsqrt"] = function<Rsqrt, Approximate::rsqrt>;
  table["ex2"] = function<Ex2, Approximate::ex2>;
  table["lg2"] = function<Lg2, Approximate::lg2>;
  table["sin"] = function<Sin, Approximate::sin>;
  table["cos"] = function<Cos, Approximate::cos>;
  table["tanh"] = function<Tanh, Approximate::tanh>;
  table["copysign"] = [](Decoder& d) { full_width<CopySign, 2>(d, d.type()); };
  table["testp"] = [](Decoder& d) {
    static const char* const names[] = {"finite", "infinite", "number", "notanumber", "normal", "subnormal"};
    for (int i = 0; i < 6; ++i)
      if (d.take(names[i])) d.in.kind = i;
    Type t = d.type();
    d.expect(2, 2);
    if (t.name != "f32") d.fail("type ." + t.name);
    d.in.a[0] = d.predicate_destination(0);
    d.in.a[1] = d.source_slot(1, t);
    d.in.fn = testp;
  };
  table["setp"] = decode_setp;
  table["set"] = decode_set;
  table["selp"] = decode_selp;
  table["slct"] = [](Decoder& d) {
    Type t = d.type(), c = d.type();
    d.expect(4, 4);
    d.in.kind = c.name == "f32";
    d.in.a = {d.destination(0, t.bytes), d.source_slot(1, t), d.source_slot(2, t), d.source_slot(3, c), -1, -1};
    d.in.fn = t.bytes == 2 ? slct<uint16_t> : t.bytes == 4 ? slct<uint32_t> : slct<uint64_t>;
  };
}

}  // namespace ptxsim
