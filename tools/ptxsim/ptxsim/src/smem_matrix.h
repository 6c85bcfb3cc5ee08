// Matrices in shared memory as the tensor cores' descriptors name them.
#pragma once

#include "core.h"

namespace ptxsim {

// A descriptor, taken apart. Offsets are in bytes.
struct MatrixDescriptor {
  uint32_t start;
  uint32_t leading;  // LBO
  uint32_t stride;   // SBO
  int swizzle;       // as in a tensor map: 0 none, 1 32 B, 2 64 B, 3 128 B
};

// The wgmma (sm_90) encoding. Throws SimError at reserved bits that are set and at modes that do not exist.
MatrixDescriptor decode_wgmma_descriptor(uint64_t bits, bool checked);

// The tcgen05 (sm_100) encoding.
MatrixDescriptor decode_tcgen05_descriptor(uint64_t bits, bool checked);

// Types below 8 bits come in two forms: packed (e2m1_packed), or sixteen elements in the first bytes of a chunk of
// sixteen bytes, which padding fills up.
enum class Element { f16, bf16, e4m3, e5m2, tf32, s8, u8, e2m1, e2m3, e3m2, e2m1_packed };
inline uint32_t element_bits(Element e) {
  switch (e) {
    case Element::tf32: return 32;
    case Element::f16: case Element::bf16: return 16;
    case Element::e2m3: case Element::e3m2: return 6;
    case Element::e2m1: case Element::e2m1_packed: return 4;
    default: return 8;
  }
}
// Of the smallest normal number of the types that wgmma has.
inline int least_exponent(Element e) { return e == Element::e4m3 ? -6 : e == Element::f16 || e == Element::e5m2 ? -14 : -126; }
inline bool is_padded(Element e) { return e == Element::e2m1 || e == Element::e2m3 || e == Element::e3m2; }
// What a chunk of 16 bytes holds.
inline uint32_t chunk_elements(Element e) { return is_padded(e) ? 16 : 128 / element_bits(e); }
inline uint32_t chunk_bytes(Element e) { return chunk_elements(e) * element_bits(e) / 8; }  // without the padding
// Element `e`, of `bits` bits, of those that follow one another from `from` on.
uint32_t element_at(const uint8_t* from, uint32_t e, uint32_t bits);
// `bytes` of memory, whole chunks of a padded type, as float32.
void decode_elements(Element type, const uint8_t* from, uint32_t bytes, float* to);
// The same where each element has a byte of its own, as in tensor memory: its bits lie in the middle.
void decode_containers(Element type, const uint8_t* from, uint32_t bytes, float* to);
// Makes such bytes from the elements of a chunk of a padded type.
void unpack_containers(Element type, const uint8_t* from, uint8_t* to);

// An operand in shared memory. Rows are M or N, and chunks of 16 bytes lie along K, for a K-major matrix; for an
// MN-major one rows are K and chunks lie along M or N.
struct Tile {
  MatrixDescriptor descriptor;
  Element element;
  bool k_major;
  uint32_t rows, chunks;
  // `extent` elements of M or N, `k` of K.
  Tile(const MatrixDescriptor& descriptor, Element element, bool k_major, uint32_t extent, uint32_t k);
  uint32_t address(uint32_t row, uint32_t chunk) const;
};

// Notes the read of a whole tile of the CTA's shared memory.
void note_tile(Cta& cta, const Tile& tile, const Actor& actor);
// Elements to to[mn * mn_stride + k * k_stride].
void read_tile(Cta& cta, const Tile& tile, float* to, uint32_t mn_stride, uint32_t k_stride, bool negate);
// d[m][n] += a[m][k] * b[k][n]
void multiply(float* d, const float* a, const float* b, uint32_t m, uint32_t n, uint32_t k);
// The same as Hopper's tensor cores do it (MMA-Sim, arXiv 2511.10909): the products and d are aligned to the largest of
// their exponents and cut off `fraction` bits below it, summed exactly, and cut to the bits that a result keeps.
struct Fusion {
  int fraction;        // 25; 13 of 8-bit types in wgmma
  int least_a, least_b;  // exponents of the smallest normal numbers: subnormals are not normalised
  bool half;           // sums are f16, and rounded to the nearest; otherwise float32 with at most `fraction` bits
};
void multiply_fused(float* d, const float* a, const float* b, uint32_t m, uint32_t n, uint32_t k, const Fusion& fusion);
// The same with scale factors: k falls into `blocks` blocks, whose sums are scaled with scale_a[m][block] * scale_b[n][block].
void multiply_scaled(float* d, const float* a, const float* b, const float* scale_a, const float* scale_b, uint32_t m, uint32_t n, uint32_t k, uint32_t blocks);

}  // namespace ptxsim
