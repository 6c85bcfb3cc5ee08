"""Loads, stores, atomics and address spaces."""

import numpy as np
import ptxsim
import pytest
from ptx import REDUCTIONS, aligned, kernel, lanes

LANE = np.arange(32, dtype=np.uint32)


@pytest.mark.parametrize("vector, type_", [("v2", "b32"), ("v4", "b32"), ("v2", "b64"), ("v4", "b16"), ("v8", "b32")])
def test_vectors_move_in_order(vector, type_):
    count, size = int(vector[1]), int(type_[1:]) // 8
    source = aligned(np.random.default_rng(0).integers(0, 255, 32 * count * size).astype(np.uint8))
    result = aligned(np.zeros_like(source))
    letter = {2: "h", 4: "r", 8: "d"}[size]
    registers = "{" + ", ".join(f"%{letter}{10 + i}" for i in range(count)) + "}"
    step = count * size
    body = f"""mad.wide.u32 %d0, %t, {step}, %q0; mad.wide.u32 %d1, %t, {step}, %q1; mov.u32 %r0, tile;
              mad.lo.s32 %r0, %t, {step}, %r0;
      ld.global.nc.{vector}.{type_} {registers}, [%d0]; st.shared.{vector}.{type_} [%r0], {registers};
      ld.shared.{vector}.{type_} {registers}, [%r0]; st.global.{vector}.{type_} [%d1], {registers};"""
    module = kernel(body, 2, f".shared .align 32 .b8 tile[{32 * step}];")
    module.launch(grid=1, block=32, params=[source, result], memory=[source, result])
    np.testing.assert_array_equal(result, source)


def test_narrow_loads_extend_by_their_type():
    source = np.arange(-16, 16, dtype=np.int8)
    got = np.zeros((2, 32), np.uint32)
    body = """cvt.u64.u32 %d0, %t; add.s64 %d0, %d0, %q0; ld.global.s8 %r0, [%d0]; ld.global.u8 %r1, [%d0];
              mad.wide.u32 %d1, %t, 4, %q1; st.global.b32 [%d1], %r0; st.global.b32 [%d1+128], %r1;"""
    kernel(body, 2).launch(grid=1, block=32, params=[source, got], memory=[source, got])
    np.testing.assert_array_equal(got[0].view(np.int32), source)
    np.testing.assert_array_equal(got[1], source.view(np.uint8))


def test_generic_addresses_reach_every_space():
    out = np.zeros((3, 32), np.uint32)
    body = """mov.u32 %r0, tile; cvt.u64.u32 %d0, %r0; cvta.shared.u64 %d1, %d0; mul.wide.u32 %d2, %t, 4;
              add.s64 %d3, %d1, %d2;
              st.b32 [%d3], %t; mad.lo.s32 %r1, %t, 4, %r0; ld.shared.b32 %r2, [%r1]; add.s64 %d4, %q0, %d2;
              st.b32 [%d4], %r2;
              mov.b64 %d5, depot; cvta.local.u64 %d6, %d5; st.local.b32 [%d5+4], %t; ld.b32 %r3, [%d6+4];
              st.global.b32 [%d4+128], %r3;
              isspacep.shared %p0, %d3; isspacep.global %p1, %d4; isspacep.local %p2, %d6; and.pred %p0, %p0, %p1;
              and.pred %p0, %p0, %p2; selp.b32 %r4, 1, 0, %p0; st.global.b32 [%d4+256], %r4;"""
    shared = ".shared .align 4 .b8 tile[128]; .local .align 8 .b8 depot[16];"
    kernel(body, shared=shared).launch(grid=1, block=32, params=[out], memory=[out])
    np.testing.assert_array_equal(out, [LANE, LANE, np.ones(32)])


ATOMICS = REDUCTIONS | {"exch": lambda x, y: y}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("op", ATOMICS)
def test_atomics_return_what_was_there(op, space):
    type_ = "b32" if op in ("and", "or", "xor", "exch") else "u32"
    memory = np.random.default_rng(0).integers(0, 40, 32).astype(np.uint32)
    operand = np.random.default_rng(1).integers(0, 40, 32).astype(np.uint32)
    before, old = memory.copy(), np.zeros(32, np.uint32)
    body = f"""mul.wide.u32 %d0, %t, 4; add.s64 %d1, %q0, %d0; add.s64 %d2, %q1, %d0; add.s64 %d3, %q2, %d0;
              ld.global.b32 %r1, [%d2];
      mov.u32 %r5, tile; mad.lo.s32 %r5, %t, 4, %r5; ld.global.b32 %r2, [%d1]; st.shared.b32 [%r5], %r2;
      atom.{space}.{op}.{type_} %r3, [{"%d1" if space == "global" else "%r5"}], %r1;
      {"" if space == "global" else "ld.shared.b32 %r4, [%r5]; st.global.b32 [%d1], %r4;"} st.global.b32 [%d3], %r3;"""
    arrays = [memory, operand, old]
    kernel(body, 3, ".shared .align 4 .b8 tile[128];").launch(grid=1, block=32, params=arrays, memory=arrays)
    np.testing.assert_array_equal(old, before)
    np.testing.assert_array_equal(memory, ATOMICS[op](before, operand))


def test_compare_and_swap_and_float_adds_from_every_lane():
    counter, taken, total = np.zeros(1, np.uint32), np.zeros(32, np.uint32), np.zeros(2, np.float32)
    body = """AGAIN: ld.relaxed.gpu.global.b32 %r0, [%q0]; add.s32 %r1, %r0, 1;
              atom.global.cas.b32 %r2, [%q0], %r0, %r1;
              setp.ne.u32 %p0, %r2, %r0; @%p0 bra AGAIN; mad.wide.u32 %d0, %r0, 4, %q1; st.global.b32 [%d0], 1;
              cvt.rn.f32.u32 %r3, %t; red.global.add.f32 [%q2], %r3; red.global.add.v2.f32 [%q2], {%r3, %r3};"""
    arrays = [counter, taken, total]
    kernel(body, 3).launch(grid=1, block=32, params=arrays, memory=arrays)
    assert counter[0] == 32 and (taken == 1).all()
    np.testing.assert_array_equal(total, [2 * 496, 496])


def test_cp_async_copies_and_fills_with_zeros():
    source = np.arange(128, dtype=np.uint32)
    result = np.zeros_like(source)
    body = """mul.wide.u32 %d0, %t, 16; add.s64 %d1, %q0, %d0; add.s64 %d2, %q1, %d0; mov.u32 %r0, tile;
              mad.lo.s32 %r0, %t, 16, %r0;
              and.b32 %r1, %t, 1; shl.b32 %r1, %r1, 3; cp.async.cg.shared.global [%r0], [%d1], 16, %r1;
              cp.async.commit_group;
              cp.async.wait_group 0; ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r0];
              st.global.v4.b32 [%d2], {%r2, %r3, %r4, %r5};"""
    for seed in range(3):
        module = kernel(body, 2, ".shared .align 16 .b8 tile[512];")
        module.launch(grid=1, block=32, params=[source, result], memory=[source, result], seed=seed)
        want = source.reshape(32, 4) * np.array([[0, 0, 0, 0], [1, 1, 0, 0]])[LANE % 2]
        np.testing.assert_array_equal(result, want.ravel())


def test_clusters_share_memory():
    out = np.zeros(4, np.uint32)
    body = """mov.u32 %r0, cell; mov.u32 %r1, %cluster_ctarank; mad.lo.s32 %r2, %r1, 10, 5; setp.ne.u32 %p0, %t, 0;
              @!%p0 st.shared.b32 [%r0], %r2; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
              xor.b32 %r3, %r1, 1; mapa.shared::cluster.u32 %r4, %r0, %r3; ld.shared::cluster.b32 %r5, [%r4];
              mov.u32 %r6, %ctaid.x; mad.wide.u32 %d0, %r6, 4, %q0; @!%p0 st.global.b32 [%d0], %r5;
              barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    kernel(body, shared=".shared .align 4 .b32 cell;").launch(grid=4, block=64, cluster=2, params=[out], memory=[out])
    np.testing.assert_array_equal(out, [15, 5, 15, 5])


def test_an_address_of_a_cta_that_does_not_exist_is_a_fault_where_it_is_used():
    body = "mov.u32 %r0, cell; mov.b32 %r1, {}; mapa.shared::cluster.u32 %r2, %r0, %r1;"
    shared = ".shared .align 4 .b32 cell;"
    for rank in (1, 300):
        kernel(body.format(rank), 0, shared).launch(grid=1, block=32)
        with pytest.raises(ptxsim.SimulationError, match=r"^shared_bounds: .* names CTA .* of a cluster of 1"):
            kernel(body.format(rank) + "st.shared::cluster.b32 [%r2], %r1;", 0, shared).launch(grid=1, block=32)


def test_clock_and_predicated_moves_run():
    (got,) = lanes(
        "mov.u32 %r0, %clock; mov.u64 %d70, %globaltimer; setp.eq.u32 %p0, %a0, 3; @%p0 mov.b32 %o0, 9;",
        [LANE],
        [np.uint32],
    )
    assert got[3] == 9
