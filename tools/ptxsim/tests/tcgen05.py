"""PTX that kernels with tensor memory share: allocation, completion, addresses, descriptors."""

import numpy as np

SHARED = ".shared .align 8 .b8 bar[8]; .shared .align 4 .b32 held;"
ALLOC = """mov.b32 %r0, 512; setp.ge.u32 %p9, %t, 32;
           @!%p9 tcgen05.alloc.cta_group::{0}.sync.aligned.shared::cta.b32 [held], %r0;"""
FREE = "bar.sync 0; @!%p9 tcgen05.dealloc.cta_group::{0}.sync.aligned.b32 %r1, %r0;"
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [bar], 0; @!%p4 bra WAIT;"
QUARTER = "shr.u32 %r2, %t, 5; shl.b32 %r2, %r2, 21; add.s32 %r3, %r1, %r2;"  # %r3: the warp's lanes

# Codes of element types in instruction descriptors.
CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5, "e2m1_packed": 1}
CODES |= {"u8": 0, "s8": 1}


def places(rows, n, folded):
    """Tensor lane and column of each element of a CTA's part of D, [rows, n].

    folded: shares of the columns lie in the lanes that rows leave free, as over two CTAs and where the product is
    weight stationary; otherwise 64 rows use half of each warp's lanes.
    """
    row, column = np.meshgrid(np.arange(rows), np.arange(n), indexing="ij")
    if folded:
        width = n * rows // 128
        return row + column // width * rows, column % width
    return (row // 16 * 32 + row % 16 if rows == 64 else row), column


def vector(first, count):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def descriptor(lead, stride, swizzle):
    return lead >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | {0: 0, 1: 6, 2: 4, 3: 2}[swizzle] << 61


def commit(ctas):
    """The end of the products of a group of CTAs."""
    group = f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster"
    return f"{group}.b64 [bar];" if ctas == 1 else f"{group}.multicast::cluster.b64 [bar], %h0;"


def cluster_sync(ctas):
    return "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if ctas == 2 else "bar.sync 0;"


def copy_to_shared(size, name="tile"):
    """128 threads copy ``size`` bytes, a multiple of 512, of each CTA's row of %q0; %r10: the CTA, %r11: the copy."""
    return f"""mov.u32 %r10, %cluster_ctarank; mov.u32 %r11, {name}; mad.lo.s32 %r12, %t, 4, %r11;
      mad.lo.s32 %r13, %r10, {size}, 0;
      cvt.u64.u32 %d0, %r13; add.s64 %d0, %d0, %q0; mad.wide.u32 %d0, %t, 4, %d0; mov.b32 %r14, 0;
      COPY: ld.global.b32 %r15, [%d0]; st.shared.b32 [%r12], %r15; add.s64 %d0, %d0, 512; add.s32 %r12, %r12, 512;
      add.s32 %r14, %r14, 1; setp.lt.u32 %p1, %r14, {size // 512}; @%p1 bra COPY; fence.proxy.async;"""


def change(old, new=""):
    """An edit of a body that must apply."""

    def edit(body):
        assert old in body
        return body.replace(old, new)

    return edit
