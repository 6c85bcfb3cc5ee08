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
  // The simulator starts a kernel when what it depends on has finished.
  table["griddepcontrol"] = [](Decoder& d) {
    if (std::string(d.take_one({"wait", "launch_dependents"})).empty()) d.fail("unknown action");
    d.expect(0, 0);
    d.in.fn = nothing;
  };
}

}  // namespace ptxsim
