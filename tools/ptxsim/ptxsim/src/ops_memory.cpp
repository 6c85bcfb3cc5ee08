// Loads, stores, atomics, prefetch and address queries.
#include <algorithm>
#include <cmath>

#include "async.h"
#include "numeric.h"

namespace ptxsim {

uint8_t* local_place(Warp& w, int lane, uint64_t address, uint32_t n, uint32_t align) {
  if ((address & (align - 1)) && w.machine->checking(kAlignment))
    throw SimError(format("alignment: local address 0x%llx is not a multiple of %u", static_cast<unsigned long long>(address), align));
  if (address + n > w.program->local_bytes)
    throw SimError(format("%s%u bytes at local address 0x%llx of %u", bounds_prefix(w.machine->launch.checks, kLocalBounds), n, static_cast<unsigned long long>(address), w.program->local_bytes));
  return w.local.data() + static_cast<size_t>(lane) * w.program->local_bytes + address;
}

Space take_space(Decoder& d) {
  std::string s = d.take_one({"global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const"});
  if (s.empty()) return Space::generic;
  if (s.compare(0, 6, "shared") == 0) return Space::shared;
  return s == "local" ? Space::local : Space::global;
}

namespace {

// Meaning of Instr::kind for loads, stores and atomics.
struct Kind {
  static constexpr int wide = 4, sign = 8, acquire = 32, release = 64, read_only = 128, scopes = 16, strong = 3 << scopes;
  static Space space(int kind) { return static_cast<Space>(kind & 3); }
  static int container(int kind) { return kind >> 8 & 0xff; }  // bytes of a data register
  static Scope scope(int kind) { return static_cast<Scope>(kind >> scopes & 3); }  // none: a weak access
};

// Compilers merge neighbouring loads, also where one of them is of no use on the way that is taken. So a vector load may
// read elements that nothing wrote as long as it reads one that something did.
void note_vector_read(TrackedMemory& shared, uint32_t address, uint32_t n, uint32_t element, const Actor& actor) {
  if (n == element || !shared.written(address, n)) return shared.note_read(address, n, actor);
  for (uint32_t i = 0; i < n; i += element)
    if (shared.written(address + i, element)) shared.note_read(address + i, element, actor);
}

// Place of an access, checked and noted. `n` bytes, aligned to n, in elements of `element` bytes.
uint8_t* place(Warp& w, Space space, uint64_t address, uint32_t n, uint32_t element, int lane, const Actor& actor, bool reads, bool writes) {
  w.lane = lane;
  switch (resolve(space, address)) {
    case Space::shared: {
      SharedPlace p = shared_place(w, static_cast<uint32_t>(address));
      uint8_t* at = p.cta->shared->at(p.address, n, n);
      note_visit(w, lane, *p.cta, actor);
      if (reads) note_vector_read(*p.cta->shared, p.address, n, element, actor);
      if (writes) p.cta->shared->note_write(p.address, n, actor);
      return at;
    }
    case Space::local: return local_place(w, lane, address, n, n);
    default: {
      GlobalMemory& global = w.machine->global;
      uint8_t* at = global.at(address, n, n);
      if (reads) global.note_read(address, n, actor);
      if (writes) global.note_write(address, n, actor);
      return at;
    }
  }
}

// Where the releases of strong writes to an address are kept; nullptr: nobody but the thread itself can reach it.
Released* released_at(Warp& w, Space space, uint64_t address, bool make) {
  auto find = [&](auto& places, auto key) -> Released* {
    if (make) return &places[key];
    auto it = places.find(key);
    return it == places.end() ? nullptr : &it->second;
  };
  switch (resolve(space, address)) {
    case Space::shared: {
      SharedPlace p = shared_place(w, static_cast<uint32_t>(address));
      return find(p.cta->released, p.address);
    }
    case Space::local: return nullptr;
    default: return find(w.machine->released, address);
  }
}

uint32_t cta_number(const Warp& w) { return w.cta->cluster->number << 4 | w.cta->rank; }

// A strong read takes in what was released for a scope that includes this thread.
void observe(Warp& w, const Instr& in, uint64_t address, uint32_t lanes) {
  Released* r = released_at(w, Kind::space(in.kind), address, false);
  if (!r) return;
  Scope scope = Kind::scope(in.kind);
  auto take = [&](const Clock& from, Scope at) {
    if (in.kind & Kind::acquire) w.acquire(lanes, from);
    else w.acquire_relaxed(lanes, at, from);
  };
  auto cta = r->cta.find(cta_number(w));
  if (cta != r->cta.end()) take(cta->second, kCtaScope);
  auto cluster = r->cluster.find(w.cta->cluster->number);
  if (scope >= kClusterScope && cluster != r->cluster.end()) take(cluster->second, kClusterScope);
  if (scope >= kGpuScope) take(r->gpu, kGpuScope);
}

// A strong write releases; what earlier writes released goes on only through a read-modify-write.
void publish(Warp& w, const Instr& in, uint64_t address, uint32_t lanes, bool modifies) {
  Released* r = released_at(w, Kind::space(in.kind), address, true);
  if (!r) return;
  if (!modifies) *r = Released();
  Scope scope = Kind::scope(in.kind);
  Clock clock;
  if (in.kind & Kind::release) w.release(lanes, clock);
  else w.release_relaxed(lanes, scope, clock);
  r->cta[cta_number(w)].join(clock);
  if (scope >= kClusterScope) r->cluster[w.cta->cluster->number].join(clock);
  if (scope >= kGpuScope && Kind::space(in.kind) != Space::shared) r->gpu.join(clock);
}

template <class T>
void ld_elements(Warp& w, const Instr& in, const int32_t* registers, int lane, const uint8_t* from) {
  int container = Kind::container(in.kind);
  for (int e = 0; e < in.n; ++e) {
    T v;
    std::memcpy(&v, from + e * sizeof(T), sizeof(T));
    uint8_t* to = w.file.data() + registers[e] + lane * container;
    if (container == sizeof(T)) {
      std::memcpy(to, &v, sizeof(T));
    } else {
      uint64_t bits = in.kind & Kind::sign ? static_cast<uint64_t>(static_cast<int64_t>(static_cast<std::make_signed_t<T>>(v))) : static_cast<uint64_t>(v);
      std::memcpy(to, &bits, static_cast<size_t>(container));
    }
  }
}

void ld_wide_elements(Warp& w, const Instr& in, const int32_t* registers, int lane, const uint8_t* from) {
  for (int e = 0; e < in.n; ++e) std::memcpy(w.file.data() + registers[e] + lane * 16, from + e * 16, 16);
}

void read_elements(Warp& w, const Instr& in, const int32_t* registers, int lane, const uint8_t* from) {
  switch (in.size) {
    case 1: return ld_elements<uint8_t>(w, in, registers, lane, from);
    case 2: return ld_elements<uint16_t>(w, in, registers, lane, from);
    case 4: return ld_elements<uint32_t>(w, in, registers, lane, from);
    case 8: return ld_elements<uint64_t>(w, in, registers, lane, from);
    default: return ld_wide_elements(w, in, registers, lane, from);
  }
}

Actor access_actor(Warp& w, const Instr& in, int lane) {
  Actor actor = w.actor(lane);
  actor.scope = Kind::scope(in.kind);
  actor.read_only = in.kind & Kind::read_only;
  return actor;
}

void ld(Warp& w, const Instr& in, uint32_t mask) {
  const int32_t* registers = w.program->lists.data() + in.list;
  uint32_t bytes = static_cast<uint32_t>(in.size * in.n), element = static_cast<uint32_t>(in.size);
  // Addresses are read before any lane's data is written: a destination may be the address register.
  uint64_t addresses[kLanes];
  for (int l = 0; l < kLanes; ++l) addresses[l] = lane_address(w, in, in.a[0], in.kind & Kind::wide, l);
  int first = __builtin_ctz(mask);
  bool same = w.known.size() == 1 && (mask & (mask - 1)), local = Kind::space(in.kind) == Space::local;
  for (uint32_t m = mask; m; m &= m - 1) same &= addresses[__builtin_ctz(m)] == addresses[first];
  if (same && !local && addresses[first] < kLocalWindow) {
    // One access of many lanes, each of which must be ordered after the write.
    if (in.kind & Kind::strong) observe(w, in, addresses[first], mask);
    Actor actor = access_actor(w, in, first);
    actor.lanes = mask;
    actor.self.lanes = 0;
    const uint8_t* from = place(w, Kind::space(in.kind), addresses[first], bytes, element, first, actor, true, false);
    for (uint32_t m = mask; m; m &= m - 1) read_elements(w, in, registers, __builtin_ctz(m), from);
  } else {
    for (uint32_t m = mask; m; m &= m - 1) {
      int l = __builtin_ctz(m);
      if (in.kind & Kind::strong) observe(w, in, addresses[l], 1u << l);
      read_elements(w, in, registers, l, place(w, Kind::space(in.kind), addresses[l], bytes, element, l, access_actor(w, in, l), true, false));
    }
  }
  w.lane = -1;
}

void st(Warp& w, const Instr& in, uint32_t mask) {
  const int32_t* registers = w.program->lists.data() + in.list;
  uint32_t bytes = static_cast<uint32_t>(in.size * in.n);
  int container = Kind::container(in.kind);
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    uint64_t address = lane_address(w, in, in.a[0], in.kind & Kind::wide, l);
    uint8_t* to = place(w, Kind::space(in.kind), address, bytes, static_cast<uint32_t>(in.size), l, access_actor(w, in, l), false, true);
    for (int e = 0; e < in.n; ++e) std::memcpy(to + e * in.size, w.file.data() + registers[e] + l * container, static_cast<size_t>(in.size));
    if (in.kind & Kind::strong) publish(w, in, address, 1u << l, false);
  }
  if (in.kind & Kind::strong) w.tick();
  w.lane = -1;
  ++w.machine->progress;
}

// Modifiers that ld and st share.
void take_access_modifiers(Decoder& d, bool load) {
  std::string order = d.take_one({"weak", "relaxed", "acquire", "release", "volatile", "mmio"});
  Scope scope = take_scope(d, kGpuScope);
  if (!order.empty() && order != "weak") d.in.kind |= scope << Kind::scopes;
  if (order == "acquire") d.in.kind |= Kind::acquire;
  if (order == "release") d.in.kind |= Kind::release;
  if ((load && order == "release") || (!load && order == "acquire")) d.fail("`." + order + "` has no meaning here");
  d.in.kind |= static_cast<int>(take_space(d));
  if (d.take("nc")) d.in.kind |= Kind::read_only;
  d.drop({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
  d.take_one({"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"});
  d.take_one({"L2::evict_normal", "L2::evict_first", "L2::evict_last"});
  d.take_one({"L2::64B", "L2::128B", "L2::256B"});
}

void decode_access(Decoder& d, bool load) {
  take_access_modifiers(d, load);
  bool hint = d.take("L2::cache_hint");
  std::string vector = d.take_one({"v2", "v4", "v8"});
  Type t = d.type();
  if (t.cls == Type::signed_int) d.in.kind |= Kind::sign;
  d.expect(2, hint ? 3 : 2);
  size_t data_at = load ? 0 : 1, address_at = load ? 1 : 0;
  d.in.a[0] = d.address(address_at, Kind::wide);
  const Operand& data = d.operand(data_at);
  size_t n = vector.empty() ? 1 : static_cast<size_t>(vector[1] - '0');
  int container = t.bytes;
  for (size_t e = 0; e < n; ++e) {
    const Operand& o = d.element(data, e, n);
    int bytes = t.bytes;
    if (o.kind == Operand::reg || o.kind == Operand::integer || o.kind == Operand::real) {
      if (load && o.kind != Operand::reg) d.fail("the destination is not a register");
      // A floating-point constant needs the type, a register may be wider than it.
      d.list(load ? d.target_of(o, &bytes) : o.kind == Operand::real ? d.value(o, t) : d.register_of(o, &bytes));
      if (bytes < t.bytes) d.fail("register is narrower than the type");
      container = bytes;
    } else if (o.kind == Operand::sink && load) {
      d.list(d.scratch());
    } else {
      d.list(d.value(o, t));
    }
  }
  d.in.kind |= container << 8;
  d.in.n = static_cast<int>(n);
  d.in.size = t.bytes;
  d.in.fn = load ? ld : st;
}

// ---- atomics ----
enum Atomic { add, min, max, inc, dec, and_, or_, xor_, exch, cas };

template <class T>
T combine(int op, T old, T b, T c) {
  switch (op) {
    case add: return static_cast<T>(old + b);
    case min: return b < old ? b : old;
    case max: return b > old ? b : old;
    case exch: return b;
    case cas: return old == b ? c : old;
    default: break;
  }
  if constexpr (std::is_integral<T>::value) {
    switch (op) {
      case inc: return old >= b ? T(0) : static_cast<T>(old + 1);
      case dec: return old == 0 || old > b ? b : static_cast<T>(old - 1);
      case and_: return static_cast<T>(old & b);
      case or_: return static_cast<T>(old | b);
      case xor_: return static_cast<T>(old ^ b);
      default: break;
    }
  }
  return old;
}

using Update = void (*)(int op, uint8_t* at, const uint8_t* b, const uint8_t* c);

template <class T>
void update(int op, uint8_t* at, const uint8_t* b, const uint8_t* c) {
  T old, x, y = T();
  std::memcpy(&old, at, sizeof(T));
  std::memcpy(&x, b, sizeof(T));
  if (c) std::memcpy(&y, c, sizeof(T));
  T result = combine<T>(op, old, x, y);
  std::memcpy(at, &result, sizeof(T));
}
template <const Format& kFormat, int kCount>
void update_half(int op, uint8_t* at, const uint8_t* b, const uint8_t*) {
  uint16_t old[kCount], more[kCount];
  std::memcpy(old, at, sizeof old);
  std::memcpy(more, b, sizeof more);
  for (int i = 0; i < kCount; ++i) {
    float x = decode(kFormat, old[i]), y = decode(kFormat, more[i]);
    float v = op == add ? x + y : op == min ? std::fmin(x, y) : std::fmax(x, y);
    old[i] = op == exch ? more[i] : static_cast<uint16_t>(encode(kFormat, v, Round::nearest, false));
  }
  std::memcpy(at, old, sizeof old);
}

// Element type of an atomic, in the low byte of Instr::use of a[5].
constexpr Update kUpdates[] = {update<uint32_t>, update<int32_t>, update<uint64_t>, update<int64_t>, update<float>, update<double>,
                                update_half<kF16, 2>, update_half<kBf16, 2>, update_half<kF16, 1>, update_half<kBf16, 1>};

// a[0] address, a[1] old values, a[4] operation, a[5] type; lists: b elements, then c elements
void atom(Warp& w, const Instr& in, uint32_t mask) {
  const int32_t* registers = w.program->lists.data() + in.list;
  uint32_t bytes = static_cast<uint32_t>(in.size * in.n);
  bool has_result = in.a[1] >= 0;
  uint64_t addresses[kLanes];
  for (int l = 0; l < kLanes; ++l) addresses[l] = lane_address(w, in, in.a[0], in.kind & Kind::wide, l);
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    if (has_result) observe(w, in, addresses[l], 1u << l);  // `red` forms no acquire pattern
    uint8_t* at = place(w, Kind::space(in.kind), addresses[l], bytes, static_cast<uint32_t>(in.size), l, access_actor(w, in, l), true, true);
    for (int e = 0; e < in.n; ++e) {
      uint8_t* element = at + e * in.size;
      const uint8_t* b = w.file.data() + registers[e] + l * in.size;
      const uint8_t* c = in.a[4] == cas ? w.file.data() + registers[in.n + e] + l * in.size : nullptr;
      uint8_t old[8];
      std::memcpy(old, element, static_cast<size_t>(in.size));
      kUpdates[in.a[5]](in.a[4], element, b, c);
      if (has_result) std::memcpy(w.file.data() + registers[2 * in.n + e] + l * in.size, old, static_cast<size_t>(in.size));
    }
    publish(w, in, addresses[l], 1u << l, true);
  }
  w.tick();
  w.lane = -1;
  ++w.machine->progress;
}

void decode_atomic(Decoder& d, bool result) {
  std::string sem = d.take_one({"relaxed", "acquire", "release", "acq_rel"});
  if (sem == "acquire" || sem == "acq_rel") d.in.kind |= Kind::acquire;
  if (sem == "release" || sem == "acq_rel") d.in.kind |= Kind::release;
  d.in.kind |= take_scope(d, kGpuScope) << Kind::scopes;
  d.in.kind |= static_cast<int>(take_space(d));
  static const char* const names[] = {"add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"};
  int op = -1;
  for (int i = 0; i < 10; ++i)
    if (d.take(names[i])) op = i;
  if (op < 0) d.fail("no known operation");
  d.take("noftz");
  bool hint = d.take("L2::cache_hint");
  std::string vector = d.take_one({"v2", "v4", "v8"});
  Type t = d.type();
  static const char* const types[] = {"u32", "s32", "u64", "s64", "f32", "f64", "f16x2", "bf16x2", "f16", "bf16"};
  d.in.a[5] = -1;
  for (int i = 0; i < 10; ++i)
    if (t.name == types[i] || (t.name == "b32" && i == 0) || (t.name == "b64" && i == 2)) d.in.a[5] = i;
  if (d.in.a[5] < 0) d.fail("type ." + t.name);
  if (t.cls == Type::real && op != add && op != min && op != max && op != exch) d.fail("operation on type ." + t.name);
  size_t first = result ? 1 : 0, sources = op == cas ? 2 : 1;
  d.expect(first + 1 + sources, first + 1 + sources + (hint ? 1 : 0));
  d.in.a[0] = d.address(first, Kind::wide);
  size_t n = vector.empty() ? 1 : static_cast<size_t>(vector[1] - '0');
  for (size_t s = 0; s < 2; ++s)
    for (size_t e = 0; e < n; ++e) d.list(s < sources ? d.value(d.element(d.operand(first + 1 + s), e, n), t) : -1);
  if (result && d.operand(0).kind != Operand::sink) {
    d.in.a[1] = 0;
    for (size_t e = 0; e < n; ++e) d.list(d.target(d.element(d.operand(0), e, n), t.bytes));
  }
  d.in.n = static_cast<int>(n);
  d.in.size = t.bytes;
  d.in.a[4] = op;
  d.in.fn = atom;
}

// ---- multimem ----
// A multicast address names a place on every device of a group. There is one device here, so it is an address as any
// other: a reduction over all places gives what lies there.
void decode_multimem(Decoder& d) {
  bool load = d.take("ld_reduce"), store = !load && d.take("st");
  if (!load && !store && !d.take("red")) d.fail("unknown multimem operation");
  const auto& words = d.source->opcode;
  auto among = [&](const std::string& word, std::initializer_list<const char*> list) { return std::find(list.begin(), list.end(), word) != list.end(); };
  std::string op, vector;
  for (const std::string& word : words) {
    if (among(word, {"min", "max", "add", "and", "or", "xor"})) op = word;
    if (among(word, {"v2", "v4", "v8"})) vector = word;
    if (word.compare(0, 6, "shared") == 0 || among(word, {"local", "param", "const"})) d.fail("multicast addresses are global");
  }
  const std::string& name = words.back();
  const Type* t = find_type(name);
  if (!t) d.fail("type ." + name + " is not supported");
  bool real = t->cls == Type::real, half = real && name != "f32" && name != "f64";
  int bytes = t->bytes * (vector.empty() ? 1 : vector[1] - '0');
  if (t->bytes < (half ? 2 : 4) || bytes < 4 || bytes > 16 || (!vector.empty() && (!real || name == "f64"))) d.fail("no such vector of type ." + name);
  bool possible = store ? op.empty()
                  : among(op, {"and", "or", "xor"}) ? t->cls == Type::bits
                  : op == "add" ? real || among(name, {"u32", "s32", "u64"})
                  : real ? half && load : t->cls != Type::bits && !op.empty();
  if (!possible) d.fail("no such reduction of type ." + name);
  if (load) d.take(op.c_str());
  if (load && half) d.take("acc::f32");
  if (load || store) decode_access(d, load);
  else decode_atomic(d, false);
  d.in.kind |= static_cast<int>(Space::global);
}

// ---- address queries ----
// Programs may map for lanes that will not use the address: a CTA that does not exist is a fault where it is accessed.
template <bool kWide>
void mapa(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    uint32_t rank = std::min(w.reg<uint32_t>(in.a[2])[l], 0xffu);
    if (kWide) {
      uint64_t a = w.reg<uint64_t>(in.a[1])[l];
      w.reg<uint64_t>(in.a[0])[l] = (a & ~static_cast<uint64_t>(0xffu << kRankShift)) | static_cast<uint64_t>(rank) << kRankShift;
    } else {
      w.reg<uint32_t>(in.a[0])[l] = (w.reg<uint32_t>(in.a[1])[l] & kRankMask) | rank << kRankShift;
    }
  }
}

template <bool kWide>
void getctarank(Warp& w, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    uint64_t a = kWide ? w.reg<uint64_t>(in.a[1])[l] : w.reg<uint32_t>(in.a[1])[l];
    w.reg<uint32_t>(in.a[0])[l] = static_cast<uint32_t>(a) >> kRankShift;
  }
}

void isspacep(Warp& w, const Instr& in, uint32_t mask) {
  uint32_t r = 0;
  for (int l = 0; l < kLanes; ++l) {
    uint64_t a = w.reg<uint64_t>(in.a[1])[l];
    r |= static_cast<uint32_t>(resolve(Space::generic, a) == static_cast<Space>(in.kind)) << l;
  }
  w.put_pred(in.a[0], r, mask);
}

void nothing(Warp&, const Instr&, uint32_t) {}

}  // namespace

void register_memory(OpcodeTable& table) {
  table["ld"] = [](Decoder& d) { decode_access(d, true); };
  table["ldu"] = table["ld"];
  table["st"] = [](Decoder& d) { d.take("async") ? decode_remote(d, false) : decode_access(d, false); };
  table["atom"] = [](Decoder& d) { decode_atomic(d, true); };
  table["red"] = [](Decoder& d) { d.take("async") ? decode_remote(d, true) : decode_atomic(d, false); };
  table["multimem"] = decode_multimem;
  table["mapa"] = [](Decoder& d) {
    bool shared = d.take("shared::cluster");
    Type t = d.type();
    d.expect(3, 3);
    if (!shared && t.bytes != 8) d.fail("32-bit generic address");
    d.in.a = {d.destination(0, t.bytes), d.source_slot(1, t), d.source_slot(2, *find_type("u32")), -1, -1, -1};
    d.in.fn = t.bytes == 8 ? mapa<true> : mapa<false>;
  };
  table["getctarank"] = [](Decoder& d) {
    d.take("shared::cluster");
    Type t = d.type();
    d.expect(2, 2);
    d.in.a[0] = d.destination(0, 4);
    d.in.a[1] = d.source_slot(1, t);
    d.in.fn = t.bytes == 8 ? getctarank<true> : getctarank<false>;
  };
  table["isspacep"] = [](Decoder& d) {
    d.in.kind = static_cast<int>(take_space(d));
    d.expect(2, 2);
    d.in.a[0] = d.predicate_destination(0);
    d.in.a[1] = d.source_slot(1, *find_type("u64"));
    d.in.fn = isspacep;
  };
  // Caches are not modelled.
  table["prefetch"] = [](Decoder& d) {
    d.drop({"global", "local", "param", "const", "L1", "L2", "tensormap", "L2::evict_last", "L2::evict_normal"});
    d.in.fn = nothing;
  };
  table["prefetchu"] = [](Decoder& d) { d.drop({"L1"}); d.in.fn = nothing; };
  table["createpolicy"] = [](Decoder& d) {
    d.drop({"fractional", "range", "L2::evict_first", "L2::evict_last", "L2::evict_normal", "L2::evict_unchanged", "global"});
    d.type();
    d.in.a[0] = d.destination(0, 8);
    d.in.a[1] = d.constant(8, 0);
    d.in.fn = [](Warp& w, const Instr& in, uint32_t mask) { w.put(in.a[0], w.reg<uint64_t>(in.a[1]), mask); };
  };
}

}  // namespace ptxsim
