"""Short film opinions generated from a built-in grammar: English sentences with sentiment, without any download.

    opinion    I saw this Korean cartoon on my laptop and the script seemed cold. ...
    opening    I saw this Korean cartoon                  the first five words determine the split
    prompt     I saw this Korean cartoon on my            five to seven words
    reference  laptop and the script seemed cold. ...     the rest

The split of an opening depends neither on the seed nor on the number of texts, so a held-out prompt never begins a
training text. Python's hash randomisation has no influence: a seed gives the same texts in every process.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Annotated

from annotated_types import Interval

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools import film_grammar
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.splits import SPLITS

OPENING_WORDS = 5
"""Number of words that determine an opinion's split; also the minimum prompt length."""

_MOODS = {"praise": 0.46, "blame": 0.42, "shrug": 0.12}
_HELD_OUT_FRACTION = 20  # val and test each get one opening in 20


class FilmOpinions(TextGenPool):
    """Beginnings of film opinions as prompts, with the rest of each opinion as its reference."""

    @classmethod
    def prepare(
        cls,
        split: str,
        n_train: Annotated[int, Interval(ge=0, le=1_000_000)] = 2000,
        n_eval: Annotated[int, Interval(ge=0, le=1000)] = 200,
        seed: int = 0,
        prompt_words: Sequence[int] = (OPENING_WORDS, 7),
    ) -> FilmOpinions:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            n_train: number of samples of `train`: the first texts of `film_opinions(n, seed)`.
            n_eval: number of samples of `val` and of `test`; limited, because held-out openings are rare.
            seed: seed of texts and prompt lengths.
            prompt_words: minimum and maximum prompt length in words; at least `OPENING_WORDS`.

        Raises:
            DataPoolError: unknown split, or prompts too short to keep held-out openings apart.
        """
        shortest, longest = prompt_words
        if not OPENING_WORDS <= shortest <= longest:
            raise DataPoolError(
                f"film_opinions: prompt_words must be [shortest, longest] with {OPENING_WORDS} <= shortest <= longest "
                f"(the first {OPENING_WORDS} words determine an opinion's split), got {list(prompt_words)}"
            )
        texts = film_opinions(n_train if split == "train" else n_eval, seed, split=split)
        rng = random.Random(f"{seed}-{split}-prompts")
        pairs = [split_opinion(text, rng.randint(shortest, longest)) for text in texts]
        return cls([Sample(f"{split}_{i}", prompt, [rest]) for i, (prompt, rest) in enumerate(pairs)])


def film_opinions(n: int, seed: int, *, split: str = "train") -> list[str]:
    """Generate distinct opinions of one to three sentences: about 46 % praise, 42 % blame, the rest neutral or mixed.

    A smaller `n` gives a prefix of a larger one: `film_opinions(10, seed) == film_opinions(99, seed)[:10]`.

    Args:
        n: number of opinions.
        seed: seed of the draws; texts of different seeds are independent.
        split: split of the opinions; opinions of `val` and `test` also have distinct openings.

    Raises:
        DataPoolError: unknown split.
    """
    if split not in SPLITS:
        raise DataPoolError(f"film_opinions: unknown split {split!r}; known: {', '.join(SPLITS)}")
    texts: dict[str, str] = {}
    for text in _drawn(random.Random(f"{seed}-{split}")):
        if len(texts) >= n:
            break
        if split_of(text) == split:
            texts.setdefault(text if split == "train" else opening(text), text)
    return list(texts.values())


def opening(text: str) -> str:
    """Return the first `OPENING_WORDS` words, which determine the split."""
    return " ".join(text.split(" ", OPENING_WORDS)[:OPENING_WORDS])


def split_of(text: str) -> str:
    """Return the split of a text, which depends on its opening only."""
    bucket = zlib.crc32(opening(text).encode()) % _HELD_OUT_FRACTION
    return {0: "val", 1: "test"}.get(bucket, "train")


def split_opinion(text: str, n_words: int) -> tuple[str, str]:
    """Return prompt and continuation; the continuation has at least two words if the text is long enough."""
    words = text.split(" ")
    n_words = max(OPENING_WORDS, min(n_words, len(words) - 2))
    return " ".join(words[:n_words]), " ".join(words[n_words:])


def made_up_fraction(texts: Sequence[str]) -> float:
    """Return the fraction of texts with a word outside the grammar; 0 for texts of the grammar."""
    known = film_grammar.vocabulary()
    return sum(not known.issuperset(film_grammar.words_of(text)) for text in texts) / len(texts)


def _drawn(rng: random.Random) -> Iterator[str]:
    while True:
        [mood] = rng.choices(list(_MOODS), weights=list(_MOODS.values()))
        yield film_grammar.write(mood, rng)
