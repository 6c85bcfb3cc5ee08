// st.async and red.async: a thread's registers to the shared memory of a CTA of the cluster. They complete on an mbarrier
// there, as bulk copies do, but through the generic proxy.
#include "async.h"

namespace ptxsim {
namespace {

constexpr int kWide = 4, kWideBarrier = 8;  // Instr::kind: the Space, and these

// a[0] destination, a[1] mbarrier, a[2] its offset, a[3] reduction, a[4] its type; lists: in.n registers of in.size bytes
void remote(Warp& w, const Instr& in, uint32_t mask) {
  const int32_t* registers = w.program->lists.data() + in.list;
  uint32_t size = static_cast<uint32_t>(in.size), bytes = size * static_cast<uint32_t>(in.n);
  int reduction = in.a[3], type = in.a[4];
  Space space = static_cast<Space>(in.kind & 3);
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    w.lane = l;
    uint64_t address = lane_address(w, in, in.a[0], in.kind & kWide, l);
    if (resolve(space, address) != Space::shared) throw SimError(format("shared_bounds: address 0x%llx is not in shared memory", static_cast<unsigned long long>(address)));
    SharedPlace to = shared_place(w, static_cast<uint32_t>(address));
    SharedPlace barrier = mbarrier_place(w, operand_address(w, in.a[1], in.kind & kWideBarrier, l, in.a[2]), space);
    if (w.machine->checking(kSharedBounds)) {
      if (w.cta->cluster->ctas.size() == 1) throw SimError("shared_bounds: asynchronous stores need a cluster of more than one CTA");
      if (reduction && to.cta == w.cta) throw SimError("shared_bounds: the destination of red.async lies in the CTA's own shared memory");
    }
    if (to.cta != barrier.cta && w.machine->checking(kMbarrier)) throw SimError("mbarrier: the destination and the mbarrier of an asynchronous store lie in different CTAs");
    uint8_t* data = to.cta->shared->at(to.address, bytes, bytes);
    Completion done = barrier_of(w, barrier);
    Actor actor = async_actor(w, done);
    actor.async_proxy = false;
    if (reduction) actor.scope = kGpuScope;  // relaxed atomics
    if (reduction) to.cta->shared->note_read(to.address, bytes, actor);
    to.cta->shared->note_write(to.address, bytes, actor);
    std::array<uint8_t, 32> values;
    for (int e = 0; e < in.n; ++e) std::memcpy(values.data() + e * in.size, w.file.data() + registers[e] + l * in.size, size);
    w.machine->issue(w, [&w, data, values, bytes, done, reduction, type] {
      deliver(reduction, type, data, values.data(), bytes);
      signal(w, done, bytes);
    });
  }
  w.lane = -1;
}

}  // namespace

void decode_remote(Decoder& d, bool reduce) {
  std::string order = d.take_one({"relaxed", "weak", "release"});
  bool scope = d.take("cluster");
  if (order == "release") d.fail("asynchronous stores to global memory are not modelled");
  if (reduce ? order != "relaxed" || !scope : !order.empty() && scope) d.fail("unknown order and scope");
  if (d.take("shared::cluster")) d.in.kind = static_cast<int>(Space::shared);
  if (!d.take("mbarrier::complete_tx::bytes") && !reduce) d.fail("unknown completion mechanism");
  std::string vector = reduce ? "" : d.take_one({"v2", "v4"});
  size_t n = vector.empty() ? 1 : static_cast<size_t>(vector[1] - '0');
  int reduction = reduce ? take_reduction(d) : 0, type = 0;
  Type t = *find_type("b32");
  if (reduce) {
    const std::string& last = d.source->opcode.back();
    if (const Type* named = find_type(last)) t = *named;
    type = take_reduction_type(d, reduction, true);
  } else {
    t = d.type();
    if (t.bytes != 4 && t.bytes != 8) d.fail("type ." + t.name);
  }
  d.expect(3, 3);
  for (size_t e = 0; e < n; ++e) d.list(d.value(d.element(d.operand(1), e, n), t));
  d.in.a[1] = d.address(2, kWideBarrier);
  d.in.a[2] = static_cast<int32_t>(d.in.imm);
  d.in.a[0] = d.address(0, kWide);
  d.in.a[3] = reduction;
  d.in.a[4] = type;
  d.in.n = static_cast<int>(n);
  d.in.size = t.bytes;
  d.in.fn = remote;
}

}  // namespace ptxsim
