"""Encoding of preferences as token ids, and counts of everything that is unusual about them.

    row        prompt            responses                          label      margin
    pair       prompt            chosen end      rejected end
    kto        prompt            response end    mismatched end     good, bad         mismatched: of another prompt
    reward     common beginning  rest end        rest end                      0.5    prompt and response are one text

Prompts are encoded as in rollouts and evaluations, and responses as the tokens that continue them, so that no token
spans their boundary.
Both responses of a pair have the same prompt: if the longer one does not fit after it, it is truncated for both.
Texts for a reward model are encoded as the reward `reward_model` reads them: prompt and response as one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import fmean
from typing import Any, TypedDict

from rl4lms_like.core.observation import NO_LIMIT
from rl4lms_like.core.sample import Preference, Sample
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.training.examples import ExampleEncoder


class Row(TypedDict, total=False):
    """Two responses to one prompt.

    `rejected_prompt` is only present if the responses have no common beginning. `ref_log_prob` has the log-probs of
    both responses under the reference model. `pictures` is the number of the prompt's pictures, 0 without; it is only
    present if the model reads pictures.
    """

    prompt: list[int]
    pictures: int
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

    def longest(self, *, is_encoder_decoder: bool) -> int:
        """Return the number of tokens of the longest text that a model reads in one pass; 0 if there is none."""
        lengths = [0]
        for row in self.rows:
            prompt_len = max(len(row["prompt"]), len(row.get("rejected_prompt", ())))
            response_len = max(len(response) for response in row["responses"])
            lengths.append(max(prompt_len, response_len) if is_encoder_decoder else prompt_len + response_len)
        return max(lengths)

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

        # What is as usual is not reported.
        return [f"{split}: {n:,} {message}" for n, message in lines if n]

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

        # Objectives with sums of log-probs, and reward models, learn a difference in length.
        if self.lengths:
            chosen = fmean(n_chosen for n_chosen, _ in self.lengths)
            rejected = fmean(n_rejected for _, n_rejected in self.lengths)
            difference = f"{chosen - rejected:+.1f} on average"
            rows.append(("response tokens", f"chosen {chosen:.1f}, rejected {rejected:.1f}: {difference}"))
        return rows


def preferences_of(samples: Sequence[Sample], *, reads_labels: bool, source: str) -> list[Preference]:
    """Return the samples of a split as preferences.

    Raises:
        DataPoolError: the pool has no preferences, or labels where pairs are needed.
    """
    preferences: list[Preference] = []
    for sample in samples:
        if not isinstance(sample, Preference):
            raise DataPoolError(f"{source} has prompts without preferences ({sample.id!r}); use the pool 'preferences'")
        if not reads_labels and (sample.chosen is None or sample.rejected is None):
            raise DataPoolError(f"{source} has responses with labels ({sample.id!r}); this objective needs pairs")
        preferences.append(sample)
    return preferences


def encode_pairs(
    encoder: ExampleEncoder, preferences: Sequence[Preference], max_response_length: int | None = None
) -> Pairs:
    """Encode pairs for the objectives that train a language model.

    Raises:
        ConfigError: the chat template does not show which tokens the assistant writes.
        DataPoolError: a response or the prompt of a causal model has no tokens.
    """
    pairs = _counted(preferences)

    # All texts in one call of the tokenizer, then by preference: one or two responses, not truncated.
    encoded = iter(encoder.responses([(sample, text) for sample in preferences for text in _texts(sample)]))
    responses = []
    for sample in preferences:
        responses.append([next(encoded) for _ in _texts(sample)])
    prompts = encoder.prompts(preferences)
    whole_prompts = encoder.prompts(preferences, NO_LIMIT)
    pairs.n_boundary = _n_changed_at_boundary(encoder, preferences, whole_prompts, responses)

    # A conversation may end with another token than a text.
    end_token_ids = {encoder.end_token_id}
    if any(sample.rendered_prompt is not None for sample in preferences):
        end_token_ids.add(encoder.template.end_of_turn)

    for sample, prompt, whole_prompt, whole in zip(preferences, prompts, whole_prompts, responses, strict=True):
        prompt, truncated = encoder.fitted(sample, prompt, whole, max_response_length)
        _require_tokens(sample, prompt, truncated, encoder.is_encoder_decoder)

        pairs.n_cut_prompts += len(prompt) < len(whole_prompt)
        for before, after in zip(whole, truncated, strict=True):
            pairs.n_cut_responses += len(after) < len(before)
            # Some models append a language token after the end token.
            pairs.n_without_end += not end_token_ids & set(after[-2:])
        if len(truncated) == 2:
            chosen, rejected = truncated
            pairs.n_identical_when_cut += chosen == rejected and sample.chosen != sample.rejected
            pairs.lengths.append((len(chosen), len(rejected)))
        row: Row = {"prompt": prompt, "responses": truncated, "margin": sample.margin}
        if encoder.pictures is not None:
            row["pictures"] = encoder.pictures.number(sample)
        pairs.rows.append(row)
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

    # One row for each response: good ones are `chosen`, bad ones `rejected`.
    rows: list[Row] = []
    for sample, row in zip(preferences, pairs.rows, strict=True):
        labels = []
        if sample.chosen is not None:
            labels.append(True)
        if sample.rejected is not None:
            labels.append(False)
        for label, response in zip(labels, row["responses"], strict=True):
            labelled: Row = {"prompt": row["prompt"], "responses": [response], "is_desirable": label}
            if "pictures" in row:
                labelled["pictures"] = row["pictures"]
            rows.append(labelled)
    pairs.n_labels = len(rows)
    pairs.n_bad = sum(not row["is_desirable"] for row in rows)

    pairs.rows = []
    for row, index in zip(rows, _mismatched(rows), strict=True):
        other = rows[index]
        pairs.n_same_mismatched += _prompt_of(other) == _prompt_of(row)
        pairs.rows.append({**row, "responses": [*row["responses"], other["responses"][0]]})
    return pairs


def _mismatched(rows: Sequence[Row]) -> list[int]:
    """Return for each row the next one with the same label and another prompt, else the next one in all."""
    mismatched = [(index + 1) % len(rows) for index in range(len(rows))]
    for label in (True, False):
        alike = [index for index, row in enumerate(rows) if row["is_desirable"] is label]
        n = len(alike)

        # Backwards, so that the next row with another prompt is known, in linear time: where the next row has the same
        # prompt, it is the one of that row. Twice, since the first rows follow the last one.
        following = None
        for position in reversed(range(2 * n)):
            index = alike[position % n]
            next_index = alike[(position + 1) % n]
            if _prompt_of(rows[next_index]) != _prompt_of(rows[index]):
                following = next_index
            if following is not None:
                mismatched[index] = following
    return mismatched


def _prompt_of(row: Row) -> tuple[list[int], int]:
    """Return what identifies a prompt: prompts with equal texts and different pictures are different."""
    return row["prompt"], row.get("pictures", 0)


def encode_texts(
    encoder: ExampleEncoder, preferences: Sequence[Preference], *, append_eos: bool, split_beginning: bool
) -> Pairs:
    """Encode pairs for a reward model: prompt and response as one text, ended by the end-of-text token if `append_eos`.

    With `split_beginning` it is divided at the end of the common beginning; otherwise the prompt is empty.

    Raises:
        DataPoolError: a text has no tokens.
    """
    pairs = _counted(preferences)
    tokenizer = encoder.tokenizer
    end = [tokenizer.eos_token_id] if append_eos else []
    limit = encoder.max_length - len(end)

    for sample in preferences:
        texts = []
        for text in _texts(sample):
            ids = _whole(encoder, sample, text)
            pairs.n_cut_responses += len(ids) > limit
            if len(ids) > limit:
                ids = ids[-limit:] if tokenizer.truncation_side == "left" else ids[:limit]
            # A chat template may have ended the text with this token.
            texts.append(ids if ids[-1:] == end else [*ids, *end])
        _require_tokens(sample, [0], texts, False)

        chosen, rejected = texts
        pairs.n_identical_when_cut += chosen == rejected and sample.chosen != sample.rejected
        pairs.lengths.append((len(chosen), len(rejected)))
        if split_beginning:
            pairs.rows.append(_divided(texts, sample.margin))
        else:
            pairs.rows.append({"prompt": [], "responses": texts, "margin": sample.margin})
    return pairs


def encode_texts_with_pictures(
    encoder: ExampleEncoder, preferences: Sequence[Preference], *, append_eos: bool
) -> Pairs:
    """Encode pairs for a reward model of prompts with pictures: the prompt, and what follows it in each text.

    Raises:
        ConfigError: see `encode_pairs`.
        DataPoolError: see `encode_pairs`; or a text is longer than the model accepts.
    """
    assert encoder.pictures is not None
    pairs = _counted(preferences)
    end = [encoder.tokenizer.eos_token_id] if append_eos else []
    for sample in preferences:
        prompt: list[int] = []
        rests = []
        for text in _texts(sample):
            prompt, rest = encoder.prompt_and_rest(sample, text)
            rests.append(rest if rest[-1:] == end else [*rest, *end])
        _require_tokens(sample, prompt, rests, False)

        # Without pictures, texts that are too long are truncated.
        n_before = sum(map(len, rests))
        prompt, rests = encoder.fitted(sample, prompt, rests)
        pairs.n_cut_responses += sum(map(len, rests)) < n_before

        chosen, rejected = rests
        pairs.lengths.append((len(prompt) + len(chosen), len(prompt) + len(rejected)))
        number = encoder.pictures.number(sample)
        pairs.rows.append({"prompt": prompt, "responses": rests, "margin": sample.margin, "pictures": number})
    return pairs


def _divided(texts: list[list[int]], margin: float) -> Row:
    """Divide two texts at the end of their common beginning; both keep a token before and after it."""
    n_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    n = max(min(n_common, min(map(len, texts)) - 1), 1)
    row: Row = {"prompt": texts[0][:n], "responses": [ids[n:] for ids in texts], "margin": margin}
    # Nothing in common: even the first tokens differ.
    if texts[0][:n] != texts[1][:n]:
        row["rejected_prompt"] = texts[1][:n]
    return row


def _whole(encoder: ExampleEncoder, sample: Sample, response: str) -> list[int]:
    """Encode prompt and response as the reward `reward_model` does."""
    tokenizer = encoder.tokenizer
    if sample.rendered_prompt is None:
        text = encoder.joined(sample.prompt_or_input_text, response)
        return list(tokenizer(text, verbose=False)["input_ids"])

    # A chat template writes the special tokens itself.
    turns = [*(sample.messages or ()), *sample.response_turns(response)]
    text = encoder.template.render(turns, tools=sample.tools, where=f"sample {sample.id!r}")
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


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


def _n_changed_at_boundary(
    encoder: ExampleEncoder,
    preferences: Sequence[Preference],
    prompts: Sequence[list[int]],
    responses: Sequence[list[list[int]]],
) -> int:
    """Return the number of preferences with a response that has other tokens if it is one text with its prompt."""
    # A seq2seq model and a chat template separate prompt and response.
    if encoder.is_encoder_decoder:
        return 0
    indices: list[int] = []  # of the preference of each text
    texts: list[str] = []
    rows: list[list[int]] = []
    for index, sample in enumerate(preferences):
        # A prompt with pictures is no text that the tokenizer alone can encode.
        if sample.rendered_prompt is not None or sample.images:
            continue
        for text, ids in zip(_texts(sample), responses[index], strict=True):
            without_end = ids[:-1] if ids[-1:] == [encoder.end_token_id] else ids
            indices.append(index)
            texts.append(encoder.joined(sample.prompt_or_input_text, text))
            rows.append([*prompts[index], *without_end])

    changed = set()
    for index, as_one_text, ids in zip(indices, encoder.continuations.whole_ids(texts), rows, strict=True):
        if as_one_text != ids:
            changed.add(index)
    return len(changed)


def _require_tokens(
    sample: Sample, prompt: list[int], responses: Sequence[list[int]], is_encoder_decoder: bool
) -> None:
    if not is_encoder_decoder and not prompt:
        raise DataPoolError(f"sample {sample.id!r}: the prompt has no tokens, and a causal model needs at least one")
    if not all(responses):
        raise DataPoolError(f"sample {sample.id!r}: a response is empty, and the tokenizer has no end-of-text token")


def token_ids(rows: Sequence[Row]) -> list[Any]:
    """Return everything that the log-probs of rows depend on."""
    values: list[Any] = []
    for row in rows:
        pictures = [row["pictures"]] if "pictures" in row else []
        values.append([row["prompt"], row["responses"], *pictures])
    return values
