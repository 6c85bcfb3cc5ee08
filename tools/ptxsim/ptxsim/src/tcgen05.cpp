// tcgen05: allocation of tensor memory, loads and stores, mma, cp, commit, waits.
//
// Operations of the tensor core (mma, cp, commit) take effect some time after they were issued. Those of one thread
// follow one another only in the pairs that the ISA lists (9.7.16.6.2); unless `tensor_order` is off, others may
// overtake. Loads and stores are ordered by waits alone, though the reader of a loaded register waits for that load.
#include "tcgen05.h"

#include <algorithm>

#include "numeric.h"
#include "smem_matrix.h"
#include "sync.h"

namespace ptxsim {
namespace {

constexpr uint32_t kLaneBytes = kTensorColumns * 4;

// ---- tensor memory ----
TrackedMemory& tensor_memory(Cta& cta) {
  if (!cta.tensor->memory) throw SimError("tensor_bounds: no tensor memory is allocated");
  return *cta.tensor->memory;
}

// Linear address of a lane's columns, all of them allocated.
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

// ---- the order of operations ----
// What an operation of the tensor core is to those after it; products add their accumulator and shape.
enum Operation : uint64_t { op_commit, op_cp, op_mma };
uint64_t product_key(uint32_t d, uint32_t shape) { return op_mma | static_cast<uint64_t>(d) << 2 | static_cast<uint64_t>(shape) << 34; }

// The pairs that the ISA orders, of one thread's operations.
bool in_order(uint64_t first, uint64_t second) { return ((first & 3) == op_mma && first == second) || ((first & 3) == op_cp && (second & 3) == op_mma); }

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

// ---- allocation ----
std::string describe_alloc(const Warp& w) { return format("%u columns of tensor memory", static_cast<uint32_t>(w.wait_argument)); }

// a[0] shared address, a[1] columns; in.imm offset
void alloc(Warp& w, const Instr& in, uint32_t mask) {
  if (!w.converged(kFullMask)) return;
  TensorMemory& t = *w.cta->tensor;
  uint32_t columns = uniform(w, in.a[1], mask, "column counts");
  if (columns < 32 || columns > kTensorColumns || (columns & (columns - 1))) throw SimError(format("tensor_bounds: allocation of %u columns", columns));
  if (t.relinquished) throw SimError("tensor_leak: allocation after relinquish_alloc_permit");
  uint64_t address = lane_address(w, in, in.a[0], in.kind & 1, __builtin_ctz(mask));
  if (in.kind & 1) resolve(Space::generic, address);
  SharedPlace to = shared_place(w, static_cast<uint32_t>(address));
  uint8_t* place = to.cta->shared->at(to.address, 4, 4);
  if (!t.memory) t.memory = std::make_unique<TrackedMemory>("tensor", kTensorBounds, 0, kTensorLanes * kLaneBytes, 4, &w.machine->stream.clusters, w.cta->cluster->number, w.machine->launch.checks);
  uint32_t units = columns / kAllocationColumns;
  for (uint32_t first = 0; first + units <= kTensorColumns / kAllocationColumns; ++first) {
    bool free = true;
    for (uint32_t u = first; u < first + units; ++u) free &= !t.allocated[u];
    if (!free) continue;
    for (uint32_t u = first; u < first + units; ++u) t.allocated[u] = 1;
    t.allocated[first] = columns;
    uint32_t result = first * kAllocationColumns;
    to.cta->shared->note_write(to.address, 4, w.collective_actor());
    std::memcpy(place, &result, 4);
    ++w.machine->progress;
    return;
  }
  w.retry();
  w.wait(describe_alloc, columns);
}

// Memory that is freed must be out of use, and its content goes.
void check_quiet(Warp& w, uint32_t column, uint32_t columns) {
  TrackedMemory& tensor = tensor_memory(*w.cta);
  Actor actor = w.collective_actor();
  actor.ordered = nullptr;  // that it is complete is enough
  for (uint32_t lane = 0; lane < kTensorLanes; ++lane) {
    uint32_t place = tensor_place(*w.cta, lane, column, columns);
    try {
      tensor.note_write(place, columns * 4, actor);
    } catch (const SimError& e) {
      throw SimError(std::string(e.what()) + ", which is freed here");
    }
    tensor.forget(place, columns * 4);
  }
}

void dealloc(Warp& w, const Instr& in, uint32_t mask) {
  if (!w.converged(kFullMask)) return;
  TensorMemory& t = *w.cta->tensor;
  uint32_t address = uniform(w, in.a[0], mask, "addresses"), columns = uniform(w, in.a[1], mask, "column counts");
  uint32_t first = (address & 0xffff) / kAllocationColumns;
  if (address >> 16 || address % kAllocationColumns || first >= kTensorColumns / kAllocationColumns || t.allocated[first] != columns)
    throw SimError(format("tensor_bounds: no allocation of %u columns at 0x%x", columns, address));
  check_quiet(w, address, columns);
  for (uint32_t u = first; u < first + columns / kAllocationColumns; ++u) t.allocated[u] = 0;
  ++w.machine->progress;
  for (auto& warp : w.cta->warps)
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
// What an instruction descriptor says. The block-scaled kinds come last.
enum MmaKind { kind_f16, kind_tf32, kind_f8f6f4, kind_mxf8f6f4, kind_mxf4, kind_mxf4nvf4 };

struct MmaShape {
  uint32_t m, n, k;
  Element a, b;
  bool half_d = false, negate_a, negate_b, a_mn, b_mn;
  uint32_t blocks = 0;  // of k, each with its scale factors; 0: not scaled
  bool ue8m0 = false;
  uint32_t sfa_id = 0, sfb_id = 0;
};

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

// Kinds f16, tf32 and f8f6f4.
MmaShape decode_shape(uint32_t bits, int kind, bool two_ctas) {
  DescriptorBits d{bits};
  d.require((bits & (1u << 6 | 1u << 23 | 1u << 29)) == 0, "reserved bits are set");
  d.require((bits & 11) == 0, "the selector of sparse operands or the saturation of integers is set");
  MmaShape s = d.common();
  auto element = [&](uint32_t first) {
    if (kind == kind_f8f6f4) return d.narrow(first);
    uint32_t code = d.field(first, 3);
    d.require(kind == kind_tf32 ? code == 2 : code <= 1, "element type");
    return kind == kind_tf32 ? Element::tf32 : code ? Element::bf16 : Element::f16;
  };
  s.a = element(7);
  s.b = element(10);
  d.require(kind != kind_f16 || s.a == s.b, "A and B of different types");
  uint32_t to = d.field(4, 2);
  d.require(to == 1 || (to == 0 && kind != kind_tf32 && s.a != Element::bf16), "accumulator type");
  s.half_d = to == 0;
  s.m = d.field(24, 5) * 16;
  s.k = kind == kind_tf32 ? 8 : kind == kind_f16 ? 16 : 32;
  d.require(two_ctas ? s.m == 128 || s.m == 256 : s.m == 64 || s.m == 128, "M");
  d.require_n(s, two_ctas ? 32 : s.m == 64 ? 8 : 16, two_ctas);
  return s;
}

// Kinds mxf8f6f4, mxf4 and mxf4nvf4.
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
  d.require(!(two_ctas && s.m == 128), "M of 128 over two CTAs is not modelled: where scale factors of B lie then is not documented");
  d.require(s.m == (two_ctas ? 256 : 128), "M");
  d.require_n(s, two_ctas ? 16 : 8, two_ctas);
  return s;
}

struct MmaOperation {
  MmaShape shape;
  bool two_ctas, a_in_tensor, accumulate;
  uint32_t d, a_tensor, sfa, sfb;
  uint64_t a, b;  // descriptors
  float scale_d;
  std::array<uint32_t, 8> disabled;
  std::vector<Cta*> ctas;  // lower rank first
  uint32_t rows() const { return shape.m / static_cast<uint32_t>(ctas.size()); }   // of A and D in one CTA
  uint32_t columns() const { return shape.n / static_cast<uint32_t>(ctas.size()); }  // of B in one CTA

  // Tensor lane and column, from D's address, of an element of a CTA's part of D.
  void place(uint32_t row, uint32_t n, uint32_t* lane, uint32_t* column) const {
    *lane = row;
    *column = n;
    if (rows() == 128) return;
    if (two_ctas) {  // M 128 over two CTAs: the second half of the columns lies in the upper lanes
      *lane = row + n / (shape.n / 2) * 64;
      *column = n % (shape.n / 2);
    } else {         // M 64: sixteen rows in each quarter
      *lane = row / 16 * 32 + row % 16;
    }
  }
  uint32_t a_lane(uint32_t row) const { return rows() == 128 || two_ctas ? row : row / 16 * 32 + row % 16; }
  uint32_t words_of_a() const { return shape.k * (shape.a == Element::e2m1_packed ? 4 : std::max(8u, element_bits(shape.a))) / 32; }
  Tile tile_a(bool checked) const { return Tile(decode_tcgen05_descriptor(a, checked), shape.a, !shape.a_mn, rows(), shape.k); }
  Tile tile_b(bool checked) const { return Tile(decode_tcgen05_descriptor(b, checked), shape.b, !shape.b_mn, columns(), shape.k); }
};

// Scale factors of A: a row's lie in lane row % 32 of column row / 32, and so in each quarter of the lanes. Those of B
// do the same with n, all of them in each CTA. The id is the first byte of the column's four that holds one.
// Visits f(row or n, address of its bytes in a quarter).
template <class F>
void for_each_scale(Cta& cta, uint32_t address, uint32_t id, uint32_t count, uint32_t quarter, F f) {
  for (uint32_t i = 0; i < count; ++i)
    f(i, tensor_place(cta, (address >> 16) + quarter * 32 + i % 32, (address & 0xffff) + i / 32, 1) + id);
}

void note_scales(Cta& cta, uint32_t address, uint32_t id, uint32_t blocks, uint32_t count, const Actor& actor) {
  TrackedMemory& tensor = tensor_memory(cta);
  for (uint32_t quarter = 0; quarter < 4; ++quarter)
    for_each_scale(cta, address, id, count, quarter, [&](uint32_t, uint32_t place) { tensor.note_read(place, blocks, actor); });
}

void read_scales(Cta& cta, uint32_t address, uint32_t id, const MmaShape& s, uint32_t count, std::vector<float>* to) {
  TrackedMemory& tensor = tensor_memory(cta);
  to->resize(count * s.blocks);
  for_each_scale(cta, address, id, count, 0, [&](uint32_t i, uint32_t place) {
    const uint8_t* bytes = tensor.at(place, s.blocks, 1);
    for (uint32_t b = 0; b < s.blocks; ++b) (*to)[i * s.blocks + b] = s.ue8m0 ? ue8m0_to_float(bytes[b]) : decode(kE4m3, bytes[b] & 0x7f);
    if (!cta.cluster->machine->checking(kScaleFactors)) return;
    for (uint32_t quarter = 1; quarter < 4; ++quarter)
      if (std::memcmp(bytes, bytes + quarter * 32 * kLaneBytes, s.blocks))
        throw SimError(format("scale_factors: those at lane %u, column %u differ from their copy at lane %u", (address >> 16) + i % 32, (address & 0xffff) + i / 32, (address >> 16) + i % 32 + quarter * 32));
  });
}

void perform(const MmaOperation& op, bool checked) {
  const MmaShape& s = op.shape;
  static thread_local std::vector<float> a, b, d, scale_a, scale_b;
  b.resize(s.k * s.n);
  for (size_t i = 0; i < op.ctas.size(); ++i) read_tile(*op.ctas[i], op.tile_b(checked), b.data() + i * op.columns(), 1, s.n, s.negate_b);
  for (size_t i = 0; i < op.ctas.size(); ++i) {
    Cta& cta = *op.ctas[i];
    a.resize(op.rows() * s.k);
    if (op.a_in_tensor) {
      for (uint32_t row = 0; row < op.rows(); ++row) {
        const uint32_t* words = tensor_words(cta, (op.a_tensor >> 16) + op.a_lane(row), op.a_tensor & 0xffff, op.words_of_a());
        decode_containers(s.a, reinterpret_cast<const uint8_t*>(words), op.words_of_a() * 4, a.data() + row * s.k);
      }
      if (s.negate_a) for (float& v : a) v = -v;
    } else {
      read_tile(cta, op.tile_a(checked), a.data(), s.k, 1, s.negate_a);
    }
    d.assign(op.rows() * s.n, 0.0f);
    auto word = [&](uint32_t row, uint32_t n) -> uint32_t* {
      uint32_t lane, column;
      op.place(row, n, &lane, &column);
      return tensor_words(cta, (op.d >> 16) + lane, (op.d & 0xffff) + column, 1);
    };
    if (op.accumulate)
      for (uint32_t row = 0; row < op.rows(); ++row)
        for (uint32_t n = 0; n < s.n; ++n) {
          uint32_t bits = *word(row, n);
          d[row * s.n + n] = (s.half_d ? f16_to_float(static_cast<uint16_t>(bits)) : from_bits(bits)) * op.scale_d;
        }
    if (s.blocks) {
      read_scales(cta, op.sfa, s.sfa_id, s, op.rows(), &scale_a);
      read_scales(cta, op.sfb, s.sfb_id, s, s.n, &scale_b);
      multiply_scaled(d.data(), a.data(), b.data(), scale_a.data(), scale_b.data(), op.rows(), s.n, s.k, s.blocks);
    } else {
      multiply(d.data(), a.data(), b.data(), op.rows(), s.n, s.k);
    }
    for (uint32_t row = 0; row < op.rows(); ++row)
      for (uint32_t n = 0; n < s.n; ++n) {
        uint32_t lane, column;
        op.place(row, n, &lane, &column);
        if (op.disabled[i * 4 + lane / 32] >> (lane % 32) & 1) continue;
        float v = d[row * s.n + n];
        *word(row, n) = s.half_d ? float_to_f16(v) : to_bits(v);
      }
  }
}

// CTAs of a group: this one, or this one and its peer.
std::vector<Cta*> group_of(Warp& w, bool two) {
  if (!two) return {w.cta};
  auto& ctas = w.cta->cluster->ctas;
  uint32_t even = w.cta->rank & ~1u;
  if (even + 1 >= ctas.size()) throw SimError("cta_group::2 in a cluster without the peer CTA");
  return {ctas[even].get(), ctas[even + 1].get()};
}

// Instr::kind of mma
struct Kind {
  static constexpr int two_ctas = 8, a_in_tensor = 16, blocks = 5;  // from bit 5 on: the blocks of k
  static int mma(int kind) { return kind & 7; }
};

// a[0] D, a[1] A, a[2] B, a[3] instruction descriptor, a[4] enable-input-d; in.imm scale-input-d; lists: disabled lanes,
// in.n of them, or of a block-scaled kind the addresses of the scale factors of A and B and the offsets from them
void mma(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    MmaOperation op;
    op.two_ctas = in.kind & Kind::two_ctas;
    uint32_t descriptor = w.reg<uint32_t>(in.a[3])[l], blocks = static_cast<uint32_t>(in.kind >> Kind::blocks);
    op.shape = blocks ? decode_scaled_shape(descriptor, Kind::mma(in.kind), blocks, op.two_ctas) : decode_shape(descriptor, Kind::mma(in.kind), op.two_ctas);
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
      if (blocks) {
        note_scales(cta, op.sfa, op.shape.sfa_id, blocks, op.rows(), actor);
        note_scales(cta, op.sfb, op.shape.sfb_id, blocks, op.shape.n, actor);
      }
      for (uint32_t row = 0; row < op.rows(); ++row) {
        if (op.a_in_tensor)
          tensor.note_read(tensor_place(cta, (op.a_tensor >> 16) + op.a_lane(row), op.a_tensor & 0xffff, op.words_of_a()), op.words_of_a() * 4, actor);
        bool halves = op.two_ctas && op.rows() == 64;
        for (uint32_t half = 0; half < (halves ? 2u : 1u); ++half) {
          uint32_t lane, column, columns = halves ? op.shape.n / 2 : op.shape.n;
          op.place(row, half * columns, &lane, &column);
          if (op.disabled[i * 4 + lane / 32] >> (lane % 32) & 1) continue;
          uint32_t address = tensor_place(cta, (op.d >> 16) + lane, (op.d & 0xffff) + column, columns);
          if (op.accumulate) tensor.note_read(address, columns * 4, actor);
          tensor.note_write(address, columns * 4, actor);
        }
      }
    }
    push(w, w.tensor_core[l], key, [op, checked] { perform(op, checked); });
  }
  w.lane = -1;
}

// ---- cp: shared memory to tensor memory ----
// in.kind: rows | repeated every 32 lanes << 8 | two_ctas << 16; in.n: bytes of a row; in.imm: Element of the source,
// e4m3 for plain bytes; a[0] address, a[1] descriptor
void cp(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    uint32_t rows = static_cast<uint32_t>(in.kind & 0xff), columns = static_cast<uint32_t>(in.n) / 4, to = w.reg<uint32_t>(in.a[0])[l] + static_cast<uint32_t>(in.size);
    uint32_t copies = in.kind >> 8 & 1 ? 4 : 1;
    Tile tile(decode_tcgen05_descriptor(w.reg<uint64_t>(in.a[1])[l], w.machine->checking(kDescriptor)), static_cast<Element>(in.imm), true, rows, static_cast<uint32_t>(in.n));
    std::vector<Cta*> ctas = group_of(w, in.kind >> 16);
    CoreActor actor(w, l, op_cp);
    for (Cta* cta : ctas) {
      note_tile(*cta, tile, actor);
      for (uint32_t row = 0; row < rows; ++row)
        for (uint32_t copy = 0; copy < copies; ++copy)
          tensor_memory(*cta).note_write(tensor_place(*cta, (to >> 16) + row + 32 * copy, to & 0xffff, columns), columns * 4, actor);
    }
    push(w, w.tensor_core[l], op_cp, [=] {
      for (Cta* cta : ctas)
        for (uint32_t row = 0; row < rows; ++row)
          for (uint32_t copy = 0; copy < copies; ++copy) {
            uint32_t* words = tensor_words(*cta, (to >> 16) + row + 32 * copy, to & 0xffff, columns);
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
        b->arriving.join(relied_on);
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

void decode_mma(Decoder& d) {
  static const char* const kinds[] = {"kind::f16", "kind::tf32", "kind::f8f6f4", "kind::mxf8f6f4", "kind::mxf4", "kind::mxf4nvf4"};
  if (take_group(d)) d.in.kind |= Kind::two_ctas;
  int kind = -1;
  for (int i = 0; i < 6; ++i)
    if (d.take(kinds[i])) kind = i;
  if (kind < 0) d.fail("unknown kind");
  bool scaled = kind >= kind_mxf8f6f4;
  d.in.kind |= kind | (scaled ? take_blocks(d, kind) << Kind::blocks : 0);
  d.take_one({"collector::a::fill", "collector::a::use", "collector::a::lastuse", "collector::a::discard"});
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
  } else if (d.operand(next).kind == Operand::vector) {
    const Operand& lanes = d.operand(next++);
    if (lanes.items.size() != (d.in.kind & Kind::two_ctas ? 8u : 4u)) d.fail("size of the disabled lanes' mask");
    d.in.n = static_cast<int>(lanes.items.size());
    for (const Operand& o : lanes.items) d.list(d.value(o, *find_type("b32")));
  }
  d.in.a[4] = d.predicate(next++);
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
    take_group(d);
    expect_collective(d);
    take_space(d);
    d.type();
    d.expect(2, 2);
    int bytes = 0;
    d.in.a[0] = d.address(d.operand(0), &bytes);
    d.in.kind = bytes == 8;
    d.in.a[1] = d.source_slot(1, b32);
    d.in.fn = alloc;
  } else if (op == "dealloc") {
    take_group(d);
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
    std::string shape = d.take_one({"128x256b", "128x128b", "4x256b", "32x128b"});
    if (shape.empty()) d.fail("unknown shape");
    bool repeated = d.take("warpx4");
    if (repeated != (shape == "32x128b")) d.fail("unknown form");
    // Six bits become a byte alike, whichever type they are.
    Element source = Element::e4m3;
    if (d.take("b8x16")) {
      std::string from = d.take_one({"b4x16_p64", "b6x16_p32"});
      if (from.empty()) d.fail("unknown format");
      source = from == "b4x16_p64" ? Element::e2m1 : Element::e2m3;
    }
    int rows = std::stoi(shape);
    d.in.kind = rows | repeated << 8 | two << 16;
    d.in.n = shape.find("256b") != std::string::npos ? 32 : 16;
    d.expect(2, 2);
    d.in.a[0] = tensor_address(d, d.operand(0), &d.in.size);
    d.in.a[1] = d.source_slot(1, *find_type("b64"));
    d.in.imm = static_cast<uint64_t>(source);
    d.in.fn = cp;
  } else if (op == "commit") {
    take_group(d);
    if (!d.take("mbarrier::arrive::one")) d.fail("unknown completion mechanism");
    bool multicast = d.take("multicast::cluster");
    take_space(d);
    d.type();
    d.expect(multicast ? 2 : 1, multicast ? 2 : 1);
    int bytes = 0;
    d.in.a[0] = d.address(d.operand(0), &bytes);
    d.in.kind = bytes == 8;
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

void check_tensor_memory_freed(Cta& cta) {
  const Machine& machine = *cta.cluster->machine;
  if (!machine.checking(kTensorLeak)) return;
  for (uint32_t u = 0; u < kTensorColumns / kAllocationColumns; ++u)
    if (cta.tensor->allocated[u] > 1) throw SimError(format("tensor_leak: the CTA ends with %u columns of tensor memory allocated at column %u", cta.tensor->allocated[u], u * kAllocationColumns));
}

void register_tcgen05(OpcodeTable& table) { table["tcgen05"] = decode_tcgen05; }

}  // namespace ptxsim
