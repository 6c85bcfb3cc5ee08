// ldmatrix, stmatrix and movmatrix: matrices between the registers of a warp and shared memory.
#include "access.h"
#include "smem_matrix.h"

namespace ptxsim {
namespace {

// in.n: data registers, each with eight rows of 16 bytes; in.kind: 1 = transposed, 2 = 64-bit address, bits of an element
// << 2. a[0] address, lists: data registers. Lane r gives the address of row r; matrices follow one another.
int matrix_bits(const Instr& in) { return in.kind >> 2; }

void matrix_rows(Warp& w, const Instr& in, bool writing, uint8_t* rows[32]) {
  uint32_t bytes = matrix_bits(in) < 8 ? static_cast<uint32_t>(2 * matrix_bits(in)) : 16;  // padding follows
  for (int l = 0; l < 8 * in.n; ++l) {
    w.lane = l;
    Actor actor = w.actor(l);
    uint64_t address = lane_address(w, in, in.a[0], in.kind & 2, l);
    if (in.kind & 2 && resolve(Space::generic, address) != Space::shared && in.size == 0) throw SimError("matrix row outside shared memory");
    SharedPlace p = shared_place(w, static_cast<uint32_t>(address));
    rows[l] = p.cta->shared->at(p.address, 16, 16);
    note_visit(w, l, *p.cta, actor);
    if (writing) p.cta->shared->note_write(p.address, bytes, actor);
    else p.cta->shared->note_read(p.address, bytes, actor);
  }
  w.lane = -1;
}

// Offset in 16-bit elements of lane l's element e (0 or 1) in a matrix, as row and column.
void fragment_place(int l, int e, bool transposed, int* row, int* column) {
  *row = transposed ? 2 * (l % 4) + e : l / 4;
  *column = transposed ? l / 4 : 2 * (l % 4) + e;
}

template <bool kLoad>
void copy_matrices(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(kFullMask)) return;
  uint8_t* rows[32];
  matrix_rows(w, in, !kLoad, rows);
  const int32_t* registers = w.program->lists.data() + in.list;
  for (int i = 0; i < in.n; ++i) {
    uint16_t* fragment = w.reg<uint16_t>(registers[i]);
    for (int l = 0; l < kLanes; ++l)
      for (int e = 0; e < 2; ++e) {
        int row, column;
        fragment_place(l, e, in.kind & 1, &row, &column);
        uint8_t* element = rows[8 * i + row] + 2 * column;
        if (kLoad) std::memcpy(&fragment[2 * l + e], element, 2);
        else std::memcpy(element, &fragment[2 * l + e], 2);
      }
  }
  if (!kLoad) ++w.machine->progress;
}

// Rows of 16 elements, each in a byte of its own once it is in a register. An 8x16 matrix takes a register: a lane has
// four neighbours of a row. A transposed 16x16 one takes two, for the left and the right half: a lane has four of a column.
void ldmatrix_bytes(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(kFullMask)) return;
  uint8_t* rows[32];
  matrix_rows(w, in, false, rows);
  const int32_t* registers = w.program->lists.data() + in.list;
  for (int i = 0; i < in.n; ++i) {
    uint8_t* to = w.reg<uint8_t>(registers[i]);
    for (int l = 0; l < kLanes; ++l)
      for (int e = 0; e < 4; ++e) {
        bool transposed = in.kind & 1;
        int row = transposed ? 16 * (i / 2) + 4 * (l % 4) + e : 8 * i + l / 4;
        int column = transposed ? 8 * (i % 2) + l / 4 : 4 * (l % 4) + e;
        to[4 * l + e] = static_cast<uint8_t>(element_at(rows[row], static_cast<uint32_t>(column), static_cast<uint32_t>(matrix_bits(in))));
      }
  }
}

// 16x8 matrices, whose columns are the rows in memory.
void stmatrix_bytes(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(kFullMask)) return;
  uint8_t* rows[32];
  matrix_rows(w, in, true, rows);
  const int32_t* registers = w.program->lists.data() + in.list;
  for (int i = 0; i < in.n; ++i)
    for (int l = 0; l < kLanes; ++l)
      for (int e = 0; e < 4; ++e) rows[8 * i + 2 * (l % 4) + e % 2][l / 4 + 8 * (e / 2)] = w.reg<uint8_t>(registers[i])[4 * l + e];
  ++w.machine->progress;
}

void decode_matrix_access(Decoder& d, bool load) {
  if (!d.take("sync") || !d.take("aligned")) d.fail("without .sync.aligned");
  std::string shape = d.take_one({"m8n8", "m8n16", "m16n16", "m16n8"});
  if (shape.empty()) d.fail("unknown matrix shape");
  std::string count = d.take_one({"x1", "x2", "x4"});
  if (count.empty()) d.fail("no known number of matrices");
  d.in.n = count[1] - '0';
  if (shape == "m16n16") d.in.n *= 2;
  if (d.in.n > 4) d.fail("too many matrices");
  bool transposed = d.take("trans");
  Space space = take_space(d);
  d.in.size = space == Space::shared;
  std::string packed = d.take("b8x16") ? d.take_one({"b6x16_p32", "b4x16_p64"}) : "";
  std::string type = packed.empty() ? d.type().name : packed;
  int bits = type == "b16" ? 16 : type == "b8" ? 8 : type == "b6x16_p32" ? 6 : type == "b4x16_p64" ? 4 : 0;
  bool exists = shape == "m8n8" ? bits == 16 : shape == "m16n8" ? !load && bits == 8 && transposed
                : shape == "m8n16" ? load && bits && bits < 8 && !transposed : load && bits && bits <= 8 && transposed;
  if (!exists) d.fail("no such combination of shape, type ." + type + " and transposition");
  d.in.kind = transposed | bits << 2;
  d.expect(2, 2);
  d.in.a[0] = d.address(load ? 1 : 0, 2);
  const Operand& data = d.operand(load ? 0 : 1);
  if (data.kind == Operand::vector) {
    if (static_cast<int>(data.items.size()) != d.in.n) d.fail("number of registers and of matrices differ");
    for (const Operand& o : data.items) d.list(load ? d.target(o, 4) : d.value(o, *find_type("b32")));
  } else {
    if (d.in.n != 1) d.fail("number of registers and of matrices differ");
    d.list(load ? d.target(data, 4) : d.value(data, *find_type("b32")));
  }
  d.in.fn = bits != 16 ? (load ? ldmatrix_bytes : stmatrix_bytes) : load ? copy_matrices<true> : copy_matrices<false>;
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
}

}  // namespace ptxsim
