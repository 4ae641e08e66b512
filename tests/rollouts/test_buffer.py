"""The buffer gives every episode once per pass, with its own fields, in minibatches counted in tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl4lms_like.rollouts.buffer import EpisodeBuffer
from tests.builders import episodes_of_lengths


def filled(lengths, seed=0, prompt_rows=None, **options):
    buffer = EpisodeBuffer(**options)
    buffer.seed(seed)
    middle = len(lengths) // 2
    for part, offset in ((slice(middle), 0), (slice(middle, None), 1000)):
        episodes = episodes_of_lengths(lengths[part], seed=offset)
        if prompt_rows is not None:
            episodes = replace(episodes, prompt_rows=torch.tensor(prompt_rows[part]))
        n = episodes.n_tokens
        buffer.add(episodes, torch.randn(n), torch.arange(n) + float(offset), -torch.arange(n).float())
    buffer.compute_returns_and_advantage()
    return buffer


@pytest.mark.parametrize("sort_by_length", [False, True])
def test_a_pass_visits_every_token_once(sort_by_length):
    lengths = [3, 9, 1, 4, 4, 7, 2, 8, 5, 6, 3, 2]
    buffer = filled(lengths, sort_by_length=sort_by_length)
    passes = []
    for _ in range(2):
        batches = list(buffer.get(10))
        passes.append(torch.cat([batch.old_values for batch in batches]))
        for batch in batches:
            assert len(batch.actions) <= 10
            assert torch.equal(batch.observations.actions, batch.actions)
            torch.testing.assert_close(batch.advantages, batch.returns - batch.old_values)
            assert torch.equal(batch.old_log_prob % 1000, -(batch.old_values % 1000) % 1000)
        assert sorted(passes[-1].tolist()) == sorted(buffer.values.tolist())
    assert not torch.equal(*passes), "the order is new in every pass"


def test_sorting_by_length_wastes_less_padding():
    lengths = np.random.default_rng(0).integers(1, 40, 96).tolist()

    def padding(buffer):
        return sum(int((~batch.observations.response_mask).sum()) for batch in buffer.get(80))

    assert padding(filled(lengths, sort_by_length=True)) < 0.6 * padding(filled(lengths))


@pytest.mark.parametrize("sort_by_length", [False, True])
def test_responses_to_one_prompt_are_in_one_minibatch(sort_by_length):
    lengths = [3, 9, 1, 4, 4, 7, 2, 8, 5, 6, 3, 2]
    rows = [0, 1, 0, 1, 2, 2, 0, 1, 2, 0, 1, 2]
    buffer = filled(lengths, prompt_rows=rows, sort_by_length=sort_by_length)
    orders = set()
    for _ in range(6):
        found = [batch.observations.prompt_rows.tolist() for batch in buffer.get(30)]
        assert sorted(row for batch in found for row in batch) == sorted(buffer.episodes.prompt_rows.tolist())
        assert sum(len(set(batch)) for batch in found) == 6, "three prompts in each of two parts"
        orders.add(tuple(tuple(batch) for batch in found))
    assert len(orders) > 1, "the order is random"


@pytest.mark.parametrize("sort_by_length", [False, True])
def test_the_order_of_different_prompts_is_that_without_groups(sort_by_length):
    lengths = [2, 3, 4, 5, 3, 2, 7, 1]
    buffers = [
        filled(lengths, prompt_rows=rows, sort_by_length=sort_by_length) for rows in (None, [3, 1, 2, 0, 1, 0, 3, 2])
    ]
    passes = [[batch.old_values.tolist() for _ in range(2) for batch in buffer.get(8)] for buffer in buffers]
    assert passes[0] == passes[1]


def test_the_order_is_the_seeds_and_its_state_can_be_saved():
    def order(buffer):
        return [batch.old_values.tolist() for batch in buffer.get(8)]

    lengths = [2, 3, 4, 5, 3, 2]
    a, b = filled(lengths, seed=4), filled(lengths, seed=4)
    assert order(a) == order(b)
    state = a.state_dict()
    following = order(a)
    c = filled(lengths, seed=5)
    c.load_state_dict(state)
    assert order(c) == following


def test_the_whole_rollout_at_once():
    buffer = filled([2, 3, 4])
    (batch,) = buffer.get(None)
    assert batch.observations.n_episodes == 3
    assert np.array_equal(batch.returns.numpy(), buffer.returns)


def test_a_field_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match=r"rewards .*\(4,\).* 5 "):
        EpisodeBuffer().add(episodes_of_lengths([2, 3]), torch.zeros(4), torch.zeros(5), torch.zeros(5))
