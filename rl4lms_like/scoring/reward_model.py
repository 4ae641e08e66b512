"""One number a response from a reward model: a sequence classifier with one logit, or one label of several.

how prompt and response are put to the model
    text        prompt + response, nothing in between
    response    the response alone
    pair        two texts, as the tokenizer joins them
    chat        a user's and an assistant's message, in the tokenizer's chat template

logit or probability  ─ times scale ─ clipped to [-clip, clip]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from rl4lms_like.core.errors import ModelError
from rl4lms_like.scoring.classifier import Classifier

if TYPE_CHECKING:
    import torch

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
    """

    classifier: Classifier
    template: Template = "text"
    label: int | str | None = None
    value: Value = "logit"
    scale: float = 1.0
    clip: float | None = None

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
        if self.template == "pair":
            return self.classifier.logits(prompts, responses)
        if self.template == "chat":
            chats = [self._chat(*turn) for turn in zip(prompts, responses, strict=True)]
            return self.classifier.logits(chats, add_special_tokens=False)
        if self.template == "response":
            return self.classifier.logits(responses)
        return self.classifier.logits([prompt + response for prompt, response in zip(prompts, responses, strict=True)])

    def _chat(self, prompt: str, response: str) -> str:
        tokenizer = self.classifier.frozen.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            name = self.classifier.frozen.model_name
            raise ModelError(f"the tokenizer of {name!r} has no chat template; choose another template than 'chat'")
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return tokenizer.apply_chat_template(messages, tokenize=False)
