"""One number a response from a reward model: a sequence classifier with one logit, or one label of several.

how prompt and response are put to the model
    text        prompt + response, nothing in between
    response    the response alone
    pair        two texts, as the tokenizer joins them
    chat        a user's and an assistant's message, in the tokenizer's chat template

what follows the response
    an end-of-text token, or nothing      as the model was trained: `append_eos`, or that of its config.json

logit or probability  ─ times scale ─ clipped to [-clip, clip]
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

from rl4lms_like.core.errors import ModelError
from rl4lms_like.scoring.classifier import Classifier

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

RECORDED = "append_eos"
"""Key of a reward model's config.json: whether it was trained on texts that end with the end-of-text token."""

Template: TypeAlias = Literal["text", "response", "pair", "chat"]
Value: TypeAlias = Literal["logit", "probability"]


@dataclass(frozen=True)
class RewardModelScorer:
    """What makes a reward of a classifier's logits.

    Args:
        classifier: the reward model.
        template: how prompt and response are put to it.
        label: index or name of the label that counts; None where the model has one logit.
        value: the logit, or the probability: softmax over several labels, sigmoid of a single logit.
        scale: factor of the value.
        clip: the largest size of the result; None: no limit.
        append_eos: end what it reads with the end-of-text token; None: what the model's config says, else not.
    """

    classifier: Classifier
    template: Template = "text"
    label: int | str | None = None
    value: Value = "logit"
    scale: float = 1.0
    clip: float | None = None
    append_eos: bool | None = None

    @cached_property
    def ends_with_eos(self) -> bool:
        """Return whether texts get an end-of-text token; log a warning where nothing decides that.

        Raises:
            ModelError: the model cannot be loaded.
        """
        if self.append_eos is not None:
            return self.append_eos
        recorded = getattr(self.classifier.frozen.model.config, RECORDED, None)
        if recorded is not None:
            return bool(recorded)
        tokenizer, name = self.classifier.frozen.tokenizer, self.classifier.frozen.model_name
        ends_itself = tokenizer("a", verbose=False)["input_ids"][-1] in tokenizer.all_special_ids
        if tokenizer.eos_token is not None and not ends_itself and self.template != "chat":
            logger.warning(
                "the reward model %r reads texts without an end-of-text token; it does not say whether it was trained "
                "so. If it was trained with one, its scores are wrong: set append_eos to true (or false, without this "
                "warning), or write it into its config.json",
                name,
            )
        return False

    def scores(self, prompt_texts: Sequence[str], generated_texts: Sequence[str]) -> list[float]:
        """One number for each response.

        Raises:
            ModelError: the model cannot be loaded, has no such label, or its tokenizer no chat template.
        """
        index = self.classifier.label_index(self.label)
        logits = self._logits(list(prompt_texts), list(generated_texts))
        values = logits[:, index]
        if self.value == "probability":
            values = values.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)[:, index]
        values = values * self.scale
        if self.clip is not None:
            values = values.clamp(-self.clip, self.clip)
        return values.tolist()

    def _logits(self, prompts: list[str], responses: list[str]) -> torch.Tensor:
        ends = self.ends_with_eos
        if self.template == "pair":
            return self.classifier.logits(prompts, responses, append_eos=ends)
        if self.template == "chat":
            chats = [self._chat(*turn) for turn in zip(prompts, responses, strict=True)]
            return self.classifier.logits(chats, add_special_tokens=False, append_eos=ends)
        texts = responses
        if self.template == "text":
            texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        return self.classifier.logits(texts, append_eos=ends)

    def _chat(self, prompt: str, response: str) -> str:
        tokenizer = self.classifier.frozen.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            name = self.classifier.frozen.model_name
            raise ModelError(f"the tokenizer of {name!r} has no chat template; choose another template than 'chat'")
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return tokenizer.apply_chat_template(messages, tokenize=False)
