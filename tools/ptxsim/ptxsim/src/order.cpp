#include "order.h"

#include <algorithm>

namespace ptxsim {

const char* const kCheckNames[] = {"global_bounds", "shared_bounds", "local_bounds", "alignment",  "uninitialized",
                                   "race",          "async_early",   "proxy_fence",  "mbarrier",   "deadlock",
                                   "descriptor",    "shared_limit",  "in_flight_registers", "convergence", "barrier",
                                   "tensor_bounds", "tensor_leak", "scale_factors", "tensor_fence", "tensor_order", "cluster", "cta_group", "registers", nullptr};

// ---- views and clocks ----

bool View::has_lanes(uint32_t agent, uint32_t clock, uint32_t mask) const {
  for (auto it = std::lower_bound(lanes.begin(), lanes.end(), agent << 5, [](const Lane& l, uint32_t who) { return l.who < who; });
       it != lanes.end() && it->who >> 5 == agent; ++it)
    if (it->clock >= clock) mask &= ~(1u << (it->who & 31));
  return mask == 0;
}

bool View::knows(uint32_t agent) const {
  if (agent < all.size() && all[agent]) return true;
  for (const Lane& l : lanes)
    if (l.who >> 5 == agent) return true;
  return false;
}

void View::join(const View& other) {
  if (all.size() < other.all.size()) all.resize(other.all.size(), 0);
  for (size_t i = 0; i < other.all.size(); ++i) all[i] = std::max(all[i], other.all[i]);
  if (lanes.empty() && other.lanes.empty()) return;
  std::vector<Lane> merged;
  merged.reserve(lanes.size() + other.lanes.size());
  auto a = lanes.cbegin(), b = other.lanes.cbegin();
  auto add = [&](Lane l) {
    uint32_t agent = l.who >> 5;
    if (agent >= all.size() || l.clock > all[agent]) merged.push_back(l);
  };
  while (a != lanes.cend() || b != other.lanes.end()) {
    if (b == other.lanes.end() || (a != lanes.cend() && a->who < b->who)) add(*a++);
    else if (a == lanes.cend() || b->who < a->who) add(*b++);
    else { add({a->who, std::max(a->clock, b->clock)}); ++a; ++b; }
  }
  lanes.swap(merged);
}

void View::see(uint32_t agent, uint32_t clock) {
  if (all.size() <= agent) all.resize(agent + 1, 0);
  all[agent] = std::max(all[agent], clock);
}

void View::see(uint32_t agent, uint32_t clock, uint32_t mask) {
  if (agent < all.size() && clock <= all[agent]) return;
  View further;
  for (uint32_t m = mask; m; m &= m - 1) further.lanes.push_back({agent << 5 | static_cast<uint32_t>(__builtin_ctz(m)), clock});
  join(further);
}

void View::forget(uint32_t agent) {
  if (agent < all.size()) all[agent] = 0;
  lanes.erase(std::remove_if(lanes.begin(), lanes.end(), [&](const Lane& l) { return l.who >> 5 == agent; }), lanes.end());
}

const Clock::Past* Clock::find(uint32_t of) const {
  auto it = std::lower_bound(far.begin(), far.end(), of, [](const Far& f, uint32_t c) { return f.cluster < c; });
  return it != far.end() && it->cluster == of ? it->past.get() : nullptr;
}

void Clock::add_far(uint32_t of, const std::shared_ptr<const Past>& past) {
  if (of < before) return;
  auto it = std::lower_bound(far.begin(), far.end(), of, [](const Far& f, uint32_t c) { return f.cluster < c; });
  if (it == far.end() || it->cluster != of) { far.insert(it, {of, past}); return; }
  if (it->past == past) return;
  auto both = std::make_shared<Past>(*it->past);
  both->seen.join(past->seen);
  both->fenced.join(past->fenced);
  it->past = both;
}

void Clock::join(const Clock& other) {
  before = std::max(before, other.before);
  if (cluster == kNoCluster) cluster = other.cluster;
  if (other.cluster == cluster) {
    seen.join(other.seen);
    fenced.join(other.fenced);
    fenced_global.join(other.fenced_global);
    passed.join(other.passed);
  } else if (other.cluster < kAnyCluster && !(other.seen.all.empty() && other.seen.lanes.empty())) {
    add_far(other.cluster, std::make_shared<Past>(Past{other.seen, other.fenced_global}));
  }
  for (const Far& f : other.far) {
    if (f.cluster != cluster) { add_far(f.cluster, f.past); continue; }
    seen.join(f.past->seen);
    fenced_global.join(f.past->fenced);
  }
}

bool Clock::has_seen(uint32_t of, uint32_t e, uint32_t mask) const {
  if (of < before) return true;
  if (of == cluster) return seen.has(e, mask);
  const Past* past = find(of);
  return past && past->seen.has(e, mask);
}

bool Clock::has_fenced(uint32_t of, uint32_t e, uint32_t mask, bool global) const {
  if (of < before) return true;
  if (of == cluster) return (global ? fenced_global : fenced).has(e, mask);
  const Past* past = find(of);
  return past && past->fenced.has(e, mask);
}

uint32_t Agents::add(const std::string& name, bool asynchronous, uint32_t rank, uint32_t core_of) {
  if (list.size() >= kMaxAgents) throw SimError("a cluster has more warps and mbarriers than the order checks can follow");
  list.push_back({name, asynchronous, rank, core_of});
  return static_cast<uint32_t>(list.size() - 1);
}

// ---- histories ----

History::History(size_t units, bool far) : writer(units, 0), reader(units, 0), reader_line(units, 0), flags(units, 0) {
  if (!far) return;
  writer_cluster.assign(units, 0);
  reader_cluster.assign(units, 0);
}

size_t History::run(size_t first, size_t end) const {
  const uint64_t w = writer[first], r = reader[first];
  const uint8_t f = flags[first];
  auto same = [&](size_t i) { return ((writer[i] ^ w) | (reader[i] ^ r) | static_cast<uint64_t>(flags[i] ^ f)) == 0; };
  size_t i = first + 1;
  constexpr size_t kBlock = 16;  // without an exit in it, for the compiler to vectorise
  for (; i + kBlock <= end; i += kBlock) {
    uint64_t differs = 0;
    for (size_t k = 0; k < kBlock; ++k) differs |= (writer[i + k] ^ w) | (reader[i + k] ^ r) | static_cast<uint64_t>(flags[i + k] ^ f);
    if (differs) break;
  }
  while (i < end && same(i)) ++i;
  if (writer_cluster.empty()) return i;
  for (size_t k = first + 1; k < i; ++k)
    if (writer_cluster[k] != writer_cluster[first] || reader_cluster[k] != reader_cluster[first]) return k;
  return i;
}

// ---- rules ----

const Agents::Agent* OrderRules::agent(uint32_t cluster, uint32_t e) const {
  const std::shared_ptr<Agents>& agents = (*clusters_)[cluster];
  return agents ? &agents->list[epoch_agent(e)] : nullptr;
}

void OrderRules::report(uint64_t address, const std::string& what, uint32_t cluster, uint32_t e, uint32_t lanes, int line) const {
  const Agents::Agent* a = agent(cluster, e);
  std::string who = a ? a->name : "a cluster of an earlier launch";
  if (cluster < launch_begin_) who += " of an earlier launch";
  if (a && !a->asynchronous && lanes && !(lanes & (lanes - 1))) who += format(", lane %d,", __builtin_ctz(lanes));
  throw SimError(format("%s %s at PTX line %d: %s address 0x%llx", what.c_str(), who.c_str(), line, kind_, static_cast<unsigned long long>(address)));
}

bool OrderRules::includes(Scope mine, const Actor& actor, Scope theirs, uint32_t cluster, uint32_t e) const {
  if (!mine || !theirs) return false;
  Scope needed = kGpuScope;
  if (cluster == actor.clock->cluster) needed = agent(cluster, e)->rank == agent(cluster, epoch(actor.self, 0))->rank ? kCtaScope : kClusterScope;
  return mine >= needed && theirs >= needed;
}

bool OrderRules::knows(const Actor& actor, uint32_t cluster, uint32_t e, uint32_t lanes) const {
  const Clock& clock = *actor.clock;
  if (tensor_ && actor.ordered) {
    // Tensor memory: completion alone orders nothing for tcgen05, its fences do.
    if (actor.ordered->has(e, lanes)) return true;
    return !(checks_ & kTensorFence) && (clock.seen.has(e, lanes) || clock.passed.has(e, lanes));
  }
  return cluster == clock.cluster ? actor.knows(e, lanes) : clock.has_seen(cluster, e, lanes);
}

// Whether both are operations of the tensor core, issued by one thread and on the way together.
bool OrderRules::same_thread(const Actor& actor, uint32_t cluster, uint32_t e, uint32_t lanes) const {
  return actor.follows && cluster == actor.clock->cluster && agent(cluster, e)->core_of == actor.self && lanes == actor.lanes && !knows(actor, cluster, e, lanes);
}

bool OrderRules::follows(const Actor& actor, uint32_t e) const {
  return std::find(actor.follows->begin(), actor.follows->end(), epoch_agent(e)) != actor.follows->end();
}

void OrderRules::check_writer(const History& h, uint64_t base, size_t at, const Actor& actor, bool writing) const {
  uint64_t address = base + at * unit_;
  if ((h.flags[at] & Flags::guarded) && (checks_ & kMbarrier))
    throw SimError(format("mbarrier: %s of %s address 0x%llx, which holds one", writing ? "write" : "read", kind_, static_cast<unsigned long long>(address)));
  if (!h.writer[at]) {
    if (!writing && (checks_ & kUninitialized) && cluster_ != kAnyCluster)
      throw SimError(format("uninitialized: read of %s address 0x%llx, which nothing wrote", kind_, static_cast<unsigned long long>(address)));
    return;
  }
  Written w = Written::unpack(h.writer[at]);
  uint32_t cluster = h.writer_cluster.empty() ? cluster_ : h.writer_cluster[at], lanes = 1u << w.lane;
  auto stop = [&](const char* what) { report(address, what, cluster, w.epoch, lanes, w.line); };
  if (actor.read_only && cluster >= launch_begin_ && (checks_ & kRace)) stop("race: read as constant for the kernel (ld.global.nc) of what it writes, by");
  if (cluster == actor.clock->cluster) {
    if (same_thread(actor, cluster, w.epoch, lanes)) {
      if (!follows(actor, w.epoch) && (checks_ & kTensorOrder)) stop(writing ? "tensor_order: nothing orders this write after that of" : "tensor_order: nothing orders this read after the write of");
      return;
    }
    // Lanes that write one address in one instruction.
    if (writing && w.epoch == actor.tag && w.line == actor.line && lanes != actor.lanes) return;
  }
  if (!knows(actor, cluster, w.epoch, lanes)) {
    if (includes(actor.scope, actor, w.scope, cluster, w.epoch)) return;
    if (tensor_ && actor.ordered && (checks_ & kTensorFence)) {
      if (actor.clock->passed.has(w.epoch, lanes)) stop("tensor_fence: no tcgen05.fence::after_thread_sync since what orders this access after that of");
      if (actor.clock->seen.has(w.epoch, lanes)) stop("tensor_fence: no tcgen05.fence::before_thread_sync before what orders this access after that of");
    }
    if (agent(cluster, w.epoch)->asynchronous) {
      if (checks_ & kAsyncEarly) stop(writing ? "async_early: write over an asynchronous result that was not waited for, of" : "async_early: read of an asynchronous result that was not waited for, of");
    } else if (checks_ & kRace) {
      stop(writing ? "race: write not ordered after the write by" : "race: read not ordered after the write by");
    }
  } else if (actor.async_proxy && !w.async_proxy && (checks_ & kProxyFence) && !actor.clock->has_fenced(cluster, w.epoch, lanes, cluster_ == kAnyCluster)) {
    stop("proxy_fence: async proxy access without fence.proxy.async after the generic write by");
  }
}

void OrderRules::check_reader(const History& h, uint64_t base, size_t at, const Actor& actor, const Reader& r) const {
  const Agents::Agent* a = agent(r.cluster, r.epoch);
  bool asynchronous = a && a->asynchronous;
  if (r.cluster == actor.clock->cluster) {
    if (asynchronous && r.epoch == actor.tag) return;  // of the same operation, or one that completes with it
  }
  if (knows(actor, r.cluster, r.epoch, r.lanes)) return;
  if (includes(actor.scope, actor, static_cast<Scope>(h.flags[at] & Flags::readers_scope), r.cluster, r.epoch)) return;
  auto stop = [&](const char* what) { report(base + at * unit_, what, r.cluster, r.epoch, r.lanes, static_cast<int>(h.reader_line[at])); };
  if (same_thread(actor, r.cluster, r.epoch, r.lanes)) {
    if (!follows(actor, r.epoch) && (checks_ & kTensorOrder)) stop("tensor_order: nothing orders this write after the read of");
    return;
  }
  if (tensor_ && actor.ordered && (checks_ & kTensorFence)) {
    if (actor.clock->passed.has(r.epoch, r.lanes)) stop("tensor_fence: no tcgen05.fence::after_thread_sync since what orders this write after the read of");
    if (actor.clock->seen.has(r.epoch, r.lanes)) stop("tensor_fence: no tcgen05.fence::before_thread_sync before what orders this write after the read of");
  }
  if (!(checks_ & (asynchronous ? kAsyncEarly : kRace))) return;
  stop(asynchronous ? "async_early: write to what an asynchronous operation may still read, of" : "race: write not ordered after the read by");
}

void OrderRules::check_readers(const History& h, uint64_t base, size_t at, const Actor& actor) const {
  uint64_t r = h.reader[at];
  if (!r) return;
  uint32_t e = static_cast<uint32_t>(r >> 32);
  if (epoch_agent(e) == kMaxAgents) {
    for (const Reader& reader : sets_[epoch_clock(e)]) check_reader(h, base, at, actor, reader);
  } else {
    check_reader(h, base, at, actor, {h.reader_cluster.empty() ? cluster_ : h.reader_cluster[at], e, static_cast<uint32_t>(r)});
  }
}

// The readers of a unit once `actor` has read it too. Those that it comes after need not be kept.
OrderRules::Reader OrderRules::add_reader(const History& h, size_t at, const Actor& actor) {
  Reader added{actor.clock->cluster, actor.tag, actor.lanes};
  uint64_t r = h.reader[at];
  if (!r) return added;
  uint32_t e = static_cast<uint32_t>(r >> 32);
  bool is_set = epoch_agent(e) == kMaxAgents;
  Reader single{h.reader_cluster.empty() ? cluster_ : h.reader_cluster[at], e, static_cast<uint32_t>(r)};
  // Clocks only grow, so an answer given before may keep a reader too many, never one too few.
  if (single == last_before_ && added == last_added_) return last_after_;
  last_before_ = single;
  last_added_ = added;
  return last_after_ = join_readers(single, is_set, actor, added);
}

OrderRules::Reader OrderRules::join_readers(const Reader& single, bool is_set, const Actor& actor, Reader added) {
  uint32_t e = single.epoch;
  // A set of readers of global memory is a sample: one that none of them is known to would have to know a crowd.
  constexpr size_t kSample = 8;
  if (is_set && cluster_ == kAnyCluster && sets_[epoch_clock(e)].size() >= kSample) return single;
  std::vector<Reader> set;
  auto keep = [&](const Reader& x) {
    if (x.cluster == added.cluster && x.epoch == added.epoch) added.lanes |= x.lanes;
    else if (!knows(actor, x.cluster, x.epoch, x.lanes)) set.push_back(x);
  };
  if (is_set) for (const Reader& x : sets_[epoch_clock(e)]) keep(x);
  else keep(single);
  if (set.empty()) return added;
  if (sets_.size() + 1 == 1u << kEpochClockBits) throw SimError("too many different sets of readers for the order checks: turn `race` and `async_early` off");
  set.insert(std::upper_bound(set.begin(), set.end(), added), added);
  auto it = set_numbers_.emplace(set, static_cast<uint32_t>(sets_.size()));
  if (it.second) sets_.push_back(set);
  return {0, epoch(kMaxAgents, it.first->second), 0};
}

void OrderRules::read(History& h, uint64_t base, size_t first, size_t n, const Actor& actor) {
  for (size_t i = first, end = first + n; i < end;) {
    size_t j = h.run(i, end);
    check_writer(h, base, i, actor, false);
    uint64_t before = h.reader[i];
    Reader reader = add_reader(h, i, actor);
    uint64_t after = static_cast<uint64_t>(reader.epoch) << 32 | reader.lanes;
    Scope scope = before ? std::min(actor.scope, static_cast<Scope>(h.flags[i] & Flags::readers_scope)) : actor.scope;
    uint8_t flags = static_cast<uint8_t>((h.flags[i] & ~Flags::readers_scope) | scope);
    if (after != before || flags != h.flags[i] || (!h.reader_cluster.empty() && h.reader_cluster[i] != reader.cluster)) {
      std::fill(h.reader.begin() + static_cast<long>(i), h.reader.begin() + static_cast<long>(j), after);
      std::fill(h.flags.begin() + static_cast<long>(i), h.flags.begin() + static_cast<long>(j), flags);
      std::fill(h.reader_line.begin() + static_cast<long>(i), h.reader_line.begin() + static_cast<long>(j), static_cast<uint32_t>(actor.line));
      if (!h.reader_cluster.empty()) std::fill(h.reader_cluster.begin() + static_cast<long>(i), h.reader_cluster.begin() + static_cast<long>(j), reader.cluster);
    }
    i = j;
  }
}

void OrderRules::write(History& h, uint64_t base, size_t first, size_t n, const Actor& actor) {
  size_t end = first + n;
  for (size_t i = first; i < end; i = h.run(i, end)) {
    check_writer(h, base, i, actor, true);
    check_readers(h, base, i, actor);
  }
  Written w{actor.tag, static_cast<uint32_t>(__builtin_ctz(actor.lanes)), actor.scope, actor.async_proxy, actor.line};
  auto fill = [&](auto& values, auto value) { std::fill(values.begin() + static_cast<long>(first), values.begin() + static_cast<long>(end), value); };
  fill(h.writer, w.pack());
  fill(h.reader, uint64_t{0});
  fill(h.flags, uint8_t{0});
  if (!h.writer_cluster.empty()) fill(h.writer_cluster, actor.clock->cluster);
}

}  // namespace ptxsim
