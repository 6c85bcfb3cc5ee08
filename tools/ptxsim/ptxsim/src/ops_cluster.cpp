// clusterlaunchcontrol: a running cluster takes over the work of one that has not started, which then never does.
#include "async.h"

namespace ptxsim {
namespace {

constexpr int kMulticast = 1, kWide = 2, kWideBarrier = 4;  // Instr::kind of try_cancel; bits 4 and up: the Space

// The 16 bytes that a request is answered with: opaque to programs.
struct Response {
  static constexpr uint32_t kGranted = 0x636c6f6bu, kDenied = 0x636c6e6fu;
  uint32_t first[3];  // number of the cluster's first CTA
  uint32_t answer;
};
static_assert(sizeof(Response) == 16, "a response has 16 bytes");

// a[0] where the response goes, a[1] mbarrier, a[2] its offset
void try_cancel(Warp& w, const Instr& in, uint32_t mask) {
  if (w.cta->saw_no_cluster_left) throw SimError("clusterlaunchcontrol.try_cancel after the CTA has seen a request fail: undefined");
  Space space = static_cast<Space>(in.kind >> 4);
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    uint64_t address = lane_address(w, in, in.a[0], in.kind & kWide, l);
    if (resolve(space, address) != Space::shared) throw SimError(format("shared_bounds: address 0x%llx is not in shared memory", static_cast<unsigned long long>(address)));
    SharedPlace to = shared_place(w, static_cast<uint32_t>(address));
    SharedPlace barrier = mbarrier_place(w, operand_address(w, in.a[1], in.kind & kWideBarrier, l, in.a[2]), space);
    if (to.cta != w.cta || barrier.cta != w.cta) throw SimError("shared_bounds: response and mbarrier must lie in the CTA's own shared memory");
    struct Target { uint8_t* data; Completion done; };
    std::vector<Target> targets;
    for (auto& cta : w.cta->cluster->ctas) {
      if (cta.get() != w.cta && !(in.kind & kMulticast)) continue;
      if (cta->live_warps == 0) throw SimError(format("clusterlaunchcontrol.try_cancel: CTA %u of the cluster, which the response goes to as well, has exited", cta->rank));
      Completion done = barrier_of(w, {cta.get(), barrier.address});
      targets.push_back({cta->shared->at(to.address, sizeof(Response), sizeof(Response)), done});
      cta->shared->note_write(to.address, sizeof(Response), async_actor(w, done));
    }
    w.machine->issue(w, [&w, targets] {
      Response response{{~0u, ~0u, ~0u}, Response::kDenied};
      if (w.machine->cancel_cluster(response.first)) response.answer = Response::kGranted;
      for (const Target& t : targets) {
        std::memcpy(t.data, &response, sizeof response);
        signal(w, t.done, sizeof response);
      }
    });
  }
  w.lane = -1;
}

Response response_of(Warp& w, const Instr& in, int lane) {
  Response r = w.reg<Response>(in.a[4])[lane];
  if (r.answer != Response::kGranted && r.answer != Response::kDenied) throw SimError("clusterlaunchcontrol.query_cancel of something that is no response of try_cancel");
  return r;
}

void is_canceled(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t granted = 0;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    if (response_of(w, in, l).answer == Response::kGranted) granted |= 1u << l;
    else w.cta->saw_no_cluster_left = true;
  }
  w.lane = -1;
  w.put_pred(in.a[0], granted, mask);
}

// a[0 ... 2]: where x, y, z go, or -1. Of a request that failed they are undefined: programs may ask all the same, and get
// numbers that they can not use.
void first_ctaid(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    Response r = response_of(w, in, l);
    for (size_t d = 0; d < 3; ++d)
      if (in.a[d] >= 0) w.reg<uint32_t>(in.a[d])[l] = r.first[d];
  }
  w.lane = -1;
}

void decode_launch_control(Decoder& d) {
  if (d.take("try_cancel")) {
    if (!d.take("async") || !d.take("mbarrier::complete_tx::bytes") || !d.take("b128")) d.fail("unknown form");
    Space space = d.take("shared::cta") ? Space::shared : Space::generic;
    d.in.kind = static_cast<int>(space) << 4 | (d.take("multicast::cluster::all") ? kMulticast : 0);
    d.expect(2, 2);
    d.in.a[1] = d.address(1, kWideBarrier);
    d.in.a[2] = static_cast<int32_t>(d.in.imm);
    d.in.a[0] = d.address(0, kWide);
    d.in.fn = try_cancel;
    return;
  }
  if (!d.take("query_cancel")) d.fail("unknown clusterlaunchcontrol operation");
  d.expect(2, 2);
  const Type& response = *find_type("b128");
  if (d.take("is_canceled")) {
    if (!d.take("pred") || !d.take("b128")) d.fail("unknown type");
    d.in.a[0] = d.predicate_destination(0);
    d.in.a[4] = d.source_slot(1, response);
    d.in.fn = is_canceled;
    return;
  }
  std::string one = d.take_one({"get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z"});
  if (one.empty() && (!d.take("get_first_ctaid") || !d.take("v4"))) d.fail("unknown query");
  if (!d.take("b32") || !d.take("b128")) d.fail("unknown type");
  if (!one.empty()) {
    d.in.a[static_cast<size_t>(one.back() - 'x')] = d.destination(0, 4);
  } else {
    const Operand& to = d.operand(0);
    if (to.kind != Operand::vector || to.items.size() != 4) d.fail("expected four registers");
    for (size_t i = 0; i < 4; ++i) {
      Slot slot = d.target(to.items[i], 4);  // the fourth is unspecified
      if (i < 3 && to.items[i].kind == Operand::reg) d.in.a[i] = slot;
    }
  }
  d.in.a[4] = d.source_slot(1, response);
  d.in.fn = first_ctaid;
}

}  // namespace

void register_cluster(OpcodeTable& table) { table["clusterlaunchcontrol"] = decode_launch_control; }

}  // namespace ptxsim
