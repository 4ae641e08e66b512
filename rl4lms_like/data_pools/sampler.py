"""Samplers of prompts: with replacement, in proportion to a probability of each sample; or without replacement.

probabilities   1.0   3.0   0.5
cumulative      1.0   4.0   4.5     a draw is a random number below the total, located by bisection

shuffled        2 0 1 | 0 2 1 | ... each pass over the samples in another random order
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval

from rl4lms_like.core.sample import Sample
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.numbers import Finite, Fraction, Positive

Items = Iterable[Sample | tuple[Sample, float]]
"""Samples, or pairs of sample and weight (a pool yields such pairs)."""


class PromptSampler:
    """Sampler with its own random generator, uniform if no subclass sets other probabilities; O(log n) per draw.

    A subclass has the arguments of a config's `datapool.sampler.args` after `items` and `seed`. It calls
    `set_probabilities` in its constructor and whenever they change.

    Args:
        items: samples, or pairs of sample and weight.
        seed: seed of the generator; default: from the operating system.

    Raises:
        DataPoolError: there are no items.
    """

    def __init__(self, items: Items, seed: int | None = None) -> None:
        self.samples: list[Sample] = []
        self.weights: list[float] = []
        for item in items:
            sample, weight = item if isinstance(item, tuple) else (item, 1.0)
            self.samples.append(sample)
            self.weights.append(weight)
        if not self.samples:
            raise DataPoolError("there are no samples to draw prompts from")

        # Cumulative probabilities `[n_samples]`, not normalised: here 1, 2, 3, ..., the uniform distribution.
        self._cumulative = np.arange(1.0, len(self.samples) + 1)
        self._generator = np.random.default_rng(seed)

    def set_probabilities(self, probabilities: Sequence[float] | np.ndarray) -> None:
        """Set the probabilities `[n_samples]` of the samples; they need not add up to 1."""
        self._cumulative = np.cumsum(probabilities)

    def __len__(self) -> int:
        return len(self.samples)

    def seed(self, seed: int) -> None:
        """Seed the random generator."""
        self._generator = np.random.default_rng(seed)

    def draw(self) -> int:
        """Draw the index of the next sample."""
        # "right" skips samples of probability 0, whose cumulative value is that of the sample before. The product can
        # be rounded up to the total itself, which is beyond the last sample: hence `min`.
        point = self._generator.random() * self._cumulative[-1]
        return min(int(np.searchsorted(self._cumulative, point, side="right")), len(self) - 1)

    def sample(self, size: int = 1) -> list[Sample]:
        """Draw the next `size` samples."""
        return [self.samples[self.draw()] for _ in range(size)]

    def put_back(self, n: int) -> None:
        """Undo the last `n` draws, whose prompts got no response; with replacement this has no effect."""

    def update(self, sample_ids: Sequence[str], rewards: Sequence[float]) -> dict[str, float]:
        """Use the results of a rollout; called once after each.

        Args:
            sample_ids: id of each episode's sample `[n_episodes]`, as a text.
            rewards: total task reward of each episode `[n_episodes]`.

        Returns:
            Numbers to log, by name.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random generator, in JSON types; a subclass adds what changes in `update`."""
        return {"n_samples": len(self), "generator": self._generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`.

        Raises:
            DataPoolError: the state was saved with a different number of samples.
        """
        if state["n_samples"] != len(self):
            raise DataPoolError(f"the sampler's state is of {state['n_samples']} samples, the pool has {len(self)}")
        self._generator.bit_generator.state = state["generator"]


class PrioritySampler(PromptSampler):
    """Sampler that draws in proportion to `weight ** priority_scale`.

    Args:
        items: samples, or pairs of sample and weight.
        priority_scale: exponent of the weights; 0 draws uniformly.
        seed: seed of the generator; default: from the operating system.

    Raises:
        DataPoolError: there are no items, no weight is above 0, or a weight is negative or not finite.
    """

    def __init__(self, items: Items, priority_scale: float = 0.0, seed: int | None = None) -> None:
        super().__init__(items, seed)
        self.set_probabilities(_priorities(self.weights, priority_scale))


class ShuffledSampler(PromptSampler):
    """Sampler without replacement: all samples in a random order, then all in another one, and so on.

    The order of a pass depends only on the seed and the number of the pass, so the state is the number of draws.

    Args:
        items: samples, or pairs of sample and weight; the weights of samples are not used.
        seed: seed of the orders; default: from the operating system.

    Attributes:
        n_drawn: number of draws.

    Raises:
        DataPoolError: there are no items.
    """

    def __init__(self, items: Items, seed: int | None = None) -> None:
        super().__init__(items, seed)
        self._seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self.n_drawn = 0
        self._order = np.empty(0, dtype=np.int64)  # [n_samples], of the pass `_order_of`
        self._order_of = -1

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._seed = seed
        self.n_drawn = 0
        self._order_of = -1

    def draw(self) -> int:
        n_passes, position = divmod(self.n_drawn, len(self))
        if n_passes != self._order_of:
            self._order = np.random.default_rng([self._seed, n_passes]).permutation(len(self))
            self._order_of = n_passes
        self.n_drawn += 1
        return int(self._order[position])

    def put_back(self, n: int) -> None:
        self.n_drawn -= n

    def update(self, sample_ids: Sequence[str], rewards: Sequence[float]) -> dict[str, float]:
        return {"n_passes": self.n_drawn / len(self)}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seed": self._seed, "n_drawn": self.n_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._seed = state["seed"]
        self.n_drawn = state["n_drawn"]
        self._order_of = -1


class DifficultySampler(PromptSampler):
    """Sampler that prefers prompts which the policy answers right sometimes, but not always.

    The success rate of a prompt is a moving average over its episodes. It starts at 0.5, so new prompts are useful.

        success rate    0 ... hard_below    ...     easy_above ... 1
        bin             too hard           useful          too easy
        weight          weights[0]         weights[1]      weights[2]

    The probability of a prompt is proportional to the weight of its bin. All weights are above 0: prompts that were too
    hard are drawn from time to time and can become useful.

    Args:
        items: samples, or pairs of sample and weight; the weights of samples are not used.
        seed: seed of the generator; default: from the operating system.
        success_from: minimum total task reward of a successful episode.
        momentum: weight of a new episode in the moving average.
        hard_below: prompts with a success rate below this are too hard.
        easy_above: prompts with a success rate above this are too easy.
        weights: weights of prompts that are too hard, useful, and too easy; each above 0.

    Raises:
        DataPoolError: there are no items.
        ValueError: `hard_below` is above `easy_above`.
    """

    def __init__(
        self,
        items: Items,
        seed: int | None = None,
        success_from: Finite = 0.5,
        momentum: Annotated[float, Interval(gt=0, le=1)] = 0.3,
        hard_below: Fraction = 0.1,
        easy_above: Fraction = 0.9,
        weights: tuple[Positive, Positive, Positive] = (0.1, 1.0, 0.1),
    ) -> None:
        if hard_below > easy_above:
            raise ValueError(f"hard_below {hard_below} is above easy_above {easy_above}")
        super().__init__(items, seed)
        self.success_from = success_from
        self.momentum = momentum
        self.hard_below = hard_below
        self.easy_above = easy_above
        self._bin_weights = np.asarray(weights, dtype=np.float64)  # [3]: too hard, useful, too easy

        # Success rates by sample id, only of drawn samples: a checkpoint holds them, and a pool may be large.
        self._rates: dict[str, float] = {}
        self.set_probabilities(self._bin_weights[self._bins()])

    def _bins(self) -> np.ndarray:
        """Return the bin `[n_samples]` of each sample: 0 too hard, 1 useful, 2 too easy."""
        rates = np.array([self._rates.get(str(sample.id), 0.5) for sample in self.samples])
        return 1 - (rates < self.hard_below).astype(int) + (rates > self.easy_above)

    def update(self, sample_ids: Sequence[str], rewards: Sequence[float]) -> dict[str, float]:
        # rate <- rate + momentum * (success - rate), once for each episode: a group of a prompt moves it several times.
        for sample_id, reward in zip(sample_ids, rewards, strict=True):
            rate = self._rates.get(sample_id, 0.5)
            self._rates[sample_id] = rate + self.momentum * (float(reward >= self.success_from) - rate)

        bins = self._bins()
        self.set_probabilities(self._bin_weights[bins])

        # Fractions of all samples of the pool; the mean success rate is of the drawn ones.
        too_hard, useful, too_easy = (np.bincount(bins, minlength=3) / len(self)).tolist()
        return {
            "too_hard": too_hard,
            "useful": useful,
            "too_easy": too_easy,
            # An exact sum: the order of the rates is another one after resuming.
            "success_rate": math.fsum(self._rates.values()) / len(self._rates),
        }

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"rates": dict(self._rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._rates = dict(state["rates"])
        self.set_probabilities(self._bin_weights[self._bins()])


def _priorities(weights: list[float], scale: float) -> np.ndarray:
    """Return `weight ** scale` of each sample `[n_samples]`."""
    checked = np.asarray(weights, dtype=np.float64)
    invalid = np.flatnonzero(~np.isfinite(checked) | (checked < 0))
    if len(invalid):
        raise DataPoolError(f"weights must be finite and at least 0; sample {invalid[0]} has {weights[invalid[0]]}")

    # With a scale of 0 a weight of 0 has the priority 1, as all others: 0 ** 0 is 1.
    priorities = checked**scale
    if not 0 < priorities.sum() < np.inf:
        raise DataPoolError(f"no sample can be drawn: all weights to the power {scale} are 0, or their sum overflows")
    return priorities
