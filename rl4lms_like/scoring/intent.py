"""Dialogue act of a response, one of four, by a classifier trained on DailyDialog (Li et al., 2017).

input      the last utterance of the context, `<EOU>`, the response       as in the classifier's training
intents    1 inform, 2 question, 3 directive, 4 commissive; label i of the classifier is intent i + 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl4lms_like.scoring.classifier import Classifier

END_OF_UTTERANCE = "<EOU>"
DEFAULT_CLASSIFIER = "rajkumarrrk/roberta-daily-dialog-intent-classifier"


def intent_matches(
    scorer: Classifier,
    prompt_texts: Sequence[str],
    generated_texts: Sequence[str],
    meta_infos: Sequence[Mapping[str, Any] | None],
) -> list[float]:
    """Return 1 for each response whose predicted intent is the requested one, else 0.

    Args:
        scorer: the intent classifier.
        prompt_texts: utterances, each followed by `<EOU>`, which the last one may lack.
        generated_texts: the responses.
        meta_infos: `meta_data` of each sample; `intent` is a list that starts with the intent, counted from 1.

    Raises:
        ModelError: the classifier cannot be loaded.
        ValueError: a sample has no intent, or one that the classifier does not have.
    """
    targets = [_intent(meta, prompt) for meta, prompt in zip(meta_infos, prompt_texts, strict=True)]
    for target, prompt in zip(targets, prompt_texts, strict=True):
        if not 1 <= target <= scorer.n_labels:
            raise ValueError(
                f"the sample with the prompt {prompt[:60]!r} has the intent {target}; the classifier has "
                f"1 to {scorer.n_labels}"
            )
    texts = [
        f"{last_utterance(prompt)}{END_OF_UTTERANCE}{text}"
        for prompt, text in zip(prompt_texts, generated_texts, strict=True)
    ]
    seen = scorer.logits(texts).argmax(dim=1).tolist()
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
