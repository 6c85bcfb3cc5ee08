#include "tensor_map.h"

namespace ptxsim {
namespace {
struct Unit { uint8_t elements, bytes, shared_bytes; };
// By CUtensorMapDataType. The last three are 16U4_ALIGN8B, 16U4_ALIGN16B and 16U6_ALIGN16B.
constexpr Unit kUnits[] = {{1, 1, 1}, {1, 2, 2}, {1, 4, 4}, {1, 4, 4}, {1, 8, 8}, {1, 8, 8}, {1, 2, 2}, {1, 4, 4}, {1, 8, 8},
                           {1, 2, 2}, {1, 4, 4}, {1, 4, 4}, {1, 4, 4}, {2, 1, 1}, {16, 8, 16}, {16, 12, 16}};
constexpr int kNoSwizzle = 0, kSwizzle128 = 3;
constexpr uint32_t kSpan[] = {0, 32, 64, 128};

void require(bool holds, const std::string& rule) {
  if (!holds) throw SimError("tensor map: " + rule);
}
// A map in memory.
struct Packed {
  static constexpr uint32_t kMagic = 0x6d787470u;  // "ptxm"
  uint64_t address;
  uint32_t magic;
  uint32_t strides[4];     // in 16 bytes
  uint32_t last[5];
  uint8_t strides_high[4]; // bits 32 and up
  uint8_t box_last[5];     // extent - 1
  uint8_t type, rank, swizzle, nan_fill, changed, empty;
};
static_assert(sizeof(Packed) == TensorMap::kUsed, "a map fits into the half that kernels copy");
}  // namespace

void TensorMap::set_type(int number) {
  const Unit& unit = kUnits[number];
  type = static_cast<uint8_t>(number);
  unit_elements = unit.elements;
  unit_bytes = unit.bytes;
  shared_bytes = unit.shared_bytes;
}

TensorMap TensorMap::read(const uint8_t* from) {
  Packed p;
  std::memcpy(&p, from, sizeof p);
  if (p.magic != Packed::kMagic) throw SimError("descriptor: no tensor map of the simulator");
  TensorMap map{};
  map.address = p.address;
  for (int d = 0; d < 4; ++d) map.strides[d] = (uint64_t{p.strides_high[d]} << 32 | p.strides[d]) << 4;
  for (int d = 0; d < 5; ++d) {
    map.last[d] = p.last[d];
    map.box[d] = static_cast<uint16_t>(p.box_last[d] + 1);
  }
  map.set_type(p.type);
  map.rank = p.rank;
  map.swizzle = p.swizzle;
  map.nan_fill = p.nan_fill;
  map.changed = p.changed;
  map.empty = p.empty;
  return map;
}

void TensorMap::write(uint8_t* to) const {
  Packed p{};
  p.address = address;
  p.magic = Packed::kMagic;
  for (int d = 0; d < 4; ++d) {
    p.strides[d] = static_cast<uint32_t>(strides[d] >> 4);
    p.strides_high[d] = static_cast<uint8_t>(strides[d] >> 36);
  }
  for (int d = 0; d < 5; ++d) {
    p.last[d] = last[d];
    p.box_last[d] = static_cast<uint8_t>(box[d] - 1);
  }
  p.type = type;
  p.rank = rank;
  p.swizzle = swizzle;
  p.nan_fill = nan_fill;
  p.changed = changed;
  p.empty = empty;
  std::memcpy(to, &p, sizeof p);
}

TensorMap encode_tiled(int type, int rank, uint64_t address, const uint64_t* extents, const uint64_t* strides,
                       const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int oob_fill) {
  require(type >= 0 && type < 16, format("data type %d is not supported", type));
  require(rank >= 1 && rank <= 5, format("rank %d; 1 to 5 are possible", rank));
  const Unit& unit = kUnits[type];
  bool padded = unit.bytes != unit.shared_bytes;
  uint32_t align = padded ? 32 : 16;
  require(address % align == 0, format("the global address must be a multiple of %u", align));
  require(interleave == 0, "interleaved layouts are not supported");
  require(swizzle >= 0 && swizzle <= 3, format("swizzle mode %d is not supported", swizzle));
  TensorMap map{};
  map.address = address;
  map.set_type(type);
  for (uint16_t& extent : map.box) extent = 1;
  map.rank = static_cast<uint8_t>(rank);
  map.swizzle = static_cast<uint8_t>(swizzle);
  map.nan_fill = oob_fill != 0;
  require(!map.nan_fill || (type >= 6 && type <= 12), "NaN fill needs a floating-point type");
  for (int d = 0; d < rank; ++d) {
    require(extents[d] >= 1 && extents[d] <= 1ull << 32, format("extent of dimension %d is %llu", d, static_cast<unsigned long long>(extents[d])));
    require(box[d] >= 1 && box[d] <= 256, format("box extent of dimension %d is %u; 1 to 256 are possible", d, box[d]));
    require(element_strides[d] == 1, "element strides other than 1 are not supported");
    map.last[d] = static_cast<uint32_t>(extents[d] - 1);
    map.box[d] = static_cast<uint16_t>(box[d]);
    if (d == 0) continue;
    require(strides[d - 1] % align == 0 && strides[d - 1] < 1ull << 40, format("stride of dimension %d is %llu bytes: it must be a multiple of %u below 2^40", d, static_cast<unsigned long long>(strides[d - 1]), align));
    map.strides[d - 1] = strides[d - 1];
  }
  if (padded) {
    require(extents[0] % 128 == 0, format("extent of dimension 0 is %llu: it must be a multiple of 128 for padded types", static_cast<unsigned long long>(extents[0])));
    require(box[0] == 128, format("the box is %u elements wide: it must be 128 for padded types", box[0]));
    require(swizzle == kNoSwizzle || swizzle == kSwizzle128, "padded types need the swizzle mode of 128 bytes, or none");
  }
  require(extents[0] % unit.elements == 0, format("extent of dimension 0 is %llu: it must be a multiple of %u", static_cast<unsigned long long>(extents[0]), unit.elements));
  map.last[0] = static_cast<uint32_t>(extents[0] / unit.elements - 1);
  map.box[0] = static_cast<uint16_t>(box[0] / unit.elements);
  uint32_t inner = box[0] * unit.shared_bytes / unit.elements;
  require(inner % 16 == 0, format("the box is %u bytes wide: it must be a multiple of 16", inner));
  if (swizzle) require(inner <= kSpan[swizzle], format("the box is %u bytes wide, the swizzle spans %u", inner, kSpan[swizzle]));
  if (swizzle) require(inner == kSpan[swizzle], format("a box of %u bytes narrower than the swizzle's %u is not supported", inner, kSpan[swizzle]));
  return map;
}

void replace_field(TensorMap& map, MapField field, uint32_t ordinal, uint64_t value) {
  map.changed = 1;
  auto use_unit = [&](int type) {
    uint64_t width = (uint64_t{map.last[0]} + 1) * map.unit_elements, box = uint64_t{map.box[0]} * map.unit_elements;
    const Unit& unit = kUnits[type];
    require(width % unit.elements == 0 && box % unit.elements == 0, format("dimension 0 is no multiple of the new type's %u elements", unit.elements));
    map.last[0] = static_cast<uint32_t>(width / unit.elements - 1);
    map.box[0] = static_cast<uint16_t>(box / unit.elements);
    map.set_type(type);
  };
  uint32_t elements = ordinal == 0 ? map.unit_elements : 1;
  switch (field) {
    case MapField::address: map.address = value; return;
    case MapField::rank:
      require(value < 5, format("rank %llu; 1 to 5 are possible", static_cast<unsigned long long>(value + 1)));
      map.rank = static_cast<uint8_t>(value + 1);
      return;
    case MapField::box:
      require(value >= 1 && value <= 256 && value % elements == 0, format("box extent of dimension %u is %llu", ordinal, static_cast<unsigned long long>(value)));
      map.box[ordinal] = static_cast<uint16_t>(value / elements);
      return;
    case MapField::extent:
      require(value % elements == 0, format("extent of dimension %u is %llu: it must be a multiple of %u", ordinal, static_cast<unsigned long long>(value), elements));
      map.last[ordinal] = static_cast<uint32_t>(value / elements - 1);
      map.empty = static_cast<uint8_t>((map.empty & ~(1u << ordinal)) | (value == 0) << ordinal);
      return;
    case MapField::stride:
      require(value % 16 == 0 && value < 1ull << 40, format("stride of dimension %u is %llu bytes: it must be a multiple of 16 below 2^40", ordinal + 1, static_cast<unsigned long long>(value)));
      map.strides[ordinal] = value;
      return;
    case MapField::element_stride: return require(value == 1, "element strides other than 1 are not supported");
    case MapField::type: {
      static const uint8_t types[] = {0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15};  // the ISA's order to CUtensorMapDataType
      require(value < 16, format("element type %llu", static_cast<unsigned long long>(value)));
      return use_unit(types[value]);
    }
    case MapField::interleave: return require(value == 0, "interleaved layouts are not supported");
    case MapField::swizzle:
      require(value <= 3, format("swizzle mode %llu is not supported", static_cast<unsigned long long>(value)));
      map.swizzle = static_cast<uint8_t>(value);
      return;
    case MapField::atomicity: return require(value == 0, "swizzles of other atoms than 16 bytes are not supported");
    case MapField::fill:
      require(value <= 1, format("fill mode %llu", static_cast<unsigned long long>(value)));
      map.nan_fill = value == 1;
  }
}

void check_changed_map(const TensorMap& map) {
  uint64_t extents[5];
  uint32_t box[5], ones[5] = {1, 1, 1, 1, 1};
  for (int d = 0; d < 5; ++d) {
    uint32_t elements = d == 0 ? map.unit_elements : 1;
    extents[d] = map.empty >> d & 1 ? 0 : (uint64_t{map.last[d]} + 1) * elements;
    box[d] = map.box[d] * elements;
  }
  try {
    encode_tiled(map.type, map.rank, map.address, extents, map.strides, box, ones, 0, map.swizzle, map.nan_fill);
  } catch (const SimError& e) {
    throw SimError(format("descriptor: what tensormap.replace made of a %s", e.what()));
  }
}

}  // namespace ptxsim
