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
"""Key of a reward model's config.json: true if it was trained on texts that end with the end-of-text token."""

Template: TypeAlias = Literal["text", "response", "pair", "chat"]
Value: TypeAlias = Literal["logit", "probability"]


@dataclass(frozen=True)
class RewardModelScorer:
    """Computation of rewards from a classifier's logits.

    Args:
        classifier: the reward model.
        template: format of prompt and response in the input.
        label: index or name of the label to score; None if the model has one logit.
        value: the logit, or the probability: softmax over several labels, sigmoid of a single logit.
        scale: factor by which the value is multiplied.
        clip: maximum absolute value of the result; None: no limit.
        append_eos: append the end-of-text token to each input; None: the value in the model's config, else False.
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
        """Return whether to append an end-of-text token; log a warning if neither argument nor config sets it.

        Raises:
            ModelError: the model cannot be loaded.
        """
        if self.append_eos is not None:
            return self.append_eos
        recorded = getattr(self.classifier.frozen.model.config, RECORDED, None)
        if recorded is not None:
            return bool(recorded)
        tokenizer, name = self.classifier.frozen.tokenizer, self.classifier.frozen.model_name
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

    def scores(self, prompt_texts: Sequence[str], generated_texts: Sequence[str]) -> list[float]:
        """Return one score per response.

        Raises:
            ModelError: the model cannot be loaded or has no such label, or its tokenizer has no chat template.
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
