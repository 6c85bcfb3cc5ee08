// Handlers for instructions that work lane by lane: Op::of(...) is applied to 32 lanes at once and the lanes of the
// mask are written. Results go through a local array so that the compiler may vectorise even where registers repeat.
#pragma once

#include "decode.h"

namespace ptxsim {

template <class Op, class D, class A>
void unary(Warp& w, const Instr& in, uint32_t mask) {
  const A* a = w.reg<A>(in.a[1]);
  alignas(64) D t[kLanes];
  for (int l = 0; l < kLanes; ++l) t[l] = Op::of(a[l]);
  w.put(in.a[0], t, mask);
}

template <class Op, class D, class A, class B>
void binary(Warp& w, const Instr& in, uint32_t mask) {
  const A* a = w.reg<A>(in.a[1]);
  const B* b = w.reg<B>(in.a[2]);
  alignas(64) D t[kLanes];
  for (int l = 0; l < kLanes; ++l) t[l] = Op::of(a[l], b[l]);
  w.put(in.a[0], t, mask);
}

template <class Op, class D, class A, class B, class C>
void ternary(Warp& w, const Instr& in, uint32_t mask) {
  const A* a = w.reg<A>(in.a[1]);
  const B* b = w.reg<B>(in.a[2]);
  const C* c = w.reg<C>(in.a[3]);
  alignas(64) D t[kLanes];
  for (int l = 0; l < kLanes; ++l) t[l] = Op::of(a[l], b[l], c[l]);
  w.put(in.a[0], t, mask);
}

// Operands of the usual shape: a destination and `sources` sources, all of one type.
inline void same_type_operands(Decoder& d, const Type& t, size_t sources) {
  d.expect(sources + 1, sources + 1);
  d.in.a[0] = d.destination(0, t.bytes);
  for (size_t i = 1; i <= sources; ++i) d.in.a[i] = d.source_slot(i, t);
}

}  // namespace ptxsim
