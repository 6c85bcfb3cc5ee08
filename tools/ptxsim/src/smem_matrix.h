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

enum class Element { f16, bf16, e4m3, e5m2, tf32 };
inline uint32_t element_bytes(Element e) { return e == Element::tf32 ? 4 : e == Element::f16 || e == Element::bf16 ? 2 : 1; }
// The elements in `bytes` of memory, as float32.
void decode_elements(Element type, const uint8_t* from, uint32_t bytes, float* to);

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

}  // namespace ptxsim
