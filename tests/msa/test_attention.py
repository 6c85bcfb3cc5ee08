"""Numbers: the pipeline against the reference, over layouts, topk, G, masks and partial dtypes."""

from functools import lru_cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pipeline import attend, build, check, run  # noqa: E402
from reference import LAYOUTS, assert_lse_close, assert_out_close, make_case, offsets, ragged  # noqa: E402

PARTIAL_DTYPES = ("float32", "bfloat16")


@lru_cache(maxsize=2)
def ragged_case(layout, topk, qhead_per_kv, causal):
    seed = topk * 100 + qhead_per_kv * 2 + causal
    lens_q, lens_k = ragged(np.random.default_rng(seed), 10, 90, 3000)
    case = make_case(
        lens_q=lens_q, lens_k=lens_k, head_kv=2, qhead_per_kv=qhead_per_kv, topk=topk, layout=layout, causal=causal,
        trim=bool(seed // 2 % 2), seed=seed, device="cuda",
    )  # fmt: skip
    return case, build(case), case.reference()


@pytest.mark.parametrize("partial_dtype", PARTIAL_DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("qhead_per_kv", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("topk", [4, 8, 16, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_batch_with_poisoned_keys_matches_the_reference(layout, topk, qhead_per_kv, causal, partial_dtype):
    case, plan, want = ragged_case(layout, topk, qhead_per_kv, causal)
    out, lse = attend(case, plan, partial_dtype=partial_dtype)
    assert_out_close(out, want)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("partial_dtype", PARTIAL_DTYPES)
@pytest.mark.parametrize("head_kv", [1, 3, 8])
def test_any_number_of_kv_heads_matches_the_reference(head_kv, partial_dtype):
    case = make_case(
        lens_q=[70, 300], lens_k=[900, 1111], head_kv=head_kv, qhead_per_kv=8, topk=8, layout="interleaved",
        causal=True, seed=head_kv, device="cuda",
    )  # fmt: skip
    check(case, partial_dtype=partial_dtype)


@pytest.mark.parametrize("partial_dtype", PARTIAL_DTYPES)
@pytest.mark.parametrize("qhead_per_kv", [1, 2, 4, 8, 16])
def test_temperature_lse_matches_the_reference(qhead_per_kv, partial_dtype):
    lens_q, lens_k = ragged(np.random.default_rng(4), 6, 60, 1500)
    case = make_case(
        lens_q=lens_q, lens_k=lens_k, qhead_per_kv=qhead_per_kv, topk=8, layout="packed", causal=True, seed=4,
        device="cuda",
    )  # fmt: skip
    options = {"return_temperature_lse": True, "partial_dtype": partial_dtype}
    out, lse, lse_temperature = run(case, lse_temperature_scale=2.5, **options)
    want = case.reference(lse_temperature_scale=2.5)
    assert_out_close(out, want)
    assert_lse_close(lse, want.lse)
    assert_lse_close(lse_temperature, want.lse_temperature)
    _, lse, lse_temperature = run(case, lse_temperature_scale=1.0, **options)
    assert lse_temperature.data_ptr() == lse.data_ptr(), "at temperature 1 both are one tensor"


@pytest.mark.parametrize("softmax_scale", [0.02, 1.0])
def test_softmax_scale_is_applied_to_out_and_lse(softmax_scale):
    case = make_case(lens_q=[150], lens_k=[1200], topk=8, seed=6, device="cuda")
    out, lse = run(case, softmax_scale=softmax_scale)
    want = case.reference(softmax_scale=softmax_scale)
    assert_out_close(out, want)
    assert_lse_close(lse, want.lse)


def test_without_lse_only_out_is_returned():
    case = make_case(lens_q=[50], lens_k=[700], seed=9, device="cuda")
    out = run(case, return_softmax_lse=False)
    assert isinstance(out, torch.Tensor)
    assert_out_close(out, case.reference())


@pytest.mark.parametrize("qhead_per_kv", [1, 4, 16])
def test_attention_without_a_schedule_gives_the_same_bits(qhead_per_kv):
    lens_q, lens_k = ragged(np.random.default_rng(8), 7, 80, 1500)
    case = make_case(lens_q=lens_q, lens_k=lens_k, qhead_per_kv=qhead_per_kv, topk=16, seed=8, device="cuda")
    plan = build(case)
    for with_schedule, without in zip(attend(case, plan), attend(case, plan, schedule=None), strict=True):
        assert torch.equal(with_schedule, without)


def test_a_first_slot_that_sees_nothing_does_not_hide_later_keys():
    # The block with the lowest number is the one whose keys all lie past seqused_k or beyond the diagonal.
    lens_q, lens_k = [4, 3], [640, 640]
    q2k = np.full((1, 7, 4), -1, np.int32)
    q2k[0, :4] = [-1, 4, -1, 0]
    q2k[0, 4:] = [4, -1, 3, -1]
    case = make_case(lens_q=lens_q, lens_k=lens_k, head_kv=1, q2k=q2k, causal=True, poison=False, device="cuda")
    case.seqused_k = torch.tensor([512, 386], dtype=torch.int32, device="cuda")
    check(case)
    case.seqused_k = torch.tensor([3, 2], dtype=torch.int32, device="cuda")  # fewer keys than queries
    check(case)


def test_rows_that_select_nothing_give_zero_and_minus_infinity():
    q2k = np.full((2, 40, 8), -1, np.int32)
    case = make_case(lens_q=[40], lens_k=[500], topk=8, q2k=q2k, device="cuda")
    out, lse = run(case)
    assert not out.any() and (lse == -torch.inf).all()


def test_neighbouring_tokens_keep_their_own_selection():
    # Token i selects block i only: merged or shared rows would mix values that differ by block.
    blocks = 40
    q2k = np.full((2, blocks, 4), -1, np.int32)
    q2k[0, :, 2] = np.arange(blocks)
    q2k[1, :, 1] = np.arange(blocks)[::-1]
    case = make_case(lens_q=[blocks], lens_k=[blocks * 128], q2k=q2k, poison=False, device="cuda")
    case.v[:] = (torch.arange(blocks * 128, device="cuda") // 128)[:, None, None].to(torch.bfloat16)
    out = run(case)[0].view(blocks, 2, -1).float()
    want = torch.arange(blocks, device="cuda").float()
    assert (out[:, 0] == want[:, None]).all() and (out[:, 1] == want.flip(0)[:, None]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_runs_are_bitwise_equal(layout):
    lens_q, lens_k = ragged(np.random.default_rng(12), 9, 400, 4000)
    case = make_case(
        lens_q=lens_q, lens_k=lens_k, qhead_per_kv=8, topk=16, layout=layout, causal=True, seed=12, device="cuda"
    )
    first = run(case, partial_dtype="bfloat16")
    for _ in range(3):
        again = run(case, partial_dtype="bfloat16")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_tokens_and_page_table_rows_past_the_batch_are_padding():
    # A captured graph's padding: more query rows than cu_seqlens_q covers, sequences of length 0, pages of -1.
    lens_q, lens_k = [30, 20, 0, 0], [400, 300, 0, 0]
    case = make_case(lens_q=lens_q, lens_k=lens_k, layout="paged", causal=True, seed=14, device="cuda")
    live, padding = 50, 14
    case.q = torch.cat([case.q, torch.full_like(case.q[:padding], torch.nan)])
    case.q2k = torch.cat([case.q2k, torch.zeros_like(case.q2k[:, :padding])], dim=1)
    case.page_table[2:] = -1
    out, lse = run(case)
    want = case.reference(torch.arange(live, device="cuda"))
    assert_out_close(out[:live], want)
    assert_lse_close(lse[:live], want.lse)
    assert not out[live:].any() and (lse[live:] == -torch.inf).all()


def test_stale_length_hints_are_refused_or_harmless():
    case = make_case(lens_q=[200, 150], lens_k=[2000, 1500], topk=8, causal=True, seed=15, device="cuda")
    want = case.reference()
    for hint in (1, 128, 1999, 1 << 20):
        try:
            out, lse = attend(
                case, build(case, max_seqlen_k=hint, max_seqlen_q=hint), max_seqlen_k=hint, max_seqlen_q=hint
            )
        except ValueError as error:
            assert "max_seqlen" in str(error)
            continue
        assert_out_close(out, want)
        assert_lse_close(lse, want.lse)


def test_q_may_be_a_strided_view():
    case = make_case(lens_q=[100], lens_k=[900], seed=16, device="cuda")
    wide = torch.randn(100, 12, 256, device="cuda").bfloat16()
    case.q = wide[:, 2:10, 128:]
    check(case)


def test_offsets_of_a_batch_with_only_empty_sequences_give_empty_rows():
    case = make_case(lens_q=[5, 0, 7], lens_k=[0, 0, 0], seed=17, device="cuda")
    assert case.total_rows == 0 and offsets([0, 0, 0])[-1] == 0
    out, lse = run(case)
    assert out.shape == case.q.shape and not out.any() and (lse == -torch.inf).all()
