#include "memory.h"

#include <algorithm>

namespace ptxsim {

const char* const kCheckNames[] = {"global_bounds", "shared_bounds", "local_bounds", "alignment",  "uninitialized",
                                   "race",          "async_early",   "proxy_fence",  "mbarrier",   "deadlock",
                                   "descriptor",    "shared_limit",  "in_flight_registers", "convergence", "barrier",
                                   "tensor_bounds", "tensor_leak", "scale_factors", "cta_group", "registers", nullptr};

namespace {
void join_into(std::vector<uint32_t>& to, const std::vector<uint32_t>& from) {
  if (to.size() < from.size()) to.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}
void raise_to(std::vector<uint32_t>& v, uint32_t agent, uint32_t clock) {
  if (v.size() <= agent) v.resize(agent + 1, 0);
  v[agent] = std::max(v[agent], clock);
}
}  // namespace

void Clock::join(const Clock& other) {
  join_into(seen, other.seen);
  join_into(fenced, other.fenced);
}

void Clock::see(uint32_t agent, uint32_t clock, bool async_proxy) {
  raise_to(seen, agent, clock);
  if (async_proxy) raise_to(fenced, agent, clock);
}

const char* bounds_prefix(uint32_t checks, Check bounds) {
  if (!(checks & bounds)) return "can not carry on: ";
  return bounds == kLocalBounds ? "local_bounds: " : bounds == kSharedBounds ? "shared_bounds: " : "tensor_bounds: ";
}

uint32_t Agents::add(const std::string& name, bool asynchronous) {
  if (list.size() >= kMaxAgents) throw SimError("a cluster has more warps and mbarriers than the order checks can follow");
  list.push_back({name, asynchronous});
  return static_cast<uint32_t>(list.size() - 1);
}

TrackedMemory::TrackedMemory(const char* kind, Check bounds, uint32_t first, uint32_t end, const Agents* agents, uint32_t checks)
    : kind_(kind), bounds_(bounds), first_(first), end_(end), agents_(agents), checks_(checks) {
  uint32_t size = end - first;
  // What nothing wrote must not pass for a sensible value: NaN in float32, far out of range as an integer.
  static const uint8_t poison[] = {0xad, 0xde, 0xff, 0x7f};
  bytes_.resize(size);
  for (uint32_t i = 0; i < size; ++i) bytes_[i] = poison[i % 4];
  tracked_ = checks & (kUninitialized | kRace | kAsyncEarly | kProxyFence);
  if (!tracked_) return;
  writer_.assign(size, 0);
  reader_.assign(size, 0);
  strong_.assign(size, 0);
  writer_line_.assign(size, 0);
  reader_line_.assign(size, 0);
}

void TrackedMemory::reject(uint32_t address, uint32_t n, uint32_t align) {
  if (address & (align - 1)) {
    if (checks_ & kAlignment) throw SimError(format("alignment: %s address 0x%x is not a multiple of %u", kind_, address, align));
    if (contains(address, n)) return;
  }
  throw SimError(format("%s%u bytes at %s address 0x%x, outside the CTA's [0x%x, 0x%x)", bounds_prefix(checks_, bounds_), n, kind_, address, first_, end_));
}

void TrackedMemory::guard(uint32_t address, uint32_t n, bool on) {
  if (!tracked_) return;
  for (uint32_t i = address - first_; i < address - first_ + n; ++i) strong_[i] = on ? strong_[i] | 4 : strong_[i] & 3;
}

bool TrackedMemory::written(uint32_t address, uint32_t n) const {
  if (!tracked_) return true;
  for (uint32_t i = address - first_; i < address - first_ + n; ++i)
    if (writer_[i]) return true;
  return false;
}

void TrackedMemory::report(uint32_t offset, const char* what, uint32_t other, uint32_t other_line) const {
  throw SimError(format("%s %s at PTX line %u: %s address 0x%x", what, agents_->list[epoch_agent(other)].name.c_str(),
                        other_line, kind_, first_ + offset));
}

void TrackedMemory::check_order(uint32_t offset, const Actor& actor, bool writing) const {
  uint32_t w = writer_[offset];
  if ((strong_[offset] & 4) && (checks_ & kMbarrier))
    throw SimError(format("mbarrier: %s of %s address 0x%x, which holds one", writing ? "write" : "read", kind_, first_ + offset));
  if (w == 0) {
    if (!writing && (checks_ & kUninitialized))
      throw SimError(format("uninitialized: read of %s address 0x%x, which nothing wrote", kind_, first_ + offset));
    return;
  }
  if (actor.in_order && epoch_agent(w) == epoch_agent(actor.tag)) return;
  bool async_writer = agents_->list[epoch_agent(w)].asynchronous;
  if (!actor.clock->has_seen(w)) {
    if (actor.strong && (strong_[offset] & 1)) return;
    if (async_writer) {
      if (w != actor.tag && (checks_ & kAsyncEarly))
        report(offset, writing ? "async_early: write over an asynchronous result that was not waited for, of" : "async_early: read of an asynchronous result that was not waited for, of", w, writer_line_[offset]);
    } else if (checks_ & kRace) {
      report(offset, writing ? "race: write not ordered after the write by" : "race: read not ordered after the write by", w, writer_line_[offset]);
    }
  } else if (actor.async_proxy && !async_writer && !actor.clock->has_fenced(w) && (checks_ & kProxyFence)) {
    report(offset, "proxy_fence: async proxy access without fence.proxy.async after the generic write by", w, writer_line_[offset]);
  }
}

void TrackedMemory::check_readers(uint32_t offset, const Actor& actor) const {
  uint32_t r = reader_[offset];
  if (r == 0 || (actor.strong && (strong_[offset] & 2))) return;
  auto check = [&](uint32_t e) {
    if (e == actor.tag || actor.clock->has_seen(e)) return;
    if (actor.in_order && epoch_agent(e) == epoch_agent(actor.tag)) return;
    bool async_reader = agents_->list[epoch_agent(e)].asynchronous;
    if (!(checks_ & (async_reader ? kAsyncEarly : kRace))) return;
    report(offset, async_reader ? "async_early: write to what an asynchronous operation may still read, of" : "race: write not ordered after the read by", e, reader_line_[offset]);
  };
  if (epoch_agent(r) != kMaxAgents) check(r);
  else for (uint32_t e : sets_[epoch_clock(r)]) check(e);
}

uint32_t TrackedMemory::add_reader(uint32_t readers, const Actor& actor) {
  if (readers == 0) return actor.tag;
  // Clocks only grow, so an answer given before may keep a reader too many, never one too few.
  if (readers == last_readers_ && actor.tag == last_tag_) return last_set_;
  last_readers_ = readers;
  last_tag_ = actor.tag;
  return last_set_ = join_readers(readers, actor);
}

uint32_t TrackedMemory::join_readers(uint32_t readers, const Actor& actor) {
  bool is_set = epoch_agent(readers) == kMaxAgents;
  std::vector<uint32_t> before = is_set ? sets_[epoch_clock(readers)] : std::vector<uint32_t>{readers};
  std::vector<uint32_t> set;
  for (uint32_t e : before)
    if (epoch_agent(e) != epoch_agent(actor.tag) && !actor.clock->has_seen(e)) set.push_back(e);
  if (set.empty()) return actor.tag;
  if (sets_.size() + 1 == 1u << kEpochClockBits) throw SimError("too many different sets of readers for the order checks: turn `race` and `async_early` off");
  set.insert(std::upper_bound(set.begin(), set.end(), actor.tag), actor.tag);
  auto it = set_numbers_.emplace(set, static_cast<uint32_t>(sets_.size()));
  if (it.second) sets_.push_back(set);
  return epoch(kMaxAgents, it.first->second);
}

void TrackedMemory::read(uint32_t offset, uint32_t n, const Actor& actor) {
  uint32_t last_writer = 0, last_reader = 0, next_reader = 0;
  uint8_t keep = actor.strong ? 7 : 5;
  for (uint32_t i = offset; i < offset + n; ++i) {
    // Neighbouring bytes nearly always share their history.
    if (i == offset || writer_[i] != last_writer || (strong_[i] & 4)) { check_order(i, actor, false); last_writer = writer_[i]; }
    if (reader_[i] == actor.tag) continue;
    if (i == offset || reader_[i] != last_reader) { last_reader = reader_[i]; next_reader = add_reader(last_reader, actor); }
    if (last_reader == 0) strong_[i] |= 2;
    strong_[i] &= keep;
    reader_[i] = next_reader;
    reader_line_[i] = static_cast<uint32_t>(actor.line);
  }
}

void TrackedMemory::write(uint32_t offset, uint32_t n, const Actor& actor) {
  for (uint32_t i = offset; i < offset + n; ++i) {
    bool repeats = i != offset && writer_[i] == writer_[i - 1] && reader_[i] == reader_[i - 1] && strong_[i] == strong_[i - 1];
    if (repeats) continue;
    if (writer_[i] != 0) check_order(i, actor, true);
    if (reader_[i] != 0) check_readers(i, actor);
  }
  std::fill_n(writer_.begin() + offset, n, actor.tag);
  std::fill_n(reader_.begin() + offset, n, 0);
  std::fill_n(strong_.begin() + offset, n, actor.strong ? 1 : 0);
  std::fill_n(writer_line_.begin() + offset, n, static_cast<uint32_t>(actor.line));
}

void GlobalMemory::add(const void* data, uint64_t bytes, const std::string& name) {
  uint64_t begin = reinterpret_cast<uint64_t>(data);
  if (bytes == 0) return;
  buffers_.push_back({begin, begin + bytes, name});
  std::sort(buffers_.begin(), buffers_.end(), [](const Buffer& a, const Buffer& b) { return a.begin < b.begin; });
  last_ = &none_;
}

void GlobalMemory::misaligned(uint64_t address, uint32_t align) const {
  if (checks_ & kAlignment)
    throw SimError(format("alignment: global address 0x%llx is not a multiple of %u", static_cast<unsigned long long>(address), align));
}

uint8_t* GlobalMemory::find(uint64_t address, uint32_t n) {
  auto it = std::upper_bound(buffers_.begin(), buffers_.end(), address, [](uint64_t a, const Buffer& b) { return a < b.begin; });
  // Buffers may be views of one another: any that holds the whole access will do.
  for (auto b = it; b != buffers_.begin();) {
    --b;
    if (address >= b->begin && address + n <= b->end) { last_ = &*b; return reinterpret_cast<uint8_t*>(address); }
  }
  if (checks_ & kGlobalBounds) {
    std::string near = "no buffer lies below";
    if (it != buffers_.begin()) {
      const Buffer& b = *(it - 1);
      near = format("nearest: %s of %llu bytes, offset %lld", b.name.c_str(), static_cast<unsigned long long>(b.end - b.begin),
                    static_cast<long long>(address - b.begin));
    }
    throw SimError(format("global_bounds: %u bytes at global address 0x%llx, outside every buffer (%s)", n,
                          static_cast<unsigned long long>(address), near.c_str()));
  }
  scratch_.assign(n, 0);
  return scratch_.data();
}

}  // namespace ptxsim
