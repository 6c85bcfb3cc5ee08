#include "smem_matrix.h"

#include <algorithm>
#include <cmath>

#include "numeric.h"
#include "tensor_map.h"

namespace ptxsim {

MatrixDescriptor decode_wgmma_descriptor(uint64_t bits, bool checked) {
  constexpr uint64_t kReserved = 3ull << 14 | 3ull << 30 | 7ull << 46 | 0x3ffull << 52;
  if (checked && (bits & kReserved))
    throw SimError(format("descriptor: reserved bits of matrix descriptor 0x%016llx are set", static_cast<unsigned long long>(bits)));
  if (bits >> 49 & 7) throw SimError("descriptor: a base offset other than 0 is not modelled");
  static const int swizzles[] = {0, 3, 2, 1};
  MatrixDescriptor d;
  d.start = static_cast<uint32_t>(bits & 0x3fff) << 4;
  d.leading = static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4;
  d.stride = static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4;
  d.swizzle = swizzles[bits >> 62];
  return d;
}

MatrixDescriptor decode_tcgen05_descriptor(uint64_t bits, bool checked) {
  static const int swizzles[] = {0, -1, 3, -1, 2, -1, 1, -1};
  MatrixDescriptor d;
  d.start = static_cast<uint32_t>(bits & 0x3fff) << 4;
  d.leading = static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4;
  d.stride = static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4;
  d.swizzle = swizzles[bits >> 61];
  constexpr uint64_t kReserved = 3ull << 14 | 3ull << 30 | 0xffull << 53;
  if (checked && ((bits & kReserved) || (bits >> 46 & 7) != 1))
    throw SimError(format("descriptor: fixed bits of matrix descriptor 0x%016llx are wrong", static_cast<unsigned long long>(bits)));
  if (bits >> 49 & 7) throw SimError("descriptor: a base offset other than 0 is not modelled");
  if (bits >> 52 & 1) throw SimError("descriptor: absolute leading addresses are not modelled");
  if (d.swizzle < 0) throw SimError(format("descriptor: swizzle mode %d is not modelled", static_cast<int>(bits >> 61)));
  return d;
}

namespace {

std::array<float, 256> table_of(const Format& f) {
  std::array<float, 256> values;
  for (uint32_t i = 0; i < 256; ++i) values[i] = decode(f, i);
  return values;
}

// Byte offset, before swizzling, of a chunk.
uint32_t chunk_offset(const MatrixDescriptor& d, bool k_major, uint32_t row, uint32_t chunk) {
  uint32_t pitch = 16u << d.swizzle;  // bytes of a row within the swizzle pattern; 16 without one
  uint32_t across = 1u << d.swizzle;  // chunks of such a row
  uint32_t in_row = row % 8 * pitch, group = row / 8;
  if (d.swizzle == 0) return in_row + (k_major ? chunk * d.leading + group * d.stride : chunk * d.stride + group * d.leading);
  // K-major operands never leave the pattern's row, so the leading offset has no meaning for them.
  if (k_major) return in_row + chunk * 16 + group * d.stride;
  return in_row + chunk % across * 16 + chunk / across * d.leading + group * d.stride;
}

}  // namespace

namespace {

const Format& narrow_format(Element type) { return type == Element::e2m3 ? kE2m3 : type == Element::e3m2 ? kE3m2 : kE2m1; }

}  // namespace

uint32_t element_at(const uint8_t* from, uint32_t e, uint32_t bits) {
  uint32_t at = e * bits, both = from[at / 8];
  if (at % 8 + bits > 8) both |= static_cast<uint32_t>(from[at / 8 + 1]) << 8;
  return both >> at % 8 & ((1u << bits) - 1);
}

void decode_containers(Element type, const uint8_t* from, uint32_t bytes, float* to) {
  if (!is_padded(type)) return decode_elements(type, from, bytes, to);
  uint32_t bits = element_bits(type), shift = (8 - bits) / 2;
  for (uint32_t i = 0; i < bytes; ++i) to[i] = decode(narrow_format(type), from[i] >> shift & ((1u << bits) - 1));
}

void unpack_containers(Element type, const uint8_t* from, uint8_t* to) {
  uint32_t bits = element_bits(type), shift = (8 - bits) / 2;
  for (uint32_t e = 0; e < 16; ++e) to[e] = static_cast<uint8_t>(element_at(from, e, bits) << shift);
}

void decode_elements(Element type, const uint8_t* from, uint32_t bytes, float* to) {
  static const std::array<float, 256> e4m3 = table_of(kE4m3), e5m2 = table_of(kE5m2);
  if (element_bits(type) < 8) {
    uint32_t bits = element_bits(type), n = chunk_elements(type);
    for (; bytes >= 16; bytes -= 16, from += 16)
      for (uint32_t e = 0; e < n; ++e) *to++ = decode(narrow_format(type), element_at(from, e, bits));
    return;
  }
  uint32_t size = element_bits(type) / 8;
  for (uint32_t e = 0; e < bytes / size; ++e) {
    uint32_t bits = 0;
    std::memcpy(&bits, from + e * size, size);
    switch (type) {
      case Element::f16: to[e] = decode(kF16, bits); break;
      case Element::bf16: to[e] = bf16_to_float(static_cast<uint16_t>(bits)); break;
      case Element::e4m3: to[e] = e4m3[bits]; break;
      case Element::e5m2: to[e] = e5m2[bits]; break;
      case Element::s8: to[e] = static_cast<int8_t>(bits); break;
      case Element::u8: to[e] = static_cast<float>(bits); break;
      default: to[e] = from_bits(bits & ~0x1fffu); break;  // tf32
    }
  }
}

Tile::Tile(const MatrixDescriptor& d, Element e, bool major, uint32_t extent, uint32_t k) : descriptor(d), element(e), k_major(major) {
  rows = k_major ? extent : k;
  chunks = (k_major ? k : extent) / chunk_elements(e);
}

uint32_t Tile::address(uint32_t row, uint32_t chunk) const {
  return swizzle_address(descriptor.start + chunk_offset(descriptor, k_major, row, chunk), descriptor.swizzle);
}

void note_tile(Cta& cta, const Tile& t, const Actor& actor) {
  uint32_t bytes = chunk_bytes(t.element);
  for (uint32_t row = 0; row < t.rows; ++row)
    for (uint32_t chunk = 0; chunk < t.chunks; ++chunk) {
      uint32_t address = t.address(row, chunk);
      cta.shared->at(address, 16, 16);
      cta.shared->note_read(address, bytes, actor);
    }
}

void read_tile(Cta& cta, const Tile& t, float* to, uint32_t mn_stride, uint32_t k_stride, bool negate) {
  uint32_t row_stride = t.k_major ? mn_stride : k_stride, column_stride = t.k_major ? k_stride : mn_stride;
  uint32_t n = chunk_elements(t.element);
  float values[32];
  for (uint32_t row = 0; row < t.rows; ++row)
    for (uint32_t chunk = 0; chunk < t.chunks; ++chunk) {
      decode_elements(t.element, cta.shared->at(t.address(row, chunk), 16, 16), 16, values);
      for (uint32_t e = 0; e < n; ++e) to[row * row_stride + (chunk * n + e) * column_stride] = negate ? -values[e] : values[e];
    }
}

void multiply(float* d, const float* a, const float* b, uint32_t m, uint32_t n, uint32_t k) {
  for (uint32_t i = 0; i < m; ++i) {
    float* row = d + i * n;
    for (uint32_t kk = 0; kk < k; ++kk) {
      float x = a[i * k + kk];
      const float* y = b + kk * n;
      for (uint32_t j = 0; j < n; ++j) row[j] += x * y[j];
    }
  }
}

void multiply_fused(float* d, const float* a, const float* b, uint32_t m, uint32_t n, uint32_t k, const Fusion& fusion) {
  constexpr int kLeast = -126;  // of float32, and the exponent of zero
  auto exponents = [](const float* x, uint32_t count, int least) {
    std::vector<int> e(count);
    for (uint32_t i = 0; i < count; ++i) e[i] = x[i] == 0 || !std::isfinite(x[i]) ? kLeast : std::max(std::ilogb(x[i]), least);
    return e;
  };
  const int least = fusion.half ? -14 : kLeast, kept = fusion.half ? 10 : std::min(23, fusion.fraction);
  std::vector<int> ea = exponents(a, m * k, fusion.least_a), eb = exponents(b, k * n, fusion.least_b), ed = exponents(d, m * n, least);
  for (uint32_t i = 0; i < m; ++i)
    for (uint32_t j = 0; j < n; ++j) {
      float& sum = d[i * n + j];
      double plain = sum;
      int top = ed[i * n + j];
      for (uint32_t kk = 0; kk < k; ++kk) {
        plain += double{a[i * k + kk]} * b[kk * n + j];
        top = std::max(top, ea[i * k + kk] + eb[kk * n + j]);
      }
      if (!std::isfinite(plain)) {
        sum = static_cast<float>(plain);
        continue;
      }
      double unit = std::ldexp(1.0, top - fusion.fraction), total = std::trunc(sum / unit);
      for (uint32_t kk = 0; kk < k; ++kk) total += std::trunc(double{a[i * k + kk]} * b[kk * n + j] / unit);
      total *= unit;
      if (total == 0) {
        sum = 0;
        continue;
      }
      double last = std::ldexp(1.0, std::max(std::ilogb(total), least) - kept);
      sum = static_cast<float>((fusion.half ? std::nearbyint(total / last) : std::trunc(total / last)) * last);
    }
}

void multiply_scaled(float* d, const float* a, const float* b, const float* scale_a, const float* scale_b, uint32_t m, uint32_t n, uint32_t k, uint32_t blocks) {
  uint32_t length = k / blocks;
  std::vector<float> sum(n);
  for (uint32_t i = 0; i < m; ++i)
    for (uint32_t block = 0; block < blocks; ++block) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (uint32_t kk = block * length; kk < (block + 1) * length; ++kk) {
        float x = a[i * k + kk];
        const float* y = b + kk * n;
        for (uint32_t j = 0; j < n; ++j) sum[j] += x * y[j];
      }
      // Two powers of two may be out of float32's range where their product with the sum is not.
      double scale = scale_a[i * blocks + block];
      for (uint32_t j = 0; j < n; ++j) d[i * n + j] += static_cast<float>(sum[j] * (scale * scale_b[j * blocks + block]));
    }
}

}  // namespace ptxsim
