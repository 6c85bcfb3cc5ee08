"""tcgen05.mma with block scaling: kinds, types, scale factors and where they lie, against a plain formula."""

from dataclasses import dataclass

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
)

BYTES = ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]
A_COLUMN, SFA_COLUMN, SFB_COLUMN = 256, 290, 301


@dataclass(frozen=True)
class Kind:
    """A kind with a size of the scale vectors: factors of a row or column in one product, and how PTX may name it."""

    name: str
    factors: int
    ue8m0: bool
    qualifiers: tuple[str, ...]


MXF8 = Kind("mxf8f6f4", 1, True, ("", ".scale_vec::1X", ".block32"))
MXF4 = Kind("mxf4", 2, True, ("", ".scale_vec::2X", ".block32"))
NVF4_2X = Kind("mxf4nvf4", 2, True, (".scale_vec::2X", ".block32"))
NVF4_4X = Kind("mxf4nvf4", 4, True, (".scale_vec::4X", ".block16"))
NVF4 = Kind("mxf4nvf4", 4, False, (".scale_vec::4X", ".block16"))
FP4 = [MXF4, NVF4_2X, NVF4_4X, NVF4]


def random_scales(rows, ue8m0, seed):
    """(values, bytes) of four factors a row."""
    rng = np.random.default_rng(seed)
    if ue8m0:
        code = rng.integers(124, 131, (rows, 4))
        return 2.0 ** (code - 127), code.astype(np.uint8)
    code = rng.integers(0x28, 0x48, (rows, 4))  # ue4m3: four bits of exponent, bias 7, three of mantissa
    return 2.0 ** (code // 8 - 7) * (1 + code % 8 / 8), code.astype(np.uint8)


def scale_image(codes) -> np.ndarray:
    """512 bytes for 128 rows: row r's four factors at 16 * (r % 32) + 4 * (r // 32)."""
    image = np.zeros((-(-len(codes) // 128), 512), np.uint8)
    row, factor = np.meshgrid(np.arange(len(codes)), np.arange(4), indexing="ij")
    image[row // 128, 16 * (row % 32) + 4 * (row % 128 // 32) + factor] = codes
    return image.ravel()


def tensor_scales(codes) -> np.ndarray:
    """What 128 lanes hold in eight columns: row r's four factors in column r // 32 of the lanes r % 32 + 32 q."""
    words = np.ascontiguousarray(codes).view(np.uint32)[:, 0]
    lanes = np.zeros((4, 32, 8), np.uint32)
    row = np.arange(len(codes))
    lanes[:, row % 32, row // 32] = words
    return lanes.reshape(128, 8)


def folded_scales(codes) -> np.ndarray:
    """The same where the columns of D are folded: the factors of each half of them in the lanes of that half."""
    halves = [tensor_scales(half) for half in np.split(codes, 2)]
    return np.concatenate([halves[0][:64], halves[1][:64]])


def store(address, source, columns, step=8):
    """tcgen05.st of ``columns`` words of each lane at ``source`` to columns from ``address`` on."""
    return " ".join(
        " ".join(f"ld.global.b32 %r{30 + i}, [{source}+{4 * (at + i)}];" for i in range(step))
        + f"tcgen05.st.sync.aligned.32x32b.x{step}.b32 [{address}+{at}], {{"
        + ", ".join(f"%r{30 + i}" for i in range(step))
        + "};"
        for at in range(0, columns, step)
    )


def scaled_product(
    kind, m=128, n=64, a_type="e2m1_packed", b_type=None, swizzle=3, ctas=1, a_mn=False, b_mn=False, a_tensor=False,
    accumulate=True, ids=(0, 0), negate=(False, False), qualifier=None, by_store=False, code_a=None, code_b=None,
    idesc_xor=0, id_in_address=False, edit=lambda body: body, **options,
):  # fmt: skip
    """One product on random operands: (D as tensor memory holds it [ctas, 128 lanes, n], D wanted there).

    by_store: the scale factors get into tensor memory by tcgen05.st, not tcgen05.cp.
    """
    b_type = b_type or a_type
    k = 2 * elements_of_16_bytes(a_type)
    a, _ = random_matrix(m, k, a_type, 1)
    b, _ = random_matrix(n, k, b_type, 2)
    c = np.random.default_rng(3).normal(size=(ctas, 128, n)).astype(np.float32)
    sfa, sfa_codes = random_scales(m, kind.ue8m0, 4)
    sfb, sfb_codes = random_scales(n, kind.ue8m0, 5)
    if code_a is not None:
        sfa_codes[:], sfa[:] = code_a
    if code_b is not None:
        sfb_codes[:], sfb[:] = code_b
    columns, rows = n // ctas, m // ctas
    folded = rows == 64
    images = []
    for rank in range(ctas):
        a_image, *a_offsets = shared_image(a[rank * rows :][:rows], a_type, swizzle, a_mn)
        b_image, *b_offsets = shared_image(b[rank * columns :][:columns], b_type, swizzle, b_mn)
        scales = [scale_image(part) for part in [sfa_codes[rank * rows :][:rows], *np.split(sfb_codes, 1 + folded)]]
        images.append(np.concatenate([a_image, b_image, *scales]))
    image = np.stack(images)
    size = image.shape[1]
    lanes = np.zeros((ctas, 128, 24), np.uint32)  # A, scale factors of A, of B
    for rank in range(ctas):
        a_words = container_bytes(a[rank * rows :][:rows], a_type).view(np.uint32)
        lanes[rank, :, :8] = np.concatenate([a_words] * (128 // rows))
        lanes[rank, :, 8:16] = tensor_scales(sfa_codes[rank * rows :][:rows])
        lanes[rank, :, 16:] = folded_scales(sfb_codes) if folded else tensor_scales(sfb_codes)
    d = c.copy()
    arrays = [image, d, lanes]

    idesc = ids[1] << 4 | CODES[a_type] << 7 | CODES[b_type] << 10 | negate[0] << 13 | negate[1] << 14
    idesc |= a_mn << 15 | b_mn << 16 | n // 8 << 17 | kind.ue8m0 << 23 | m // 128 << 27 | ids[0] << 29
    qualifier = kind.qualifiers[0] if qualifier is None else qualifier
    sync = cluster_sync(ctas)
    # The copies read 32 rows of 16 bytes without a swizzle, eight rows 128 bytes apart.
    b_blocks = -(-n // (256 if folded else 128))
    copies = [(SFA_COLUMN, 0)] + [(SFB_COLUMN + 4 * i, 32 * (1 + i)) for i in range(b_blocks)]
    shapes = ["32x128b.warpx4", *["64x128b.warpx2::01_23" if folded else "32x128b.warpx4"] * b_blocks]
    first_scale = (len(a_image) + len(b_image)) // 16
    cp = "" if by_store else " ".join(
        f"add.s64 %d7, %d6, {offset}; add.s32 %r26, %r1, {column};"
        f"tcgen05.cp.cta_group::{ctas}.{shape} [%r26], %d7;"
        for (column, offset), shape in zip(copies, shapes, strict=True)
    )  # fmt: skip
    sf_address = [f"or.b32 %r{27 + i}, %r{27 + i}, {ids[i] << 30 if id_in_address else 0};" for i in range(2)]
    body = f"""
      {ALLOC.format(ctas)} setp.ne.u32 %p0, %t, 0; @!%p0 mbarrier.init.shared.b64 [bar], 1;
      fence.mbarrier_init.release.cluster; {copy_to_shared(size)}
      bar.sync 0; ld.shared.b32 %r1, [held]; {QUARTER}
      mad.lo.s32 %r16, %r10, 128, %t; mad.lo.s32 %r17, %r16, {4 * n}, 0; cvt.u64.u32 %d1, %r17; add.s64 %d1, %d1, %q1;
      mad.lo.s32 %r18, %r16, 96, 0; cvt.u64.u32 %d2, %r18; add.s64 %d2, %d2, %q2;
      {store("%r3", "%d1", n)} add.s32 %r26, %r3, {A_COLUMN}; {store("%r26", "%d2", 8)}
      add.s64 %d2, %d2, 32; add.s32 %r26, %r3, {SFA_COLUMN}; {store("%r26", "%d2", 4, 4) if by_store else ""}
      add.s64 %d2, %d2, 32; add.s32 %r26, %r3, {SFB_COLUMN};
      {store("%r26", "%d2", 4 * b_blocks, 4) if by_store else ""}
      tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; {sync} tcgen05.fence::after_thread_sync;
      setp.ne.or.u32 %p2, %r10, 0, %p0; @%p2 bra WAIT;
      and.b32 %r19, %r11, 0xffffff; shr.u32 %r19, %r19, 4; cvt.u64.u32 %d3, %r19;
      or.b64 %d4, %d3, {descriptor(*a_offsets, swizzle)};
      add.s64 %d5, %d3, {len(a_image) // 16}; or.b64 %d5, %d5, {descriptor(*b_offsets, swizzle)};
      add.s64 %d6, %d3, {first_scale}; or.b64 %d6, %d6, {descriptor(0, 128, 0)}; {cp}
      mov.b32 %r251, {idesc ^ idesc_xor}; setp.eq.u32 %p3, %r10, {0 if accumulate else 7}; mov.b16 %h0, 3;
      add.s32 %r252, %r1, {A_COLUMN}; add.s32 %r27, %r1, {SFA_COLUMN}; add.s32 %r28, %r1, {SFB_COLUMN - 1};
      {" ".join(sf_address)}
      tcgen05.mma.cta_group::{ctas}.kind::{kind.name}.block_scale{qualifier} [%r1],
        {"[%r252]" if a_tensor else "%d4"}, %d5, %r251, [%r27], [%r28+1], %p3;
      {commit(ctas)} {WAIT} tcgen05.fence::after_thread_sync;
      {
        " ".join(
            f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r30, %r31, %r32, %r33}}, [%r3+{at}];"
            "tcgen05.wait::ld.sync.aligned;"
            f"st.global.v4.b32 [%d1+{4 * at}], {{%r30, %r31, %r32, %r33}};"
            for at in range(0, n, 4)
        )
    }
      {FREE.format(ctas)} {sync}"""
    module = kernel(edit(body), 3, f".shared .align 1024 .b8 tile[{size}]; {SHARED}")
    module.launch(grid=ctas, block=128, cluster=ctas, params=arrays, memory=arrays, **options)

    def scaled(values, factors, first, negative):
        used = factors[:, first : first + kind.factors]
        return (-1 if negative else 1) * values * np.repeat(used, k // kind.factors, axis=1)

    with np.errstate(invalid="ignore", over="ignore"):
        value = scaled(a, sfa, ids[0], negate[0]) @ scaled(b, sfb, ids[1], negate[1]).T
        want = c.copy()
        lane, column = places(rows, n, folded)
        want[:, lane, column] = value.reshape(ctas, rows, n) + (c[:, lane, column] if accumulate else 0)
    return d, want


def check(*args, **options):
    got, want = scaled_product(*args, **options)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.nanmax(np.abs(want)))


# ------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("b_type", BYTES)
@pytest.mark.parametrize("a_type", BYTES)
@pytest.mark.parametrize("a_tensor", [False, True])
def test_mxf8f6f4_of_every_pair_of_types(a_type, b_type, a_tensor):
    check(MXF8, a_type=a_type, b_type=b_type, a_tensor=a_tensor, ids=(1, 2))


@pytest.mark.parametrize("kind, qualifier", [(k, q) for k in (MXF8, *FP4) for q in k.qualifiers], ids=str)
def test_every_kind_under_each_of_its_names(kind, qualifier):
    check(kind, a_type="e4m3" if kind is MXF8 else "e2m1_packed", qualifier=qualifier)


@pytest.mark.parametrize("swizzle", range(4))
@pytest.mark.parametrize("kind", FP4, ids=str)
def test_packed_operands_of_every_swizzle(kind, swizzle):
    check(kind, swizzle=swizzle)


@pytest.mark.parametrize("swizzle", range(4))
@pytest.mark.parametrize("a_mn, b_mn", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("types", [("e4m3", "e5m2"), ("e2m1", "e3m2"), ("e2m3", "e4m3")])
def test_transposed_operands(types, a_mn, b_mn, swizzle):
    a_type, b_type = types
    check(MXF8, a_type=a_type, b_type=b_type, a_mn=a_mn, b_mn=b_mn, swizzle=swizzle)


ALL_IDS = [(MXF8, (i, j)) for i in range(4) for j in range(4)]
ALL_IDS += [(kind, (i, j)) for kind in (MXF4, NVF4_2X) for i in (0, 2) for j in (0, 2)]


@pytest.mark.parametrize("by_store", [False, True])
@pytest.mark.parametrize("kind, ids", ALL_IDS, ids=str)
def test_the_ids_choose_the_bytes_of_the_columns(kind, ids, by_store):
    check(kind, a_type="e4m3" if kind is MXF8 else "e2m1_packed", ids=ids, by_store=by_store, id_in_address=by_store)


@pytest.mark.parametrize("n", [8, 16, 24, 40, 128, 136, 192, 256])
@pytest.mark.parametrize("kind, a_type", [(MXF8, "e4m3"), (MXF8, "e2m1"), (NVF4, "e2m1_packed")], ids=str)
def test_widths(kind, a_type, n):
    check(kind, a_type=a_type, n=n, by_store=n % 16 == 0)


PAIRED = [(MXF8, "e5m2"), (MXF8, "e3m2"), (MXF4, "e2m1_packed"), (NVF4, "e2m1_packed")]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n", [16, 48, 128, 256])
@pytest.mark.parametrize("a_tensor", [False, True])
@pytest.mark.parametrize("m", [128, 256])
@pytest.mark.parametrize("kind, a_type", PAIRED, ids=str)
def test_pairs_of_ctas(kind, a_type, m, a_tensor, n, seed):
    check(kind, a_type=a_type, m=m, n=n, ctas=2, a_tensor=a_tensor, by_store=seed == 1, seed=seed)


@pytest.mark.parametrize("kind, ids", [(MXF8, (1, 3)), (MXF4, (2, 0)), (NVF4_2X, (0, 2))], ids=str)
def test_ids_of_pairs_that_fold_their_columns(kind, ids):
    check(kind, a_type="e4m3" if kind is MXF8 else "e2m1_packed", m=128, n=192, ctas=2, ids=ids)


OPTIONS = [{"negate": (True, False)}, {"negate": (False, True)}, {"accumulate": False}, {"a_tensor": True}]


@pytest.mark.parametrize("kind", [MXF8, *FP4], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(kind, options):
    check(kind, a_type="e2m3" if kind is MXF8 else "e2m1_packed", **options)


def test_scale_factors_of_every_size_and_nan():
    check(MXF8, a_type="e4m3", code_a=(254, 2.0**127), code_b=(1, 2.0**-126))
    check(NVF4_4X, code_a=(0, 2.0**-127), code_b=(254, 2.0**127))
    check(NVF4, code_a=(1, 2.0**-9), code_b=(0x7E, 448))
    for kind, nan in ((MXF8, 0xFF), (NVF4, 0x7F)):
        got, _ = scaled_product(kind, a_type="e2m1" if kind is MXF8 else "e2m1_packed", code_b=(nan, np.nan))
        assert np.isnan(got).all()


def test_a_zero_stays_a_zero_under_scale_factors_whose_product_overflows():
    scale = (254, 2.0**127)
    got, want = scaled_product(MXF8, a_type="e2m1", code_a=scale, code_b=scale, accumulate=False)
    assert (want == 0).any() and (want > 0).any() and (want < 0).any()
    np.testing.assert_array_equal(got, np.where(want == 0, 0, np.copysign(np.inf, want)))


# ------------------------------------------------------------------------------------------------- checks

RESERVED = "reserved bits are set"
FAULTS = [  # kind, bits of the descriptor to flip, options, message
    (MXF8, 1, {}, RESERVED),
    (MXF8, 1 << 3, {}, RESERVED),
    (MXF8, 1 << 6, {}, RESERVED),
    (MXF8, 1 << 24, {}, RESERVED),
    (MXF8, 1 << 31, {}, RESERVED),
    (NVF4, 1 << 12, {}, RESERVED),
    (NVF4, 1 << 25, {}, RESERVED),
    (MXF8, 1 << 2, {}, "sparse"),
    (NVF4, 1 << 2, {}, "sparse"),
    (NVF4, 1 << 31, {}, "K of 96"),
    (MXF8, 2 << 7, {}, "element type"),
    (MXF8, 7 << 10, {}, "element type"),
    (NVF4, 1 << 7, {}, "element type"),
    (MXF4, 2 << 10, {}, "element type"),
    (NVF4, 1 << 15, {}, "operands of four bits cannot be transposed"),
    (MXF4, 1 << 16, {}, "operands of four bits cannot be transposed"),
    (MXF8, 1 << 23, {}, "scale factor type"),
    (MXF4, 1 << 23, {}, "scale factor type"),
    (NVF4_2X, 1 << 23, {}, "scale factor type"),
    (MXF4, 1 << 4, {}, "scale factor ids"),
    (NVF4_2X, 1 << 29, {}, "scale factor ids"),
    (NVF4, 2 << 29, {}, "scale factor ids"),
    (MXF8, 3 << 27, {}, "M\n"),
    (NVF4, 1 << 27, {}, "M\n"),
    (MXF8, 8 << 17, {}, "N\n"),
    (MXF8, (8 ^ 33) << 17, {}, "N\n"),
    (MXF8, 1 << 17, {"b_mn": True}, "N\n"),
    (MXF8, 2 << 27, {"ctas": 2, "m": 256}, "M\n"),
    (NVF4, 1 << 17, {"ctas": 2, "m": 256}, "N\n"),
]


@pytest.mark.parametrize("kind, bits, options, message", FAULTS, ids=[f"{f[0].name}-{f[1]:x}" for f in FAULTS])
def test_wrong_instruction_descriptors_are_reported(kind, bits, options, message):
    a_type = "e4m3" if kind is MXF8 else "e2m1_packed"
    with pytest.raises(ptxsim.SimulationError, match=f"^descriptor: instruction descriptor 0x\\w+: {message}"):
        scaled_product(kind, a_type=a_type, idesc_xor=bits, **options)


SCALE_A, SCALE_B = "[%r27], ", "[%r28+1], %p3"
TO_SFA, TO_SFB = (f"add.s32 %r26, %r3, {column};" for column in (SFA_COLUMN, SFB_COLUMN))
COPY_SFA = f"add.s32 %r26, %r1, {SFA_COLUMN};"
OVERWRITE = "ld.shared.b32 %r9, [tile]; st.shared.b32 [tile+32768], %r9;"  # scale factors that are being copied
WRONG = [  # check, scale factors by tcgen05.st, edit, message
    ("uninitialized", True, change(TO_SFA, f"{TO_SFA} setp.gt.u32 %p5, %t, 95; @%p5 add.s32 %r26, %r26, 100;"),
     "tensor address"),
    ("uninitialized", False, change("add.s32 %r28, %r1,", "add.s32 %r28, %r1, 4; add.s32 %r28, %r28,"),
     "tensor address"),
    ("uninitialized", False, change(COPY_SFA, "add.s32 %r26, %r1, 400;"), "tensor address"),
    ("scale_factors", True, change(TO_SFB, f"{TO_SFB} setp.gt.u32 %p5, %t, 63; @%p5 sub.s64 %d2, %d2, 96;"),
     "differ from their copy at lane (64|96)"),
    ("tensor_bounds", False, change(SCALE_B, "[%r28+215], %p3"), "columns 51|lane"),
    ("tensor_bounds", False, change(SCALE_A, "[%r29], "), "lane 128"),
    ("async_early", True, change("tcgen05.wait::st.sync.aligned;"), "of tcgen05.st of warp"),
    ("async_early", False, change(WAIT, OVERWRITE + WAIT), "may still read, of tcgen05 operations"),
    ("proxy_fence", False, change("fence.proxy.async;"), "without fence.proxy.async"),
]  # fmt: skip


@pytest.mark.parametrize("check, by_store, edit, message", WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_wrong_uses_of_scale_factors_are_stopped(check, by_store, edit, message):
    def whole(body):
        return change("tcgen05.mma", f"mov.b32 %r29, {1 << 16 | SFA_COLUMN}; tcgen05.mma")(edit(body))

    for seed in range(3):
        with pytest.raises(ptxsim.SimulationError, match=message) as stopped:
            scaled_product(NVF4, n=128, by_store=by_store, edit=whole, seed=seed)
        assert str(stopped.value).startswith(f"{check}: "), str(stopped.value)


@pytest.mark.parametrize("types, data", [(("e2m1", "e2m1"), 8), (("e3m2", "e2m3"), 12)])
def test_padding_may_be_uninitialized_but_elements_may_not(types, data):
    a_type, b_type = types
    for written in (data, data - 4):
        store = f"and.b32 %r25, %r12, 15; setp.lt.u32 %p6, %r25, {written}; @%p6 st.shared.b32 [%r12], %r15;"
        options = {
            "a_type": a_type,
            "b_type": b_type,
            "by_store": True,
            "edit": change("st.shared.b32 [%r12], %r15;", store),
        }
        if written == data:
            check(MXF8, **options)
            continue
        with pytest.raises(ptxsim.SimulationError, match=r"^uninitialized"):
            scaled_product(MXF8, **options)


def test_differing_copies_may_be_allowed():
    (_, by_store, edit, _) = next(w for w in WRONG if w[0] == "scale_factors")
    scaled_product(NVF4, n=128, by_store=by_store, edit=edit, off=["scale_factors"])


@pytest.mark.parametrize(
    "old, new",
    [
        (".block_scale.scale_vec::4X", ""),
        (".block_scale.scale_vec::4X", ".block_scale"),
        ("scale_vec::4X", "scale_vec::1X"),
        ("kind::mxf4nvf4", "kind::mxf4"),
        ("kind::mxf4nvf4", "kind::mxf8f6f4"),
        ("kind::mxf4nvf4", "kind::f8f6f4"),
        (SCALE_A, "%r27, "),
        (SCALE_B, SCALE_B + ", 2"),
    ],
)
def test_forms_that_do_not_exist_are_refused(old, new):
    with pytest.raises(ptxsim.SimulationError, match="tcgen05"):
        scaled_product(NVF4, edit=change(old, new))
