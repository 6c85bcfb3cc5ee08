"""What a row may depend on: its own queries, and the keys that it selected and sees. Nothing else, in any bit."""

import numpy as np
import pytest
import torch
from places import attend, build, check, run
from reference import BLOCK, make_case

G = (1, 2, 4, 8, 16)
LENS_Q, LENS_K = (50, 46), (300, 280)  # the sequences share a group of any size
POISON = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def overlapping(seed, topk=4, head_kv=2):
    """int32 [Hkv, total_q, topk]: most tokens select block 0 of their sequence, some a further one, some none."""
    rng = np.random.default_rng(seed)
    share = np.array([0.8, 0.4, 0.3])  # of the tokens select block 0, 1, 2
    selected = rng.random((head_kv, sum(LENS_Q), 3)) < share
    blocks = np.where(selected, np.arange(3), -1)
    blocks = np.concatenate([blocks, np.full((*blocks.shape[:2], topk - 3), -1)], axis=-1)
    return rng.permuted(blocks, axis=-1).astype(np.int32)


def case_of(place, g=8, q2k=None, seed=0, **options):
    q2k = overlapping(seed) if q2k is None else q2k
    return make_case(
        lens_q=LENS_Q, lens_k=LENS_K, qhead_per_kv=g, q2k=q2k, poison=False, seed=seed, device=place.device, **options
    )


def bits(out, lse):
    """[total_q, Hkv, bytes] of the results of each (token, KV head)."""
    return torch.cat([x.reshape(x.shape[0], 2, -1).contiguous().view(torch.uint8) for x in (out, lse)], dim=-1)


def poison(case, blocks, value):
    """Overwrite K and V of (sequence, block)s of a flat cache."""
    for sequence, block in blocks:
        start = int(case.cu_seqlens_k[sequence]) + block * BLOCK
        end = min(start + BLOCK, int(case.cu_seqlens_k[sequence + 1]))
        case.k[start:end] = value
        case.v[start:end] = value


def selects(case, blocks):
    """bool [total_q, Hkv]: which rows selected one of the (sequence, block)s."""
    token = torch.arange(case.q.shape[0], device=case.q.device)
    sequence = (token >= case.cu_seqlens_q[1]).int()
    found = torch.zeros((case.q2k.shape[0], len(token)), dtype=torch.bool, device=case.q.device)
    for wanted, block in blocks:
        found |= (case.q2k == block).any(-1) & (sequence == wanted)
    return found.T


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("g", G)
def test_no_byte_of_a_block_that_a_row_did_not_select_reaches_it(place, g, causal):
    for traversal in place.traversals:
        case = case_of(place, g, causal=causal)
        clean = bits(*run(case, traversal))
        for number, value in enumerate(POISON.values()):
            case = case_of(place, g, causal=causal)
            blocks = [(0, 0), (1, 2)] if number % 2 else [(0, 1), (1, 0)]
            poison(case, blocks, value)
            out, lse = run(case, traversal)
            reached = selects(case, blocks)
            assert torch.equal(bits(out, lse)[~reached], clean[~reached])
            heads = out.reshape(*reached.shape, g, -1)
            nothing = (case.q2k < 0).all(-1).T
            assert nothing.any() and not heads[nothing].any(), "a row that selects nothing is 0"
            assert (lse.reshape(*reached.shape, g)[nothing] == -torch.inf).all()


@pytest.mark.parametrize("g", G)
def test_a_nan_in_one_value_of_a_request_stays_in_the_request(place, g):
    """Two requests share groups, every token selects its block 0."""
    q2k = np.full((2, sum(LENS_Q), 4), -1, np.int32)
    q2k[..., 2] = 0
    for traversal in place.traversals:
        case = case_of(place, g, q2k)
        clean = bits(*run(case, traversal))
        case.v[5] = torch.nan
        assert torch.equal(bits(*run(case, traversal))[LENS_Q[0] :], clean[LENS_Q[0] :])


@pytest.mark.parametrize("g", G)
def test_the_bits_of_a_row_do_not_depend_on_what_its_neighbours_select(place, g):
    mine = np.random.default_rng(1).random(sum(LENS_Q)) < 0.5
    q2k, other = overlapping(0), overlapping(7)
    other[:, mine] = q2k[:, mine]
    for traversal in place.traversals[:2]:  # what a mixture walks is the schedule's, which neighbours decide
        one, two = (bits(*run(case_of(place, g, selection, causal=True), traversal)) for selection in (q2k, other))
        assert torch.equal(one[mine], two[mine])
        assert not torch.equal(one, two)


@pytest.mark.parametrize("g", [1, 16])
def test_rows_before_all_of_their_keys_are_zero_whatever_stands_there(place, g):
    """The first tokens of the first sequence select its last block only, which lies past their diagonal."""
    q2k = overlapping(0)
    q2k[:, :5] = [-1, 2, -1, -1]
    for traversal in place.traversals:
        case = case_of(place, g, q2k, causal=True)
        poison(case, [(0, 2)], torch.nan)
        out, lse = run(case, traversal)
        assert not out[:5].any()
        assert (lse[:5] == -torch.inf).all()


def test_a_nan_that_a_row_sees_is_not_hidden(place):
    for traversal in place.traversals:
        case = case_of(place)
        case.k[3] = torch.nan
        out, lse = run(case, traversal)
        sees = selects(case, [(0, 0)])
        assert sees.any()
        assert out.reshape(*sees.shape, -1)[sees].isnan().all()
        assert lse.reshape(*sees.shape, -1)[sees].isnan().all()


# Keys that do not exist ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page", [-1, -(2**31), "num_pages", 2**31 - 1])
def test_keys_of_a_page_that_the_pool_does_not_have_are_not_there(place, page, causal):
    for traversal in place.traversals:
        case = case_of(place, layout="paged", causal=causal)
        pages = case.page_table.clone()
        pages[0, 1] = pages[1, 0] = case.k.shape[0] if page == "num_pages" else page
        case.page_table = pages
        check(case, traversal)


def test_a_pool_without_pages_has_no_keys(place):
    case = case_of(place, layout="paged")
    plan = build(case)
    case.k, case.v = case.k[:0], case.v[:0]
    out, lse = attend(case, plan)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("columns", [1, 2])
def test_keys_of_columns_that_the_page_table_lacks_are_not_there(place, columns):
    for traversal in place.traversals:
        case = case_of(place, layout="interleaved", causal=True)
        case.page_table = case.page_table[:, :columns]
        check(case, traversal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("used", [(900, 200), (300, 2**31 - 1), (-5, 280), (129, -(2**31))])
def test_a_flat_sequence_has_no_more_keys_than_its_own(place, used, causal):
    for traversal in place.traversals:
        case = case_of(place, causal=causal)
        case.seqused_k = torch.tensor(used, dtype=torch.int32, device=place.device)
        check(case, traversal)


@pytest.mark.parametrize("missing", [1, 24, 25, 280, 400])
def test_keys_past_the_end_of_a_flat_tensor_are_not_there(place, missing):
    for traversal in place.traversals:
        case = case_of(place, causal=True)
        plan = build(case, traversal)
        storage_k, storage_v = case.k.clone(), case.v.clone()
        storage_k[-missing:] = storage_v[-missing:] = torch.nan
        case.k, case.v = storage_k[:-missing], storage_v[:-missing]
        out, lse = attend(case, plan)
        want = case.reference()
        assert torch.equal(lse == -torch.inf, want.lse == -torch.inf)
        assert ((out.float() - want.out).abs() <= want.tolerance).all()
