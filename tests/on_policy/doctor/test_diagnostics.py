"""What an iteration shows, as numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rl4lms_like.core.continuation import Continuations
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.on_policy.doctor.diagnostics import N_COMPARED, diagnostics_of, rank_correlation, rollout_examples


def episodes(responses: list[list[int]], prompts: list[list[int]], *, ended: bool = True) -> EpisodeBatch:
    width = max(map(len, responses))
    ids = torch.tensor([[*row, *[7] * (width - len(row))] for row in responses])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in responses])
    prompt_ids = torch.tensor(prompts)
    return EpisodeBatch(
        prompt_ids, torch.ones_like(prompt_ids, dtype=torch.bool), ids, mask, torch.full((len(responses),), ended)
    )


def test_logged_numbers_go_by_their_own_names_and_none_is_what_is_no_number():
    batch = episodes([[5, 1], [6, 1]], [[2], [3]])
    signs = diagnostics_of(
        {"rollout_info/entropy": 2.0, "train/value_loss": 3.0, "ppo/approx_kl": float("nan")}, batch, [1, 2]
    )
    assert (signs["entropy"], signs["value_loss"], signs["approx_kl"], signs["kl"]) == (2.0, 3.0, None, None)
    assert signs["reward_spread"] == 0.5 and signs["length_correlation"] is None


def test_what_is_no_number_is_none_whatever_an_algorithm_logs():
    odd = {
        "train/value_loss": "high",
        "ppo/clip_fraction": torch.ones(3),
        "train/grad_norm": None,
        "trpo/kl": torch.ones(1),
    }
    signs = diagnostics_of(odd, episodes([[5, 1], [6, 1]], [[2], [3]]), [1.0, float("inf")])
    names = ("value_loss", "clip_fraction", "grad_norm", "approx_kl", "best_reward", "reward_spread")
    assert [signs[name] for name in names] == [None, None, None, 1.0, None, None]


def test_the_most_frequent_response_is_counted_whatever_the_prompt_and_the_padding():
    responses = [[5, 6, 1], [5, 6, 1], [5, 6], [7, 1]]
    batch = episodes(responses, [[2], [3], [2], [3]])
    assert diagnostics_of({}, batch, [0, 0, 0, 0])["duplicates"] == 0.5
    assert diagnostics_of({}, episodes(responses, [[2]] * 4), [0, 0, 0, 0])["duplicates"] is None, "one prompt"
    assert diagnostics_of({}, batch, [0, 0, 0, 0])["reward_spread"] == 0.0


def test_near_twins_count_under_different_prompts_only():
    text = list(range(10, 31))
    changed = [*text[:-1], 99]  # 19 of 21 pairs of neighbours in common
    other = list(range(40, 61))
    assert diagnostics_of({}, episodes([text, changed, other], [[2], [3], [4]]), [1, 2, 3])[
        "near_duplicates"
    ] == pytest.approx(2 / 3)
    assert diagnostics_of({}, episodes([text, changed, other], [[2], [2], [4]]), [1, 2, 3])["near_duplicates"] == 0.0
    assert diagnostics_of({}, episodes([text, changed, other], [[2], [2], [2]]), [1, 2, 3])["near_duplicates"] is None


def test_many_episodes_are_thinned_before_they_are_compared():
    n = 4 * N_COMPARED
    batch = episodes([[k, k + 1, k + 2] for k in range(n)], [[k] for k in range(n)])
    assert diagnostics_of({}, batch, [float(k) for k in range(n)])["near_duplicates"] == 0.0


def test_a_response_is_empty_if_its_first_token_ends_it():
    assert diagnostics_of({}, episodes([[1], [5, 1]], [[2], [3]]), [0, 1])["empty"] == 0.5
    assert diagnostics_of({}, episodes([[1], [5]], [[2], [3]], ended=False), [0, 1])["empty"] == 0.0


def test_ranks_are_correlated_as_scipy_correlates_them():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 6, 40), rng.normal(size=40).round(1)
    assert rank_correlation(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)
    assert rank_correlation(np.ones(5), second[:5]) is None


def test_examples_are_the_episodes_that_show_it(tiny_tokenizer):
    ids = [tiny_tokenizer(text)["input_ids"] for text in ("one", "two two two", "two two two", "three")]
    batch = episodes(ids, [[20 + k] for k in range(4)])
    same = rollout_examples("duplicates", Continuations(tiny_tokenizer), batch, [1, 2, 3, 4])
    assert [(item["response"], item["reward"]) for item in same] == [("two two two", 2.0), ("two two two", 3.0)]
    ends = rollout_examples("reward_follows_length", Continuations(tiny_tokenizer), batch, [1, 2, 3, 4])
    assert [item["tokens"] for item in ends] == [min(map(len, ids)), max(map(len, ids))]
    short = dataclasses.replace(batch, terminated=torch.tensor([True, True, False, True]))
    (cut,) = rollout_examples("all_truncated", Continuations(tiny_tokenizer), short, [1, 2, 3, 4])
    assert cut["reward"] == 3.0, "the one that was cut"
    backwards = batch.select(torch.tensor([1, 0, 3, 2]))
    (empty,) = rollout_examples("all_empty", Continuations(tiny_tokenizer), backwards, [1, 2, 3, 4])
    assert empty["tokens"] == min(map(len, ids))
    assert rollout_examples("ratio_gap", Continuations(tiny_tokenizer), batch, [1, 2, 3, 4]) == []


def test_an_example_of_near_twins_is_two_that_are_and_under_two_prompts(tiny_tokenizer):
    text = list(range(10, 31))
    last = [[*text[:-1], end] for end in (97, 98, 99)]
    other = [list(range(start, start + 21)) for start in (40, 70)]
    batch = episodes([other[0], last[0], last[1], other[1], last[2]], [[2], [3], [3], [4], [5]])
    first, second = rollout_examples("duplicates", Continuations(tiny_tokenizer), batch, [1, 2, 3, 4, 5])
    assert (first["reward"], second["reward"]) == (2.0, 5.0)


def with_answers(answers: list[list[list[int]]], *, turn: int = 9) -> EpisodeBatch:
    """Episodes of turns with one token, between these answers; of each episode one turn more than answers."""
    responses, observed = [], []
    for of_episode in answers:
        ids, flags = [turn], [False]
        for answer in of_episode:
            ids += [*answer, turn]
            flags += [True] * len(answer) + [False]
        responses.append(ids)
        observed.append(flags)
    batch = episodes(responses, [[number] for number in range(len(answers))])
    width = batch.response_ids.shape[1]
    flags = torch.tensor([[*row, *[False] * (width - len(row))] for row in observed])
    return dataclasses.replace(batch, observed=flags)


@pytest.mark.parametrize(
    ("answers", "share"),
    [
        ([[[5, 6]] * 2] * 4, 1.0),
        ([[[5, 6]] * 2] * 3 + [[[5, 6], [5]]], 7 / 8),
        ([[[5, 6], [4]] * 2] * 2, 0.5),
        ([[[5, 6]] * 7], None),
    ],
    ids=["equal", "one differs", "two answers", "few"],
)
def test_the_share_of_the_most_frequent_answer(answers, share):
    signs = diagnostics_of({}, with_answers(answers), [1.0] * len(answers))
    assert signs["equal_answers"] == share


def test_equal_answers_make_no_duplicates_of_different_turns():
    batch = with_answers([[[5, 6, 7, 8]]] * 4)
    ids = batch.response_ids.clone()
    ids[~batch.observed] = torch.arange(8) + 20
    signs = diagnostics_of({}, dataclasses.replace(batch, response_ids=ids), [1.0] * 4)
    assert signs["duplicates"] == 0.0 and signs["near_duplicates"] == 0.0


def test_numbers_of_tools_are_diagnostics_of_runs_that_have_them():
    logged = {
        "rollout_info/environment/calls": 2.0,
        "rollout_info/environment/calls/add": 1.5,
        "environment/calls": 9.0,
    }
    logged |= {"rollout_info/environment/failed_calls": 0.5, "rollout_info/environment/turns": 3.0}
    batch = episodes([[5, 1], [6, 1]], [[2], [3]])
    signs = diagnostics_of(logged, batch, [1, 2])
    assert {name: signs[name] for name in signs if "calls" in name} == {
        "calls": 2.0,
        "failed_calls": 0.5,
        "calls/add": 1.5,
    }
    assert not [name for name in diagnostics_of({}, batch, [1, 2]) if "call" in name or name == "equal_answers"]
