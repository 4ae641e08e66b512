"""Which tokens may be chosen: what top-p and top-k keep, and that bits give back what went in."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl4lms_like.core import token_masks
from rl4lms_like.core.token_masks import (
    contains,
    n_allowed,
    pack,
    packed_size,
    top_k_mask,
    top_p_mask,
    unpack,
    with_tokens,
)


def logits_of(probs):
    return torch.tensor(probs, dtype=torch.float64).log()


@given(st.integers(1, 70), st.integers(1, 5), st.integers(0, 2**31))
def test_bits_give_back_the_mask(vocab_size, n, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(n, vocab_size, generator=generator) < torch.rand(n, 1, generator=generator)
    packed = pack(mask)
    assert packed.dtype == torch.uint8 and packed.shape == (n, packed_size(vocab_size))
    assert torch.equal(unpack(packed, vocab_size), mask)
    assert torch.equal(n_allowed(packed), mask.sum(1))
    tokens = torch.randint(0, vocab_size, (n,), generator=generator)
    assert torch.equal(contains(packed, tokens), mask.gather(1, tokens[:, None]).squeeze(1))


def test_a_token_s_mask_is_an_eighth_of_the_vocabulary_in_bytes():
    for vocab_size, size in ((50257, 6283), (32128, 4016), (8, 1), (9, 2)):
        packed = pack(torch.ones(3, vocab_size).bool())
        assert packed.element_size() * packed[0].numel() == packed_size(vocab_size) == size
        assert n_allowed(packed).tolist() == [vocab_size] * 3, "bits beyond the vocabulary are 0"


def test_the_token_that_crosses_the_threshold_stays():
    logits = logits_of([0.5, 0.05, 0.3, 0.15])
    assert top_p_mask(logits, 0.4).tolist() == [True, False, False, False]
    assert top_p_mask(logits, 0.7).tolist() == [True, False, True, False]
    assert top_p_mask(logits, 0.9).tolist() == [True, False, True, True]


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_looking_at_the_best_tokens_first_changes_nothing(spread, monkeypatch):
    """Peaked, half flat and flat distributions over a vocabulary that is larger than the first look."""
    logits = spread * torch.randn(6, 9000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masks = []
    for n_best in (token_masks.N_BEST, 10**9):
        monkeypatch.setattr(token_masks, "N_BEST", n_best)
        masks += [top_p_mask(logits, p, least) for p in (0.1, 0.9) for least in (1, 2500)]
    for first, second in zip(masks[:4], masks[4:], strict=True):
        assert torch.equal(first, second)


def test_at_least_so_many_tokens_stay():
    logits = logits_of([0.9, 0.05, 0.03, 0.02])
    assert [int(top_p_mask(logits, 0.1, least).sum()) for least in (1, 2, 3, 9)] == [1, 2, 3, 4]
    assert top_p_mask(logits, 0.1, 2).tolist() == [True, True, False, False]


def test_all_of_the_probability_is_every_token():
    """Also where rounding lifts the cumulative sum above 1."""
    logits = 3 * torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0))
    assert bool(top_p_mask(logits, 1.0).all())


@given(st.floats(0.01, 1.0), st.integers(1, 12), st.integers(0, 2**31))
def test_top_p_is_the_shortest_run_of_the_best_tokens(p, least, seed):
    logits = 3 * torch.randn(10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = top_p_mask(logits, p, least)
    probs, order = logits.softmax(0).sort(descending=True)
    n = int(mask.sum())
    assert torch.equal(mask[order], torch.arange(10) < n)
    assert n >= min(least, 10)
    if p < 1.0:
        assert float(probs[:n].sum()) > p - 1e-12
        assert n == min(least, 10) or n == 1 or float(probs[: n - 1].sum()) <= p


def test_top_k_keeps_k_tokens_and_no_more_than_there_are():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]])
    assert top_k_mask(logits, 2)[0].tolist() == [False, True, True]
    assert top_k_mask(logits, 2).sum(1).tolist() == [2, 2]
    assert bool(top_k_mask(logits, 7).all())


def test_some_tokens_are_always_allowed():
    assert with_tokens(torch.zeros(2, 4).bool(), [3, 1]).tolist() == [[False, True, False, True]] * 2
    assert not bool(with_tokens(torch.zeros(2, 4).bool(), []).any())
