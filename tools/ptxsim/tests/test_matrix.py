"""ldmatrix, stmatrix, movmatrix, mma and wgmma: the fragments of the PTX ISA against matrix products in NumPy."""

import numpy as np
import pytest
from operands import TYPES, random_matrix, shared_image
from ptx import kernel

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


@pytest.mark.parametrize("k, name", [(8, "bf16"), (16, "bf16"), (16, "f16"), (32, "e4m3"), (32, "e5m2")])
def test_mma_multiplies(k, name):
    a, a_raw = random_matrix(16, k, name, 1)
    b, b_raw = random_matrix(8, k, name, 2)  # stored by column of B
    c = np.random.default_rng(3).normal(size=(16, 8)).astype(np.float32)
    per = 4 // TYPES[name].itemsize  # elements of a register
    a_words, b_words = a_raw.view(np.uint32), b_raw.view(np.uint32)  # [rows, k / per]
    a_count = k // (4 * per) * 2
    a_fragment = np.stack([a_words[GROUP + 8 * (r % 2), THREAD + 4 * (r // 2)] for r in range(a_count)])
    b_fragment = np.stack([b_words[GROUP, THREAD + 4 * r] for r in range(a_count // 2)])
    c_fragment = np.stack([c[GROUP + 8 * (i // 2), 2 * THREAD + i % 2] for i in range(4)])
    result = np.zeros((4, 32), np.float32)
    arrays = [np.ascontiguousarray(x) for x in (a_fragment, b_fragment, c_fragment, result)]
    loads, operands = [], []
    for array, first in zip(arrays[:3], (10, 20, 30), strict=True):
        address = f"%d{first}"
        loads.append(f"mad.wide.u32 {address}, %t, 4, %q{first // 10 - 1};")
        loads += [f"ld.global.b32 %r{first + i}, [{address}+{128 * i}];" for i in range(len(array))]
        operands.append("{" + ", ".join(f"%r{first + i}" for i in range(len(array))) + "}")
    stores = [f"st.global.b32 [%d40+{128 * i}], %r{40 + i};" for i in range(4)]
    body = f"""{" ".join(loads)} mad.wide.u32 %d40, %t, 4, %q3;
      mma.sync.aligned.m16n8k{k}.row.col.f32.{name}.{name}.f32 {{%r40, %r41, %r42, %r43}}, {", ".join(operands)};
      {" ".join(stores)}"""
    kernel(body, 4).launch(grid=1, block=32, params=arrays, memory=arrays)
    want = a @ b.T + c
    for i in range(4):
        np.testing.assert_allclose(arrays[3][i], want[GROUP + 8 * (i // 2), 2 * THREAD + i % 2], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- wgmma


def descriptor(lead, stride, swizzle):
    return lead >> 4 << 16 | stride >> 4 << 32 | {0: 0, 3: 1, 2: 2, 1: 3}[swizzle] << 62


def wgmma(n, name, swizzle, a_source="shared", a_mn=False, b_mn=False, scale_a=1, seed=0, **options):
    """Runs one wgmma of random operands; returns its result and the product in float32."""
    size = TYPES[name].itemsize
    k = 32 // size
    a, a_raw = random_matrix(64, k, name, 1)
    b, _ = random_matrix(n, k, name, 2)
    c = np.random.default_rng(3).normal(size=(64, n)).astype(np.float32)

    a_image, *a_offsets = shared_image(a, name, swizzle, a_mn)
    b_image, *b_offsets = shared_image(b, name, swizzle, b_mn)
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
    transposes = ""
    if size == 2:
        transposes = f", {int(b_mn)}" if a_source == "registers" else f", {int(a_mn)}, {int(b_mn)}"
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
      wgmma.fence.sync.aligned; setp.eq.u32 %p1, %r2, %r2;
      wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{name}.{name} {{{", ".join(d)}}},
        {a_operand}, %d2, %p1, {scale_a}, 1{transposes};
      wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
      {" ".join(f"st.global.b32 [%d11+{512 * i}], {r};" for i, r in enumerate(d))}"""
    module = kernel(body, 3, f".shared .align 1024 .b8 tile[{len(image)}];")
    module.launch(grid=1, block=128, params=arrays, memory=arrays, seed=seed, **options)
    return accumulators, (scale_a * (a @ b.T) + c)[rows, columns]


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
