"""clusterlaunchcontrol: every CTA of the grid is worked on once, by itself or by one that took it over."""

import numpy as np
import ptxsim
import pytest
from ptx import HEADER

HANDLE = "clusterlaunchcontrol.query_cancel"
FENCED = """fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster; barrier.cluster.arrive.relaxed;
barrier.cluster.wait; fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;"""
V4 = f"@%p3 {HANDLE}.get_first_ctaid.v4.b32.b128 {{%r4, %r5, %r6, _}}, %w;"
WAIT = "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [bar], %r7; @!%p2 bra WAIT;"
SINGLY = "".join(f"@%p3 {HANDLE}.get_first_ctaid::{d}.b32.b128 %r{4 + i}, %w;" for i, d in enumerate("xyz"))


def persistent(query=V4, multicast=True, changes=()):
    """A kernel as in the ISA's example.

    Thread 0 of each CTA adds one to the place of every CTA that it works on, and once to the place behind all.
    """
    every = ".multicast::cluster::all" if multicast else ""
    body = f"""{HEADER}.visible .entry k(.param .u64 out)
{{
.reg .pred %p<8>; .reg .b32 %r<30>; .reg .b64 %d<8>; .reg .b128 %w;
.shared .align 16 .b8 response[16]; .shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; mov.u32 %r1, %cluster_ctarank; setp.ne.or.u32 %p1, %r1, 0, %p0;
mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y; mov.u32 %r6, %ctaid.z; mov.u32 %r7, 0;
mov.u32 %r8, response; mov.u32 %r9, bar; mov.u32 %r10, %cluster_ctaid.x; sub.s32 %r4, %r4, %r10;
mov.u32 %r16, %nctaid.x; mov.u32 %r17, %nctaid.y; mov.u32 %r18, %nctaid.z; mul.lo.s32 %r16, %r16, %r17;
mul.lo.s32 %r16, %r16, %r18; ld.param.b64 %d0, [out]; mad.wide.u32 %d1, %r16, 4, %d0;
@!%p0 atom.global.add.u32 %r15, [%d1], 1;
@!%p0 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
barrier.cluster.arrive; barrier.cluster.wait;
NEXT:
@%p0 bra WORK; mbarrier.arrive.expect_tx.relaxed.cluster.shared::cta.b64 _, [bar], 16;
@!%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{every}.b128 [%r8], [%r9];
WORK:
@%p0 bra WAIT; add.s32 %r11, %r4, %r10; mov.u32 %r12, %nctaid.x; mov.u32 %r13, %nctaid.y;
mad.lo.s32 %r14, %r6, %r13, %r5; mad.lo.s32 %r14, %r14, %r12, %r11; ld.param.b64 %d0, [out];
mad.wide.u32 %d1, %r14, 4, %d0; atom.global.add.u32 %r15, [%d1], 1;
{WAIT}
xor.b32 %r7, %r7, 1; ld.shared.b128 %w, [response];
{HANDLE}.is_canceled.pred.b128 %p3, %w;
@!%p3 ret;
{query}
{FENCED}
bra NEXT;
}}"""
    for old, new in changes:
        assert old in body
        body = body.replace(old, new)
    return ptxsim.load(body)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("query", [V4, SINGLY], ids=["v4", "singly"])
@pytest.mark.parametrize("grid, cluster, resident", [((24, 3, 2), 2, 8), ((9, 5, 1), 1, 4), ((5, 1, 1), 1, 8)])
def test_every_cta_is_worked_on_once_and_none_starts_that_was_taken_over(grid, cluster, resident, query, seed):
    out = np.zeros(np.prod(grid) + 1, np.uint32)
    options = {"block": 64, "cluster": cluster, "resident": resident, "seed": seed}
    persistent(query, multicast=cluster > 1).launch(grid=grid, params=[out], memory=[out], **options)
    np.testing.assert_array_equal(out[:-1], 1)
    assert out[-1] == min(resident, len(out) - 1)


def test_a_program_may_ask_for_a_number_before_it_knows_that_there_is_one():
    out = np.zeros(31, np.uint32)
    asked_first = [("@!%p3 ret;\n", ""), (V4, V4.replace("@%p3 ", "") + "@!%p3 ret;")]
    persistent(changes=asked_first).launch(grid=30, block=64, params=[out], memory=[out])
    np.testing.assert_array_equal(out[:-1], 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ([("@!%p3 ret;", "")], "try_cancel after the CTA has seen a request fail"),
        ([("ld.shared.b128 %w, [response];", "mov.b64 %d3, 1; mov.b128 %w, {%d3, %d3};")], "no response of try_cancel"),
        ([(FENCED, "barrier.cluster.arrive.relaxed; barrier.cluster.wait;")], "^async_early|^race: write not ordered"),
        ([(WAIT, "WAIT:")], "^(async_early|uninitialized): read"),
        ([("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive; barrier.cluster.wait;", "")], "^mbarrier: "),
    ],
)  # fmt: skip
def test_wrong_requests_are_stopped(changes, message):
    out = np.zeros(65, np.uint32)
    with pytest.raises(ptxsim.SimulationError, match=message):
        persistent(changes=changes).launch(grid=64, cluster=2, block=64, params=[out], memory=[out])
