"""Instructions that exchange data between lanes, control flow and divergence."""

import numpy as np
import ptxsim
import pytest
from ptx import HEADER, kernel, lanes, random_bits

LANE = np.arange(32, dtype=np.uint32)
A = random_bits(np.uint32, 5)


@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("mode, delta", [("up", 3), ("down", 5), ("bfly", 6), ("idx", 9)])
def test_shuffles_stay_within_their_segment(mode, delta, width):
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    got = lanes(
        f"shfl.sync.{mode}.b32 %o0|%p0, %a0, {delta}, {clamp}, -1; selp.b32 %o1, 1, 0, %p0;", [A], [np.uint32] * 2
    )
    for lane in range(32):
        base = lane // width * width
        source = {"up": lane - delta, "down": lane + delta, "bfly": lane ^ delta, "idx": base + delta % width}[mode]
        inside = base <= source < base + width
        assert got[0][lane] == A[source if inside else lane]
        assert got[1][lane] == inside


def test_votes_and_ballots():
    code = """and.b32 %r0, %a0, 3; setp.eq.u32 %p0, %r0, 1; vote.sync.ballot.b32 %o0, %p0, -1;
              vote.sync.any.pred %p1, %p0, -1;
              vote.sync.all.pred %p2, !%p0, -1; vote.sync.uni.pred %p3, %p0, -1; selp.b32 %o1, 1, 0, %p1;
              selp.b32 %o2, 1, 0, %p2; selp.b32 %o3, 1, 0, %p3; activemask.b32 %o4;"""
    got = lanes(code, [LANE], [np.uint32] * 5)
    assert [int(x[7]) for x in got] == [0x22222222, 1, 0, 0, 0xFFFFFFFF]


def test_match_finds_equal_lanes():
    key = LANE % 5
    got = lanes("match.any.sync.b32 %o0, %a0, -1; match.all.sync.b32 %o1|%p0, %a0, -1;", [key], [np.uint32] * 2)
    for lane in range(32):
        assert got[0][lane] == sum(1 << i for i in range(32) if key[i] == key[lane])
        assert got[1][lane] == 0


@pytest.mark.parametrize("op, want", [("add", np.sum), ("min", np.min), ("max", np.max)])
def test_redux_of_integers(op, want):
    a = A.view(np.int32)
    (got,) = lanes(f"redux.sync.{op}.s32 %o0, %a0, -1;", [a], [np.int32])
    assert (got == np.array(want(a.astype(np.int64)) & 0xFFFFFFFF, np.uint32).view(np.int32)).all()


def test_elect_picks_one_lane():
    got = lanes("elect.sync %o0|%p0, -1; selp.b32 %o1, 1, 0, %p0;", [LANE], [np.uint32] * 2)
    assert got[1].sum() == 1 and got[1][got[0][0]] == 1


def test_divergent_loops_reconverge():
    code = """mov.b32 %o0, 0; mov.b32 %o1, 0; setp.eq.u32 %p0, %a0, 0; @%p0 bra OUT;
              LOOP: add.s32 %o0, %o0, 1; setp.lt.u32 %p1, %o0, %a0; @%p1 bra LOOP;
              OUT: activemask.b32 %o1;"""
    got = lanes(code, [LANE], [np.uint32] * 2)
    np.testing.assert_array_equal(got[0], LANE)
    assert (got[1] == 0xFFFFFFFF).all()


def test_lanes_that_exit_do_not_hold_up_the_others():
    out = np.zeros(32, np.uint32)
    body = """setp.lt.u32 %p0, %t, 5; @%p0 bra OUT; bar.warp.sync 0xffffffe0; vote.sync.ballot.b32 %r0, %p0, 0xffffffe0;
              mad.wide.u32 %d0, %t, 4, %q0; activemask.b32 %r1; st.global.b32 [%d0], %r1; OUT:"""
    kernel(body).launch(grid=1, block=32, params=[out], memory=[out])
    np.testing.assert_array_equal(out, np.where(LANE < 5, 0, 0xFFFFFFE0))


@pytest.mark.parametrize("seed", range(3))
def test_a_lane_that_spins_lets_the_others_release_it(seed):
    """Lane 0 waits, at a lower address, for an mbarrier at which lane 1 arrives further on."""
    out = np.zeros(32, np.uint32)
    shared = ".shared .align 8 .b64 bar;"
    body = """setp.ne.u32 %p0, %l, 0; @%p0 bra OTHERS; mbarrier.init.shared.b64 [bar], 1;
              OTHERS: bar.warp.sync -1; @%p0 bra NEXT;
              WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra WAIT; bra DONE;
              NEXT: setp.ne.u32 %p2, %l, 1; @%p2 bra DONE; mbarrier.arrive.shared.b64 _, [bar];
              DONE: mad.wide.u32 %d0, %t, 4, %q0; st.global.b32 [%d0], %l;"""
    kernel(body, shared=shared).launch(grid=1, block=32, params=[out], memory=[out], seed=seed)
    np.testing.assert_array_equal(out, LANE)


def test_statistics_name_the_lines_that_ran():
    text = f"{HEADER}.visible .entry k() {{\n.reg .pred %p;\nsetp.eq.u32 %p, 1, 1;\n@%p bra OUT;\ntrap;\nOUT:\nret;\n}}"
    statistics = ptxsim.load(text).launch(grid=1, block=64)
    assert statistics.lines == {6, 7, 10}
    assert (statistics.warp_instructions, statistics.thread_instructions) == (6, 192)


def test_special_registers_name_thread_and_cta():
    out = np.zeros((2, 3, 8, 64, 6), np.uint32)
    names = ["%tid.x", "%tid.y", "%ctaid.x", "%ctaid.y", "%laneid", "%warpid"]
    reads = "\n".join(f"mov.u32 %r{i}, {n}; st.global.b32 [%d0+{4 * i}], %r{i};" for i, n in enumerate(names))
    body = f"""mov.u32 %r10, %tid.x; mov.u32 %r11, %tid.y; mov.u32 %r12, %ctaid.x; mov.u32 %r13, %ctaid.y;
              mov.u32 %r14, %nctaid.x;
              mad.lo.s32 %r15, %r13, %r14, %r12; mad.lo.s32 %r15, %r15, 8, %r11; mad.lo.s32 %r15, %r15, 64, %r10;
              mad.wide.u32 %d0, %r15, 24, %q0; {reads}"""
    kernel(body).launch(grid=(3, 2), block=(64, 8), params=[out], memory=[out])
    y, x, ty, tx = np.meshgrid(*map(np.arange, out.shape[:4]), indexing="ij")
    thread = tx + 64 * ty
    np.testing.assert_array_equal(out, np.stack([tx, ty, x, y, thread % 32, thread // 32], -1))
