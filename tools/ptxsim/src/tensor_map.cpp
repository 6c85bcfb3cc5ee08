#include "tensor_map.h"

namespace ptxsim {
namespace {
// By CUtensorMapDataType; 0: not supported here.
constexpr int kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4, 0, 0, 0};
constexpr uint32_t kSpan[] = {0, 32, 64, 128};

void require(bool holds, const std::string& rule) {
  if (!holds) throw SimError("tensor map: " + rule);
}
}  // namespace

TensorMap encode_tiled(int type, int rank, uint64_t address, const uint64_t* extents, const uint64_t* strides,
                       const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int oob_fill) {
  require(type >= 0 && type < 16 && kElementBytes[type], format("data type %d is not supported", type));
  require(rank >= 1 && rank <= 5, format("rank %d; 1 to 5 are possible", rank));
  require(address % 16 == 0, "the global address must be a multiple of 16");
  require(interleave == 0, "interleaved layouts are not supported");
  require(swizzle >= 0 && swizzle <= 3, format("swizzle mode %d is not supported", swizzle));
  TensorMap map{};
  map.magic = TensorMap::kMagic;
  map.address = address;
  map.type = static_cast<uint8_t>(type);
  map.rank = static_cast<uint8_t>(rank);
  map.swizzle = static_cast<uint8_t>(swizzle);
  map.nan_fill = oob_fill != 0;
  map.element_bytes = static_cast<uint8_t>(kElementBytes[type]);
  require(!map.nan_fill || (type >= 6 && type <= 12), "NaN fill needs a floating-point type");
  for (int d = 0; d < rank; ++d) {
    require(extents[d] >= 1 && extents[d] <= 1ull << 32, format("extent of dimension %d is %llu", d, static_cast<unsigned long long>(extents[d])));
    require(box[d] >= 1 && box[d] <= 256, format("box extent of dimension %d is %u; 1 to 256 are possible", d, box[d]));
    require(element_strides[d] == 1, "element strides other than 1 are not supported");
    map.last[d] = static_cast<uint32_t>(extents[d] - 1);
    map.box[d] = static_cast<uint16_t>(box[d]);
    if (d == 0) continue;
    require(strides[d - 1] % 16 == 0 && strides[d - 1] < 1ull << 40, format("stride of dimension %d is %llu bytes: it must be a multiple of 16 below 2^40", d, static_cast<unsigned long long>(strides[d - 1])));
    map.strides[d - 1] = strides[d - 1];
  }
  uint32_t inner = box[0] * map.element_bytes;
  require(inner % 16 == 0, format("the box is %u bytes wide: it must be a multiple of 16", inner));
  if (swizzle) require(inner <= kSpan[swizzle], format("the box is %u bytes wide, the swizzle spans %u", inner, kSpan[swizzle]));
  if (swizzle) require(inner == kSpan[swizzle], format("a box of %u bytes narrower than the swizzle's %u is not supported", inner, kSpan[swizzle]));
  return map;
}

}  // namespace ptxsim
