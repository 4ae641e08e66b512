"""Encoding of preferences as token ids, and counts of everything that is unusual about them.

    row        prompt            responses                          label      margin
    pair       prompt            chosen end      rejected end
    kto        prompt            response end    mismatched end     good, bad         mismatched: of another prompt
    reward     common beginning  rest end        rest end                      0.5    prompt and response are one text

Prompts and responses are encoded as in rollouts and evaluations, separately, so that no token spans their boundary.
Both responses of a pair have the same prompt: if the longer one does not fit after it, it is truncated for both.
Texts for a reward model are encoded as the reward `reward_model` reads them: prompt and response as one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import fmean
from typing import Any, TypedDict

from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.observation import NO_LIMIT
from rl4lms_like.core.sample import Preference, Sample
from rl4lms_like.training.supervised.examples import ExampleEncoder


class Row(TypedDict, total=False):
    """Two responses to one prompt.

    `rejected_prompt` is only present if the responses have no common beginning. `ref_log_prob` has the log-probs of
    both responses under the reference model.
    """

    prompt: list[int]
    rejected_prompt: list[int]
    responses: list[list[int]]
    is_desirable: bool
    margin: float
    ref_log_prob: list[float]


@dataclass
class Pairs:
    """Rows of a split, and the numbers of preferences that differ from what was read, or that teach nothing."""

    rows: list[Row] = field(default_factory=list)
    n_preferences: int = 0
    n_bad: int = 0  # labelled responses that are bad
    n_labels: int = 0
    n_implicit: int = 0
    n_identical: int = 0
    n_identical_when_cut: int = 0
    n_empty: int = 0
    n_cut_prompts: int = 0
    n_cut_responses: int = 0
    n_without_end: int = 0
    n_boundary: int = 0
    n_same_mismatched: int = 0
    lengths: list[tuple[int, int]] = field(default_factory=list)  # tokens of the better and of the worse response

    @property
    def n_tokens(self) -> int:
        """Number of tokens of all responses, and of the prompts that are computed once for each row."""
        return sum(len(row["prompt"]) + sum(map(len, row["responses"])) for row in self.rows)

    def notices(self, split: str) -> list[str]:
        """Return log lines about what is not as in the data, or has no effect."""
        lines = (
            (self.n_implicit, "prompts are the common beginning of both responses"),
            (self.n_identical, "pairs have identical responses, which teach nothing; they are kept"),
            (self.n_identical_when_cut, "pairs are identical after truncation, and teach nothing; they are kept"),
            (self.n_empty, "responses are empty"),
            (self.n_cut_prompts, "prompts were truncated"),
            (self.n_cut_responses, "responses were truncated"),
            (self.n_without_end, "responses have no end token"),
            (self.n_boundary, "preferences have other tokens where prompt and response meet than as one text"),
            (
                self.n_same_mismatched,
                "responses are compared with one to the same prompt for z0: all prompts are equal",
            ),
        )
        return [f"{split}: {n:,} {what}" for n, what in lines if n]

    def lines(self) -> list[tuple[str, str]]:
        """Return all counts as names and values."""
        kind = "pairs"
        if self.n_labels:
            kind = f"responses with a label, of which {self.n_bad:,} bad ({self.n_bad / self.n_labels:.0%})"
        rows = [
            ("preferences", f"{self.n_preferences:,} {kind}"),
            ("implicit prompts", f"{self.n_implicit:,}"),
            ("identical pairs", f"{self.n_identical:,}; {self.n_identical_when_cut:,} more after truncation"),
            ("empty responses", f"{self.n_empty:,}"),
            ("truncated", f"{self.n_cut_prompts:,} prompts, {self.n_cut_responses:,} responses"),
            ("without end token", f"{self.n_without_end:,} responses"),
            ("changed at the boundary", f"tokens of {self.n_boundary:,} preferences, compared with one text"),
        ]
        if self.lengths:
            chosen, rejected = (fmean(each) for each in zip(*self.lengths, strict=True))
            rows.append(
                (
                    "response tokens",
                    f"chosen {chosen:.1f}, rejected {rejected:.1f}: {chosen - rejected:+.1f} on average",
                )
            )
        return rows


def preferences_of(samples: Sequence[Sample], *, reads_labels: bool, source: str) -> list[Preference]:
    """Return the samples of a split as preferences.

    Raises:
        DataPoolError: the pool has no preferences, or labels where pairs are needed.
    """
    found: list[Preference] = []
    for sample in samples:
        if not isinstance(sample, Preference):
            raise DataPoolError(f"{source} has prompts without preferences ({sample.id!r}); use the pool 'preferences'")
        if not reads_labels and (sample.chosen is None or sample.rejected is None):
            raise DataPoolError(f"{source} has responses with labels ({sample.id!r}); this objective needs pairs")
        found.append(sample)
    return found


def encode_pairs(
    encoder: ExampleEncoder, preferences: Sequence[Preference], max_response_length: int | None = None
) -> Pairs:
    """Encode pairs for the objectives that train a language model.

    Raises:
        ConfigError: the chat template does not show which tokens the assistant writes.
        DataPoolError: a response or the prompt of a causal model has no tokens.
    """
    pairs = _counted(preferences)
    given = [(sample, text) for sample in preferences for text in _texts(sample)]
    responses = iter(encoder.responses(given))
    full, ends = encoder.prompts(preferences, NO_LIMIT), {encoder.end_token_id}
    if any(sample.rendered_prompt is not None for sample in preferences):
        ends.add(ChatTemplate(encoder.tokenizer).end_of_turn)
    for sample, prompt, whole in zip(preferences, encoder.prompts(preferences), full, strict=True):
        found = [next(responses) for _ in _texts(sample)]
        _count_boundary(pairs, encoder, sample, whole, found)
        prompt, kept = _fitted(encoder, sample, prompt, found, max_response_length)
        _require_tokens(sample, prompt, kept, encoder.is_encoder_decoder)
        pairs.n_cut_prompts += len(prompt) < len(whole)
        for before, after in zip(found, kept, strict=True):
            pairs.n_cut_responses += len(after) < len(before)
            # some models append a language token after the end token
            pairs.n_without_end += not ends & set(after[-2:])
        pairs.n_identical_when_cut += len(kept) == 2 and kept[0] == kept[1] and sample.chosen != sample.rejected
        if len(kept) == 2:
            pairs.lengths.append((len(kept[0]), len(kept[1])))
        pairs.rows.append({"prompt": prompt, "responses": kept, "margin": sample.margin})
    return pairs


def encode_labels(
    encoder: ExampleEncoder, preferences: Sequence[Preference], max_response_length: int | None = None
) -> Pairs:
    """Encode responses with labels; a pair is a good and a bad one.

    The second response of a row is that of the next row with the same label and another prompt, for the estimate of the
    KL (KTO, section 4.1).

    Raises:
        ConfigError: see `encode_pairs`.
        DataPoolError: see `encode_pairs`.
    """
    pairs = encode_pairs(encoder, preferences, max_response_length)
    of_preferences, pairs.rows = pairs.rows, []
    rows: list[Row] = []
    for sample, row in zip(preferences, of_preferences, strict=True):
        labels = [label for label, text in ((True, sample.chosen), (False, sample.rejected)) if text is not None]
        for label, response in zip(labels, row["responses"], strict=True):
            rows.append({"prompt": row["prompt"], "responses": [response], "is_desirable": label})
    pairs.n_labels, pairs.n_bad = len(rows), sum(not row["is_desirable"] for row in rows)
    for row, index in zip(rows, _mismatched(rows), strict=True):
        other = rows[index]
        pairs.n_same_mismatched += other["prompt"] == row["prompt"]
        pairs.rows.append({**row, "responses": [*row["responses"], other["responses"][0]]})
    return pairs


def _mismatched(rows: Sequence[Row]) -> list[int]:
    """Return for each row the next one with the same label and another prompt, else the next one in all."""
    found = [(index + 1) % len(rows) for index in range(len(rows))]
    for label in (True, False):
        alike = [index for index, row in enumerate(rows) if row["is_desirable"] is label]
        following = None
        for place in reversed(range(2 * len(alike))):  # twice, since the first rows follow the last one
            index, after = alike[place % len(alike)], alike[(place + 1) % len(alike)]
            if rows[after]["prompt"] != rows[index]["prompt"]:
                following = after
            if following is not None:
                found[index] = following
    return found


def encode_texts(
    encoder: ExampleEncoder, preferences: Sequence[Preference], *, append_eos: bool, split_beginning: bool
) -> Pairs:
    """Encode pairs for a reward model: prompt and response as one text, ended by the end-of-text token if `append_eos`.

    With `split_beginning` it is divided at the end of the common beginning; otherwise the prompt is empty.

    Raises:
        DataPoolError: a text has no tokens.
    """
    pairs, tokenizer = _counted(preferences), encoder.tokenizer
    end = [tokenizer.eos_token_id] if append_eos else []
    for sample in preferences:
        texts = [_whole(encoder, sample, text) for text in _texts(sample)]
        kept = []
        for ids in texts:
            limit = encoder.max_length - len(end)
            ids = ids[-limit:] if tokenizer.truncation_side == "left" and len(ids) > limit else ids[:limit]
            kept.append(ids if ids[-1:] == end else [*ids, *end])
        pairs.n_cut_responses += sum(len(ids) > encoder.max_length - len(end) for ids in texts)
        pairs.n_identical_when_cut += kept[0] == kept[1] and sample.chosen != sample.rejected
        pairs.lengths.append((len(kept[0]), len(kept[1])))
        _require_tokens(sample, [0], kept, False)
        whole: Row = {"prompt": [], "responses": kept, "margin": sample.margin}
        pairs.rows.append(_divided(kept, sample.margin) if split_beginning else whole)
    return pairs


def _divided(texts: list[list[int]], margin: float) -> Row:
    """Divide two texts at the end of their common beginning; both keep a token before and after it."""
    n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    n = max(min(n, min(map(len, texts)) - 1), 1)
    row: Row = {"prompt": texts[0][:n], "responses": [ids[n:] for ids in texts], "margin": margin}
    if texts[0][:n] != texts[1][:n]:
        row["rejected_prompt"] = texts[1][:n]
    return row


def _whole(encoder: ExampleEncoder, sample: Sample, response: str) -> list[int]:
    """Encode prompt and response as the reward `reward_model` does."""
    tokenizer, is_plain = encoder.tokenizer, sample.rendered_prompt is None
    if is_plain:
        text = encoder.joined(sample.prompt_or_input_text, response)
    else:
        turns = [*(sample.messages or ()), {"role": "assistant", "content": response}]
        text = ChatTemplate(tokenizer).render(turns, where=f"sample {sample.id!r}")
    return list(tokenizer(text, add_special_tokens=is_plain, verbose=False)["input_ids"])


def _texts(sample: Preference) -> list[str]:
    return [text for text in (sample.chosen, sample.rejected) if text is not None]


def _counted(preferences: Sequence[Preference]) -> Pairs:
    """Return the counts that need no tokens."""
    return Pairs(
        n_preferences=len(preferences),
        n_implicit=sum(sample.is_implicit for sample in preferences),
        n_identical=sum(sample.chosen == sample.rejected for sample in preferences),
        n_empty=sum(not text.strip() for sample in preferences for text in _texts(sample)),
    )


def _count_boundary(
    pairs: Pairs, encoder: ExampleEncoder, sample: Preference, prompt: list[int], responses: Sequence[list[int]]
) -> None:
    """Count a preference whose tokens are others if prompt and response are encoded as one text."""
    if encoder.is_encoder_decoder or sample.rendered_prompt is not None:
        return
    for text, ids in zip(_texts(sample), responses, strict=True):
        whole = encoder.tokenizer(encoder.joined(sample.prompt_or_input_text, text), verbose=False)["input_ids"]
        if whole != [*prompt, *(ids[:-1] if ids[-1:] == [encoder.end_token_id] else ids)]:
            pairs.n_boundary += 1
            return


def _fitted(
    encoder: ExampleEncoder,
    sample: Preference,
    prompt: list[int],
    responses: Sequence[list[int]],
    max_response_length: int | None,
) -> tuple[list[int], list[list[int]]]:
    """Truncate a prompt and its responses to the limits: first the prompt, down to one token, then the responses."""
    limit = encoder.max_length
    if not encoder.is_encoder_decoder:
        limit -= min(len(prompt), encoder.shortest_prompt)
    kept = [ids[: min(max_response_length or limit, limit)] for ids in responses]
    room = encoder.max_length - max(map(len, kept))
    if not encoder.is_encoder_decoder and len(prompt) > room:
        (prompt,) = encoder.prompts([sample], room)
    return prompt, kept


def _require_tokens(
    sample: Sample, prompt: list[int], responses: Sequence[list[int]], is_encoder_decoder: bool
) -> None:
    if not is_encoder_decoder and not prompt:
        raise DataPoolError(f"sample {sample.id!r}: the prompt has no tokens, and a causal model needs at least one")
    if not all(responses):
        raise DataPoolError(f"sample {sample.id!r}: a response is empty, and the tokenizer has no end-of-text token")


def token_ids(rows: Sequence[Row]) -> list[Any]:
    """Return everything that the log-probs of rows depend on."""
    return [[row["prompt"], row["responses"]] for row in rows]
