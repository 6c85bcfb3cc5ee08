// ldmatrix, stmatrix, movmatrix and mma: the matrix instructions of a single warp.
#include "access.h"
#include "numeric.h"

namespace ptxsim {
namespace {

// in.n: 8x8 matrices; in.kind: 1 = transposed, 2 = 64-bit address. a[0] address, lists: data registers.
// Lane 8 * i + r gives the address of row r of matrix i.
void matrix_rows(Warp& w, const Instr& in, bool writing, uint8_t* rows[32]) {
  for (int l = 0; l < 8 * in.n; ++l) {
    w.lane = l;
    Actor actor = w.actor(l);
    uint64_t address = lane_address(w, in, in.a[0], in.kind & 2, l);
    if (in.kind & 2 && resolve(Space::generic, address) != Space::shared && in.size == 0) throw SimError("matrix row outside shared memory");
    SharedPlace p = shared_place(w, static_cast<uint32_t>(address));
    rows[l] = p.cta->shared->at(p.address, 16, 16);
    note_visit(w, l, *p.cta, actor);
    if (writing) p.cta->shared->note_write(p.address, 16, actor);
    else p.cta->shared->note_read(p.address, 16, actor);
  }
  w.lane = -1;
}

// Offset in 16-bit elements of lane l's element e (0 or 1) in a matrix, as row and column.
void fragment_place(int l, int e, bool transposed, int* row, int* column) {
  *row = transposed ? 2 * (l % 4) + e : l / 4;
  *column = transposed ? l / 4 : 2 * (l % 4) + e;
}

void ldmatrix(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(kFullMask)) return;
  uint8_t* rows[32];
  matrix_rows(w, in, false, rows);
  const int32_t* registers = w.program->lists.data() + in.list;
  for (int i = 0; i < in.n; ++i) {
    uint16_t* to = w.reg<uint16_t>(registers[i]);
    for (int l = 0; l < kLanes; ++l)
      for (int e = 0; e < 2; ++e) {
        int row, column;
        fragment_place(l, e, in.kind & 1, &row, &column);
        std::memcpy(&to[2 * l + e], rows[8 * i + row] + 2 * column, 2);
      }
  }
}

void stmatrix(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(kFullMask)) return;
  uint8_t* rows[32];
  matrix_rows(w, in, true, rows);
  const int32_t* registers = w.program->lists.data() + in.list;
  for (int i = 0; i < in.n; ++i) {
    const uint16_t* from = w.reg<uint16_t>(registers[i]);
    for (int l = 0; l < kLanes; ++l)
      for (int e = 0; e < 2; ++e) {
        int row, column;
        fragment_place(l, e, in.kind & 1, &row, &column);
        std::memcpy(rows[8 * i + row] + 2 * column, &from[2 * l + e], 2);
      }
  }
  ++w.machine->progress;
}

void decode_matrix_access(Decoder& d, bool load) {
  if (!d.take("sync") || !d.take("aligned")) d.fail("without .sync.aligned");
  if (!d.take("m8n8")) d.fail("unknown matrix shape");
  std::string count = d.take_one({"x1", "x2", "x4"});
  if (count.empty()) d.fail("no known number of matrices");
  d.in.n = count[1] - '0';
  if (d.take("trans")) d.in.kind |= 1;
  Space space = take_space(d);
  d.in.size = space == Space::shared;
  Type t = d.type();
  if (t.name != "b16") d.fail("type ." + t.name);
  d.expect(2, 2);
  int base_bytes = 0;
  d.in.a[0] = d.address(d.operand(load ? 1 : 0), &base_bytes);
  if (base_bytes == 8) d.in.kind |= 2;
  const Operand& data = d.operand(load ? 0 : 1);
  if (data.kind == Operand::vector) {
    if (static_cast<int>(data.items.size()) != d.in.n) d.fail("number of registers and of matrices differ");
    for (const Operand& o : data.items) d.list(load ? d.target(o, 4) : d.value(o, *find_type("b32")));
  } else {
    if (d.in.n != 1) d.fail("number of registers and of matrices differ");
    d.list(load ? d.target(data, 4) : d.value(data, *find_type("b32")));
  }
  d.in.fn = load ? ldmatrix : stmatrix;
}

// Each lane holds two elements of an 8x8 matrix of 16-bit elements; transposes it across the warp.
void movmatrix(Warp& w, const Instr& in, uint32_t mask) {
  if (!w.converged(kFullMask)) return;
  uint16_t matrix[8][8];
  std::memcpy(matrix, w.reg<uint16_t>(in.a[1]), sizeof matrix);
  uint32_t t[kLanes];
  for (int l = 0; l < kLanes; ++l) t[l] = static_cast<uint32_t>(matrix[2 * (l % 4) + 1][l / 4]) << 16 | matrix[2 * (l % 4)][l / 4];
  w.put(in.a[0], t, mask);
}

// ---- mma.sync ----
// lists: D (4 or 2 registers), A, B, C. in.kind: format of A | format of B << 4 | half accumulators << 8; in.n: K.
const Format* const kFormats[] = {&kF16, &kBf16, &kE4m3, &kE5m2};

// Element `i` (counted through the registers of a lane) of an operand with `width`-bit elements.
float element(Warp& w, const int32_t* registers, int lane, int i, int width, const Format& format) {
  int per = 32 / width;
  uint32_t bits = w.reg<uint32_t>(registers[i / per])[lane] >> (width * (i % per));
  return decode(format, bits & ((1u << width) - 1));
}

void mma(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(kFullMask)) return;
  const Format& fa = *kFormats[in.kind & 15];
  const Format& fb = *kFormats[in.kind >> 4 & 15];
  bool half = in.kind >> 8;
  int width = (in.kind & 15) < 2 ? 16 : 8, per = 32 / width, k = in.n;
  int accumulators = half ? 2 : 4, a_registers = k * 16 * width / 1024, b_registers = a_registers / 2;
  const int32_t* D = w.program->lists.data() + in.list;
  const int32_t* A = D + accumulators;
  const int32_t* B = A + a_registers;
  const int32_t* C = B + b_registers;
  float a[16][32], b[32][8], c[16][8];
  for (int l = 0; l < kLanes; ++l) {
    int group = l / 4, thread = l % 4;
    for (int r = 0; r < a_registers; ++r)
      for (int e = 0; e < per; ++e)
        a[group + 8 * (r & 1)][thread * per + e + (r >> 1) * 4 * per] = element(w, A, l, r * per + e, width, fa);
    for (int r = 0; r < b_registers; ++r)
      for (int e = 0; e < per; ++e) b[thread * per + e + r * 4 * per][group] = element(w, B, l, r * per + e, width, fb);
    for (int i = 0; i < 4; ++i)
      c[group + 8 * (i >> 1)][2 * thread + (i & 1)] = half ? element(w, C, l, i, 16, kF16) : w.reg<float>(C[i])[l];
  }
  for (int m = 0; m < 16; ++m)
    for (int kk = 0; kk < k; ++kk)
      for (int n = 0; n < 8; ++n) c[m][n] += a[m][kk] * b[kk][n];
  for (int l = 0; l < kLanes; ++l) {
    int group = l / 4, thread = l % 4;
    for (int i = 0; i < 4; ++i) {
      float v = c[group + 8 * (i >> 1)][2 * thread + (i & 1)];
      if (half) w.reg<uint16_t>(D[i >> 1])[2 * l + (i & 1)] = float_to_f16(v);
      else w.reg<float>(D[i])[l] = v;
    }
  }
}

void decode_mma(Decoder& d) {
  if (!d.take("sync") || !d.take("aligned")) d.fail("without .sync.aligned");
  std::string shape = d.take_one({"m16n8k8", "m16n8k16", "m16n8k32"});
  if (shape.empty()) d.fail("unknown matrix shape");
  if (!d.take("row") || !d.take("col")) d.fail("layouts other than .row.col");
  d.in.n = std::stoi(shape.substr(shape.find('k') + 1));
  const auto& op = d.source->opcode;  // ... .dtype.atype.btype.ctype
  std::string types[4];
  for (size_t i = 0; i < 4; ++i) {
    types[i] = op[op.size() - 4 + i];
    d.take(types[i].c_str());
  }
  auto format_of = [&](const std::string& name) {
    static const char* const names[] = {"f16", "bf16", "e4m3", "e5m2"};
    for (int i = 0; i < 4; ++i)
      if (name == names[i]) return i;
    d.fail("elements of type ." + name);
  };
  int fa = format_of(types[1]), fb = format_of(types[2]);
  bool wide = fa < 2, half = types[0] == "f16";
  if ((fb < 2) != wide || (wide && fa != fb) || (wide ? d.in.n > 16 : d.in.n != 32)) d.fail("unknown combination of shape and types");
  if (types[0] != types[3] || (!half && types[0] != "f32")) d.fail("accumulators of type ." + types[0]);
  d.in.kind = fa | fb << 4 | (half ? 1 << 8 : 0);
  size_t a_registers = static_cast<size_t>(d.in.n * 16 * (wide ? 16 : 8) / 1024);
  size_t counts[4] = {half ? 2u : 4u, a_registers, a_registers / 2, half ? 2u : 4u};
  d.expect(4, 4);
  for (size_t i = 0; i < 4; ++i) {
    const Operand& o = d.operand(i);
    size_t n = o.kind == Operand::vector ? o.items.size() : 1;
    if (n != counts[i]) d.fail(format("operand %zu has %zu registers, not %zu", i + 1, n, counts[i]));
    const Type& t = *find_type(i == 0 || i == 3 ? (half ? "b32" : "f32") : "b32");
    for (size_t e = 0; e < n; ++e) {
      const Operand& x = o.kind == Operand::vector ? o.items[e] : o;
      d.list(i == 0 ? d.target(x, 4) : d.value(x, t));
    }
  }
  d.in.fn = mma;
}

}  // namespace

void register_matrix(OpcodeTable& table) {
  table["ldmatrix"] = [](Decoder& d) { decode_matrix_access(d, true); };
  table["stmatrix"] = [](Decoder& d) { decode_matrix_access(d, false); };
  table["movmatrix"] = [](Decoder& d) {
    if (!d.take("sync") || !d.take("aligned") || !d.take("m8n8") || !d.take("trans")) d.fail("unknown form");
    Type t = d.type();
    d.expect(2, 2);
    d.in.a[0] = d.destination(0, 4);
    d.in.a[1] = d.source_slot(1, *find_type("b32"));
    if (t.name != "b16") d.fail("type ." + t.name);
    d.in.fn = movmatrix;
  };
  table["mma"] = decode_mma;
}

}  // namespace ptxsim
