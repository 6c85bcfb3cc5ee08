// Control flow and what steers execution without computing.
#include "lanes.h"

namespace ptxsim {
namespace {

void bra(Warp& w, const Instr& in, uint32_t mask) {
  int target = static_cast<int>(in.imm);
  if (mask == w.cur.mask) w.jump(target);
  else w.split(mask, target);
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
  // Register budgets change nothing that a program can observe.
  table["setmaxnreg"] = [](Decoder& d) {
    std::string way = d.take_one({"inc", "dec"});
    if (way.empty() || !d.take("sync") || !d.take("aligned")) d.fail("setmaxnreg without .inc or .dec, .sync and .aligned");
    d.type();
    d.expect(1, 1);
    uint64_t n = d.immediate(0);
    if (n < 24 || n > 256 || n % 8) d.fail("setmaxnreg takes a multiple of 8 from 24 to 256");
    d.in.fn = [](Warp& w, const Instr&, uint32_t) { w.converged(w.live); };
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
