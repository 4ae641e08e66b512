"""Text and ids of a continuation: what a response adds to its prompt.

    prompt      ▁The  ▁film  ▁was       The film was
    response    ▁good  .                decoded alone: "good."    after its prompt: " good."
    text        4                       encoded alone: ▁ 4        after "2+2=": 4

Tokenizers such as SentencePiece treat the beginning of a text in another way than the rest: a response that is decoded
alone loses its first space, one that is encoded alone gains one. So the text of a response is the difference of two
decoded texts, and its ids are those that continue the ids of the prompt. The response of an encoder-decoder model is a
text of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from rl4lms_like.system.wording import agreement

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Ids: TypeAlias = "Sequence[int] | np.ndarray | Tensor"

UNDECODABLE = "\ufffd"
"""Character to which bytes that form no character are decoded."""

_TAIL = 16
"""Number of tokens of the prompt that are decoded with a response; a decoder's rules reach over a few characters."""

_BYTES = 4
"""Largest number of bytes, hence of tokens, of a character."""

_CACHED_PROMPTS = 4096

_ANCHORS = ("", "\n", ".", "a", "z", "0")
"""Texts after which a continuation is encoded if its prompt's last token would change; one of them does not change.

The first one stands for the continuation alone.
"""


_KEPT = "ids_of_kept_special_tokens"
"""Attribute of a tokenizer in memory; it is not saved."""


def keep_special_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Let the texts of responses that this tokenizer decodes keep some of its special tokens."""
    setattr(tokenizer, _KEPT, frozenset(tokenizer.convert_tokens_to_ids(token) for token in tokens))


def kept_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the special tokens that texts of responses keep."""
    ids: frozenset[int] = getattr(tokenizer, _KEPT, frozenset())
    return ids


def stripped_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the special tokens that no text of a response has, and their ids."""
    ids = set(tokenizer.all_special_ids)
    ids.update(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return {str(tokenizer.convert_ids_to_tokens(id)): id for id in sorted(ids - kept_ids(tokenizer))}


class _Context(NamedTuple):
    """Last tokens of a prompt and their text."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Continuations:
    """Decodes and encodes responses as continuations of their prompts.

    Args:
        tokenizer: of prompts and responses.
        follows_prompt: False for an encoder-decoder model, whose response does not continue the prompt's text.
        skips_special_tokens: leave special tokens out of texts.
    """

    tokenizer: PreTrainedTokenizerBase
    follows_prompt: bool = True
    skips_special_tokens: bool = True

    # --- text -------------------------------------------------------------------------------------------------------

    def text(self, prompt_ids: Ids, ids: Ids) -> str:
        """Return the text of a response the decoded whole after the text of the prompt.

        A character of which the prompt has only some bytes belongs to the response.
        """
        # A byte-level decoder joins the bytes of all tokens, so the text is the same alone, unless the first bytes
        # complete a character of the prompt.
        if not self.follows_prompt or self._joins_bytes:
            alone = self.decode(ids)
            if not self.follows_prompt or not alone.startswith(UNDECODABLE):
                return alone

        context = self._context(np.asarray(prompt_ids, dtype=np.int64))
        whole = self.decode([*context.ids, *_listed(ids)])
        if whole.startswith(context.text):
            return whole[len(context.text) :]

        # The border cuts a character, or the decoder changed the end of the prompt because of what follows. The text of
        # the prompt is what remains of it, also without the tokens of its last, incomplete character.
        n_common = 0
        for n_tokens in range(len(context.ids), max(len(context.ids) - _BYTES, -1), -1):
            text = self.decode(context.ids[:n_tokens])
            n_common = max(n_common, agreement(text, whole))
        return whole[n_common:]

    def texts(self, prompts: Sequence[Ids], responses: Sequence[Ids]) -> list[str]:
        """Return the texts of several responses, see `text`."""
        return [self.text(prompt_ids, ids) for prompt_ids, ids in zip(prompts, responses, strict=True)]

    def _context(self, prompt: np.ndarray) -> _Context:
        """Return the end of a prompt `[prompt_length]` that is decoded with its responses."""
        # By its bytes, which are hashed many times faster than a tuple of numbers.
        key = prompt.tobytes()
        if key in self._contexts:
            return self._contexts[key]

        # A few tokens are enough if they are decoded as in the whole prompt. They are not if they begin within a
        # character, or with a token that the decoder changes at the beginning of a text.
        prompt_ids = tuple(prompt.tolist())
        context = _Context(prompt_ids, self.decode(prompt_ids))
        tail_ids = prompt_ids[-_TAIL:]
        tail = self.decode(tail_ids)
        if tail.strip() and UNDECODABLE not in tail and context.text.endswith(tail):
            context = _Context(tail_ids, tail)

        if len(self._contexts) >= _CACHED_PROMPTS:
            self._contexts.clear()
        self._contexts[key] = context
        return context

    def decode(self, ids: Ids) -> str:
        """Return the text of ids that begin a text, such as a prompt's."""
        if self.skips_special_tokens and kept_ids(self.tokenizer):
            ids = [id for id in _listed(ids) if id not in self.stripped_ids]
            return str(self.tokenizer.decode(ids))
        return str(self.tokenizer.decode(_listed(ids), skip_special_tokens=self.skips_special_tokens))

    @cached_property
    def stripped_ids(self) -> frozenset[int]:
        """Ids of the special tokens that texts do not have."""
        return frozenset(stripped_tokens(self.tokenizer).values())

    @cached_property
    def _contexts(self) -> dict[bytes, _Context]:
        return {}

    @cached_property
    def _joins_bytes(self) -> bool:
        from tokenizers import decoders

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return isinstance(getattr(backend, "decoder", None), decoders.ByteLevel)

    # --- ids --------------------------------------------------------------------------------------------------------

    def whole_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts of a causal model: prompts, or prompts with their responses, without an end token."""
        if not texts:
            return []
        rows = self.tokenizer(list(texts), verbose=False)["input_ids"]
        return [list(ids[: len(ids) - len(self.appended_ids)]) for ids in rows]

    @cached_property
    def appended_ids(self) -> list[int]:
        """End tokens that the tokenizer appends to a text; empty for an encoder-decoder model, which reads them."""
        # A model that continues its prompt after an end token begins a new text.
        if not self.follows_prompt:
            return []
        text, whole = self.tokenizer("a", add_special_tokens=False)["input_ids"], self.tokenizer("a")["input_ids"]
        ends = {self.tokenizer.eos_token_id, self.tokenizer.sep_token_id}
        appended = takewhile(lambda id: id in ends, reversed(whole[len(text) :]))
        return list(appended)[::-1]

    def ids(self, prompts: Sequence[str], texts: Sequence[str]) -> list[list[int] | None]:
        """Return the ids with which texts continue the ids of their prompts, without special tokens.

        If the whole has a token border between prompt and text, these are the ids of the whole after it. Otherwise they
        are ids that are decoded to the whole after those of the prompt; None if there are none.
        """
        if not prompts:
            return []
        wholes = self.whole_ids([prompt + text for prompt, text in zip(prompts, texts, strict=True)])

        rows: list[list[int] | None] = []
        for prompt_ids, whole, text in zip(self.whole_ids(prompts), wholes, texts, strict=True):
            if whole[: len(prompt_ids)] == prompt_ids:
                rows.append(whole[len(prompt_ids) :])
            else:
                rows.append(self._continuing(prompt_ids, self._anchored(text), whole, text))
        return rows

    def ids_or_alone(self, prompt: str, text: str) -> list[int]:
        """Return the ids of a text after its prompt; as a text of its own where no ids continue the prompt."""
        ids = self.ids([prompt], [text])[0] if self.follows_prompt else None
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if ids is None else ids

    def _continuing(
        self, prompt_ids: list[int], candidates: Iterable[list[int]], whole: list[int], text: str
    ) -> list[int] | None:
        """Return the first candidate that is decoded to the whole after the prompt, or adds just the text to it."""
        # Normalization may change the text itself, so ids are compared with ids. The text counts where the whole has a
        # special token across the border, which is a token only there.
        with_special_tokens = replace(self, skips_special_tokens=False)
        expected = (with_special_tokens.decode(whole), with_special_tokens.decode(prompt_ids) + text)
        for candidate in candidates:
            if with_special_tokens.decode([*prompt_ids, *candidate]) in expected:
                return candidate
        return None

    def _anchored(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of a text in the middle of another one, after different anchors."""
        for anchor in _ANCHORS:
            before, both = self.tokenizer([anchor, anchor + text], add_special_tokens=False, verbose=False)["input_ids"]
            if both[: len(before)] == before:
                yield list(both[len(before) :])


def _listed(ids: Ids) -> list[int]:
    """Return ids as a list of Python integers, as tokenizers need them."""
    return list(ids) if isinstance(ids, Sequence) else ids.tolist()
