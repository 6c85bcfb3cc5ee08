// cp.async, cp.async.bulk and cp.async.bulk.tensor: copies that take effect some time after they were issued.
//
// At issue the copy is checked against the order that the issuing warp has established, and the bytes that it reads or
// writes remember its completion epoch. The data moves when the scheduler lets the copy take effect.
#include <cmath>

#include "async.h"
#include "numeric.h"
#include "tensor_map.h"

namespace ptxsim {
namespace {

uint32_t new_agent(Warp& w, const char* what, bool async_proxy) {
  return w.cta->cluster->agents->add(format("%s of warp %d", what, w.index), async_proxy, w.cta->rank);
}

uint32_t copies_agent(Warp& w) {
  if (!w.cp_async.agent) w.cp_async.agent = new_agent(w, "cp.async groups", false);
  return w.cp_async.agent;
}

std::string describe_groups(const Warp& w) {
  return format("%zu asynchronous groups that have not taken effect", w.bulk.outstanding() + w.cp_async.outstanding());
}

void group_operation_done(Warp& w, Groups& g, uint32_t mark) {
  g.finished(mark);
  if (w.describe_wait == describe_groups && w.status == Warp::waiting) w.wake();
}

// Each thread waits for its own groups. `reads`: only for what they read; results are not known then.
void wait_for_groups(Warp& w, ThreadGroups& groups, uint32_t mask, uint64_t pending, bool reads) {
  for (uint32_t m = mask; m; m &= m - 1) {
    Groups& g = groups.of[static_cast<size_t>(__builtin_ctz(m))];
    if (g.done(g.covered(pending))) continue;
    w.retry();
    w.wait(describe_groups);
    return;
  }
  for (uint32_t m = mask; m; m &= m - 1) {
    size_t l = static_cast<size_t>(__builtin_ctz(m));
    uint32_t mark = groups.of[l].covered(pending);
    if (!reads) groups.waited[l] = std::max(groups.waited[l], mark);
    groups.waited_reads[l] = std::max(groups.waited_reads[l], mark);
  }
}

// An operation that a lane issues; what it reads and writes remembers the epoch.
Actor issued_by(Warp& w, int lane, uint32_t tag, uint32_t lanes, bool async_proxy) {
  Actor a = w.actor(lane);
  a.tag = tag;
  a.lanes = lanes;
  a.async_proxy = async_proxy;
  return a;
}

// ---- cp.async ----
// a[0] destination, a[1] source, a[2] bytes to read or -1, a[3] offset of the source; in.size bytes; in.imm offset of
// the destination
void cp_async(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t agent = copies_agent(w), size = static_cast<uint32_t>(in.size);
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    Groups& groups = w.cp_async.of[static_cast<size_t>(l)];
    uint32_t mark = groups.mark;
    Actor actor = issued_by(w, l, epoch(agent, mark), 1u << l, false);
    uint64_t to = (in.kind & 1 ? w.reg<uint64_t>(in.a[0])[l] : w.reg<uint32_t>(in.a[0])[l]) + in.imm;
    SharedPlace p = shared_place(w, static_cast<uint32_t>(to));
    uint8_t* destination = p.cta->shared->at(p.address, size, size);
    p.cta->shared->note_write(p.address, size, actor);
    uint64_t from = w.reg<uint64_t>(in.a[1])[l] + static_cast<uint64_t>(static_cast<int64_t>(in.a[3]));
    uint32_t read = in.a[2] >= 0 ? w.reg<uint32_t>(in.a[2])[l] : size;
    if (read > size) throw SimError(format("cp.async reads %u bytes of %u", read, size));
    const uint8_t* source = read ? w.machine->global.at(from, read, in.a[2] >= 0 ? 1 : size) : nullptr;
    if (read) w.machine->global.note_read(from, read, actor);
    groups.issued();
    w.machine->issue(w, [&w, &groups, destination, source, size, read, mark] {
      if (read) std::memcpy(destination, source, read);
      std::memset(destination + read, 0, size - read);
      group_operation_done(w, groups, mark);
      for (size_t i = 0; i < w.after_copies.size();) {
        if (!w.cp_async.of[static_cast<size_t>(w.after_copies[i].lane)].done(w.after_copies[i].mark)) { ++i; continue; }
        auto action = std::move(w.after_copies[i].action);
        w.after_copies.erase(w.after_copies.begin() + static_cast<long>(i));
        action();
      }
    });
  }
  w.lane = -1;
}

void cp_async_mbarrier(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t agent = copies_agent(w);
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    Groups& groups = w.cp_async.of[static_cast<size_t>(l)];
    uint32_t mark = groups.mark++;
    SharedPlace p = mbarrier_place(w, lane_address(w, in, in.a[0], in.kind & 4, l), static_cast<Space>(in.kind & 3));
    Mbarrier* b = &find_mbarrier(w, p);
    if (!in.n) ++b->pending;
    Machine* machine = w.machine;
    auto action = [machine, b, p, agent, mark, l] {
      b->arriving.own.seen.see(agent, mark, 1u << l);
      arrive_asynchronously(*machine, *b, p.address);
    };
    if (groups.done(mark)) action();
    else w.after_copies.push_back({l, mark, action});
  }
  w.lane = -1;
}

}  // namespace


// ---- bulk copies ----
void signal(Warp& w, const Completion& c, uint32_t bytes) {
  if (c.barrier) complete_transactions(*w.machine, *c.barrier, c.address, bytes);
  else group_operation_done(w, w.bulk.of[static_cast<size_t>(c.lane)], c.mark);
}

Completion barrier_of(Warp& w, SharedPlace p) {
  Completion c;
  c.barrier = &find_mbarrier(w, p);
  c.address = p.address;
  return c;
}

namespace {
Completion group_of(Warp& w) {
  if (!w.bulk.agent) {
    w.bulk.agent = new_agent(w, "bulk groups", true);
    w.bulk.reads = new_agent(w, "bulk groups", true);
  }
  Completion c;
  c.lane = w.lane;
  Groups& groups = w.bulk.of[static_cast<size_t>(c.lane)];
  c.mark = groups.mark;
  groups.issued();
  return c;
}

}  // namespace

Actor async_actor(Warp& w, const Completion& c, bool reads) {
  if (c.barrier) return issued_by(w, w.lane, completion_epoch(*c.barrier), 1, true);
  return issued_by(w, w.lane, epoch(reads ? w.bulk.reads : w.bulk.agent, c.mark), 1u << c.lane, true);
}

namespace {

enum Reduction { none, add, min, max, inc, dec, and_, or_, xor_ };

// Who writes the result of a copy. Reductions are atomic: those of many copies may meet.
Actor result_actor(Warp& w, const Completion& c, int op) {
  Actor a = async_actor(w, c);
  if (op != none) a.scope = kGpuScope;
  return a;
}

template <class T, bool kFlush = false>
void reduce_as(int op, uint8_t* to, const uint8_t* from, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += sizeof(T)) {
    T x, y;
    std::memcpy(&x, to + i, sizeof(T));
    std::memcpy(&y, from + i, sizeof(T));
    T r = x;
    if (op == add) r = static_cast<T>(x + y);
    if constexpr (kFlush)
      if (op == add) r = flush(flush(x) + flush(y));
    if (op == min) r = y < x ? y : x;
    if (op == max) r = y > x ? y : x;
    if constexpr (std::is_integral<T>::value) {
      if (op == inc) r = x >= y ? T(0) : static_cast<T>(x + 1);
      if (op == dec) r = x == 0 || x > y ? y : static_cast<T>(x - 1);
      if (op == and_) r = static_cast<T>(x & y);
      if (op == or_) r = static_cast<T>(x | y);
      if (op == xor_) r = static_cast<T>(x ^ y);
    }
    std::memcpy(to + i, &r, sizeof(T));
  }
}

template <const Format& kFormat>
void reduce_half(int op, uint8_t* to, const uint8_t* from, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += 2) {
    uint16_t x, y;
    std::memcpy(&x, to + i, 2);
    std::memcpy(&y, from + i, 2);
    float a = decode(kFormat, x), b = decode(kFormat, y);
    uint16_t r = static_cast<uint16_t>(encode(kFormat, op == add ? a + b : op == min ? std::fmin(a, b) : std::fmax(a, b), Round::nearest, false));
    std::memcpy(to + i, &r, 2);
  }
}

}  // namespace

void deliver(int op, int type, uint8_t* to, const uint8_t* from, uint32_t bytes) {
  if (op == none) { std::memcpy(to, from, bytes); return; }
  switch (type) {
    case 0: return reduce_as<uint8_t>(op, to, from, bytes);
    case 1: return reduce_as<uint16_t>(op, to, from, bytes);
    case 2: return reduce_as<uint32_t>(op, to, from, bytes);
    case 3: return reduce_as<int32_t>(op, to, from, bytes);
    case 4: return reduce_as<uint64_t>(op, to, from, bytes);
    case 5: return reduce_as<int64_t>(op, to, from, bytes);
    case 6: return reduce_half<kF16>(op, to, from, bytes);
    case 8: return reduce_as<double>(op, to, from, bytes);
    case 9: return reduce_half<kBf16>(op, to, from, bytes);
    case 10: return reduce_as<float, true>(op, to, from, bytes);
    default: return reduce_as<float>(op, to, from, bytes);
  }
}

namespace {

// Visits the rows of the box at `coordinates`: f(global address or 0 when all of it is outside, first unit inside,
// number of units inside, shared offset of the row).
template <class F>
void for_each_row(const TensorMap& map, const int32_t* coordinates, F f) {
  uint32_t inner = map.box[0] * map.shared_bytes, rows = 1;
  for (int d = 1; d < map.rank; ++d) rows *= map.box[d];
  int64_t extent = int64_t{map.last[0]} + 1;
  int64_t first = std::max<int64_t>(0, -int64_t{coordinates[0]});
  int64_t last = std::min<int64_t>(map.box[0], extent - coordinates[0]);
  for (uint32_t row = 0; row < rows; ++row) {
    uint64_t address = map.address;
    bool inside = last > first;
    uint32_t rest = row;
    for (int d = 1; d < map.rank; ++d) {
      int64_t at = int64_t{coordinates[d]} + rest % map.box[d];
      rest /= map.box[d];
      inside &= at >= 0 && at <= int64_t{map.last[d]};
      address += static_cast<uint64_t>(at) * map.strides[d - 1];
    }
    address += static_cast<uint64_t>(int64_t{coordinates[0]} + first) * map.unit_bytes;
    f(inside ? address : 0, static_cast<uint32_t>(inside ? first : 0), static_cast<uint32_t>(inside ? last - first : 0), row * inner);
  }
}

void fill_outside(const TensorMap& map, uint8_t* row, uint32_t bytes) {
  std::memset(row, 0, bytes);
  if (!map.nan_fill) return;
  uint64_t nan = map.unit_bytes == 2 ? 0x7fffu : map.unit_bytes == 4 ? 0x7fffffffu : 0x7fffffffffffffffull;
  for (uint32_t i = 0; i < bytes; i += map.unit_bytes) std::memcpy(row + i, &nan, map.unit_bytes);
}

uint32_t box_units(const TensorMap& map) {
  uint32_t units = 1;
  for (int d = 0; d < map.rank; ++d) units *= map.box[d];
  return units;
}
uint32_t box_bytes(const TensorMap& map) { return box_units(map) * map.shared_bytes; }

// Copies `bytes` between a plain buffer in box order and swizzled shared memory at `address`.
template <class F>
void for_each_chunk(const TensorMap& map, uint32_t address, uint32_t offset, uint32_t bytes, F f) {
  for (uint32_t i = 0; i < bytes; i += 16) f(swizzle_address(address + offset + i, map.swizzle) - address, i);
}

TensorMap read_map(Warp& w, uint64_t address, int rank) {
  TensorMap map = TensorMap::read(w.machine->global.at(address, TensorMap::kBytes, 64));
  check_map_acquired(w, address);
  if (map.changed && w.machine->checking(kDescriptor)) check_changed_map(map);
  if (map.rank != rank && w.machine->checking(kDescriptor)) throw SimError(format("descriptor: tensor map of rank %d used with %d coordinates", map.rank, rank));
  return map;
}

uint32_t shared_alignment(const TensorMap& map) { return map.swizzle ? 128 : 16; }

// Kind: shape of the operands. Slots: a[0] shared address, a[1] mbarrier, a[2] map or global address, a[3] CTA mask or
// size, a[4] CTA mask; lists: coordinates, then the three offsets.
struct Bulk {
  static constexpr int multicast = 1, wide_shared = 2, wide_barrier = 4, wide_source = 8, four_rows = 16, pairs = 32;
};

}  // namespace

uint64_t operand_address(Warp& w, Slot slot, bool wide, int lane, int64_t offset) {
  return wide ? w.reg<uint64_t>(slot)[lane] + static_cast<uint64_t>(offset)
              : w.reg<uint32_t>(slot)[lane] + static_cast<uint32_t>(offset);
}

namespace {

SharedPlace shared_operand(Warp& w, uint64_t address, uint32_t bytes, uint32_t align) {
  if (address >= kSharedWindow) resolve(Space::generic, address);
  SharedPlace p = shared_place(w, static_cast<uint32_t>(address));
  p.cta->shared->at(p.address, bytes, align);
  return p;
}

// The destinations of a copy: the addressed CTA, or with multicast the same address in every CTA of the mask.
std::vector<Cta*> destinations(Warp& w, const Instr& in, SharedPlace place, int lane) {
  if (!(in.kind & Bulk::multicast)) return {place.cta};
  uint32_t ctas = w.reg<uint16_t>(in.a[4])[lane];
  std::vector<Cta*> list;
  for (auto& cta : w.cta->cluster->ctas)
    if (ctas >> cta->rank & 1) list.push_back(cta.get());
  if (list.empty() || ctas >> w.cta->cluster->ctas.size()) throw SimError(format("multicast to CTAs 0x%x of a cluster of %zu", ctas, w.cta->cluster->ctas.size()));
  return list;
}

// Whose barrier a copy to `destination` signals: with multicast its own, or with cta_group::2 that one of its pair whose
// rank is odd or even like that of the barrier's CTA.
Cta* signalled(Warp& w, const Instr& in, Cta* destination, Cta* barrier) {
  if (!(in.kind & Bulk::multicast)) return barrier;
  if (!(in.kind & Bulk::pairs)) return destination;
  auto& ctas = w.cta->cluster->ctas;
  uint32_t rank = (destination->rank & ~1u) | (barrier->rank & 1);
  if (rank >= ctas.size()) throw SimError("cta_group::2 in a cluster without the peer CTA");
  return ctas[rank].get();
}

// Where the boxes of one copy lie, one after the other in shared memory: one box, or with gather4 and scatter4 four rows
// of a two-dimensional tensor, whose coordinates are the column and the four row numbers.
using Places = std::vector<std::array<int32_t, 5>>;

Places places_of(Warp& w, const Instr& in, const TensorMap& map, int lane) {
  const int32_t* lists = w.program->lists.data() + in.list;
  std::array<int32_t, 5> at{};
  for (int d = 0; d < in.n; ++d) at[static_cast<size_t>(d)] = w.reg<int32_t>(lists[d])[lane];
  if (map.unit_elements > 1) {
    int32_t step = map.padded() ? 128 : map.unit_elements;
    if (at[0] % step && w.machine->checking(kDescriptor)) throw SimError(format("descriptor: the first coordinate is %d, of the map's type it must be a multiple of %d", at[0], step));
    at[0] /= map.unit_elements;
  }
  if (!(in.kind & Bulk::four_rows)) return {at};
  return {{at[0], at[1]}, {at[0], at[2]}, {at[0], at[3]}, {at[0], at[4]}};
}

TensorMap map_of(Warp& w, const Instr& in, int lane) {
  const int32_t* lists = w.program->lists.data() + in.list;
  bool four = in.kind & Bulk::four_rows;
  TensorMap map = read_map(w, operand_address(w, in.a[2], true, lane, lists[in.n + 2]), four ? 2 : in.n);
  if (four && map.box[1] != 1 && w.machine->checking(kDescriptor)) throw SimError(format("descriptor: four rows through a box of %u rows, not 1", map.box[1]));
  return map;
}

void note_boxes(Warp& w, const TensorMap& map, const Places& places, const Actor& actor, bool writing) {
  GlobalMemory& global = w.machine->global;
  for (const auto& at : places)
    for_each_row(map, at.data(), [&](uint64_t address, uint32_t, uint32_t count, uint32_t) {
      uint32_t bytes = count * map.unit_bytes;
      if (!count) return;
      global.at(address, bytes, 1);
      if (writing) global.note_write(address, bytes, actor);
      else global.note_read(address, bytes, actor);
    });
}

void tensor_load(Warp& w, const Instr& in, uint32_t mask) {
  const int32_t* lists = w.program->lists.data() + in.list;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    TensorMap map = map_of(w, in, l);
    Places places = places_of(w, in, map, l);
    uint32_t bytes = box_bytes(map) * static_cast<uint32_t>(places.size());
    SharedPlace to = shared_operand(w, operand_address(w, in.a[0], in.kind & Bulk::wide_shared, l, lists[in.n]), bytes, shared_alignment(map));
    uint64_t barrier_address = operand_address(w, in.a[1], in.kind & Bulk::wide_barrier, l, lists[in.n + 1]);
    SharedPlace barrier = mbarrier_place(w, barrier_address, barrier_address >= kSharedWindow ? Space::generic : Space::shared);
    struct Target { uint8_t* data; Completion done; };
    std::vector<Target> targets;
    for (Cta* cta : destinations(w, in, to, l)) {
      Target t;
      t.done = barrier_of(w, {signalled(w, in, cta, barrier.cta), barrier.address});
      t.data = cta->shared->at(to.address, bytes, 16);
      Actor actor = async_actor(w, t.done, false);
      note_visit(w, l, *cta, actor);
      // Padding stays as if nobody had written it.
      if (!map.padded()) cta->shared->note_write(to.address, bytes, actor);
      else for_each_chunk(map, to.address, 0, bytes, [&](uint32_t place, uint32_t) { cta->shared->note_write(to.address + place, map.unit_bytes, actor); });
      targets.push_back(t);
    }
    note_boxes(w, map, places, async_actor(w, targets[0].done, true), false);
    w.machine->issue(w, [&w, map, places, bytes, to, targets] {
      std::vector<uint8_t> box(bytes);
      uint8_t* part = box.data();
      for (const auto& at : places) {
        for_each_row(map, at.data(), [&](uint64_t address, uint32_t first, uint32_t count, uint32_t offset) {
          uint32_t size = map.unit_bytes, step = map.shared_bytes;
          if (count < map.box[0]) fill_outside(map, part + offset, map.box[0] * step);
          if (!count) return;
          const uint8_t* from = w.machine->global.at(address, count * size, 1);
          if (size == step) std::memcpy(part + offset + first * size, from, count * size);
          else for (uint32_t u = 0; u < count; ++u) std::memcpy(part + offset + (first + u) * step, from + u * size, size);
        });
        part += box_bytes(map);
      }
      for (const auto& t : targets) {
        uint32_t moved = map.padded() ? map.unit_bytes : 16;
        for_each_chunk(map, to.address, 0, bytes, [&](uint32_t place, uint32_t i) { std::memcpy(t.data + place, box.data() + i, moved); });
        signal(w, t.done, bytes / map.shared_bytes * map.unit_bytes);  // padding does not count
      }
    });
  }
  w.lane = -1;
}

// in.size: the Reduction
void tensor_store(Warp& w, const Instr& in, uint32_t mask) {
  const int32_t* lists = w.program->lists.data() + in.list;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    TensorMap map = map_of(w, in, l);
    Places places = places_of(w, in, map, l);
    if (map.padded()) throw SimError(map.unit_bytes == 8 ? "descriptor: data of type 16U4_ALIGN16B can be loaded, not stored" : "descriptor: stores of type 16U6_ALIGN16B, which pack bytes of six bits, are not modelled");
    if (in.size && map.unit_elements > 1) throw SimError("descriptor: there is no reduction of elements below 8 bits");
    uint32_t bytes = box_bytes(map) * static_cast<uint32_t>(places.size());
    SharedPlace from = shared_operand(w, operand_address(w, in.a[0], in.kind & Bulk::wide_shared, l, lists[in.n]), bytes, shared_alignment(map));
    Completion done = group_of(w);
    from.cta->shared->note_read(from.address, bytes, async_actor(w, done, true));
    note_boxes(w, map, places, result_actor(w, done, in.size), true);
    const uint8_t* data = from.cta->shared->at(from.address, bytes, 16);
    int op = in.size;
    w.machine->issue(w, [&w, map, places, bytes, from, data, done, op] {
      std::vector<uint8_t> box(bytes);
      for_each_chunk(map, from.address, 0, bytes, [&](uint32_t place, uint32_t i) { std::memcpy(box.data() + i, data + place, 16); });
      const uint8_t* part = box.data();
      for (const auto& at : places) {
        for_each_row(map, at.data(), [&](uint64_t address, uint32_t first, uint32_t count, uint32_t offset) {
          uint32_t size = map.unit_bytes;
          if (count) deliver(op, map.type, w.machine->global.at(address, count * size, 1), part + offset + first * size, count * size);
        });
        part += box_bytes(map);
      }
      signal(w, done, bytes);
    });
  }
  w.lane = -1;
}

// Plain bulk copies and reductions. a[2]: global address, or source shared address when in.n == 2; a[5]: which bytes of
// 16 are written to global memory, or -1.
// in.n: 0 global -> shared, 1 shared -> global, 2 shared -> shared of the cluster; in.size: reduction | type << 8
void bulk_copy(Warp& w, const Instr& in, uint32_t mask) {
  const int32_t* lists = w.program->lists.data() + in.list;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    uint32_t bytes = w.reg<uint32_t>(in.a[3])[l];
    if (bytes % 16 && w.machine->checking(kAlignment)) throw SimError(format("alignment: bulk copy of %u bytes, not a multiple of 16", bytes));
    SharedPlace near = shared_operand(w, operand_address(w, in.a[0], in.kind & Bulk::wide_shared, l, lists[0]), bytes, 16);
    uint64_t other = operand_address(w, in.a[2], in.kind & Bulk::wide_source, l, lists[2]);
    int op = in.size & 0xff, type = in.size >> 8;
    if (in.n == 1) {
      Completion done = group_of(w);
      near.cta->shared->note_read(near.address, bytes, async_actor(w, done, true));
      const uint8_t* data = near.cta->shared->at(near.address, bytes, 16);
      uint8_t* to = w.machine->global.at(other, bytes, 16);
      if (bytes) w.machine->global.note_write(other, bytes, result_actor(w, done, op));
      uint32_t chosen = in.a[5] >= 0 ? w.reg<uint16_t>(in.a[5])[l] : 0xffff;
      w.machine->issue(w, [&w, data, to, bytes, done, op, type, chosen] {
        if (chosen == 0xffff) deliver(op, type, to, data, bytes);
        else for (uint32_t i = 0; i < bytes; ++i) to[i] = chosen >> (i & 15) & 1 ? data[i] : to[i];
        signal(w, done, bytes);
      });
      continue;
    }
    uint64_t barrier_address = operand_address(w, in.a[1], in.kind & Bulk::wide_barrier, l, lists[1]);
    SharedPlace barrier = mbarrier_place(w, barrier_address, barrier_address >= kSharedWindow ? Space::generic : Space::shared);
    const uint8_t* from;
    SharedPlace source{nullptr, 0};
    if (in.n == 2) {
      source = shared_operand(w, other, bytes, 16);
      from = source.cta->shared->at(source.address, bytes, 16);
      if (near.cta == w.cta && w.machine->checking(kSharedBounds)) throw SimError("shared_bounds: the destination of a copy to another CTA's shared memory lies in the CTA's own");
    } else {
      from = w.machine->global.at(other, bytes, 16);
    }
    for (Cta* cta : destinations(w, in, near, l)) {
      Completion done = barrier_of(w, {in.kind & Bulk::multicast ? cta : barrier.cta, barrier.address});
      Actor actor = result_actor(w, done, op);
      if (source.cta) source.cta->shared->note_read(source.address, bytes, async_actor(w, done, true));
      else if (bytes && w.machine->global.at(other, bytes, 16)) w.machine->global.note_read(other, bytes, async_actor(w, done, true));
      note_visit(w, l, *cta, actor);
      if (op) cta->shared->note_read(near.address, bytes, actor);
      cta->shared->note_write(near.address, bytes, actor);
      uint8_t* to = cta->shared->at(near.address, bytes, 16);
      w.machine->issue(w, [&w, to, from, bytes, done, op, type] {
        deliver(op, type, to, from, bytes);
        signal(w, done, bytes);
      });
    }
  }
  w.lane = -1;
}

void commit(ThreadGroups& groups, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) groups.of[static_cast<size_t>(__builtin_ctz(m))].commit();
}
void bulk_commit(Warp& w, const Instr&, uint32_t mask) { commit(w.bulk, mask); }
// in.n: only what is read
void bulk_wait(Warp& w, const Instr& in, uint32_t mask) { wait_for_groups(w, w.bulk, mask, in.imm, in.n); }
void cp_async_commit(Warp& w, const Instr&, uint32_t mask) { commit(w.cp_async, mask); }
void cp_async_wait(Warp& w, const Instr& in, uint32_t mask) {
  if (in.n) commit(w.cp_async, mask);  // wait_all: also for what was not committed
  wait_for_groups(w, w.cp_async, mask, in.imm, false);
}
void nothing(Warp&, const Instr&, uint32_t) {}

}  // namespace

// ---- decoding ----
int take_reduction(Decoder& d) {
  static const char* const names[] = {"", "add", "min", "max", "inc", "dec", "and", "or", "xor"};
  for (int i = 1; i < 9; ++i)
    if (d.take(names[i])) return i;
  d.fail("no known reduction");
}

int take_reduction_type(Decoder& d, int op, bool shared) {
  bool noftz = d.take("noftz");
  Type t = d.type();
  struct Choice { const char* name; int type; bool shared, global; };
  // The plain addition of float32 flushes subnormals: type 10.
  static const Choice sums[] = {{"u32", 2, true, true}, {"s32", 3, true, true}, {"u64", 4, true, true}, {"f16", 6, false, true}, {"f32", 10, false, true}, {"f64", 8, false, true}, {"bf16", 9, false, true}};
  static const Choice extremes[] = {{"u32", 2, true, true}, {"s32", 3, true, true}, {"u64", 4, false, true}, {"s64", 5, false, true}, {"f16", 6, false, true}, {"bf16", 9, false, true}};
  static const Choice counts[] = {{"u32", 2, true, true}};
  static const Choice bits[] = {{"b32", 2, true, true}, {"b64", 4, false, true}};
  auto find = [&](const Choice* first, const Choice* last) {
    for (const Choice* c = first; c != last; ++c)
      if (t.name == c->name && (shared ? c->shared : c->global)) return c->type;
    d.fail("no such reduction of type ." + t.name);
  };
  bool half = t.name == "f16" || t.name == "bf16";
  if (noftz != (half && op == add)) d.fail(noftz ? "`.noftz` has no meaning here" : "additions of type ." + t.name + " need `.noftz`");
  switch (op) {
    case add: return find(std::begin(sums), std::end(sums));
    case min: case max: return find(std::begin(extremes), std::end(extremes));
    case inc: case dec: return find(std::begin(counts), std::end(counts));
    default: return find(std::begin(bits), std::end(bits));
  }
}

namespace {

void decode_bulk(Decoder& d, bool reduce) {
  if (d.take("commit_group")) { d.expect(0, 0); d.in.fn = bulk_commit; return; }
  if (d.take("wait_group")) { d.in.n = d.take("read"); d.expect(1, 1); d.in.imm = d.immediate(0); d.in.fn = bulk_wait; return; }
  bool tensor = d.take("tensor");
  if (d.take("prefetch")) {
    d.take("tensor");
    d.drop({"1d", "2d", "3d", "4d", "5d", "L2", "global", "tile", "L2::cache_hint"});
    d.in.fn = nothing;
    return;
  }
  tensor |= d.take("tensor");
  std::string rank = d.take_one({"1d", "2d", "3d", "4d", "5d"});
  // The first state space is the destination's.
  std::string first;
  for (const std::string& m : d.source->opcode)
    if (first.empty() && (m == "global" || m.compare(0, 6, "shared") == 0)) first = m;
  bool store = first == "global";
  bool from_shared = !store && !tensor && !d.take("global");
  d.take("global");
  d.take("shared::cta");
  d.take("shared::cluster");
  bool multicast = d.take("multicast::cluster"), hint = d.take("L2::cache_hint");
  if (std::string(d.take_one({"cta_group::1", "cta_group::2"})) == "cta_group::2") d.in.kind |= Bulk::pairs;
  bool masked = !tensor && !reduce && store && d.take("cp_mask");
  int op = reduce ? take_reduction(d) : none;
  if (store ? !d.take("bulk_group") : !d.take("mbarrier::complete_tx::bytes")) d.fail("unknown completion mechanism");
  if (reduce && !store && !from_shared) d.fail("reduction of global into shared memory");
  if (multicast) d.in.kind |= Bulk::multicast;
  auto offset = [&] { return static_cast<int32_t>(d.in.imm); };  // of the address that was taken last
  d.in.a[0] = d.address(store ? 1 : 0, Bulk::wide_shared);
  int32_t shared = offset(), barrier = 0;
  size_t next;
  if (tensor) {
    bool four = d.take(store ? "tile::scatter4" : "tile::gather4");
    d.take("tile");
    if (rank.empty() || (four && rank != "2d")) d.fail("no known rank");
    if (four) d.in.kind |= Bulk::four_rows;
    d.in.n = four ? 5 : rank[0] - '0';
    const Operand& map = d.operand(store ? 0 : 1);
    if (map.kind != Operand::address || map.items.size() != 2) d.fail("expected [tensor map, {coordinates}]");
    const Operand& at = map.items[1];
    size_t n = at.kind == Operand::vector ? at.items.size() : 1;
    if (static_cast<int>(n) != d.in.n) d.fail("number of coordinates and rank differ");
    for (size_t i = 0; i < n; ++i) d.list(d.value(at.kind == Operand::vector ? at.items[i] : at, *find_type("s32")));
    d.in.a[2] = d.wide_address(store ? 0 : 1);
    next = 2;
    d.in.size = op;
    d.in.fn = store ? tensor_store : tensor_load;
  } else {
    int type = reduce ? take_reduction_type(d, op, !store) : 0;
    d.in.a[2] = d.address(store ? 0 : 1, Bulk::wide_source);
    d.in.a[3] = d.source_slot(2, *find_type("u32"));
    next = 3;
    d.in.n = store ? 1 : from_shared ? 2 : 0;
    d.in.size = op | type << 8;
    d.in.fn = bulk_copy;
  }
  int32_t source = offset();
  if (!store) {
    d.in.a[1] = d.address(next++, Bulk::wide_barrier);
    barrier = offset();
  }
  for (int32_t o : {shared, barrier, source}) d.list(o);
  if (multicast) d.in.a[4] = d.source_slot(next++, *find_type("u16"));
  if (hint) ++next;
  if (masked) d.in.a[5] = d.source_slot(next++, *find_type("u16"));
  d.expect(next, next);
}

void decode_cp(Decoder& d) {
  bool reduce = d.take("reduce");
  if (!d.take("async")) d.fail("unknown instruction");
  if (d.take("bulk")) return decode_bulk(d, reduce);
  if (d.take("commit_group")) { d.expect(0, 0); d.in.fn = cp_async_commit; return; }
  if (d.take("wait_group")) { d.expect(1, 1); d.in.imm = d.immediate(0); d.in.fn = cp_async_wait; return; }
  if (d.take("wait_all")) { d.expect(0, 0); d.in.n = 1; d.in.fn = cp_async_wait; return; }
  if (d.take("mbarrier")) {
    if (!d.take("arrive")) d.fail("unknown form");
    d.in.n = d.take("noinc");
    d.in.kind = static_cast<int>(take_space(d));
    d.type();
    d.expect(1, 1);
    d.in.a[0] = d.address(0, 4);
    d.in.fn = cp_async_mbarrier;
    return;
  }
  bool cg = std::string(d.take_one({"ca", "cg"})) == "cg";
  d.drop({"shared", "shared::cta", "global", "L2::64B", "L2::128B", "L2::256B"});
  bool hint = d.take("L2::cache_hint");
  d.expect(3, hint ? 5 : 4);
  uint64_t size = d.immediate(2);
  if (size != 16 && (cg || (size != 4 && size != 8))) d.fail("unknown size");
  d.in.size = static_cast<int>(size);
  d.in.a[1] = d.wide_address(1);
  d.in.a[3] = static_cast<int32_t>(d.in.imm);
  d.in.a[0] = d.address(0, 1);
  if (d.count() == (hint ? 5u : 4u)) d.in.a[2] = d.source_slot(3, *find_type("u32"));
  d.in.fn = cp_async;
}

}  // namespace

void check_copies_waited_for(Warp& w, uint32_t mask) {
  if (!w.bulk.agent || !w.machine->checking(kAsyncEarly)) return;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    uint32_t last = w.bulk.of[static_cast<size_t>(l)].last;
    if (w.bulk.waited_reads[static_cast<size_t>(l)] < last)
      throw SimError(format("async_early: lane %d exits without having waited for its bulk copies, which may still read shared memory", l));
  }
}

void register_async(OpcodeTable& table) { table["cp"] = decode_cp; }

}  // namespace ptxsim
