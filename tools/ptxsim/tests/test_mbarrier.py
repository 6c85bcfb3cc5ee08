"""mbarrier's counts, states and orders; fences that pair with relaxed arrivals and waits."""

import numpy as np
import ptxsim
import pytest
from ptx import kernel

SHARED = ".shared .align 8 .b8 bar[8]; .shared .align 128 .b8 tile[256];"
LOOK = "mbarrier.test_wait.parity.shared.b64 %p1, [bar], {}; selp.u32 %r{}, 1, 0, %p1;"


def init(count):
    return f"setp.ne.u32 %p0, %t, 0; @!%p0 mbarrier.init.shared.b64 [bar], {count}; bar.sync 0;"


def run(body, registers=1, threads=1, cluster=1, **options):
    """%r0, %r1, ... of the first thread after ``body``."""
    out = np.zeros(registers, np.uint32)
    stores = "".join(f"@!%p0 st.global.b32 [%q0+{4 * i}], %r{i};" for i in range(registers))
    module = kernel(body + stores, 1, SHARED)
    module.launch(grid=cluster, cluster=cluster, block=threads, params=[out], memory=[out], **options)
    return out.tolist()


@pytest.mark.parametrize("arrivals", [1, 3, 9])
def test_pending_count_is_what_was_pending_before_the_arrival(arrivals):
    body = init(20) + "mbarrier.arrive.shared.b64 _, [bar], 4;"
    body += f"mbarrier.arrive.noComplete.shared.b64 %d0, [bar], {arrivals}; mbarrier.pending_count.b64 %r0, %d0;"
    body += "mbarrier.arrive_drop.noComplete.release.cta.shared::cta.b64 %d0, [bar], 2;"
    assert run(body + "mbarrier.pending_count.b64 %r1, %d0;", 2) == [16, 16 - arrivals]


def test_a_state_tells_its_phase_from_the_next():
    body = init(2) + "mbarrier.arrive.shared.b64 %d0, [bar]; mbarrier.test_wait.shared.b64 %p1, [bar], %d0;"
    body += "selp.u32 %r0, 1, 0, %p1; mbarrier.arrive.release.cluster.shared.b64 _, [bar];"
    assert run(body + "mbarrier.test_wait.acquire.cta.shared.b64 %p1, [bar], %d0; selp.u32 %r1, 1, 0, %p1;", 2) == [
        0,
        1,
    ]


def test_a_drop_counts_in_its_phase_and_in_no_later_one():
    body = (
        init(3)
        + "mbarrier.arrive_drop.shared.b64 _, [bar]; mbarrier.arrive.shared.b64 _, [bar], 2;"
        + LOOK.format(0, 0)
    )
    body += "mbarrier.arrive.relaxed.cta.shared.b64 _, [bar], 2;" + LOOK.format(1, 1)
    assert run(body, 2) == [1, 1]


def test_a_drop_with_bytes_waits_for_them_and_drops_one():
    body = init(2) + "mbarrier.arrive_drop.expect_tx.relaxed.cluster.shared.b64 _, [bar], 16;"
    body += "mbarrier.arrive.shared.b64 _, [bar];" + LOOK.format(0, 0)
    body += "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 16;" + LOOK.format(0, 1)
    assert run(body + "mbarrier.arrive.shared.b64 _, [bar];" + LOOK.format(1, 2), 3) == [0, 1, 1]


HAND_OVER = """setp.ge.u32 %p2, %t, 32; @%p2 bra READ; @!%p0 st.shared.b32 [tile], 7;
  @!%p0 mbarrier.arrive.release.cta.shared.b64 _, [bar]; bra END;
  READ: mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p1, [bar], 0; @!%p1 bra READ; fence.acquire.cta;
  ld.shared.b32 %r0, [tile]; END:"""


@pytest.mark.parametrize("seed", range(4))
def test_a_fence_after_a_relaxed_wait_acquires(seed):
    run(init(1) + HAND_OVER, threads=64, seed=seed)
    with pytest.raises(ptxsim.SimulationError, match=r"^race: read not ordered after the write by warp 0"):
        run(init(1) + HAND_OVER.replace("fence.acquire.cta;", ""), threads=64, seed=seed)


@pytest.mark.parametrize(
    "body, message",
    [
        ("mbarrier.arrive.shared.b64 %d0, [bar]; mbarrier.pending_count.b64 %r0, %d0;", "^mbarrier: pending_count"),
        ("mbarrier.arrive.noComplete.shared.b64 %d0, [bar], 2;", "^mbarrier: arrive.noComplete at .* completes"),
        ("mbarrier.arrive.release.shared.b64 _, [bar];", "order and scope come together"),
        ("mbarrier.arrive.acquire.cta.shared.b64 _, [bar];", "`.acquire` has no meaning here"),
        ("mbarrier.test_wait.parity.release.cta.shared.b64 %p1, [bar], 0;", "`.release` has no meaning here"),
        ("fence.proxy.async::generic.release.sync_restrict::shared::cluster.cluster;", "unknown form"),
        ("fence.release.sync_restrict::shared::cluster.cluster;", "unknown form"),
        ("fence.acquire.sync_restrict::shared::cluster.gpu;", "unknown form"),
    ],
)
def test_what_the_isa_leaves_undefined_or_does_not_have(body, message):
    with pytest.raises(ptxsim.SimulationError, match=message):
        run(init(2) + body)


def test_a_remote_arrival_returns_no_state():
    body = (
        init(2)
        + """fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %r1, bar;
      mapa.shared::cluster.u32 %r2, %r1, 1; mbarrier.arrive.shared::cluster.b64 {}, [%r2];
      barrier.cluster.arrive; barrier.cluster.wait;"""
    )
    run(body.format("_"), cluster=2, off=["race"])  # both CTAs store the same
    with pytest.raises(
        ptxsim.SimulationError, match=r"^mbarrier: an arrival at another CTA's mbarrier returns no state"
    ):
        run(body.format("%d0"), cluster=2)
