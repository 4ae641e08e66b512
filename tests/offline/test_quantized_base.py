"""Runs on given texts with a quantized base: trained, resumed, saved and measured like others."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.assemble_supervised import assemble_supervised
from rl4lms_like.offline.measured_split import measured_split
from rl4lms_like.policies.quantized_layers import QuantizedLinear
from rl4lms_like.run import resume
from rl4lms_like.system.errors import ModelError
from tests.config_errors import raises_at
from tests.offline.preferences.preference_runs import OBJECTIVES, lines, run, written
from tests.offline.preferences.preference_runs import blocks as pair_blocks
from tests.offline.supervised.test_resume import blocks, started, stopped
from tests.robustness.killed_runs import files_of

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")
pytest.importorskip("peft")

ADAPTERS = {"peft": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}}
QUANTIZED = {**ADAPTERS, "quantization": {"id": "nf4"}, "merge_on_save": True}


def with_head(alg):
    """The same with a whole head, which a reward model needs."""
    return {**alg, "peft": {**alg["peft"], "exclude_modules": ["score"]}}


def val_losses(folder):
    key = "supervised/val_loss"
    return [line[key] for line in lines(folder / "training_info.jsonl") if key in line]


@pytest.mark.parametrize("quantization", [{"id": "nf4"}, {"id": "int8"}], ids=["nf4", "int8"])
def test_a_supervised_run_learns_and_is_resumed_to_the_same_bytes(quantization, tiny_gpt2_dir, tmp_path, monkeypatch):
    alg = {**QUANTIZED, "quantization": quantization}
    mapping = blocks("causal", tiny_gpt2_dir, alg=alg)
    expected = started(mapping, tmp_path / "whole")
    losses = val_losses(expected)
    assert losses[-1] < losses[0]
    folder = stopped(mapping, tmp_path, 3, monkeypatch)
    resume(folder, quiet=True)
    assert files_of(folder) == files_of(expected)

    # A plain model, whose loss is the last one of the run.
    again = blocks("causal", expected / "model", learning_rate=0.0, eval_strategy="steps")
    assert val_losses(started(again, tmp_path / "again"))[0] == pytest.approx(losses[-1], abs=1e-5)


@pytest.mark.parametrize("id", OBJECTIVES)
def test_every_objective_trains_adapters_of_a_quantized_base(id, tiny_gpt2_dir, tmp_path):
    mapping = pair_blocks(id, tiny_gpt2_dir, written(tmp_path))
    mapping["alg"] |= with_head(QUANTIZED) if id == "reward_model" else QUANTIZED
    folder = run(mapping, tmp_path)
    measured = lines(folder / "val_split_metrics.jsonl")
    first, last = measured[0]["metrics"], measured[-1]["metrics"]
    assert last["preference/loss"] < first["preference/loss"]
    if id == "dpo":  # the reference is the quantized base
        assert first["preference/loss"] == pytest.approx(math.log(2), abs=1e-5)

    # The saved model is the trained one, compared with the same reference. KTO's loss needs the labels of `train`.
    again = {} if id == "kto" else measured_split(parse_config(mapping), str(folder / "model"), "val")
    for name, number in again.items():
        assert number == pytest.approx(last[name], rel=1e-3, abs=1e-4), name
    auto = AutoModelForSequenceClassification if id == "reward_model" else AutoModelForCausalLM
    assert not any(isinstance(layer, QuantizedLinear) for layer in auto.from_pretrained(folder / "model").modules())


def test_heads_are_not_quantized_and_that_of_a_reward_model_is_trained(tiny_gpt2_dir, tmp_path):
    mapping = pair_blocks("reward_model", tiny_gpt2_dir, written(tmp_path))
    mapping["alg"] |= with_head(QUANTIZED)
    model = assemble_preferences(parse_config(mapping)).model
    assert type(model.score) is torch.nn.Linear and model.score.weight.requires_grad


@pytest.mark.parametrize("make", ["supervised", "dpo", "reward_model"])
def test_a_kernel_without_gradients_is_found(make, tiny_gpt2_dir, tmp_path, monkeypatch):
    def product(self, input, bias):
        return torch.nn.functional.linear(input.detach(), self.dequantized(), bias)

    monkeypatch.setattr(QuantizedLinear, "_product", product)
    mapping = blocks("causal", tiny_gpt2_dir, alg=QUANTIZED)
    if make != "supervised":
        mapping = pair_blocks(make, tiny_gpt2_dir, written(tmp_path))
        mapping["alg"] |= with_head(QUANTIZED) if make == "reward_model" else QUANTIZED
    assemble = assemble_supervised if make == "supervised" else assemble_preferences
    with pytest.raises(ModelError, match="finite differences"):
        assemble(parse_config(mapping))


def test_refusals(tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, alg={"quantization": {"id": "nf4"}})
    with raises_at("alg.quantization", mentions="only adapters can be trained"):
        parse_config(mapping)
    mapping = blocks("causal", tiny_gpt2_dir, alg={**QUANTIZED, "model_type": "vision"})
    with raises_at("alg.quantization", mentions="vision-language models"):
        parse_config(mapping)
    mapping = blocks("causal", tiny_gpt2_dir, alg=QUANTIZED, torch_compile=True)
    with raises_at("alg.training_args.torch_compile", mentions="quantization"):
        parse_config(mapping)
