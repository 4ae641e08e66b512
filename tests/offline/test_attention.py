"""`alg.attn_implementation` in supervised and preference runs: which attention computes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.assemble_supervised import assemble_supervised
from rl4lms_like.preview import preview
from rl4lms_like.testing import models
from tests.config_errors import raises_at
from tests.configs import run_blocks
from tests.offline.preferences.preference_runs import blocks, written

IDS = ("supervised", "dpo", "reward_model")


def mapping_of(id, model, folder, attention, **training_args) -> dict[str, Any]:
    made = blocks("dpo" if id == "supervised" else id, model, written(folder), **training_args)
    made["alg"] |= {"id": id, "attn_implementation": attention}
    if id == "supervised":
        del made["alg"]["args"]
    return made


def assembled(mapping):
    config = parse_config(mapping)
    return assemble_supervised(config) if mapping["alg"]["id"] == "supervised" else assemble_preferences(config)


@pytest.mark.parametrize("id", IDS)
def test_another_attention_computes_the_same_numbers(id, tiny_gpt2_dir, tmp_path):
    numbers = {}
    for attention in ("eager", "sdpa"):
        run = assembled(mapping_of(id, tiny_gpt2_dir, tmp_path, attention))
        assert run.model.config._attn_implementation == attention
        batch = run.objective.collate(run.examples["train"].rows[:4])
        if id == "supervised":
            numbers[attention] = run.objective.loss(run.model.eval(), batch)
        else:
            numbers[attention] = run.objective.scores(batch)  # before the difference to the reference, which is 0
    torch.testing.assert_close(numbers["eager"], numbers["sdpa"], atol=1e-4, rtol=1e-5)


def test_the_reference_has_the_same_attention(tiny_gpt2_dir, tiny_tokenizer, tmp_path):
    reference = models.make_causal_lm("gpt2", tiny_tokenizer, n_layers=1, seed=1)
    folder = models.save_model(tmp_path / "reference", reference, tiny_tokenizer)
    mapping = mapping_of("dpo", tiny_gpt2_dir, tmp_path, "eager")
    mapping["alg"]["args"] = {"reference_model": str(folder)}
    assert assembled(mapping).objective.reference.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize(
    ("attention", "mentioned"), [("kernels-community/flash-attn", "from the hub"), ("flash_attention_2", "bf16")]
)
def test_kernels_that_need_more_are_refused(id, attention, mentioned, tmp_path):
    if (id, attention) == ("reward_model", "flash_attention_2"):
        pytest.skip("refused for another reason: see docs/features.md")
    with raises_at("alg.attn_implementation", mentions=mentioned):
        parse_config(mapping_of(id, "gpt2", tmp_path, attention))


@pytest.mark.parametrize("id", IDS)
def test_an_unknown_attention_is_found_by_the_check(id, tiny_gpt2_dir, tmp_path):
    with raises_at("alg.attn_implementation", mentions="sdpa"):
        list(preview(parse_config(mapping_of(id, tiny_gpt2_dir, tmp_path, "spda"))))


def test_an_unknown_attention_of_a_policy_is_found_by_the_check(tiny_gpt2_dir):
    mapping = run_blocks()
    mapping["alg"]["policy"]["args"] |= {"model_name": str(tiny_gpt2_dir), "attn_implementation": "spda"}
    with raises_at("alg.policy.args.attn_implementation", mentions="sdpa"):
        list(preview(parse_config(mapping)))
