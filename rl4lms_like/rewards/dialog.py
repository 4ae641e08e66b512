"""Reward for dialogue: the requested intent, plus word overlap with the reference (METEOR)."""

from __future__ import annotations

from typing import Any

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.numbers import Count, Finite
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.classifier import classifier
from rl4lms_like.scoring.intent import DEFAULT_CLASSIFIER, intent_matches
from rl4lms_like.scoring.meteor import meteor, require_meteor
from rl4lms_like.scoring.references import require_references


class IntentAccuracy(TextReward):
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

    needs_references = True

    def __init__(
        self,
        shape: bool = True,
        intent_coeff: Finite = 1.0,
        auto_coeff: Finite = 1.0,
        model_name: str = DEFAULT_CLASSIFIER,
        batch_size: Count = 32,
        device: Device = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        self.shape = shape
        self.intent_coeff = intent_coeff
        self.auto_coeff = auto_coeff
        self.classifier = classifier(
            model_name, role="classifier of intents", batch_size=batch_size, device=device, dtype=dtype
        )
        if shape:
            require_meteor("the reward 'intent_accuracy'")

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        matches = intent_matches(self.classifier, prompt_texts, gen_texts, meta_infos)
        rewards = [self.intent_coeff * match for match in matches]
        if not self.shape:
            return rewards
        require_references(prompt_texts, ref_texts)
        shaping = meteor(gen_texts, ref_texts)
        return [reward + self.auto_coeff * score for reward, score in zip(rewards, shaping, strict=True)]
