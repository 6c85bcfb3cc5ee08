// wgmma.mma_async and its fence, commit and wait.
#include "wgmma.h"

#include <algorithm>

#include "decode.h"
#include "numeric.h"
#include "smem_matrix.h"
#include "tcgen05.h"

namespace ptxsim {
namespace {

// Instr::kind of wgmma.mma_async: the types of the elements and these flags
struct Kind {
  static constexpr int format_b = 4, a_registers = 1 << 8, negate_a = 1 << 9, negate_b = 1 << 10, trans_a = 1 << 11, trans_b = 1 << 12, half = 1 << 13,
                       integer = 1 << 14, satfinite = 1 << 15;
  static Element a(int kind) { return static_cast<Element>(kind & 15); }
  static Element b(int kind) { return static_cast<Element>(kind >> format_b & 15); }
  static uint32_t k(int kind) { return 256 / element_bits(a(kind)); }
  static uint32_t shape(const Instr& in) { return static_cast<uint32_t>(in.n) << 7 | k(in.kind) << 1 | 1; }
};
// Slots: a[0] descriptor of A, a[1] of B, a[2] scale-d; in.n: N; lists: D registers, A registers, then their numbers.

uint32_t accumulator_registers(const Instr& in) { return static_cast<uint32_t>(in.n) / (in.kind & Kind::half ? 4 : 2); }

Warpgroup& warpgroup_of(Warp& w) {
  Warpgroup& g = *w.cta->warpgroups[static_cast<size_t>(w.index / 4)];
  if (!g.warps[0]) {
    size_t first = static_cast<size_t>(w.index / 4 * 4);
    if (first + 4 > w.cta->warps.size()) throw SimError("wgmma in a warpgroup of less than four warps");
    for (size_t i = 0; i < 4; ++i) g.warps[i] = w.cta->warps[first + i].get();
    g.agent = w.cta->cluster->agents->add(format("wgmma groups of warpgroup %d", w.index / 4), true, w.cta->rank);
  }
  return g;
}

Tile tile_of(const Warp& w, const Instr& in, uint64_t bits, bool a) {
  uint32_t extent = a ? 64 : static_cast<uint32_t>(in.n);
  bool k_major = !(in.kind & (a ? Kind::trans_a : Kind::trans_b));
  Element element = a ? Kind::a(in.kind) : Kind::b(in.kind);
  return Tile(decode_wgmma_descriptor(bits, w.machine->checking(kDescriptor)), element, k_major, extent, Kind::k(in.kind));
}

void read_a_registers(Warpgroup& g, const Instr& in, float* a, uint32_t k) {
  uint32_t per = k / 8;  // elements of a register
  float values[4];
  for (uint32_t warp = 0; warp < 4; ++warp) {
    Warp& w = *g.warps[warp];
    const int32_t* registers = w.program->lists.data() + in.list + accumulator_registers(in);
    for (uint32_t l = 0; l < kLanes; ++l)
      for (uint32_t r = 0; r < 4; ++r) {
        decode_elements(Kind::a(in.kind), w.reg<uint8_t>(registers[r]) + 4 * l, 4, values);
        uint32_t row = warp * 16 + l / 4 + 8 * (r & 1), column = l % 4 * per + (r >> 1) * 4 * per;
        for (uint32_t e = 0; e < per; ++e) a[row * k + column + e] = in.kind & Kind::negate_a ? -values[e] : values[e];
      }
  }
}

// Register i of a lane holds row l / 4 (+ 8) and column 8 * (i / 4) + 2 * (l % 4) + (i & 1) of its warp's 16 rows.
template <class F>
void for_each_accumulator(Warpgroup& g, const Instr& in, F f) {
  uint32_t n = static_cast<uint32_t>(in.n);
  for (uint32_t warp = 0; warp < 4; ++warp) {
    Warp& w = *g.warps[warp];
    const int32_t* registers = w.program->lists.data() + in.list;
    for (uint32_t i = 0; i < n / 2; ++i)
      for (uint32_t l = 0; l < kLanes; ++l) {
        uint32_t at = (warp * 16 + l / 4 + 8 * (i >> 1 & 1)) * n + 8 * (i / 4) + 2 * (l % 4) + (i & 1);
        if (in.kind & Kind::half) f(at, static_cast<float*>(nullptr), &w.reg<uint16_t>(registers[i / 2])[2 * l + (i & 1)]);
        else f(at, &w.reg<float>(registers[i])[l], static_cast<uint16_t*>(nullptr));
      }
  }
}

void perform(Warpgroup& g, const WgmmaOperation& op) {
  const Instr& in = *op.in;
  uint32_t n = static_cast<uint32_t>(in.n), k = Kind::k(in.kind);
  Warp& w = *g.warps[0];
  static thread_local std::vector<float> a, b, d;
  a.resize(64 * k);
  b.resize(k * n);
  d.assign(64 * n, 0.0f);
  if (in.kind & Kind::a_registers) read_a_registers(g, in, a.data(), k);
  else read_tile(*w.cta, tile_of(w, in, op.a, true), a.data(), k, 1, in.kind & Kind::negate_a);
  read_tile(*w.cta, tile_of(w, in, op.b, false), b.data(), 1, n, in.kind & Kind::negate_b);
  // Of integers the products alone: a sum of 32 has less than the 24 bits that float32 holds exactly.
  bool integer = in.kind & Kind::integer;
  if (op.accumulate && !integer)
    for_each_accumulator(g, in, [&](uint32_t at, float* f, uint16_t* h) { d[at] = f ? *f : f16_to_float(*h); });
  bool chip = w.machine->launch.chip_accuracy && !integer;
  Fusion fusion{k == 32 ? 13 : 25, least_exponent(Kind::a(in.kind)), least_exponent(Kind::b(in.kind)), (in.kind & Kind::half) != 0};
  if (chip) multiply_fused(d.data(), a.data(), b.data(), 64, n, k, fusion);
  else multiply(d.data(), a.data(), b.data(), 64, n, k);
  for_each_accumulator(g, in, [&](uint32_t at, float* f, uint16_t* h) {
    if (h) {
      *h = float_to_f16(d[at]);
    } else if (integer) {
      int64_t sum = static_cast<int64_t>(d[at]) + (op.accumulate ? bit_cast<int32_t>(*f) : 0);
      *f = bit_cast<float>(integer_sum(sum, in.kind & Kind::satfinite));
    } else {
      *f = d[at];
    }
  });
}

std::string describe_wgmma(const Warp& w) {
  return format("wgmma groups (%zu have not taken effect; all four warps must issue them)", w.wgmma.outstanding.size());
}

// Hands the first operation to the scheduler once all four warps have issued it.
void schedule(Warpgroup& g) {
  if (g.scheduled || g.operations.empty() || g.operations.front().arrived < 4) return;
  g.scheduled = true;
  Warpgroup* group = &g;
  g.warps[0]->machine->issue(*g.warps[0], g.operations.front().at, [group] {
    WgmmaOperation op = group->operations.front();
    group->operations.pop_front();
    ++group->finished;
    group->scheduled = false;
    perform(*group, op);
    for (Warp* w : group->warps) {
      w->wgmma.finished(op.mark);
      if (w->describe_wait == describe_wgmma && w->status == Warp::waiting) w->wake();
    }
    schedule(*group);
  });
}

// Numbers of the registers of D, then of A; -1: a constant or nothing.
struct Registers {
  const int32_t* numbers;
  uint32_t accumulators, count;
  Registers(const Program& program, const Instr& in) : accumulators(accumulator_registers(in)), count(accumulators + (in.kind & Kind::a_registers ? 4 : 0)) {
    numbers = program.lists.data() + in.list + count;
  }
};

// A wgmma is ordered after earlier accesses to its registers by a wgmma.fence alone. Two need none between them where both
// accumulate in the register with the same shape, or both read it as A.
void check_fenced(Warp& w, const Instr& in) {
  if (!w.wgmma_fences) throw SimError("in_flight_registers: no wgmma.fence before the warp's first wgmma");
  Registers registers(*w.program, in);
  for (uint32_t i = 0; i < registers.count; ++i) {
    if (registers.numbers[i] < 0) continue;
    WgmmaRegister& r = w.wgmma_registers[static_cast<size_t>(registers.numbers[i])];
    uint32_t shape = i < registers.accumulators ? Kind::shape(in) : 0;
    const char* name = w.program->function->registers[static_cast<size_t>(registers.numbers[i])].name.c_str();
    if (r.touched == w.wgmma_fences) throw SimError(format("in_flight_registers: no wgmma.fence between this wgmma and an earlier access to its register %s", name));
    if (r.used == w.wgmma_fences && r.shape != shape)
      throw SimError(format("in_flight_registers: no wgmma.fence between this wgmma and one that uses its register %s in another shape, or as an operand of another kind", name));
    r.used = w.wgmma_fences;
    r.shape = shape;
  }
}

void touch_wgmma_registers(Warp& w, const Instr& in, uint32_t mask) {
  const int32_t* uses = w.program->lists.data() + in.uses;
  for (int i = 0; i < in.use_count; ++i) w.wgmma_registers[static_cast<size_t>(uses[i])].touched = w.wgmma_fences;
  w.program->behind[static_cast<size_t>(w.at)](w, in, mask);
}

// `mov d, a`. Compilers copy accumulators, and move constants into them, wherever they like; the assembler knows that
// these are one value, so a copy is no access and has what its source has behind it.
bool is_copy(const Instr& in) {
  const Statement& s = *in.source;
  return s.opcode[0] == "mov" && s.operands[0].kind == Operand::reg && (s.operands[1].kind == Operand::reg || s.operands[1].kind == Operand::real || s.operands[1].kind == Operand::integer);
}

void copy_wgmma_register(Warp& w, const Instr& in, uint32_t mask) {
  const Operand& to = in.source->operands[0];
  const Operand& from = in.source->operands[1];
  w.wgmma_registers[static_cast<size_t>(to.index)] = from.kind == Operand::reg ? w.wgmma_registers[static_cast<size_t>(from.index)] : WgmmaRegister();
  w.program->behind[static_cast<size_t>(w.at)](w, in, mask);
}

void own_registers(Warp& w, const Instr& in, uint32_t mark) {
  Registers registers(*w.program, in);
  const int32_t* numbers = registers.numbers;
  for (uint32_t i = 0; i < registers.count; ++i) {
    if (numbers[i] < 0) continue;
    w.in_flight[static_cast<size_t>(numbers[i])] = kOwnedByWgmma;
    w.owned.emplace_back(mark, numbers[i]);
  }
  w.in_flight_count = static_cast<int>(w.owned.size()) + w.loading;
}

void mma_async(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(kFullMask)) return;
  Warpgroup& g = warpgroup_of(w);
  if (w.machine->checking(kInFlightRegisters)) check_fenced(w, in);
  size_t rank = static_cast<size_t>(w.index % 4);
  uint64_t number = g.issued[rank]++;
  uint64_t a = in.kind & Kind::a_registers ? 0 : w.reg<uint64_t>(in.a[0])[0], b = w.reg<uint64_t>(in.a[1])[0];
  bool accumulate = w.pred(in.a[2]) & 1;
  if (number - g.finished == g.operations.size()) g.operations.push_back({&in, a, b, accumulate, w.at, 0, w.wgmma.mark});
  WgmmaOperation& op = g.operations[number - g.finished];
  if (op.in != &in || op.a != a || op.b != b || op.accumulate != accumulate || op.mark != w.wgmma.mark)
    throw SimError("convergence: the warps of a warpgroup issue different wgmma operations");
  Actor actor = w.collective_actor();
  actor.tag = epoch(g.agent, op.mark);
  actor.async_proxy = true;
  if (!(in.kind & Kind::a_registers)) note_tile(*w.cta, tile_of(w, in, a, true), actor);
  note_tile(*w.cta, tile_of(w, in, b, false), actor);
  w.wgmma.issued();
  if (w.machine->checking(kInFlightRegisters)) own_registers(w, in, op.mark);
  ++op.arrived;
  ++w.machine->progress;
  schedule(g);
}

void mma_fence(Warp& w, const Instr&, uint32_t) {
  if (w.converged(kFullMask)) ++w.wgmma_fences;
}

void commit_group(Warp& w, const Instr&, uint32_t) {
  if (w.converged(kFullMask)) w.wgmma.commit();
}

void wait_group(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(kFullMask)) return;
  uint32_t mark = w.wgmma.covered(in.imm);
  if (!w.wgmma.done(mark)) {
    w.retry();
    w.wait(describe_wgmma);
    return;
  }
  if (!mark) return;
  uint32_t agent = warpgroup_of(w).agent;
  w.for_sets(w.live, [&](LaneSet& s) { s.clock.seen.see(agent, mark); });
  // A register may belong to several operations: it is free when none of them is outstanding.
  std::vector<std::pair<uint32_t, int32_t>> still;
  for (auto& o : w.owned) {
    if (o.first <= mark) w.in_flight[static_cast<size_t>(o.second)] = 0;
    else still.push_back(o);
  }
  w.owned.swap(still);
  for (auto& o : w.owned) w.in_flight[static_cast<size_t>(o.second)] = kOwnedByWgmma;
  w.in_flight_count = static_cast<int>(w.owned.size()) + w.loading;
}

void decode_mma(Decoder& d) {
  const auto& op = d.source->opcode;  // ... m64nNkK . dtype . atype . btype
  std::string shape;
  for (const std::string& m : op)
    if (m.compare(0, 4, "m64n") == 0) shape = m;
  if (shape.empty()) d.fail("unknown matrix shape");
  d.take(shape.c_str());
  int n = 0, k = 0;
  if (std::sscanf(shape.c_str(), "m64n%dk%d", &n, &k) != 2 || n < 8 || n > 256 || n % 8) d.fail("unknown matrix shape");
  if (!d.take("sync") || !d.take("aligned")) d.fail("without .sync.aligned");
  std::string types[3];
  for (size_t i = 0; i < 3; ++i) {
    types[i] = op[op.size() - 3 + i];
    d.take(types[i].c_str());
  }
  auto element_of = [&](const std::string& name) {
    static const std::pair<const char*, Element> elements[] = {{"f16", Element::f16},   {"bf16", Element::bf16}, {"tf32", Element::tf32}, {"e4m3", Element::e4m3},
                                                               {"e5m2", Element::e5m2}, {"s8", Element::s8},     {"u8", Element::u8}};
    for (auto& e : elements)
      if (name == e.first) return e.second;
    d.fail("unknown element types");
  };
  Element ea = element_of(types[1]), eb = element_of(types[2]);
  auto is_integer = [](Element e) { return e == Element::s8 || e == Element::u8; };
  bool integer = is_integer(ea), wide = element_bits(ea) == 16;
  // Types are mixed among those of 8 bits only.
  if (ea != eb && (element_bits(ea) != 8 || element_bits(eb) != 8 || is_integer(eb) != integer)) d.fail("unknown element types");
  if (static_cast<uint32_t>(k) != 256 / element_bits(ea) || (integer && n > 32 && n % 16)) d.fail("unknown matrix shape");
  bool half = types[0] == "f16" && !integer && ea != Element::bf16 && ea != Element::tf32;
  if (types[0] != (integer ? "s32" : half ? "f16" : "f32")) d.fail("accumulators of type ." + types[0]);
  d.in.n = n;
  d.in.kind = static_cast<int>(ea) | static_cast<int>(eb) << Kind::format_b | (half ? Kind::half : 0) | (integer ? Kind::integer : 0);
  if (integer && d.take("satfinite")) d.in.kind |= Kind::satfinite;
  const Operand& accumulators = d.operand(0);
  const Operand& a = d.operand(1);
  bool a_registers = a.kind == Operand::vector;
  if (a_registers) d.in.kind |= Kind::a_registers;
  if (accumulators.kind != Operand::vector || accumulators.items.size() != accumulator_registers(d.in)) d.fail("number of accumulator registers");
  if (a_registers && a.items.size() != 4) d.fail("number of registers of A");
  const Type& b32 = *find_type("b32");
  for (const Operand& o : accumulators.items) d.list(d.target(o, 4));
  if (a_registers)
    for (const Operand& o : a.items) d.list(d.value(o, b32));
  for (const Operand& o : accumulators.items) d.list(o.index);
  if (a_registers)
    for (const Operand& o : a.items) d.list(o.kind == Operand::reg ? o.index : -1);
  if (!a_registers) d.in.a[0] = d.source_slot(1, *find_type("b64"));
  d.in.a[1] = d.source_slot(2, *find_type("b64"));
  // scale-d; but for integers imm-scale-a, imm-scale-b; for 16-bit elements imm-trans-a (A in shared memory), imm-trans-b
  size_t transposes = wide ? (a_registers ? 1 : 2) : 0, operands = integer ? 4 : 6 + transposes;
  d.expect(operands, operands);
  d.in.a[2] = d.predicate(3);
  d.in.fn = mma_async;
  if (integer) return;
  auto scale = [&](size_t i) {
    int64_t v = static_cast<int64_t>(d.immediate(i));
    if (v != 1 && v != -1) d.fail("scale other than 1 and -1");
    return v < 0;
  };
  if (scale(4)) d.in.kind |= Kind::negate_a;
  if (scale(5)) d.in.kind |= Kind::negate_b;
  auto transposed = [&](size_t i) {
    uint64_t v = d.immediate(i);
    if (v > 1) d.fail("transposition other than 0 and 1");
    return v == 1;
  };
  if (transposes == 2 && transposed(6)) d.in.kind |= Kind::trans_a;
  if (transposes && transposed(5 + transposes)) d.in.kind |= Kind::trans_b;
}

}  // namespace

bool registers_ready(Warp& w, const Instr& in) {
  if (in.fn == mma_async) return true;  // operations of a warpgroup follow one another in order
  const int32_t* uses = w.program->lists.data() + in.uses;
  for (int i = 0; i < in.use_count; ++i) {
    uint32_t owner = w.in_flight[static_cast<size_t>(uses[i])];
    if (owner >= kOwnedByLoad) return wait_for_load(w);
    if (owner)
      throw SimError(format("in_flight_registers: %s belongs to a wgmma that was not waited for", w.program->function->registers[static_cast<size_t>(uses[i])].name.c_str()));
  }
  return true;
}

void watch_wgmma_registers(Program& program) {
  std::vector<bool> watched(program.register_slot.size());
  bool any = false;
  for (const Instr& in : program.code) {
    if (in.fn != mma_async) continue;
    Registers registers(program, in);
    for (uint32_t i = 0; i < registers.count; ++i)
      if (registers.numbers[i] >= 0) watched[static_cast<size_t>(registers.numbers[i])] = any = true;
  }
  if (!any) return;
  // What is copied to such a register is followed as well.
  for (bool more = true; more;) {
    more = false;
    for (const Instr& in : program.code) {
      if (!is_copy(in) || in.source->operands[1].kind != Operand::reg) continue;
      size_t to = static_cast<size_t>(in.source->operands[0].index), from = static_cast<size_t>(in.source->operands[1].index);
      if (watched[to] && !watched[from]) watched[from] = more = true;
    }
  }
  program.behind.resize(program.code.size());
  for (size_t at = 0; at < program.code.size(); ++at) {
    Instr& in = program.code[at];
    if (in.fn == mma_async) continue;
    const int32_t* uses = program.lists.data() + in.uses;
    if (std::none_of(uses, uses + in.use_count, [&](int32_t r) { return watched[static_cast<size_t>(r)]; })) continue;
    program.behind[at] = in.fn;
    in.fn = is_copy(in) ? copy_wgmma_register : touch_wgmma_registers;
  }
}

void register_wgmma(OpcodeTable& table) {
  table["wgmma"] = [](Decoder& d) {
    if (d.take("mma_async")) return decode_mma(d);
    std::string op = d.take_one({"fence", "commit_group", "wait_group"});
    if (op.empty()) d.fail("unknown wgmma operation");
    if (!d.take("sync") || !d.take("aligned")) d.fail("without .sync.aligned");
    d.expect(op == "wait_group", op == "wait_group");
    if (op == "wait_group") d.in.imm = d.immediate(0);
    d.in.fn = op == "fence" ? mma_fence : op == "commit_group" ? commit_group : wait_group;
  };
}

}  // namespace ptxsim
