r"""Stop strings: an episode ends with the token after which the text of the response contains one of them.

    text      4.⏎Question: Who         stop string  ⏎Question:
    tokens    4 . ⏎ Question :         the tokens of the stop string are actions

Environments and generation use this definition. The criterion of transformers differs from it: it also finds strings
that begin in the prompt, and it reads the tokens' own strings instead of the decoded text. The text of a response is
that of the continuation of its prompt (`core.continuation`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rl4lms_like.core.continuation import UNDECODABLE, Continuations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "stop_strings"
"""The key in `generation_kwargs`."""

_MARGIN = 8
"""Number of tokens that are decoded in addition, since decoders may change the first ones of a text."""


def stop_strings_of(generation_kwargs: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the stop strings of generation arguments: a text, a list of texts or none."""
    strings = (generation_kwargs or {}).get(KEY) or ()
    if isinstance(strings, str):
        return (strings,)
    return tuple(strings)


def contains_any(text: str, strings: Sequence[str]) -> bool:
    """Return whether a text contains one of the strings."""
    return any(string in text for string in strings)


@dataclass(frozen=True)
class StopStrings:
    """Stop strings of responses that a tokenizer decodes.

    Responses are continuations of prompts; that of an encoder-decoder model has none (`prompt_ids` is empty).

    Args:
        strings: the stop strings; none is empty.
        tokenizer: decodes responses.
    """

    strings: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase

    def found(self, ids: list[int], prompt_ids: Sequence[int] = ()) -> bool:
        """Return whether the text of a response contains a stop string."""
        return contains_any(self._continuations.text(prompt_ids, ids), self.strings)

    def found_at_end(self, ids: list[int], prompt_ids: Sequence[int] = ()) -> bool:
        """Return the same for a response that contained none before its last token; usually few tokens are decoded."""
        # A stop string that is complete now ends in the last token, so the last tokens contain it. Special tokens have
        # no text: they are left out, as far as a longer window can make up for them.
        stripped = self._continuations.stripped_ids
        window = [id for id in ids[-4 * self._n_decoded :] if id not in stripped][-self._n_decoded :]

        # A tokenizer may decode the first tokens of a text differently, so the prompt precedes a short response. The
        # window may then show a string that the response does not have, but never lacks one that it has, unless it
        # begins within a character: bytes that form no character make the whole run of bytes undecodable.
        if len(window) < self._n_decoded:
            window = [*prompt_ids[-_MARGIN:], *window]
        text = self._continuations.text((), window)
        is_possible = contains_any(text, self.strings) or UNDECODABLE in text
        return is_possible and self.found(ids, prompt_ids)

    def n_tokens(self, ids: list[int], prompt_ids: Sequence[int] = ()) -> int | None:
        """Return the number of tokens up to the one that completes the first stop string; None without any."""
        if not self.found(ids, prompt_ids):
            return None

        # A text that contains a string still does with more tokens, so the first n can be found by bisection.
        return bisect_left(range(len(ids)), True, key=lambda n: self.found(ids[:n], prompt_ids))

    @cached_property
    def _n_decoded(self) -> int:
        """Number of tokens that contain the longest stop string; a token has at least one byte."""
        return max(len(string.encode()) for string in self.strings) + _MARGIN

    @cached_property
    def _continuations(self) -> Continuations:
        return Continuations(self.tokenizer)
