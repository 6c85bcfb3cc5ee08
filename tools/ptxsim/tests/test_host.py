"""What stands in the place of a device under `ptxsim run`: its memory, its tensor maps, its operations."""

import gc

import numpy as np
import ptxsim
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from ptxsim.host import operations, tensor_map  # noqa: E402
from ptxsim.host.memory import ALIGNMENT, DeviceMemory  # noqa: E402


@pytest.fixture
def memory():
    with DeviceMemory() as memory:
        yield memory


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, 5, device="cuda"),
        lambda: torch.ones(3, 5).cuda(),
        lambda: torch.ones(3, 5).to("cuda:0"),
        lambda: torch.ones(3, 5).to(torch.device("cuda"), torch.float16),
        lambda: torch.ones(3, 5, device="cuda") + torch.ones(()),
        lambda: torch.empty_like(torch.ones(3, 5, device="cuda")),
        lambda: torch.ones(3, 5, device="cuda").new_zeros(7),
        lambda: torch.ones(5, 3, device="cuda").T[1:],
        lambda: torch.nn.Parameter(torch.ones(3, 5)).cuda(),
        lambda: torch.ones(6, device="cuda").chunk(2)[1],
        lambda: torch.zeros(4, device="cuda").add_(1),
    ],
)
def test_what_is_made_on_the_device_is_a_buffer_of_it(memory, make):
    tensor = make()
    assert memory.holds(tensor)
    assert tensor.is_cuda and tensor.device == torch.device("cuda", 0)
    address = tensor.untyped_storage().data_ptr()
    assert address % ALIGNMENT == 0
    assert memory.buffers[address][0] == tensor.untyped_storage().nbytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3),
        lambda: torch.ones(3, device="cuda").cpu(),
        lambda: torch.ones(3, device="cuda").to("cpu"),
        lambda: torch.ones(3).copy_(torch.zeros(3, device="cuda")),
        lambda: torch.empty(3, pin_memory=True),
    ],
)
def test_what_is_on_the_host_is_none(memory, make):
    tensor = make()
    assert not memory.holds(tensor)
    assert not tensor.is_cuda


@pytest.mark.parametrize("move", [lambda x: x.cuda(), lambda x: x.to("cuda"), lambda x: x.cuda().cpu()])
def test_moving_copies(memory, move):
    source = torch.arange(6.0).reshape(2, 3).T
    moved = move(source)
    source.zero_()
    assert moved.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_moving_what_is_there_already_does_not_copy(memory):
    tensor = torch.ones(3, device="cuda")
    assert tensor.cuda() is tensor
    assert tensor.to("cuda").data_ptr() == tensor.data_ptr()


def test_a_buffer_lives_as_long_as_its_storage(memory):
    tensor = torch.ones(3, 5, device="cuda")
    view = tensor[1]
    del tensor
    gc.collect()
    ((_, name),) = memory.buffers.values()
    assert name.startswith("float32[3, 5] of test_host.py:")
    del view
    gc.collect()
    assert not memory.buffers


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_says_on_which_device_a_tensor_is(memory, versioned):
    version = {"max_version": (1, 0)} if versioned else {}
    on_device, on_host = torch.ones(3, device="cuda"), torch.ones(3)
    assert on_device.__dlpack_device__() == (2, 0)
    assert on_host.__dlpack_device__()[0] == 1
    with pytest.raises(Exception, match=r"(?i)cuda|device"):
        np.from_dlpack(Capsule(on_device.__dlpack__(**version), (2, 0)))
    assert np.from_dlpack(Capsule(on_host.__dlpack__(**version), (1, 0))).tolist() == [1, 1, 1]


class Capsule:
    """An exporter of one capsule."""

    def __init__(self, capsule, device):
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return self.device


def pack(*fields):
    """128 bytes of (bit, width, value)."""
    bits = 0
    for at, width, value in fields:
        assert value < 1 << width
        bits |= value << at
    return bits.to_bytes(128, "little")


# The hardware's numbers of data types, and CUtensorMapDataType's.
@pytest.mark.parametrize("hardware, data_type", [(0, 0), (1, 1), (3, 3), (6, 6), (7, 7), (9, 8), (10, 9)])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_tensor_map_of_the_hardware_becomes_the_simulators(hardware, data_type, rank):
    extents, box = [160, 3, 1 << 20, 5, 9][:rank], [32, 3, 256, 1, 2][:rank]
    strides = [1 << 4, 5 << 36, 3 << 20, 1 << 39][: rank - 1]
    address = 0x7F1234567800
    fields = [(0, 64, address), (64, 4, 2), (68, 3, rank - 1), (71, 4, hardware)]
    for d in range(rank):
        fields += [(256 + 32 * d, 32, extents[d] - 1), (440 + 8 * d, 8, box[d] - 1)]
    for d, stride in enumerate(strides):
        fields += [(96 + 32 * d, 32, stride >> 4 & 0xFFFFFFFF), (224 + 4 * d, 4, stride >> 36)]
    expected = ptxsim.encode_tiled(data_type, address, extents, strides, box)
    assert tensor_map.from_hardware(pack(*fields)) == expected


@pytest.mark.parametrize("swizzle", [1, 2, 3])
def test_a_tensor_maps_swizzle_and_its_tf32_are_read(swizzle):
    width = 4 << swizzle  # of float32, what the swizzle spans
    fields = [(0, 64, 4096), (64, 4, 2), (68, 3, 1), (71, 4, 7), (77, 2, swizzle), (80, 1, 1)]
    fields += [(96, 32, 64), (256, 32, 255), (288, 32, 7), (440, 8, width - 1), (448, 8, 7)]
    expected = ptxsim.encode_tiled(11, 4096, [256, 8], [1024], [width, 8], swizzle=swizzle)
    assert tensor_map.from_hardware(pack(*fields)) == expected


def test_other_parameters_of_the_same_size_stay_as_they_are():
    for raw in (bytes(128), bytes(range(128)), b"\xff" * 128):
        assert tensor_map.from_hardware(raw) == raw


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("rows, columns, depth", [(128, 128, 128), (96, 200, 256)])
@pytest.mark.parametrize("float4", [False, True])
def test_a_scaled_product_is_that_of_the_scaled_operands(block, rows, columns, depth, float4):
    generator = torch.Generator().manual_seed(0)

    def operand(count):
        """Its values, its elements as torch has them, its scales, these as the hardware wants them."""
        if float4:
            codes = torch.randint(0, 16, (count, depth), generator=generator)
            values = torch.tensor([(-1) ** (c >> 3) * abs([0, 0.5, 1, 1.5, 2, 3, 4, 6][c & 7]) for c in range(16)])[
                codes
            ]
            raw = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.float4_e2m1fn_x2)
        else:
            raw = torch.randn(count, depth, generator=generator).to(torch.float8_e4m3fn)
            values = raw.float()
        scales = torch.rand(count, depth // block, generator=generator).to(torch.float8_e4m3fn)
        blocks = -(-count // 128)
        packed = torch.zeros(blocks * 128 * (depth // block), dtype=torch.uint8)
        for row in range(count):
            for k in range(depth // block):
                tile = row // 128 * (depth // block // 4) + k // 4
                packed[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + k % 4] = scales.view(torch.uint8)[row, k]
        scaled = values * scales.float().repeat_interleave(block, dim=1)
        return scaled, raw, packed.view(torch.float8_e4m3fn)

    (left, a, scale_a), (right, b, scale_b) = operand(rows), operand(columns)
    result = operations.scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.float32)
    torch.testing.assert_close(result, left @ right.T)
