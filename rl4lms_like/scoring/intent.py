"""Dialogue act of a response, one of four, by a classifier trained on DailyDialog (Li et al., 2017).

input      the last utterance of the context, `<EOU>`, the response       as in the classifier's training
intents    1 inform, 2 question, 3 directive, 4 commissive; label i of the classifier is intent i + 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4lms_like.scoring.classifier import classifier_of
from rl4lms_like.scoring.frozen import ModelArguments
from rl4lms_like.scoring.score import Score, Texts

END_OF_UTTERANCE = "<EOU>"
DEFAULT_CLASSIFIER = "rajkumarrrk/roberta-daily-dialog-intent-classifier"


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
