"""Padding is invisible, packing is a partition within budget, flat and padded are two views of the same numbers."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from rl4lms_like.core.episodes import EpisodeBatch, pack_episodes, response_mask_until_end
from rl4lms_like.core.token_masks import contains, pack
from tests.builders import episodes_of_lengths

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=9)


@given(lengths, st.integers(1, 40), st.randoms(use_true_random=False))
def test_packing_is_a_partition_within_budget(lengths, batch_size, random):
    order = list(range(len(lengths)))
    random.shuffle(order)
    groups = pack_episodes(lengths, order, batch_size)
    assert [episode for group in groups for episode in group] == order
    for group in groups:
        assert sum(lengths[i] for i in group) <= batch_size or len(group) == 1
    for first, second in itertools.pairwise(groups):
        assert sum(lengths[i] for i in first) + lengths[second[0]] > batch_size


@given(lengths, st.integers(0, 5), st.integers(0, 5), st.sampled_from(["left", "right"]))
def test_padding_and_trimming_keep_every_action(lengths, prompt_padding, response_padding, side):
    batch = episodes_of_lengths(lengths, side=side, prompt_padding=prompt_padding, response_padding=response_padding)
    trimmed = batch.trimmed()
    assert trimmed.response_ids.shape[1] == max(lengths)
    assert trimmed.prompt_ids.shape[1] == 3
    assert torch.equal(trimmed.actions, batch.actions)
    assert torch.equal(trimmed.prompt_ids[trimmed.prompt_mask], batch.prompt_ids[batch.prompt_mask])
    wide = trimmed.widened(11, 17)
    assert wide.prompt_ids.shape[1] == 11 and wide.response_ids.shape[1] == 17
    assert torch.equal(wide.actions, batch.actions)
    assert torch.equal(wide.lengths, batch.lengths)


@given(lengths, st.randoms(use_true_random=False))
def test_a_flat_field_follows_its_episodes(lengths, random):
    batch = episodes_of_lengths(lengths)
    field = torch.arange(batch.n_tokens, dtype=torch.float32)
    assert torch.equal(batch.pad(field)[batch.response_mask], field)
    order = list(range(len(lengths)))
    random.shuffle(order)
    index = torch.tensor(order[: max(1, len(order) // 2)])
    assert torch.equal(batch.actions[batch.token_index(index)], batch.select(index).actions)
    assert batch.select(index).n_tokens == len(batch.token_index(index))


@given(lengths, lengths, st.randoms(use_true_random=False))
def test_masks_follow_their_tokens(first, second, random):
    """Each token's mask allows that token only, so a mask in the wrong place shows."""

    def with_masks(batch):
        return replace(batch, allowed=pack(one_hot(batch.actions, 50).bool()))

    a, b = with_masks(episodes_of_lengths(first, seed=1)), with_masks(episodes_of_lengths(second, seed=2))
    both = EpisodeBatch.concatenated([a, b])
    order = list(range(both.n_episodes))
    random.shuffle(order)
    some = both.select(torch.tensor(order[: max(1, len(order) // 2)]))
    for batch in (a, both, some, some.widened(9, 20), some.widened(9, 20).trimmed(), some.to("cpu")):
        assert batch.allowed.shape == (batch.n_tokens, 7)
        assert bool(contains(batch.allowed, batch.actions).all())
    assert episodes_of_lengths(first).select(torch.tensor([0])).widened(9, 20).to("cpu").allowed is None


def test_batches_with_and_without_masks_are_not_joined():
    plain = episodes_of_lengths([2, 3])
    masked = replace(plain, allowed=pack(torch.ones(plain.n_tokens, 50).bool()))
    with pytest.raises(ValueError):
        EpisodeBatch.concatenated([plain, masked])


@given(lengths, lengths)
def test_concatenation_keeps_order(first, second):
    a, b = episodes_of_lengths(first, seed=1), episodes_of_lengths(second, prompt_lengths=[5] * len(second), seed=2)
    both = EpisodeBatch.concatenated([a, b])
    assert torch.equal(both.actions, torch.cat([a.actions, b.actions]))
    assert both.n_episodes == len(first) + len(second)
    assert torch.equal(
        both.prompt_ids[both.prompt_mask], torch.cat([a.prompt_ids[a.prompt_mask], b.prompt_ids.flatten()])
    )


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=5),
    st.sets(st.integers(0, 4), max_size=2),
)
def test_an_episode_reaches_to_its_first_end_token(rows, ends):
    mask, terminated = response_mask_until_end(torch.tensor(rows), sorted(ends))
    for row, kept, ended in zip(rows, mask.tolist(), terminated.tolist(), strict=True):
        first = next((i for i, token in enumerate(row) if token in ends), None)
        assert ended == (first is not None)
        assert kept == [i <= (5 if first is None else first) for i in range(6)]
