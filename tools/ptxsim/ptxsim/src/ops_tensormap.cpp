// tensormap.replace, tensormap.cp_fenceproxy and the proxy fence of tensor maps.
//
// Copies read a tensor map through a proxy of its own. A map in global memory that was changed is theirs after a release by
// the warp that changed it and an acquire in the CTA of the copy, both of that proxy. Followed are changes by these
// instructions; those by plain stores are not.
#include "async.h"
#include "tensor_map.h"

namespace ptxsim {
namespace {

constexpr uint32_t kBytes = TensorMap::kBytes, kUsed = TensorMap::kUsed, kAlign = 64;
constexpr int kWide = 4, kWideSource = 8;  // Instr::kind: the Space of a map, and these

void note_change(Warp& w, uint64_t address, bool released) {
  ChangedMap& map = w.machine->changed_maps[address];
  ++map.number;
  map.released = released;
  if (!released) w.changed_maps.push_back(address);
}

// a[0] map, a[1] new value; in.n: the MapField; in.size: bytes of the value; a[2] ordinal
void replace(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    uint64_t address = lane_address(w, in, in.a[0], in.kind & kWide, l);
    uint64_t value = in.size == 8 ? w.reg<uint64_t>(in.a[1])[l] : w.reg<uint32_t>(in.a[1])[l];
    Space space = resolve(static_cast<Space>(in.kind & 3), address);
    uint8_t* at;
    if (space == Space::shared) {
      SharedPlace p = shared_place(w, static_cast<uint32_t>(address));
      if (p.cta != w.cta) throw SimError("shared_bounds: the tensor map lies in another CTA's shared memory");
      at = p.cta->shared->at(p.address, kBytes, kAlign);
      p.cta->shared->note_read(p.address, kUsed, w.actor(l));
      p.cta->shared->note_write(p.address, kUsed, w.actor(l));
    } else if (space == Space::global) {
      at = w.machine->global.at(address, kBytes, kAlign);
      note_change(w, address, false);
    } else {
      throw SimError("descriptor: a tensor map in local memory");
    }
    TensorMap map = TensorMap::read(at);
    replace_field(map, static_cast<MapField>(in.n), static_cast<uint32_t>(in.a[2]), value);
    map.write(at);
  }
  w.lane = -1;
  ++w.machine->progress;
}

// a[0] global, a[1] shared; a[2] offset of the latter
void copy_and_release(Warp& w, const Instr& in, uint32_t mask) {
  if (!w.converged(w.live)) return;
  uint64_t last = 0;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    uint64_t to = lane_address(w, in, in.a[0], true, l);
    SharedPlace p = shared_place(w, static_cast<uint32_t>(operand_address(w, in.a[1], in.kind & kWideSource, l, in.a[2])));
    const uint8_t* from = p.cta->shared->at(p.address, kBytes, kAlign);
    p.cta->shared->note_read(p.address, kUsed, w.actor(l));
    std::memcpy(w.machine->global.at(to, kBytes, kAlign), from, kBytes);
    if (to != last) note_change(w, to, true);  // usually all lanes name one map
    last = to;
  }
  w.lane = -1;
  ++w.machine->progress;
}

void release(Warp& w, const Instr&, uint32_t) {
  for (uint64_t address : w.changed_maps) w.machine->changed_maps[address].released = true;
  w.changed_maps.clear();
}

void acquire(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    uint64_t address = lane_address(w, in, in.a[0], true, l);
    w.machine->global.at(address, kBytes, kAlign);
    auto map = w.machine->changed_maps.find(address);
    if (map != w.machine->changed_maps.end() && map->second.released) w.cta->acquired_maps[address] = {map->second.number, w.actor(l).tag, mask};
  }
  w.lane = -1;
}

void decode_tensormap(Decoder& d) {
  if (d.take("cp_fenceproxy")) {
    bool known = d.take("global") && d.take("shared::cta") && d.take("tensormap::generic") && d.take("release");
    if (!known || std::string(d.take_one({"cta", "cluster", "gpu", "sys"})).empty() || !d.take("sync") || !d.take("aligned")) d.fail("unknown form");
    d.expect(3, 3);
    if (d.immediate(2) != kBytes) d.fail("a tensor map has 128 bytes");
    d.in.a[1] = d.address(1, kWideSource);
    d.in.a[2] = static_cast<int32_t>(d.in.imm);
    d.in.a[0] = d.wide_address(0);
    d.in.fn = copy_and_release;
    return;
  }
  if (!d.take("replace") || !d.take("tile")) d.fail("unknown tensormap operation");
  static const char* const names[] = {"global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride",
                                      "elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode"};
  d.in.n = -1;
  for (int i = 0; i < 11; ++i)
    if (d.take(names[i])) d.in.n = i;
  if (d.in.n < 0) d.fail("unknown field");
  MapField field = static_cast<MapField>(d.in.n);
  d.in.kind = static_cast<int>(take_space(d));
  if (!d.take("b1024")) d.fail("a tensor map is .b1024");
  Type t = d.type();
  bool wide = field == MapField::address || field == MapField::stride;
  if (t.name != (wide ? "b64" : "b32")) d.fail("new value of type ." + t.name);
  bool has_ordinal = field >= MapField::box && field <= MapField::element_stride;
  d.expect(has_ordinal ? 3 : 2, has_ordinal ? 3 : 2);
  if (has_ordinal && d.immediate(1) >= (field == MapField::stride ? 4u : 5u)) d.fail("unknown ordinal");
  d.in.a[2] = has_ordinal ? static_cast<int>(d.immediate(1)) : 0;
  size_t value = has_ordinal ? 2 : 1;
  if (field >= MapField::type) d.immediate(value);
  d.in.a[1] = d.source_slot(value, t);
  d.in.size = t.bytes;
  d.in.a[0] = d.address(0, kWide);
  d.in.fn = replace;
}

}  // namespace

void check_map_acquired(Warp& w, uint64_t address) {
  const auto& changed = w.machine->changed_maps;
  auto map = changed.empty() || !w.machine->checking(kProxyFence) ? changed.end() : changed.find(address);
  if (map == changed.end()) return;
  const char* missing = "acquire";
  auto acquired = w.cta->acquired_maps.find(address);
  if (!map->second.released) missing = "release";
  else if (acquired != w.cta->acquired_maps.end() && acquired->second.number == map->second.number) {
    Actor actor = w.actor(w.lane);
    for (uint32_t m = acquired->second.lanes; m; m &= m - 1)
      if (actor.knows(acquired->second.by, m & -m)) return;  // one of the lanes is enough
  }
  throw SimError(format("proxy_fence: the tensor map at 0x%llx was changed, and no fence.proxy.tensormap::generic.%s lies between that and its use", static_cast<unsigned long long>(address), missing));
}

void decode_tensormap_fence(Decoder& d) {
  std::string order = d.take_one({"acquire", "release"});
  if (order.empty() || std::string(d.take_one({"cta", "cluster", "gpu", "sys"})).empty()) d.fail("no known order and scope");
  if (order == "release") {
    d.expect(0, 0);
    d.in.fn = release;
    return;
  }
  d.expect(2, 2);
  if (d.immediate(1) != kBytes) d.fail("a tensor map has 128 bytes");
  d.in.a[0] = d.wide_address(0);
  d.in.fn = acquire;
}

void register_tensormap(OpcodeTable& table) { table["tensormap"] = decode_tensormap; }

}  // namespace ptxsim
