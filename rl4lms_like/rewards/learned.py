"""Rewards from trained models: labels, reward models, similarity to the references, intents of dialogue."""

from __future__ import annotations

from dataclasses import dataclass

from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.bert_score import BERTScore
from rl4lms_like.scoring.classifier import DEFAULT_CLASSIFIER, Bleurt, IntentMatch, LabelProbability, RewardModelScore
from rl4lms_like.scoring.frozen import ModelArguments
from rl4lms_like.scoring.meteor import meteor
from rl4lms_like.scoring.nltk_data import require_data
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.numbers import Finite


class LearnedBatchedRewardFunction(LabelProbability, ScoreReward):
    """Probability of one label under a classifier, with prompt and response concatenated to one text."""


class RewardModel(RewardModelScore, ScoreReward):
    """Output of a reward model for a response: the logit of a sequence classifier, or a label's probability."""


class BERTScoreRewardFunction(BERTScore, ScoreReward):
    """BERTScore F1 (Zhang et al., 2020) against the best reference; 0 for an empty response."""


class BLEURTRewardFunction(Bleurt, ScoreReward):
    """BLEURT (Sellam et al., 2020) against the best reference, roughly from -1 to 1."""


@dataclass(eq=False)
class IntentAccuracy(ModelArguments, ScoreReward):
    """Match of the response's intent with the requested intent, plus METEOR of the response.

    `intent_coeff` * [predicted intent = `meta_data["intent"][0]`] + `auto_coeff` * METEOR; METEOR only if `shape`.

    Args:
        shape: add METEOR.
        intent_coeff: weight of the intent match.
        auto_coeff: weight of METEOR.
        model_name: hub id or local folder of the intent classifier; its label 0 is intent 1.
    """

    id = "intent_accuracy"

    shape: bool = True
    intent_coeff: Finite = 1.0
    auto_coeff: Finite = 1.0
    model_name: str = DEFAULT_CLASSIFIER

    def __post_init__(self) -> None:
        self.intent = IntentMatch(self.model_name, batch_size=self.batch_size, device=self.device, dtype=self.dtype)

        # Only METEOR compares with references, and only METEOR needs NLTK's data.
        self.needs_references = self.shape
        if self.shape:
            require_data(self.needed_by, "punkt_tab", "wordnet")

    def per_text(self, texts: Texts) -> list[float]:
        rewards = [self.intent_coeff * match for match in self.intent.per_text(texts)]
        if not self.shape:
            return rewards

        # intent_coeff x [intent is right] + auto_coeff x METEOR: the match is 0 or 1, METEOR also separates responses
        # of the right intent from each other.
        meteor_scores = meteor(texts.responses, texts.references)
        return [reward + self.auto_coeff * score for reward, score in zip(rewards, meteor_scores, strict=True)]
