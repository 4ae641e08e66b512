"""Questions of the package reasoning-gym, which generates them and knows their answers.

    entry       {"question": "Spell this word backward ...: sun", "answer": "nus", "metadata": {...}}
    sample      prompt: the question, reference: the answer without surrounding white space, meta_data: the entry

The split of a question depends on its text alone. Data sets repeat questions (`chain_sum` has only 200 with two terms
of one digit), so a division by rows would put most of the questions of `val` into `train` too.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.splits import SPLITS, check_ratios, names_of
from rl4lms_like.scoring.reasoning_gym import CONFIG, DATASET, ENTRY, create
from rl4lms_like.system.errors import DataPoolError, import_extra
from rl4lms_like.system.numbers import Count, Seed
from rl4lms_like.system.wording import raised

_NEEDED_BY = "the data pool 'reasoning_gym'"


class ReasoningGymPool(TextGenPool):
    """Distinct questions of one data set of reasoning-gym."""

    @classmethod
    def require(cls, needed_by: str, **args: Any) -> None:
        """Check that the package is installed, has the data set and accepts its config."""
        _created(args["dataset"], args.get("config"), size=1, seed=0)

    @classmethod
    def prepare(
        cls,
        split: str,
        dataset: str,
        config: dict[str, Any] | None = None,
        size: Count = 1000,
        seed: Seed = 0,
        max_size: Count | None = None,
        split_ratios: Sequence[float] = (0.8, 0.1, 0.1),
        prompt_prefix: str = "",
        prompt_suffix: str = "",
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            dataset: name of the data set, such as `chain_sum`.
            config: arguments of the data set, such as `{min_digits: 1, max_digits: 1}`. Default: its own.
            size: number of questions that are generated for all splits; repeated ones are removed.
            seed: seed of the questions.
            max_size: maximum number of samples per split.
            split_ratios: probabilities that a question belongs to train, val and test.
            prompt_prefix: text prepended to every question.
            prompt_suffix: text appended to every question.

        Raises:
            DataPoolError: the package does not know the data set or rejects its config, or the split is empty.
        """
        names_of(split)
        check_ratios(split_ratios)
        entries = _entries(dataset, json.dumps(config), size, seed)

        def samples() -> Iterator[Sample]:
            for index, entry in enumerate(entries):
                if _split_of(entry["question"], split_ratios) != split:
                    continue
                prompt = f"{prompt_prefix}{entry['question'].strip()}{prompt_suffix}"
                reference = str(entry["answer"]).strip()
                # With `strict: false`, reward and metric build the data set again: its verifier scores the answer.
                meta_data = {DATASET: dataset, CONFIG: config or {}, ENTRY: entry}
                yield Sample(f"{split}_{index}", prompt, [reference], meta_data)

        return cls.of(samples(), split, f"the data set {dataset!r}", max_size)


def _split_of(question: str, ratios: Sequence[float]) -> str | None:
    """Return the split of a question; None for a part of them if the ratios add up to less than 1."""
    # The first 32 bits of the hash as a number in [0, 1): uniform over questions, and the same in every process.
    position = int(hashlib.sha256(question.strip().encode()).hexdigest()[:8], 16) / 2**32
    for index, split in enumerate(SPLITS):
        if position < sum(ratios[: index + 1]):
            return split
    return None


@lru_cache(maxsize=1)  # the three splits come from the same questions; some take 30 ms each to generate
def _entries(name: str, config: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Return the entries with distinct questions, in the order of their generation."""
    data_set = _created(name, json.loads(config), size=size, seed=seed)

    # Some data sets (`list_functions`) draw from the global generator: it is seeded for them and restored afterwards.
    state = random.getstate()
    random.seed(seed)
    try:
        by_question: dict[str, dict[str, Any]] = {}
        for index in range(size):
            entry = data_set[index]
            by_question.setdefault(entry["question"].strip(), entry)
    except Exception as error:
        raise DataPoolError(f"{name!r} failed on question {index} of seed {seed}: {raised(error)}") from error
    finally:
        random.setstate(state)
    return list(by_question.values())


def _created(name: str, config: dict[str, Any] | None, *, size: int, seed: int) -> Any:
    package = import_extra("reasoning_gym", extra="reasoning", needed_by=_NEEDED_BY)
    known = sorted(package.factory.DATASETS)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise DataPoolError(f"reasoning-gym has no data set {name!r}; {hint}")

    # The configs of reasoning-gym check their values by `assert`.
    try:
        return create(name, json.dumps(config or {}), _NEEDED_BY, size=size, seed=seed)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataPoolError(f"the data set {name!r} does not accept the config {config}: {raised(error)}") from error
