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

from rl4lms_like.core.sample import Sample
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.wording import help_of, without_sections

Pool = TypeVar("Pool", bound="TextGenPool")


class TextGenPool(ABC):
    """Samples of one split.

    `pool[i]` is `(sample, weight)`; the prompt sampler uses the weight as priority. It is 1 in this class. A subclass
    defines `prepare`, whose parameters besides the split are the `args` of a config:

        class Capitals(TextGenPool):
            @classmethod
            def prepare(cls, split: str, path: str) -> TextGenPool:
                with open(path) as lines:
                    rows = [line.strip().split(",") for line in lines]
                samples = []
                for index, (country, capital) in enumerate(rows):
                    samples.append(Sample(f"{split}_{index}", f"The capital of {country} is", [capital]))
                return cls.of(samples, split, path)
    """

    row_format: str | None = None
    """Published format in which the rows of a table were read, for `check`; None if there is none."""

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
        # Samples may be a generator over a long file or a download: rows beyond `max_size` are not read.
        pool_samples = list(islice(samples, max_size))
        if not pool_samples:
            why = "the file is empty or the fraction is too small"
            raise DataPoolError(f"{source}: no samples for split {split!r}; {why}")
        return cls(pool_samples)

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

        pools: list[TextGenPool] = []
        start = 0
        for ratio in split_ratios:
            stop = start + int(ratio * len(self) + 1e-9)  # 0.29 * 100 is 28.999...96 in floating point
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

    # Parameters of the call, with their types and help texts: a dataclass gives its fields. The help text of `prepare`
    # takes precedence over that of a field.
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

    # One kind for all: `Signature` refuses positional parameters after keyword-only ones, which the fields may be.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([parameter.replace(kind=kind) for parameter in parameters.values()])

    def flat(*args: Any, **kwargs: Any) -> Pool:
        arguments = signature.bind(*args, **kwargs).arguments
        for name, group in groups.items():
            group_arguments = {}
            for field in fields(group):
                if field.name in arguments:
                    group_arguments[field.name] = arguments.pop(field.name)
            arguments[name] = group(**group_arguments)
        return prepare(**arguments)

    # Configs are checked against the signature and the annotations; the help of a component shows the docstring.
    argument_lines = "".join(f"\n    {name}: {helps[name]}" for name in parameters if name in helps)
    flat.__doc__ = f"{without_sections(inspect.getdoc(prepare) or '')}\n\nArgs:{argument_lines}"
    flat.__module__ = prepare.__module__
    flat.__qualname__ = prepare.__qualname__
    flat.__annotations__ = hints
    flat.__signature__ = signature  # type: ignore[attr-defined]
    return flat
