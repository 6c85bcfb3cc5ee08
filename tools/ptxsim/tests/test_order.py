"""Order: which accesses need which synchronisation, and that its absence is reported under every seed."""

import re

import numpy as np
import ptxsim
import pytest
from ptx import aligned, kernel
from tcgen05 import ALLOC, FREE, QUARTER, WAIT, change, commit, descriptor, vector

SHARED = ".shared .align 128 .b8 tile[4096]; .shared .align 8 .b8 bar[8]; .shared .align 4 .b32 held;"
ADDRESS = "mov.u32 %r0, tile; mad.lo.s32 %r1, %t, 4, %r0; mad.wide.u32 %d0, %t, 4, %q0; mov.u32 %r20, %ctaid.x;"
FIRST = "setp.ne.u32 %p0, %t, 0; setp.ne.u32 %p1, %l, 0;"  # %p0: not thread 0; %p1: not lane 0
INIT = "@!%p0 mbarrier.init.shared.b64 [bar], 1; bar.sync 0;"
SEEDS = range(6)


def run(body, threads=64, grid=1, seed=0, **options):
    data = aligned(np.arange(4096, dtype=np.uint32))
    body = FIRST + ADDRESS + body
    kernel(body, 1, SHARED).launch(grid=grid, block=threads, params=[data], memory=[data], seed=seed, **options)
    return data


def reports(body, message, **options):
    for seed in SEEDS:
        with pytest.raises(ptxsim.SimulationError, match=message):
            run(body, seed=seed, **options)
    checks = re.match(r"\(?([a-z_|]+)\)?: ", message)[1].split("|")
    try:
        run(body, off=checks, **options)
    except ptxsim.SimulationError as stopped:
        assert str(stopped).split(": ")[0] not in checks


# ---- what is right: (text, threads, CTAs); the edits below take one thing out of it ----
LANES = "st.shared.b32 [%r1], %t; bar.warp.sync -1; xor.b32 %r2, %t, 1; mad.lo.s32 %r2, %r2, 4, %r0;"
READ = "ld.shared.b32 %r3, [%r2];"
HANDED = f"""{INIT} setp.ge.u32 %p2, %t, 32; @%p2 bra WAIT; st.shared.b32 [%r1], %t; bar.warp.sync -1;
             @!%p0 mbarrier.arrive.shared.b64 _, [bar]; {WAIT} and.b32 %r2, %t, 31; mad.lo.s32 %r2, %r2, 4, %r0;
             ld.shared.b32 %r3, [%r2];"""
# Lane 0 of warp 1 alone waits, and tells the others of its warp.
TOLD = f"""{INIT} setp.ge.u32 %p2, %t, 32; @%p2 bra READER; @%p0 bra END; mov.b32 %r5, 7; st.shared.b32 [tile], %r5;
           mbarrier.arrive.shared.b64 _, [bar]; bra END; READER: @%p1 bra TOLD; {WAIT} TOLD: bar.warp.sync -1;
           ld.shared.b32 %r3, [tile]; END:"""
STORED = """st.shared.b32 [%r1], %t; fence.proxy.async; bar.warp.sync -1; @%p0 bra END;
            cp.async.bulk.global.shared::cta.bulk_group [%q0], [tile], 128; cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0; ld.global.b32 %r3, [%q0]; END:"""
COPIED = """@%p0 bra END; cp.async.ca.shared.global [tile], [%q0], 16; cp.async.commit_group; cp.async.wait_group 0;
            END: bar.warp.sync -1; ld.shared.b32 %r3, [tile+4];"""
# Every lane copies a part, lane 0 alone issues the bulk copy of all.
GATHERED = """mad.lo.s32 %r1, %t, 16, %r0; mad.wide.u32 %d0, %t, 16, %q0; cp.async.ca.shared.global [%r1], [%d0], 16;
              cp.async.commit_group; cp.async.wait_group 0; fence.proxy.async; bar.warp.sync -1; @%p0 bra END;
              cp.async.bulk.global.shared::cta.bulk_group [%q0+4096], [tile], 512; cp.async.bulk.commit_group;
              cp.async.bulk.wait_group 0; END:"""
# CTA 0 writes and raises a flag, CTA 1 waits for it.
FLAG = """@%p0 bra END; setp.ne.u32 %p2, %r20, 0; @%p2 bra READER; mov.b32 %r5, 7; st.global.b32 [%q0+64], %r5;
          mov.b32 %r6, 1; st.release.gpu.global.b32 [%q0], %r6; bra END;
          READER: ld.acquire.gpu.global.b32 %r7, [%q0]; setp.ne.u32 %p3, %r7, 1; @%p3 bra READER;
          ld.global.b32 %r8, [%q0+64]; END:"""
FENCED = FLAG.replace("st.release.gpu", "fence.acq_rel.gpu; st.relaxed.gpu").replace("ld.acquire.gpu", "ld.relaxed.gpu")
FENCED = FENCED.replace("ld.global.b32 %r8", "fence.acq_rel.gpu; ld.global.b32 %r8")
# Whoever comes last reads what all have written.
LAST = """@%p0 bra END; mov.b32 %r5, 7; mad.wide.u32 %d1, %r20, 4, %q0; st.global.b32 [%d1+64], %r5;
          mov.b32 %r6, 1; atom.acq_rel.gpu.global.add.u32 %r7, [%q0+4], %r6; setp.ne.u32 %p3, %r7, 2; @%p3 bra END;
          ld.global.v2.b32 {%r8, %r9}, [%q0+64]; ld.global.b32 %r10, [%q0+72]; END:"""
LOADED = f"""{INIT} @%p0 bra END; mov.b32 %r5, 7; st.global.b32 [%q0], %r5; fence.proxy.async.global;
             mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;
             cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [tile], [%q0], 16, [bar]; {WAIT} END:"""
RIGHT = {
    "lanes": (LANES + READ, 32, 1),
    "handed over": (HANDED, 64, 1),
    "told": (TOLD, 64, 1),
    "stored": (STORED, 32, 1),
    "copied": (COPIED, 32, 1),
    "gathered": (GATHERED, 32, 1),
    "flag": (FLAG, 32, 2),
    "flag with fences": (FENCED, 32, 2),
    "last": (LAST, 32, 3),
    "loaded": (LOADED, 32, 1),
    "counted": ("mov.b32 %r6, 1; atom.global.add.u32 %r7, [%q0], %r6; red.global.add.u32 [%q0], %r6;", 64, 4),
    "one copy of many lanes": ("cp.async.ca.shared.global [tile], [%q0], 16; cp.async.wait_all;", 32, 1),
    "one store of many lanes": ("st.shared.b32 [tile], 1;", 32, 1),
}


def zeroed(name, **options):
    """Run a right program whose flags are 0 at the start."""
    body, threads, grid = RIGHT[name]
    data = aligned(np.zeros(4096, np.uint32))
    text = kernel(FIRST + ADDRESS + body, 1, SHARED)
    text.launch(grid=grid, block=threads, params=[data], memory=[data], **options)
    return data


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_ordered_passes(name, seed):
    zeroed(name, seed=seed)


WRONG = [
    ("lanes", "bar.warp.sync -1;", "", r"(race|uninitialized): .*(warp 0 .* lane \d+,|nothing wrote)"),
    ("handed over", "bar.warp.sync -1;", "", "race: read not ordered after the write by warp 0"),
    ("handed over", "bar.warp.sync -1;", "bar.warp.sync 65535;", "race: read not ordered after the write by warp 0"),
    ("told", "TOLD: bar.warp.sync -1;", "TOLD:", "(race|uninitialized): "),
    ("stored", "bar.warp.sync -1;", "", "(race: read|proxy_fence: )"),
    ("stored", "fence.proxy.async;", "@!%p0 fence.proxy.async;", "proxy_fence: "),
    ("stored", "fence.proxy.async; bar.warp.sync -1;", "bar.warp.sync -1; @%p0 fence.proxy.async;", "proxy_fence: "),
    ("stored", "wait_group 0", "wait_group.read 0", "async_early: read of an asynchronous result .* bulk groups"),
    ("stored", "cp.async.bulk.wait_group 0;", "", "async_early: read of an asynchronous result .* of bulk groups"),
    ("copied", "bar.warp.sync -1;", "", "(race|uninitialized): "),
    ("copied", "cp.async.wait_group 0;", "cp.async.wait_group 1;", "race: read not"),
    ("gathered", "bar.warp.sync -1;", "", "(race|proxy_fence): "),
    ("gathered", "fence.proxy.async;", "@!%p0 fence.proxy.async;", "proxy_fence: .* cp.async groups of warp 0"),
    ("gathered", "cp.async.wait_group 0;", "@!%p0 cp.async.wait_group 0;", "race: read not .* cp.async groups"),
    ("flag", "st.release.gpu", "st.relaxed.gpu", "race: read not ordered after the write by .*CTA .0, 0, 0."),
    ("flag", "st.release.gpu", "st.release.cta", "race: "),
    ("flag", "ld.acquire.gpu", "ld.acquire.cta", "race: "),
    ("flag", "ld.acquire.gpu", "ld.relaxed.gpu", "race: "),
    ("flag", "ld.acquire.gpu.global", "ld.global", "race: "),
    ("flag with fences", "fence.acq_rel.gpu; st", "st", "race: "),
    ("flag with fences", "fence.acq_rel.gpu; st", "fence.acq_rel.cta; st", "race: "),
    ("flag with fences", "fence.acq_rel.gpu; ld", "fence.acq_rel.cta; ld", "race: "),
    ("flag with fences", "fence.acq_rel.gpu; ld", "ld", "race: "),
    ("last", "atom.acq_rel.gpu", "atom.relaxed.gpu", "race: read not ordered after the write by"),
    ("last", "atom.acq_rel.gpu", "atom.acq_rel.cta", "race: "),
    ("last", "atom.acq_rel.gpu", "atom.release.gpu", "race: "),
    ("loaded", "fence.proxy.async.global;", "", "proxy_fence: .*global address"),
    ("loaded", "fence.proxy.async.global;", "fence.proxy.async.shared::cta;", "proxy_fence: .*global address"),
    ("counted", "atom.global", "atom.relaxed.cta.global", "race: .*global address"),
    ("one copy of many lanes", "cp.async.wait_all", "\n cp.async.ca.shared.global [tile], [%q0], 16", "race: write"),
]  # fmt: skip


@pytest.mark.parametrize("name, old, new, message", WRONG)
def test_what_is_not_ordered_is_reported_under_every_seed(name, old, new, message, monkeypatch):
    body, threads, grid = RIGHT[name]
    monkeypatch.setitem(RIGHT, name, (change(old, new)(body), threads, grid))
    for seed in SEEDS:
        with pytest.raises(ptxsim.SimulationError, match=message):
            zeroed(name, seed=seed, max_steps=100_000)


def test_every_cta_may_not_write_one_place():
    reports("st.global.b32 [%q0], %t;", "race: write not ordered after the write by warp 0", grid=2, threads=1)


def test_writes_after_reads_of_other_ctas_are_reported():
    body = "setp.ne.u32 %p2, %r20, 1; @%p2 ld.global.b32 %r3, [%q0]; @!%p2 st.global.b32 [%q0], %t;"
    reports(body, "race: (write|read) not ordered after the (read|write)", grid=2, threads=1)


def test_what_a_kernel_writes_is_not_read_as_constant():
    reports("st.global.b32 [%d0], %t; ld.global.nc.b32 %r3, [%d0];", r"race: read as constant .*ld.global.nc")


# ---- launches ----
PRODUCE = "st.global.b32 [%d0], %t;"
CONSUME = "griddepcontrol.wait; ld.global.b32 %r3, [%d0];"


def launches(*bodies):
    """(body, whether it is dependent): one launch each, in one stream."""
    data = aligned(np.zeros(4096, np.uint32))
    stream = ptxsim.Stream()
    for body, dependent in bodies:
        module = kernel(FIRST + ADDRESS + body, 1, SHARED)
        module.launch(grid=2, block=32, params=[data], memory=[data], stream=stream, dependent=dependent)


PRODUCE = "mad.wide.u32 %d0, %r20, 128, %d0; " + PRODUCE
CONSUME = "mad.wide.u32 %d0, %r20, 128, %d0; " + CONSUME
NO_WAIT = CONSUME.replace("griddepcontrol.wait;", "")
EARLY = "griddepcontrol.launch_dependents; "


def test_a_launch_may_rely_on_those_before_it():
    launches((PRODUCE, False), (NO_WAIT, False))


def test_a_dependent_launch_may_rely_on_those_before_it_once_it_has_waited():
    launches((PRODUCE, False), (CONSUME, True), (CONSUME, True))


@pytest.mark.parametrize("consumer", [NO_WAIT, NO_WAIT + "griddepcontrol.wait;"])
def test_a_dependent_launch_may_not_before(consumer):
    with pytest.raises(
        ptxsim.SimulationError, match=r"race: read not ordered after the write by .* of an earlier launch"
    ):
        launches((PRODUCE, False), (consumer, True))


def test_writes_of_a_dependent_launch_come_after_what_earlier_ones_read():
    with pytest.raises(
        ptxsim.SimulationError, match=r"race: write not ordered after the read by .* of an earlier launch"
    ):
        launches((NO_WAIT, False), (PRODUCE, True))


def test_one_thread_may_wait_for_launches_and_tell_the_others():
    told = CONSUME.replace("griddepcontrol.wait;", "@!%p0 griddepcontrol.wait; bar.warp.sync -1;")
    launches((PRODUCE, False), (told, True))
    with pytest.raises(ptxsim.SimulationError, match="race: "):
        launches((PRODUCE, False), (told.replace("bar.warp.sync -1;", ""), True))


def test_what_a_launch_has_waited_for_is_over_for_the_next():
    """The second one waits, so the third one cannot start before the first has ended."""
    launches((PRODUCE, False), ("griddepcontrol.wait;" + EARLY, True), (NO_WAIT, True))
    for second in ("", EARLY + "griddepcontrol.wait;"):
        with pytest.raises(ptxsim.SimulationError, match="of an earlier launch"):
            launches((PRODUCE, False), (second, True), (NO_WAIT, True))


# ---- clusters ----
SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
SENT = f"""@!%p0 mbarrier.init.shared.b64 [bar], 1; {SYNC} setp.ne.u32 %p2, %r20, 0; @%p2 bra READER; @%p0 bra END;
  mov.u32 %r5, tile; mapa.shared::cluster.u32 %r5, %r5, 1; st.shared::cluster.b32 [%r5], %r20; mov.u32 %r6, bar;
  mapa.shared::cluster.u32 %r6, %r6, 1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6]; bra END;
  READER: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p4, [bar], 0; @!%p4 bra READER;
  ld.shared.b32 %r7, [tile]; END:"""
VISIT = f"{SYNC} mov.u32 %r5, tile; xor.b32 %r6, %r20, 1; mapa.shared::cluster.u32 %r5, %r5, %r6; @%p0 bra END;"
VISIT += f"st.shared::cluster.b32 [%r5], %t; END: {SYNC} ld.shared.b32 %r7, [tile];"


@pytest.mark.parametrize("seed", SEEDS)
def test_ctas_of_a_cluster_visit_each_other_between_two_barriers(seed):
    run(VISIT, grid=2, cluster=2, seed=seed)


def test_a_cta_that_may_not_have_started_is_not_visited():
    body = VISIT.replace(SYNC, "", 1)
    reports(body, "cluster: access to shared memory .* may not have started", grid=2, cluster=2)


def test_a_cta_that_may_have_ended_is_not_visited():
    body = VISIT.replace(f"END: {SYNC} ld.shared.b32 %r7, [tile];", "END:")
    reports(body, "cluster: .*(ends without being ordered after|which has ended)", grid=2, cluster=2)


def test_a_cta_may_end_when_one_lane_says_that_all_have_visited():
    """Whatever the scope of the wait: it orders execution."""
    read = "ld.shared::cluster.b32 %r9, [%r5]; bar.warp.sync -1; @%p0 bra END;"
    told = SENT.replace("@%p0 bra END;\n", "").replace("st.shared::cluster.b32 [%r5], %r20;", read)
    told = f"st.shared.b32 [%r1], %t; {told}".replace("ld.shared.b32 %r7, [tile];", "")
    for scope in (".acquire.cluster", ".acquire.cta"):
        for seed in SEEDS:
            run(told.replace(".acquire.cluster", scope), grid=2, cluster=2, threads=32, seed=seed)
    reports(told.replace("bar.warp.sync -1;", ""), "cluster: CTA .1, 0, 0. ends without", grid=2, cluster=2, threads=32)


def test_a_barrier_of_another_cta_must_be_known_to_be_initialised():
    arrive = """mov.u32 %r5, bar; xor.b32 %r6, %r20, 1; mapa.shared::cluster.u32 %r5, %r5, %r6;
                mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];"""
    start = "@!%p0 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; "
    relaxed = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
    body = f"{start} {relaxed} @%p0 bra END; {arrive} {WAIT} END:"
    for seed in SEEDS:
        run(body, grid=2, cluster=2, seed=seed)
    reports(body.replace("fence.mbarrier_init.release.cluster;", ""), "mbarrier: the initialisation", grid=2, cluster=2)
    for seed in SEEDS:
        with pytest.raises(ptxsim.SimulationError, match=r"(mbarrier|cluster): "):
            run(body.replace(relaxed, "bar.sync 0;"), grid=2, cluster=2, seed=seed)


RESTRICTED = SENT.replace(".release.cluster", ".relaxed.cluster").replace(".acquire.cluster", ".relaxed.cluster")
RESTRICTED = RESTRICTED.replace("mbarrier.arrive", "fence.release.sync_restrict::shared::cta.cluster; mbarrier.arrive")
ACQUIRED = "fence.acquire.sync_restrict::shared::cluster.cluster;"
RESTRICTED = RESTRICTED.replace("ld.shared.b32 %r7", ACQUIRED + "ld.shared.b32 %r7")


def test_what_another_cta_sends_needs_the_scope_of_the_cluster():
    for seed in SEEDS:
        run(RESTRICTED, grid=2, cluster=2, seed=seed)
        run(SENT, grid=2, cluster=2, seed=seed)
        run(SENT.replace(".release.cluster", "").replace(".acquire.cluster", ""), grid=2, cluster=2, seed=seed)
    for order in (".release.cluster", ".acquire.cluster"):
        narrow = SENT.replace(order, order.replace("cluster", "cta"))
        reports(narrow, "race: read not ordered after the write by warp 0 of CTA .0", grid=2, cluster=2)
    reports(RESTRICTED.replace(ACQUIRED, ""), "race: read not ordered after the write by warp 0", grid=2, cluster=2)


# ---- tensor memory ----
NUMBERS = vector(100, 8)
HELD = f"{ALLOC.format(1)} bar.sync 0; ld.shared.b32 %r1, [held]; {QUARTER}"
STORE = f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3], {NUMBERS}; tcgen05.wait::st.sync.aligned;"
LOAD = f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {NUMBERS}, [%r3]; tcgen05.wait::ld.sync.aligned;"
FILL = " ".join(f"mov.b32 %r{100 + i}, {i};" for i in range(8))
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
IDENTITY = 1 << 4 | 2 << 17 | 4 << 24  # f16, N 16, M 64
OPERAND = f"""mov.u32 %r30, tile; shr.u32 %r30, %r30, 4; cvt.u64.u32 %d1, %r30;
  or.b64 %d1, %d1, {descriptor(128, 256, 0)}; mov.b32 %r31, {IDENTITY}; setp.ne.u32 %p8, %r31, %r31;"""
ZEROS = """mov.b32 %r32, 0; mad.lo.s32 %r33, %t, 16, %r0; st.shared.v4.b32 [%r33], {%r32, %r32, %r32, %r32};
  st.shared.v4.b32 [%r33+2048], {%r32, %r32, %r32, %r32}; fence.proxy.async;"""
PRODUCT = "tcgen05.mma.cta_group::1.kind::f16 [%r1], %d1, %d1, %r31, %p8;"
ARRIVED = f"{PRODUCT} {commit(1)}"
MULTIPLIED = f"""{ZEROS} {INIT} {HELD} {OPERAND} {FILL} {STORE} {BEFORE} bar.sync 0; {AFTER} @%p0 bra WAIT; {ARRIVED}
  {WAIT} bar.warp.sync -1; {AFTER} {LOAD} {BEFORE} {FREE.format(1)}"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_product_between_a_store_and_a_load_of_other_threads(seed):
    run(MULTIPLIED, threads=128, seed=seed)


@pytest.mark.parametrize(
    "old, new, message",
    [
        (f"{AFTER} {LOAD}", LOAD, "tensor_fence: no tcgen05.fence::after_thread_sync since .* tcgen05 operations"),
        (f"{BEFORE} bar.sync 0; {AFTER}", f"bar.sync 0; {AFTER}", "tensor_fence: no tcgen05.fence::before_thread_sync"),
        (f"{BEFORE} bar.sync 0; {AFTER}", f"{BEFORE} bar.sync 0;", "tensor_fence: no tcgen05.fence::after_thread_sync"),
        ("tcgen05.wait::st.sync.aligned;", "", "async_early: write over an asynchronous result .* of tcgen05.st of"),
        ("tcgen05.wait::ld.sync.aligned;", "", "async_early: .* tcgen05.ld of warp .* freed here"),
    ],
)  # fmt: skip
def test_tensor_memory_needs_waits_and_fences(old, new, message):
    assert old in MULTIPLIED
    reports(MULTIPLIED.replace(old, new), message, threads=128)


def test_a_register_waits_for_its_load_alone_and_that_orders_no_memory():
    """Registers are used before the wait, as in kernels of CUTLASS."""
    used = LOAD.replace("tcgen05.wait", "add.u32 %r90, %r100, %r101; tcgen05.wait")
    for seed in SEEDS:
        run(MULTIPLIED.replace(LOAD, used), threads=128, seed=seed)
    without = used.replace("tcgen05.wait::ld.sync.aligned;", "")
    reports(MULTIPLIED.replace(LOAD, without), "async_early: .* tcgen05.ld of warp", threads=128)


def test_tensor_memory_is_not_freed_under_a_product():
    body = f"{ZEROS} {INIT} {HELD} {OPERAND} @%p0 bra GO; {ARRIVED} GO: {FREE.format(1)}"
    reports(body, "async_early: .*tcgen05 operations of warp 0 .* freed here", threads=128)


def test_a_commit_tracks_the_operations_of_its_own_thread():
    other = MULTIPLIED.replace(
        f"@%p0 bra WAIT; {ARRIVED}", f"@!%p0 {PRODUCT} setp.ne.u32 %p7, %t, 1; @!%p7 {commit(1)}"
    )
    assert other != MULTIPLIED
    reports(other, "async_early: .* tcgen05 operations of warp 0", threads=128)


def test_operations_of_one_thread_follow_one_another_only_in_the_pairs_of_the_isa():
    same = MULTIPLIED.replace(ARRIVED, PRODUCT + ARRIVED)
    for seed in SEEDS:
        run(same, threads=128, seed=seed)
    wider = PRODUCT.replace("%r31", "%r34")
    other = f"mov.b32 %r34, {IDENTITY + (2 << 17)}; {wider} {ARRIVED}"
    reports(MULTIPLIED.replace(ARRIVED, other), "tensor_order: nothing orders this write after that of", threads=128)
    copied = f"{PRODUCT} tcgen05.cp.cta_group::1.128x128b [%r1], %d1; {commit(1)}"
    reports(MULTIPLIED.replace(ARRIVED, copied), "tensor_order: nothing orders this write after", threads=128)
    before = f"tcgen05.cp.cta_group::1.128x128b [%r1], %d1; {ARRIVED}"
    for seed in SEEDS:
        run(MULTIPLIED.replace(ARRIVED, before), threads=128, seed=seed)
