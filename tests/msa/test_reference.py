"""The reference against independent computations: torch's dense attention and plain loops."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import reference  # noqa: E402
from reference import BLOCK, LAYOUTS, make_case, ragged  # noqa: E402


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_selecting_every_block_equals_dense_attention(layout, causal):
    lens_q, lens_k = [37, 1, 0, 90], [300, 512, 128, 90]
    everything = np.tile(np.arange(4, dtype=np.int32), (2, sum(lens_q), 1))
    case = make_case(lens_q=lens_q, lens_k=lens_k, layout=layout, causal=causal, q2k=everything, trim=True, seed=3)
    got = case.reference(lse_temperature_scale=2.0)
    k, v = case.k.float(), case.v.float()
    start = 0
    for b, len_q in enumerate(lens_q):
        len_k, queries = int(case.seqused_k[b]), case.q[start : start + len_q].float().transpose(0, 1)
        if case.page_table is None:
            first = int(case.cu_seqlens_k[b])
            keys, values = (x[first : first + len_k].transpose(0, 1) for x in (k, v))
        else:
            pages = case.page_table[b, : -(-lens_k[b] // BLOCK)].long()
            keys, values = (x[pages].transpose(0, 1).flatten(1, 2)[:, :len_k] for x in (k, v))
        keys, values = (x.repeat_interleave(case.qhead_per_kv, 0) for x in (keys, values))
        hidden = torch.zeros(len_q, len_k, dtype=torch.bool)
        if causal:
            hidden = torch.ones(len_q, len_k, dtype=torch.bool).triu(1 + len_k - len_q)
        want = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, ~hidden).nan_to_num()
        scores = (queries @ keys.transpose(1, 2) * 128**-0.5).masked_fill(hidden, -torch.inf)
        part = slice(start, start + len_q)
        torch.testing.assert_close(got.out[part], want.transpose(0, 1), atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(got.lse[part], scores.logsumexp(-1).T)
        torch.testing.assert_close(got.lse_temperature[part], (scores / 2).logsumexp(-1).T)
        start += len_q


@pytest.mark.parametrize("layout", LAYOUTS)
def test_poison_never_reaches_the_reference(layout):
    lens_q, lens_k = ragged(np.random.default_rng(5), 9, 20, 700)
    case = make_case(lens_q=lens_q, lens_k=lens_k, layout=layout, causal=True, trim=True, seed=5)
    assert case.k.isnan().any() and case.v.isinf().any()
    got = case.reference()
    assert not got.out.isnan().any() and not got.lse.isnan().any()
    assert (got.lse == -torch.inf).any() and got.lse.isfinite().any()
    assert not got.out[got.lse == -torch.inf].any()


def test_a_subset_of_tokens_gives_the_same_rows():
    case = make_case(lens_q=[50, 20], lens_k=[600, 200], topk=8, seed=7)
    tokens = torch.tensor([69, 3, 40])
    torch.testing.assert_close(case.reference(tokens).out, case.reference().out[tokens])


def test_tokens_of_no_sequence_see_nothing():
    case = make_case(lens_q=[20, 12], lens_k=[300, 300], seed=8)
    case.cu_seqlens_q[-1] = 25
    got = case.reference(torch.arange(25, 32))
    assert not got.out.any() and (got.lse == -torch.inf).all()


@pytest.mark.parametrize("seed", range(4))
def test_csr_equals_plain_loops(seed):
    rng = np.random.default_rng(seed)
    lens_q, lens_k = ragged(rng, 6, 15, 900)
    q2k = reference.random_q2k(rng, lens_q, lens_k, 2, 8)
    cu_q, cu_k = reference.offsets(lens_q), reference.offsets(lens_k)
    got = reference.csr(q2k, cu_q, cu_k)

    rows = {}
    for block in range(8):
        for b, len_k in enumerate(lens_k):
            if block * BLOCK < len_k:
                rows[b, block] = len(rows)
    assert [*zip(got.sequence, got.block, strict=True)] == list(rows)
    for head in range(2):
        queries = [[] for _ in rows]
        for b in range(len(lens_q)):
            for token in range(cu_q[b], cu_q[b + 1]):
                blocks = sorted(block for block in set(q2k[head, token].tolist()) if (b, block) in rows)
                assert got.split_counts[token, head] == len(blocks)
                for slot, block in enumerate(blocks):
                    queries[rows[b, block]].append((token, token | slot << 24))
        tail = [-1] * (q2k[head].size - sum(map(len, queries)))
        assert got.row_ptr[head].tolist() == [0, *np.cumsum([len(row) for row in queries])]
        assert got.q_indices[head].tolist() == [token for row in queries for token, _ in row] + tail
        assert got.qsplit_indices[head].tolist() == [word for row in queries for _, word in row] + tail


def test_check_schedule_accepts_a_cover_and_rejects_gaps_and_wrong_blocks():
    case = make_case(lens_q=[30, 30], lens_k=[500, 300], seed=11)
    want = case.csr()
    items = []
    for head, row_ptr in enumerate(want.row_ptr):
        for row, size in enumerate(np.diff(row_ptr)):
            for first in range(0, size, 8):
                items.append((head, row, first, min(8, size - first), want.sequence[row], want.block[row]))
    items = np.array(items[::-1], np.int32)
    reference.check_schedule(items, len(items), 8, want)
    for column, change in ((2, 1), (3, -1), (4, 1), (5, 1)):
        broken = items.copy()
        broken[5, column] += change
        with pytest.raises((AssertionError, IndexError)):
            reference.check_schedule(broken, len(items), 8, want)
    with pytest.raises(AssertionError):
        reference.check_schedule(items, len(items) - 1, 8, want)


def test_tolerances_reject_what_they_must():
    case = make_case(lens_q=[20], lens_k=[400], seed=13)
    got = case.reference()
    reference.assert_out_close(got.out.bfloat16(), got)
    reference.assert_lse_close(got.lse, got.lse)
    wrong = got.out.bfloat16()
    wrong[3, 2, 5] += 2 * got.tolerance[3, 2, 5]
    with pytest.raises(AssertionError):
        reference.assert_out_close(wrong, got)
    wrong[3, 2, 5] = torch.nan
    with pytest.raises(AssertionError, match="NaN"):
        reference.assert_out_close(wrong, got)
    with pytest.raises(AssertionError, match="lse"):
        reference.assert_lse_close(got.lse * (1 + 1e-4), got.lse)
