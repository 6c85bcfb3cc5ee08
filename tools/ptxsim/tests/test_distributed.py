"""Stores, reductions and copies into another CTA's shared memory, which complete on its mbarrier; bulk reductions."""

import numpy as np
import ptxsim
import pytest
from ptx import HEADER, REDUCTIONS, aligned, kernel, random_bits

ml_dtypes = pytest.importorskip("ml_dtypes")
INTEGERS = {"u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64}
FLOATS = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
NUMPY = INTEGERS | FLOATS
BETWEEN_CTAS = [
    *(("add", t) for t in ("u32", "s32", "u64")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32")),
    ("inc", "u32"),
    ("dec", "u32"),
    *((op, "b32") for op in ("and", "or", "xor")),
]
TO_GLOBAL = [
    *(("add", t) for t in ("u32", "s32", "u64", "f32", "f64", "f16", "bf16")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16", "bf16")),
    ("inc", "u32"),
    ("dec", "u32"),
    *((op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")),
]
ASYNC = "async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"


def exchange(send, sources, before, size, copies=1, changes=(), seed=0, cluster=2, **options):
    """What CTA 1 finds in its tile after CTA 0 ran ``send``.

    In CTA 0, %v0, %v1, ... hold a lane's ``sources`` of ``size`` bytes, and its tile holds them as well; the tile of
    CTA 1 begins as ``before``. %r0 is the tile of the CTA itself, %r10 and %r11 are tile and mbarrier of CTA 1.
    """
    sources = aligned(np.ascontiguousarray(sources))
    before, after = aligned(before), aligned(np.zeros_like(before))
    n, width = sources.nbytes // size // 32, 8 * size
    move = "\n".join(f"ld.global.b{width} %v{i}, [%d0+{i * size}];" for i in range(n))
    own = "\n".join(f"st.shared.b{width} [%r1+{i * size}], %v{i};" for i in range(n))
    total = before.nbytes * copies
    body = f"""{HEADER}.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{{
.reg .pred %p<8>; .reg .b32 %r<20>; .reg .b64 %d<20>; .reg .b64 %q<3>; .reg .b{width} %v<{n}>; .reg .b16 %h0;
.shared .align 128 .b8 tile[{before.nbytes}]; .shared .align 8 .b64 bar;
mov.u32 %r2, %tid.x; mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %p0, %r2, 0; setp.ne.u32 %p1, %r3, 1;
mov.u32 %r0, tile; mad.lo.s32 %r1, %r2, {n * size}, %r0; mov.u32 %r4, bar;
ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; ld.param.b64 %q2, [p2]; @%p1 bra FILL; mov.b64 %q0, %q1;
FILL: mad.wide.u32 %d0, %r2, {n * size}, %q0; {move} {own}
@!%p0 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; fence.proxy.async;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r10, %r0, {cluster - 1}; mapa.shared::cluster.u32 %r11, %r4, {cluster - 1};
@!%p1 bra RECEIVE;
{send}
bra DONE;
RECEIVE:
@!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], {total};
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra WAIT;
mad.wide.u32 %d1, %r2, {n * size}, %q2;
{"".join(f"ld.shared.b{width} %v{i}, [%r1+{i * size}]; st.global.b{width} [%d1+{i * size}], %v{i};" for i in range(n))}
DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ret;
}}"""
    for old, new in changes:
        assert old in body
        body = body.replace(old, new)
    arrays = [sources, before, after]
    ptxsim.load(body).launch(
        grid=cluster, block=32, cluster=cluster, params=arrays, memory=arrays, seed=seed, **options
    )
    return after


def operands(op, type_):
    """Two operands: random bits with corners, for inc and dec also bounds that the values reach."""
    x, y = random_bits(NUMPY[type_], 1), random_bits(NUMPY[type_], 2)
    if op in ("inc", "dec"):
        y[:8], x[:8] = 5, [0, 4, 5, 6, 1, 5, 7, 3]
    return x, y


def reduced(op, x, y):
    with np.errstate(all="ignore"):
        return REDUCTIONS[op](x, y).astype(x.dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize(
    "vector, type_", [("", "b32"), ("", "u64"), (".v2", "s32"), (".v4", "f32"), (".v2", "b64"), (".v4", "f64")]
)
def test_st_async_stores_and_counts_its_bytes(vector, type_, generic, seed):
    n, size = int(vector[2:] or 1), np.dtype(NUMPY[type_]).itemsize
    source = random_bits(f"u{size}", 1)
    source = np.stack([source + i for i in range(n)], 1)
    data = ", ".join(f"%v{i}" for i in range(n))
    data = f"{{{data}}}" if n > 1 else data
    place, bar, space = "%r12", "%r11", ".shared::cluster"
    convert = ""
    if generic:
        place, bar, space = "%d12", "%d11", ""
        convert = (
            "cvt.u64.u32 %d10, %r12; cvta.shared.u64 %d12, %d10; cvt.u64.u32 %d10, %r11; cvta.shared.u64 %d11, %d10;"
        )
    send = f"""mad.lo.s32 %r12, %r2, {n * size}, %r10; {convert}
               st.async.weak{space}.mbarrier::complete_tx::bytes{vector}.{type_} [{place}], {data}, [{bar}];"""
    got = exchange(send, source, np.zeros_like(source), size, seed=seed)
    np.testing.assert_array_equal(got, source)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("op, type_", BETWEEN_CTAS)
def test_red_async_against_its_formula(op, type_, seed):
    x, y = operands(op, type_)
    size = x.itemsize
    send = f"mad.lo.s32 %r12, %r2, {size}, %r10; red.{ASYNC}.{op}.{type_} [%r12], %v0, [%r11];"
    np.testing.assert_array_equal(exchange(send, y, x, size, seed=seed), reduced(op, x, y))


@pytest.mark.parametrize("seed", range(3))
def test_lanes_that_reduce_into_one_place_do_not_race(seed):
    y = np.arange(32, dtype=np.uint32)
    got = exchange(f"red.{ASYNC}.add.u32 [%r10], %v0, [%r11];", y, np.zeros(32, np.uint32), 4, seed=seed)
    assert got[0] == y.sum()


BULK = "async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("op, type_", [("", ""), *BETWEEN_CTAS])
def test_bulk_copies_and_reductions_between_ctas(op, type_, seed):
    x, y = operands(op or "or", type_ or "b32")
    name = f"cp.reduce.{BULK}.{op}.{type_}" if op else f"cp.{BULK}"
    send = f"@!%p0 {name} [%r10], [%r0], {x.nbytes}, [%r11];"
    want = reduced(op, x, y) if op else y
    np.testing.assert_array_equal(exchange(send, y, x, x.itemsize, seed=seed), want)


def to_global(name, x, y, more="", setup=""):
    """Element-wise operation of shared y on global x by a bulk operation."""
    x, y = aligned(x), aligned(y)
    body = f"""setp.ne.u32 %p0, %t, 0; {setup} mov.u32 %r0, tile; cvt.u64.u32 %d0, %t; add.s64 %d1, %d0, %q1;
      add.s32 %r1, %r0, %t; ld.global.b8 %h0, [%d1]; st.shared.b8 [%r1], %h0; fence.proxy.async; bar.sync 0;
      @!%p0 {name} [%q0], [%r0], {x.nbytes}{more}; @!%p0 cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    module = kernel(body, 2, f".shared .align 128 .b8 tile[{x.nbytes}];")
    module.launch(grid=1, block=x.nbytes, params=[x, y], memory=[x, y])
    return x


@pytest.mark.parametrize("op, type_", TO_GLOBAL)
def test_bulk_reductions_to_global_memory(op, type_):
    if type_ in FLOATS:
        rng = np.random.default_rng(0)
        tiny = np.finfo(np.float32).tiny if type_ != "f16" else 6e-5
        values = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, tiny, tiny / 4, -tiny / 4, 3e38, 6e4]
        with np.errstate(all="ignore"):
            x, y = (
                np.concatenate([rng.choice(values, 16), rng.normal(0, 3, 16)]).astype(NUMPY[type_]) for _ in range(2)
            )
    else:
        x, y = operands(op, type_)
    noftz = ".noftz" if op == "add" and type_ in ("f16", "bf16") else ""
    got = to_global(f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}{noftz}.{type_}", x, y)
    if type_ == "f32":  # the one addition that flushes subnormals
        flush = lambda v: np.where(np.abs(v) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), v), v)  # noqa: E731
        with np.errstate(all="ignore"):
            want = flush(flush(x) + flush(y))
    elif type_ in FLOATS and op != "add":  # a number wins over NaN
        want = (np.fmin if op == "min" else np.fmax)(x, y)
    else:
        want = reduced(op, x, y)
    same = (got == want) | (np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64)))
    assert same.all()


def test_a_byte_mask_chooses_what_a_bulk_copy_writes():
    x, y = np.zeros(64, np.uint8), np.arange(1, 65, dtype=np.uint8)
    got = to_global("cp.async.bulk.global.shared::cta.bulk_group.cp_mask", x, y, ", %h1", "mov.b16 %h1, 0x8421;")
    np.testing.assert_array_equal(got, np.where(0x8421 >> np.arange(64) % 16 & 1, y, 0))


STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r12], %v0, [%r11];"
PLACE = "mad.lo.s32 %r12, %r2, 4, %r10; "
REDUCE = f"@!%p0 cp.reduce.{BULK}.add.u32 [%r10], [%r0], 128, [%r11];"
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra WAIT;"
PUBLISHED = "fence.mbarrier_init.release.cluster; fence.proxy.async;\nbarrier.cluster.arrive.aligned;"


@pytest.mark.parametrize(
    "send, changes, check, message",
    [
        (PLACE + STORE.replace("%r11", "%r4"), [], "mbarrier", "lie in different CTAs"),
        (f"red.{ASYNC}.add.u32 [%r0], %v0, [%r4];", [], "shared_bounds", "own shared memory"),
        (f"@!%p0 cp.{BULK} [%r0], [%r0], 128, [%r4];", [], "shared_bounds", "the CTA's own"),
        (PLACE + STORE, [(WAIT, "")], "async_early", "result that was not waited for, of the mbarrier"),
        (PLACE + STORE, [(PUBLISHED, "barrier.cluster.arrive.relaxed.aligned;")], "mbarrier", "not ordered before"),
        (REDUCE, [("fence.proxy.async;", "")], "proxy_fence", "without fence.proxy.async"),
    ],
)  # fmt: skip
def test_wrong_remote_operations_are_stopped(send, changes, check, message):
    y = np.arange(32, dtype=np.uint32)
    with pytest.raises(ptxsim.SimulationError, match=message) as stopped:
        exchange(send, y, y, 4, changes=changes)
    assert str(stopped.value).startswith(check)


def test_asynchronous_stores_need_a_cluster():
    y = np.arange(32, dtype=np.uint32)
    with pytest.raises(ptxsim.SimulationError, match="need a cluster of more than one CTA"):
        exchange(PLACE + STORE, y, y, 4, cluster=1)


@pytest.mark.parametrize(
    "line, message",
    [
        ("st.async.release.gpu.global.b32 [%q0], %r1;", "not modelled"),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b16 [%r0], %h0, [%r1];", "type .b16"),
        (f"red.{ASYNC}.add.s64 [%r0], %d0, [%r1];", "no such reduction of type .s64"),
        (f"red.{ASYNC}.min.u64 [%r0], %d0, [%r1];", "no such reduction of type .u64"),
        (f"cp.reduce.{BULK}.and.b64 [%r0], [%r1], 16, [%r2];", "no such reduction of type .b64"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%q0], [%r0], 16;", "need `.noftz`"),
    ],
)
def test_forms_that_the_isa_does_not_have_are_refused(line, message):
    with pytest.raises(ptxsim.SimulationError, match=message):
        kernel(line).launch(grid=1, block=32, params=[0])
