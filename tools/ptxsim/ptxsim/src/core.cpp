#include "core.h"

#include <algorithm>
#include <climits>

#include "tcgen05.h"
#include "wgmma.h"

namespace ptxsim {

Cta::Cta() = default;
Cta::~Cta() = default;

// ---- fragments of a warp ----

void LaneSet::join(const LaneSet& other) {
  mask |= other.mask;
  clock.join(other.clock);
  ordered.join(other.ordered);
  for (int s = kCtaScope; s <= kGpuScope; ++s) {
    observed[s].join(other.observed[s]);
    if (!other.released[s] || released[s] == other.released[s]) continue;
    auto both = std::make_shared<Clock>(*other.released[s]);
    if (released[s]) both->join(*released[s]);
    released[s] = both;
  }
}

void Warp::tick() {
  if (++now >= 1u << kEpochClockBits) throw SimError("a warp synchronised more often than the order checks can count: turn `race`, `async_early` and `proxy_fence` off");
}

Actor Warp::collective_actor() {
  const Clock* clock = &known[0].clock;
  const View* ordered = &known[0].ordered;
  if (known.size() > 1) {
    joint = known[0];
    for (size_t i = 1; i < known.size(); ++i) {
      joint.clock.join(known[i].clock);
      joint.ordered.join(known[i].ordered);
    }
    clock = &joint.clock;
    ordered = &joint.ordered;
  }
  Actor a{epoch(agent, now), 1, clock, {this, kFullMask}, line()};
  a.ordered = ordered;
  return a;
}

bool Warp::has_done(uint32_t e, uint32_t mask) const {
  uint32_t of = epoch_agent(e);
  if (of == agent) return true;
  auto all_waited = [&](const std::array<uint32_t, kLanes>& marks) {
    for (uint32_t m = mask; m; m &= m - 1)
      if (marks[static_cast<size_t>(__builtin_ctz(m))] < epoch_clock(e)) return false;
    return true;
  };
  for (const ThreadGroups* groups : {&cp_async, &bulk}) {
    if (groups->agent && of == groups->agent) return all_waited(groups->waited);
    if (groups->reads && of == groups->reads) return all_waited(groups->waited_reads);
  }
  return false;
}

void Warp::tell_past(View& view, uint32_t mask) const {
  if ((mask & live) == live) view.see(agent, now);
  else view.see(agent, now, mask);
  cp_async.tell(view, mask, live);
  bulk.tell(view, mask, live);
}

void Warp::release(uint32_t mask, Clock& to) {
  for (LaneSet& s : known)
    if (s.mask & mask) to.join(s.clock);
  if (to.cluster == cta->cluster->number) {
    tell_past(to.seen, mask);
    to.passed.see(agent, now, mask);
  } else {
    Clock alone(cta->cluster->number);
    tell_past(alone.seen, mask);
    to.join(alone);
  }
}

void Warp::release_relaxed(uint32_t mask, Scope scope, Clock& to) {
  Clock order(cta->cluster->number);
  for (LaneSet& s : known) {
    if (!(s.mask & mask)) continue;
    order.passed.join(s.clock.passed);
    if (s.released[scope]) to.join(*s.released[scope]);
  }
  order.passed.see(agent, now, mask);
  to.join(order);
}

void Warp::acquire(uint32_t mask, const Clock& from) {
  for_sets(mask, [&](LaneSet& s) { s.clock.join(from); });
}

void Warp::acquire_relaxed(uint32_t mask, Scope scope, const Clock& from) {
  for_sets(mask, [&](LaneSet& s) {
    if (from.cluster == s.clock.cluster) s.clock.passed.join(from.passed);
    s.observed[scope].join(from);
  });
}

void Warp::fence(uint32_t mask, Scope scope) {
  for_sets(mask, [&](LaneSet& s) {
    for (int i = kCtaScope; i <= scope; ++i) {
      s.clock.join(s.observed[i]);
      s.observed[i] = Clock();
    }
    auto snapshot = std::make_shared<Clock>();
    release(s.mask, *snapshot);
    for (int i = kCtaScope; i <= scope; ++i) s.released[i] = snapshot;
  });
  tick();
}

void Warp::fence_proxy_async(uint32_t mask, bool shared, bool global) {
  for_sets(mask, [&](LaneSet& s) {
    View past = s.clock.seen;
    tell_past(past, s.mask);
    if (shared) s.clock.fenced.join(past);
    if (global) s.clock.fenced_global.join(past);
  });
  tick();  // what the lanes write from now on is not covered
}

void Warp::sync(uint32_t mask) {
  for_sets(mask, [](LaneSet&) {});
  size_t first = known.size();
  for (size_t i = known.size(); i-- > 0;) {
    if (!(known[i].mask & mask)) continue;
    if (first < known.size()) {
      known[i].join(known[first]);
      known.erase(known.begin() + static_cast<long>(first));
    }
    first = i;
  }
  Clock& clock = known[first].clock;
  tell_past(clock.seen, mask);
  clock.passed.see(agent, now, mask);
  tick();
}

void Warp::select() {
  if (cur.mask) others.push_back(cur);
  cur.mask = 0;
  if (others.empty()) return;
  const Fragment* best = nullptr;
  for (const Fragment& f : others)
    if (f.state == Fragment::ready && (!best || f.pc < best->pc)) best = &f;
  if (!best) {
    for (const Fragment& f : others) {
      if (f.state != Fragment::converge) continue;
      uint32_t here = 0;
      for (const Fragment& g : others)
        if (g.state == Fragment::converge && g.pc == f.pc) here |= g.mask;
      if ((here & f.need & live) == (f.need & live)) { best = &f; break; }
    }
  }
  if (!best) {
    status = waiting;
    if (!describe_wait) describe_wait = [](const Warp&) { return std::string("its other lanes to reach this instruction"); };
    return;
  }
  cur = *best;
  cur.mask = 0;
  cur.state = Fragment::ready;
  limit = INT_MAX;
  size_t kept = 0;
  for (Fragment& f : others) {
    if (f.pc == cur.pc && f.state != Fragment::parked) { cur.mask |= f.mask; cur.polled |= f.polled; continue; }
    if (f.state != Fragment::parked && f.pc > cur.pc) limit = std::min(limit, f.pc);
    others[kept++] = f;
  }
  others.resize(kept);
}

void Warp::split(uint32_t taken, int target) {
  Fragment other = cur;
  other.mask = cur.mask & ~taken;
  cur.mask = taken;
  cur.pc = target;
  if (other.mask) {
    others.push_back(other);
    select();
  } else {
    jump(target);
  }
}

void Warp::exit(uint32_t mask) {
  check_copies_waited_for(*this, mask);
  release(mask, cta->left);
  live &= ~mask;
  cur.mask &= ~mask;
  for (Fragment& f : others)
    if (f.state == Fragment::converge) f.state = Fragment::ready;  // it may have waited for the lanes that exit
  if (live == 0) {
    check_register_changes(*this);
    status = done;
    machine->warp_exited(*this);
  } else if (cur.mask == 0) {
    select();
  } else {
    limit = 0;
  }
}

bool Warp::converged(uint32_t need) {
  need &= live;
  if ((cur.mask & need) == need) return true;
  cur.state = Fragment::converge;
  cur.need = need;
  cur.pc = at;
  select();
  return false;
}

void Warp::park(std::string (*describe)(const Warp&), uint64_t argument) {
  describe_wait = describe;
  wait_argument = argument;
  cur.state = Fragment::parked;
  cur.pc = at;
  select();
}

void Warp::wait(std::string (*describe)(const Warp&), uint64_t argument) {
  describe_wait = describe;
  wait_argument = argument;
  status = waiting;
}

void Warp::wake() {
  for (Fragment& f : others)
    if (f.state == Fragment::parked) f.state = Fragment::ready;
  limit = 0;
  describe_wait = nullptr;
  if (status == waiting) {
    status = runnable;
    machine->make_runnable(this);
  }
}

// ---- the machine ----

Machine::Machine(const Module& m, const Program& p, const Launch& l, GlobalMemory& g, Stream& s)
    : module(m), program(p), launch(l), global(g), stream(s), first_cluster(static_cast<uint32_t>(s.clusters.size())),
      ended_before(l.dependent ? s.settled : first_cluster), rng(l.seed * 0x9e3779b97f4a7c15ull + 1) {
  executed.assign(program.code.size(), 0);
  total_clusters_ = 1;
  for (int d = 0; d < 3; ++d) {
    if (launch.grid[d] == 0) throw SimError(format("grid dimension %d is 0", d));
    if (launch.cluster[d] == 0 || launch.grid[d] % launch.cluster[d])
      throw SimError(format("grid dimension %d is %u, not a multiple of the cluster's %u", d, launch.grid[d], launch.cluster[d]));
    total_clusters_ *= launch.grid[d] / launch.cluster[d];
  }
  uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  if (threads == 0 || threads > 1024) throw SimError(format("%u threads a CTA; 1 to 1024 are possible", threads));
  const Function& f = *program.function;
  for (int d = 0; d < 3; ++d) {
    if (f.required_threads[0] && f.required_threads[d] != launch.block[d])
      throw SimError(format("block dimension %d is %u, but .reqntid asks for %u", d, launch.block[d], f.required_threads[d]));
    if (f.required_cluster[0] && f.required_cluster[d] != launch.cluster[d])
      throw SimError(format("cluster dimension %d is %u, but .reqnctapercluster asks for %u", d, launch.cluster[d], f.required_cluster[d]));
  }
  if (launch.params.size() != f.param_bytes)
    throw SimError(format("%zu bytes of parameters, but the kernel takes %llu", launch.params.size(), static_cast<unsigned long long>(f.param_bytes)));
  if (checking(kCtaGroup)) check_cta_groups(program);
  uint64_t end = static_cast<uint64_t>(program.dynamic_begin) + launch.dynamic_shared;
  if (checking(kSharedLimit) && end > kSharedEnd)
    throw SimError(format("shared_limit: %llu bytes of shared memory; a CTA has %u", static_cast<unsigned long long>(end - kSharedBegin), kSharedEnd - kSharedBegin));
  global.add(launch.params.data(), launch.params.size(), "the kernel's parameters", false);
}

std::string Machine::where(const Warp& warp, int at) const {
  const Statement& s = *program.code[static_cast<size_t>(at)].source;
  const Cta& c = *warp.cta;
  std::string text = format("kernel %s, PTX line %d, CTA (%u, %u, %u), warp %d", program.function->name.c_str(), s.line, c.id[0], c.id[1], c.id[2], warp.index);
  if (warp.lane >= 0) text += format(", lane %d", warp.lane);
  return text + "\n  " + s.text;
}

void Machine::start_warp(Warp& w) {
  w.file.assign(program.file_bytes, 0);
  for (const Program::Constant& c : program.constants) {
    if (c.bytes == 0) { w.pred(c.slot) = c.bits ? kFullMask : 0; continue; }
    uint64_t bits = c.bits;
    if (c.relocation == Program::param) bits += reinterpret_cast<uint64_t>(launch.params.data());
    if (c.relocation == Program::shared) bits += static_cast<uint64_t>(w.cta->rank) << kRankShift;
    for (int l = 0; l < kLanes; ++l) std::memcpy(w.file.data() + c.slot + l * c.bytes, &bits, static_cast<size_t>(std::min(c.bytes, 8)));
  }
  const Cta& cta = *w.cta;
  const uint32_t* cluster = launch.cluster;
  uint32_t rank[3] = {cta.id[0] % cluster[0], cta.id[1] % cluster[1], cta.id[2] % cluster[2]};
  uint32_t nwarps = static_cast<uint32_t>(cta.warps.size());
  for (const Program::Special& special : program.specials) {
    std::string name = special.name;
    int d = 0;
    size_t dot = name.find('.');
    if (dot != std::string::npos) {
      d = name[dot + 1] - 'x';
      name.resize(dot);
    }
    for (uint32_t l = 0; l < kLanes; ++l) {
      uint32_t thread = static_cast<uint32_t>(w.index) * kLanes + l;
      uint32_t tid[3] = {thread % launch.block[0], thread / launch.block[0] % launch.block[1], thread / launch.block[0] / launch.block[1]};
      uint32_t v;
      if (name == "%tid") v = tid[d];
      else if (name == "%ntid") v = launch.block[d];
      else if (name == "%ctaid") v = cta.id[d];
      else if (name == "%nctaid") v = launch.grid[d];
      else if (name == "%laneid") v = l;
      else if (name == "%warpid") v = static_cast<uint32_t>(w.index);
      else if (name == "%nwarpid") v = nwarps;
      else if (name == "%clusterid") v = cta.id[d] / cluster[d];
      else if (name == "%nclusterid") v = launch.grid[d] / cluster[d];
      else if (name == "%cluster_ctaid") v = rank[d];
      else if (name == "%cluster_nctaid") v = cluster[d];
      else if (name == "%cluster_ctarank") v = cta.rank;
      else if (name == "%cluster_nctarank") v = cluster[0] * cluster[1] * cluster[2];
      else if (name == "%lanemask_eq") v = 1u << l;
      else if (name == "%lanemask_lt") v = (1u << l) - 1;
      else if (name == "%lanemask_le") v = (2u << l) - 1;
      else if (name == "%lanemask_gt") v = ~((2u << l) - 1);
      else if (name == "%lanemask_ge") v = ~((1u << l) - 1);
      else if (name == "%smid") v = (cta.id[0] + launch.grid[0] * (cta.id[1] + launch.grid[1] * cta.id[2])) % launch.resident;
      else if (name == "%nsmid") v = launch.resident;
      else if (name == "%gridid") v = 0;
      else if (name == "%dynamic_smem_size") v = launch.dynamic_shared;
      else if (name == "%total_smem_size") v = program.dynamic_begin - kSharedBegin + launch.dynamic_shared;
      else if (name == "%is_explicit_cluster") v = cluster[0] * cluster[1] * cluster[2] > 1;
      else throw SimError("special register " + special.name + " is not known");
      w.reg<uint32_t>(special.slot)[l] = v;
    }
  }
  w.local.assign(static_cast<size_t>(program.local_bytes) * kLanes, 0);
  w.in_flight.assign(program.register_slot.size(), 0);
  if (!program.behind.empty()) w.wgmma_registers.resize(program.register_slot.size());
  if (program.moves_registers && checking(kRegisters)) w.registers = launch_registers(program, launch);
}

void Machine::first_cta(uint64_t cluster, uint32_t* id) const {
  for (int d = 0; d < 3; ++d) {
    uint32_t across = launch.grid[d] / launch.cluster[d];
    id[d] = static_cast<uint32_t>(cluster % across) * launch.cluster[d];
    cluster /= across;
  }
}

bool Machine::cancel_cluster(uint32_t* first) {
  if (next_cluster_ == total_clusters_) return false;
  first_cta(next_cluster_++, first);
  return true;
}

void Machine::start_cluster(uint64_t number) {
  auto cluster = std::make_unique<Cluster>();
  cluster->machine = this;
  cluster->number = static_cast<uint32_t>(stream.clusters.size());
  cluster->agents = std::make_shared<Agents>();
  stream.clusters.push_back(cluster->agents);
  const uint32_t* dims = launch.cluster;
  uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  uint32_t first_id[3];
  first_cta(number, first_id);
  for (uint32_t rank = 0; rank < dims[0] * dims[1] * dims[2]; ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = cluster.get();
    cta->rank = rank;
    uint32_t within[3] = {rank % dims[0], rank / dims[0] % dims[1], rank / dims[0] / dims[1]};
    for (int d = 0; d < 3; ++d) cta->id[d] = first_id[d] + within[d];
    cta->shared = std::make_unique<TrackedMemory>("shared", kSharedBounds, kSharedBegin, program.dynamic_begin + launch.dynamic_shared, 1, &stream.clusters, cluster->number, launch.checks);
    cta->left = Clock(cluster->number);
    for (uint32_t first = 0; first < threads; first += kLanes) {
      auto warp = std::make_unique<Warp>();
      warp->machine = this;
      warp->cta = cta.get();
      warp->program = &program;
      warp->index = static_cast<int>(first / kLanes);
      uint32_t lanes = std::min<uint32_t>(kLanes, threads - first);
      warp->live = lanes == kLanes ? kFullMask : (1u << lanes) - 1;
      warp->cur.mask = warp->live;
      warp->limit = INT_MAX;
      warp->agent = cluster->agents->add(format("warp %d of CTA (%u, %u, %u)", warp->index, cta->id[0], cta->id[1], cta->id[2]), false, rank);
      warp->known.resize(1);
      warp->known[0].mask = kFullMask;
      warp->known[0].clock = Clock(cluster->number);
      warp->known[0].clock.before = ended_before;
      cta->warps.push_back(std::move(warp));
    }
    cta->live_warps = static_cast<int>(cta->warps.size());
    cluster->live_warps += cta->live_warps;
    for (uint32_t first = 0; first < cta->warps.size(); first += 4) cta->warpgroups.push_back(std::make_unique<Warpgroup>());
    cta->tensor = std::make_unique<TensorMemory>();
    cluster->ctas.push_back(std::move(cta));
  }
  for (auto& cta : cluster->ctas)
    for (auto& warp : cta->warps) {
      start_warp(*warp);
      make_runnable(warp.get());
    }
  clusters_.push_back(std::move(cluster));
}

void Machine::make_runnable(Warp* warp) {
  if (warp->queued || warp->status != Warp::runnable) return;
  warp->queued = true;
  runnable_.push_back(warp);
}

namespace {
// The memory of a CTA goes with its last warp, which must know that nobody of the cluster uses it any more.
void check_visits_over(const Cta& cta) {
  const Machine& machine = *cta.cluster->machine;
  if (!machine.checking(kCluster)) return;
  for (const auto& [who, visit] : cta.visits)
    if (!cta.left.passed.has(visit.epoch, visit.lanes) && !cta.left.seen.has(visit.epoch, visit.lanes))
      throw SimError(format("cluster: CTA (%u, %u, %u) ends without being ordered after the access to its shared memory by %s at PTX line %d", cta.id[0], cta.id[1], cta.id[2],
                            cta.cluster->agents->list[epoch_agent(visit.epoch)].name.c_str(), visit.line));
}
}  // namespace

void note_visit(Warp& w, int lane, Cta& cta, const Actor& actor) {
  if (&cta == w.cta || !w.machine->checking(kCluster)) return;
  const View& passed = w.set_of(lane).clock.passed;
  bool started = false;
  for (auto& warp : cta.warps) started |= passed.knows(warp->agent);
  if (!started) throw SimError(format("cluster: access to shared memory of CTA (%u, %u, %u) without having synchronised with it: it may not have started", cta.id[0], cta.id[1], cta.id[2]));
  if (cta.live_warps == 0) throw SimError(format("cluster: access to shared memory of CTA (%u, %u, %u), which has ended", cta.id[0], cta.id[1], cta.id[2]));
  for (uint32_t m = actor.lanes; m; m &= m - 1)
    cta.visits[epoch_agent(actor.tag) << 5 | static_cast<uint32_t>(__builtin_ctz(m))] = {actor.tag, m & -m, actor.line};
}

void Machine::warp_exited(Warp& warp) {
  ++progress;
  --warp.cta->live_warps;
  if (warp.cta->live_warps == 0) {
    check_tensor_memory_freed(*warp.cta);
    check_visits_over(*warp.cta);
  }
  --warp.cta->cluster->live_warps;
  recheck_barriers(*warp.cta);
}

namespace {
bool later(const AsyncOperation& a, const AsyncOperation& b) { return a.due != b.due ? a.due > b.due : a.number > b.number; }
}  // namespace

void Machine::issue(Warp& issuer, int at, std::function<void()> effect) {
  // Three temperaments, so that a sweep over seeds meets them all: mixed, at once, and as late as the program allows.
  uint32_t temperament = static_cast<uint32_t>(launch.seed % 3);
  uint64_t due = steps;
  uint32_t pick = temperament == 0 ? rng.below(4) : temperament == 1 ? 0 : 3;
  if (pick == 1) due += rng.below(64);
  if (pick == 2) due += rng.below(4096);
  if (pick == 3) due = UINT64_MAX - (temperament == 2 ? rng.below(256) : 0);
  async_.push_back({due, issued_++, std::move(effect), &issuer, at});
  std::push_heap(async_.begin(), async_.end(), later);
}

void Machine::fire_next() {
  std::pop_heap(async_.begin(), async_.end(), later);
  AsyncOperation op = std::move(async_.back());
  async_.pop_back();
  ++progress;
  try {
    op.effect();
  } catch (const SimError& e) {
    throw SimError(std::string(e.what()) + "\nwhile it took effect: " + where(*op.issuer, op.at));
  }
}

bool Machine::poll_parked() {
  if (progress == last_progress_) {
    if (++idle_polls_ > 64) return false;
  } else {
    last_progress_ = progress;
    idle_polls_ = 0;
  }
  bool any = false;
  for (auto& cluster : clusters_)
    for (auto& cta : cluster->ctas)
      for (auto& warp : cta->warps) {
        bool parked = false;
        for (Fragment& f : warp->others)
          if (f.state == Fragment::parked) f.polled = parked = true;
        if (parked && warp->status == Warp::waiting) {
          warp->wake();
          any = true;
        }
      }
  return any;
}

void Machine::deadlock() {
  std::string text = format("deadlock: nothing can run in kernel %s", program.function->name.c_str());
  int listed = 0;
  for (auto& cluster : clusters_)
    for (auto& cta : cluster->ctas)
      for (auto& warp : cta->warps) {
        if (warp->status == Warp::done || ++listed > 64) continue;
        std::vector<Fragment> fragments = warp->others;
        if (warp->cur.mask) fragments.push_back(warp->cur);
        for (const Fragment& f : fragments) {
          int at = f.state == Fragment::ready && f.pc > 0 ? warp->at : f.pc;
          text += format("\n  CTA (%u, %u, %u) warp %d lanes 0x%08x", cta->id[0], cta->id[1], cta->id[2], warp->index, f.mask);
          text += format(" at PTX line %d waits for ", program.code[static_cast<size_t>(at)].source->line);
          if (f.state == Fragment::converge) text += format("lanes 0x%08x to reach this instruction", f.need & ~f.mask);
          else text += warp->describe_wait ? warp->describe_wait(*warp) : "nothing that is known";
        }
      }
  throw SimError(text);
}

void Machine::run_warp(Warp& w, uint32_t quantum) {
  running = &w;
  const Instr* code = program.code.data();
  if (w.cur.mask == 0) w.select();
  uint32_t left = quantum;
  uint64_t lanes = 0;
  while (left && w.status == Warp::runnable) {
    if (w.cur.pc >= w.limit) {
      w.select();
      continue;
    }
    w.at = w.cur.pc;
    const Instr& in = code[w.at];
    uint32_t mask = w.cur.mask;
    ++w.cur.pc;
    --left;
    if (in.guard >= 0) {
      uint32_t p = w.pred(in.guard);
      mask &= in.guard_negated ? ~p : p;
    }
    if (!mask) continue;
    if (in.aligned && mask != w.cur.mask && checking(kConvergence))
      throw SimError(format("convergence: of the lanes 0x%08x only 0x%08x execute an instruction that is .aligned", w.cur.mask, mask));
    if (in.live > w.registers) throw SimError(format("registers: at least %u registers of a thread hold values that are still needed, but the warp has %u", in.live, w.registers));
    if (w.in_flight_count && !registers_ready(w, in)) continue;
    lanes += static_cast<uint64_t>(__builtin_popcount(mask));
    executed[static_cast<size_t>(w.at)] = 1;
    in.fn(w, in, mask);
  }
  steps += quantum - left;
  lane_steps += lanes;
  running = nullptr;
}

void Machine::run() {
  uint32_t cluster_size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
  uint64_t resident = std::max<uint64_t>(1, launch.resident / cluster_size);
  constexpr uint64_t kPatience = 50'000'000;
  try {
    for (;;) {
      while (clusters_.size() < resident && next_cluster_ < total_clusters_) start_cluster(next_cluster_++);
      if (clusters_.empty()) {
        // What a dependent launch may rely on that comes next: of this one nothing, of those before it what a CTA has waited for.
        if (!launch.dependent || waited) stream.settled = first_cluster;
        break;
      }
      while (!async_.empty() && async_.front().due <= steps) fire_next();
      if (runnable_.empty()) {
        if (!async_.empty()) fire_next();
        else if (!poll_parked()) deadlock();
        continue;
      }
      size_t pick = rng.below(static_cast<uint32_t>(runnable_.size()));
      Warp* warp = runnable_[pick];
      uint64_t before = progress;
      // Mostly short turns, so that warps interleave finely; some long ones, so that one gets far ahead.
      run_warp(*warp, rng.below(8) ? 1 + rng.below(48) : 1 + rng.below(1024));
      if (warp->status != Warp::runnable) {
        warp->queued = false;
        runnable_[pick] = runnable_.back();
        runnable_.pop_back();
      }
      if (progress != before) last_progress_step_ = steps;
      if (steps - last_progress_step_ > kPatience && checking(kDeadlock)) deadlock();
      if (launch.max_steps && steps > launch.max_steps) throw SimError(format("stopped after max_steps, %llu warp instructions", static_cast<unsigned long long>(steps)));
      if (*launch.stop) throw SimError("stopped from outside");
      if (warp->status == Warp::done && warp->cta->cluster->live_warps == 0) {
        while (!async_.empty()) fire_next();
        Cluster* finished = warp->cta->cluster;
        clusters_.erase(std::find_if(clusters_.begin(), clusters_.end(), [&](auto& c) { return c.get() == finished; }));
      }
    }
  } catch (const SimError& e) {
    if (!running) throw;
    throw SimError(std::string(e.what()) + "\n" + where(*running, running->at));
  }
}

}  // namespace ptxsim
