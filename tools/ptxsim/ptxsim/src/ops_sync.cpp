// Named barriers, cluster barriers, mbarriers and fences.
#include "async.h"

namespace ptxsim {

namespace {

void complete_phase(Machine& machine, Mbarrier& b) {
  if (b.pending != 0 || b.transactions != 0) return;
  ++b.phase;
  b.pending = b.expected;
  b.completed.own.join(b.arriving.own);
  b.completed.others.join(b.arriving.others);
  b.arriving = {Clock(b.completed.own.cluster), Clock(b.completed.own.cluster)};
  b.completed.own.seen.see(b.agent, b.phase);
  ++machine.progress;
  std::vector<Warp*> waiters;
  waiters.swap(b.waiters);
  for (Warp* w : waiters) w->wake();
}

constexpr int64_t kMaxCount = (1 << 20) - 1;

void check_counts(Machine& machine, const Mbarrier& b, uint32_t address) {
  if (!machine.checking(kMbarrier)) return;
  if (b.pending < 0) throw SimError(format("mbarrier: more arrivals at 0x%x than the %u that its phase takes", address, b.expected));
  if (b.transactions > kMaxCount || b.transactions < -kMaxCount)
    throw SimError(format("mbarrier: transaction count at 0x%x is %lld, out of range", address, static_cast<long long>(b.transactions)));
  if (b.pending == 0 && b.transactions < 0)
    throw SimError(format("mbarrier: %lld bytes more than expected have arrived at 0x%x", static_cast<long long>(-b.transactions), address));
}

std::string describe_mbarrier(const Warp& w) {
  uint32_t address = static_cast<uint32_t>(w.wait_argument);
  auto it = w.cta->mbarriers.find(address);
  if (it == w.cta->mbarriers.end()) return format("an mbarrier at 0x%x", address);
  const Mbarrier& b = it->second;
  return format("the mbarrier at 0x%x (phase %u: %lld of %u arrivals and %lld bytes are missing)", address, b.phase,
                static_cast<long long>(b.pending), b.expected, static_cast<long long>(b.transactions));
}

}  // namespace

SharedPlace mbarrier_place(Warp& w, uint64_t address, Space space) {
  if (resolve(space, address) != Space::shared) throw SimError(format("mbarrier: address 0x%llx is not in shared memory", static_cast<unsigned long long>(address)));
  SharedPlace p = shared_place(w, static_cast<uint32_t>(address));
  p.cta->shared->at(p.address, 8, 8);
  return p;
}

Mbarrier& find_mbarrier(Warp& w, SharedPlace place) {
  auto it = place.cta->mbarriers.find(place.address);
  if (it == place.cta->mbarriers.end()) throw SimError(format("mbarrier: no initialised mbarrier at shared address 0x%x", place.address));
  const Mbarrier& b = it->second;
  if (!w.actor(w.lane).knows(b.initialized_by, b.initializer) && w.machine->checking(kMbarrier))
    throw SimError(format("mbarrier: the initialisation at shared address 0x%x is not ordered before this use", place.address));
  return it->second;
}

void complete_transactions(Machine& machine, Mbarrier& b, uint32_t address, int64_t bytes) {
  b.transactions -= bytes;
  check_counts(machine, b, address);
  complete_phase(machine, b);
}

void arrive_asynchronously(Machine& machine, Mbarrier& b, uint32_t address) {
  --b.pending;
  check_counts(machine, b, address);
  complete_phase(machine, b);
}

namespace {

// ---- mbarrier ----
enum Mbar { init, inval, arrive, arrive_drop, expect_tx, complete_tx, test_wait, try_wait };
struct Kind {
  static constexpr int wide = 4, relaxed = 8, expecting = 16, parity = 32, no_complete = 64, scopes = 8;  // Scope << scopes
  static Scope scope(int kind) { return static_cast<Scope>(kind >> scopes & 3); }
  // What mbarrier.arrive returns: the phase, above it the arrivals that were pending, and whether it was a .noComplete.
  static constexpr int state_pending = 32, state_no_complete = 63;
  static Space space(int kind) { return static_cast<Space>(kind & 3); }
};

SharedPlace lane_place(Warp& w, const Instr& in, int lane) {
  w.lane = lane;
  return mbarrier_place(w, lane_address(w, in, in.a[1], in.kind & Kind::wide, lane), Kind::space(in.kind));
}

void mbar_init(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    SharedPlace p = lane_place(w, in, l);
    Actor actor = w.actor(l);
    uint32_t count = w.reg<uint32_t>(in.a[2])[l];
    if (count == 0 || count > kMaxCount) throw SimError(format("mbarrier: arrival count %u", count));
    if (p.cta->mbarriers.count(p.address) && w.machine->checking(kMbarrier))
      throw SimError(format("mbarrier: shared address 0x%x already holds one", p.address));
    p.cta->shared->guard(p.address, 8, false);
    p.cta->shared->note_write(p.address, 8, actor);
    p.cta->shared->guard(p.address, 8, true);
    Mbarrier b;
    b.expected = count;
    b.pending = count;
    auto old = p.cta->mbarriers.find(p.address);
    b.agent = old != p.cta->mbarriers.end() ? old->second.agent : p.cta->cluster->agents->add(format("the mbarrier at 0x%x", p.address), true, p.cta->rank);
    b.initialized_by = actor.tag;
    b.initializer = actor.lanes;
    b.arriving = b.completed = {Clock(p.cta->cluster->number), Clock(p.cta->cluster->number)};
    p.cta->mbarriers[p.address] = b;
  }
  w.lane = -1;
  ++w.machine->progress;
}

void mbar_inval(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    SharedPlace p = lane_place(w, in, __builtin_ctz(m));
    find_mbarrier(w, p);
    p.cta->shared->guard(p.address, 8, false);
    p.cta->mbarriers.erase(p.address);
  }
  w.lane = -1;
}

// in.n: the Mbar that this is
void mbar_arrive(Warp& w, const Instr& in, uint32_t mask) {
  bool arrives = in.n == arrive || in.n == arrive_drop;
  uint32_t released = 0;  // lanes
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    SharedPlace p = lane_place(w, in, l);
    Mbarrier& b = find_mbarrier(w, p);
    note_visit(w, l, *p.cta, w.actor(l));
    if (arrives && !(released >> l & 1)) {
      // Lanes that arrive together release together.
      uint32_t together = 1u << l;
      for (uint32_t rest = m & (m - 1); rest; rest &= rest - 1) {
        int other = __builtin_ctz(rest);
        SharedPlace q = lane_place(w, in, other);
        if (q.cta == p.cta && q.address == p.address) together |= 1u << other;
      }
      w.lane = l;
      bool far = p.cta != w.cta;
      Clock& to = far ? b.arriving.others : b.arriving.own;
      if (in.kind & Kind::relaxed || (far && Kind::scope(in.kind) == kCtaScope)) w.release_relaxed(together, Kind::scope(in.kind), to);
      else w.release(together, to);
      released |= together;
    }
    uint32_t operand = in.a[2] >= 0 ? w.reg<uint32_t>(in.a[2])[l] : 1;
    if (in.a[0] >= 0) {
      if (p.cta != w.cta) throw SimError("mbarrier: an arrival at another CTA's mbarrier returns no state");
      w.reg<uint64_t>(in.a[0])[l] = b.phase | static_cast<uint64_t>(b.pending) << Kind::state_pending | static_cast<uint64_t>((in.kind & Kind::no_complete) != 0) << Kind::state_no_complete;
    }
    if (in.n == expect_tx || in.kind & Kind::expecting) b.transactions += operand;
    if (in.n == complete_tx) b.transactions -= operand;
    if (arrives) {
      uint32_t count = in.kind & Kind::expecting ? 1 : operand;
      b.pending -= count;
      if (in.n == arrive_drop) b.expected -= count;
    }
    check_counts(*w.machine, b, p.address);
    if (in.kind & Kind::no_complete && b.pending == 0 && b.transactions == 0 && w.machine->checking(kMbarrier))
      throw SimError(format("mbarrier: arrive.noComplete at 0x%x completes the phase", p.address));
    complete_phase(*w.machine, b);
  }
  if (arrives) w.tick();
  w.lane = -1;
  ++w.machine->progress;
}

void take_in(Warp& w, const Instr& in, uint32_t mask, const Mbarrier& b) {
  auto take = [&](const Clock& from, Scope least) {
    if (in.kind & Kind::relaxed || Kind::scope(in.kind) < least) w.acquire_relaxed(mask, std::max(least, Kind::scope(in.kind)), from);
    else w.acquire(mask, from);
  };
  take(b.completed.own, kCtaScope);
  if (w.cta->cluster->ctas.size() > 1) take(b.completed.others, kClusterScope);
}

void mbar_wait(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t done = 0, address = 0;
  Mbarrier* only = nullptr;
  bool one = true;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    SharedPlace p = lane_place(w, in, l);
    if (p.cta != w.cta) throw SimError(format("mbarrier: wait on another CTA's mbarrier at 0x%x", p.address));
    Mbarrier& b = find_mbarrier(w, p);
    one &= !only || only == &b;
    only = &b;
    address = p.address;
    bool complete;
    if (in.kind & Kind::parity) {
      complete = (b.phase & 1) != (w.reg<uint32_t>(in.a[2])[l] & 1);
    } else {
      uint32_t state = static_cast<uint32_t>(w.reg<uint64_t>(in.a[2])[l]);
      if (w.machine->checking(kMbarrier) && state + 1 < b.phase) throw SimError(format("mbarrier: state of a phase that is long over at 0x%x", address));
      complete = state != b.phase;
    }
    if (!complete) continue;
    done |= 1u << l;
    if (!one) take_in(w, in, 1u << l, b);
  }
  if (one && done) take_in(w, in, done, *only);
  w.lane = -1;
  bool repeated = w.cur.failed_at == w.at, polled = w.cur.polled;
  w.cur.polled = false;
  if (!done && one && !polled && (repeated || w.machine->rng.below(2))) {
    // A wait that spins stops here until the phase completes; a single look may fail, or be suspended for a while.
    only->waiters.push_back(&w);
    w.park(describe_mbarrier, address);
    return;
  }
  w.cur.failed_at = done == mask ? -1 : w.at;
  w.put_pred(in.a[0], done, mask);
}

void mbar_pending_count(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t t[kLanes] = {};
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    uint64_t state = w.reg<uint64_t>(in.a[1])[l];
    if (!(state >> Kind::state_no_complete) && w.machine->checking(kMbarrier)) throw SimError("mbarrier: pending_count of a state that no .noComplete arrival returned");
    t[l] = static_cast<uint32_t>(state >> Kind::state_pending) & kMaxCount;
  }
  w.put(in.a[0], t, mask);
}

void decode_mbarrier(Decoder& d) {
  if (d.take("pending_count")) {
    if (d.type().name != "b64") d.fail("unknown type");
    d.expect(2, 2);
    d.in.a[0] = d.destination(0, 4);
    d.in.a[1] = d.source_slot(1, *find_type("b64"));
    d.in.fn = mbar_pending_count;
    return;
  }
  static const char* const names[] = {"init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait"};
  int op = -1;
  for (int i = 0; i < 8; ++i) {
    if (d.source->opcode.size() > 1 && d.source->opcode[1] == names[i]) {
      op = i;
      d.take(names[i]);
    }
  }
  if (op < 0) d.fail("unknown mbarrier operation");
  d.in.n = op;
  if ((op == arrive || op == arrive_drop) && d.take("expect_tx")) d.in.kind |= Kind::expecting;
  if (d.take("noComplete")) d.in.kind |= Kind::no_complete;
  if (d.take("parity")) d.in.kind |= Kind::parity;
  std::string sem = d.take_one({"release", "acquire", "relaxed"});
  if (sem == "relaxed") d.in.kind |= Kind::relaxed;
  // Arrivals at other CTAs' mbarriers that name no scope, and their waits, are usual (in CUTLASS): they count as .cluster.
  std::string scope = d.take_one({"cta", "cluster"});
  if (scope.empty() != sem.empty()) d.fail("order and scope come together");
  if (sem == (op >= test_wait ? "release" : "acquire")) d.fail("`." + sem + "` has no meaning here");
  d.in.kind |= (scope == "cta" ? kCtaScope : kClusterScope) << Kind::scopes;
  d.in.kind |= static_cast<int>(take_space(d));
  Type t = d.type();
  if (t.name != "b64") d.fail("type ." + t.name);
  const Type& u32 = *find_type("u32");
  auto place = [&](size_t i) { d.in.a[1] = d.address(i, Kind::wide); };
  switch (op) {
    case init:
      d.expect(2, 2);
      place(0);
      d.in.a[2] = d.source_slot(1, u32);
      d.in.fn = mbar_init;
      break;
    case inval:
      d.expect(1, 1);
      place(0);
      d.in.fn = mbar_inval;
      break;
    case arrive:
    case arrive_drop: {
      // The state may be left out altogether when the mbarrier is in another CTA.
      bool state = d.operand(0).kind != Operand::address;
      d.expect(state ? 2 : 1, state ? 3 : 2);
      if (state && d.operand(0).kind != Operand::sink) d.in.a[0] = d.destination(0, 8);
      size_t at = state ? 1 : 0;
      place(at);
      if (d.count() > at + 1) d.in.a[2] = d.source_slot(at + 1, u32);
      else if (d.in.kind & Kind::expecting) d.fail("no transaction count");
      d.in.fn = mbar_arrive;
      break;
    }
    case expect_tx:
    case complete_tx:
      d.expect(2, 2);
      place(0);
      d.in.a[2] = d.source_slot(1, u32);
      d.in.fn = mbar_arrive;
      break;
    default:  // test_wait, try_wait
      d.expect(3, op == try_wait ? 4 : 3);
      d.in.a[0] = d.predicate_destination(0);
      place(1);
      d.in.a[2] = d.source_slot(2, d.in.kind & Kind::parity ? u32 : *find_type("b64"));
      d.in.fn = mbar_wait;
  }
}

// ---- named barriers ----
enum Bar { sync, bar_arrive, red_popc, red_and, red_or };

std::string describe_barrier(const Warp& w) {
  const NamedBarrier& b = w.cta->barriers[w.wait_argument];
  std::string need = b.expected ? format("%u", b.expected) : std::string("all");
  return format("barrier %d (%u of %s threads have arrived)", static_cast<int>(w.wait_argument), b.arrived, need.c_str());
}

void finish_barrier(Cta& cta, NamedBarrier& b) {
  uint32_t expected = b.expected ? b.expected : static_cast<uint32_t>(cta.live_warps) * kLanes;
  if (!b.in_use || b.arrived < expected) return;
  for (Warp* w : b.waiters) {
    const Instr& in = w->program->code[static_cast<size_t>(w->at)];
    if (in.n >= red_popc) {
      uint32_t mask = w->live;
      if (in.n == red_popc) {
        uint32_t t[kLanes];
        for (uint32_t& v : t) v = b.votes;
        w->put(in.a[0], t, mask);
      } else {
        w->put_pred(in.a[0], (in.n == red_and ? b.votes == expected : b.votes > 0) ? kFullMask : 0, mask);
      }
    }
    w->acquire(w->live, b.clock);
    w->wake();
  }
  ++cta.cluster->machine->progress;
  b = NamedBarrier();
}

// a[1] number, a[2] threads or -1, a[3] predicate
void bar(Warp& w, const Instr& in, uint32_t mask) {
  if (!w.converged(w.live)) return;
  uint32_t lane = static_cast<uint32_t>(__builtin_ctz(mask));
  uint32_t number = w.reg<uint32_t>(in.a[1])[lane];
  if (number > 15) throw SimError(format("barrier: number %u; there are 16", number));
  NamedBarrier& b = w.cta->barriers[number];
  uint32_t expected = in.a[2] >= 0 ? w.reg<uint32_t>(in.a[2])[lane] : 0;
  if (expected % kLanes) throw SimError(format("barrier: %u threads, not a multiple of 32", expected));
  if (b.in_use && b.expected != expected && w.machine->checking(kBarrier))
    throw SimError(format("barrier: number %u: this warp counts %u threads, an earlier one %u (0: all)", number, expected, b.expected));
  b.in_use = true;
  b.expected = expected;
  b.arrived += kLanes;
  if (expected && b.arrived > expected && w.machine->checking(kBarrier))
    throw SimError(format("barrier: number %u: more than %u threads", number, expected));
  if (in.n >= red_popc) {
    uint32_t p = w.pred(in.a[3]);
    b.votes += static_cast<uint32_t>(__builtin_popcount((in.kind ? ~p : p) & mask));
  }
  w.sync(w.live);
  w.release(w.live, b.clock);
  w.tick();
  ++w.machine->progress;
  if (in.n != bar_arrive) {
    b.waiters.push_back(&w);
    w.wait(describe_barrier, number);
  }
  finish_barrier(*w.cta, b);
}

// ---- cluster barrier ----
std::string describe_cluster_barrier(const Warp& w) {
  const Cluster& c = *w.cta->cluster;
  return format("the cluster barrier (%d of %d warps have arrived)", c.arrived, c.live_warps);
}

void finish_cluster_barrier(Cluster& c) {
  if (c.arrived == 0 || c.arrived < c.live_warps) return;
  c.arrived = 0;
  ++c.phase;
  c.completed.join(c.arriving);
  ++c.machine->progress;
  std::vector<Warp*> waiters;
  waiters.swap(c.waiters);
  for (Warp* w : waiters) w->wake();
}

void cluster_arrive(Warp& w, const Instr& in, uint32_t) {
  if (!w.converged(w.live)) return;
  Cluster& c = *w.cta->cluster;
  if (c.arrived_phase.count(&w) && w.machine->checking(kBarrier)) throw SimError("barrier: barrier.cluster.arrive twice without a wait");
  c.arrived_phase[&w] = c.phase;
  if (in.kind) w.release_relaxed(w.live, kClusterScope, c.arriving);
  else w.release(w.live, c.arriving);
  w.tick();
  ++c.arrived;
  ++w.machine->progress;
  finish_cluster_barrier(c);
}

void cluster_wait(Warp& w, const Instr&, uint32_t) {
  if (!w.converged(w.live)) return;
  Cluster& c = *w.cta->cluster;
  auto it = c.arrived_phase.find(&w);
  if (it == c.arrived_phase.end()) throw SimError("barrier: barrier.cluster.wait without an arrive");
  if (it->second == c.phase) {
    c.waiters.push_back(&w);
    w.retry();
    w.wait(describe_cluster_barrier);
    return;
  }
  c.arrived_phase.erase(it);
  w.acquire(w.live, c.completed);
}

void warp_sync(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t members = w.reg<uint32_t>(in.a[1])[__builtin_ctz(mask)];
  if (w.converged(members)) w.sync(members & w.live);
}

void decode_barrier(Decoder& d) {
  const Type& u32 = *find_type("u32");
  if (d.take("cluster")) {
    std::string op = d.take_one({"arrive", "wait"});
    if (op.empty()) d.fail("unknown cluster barrier operation");
    std::string sem = d.take_one({"release", "relaxed", "acquire"});
    d.take("aligned");
    d.expect(0, 0);
    d.in.kind = sem == "relaxed";
    d.in.fn = op == "arrive" ? cluster_arrive : cluster_wait;
    return;
  }
  if (d.take("warp")) {
    if (!d.take("sync")) d.fail("unknown form");
    d.expect(1, 1);
    d.in.a[1] = d.source_slot(0, u32);
    d.in.fn = warp_sync;
    return;
  }
  d.take("cta");
  d.take("aligned");
  if (d.take("sync")) d.in.n = sync;
  else if (d.take("arrive")) d.in.n = bar_arrive;
  else if (d.take("red")) {
    std::string op = d.take_one({"popc", "and", "or"});
    d.in.n = op == "popc" ? red_popc : op == "and" ? red_and : red_or;
    Type t = d.type();
    d.expect(3, 4);
    d.in.a[0] = d.destination(0, t.bytes);
    Operand p = d.operand(d.count() - 1);
    d.in.kind = p.negated;
    p.negated = false;
    d.in.a[3] = d.value(p, *find_type("pred"));
    d.in.a[1] = d.source_slot(1, u32);
    if (d.count() == 4) d.in.a[2] = d.source_slot(2, u32);
    d.in.fn = bar;
    return;
  } else {
    d.fail("unknown barrier operation");
  }
  d.expect(d.in.n == bar_arrive ? 2 : 1, 2);
  d.in.a[1] = d.source_slot(0, u32);
  if (d.count() == 2) d.in.a[2] = d.source_slot(1, u32);
  d.in.fn = bar;
}

// ---- fences ----
void fence(Warp& w, const Instr& in, uint32_t mask) { w.fence(mask, static_cast<Scope>(in.kind)); }

enum ProxySpaces { proxy_shared = 1, proxy_global = 2 };
void fence_proxy_async(Warp& w, const Instr& in, uint32_t mask) { w.fence_proxy_async(mask, in.kind & proxy_shared, in.kind & proxy_global); }

// One direction alone, but also a fence for what synchronises with relaxed operations.
void fence_async_generic(Warp& w, const Instr&, uint32_t mask) {
  w.fence(mask, kClusterScope);
  w.fence_proxy_async(mask, true, false);
}

void nothing(Warp&, const Instr&, uint32_t) {}

void decode_fence(Decoder& d) {
  if (d.take("proxy")) {
    bool async = d.take("async");
    std::string space = d.take_one({"global", "shared::cta", "shared::cluster", "async::global", "async::shared::cta", "async::shared::cluster"});
    if (!async && space.compare(0, 7, "async::") == 0) async = true;
    if (async) {
      d.take_one({"acquire", "release"});
      if (d.take("sync_restrict::shared::cta") || d.take("sync_restrict::shared::cluster")) d.fail("restricted proxy fence");
      d.expect(0, 0);
      d.in.kind = space.empty() ? proxy_shared | proxy_global : space.find("global") == std::string::npos ? proxy_shared : proxy_global;
      d.in.fn = fence_proxy_async;
      return;
    }
    if (d.take("alias")) { d.expect(0, 0); d.in.fn = nothing; return; }  // addresses have no aliases here
    if (d.take("tensormap::generic")) return decode_tensormap_fence(d);
    if (d.take("async::generic")) {
      std::string order = d.take_one({"acquire", "release"});
      std::string restriction = d.take_one({"sync_restrict::shared::cta", "sync_restrict::shared::cluster"});
      if (restriction != (order == "release" ? "sync_restrict::shared::cta" : "sync_restrict::shared::cluster") || !d.take("cluster")) d.fail("unknown form");
      d.expect(0, 0);
      d.in.fn = fence_async_generic;
      return;
    }
    d.fail("unknown proxy");
  }
  if (d.take("mbarrier_init")) {
    if (!d.take("release") || !d.take("cluster")) d.fail("unknown form");
    d.expect(0, 0);
    d.in.kind = kClusterScope;
    d.in.fn = fence;
    return;
  }
  // Restricted to synchronisation through shared memory; taken as if it were not.
  std::string order = d.take_one({"sc", "acq_rel", "acquire", "release"});
  std::string restriction = d.take_one({"sync_restrict::shared::cta", "sync_restrict::shared::cluster"});
  d.in.kind = take_scope(d, kNoScope);
  if (!d.in.kind) d.fail("no known scope");
  if (!restriction.empty() && (restriction != (order == "release" ? "sync_restrict::shared::cta" : "sync_restrict::shared::cluster") || d.in.kind != kClusterScope || (order != "acquire" && order != "release")))
    d.fail("unknown form");
  d.expect(0, 0);
  d.in.fn = fence;
}

}  // namespace

void recheck_barriers(Cta& cta) {
  if (cta.live_warps)
    for (NamedBarrier& b : cta.barriers) finish_barrier(cta, b);
  if (cta.cluster->live_warps) finish_cluster_barrier(*cta.cluster);
}

void register_sync(OpcodeTable& table) {
  table["mbarrier"] = decode_mbarrier;
  table["bar"] = decode_barrier;
  table["barrier"] = decode_barrier;
  table["fence"] = decode_fence;
  table["membar"] = [](Decoder& d) {
    if (d.source->opcode.size() > 1 && d.source->opcode[1] == "proxy") d.fail("unknown form");
    d.in.kind = std::string(d.take_one({"cta", "gl", "sys"})) == "cta" ? kCtaScope : kGpuScope;
    d.expect(0, 0);
    d.in.fn = fence;
  };
}

}  // namespace ptxsim
