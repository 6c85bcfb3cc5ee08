#include "tcgen05_mma.h"

#include <algorithm>

#include "numeric.h"

namespace ptxsim {
namespace {

struct DescriptorBits {
  uint32_t bits;
  uint32_t field(uint32_t first, uint32_t count) const { return bits >> first & ((1u << count) - 1); }
  void require(bool holds, const std::string& what) const {
    if (!holds) throw SimError(format("descriptor: instruction descriptor 0x%08x: %s", bits, what.c_str()));
  }
  Element narrow(uint32_t first) const {
    static const Element types[] = {Element::e4m3, Element::e5m2, Element::tf32, Element::e2m3, Element::e3m2, Element::e2m1};
    uint32_t code = field(first, 3);
    require(code <= 5 && code != 2, "element type");
    return types[code];
  }
  // Fields that lie alike in all kinds.
  MmaShape common() const {
    require(!field(2, 1), "sparse operands are not modelled");
    MmaShape s;
    s.negate_a = field(13, 1);
    s.negate_b = field(14, 1);
    s.a_mn = field(15, 1);
    s.b_mn = field(16, 1);
    s.n = field(17, 6) * 8;
    return s;
  }
  void require_n(const MmaShape& s, uint32_t step, bool two_ctas) const {
    // A chunk of an N-major B holds sixteen elements, padded ones too.
    if (s.b_mn && chunk_elements(s.b) == 16) step = std::max(step, two_ctas ? 32u : 16u);
    require(s.n >= step && s.n <= 256 && s.n % step == 0, "N");
  }
};

Element element_type(const DescriptorBits& d, int kind, uint32_t first) {
  if (kind == kind_f8f6f4) return d.narrow(first);
  uint32_t code = d.field(first, 3);
  d.require(kind == kind_tf32 ? code == 2 : code <= 1, "element type");
  if (kind == kind_i8) return code ? Element::s8 : Element::u8;
  return kind == kind_tf32 ? Element::tf32 : code ? Element::bf16 : Element::f16;
}

// Of one product, which float32 holds exactly, added to an accumulator.
uint32_t add_integer(uint32_t accumulator, float product, bool saturate) {
  int64_t sum = static_cast<int64_t>(static_cast<int32_t>(accumulator)) + static_cast<int64_t>(product);
  if (saturate) sum = std::min<int64_t>(std::max<int64_t>(sum, INT32_MIN), INT32_MAX);
  return static_cast<uint32_t>(sum);
}

// Those of a group's columns, or of A, which each of `quarters` quarters from the first one on holds.
void read_scales(Cta& cta, uint32_t address, uint32_t id, const MmaShape& s, uint32_t count, uint32_t first, uint32_t quarters, std::vector<float>* to) {
  TrackedMemory& tensor = tensor_memory(cta);
  to->resize(count * s.blocks);
  for_each_scale(cta, address, id, count, first, [&](uint32_t i, uint32_t place) {
    const uint8_t* bytes = tensor.at(place, s.blocks, 1);
    for (uint32_t b = 0; b < s.blocks; ++b) (*to)[i * s.blocks + b] = s.ue8m0 ? ue8m0_to_float(bytes[b]) : decode(kE4m3, bytes[b] & 0x7f);
    if (!cta.cluster->machine->checking(kScaleFactors)) return;
    for (uint32_t quarter = 1; quarter < quarters; ++quarter)
      if (std::memcmp(bytes, bytes + quarter * 32 * kLaneBytes, s.blocks)) {
        uint32_t lane = (address >> 16) + first * 32 + i % 32;
        throw SimError(format("scale_factors: those at lane %u, column %u differ from their copy at lane %u", lane, (address & 0xffff) + i / 32, lane + quarter * 32));
      }
  });
}

}  // namespace

MmaShape decode_shape(uint32_t bits, int kind, bool two_ctas, bool ws) {
  DescriptorBits d{bits};
  d.require((bits & (1u << 6 | 1u << 23 | 1u << 29)) == 0, "reserved bits are set");
  d.require((bits & (kind == kind_i8 ? 3 : 11)) == 0, "the selector of sparse operands or the saturation of integers is set");
  MmaShape s = d.common();
  s.a = element_type(d, kind, 7);
  s.b = element_type(d, kind, 10);
  d.require(kind != kind_f16 || s.a == s.b, "A and B of different types");
  s.integer = kind == kind_i8;
  s.saturate = d.field(3, 1);
  d.require(!s.integer || (!s.negate_a && !s.negate_b), "integers cannot be negated");
  uint32_t to = d.field(4, 2);
  d.require(s.integer ? to == 2 : to == 1 || (to == 0 && kind != kind_tf32 && s.a != Element::bf16), "accumulator type");
  s.half_d = to == 0;
  s.m = d.field(24, 5) * 16;
  s.k = kind == kind_tf32 ? 8 : kind == kind_f16 ? 16 : 32;
  if (ws) {
    d.require(s.m == 32 || s.m == 64 || s.m == 128, "M");
    d.require(s.n == 64 || s.n == 128 || s.n == 256, "N");
    return s;
  }
  d.require(two_ctas ? s.m == 128 || s.m == 256 : s.m == 64 || s.m == 128, "M");
  uint32_t step = two_ctas ? 16 : 8;
  if (s.integer && (two_ctas || s.n > 32)) step *= 2;
  d.require_n(s, step, two_ctas);
  return s;
}

MmaShape decode_scaled_shape(uint32_t bits, int kind, uint32_t blocks, bool two_ctas) {
  DescriptorBits d{bits};
  bool fp4 = kind != kind_mxf8f6f4;
  d.require((bits & (3u | 1u << 3 | 1u << 6 | 7u << 24 | (fp4 ? 1u << 12 : 1u << 31))) == 0, "reserved bits are set");
  d.require(!d.field(31, 1), "K of 96, which only sm_103a has");
  MmaShape s = d.common();
  if (fp4) {
    d.require(d.field(7, 3) == 1 && d.field(10, 2) == 1, "element type");
    d.require(!s.a_mn && !s.b_mn, "operands of four bits cannot be transposed");
    s.a = s.b = Element::e2m1_packed;
  } else {
    s.a = d.narrow(7);
    s.b = d.narrow(10);
  }
  s.k = fp4 ? 64 : 32;
  s.blocks = blocks;
  s.ue8m0 = d.field(23, 1);
  d.require(s.ue8m0 || blocks == 4, "scale factor type");
  s.sfb_id = d.field(4, 2);
  s.sfa_id = d.field(29, 2);
  d.require(s.sfa_id % blocks == 0 && s.sfb_id % blocks == 0, format("scale factor ids %u and %u: they must be multiples of %u", s.sfa_id, s.sfb_id, blocks));
  s.m = d.field(27, 2) * 128;
  d.require(s.m == 128 || (two_ctas && s.m == 256), "M");
  d.require_n(s, two_ctas ? 16 : 8, two_ctas);
  return s;
}

void shift_rows(Cta& cta, uint32_t lane, uint32_t column) {
  for (uint32_t row = lane; row < lane + 31; ++row)
    std::memcpy(tensor_words(cta, row, column, kShiftedColumns), tensor_words(cta, row + 1, column, kShiftedColumns), kShiftedColumns * 4);
}

void perform(const MmaOperation& op, bool checked) {
  const MmaShape& s = op.shape;
  uint32_t rows = op.rows(), width = op.width(), groups = op.groups();
  static thread_local std::vector<float> a, b, part, d, scale_a, scale_b;
  b.resize(s.k * s.n);
  for (size_t i = 0; i < op.ctas.size(); ++i) read_tile(*op.ctas[i], op.tile_b(checked), b.data() + i * op.columns(), 1, s.n, s.negate_b);
  for (size_t i = 0; i < op.ctas.size(); ++i) {
    Cta& cta = *op.ctas[i];
    a.resize(rows * s.k);
    if (!op.a_in_tensor) read_tile(cta, op.tile_a(checked), a.data(), s.k, 1, s.negate_a);
    if (s.blocks) read_scales(cta, op.sfa, s.sfa_id, s, rows, 0, 4, &scale_a);
    for (uint32_t group = 0; group < groups; ++group) {
      if (op.a_in_tensor) {
        for (uint32_t row = 0; row < rows; ++row) {
          const uint32_t* words = tensor_words(cta, (op.a_tensor >> 16) + op.lane(row, group), op.a_tensor & 0xffff, op.words_of_a());
          decode_containers(s.a, reinterpret_cast<const uint8_t*>(words), op.words_of_a() * 4, a.data() + row * s.k);
        }
        if (s.negate_a) for (float& v : a) v = -v;
      }
      const float* columns = b.data();
      if (groups > 1) {
        part.resize(s.k * width);
        for (uint32_t k = 0; k < s.k; ++k) std::copy_n(columns + k * s.n + group * width, width, part.data() + k * width);
        columns = part.data();
      }
      d.assign(rows * width, 0.0f);
      auto words = [&](uint32_t row) { return tensor_words(cta, (op.d >> 16) + op.lane(row, group), op.d & 0xffff, width); };
      if (op.accumulate && !s.integer)
        for (uint32_t row = 0; row < rows; ++row) {
          const uint32_t* held = words(row);
          for (uint32_t n = 0; n < width; ++n)
            d[row * width + n] = (s.half_d ? f16_to_float(static_cast<uint16_t>(held[n])) : from_bits(held[n])) * op.scale_d;
        }
      if (s.blocks) {
        read_scales(cta, op.sfb, s.sfb_id, s, width, group * (4 / groups), 4 / groups, &scale_b);
        multiply_scaled(d.data(), a.data(), columns, scale_a.data(), scale_b.data(), rows, width, s.k, s.blocks);
      } else {
        multiply(d.data(), a.data(), columns, rows, width, s.k);
      }
      for (uint32_t row = 0; row < rows; ++row) {
        if (op.is_disabled(i, row, group)) continue;
        uint32_t* held = words(row);
        for (uint32_t n = 0; n < width; ++n) {
          float v = d[row * width + n];
          held[n] = s.integer ? add_integer(op.accumulate ? held[n] : 0, v, s.saturate) : s.half_d ? float_to_f16(v) : to_bits(v);
        }
      }
    }
    if (op.ashift)
      for (uint32_t quarter = 0; quarter < 4; ++quarter) shift_rows(cta, (op.a_tensor >> 16) + quarter * 32, op.a_tensor & 0xffff);
  }
}

}  // namespace ptxsim
