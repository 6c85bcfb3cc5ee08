"""Instructions that all lanes of a warp, or a warp of each of two CTAs, must execute together."""

import numpy as np
import ptxsim
import pytest
from ptx import kernel
from tcgen05 import ALLOC, FREE, SHARED, change, cluster_sync

FRAGMENT = "{%r10, %r11, %r12, %r13}"
ALIGNED = [
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [held], 32;",
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;",
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 %r2, [%r1];",
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], %r2;",
    "tcgen05.wait::ld.sync.aligned;",
    "tcgen05.wait::st.sync.aligned;",
    "bar.sync 0;",
    "bar.arrive 1, 64;",
    "bar.red.popc.u32 %r2, 0, %p1;",
    "barrier.sync.aligned 0;",
    "barrier.cta.sync.aligned 0;",
    "barrier.cluster.arrive.aligned;",
    "barrier.cluster.wait.aligned;",
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
    "setmaxnreg.dec.sync.aligned.u32 24;",
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [bar];",
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [bar], {%r2};",
    f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {FRAGMENT}, {FRAGMENT}, {{%r2, %r3}}, {FRAGMENT};",
]  # fmt: skip
NOT_ALIGNED = ["barrier.sync 0;", "barrier.cluster.arrive;", "bar.warp.sync 1;"]


def guarded(instruction, predicate, **options):
    """Run one warp in which %p0 is ``predicate`` of lane %l, and an instruction under @%p0."""
    body = f"mov.b32 %r1, 0; setp.ne.u32 %p1, %l, 40; {predicate} @%p0 {instruction}"
    return kernel(body, 0, SHARED).launch(grid=1, block=32, params=[], **options)


@pytest.mark.parametrize("instruction", ALIGNED)
def test_an_aligned_instruction_under_a_predicate_of_some_lanes_is_stopped(instruction):
    for predicate, lanes in (("setp.lt.u32 %p0, %l, 8;", "0x000000ff"), ("setp.ne.u32 %p0, %l, 31;", "0x7fffffff")):
        with pytest.raises(ptxsim.SimulationError, match=f"^convergence: of the lanes 0xffffffff only {lanes} execute"):
            guarded(instruction, predicate)


@pytest.mark.parametrize("instruction", ALIGNED)
def test_an_aligned_instruction_under_a_predicate_of_all_lanes_or_of_none_is_not(instruction):
    guarded(instruction, "setp.gt.u32 %p0, %l, 31;")
    try:
        guarded(instruction, "setp.lt.u32 %p0, %l, 32;")
    except ptxsim.SimulationError as stopped:  # for what this kernel lacks
        assert not str(stopped).startswith("convergence")


@pytest.mark.parametrize("instruction", NOT_ALIGNED)
def test_an_instruction_that_is_not_aligned_may_be_executed_by_some_lanes(instruction):
    guarded(instruction, "setp.lt.u32 %p0, %l, 1;")


def test_lanes_that_a_branch_has_separated_are_compared_when_they_have_met_again():
    """Lanes that come later with another value of the guard are not forgotten."""
    split = "setp.lt.u32 %p2, %l, 4; @%p2 bra AGAIN; add.s32 %r2, %r2, 1; add.s32 %r2, %r2, 1; AGAIN:"
    guarded("bar.sync 0;", f"setp.lt.u32 %p0, %l, 32; {split}")
    with pytest.raises(ptxsim.SimulationError, match=r"^convergence: of the lanes 0xffffffff only 0x0000000f"):
        guarded("bar.sync 0;", f"setp.lt.u32 %p0, %l, 4; {split}")


def test_a_guard_of_some_lanes_may_be_allowed():
    guarded("tcgen05.wait::ld.sync.aligned;", "setp.lt.u32 %p0, %l, 8;", off=["convergence"])


# ------------------------------------------------------------------------------------------------- pairs of CTAs


def allocating(ctas, edit=lambda body: body, **options):
    """Each of ``ctas`` CTAs allocates 64 columns twice and frees them: the addresses that it got."""
    out = np.full((ctas, 2), -1, np.int32)
    group = f"cta_group::{ctas}"
    alloc = f"@!%p9 tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [held], %r0; bar.sync 0;"
    body = f"""mov.b32 %r0, 64; setp.ge.u32 %p9, %t, 32; mov.u32 %r10, %cluster_ctarank; setp.eq.u32 %p8, %r10, 0;
      mad.wide.u32 %d0, %r10, 8, %q0; setp.ne.u32 %p0, %t, 0;
      {alloc} ld.shared.b32 %r1, [held]; @!%p0 st.global.b32 [%d0], %r1; bar.sync 0;
      {alloc} ld.shared.b32 %r2, [held]; @!%p0 st.global.b32 [%d0+4], %r2; bar.sync 0;
      {cluster_sync(ctas)}
      @!%p9 tcgen05.dealloc.{group}.sync.aligned.b32 %r1, %r0; @!%p9 tcgen05.dealloc.{group}.sync.aligned.b32 %r2, %r0;
      @!%p9 tcgen05.relinquish_alloc_permit.{group}.sync.aligned;"""
    kernel(edit(body), 1, SHARED).launch(grid=ctas, block=64, cluster=ctas, params=[out], memory=[out], **options)
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ctas", [1, 2])
def test_allocations_of_a_pair_have_the_same_address(ctas, seed):
    assert allocating(ctas, seed=seed).tolist() == [[0, 64]] * ctas


def test_a_pair_waits_for_columns_to_be_free_in_both():
    """Two warps of each CTA in turn take all columns: the second pair gets them when the first has freed them."""
    body = """mov.b32 %r0, 512; setp.ge.u32 %p9, %t, 32; mov.u32 %r10, %cluster_ctarank; @%p9 bra SECOND;
      tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [held], %r0; bar.arrive 1, 64;
      mov.b32 %r3, 0; LOOP: add.s32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 400; @%p1 bra LOOP;
      ld.shared.b32 %r1, [held]; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r1, %r0; bra DONE;
      SECOND: bar.sync 1, 64; tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [bar], %r0;
      ld.shared.b32 %r1, [bar];
      tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r1, %r0; DONE:"""
    for seed in range(6):
        kernel(body, 0, SHARED).launch(grid=2, block=64, cluster=2, params=[], seed=seed)


DEALLOC = "@!%p9 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r2, %r0;"
RELINQUISH = "@!%p9 tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;"
FIRST_ALLOC = "cluster_ctarank; setp.eq.u32 %p8, %r10, 0;"
SAME = "^cta_group: the CTAs of a pair do not allocate or free the same: .*"
GONE = "^tensor_bounds: no allocation"
WRONG = [  # CTAs, text, what takes its place, message
    (2, FIRST_ALLOC, f"{FIRST_ALLOC} @%p8 bra DONE;",
     "^cta_group: the peer CTA has exited|^deadlock(.*\n)*.*a warp of the peer CTA to execute"),
    (2, DEALLOC, f"@%p8 bra SKIP; {DEALLOC} SKIP:",
     "^tensor_leak|^deadlock: (.*\n)*.*a warp of the peer CTA to execute"),
    (2, FIRST_ALLOC, f"{FIRST_ALLOC} @%p8 mov.b32 %r0, 128;", f"{SAME}(64|128) columns"),
    (2, DEALLOC, f"@%p8 mov.b32 %r2, %r1; {DEALLOC}", f"^tensor_bounds: no allocation of 64 columns at 0x0|{SAME}"),
    (2, DEALLOC, DEALLOC[6:], f"^cta_group: warps . and . of a CTA .*the pair|{SAME}|{GONE}"),
    (2, RELINQUISH, RELINQUISH.replace("::2", "::1"),
     r"^cta_group: all tcgen05 .*\nkernel k, PTX line .*\n.*relinquish.*group::1"),
    (2, "mov.b32 %r0, 64;", f"mov.b32 %r0, 64; {RELINQUISH} {cluster_sync(2)}",
     "^tensor_leak: allocation after relinquish"),
    (1, ".alloc.cta_group::1", ".alloc.cta_group::2", "^cta_group: all tcgen05"),
    (1, "cta_group::1", "cta_group::2", "cta_group::2 in a cluster without the peer CTA"),
    (1, "mov.b32 %r0, 64;", "mov.b32 %r0, 48;", "^tensor_bounds: allocation of 48 columns"),
    (1, "mov.b32 %r0, 64;", "mov.b32 %r0, 16;", "^tensor_bounds: allocation of 16 columns"),
]  # fmt: skip


@pytest.mark.parametrize("ctas, old, new, message", WRONG, ids=range(len(WRONG)))
def test_wrong_allocations_are_stopped(ctas, old, new, message):
    for seed in range(4):
        with pytest.raises(ptxsim.SimulationError, match=message):
            allocating(ctas, lambda body: change(old, new)(body) + " DONE:", seed=seed)


def test_a_commit_of_another_group_is_stopped():
    body = f"""{ALLOC.format(1)} bar.sync 0; ld.shared.b32 %r1, [held]; setp.ne.u32 %p0, %t, 0;
      @!%p0 mbarrier.init.shared.b64 [bar], 1;
      @!%p0 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [bar]; {FREE.format(1)}"""
    with pytest.raises(ptxsim.SimulationError, match=r"^cta_group: all tcgen05 (.*\n)*.*commit"):
        kernel(body, 0, SHARED).launch(grid=1, block=128, params=[])
    kernel(body, 0, SHARED).launch(grid=2, block=128, cluster=2, params=[], off=["cta_group"])


def test_a_pair_s_operation_after_the_peer_s_exit_is_stopped():
    body = """mov.u32 %r10, %cluster_ctarank; setp.eq.u32 %p8, %r10, 1; @%p8 bra DONE;
      mov.b32 %r3, 0; LOOP: add.s32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 9000; @%p1 bra LOOP;
      tcgen05.shift.cta_group::2.down [%r3]; DONE:"""
    with pytest.raises(ptxsim.SimulationError, match=r"^cta_group: the peer CTA has exited"):
        kernel(body, 0, SHARED).launch(grid=2, block=32, cluster=2, params=[])
