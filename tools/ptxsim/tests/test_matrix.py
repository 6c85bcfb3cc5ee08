"""ldmatrix, stmatrix, movmatrix and wgmma: the fragments of the PTX ISA against matrix products in NumPy."""

import numpy as np
import operands
import ptxsim
import pytest
from operands import TYPES, random_matrix, shared_image
from ptx import kernel, lanes

LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix_distribute_8x8_matrices(count, transposed):
    source = np.arange(count * 64, dtype=np.uint16)
    loaded = np.zeros((count, 32, 2), np.uint16)
    stored = np.zeros_like(source)
    trans = ".trans" if transposed else ""
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    out = "\n".join(f"st.global.b32 [%d1+{128 * i}], %r{10 + i};" for i in range(count))
    body = f"""
      mov.u32 %r0, tile; mad.lo.s32 %r1, %t, 16, %r0; mad.wide.u32 %d0, %t, 16, %q0; mad.wide.u32 %d1, %t, 4, %q1;
      setp.lt.u32 %p0, %t, {8 * count};
      @%p0 ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d0]; @%p0 st.shared.v4.b32 [%r1], {{%r2, %r3, %r4, %r5}};
      ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r1];
      {out}
      stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [%r1+1024], {{{registers}}};
      mad.wide.u32 %d2, %t, 16, %q2;
      @%p0 ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r1+1024]; @%p0 st.global.v4.b32 [%d2], {{%r2, %r3, %r4, %r5}};"""
    arrays = [source, loaded, stored]
    kernel(body, 3, ".shared .align 16 .b8 tile[2048];").launch(grid=1, block=32, params=arrays, memory=arrays)
    matrices = source.reshape(count, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    for e in range(2):
        np.testing.assert_array_equal(loaded[:, LANE, e], matrices[:, GROUP, 2 * THREAD + e])
    np.testing.assert_array_equal(stored.reshape(count, 8, 8), matrices)


def test_movmatrix_transposes():
    source = np.arange(64, dtype=np.uint16)
    result = np.zeros_like(source)
    body = """mad.wide.u32 %d0, %t, 4, %q0; mad.wide.u32 %d1, %t, 4, %q1; ld.global.b32 %r0, [%d0];
              movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0; st.global.b32 [%d1], %r1;"""
    kernel(body, 2).launch(grid=1, block=32, params=[source, result], memory=[source, result])
    np.testing.assert_array_equal(result.reshape(8, 8), source.reshape(8, 8).T)


def copy_of_shared(arrays, text, words):
    """Runs ``text`` over a tile that holds arrays[0], and stores its first ``words`` words into arrays[-1]."""
    body = f"""
      mad.wide.u32 %d0, %t, 64, %q0; mov.u32 %r0, tile; mad.lo.s32 %r1, %t, 64, %r0; setp.lt.u32 %p0, %t, {words // 16};
      {" ".join(f"@%p0 ld.global.b32 %r2, [%d0+{4 * i}]; @%p0 st.shared.b32 [%r1+{4 * i}], %r2;" for i in range(16))}
      bar.warp.sync -1; mad.wide.u32 %d1, %t, 4, %q1; mad.lo.s32 %r9, %t, 16, %r0;
      {text}
      bar.warp.sync -1; mad.wide.u32 %d2, %t, 64, %q{len(arrays) - 1};
      {" ".join(f"@%p0 ld.shared.b32 %r2, [%r1+{4 * i}]; @%p0 st.global.b32 [%d2+{4 * i}], %r2;" for i in range(16))}
    """
    kernel(body, len(arrays), ".shared .align 16 .b8 tile[1024];").launch(
        grid=1, block=32, params=arrays, memory=arrays
    )


def packed_rows(elements, bits) -> np.ndarray:
    """[rows, 16] elements of a few bits, in rows of 16 bytes that padding of ones fills up."""
    rows = np.unpackbits(elements[..., None], -1, bitorder="little")[..., :bits].reshape(len(elements), -1)
    padding = np.ones((len(elements), 128 - rows.shape[1]), np.uint8)
    return np.packbits(np.concatenate([rows, padding], -1), -1, "little")


@pytest.mark.parametrize(
    "shape, count, type_, bits",
    [
        *[("m16n16", count, *type_) for count in (1, 2) for type_ in (("b8", 8), ("b8x16.b6x16_p32", 6))],
        ("m16n16", 2, "b8x16.b4x16_p64", 4),
        *[
            ("m8n16", count, *type_)
            for count in (1, 2, 4)
            for type_ in (("b8x16.b6x16_p32", 6), ("b8x16.b4x16_p64", 4))
        ],
    ],
)
def test_ldmatrix_distributes_bytes(shape, count, type_, bits):
    """A lane of an 8x16 matrix has four neighbours of a row in a register; of a transposed 16x16 one it has four rows
    of a column in each of two registers, for the left and the right half."""
    rows = (16 if shape == "m16n16" else 8) * count
    elements = np.random.default_rng(0).integers(0, 1 << bits, (32, 16)).astype(np.uint8)
    loaded = np.zeros((rows // 8, 32, 4), np.uint8)
    registers = ", ".join(f"%r{10 + i}" for i in range(len(loaded)))
    trans = ".trans" if shape == "m16n16" else ""
    text = f"ldmatrix.sync.aligned.{shape}.x{count}{trans}.shared.{type_} {{{registers}}}, [%r9];"
    text += " ".join(f"st.global.b32 [%d1+{128 * i}], %r{10 + i};" for i in range(len(loaded)))
    copy_of_shared([packed_rows(elements, bits), loaded, np.zeros(128, np.uint32)], text, 128)
    for register, value in enumerate(loaded):
        for e in range(4):
            if trans:
                want = elements[16 * (register // 2) + 4 * THREAD + e, GROUP + 8 * (register % 2)]
            else:
                want = elements[8 * register + GROUP, 4 * THREAD + e]
            np.testing.assert_array_equal(value[:, e], want)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_stores_16x8_matrices_of_bytes_by_their_columns(count):
    matrices = np.random.default_rng(0).integers(0, 256, (count, 16, 8)).astype(np.uint8)
    fragments = np.stack([matrices[:, GROUP + 8 * (e // 2), 2 * THREAD + e % 2] for e in range(4)], -1)
    text = " ".join(f"ld.global.b32 %r{10 + i}, [%d1+{128 * i}];" for i in range(count))
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    stored = np.zeros((32, 16), np.uint8)
    text += f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r9], {{{registers}}};"
    copy_of_shared([np.full(512, 255, np.uint8), np.ascontiguousarray(fragments), stored], text, 128)
    np.testing.assert_array_equal(stored[: 8 * count].reshape(count, 8, 16), matrices.transpose(0, 2, 1))
    assert (stored[8 * count :] == 255).all()


def test_padding_that_nothing_wrote_is_not_read():
    loaded = np.zeros((32, 4), np.uint8)
    body = """mov.u32 %r0, tile; mad.lo.s32 %r9, %t, 16, %r0; st.shared.v2.b32 [%r9], {%t, %t}; BYTES
      bar.warp.sync -1; ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.TYPE {%r1, %r2, %r3, %r4}, [%r9];
      mad.wide.u32 %d0, %t, 4, %q0; st.global.b32 [%d0], %r4;"""

    def load(type_, more=""):
        text = body.replace("TYPE", type_).replace("BYTES", more)
        kernel(text, 1, ".shared .align 16 .b8 tile[512];").launch(grid=1, block=32, params=[loaded], memory=[loaded])

    load("b4x16_p64")
    load("b6x16_p32", "st.shared.b32 [%r9+8], %t;")
    with pytest.raises(ptxsim.SimulationError, match=r"^uninitialized"):
        load("b6x16_p32")


@pytest.mark.parametrize(
    "text",
    [
        "ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r1, %r2}, [%r0];",  # .trans is mandatory
        "ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8 {%r1, %r2, %r3, %r4}, [%r0];",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b16 {%r1, %r2}, [%r0];",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%r1}, [%r0];",
        "ldmatrix.sync.aligned.m8n16.x1.trans.shared.b8x16.b4x16_p64 {%r1}, [%r0];",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b8 {%r1}, [%r0];",
        "ldmatrix.sync.aligned.m16n8.x1.trans.shared.b8 {%r1}, [%r0];",
        "stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r0], {%r1};",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b16 [%r0], {%r1};",
        "stmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 [%r0], {%r1};",
    ],
)
def test_matrix_copies_that_do_not_exist_stop_the_run(text):
    with pytest.raises(ptxsim.SimulationError, match=r"PTX line \d+: (no such combination|too many matrices)"):
        lanes(text, [], [np.uint32])


# ------------------------------------------------------------------------------------------------------- wgmma


def descriptor(lead, stride, swizzle):
    return lead >> 4 << 16 | stride >> 4 << 32 | {0: 0, 3: 1, 2: 2, 1: 3}[swizzle] << 62


def accumulators_of(name, n):
    """Random ones; of integers half of them near the ends of their range."""
    rng = np.random.default_rng(3)
    if name not in ("s8", "u8"):
        return rng.normal(size=(64, n)).astype(np.float32)
    ends = rng.choice([2**31 - 1, -(2**31)], (64, n)) - rng.integers(-1000, 1000, (64, n))
    return np.where(rng.random((64, n)) < 0.5, np.clip(ends, -(2**31), 2**31 - 1), ends % 1000).astype(np.int32)


def wgmma(n, name, swizzle, a_source="shared", a_mn=False, b_mn=False, scale_a=1, seed=0, **options):
    """Runs one wgmma of random operands; returns its result and the exact or float32 sum of C and the product.

    options: b_name (another type for B), scale_d, satfinite, sum_of (what to return for A, B and C instead); the others
    go to the launch.
    """
    sum_of = options.pop("sum_of", None)
    b_name = options.pop("b_name", name)
    scale_d = options.pop("scale_d", True)
    satfinite = ".satfinite" if options.pop("satfinite", False) else ""
    size = TYPES[name].itemsize
    k = 32 // size
    a, a_raw = random_matrix(64, k, name, 1)
    b, _ = random_matrix(n, k, b_name, 2)
    c = accumulators_of(name, n)

    a_image, *a_offsets = shared_image(a, name, swizzle, a_mn)
    b_image, *b_offsets = shared_image(b, b_name, swizzle, b_mn)
    a_descriptor, b_descriptor = (descriptor(*offsets, swizzle) for offsets in (a_offsets, b_offsets))
    image = np.concatenate([a_image, b_image])
    row = 16 * (np.arange(128) // 32) + np.arange(128) % 32 // 4
    thread = np.arange(128) % 4
    registers = np.arange(n // 2)[:, None]
    rows, columns = row + 8 * (registers // 2 % 2), 8 * (registers // 4) + 2 * thread + registers % 2
    accumulators = np.ascontiguousarray(c[rows, columns])
    words = a_raw.view(np.uint32)
    a_fragment = np.stack([words[row + 8 * (r % 2), thread + 4 * (r // 2)] for r in range(4)])
    arrays = [image, accumulators, np.ascontiguousarray(a_fragment)]
    d = [f"%r{100 + i}" for i in range(n // 2)]
    integer = name in ("s8", "u8")
    immediates = "" if integer else f", {scale_a}, 1"
    if size == 2:
        immediates += f", {int(b_mn)}" if a_source == "registers" else f", {int(a_mn)}, {int(b_mn)}"
    a_operand = "%d1" if a_source == "shared" else "{%r20, %r21, %r22, %r23}"
    body = f"""
      mad.wide.u32 %d10, %t, 4, %q0; mov.u32 %r0, tile; mad.lo.s32 %r1, %t, 4, %r0; mov.b32 %r2, 0;
      COPY: ld.global.b32 %r3, [%d10]; st.shared.b32 [%r1], %r3; add.s64 %d10, %d10, 512; add.s32 %r1, %r1, 512;
      add.s32 %r2, %r2, 1; setp.lt.u32 %p0, %r2, {len(image) // 512}; @%p0 bra COPY;
      fence.proxy.async.shared::cta; bar.sync 0;
      mad.wide.u32 %d11, %t, 4, %q1; mad.wide.u32 %d12, %t, 4, %q2;
      {" ".join(f"ld.global.b32 {r}, [%d11+{512 * i}];" for i, r in enumerate(d))}
      {" ".join(f"ld.global.b32 %r{20 + i}, [%d12+{512 * i}];" for i in range(4))}
      shr.u32 %r4, %r0, 4; cvt.u64.u32 %d0, %r4; or.b64 %d1, %d0, {a_descriptor};
      add.s64 %d0, %d0, {len(a_image) // 16}; or.b64 %d2, %d0, {b_descriptor};
      wgmma.fence.sync.aligned; setp.{"eq" if scale_d else "ne"}.u32 %p1, %r2, %r2;
      wgmma.mma_async.sync.aligned.m64n{n}k{k}{satfinite}.{"s32" if integer else "f32"}.{name}.{b_name}
        {{{", ".join(d)}}}, {a_operand}, %d2, %p1{immediates};
      wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
      {" ".join(f"st.global.b32 [%d11+{512 * i}], {r};" for i, r in enumerate(d))}"""
    module = kernel(body, 3, f".shared .align 1024 .b8 tile[{len(image)}];")
    module.launch(grid=1, block=128, params=arrays, memory=arrays, seed=seed, **options)
    if sum_of:
        return accumulators, sum_of(a, b, c)[rows, columns]
    product = a.astype(np.int64) @ b.T.astype(np.int64) if integer else scale_a * (a @ b.T)
    return accumulators, (product + c if scale_d else product)[rows, columns]


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("a_source", ["shared", "registers"])
@pytest.mark.parametrize("n, name", [(8, "bf16"), (128, "f16"), (32, "e4m3")])
def test_wgmma_with_k_major_operands(n, name, a_source, swizzle):
    got, want = wgmma(n, name, swizzle, a_source)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("a_mn, b_mn", [(True, False), (False, True), (True, True)])
def test_wgmma_with_mn_major_operands(a_mn, b_mn, swizzle):
    got, want = wgmma(64, "bf16", swizzle, a_mn=a_mn, b_mn=b_mn)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_wgmma_negates_what_it_is_told_to():
    got, want = wgmma(16, "bf16", 3, scale_a=-1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("a_source", ["shared", "registers"])
@pytest.mark.parametrize("n, name, swizzle", [(8, "tf32", 0), (40, "tf32", 1), (64, "tf32", 3)])
def test_wgmma_of_tf32_ignores_the_low_bits(n, name, swizzle, a_source, monkeypatch):
    """The operands' lowest 13 bits are set at random; the product is that of what remains."""
    real = operands.raw_bytes

    def noisy(values, name):
        noise = np.random.default_rng(5).integers(0, 1 << 13, values.shape).astype(np.uint32)
        words = real(values, name).view(np.uint32)
        assert not np.any(words & 0x1FFF)
        return (words | noise).view(np.uint8)

    monkeypatch.setattr(operands, "raw_bytes", noisy)
    got, want = wgmma(n, name, swizzle, a_source)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("a_source", ["shared", "registers"])
@pytest.mark.parametrize("name, b_name", [("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")])
def test_wgmma_mixes_8_bit_types(name, b_name, a_source):
    got, want = wgmma(24, name, 2, a_source, b_name=b_name)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale_d", [True, False])
@pytest.mark.parametrize("satfinite", [True, False])
@pytest.mark.parametrize("a_source", ["shared", "registers"])
@pytest.mark.parametrize("n, name, b_name, swizzle", [(8, "s8", "s8", 0), (24, "u8", "u8", 1), (48, "s8", "u8", 3)])
def test_wgmma_of_integers_wraps_or_saturates(n, name, b_name, swizzle, a_source, satfinite, scale_d):
    got, want = wgmma(n, name, swizzle, a_source, b_name=b_name, satfinite=satfinite, scale_d=scale_d)
    assert np.any(want != want.astype(np.int32)) == scale_d  # some sums overflow
    want = np.clip(want, -(2**31), 2**31 - 1) if satfinite else want
    np.testing.assert_array_equal(got, want.astype(np.int32))


@pytest.mark.parametrize("a_source", ["shared", "registers"])
@pytest.mark.parametrize(
    "name, b_name, fraction",
    [("f16", "f16", 25), ("bf16", "bf16", 25), ("tf32", "tf32", 25), ("e4m3", "e4m3", 13), ("e5m2", "e4m3", 13)],
)
def test_wgmma_cuts_its_sums_as_the_chip_does(name, b_name, fraction, a_source):
    """Of 8-bit types 13 bits after the largest exponent are kept, of the others 25; only if told to."""

    def sum_of(a, b, c):
        return operands.fused_sum(a, b, c, name, b_name, fraction)

    got, want = wgmma(32, name, 2, a_source, b_name=b_name, accuracy="chip", sum_of=sum_of)
    np.testing.assert_array_equal(got, want.astype(np.float32))
    _, exact = wgmma(32, name, 2, a_source, b_name=b_name, sum_of=lambda a, b, c: c + a.astype(np.float64) @ b.T)
    errors = abs(got - exact) / abs(exact).max()
    assert 2.0 ** (-fraction - 1) < errors.max() < 2.0 ** (4 - fraction) + 2.0**-23


@pytest.mark.parametrize(
    "form, operands, message",
    [
        ("m64n8k8.f32.tf32.tf32", ", 1, 1, 0, 0", "8 operands"),  # no transposition but of 16-bit elements
        ("m64n8k16.f32.tf32.tf32", ", 1, 1", "unknown matrix shape"),
        ("m64n8k8.f16.tf32.tf32", ", 1, 1", "accumulators of type"),
        ("m64n8k32.s32.s8.s8", ", 1, 1", "6 operands"),  # no negation of integers
        ("m64n40k32.s32.s8.s8", "", "unknown matrix shape"),
        ("m64n8k32.s32.s8.e4m3", "", "unknown element types"),
        ("m64n8k32.f32.s8.s8", "", "accumulators of type"),
        ("m64n8k16.satfinite.f32.f16.f16", ", 1, 1, 0, 0", "unknown modifier"),
        ("m64n8k256.s32.b1.b1.and.popc", "", "unknown element types"),
    ],
)
def test_forms_of_wgmma_that_do_not_exist_stop_the_run(form, operands, message):
    text = f"wgmma.mma_async.sync.aligned.{form} {{%r0, %r1, %r2, %r3}}, %d0, %d1, %p0{operands};"
    with pytest.raises(ptxsim.SimulationError, match=rf"PTX line \d+: {message}"):
        lanes(text, [], [np.uint32])
