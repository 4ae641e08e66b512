"""Every argument of an objective acts: another value trains another model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from rl4lms_like.algorithms import OBJECTIVES
from rl4lms_like.testing import models
from tests.offline.preferences.preference_runs import blocks, lines, run, written

RESPONSES = {"dropout": True, "max_response_length": 1}
REFERENCE = {
    **RESPONSES, "beta": 1.0, "reference_model": "OTHER", "reference_update_iterations": 1, "reference_mixing": 0.1,
}  # fmt: skip
OTHERS = {"reference_mixing": {"reference_update_iterations": 1}}
"""What both runs have besides, where an argument alone would be a mistake."""
VALUES: dict[str, dict[str, Any]] = {
    "reward_model": {"dropout": True, "center_coef": 1.0, "append_eos": False},
    "dpo": {**REFERENCE, "loss": "hinge", "label_smoothing": 0.4, "sft_weight": 1.0},
    "ipo": {**REFERENCE, "length_average": False},
    "kto": {**REFERENCE, "desirable_weight": 3.0, "undesirable_weight": 3.0},
    "orpo": {**RESPONSES, "odds_ratio_weight": 3.0},
    "simpo": {**RESPONSES, "beta": 1.0, "gamma": 3.0},
}
WITHOUT_EFFECT = {"logits_budget_mb"}  # its chunks change no number


@pytest.fixture
def trained(tmp_path, tiny_tokenizer):
    """Return a function that trains with some arguments and returns the losses."""
    file = written(tmp_path)
    for name, seed in (("model", 0), ("OTHER", 1)):
        model = models.make_causal_lm("gpt2", tiny_tokenizer, seed=seed, scale=3.0)
        model.config.update({f"{place}_pdrop": 0.5 for place in ("resid", "embd", "attn")})
        models.save_model(tmp_path / name, model, tiny_tokenizer)

    def losses(id: str, name: str = "base", **args: Any) -> list[float]:
        config = blocks(id, tmp_path / "model", file, max_steps=2, logging_steps=1)
        config["alg"]["args"] = {key: str(tmp_path / each) if each == "OTHER" else each for key, each in args.items()}
        config["train_evaluation"] |= {"metrics": [], "generate": False}
        return [line["preference/loss"] for line in lines(run(config, tmp_path, name) / "training_info.jsonl")]

    return losses


@pytest.mark.parametrize("id", VALUES)
def test_another_value_trains_another_model(id, trained):
    known = {field.name for field in fields(OBJECTIVES.signature(id))}
    assert VALUES[id].keys() == known - WITHOUT_EFFECT
    base = trained(id)
    without = set()
    for name, value in VALUES[id].items():
        others = OTHERS.get(name)
        before = trained(id, f"{name}_before", **others) if others else base
        if trained(id, name, **{**(others or {}), name: value}) == before:
            without.add(name)
    assert not without
