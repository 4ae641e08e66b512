"""Checkers for components that users write, similar to Gymnasium's `check_env`.

    check_reward_function(MyReward())            one finite number per request, deterministic, picklable
    check_metric(MyMetric())                     name -> (one score per text or None, one score), deterministic
    check_data_pool(MyPool, path="data.jsonl")   samples with unique ids, the same at every call
    check_post_processor(my_function, limit=3)   text -> text, the same at every call
    check_algorithm(MyAlgorithm, n_steps=16)     trains a policy of either family, with a first ratio of 1;
                                                 its expected gradient is that of the expected reward

Each returns None or raises an `AssertionError` with the reason. Call them in your own tests.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.sampler import PrioritySampler
from rl4lms_like.data_pools.splits import SPLITS
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.post_processors import post_process
from rl4lms_like.rewards.base import AnyReward, BatchedRewardFunction
from rl4lms_like.rewards.call import is_terminal, score_episodes
from rl4lms_like.rewards.python_function import reward_of
from rl4lms_like.system.errors import ComponentError

if TYPE_CHECKING:
    from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
    from transformers import PreTrainedTokenizerBase

SAMPLES = (
    Sample("check_0", "The film was", ["a joy from start to finish."], {"topic": "film"}),
    Sample("check_1", "Count with me: 0", ["1 2 3 4 5", "1, 2, 3, 4, 5"], {"topic": "numbers"}),
    Sample("check_2", "On 1998-03-12 the museum", ["bought 34 paintings."], {"topic": "art"}),
)
"""Default samples: short prompts with one or two references."""

RESPONSES = (
    " good.",
    " 1 2 3 4 5 6 7 8 9 10",
    " <eos>",
    " seen on 2022-10-04, and it was a wonderful, sad story!",
    "a joy from start to finish.",
    " Привет, 世界! 😀 نص",
    " the" * 150,
)
"""Default responses: a short text, numbers, only the end of text, a sentence, a reference, non-Latin characters,
one repeated word."""

EDGE_TEXTS = ("", " ", "\n", ".", "...", "Привет, 世界! 😀 نص", "1", "the " * 400)
"""Edge cases of generated texts: empty, white space, punctuation, other scripts, no end of text."""


_GENERATED_TEXTS = (" good.", "", " seen on 2022-10-04, and it was a wonderful, sad story!")


def check_reward_function(
    reward_fn: AnyReward | Callable[..., Any],
    samples: Sequence[Sample] = SAMPLES,
    responses: Sequence[str] = RESPONSES,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_independent: bool = True,
) -> None:
    """Check a reward on every response to every sample.

    Args:
        reward_fn: an instance of the reward, or a function.
        samples: samples to use; pass your own if it needs particular references or `meta_data`.
        responses: texts that the tokenizer encodes as responses; `<eos>` is the default tokenizer's end of text.
        tokenizer: default: a small byte-level one.
        batch_independent: require that an episode's rewards do not depend on the rest of the batch.

    Raises:
        AssertionError: a check failed.
    """
    name = type(reward_fn).__name__
    assert callable(reward_fn), f"{name} is not callable; derive it from RewardFunction or BatchedRewardFunction"
    reward: AnyReward = reward_of(reward_fn)
    copied_samples = copy.deepcopy(list(samples))  # for the reward, whose changes must not reach the caller
    if tokenizer is None:
        from rl4lms_like.testing.models import make_tokenizer

        tokenizer = make_tokenizer()
    episodes = _episodes(copied_samples, responses, tokenizer)
    rewards = _scored(reward, episodes)
    assert copied_samples == list(samples), f"{name} changes the samples it is given"

    # A reward that is random or counts its calls would give different rewards for the same text.
    again = _scored(reward, episodes)
    assert np.array_equal(rewards, again), f"{name} returns different rewards for the same episodes in a second call"

    # Within a tolerance: models round differently with other padding.
    if batch_independent:
        alone = np.concatenate([_scored(reward, [episode]) for episode in episodes])
        assert np.allclose(rewards, alone, atol=1e-5), (
            f"{name} returns different rewards for an episode alone and in a batch; "
            "if that is intended, check with batch_independent=False and use no reward workers"
        )

    if is_terminal(reward):
        _check_terminal(reward, episodes)
    _check_picklable(reward, episodes, rewards)


def check_metric(
    metric: BaseMetric,
    samples: Sequence[Sample] = SAMPLES,
    generated_texts: Sequence[str] | None = None,
    *,
    model: Any = None,
    keys: Sequence[str] | None = None,
) -> None:
    """Check a metric on texts, of which one is empty, on every sample's references and on edge cases.

    Args:
        metric: an instance of the metric.
        samples: samples to use; pass your own if it needs particular references or `meta_data`.
        generated_texts: one per sample; default: a short text, an empty one and a sentence, in turn.
        model: passed to the metric.
        keys: exact set of names that it must report; `{n}` matches any text. Default: any names.

    Raises:
        AssertionError: a check failed.
    """
    name = type(metric).__name__
    if generated_texts is None:
        generated_texts = list(itertools.islice(itertools.cycle(_GENERATED_TEXTS), len(samples)))
    assert len(generated_texts) == len(samples), f"{len(generated_texts)} texts for {len(samples)} samples"

    # The names must not depend on the texts, or a curve of the metric would have gaps.
    first = _computed(metric, samples, generated_texts, model)
    second = _computed(metric, samples, generated_texts, model)
    alone = _computed(metric, samples[:1], generated_texts[:1], model)
    assert first.keys() == second.keys() == alone.keys(), f"{name} does not always report the same names"
    _check_edges(metric, samples, model, first.keys())
    if keys is not None:
        _check_keys(name, first.keys(), keys)

    # NaN is a score, too (a correlation of equal numbers), and must be NaN again.
    for key, (scores, overall) in first.items():
        assert isinstance(key, str) and "/" in key, f"{name} reports {key!r}; names are 'family/name'"
        second_scores, second_overall = second[key]
        is_same = np.array_equal([overall], [second_overall], equal_nan=True) and np.array_equal(
            scores or [], second_scores or [], equal_nan=True
        )
        assert is_same, f"{name} returns a different {key!r} for the same texts in a second call"


def check_post_processor(function: Callable[..., str], **args: Any) -> None:
    """Check a post-processor on sentences, lines and edge cases.

    Args:
        function: function of a text and the arguments in `args`.
        args: its further arguments.

    Raises:
        AssertionError: a check failed.
    """
    name = getattr(function, "__name__", type(function).__name__)
    bound = functools.partial(function, **args)
    texts = [*EDGE_TEXTS, "One. Two! Three? Four.", "first line\nsecond line\n", *RESPONSES]
    with _failing_as_assertion():
        first = post_process(bound, texts)
        second = post_process(bound, texts)
    assert first == second, f"{name} returns different texts in a second call"


def check_algorithm(
    algorithm: type[OnPolicyAlgorithm],
    families: Sequence[str] = ("causal", "seq2seq"),
    *,
    exact: bool = True,
    like: type[OnPolicyAlgorithm] | None = None,
    seed: int = 0,
    **args: Any,
) -> None:
    """Check one rollout and one update of an algorithm on tiny models, built as from a config, and its exact gradients.

    Args:
        algorithm: a loss on `OnPolicyTextAlgorithm`, or any on-policy algorithm of Stable-Baselines3.
        families: model families that it must train.
        exact: require by enumeration (docs/exact_gradients.md) that the expected gradient of the first step is that of
            the expected reward minus the KL penalty, up to a factor, without normalized advantages and with lambda 1;
            that the critic learns the expected return; and that micro-batches and padding do not change the gradient.
        like: also require the gradients of this algorithm, for instance `PPO` if yours is another implementation of it.
        seed: random seed.
        args: arguments of the algorithm; missing ones are set to small values.

    Raises:
        AssertionError: a check failed.
    """
    from rl4lms_like.testing.one_update import one_update

    for family in families:
        where = f"{algorithm.__name__} on a {family} model"
        try:
            update = one_update(algorithm, family, seed, args)
            again = one_update(algorithm, family, seed, args)
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error

        # The weights: those of the policy move, those of the reference stay.
        assert update.before, f"{where}: train() does not use self.rollout_buffer.get()"
        infinite = [name for name, weights in update.after.items() if not weights.isfinite().all()]
        assert not infinite, f"{where}: {infinite[0]} is not finite after the update"
        assert update.moved("policy_model"), f"{where}: the update does not change the policy's weights"
        assert not update.moved("ref_model"), f"{where}: the update changes the reference model's weights"

        # Before the first step, log-probs of the update are those of the rollout: each ratio is 1 up to rounding.
        gap = update.ratio_gap or 0.0
        assert gap < 1e-3, (
            f"{where}: the first minibatch's ratio differs from 1 by {gap:.2g}; compute log-probs with "
            "policy.evaluate_actions, without dropout, and before any optimizer step"
        )

        # A patched class would change all later models of the process; another seed would make runs irreproducible.
        assert not update.changed_classes, f"{where}: it changes the class attribute {update.changed_classes[0]}"
        differing = [name for name, weights in update.after.items() if not weights.equal(again.after[name])]
        assert not differing, f"{where}: {differing[0]} differs in a second training with the same seed"

    # After the simple checks, whose errors are easier to understand than a wrong gradient.
    from rl4lms_like.testing.exact import check_like, check_objective

    try:
        if exact:
            check_objective(algorithm, args)
        if like is not None:
            check_like(algorithm, like, args)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{algorithm.__name__} on a tabular policy: {type(error).__name__}: {error}; if it needs the policy of a "
            "language model, pass exact=False"
        ) from error


def check_data_pool(pool_class: type[TextGenPool], splits: Sequence[str] = SPLITS, **args: Any) -> None:
    """Check the samples that a pool prepares for every split.

    Args:
        pool_class: the class, or any object with its `prepare`.
        splits: splits that it should have.
        args: arguments of `prepare` in addition to the split.

    Raises:
        AssertionError: a check failed.
    """
    for split in splits:
        # The sampler, which a run draws its prompts with, refuses pools without samples or with wrong weights.
        try:
            pool = pool_class.prepare(split, **args)
            again = pool_class.prepare(split, **args)
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
        assert samples == again.samples, f"{where}: a second call of prepare() gives other samples; seed the shuffle"


@contextmanager
def _failing_as_assertion() -> Iterator[None]:
    """Convert an error of the component into a failed check, with its reason."""
    try:
        yield
    except ComponentError as error:
        raise AssertionError(str(error)) from error


def _check_edges(metric: BaseMetric, samples: Sequence[Sample], model: Any, keys: Collection[str]) -> None:
    """Check that references and edge cases are scored under the same names."""
    # Perfect texts, each equal to its first reference; then every edge case as the text of every sample.
    with_references = [sample for sample in samples if sample.references]
    perfect_texts = [sample.references[0] for sample in with_references]
    repeated = list(itertools.chain.from_iterable([sample] * len(EDGE_TEXTS) for sample in samples))
    edge_texts = list(EDGE_TEXTS) * len(samples)

    for chosen, texts in ((with_references, perfect_texts), (repeated, edge_texts)):
        if chosen:
            results = _computed(metric, chosen, texts, model)
            assert results.keys() == keys, f"{type(metric).__name__} does not always report the same names"


def _computed(metric: BaseMetric, samples: Sequence[Sample], generated: Sequence[str], model: Any) -> MetricResults:
    """Return a metric's results. It must not change the lists, which the next metric of a run receives, too."""
    prompts = [sample.prompt_or_input_text for sample in samples]
    references = [list(sample.references) for sample in samples]
    metas = [copy.deepcopy(sample.meta_data) for sample in samples]
    texts = list(generated)
    before = copy.deepcopy((prompts, references, metas))
    with _failing_as_assertion():
        results = compute_metric(metric, prompts, texts, references, metas, model, "val")

    is_unchanged = before == (prompts, references, metas) and texts == list(generated)
    assert is_unchanged, f"{type(metric).__name__} changes the lists it is given"
    return results


def _check_keys(name: str, reported: Collection[str], declared: Sequence[str]) -> None:
    """Check that the reported names match the declared names, and that each of these is reported."""
    # `lexical/rouge_{n}` -> the pattern `lexical/rouge_.+`
    patterns = {key: re.sub(r"\\\{\w*\\\}", ".+", re.escape(key)) for key in declared}
    for key in reported:
        is_declared = any(re.fullmatch(pattern, key) for pattern in patterns.values())
        assert is_declared, f"{name} reports {key!r}, which it does not declare; declared: {', '.join(declared)}"
    for declared_key, pattern in patterns.items():
        is_reported = any(re.fullmatch(pattern, key) for key in reported)
        assert is_reported, f"{name} declares {declared_key!r}, but does not report it"


def _check_sample(sample: Any, where: str) -> None:
    # `Sample` is a data class, which takes values of any type.
    assert isinstance(sample, Sample), f"{where} is a {type(sample).__name__}, not a Sample"
    assert isinstance(sample.id, str), f"{where}: the id is {sample.id!r}, not text"
    assert isinstance(sample.prompt_or_input_text, str), f"{where}: the prompt is {sample.prompt_or_input_text!r}"
    is_list = isinstance(sample.references, list) and all(isinstance(text, str) for text in sample.references)
    assert is_list, f"{where}: references are {sample.references!r}, not a list of texts"
    assert sample.meta_data is None or isinstance(sample.meta_data, dict), f"{where}: meta_data is not a dict"


def _check_terminal(reward_fn: AnyReward, episodes: Sequence[Observation]) -> None:
    """Check that a terminal reward returns 0 before the end, where it is not called and counts as 0."""
    for episode in episodes:
        if isinstance(reward_fn, BatchedRewardFunction):
            texts = [episode.prompt_or_input_text], [episode.context_text], [episode.target_or_reference_texts]
            reward = float(reward_fn(*texts, [False], [episode.meta_info])[0])
        else:
            previous = episode.after(episode.n_actions - 1)
            action = int(episode.action_ids[-1])
            reward = float(reward_fn(previous, action, episode, False, episode.meta_info))
        assert reward == 0, (
            f"{type(reward_fn).__name__} is marked terminal, but returns {reward} although done is False"
        )


def _check_picklable(reward_fn: AnyReward, episodes: Sequence[Observation], rewards: np.ndarray) -> None:
    # As it is sent to the workers; cloudpickle also takes classes that are defined in a script or a test.
    name = type(reward_fn).__name__
    try:
        copied = cloudpickle.loads(cloudpickle.dumps(reward_fn))
    except Exception as error:
        raise AssertionError(
            f"{name} cannot be pickled, so it cannot run in other processes (reward_workers, subproc): {error}"
        ) from error
    assert np.array_equal(rewards, _scored(copied, episodes)), f"{name} returns different rewards after pickling"


def _scored(reward_fn: AnyReward, episodes: Sequence[Observation]) -> np.ndarray:
    with _failing_as_assertion():
        return score_episodes(reward_fn, episodes)


def _episodes(
    samples: Sequence[Sample], responses: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[Observation]:
    """Return an episode of every response to every sample, as the environment builds them."""
    alone = tokenizer(list(responses), add_special_tokens=False)["input_ids"]
    layout = TextLayout(tokenizer, max_prompt_length=64, max_context_length=max(map(len, alone)))
    prompts = layout.encode_all([sample.prompt_or_input_text for sample in samples])

    episodes = []
    for sample, prompt in zip(samples, prompts, strict=True):
        for text in responses:
            ids = np.asarray(layout.continuations.ids_or_alone(sample.prompt_or_input_text, text))
            episodes.append(Observation(sample, prompt, ids, len(ids), layout))
    return episodes
