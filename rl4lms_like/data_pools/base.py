"""Base class of data pools, which provide the prompts."""

from __future__ import annotations

import inspect
import random
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, TypeVar

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.wording import help_of, without_sections

Pool = TypeVar("Pool", bound="TextGenPool")


class TextGenPool(ABC):
    """Samples of one split.

    `pool[i]` is `(sample, weight)`; the prompt sampler uses the weight as priority. It is 1 in this class.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = list(samples)

    @classmethod
    @abstractmethod
    def prepare(cls, split: str, *args: Any, **kwargs: Any) -> TextGenPool:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            args: arguments from the config.
            kwargs: arguments from the config.

        Raises:
            DataPoolError: the data cannot be loaded, read or found, or has no samples for the split.
            MissingExtraError: a package is needed and not installed.
        """

    @classmethod  # noqa: B027  (optional for subclasses)
    def require(cls, needed_by: str, **args: Any) -> None:
        """Check that the packages and resources of `prepare` are installed; most pools need none.

        Args:
            needed_by: description of the pool for messages.
            args: the arguments of `prepare`, without the split.

        Raises:
            RL4LMsLikeError: a package or resource is missing.
        """

    @classmethod
    def is_local(cls, **args: Any) -> bool:
        """Return True if `prepare` needs no network; the command `check` prepares only such pools.

        Args:
            args: the arguments of `prepare`, without the split.
        """
        return True

    @classmethod
    def of(cls: type[Pool], samples: Iterable[Sample], split: str, source: str, max_size: int | None = None) -> Pool:
        """Build the pool from at most `max_size` samples.

        Raises:
            DataPoolError: there are no samples; the message names split and source.
        """
        first = list(islice(samples, max_size))
        if not first:
            why = "the file is empty or the fraction is too small"
            raise DataPoolError(f"{source}: no samples for split {split!r}; {why}")
        return cls(first)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Sample, float]:
        return self._samples[index], 1.0

    def __iter__(self) -> Iterator[tuple[Sample, float]]:
        return (self[index] for index in range(len(self)))

    @property
    def samples(self) -> list[Sample]:
        """Samples without weights."""
        return list(self._samples)

    def sample(self, rng: random.Random | None = None) -> Sample:
        """Draw one sample uniformly."""
        return (rng or random).choice(self._samples)

    def split(self, split_ratios: Sequence[float]) -> list[TextGenPool]:
        """Split the pool into consecutive slices of `floor(ratio * len)` samples each.

        Raises:
            ValueError: the ratios are negative or add up to more than 1.
        """
        if min(split_ratios) < 0 or sum(split_ratios) > 1 + 1e-9:
            raise ValueError(f"split ratios must be at least 0 and add up to at most 1, got {list(split_ratios)}")
        pools, start = [], 0
        for ratio in split_ratios:
            stop = start + int(ratio * len(self) + 1e-9)
            pools.append(type(self)(self._samples[start:stop]))
            start = stop
        return pools


def flattened(prepare: Callable[..., Pool]) -> Callable[..., Pool]:
    """Decorate a `prepare` so that its dataclass parameters are replaced by their fields, for arguments of many pools.

        def prepare(cls, split, seed: int = 42, *, source: Source)      is called as
        prepare("train", seed=1, data_dir="reviews", max_size=100)

    Signature, annotations and the `Args:` of the docstring are those of the call. The docstring of `prepare` may
    describe a field again, in terms of its pool, and need not describe `split`.
    """
    hints = typing.get_type_hints(prepare, include_extras=True)
    helps = help_of(TextGenPool.prepare) | help_of(prepare)
    groups: dict[str, Any] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(prepare).parameters.items():
        if is_dataclass(hints.get(name)):
            groups[name] = hints.pop(name)
            parameters |= inspect.signature(groups[name]).parameters
            hints |= typing.get_type_hints(groups[name], include_extras=True)
            helps = help_of(groups[name]) | helps
        else:
            parameters[name] = parameter
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([parameter.replace(kind=kind) for parameter in parameters.values()])

    def flat(*args: Any, **kwargs: Any) -> Pool:
        given = signature.bind(*args, **kwargs).arguments
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group) if each.name in given})
        return prepare(**given)

    described = "".join(f"\n    {name}: {helps[name]}" for name in parameters if name in helps)
    flat.__doc__ = f"{without_sections(inspect.getdoc(prepare) or '')}\n\nArgs:{described}"
    flat.__module__, flat.__qualname__, flat.__annotations__ = prepare.__module__, prepare.__qualname__, hints
    flat.__signature__ = signature  # type: ignore[attr-defined]
    return flat
