"""Sequence classifiers: labels, reward models, BLEURT, intents of dialogue; one row of logits for each text.

texts ─ tokens, truncated to the model's limit ─ sorted by length ─ batches, padded on the right ─ logits in input order

A reward model has one logit. A classifier has several, of which one label is the score.

BLEURT (Sellam et al., 2020) is a BERT that was tuned on human ratings. The published TensorFlow checkpoints are on the
hub as plain BERT with one logit; BLEURT-20 and its distilled sizes have another architecture and are not.

The four intents of DailyDialog (Li et al., 2017) are 1 inform, 2 question, 3 directive, 4 commissive; label i of the
classifier is intent i + 1. Its input is, as in its training, the last utterance of the context, `<EOU>`, the response.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rl4lms_like.core.errors import ModelError
from rl4lms_like.core.numbers import Count, Finite, NonNegative, Whole
from rl4lms_like.scoring.frozen import FrozenModel, ModelArguments, longest_input, model_inputs, require_finite
from rl4lms_like.scoring.score import Score, Texts

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

RECORDED = "append_eos"
"""Key of a reward model's config.json: true if it was trained on texts that end with the end-of-text token."""

Template: TypeAlias = Literal["text", "response", "pair", "chat"]
Value: TypeAlias = Literal["logit", "probability"]

DEFAULT_BLEURT = "bleurt-base-128"

CHECKPOINTS = {
    f"bleurt-{size}-{length}": (f"Elron/bleurt-{size}-{length}", length)
    for size in ("tiny", "base", "large")
    for length in (128, 512)
}
"""Published name -> hub id of the plain BERT, and the maximum number of tokens of a pair."""

END_OF_UTTERANCE = "<EOU>"
DEFAULT_CLASSIFIER = "rajkumarrrk/roberta-daily-dialog-intent-classifier"

_ONE_AT_A_TIME = Lock()
"""Lock for the batches of all threads, because `_forward` may temporarily set a config's padding token."""


class Classifier(FrozenModel):
    """Sequence classifier; its model and its tokenizer are loaded at first use.

    Inputs with more than `max_length` tokens (None: the model's limit) are truncated on the truncation side.
    """

    def __init__(
        self,
        model_name: str,
        *,
        batch_size: int,
        max_length: int | None = None,
        role: str = "classifier",
        **settings: Any,
    ) -> None:
        super().__init__(model_name, "AutoModelForSequenceClassification", role=role, **settings)
        self.batch_size = batch_size
        self.max_length = max_length

    @property
    def n_labels(self) -> int:
        """Number of logits."""
        return int(self.model.config.num_labels)

    def logits(
        self,
        texts: Sequence[str],
        second_texts: Sequence[str] | None = None,
        *,
        add_special_tokens: bool = True,
        append_eos: bool = False,
    ) -> torch.Tensor:
        """Return the logits of each text, `[n, n_labels]`, float32 on the CPU.

        Args:
            texts: `n` texts.
            second_texts: if given, each input is a pair of texts, joined by the tokenizer.
            add_special_tokens: False if the texts already contain them.
            append_eos: append the tokenizer's end-of-text token to each input that does not end with it.

        Raises:
            ModelError: the checkpoint cannot be loaded, returns NaN or infinity, or has no end-of-text token.
        """
        import torch

        model, tokenizer = self.model, self.tokenizer
        if not texts:
            return torch.zeros(0, self.n_labels)
        limits = (longest_input(model, tokenizer), self.max_length)
        limit = min((limit - append_eos for limit in limits if limit is not None), default=None)
        encoded = tokenizer(
            list(texts),
            None if second_texts is None else list(second_texts),
            add_special_tokens=add_special_tokens,
            truncation=limit is not None,
            max_length=limit,
            verbose=False,
        )
        rows = {"input_ids": encoded["input_ids"]}
        if second_texts is not None and "token_type_ids" in encoded:
            rows["token_type_ids"] = encoded["token_type_ids"]
        if append_eos and tokenizer.eos_token_id is None:
            raise ModelError(f"append_eos: the tokenizer of {self.model_name!r} has no end-of-text token")
        if append_eos:
            for ids, *others in zip(*rows.values(), strict=True):
                if tokenizer.eos_token_id not in ids[-1:]:
                    ids.append(tokenizer.eos_token_id)
                    for values in others:  # the token belongs to the second text
                        values.append(values[-1] if values else 0)
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
        for index, ids in enumerate(rows["input_ids"]):
            if not ids:  # an empty text and a tokenizer without special tokens
                for name, values in rows.items():
                    values[index] = [next(id for id in special if id is not None) if name == "input_ids" else 0]
        results = torch.zeros(len(texts), self.n_labels)
        with torch.inference_mode():
            for chosen in _batches(rows["input_ids"], self.batch_size, model.config):
                batch = {name: [values[index] for index in chosen] for name, values in rows.items()}
                with _ONE_AT_A_TIME:
                    results[chosen] = _forward(model, batch).float().cpu()
        require_finite(results, self.role, self.model_name)
        return results

    def label_index(self, label: int | str | None, *, single: bool = True, config: Any = None) -> int:
        """Return the index of a label's logit.

        Args:
            label: index or name; None: the only logit of a reward model.
            single: accept a model with one logit.
            config: the model's config; default: that of the loaded model.

        Raises:
            ModelError: the checkpoint has no such label, and the message lists its labels; or it has only one logit
                and `single` is False.
        """
        config = config or self.model.config
        n_labels = int(config.num_labels)
        if n_labels == 1 and not single:
            raise ModelError(f"{self.model_name!r} has one logit, whose probability is always 1: use 'reward_model'")
        if label is None and n_labels == 1:
            return 0
        names = [str(config.id2label.get(index, index)) for index in range(n_labels)]
        index = names.index(label) if label in names else label
        if isinstance(index, int) and 0 <= index < n_labels:
            return index
        known = ", ".join(f"{index} ({name!r})" for index, name in enumerate(names))
        asked = "no label is selected" if label is None else f"there is no label {label!r}"
        raise ModelError(f"{self.model_name!r}: {asked}; its labels are {known}")

    def check_label(self, label: int | str | None, *, single: bool = True) -> None:
        """Call `label_index` for a local checkpoint, without loading weights."""
        if (config := self.local_config()) is not None:
            self.label_index(label, single=single, config=config)


def classifier_of(score: ModelArguments, model_name: str, **settings: Any) -> Classifier:
    """Return the classifier of a score."""
    return Classifier(model_name, batch_size=score.batch_size, device=score.device, dtype=score.dtype, **settings)


@dataclass(eq=False)
class LabelProbability(ModelArguments, Score):
    """Softmax probability of one label under a classifier, with prompt and response concatenated to one text.

    Args:
        model_name: hub id or local folder of a sequence classifier.
        label_ix: index of the label.
        include_prompt_for_eval: prepend the prompt to the response; False: score the response alone.
        trust_remote_code: run code shipped with the checkpoint.
    """

    model_name: str
    label_ix: Whole
    include_prompt_for_eval: bool = True
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self.classifier = classifier_of(self, self.model_name, trust_remote_code=self.trust_remote_code)
        self.classifier.check_label(self.label_ix, single=False)

    def per_text(self, texts: Texts) -> list[float]:
        index = self.classifier.label_index(self.label_ix, single=False)
        logits = self.classifier.logits(texts.to_read(with_prompts=self.include_prompt_for_eval))
        return logits.softmax(dim=1)[:, index].tolist()


@dataclass(eq=False)
class RewardModelScore(ModelArguments, Score):
    """Output of a reward model for a response: the logit of a sequence classifier, or a label's probability.

    Args:
        model_name: hub id or local folder of a sequence classifier.
        template: model input: `text` prompt + response, `response` the response alone, `pair` a pair of texts, `chat` a
            user and an assistant message in the tokenizer's chat template.
        label: index or name of the label to use; may be omitted if the model has one logit.
        value: `logit`, or `probability`: sigmoid of a single logit, softmax over several.
        scale: factor of the value.
        clip: maximum absolute value of the result, after scaling.
        trust_remote_code: run code shipped with the checkpoint.
        append_eos: append the end-of-text token to the input, as in the training of many reward models; null: use
            `append_eos` of the model's config.json, else false with a warning.
    """

    model_name: str
    template: Template = "text"
    label: Whole | str | None = None
    value: Value = "logit"
    scale: Finite = 1.0
    clip: NonNegative | None = None
    trust_remote_code: bool = False
    append_eos: bool | None = None

    def __post_init__(self) -> None:
        trust = self.trust_remote_code
        self.classifier = classifier_of(self, self.model_name, role="reward model", trust_remote_code=trust)
        self.classifier.check_label(self.label)

    @cached_property
    def ends_with_eos(self) -> bool:
        """Return whether to append an end-of-text token; log a warning if neither argument nor config sets it."""
        if self.append_eos is not None:
            return self.append_eos
        recorded = getattr(self.classifier.model.config, RECORDED, None)
        if recorded is not None:
            return bool(recorded)
        tokenizer, name = self.classifier.tokenizer, self.classifier.model_name
        # The tokenizer may already end its output with a special token.
        ends_itself = tokenizer("a", verbose=False)["input_ids"][-1] in tokenizer.all_special_ids
        if tokenizer.eos_token is not None and not ends_itself and self.template != "chat":
            logger.warning(
                "the reward model %r gets texts without an end-of-text token, and its config.json does not record "
                "append_eos. If the model was trained with that token, its scores are wrong: set append_eos to true "
                "(or to false to disable this warning), or add it to config.json",
                name,
            )
        return False

    def per_text(self, texts: Texts) -> list[float]:
        index = self.classifier.label_index(self.label)
        logits = self._logits(texts)
        values = logits[:, index]
        if self.value == "probability":
            values = values.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)[:, index]
        values = values * self.scale
        if self.clip is not None:
            values = values.clamp(-self.clip, self.clip)
        return values.tolist()

    def _logits(self, texts: Texts) -> torch.Tensor:
        ends = self.ends_with_eos
        if self.template == "pair":
            return self.classifier.logits(texts.prompts, texts.responses, append_eos=ends)
        if self.template == "chat":
            chats = [self._chat(*turn) for turn in zip(texts.prompts, texts.responses, strict=True)]
            return self.classifier.logits(chats, add_special_tokens=False, append_eos=ends)
        return self.classifier.logits(texts.to_read(with_prompts=self.template == "text"), append_eos=ends)

    def _chat(self, prompt: str, response: str) -> str:
        tokenizer = self.classifier.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            name = self.classifier.model_name
            raise ModelError(f"the tokenizer of {name!r} has no chat template; choose another template than 'chat'")
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return tokenizer.apply_chat_template(messages, tokenize=False)


@dataclass(eq=False)
class Bleurt(ModelArguments, Score):
    """BLEURT (Sellam et al., 2020) against the best reference, roughly from -1 to 1.

    In pairs that are too long, the end of the longer text is cut, as in the original. Empty texts are scored as others.

    Args:
        checkpoint: `bleurt-base-128` (the default), another published checkpoint with BERT's architecture
            (`bleurt-tiny-128` to `bleurt-large-512`), or the hub id or local folder of a BERT with one logit.
        max_length: maximum tokens per pair; default: the length used to train the published checkpoint. Local copies
            do not store it: set 128 for a copy of `bleurt-base-128`.
    """

    needs_references = True

    checkpoint: str | None = None
    max_length: Count | None = None

    def __post_init__(self) -> None:
        name = self.checkpoint or DEFAULT_BLEURT
        if name.startswith("BLEURT-20"):
            raise ValueError(f"{name} is not plain BERT and cannot be loaded; available: {', '.join(CHECKPOINTS)}")
        name, tuned_with = CHECKPOINTS.get(name, (name, dict(CHECKPOINTS.values()).get(name)))
        limit = self.max_length or tuned_with
        self.classifier = classifier_of(self, name, role="BLEURT checkpoint", truncation_side="right", max_length=limit)
        self.classifier.check_label(None)

    def per_text(self, texts: Texts) -> list[float]:
        pairs, index = texts.pairs(), self.classifier.label_index(None)
        logits = self.classifier.logits([reference for _, reference in pairs], [text for text, _ in pairs])
        return texts.best(dict(zip(pairs, logits[:, index].tolist(), strict=True)))


@dataclass(eq=False)
class IntentMatch(ModelArguments, Score):
    """1 for each response whose predicted intent is the requested one, `meta_data["intent"][0]`, else 0.

    Prompts are utterances, each followed by `<EOU>`, which the last one may lack.

    Args:
        model_name: hub id or local folder of the intent classifier; its label 0 is intent 1.
    """

    model_name: str = DEFAULT_CLASSIFIER

    def __post_init__(self) -> None:
        self.classifier = classifier_of(self, self.model_name, role="classifier of intents")

    def per_text(self, texts: Texts) -> list[float]:
        targets = [_intent(meta, prompt) for meta, prompt in zip(texts.metas, texts.prompts, strict=True)]
        n_labels = self.classifier.n_labels
        for target, prompt in zip(targets, texts.prompts, strict=True):
            if not 1 <= target <= n_labels:
                raise ValueError(
                    f"the sample with the prompt {prompt[:60]!r} has the intent {target}; the classifier has "
                    f"1 to {n_labels}"
                )
        turns = zip(texts.prompts, texts.responses, strict=True)
        inputs = [f"{last_utterance(prompt)}{END_OF_UTTERANCE}{response}" for prompt, response in turns]
        seen = self.classifier.logits(inputs).argmax(dim=1).tolist()
        return [float(label == target - 1) for label, target in zip(seen, targets, strict=True)]


def last_utterance(prompt: str) -> str:
    """Return the last utterance of a context, with the spaces around it; empty for an empty context."""
    return next((text for text in reversed(prompt.split(END_OF_UTTERANCE)) if text), "")


def _intent(meta_info: Mapping[str, Any] | None, prompt: str) -> int:
    intent = (meta_info or {}).get("intent")
    if not isinstance(intent, Sequence) or isinstance(intent, str) or not intent:
        raise ValueError(
            f"the sample with the prompt {prompt[:60]!r} has no intent: its meta_data needs a list `intent`, as "
            f"provided by the data pool 'daily_dialog', got {intent!r}"
        )
    return int(intent[0])


def batches_by_length(rows: Sequence[Sequence[Any]], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of indices, longest rows first, so that a lack of memory shows in the first batch."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def _batches(rows: Sequence[list[int]], batch_size: int, config: Any) -> Iterator[list[int]]:
    """Yield batches by length; in encoder-decoders the rows of a batch must have equally many end-of-text tokens."""
    end = config.eos_token_id if config.is_encoder_decoder else None
    by_ends: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_ends.setdefault(row.count(end) if end is not None else 0, []).append(index)
    for indices in by_ends.values():
        for chosen in batches_by_length([rows[index] for index in indices], batch_size):
            yield [indices[place] for place in chosen]


def _forward(model: Any, batch: dict[str, list[list[int]]]) -> torch.Tensor:
    """Return the logits of a batch, padded on the right.

    Decoders take the score at the last token that is not the config's padding token. If the config has none, the
    padding is temporarily a token with which no row of this batch ends.
    """
    config = model.config.get_text_config()
    if config.pad_token_id is not None:
        return model(**_tensors(batch, config.pad_token_id, model.device)).logits
    last = {row[-1] for row in batch["input_ids"]}
    config.pad_token_id = next(token for token in range(len(last) + 1) if token not in last)
    try:
        return model(**_tensors(batch, config.pad_token_id, model.device)).logits
    finally:
        config.pad_token_id = None


def _tensors(batch: dict[str, list[list[int]]], pad_token_id: int, device: Any) -> dict[str, torch.Tensor]:
    inputs = model_inputs(batch["input_ids"], pad_token_id, device)
    if "token_type_ids" in batch:
        inputs["token_type_ids"] = model_inputs(batch["token_type_ids"], 0, device)["input_ids"]
    return inputs
