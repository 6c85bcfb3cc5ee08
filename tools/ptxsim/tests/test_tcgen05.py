"""tcgen05: tensor memory's fragments and matrix products against NumPy, and the checks of tensor memory."""

import numpy as np
import ptxsim
import pytest
from operands import container_bytes, elements_of_16_bytes, random_matrix, shared_image
from ptx import kernel
from tcgen05 import (
    ALLOC,
    CODES,
    FREE,
    QUARTER,
    SHARED,
    WAIT,
    change,
    cluster_sync,
    commit,
    copy_to_shared,
    descriptor,
    places,
    vector,
)

LANE = np.arange(32)

SHAPES = {  # lane and column of thread t's register r, from the figures of the PTX ISA; registers of .x1
    "32x32b": (lambda t, r: (t, r + 0 * t), 1),
    "16x64b": (lambda t, r: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r), 1),
    "16x128b": (lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)), 2),
    "16x256b": (lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)), 4),
    "16x32bx2": (lambda t, r: (t % 16, r + 0 * t), 1),  # lanes 16 and up: HALF columns further on
}
HALF = 64


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_loads_and_stores_follow_their_fragments(shape, count, packed):
    """Stores through one shape and loads back through 32x32b; then the other way round."""
    place, per = SHAPES[shape]
    n = count * per
    registers = np.arange(n)[:, None]
    lane, column = np.broadcast_arrays(*place(LANE[None, :], registers))
    column = column * (2 if packed else 1)
    half = ""
    if shape == "16x32bx2":
        half = f", {HALF}"
        column = column + LANE // 16 * HALF
    if column.max() + packed >= 128:
        pytest.skip("more columns than the test stores")
    given = np.random.default_rng(0).integers(0, 1 << 32, (4, n, 32)).astype(np.uint32)
    plain = np.zeros((4, 128, 32), np.uint32)
    back = np.zeros_like(given)
    pack, unpack = (".pack::16b", ".unpack::16b") if packed else ("", "")
    modifier = f"{shape}.x{count}"
    body = f"""{ALLOC.format(1)} bar.sync 0; ld.shared.b32 %r1, [held]; {QUARTER}
      shr.u32 %r4, %t, 5; mad.lo.s32 %r5, %r4, {n}, 0; mad.lo.s32 %r5, %r5, 32, %l; mad.wide.u32 %d0, %r5, 4, %q0;
      mad.wide.u32 %d2, %r5, 4, %q2;
      mad.lo.s32 %r6, %r4, 128, 0; mad.lo.s32 %r6, %r6, 32, %l; mad.wide.u32 %d1, %r6, 4, %q1;
      {" ".join(f"mov.b32 %r{100 + i}, 0;" for i in range(128))}
      tcgen05.st.sync.aligned.32x32b.x128.b32 [%r3], {vector(100, 128)}; tcgen05.wait::st.sync.aligned;
      {" ".join(f"ld.global.b32 %r{20 + i}, [%d0+{128 * i}];" for i in range(n))}
      tcgen05.st.sync.aligned.{modifier}{unpack}.b32 [%r3]{half}, {vector(20, n)}; tcgen05.wait::st.sync.aligned;
      tcgen05.ld.sync.aligned.32x32b.x128.b32 {vector(100, 128)}, [%r3];
      tcgen05.ld.sync.aligned.{modifier}{pack}.b32 {vector(20, n)}, [%r3]{half}; tcgen05.wait::ld.sync.aligned;
      {" ".join(f"st.global.b32 [%d1+{128 * i}], %r{100 + i};" for i in range(128))}
      {" ".join(f"st.global.b32 [%d2+{128 * i}], %r{20 + i};" for i in range(n))}
      {FREE.format(1)}"""
    arrays = [given, plain, back]
    for seed in range(2):
        kernel(body, 3, SHARED).launch(grid=1, block=128, params=arrays, memory=arrays, seed=seed)
        want = np.zeros((4, 128, 32), np.uint32)  # [warp, column, lane]
        if packed:
            want[:, column, lane] = given & 0xFFFF
            want[:, column + 1, lane] = given >> 16
        else:
            want[:, column, lane] = given
        np.testing.assert_array_equal(plain, want)
        np.testing.assert_array_equal(back, given)


KINDS = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "u8": "i8", "s8": "i8"}
FLOATS = ["f16", "bf16", "tf32"]
BYTES = ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]  # in any combination, of kind f8f6f4


def product(
    m=128, n=64, name="bf16", swizzle=3, ctas=1, a_mn=False, b_mn=False, a_tensor=False, half=False, accumulate=True,
    disabled=0, scale=0, edit=lambda body: body, negate=False, name_b=None, ws=False, ashift=False, saturate=False,
    collector="", **options,
):  # fmt: skip
    """One tcgen05.mma on random operands: (D as tensor memory holds it [ctas, 128 lanes, n], D wanted there).

    ashift: one product that shifts A, then another of the same operands.
    """
    name_b = name_b or name
    k = 2 * elements_of_16_bytes(name)
    a, _ = random_matrix(m, k, name, 1)
    b, _ = random_matrix(n, k, name_b, 2)
    integer = KINDS.get(name) == "i8"
    if integer:
        c = np.random.default_rng(3).choice([-(2**31), 2**31 - 1, 0, 12345], (ctas, 128, n)).astype(np.int32)
    else:
        c = np.random.default_rng(3).normal(size=(ctas, 128, n)).astype(np.float32)
    if half:
        c = c.astype(np.float16).astype(np.float32)
    rows, columns = m // ctas, n // ctas
    folded = ws or ctas == 2
    images = []
    for rank in range(ctas):
        part_a, part_b = a[rank * rows : (rank + 1) * rows], b[rank * columns : (rank + 1) * columns]
        a_image, *a_offsets = shared_image(part_a, name, swizzle, a_mn)
        b_image, *b_offsets = shared_image(part_b, name_b, swizzle, b_mn)
        images.append(np.concatenate([a_image, b_image]))
    image = np.stack(images)
    lane, column = places(rows, n, folded)
    a_lanes = np.zeros((ctas, 128, 8), np.uint32)
    for rank in range(ctas):
        words = container_bytes(a[rank * rows : (rank + 1) * rows], name).view(np.uint32)
        for i in range(n):
            a_lanes[rank, lane[:, i]] = words  # where the lanes of D that need it are
    held = c.astype(np.float16).view(np.uint16).astype(np.uint32) if half else c.view(np.uint32)
    d = np.ascontiguousarray(held.copy())
    arrays = [image, d, a_lanes]
    idesc = (2 if integer else 0 if half else 1) << 4 | CODES[name] << 7 | CODES[name_b] << 10 | negate << 13
    idesc |= saturate << 3 | a_mn << 15 | b_mn << 16 | n // 8 << 17 | m // 16 << 24
    mask = "" if ws else "{" + ", ".join(["%r250"] * (4 * ctas)) + "},"
    size = image.shape[1]
    sync = cluster_sync(ctas)
    step = min(n & -n, 128)

    def mma(forms, flag):
        return f"""tcgen05.mma{".ws" if ws else ""}.cta_group::{ctas}.kind::{KINDS.get(name, "f8f6f4")}{forms} [%r1],
        {"[%r252]" if a_tensor else "%d4"}, %d5, %r251, {mask} {flag}{f", {scale}" if scale else ""};"""

    body = f"""
      {ALLOC.format(ctas)} setp.ne.u32 %p0, %t, 0; @!%p0 mbarrier.init.shared.b64 [bar], 1;
      fence.mbarrier_init.release.cluster;
      {copy_to_shared(size)}
      bar.sync 0; ld.shared.b32 %r1, [held]; {QUARTER}
      mad.lo.s32 %r16, %r10, 128, %t; mad.lo.s32 %r17, %r16, {4 * n}, 0; cvt.u64.u32 %d1, %r17; add.s64 %d1, %d1, %q1;
      mad.lo.s32 %r18, %r16, 32, 0; cvt.u64.u32 %d2, %r18; add.s64 %d2, %d2, %q2;
      {
        " ".join(
            " ".join(f"ld.global.b32 %r{30 + i}, [%d1+{4 * (at + i)}];" for i in range(step))
            + f"tcgen05.st.sync.aligned.32x32b.x{step}.b32 [%r3{f'+{at}' if at else ''}], {vector(30, step)};"
            for at in range(0, n, step)
        )
    }
      {" ".join(f"ld.global.b32 %r{20 + i}, [%d2+{4 * i}];" for i in range(8))}
      tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3+256], {vector(20, 8)};
      tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; {sync} tcgen05.fence::after_thread_sync;
      setp.ne.or.u32 %p2, %r10, 0, %p0; @%p2 bra WAIT;
      and.b32 %r19, %r11, 0xffffff; shr.u32 %r19, %r19, 4; cvt.u64.u32 %d3, %r19;
      or.b64 %d4, %d3, {descriptor(*a_offsets, swizzle)};
      add.s64 %d3, %d3, {len(a_image) // 16}; or.b64 %d5, %d3, {descriptor(*b_offsets, swizzle)};
      mov.b32 %r250, {disabled}; setp.eq.u32 %p3, %r10, {0 if accumulate else 7}; mov.b16 %h0, 3;
      mov.b32 %r251, {idesc}; setp.eq.u32 %p8, %r10, %r10;
      add.s32 %r252, %r1, 256; {mma(".ashift", "%p3") if ashift else ""} {mma(collector, "%p8" if ashift else "%p3")}
      {commit(ctas)} {WAIT} tcgen05.fence::after_thread_sync;
      {
        " ".join(
            f"tcgen05.ld.sync.aligned.32x32b.x{step}.b32 {vector(30, step)}, [%r3+{at}]; tcgen05.wait::ld.sync.aligned;"
            + " ".join(f"st.global.b32 [%d1+{4 * (at + i)}], %r{30 + i};" for i in range(step))
            for at in range(0, n, step)
        )
    }
      {FREE.format(ctas)} {sync}"""
    shared = f".shared .align 1024 .b8 tile[{size}]; {SHARED}"
    module = kernel(edit(body), 3, shared)
    module.launch(grid=ctas, block=128, cluster=ctas, params=arrays, memory=arrays, **options)
    got = d.astype(np.uint16).view(np.float16).astype(np.float32) if half else d.view(c.dtype)
    want = c.astype(np.int64) if integer else c.copy()
    exact = np.int64 if integer else np.float32
    row = np.arange(m)
    below = np.minimum(row + 1, row | 31)  # A shifted: of 32 rows the last one stays
    for factor in [a, a[below]] if ashift else [a]:
        value = (-factor if negate else factor).astype(exact) @ b.T.astype(exact)
        for rank in range(ctas):
            old = want[rank, lane, column] * 2.0**-scale if scale else want[rank, lane, column]
            new = value[rank * rows : (rank + 1) * rows] + (old if accumulate or factor is not a else 0)
            want[rank, lane, column] = np.where(disabled >> lane % 32 & 1, want[rank, lane, column], new)
    if integer:
        want = (np.clip(want, -(2**31), 2**31 - 1) if saturate else want).astype(np.int32)
    return got, want


@pytest.mark.parametrize("swizzle", range(4))
@pytest.mark.parametrize("name", [*FLOATS, *BYTES])
def test_mma_of_every_type_and_swizzle(name, swizzle):
    np.testing.assert_allclose(*product(name=name, swizzle=swizzle), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("swizzle", range(4))
@pytest.mark.parametrize("a_mn, b_mn", [(True, False), (False, True), (True, True)])
def test_mma_with_mn_major_operands(a_mn, b_mn, swizzle):
    np.testing.assert_allclose(*product(swizzle=swizzle, a_mn=a_mn, b_mn=b_mn), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("swizzle", [0, 3])
@pytest.mark.parametrize("b_mn", [False, True])
@pytest.mark.parametrize("name, name_b", [(a, b) for a in BYTES for b in BYTES if a != b])
def test_mma_of_mixed_types(name, name_b, b_mn, swizzle):
    options = {"a_mn": not b_mn, "half": b_mn} if swizzle else {"a_tensor": True}
    got, want = product(name=name, name_b=name_b, b_mn=b_mn, swizzle=swizzle, **options)
    tolerance = 4e-3 if options.get("half") else 1e-5
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * 30)


@pytest.mark.parametrize("ctas, m", [(1, 64), (1, 128), (2, 128), (2, 256)])
@pytest.mark.parametrize("a_tensor", [False, True])
@pytest.mark.parametrize("name", ["bf16", "e2m3", "e2m1"])
@pytest.mark.parametrize("seed", range(3))
def test_mma_places_rows_as_its_layout_says(ctas, m, a_tensor, name, seed):
    got, want = product(m=m, ctas=ctas, a_tensor=a_tensor, name=name, seed=seed)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": False},
        {"disabled": 0x0F0F00FF},
        {"scale": 3},
        {"negate": True},
        {"half": True, "name": "f16"},
        {"n": 16},
        {"collector": ".collector::a::fill"},
    ],
    ids=str,
)
def test_mma_obeys_its_options(options):
    got, want = product(**options)
    tolerance = 4e-3 if "half" in options else 1e-5
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


WIDTHS = [(1, 64, n) for n in (8, 24, 248)] + [(1, 128, n) for n in (8, 40, 200, 256)]
WIDTHS += [(2, 128, n) for n in (16, 48, 256)] + [(2, 256, n) for n in (16, 80, 208)]


@pytest.mark.parametrize("ctas, m, n", WIDTHS)
@pytest.mark.parametrize("name", ["f16", "tf32", "e4m3"])
def test_mma_of_every_step_of_n(ctas, m, n, name):
    np.testing.assert_allclose(*product(m=m, n=n, ctas=ctas, name=name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize("m", [32, 64, 128])
@pytest.mark.parametrize("options", [{}, {"a_tensor": True}, {"name": "e4m3", "name_b": "e2m1", "b_mn": True},
                                     {"name": "f16", "half": True, "a_mn": True}, {"name": "tf32", "accumulate": False},
                                     {"collector": ".collector::b2::lastuse"}], ids=str)  # fmt: skip
def test_weight_stationary_mma(m, n, options):
    got, want = product(m=m, n=n, ws=True, **options)
    tolerance = 4e-3 if "half" in options else 1e-5
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("ctas, m", [(1, 128), (2, 128), (2, 256)])
@pytest.mark.parametrize("name", ["bf16", "tf32", "e2m3", "s8"])
@pytest.mark.parametrize("collector", ["", ".collector::a::lastuse"])
def test_ashift_leaves_a_shifted_behind(ctas, m, name, collector):
    got, want = product(m=m, ctas=ctas, name=name, a_tensor=True, ashift=True, collector=collector)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


INTEGERS = [
    {"swizzle": 0},
    {},
    {"m": 64, "n": 24},
    {"a_tensor": True, "n": 48},
    {"a_mn": True, "b_mn": True},
    {"m": 256, "ctas": 2, "n": 96},
    {"m": 128, "ctas": 2, "a_tensor": True},
    {"m": 32, "n": 128, "ws": True},
    {"accumulate": False, "disabled": 0xF0},
]


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("name, name_b", [(a, b) for a in ("u8", "s8") for b in ("u8", "s8")])
@pytest.mark.parametrize("options", INTEGERS, ids=str)
def test_mma_of_integers(name, name_b, options, saturate):
    np.testing.assert_array_equal(*product(name=name, name_b=name_b, saturate=saturate, **options))


UNCHANGED = change("")
REFUSED = [  # options, edit of the text, message
    ({"ws": True}, change(" %p3;", " %p3, %d3;"), "zero-column masks are not modelled"),
    ({"ws": True}, change("mma.ws.cta_group::1", "mma.ws.cta_group::2"), "weight stationary over two CTAs"),
    ({"ws": True, "collector": ".collector::a::fill"}, UNCHANGED, "unknown modifier `.collector::a::fill`"),
    ({"ws": True, "n": 32}, UNCHANGED, "^descriptor: .*: N\n"),
    ({"ws": True, "m": 128, "n": 64}, change("mov.b32 %r251, ", f"mov.b32 %r251, {16 << 24}; xor.b32 %r251, %r251, "),
     "^descriptor: .*: M\n"),
    ({"collector": ".collector::b0::fill"}, UNCHANGED, "unknown modifier `.collector::b0::fill`"),
    ({"collector": ".ashift"}, UNCHANGED, "not in tensor memory"),
    ({"a_tensor": True, "collector": ".ashift.collector::a::use"}, UNCHANGED, ".ashift and the collector buffer"),
    ({"a_tensor": True, "collector": ".ashift", "m": 64}, UNCHANGED, "^descriptor: .*: M below 128 with .ashift"),
    ({"name": "s8", "negate": True}, UNCHANGED, "^descriptor: .*: integers cannot be negated"),
    ({"name": "s8", "n": 40}, UNCHANGED, "^descriptor: .*: N\n"),
    ({"name": "s8", "n": 16, "m": 256, "ctas": 2}, UNCHANGED, "^descriptor: .*: N\n"),
    ({"name": "s8"}, change("mov.b32 %r251, ", "mov.b32 %r251, 32; xor.b32 %r251, %r251, "), "accumulator type"),
    ({"name": "bf16", "saturate": True}, UNCHANGED, "^descriptor: .*: .*saturation of integers is set"),
    ({"n": 8, "ctas": 2}, UNCHANGED, "^descriptor: .*: N\n"),
    ({"name": "e4m3", "n": 8, "b_mn": True}, UNCHANGED, "^descriptor: .*: N\n"),
    ({}, change("tcgen05.mma.", "tcgen05.mma.sp."), "unknown modifier `.sp`"),
]  # fmt: skip


@pytest.mark.parametrize("options, edit, message", REFUSED, ids=range(len(REFUSED)))
def test_products_that_do_not_exist_are_refused(options, edit, message):
    with pytest.raises(ptxsim.SimulationError, match=message):
        product(edit=edit, **options)


WRONG = [
    ("tensor_leak", change(FREE.format(1)), "512 columns of tensor memory allocated at column 0"),
    ("tensor_bounds", change("[%r3], {%r30", "[%r3+496], {%r30"), "columns 496 to 5|column"),
    ("tensor_bounds", change(QUARTER, "mov.u32 %r3, %r1;"), "reaches lanes .* only"),
    ("uninitialized", change("x64.b32 [%r3], {%r30", "x64.b32 [%r3+64], {%r30"), "tensor address"),
    ("async_early", change("tcgen05.wait::st.sync.aligned;"), "of tcgen05.st of warp"),
    ("async_early", change(WAIT, "WAIT:"), "of tcgen05 operations of warp 0|of tcgen05.ld"),
    ("proxy_fence", change("fence.proxy.async;"), "without fence.proxy.async"),
    ("descriptor", change("mov.b32 %r251, ", "mov.b32 %r251, 64; or.b32 %r251, %r251, "), "reserved bits"),
    ("descriptor", change("mov.b32 %r251, ", "mov.b32 %r251, 1; or.b32 %r251, %r251, "), "sparse"),
    ("descriptor", change("mov.b32 %r251, ", "mov.b32 %r251, 4; or.b32 %r251, %r251, "), "sparse"),
    ("descriptor", change("mov.b32 %r251, ", "mov.b32 %r251, 256; or.b32 %r251, %r251, "), "element type"),
    ("descriptor", change("mov.b32 %r251, ", "mov.b32 %r251, 32; or.b32 %r251, %r251, "), "accumulator type"),
    ("descriptor", change("or.b64 %d4, %d3, ", f"or.b64 %d4, %d3, {1 << 61}; or.b64 %d4, %d4, "), "swizzle mode"),
    ("descriptor", change("mov.b32 %r251, ", "mov.b32 %r251, 8; or.b32 %r251, %r251, "), "saturation of integers"),
    ("deadlock", change(commit(1)), "1 of 1 arrivals"),
]  # fmt: skip


@pytest.mark.parametrize("check, edit, message", WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_wrong_uses_of_tensor_memory_are_stopped(check, edit, message):
    for seed in range(3):
        with pytest.raises(ptxsim.SimulationError, match=message) as stopped:
            product(edit=edit, seed=seed)
        assert str(stopped.value).startswith(f"{check}: ")
