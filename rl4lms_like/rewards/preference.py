"""Reward from a model of human preferences, for sentences made of given concepts (CommonGen)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.numbers import Count, Finite, NonNegative
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.meteor import meteor, require_meteor
from rl4lms_like.scoring.preference import PreferenceScorer, PreferenceT5, preference_rewards
from rl4lms_like.scoring.references import require_references


class CommonGenPrefRM(TextReward):
    """Probability that people prefer the response, from RL4LMs' T5 that outputs `good` or `bad`.

    P(good) / (1 + `concept_penalty_coeff` x missing concepts) + `meteor_coeff` METEOR. The T5 reads the response alone.
    The concepts are `meta_data["concepts"]`; a concept is missing if the lower-cased response does not contain it.

    Args:
        model_type: size of the published model; only one exists, so this has no effect.
        device: device of the model; `auto` uses a GPU if available.
        batch_size: texts per forward pass.
        concept_penalty_coeff: strength of the penalty for missing concepts.
        meteor_coeff: weight of METEOR against the references.
        model_name: hub id or local folder of a T5 that outputs `good` or `bad`. With `weights`: the T5 that the weights
            belong to, by default `google-t5/t5-11b`.
        weights: a `.pt` file with weights, as published by RL4LMs.
        dtype: data type of the weights.
    """

    needs_references = True

    def __init__(
        self,
        model_type: Literal["11b"] = "11b",
        device: Device = "auto",
        batch_size: Count = 8,
        concept_penalty_coeff: NonNegative = 0.0,
        meteor_coeff: Finite = 0.0,
        model_name: str | None = None,
        weights: str | None = None,
        dtype: Dtype = "float32",
    ) -> None:
        name = "the reward 'common_gen_preference_model'"
        self.concept_penalty_coeff = concept_penalty_coeff
        self.meteor_coeff = meteor_coeff
        if meteor_coeff:
            require_meteor(name)
        model = PreferenceT5(model_name, weights, device=device, dtype=dtype, needed_by=name)
        self.scorer = PreferenceScorer(model, batch_size)

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        concepts = [
            _concepts(meta, prompt) if self.concept_penalty_coeff else []
            for meta, prompt in zip(meta_infos, prompt_texts, strict=True)
        ]
        rewards = preference_rewards(self.scorer, gen_texts, concepts, concept_penalty_coeff=self.concept_penalty_coeff)
        if not self.meteor_coeff:
            return rewards
        require_references(prompt_texts, ref_texts)
        shaping = meteor(gen_texts, ref_texts)
        return [reward + self.meteor_coeff * score for reward, score in zip(rewards, shaping, strict=True)]


def _concepts(meta_info: Mapping[str, Any] | None, prompt: str) -> list[str]:
    concepts = (meta_info or {}).get("concepts")
    if not isinstance(concepts, (list, tuple)):
        raise ValueError(
            f"the sample with the prompt {prompt[:60]!r} has no concepts: its meta_data needs a list `concepts`, as "
            f"provided by the data pool 'commongen', got {concepts!r}"
        )
    return [str(concept) for concept in concepts]
