"""Rewards from a sequence classifier: the probability of a label, or the output of a reward model."""

from __future__ import annotations

from typing import Any

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.numbers import Count, Finite, NonNegative, Whole
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.classifier import classifier, label_probabilities
from rl4lms_like.scoring.reward_model import RewardModelScorer, Template, Value


class LearnedBatchedRewardFunction(TextReward):
    """Probability of one label under a classifier, with prompt and response concatenated to one text.

    Args:
        model_name: hub id or local folder of a sequence classifier.
        label_ix: index of the label.
        include_prompt_for_eval: prepend the prompt to the response; False: score the response alone.
        batch_size: texts per forward pass.
        device: device of the classifier; `auto` uses a GPU if available.
        dtype: data type of its weights.
        trust_remote_code: run code shipped with the checkpoint.
    """

    def __init__(
        self,
        model_name: str,
        label_ix: Whole,
        include_prompt_for_eval: bool = True,
        batch_size: Count = 32,
        device: Device = "auto",
        dtype: Dtype = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        self.label_ix = label_ix
        self.include_prompt_for_eval = include_prompt_for_eval
        self.classifier = classifier(
            model_name, batch_size=batch_size, device=device, dtype=dtype, trust_remote_code=trust_remote_code
        )
        self.classifier.check_label(label_ix, single=False)

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        return label_probabilities(
            self.classifier,
            prompt_texts,
            gen_texts,
            label_ix=self.label_ix,
            include_prompt=self.include_prompt_for_eval,
        )


class RewardModel(TextReward):
    """Output of a reward model for a response: the logit of a sequence classifier, or a label's probability.

    Args:
        model_name: hub id or local folder of a sequence classifier.
        template: model input: `text` prompt + response, `response` the response alone, `pair` a pair of texts, `chat` a
            user and an assistant message in the tokenizer's chat template.
        label: index or name of the label to use; may be omitted if the model has one logit.
        value: `logit`, or `probability`: sigmoid of a single logit, softmax over several.
        scale: factor of the value.
        clip: maximum absolute value of the reward, after scaling.
        batch_size: texts per forward pass.
        device: device of the model; `auto` uses a GPU if available.
        dtype: data type of its weights.
        trust_remote_code: run code shipped with the checkpoint.
        append_eos: append the end-of-text token to the input, as in the training of many reward models; null: use
            `append_eos` of the model's config.json, else false with a warning.
    """

    def __init__(
        self,
        model_name: str,
        template: Template = "text",
        label: Whole | str | None = None,
        value: Value = "logit",
        scale: Finite = 1.0,
        clip: NonNegative | None = None,
        batch_size: Count = 32,
        device: Device = "auto",
        dtype: Dtype = "float32",
        trust_remote_code: bool = False,
        append_eos: bool | None = None,
    ) -> None:
        model = classifier(
            model_name,
            role="reward model",
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
        model.check_label(label)
        self.scorer = RewardModelScorer(model, template, label, value, scale, clip, append_eos)

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        return self.scorer.scores(prompt_texts, gen_texts)
