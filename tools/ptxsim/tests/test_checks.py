"""Every check stops a program that breaks its rule, says where, and can be turned off by its name."""

import numpy as np
import ptxsim
import pytest
from ptx import HEADER, kernel

SHARED = ".shared .align 1024 .b8 tile[8192]; .shared .align 8 .b8 bar[16];"
ELECTED = "setp.ne.u32 %p0, %t, 0;"
INIT = f"{ELECTED} @!%p0 mbarrier.init.shared.b64 [bar], 1; bar.sync 0;"
COPY = """@!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
          @!%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [tile], [%q0], 256, [bar];"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra WAIT;"
FILL = "mov.u32 %r0, tile; mad.lo.s32 %r1, %t, 4, %r0; st.shared.b32 [%r1], %t;"
STORE = "@!%p0 cp.async.bulk.global.shared::cta.bulk_group [%q0], [tile], 256; @!%p0 cp.async.bulk.commit_group;"
STORED = "cp.async.bulk.wait_group.read 0; bar.sync 0;"
DESCRIPTOR = "mov.u32 %r0, tile; shr.u32 %r0, %r0, 4; cvt.u64.u32 %d0, %r0; or.b64 %d0, %d0, 0x0000000800080000;"
ZERO_TILE = """mov.u32 %r0, tile; mad.lo.s32 %r1, %t, 16, %r0; mov.b32 %r2, 0;
          st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2};
               st.shared.v4.b32 [%r1+2048], {%r2, %r2, %r2, %r2}; fence.proxy.async; bar.sync 0; mov.b32 %r10, 0;
               mov.b32 %r11, 0;
               mov.b32 %r12, 0; mov.b32 %r13, 0; setp.eq.u32 %p3, %r10, 1;"""
MMA = """wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10, %r11, %r12, %r13}, %d0, %d0, %p3, 1, 1, 0, 0;
         wgmma.commit_group.sync.aligned;"""
COUNT = "atom.shared.add.u32 %r1, [tile], 1;"
START = "mov.u32 %r3, 0; @!%p0 st.shared.b32 [tile], %r3;"
EARLY_WGMMA = "may still read, of wgmma groups"
NO_FENCE = "without fence.proxy.async after the generic write by warp 0"
TWO_COUNTS = """setp.ge.u32 %p2, %t, 64; @%p2 ret; setp.ge.u32 %p2, %t, 32; @%p2 bra B; bar.sync 1, 64;
                B: bar.sync 1, 96;"""
SPLIT_WARP = "setp.lt.u32 %p2, %t, 16; @%p2 bra A; bar.sync 0; bra B; A: bar.sync 0; B:"
MMA_READY = "wgmma.fence.sync.aligned;"
MMA_DONE = "wgmma.wait_group.sync.aligned 0;"
A_MMA = MMA.replace("%d0, %d0", "{%r20, %r21, %r22, %r23}, %d0").replace("1, 1, 0, 0", "1, 1, 0")
A_ZERO = "mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;"
READ = "add.f32 %r5, %r10, %r10;"
CHANGED_A = "xor.b32 %r20, %r20, 1;"
COPIES = "mov.b32 %r5, %r10; mov.b32 %r6, %r5; mov.b32 %r10, %r6; mov.b32 %r11, 0;"
CHANGED_COPY = "mov.b32 %r5, %r10; add.f32 %r5, %r5, %r5; mov.b32 %r6, %r5; mov.b32 %r10, %r6;"
WIDER_MMA = MMA.replace("m64n8", "m64n16").replace("%r13}", "%r13, %r24, %r25, %r26, %r27}")
ACCUMULATORS_AS_A = ZERO_TILE + DESCRIPTOR + MMA_READY + MMA + A_MMA.replace("{%r20", "{%r10") + MMA_DONE


def run(body, threads=128, **options):
    data = np.arange(1024, dtype=np.uint32)
    kernel(body, 1, SHARED).launch(grid=1, block=threads, params=[data], memory=[data], **options)


RIGHT = {
    "load": INIT + COPY + WAIT + "ld.shared.b32 %r1, [tile+8];",
    "store": ELECTED + FILL + "fence.proxy.async; bar.sync 0;" + STORE + STORED + FILL,
    "exchange": FILL + "bar.sync 0; ld.shared.b32 %r1, [tile];",
    "hand over": f"""{INIT} setp.ge.u32 %p2, %t, 32; @%p2 bra WAIT; {FILL} bar.warp.sync -1;
                     @!%p0 mbarrier.arrive.shared.b64 _, [bar]; {WAIT} ld.shared.b32 %r1, [tile+4];""",
    "mma": ZERO_TILE + DESCRIPTOR + MMA_READY + MMA + MMA_DONE + "mov.b32 %r5, %r10; bar.sync 0;" + FILL,
    "mma again": ZERO_TILE + DESCRIPTOR + MMA_READY + MMA + MMA + MMA_DONE + MMA + MMA_DONE,
    "mma after copies": ZERO_TILE + DESCRIPTOR + MMA_READY + COPIES + MMA + MMA_DONE + COPIES + MMA + MMA_DONE,
    "mma of registers": ZERO_TILE + DESCRIPTOR + A_ZERO + MMA_READY + A_MMA + A_MMA + MMA_DONE,
    "mma and wider": ZERO_TILE + DESCRIPTOR + MMA_READY + MMA + MMA_READY + WIDER_MMA + MMA_DONE,
    "mma after an access": ZERO_TILE
    + DESCRIPTOR
    + MMA_READY
    + MMA
    + MMA_DONE
    + "mov.b32 %r5, %r10;"
    + MMA_READY
    + MMA
    + MMA_DONE,
    "count": START + "bar.sync 0;" + COUNT + "bar.sync 0; ld.shared.b32 %r2, [tile];",
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass_every_check(name, seed):
    run(ELECTED + RIGHT[name], seed=seed)


WRONG = [
    ("global_bounds", "ld.global.b32 %r0, [%q0+4096];", "nearest: buffer 0 of 4096 bytes, offset 4096"),
    ("global_bounds", "mov.b64 %d0, 64; st.global.b32 [%d0], %t;", "outside every buffer"),
    ("alignment", "ld.global.v2.b32 {%r0, %r1}, [%q0+4];", "not a multiple of 8"),
    ("alignment", FILL + "bar.sync 0; ld.shared.b32 %r2, [tile+2];", "not a multiple of 4"),
    ("uninitialized", "ld.shared.b32 %r0, [tile+64];", "which nothing wrote"),
    ("race|uninitialized", FILL + "ld.shared.b32 %r1, [tile];", "after the write by warp 0|nothing wrote"),
    ("race", FILL + "bar.sync 0; ld.shared.b32 %r1, [tile];" + FILL, "not ordered after the (read|write) by warp"),
    ("race|uninitialized", START + COUNT, "not ordered|nothing wrote"),
    ("race", RIGHT["hand over"].replace("mbarrier.arrive.", "mbarrier.arrive.relaxed.cta."), "read not ordered"),
    ("async_early", INIT + COPY + "bar.sync 0; ld.shared.b32 %r1, [tile];", "was not waited for, of the mbarrier"),
    ("async_early", RIGHT["store"].replace(STORED, "bar.sync 0;"), "may still read, of bulk groups of warp 0"),
    ("async_early", RIGHT["mma"].replace(MMA_DONE, "").replace("mov.b32 %r5, %r10;", ""), EARLY_WGMMA),
    ("proxy_fence", RIGHT["store"].replace("fence.proxy.async;", ""), NO_FENCE),
    ("proxy_fence", RIGHT["mma"].replace("fence.proxy.async;", ""), "without fence.proxy.async"),
    ("mbarrier", INIT + "@!%p0 mbarrier.arrive.shared.b64 _, [bar], 2;", "more arrivals at"),
    ("mbarrier", RIGHT["load"].replace("_, [bar], 256", "_, [bar], 128"), "128 bytes more than expected"),
    ("mbarrier", INIT.replace("bar.sync 0;", "@%p0 bra WAIT;") + WAIT, "not ordered before this use|no initialised"),
    ("mbarrier", INIT + "@!%p0 mbarrier.init.shared.b64 [bar], 1;", "already holds one"),
    ("mbarrier", INIT + "@!%p0 st.shared.b32 [bar+4], %t;", "write of shared address 0x.*, which holds one"),
    ("mbarrier", INIT + "ld.shared.b64 %d0, [bar];", "read of shared address 0x.*, which holds one"),
    ("barrier", TWO_COUNTS, "this warp counts"),
    ("deadlock", RIGHT["load"].replace("_, [bar], 256", "_, [bar], 512"), "256 bytes are missing"),
    ("deadlock", INIT + WAIT, "the mbarrier at 0x.* 1 of 1 arrivals"),
    ("deadlock", "setp.lt.u32 %p2, %t, 32; @%p2 ret; bar.sync 1, 128;", r"barrier 1 \(96 of 128 threads have"),
    ("deadlock", SPLIT_WARP, "lanes 0x0000ffff to reach"),
    ("descriptor", RIGHT["mma"].replace("0x0000000800080000", "0x0010000800080000"), "reserved bits"),
    ("in_flight_registers", RIGHT["mma"].replace(MMA_DONE, ""), "%r10 belongs to a wgmma"),
    ("in_flight_registers", RIGHT["mma"].replace(MMA_READY, ""), "no wgmma.fence before the warp's first"),
    ("in_flight_registers", RIGHT["mma"].replace(MMA_READY, MMA_READY + "add.s32 %r12, %r12, 0;"), "register %r12"),
    ("in_flight_registers", RIGHT["mma again"].replace(MMA_DONE, MMA_DONE + READ, 1), "register %r10"),
    ("in_flight_registers", RIGHT["mma again"].replace(MMA_DONE, MMA_DONE + CHANGED_COPY, 1), "register %r10"),
    ("in_flight_registers", RIGHT["mma of registers"].replace(MMA_READY, MMA_READY + CHANGED_A), "register %r20"),
    ("in_flight_registers", RIGHT["mma and wider"].replace(MMA + MMA_READY, MMA), "%r10 in another shape"),
    ("in_flight_registers", ACCUMULATORS_AS_A, "operand of another kind"),
    ("convergence", "vote.sync.ballot.b32 %r0, %p0, %t;", "member mask"),
]  # fmt: skip


@pytest.mark.parametrize("check, body, message", WRONG)
def test_wrong_programs_are_stopped_under_every_seed(check, body, message):
    for seed in range(6):
        with pytest.raises(ptxsim.SimulationError, match=message) as stopped:
            run(ELECTED + body, seed=seed)
        assert str(stopped.value).split(": ")[0] in check.split("|"), stopped.value


@pytest.mark.parametrize("check, body, message", WRONG)
def test_a_check_that_is_off_does_not_report(check, body, message):
    if check == "deadlock" or "no initialised" in message:
        pytest.skip("nothing can carry on from here")
    try:
        run(ELECTED + body, off=check.split("|"))
    except ptxsim.SimulationError as stopped:
        assert str(stopped).split(": ")[0] not in check.split("|")


def test_reports_name_kernel_line_cta_warp_and_lane():
    data = np.zeros(64, np.uint32)
    body = """setp.ne.u32 %p0, %t, 37; mov.u32 %r1, %ctaid.y; setp.ne.or.u32 %p0, %r1, 1, %p0;
              @!%p0 st.global.b32 [%q0+256], %t;"""
    text = kernel(body)
    with pytest.raises(ptxsim.SimulationError) as stopped:
        text.launch(grid=(1, 2), block=64, params=[data], memory=[data])
    report = str(stopped.value)
    assert "kernel k, PTX line 18, CTA (0, 1, 0), warp 1, lane 5" in report
    assert "@!%p0 st.global.b32 [%q0+256], %t;" in report
    assert f"0x{data.ctypes.data + 256:x}" in report


def test_more_shared_memory_than_a_cta_has_is_refused():
    with pytest.raises(ptxsim.SimulationError, match=r"shared_limit: 2324\d+ bytes"):
        run("", smem=227 * 1024 - 8192 - 15)


@pytest.mark.parametrize(
    "line, message",
    [
        ("foo.b32 %r0, %r1;", "unknown instruction `foo`"),
        ("add.weird.s32 %r0, %r1, %r2;", "unknown modifier `.weird`"),
        ("add.s32 %r0, %r1;", "2 operands"),
        ("add.s32 %d0, %r1, %r2;", "register %d0 has 8 bytes"),
        ("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc %r0, %r1, %r2, %r3;", "unknown matrix shape"),
        ("bra NOWHERE;", "unknown name `NOWHERE`"),
    ],
)
def test_what_is_not_known_stops_with_its_text_and_line(line, message):
    with pytest.raises(ptxsim.SimulationError, match=f"PTX line [0-9]+: .*{message}") as stopped:
        run(line)
    if "NOWHERE" not in line:
        assert line in str(stopped.value)


def test_launches_that_can_not_be_are_refused():
    text = f"{HEADER}.visible .entry k(.param .u64 p) .reqntid 64, 1, 1 {{ ret; }}"
    module = ptxsim.load(text)
    for launch, message in (
        ({"block": 32, "params": [0]}, "reqntid asks for 64"),
        ({"block": 64, "params": []}, "takes 1 parameters, not 0"),
        ({"block": 64, "params": [np.int32(1)]}, "has 8 bytes, not 4"),
        ({"block": 64, "params": [0], "grid": 3, "cluster": 2}, "not a multiple of the cluster"),
    ):
        with pytest.raises(ptxsim.SimulationError, match=message):
            module.launch(**{"grid": 1} | launch)
    with pytest.raises(ValueError, match="no checks named sloth"):
        module.launch(grid=1, block=64, params=[0], off=["sloth"])


def test_the_same_seed_gives_the_same_run_and_others_interleave_differently():
    order = np.zeros(65, np.uint32)
    body = """setp.ne.u32 %p1, %l, 0; mov.b32 %r1, 0; mov.u32 %r5, %warpid; mov.b32 %r3, 1;
              LOOP: @%p1 bra SKIP; atom.global.add.u32 %r2, [%q0], 1; mad.wide.u32 %d0, %r2, 4, %q0;
              st.global.b32 [%d0+4], %r5;
              SKIP: add.s32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 16; @%p2 bra LOOP;"""
    runs = []
    for seed in (0, 0, 1, 2, 3):
        order[:] = 0
        kernel(body).launch(grid=1, block=128, params=[order], memory=[order], seed=seed)
        assert order[0] == 64
        runs.append(order.tolist())
    assert runs[0] == runs[1]
    assert len({tuple(r) for r in runs}) == 4
