// The simulator's tensor maps: 128 bytes, as the hardware's, but in a format of its own.
#pragma once

#include "common.h"

namespace ptxsim {

struct TensorMap {
  static constexpr uint32_t kBytes = 128;
  static constexpr uint32_t kUsed = 64;  // all is in the first half, as in the hardware's maps: kernels copy that alone
  uint64_t address;
  uint64_t strides[4];   // bytes, of dimensions 1 and up
  uint32_t last[5];      // extent - 1; of dimension 0 in units, as the box
  uint16_t box[5];
  uint8_t type;          // CUtensorMapDataType
  uint8_t rank;
  uint8_t swizzle;       // CUtensorMapSwizzle
  uint8_t nan_fill;
  uint8_t changed;       // by tensormap.replace: its rules are to be checked again where it is used
  uint8_t empty;         // by dimension: tensormap.replace made the extent 0
  // A unit is an element, or of types below 8 bits as many as fill whole bytes of global memory; padding may follow it in
  // shared memory.
  uint8_t unit_elements;
  uint8_t unit_bytes;
  uint8_t shared_bytes;  // of a unit in shared memory
  bool padded() const { return shared_bytes != unit_bytes; }
  void set_type(int type);
  // From and to kUsed bytes of memory. Throws SimError where there is no map of the simulator.
  static TensorMap read(const uint8_t* from);
  void write(uint8_t* to) const;
};

// What cuTensorMapEncodeTiled does: the arguments mean the same and obey the same rules. Throws SimError at a broken one.
TensorMap encode_tiled(int type, int rank, uint64_t address, const uint64_t* extents, const uint64_t* strides,
                       const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int oob_fill);

// What tensormap.replace may change. A new value is as the PTX ISA has it, the ordinal counts dimensions, or strides.
enum class MapField { address, rank, box, extent, stride, element_stride, type, interleave, swizzle, atomicity, fill };
void replace_field(TensorMap& map, MapField field, uint32_t ordinal, uint64_t value);
// Throws unless encode_tiled would make such a map.
void check_changed_map(const TensorMap& map);

// Where byte `address` of shared memory lies under a swizzle mode: 16-byte chunks trade places within 128-byte lines.
inline uint32_t swizzle_address(uint32_t address, int swizzle) {
  switch (swizzle) {
    case 1: return address ^ (address >> 7 & 1) << 4;
    case 2: return address ^ (address >> 7 & 3) << 4;
    case 3: return address ^ (address >> 7 & 7) << 4;
    default: return address;
  }
}

}  // namespace ptxsim
