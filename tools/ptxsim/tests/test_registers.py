"""setmaxnreg: the pool of a CTA, warpgroups that agree, and kernels that need more registers than they have."""

import numpy as np
import ptxsim
import pytest
from ptx import kernel

GROUPS = "setp.lt.u32 %p0, %t, 128;"  # %p0: the first warpgroup


def moves(first, second, threads=256, edit="", **options):
    """Two warpgroups, each with its own instructions; 256 registers a thread when they start."""
    body = f"{edit} {GROUPS} @!%p0 bra SECOND; {first} bra DONE; SECOND: {second} DONE:"
    return kernel(body, 0).launch(grid=1, block=threads, params=[], **options)


def set_to(way, count):
    return f"setmaxnreg.{way}.sync.aligned.u32 {count};"


LOOP = "mov.b32 %r0, 0; LOOP: add.s32 %r0, %r0, 1; setp.lt.u32 %p3, %r0, 300; @%p3 bra LOOP;"


@pytest.mark.parametrize("seed", range(4))
def test_one_warpgroup_gets_what_another_gives(seed):
    moves(LOOP + set_to("dec", 40), set_to("inc", 216), registers=128, seed=seed)
    moves(set_to("dec", 128) + "bar.sync 1, 128;" + set_to("inc", 128), set_to("dec", 256), seed=seed)


def test_registers_at_the_start_are_what_there_are_or_what_is_said():
    for threads, most in ((128, 256), (256, 256), (288, 224), (384, 168), (512, 128), (1024, 64)):
        kernel(set_to("dec", most), 0).launch(grid=1, block=threads, params=[])
        if most < 256:
            with pytest.raises(
                ptxsim.SimulationError, match=f"^registers: setmaxnreg.dec to {most + 8}, .* has {most}\n"
            ):
                kernel(set_to("dec", most + 8), 0).launch(grid=1, block=threads, params=[])
    with pytest.raises(ptxsim.SimulationError, match=r"^registers: setmaxnreg.dec to 104, but the warp has 96"):
        kernel(set_to("dec", 104), 0).launch(grid=1, block=128, params=[], registers=90)
    with pytest.raises(
        ptxsim.SimulationError, match=r"^registers: 136 for each of 512 threads are more than there are"
    ):
        kernel(set_to("dec", 104), 0).launch(grid=1, block=512, params=[], registers=136)


@pytest.mark.parametrize("directives, has", [(".maxnreg 80", 80), (".minnctapersm 4", 128), (".maxnreg 64", 64)])
def test_directives_say_how_many_registers_there_are(directives, has):
    text = f""".version 9.0\n.target sm_90a\n.address_size 64
      .visible .entry k() {directives} {{ {set_to("inc", has - 8)} ret; }}"""
    with pytest.raises(
        ptxsim.SimulationError, match=f"^registers: setmaxnreg.inc to {has - 8}, but the warp has {has}"
    ):
        ptxsim.load(text).launch(grid=1, block=128, params=[], registers=96 if ".maxnreg" in directives else 0)


ENDS = r"^registers: (the warp ends without setmaxnreg|warp \d of the warpgroup has ended without this)"
WRONG = [  # instructions of the first and of the second warpgroup, message
    (set_to("inc", 120), "", "^registers: setmaxnreg.inc to 120, but the warp has 128"),
    (set_to("dec", 136), "", "^registers: setmaxnreg.dec to 136, but the warp has 128"),
    (set_to("inc", 136), "", r"^deadlock: (.*\n)*.*waits for 136 registers a thread, of which the .* must hold 8 more"),
    (set_to("dec", 64), set_to("inc", 200), r"^deadlock: (.*\n)*.*waits for 200 registers"),
    (f"@%p2 bra OTHER; {set_to('dec', 64)} bra DONE; OTHER: {set_to('dec', 56)}", "",
     "^registers: another warp of the warpgroup has executed setmaxnreg.dec"),
    (f"@%p2 bra DONE; {set_to('dec', 64)}", "", ENDS),
    (f"@%p2 bra DONE; {set_to('dec', 64)} {LOOP}", "", ENDS),
]  # fmt: skip


@pytest.mark.parametrize("first, second, message", WRONG, ids=range(len(WRONG)))
def test_wrong_moves_of_registers_are_stopped(first, second, message):
    for seed in range(4):
        with pytest.raises(ptxsim.SimulationError, match=message):
            moves(first, second, registers=128, edit="setp.ge.u32 %p2, %t, 96;", seed=seed)


def test_moves_of_registers_may_be_left_unchecked():
    moves(set_to("inc", 136), "", registers=128, off=["registers"])


def test_warps_of_a_warpgroup_may_do_the_same_in_branches_of_their_own():
    give = set_to("dec", 64)
    moves(f"@%p2 bra OTHER; {give} bra DONE; OTHER: {give}", "", edit="setp.ge.u32 %p2, %t, 96;")


# ------------------------------------------------------------------------------------- registers that are needed


def within_40(body):
    """Run a warp that has given up all but 40 registers a thread; up to 16 more are no fault."""
    data = np.zeros(1024, np.uint8)
    kernel(f"{set_to('dec', 40)} {body}", 1).launch(grid=1, block=32, params=[data], memory=[data], off=["race"])


def loads(count, bits=32):
    return " ".join(f"ld.global.b{bits} %{'r' if bits == 32 else 'd'}{10 + i}, [%q0+{8 * i}];" for i in range(count))


def stores(count, bits=32, first=10):
    return " ".join(f"st.global.b{bits} [%q0+{8 * i}], %{'r' if bits == 32 else 'd'}{first + i};" for i in range(count))


COPIES = " ".join(f"mov.b32 %r{150 + i}, %r{10 + i};" for i in range(40))
HALVES = " ".join(f"mov.b64 %d{10 + i}, {{%r{10 + 2 * i}, %r{11 + 2 * i}}};" for i in range(20))
CONSTANTS = " ".join(f"mov.b32 %r{10 + i}, {i};" for i in range(100))
FEW = [
    loads(50) + stores(50),
    loads(25, 64) + stores(25, 64),
    loads(100) + stores(10),
    loads(40) + COPIES + stores(40) + stores(40, first=150),
    loads(40) + HALVES + stores(20, 64) + stores(40),
    CONSTANTS + stores(100),
    f"{loads(40)} bra A; B: {stores(40)} bra DONE; A: {stores(40)} {loads(40)} bra B; DONE:",
]
MANY = [
    loads(60) + stores(60),
    loads(30, 64) + stores(30, 64),
    f"{loads(60)} {LOOP} {stores(60)}",
    loads(40) + COPIES + "add.s32 %r150, %r150, 1;" * 40 + stores(40) + " ".join(
        f"add.s32 %r{150 + i}, %r{150 + i}, 1;" for i in range(40)) + stores(40) + stores(40, first=150),
    CONSTANTS + "".join(f"add.s32 %r{10 + i}, %r{10 + i}, %t;" for i in range(100)) + stores(100),
    f"{loads(60)} setp.lt.u32 %p1, %t, 0; @%p1 bra A; bra DONE; A: {stores(60)} DONE:",
]  # fmt: skip


@pytest.mark.parametrize("body", FEW, ids=range(len(FEW)))
def test_values_that_fit_are_not_reported(body):
    within_40(body)


@pytest.mark.parametrize("body", MANY, ids=range(len(MANY)))
def test_more_values_than_registers_are_reported(body):
    with pytest.raises(ptxsim.SimulationError, match=r"^registers: at least \d+ registers .*, but the warp has 40\n"):
        within_40(body)


@pytest.mark.parametrize("accumulates", [False, True])
def test_accumulators_are_needed_before_a_product_that_adds_to_them(accumulates):
    """The product is not reached, but the warp cannot know that between its loads and there."""
    accumulators = "{" + ", ".join(f"%r{10 + i}" for i in range(64)) + "}"
    body = f"""{loads(64)} {stores(64)} setp.ge.u32 %p1, %t, 0; {set_to("dec", 40)} mov.b32 %r1, %t; @%p1 bra DONE;
      {set_to("inc", 128)} mov.b32 %r200, {int(accumulates)}; setp.ne.b32 %p2, %r200, 0;
      wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {accumulators}, %d0, %d1, %p2, 1, 1, 0, 0;
      wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; {stores(64)} DONE:"""
    data = np.zeros(1024, np.uint8)

    def launch():
        kernel(body, 1).launch(grid=1, block=32, params=[data], memory=[data], registers=128, off=["race"])

    if not accumulates:
        return launch()
    with pytest.raises(ptxsim.SimulationError, match=r"^registers: at least \d+ registers .*, but the warp has 40\n"):
        launch()
