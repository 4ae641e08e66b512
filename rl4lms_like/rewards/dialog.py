"""Reward for dialogue: the requested intent, plus word overlap with the reference (METEOR)."""

from __future__ import annotations

from dataclasses import dataclass

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.numbers import Count, Finite
from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.intent import DEFAULT_CLASSIFIER, IntentMatch
from rl4lms_like.scoring.meteor import meteor, require_meteor
from rl4lms_like.scoring.score import Texts


@dataclass(eq=False)
class IntentAccuracy(ScoreReward):
    """Match of the response's intent with the requested intent, plus METEOR of the response.

    `intent_coeff` * [predicted intent = `meta_data["intent"][0]`] + `auto_coeff` * METEOR; METEOR only if `shape`.

    Args:
        shape: add METEOR.
        intent_coeff: weight of the intent match.
        auto_coeff: weight of METEOR.
        model_name: hub id or local folder of the intent classifier; its label 0 is intent 1.
        batch_size: texts per forward pass.
        device: device of the classifier; `auto` uses a GPU if available.
        dtype: data type of its weights.
    """

    id = "intent_accuracy"

    shape: bool = True
    intent_coeff: Finite = 1.0
    auto_coeff: Finite = 1.0
    model_name: str = DEFAULT_CLASSIFIER
    batch_size: Count = 32
    device: Device = "auto"
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        self.needs_references = self.shape
        self.intent = IntentMatch(self.model_name, self.batch_size, self.device, self.dtype)
        if self.shape:
            require_meteor(self.needed_by)

    def per_text(self, texts: Texts) -> list[float]:
        rewards = [self.intent_coeff * match for match in self.intent.per_text(texts)]
        if not self.shape:
            return rewards
        shaping = meteor(texts.responses, texts.references)
        return [reward + self.auto_coeff * score for reward, score in zip(rewards, shaping, strict=True)]
