"""Encoding of prompts and references as training examples, one for each reference of a sample.

    causal    input_ids   prompt   reference   end      labels   -100 ...   reference   end
    seq2seq   input_ids   prompt                        labels   reference   end

    chat      input_ids   system   user   assistant   user   assistant           labels   only of the assistant's tokens
    text      input_ids   start   text   end                                     labels   text   end

Prompts are encoded as in environments and evaluations, and references as the tokens that continue them, so that no
token spans the boundary between them, as in generation (`core.continuation`). Labels of -100 are ignored by the loss.
Padding is recognized by its position, never by its id, so that the end token is learned even if it is the pad token.
The first token of a causal example has no label, because no token precedes it. With a chat template, a causal example
is the rendered conversation; its labels are those of the response, or of all messages of the assistant
(`Sample.learned`), and of the token that ends each. A text without a prompt is divided into blocks. A response that
ended at a length limit (`Sample.truncated`) has no end token: the model that wrote it would have continued.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from typing import Literal, TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rl4lms_like.core.chat_template import ChatTemplate, chat_template_issue
from rl4lms_like.core.continuation import Continuations
from rl4lms_like.core.episodes import padded
from rl4lms_like.core.observation import NO_LIMIT, TextLayout
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.sample import Sample
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError
from rl4lms_like.system.wording import beginning

NOT_LEARNED = -100
"""Label that transformers' losses ignore."""


class _Tokens(TypedDict):
    input_ids: list[int]
    labels: list[int]


class Example(_Tokens, total=False):
    """Ids and labels without padding.

    If the model reads pictures, also the number of the prompt's pictures, 0 without, and how many of the ids are those
    of the prompt.
    """

    pictures: int
    n_prompt: int


@dataclass(frozen=True)
class Examples:
    """Examples of a split, in the order of the samples, and the numbers of those truncated or not used."""

    rows: list[Example] = field(default_factory=list)
    n_without_reference: int = 0  # samples without a reference, which give no examples
    n_shorter_prompts: int = 0  # examples whose prompt was truncated further to make room for the reference
    n_cut_references: int = 0  # examples whose reference was truncated; these have no end token
    n_texts: int = 0  # texts without prompts that were divided into these examples
    n_empty_texts: int = 0  # of these, texts with nothing to learn

    @property
    def n_learned(self) -> int:
        """Number of tokens with a label."""
        return sum(label != NOT_LEARNED for row in self.rows for label in row["labels"])

    @property
    def n_learned_in_prompts(self) -> int:
        """Number of tokens with a label in prompts of a model that reads pictures."""
        n = 0
        for row in self.rows:
            labels = row["labels"][: row.get("n_prompt", 0)]
            n += sum(label != NOT_LEARNED for label in labels)
        return n

    def longest(self, *, is_encoder_decoder: bool) -> int:
        """Return the number of tokens of the longest text that a model reads in one pass; 0 if there is none."""
        # Of both families: causal labels are as long as the input, and a decoder has positions of its own.
        lengths = [max(len(row["input_ids"]), len(row["labels"])) for row in self.rows]
        return max(lengths, default=0)

    def notices(self, split: str) -> list[str]:
        """Return log lines about truncated and unused samples."""
        lines = (
            (self.n_without_reference, "samples have no reference and are not used"),
            (self.n_shorter_prompts, "prompts were truncated further to make room for their references"),
            (self.n_cut_references, "references were truncated to the model's maximum length; they have no end token"),
            (self.n_empty_texts, "texts have fewer than two tokens and are not used"),
        )
        return [f"{split}: {n} {message}" for n, message in lines if n]


@dataclass(frozen=True, kw_only=True)
class ExampleEncoder:
    """Encodes samples as training examples."""

    tokenizer: PreTrainedTokenizerBase
    is_encoder_decoder: bool
    max_prompt_length: int  # tokens; longer prompts are truncated on the tokenizer's `truncation_side`
    max_length: int  # tokens of a causal example, or of a seq2seq model's reference
    end_token_id: int | None  # appended to each reference, if any
    separator: str | None = None  # between prompt and reference of a causal model; None: a space if there is none
    loss_on_prompt: bool = False  # a causal model also learns the tokens of the prompt
    block_length: int | None = None  # tokens of an example of a text without a prompt; None: `max_length`
    pictures: PictureEncoder | None = None  # encodes prompts with pictures; None if the model reads texts only

    def encode(self, samples: Sequence[Sample]) -> Examples:
        """Encode samples, one example for each of their references.

        Raises:
            ConfigError: the chat template does not say which tokens the assistant writes, or it renders a prompt
                differently if a response follows.
            DataPoolError: no tokens continue a prompt with its reference, or an encoder-decoder model has nothing to
                read, because the samples are texts without prompts.
        """
        if any(sample.learned == "text" for sample in samples):
            return self._texts(samples)
        if samples and self.block_length is not None:
            message = "has no effect: the data have prompts, and only texts without prompts are divided into blocks"
            raise ConfigError([ConfigIssue("alg.block_length", message)])
        if not self.is_encoder_decoder and any(sample.rendered_prompt is not None for sample in samples):
            return self._conversations(samples)

        # All texts in a few calls of the tokenizer, which is many times faster than one call for each.
        prompts = self.prompts(samples)
        sample_rows: list[int] = []  # row of the sample of each reference
        pairs: list[tuple[Sample, str]] = []
        for i, sample in enumerate(samples):
            for text in sample.references:
                sample_rows.append(i)
                pairs.append((sample, text))
        references = self._references(pairs)

        rows: list[Example] = []
        n_shorter = 0
        n_cut = 0
        for i, reference in zip(sample_rows, references, strict=True):
            prompt, (response,) = self.fitted(samples[i], prompts[i], [reference])
            if self.is_encoder_decoder:
                rows.append({"input_ids": prompt, "labels": response})
            else:
                prompt_labels = prompt if self.loss_on_prompt else [NOT_LEARNED] * len(prompt)
                labels = [*prompt_labels, *response]
                rows.append(self._example(samples[i], [*prompt, *response], labels, n_prompt=len(prompt)))
            n_shorter += len(prompt) < len(prompts[i])
            n_cut += len(response) < len(reference)
        return Examples(rows, _n_without_reference(samples), n_shorter, n_cut)

    def prompts(self, samples: Sequence[Sample], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of the prompts, of at most `max_length` tokens; default: `max_prompt_length`."""
        return [ids.tolist() for ids in self._layout.encode_all(samples, max_length)] if samples else []

    def responses(self, pairs: Sequence[tuple[Sample, str]]) -> list[list[int]]:
        """Return the ids of responses with their end tokens, not truncated, as they follow the prompts.

        Raises:
            ConfigError: see `encode`.
            DataPoolError: see `encode`; or a response has a token that stands for a picture.
        """
        if self.is_encoder_decoder or not any(sample.rendered_prompt is not None for sample, _ in pairs):
            return self._references(pairs)

        # What the assistant writes is learned, up to the token that ends its turn. Some templates render more after it,
        # such as a line break, which is not generated either. Of several turns, all tokens up to the last such one.
        rows = []
        for sample, text in pairs:
            ids, labels, n_prompt = self._conversation(sample, text, last_only=True)
            response_labels = labels[n_prompt:]
            if len(sample.response_turns(text)) > 1:
                while response_labels and response_labels[-1] == NOT_LEARNED:
                    response_labels.pop()
            elif NOT_LEARNED in response_labels:
                response_labels = response_labels[: response_labels.index(NOT_LEARNED)]
            rows.append(ids[n_prompt:][: len(response_labels)])
        return rows

    def prompt_and_rest(self, sample: Sample, response: str) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt, not truncated, and those after it in the text of prompt and response.

        No end token is added. Of a conversation, the text has all that the chat template writes. Errors as in
        `responses`.
        """
        if sample.rendered_prompt is not None:
            ids, _, n_prompt = self._conversation(sample, response, last_only=True)
            return ids[:n_prompt], ids[n_prompt:]
        (prompt,) = self.prompts([sample], NO_LIMIT)
        prompt_text = self._prompt_text(sample)
        text = self._separated(sample.prompt_or_input_text, response)
        rest = self.continuations.ids_or_alone(prompt_text, text)
        self._refuse_placeholders(sample, rest)
        return prompt, rest

    def joined(self, prompt: str, response: str) -> str:
        """Return the prompt and the response of a causal model as one text."""
        return prompt + self._separated(prompt, response)

    def _texts(self, samples: Sequence[Sample]) -> Examples:
        """Encode texts without prompts, of which every token is learned, in blocks of `block_length` tokens."""
        if self.is_encoder_decoder:
            raise DataPoolError(
                f"the data has texts without prompts ({samples[0].id!r}), which only causal models learn; name the "
                f"columns of prompts and references"
            )
        for key, is_set in (("separator", self.separator is not None), ("loss_on_prompt", self.loss_on_prompt)):
            if is_set:
                raise ConfigError([ConfigIssue(f"alg.{key}", "has no effect: the data have no prompts; remove it")])

        texts = []
        samples_of_texts = []
        for sample in samples:
            texts += sample.references
            samples_of_texts += [sample] * len(sample.references)
        length = min(self.block_length or self.max_length, self.max_length)
        end = [] if self.end_token_id is None else [self.end_token_id]

        # The first token of a block has no label. So each block begins with the last token of the one before, in which
        # this token is learned. A block of one token would teach nothing.
        rows: list[Example] = []
        n_empty = 0
        for sample, ids in zip(samples_of_texts, self.continuations.whole_ids(texts), strict=True):
            self._refuse_placeholders(sample, ids)
            tokens = [*ids, *end]
            n_empty += len(tokens) < 2
            for start in range(0, len(tokens) - 1, length - 1):
                block = tokens[start : start + length]
                rows.append(self._example(None, block, block, n_prompt=1))
        return Examples(rows, _n_without_reference(samples), n_texts=len(texts), n_empty_texts=n_empty)

    def _example(self, sample: Sample | None, ids: list[int], labels: list[int], *, n_prompt: int) -> Example:
        """Return an example of a causal model; `sample` is None for a text without a prompt."""
        # The first token is predicted from nothing, so it is never learned.
        example: Example = {"input_ids": ids, "labels": [NOT_LEARNED, *labels[1:]]}
        if self.pictures is not None:
            example["pictures"] = 0 if sample is None else self.pictures.number(sample)
            example["n_prompt"] = n_prompt
        return example

    def _conversations(self, samples: Sequence[Sample]) -> Examples:
        """Encode samples with rendered prompts, one example for each of their references."""
        rows: list[Example] = []
        n_shorter = 0
        n_cut = 0
        for sample in samples:
            for reference in sample.references:
                # Of a response of several turns, the messages of the assistant are learned.
                is_response = sample.learned == "response"
                has_turns = len(sample.response_turns(reference)) > 1
                last_only = is_response and not has_turns
                ids, labels, n_prompt = self._conversation(sample, reference, last_only=last_only)

                # Marks of the template are those of all messages of the assistant.
                if is_response and not self.loss_on_prompt:
                    labels[:n_prompt] = [NOT_LEARNED] * n_prompt

                # As `fitted`: the response has priority, but at least one token of the prompt is left before it.
                n_response = min(len(ids) - n_prompt, self.max_length - 1)
                self._require_room(sample, n_prompt, n_response)
                n_allowed = min(n_prompt, self.max_prompt_length)
                n_fitting = min(n_allowed, self.max_length - n_response)
                start = n_prompt - n_fitting if self.tokenizer.truncation_side == "left" else 0
                positions = [*range(start, start + n_fitting), *range(n_prompt, n_prompt + n_response)]

                row_ids = [ids[i] for i in positions]
                row_labels = [labels[i] for i in positions]
                rows.append(self._example(sample, row_ids, row_labels, n_prompt=n_fitting))
                n_shorter += n_fitting < n_allowed
                n_cut += n_response < len(ids) - n_prompt
        return Examples(rows, _n_without_reference(samples), n_shorter, n_cut)

    def _conversation(
        self, sample: Sample, reference: str, *, last_only: bool = False
    ) -> tuple[list[int], list[int], int]:
        """Return the ids and labels of a prompt with a reference, and the number of the prompt's tokens."""
        turns = [*(sample.messages or ()), *sample.response_turns(reference)]
        ids, is_written = self.template.encode(
            turns, tools=sample.tools, last_only=last_only, where=f"sample {sample.id!r}"
        )

        # Generation starts from the prompt alone. If a template rendered it in another way with a response, the model
        # would learn to continue texts that it never sees. A template writes one mark for each picture.
        if sample.images:
            prompt_ids = list(self.tokenizer(sample.rendered_prompt, add_special_tokens=False)["input_ids"])
        else:
            (prompt_ids,) = self.prompts([sample], NO_LIMIT)
        if ids[: len(prompt_ids)] != prompt_ids:
            text = f"of {self.tokenizer.name_or_path!r} renders the prompt of sample {sample.id!r} differently"
            raise chat_template_issue(f"the chat template {text} if a response follows")

        labels = list(ids)
        if not self.loss_on_prompt:
            for i, is_of_assistant in enumerate(is_written):
                if not is_of_assistant:
                    labels[i] = NOT_LEARNED
        self._refuse_placeholders(sample, ids[len(prompt_ids) :])

        # A truncated response is followed by nothing: neither the end of the turn, nor what a template writes after it.
        if reference in sample.truncated:
            n_written = max(i for i, is_of_assistant in enumerate(is_written) if is_of_assistant) + 1
            n_kept = n_written - (ids[n_written - 1] == self.template.end_of_turn)
            ids, labels = ids[:n_kept], labels[:n_kept]
        if sample.images:
            return self._with_placeholders(sample, ids, labels, len(prompt_ids))
        return ids, labels, len(prompt_ids)

    def _with_placeholders(
        self, sample: Sample, ids: list[int], labels: list[int], n_prompt: int
    ) -> tuple[list[int], list[int], int]:
        """Return ids and labels of a conversation with the placeholders of pictures in its prompt.

        Args:
            sample: has pictures.
            ids: those of the rendered conversation, with one mark for each picture.
            labels: their labels.
            n_prompt: number of the prompt's tokens among them.

        Raises:
            DataPoolError: a learned token of the prompt is not among those that the processor makes of it.
        """
        (prompt_ids,) = self.prompts([sample], NO_LIMIT)
        prompt_labels = [NOT_LEARNED] * len(prompt_ids)
        if any(label != NOT_LEARNED for label in labels[:n_prompt]):
            # The processor only replaces marks and what is next to them.
            is_found = [label == NOT_LEARNED for label in labels[:n_prompt]]
            matcher = SequenceMatcher(None, ids[:n_prompt], prompt_ids, autojunk=False)
            for start, start_in_prompt, size in matcher.get_matching_blocks():
                prompt_labels[start_in_prompt : start_in_prompt + size] = labels[start : start + size]
                is_found[start : start + size] = [True] * size
            if not all(is_found):
                raise DataPoolError(
                    f"sample {sample.id!r}: the tokens of an earlier message of the assistant are not found in the "
                    f"prompt with images; put a text between the message and an image"
                )
        return [*prompt_ids, *ids[n_prompt:]], [*prompt_labels, *labels[n_prompt:]], len(prompt_ids)

    def _refuse_placeholders(self, sample: Sample, response_ids: Iterable[int]) -> None:
        """Raise a `DataPoolError` if a response has a token that stands for a picture: it could never be written."""
        if self.pictures is None:
            return
        placeholders = set(self.pictures.placeholder_ids).intersection(response_ids)
        if placeholders:
            token = self.tokenizer.convert_ids_to_tokens(min(placeholders))
            raise DataPoolError(
                f"a response of sample {sample.id!r} has the text {token!r}, which stands for an image; remove it"
            )

    @cached_property
    def template(self) -> ChatTemplate:
        """Chat template of the tokenizer."""
        return ChatTemplate(self.tokenizer)

    @cached_property
    def _layout(self) -> TextLayout:
        side: Literal["left", "right"] = "right" if self.tokenizer.truncation_side == "right" else "left"
        return TextLayout(
            self.tokenizer,
            self.max_prompt_length,
            1,
            prompt_truncation_side=side,
            is_encoder_decoder=self.is_encoder_decoder,
            pictures=self.pictures,
        )

    @property
    def continuations(self) -> Continuations:
        """Ids of texts after their prompts."""
        return self._layout.continuations

    def _references(self, pairs: Sequence[tuple[Sample, str]]) -> list[list[int]]:
        """Encode the references of pairs of sample and reference, with their separators and end tokens."""
        if not pairs:
            return []
        end = [] if self.end_token_id is None else [self.end_token_id]

        if not self.is_encoder_decoder:
            prompts = [self._prompt_text(sample) for sample, _ in pairs]
            texts = [self._separated(sample.prompt_or_input_text, reference) for sample, reference in pairs]
            rows = []
            encoded_texts = self.continuations.ids(prompts, texts)
            for (sample, reference), text, ids in zip(pairs, texts, encoded_texts, strict=True):
                if ids is None:
                    raise DataPoolError(_without_continuation(sample, text, self.separator))
                self._refuse_placeholders(sample, ids)
                has_end = ids[-1:] == end or reference in sample.truncated
                rows.append(ids if has_end else [*ids, *end])
            return rows

        # As the target of a seq2seq tokenizer, which may append the end token itself, and some a language token after
        # it.
        encoded = self.tokenizer(text_target=[reference for _, reference in pairs], verbose=False)
        references = []
        for (sample, reference), ids in zip(pairs, encoded["input_ids"], strict=True):
            has_end = bool(set(end) & set(ids[-2:]))
            ids = list(ids) if has_end else [*ids, *end]
            if end and reference in sample.truncated:
                ids = ids[: len(ids) - 1 - ids[::-1].index(*end)]
            references.append(ids)
        return references

    def _prompt_text(self, sample: Sample) -> str:
        """Return the text before a response, with the tokens of a vision model at the place of each picture."""
        if self.pictures is not None and sample.images:
            return self.pictures.text(sample)
        return sample.prompt_or_input_text

    def _separated(self, prompt: str, reference: str) -> str:
        """Return the reference after its separator."""
        if self.separator is not None:
            return self.separator + reference
        is_apart = not prompt or not reference or prompt[-1].isspace() or reference[0].isspace()
        return reference if is_apart else f" {reference}"

    def fitted(
        self,
        sample: Sample,
        prompt: list[int],
        responses: Sequence[list[int]],
        max_response_length: int | None = None,
    ) -> tuple[list[int], list[list[int]]]:
        """Truncate a prompt and its responses to the limits: first the prompt, down to one token, then the responses.

        Args:
            sample: the sample with the prompt.
            prompt: ids of the prompt, of at most `max_prompt_length` tokens.
            responses: ids of one or more responses, which get the same prompt.
            max_response_length: limit of a response in tokens, in addition to that of the model.

        Raises:
            DataPoolError: the prompt has pictures, so that it is not truncated, and leaves no room for a response.
        """
        if self.is_encoder_decoder:
            limit = min(max_response_length or self.max_length, self.max_length)
            return prompt, [ids[:limit] for ids in responses]

        # Prompt and response of a causal model share its positions. At least one token of the prompt is left, after
        # special tokens such as the first one.
        n_special = int(self.tokenizer.num_special_tokens_to_add()) - len(self.continuations.appended_ids)
        limit = max(self.max_length - min(len(prompt), n_special + 1), 1)
        n_response = min(max_response_length or limit, limit)
        truncated = [ids[:n_response] for ids in responses]

        # One prompt for all, which leaves room for the longest response: log-probs after two prompts cannot be
        # compared. It is encoded again instead of sliced, so that its special tokens stay.
        room = self.max_length - max(map(len, truncated))
        if len(prompt) > room:
            self._require_room(sample, len(prompt), max(map(len, truncated)))
            (prompt,) = self.prompts([sample], room)
        return prompt, truncated

    def _require_room(self, sample: Sample, n_prompt: int, n_response: int) -> None:
        """Raise a `DataPoolError` if a prompt would have to be truncated for its response, and has pictures."""
        if self.pictures is not None and sample.images and n_prompt + n_response > self.max_length:
            raise DataPoolError(
                f"the prompt of sample {sample.id!r} has {n_prompt} tokens with its images, and its response "
                f"{n_response}: the model takes {self.max_length} together, and prompts with images are not truncated; "
                f"shorten the response, or let {self.pictures.keys.max_pixels} make the images smaller"
            )


def _without_continuation(sample: Sample, text: str, separator: str | None) -> str:
    """Return the message of the error that no tokens continue a prompt with a text."""
    hint = "leave alg.separator unset, or begin the text with a space" if separator == "" else "change the text"
    end = sample.prompt_or_input_text[-40:]
    return (
        f"sample {sample.id!r}: no tokens of the tokenizer continue the prompt, which ends with {end!r}, with "
        f"{beginning(text)}: {hint}"
    )


def _n_without_reference(samples: Sequence[Sample]) -> int:
    return sum(not sample.references for sample in samples)


@dataclass(frozen=True)
class ExampleCollator:
    """Collates examples, padded on the right: `input_ids`, `attention_mask`, `labels`, all `[n, length]`.

    Batches of a seq2seq model also have `decoder_input_ids`: the labels shifted right, after the start token.
    """

    pad_token_id: int  # padding of `input_ids`; labels are padded with -100
    start_token_id: int | None = None  # of a seq2seq model's decoder; None for causal models

    def __call__(self, rows: Sequence[Example]) -> dict[str, Tensor]:
        """Collate examples into a batch."""
        input_ids, mask = padded([row["input_ids"] for row in rows], self.pad_token_id)
        labels, _ = padded([row["labels"] for row in rows], NOT_LEARNED)
        batch = {"input_ids": input_ids, "attention_mask": mask.long(), "labels": labels}

        # -100 is no token id. What the decoder reads at padding has no effect, since there are no labels after it.
        if self.start_token_id is not None:
            start = torch.full_like(labels[:, :1], self.start_token_id)
            decoder_ids = labels.masked_fill(labels == NOT_LEARNED, self.pad_token_id)
            batch["decoder_input_ids"] = torch.cat([start, decoder_ids[:, :-1]], dim=1)
        return batch


def n_learned(labels: Tensor) -> Tensor:
    """Count the labels that are not ignored, as a 0-dimensional tensor."""
    return (labels != NOT_LEARNED).sum()
