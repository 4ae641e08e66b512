"""Checks of components that users write, as Gymnasium's `check_env` checks an environment.

    check_reward_function(MyReward())            one finite number a request, pure, picklable, keeps its promises
    check_metric(MyMetric())                     name -> (one score a text or None, one score), pure
    check_data_pool(MyPool, path="data.jsonl")   samples with unique ids, the same ones at every call

Each returns None, or raises an `AssertionError` that says what is wrong. Call them in a test of your own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from rl4lms_like.core.errors import ComponentError
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.sampler import PrioritySampler
from rl4lms_like.data_pools.splits import SPLITS
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.rewards.base import BatchedRewardFunction
from rl4lms_like.rewards.call import AnyReward, is_terminal, score_episodes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES = (
    Sample("check_0", "The film was", ["a joy from start to finish."], {"topic": "film"}),
    Sample("check_1", "Count with me: 0", ["1 2 3 4 5", "1, 2, 3, 4, 5"], {"topic": "numbers"}),
    Sample("check_2", "On 1998-03-12 the museum", ["bought 34 paintings."], {"topic": "art"}),
)
"""What components are tried on by default: short prompts with one or two references."""

RESPONSES = (" good.", " 1 2 3 4 5 6 7 8 9 10", " <eos>", " seen on 2022-10-04, and it was a wonderful, sad story!")
"""What stands behind them: a short text, numbers, nothing but the end of text, a sentence."""


def check_reward_function(
    reward_fn: AnyReward,
    samples: Sequence[Sample] = SAMPLES,
    responses: Sequence[str] = RESPONSES,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_independent: bool = True,
) -> None:
    """Checks a reward on every response to every sample.

    Args:
        reward_fn: the reward, built.
        samples: give your own where it needs particular references or `meta_data`.
        responses: texts that the tokenizer turns into responses; `<eos>` is the default tokenizer's end of text.
        tokenizer: default: a small byte-level one.
        batch_independent: whether an episode's rewards must not depend on what else is scored with it.

    Raises:
        AssertionError: what is wrong.
    """
    name = type(reward_fn).__name__
    assert callable(reward_fn), f"{name} is not callable; derive it from RewardFunction or BatchedRewardFunction"
    given = copy.deepcopy(list(samples))
    episodes = _episodes(given, responses, tokenizer or _default_tokenizer())
    rewards = _scored(reward_fn, episodes)
    assert given == list(samples), f"{name} changes the samples it is given"
    again = _scored(reward_fn, episodes)
    assert np.array_equal(rewards, again), f"{name} gives other rewards for the same episodes when it is called again"
    if batch_independent:
        alone = np.concatenate([_scored(reward_fn, [episode]) for episode in episodes])
        assert np.allclose(rewards, alone, atol=1e-5), (
            f"{name} gives an episode other rewards alone than together with others; "
            "if that is meant, check with batch_independent=False and without reward workers"
        )
    if is_terminal(reward_fn):
        _check_terminal(reward_fn, episodes)
    _check_picklable(reward_fn, episodes, rewards)


def check_metric(
    metric: BaseMetric,
    samples: Sequence[Sample] = SAMPLES,
    generated_texts: Sequence[str] = (" good.", "", " seen on 2022-10-04, and it was a wonderful, sad story!"),
    *,
    model: Any = None,
) -> None:
    """Checks a metric on texts, of which one is empty.

    Args:
        metric: the metric, built.
        samples: give your own where it needs particular references or `meta_data`.
        generated_texts: one for each sample.
        model: handed on to the metric.

    Raises:
        AssertionError: what is wrong.
    """
    name = type(metric).__name__
    prompts = [sample.prompt_or_input_text for sample in samples]
    references = [list(sample.references) for sample in samples]
    metas = [copy.deepcopy(sample.meta_data) for sample in samples]
    given = copy.deepcopy((prompts, references, metas))
    generated = list(generated_texts)
    try:
        first = compute_metric(metric, prompts, generated, references, metas, model, "val")
        second = compute_metric(metric, prompts, generated, references, metas, model, "val")
        alone = compute_metric(metric, prompts[:1], generated[:1], references[:1], metas[:1], model, "val")
    except ComponentError as error:
        raise AssertionError(str(error)) from error
    unchanged = given == (prompts, references, metas) and generated == list(generated_texts)
    assert unchanged, f"{name} changes the lists it is given"
    assert first.keys() == second.keys() == alone.keys(), f"{name} does not always report the same names"
    for key, (scores, overall) in first.items():
        assert isinstance(key, str) and "/" in key, f"{name} reports {key!r}; names are 'family/name'"
        same = np.array_equal([overall], [second[key][1]], equal_nan=True) and np.array_equal(
            scores or [], second[key][0] or [], equal_nan=True
        )
        assert same, f"{name} gives another {key!r} for the same texts when it is computed again"


def check_data_pool(pool_class: type[TextGenPool], splits: Sequence[str] = SPLITS, **args: Any) -> None:
    """Checks what a pool prepares for every split.

    Args:
        pool_class: the class, or anything with its `prepare`.
        splits: the splits that it should have.
        args: the arguments of `prepare`, beside the split.

    Raises:
        AssertionError: what is wrong.
    """
    for split in splits:
        try:
            pool, again = (pool_class.prepare(split, **args) for _ in range(2))
            where = f"{pool_class.__name__}, split {split!r}"
            assert isinstance(pool, TextGenPool), (
                f"{where}: prepare() returned {type(pool).__name__}, not a TextGenPool"
            )
            PrioritySampler(pool)
        except ComponentError as error:
            raise AssertionError(f"{pool_class.__name__}, split {split!r}: {error}") from error
        samples = [sample for sample, _ in pool]
        for index, sample in enumerate(samples):
            _check_sample(sample, f"{where}, sample {index}")
        assert len({sample.id for sample in samples}) == len(samples), f"{where}: ids occur more than once"
        assert samples == again.samples, f"{where}: another call of prepare() gives other samples; seed the shuffle"


def _check_sample(sample: Any, where: str) -> None:
    assert isinstance(sample, Sample), f"{where} is a {type(sample).__name__}, not a Sample"
    assert isinstance(sample.id, str), f"{where}: the id is {sample.id!r}, not text"
    assert isinstance(sample.prompt_or_input_text, str), f"{where}: the prompt is {sample.prompt_or_input_text!r}"
    is_list = isinstance(sample.references, list) and all(isinstance(text, str) for text in sample.references)
    assert is_list, f"{where}: references are {sample.references!r}, not a list of texts"
    assert sample.meta_data is None or isinstance(sample.meta_data, dict), f"{where}: meta_data is not a dict"


def _check_terminal(reward_fn: AnyReward, episodes: Sequence[Observation]) -> None:
    for episode in episodes:
        previous, action = episode.after(episode.n_actions - 1), int(episode.action_ids[-1])
        if isinstance(reward_fn, BatchedRewardFunction):
            texts = [episode.prompt_or_input_text], [episode.context_text], [episode.target_or_reference_texts]
            paid = float(reward_fn(*texts, [False], [episode.meta_info])[0])
        else:
            paid = float(reward_fn(previous, action, episode, False, episode.meta_info))
        assert paid == 0, f"{type(reward_fn).__name__} is marked terminal, but pays {paid} where done is False"


def _check_picklable(reward_fn: AnyReward, episodes: Sequence[Observation], rewards: np.ndarray) -> None:
    name = type(reward_fn).__name__
    try:
        copied = cloudpickle.loads(cloudpickle.dumps(reward_fn))
    except Exception as error:
        raise AssertionError(
            f"{name} cannot be pickled, so it cannot run in other processes (reward_workers, subproc): {error}"
        ) from error
    assert np.array_equal(rewards, _scored(copied, episodes)), f"{name} gives other rewards after it was pickled"


def _scored(reward_fn: AnyReward, episodes: Sequence[Observation]) -> np.ndarray:
    try:
        return score_episodes(reward_fn, episodes)
    except ComponentError as error:
        raise AssertionError(str(error)) from error


def _episodes(
    samples: Sequence[Sample], responses: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[Observation]:
    written = [np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in responses]
    layout = TextLayout(tokenizer, max_prompt_length=64, max_context_length=max(map(len, written)))
    prompts = layout.encode_all([sample.prompt_or_input_text for sample in samples])
    return [
        Observation(sample, prompt, response, len(response), layout)
        for sample, prompt in zip(samples, prompts, strict=True)
        for response in written
    ]


def _default_tokenizer() -> PreTrainedTokenizerBase:
    from rl4lms_like.testing.models import make_tokenizer

    return make_tokenizer()
