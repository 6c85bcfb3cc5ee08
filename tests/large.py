"""Attention on arrays that pretend gigabytes: in the simulator, no offset that a kernel computes fits into 32 bits.

Q, K, V and the results get strides of gigabytes, which the public function takes. What a kernel finds by a number is
moved when it is launched: tokens, rows, sequences and work items get high numbers, as if there were many more, of which
a launch reaches those that exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np
import pytest
import torch
from places import assert_close, attend, build
from reference import Reference, make_case, random_q2k

from sparse_aot import sim

HEADS = {"csr": 4, "walk": 18}  # of K and V; the first and the last one select blocks, in a walk the last one alone
TOKENS = (1 << 24) - 128  # before those that exist, in a walk
LENS_Q, LENS_K = [20, 4], [300, 200]  # 24 tokens: combine's CTAs take whole ones
TOKEN, HEAD = (1 << 32) + (1 << 14), (1 << 33) + 128  # strides of Q and of the results
PAGES = (1 << 36, (1 << 32) + (1 << 17), 128, 1)  # strides of K and V
COLUMNS = 8  # of a page table
MANY = 1_500_000_000  # entries of a head of the CSR, and rows
SEQUENCES = (1 << 30) + 8  # before those that exist
ITEMS = (1 << 29) + 8  # between those that the CTAs start with and those that they claim
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on


def reserved(shape, dtype, strides=None) -> torch.Tensor:
    """Zeros, of which only the pages that are touched take memory."""
    if strides is None:
        strides = [int(np.prod(shape[dim + 1 :], dtype=np.int64)) for dim in range(len(shape))]
    count = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def spread(tensor, strides) -> torch.Tensor:
    """The same elements, further apart."""
    return reserved(tensor.shape, tensor.dtype, strides).copy_(tensor)


def within(tensor, shape, at=None) -> torch.Tensor:
    """The same elements from ``at`` on, among zeros."""
    array = reserved(shape, tensor.dtype)
    starts = at or (0,) * len(shape)
    array[tuple(slice(start, start + size) for start, size in zip(starts, tensor.shape, strict=True))] = tensor
    return array


class LargeCall:
    """A call of ``sparse_atten_func``; ``check`` makes it."""

    def __init__(self, g, traversal="csr", topk=4, partial="bfloat16", temperature=None):
        self.walks = traversal == "walk"
        self.head_kv = head_kv = HEADS[traversal]
        heads = [head_kv - 1] if self.walks else [0, head_kv - 1]
        q2k = np.full((head_kv, sum(LENS_Q), topk), -1, np.int32)
        q2k[heads] = random_q2k(np.random.default_rng(0), LENS_Q, LENS_K, len(heads), topk)
        case = make_case(
            lens_q=LENS_Q, lens_k=LENS_K, head_kv=head_kv, qhead_per_kv=g, topk=topk, q2k=q2k, layout="paged",
            causal=True,
        )  # fmt: skip
        case.page_table[0, 1] = case.k.shape[0]  # a page that is not there
        self.want = case.reference(lse_temperature_scale=temperature or 1.0)
        self.plan = build(case, traversal)
        self.partial, self.temperature = getattr(torch, partial), temperature
        self.tokens = TOKENS if self.walks else 0
        self.groups = self.tokens // (128 // g)

        case.k, case.v = spread(case.k, PAGES), spread(case.v, PAGES)
        total_q, head_q = case.q.shape[:2]
        strides = (128 * head_q, 128, 1) if self.walks else (TOKEN, HEAD, 1)
        lse_strides = (head_q, 1) if self.walks or temperature else (TOKEN, HEAD)
        self.far = {  # with the tokens before those that exist
            "q": reserved((self.tokens + total_q, head_q, 128), torch.bfloat16, strides),
            "out": reserved((self.tokens + total_q, head_q, 128), torch.bfloat16, strides),
            "lse": reserved((self.tokens + total_q, head_q), torch.float32, lse_strides),
        }
        self.far["q"][self.tokens :] = case.q
        case.q = self.far["q"][self.tokens :]
        self.case = case
        self.moved = self._move()

    def check(self):
        """The results are right."""
        buffers = {name: self.far[name][self.tokens :].zero_() for name in ("out", "lse")}
        options = {"partial_dtype": self.partial, "temperature": self.temperature}
        if not self.walks:
            self.moved |= self._workspace()
        with self._far():
            results = attend(self.case, self.plan, **options, **buffers)
        g, want = self.case.qhead_per_kv, self.want
        if self.walks:
            results = [result[:, -g:] for result in results]
            want = Reference(*(values[:, -g:] for values in vars(want).values()))
        assert_close(results, want)

    def _move(self):
        """What launches take instead of what they are given: arrays and numbers, by name."""
        case, (row_ptr, _, schedule) = self.case, self.plan
        head_kv, topk, total_q = self.head_kv, case.topk, case.q.shape[0]
        times = MANY // (total_q * topk)  # more entries
        entries = total_q * topk * times
        batch = case.cu_seqlens_q.shape[0] - 1
        table = torch.full((batch, COLUMNS), -1, dtype=torch.int32)
        table[:, : case.page_table.shape[1]] = case.page_table
        moved = {
            "cu_seqlens_q": within(case.cu_seqlens_q + self.tokens, (SEQUENCES + batch + 1,), (SEQUENCES,)),
            "cu_seqlens_k": within(case.cu_seqlens_k, (SEQUENCES + batch + 1,), (SEQUENCES,)),
            "page_table": within(table, (SEQUENCES + batch, COLUMNS), (SEQUENCES, 0)),
            "page_table_stride": COLUMNS,
            "batch": SEQUENCES + batch,
        }
        if self.walks:
            blocks = schedule.walk_blocks.clone()
            blocks[..., 0] += SEQUENCES
            groups = self.groups + blocks.shape[1]
            return moved | self.far | {
                "total_q": self.tokens + total_q,
                "walk_blocks": within(blocks, (head_kv, groups, *blocks.shape[2:]), (0, self.groups, 0, 0)),
                "walk_counts": within(schedule.walk_counts, (head_kv, groups), (0, self.groups)),
            }  # fmt: skip
        return moved | {
            "topk": topk * times,
            "row_ptr": within(row_ptr, (head_kv, MANY + 1)),
            "total_rows": MANY,
            "entry_words": within(schedule.qsplit_indices, (head_kv, entries)),
            "head_partials": entries,
            "work_count": schedule.work_count + ITEMS,
            "work_capacity": ITEMS + schedule.work_capacity,
        }

    def _workspace(self):
        """What lies between the forward and combine, with nothing of an earlier call."""
        rows = self.moved["entry_words"].numel() * self.case.qhead_per_kv
        return {
            "partial_out": reserved((rows, 128), self.partial),
            "partial_lse": reserved((rows,), torch.float32),
            "partial_lse_temperature": reserved((rows,), torch.float32),
        }

    def _of_combine(self):
        """The same for combine."""
        partials = {name: self.moved[name] for name in self.moved if name.startswith("partial")}
        return partials | {"head_partials": self.moved["head_partials"]}

    def _items(self, grid):
        """The schedule's items: those that CTAs start with, and the others, which they claim."""
        items = self.plan[2].scheduler_metadata.clone()
        items[:, 4] += SEQUENCES
        far = within(items[:grid], (ITEMS + len(items), items.shape[1]))
        far[ITEMS + grid :] = items[grid:]
        return far

    @contextlib.contextmanager
    def _far(self):
        """Launches take what was moved."""
        run, encode_tiled = sim.run, sim.encode_tiled
        before = {name: self.tokens * tensor.stride(0) * tensor.itemsize for name, tensor in self.far.items()}

        def run_far(entry, grid, params, memory):
            names = [param["name"] for param in entry["params"]]
            given = dict(zip(names, params, strict=True))
            if entry["operation"] == "combine":
                new = {} if self.walks else self._of_combine()
            else:
                new = self.moved if self.walks else self.moved | {"scheduler_metadata": self._items(grid)}
                # The next item that is claimed: the first of the last head, or the first that no CTA starts with.
                claimed = (self.head_kv - 1) * new["walk_counts"].shape[1] + self.groups - grid if self.walks else ITEMS
                counter = int.from_bytes(given["work_counter"], "little") + 4 * self.walks
                ctypes.c_int32.from_address(counter).value = claimed
            tensors = {name: value for name, value in new.items() if torch.is_tensor(value)}
            numbers = {name: value.data_ptr() if name in tensors else value for name, value in new.items()}
            params = [
                numbers[name].to_bytes(len(param), "little") if name in numbers and any(param) else param
                for name, param in given.items()
            ]
            return run(entry, grid, params, beside(memory, tensors))

        def encode_far(data_type, address, extents, strides, box, *, swizzle):
            if address == self.case.q.data_ptr():
                address -= before["q"]
                extents = (*extents[:-1], extents[-1] + self.tokens)
            return encode_tiled(data_type, address, extents, strides, box, swizzle=swizzle)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sim, "run", run_far)
            patch.setattr(sim, "encode_tiled", encode_far)
            yield


def beside(memory, tensors):
    """A call's memory, and arrays by name."""
    both = sim.Memory(memory)
    both.stream = memory.stream
    for name, tensor in tensors.items():
        steps = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
        both.append((tensor.data_ptr(), (steps + 1) * tensor.itemsize, name))
    return both


# CSR and schedule -----------------------------------------------------------------------------------------------------

BY_HEAD = (
    "keys", "values", "keys_in", "values_in", "keys_out", "values_out", "indices_out", "entries_out", "rest_out",
    "q_indices", "qsplit_indices", "split_entries",
)  # fmt: skip


@contextlib.contextmanager
def heads_far_apart(heads, size):
    """Launches of the kernels that make CSR and schedule find a head's ``size`` entries far from the next one's.

    size: a multiple of what a CTA takes, for a kernel does not know where the entries end.
    """
    run = sim.run

    def rows(address, length):
        words = (ctypes.c_int32 * (heads * length)).from_address(address)
        return torch.frombuffer(words, dtype=torch.int32).view(heads, length)

    def run_far(entry, grid, params, memory):
        names = [param["name"] for param in entry["params"]]
        given = dict(zip(names, params, strict=True))
        number = {name: int.from_bytes(given[name], "little") for name in names}
        topk = number.get("topk") or entry["options"].get("topk", 1)
        entries, new, near, far = MANY // topk * topk, {}, {}, {}
        if "size" in given or "total_q" in given:
            new["size"], new["total_q"] = entries, entries // topk
            near = {name: rows(number[name], size) for name in BY_HEAD if number.get(name)}
            far = {name: within(array, (heads, entries)) for name, array in near.items()}
        if "row_ptr" in given:
            near["row_ptr"] = rows(number["row_ptr"], number["total_rows"] + 1)
            far["row_ptr"] = within(near["row_ptr"], (heads, MANY + 1))
            far["row_ptr"][:, -1] = near["row_ptr"][:, -1]
            new["total_rows"] = MANY
        if entry["operation"] == "csr_row_ptr":  # the keys ascend, where the search looks
            halves = [half for half in (entries >> number for number in range(1, 32)) if half >= size]
            far["keys"][:, halves] = 2**31 - 1
            far["keys"][:, size : halves[-1]] = 2**31 - 1
        new |= {name: array.data_ptr() for name, array in far.items()}
        params = [new[name].to_bytes(len(given[name]), "little") if name in new else given[name] for name in names]
        statistics = run(entry, grid, params, beside(memory, far))
        for name, array in near.items():
            array.copy_(far[name][:, : array.shape[1]])
        return statistics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim, "run", run_far)
        yield
