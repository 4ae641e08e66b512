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

from rl4lms_like.core.chat_template import RENDERING_S, dated_template, set_template_date
from rl4lms_like.scoring.frozen import (
    FrozenModel,
    ModelArguments,
    batches_by_length,
    longest_input,
    model_inputs,
    require_finite,
)
from rl4lms_like.scoring.score import Score, Texts
from rl4lms_like.scoring.vision_rewards import VisionRewardModel, reads_images
from rl4lms_like.system.deadline import deadline
from rl4lms_like.system.errors import ModelError
from rl4lms_like.system.numbers import Count, Day, Finite, NonNegative, Whole

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

RECORDED = "append_eos"
"""Key of a reward model's config.json: true if it was trained on texts that end with the end-of-text token."""

Template: TypeAlias = Literal["text", "response", "pair", "chat"]
Value: TypeAlias = Literal["logit", "probability"]

DEFAULT_BLEURT = "bleurt-base-128"

CHECKPOINTS = {
    "bleurt-tiny-128": ("Elron/bleurt-tiny-128", 128),
    "bleurt-tiny-512": ("Elron/bleurt-tiny-512", 512),
    "bleurt-base-128": ("Elron/bleurt-base-128", 128),
    "bleurt-base-512": ("Elron/bleurt-base-512", 512),
    "bleurt-large-128": ("Elron/bleurt-large-128", 128),
    "bleurt-large-512": ("Elron/bleurt-large-512", 512),
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

        model = self.model
        tokenizer = self.tokenizer
        if not texts:
            return torch.zeros(0, self.n_labels)

        # One token less if the end-of-text token is appended after the truncation.
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

        # Lists of token ids and, for pairs, of the segment of each token (0 first text, 1 second text).
        rows = {"input_ids": encoded["input_ids"]}
        if second_texts is not None and "token_type_ids" in encoded:
            rows["token_type_ids"] = encoded["token_type_ids"]
        if append_eos:
            self._append_eos(rows)
        _fill_empty_rows(rows, tokenizer)

        # [n, n_labels], in the order of the texts: each batch is written to the rows of its texts.
        results = torch.zeros(len(texts), self.n_labels)
        with torch.inference_mode():
            for indices in _batches(rows["input_ids"], self.batch_size, model.config):
                batch = {}
                for name, values in rows.items():
                    batch[name] = [values[index] for index in indices]
                with _ONE_AT_A_TIME:
                    results[indices] = _forward(model, batch).float().cpu()

        require_finite(results, self.role, self.model_name)
        return results

    def _append_eos(self, rows: Mapping[str, list[list[int]]]) -> None:
        """Append the end-of-text token to each row that does not end with it; it belongs to the last segment."""
        eos_token_id = self.tokenizer.eos_token_id
        if eos_token_id is None:
            raise ModelError(f"append_eos: the tokenizer of {self.model_name!r} has no end-of-text token")

        segments = rows.get("token_type_ids")
        for index, ids in enumerate(rows["input_ids"]):
            if eos_token_id not in ids[-1:]:
                ids.append(eos_token_id)
                if segments is not None:
                    segments[index].append(segments[index][-1] if segments[index] else 0)

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

        return index_of_label(self.model_name, config, label)

    def check_label(self, label: int | str | None, *, single: bool = True) -> None:
        """Call `label_index` for a local checkpoint, without loading weights."""
        config = self.local_config()
        if config is not None:
            self.label_index(label, single=single, config=config)


def index_of_label(model_name: str, config: Any, label: int | str | None) -> int:
    """Return the index of a label among those of a model's config; a `ModelError` lists them if it is none of them."""
    # A number is an index and a text a name: if a checkpoint names its labels "1" to "5", 1 and "1" differ.
    names = [str(config.id2label.get(index, index)) for index in range(int(config.num_labels))]
    index = names.index(label) if label in names else label
    if isinstance(index, int) and 0 <= index < len(names):
        return index

    known = ", ".join(f"{index} ({name!r})" for index, name in enumerate(names))
    problem = "no label is selected" if label is None else f"there is no label {label!r}"
    raise ModelError(f"{model_name!r}: {problem}; its labels are {known}")


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
        # [n, n_labels]; the softmax of one logit is always 1, which `single=False` refuses.
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
        template_date: with `template: chat`: the day that the chat template writes as today, such as 2026-11-20. Needed
            by templates that write it, because scores would change from day to day.
    """

    model_name: str
    template: Template = "text"
    label: Whole | str | None = None
    value: Value = "logit"
    scale: Finite = 1.0
    clip: NonNegative | None = None
    trust_remote_code: bool = False
    append_eos: bool | None = None
    template_date: Day | None = None

    def __post_init__(self) -> None:
        self.classifier: Classifier | VisionRewardModel
        if reads_images(self.model_name):
            if self.template not in ("text", "chat"):
                raise ValueError(f"template: {self.template} is for reward models of texts; use text or chat")
            self.classifier = VisionRewardModel(
                self.model_name, batch_size=self.batch_size, device=self.device, dtype=self.dtype
            )
            self.classifier.label_index(self.label)
            return

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

        # No warning if the tokenizer already ends its output with a special token, as BERT's does with [SEP], or if the
        # chat template is responsible for the end.
        tokenizer = self.classifier.tokenizer
        ends_itself = tokenizer("a", verbose=False)["input_ids"][-1] in tokenizer.all_special_ids
        if tokenizer.eos_token is not None and not ends_itself and self.template != "chat":
            logger.warning(
                "the reward model %r gets texts without an end-of-text token, and its config.json does not record "
                "append_eos. If the model was trained with that token, its scores are wrong: set append_eos to true "
                "(or to false to disable this warning), or add it to config.json",
                self.classifier.model_name,
            )
        return False

    def per_text(self, texts: Texts) -> list[float]:
        index = self.classifier.label_index(self.label)
        logits = self._logits(texts)

        # [n]. A single logit is that of a yes or no (Bradley-Terry), whose probability is the sigmoid.
        values = logits[:, index]
        if self.value == "probability":
            values = values.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)[:, index]

        values = values * self.scale
        if self.clip is not None:
            values = values.clamp(-self.clip, self.clip)
        return values.tolist()

    def _logits(self, texts: Texts) -> torch.Tensor:
        append_eos = self.ends_with_eos
        if isinstance(self.classifier, VisionRewardModel):
            is_chat = self.template == "chat"
            if is_chat:
                _ = self._chat_template  # raises if there is none, and sets the date that it writes
            return self.classifier.logits_of_texts(texts, is_chat=is_chat, append_eos=append_eos)
        if self.template == "pair":
            return self.classifier.logits(texts.prompts, texts.responses, append_eos=append_eos)

        # A chat template writes the special tokens itself: a second beginning-of-text token would change the score.
        if self.template == "chat":
            chats = [self._chat(*turn) for turn in zip(texts.prompts, texts.responses, strict=True)]
            return self.classifier.logits(chats, add_special_tokens=False, append_eos=append_eos)

        inputs = texts.to_read(with_prompts=self.template == "text")
        return self.classifier.logits(inputs, append_eos=append_eos)

    @cached_property
    def _chat_template(self) -> str:
        """Return the tokenizer's chat template, with the date that it writes as today."""
        tokenizer = self.classifier.tokenizer
        name = self.classifier.model_name
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(f"the tokenizer of {name!r} has no chat template; choose another template than 'chat'")

        if self.template_date is not None:
            set_template_date(tokenizer, self.template_date)
        template = dated_template(tokenizer) or tokenizer.get_chat_template()
        if self.template_date is None and "strftime_now" in template:
            raise ModelError(
                f"the chat template of {name!r} writes today's date, so its scores would change from day to day; "
                "set template_date of the reward to a day, such as 2026-11-20"
            )
        return template

    def _chat(self, prompt: str, response: str) -> str:
        template = self._chat_template
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        with deadline(RENDERING_S, "rendering by the chat template"):
            return self.classifier.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)


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

        # The length with which a checkpoint was tuned is known by its published name and by its id on the hub.
        published_length = dict(CHECKPOINTS.values()).get(name)
        if name in CHECKPOINTS:
            name, published_length = CHECKPOINTS[name]
        self.classifier = classifier_of(
            self,
            name,
            role="BLEURT checkpoint",
            truncation_side="right",
            max_length=self.max_length or published_length,
        )
        self.classifier.check_label(None)

    def per_text(self, texts: Texts) -> list[float]:
        # The reference comes first, as in the training of BLEURT; the score is not symmetric.
        pairs = texts.pairs()
        index = self.classifier.label_index(None)
        logits = self.classifier.logits([reference for _, reference in pairs], [response for response, _ in pairs])
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
        # Intents count from 1, labels of the classifier from 0.
        intents = [_intent(meta, prompt) for meta, prompt in zip(texts.metas, texts.prompts, strict=True)]
        n_labels = self.classifier.n_labels
        for intent, prompt in zip(intents, texts.prompts, strict=True):
            if not 1 <= intent <= n_labels:
                raise ValueError(
                    f"the sample with the prompt {prompt[:60]!r} has the intent {intent}; the classifier has "
                    f"1 to {n_labels}"
                )

        # The input of the classifier's training: the last utterance of the context, <EOU>, the response.
        turns = zip(texts.prompts, texts.responses, strict=True)
        inputs = [f"{last_utterance(prompt)}{END_OF_UTTERANCE}{response}" for prompt, response in turns]
        labels = self.classifier.logits(inputs).argmax(dim=1).tolist()
        return [float(label == intent - 1) for label, intent in zip(labels, intents, strict=True)]


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


def _fill_empty_rows(rows: Mapping[str, list[list[int]]], tokenizer: Any) -> None:
    """Put one special token into each empty row: that of an empty text and a tokenizer without special tokens."""
    special_ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
    first_special_id = next(id for id in special_ids if id is not None)
    for index, ids in enumerate(rows["input_ids"]):
        if not ids:
            for name, values in rows.items():
                values[index] = [first_special_id] if name == "input_ids" else [0]


def _batches(rows: Sequence[list[int]], batch_size: int, config: Any) -> Iterator[list[int]]:
    """Yield batches by length; in encoder-decoders the rows of a batch must have equally many end-of-text tokens."""
    # BART takes the score at the last end-of-text token, by a mask that must have equally many entries in each row.
    eos_token_id = config.eos_token_id if config.is_encoder_decoder else None
    by_n_eos: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        n_eos = row.count(eos_token_id) if eos_token_id is not None else 0
        by_n_eos.setdefault(n_eos, []).append(index)

    # `batches_by_length` returns positions within the group, not indices of rows.
    for group in by_n_eos.values():
        for positions in batches_by_length([rows[index] for index in group], batch_size):
            yield [group[position] for position in positions]


def _forward(model: Any, batch: dict[str, list[list[int]]]) -> torch.Tensor:
    """Return the logits of a batch, padded on the right.

    Decoders take the score at the last token that is not the config's padding token. If the config has none, the
    padding is temporarily a token with which no row of this batch ends.
    """
    config = model.config.get_text_config()
    if config.pad_token_id is not None:
        return model(**_tensors(batch, config.pad_token_id, model.device)).logits

    # Among n + 1 ids there is one that is none of the n last tokens.
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
