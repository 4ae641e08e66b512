"""What a reward, metric or data pool comes to under some `args`: one function for each place where arguments act.

    {id, args} ─ build ─> component ─┬─ scores of texts, samples of a pool
                                     ├─ attributes that its parts work with
                                     └─ what libraries were asked for: models to load, batches, data sets

Each takes a `Tried` and returns something that can be compared; what is refused is seen as its message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from rl4lms_like.config.binding import ComponentConfig, build_component
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Preference, Sample
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.rewards.call import score_episodes
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.system.registry import Registry
from rl4lms_like.testing.models import make_tokenizer
from tests.catalogue import Places

PAIRS: Sequence[tuple[str, Sequence[str], str]] = (
    ("Say it:", ["The film was good, and long.", "a good film"], "the film was good"),
    ("Count: 0", ["1 2 3 4"], "1 2 3 7 8"),
    ("Review.", ["it was bad . it was sad ."], "it was bad. it was bad, it was Bad and sad."),
)
"""A prompt, its references and what was written: words in common, numbers, repetition."""


@dataclass(frozen=True)
class Texts:
    """What is scored.

    Args:
        samples: prompts, references and `meta_data`.
        written: a text for each.
    """

    samples: Sequence[Sample]
    written: Sequence[str]


def pairs(*rows: tuple[str, Sequence[str], str]) -> Callable[[Places], Texts]:
    """Texts without `meta_data`."""
    samples = [Sample(f"pair_{i}", prompt, list(references)) for i, (prompt, references, _) in enumerate(rows)]
    return lambda places: Texts(samples, [written for _, _, written in rows])


DEFAULT = pairs(*PAIRS)


@dataclass
class Tried:
    """A component's `id` and `args`, and what may be asked of it.

    Args:
        registry: that knows the id.
        id: of the component.
        args: as a config has them.
        places: folders of models and data.
        texts: what rewards and metrics score.
        patch: to listen to libraries with; undone afterwards.
        model: that a metric is handed.
    """

    registry: Registry
    id: str
    args: dict[str, Any]
    places: Places
    texts: Texts
    patch: pytest.MonkeyPatch
    model: Any = None

    @cached_property
    def component(self) -> Any:
        """The reward, metric or pool."""
        if self.registry.kind == "data pool":
            return self.registry.get(self.id, {"split": "train"} | self.args)
        return build_component(self.registry, ComponentConfig(id=self.id, args=self.args))

    def scores(self) -> Any:
        """A reward's, of every token of all texts; a metric's."""
        if self.registry.kind == "reward":
            return np.asarray(score_episodes(self.component, episodes(self.texts))).round(6).tolist()
        samples = self.texts.samples
        return compute_metric(
            self.component,
            [sample.prompt_or_input_text for sample in samples],
            list(self.texts.written),
            [list(sample.references) for sample in samples],
            [dict(sample.meta_data or {}) for sample in samples],
            self.model,
            "val",
        )


Sight = Callable[[Tried], Any]


@dataclass(frozen=True)
class Refused:
    """Why nothing is scored."""

    message: str


def observed(tried: Tried, sight: Sight) -> Any:
    """What a component shows; its message where it is refused."""
    try:
        return sight(tried)
    except RL4LMsLikeError as error:
        return Refused(str(error))


def episodes(texts: Texts) -> list[Observation]:
    """The texts as whole episodes of one tokenizer."""
    tokenizer = make_tokenizer()
    written = [np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts.written]
    layout = TextLayout(tokenizer, max_prompt_length=64, max_context_length=max(map(len, written)))
    prompts = layout.encode_all([sample.prompt_or_input_text for sample in texts.samples])
    return [
        Observation(sample, prompt, response, len(response), layout)
        for sample, prompt, response in zip(texts.samples, prompts, written, strict=True)
    ]


# --- sights ----------------------------------------------------------------------------------------------------------


def scores(tried: Tried) -> Any:
    """Rewards or a metric's scores."""
    return tried.scores()


def samples(tried: Tried) -> list[tuple[Any, ...]]:
    """Those of a pool, with the weights that they are drawn with."""
    return [
        (
            *(sample.id, sample.prompt_or_input_text, list(sample.references), dict(sample.meta_data or {}), weight),
            *((sample.rejected, sample.margin) if isinstance(sample, Preference) else ()),
            *(picture.number for picture in sample.images),
        )
        for sample, weight in tried.component
    ]


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acts:
    """How an argument is seen to act.

    Args:
        value: another value than the catalogue row's or the default; a function is given the places.
        sees: where.
        beside: what both say besides what the catalogue's row says; values that are functions are given the places.
        also: what the other says besides, where the argument alone would be a mistake.
        without: arguments of the catalogue's row that both leave out.
        texts: what is scored.
        refused: what the error says, where the other value is refused.
    """

    value: Any
    sees: Sight = scores
    others: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[str] = ()
    texts: Callable[[Places], Texts] = DEFAULT
    refused: str = ""


@dataclass(frozen=True)
class Silent:
    """An argument that is taken for RL4LMs' configs, or has one value only; its help says so in these words."""

    words: str
