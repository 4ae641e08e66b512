"""Short film opinions made from a grammar of ours: real sentences with real sentiment, without any download.

    opinion    I saw this Korean cartoon on my laptop and the script seemed cold. ...
    opening    I saw this Korean cartoon                  its first five words decide its split
    prompt     I saw this Korean cartoon on my            five to seven words
    reference  laptop and the script seemed cold. ...     the rest

An opening belongs to one split for good, whatever the seed and the number of texts, so a held-out prompt never opens a
training text. Nothing here depends on Python's hash randomisation: one seed gives the same texts in every process.
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
"""Words that decide an opinion's split; the shortest prompt."""

_MOODS = {"praise": 0.46, "blame": 0.42, "shrug": 0.12}
_HELD_OUT_SHARE = 20  # one opening in 20 for each of val and test


class FilmOpinions(TextGenPool):
    """Openings of film opinions as prompts, the rest of each opinion as its reference."""

    @classmethod
    def prepare(
        cls,
        split: str,
        n_train: Annotated[int, Interval(ge=0, le=1_000_000)] = 2000,
        n_eval: Annotated[int, Interval(ge=0, le=1000)] = 200,
        seed: int = 0,
        prompt_words: Sequence[int] = (OPENING_WORDS, 7),
    ) -> FilmOpinions:
        """Builds the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            n_train: samples of `train`, the first texts of `film_opinions(n, seed)`.
            n_eval: samples of `val` and of `test`; held-out openings are rare, and run out.
            seed: of texts and prompt lengths.
            prompt_words: shortest and longest prompt, in words; at least `OPENING_WORDS`.

        Raises:
            DataPoolError: unknown split, or prompts too short to keep held-out openings apart.
        """
        shortest, longest = prompt_words
        if not OPENING_WORDS <= shortest <= longest:
            raise DataPoolError(
                f"film_opinions: prompt_words must be [shortest, longest] with {OPENING_WORDS} <= shortest <= longest "
                f"(the first {OPENING_WORDS} words decide an opinion's split), got {list(prompt_words)}"
            )
        texts = film_opinions(n_train if split == "train" else n_eval, seed, split=split)
        rng = random.Random(f"{seed}-{split}-prompts")
        pairs = [split_opinion(text, rng.randint(shortest, longest)) for text in texts]
        return cls([Sample(f"{split}_{i}", prompt, [rest]) for i, (prompt, rest) in enumerate(pairs)])


def film_opinions(n: int, seed: int, *, split: str = "train") -> list[str]:
    """Distinct opinions of one to three sentences; about 46 % praise, 42 % blame, the rest is neutral or mixed.

    Fewer opinions are a prefix of more: `film_opinions(10, seed) == film_opinions(99, seed)[:10]`.

    Args:
        n: how many.
        seed: texts of different seeds are independent draws.
        split: whose openings they have; held-out texts also differ in their openings.

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
    """The first `OPENING_WORDS` words, which decide the split."""
    return " ".join(text.split(" ", OPENING_WORDS)[:OPENING_WORDS])


def split_of(text: str) -> str:
    """The split that a text belongs to, by its opening alone."""
    bucket = zlib.crc32(opening(text).encode()) % _HELD_OUT_SHARE
    return {0: "val", 1: "test"}.get(bucket, "train")


def split_opinion(text: str, n_words: int) -> tuple[str, str]:
    """Prompt and continuation; the continuation keeps at least two words where the text allows it."""
    words = text.split(" ")
    n_words = max(OPENING_WORDS, min(n_words, len(words) - 2))
    return " ".join(words[:n_words]), " ".join(words[n_words:])


def made_up_share(texts: Sequence[str]) -> float:
    """Share of texts with a word that the grammar does not have; 0 for its own texts."""
    known = film_grammar.vocabulary()
    return sum(not known.issuperset(film_grammar.words_of(text)) for text in texts) / len(texts)


def _drawn(rng: random.Random) -> Iterator[str]:
    while True:
        [mood] = rng.choices(list(_MOODS), weights=list(_MOODS.values()))
        yield film_grammar.write(mood, rng)
