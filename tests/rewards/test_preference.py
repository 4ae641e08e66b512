"""`common_gen_preference_model`: the preference, concepts that are missing, METEOR."""

from __future__ import annotations

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards import REWARDS
from rl4lms_like.scoring.meteor import meteor
from rl4lms_like.system.errors import MissingResourceError
from rl4lms_like.testing.checkers import check_reward_function

SAMPLES = [
    Sample("0", "generate a sentence with: man drive car.", ["A man drives a car."], {"concepts": ["man", "drive"]}),
    Sample("1", "generate a sentence with: dog run.", ["A dog runs.", "Dogs run."], {"concepts": ["dog", "run"]}),
]
PROMPTS = [sample.prompt_or_input_text for sample in SAMPLES]
REFERENCES = [sample.references for sample in SAMPLES]
METAS = [sample.meta_data for sample in SAMPLES]
TEXTS = ["A man has a car.", "the dog runs"]


@pytest.fixture
def paid(tiny_t5_dir):
    def score(metas=METAS, **args):
        reward = REWARDS.get("common_gen_preference_model", {"model_name": str(tiny_t5_dir), **args})
        return reward(PROMPTS, TEXTS, REFERENCES, [True, True], metas)

    return score


def test_missing_concepts_cost(paid):
    plain = paid()
    assert all(0 < value < 1 for value in plain)
    assert paid(concept_penalty_coeff=0.5) == pytest.approx([plain[0] / 1.5, plain[1]])


@pytest.mark.usefixtures("language_data")
def test_meteor_is_added(paid):
    plain, with_meteor = paid(), paid(meteor_coeff=0.5)
    added = [after - before for before, after in zip(plain, with_meteor, strict=True)]
    assert added == pytest.approx([0.5 * score for score in meteor(TEXTS, REFERENCES)], abs=1e-6)


def test_concepts_are_needed_only_where_they_count(paid):
    assert paid(metas=[None, None]) == paid()
    with pytest.raises(ValueError, match=r"'generate a sentence with: man"):
        paid(metas=[None, None], concept_penalty_coeff=1.0)


def test_rl4lms_config_says_how_to_get_the_weights():
    """D-38: RL4LMs downloaded them into its own package, and crashed without a device."""
    args = {"model_type": "11b", "device": "cpu", "batch_size": 5}
    with pytest.raises(MissingResourceError):
        REWARDS.get("common_gen_preference_model", args)


def test_it_passes_the_checker(tiny_t5_dir):
    args = {"model_name": str(tiny_t5_dir), "batch_size": 5, "concept_penalty_coeff": 0.5}
    check_reward_function(REWARDS.get("common_gen_preference_model", args), SAMPLES)
