"""Random matrix operands and where the PTX ISA puts them in shared memory for wgmma and tcgen05.mma."""

import numpy as np
import torch

TYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "tf32": torch.float32,
    "s8": torch.int8,
    "u8": torch.uint8,
}
# Types below 8 bits: bits of the exponent and the mantissa, and the exponent's bias. Sixteen elements lie at the
# beginning of 16 bytes, and padding follows; those of the packed one follow one another.
NARROW = {"e2m1": (2, 1, 1), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1_packed": (2, 1, 1)}


def elements_of_16_bytes(name) -> int:
    return 32 if name == "e2m1_packed" else 16 if name in NARROW else 16 // TYPES[name].itemsize


def every_value(name) -> np.ndarray:
    """The value of each code of a narrow type."""
    exponent_bits, mantissa_bits, bias = NARROW[name]
    code = np.arange(2 << exponent_bits + mantissa_bits)
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code % (1 << mantissa_bits) / (1 << mantissa_bits)
    value = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - bias), mantissa * 2.0 ** (1 - bias))
    return np.where(code >> exponent_bits + mantissa_bits, -value, value).astype(np.float32)


def narrow_codes(values, name) -> np.ndarray:
    """The codes of values that a narrow type holds exactly."""
    table = every_value(name)
    code = np.abs(np.asarray(values)[..., None] - table).argmin(-1)
    np.testing.assert_array_equal(table[code], values)
    return code


def narrow_bytes(values, name) -> np.ndarray:
    code = narrow_codes(values, name)
    bits = code[..., None] >> np.arange(sum(NARROW[name][:2]) + 1) & 1
    bits = bits.reshape(len(code), -1, elements_of_16_bytes(name) * bits.shape[-1])
    padding = np.random.default_rng(9).integers(0, 2, (*bits.shape[:2], 128 - bits.shape[2]))
    return np.packbits(np.concatenate([bits, padding], -1).astype(np.uint8), -1, "little").reshape(len(code), -1)


def container_bytes(values, name) -> np.ndarray:
    """The bytes of a matrix in tensor memory: as raw_bytes, but padded elements in the middle of bytes of their own."""
    if name not in NARROW or name == "e2m1_packed":
        return raw_bytes(values, name)
    return (narrow_codes(values, name) << (2 if name == "e2m1" else 1)).astype(np.uint8)


def raw_bytes(values, name) -> np.ndarray:
    """The bytes of a float32 matrix in a type, [rows, columns * size]."""
    if name in NARROW:
        return narrow_bytes(values, name)
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(TYPES[name])
    return tensor.view(torch.uint8).numpy().reshape(len(values), -1)


def random_matrix(rows, columns, name, seed) -> tuple[np.ndarray, np.ndarray]:
    """(float32 values, bytes [rows, columns * size]) of a matrix that the type holds exactly."""
    if name in NARROW:
        table = every_value(name)
        values = table[np.random.default_rng(seed).integers(0, len(table), (rows, columns))]
        return values, raw_bytes(values, name)
    rng = np.random.default_rng(seed)
    if name in ("s8", "u8"):
        first = -128 if name == "s8" else 0
        values = rng.integers(first, first + 256, (rows, columns)).astype(np.float32)
        return values, raw_bytes(values, name)
    values = torch.from_numpy(rng.normal(size=(rows, columns)).astype(np.float32))
    if name == "tf32":
        values = (values.view(torch.int32) & ~0x1FFF).view(torch.float32)
    values = values.to(TYPES[name]).float().numpy()
    return values, raw_bytes(values, name)


def swizzled(address, swizzle):
    """Swizzling modes: address bits 4.. are XORed with bits 7.., as many as the mode has (0 to 3)."""
    return address ^ (address >> 7 & (1 << swizzle) - 1) << 4


LEAST_EXPONENT = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}  # of the normal numbers


def fused_sum(a, b, c, a_name, b_name, fraction, half=False) -> np.ndarray:
    """c + a @ b.T as Hopper's tensor cores form it (MMA-Sim, arXiv 2511.10909), float64.

    Every product and c are cut off ``fraction`` bits below the largest exponent among them, where subnormal numbers
    have the exponent of the smallest normal one; the exact sum of what remains is cut to the bits of the result.
    """

    def exponent(x, least):
        return np.where(x == 0, -126, np.maximum(np.frexp(x)[1] - 1, least))

    a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    least, kept = (-14, 10) if half else (-126, min(fraction, 23))
    tops = exponent(a, LEAST_EXPONENT[a_name])[:, None] + exponent(b, LEAST_EXPONENT[b_name])[None]
    unit = 2.0 ** (np.maximum(tops.max(-1), exponent(c, least)) - fraction)
    total = (np.trunc(c / unit) + np.trunc(a[:, None] * b[None] / unit[..., None]).sum(-1)) * unit
    last = 2.0 ** (exponent(total, least) - kept)
    return (np.rint if half else np.trunc)(total / last) * last


def k_major_offsets(raw, swizzle, lead, stride) -> np.ndarray:
    """Offsets of each byte of a [rows, bytes of K] operand: canonical K-major layout, 8-row core matrices."""
    row, byte = np.meshgrid(*map(np.arange, raw.shape), indexing="ij")
    chunk, pitch = byte // 16, 16 << swizzle
    across = chunk * 16 if swizzle else chunk * lead
    return swizzled(row % 8 * pitch + row // 8 * stride + across, swizzle) + byte % 16


def mn_major_offsets(raw, swizzle, lead, stride) -> np.ndarray:
    """Offsets of each byte of a [k, bytes of M or N] operand: canonical MN-major layout."""
    k, byte = np.meshgrid(*map(np.arange, raw.shape), indexing="ij")
    chunk, pitch, across = byte // 16, 16 << swizzle, 1 << swizzle
    if swizzle:
        offset = chunk % across * 16 + chunk // across * lead + k % 8 * pitch + k // 8 * stride
    else:
        offset = chunk * stride + k % 8 * 16 + k // 8 * lead
    return swizzled(offset, swizzle) + byte % 16


def shared_image(values, name, swizzle, mn_major) -> tuple[np.ndarray, int, int]:
    """(bytes, leading offset, stride offset) of an operand [M or N, K], a multiple of 1024 bytes."""
    pitch = 16 << swizzle
    if mn_major:
        raw = raw_bytes(values.T, name)
        # The groups of eight k beside each other, then the next columns.
        groups = len(raw) // 8
        lead, stride = (groups * pitch * 8, pitch * 8) if swizzle else (128, groups * 128)
        offsets = mn_major_offsets(raw, swizzle, lead, stride)
    else:
        raw = raw_bytes(values, name)
        lead, stride = 128 * (len(raw) // 8), (pitch * 8 if swizzle else 128)
        offsets = k_major_offsets(raw, swizzle, lead, stride)
    image = np.zeros(int(offsets.max()) // 1024 * 1024 + 1024, np.uint8)
    image[offsets] = raw
    return image, lead, stride
