"""Padding is invisible, packing is a partition within budget, flat and padded are two views of the same numbers."""

import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from rl4lms_like.core.episodes import (
    EpisodeBatch,
    PassLimits,
    own_batches,
    pack_episodes,
    pack_passes,
    response_mask_until_end,
)
from rl4lms_like.core.token_masks import contains, pack
from rl4lms_like.system.ranks import Ranks
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


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 40), st.randoms(use_true_random=False))
def test_responses_to_one_prompt_are_packed_together_if_they_fit(sizes, batch_size, random):
    rows = [row for row, size in enumerate(sizes) for _ in range(size)]
    lengths = [random.randint(1, 9) for _ in rows]
    order = list(range(len(rows)))
    batches = pack_episodes(lengths, order, batch_size, torch.tensor(rows))
    assert [episode for batch in batches for episode in batch] == order
    totals = [
        sum(length for length, other in zip(lengths, rows, strict=True) if other == row) for row in range(len(sizes))
    ]
    for batch in batches:
        assert sum(lengths[i] for i in batch) <= batch_size or len(batch) == 1
    for row, total in enumerate(totals):
        n_batches = sum(row in {rows[i] for i in batch} for batch in batches)
        assert n_batches == 1 or total > batch_size
    for first, second in itertools.pairwise(batches):
        following = totals[rows[second[0]]]
        added = following if following <= batch_size else lengths[second[0]]
        assert sum(lengths[i] for i in first) + added > batch_size, "no minibatch is smaller than necessary"


@given(lengths, st.integers(1, 40), st.randoms(use_true_random=False))
def test_different_prompts_do_not_change_the_packing(lengths, batch_size, random):
    order = random.sample(range(len(lengths)), len(lengths))
    rows = torch.tensor(random.sample(range(100), len(lengths)))
    assert pack_episodes(lengths, order, batch_size, rows) == pack_episodes(lengths, order, batch_size)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9))
def test_shared_prompts_find_one_episode_of_each(numbers):
    batch = replace(episodes_of_lengths([1] * len(numbers)), prompt_rows=torch.tensor(numbers))
    units = batch.together(batch.prompt_rows)
    assert sorted(episode for unit in units for episode in unit) == list(range(len(numbers)))
    assert [{numbers[episode] for episode in unit} for unit in units] == [{n} for n in dict.fromkeys(numbers)]
    shared = batch.shared_prompts()
    assert (shared is None) == (len(set(numbers)) == len(numbers))
    if shared is not None:
        one_each, rows = shared
        assert len(one_each) == len(units)
        assert batch.prompt_rows[one_each][rows].tolist() == numbers


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


@st.composite
def batches_with_prompts(draw):
    """Episodes with prompts and responses of different lengths; those of a group have one prompt."""
    prompt_lengths, lengths, rows = [], [], []
    for row, size in enumerate(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))):
        prompt_lengths += [draw(st.integers(1, 12))] * size
        lengths += draw(st.lists(st.integers(1, 12), min_size=size, max_size=size))
        rows += [row] * size
    side = draw(st.sampled_from(["left", "right"]))
    batch = episodes_of_lengths(lengths, prompt_lengths=prompt_lengths, side=side)
    return replace(batch, prompt_rows=torch.tensor(rows))


@given(batches_with_prompts(), st.integers(1, 80), st.booleans())
def test_no_pass_has_more_tokens_of_prompts_and_responses_than_allowed(batch, limit, shares_prompts):
    limits = PassLimits(limit, shares_prompts=shares_prompts)
    passes = pack_passes(batch, limits)
    assert [episode for rows in passes for episode in rows] == list(range(batch.n_episodes))

    def n_tokens(rows):
        chosen = batch.select(torch.tensor(rows))  # trimmed: the matrices that the model reads
        firsts = chosen.shared_prompts() if shares_prompts else None
        n_prompts = chosen.n_episodes if firsts is None else len(firsts[0])
        return n_prompts * chosen.prompt_ids.shape[1] + chosen.response_ids.numel()

    for rows in passes:
        assert n_tokens(rows) <= limit or len(rows) == 1

    # No pass is smaller than necessary: the next group, or its first response if it is split, would not have fitted.
    for first, second in itertools.pairwise(passes):
        group = [row for row in second if batch.prompt_rows[row] == batch.prompt_rows[second[0]]]
        assert n_tokens(first + group) > limit or n_tokens([*first, second[0]]) > limit


@given(batches_with_prompts(), st.integers(1, 40))
def test_passes_limited_by_their_response_tokens_are_packed_as_minibatches(batch, limit):
    lengths, order = batch.response_lengths.tolist(), range(batch.n_episodes)
    passes = pack_passes(batch, PassLimits(response_tokens=limit))
    assert passes == pack_episodes(lengths, order, limit, batch.prompt_rows)


def test_a_shared_prompt_counts_once_and_a_separate_one_for_each_response():
    batch = replace(episodes_of_lengths([2] * 8, prompt_lengths=[40] * 8), prompt_rows=torch.arange(8) // 4)
    assert pack_passes(batch, PassLimits(tokens=48, shares_prompts=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert pack_passes(batch, PassLimits(tokens=84)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_padding_counts_as_it_passes_through_the_model():
    batch = episodes_of_lengths([10, 1, 1, 1], prompt_lengths=[1, 1, 1, 10])
    assert pack_passes(batch, PassLimits(tokens=22)) == [[0, 1], [2, 3]]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    n_together=st.sampled_from([1, 2, 3]),
    limit=st.sampled_from([None, 1, 20]),
    size=st.integers(1, 5),
    in_step=st.booleans(),
)
def test_processes_share_out_all_episodes_and_make_equally_many_passes_in_step(
    lengths, n_together, limit, size, in_step
):
    batch = episodes_of_lengths([length for length in lengths for _ in range(n_together)])
    processes = [Ranks() for _ in range(size)]
    for rank, ranks in enumerate(processes):
        ranks.rank = rank
        ranks.size = size

    of_all = [own_batches(batch, PassLimits(tokens=limit), ranks, n_together, in_step=in_step) for ranks in processes]
    assert [episode for passes in of_all for group in passes for episode in group] == list(range(batch.n_episodes))
    for group in itertools.chain.from_iterable(of_all):
        assert [
            unit * n_together + k for unit in sorted({e // n_together for e in group}) for k in range(n_together)
        ] == group
    if in_step:
        assert len({len(passes) for passes in of_all}) == 1
    else:
        assert all(group for passes in of_all for group in passes)


@given(lengths, st.data())
def test_a_layout_is_that_of_the_tensors_whatever_was_selected(lengths, data):
    n = len(lengths)
    flags = st.lists(st.booleans(), min_size=max(lengths), max_size=max(lengths))
    observed = torch.tensor([data.draw(flags) for _ in lengths])
    observed[:, 0] = False  # every episode has an action
    numbers = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    batch = replace(episodes_of_lengths(lengths), observed=observed, group_ids=numbers, prompt_rows=numbers)

    # A part of a part has a layout that was never read from its own tensors.
    rows = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9))
    part = batch.select(rows).select(torch.arange(len(rows) - 1, -1, -1)).without_masks()
    layout = part.layout
    assert torch.equal(layout.prompt_lengths, part.prompt_mask.sum(dim=1))
    assert torch.equal(layout.response_lengths, part.response_mask.sum(dim=1))
    assert torch.equal(layout.action_mask, part.response_mask & ~part.observed)
    assert torch.equal(layout.group_ids, part.group_ids) and torch.equal(layout.prompt_rows, part.prompt_rows)
    assert layout.n_actions == part.n_tokens == int(part.lengths.sum())
    assert torch.equal(part.actions, part.response_ids[part.action_mask])


def test_other_masks_and_another_process_have_no_layout_of_before():
    batch = episodes_of_lengths([2, 4])
    assert batch.layout.n_actions == 6
    shorter = replace(batch, response_mask=batch.response_mask & (torch.arange(4) < 1))
    assert shorter.n_tokens == 2 and shorter.actions.tolist() == batch.response_ids[:, 0].tolist()
    restored = pickle.loads(pickle.dumps(batch))
    assert "layout" not in vars(restored) and restored.n_tokens == 6
