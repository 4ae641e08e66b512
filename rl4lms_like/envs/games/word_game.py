"""A word to guess, letter by letter."""

from __future__ import annotations

import re
import string

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.games.base import Step, TextGame
from rl4lms_like.system.numbers import Count, NonNegative

WORDS = (
    *("baby", "bank", "bear", "bird", "blue", "book", "cake", "cold", "door", "farm"),
    *("fish", "game", "gold", "king", "lake", "milk", "moon", "rain", "ship", "tree"),
)
"""Words that are drawn: 20 of four letters."""

_WORD = re.compile(r"[a-z]{1,20}")


class WordGame(TextGame):
    """A word to guess, letter by letter.

    The word is drawn uniformly from 20 words of four letters; if the sample has a reference, it is the word. A turn is
    a letter, the first one from a to z in its text; every other letter of it is ignored, and capital letters are small
    ones. It is answered with the word, in which letters that were not yet guessed are `_`. A text without a letter, and
    a letter that is not in the word or was tried before, is wrong. The episode ends with the last letter of the word,
    or with the wrong turn number `lives`.

    Score: 1 for the whole word, minus `cost` for each wrong turn.

        player          score
        best possible   .82
        scripted        .47

    The scripted player tries one of the letters that are not yet guessed in the words which are still possible, each
    with the same probability. The best one needs a search over the sets of possible words.

    Metrics: `won`, `wrong`.

    Args:
        lives: number of wrong turns that end the episode.
        cost: points of a wrong turn.
    """

    def __init__(self, lives: Count = 6, cost: NonNegative = 0.1) -> None:
        self.lives = lives
        self.cost = cost

    def start(self, sample: Sample | None) -> str:
        """Return the word without its letters; see `TextGame.start`.

        Raises:
            ValueError: the reference of the sample is no word of 1 to 20 letters from a to z.
        """
        drawn = WORDS[int(self.np_random.integers(len(WORDS)))]
        self.word = drawn if sample is None else sample.references[0].strip()
        if not _WORD.fullmatch(self.word):
            raise ValueError(f"the reference {self.word!r} is no word of 1 to 20 letters from a to z")
        self.tried: set[str] = set()
        self.n_wrong = 0
        return f"{self.pattern}\n"

    @property
    def pattern(self) -> str:
        """The word, in which letters that were not yet guessed are `_`."""
        return seen(self.word, self.tried)

    @property
    def possible(self) -> list[str]:
        """Words of the list that agree with all answers so far."""
        return [word for word in WORDS if seen(word, self.tried) == self.pattern]

    def step(self, action: str) -> Step:
        """Answer a letter."""
        letter = next((character for character in action.lower() if character in string.ascii_lowercase), None)
        is_right = letter is not None and letter in self.word and letter not in self.tried
        if letter is not None:
            self.tried.add(letter)
        if not is_right:
            self.n_wrong += 1

        # Only a right letter can win, and only a wrong one lose.
        has_won = "_" not in self.pattern
        has_lost = self.n_wrong >= self.lives
        reward = float(has_won) if is_right else -self.cost
        answer = f"The word is {self.word}.\n" if has_lost else f"{self.pattern}\n"
        metrics = {"won": float(has_won), "wrong": float(self.n_wrong)}
        return answer, reward, has_won or has_lost, False, {"metrics": metrics}

    def player(self) -> str:
        """Return a letter that was not yet tried and is in one of the possible words, drawn uniformly."""
        letters = set("".join(self.possible)) - self.tried
        if not letters:  # a word that is not in the list
            letters = set(string.ascii_lowercase) - self.tried
        return str(self.player_random.choice(sorted(letters)))


def seen(word: str, tried: set[str]) -> str:
    """Return a word in which letters that were not yet tried are `_`.

    Examples:
        >>> seen("book", {"o", "x"})
        '_oo_'
    """
    return "".join(letter if letter in tried else "_" for letter in word)
