#include "registers.h"

#include <algorithm>

#include "decode.h"

namespace ptxsim {
namespace {

// A compiler may order instructions better than the PTX does, and keeps values that are the same for a whole warp
// elsewhere: so many values more than registers are no fault. (Of ours, no kernel has ever had more than 7 too many.)
constexpr int kUnsure = 16;

using Bits = std::vector<uint64_t>;
void set(Bits& b, size_t i) { b[i / 64] |= 1ull << (i % 64); }
void clear(Bits& b, size_t i) { b[i / 64] &= ~(1ull << (i % 64)); }

std::string describe_registers(const Warp& w) {
  return format("%u registers a thread, of which the CTA's pool must hold %u more", static_cast<uint32_t>(w.wait_argument), static_cast<uint32_t>(w.wait_argument) - w.registers - w.cta->registers.free);
}

// Whether the warps of a warpgroup do the same, each for itself.
void agree(Warp& w, const Instr& in) {
  auto& changes = w.cta->registers.changes;
  size_t group = static_cast<size_t>(w.index) / 4;
  if (changes.size() <= group) changes.resize(group + 1);
  if (changes[group].size() > w.register_changes) {
    const Instr& other = *changes[group][w.register_changes];
    if (other.kind != in.kind || other.imm != in.imm)
      throw SimError(format("registers: another warp of the warpgroup has executed %s of PTX line %d instead", other.source->text.c_str(), other.source->line));
    return;
  }
  for (size_t i = group * 4; i < std::min(w.cta->warps.size(), group * 4 + 4); ++i)
    if (w.cta->warps[i]->status == Warp::done) throw SimError(format("registers: warp %zu of the warpgroup has ended without this setmaxnreg", i));
  changes[group].push_back(&in);
}

// in.kind: 1 = .inc; in.imm: registers of a thread
void setmaxnreg(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(w.live) || !w.machine->checking(kRegisters)) return;
  agree(w, in);
  RegisterPool& pool = w.cta->registers;
  uint32_t wanted = static_cast<uint32_t>(in.imm);
  if (in.kind ? wanted < w.registers : wanted > w.registers)
    throw SimError(format("registers: setmaxnreg.%s to %u, but the warp has %u", in.kind ? "inc" : "dec", wanted, w.registers));
  if (in.kind && pool.free < wanted - w.registers) {
    w.retry();
    w.wait(describe_registers, wanted);
    return;
  }
  pool.free += w.registers - wanted;  // less than before where it takes some
  w.registers = wanted;
  ++w.register_changes;
  ++w.machine->progress;
  for (auto& warp : w.cta->warps)
    if (warp->describe_wait == describe_registers && warp->status == Warp::waiting) warp->wake();
}

// The halves of each register, where a copy shares those of its source: a copy of what is written once needs no register.
class Halves {
 public:
  Halves(const Function& f, const std::vector<Effects>& effects) : function_(f), writes_(f.registers.size(), 0), first_(f.registers.size()) {
    for (size_t r = 0; r < f.registers.size(); ++r) {
      first_[r] = static_cast<int>(root_.size());
      for (int i = 0; i < f.registers[r].bytes / 2; ++i) root_.push_back(static_cast<int>(root_.size()));
    }
    fixed_.assign(root_.size(), false);
    std::vector<bool> computed(f.registers.size(), false);
    for (size_t i = 0; i < f.statements.size(); ++i) {
      const Statement& s = f.statements[i];
      for (int r : effects[i].targets) {
        writes_[static_cast<size_t>(r)] += s.guard >= 0 ? 2 : 1;
        if (!is_constant(s)) computed[static_cast<size_t>(r)] = true;
      }
    }
    for (size_t r = 0; r < f.registers.size(); ++r)
      if (!computed[r])
        for (int i = 0; i < f.registers[r].bytes / 2; ++i) fixed_[static_cast<size_t>(first_[r] + i)] = true;
    for (const Statement& s : f.statements)
      if (s.opcode[0] == "mov" && s.operands.size() == 2) share(s.operands[0], s.operands[1]);
  }
  size_t count() const { return root_.size(); }
  // Visits the halves that hold a register.
  template <class F>
  void each(int r, F f) const {
    for (int i = 0; i < function_.registers[static_cast<size_t>(r)].bytes / 2; ++i) {
      int h = root(first_[static_cast<size_t>(r)] + i);
      if (!fixed_[static_cast<size_t>(h)]) f(static_cast<size_t>(h));
    }
  }
  bool written_once(int r) const { return writes_[static_cast<size_t>(r)] == 1; }

 private:
  // Immediates, addresses, special registers and parameters can be had again at any time.
  static bool is_constant(const Statement& s) {
    if (s.opcode[0] == "ld" && s.opcode.size() > 1 && s.opcode[1] == "param") return true;
    if (s.opcode[0] != "mov" || s.operands.size() != 2) return false;
    Operand::Kind k = s.operands[1].kind;
    return k == Operand::integer || k == Operand::real || k == Operand::symbol || k == Operand::special;
  }
  int root(int h) const {
    while (root_[static_cast<size_t>(h)] != h) h = root_[static_cast<size_t>(h)];
    return h;
  }
  bool halves_of(const Operand& o, std::vector<int>* to) const {
    if (o.kind == Operand::vector) {
      for (const Operand& item : o.items)
        if (!halves_of(item, to)) return false;
      return true;
    }
    if (o.kind != Operand::reg || !written_once(o.index)) return false;
    for (int i = 0; i < function_.registers[static_cast<size_t>(o.index)].bytes / 2; ++i) to->push_back(first_[static_cast<size_t>(o.index)] + i);
    return true;
  }
  void share(const Operand& to, const Operand& from) {
    std::vector<int> a, b;
    if (!halves_of(to, &a) || !halves_of(from, &b) || a.size() != b.size()) return;
    for (size_t i = 0; i < a.size(); ++i) {
      int x = root(a[i]), y = root(b[i]);
      if (x == y) continue;
      root_[static_cast<size_t>(x)] = y;
      if (fixed_[static_cast<size_t>(x)]) fixed_[static_cast<size_t>(y)] = true;
    }
  }
  const Function& function_;
  std::vector<int> writes_, first_, root_;
  std::vector<bool> fixed_;
};

// For each instruction, whether it reads its accumulators too: a wgmma does unless its predicate is the constant false,
// which compilers write as a comparison of a constant just before it.
std::vector<bool> find_accumulating(const Function& f, const std::vector<bool>& begins) {
  std::vector<bool> result(f.statements.size(), false);
  std::map<int, uint64_t> known;  // values of registers in this block
  for (size_t i = 0; i < f.statements.size(); ++i) {
    if (begins[i]) known.clear();
    const Statement& s = f.statements[i];
    auto value = [&](const Operand& o, uint64_t* to) {
      if (o.kind == Operand::integer) *to = o.value;
      else if (o.kind == Operand::reg && known.count(o.index)) *to = known[o.index];
      else return false;
      return true;
    };
    uint64_t a = 0, b = 0;
    if (s.opcode[0] == "wgmma" && s.operands.size() > 3) result[i] = !(value(s.operands[3], &a) && !a);
    if (s.operands.empty() || s.operands[0].kind != Operand::reg) continue;
    int to = s.operands[0].index;
    if (s.guard < 0 && s.opcode[0] == "mov" && value(s.operands[1], &a)) known[to] = a;
    else if (s.guard < 0 && s.opcode[0] == "setp" && s.opcode[1] == "ne" && s.operands.size() == 3 && value(s.operands[1], &a) && value(s.operands[2], &b)) known[to] = a != b;
    else known.erase(to);
  }
  return result;
}

}  // namespace

uint32_t launch_registers(const Program& program, const Launch& launch) {
  const Function& f = *program.function;
  uint32_t threads = (launch.block[0] * launch.block[1] * launch.block[2] + kLanes - 1) / kLanes * kLanes;
  uint32_t most = std::min(kMostRegisters, kRegistersOfSm / (threads * f.min_ctas) / 8 * 8);
  uint32_t given = ((f.max_registers ? f.max_registers : launch.registers) + 7) / 8 * 8;
  if (given > kMostRegisters || given * threads > kRegistersOfSm) throw SimError(format("registers: %u for each of %u threads are more than there are", given, threads));
  return given ? given : most;
}

void check_register_changes(const Warp& w) {
  const auto& changes = w.cta->registers.changes;
  size_t group = static_cast<size_t>(w.index) / 4;
  if (group < changes.size() && w.register_changes < changes[group].size())
    throw SimError(format("registers: the warp ends without %s of PTX line %d, which another one of its warpgroup has executed", changes[group][w.register_changes]->source->text.c_str(), changes[group][w.register_changes]->source->line));
}

void register_setmaxnreg(OpcodeTable& table) {
  table["setmaxnreg"] = [](Decoder& d) {
    std::string way = d.take_one({"inc", "dec"});
    if (way.empty() || !d.take("sync") || !d.take("aligned")) d.fail("setmaxnreg without .inc or .dec, .sync and .aligned");
    d.type();
    d.expect(1, 1);
    d.in.imm = d.immediate(0);
    if (d.in.imm < 24 || d.in.imm > kMostRegisters || d.in.imm % 8) d.fail("setmaxnreg takes a multiple of 8 from 24 to 256");
    d.in.kind = way == "inc";
    d.in.fn = setmaxnreg;
  };
}

std::vector<uint16_t> live_registers(const Function& f, const std::vector<Effects>& effects) {
  Halves halves(f, effects);
  size_t n = f.statements.size();
  // A block ends where control may leave it or come in.
  std::vector<bool> begins(n + 1, false);
  begins[0] = begins[n] = true;
  auto target = [&](size_t i) { return f.statements[i].opcode[0] == "bra" ? f.statements[i].operands[0].index : -1; };
  auto leaves = [&](size_t i) { const std::string& op = f.statements[i].opcode[0]; return op == "ret" || op == "exit" || op == "trap"; };
  for (size_t i = 0; i < n; ++i) {
    if (target(i) >= 0) begins[static_cast<size_t>(target(i))] = true;
    if (target(i) >= 0 || leaves(i)) begins[i + 1] = true;
  }
  std::vector<bool> accumulating = find_accumulating(f, begins);
  std::vector<size_t> starts;
  std::vector<size_t> block_of(n + 1);
  for (size_t i = 0; i <= n; ++i) {
    if (begins[i]) starts.push_back(i);
    block_of[i] = starts.size() - 1;
  }
  size_t blocks = starts.size() - 1, words = (halves.count() + 63) / 64;
  std::vector<Bits> in(blocks + 1, Bits(words, 0));
  auto step = [&](size_t i, Bits& live) {
    const Statement& s = f.statements[i];
    if (s.guard < 0)
      for (int r : effects[i].targets) halves.each(r, [&](size_t h) { clear(live, h); });
    if (accumulating[i])
      for (int r : effects[i].targets) halves.each(r, [&](size_t h) { set(live, h); });
    for (int r : effects[i].sources) halves.each(r, [&](size_t h) { set(live, h); });
  };
  auto for_each_successor = [&](size_t block, auto visit) {
    size_t last = starts[block + 1] - 1;
    bool always = f.statements[last].guard < 0;
    if (target(last) >= 0) visit(block_of[static_cast<size_t>(target(last))]);
    if (!(always && (target(last) >= 0 || leaves(last))) && last + 1 < n) visit(block + 1);
  };
  auto out_of = [&](size_t block) {
    Bits live(words, 0);
    for_each_successor(block, [&](size_t next) { for (size_t w = 0; w < words; ++w) live[w] |= in[next][w]; });
    return live;
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t b = blocks; b-- > 0;) {
      Bits live = out_of(b);
      for (size_t i = starts[b + 1]; i-- > starts[b];) step(i, live);
      if (live != in[b]) { in[b] = live; changed = true; }
    }
  }
  // What no path has written yet holds nothing.
  std::vector<Bits> written(blocks + 1, Bits(words, 0));
  auto write = [&](size_t i, Bits& to) { for (int r : effects[i].targets) halves.each(r, [&](size_t h) { set(to, h); }); };
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t b = 0; b < blocks; ++b) {
      Bits after = written[b];
      for (size_t i = starts[b]; i < starts[b + 1]; ++i) write(i, after);
      for_each_successor(b, [&](size_t next) {
        for (size_t w = 0; w < words; ++w) {
          uint64_t both = written[next][w] | after[w];
          changed |= both != written[next][w];
          written[next][w] = both;
        }
      });
    }
  }
  std::vector<uint16_t> result(n + 1, 0);
  for (size_t b = 0; b < blocks; ++b) {
    Bits live = out_of(b), held = written[b];
    std::vector<Bits> before;
    for (size_t i = starts[b]; i < starts[b + 1]; ++i) {
      before.push_back(held);
      write(i, held);
    }
    for (size_t i = starts[b + 1]; i-- > starts[b];) {
      step(i, live);
      int values = 0;
      for (size_t w = 0; w < words; ++w) values += __builtin_popcountll(live[w] & before[i - starts[b]][w]);
      result[i] = static_cast<uint16_t>(std::max(0, values / 2 - kUnsure));
    }
  }
  return result;
}

}  // namespace ptxsim
