"""Prompts and references as token ids to learn from: one example for each reference of a sample.

    causal    input_ids   prompt   reference   end      labels   -100 ...   reference   end
    seq2seq   input_ids   prompt                        labels   reference   end

Prompts are encoded as environments and evaluations encode them, references on their own: where a policy writes, its
first token follows the prompt's last one, and no token reaches over the border. A label of -100 is not learned. Labels
are told from padding by their place, never by their id, so the end is learned also where it is the pad token. The
first token of a causal example has none: nothing stands before it that could predict it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Sample

NOT_LEARNED = -100
"""The label that transformers' losses leave out."""

Example: TypeAlias = "dict[str, list[int]]"
"""`input_ids` and `labels`, not padded."""


@dataclass(frozen=True)
class Examples:
    """What a split teaches, and what did not fit.

    Args:
        rows: the examples, in the order of the samples.
        n_without_reference: samples that teach nothing.
        n_shorter_prompts: examples whose prompt was cut further, so that the reference fits behind it.
        n_cut_references: examples whose reference was cut; no end follows there.
    """

    rows: list[Example] = field(default_factory=list)
    n_without_reference: int = 0
    n_shorter_prompts: int = 0
    n_cut_references: int = 0

    @property
    def n_learned(self) -> int:
        """Tokens with a label."""
        return sum(label != NOT_LEARNED for row in self.rows for label in row["labels"])

    def notices(self, split: str) -> list[str]:
        """What a reader should know of them, one line each."""
        lines = (
            (self.n_without_reference, "samples have no reference and teach nothing"),
            (self.n_shorter_prompts, "prompts were cut further, so that their references fit into the model"),
            (self.n_cut_references, "references were cut, because they do not fit into the model; no end follows them"),
        )
        return [f"{split}: {n} {what}" for n, what in lines if n]


@dataclass(frozen=True, kw_only=True)
class ExampleEncoder:
    """Makes examples of samples.

    Args:
        tokenizer: of prompts and references.
        is_encoder_decoder: the model's family.
        max_prompt_length: tokens; longer prompts are cut on the tokenizer's `truncation_side`.
        max_length: tokens of a whole causal example, or of a seq2seq model's reference.
        end_token_id: what follows a reference; None: nothing.
        separator: between prompt and reference of a causal model; None: a space where there is no white space.
        loss_on_prompt: a causal model learns the prompt's tokens too.
    """

    tokenizer: PreTrainedTokenizerBase
    is_encoder_decoder: bool
    max_prompt_length: int
    max_length: int
    end_token_id: int | None
    separator: str | None = None
    loss_on_prompt: bool = False

    def encode(self, samples: Sequence[Sample]) -> Examples:
        """The examples of some samples."""
        prompts = [sample.prompt_or_input_text for sample in samples]
        prompt_ids = (
            [ids.tolist() for ids in self._layout(self.max_prompt_length).encode_all(prompts)] if prompts else []
        )
        pairs = [(i, reference) for i, sample in enumerate(samples) for reference in sample.references]
        references = self._references([prompts[i] for i, _ in pairs], [reference for _, reference in pairs])
        rows, n_shorter, n_cut = [], 0, 0
        for (i, _), reference in zip(pairs, references, strict=True):
            if self.is_encoder_decoder:
                prompt, kept = prompt_ids[i], reference[: self.max_length]
            else:
                prompt, kept = self._fitting(prompts[i], prompt_ids[i], reference)
            n_shorter += len(prompt) < len(prompt_ids[i])
            n_cut += len(kept) < len(reference)
            rows.append(self._example(prompt, kept))
        n_without = sum(not sample.references for sample in samples)
        return Examples(rows, n_without, n_shorter, n_cut)

    def _layout(self, max_prompt_length: int) -> TextLayout:
        side: Literal["left", "right"] = "right" if self.tokenizer.truncation_side == "right" else "left"
        return TextLayout(self.tokenizer, max_prompt_length, 1, prompt_truncation_side=side)

    def _references(self, prompts: Sequence[str], references: Sequence[str]) -> list[list[int]]:
        """Ids of the references, their ends included."""
        if not references:
            return []
        end = [] if self.end_token_id is None else [self.end_token_id]
        if self.is_encoder_decoder:
            rows = self.tokenizer(text_target=list(references), verbose=False)["input_ids"]
            # some families put a language token behind the end
            return [list(ids) if set(end) & set(ids[-2:]) else [*ids, *end] for ids in rows]
        spaced = self._spaces_by_itself()
        texts = [self._behind(*pair, spaced=spaced) for pair in zip(prompts, references, strict=True)]
        rows = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [[*ids, *end] for ids in rows]

    def _behind(self, prompt: str, reference: str, *, spaced: bool) -> str:
        """The reference as it stands behind its prompt."""
        if self.separator is not None:
            return self.separator + reference
        if spaced or not prompt or not reference or prompt[-1].isspace() or reference[0].isspace():
            return reference
        return f" {reference}"

    def _spaces_by_itself(self) -> bool:
        """Whether a text's first token begins with a space that is not in the text, as SentencePiece's do."""
        ids = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        return " " in str(self.tokenizer.decode([*ids, *ids])).strip()

    def _fitting(self, text: str, prompt: list[int], reference: list[int]) -> tuple[list[int], list[int]]:
        """Prompt and reference of at most `max_length` tokens: first the prompt gives way, down to one token."""
        least = min(len(prompt), self.tokenizer.num_special_tokens_to_add() + 1)
        reference = reference[: max(self.max_length - least, 1)]
        room = self.max_length - len(reference)
        if len(prompt) > room:
            prompt = self._layout(room).encode(text).tolist()
        return prompt, reference

    def _example(self, prompt: list[int], reference: list[int]) -> Example:
        if self.is_encoder_decoder:
            return {"input_ids": prompt, "labels": reference}
        learned = prompt if self.loss_on_prompt else [NOT_LEARNED] * len(prompt)
        return {"input_ids": [*prompt, *reference], "labels": [NOT_LEARNED, *[*learned, *reference][1:]]}


class ExampleCollator:
    """Examples as one batch, padded on the right: `input_ids`, `attention_mask`, `labels`, all `[n, length]`.

    Batches of a seq2seq model also have `decoder_input_ids`: the start token, then the labels but the last, as
    `generate` reads them.

    Args:
        pad_token_id: fills `input_ids`; labels are filled with -100.
        start_token_id: of a seq2seq model's decoder; None for causal models.
    """

    def __init__(self, pad_token_id: int, start_token_id: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.start_token_id = start_token_id

    def __call__(self, rows: Sequence[Example]) -> dict[str, Tensor]:
        """The batch."""
        ids = [row["input_ids"] for row in rows]
        labels = _padded([row["labels"] for row in rows], NOT_LEARNED)
        batch = {
            "input_ids": _padded(ids, self.pad_token_id),
            "attention_mask": _padded([[1] * len(row) for row in ids], 0),
            "labels": labels,
        }
        if self.start_token_id is not None:
            start = torch.full_like(labels[:, :1], self.start_token_id)
            written = labels.masked_fill(labels == NOT_LEARNED, self.pad_token_id)
            batch["decoder_input_ids"] = torch.cat([start, written[:, :-1]], dim=1)
        return batch


def n_learned(labels: Tensor) -> Tensor:
    """How many labels are learned, as a tensor without dimensions."""
    return (labels != NOT_LEARNED).sum()


def _padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.long)
