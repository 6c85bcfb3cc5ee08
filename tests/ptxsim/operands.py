"""Random matrix operands and where the PTX ISA puts them in shared memory for wgmma and tcgen05.mma."""

import numpy as np
import torch

TYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "tf32": torch.float32,
}


def raw_bytes(values, name) -> np.ndarray:
    """The bytes of a float32 matrix in a type, [rows, columns * size]."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(TYPES[name])
    return tensor.view(torch.uint8).numpy().reshape(len(values), -1)


def random_matrix(rows, columns, name, seed) -> tuple[np.ndarray, np.ndarray]:
    """(float32 values, bytes [rows, columns * size]) of a matrix that the type holds exactly."""
    values = torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32))
    if name == "tf32":
        values = (values.view(torch.int32) & ~0x1FFF).view(torch.float32)
    values = values.to(TYPES[name]).float().numpy()
    return values, raw_bytes(values, name)


def swizzled(address, swizzle):
    """Swizzling modes: address bits 4.. are XORed with bits 7.., as many as the mode has (0 to 3)."""
    return address ^ (address >> 7 & (1 << swizzle) - 1) << 4


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
        # With a swizzle: two groups of eight k beside each other, then the next columns.
        lead, stride = (2 * pitch * 8, pitch * 8) if swizzle else (128, 256)
        offsets = mn_major_offsets(raw, swizzle, lead, stride)
    else:
        raw = raw_bytes(values, name)
        lead, stride = 128 * (len(raw) // 8), (pitch * 8 if swizzle else 128)
        offsets = k_major_offsets(raw, swizzle, lead, stride)
    image = np.zeros(int(offsets.max()) // 1024 * 1024 + 1024, np.uint8)
    image[offsets] = raw
    return image, lead, stride
