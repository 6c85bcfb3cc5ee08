// tcgen05: allocation of tensor memory, loads and stores, mma, cp, shift, commit, waits.
//
// Operations of the tensor core (mma, cp, shift, commit) take effect some time after they were issued. Those of one thread
// follow one another only in the pairs that the ISA lists (9.7.16.6.2); unless `tensor_order` is off, others may
// overtake. Loads and stores are ordered by waits alone, though the reader of a loaded register waits for that load.
#include "tcgen05.h"

#include <algorithm>

#include "sync.h"
#include "tcgen05_mma.h"

namespace ptxsim {

// ---- tensor memory ----
TrackedMemory& tensor_memory(Cta& cta) {
  if (!cta.tensor->memory) throw SimError("tensor_bounds: no tensor memory is allocated");
  return *cta.tensor->memory;
}

uint32_t tensor_place(Cta& cta, uint32_t lane, uint32_t column, uint32_t columns) {
  const Machine& machine = *cta.cluster->machine;
  if (lane >= kTensorLanes || column + columns > kTensorColumns)
    throw SimError(format("%slane %u, columns %u to %u", bounds_prefix(machine.launch.checks, kTensorBounds), lane, column, column + columns - 1));
  if (machine.checking(kTensorBounds))
    for (uint32_t unit = column / kAllocationColumns; unit <= (column + columns - 1) / kAllocationColumns; ++unit)
      if (!cta.tensor->allocated[unit]) throw SimError(format("tensor_bounds: columns %u to %u at lane %u are not all allocated", column, column + columns - 1, lane));
  return lane * kLaneBytes + column * 4;
}

uint32_t* tensor_words(Cta& cta, uint32_t lane, uint32_t column, uint32_t columns) {
  return reinterpret_cast<uint32_t*>(tensor_memory(cta).at(tensor_place(cta, lane, column, columns), columns * 4, 4));
}

namespace {

// ---- the order of operations ----
// What an operation of the tensor core is to those after it; products add their accumulator and shape.
enum Operation : uint64_t { op_commit, op_cp, op_mma, op_shift };
constexpr uint64_t op_cp_4x256b = op_cp | 4;
uint64_t product_key(uint32_t d, uint32_t shape) { return op_mma | static_cast<uint64_t>(d) << 2 | static_cast<uint64_t>(shape) << 34; }

// The pairs that the ISA orders, of one thread's operations.
bool in_order(uint64_t first, uint64_t second) {
  uint64_t before = first & 3, after = second & 3;
  if (after == op_mma) return before == op_cp || before == op_shift || first == second;
  return (after == op_shift && before == op_mma) || (second == op_cp_4x256b && before == op_shift);
}

void schedule(Warp& w, TensorCore& core) {
  bool strict = !w.machine->checking(kTensorOrder);
  for (size_t i = 0; i < core.operations.size(); ++i) {
    TensorCore::Operation& op = core.operations[i];
    if (op.scheduled) continue;
    bool held = false;
    for (size_t k = 0; k < i && !held; ++k) {
      uint64_t earlier = core.operations[k].key;
      held = strict || op.key == op_commit || earlier == op_commit || in_order(earlier, op.key);
    }
    if (held) continue;
    op.scheduled = true;
    w.machine->issue(w, op.at, [&w, &core, number = op.number] {
      auto it = std::find_if(core.operations.begin(), core.operations.end(), [&](auto& o) { return o.number == number; });
      auto effect = std::move(it->effect);
      core.operations.erase(it);
      effect();
      schedule(w, core);
    });
  }
}

void push(Warp& w, TensorCore& core, uint64_t key, std::function<void()> effect) {
  core.operations.push_back({w.machine->next_number++, w.at, key, false, std::move(effect)});
  ++w.machine->progress;
  schedule(w, core);
}

// An operation of the tensor core that a lane issues.
struct CoreActor : Actor {
  std::vector<uint32_t> in_order_after;
  CoreActor(Warp& w, int lane, uint64_t key) : Actor(w.actor(lane)) {
    auto& agents = w.core_agents;
    if (!agents.count(key)) agents[key] = w.cta->cluster->agents->add(format("tcgen05 operations of warp %d", w.index), true, w.cta->rank, w.agent);
    for (auto& [other, agent] : agents)
      if (in_order(other, key)) in_order_after.push_back(agent);
    tag = epoch(agents[key], w.tensor_core[lane].mark);
    async_proxy = true;
    ordered = &w.set_of(lane).ordered;
    follows = &in_order_after;
  }
  CoreActor(const CoreActor&) = delete;
};

Actor access_actor(Warp& w, TensorAccesses& accesses, const char* what) {
  if (!accesses.agent) accesses.agent = w.cta->cluster->agents->add(format("%s of warp %d", what, w.index), true, w.cta->rank);
  Actor a = w.collective_actor();
  a.tag = epoch(accesses.agent, accesses.mark);
  a.async_proxy = true;
  return a;
}

uint32_t uniform(Warp& w, Slot slot, uint32_t mask, const char* what) {
  const uint32_t* v = w.reg<uint32_t>(slot);
  uint32_t first = v[__builtin_ctz(mask)];
  for (uint32_t m = mask; m; m &= m - 1)
    if (v[__builtin_ctz(m)] != first && w.machine->checking(kConvergence)) throw SimError(format("convergence: lanes give different %s", what));
  return first;
}

// CTAs of a group: this one, or this one and its peer.
std::vector<Cta*> group_of(Warp& w, bool two) {
  if (!two) return {w.cta};
  auto& ctas = w.cta->cluster->ctas;
  uint32_t even = w.cta->rank & ~1u;
  if (even + 1 >= ctas.size()) throw SimError("cta_group::2 in a cluster without the peer CTA");
  if (ctas[w.cta->rank ^ 1]->live_warps == 0 && w.machine->checking(kCtaGroup)) throw SimError("cta_group: the peer CTA has exited");
  return {ctas[even].get(), ctas[even + 1].get()};
}

// ---- allocation ----
std::string describe_alloc(const Warp& w) { return format("%u columns of tensor memory", static_cast<uint32_t>(w.wait_argument)); }
std::string describe_meeting(const Warp&) { return "a warp of the peer CTA to execute this instruction too"; }

using Meeting = TensorMemory::Meeting;

// Whether a warp of the peer CTA has come to the same; if not, this one waits and repeats its instruction.
bool met(Warp& w, Meeting& mine, const Meeting& theirs, uint32_t columns, uint32_t column) {
  if (mine.warp && mine.warp != &w) throw SimError(format("cta_group: warps %d and %d of a CTA allocate or free for the pair at the same time", mine.warp->index, w.index));
  mine = {&w, columns, column, false};
  ++w.machine->progress;
  if (!theirs.warp || theirs.over) {
    w.retry();
    w.wait(describe_meeting);
    return false;
  }
  if (theirs.columns != columns || theirs.column != column)
    throw SimError(format("cta_group: the CTAs of a pair do not allocate or free the same: warp %d here %u columns at %u, warp %d of the peer %u at %u", w.index, columns, column, theirs.warp->index, theirs.columns, theirs.column));
  return true;
}

// It has led to what both warps came for.
void end_meeting(Meeting& mine, Meeting& theirs, uint32_t column) {
  mine = {};
  theirs.over = true;
  theirs.column = column;
  theirs.warp->wake();
}

// Whether the peer's warp has done what this one waited for.
bool done_by_peer(Warp& w, Meeting& mine, uint32_t* column) {
  if (mine.warp != &w || !mine.over) return false;
  *column = mine.column;
  mine = {};
  return true;
}

Cta* peer_of(Warp& w, const std::vector<Cta*>& ctas) { return ctas.size() == 2 ? ctas[~w.cta->rank & 1] : nullptr; }

// Takes the first columns that are free in all the CTAs.
bool take_columns(const std::vector<Cta*>& ctas, uint32_t columns, uint32_t* column) {
  uint32_t units = columns / kAllocationColumns;
  for (uint32_t first = 0; first + units <= kTensorColumns / kAllocationColumns; ++first) {
    bool free = true;
    for (Cta* cta : ctas)
      for (uint32_t u = first; u < first + units; ++u) free &= !cta->tensor->allocated[u];
    if (!free) continue;
    for (Cta* cta : ctas) {
      std::fill_n(cta->tensor->allocated + first, units, 1);
      cta->tensor->allocated[first] = columns;
    }
    *column = first * kAllocationColumns;
    return true;
  }
  return false;
}

// a[0] shared address, a[1] columns; in.imm offset; in.kind: 1 = 64-bit address, 2 = two CTAs
void alloc(Warp& w, const Instr& in, uint32_t mask) {
  if (!w.converged(kFullMask)) return;
  uint32_t columns = uniform(w, in.a[1], mask, "column counts"), column = 0;
  if (columns < 32 || columns > kTensorColumns || (columns & (columns - 1))) throw SimError(format("tensor_bounds: allocation of %u columns", columns));
  uint64_t address = lane_address(w, in, in.a[0], in.kind & 1, __builtin_ctz(mask));
  if (in.kind & 1) resolve(Space::generic, address);
  SharedPlace to = shared_place(w, static_cast<uint32_t>(address));
  uint8_t* place = to.cta->shared->at(to.address, 4, 4);
  Meeting& mine = w.cta->tensor->allocating;
  if (!done_by_peer(w, mine, &column)) {
    std::vector<Cta*> ctas = group_of(w, in.kind & 2);
    for (Cta* cta : ctas) {
      TensorMemory& t = *cta->tensor;
      if (t.relinquished) throw SimError("tensor_leak: allocation after relinquish_alloc_permit");
      if (!t.memory) t.memory = std::make_unique<TrackedMemory>("tensor", kTensorBounds, 0, kTensorLanes * kLaneBytes, 4, &w.machine->stream.clusters, w.cta->cluster->number, w.machine->launch.checks);
    }
    Cta* peer = peer_of(w, ctas);
    if (peer && !met(w, mine, peer->tensor->allocating, columns, 0)) return;
    if (!take_columns(ctas, columns, &column)) {
      w.retry();
      w.wait(describe_alloc, columns);
      return;
    }
    if (peer) end_meeting(mine, peer->tensor->allocating, column);
  }
  // A write of the whole warp: each of its lanes knows it.
  Actor actor = access_actor(w, w.tensor_alloc, "tcgen05.alloc");
  actor.async_proxy = false;
  to.cta->shared->note_write(to.address, 4, actor);
  w.for_sets(kFullMask, [&](LaneSet& s) { s.clock.seen.see(w.tensor_alloc.agent, w.tensor_alloc.mark); });
  ++w.tensor_alloc.mark;
  std::memcpy(place, &column, 4);
  ++w.machine->progress;
}

// Memory that is freed must be out of use, and its content goes.
void check_quiet(Warp& w, Cta& cta, uint32_t column, uint32_t columns) {
  TrackedMemory& tensor = tensor_memory(cta);
  Actor actor = w.collective_actor();
  actor.ordered = nullptr;  // that it is complete is enough
  for (uint32_t lane = 0; lane < kTensorLanes; ++lane) {
    uint32_t place = tensor_place(cta, lane, column, columns);
    try {
      tensor.note_write(place, columns * 4, actor);
    } catch (const SimError& e) {
      throw SimError(std::string(e.what()) + ", which is freed here");
    }
    tensor.forget(place, columns * 4);
  }
}

// in.kind: 2 = two CTAs
void dealloc(Warp& w, const Instr& in, uint32_t mask) {
  if (!w.converged(kFullMask)) return;
  uint32_t address = uniform(w, in.a[0], mask, "addresses"), columns = uniform(w, in.a[1], mask, "column counts");
  uint32_t first = (address & 0xffff) / kAllocationColumns;
  Meeting& mine = w.cta->tensor->freeing;
  if (done_by_peer(w, mine, &address)) return;
  std::vector<Cta*> ctas = group_of(w, in.kind & 2);
  for (Cta* cta : ctas)
    if (address >> 16 || address % kAllocationColumns || first >= kTensorColumns / kAllocationColumns || cta->tensor->allocated[first] != columns)
      throw SimError(format("tensor_bounds: no allocation of %u columns at 0x%x", columns, address));
  check_quiet(w, *w.cta, address, columns);
  Cta* peer = peer_of(w, ctas);
  if (peer && !met(w, mine, peer->tensor->freeing, columns, address)) return;
  for (Cta* cta : ctas) std::fill_n(cta->tensor->allocated + first, columns / kAllocationColumns, 0);
  if (peer) end_meeting(mine, peer->tensor->freeing, address);
  ++w.machine->progress;
  for (Cta* cta : ctas)
    for (auto& warp : cta->warps)
      if (warp->describe_wait == describe_alloc && warp->status == Warp::waiting) warp->wake();
}

void relinquish(Warp& w, const Instr&, uint32_t) {
  if (w.converged(kFullMask)) w.cta->tensor->relinquished = true;
}

// ---- ld and st ----
enum Shape { s32x32b, s16x64b, s16x128b, s16x256b, s16x32bx2 };

// Lane and column, from the address, of lane l's register r. (The second half of 16x32bx2 is further off.)
void fragment_place(int shape, uint32_t l, uint32_t r, uint32_t* lane, uint32_t* column) {
  switch (shape) {
    case s32x32b: *lane = l; *column = r; break;
    case s16x64b: *lane = l / 4 + 8 * (l & 1); *column = (l >> 1 & 1) + 2 * r; break;
    case s16x128b: *lane = l / 4 + 8 * (r & 1); *column = l % 4 + 4 * (r >> 1); break;
    case s16x256b: *lane = l / 4 + 8 * (r >> 1 & 1); *column = 2 * (l % 4) + (r & 1) + 8 * (r >> 2); break;
    default: *lane = l % 16; *column = r;
  }
}

// in.kind: Shape | 16-bit packing << 8; in.n registers; a[0] address; in.imm half offset; lists: registers, numbers
struct Access {
  Warp& w;
  const Instr& in;
  uint32_t lane, column;  // of the address
  bool packed() const { return in.kind >> 8; }
  template <class F>
  void each(F f) const {  // f(lane l of the warp, register r, tensor lane, column)
    for (uint32_t l = 0; l < kLanes; ++l)
      for (uint32_t r = 0; r < static_cast<uint32_t>(in.n); ++r) {
        uint32_t dl, dc;
        fragment_place(in.kind & 0xff, l, r, &dl, &dc);
        if (packed()) dc *= 2;
        if ((in.kind & 0xff) == s16x32bx2 && l >= 16) dc += static_cast<uint32_t>(in.imm);
        f(l, r, lane + dl, column + dc);
      }
  }
  template <class F>
  void note(F f) const {  // f(address, bytes)
    uint32_t registers = static_cast<uint32_t>(in.n);
    auto place = [&](uint32_t tensor_lane, uint32_t from, uint32_t columns) { f(tensor_place(*w.cta, tensor_lane, from, columns), columns * 4); };
    if (in.kind == s32x32b)
      for (uint32_t l = 0; l < kLanes; ++l) place(lane + l, column, registers);
    else
      each([&](uint32_t, uint32_t, uint32_t tensor_lane, uint32_t from) { place(tensor_lane, from, packed() ? 2 : 1); });
  }
};

Access access_of(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t address = uniform(w, in.a[0], mask, "addresses") + static_cast<uint32_t>(in.size);
  Access a{w, in, address >> 16, address & 0xffff};
  uint32_t quarter = static_cast<uint32_t>(w.index % 4) * 32, lanes = (in.kind & 0xff) == s32x32b ? 32 : 16;
  if (w.machine->checking(kTensorBounds) && (a.lane < quarter || a.lane + lanes > quarter + 32))
    throw SimError(format("tensor_bounds: warp %d reaches lanes %u to %u only, not %u to %u", w.index, quarter, quarter + 31, a.lane, a.lane + lanes - 1));
  return a;
}

std::string describe_tensor_wait(const Warp& w) {
  return format("%u loads and %u stores of tensor memory", w.tensor_load.outstanding, w.tensor_store.outstanding);
}

void access_done(Warp& w, TensorAccesses& accesses) {
  --accesses.outstanding;
  if (w.describe_wait == describe_tensor_wait && w.status == Warp::waiting) w.wake();
}

void tensor_ld(Warp& w, const Instr& in, uint32_t mask) {
  if (!w.converged(kFullMask)) return;
  Access a = access_of(w, in, mask);
  Actor actor = access_actor(w, w.tensor_load, "tcgen05.ld");
  a.note([&](uint32_t address, uint32_t bytes) { tensor_memory(*w.cta).note_read(address, bytes, actor); });
  const int32_t* numbers = w.program->lists.data() + in.list + in.n;
  uint32_t load = w.next_load++;
  int registers = 0;
  for (int i = 0; i < in.n; ++i) {
    if (numbers[i] < 0) continue;
    w.in_flight[static_cast<size_t>(numbers[i])] = load;
    ++registers;
  }
  w.loading += registers;
  w.in_flight_count += registers;
  ++w.tensor_load.outstanding;
  ++w.machine->progress;
  w.machine->issue(w, [&w, a, load, registers] {
    const int32_t* lists = w.program->lists.data() + a.in.list;
    a.each([&](uint32_t l, uint32_t r, uint32_t lane, uint32_t column) {
      const uint32_t* from = tensor_words(*w.cta, lane, column, a.packed() ? 2 : 1);
      w.reg<uint32_t>(lists[r])[l] = a.packed() ? (from[0] & 0xffff) | from[1] << 16 : from[0];
    });
    for (int i = 0; i < a.in.n; ++i) {
      int32_t number = lists[a.in.n + i];
      if (number >= 0 && w.in_flight[static_cast<size_t>(number)] == load) w.in_flight[static_cast<size_t>(number)] = 0;
    }
    w.loading -= registers;
    w.in_flight_count -= registers;
    access_done(w, w.tensor_load);
  });
}

void tensor_st(Warp& w, const Instr& in, uint32_t mask) {
  if (!w.converged(kFullMask)) return;
  Access a = access_of(w, in, mask);
  Actor actor = access_actor(w, w.tensor_store, "tcgen05.st");
  a.note([&](uint32_t address, uint32_t bytes) { tensor_memory(*w.cta).note_write(address, bytes, actor); });
  const int32_t* registers = w.program->lists.data() + in.list;
  std::vector<uint32_t> values(static_cast<size_t>(in.n) * kLanes);
  for (uint32_t r = 0; r < static_cast<uint32_t>(in.n); ++r) std::memcpy(&values[r * kLanes], w.reg<uint32_t>(registers[r]), 4 * kLanes);
  ++w.tensor_store.outstanding;
  ++w.machine->progress;
  w.machine->issue(w, [&w, a, values] {
    a.each([&](uint32_t l, uint32_t r, uint32_t lane, uint32_t column) {
      uint32_t v = values[r * kLanes + l];
      uint32_t* to = tensor_words(*w.cta, lane, column, a.packed() ? 2 : 1);
      to[0] = a.packed() ? v & 0xffff : v;
      if (a.packed()) to[1] = v >> 16;
    });
    access_done(w, w.tensor_store);
  });
}

// in.kind: 0 loads, 1 stores
void tensor_wait(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(kFullMask)) return;
  TensorAccesses& accesses = in.kind ? w.tensor_store : w.tensor_load;
  if (accesses.outstanding) {
    w.retry();
    w.wait(describe_tensor_wait);
  } else if (accesses.agent) {
    uint32_t mark = accesses.mark++;
    w.for_sets(w.live, [&](LaneSet& s) {
      s.clock.seen.see(accesses.agent, mark);
      s.ordered.see(accesses.agent, mark);
    });
  }
}

void fence_before(Warp& w, const Instr&, uint32_t mask) {
  w.for_sets(mask, [](LaneSet& s) { s.clock.passed.join(s.ordered); });
}

void fence_after(Warp& w, const Instr&, uint32_t mask) {
  w.for_sets(mask, [](LaneSet& s) { s.ordered.join(s.clock.passed); });
}

// ---- mma ----
// Instr::kind of mma
struct Kind {
  static constexpr int two_ctas = 8, a_in_tensor = 16, blocks = 5, ws = 256, ashift = 512;  // bits 5 to 7: the blocks of k
  static int mma(int kind) { return kind & 7; }
};

void note_scales(Cta& cta, uint32_t address, uint32_t id, uint32_t blocks, uint32_t count, uint32_t first, uint32_t quarters, const Actor& actor) {
  TrackedMemory& tensor = tensor_memory(cta);
  for (uint32_t quarter = first; quarter < first + quarters; ++quarter)
    for_each_scale(cta, address, id, count, quarter, [&](uint32_t, uint32_t place) { tensor.note_read(place, blocks, actor); });
}

void note_shift(Cta& cta, uint32_t lane, uint32_t column, const Actor& actor) {
  for (uint32_t row = lane; row < lane + 32; ++row) {
    uint32_t address = tensor_place(cta, row, column, kShiftedColumns);
    if (row > lane) tensor_memory(cta).note_read(address, kShiftedColumns * 4, actor);
    if (row < lane + 31) tensor_memory(cta).note_write(address, kShiftedColumns * 4, actor);
  }
}

// a[0] D, a[1] A, a[2] B, a[3] instruction descriptor, a[4] enable-input-d; in.imm scale-input-d; lists: disabled lanes,
// in.n of them, or of a block-scaled kind the addresses of the scale factors of A and B and the offsets from them
void mma(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    MmaOperation op;
    op.two_ctas = in.kind & Kind::two_ctas;
    uint32_t descriptor = w.reg<uint32_t>(in.a[3])[l], blocks = static_cast<uint32_t>(in.kind >> Kind::blocks & 7);
    op.ws = in.kind & Kind::ws;
    op.ashift = in.kind & Kind::ashift;
    op.shape = blocks ? decode_scaled_shape(descriptor, Kind::mma(in.kind), blocks, op.two_ctas) : decode_shape(descriptor, Kind::mma(in.kind), op.two_ctas, op.ws);
    if (op.ashift && op.shape.m < 128) throw SimError(format("descriptor: instruction descriptor 0x%08x: M below 128 with .ashift", descriptor));
    op.a_in_tensor = in.kind & Kind::a_in_tensor;
    op.accumulate = w.pred(in.a[4]) >> l & 1;
    op.d = w.reg<uint32_t>(in.a[0])[l] + static_cast<uint32_t>(in.size);
    op.a_tensor = op.a_in_tensor ? w.reg<uint32_t>(in.a[1])[l] + static_cast<uint32_t>(in.a[5]) : 0;
    op.a = op.a_in_tensor ? 0 : w.reg<uint64_t>(in.a[1])[l];
    op.b = w.reg<uint64_t>(in.a[2])[l];
    op.scale_d = 1.0f / static_cast<float>(1u << in.imm);
    const int32_t* list = w.program->lists.data() + in.list;
    // The two highest bits of these addresses may repeat the id that the descriptor holds.
    op.sfa = blocks ? (w.reg<uint32_t>(list[0])[l] + static_cast<uint32_t>(list[2])) & 0x3fffffff : 0;
    op.sfb = blocks ? (w.reg<uint32_t>(list[1])[l] + static_cast<uint32_t>(list[3])) & 0x3fffffff : 0;
    op.disabled.fill(0);
    for (int i = 0; i < in.n; ++i) op.disabled[static_cast<size_t>(i)] = w.reg<uint32_t>(list[i])[l];
    op.ctas = group_of(w, op.two_ctas);
    bool checked = w.machine->checking(kDescriptor);
    uint64_t key = product_key(op.d, descriptor);
    CoreActor actor(w, l, key);
    for (size_t i = 0; i < op.ctas.size(); ++i) {
      Cta& cta = *op.ctas[i];
      note_tile(cta, op.tile_b(checked), actor);
      if (!op.a_in_tensor) note_tile(cta, op.tile_a(checked), actor);
      TrackedMemory& tensor = tensor_memory(cta);
      if (blocks) note_scales(cta, op.sfa, op.shape.sfa_id, blocks, op.rows(), 0, 4, actor);
      for (uint32_t group = 0; group < op.groups(); ++group) {
        if (blocks) note_scales(cta, op.sfb, op.shape.sfb_id, blocks, op.width(), group * (4 / op.groups()), 4 / op.groups(), actor);
        for (uint32_t row = 0; row < op.rows(); ++row) {
          uint32_t lane = op.lane(row, group);
          if (op.a_in_tensor)
            tensor.note_read(tensor_place(cta, (op.a_tensor >> 16) + lane, op.a_tensor & 0xffff, op.words_of_a()), op.words_of_a() * 4, actor);
          if (op.is_disabled(i, row, group)) continue;
          uint32_t address = tensor_place(cta, (op.d >> 16) + lane, op.d & 0xffff, op.width());
          if (op.accumulate) tensor.note_read(address, op.width() * 4, actor);
          tensor.note_write(address, op.width() * 4, actor);
        }
      }
      if (op.ashift)
        for (uint32_t quarter = 0; quarter < 4; ++quarter) note_shift(cta, (op.a_tensor >> 16) + quarter * 32, op.a_tensor & 0xffff, actor);
    }
    push(w, w.tensor_core[l], key, [op, checked] { perform(op, checked); });
  }
  w.lane = -1;
}

// ---- cp: shared memory to tensor memory ----
enum CopyForm { plain, one_a_warp, warpx4, warpx2_02_13, warpx2_01_23 };

uint32_t copies_of(int form) { return form == warpx4 ? 4 : form >= warpx2_02_13 ? 2 : 1; }

// Lane, from the address, of a row's copy. (The four rows of 4x256b refresh one lane of each warp.)
uint32_t copied_lane(int form, uint32_t row, uint32_t copy) {
  switch (form) {
    case one_a_warp: return row * 32;
    case warpx4: return row + copy * 32;
    case warpx2_02_13: return row + copy * 64;
    case warpx2_01_23: return row / 32 * 64 + row % 32 + copy * 32;
    default: return row;
  }
}

// in.kind: rows | CopyForm << 8 | two_ctas << 16; in.n: bytes of a row; in.imm: Element of the source,
// e4m3 for plain bytes; a[0] address, a[1] descriptor
void cp(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    uint32_t rows = static_cast<uint32_t>(in.kind & 0xff), columns = static_cast<uint32_t>(in.n) / 4, to = w.reg<uint32_t>(in.a[0])[l] + static_cast<uint32_t>(in.size);
    int form = in.kind >> 8 & 0xff;
    uint32_t copies = copies_of(form);
    Tile tile(decode_tcgen05_descriptor(w.reg<uint64_t>(in.a[1])[l], w.machine->checking(kDescriptor)), static_cast<Element>(in.imm), true, rows, static_cast<uint32_t>(in.n));
    std::vector<Cta*> ctas = group_of(w, in.kind >> 16);
    uint64_t key = rows == 4 ? op_cp_4x256b : op_cp;
    CoreActor actor(w, l, key);
    for (Cta* cta : ctas) {
      note_tile(*cta, tile, actor);
      for (uint32_t row = 0; row < rows; ++row)
        for (uint32_t copy = 0; copy < copies; ++copy)
          tensor_memory(*cta).note_write(tensor_place(*cta, (to >> 16) + copied_lane(form, row, copy), to & 0xffff, columns), columns * 4, actor);
    }
    push(w, w.tensor_core[l], key, [=] {
      for (Cta* cta : ctas)
        for (uint32_t row = 0; row < rows; ++row)
          for (uint32_t copy = 0; copy < copies; ++copy) {
            uint32_t* words = tensor_words(*cta, (to >> 16) + copied_lane(form, row, copy), to & 0xffff, columns);
            for (uint32_t chunk = 0; chunk < tile.chunks; ++chunk) {
              const uint8_t* from = cta->shared->at(tile.address(row, chunk), 16, 16);
              if (is_padded(tile.element)) unpack_containers(tile.element, from, reinterpret_cast<uint8_t*>(words + 4 * chunk));
              else std::memcpy(words + 4 * chunk, from, 16);
            }
          }
    });
  }
  w.lane = -1;
}

// ---- shift ----
// in.kind: two_ctas; a[0] address
void shift(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    w.lane = __builtin_ctz(m);
    uint32_t address = w.reg<uint32_t>(in.a[0])[w.lane] + static_cast<uint32_t>(in.size), lane = address >> 16, column = address & 0xffff;
    if (lane % 32 && w.machine->checking(kAlignment)) throw SimError(format("alignment: the rows from lane %u on, which is not a multiple of 32", lane));
    std::vector<Cta*> ctas = group_of(w, in.kind);
    CoreActor actor(w, w.lane, op_shift);
    for (Cta* cta : ctas) note_shift(*cta, lane, column, actor);
    push(w, w.tensor_core[w.lane], op_shift, [=] {
      for (Cta* cta : ctas) shift_rows(*cta, lane, column);
    });
  }
  w.lane = -1;
}

// ---- commit ----
// a[0] mbarrier, a[1] CTA mask or -1; in.kind: 1 = 64-bit address
void commit(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    uint64_t address = lane_address(w, in, in.a[0], in.kind & 1, l);
    SharedPlace place = mbarrier_place(w, address, in.kind & 1 ? (address >= kSharedWindow ? Space::generic : Space::shared) : Space::shared);
    std::vector<Mbarrier*> barriers;
    if (in.a[1] >= 0) {
      uint32_t ctas = w.reg<uint16_t>(in.a[1])[l];
      for (auto& cta : w.cta->cluster->ctas)
        if (ctas >> cta->rank & 1) barriers.push_back(&find_mbarrier(w, {cta.get(), place.address}));
    } else {
      barriers.push_back(&find_mbarrier(w, place));
    }
    TensorCore& core = w.tensor_core[l];
    uint32_t mark = core.mark++;
    Machine* machine = w.machine;
    // What the operations relied on is complete when they are. What the thread itself wrote is not released by a commit.
    LaneSet& set = w.set_of(l);
    Clock relied_on = set.clock;
    relied_on.seen.forget(w.agent);
    // The operations of this thread are, and a fence::before_thread_sync is implied.
    relied_on.passed.join(set.ordered);
    for (auto& [key, agent] : w.core_agents) {
      relied_on.seen.see(agent, mark, 1u << l);
      relied_on.passed.see(agent, mark, 1u << l);
    }
    push(w, core, op_commit, [machine, barriers, place, relied_on] {
      for (Mbarrier* b : barriers) {
        b->arriving.own.join(relied_on);
        arrive_asynchronously(*machine, *b, place.address);
      }
    });
  }
  w.lane = -1;
}

// ---- decoding ----
bool take_group(Decoder& d) {
  std::string g = d.take_one({"cta_group::1", "cta_group::2"});
  if (g.empty()) d.fail("no cta_group");
  return g.back() == '2';
}

void expect_collective(Decoder& d) {
  if (!d.take("sync") || !d.take("aligned")) d.fail("without .sync.aligned");
}

// [address] of tensor memory; its constant offset goes to `offset`.
Slot tensor_address(Decoder& d, const Operand& o, int32_t* offset) {
  int bytes = 4;
  Slot s = d.address(o, &bytes);
  if (bytes != 4) d.fail("tensor memory addresses have 32 bits");
  *offset = static_cast<int32_t>(d.in.imm);
  d.in.imm = 0;
  return s;
}

void decode_access(Decoder& d, bool load) {
  expect_collective(d);
  static const char* const shapes[] = {"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"};
  static const int per[] = {1, 1, 2, 4, 1};
  int shape = -1;
  for (int i = 0; i < 5; ++i)
    if (d.take(shapes[i])) shape = i;
  std::string count = d.take_one({"x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128"});
  if (shape < 0 || count.empty()) d.fail("unknown shape");
  d.in.n = per[shape] * std::stoi(count.substr(1));
  d.in.kind = shape | (d.take(load ? "pack::16b" : "unpack::16b") ? 1 << 8 : 0);
  d.type();
  size_t extra = shape == s16x32bx2;
  d.expect(2 + extra, 2 + extra);
  const Operand& data = d.operand(load ? 0 : 1 + extra);
  d.in.a[0] = tensor_address(d, d.operand(load ? 1 : 0), &d.in.size);
  if (extra) d.in.imm = d.immediate(load ? 2 : 1);
  size_t n = data.kind == Operand::vector ? data.items.size() : 1;
  if (static_cast<int>(n) != d.in.n) d.fail(format("%zu registers, not %d", n, d.in.n));
  auto item = [&](size_t i) -> const Operand& { return data.kind == Operand::vector ? data.items[i] : data; };
  for (size_t i = 0; i < n; ++i) d.list(load ? d.target(item(i), 4) : d.value(item(i), *find_type("b32")));
  for (size_t i = 0; i < n; ++i) d.list(item(i).kind == Operand::reg ? item(i).index : -1);
  d.in.fn = load ? tensor_ld : tensor_st;
}

// Into how many blocks the qualifier, or what it defaults to, divides k.
int take_blocks(Decoder& d, int kind) {
  if (!d.take("block_scale")) d.fail("without .block_scale");
  std::string q = d.take_one({"scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32"});
  if (q.empty() && kind == kind_mxf4nvf4) d.fail("no size of the scale vectors");
  int usual = kind == kind_mxf8f6f4 ? 1 : 2;
  int blocks = q.empty() || q == "block32" ? usual : q == "block16" ? 4 : q[11] - '0';
  if (blocks != usual && !(kind == kind_mxf4nvf4 && blocks == 4)) d.fail("size of the scale vectors");
  return blocks;
}

// What is to become of the collector buffer: of A, or where it is weight stationary one of B.
std::string take_collector(Decoder& d, bool ws) {
  for (const char* buffer : {"a", "b0", "b1", "b2", "b3"})
    for (const char* what : {"fill", "use", "lastuse", "discard"})
      if ((buffer[0] == 'b') == ws && d.take(format("collector::%s::%s", buffer, what).c_str())) return what;
  return "";
}

void decode_mma(Decoder& d) {
  static const char* const kinds[] = {"kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8", "kind::mxf8f6f4", "kind::mxf4", "kind::mxf4nvf4"};
  if (take_group(d)) d.in.kind |= Kind::two_ctas;
  bool ws = d.take("ws");
  if (ws) d.in.kind |= Kind::ws;
  if (ws && d.in.kind & Kind::two_ctas) d.fail("weight stationary over two CTAs");
  int kind = -1;
  for (int i = 0; i < 7; ++i)
    if (d.take(kinds[i])) kind = i;
  if (kind < 0) d.fail("unknown kind");
  bool scaled = kind >= kind_mxf8f6f4;
  d.in.kind |= kind | (scaled ? take_blocks(d, kind) << Kind::blocks : 0);
  if (ws && scaled) d.fail("weight stationary with block scaling");
  // Collector buffers hold what was read; what lies in memory must not change meanwhile, so that they change nothing.
  std::string collector = take_collector(d, ws);
  if (d.take("ashift")) {
    d.in.kind |= Kind::ashift;
    if (ws || scaled || d.operand(1).kind != Operand::address) d.fail(".ashift of an A that is not in tensor memory");
    if (collector == "fill" || collector == "use") d.fail(".ashift and the collector buffer");
  }
  d.expect(scaled ? 7 : 5, 7);
  d.in.a[0] = tensor_address(d, d.operand(0), &d.in.size);
  if (d.operand(1).kind == Operand::address) {
    d.in.kind |= Kind::a_in_tensor;
    d.in.a[1] = tensor_address(d, d.operand(1), &d.in.a[5]);
  } else {
    d.in.a[1] = d.source_slot(1, *find_type("b64"));
  }
  d.in.a[2] = d.source_slot(2, *find_type("b64"));
  d.in.a[3] = d.source_slot(3, *find_type("b32"));
  size_t next = 4;
  if (scaled) {
    int32_t offsets[2];
    for (int32_t& offset : offsets) {
      if (d.operand(next).kind != Operand::address) d.fail("scale factors lie in tensor memory");
      d.list(tensor_address(d, d.operand(next++), &offset));
    }
    for (int32_t offset : offsets) d.list(offset);
  } else if (!ws && d.operand(next).kind == Operand::vector) {
    const Operand& lanes = d.operand(next++);
    if (lanes.items.size() != (d.in.kind & Kind::two_ctas ? 8u : 4u)) d.fail("size of the disabled lanes' mask");
    d.in.n = static_cast<int>(lanes.items.size());
    for (const Operand& o : lanes.items) d.list(d.value(o, *find_type("b32")));
  }
  d.in.a[4] = d.predicate(next++);
  if (next < d.count() && ws) d.fail("zero-column masks are not modelled");
  if (next < d.count() && (kind == kind_f16 || kind == kind_tf32)) {
    d.in.imm = d.immediate(next++);
    if (d.in.imm > 15) d.fail("scale-input-d above 15");
  }
  d.expect(next, next);
  d.in.fn = mma;
}

void decode_tcgen05(Decoder& d) {
  const std::string op = d.source->opcode.size() > 1 ? d.source->opcode[1] : "";
  if (!d.take(op.c_str())) d.fail("unknown form");
  const Type& b32 = *find_type("b32");
  if (op == "alloc") {
    bool two = take_group(d);
    expect_collective(d);
    take_space(d);
    d.type();
    d.expect(2, 2);
    d.in.kind = two << 1;
    d.in.a[0] = d.address(0, 1);
    d.in.a[1] = d.source_slot(1, b32);
    d.in.fn = alloc;
  } else if (op == "dealloc") {
    d.in.kind = take_group(d) << 1;
    expect_collective(d);
    d.type();
    d.expect(2, 2);
    d.in.a[0] = d.source_slot(0, b32);
    d.in.a[1] = d.source_slot(1, b32);
    d.in.fn = dealloc;
  } else if (op == "relinquish_alloc_permit") {
    take_group(d);
    expect_collective(d);
    d.in.fn = relinquish;
  } else if (op == "ld" || op == "st") {
    decode_access(d, op == "ld");
  } else if (op == "wait::ld" || op == "wait::st") {
    expect_collective(d);
    d.in.kind = op == "wait::st";
    d.in.fn = tensor_wait;
  } else if (op == "fence::before_thread_sync" || op == "fence::after_thread_sync") {
    d.in.fn = op == "fence::before_thread_sync" ? fence_before : fence_after;
  } else if (op == "mma") {
    decode_mma(d);
  } else if (op == "cp") {
    int two = take_group(d);
    std::string shape = d.take_one({"128x256b", "128x128b", "4x256b", "64x128b", "32x128b"});
    if (shape.empty()) d.fail("unknown shape");
    std::string repeated = d.take_one({"warpx4", "warpx2::02_13", "warpx2::01_23"});
    if (repeated.substr(0, 6) != (shape == "32x128b" ? "warpx4" : shape == "64x128b" ? "warpx2" : "")) d.fail("unknown form");
    int form = shape == "4x256b" ? one_a_warp : repeated.empty() ? plain : repeated == "warpx4" ? warpx4 : repeated == "warpx2::02_13" ? warpx2_02_13 : warpx2_01_23;
    // Six bits become a byte alike, whichever type they are.
    Element source = Element::e4m3;
    if (d.take("b8x16")) {
      std::string from = d.take_one({"b4x16_p64", "b6x16_p32"});
      if (from.empty()) d.fail("unknown format");
      source = from == "b4x16_p64" ? Element::e2m1 : Element::e2m3;
    }
    int rows = std::stoi(shape);
    d.in.kind = rows | form << 8 | two << 16;
    d.in.n = shape.find("256b") != std::string::npos ? 32 : 16;
    d.expect(2, 2);
    d.in.a[0] = tensor_address(d, d.operand(0), &d.in.size);
    d.in.a[1] = d.source_slot(1, *find_type("b64"));
    d.in.imm = static_cast<uint64_t>(source);
    d.in.fn = cp;
  } else if (op == "shift") {
    d.in.kind = take_group(d);
    if (!d.take("down")) d.fail("unknown direction");
    d.expect(1, 1);
    d.in.a[0] = tensor_address(d, d.operand(0), &d.in.size);
    d.in.fn = shift;
  } else if (op == "commit") {
    take_group(d);
    if (!d.take("mbarrier::arrive::one")) d.fail("unknown completion mechanism");
    bool multicast = d.take("multicast::cluster");
    take_space(d);
    d.type();
    d.expect(multicast ? 2 : 1, multicast ? 2 : 1);
    d.in.a[0] = d.address(0, 1);
    if (multicast) d.in.a[1] = d.source_slot(1, *find_type("u16"));
    d.in.fn = commit;
  } else {
    d.fail("unknown tcgen05 operation");
  }
}

}  // namespace

bool wait_for_load(Warp& w) {
  w.retry();
  w.wait(describe_tensor_wait);
  return false;
}

void check_cta_groups(const Program& program) {
  const Statement* first = nullptr;
  std::string group;
  for (const Instr& in : program.code) {
    const Statement& s = *in.source;
    if (s.opcode[0] != "tcgen05") continue;
    for (const std::string& part : s.opcode) {
      if (part.compare(0, 11, "cta_group::")) continue;
      if (first && part != group)
        throw SimError(format("cta_group: all tcgen05 instructions of a kernel must name the same one; here it is not that of PTX line %d\nkernel %s, PTX line %d\n  %s", first->line, program.function->name.c_str(), s.line, s.text.c_str()));
      if (!first) first = &s;
      group = part;
    }
  }
}

void check_tensor_memory_freed(Cta& cta) {
  const Machine& machine = *cta.cluster->machine;
  if (!machine.checking(kTensorLeak)) return;
  for (uint32_t u = 0; u < kTensorColumns / kAllocationColumns; ++u)
    if (cta.tensor->allocated[u] > 1) throw SimError(format("tensor_leak: the CTA ends with %u columns of tensor memory allocated at column %u", cta.tensor->allocated[u], u * kAllocationColumns));
}

void register_tcgen05(OpcodeTable& table) { table["tcgen05"] = decode_tcgen05; }

}  // namespace ptxsim
