"""Diagnostics of a run, their history, and example texts that illustrate them.

    logger      entropy, KL, truncated fraction, value loss, ratio gap ...   ┐
    episodes    relative range of rewards, duplicates and near duplicates,   ├─ {"entropy": 2.1, "kl": 0.04, ...}
                rank correlation of length and reward                        ┘

None stands for a number that is missing or not finite. Only the token ids of the episodes are read, without forward
pass or random numbers; examples are decoded only when an alert is first reported. The history is saved in checkpoints,
so that a resumed run gives the same alerts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any

import numpy as np
from torch import Tensor

from rl4lms_like.core.continuation import Continuations
from rl4lms_like.core.episodes import EpisodeBatch

Diagnostics = dict[str, float | None]
"""Diagnostics of one iteration, and its number as `iteration`."""

LOGGED: dict[str, tuple[str, ...]] = {
    "reward": ("rollout_info/ep_rew",),
    "reward_std": ("rollout_info/ep_rew_std",),
    "n_episodes": ("rollout_info/n_episodes",),
    "kl_reward": ("rollout_info/ep_kl_rew",),
    "kl_reward_std": ("rollout_info/ep_kl_rew_std",),
    "length": ("rollout_info/ep_lens",),
    "truncated": ("rollout_info/truncated_share",),
    "groups_differing": ("rollout_info/groups_differing_share",),
    "groups_kept": ("rollout_info/groups_kept_share",),
    "entropy": ("rollout_info/entropy",),
    "kl": ("rollout_info/kl_div_mean",),
    "value_loss": ("ppo/value_loss", "train/value_loss"),
    "explained_variance": ("ppo/explained_variance", "train/explained_variance"),
    "approx_kl": ("trpo/kl", "ppo/approx_kl", "train/approx_kl"),
    "clip_fraction": ("ppo/clip_fraction", "train/clip_fraction"),
    "ratio_gap": ("train/ratio_gap",),
    "grad_norm": ("train/grad_norm",),
    "minibatch_episodes": ("train/minibatch_episodes",),
    "optimizer_steps": ("train/optimizer_steps",),
    "skipped_steps": ("train/skipped_steps",),
    "step_taken": ("trpo/line_search_success",),
}
"""Diagnostic -> logged keys, by priority: exact before estimated, ours before those of Stable-Baselines3."""

OF_ENVIRONMENT = "rollout_info/environment/"
"""Beginning of the logged keys of what environments of dialogues report."""
CALLS = "calls"
FAILED_CALLS = "failed_calls"
OF_TOOL = "calls/"
"""Beginning of the names of the diagnostics of single tools."""

N_COMPARED = 64  # largest number of episodes that are compared pairwise; of more, an evenly spaced subset is used
NEARLY = 0.8  # Jaccard similarity of the token bigrams of two responses from which they are near duplicates
FEWEST_EPISODES = 8  # for conclusions from one rollout; fewer have equal or ordered rewards by chance
N_MARKS = 2  # number of consecutive evaluations that must agree
LONGEST = 400  # largest number of characters of an example text


def diagnostics_of(logged: Mapping[str, Any], episodes: EpisodeBatch, rewards: Sequence[float]) -> Diagnostics:
    """Return the diagnostics of one iteration.

    Args:
        logged: values recorded by the algorithm.
        episodes: the `n` episodes of the rollout.
        rewards: `[n]`, task reward of each episode.
    """
    diagnostics: Diagnostics = {}
    for name, keys in LOGGED.items():
        logged_keys = [key for key in keys if key in logged]
        diagnostics[name] = _number(logged[logged_keys[0]]) if logged_keys else None

    # An empty response is one end-of-text token, so its length is 1.
    lengths = episodes.lengths.cpu().numpy()  # [n]
    totals = np.asarray(rewards, dtype=float)  # [n]
    terminated = episodes.terminated.cpu().numpy()  # [n], bool
    diagnostics["reward_spread"] = _relative_range(totals)
    diagnostics["best_reward"] = _number(totals.max())
    diagnostics["empty"] = float(np.mean((lengths <= 1) & terminated))
    diagnostics["duplicates"], diagnostics["near_duplicates"] = _duplicates(episodes)

    # Of dialogues only, so that the checkpoints of other runs have no keys of them.
    if episodes.observed is not None:
        diagnostics["equal_answers"] = _equal_answers(episodes)
    for key in logged:
        name = key.removeprefix(OF_ENVIRONMENT)
        if name != key and (name in (CALLS, FAILED_CALLS) or name.startswith(OF_TOOL)):
            diagnostics[name] = _number(logged[key])

    # Of few episodes, length and reward have the same order by chance.
    diagnostics["length_correlation"] = None
    if len(totals) >= FEWEST_EPISODES:
        diagnostics["length_correlation"] = rank_correlation(lengths, totals)
    return diagnostics


def _number(value: Any) -> float | None:
    """Return a finite number, or None. User-defined algorithms may log values of any type."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def _relative_range(rewards: np.ndarray) -> float | None:
    """Return the range of the rewards divided by the largest absolute reward; 0 if all are equal."""
    largest = float(np.abs(rewards).max())
    if len(rewards) < 2 or not math.isfinite(largest):
        return None
    return float(np.ptp(rewards)) / largest if largest else 0.0


def _token_ids(ids: Tensor, mask: Tensor) -> list[tuple[int, ...]]:
    """Return the rows of padded token ids `[n, width]` without padding; tuples, which can be counted."""
    return [tuple(row[keep].tolist()) for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]


def _equal_answers(episodes: EpisodeBatch) -> float | None:
    """Return the fraction of the environments' answers that the most frequent one has; None if there are few."""
    assert episodes.observed is not None
    answers: Counter[tuple[int, ...]] = Counter()
    rows = zip(episodes.response_ids.tolist(), episodes.observed.tolist(), strict=True)
    for ids, are_observed in rows:
        for is_observed, part in groupby(zip(ids, are_observed, strict=True), key=itemgetter(1)):
            if is_observed:
                answers[tuple(id for id, _ in part)] += 1
    n_answers = answers.total()
    return max(answers.values()) / n_answers if n_answers >= FEWEST_EPISODES else None


def _duplicates(episodes: EpisodeBatch) -> tuple[float | None, float | None]:
    """Return the fraction of episodes with the most frequent response, and that with a near duplicate.

    The first is 0 if all responses differ. Near duplicates are those of another prompt. None if all prompts are equal.
    """
    prompts = _token_ids(episodes.prompt_ids, episodes.prompt_mask)
    responses = _token_ids(episodes.response_ids, episodes.action_mask)

    # The ids of a picture are those of all pictures of its size.
    if episodes.pictures is not None:
        prompts = [(*ids, number) for ids, number in zip(prompts, episodes.pictures.tolist(), strict=True)]
    if len(set(prompts)) == 1:
        return None, None
    n_most = max(Counter(responses).values())
    share = n_most / len(responses) if n_most > 1 else 0.0

    # Responses to one prompt may well be alike, so only those to different prompts count.
    near = _near_duplicates(responses)
    has_near = []
    for index, others in near.items():
        has_near.append(any(prompts[other] != prompts[index] for other in others))

    # The compared episodes may all have one prompt, as those of a large group have; then nothing is known.
    n_prompts = len({prompts[index] for index in near})
    return share, fmean(has_near) if n_prompts > 1 else None


def _near_duplicates(responses: Sequence[tuple[int, ...]]) -> dict[int, list[int]]:
    """Return, for each compared response, those that share most of its bigrams (Jaccard similarity), and itself."""
    # All pairs are compared, so their number is limited: evenly spaced rows, without random numbers.
    n = len(responses)
    n_compared = min(n, N_COMPARED)
    bigrams = {}
    for k in range(n_compared):
        index = k * n // n_compared
        bigrams[index] = set(pairwise(responses[index]))

    # |A ∩ B| >= 0.8 |A ∪ B|, without a division; responses without a bigram have no duplicates.
    near: dict[int, list[int]] = {}
    for index, bigrams_of_one in bigrams.items():
        near[index] = []
        for other, bigrams_of_other in bigrams.items():
            n_shared = len(bigrams_of_one & bigrams_of_other)
            n_all = len(bigrams_of_one | bigrams_of_other)
            if n_shared >= NEARLY * n_all > 0:
                near[index].append(other)
    return near


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Return Spearman's rho with ties at their mean rank; None if one of the two is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value, from 1; equal values have the mean of their ranks."""
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2  # [n_distinct]: the last rank of a value minus half its width
    return np.asarray(mean_ranks[numbers.reshape(-1)])


@dataclass(frozen=True)
class HeldOutScore:
    """Held-out metric and training reward at one evaluation."""

    epoch: int  # number of iterations before the evaluation
    score: float
    error: float  # standard error of the score; 0 if the metric has no scores of single texts
    reward: float | None  # mean of the rollouts since the previous evaluation; None if the history has none of them
    reward_error: float  # standard error of the reward


@dataclass
class Evaluations:
    """Best and last evaluations of a held-out metric."""

    best: HeldOutScore
    last: list[HeldOutScore]

    def add(self, score: HeldOutScore, mode: str) -> None:
        """Add an evaluation."""
        # Of equal scores the earlier one stays the best: a metric that does not change has not fallen.
        is_better = score.score > self.best.score if mode == "max" else score.score < self.best.score
        if is_better:
            self.best = score
        self.last = [*self.last, score][-N_MARKS:]


@dataclass
class History:
    """Diagnostics of a run that alerts use."""

    first: Diagnostics = field(default_factory=dict)  # first known value of each diagnostic
    recent: list[Diagnostics] = field(default_factory=list)  # of the last consecutive iterations
    held_out: dict[str, Evaluations] = field(default_factory=dict)  # best and last evaluations of each held-out metric
    best_reward: float | None = None  # largest reward of any episode so far

    def add(self, diagnostics: Diagnostics, keep: int) -> None:
        """Add the diagnostics of an iteration; `keep` is the number of iterations in the history."""
        # A condition must hold in consecutive iterations. After a gap, those before it do not count.
        if self.recent and self.recent[-1]["iteration"] != (diagnostics["iteration"] or 0) - 1:
            self.recent = []
        self.recent = [*self.recent, diagnostics][-keep:]

        for name, value in diagnostics.items():
            if value is not None:
                self.first.setdefault(name, value)

        best = diagnostics.get("best_reward")
        if self.best_reward is None:
            self.best_reward = best
        elif best is not None:
            self.best_reward = max(self.best_reward, best)

    def add_evaluation(self, epoch: int, key: str, mode: str, score: float, scores_of_texts: Iterable[Any]) -> None:
        """Add a held-out metric, with the mean reward of the iterations since its previous evaluation."""
        evaluations = self.held_out.get(key)
        since = evaluations.last[-1].epoch if evaluations else 0
        recent = [diagnostics for diagnostics in self.recent if (diagnostics["iteration"] or 0) > since]

        # The mean of the k rollouts' means, and its standard error: √(Σ std² / n) / k, for n episodes in a rollout.
        rewards = []
        variances = []
        for diagnostics in recent:
            reward = diagnostics.get("reward")
            if reward is not None:
                rewards.append(reward)
            variances.append((diagnostics.get("reward_std") or 0.0) ** 2 / (diagnostics.get("n_episodes") or 1.0))
        mean_reward = None
        reward_error = 0.0
        if rewards:
            mean_reward = fmean(rewards)
            reward_error = math.sqrt(math.fsum(variances)) / len(rewards)

        held_out = HeldOutScore(
            epoch,
            score,
            error=standard_error(scores_of_texts),
            reward=mean_reward,
            reward_error=reward_error,
        )
        self.held_out.setdefault(key, Evaluations(held_out, [])).add(held_out, mode)

    def last(self, name: str, n: int) -> list[float]:
        """Return a diagnostic of the last `n` iterations; empty if one of them lacks it."""
        values = self.known(name, n)
        return values if len(values) == n else []

    def known(self, name: str, n: int) -> list[float]:
        """Return the known values of a diagnostic in the last `n` iterations; empty if there are fewer iterations."""
        values = [diagnostics.get(name) for diagnostics in self.recent[-n:]]
        return [value for value in values if value is not None] if len(values) == n else []

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """Create a history from its fields as `dataclasses.asdict` returns them."""
        held_out = {}
        for key, saved in state["held_out"].items():
            last = [HeldOutScore(**score) for score in saved["last"]]
            held_out[key] = Evaluations(HeldOutScore(**saved["best"]), last)
        return cls(**{**state, "held_out": held_out})


def standard_error(values: Iterable[Any]) -> float:
    """Return the standard error of the mean of a metric's scores of single texts; 0 for fewer than two scores."""
    numbers = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else 0.0


def rollout_examples(
    alert: str, continuations: Continuations, episodes: EpisodeBatch, rewards: Sequence[float]
) -> list[dict[str, Any]]:
    """Return episodes of the rollout that illustrate an alert; empty for alerts without examples."""
    if alert not in _CHOICES:
        return []

    # Special tokens of the response are kept: whether it ends, and with which token, is often the point.
    with_special_tokens = replace(continuations, skips_special_tokens=False)
    examples = []
    for i in _CHOICES[alert](episodes):
        prompt_ids = episodes.prompt_ids[i][episodes.prompt_mask[i]].tolist()
        response = with_special_tokens.text(prompt_ids, episodes.response_ids[i][episodes.response_mask[i]].tolist())
        examples.append(
            {
                "prompt": _cut(continuations.decode(prompt_ids)),
                "response": _cut(response),
                "reward": float(rewards[i]),
                "tokens": int(episodes.lengths[i]),
            }
        )
    return examples


def evaluation_examples(key: str, mode: str, predictions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the text with the worst score of an evaluation; empty if the metric has no scores of single texts."""
    scored = [prediction for prediction in predictions if isinstance(prediction.get(key), (int, float))]
    if not scored:
        return []
    choose_worst = min if mode == "max" else max
    worst = choose_worst(scored, key=lambda prediction: float(prediction[key]))

    prompt = _cut(worst["prompt_text"])
    response = _cut(worst["generated_text"])
    return [{"prompt": prompt, "response": response, "score": float(worst[key])}]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _most_alike(episodes: EpisodeBatch) -> list[int]:
    """Return two episodes with the most frequent response or with near duplicates, of different prompts if possible."""
    prompts = _token_ids(episodes.prompt_ids, episodes.prompt_mask)
    responses = _token_ids(episodes.response_ids, episodes.action_mask)

    # Equal responses, or else the one with the most near duplicates: it is in the middle of the largest cluster.
    response, n = Counter(responses).most_common(1)[0]
    if n > 1:
        first, *others = [index for index, other in enumerate(responses) if other == response]
    else:
        first, near = max(_near_duplicates(responses).items(), key=lambda item: len(item[1]))
        others = [index for index in near if index != first]

    # Another prompt first (False sorts before True): equal texts for different prompts show that it is ignored.
    others.sort(key=lambda index: prompts[index] == prompts[first])
    return [first, *others[:1]]


_CHOICES: dict[str, Callable[[EpisodeBatch], list[int]]] = {
    "kl_above_budget": lambda episodes: [0],
    "kl_negative": lambda episodes: [0],
    "entropy_collapse": _most_alike,
    "reward_constant": lambda episodes: [0],
    "all_truncated": lambda episodes: [int((~episodes.terminated).int().argmax())],
    "equal_answers": lambda episodes: [0],
    "all_empty": lambda episodes: [int(episodes.lengths.argmin())],
    "duplicates": _most_alike,
    "reward_follows_length": lambda episodes: [int(episodes.lengths.argmin()), int(episodes.lengths.argmax())],
}
"""Alert -> indices of the episodes that illustrate it."""
