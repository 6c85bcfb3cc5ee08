// Control flow and what steers execution without computing.
#include "lanes.h"

namespace ptxsim {
namespace {

void bra(Warp& w, const Instr& in, uint32_t mask) {
  int target = static_cast<int>(in.imm);
  if (mask == w.cur.mask) w.jump(target);
  else w.split(mask, target);
}

// a[0] index; lists: in.n targets
void brx(Warp& w, const Instr& in, uint32_t mask) {
  const uint32_t* index = w.reg<uint32_t>(in.a[0]);
  int first = __builtin_ctz(mask);
  if (index[first] >= static_cast<uint32_t>(in.n)) {
    w.lane = first;
    throw SimError(format("brx.idx: index %u of a list of %d: undefined", index[first], in.n));
  }
  uint32_t taken = 0;
  for (uint32_t m = mask; m; m &= m - 1) taken |= static_cast<uint32_t>(index[__builtin_ctz(m)] == index[first]) << __builtin_ctz(m);
  int target = w.program->lists[static_cast<size_t>(in.list) + index[first]];
  if (taken == w.cur.mask) return w.jump(target);
  w.cur.pc = w.at;  // the other lanes come here again
  w.split(taken, target);
}

// The text at a global address.
std::string string_at(Warp& w, uint64_t address) {
  std::string text;
  while (char c = static_cast<char>(*w.machine->global.at(address++, 1, 1))) text += c;
  return text;
}

// a[0] message, a[1] file, a[2] line, a[3] function
void assert_fail(Warp& w, const Instr& in, uint32_t mask) {
  int l = w.lane = __builtin_ctz(mask);
  auto text = [&](size_t i) { return string_at(w, w.reg<uint64_t>(in.a[i])[l]); };
  throw SimError(format("assertion failed: %s, %s:%u, %s", text(0).c_str(), text(1).c_str(), w.reg<uint32_t>(in.a[2])[l], text(3).c_str()));
}

void ret(Warp& w, const Instr&, uint32_t mask) { w.exit(mask); }

void trap(Warp&, const Instr&, uint32_t) { throw SimError("trap: the kernel stopped itself"); }

void nothing(Warp&, const Instr&, uint32_t) {}

void wait_for_launches(Warp& w, const Instr&, uint32_t mask) {
  uint32_t first = w.machine->first_cluster;
  w.for_sets(mask, [&](LaneSet& s) { s.clock.before = first; });
  if (!w.cta->lets_dependents_start) w.machine->waited = true;
}

void launch_dependents(Warp& w, const Instr&, uint32_t) { w.cta->lets_dependents_start = true; }

}  // namespace

void register_control(OpcodeTable& table) {
  table["bra"] = [](Decoder& d) {
    d.take("uni");
    d.expect(1, 1);
    const Operand& o = d.operand(0);
    if (o.kind != Operand::label) d.fail("branch to something that is not a label");
    d.in.imm = static_cast<uint64_t>(o.index);
    d.in.fn = bra;
  };
  table["brx"] = [](Decoder& d) {
    if (!d.take("idx")) d.fail("unknown form");
    d.take("uni");
    d.expect(2, 2);
    const Operand& list = d.operand(1);
    if (list.kind != Operand::label || d.statement_of(list).opcode[0] != ".branchtargets") d.fail("expected the label of .branchtargets");
    d.in.a[0] = d.source_slot(0, *find_type("u32"));
    for (const Operand& o : d.statement_of(list).operands) {
      if (o.kind != Operand::label) d.fail("a target that is not a label");
      d.list(o.index);
    }
    d.in.n = static_cast<int>(d.statement_of(list).operands.size());
    d.in.fn = brx;
  };
  table[".branchtargets"] = [](Decoder& d) { d.in.fn = nothing; };
  // What inline_calls has left.
  table["call"] = [](Decoder& d) {
    d.take("uni");
    const Operand& function = d.operand(1);
    const std::vector<Operand>& arguments = d.operand(2).items;
    if (function.kind == Operand::reg || d.count() > 3) d.fail("indirect call");
    if (function.name == "vprintf") {  // prints nothing
      d.in.fn = nothing;
      return;
    }
    if (function.name == "__assertfail" && arguments.size() == 5) {
      for (size_t i = 0; i < 4; ++i) d.in.a[i] = d.value(arguments[i], *find_type(i == 2 ? "b32" : "b64"));
      d.in.fn = assert_fail;
      return;
    }
    for (const Function& f : d.module().device_functions)
      if (f.name == function.name) d.fail("recursive call");
    d.fail("call of `" + function.name + "`, which has no body");
  };
  DecodeFunction leave = [](Decoder& d) {
    d.take("uni");
    d.expect(0, 0);
    d.in.fn = ret;
  };
  table["ret"] = leave;
  table["exit"] = leave;
  table["trap"] = [](Decoder& d) { d.in.fn = trap; };
  table["nanosleep"] = [](Decoder& d) {
    Type t = d.type();
    d.source_slot(0, t);
    d.in.fn = nothing;
  };
  // A kernel starts here when those before it have ended, but may rely on that only from its wait on.
  table["griddepcontrol"] = [](Decoder& d) {
    std::string action = d.take_one({"wait", "launch_dependents"});
    if (action.empty()) d.fail("unknown action");
    d.expect(0, 0);
    d.in.fn = action == "wait" ? wait_for_launches : launch_dependents;
  };
}

}  // namespace ptxsim
