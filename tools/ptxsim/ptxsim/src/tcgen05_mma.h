// tcgen05.mma: what an instruction descriptor says, where operands lie in tensor memory, and the product itself.
#pragma once

#include "smem_matrix.h"
#include "tcgen05.h"

namespace ptxsim {

// The block-scaled kinds come last.
enum MmaKind { kind_f16, kind_tf32, kind_f8f6f4, kind_i8, kind_mxf8f6f4, kind_mxf4, kind_mxf4nvf4 };

struct MmaShape {
  uint32_t m, n, k;
  Element a, b;
  bool half_d = false, integer = false, saturate = false, negate_a, negate_b, a_mn, b_mn;
  uint32_t blocks = 0;  // of k, each with its scale factors; 0: not scaled
  bool ue8m0 = false;
  uint32_t sfa_id = 0, sfb_id = 0;
};

// Kinds f16, tf32, f8f6f4 and i8; ws: weight stationary.
MmaShape decode_shape(uint32_t bits, int kind, bool two_ctas, bool ws);
// Kinds mxf8f6f4, mxf4 and mxf4nvf4.
MmaShape decode_scaled_shape(uint32_t bits, int kind, uint32_t blocks, bool two_ctas);

struct MmaOperation {
  MmaShape shape;
  bool two_ctas, ws, a_in_tensor, ashift, accumulate;
  uint32_t d, a_tensor, sfa, sfb;
  uint64_t a, b;  // descriptors
  float scale_d;
  std::array<uint32_t, 8> disabled;
  std::vector<Cta*> ctas;  // lower rank first
  uint32_t rows() const { return shape.m / static_cast<uint32_t>(ctas.size()); }     // of A and D in one CTA
  uint32_t columns() const { return shape.n / static_cast<uint32_t>(ctas.size()); }  // of B in one CTA

  // Data paths that rows leave free take a share of the columns: 64 rows halves of them, 32 rows quarters. Each group
  // of data paths reads A, where it lies in tensor memory, and scale factors in lanes of its own. The 64 rows of a
  // product of one CTA that is not weight stationary use half of each warp's lanes instead.
  bool halved() const { return rows() == 64 && !two_ctas && !ws; }
  uint32_t groups() const { return halved() ? 1 : 128 / rows(); }
  uint32_t width() const { return shape.n / groups(); }  // columns of a group
  // From the address of D, or of A in tensor memory.
  uint32_t lane(uint32_t row, uint32_t group) const { return (halved() ? row / 16 * 32 + row % 16 : row) + group * (kTensorLanes / groups()); }
  bool is_disabled(size_t cta, uint32_t row, uint32_t group) const { return disabled[cta * 4 + lane(row, group) / 32] >> (lane(row, group) % 32) & 1; }
  uint32_t words_of_a() const { return shape.k * (shape.a == Element::e2m1_packed ? 4 : std::max(8u, element_bits(shape.a))) / 32; }
  Tile tile_a(bool checked) const { return Tile(decode_tcgen05_descriptor(a, checked), shape.a, !shape.a_mn, rows(), shape.k); }
  Tile tile_b(bool checked) const { return Tile(decode_tcgen05_descriptor(b, checked), shape.b, !shape.b_mn, columns(), shape.k); }
};

// Scale factors of A: a row's lie in lane row % 32 of column row / 32, and so in each quarter of the lanes. Those of B
// do the same with n, all of them in each CTA; where the columns fall into two groups, in the quarters of each group
// are those of its columns. The id is the first byte of the column's four that holds one.
// Visits f(row or n, address of its bytes in a quarter).
template <class F>
void for_each_scale(Cta& cta, uint32_t address, uint32_t id, uint32_t count, uint32_t quarter, F f) {
  for (uint32_t i = 0; i < count; ++i)
    f(i, tensor_place(cta, (address >> 16) + quarter * 32 + i % 32, (address & 0xffff) + i / 32, 1) + id);
}

void perform(const MmaOperation& op, bool checked);

// 31 rows of 32 bytes, of a warp's lanes from `lane` on, become what the row below holds; the last one stays.
constexpr uint32_t kShiftedColumns = 8;
void shift_rows(Cta& cta, uint32_t lane, uint32_t column);

}  // namespace ptxsim
