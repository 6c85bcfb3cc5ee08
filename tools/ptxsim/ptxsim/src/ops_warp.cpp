// Exchange between the lanes of a warp. Each waits until all live lanes of its member mask have come to it.
#include "lanes.h"

namespace ptxsim {
namespace {

uint32_t first_lane(uint32_t mask) { return static_cast<uint32_t>(__builtin_ctz(mask)); }

// The member mask as the active lanes give it; all must agree.
uint32_t members(Warp& w, Slot slot, uint32_t mask) {
  const uint32_t* m = w.reg<uint32_t>(slot);
  uint32_t members = m[first_lane(mask)];
  if (w.machine->checking(kConvergence)) {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      uint32_t l = first_lane(rest);
      if (m[l] != members) throw SimError(format("convergence: lane %u has member mask 0x%08x, lane %u has 0x%08x", l, m[l], first_lane(mask), members));
      if (!(members >> l & 1)) throw SimError(format("convergence: lane %u is not in the member mask 0x%08x", l, members));
    }
  }
  return members;
}

enum Shuffle { up, down, bfly, idx };

// a[0] result, a[1] predicate or -1, a[2] value, a[3] lane or delta, a[4] clamp and segment, a[5] members
void shfl(Warp& w, const Instr& in, uint32_t mask) {
  if (!w.converged(members(w, in.a[5], mask))) return;
  const uint32_t* a = w.reg<uint32_t>(in.a[2]);
  const uint32_t* b = w.reg<uint32_t>(in.a[3]);
  const uint32_t* c = w.reg<uint32_t>(in.a[4]);
  uint32_t t[kLanes], p = 0;
  for (uint32_t l = 0; l < kLanes; ++l) {
    uint32_t delta = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
    uint32_t last = (l & segment) | (clamp & ~segment), base = l & segment;
    int from = static_cast<int>(l);
    bool valid = false;
    switch (in.kind) {
      case up: from -= static_cast<int>(delta); valid = from >= static_cast<int>(last); break;
      case down: from += static_cast<int>(delta); valid = from <= static_cast<int>(last); break;
      case bfly: from ^= static_cast<int>(delta); valid = from <= static_cast<int>(last); break;
      default: from = static_cast<int>(base | (delta & ~segment)); valid = from <= static_cast<int>(last);
    }
    if (!valid) from = static_cast<int>(l);
    t[l] = a[from];
    p |= static_cast<uint32_t>(valid) << l;
  }
  w.put(in.a[0], t, mask);
  if (in.a[1] >= 0) w.put_pred(in.a[1], p, mask);
}

enum Vote { all, any, uni, ballot };

void vote(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t m = members(w, in.a[2], mask);
  if (!w.converged(m)) return;
  uint32_t p = w.pred(in.a[1]);
  if (in.n) p = ~p;
  p &= mask;  // lanes that do not take part do not vote
  uint32_t voters = m & mask;
  if (in.kind == ballot) {
    uint32_t t[kLanes];
    for (uint32_t& v : t) v = p & voters;
    w.put(in.a[0], t, mask);
    return;
  }
  bool every = (p & voters) == voters, some = p & voters;
  bool result = in.kind == all ? every : in.kind == any ? some : every || !some;
  w.put_pred(in.a[0], result ? kFullMask : 0, mask);
}

template <class T>
void match(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t m = members(w, in.a[3], mask);
  if (!w.converged(m)) return;
  const T* a = w.reg<T>(in.a[2]);
  uint32_t t[kLanes], voters = m & mask;
  for (int l = 0; l < kLanes; ++l) {
    uint32_t same = 0;
    for (uint32_t rest = voters; rest; rest &= rest - 1) {
      uint32_t k = first_lane(rest);
      same |= static_cast<uint32_t>(a[k] == a[l]) << k;
    }
    t[l] = in.kind ? (same == voters ? voters : 0) : same;
  }
  w.put(in.a[0], t, mask);
  if (in.a[1] >= 0) w.put_pred(in.a[1], t[first_lane(mask)] ? kFullMask : 0, mask);
}

void elect(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t m = members(w, in.a[2], mask);
  if (!w.converged(m)) return;
  uint32_t leader = first_lane(m & mask);
  uint32_t t[kLanes];
  for (uint32_t& v : t) v = leader;
  w.put(in.a[0], t, mask);
  w.put_pred(in.a[1], 1u << leader, mask);
}

enum Redux { radd, rmin, rmax, rand_, ror, rxor };

template <class T>
void redux(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t m = members(w, in.a[2], mask);
  if (!w.converged(m)) return;
  const T* a = w.reg<T>(in.a[1]);
  uint32_t voters = m & mask;
  T r = a[first_lane(voters)];
  for (uint32_t rest = voters & (voters - 1); rest; rest &= rest - 1) {
    T v = a[first_lane(rest)];
    if constexpr (std::is_integral<T>::value) {
      using U = std::make_unsigned_t<T>;
      switch (in.kind) {
        case radd: r = static_cast<T>(static_cast<U>(r) + static_cast<U>(v)); break;
        case rmin: r = v < r ? v : r; break;
        case rmax: r = v > r ? v : r; break;
        case rand_: r &= v; break;
        case ror: r |= v; break;
        default: r ^= v;
      }
    } else {
      // in.n: 1 = .abs, 2 = .NaN
      T x = in.n & 1 ? (r < 0 ? -r : r) : r, y = in.n & 1 ? (v < 0 ? -v : v) : v;
      if (x != x) r = in.n & 2 ? x : y;
      else if (y != y) r = in.n & 2 ? y : x;
      else r = in.kind == rmin ? (y < x ? y : x) : (y > x ? y : x);
    }
  }
  T t[kLanes];
  for (T& v : t) v = r;
  w.put(in.a[0], t, mask);
}

}  // namespace

void register_warp(OpcodeTable& table) {
  table["shfl"] = [](Decoder& d) {
    if (!d.take("sync")) d.fail("shfl without .sync");
    d.in.kind = d.take("up") ? up : d.take("down") ? down : d.take("bfly") ? bfly : d.take("idx") ? idx : -1;
    if (d.in.kind < 0) d.fail("no known shuffle mode");
    Type t = d.type();
    if (t.bytes != 4) d.fail("type ." + t.name);
    d.expect(5, 5);
    const Type& u32 = *find_type("u32");
    d.in.a[0] = d.destination(0, 4);
    if (d.operand(0).second >= 0) {
      Operand p = d.operand(0);
      p.index = p.second;
      d.in.a[1] = d.target(p, 0);
    }
    for (size_t i = 1; i < 5; ++i) d.in.a[i + 1] = d.source_slot(i, i == 1 ? t : u32);
    d.in.fn = shfl;
  };
  table["vote"] = [](Decoder& d) {
    if (!d.take("sync")) d.fail("vote without .sync");
    d.in.kind = d.take("all") ? all : d.take("any") ? any : d.take("uni") ? uni : d.take("ballot") ? ballot : -1;
    if (d.in.kind < 0) d.fail("no known vote");
    Type t = d.type();
    d.expect(3, 3);
    d.in.a[0] = d.destination(0, t.bytes);
    Operand p = d.operand(1);
    d.in.n = p.negated;
    p.negated = false;
    d.in.a[1] = d.value(p, *find_type("pred"));
    d.in.a[2] = d.source_slot(2, *find_type("b32"));
    d.in.fn = vote;
  };
  table["match"] = [](Decoder& d) {
    if (!d.take("sync")) d.fail("match without .sync");
    d.in.kind = std::string(d.take_one({"any", "all"})) == "all";
    Type t = d.type();
    d.expect(3, 3);
    d.in.a[0] = d.destination(0, 4);
    if (d.operand(0).second >= 0) {
      Operand p = d.operand(0);
      p.index = p.second;
      d.in.a[1] = d.target(p, 0);
    }
    d.in.a[2] = d.source_slot(1, t);
    d.in.a[3] = d.source_slot(2, *find_type("b32"));
    d.in.fn = t.bytes == 4 ? match<uint32_t> : match<uint64_t>;
  };
  table["elect"] = [](Decoder& d) {
    if (!d.take("sync")) d.fail("elect without .sync");
    d.expect(2, 2);
    Operand p = d.operand(0);
    d.in.a[0] = d.destination(0, 4);
    p.index = p.second;
    if (p.index < 0) d.fail("elect without a predicate");
    p.kind = Operand::reg;
    d.in.a[1] = d.target(p, 0);
    d.in.a[2] = d.source_slot(1, *find_type("b32"));
    d.in.fn = elect;
  };
  table["redux"] = [](Decoder& d) {
    if (!d.take("sync")) d.fail("redux without .sync");
    static const char* const names[] = {"add", "min", "max", "and", "or", "xor"};
    d.in.kind = -1;
    for (int i = 0; i < 6; ++i)
      if (d.take(names[i])) d.in.kind = i;
    if (d.in.kind < 0) d.fail("no known operation");
    d.in.n = (d.take("abs") ? 1 : 0) | (d.take("NaN") ? 2 : 0);
    Type t = d.type();
    if (t.bytes != 4) d.fail("type ." + t.name);
    d.expect(3, 3);
    d.in.a[0] = d.destination(0, 4);
    d.in.a[1] = d.source_slot(1, t);
    d.in.a[2] = d.source_slot(2, *find_type("b32"));
    d.in.fn = t.name == "f32" ? redux<float> : t.cls == Type::signed_int ? redux<int32_t> : redux<uint32_t>;
  };
  table["activemask"] = [](Decoder& d) {
    d.type();
    d.expect(1, 1);
    d.in.a[0] = d.destination(0, 4);
    d.in.fn = [](Warp& w, const Instr& in, uint32_t mask) {
      uint32_t t[kLanes];
      for (uint32_t& v : t) v = mask;
      w.put(in.a[0], t, mask);
    };
  };
}

}  // namespace ptxsim
