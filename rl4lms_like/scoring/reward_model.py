"""Scores of responses by a reward model: a sequence classifier with one logit, or one label of several.

template        input of the model
    text        prompt + response, concatenated
    response    the response alone
    pair        prompt and response as two texts, joined by the tokenizer
    chat        a user message and an assistant message, in the tokenizer's chat template

end of the input
    an end-of-text token, or nothing      as in the model's training: `append_eos`, here or in its config.json

logit or probability  ─ times scale ─ clipped to [-clip, clip]
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.errors import ModelError
from rl4lms_like.core.numbers import Count, Finite, NonNegative, Whole
from rl4lms_like.scoring.classifier import Classifier
from rl4lms_like.scoring.score import Score, Texts

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

RECORDED = "append_eos"
"""Key of a reward model's config.json: true if it was trained on texts that end with the end-of-text token."""

Template: TypeAlias = Literal["text", "response", "pair", "chat"]
Value: TypeAlias = Literal["logit", "probability"]


@dataclass(eq=False)
class RewardModelScore(Score):
    """Output of a reward model for a response: the logit of a sequence classifier, or a label's probability.

    Args:
        model_name: hub id or local folder of a sequence classifier.
        template: model input: `text` prompt + response, `response` the response alone, `pair` a pair of texts, `chat` a
            user and an assistant message in the tokenizer's chat template.
        label: index or name of the label to use; may be omitted if the model has one logit.
        value: `logit`, or `probability`: sigmoid of a single logit, softmax over several.
        scale: factor of the value.
        clip: maximum absolute value of the result, after scaling.
        batch_size: texts per forward pass.
        device: device of the model; `auto` uses a GPU if available.
        dtype: data type of its weights.
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
    batch_size: Count = 32
    device: Device = "auto"
    dtype: Dtype = "float32"
    trust_remote_code: bool = False
    append_eos: bool | None = None

    def __post_init__(self) -> None:
        self.classifier = Classifier(
            self.model_name,
            role="reward model",
            batch_size=self.batch_size,
            device=self.device,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )
        self.classifier.check_label(self.label)

    @cached_property
    def ends_with_eos(self) -> bool:
        """Return whether to append an end-of-text token; log a warning if neither argument nor config sets it.

        Raises:
            ModelError: the model cannot be loaded.
        """
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
        """Return one score per response.

        Raises:
            ModelError: the model cannot be loaded or has no such label, or its tokenizer has no chat template.
        """
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
