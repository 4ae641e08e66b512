"""Greedy answers of a language model on this machine to messages, in batches.

    messages ─ chat template ─ token ids, longest first ─ batches, padded on the left ─ greedy generation ─> answers

A model without a chat template continues the message itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rl4lms_like.core.chat_template import ChatTemplate, set_template_date
from rl4lms_like.scoring.frozen import FrozenModel, Loaded, batches_by_length, longest_input
from rl4lms_like.system.errors import ModelError


@dataclass(frozen=True)
class Answered:
    """Answer to a message.

    Args:
        index: of the message.
        text: without special tokens.
        is_complete: False if it was cut off at the limit of tokens.
    """

    index: int
    text: str
    is_complete: bool


class AnsweringModel(FrozenModel):
    """Causal language model that answers messages greedily.

    Args:
        model_name: hub id or local folder.
        template_date: day that the chat template writes as today; needed by templates that write it.
        settings: see `FrozenModel`.
    """

    def __init__(self, model_name: str, *, template_date: str | None, **settings: Any) -> None:
        super().__init__(model_name, "AutoModelForCausalLM", role="judge", **settings)
        self.template_date = template_date

    def answers(self, messages: Sequence[str], *, max_new_tokens: int, batch_size: int) -> Iterator[Answered]:
        """Yield the answer to each message, batch by batch, those to the longest messages first.

        Raises:
            ModelError: the model cannot be loaded, has no end token, or its chat template cannot be used.
            ValueError: a message with its answer is longer than the model's limit.
        """
        import torch

        rows = [self._encoded(message) for message in messages]
        self._check_lengths(rows, max_new_tokens)
        for indices in batches_by_length(rows, batch_size):
            # Padded on the left, so that all answers begin at the same position.
            longest = max(len(rows[index]) for index in indices)
            ids = torch.zeros(len(indices), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(indices):
                ids[row, longest - len(rows[index]) :] = torch.tensor(rows[index])
                mask[row, longest - len(rows[index]) :] = 1

            with torch.inference_mode():
                whole = self.model.generate(
                    input_ids=ids.to(self.model.device),
                    attention_mask=mask.to(self.model.device),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                )
            for index, answer_ids in zip(indices, whole[:, longest:].tolist(), strict=True):
                ends = [position for position, id in enumerate(answer_ids) if id in self._end_token_ids]
                kept_ids = answer_ids[: ends[0]] if ends else answer_ids
                text = self.tokenizer.decode(kept_ids, skip_special_tokens=True)
                yield Answered(index, text, is_complete=bool(ends))

    def _load(self) -> Loaded:
        from transformers import GenerationConfig

        loaded = super()._load()
        tokenizer = loaded.tokenizer
        if self.template_date is not None:
            set_template_date(tokenizer, self.template_date)
        elif tokenizer.chat_template and "strftime_now" in tokenizer.get_chat_template():
            raise ModelError(
                f"the chat template of {self.model_name!r} writes today's date, so its answers would change from day "
                "to day; set template_date to a day, such as 2026-11-20"
            )

        # Only the tokens of the checkpoint's generation config: its temperature or penalties are not greedy answers.
        ends = _end_tokens(loaded)
        if not ends:
            raise ModelError(f"{self.model_name!r} has no token that ends an answer")
        loaded.model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0])

        # The balancing loss of a mixture of experts, with which `generate` of transformers fails.
        loaded.model.config.get_text_config().output_router_logits = False
        return loaded

    @cached_property
    def _end_token_ids(self) -> frozenset[int]:
        return frozenset(self.model.generation_config.eos_token_id)

    def _encoded(self, message: str) -> list[int]:
        """Return the ids of a message and of what its answer begins with."""
        tokenizer = self.tokenizer
        text = message
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": message}]
            text = ChatTemplate(tokenizer).render(messages, add_generation_prompt=True)
        # A rendered message has its special tokens already.
        encoded = tokenizer(text, add_special_tokens=not tokenizer.chat_template, verbose=False)["input_ids"]
        return list(encoded)

    def _check_lengths(self, rows: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        # A message without its beginning or end would be answered, too, and the answer be wrong.
        limit = longest_input(self.model, self.tokenizer)
        longest = max((len(row) for row in rows), default=0)
        if limit is not None and longest + max_new_tokens > limit:
            raise ValueError(
                f"a message has {longest} tokens and its answer up to {max_new_tokens}, and {self.model_name!r} reads "
                f"at most {limit}: shorten the template or the responses, or lower max_new_tokens"
            )


def _end_tokens(loaded: Loaded) -> list[int]:
    """Return the ids that end an answer: those of the checkpoint, of the tokenizer, and of a turn of the template."""
    generation_config = loaded.model.generation_config
    ends: list[int | None] = []
    for ids in (generation_config.eos_token_id, loaded.tokenizer.eos_token_id):
        ends += ids if isinstance(ids, list) else [ids]
    if loaded.tokenizer.chat_template:
        ends.append(ChatTemplate(loaded.tokenizer).end_of_turn)
    return list(dict.fromkeys(id for id in ends if id is not None))
