// mma.sync: a warp multiplies matrices that its registers hold.
#include <algorithm>
#include <cmath>

#include "decode.h"
#include "numeric.h"
#include "smem_matrix.h"

namespace ptxsim {
namespace {

// Elements of A and B. An integer has no format.
struct Multiplicand {
  const char* name;
  int bits;
  const Format* format;
  bool negative;
};
constexpr Multiplicand kMultiplicands[] = {
    {"f16", 16, &kF16, true},  {"bf16", 16, &kBf16, true}, {"tf32", 32, &kTf32, true}, {"e4m3", 8, &kE4m3, true}, {"e5m2", 8, &kE5m2, true},
    {"s8", 8, nullptr, true},  {"u8", 8, nullptr, false},  {"s4", 4, nullptr, true},   {"u4", 4, nullptr, false}, {"f64", 64, nullptr, true},
};
enum Accumulator { kF32Sum, kF16Sum, kS32Sum, kF64Sum };

// in.n: K; in.size: M; lists: registers of D, A, B and C; in.kind: index of A's type | of B's << 4 | accumulator << 8 | satfinite << 12
const Multiplicand& type_a(const Instr& in) { return kMultiplicands[in.kind & 15]; }
const Multiplicand& type_b(const Instr& in) { return kMultiplicands[in.kind >> 4 & 15]; }
Accumulator accumulator(const Instr& in) { return static_cast<Accumulator>(in.kind >> 8 & 15); }
int per_register(const Multiplicand& t) { return t.bits < 32 ? 32 / t.bits : 1; }
// Registers of a lane for A, of `rows` rows, and for B, of eight columns.
int registers_of(const Multiplicand& t, int rows, int k) { return rows * k / kLanes / per_register(t); }
int accumulator_registers(const Instr& in) { return in.size / (accumulator(in) == kF16Sum ? 8 : 4); }

// Element `i`, counted through the registers of a lane.
template <class T>
T element(Warp& w, const int32_t* registers, int lane, int i, const Multiplicand& t) {
  if (t.bits == 64) return static_cast<T>(w.reg<double>(registers[i])[lane]);
  int per = per_register(t);
  uint32_t word = w.reg<uint32_t>(registers[i / per])[lane];
  if (t.bits == 32) return decode(*t.format, word >> 13);  // what follows is ignored
  uint32_t bits = word >> (t.bits * (i % per)) & ((1u << t.bits) - 1);
  if (t.format) return decode(*t.format, bits);
  return static_cast<T>(t.negative && bits >> (t.bits - 1) ? static_cast<int>(bits) - (1 << t.bits) : static_cast<int>(bits));
}

template <class T>
T read_accumulator(Warp& w, const Instr& in, const int32_t* registers, int lane, int i) {
  switch (accumulator(in)) {
    case kF32Sum: return w.reg<float>(registers[i])[lane];
    case kF16Sum: return f16_to_float(w.reg<uint16_t>(registers[i / 2])[2 * lane + i % 2]);
    case kS32Sum: return static_cast<T>(w.reg<int32_t>(registers[i])[lane]);
    default: return static_cast<T>(w.reg<double>(registers[i])[lane]);
  }
}

void write_accumulator(Warp& w, const Instr& in, const int32_t* registers, int lane, int i, double v) {
  switch (accumulator(in)) {
    case kF32Sum: w.reg<float>(registers[i])[lane] = static_cast<float>(v); break;
    case kF16Sum: w.reg<uint16_t>(registers[i / 2])[2 * lane + i % 2] = float_to_f16(static_cast<float>(v)); break;
    case kS32Sum: w.reg<int32_t>(registers[i])[lane] = integer_sum(static_cast<int64_t>(v), in.kind >> 12); break;
    default: w.reg<double>(registers[i])[lane] = v;
  }
}

// Where element `i` of a lane's accumulators lies in the matrix of eight columns.
int place_of(int lane, int i) { return (lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2; }

// Sums are of type T: float64 holds those of integers exactly.
template <class T>
void mma(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(kFullMask)) return;
  const int m = in.size, k = in.n, per = per_register(type_a(in)), row_groups = m / 8;
  const int a_registers = registers_of(type_a(in), m, k), b_registers = registers_of(type_b(in), 8, k);
  const int32_t* D = w.program->lists.data() + in.list;
  const int32_t* A = D + accumulator_registers(in);
  const int32_t* B = A + a_registers;
  const int32_t* C = B + b_registers;
  T a[16 * 64], b[64 * 8], c[16 * 8];
  for (int l = 0; l < kLanes; ++l) {
    int group = l / 4, thread = l % 4;
    for (int r = 0; r < a_registers; ++r)
      for (int e = 0; e < per; ++e)
        a[(group + 8 * (r % row_groups)) * k + (r / row_groups * 4 + thread) * per + e] = element<T>(w, A, l, r * per + e, type_a(in));
    for (int r = 0; r < b_registers; ++r)
      for (int e = 0; e < per; ++e) b[((r * 4 + thread) * per + e) * 8 + group] = element<T>(w, B, l, r * per + e, type_b(in));
    for (int i = 0; i < m / 4; ++i) c[place_of(l, i)] = read_accumulator<T>(w, in, C, l, i);
  }
  if constexpr (std::is_same<T, double>::value) {
    for (int i = 0; i < m; ++i)
      for (int kk = 0; kk < k; ++kk)
        for (int n = 0; n < 8; ++n) c[i * 8 + n] = std::fma(a[i * k + kk], b[kk * 8 + n], c[i * 8 + n]);
  } else if (w.machine->launch.chip_accuracy) {
    Fusion fusion{25, 1 - type_a(in).format->bias, 1 - type_b(in).format->bias, accumulator(in) == kF16Sum};
    multiply_fused(c, a, b, static_cast<uint32_t>(m), 8, static_cast<uint32_t>(k), fusion);
  } else {
    multiply(c, a, b, static_cast<uint32_t>(m), 8, static_cast<uint32_t>(k));
  }
  for (int l = 0; l < kLanes; ++l)
    for (int i = 0; i < m / 4; ++i) write_accumulator(w, in, D, l, i, c[place_of(l, i)]);
}

bool shape_exists(const Multiplicand& a, const Multiplicand& b, int m, int k) {
  bool same = &a == &b || (a.bits == b.bits && a.bits <= 8 && !a.format == !b.format);
  if (a.bits == 64) return same && (m == 8 ? k == 4 : k == 4 || k == 8 || k == 16);
  bool integer = !a.format;
  int row = k * a.bits;  // bits of a row of A
  return same && (m == 8 ? integer && row == 128 : row == 128 || row == 256);
}

void decode_mma(Decoder& d) {
  if (!d.take("sync") || !d.take("aligned")) d.fail("without .sync.aligned");
  std::string shape = d.take_one({"m8n8k4", "m8n8k16", "m8n8k32", "m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32", "m16n8k64"});
  if (shape.empty()) d.fail("unknown matrix shape");
  const auto& op = d.source->opcode;
  auto layout = std::find(op.begin(), op.end(), shape) + 1;
  if (op.end() - layout < 2 || layout[0] != "row" || layout[1] != "col") d.fail("layouts other than .row.col");
  d.take("row");
  d.take("col");
  d.in.size = shape[1] == '8' ? 8 : 16;
  d.in.n = std::stoi(shape.substr(shape.find('k') + 1));
  bool satfinite = d.take("satfinite");
  std::vector<std::string> types;  // of D, A, B and C
  for (const std::string& m : op)
    for (const char* name : {"f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "s4", "u4", "f64", "f32", "s32"})
      if (m == name) types.push_back(m);
  if (types.size() != 4) d.fail("no four known types");
  for (const std::string& t : types) d.take(t.c_str());
  auto index_of = [&](const std::string& name) {
    for (int i = 0; i < 10; ++i)
      if (name == kMultiplicands[i].name) return i;
    d.fail("elements of type ." + name);
  };
  int ia = index_of(types[1]), ib = index_of(types[2]);
  const Multiplicand &a = kMultiplicands[ia], &b = kMultiplicands[ib];
  if (!shape_exists(a, b, d.in.size, d.in.n)) d.fail("unknown combination of shape and types");
  bool integer = !a.format && a.bits != 64;
  bool half = types[0] == "f16" && (a.format == &kF16 || (a.format && a.bits == 8));
  std::string sum = integer ? "s32" : a.bits == 64 ? "f64" : half ? "f16" : "f32";
  if (types[0] != sum || types[3] != sum) d.fail("accumulators of type ." + types[0] + " and ." + types[3]);
  if (satfinite && !integer) d.fail("`.satfinite` of real numbers");
  if (a.bits == 64) d.take("rn");
  Accumulator accumulators = integer ? kS32Sum : a.bits == 64 ? kF64Sum : half ? kF16Sum : kF32Sum;
  d.in.kind = ia | ib << 4 | accumulators << 8 | satfinite << 12;
  int counts[4] = {accumulator_registers(d.in), registers_of(a, d.in.size, d.in.n), registers_of(b, 8, d.in.n), accumulator_registers(d.in)};
  d.expect(4, 4);
  const Type& word = *find_type("b32");
  const Type& number = *find_type(a.bits == 64 ? "f64" : sum == "f32" ? "f32" : "b32");
  for (size_t i = 0; i < 4; ++i) {
    const Operand& o = d.operand(i);
    size_t n = o.kind == Operand::vector ? o.items.size() : 1;
    if (n != static_cast<size_t>(counts[i])) d.fail(format("operand %zu has %zu registers, not %d", i + 1, n, counts[i]));
    const Type& t = i == 0 || i == 3 || a.bits == 64 ? number : word;
    for (size_t e = 0; e < n; ++e) {
      const Operand& x = o.kind == Operand::vector ? o.items[e] : o;
      d.list(i == 0 ? d.target(x, t.bytes) : d.value(x, t));
    }
  }
  d.in.fn = integer || a.bits == 64 ? mma<double> : mma<float>;
}

}  // namespace

void register_mma(OpcodeTable& table) { table["mma"] = decode_mma; }

}  // namespace ptxsim
