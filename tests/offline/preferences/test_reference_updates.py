"""A reference that follows the model is that of a plain loop, and is resumed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.preference_objectives import REFERENCE_FILE
from rl4lms_like.run import resume
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.config_errors import raises_at
from tests.offline.preferences.preference_runs import PAIRS, blocks, run, written
from tests.offline.supervised.test_resume import stopped
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError

SGD = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 0}


def log_prob(model, tokenizer, prompt, response):
    """The log-prob of one response with its end token, from all logits."""
    prompt_ids = tokenizer(prompt)["input_ids"]
    response_ids = [*tokenizer(f" {response}")["input_ids"], tokenizer.eos_token_id]
    logits = model(torch.tensor([prompt_ids + response_ids])).logits[0, len(prompt_ids) - 1 : -1]
    return F.log_softmax(logits, dim=-1)[range(len(response_ids)), response_ids].sum()


def test_dpo_with_a_moving_reference_is_a_plain_loop(tmp_path, tiny_gpt2_dir):
    mapping = blocks("dpo", tiny_gpt2_dir, written(tmp_path), **SGD, max_steps=4, per_device_train_batch_size=12)
    mapping["alg"]["args"] = {"beta": 0.5, "reference_update_iterations": 2, "reference_mixing": 0.7}
    folder = run(mapping, tmp_path)
    assert not (folder / REFERENCE_FILE).exists()

    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir).eval()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["learning_rate"])
    for step in range(1, 5):
        losses = []
        for pair in PAIRS:
            ratios = []
            for column in ("chosen", "rejected"):
                of_model, of_reference = (
                    log_prob(network, tokenizer, pair["prompt"], pair[column]) for network in (model, reference)
                )
                ratios.append(of_model - of_reference)
            losses.append(-F.logsigmoid(0.5 * (ratios[0] - ratios[1])))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        if step % 2 == 0:
            with torch.no_grad():
                for old, new in zip(reference.parameters(), model.parameters(), strict=True):
                    old.copy_(0.7 * new + 0.3 * old)

    trained = load_file(folder / "model" / "model.safetensors")
    weights = dict(model.named_parameters())
    for name, weight in trained.items():
        torch.testing.assert_close(weight, weights[name].detach(), atol=2e-6, rtol=1e-5)

    # Without updates of the reference, the second half of the training is another one.
    mapping["alg"]["args"] = {"beta": 0.5}
    fixed = load_file(run(mapping, tmp_path, "fixed") / "model" / "model.safetensors")
    assert max(float((fixed[name] - trained[name]).abs().max()) for name in trained) > 1e-4


@pytest.mark.parametrize("id", ["dpo", "ipo", "kto"])
def test_the_reference_is_the_recurrence_over_the_saved_models(id, tmp_path, tiny_gpt2_dir):
    mapping = blocks(id, tiny_gpt2_dir, written(tmp_path), save_strategy="steps", save_steps=1, max_steps=4)
    mapping["alg"]["args"] = {"reference_update_iterations": 2, "reference_mixing": 0.25}
    checkpoints = run(mapping, tmp_path) / "checkpoints"
    reference = load_file(tiny_gpt2_dir / "model.safetensors")
    for step in range(1, 5):
        weights = load_file(checkpoints / f"checkpoint-{step}" / "model.safetensors")
        if step % 2 == 0:
            reference = {name: 0.25 * weights[name] + 0.75 * reference[name] for name in reference}
        if step < 3:  # only the newest two have a state
            continue
        state = load_file(checkpoints / f"checkpoint-{step}" / "training_state.safetensors")
        for name, expected in reference.items():
            torch.testing.assert_close(state[f"objective.reference.{name}"], expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("id", ["dpo", "kto"])
def test_a_stopped_run_goes_on_to_the_same_bytes(id, tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = blocks(id, tiny_gpt2_dir, written(tmp_path), save_steps=2, save_strategy="steps", logging_steps=1)
    mapping["alg"]["args"] = {"reference_update_iterations": 2, "reference_mixing": 0.6}
    expected = run(mapping, tmp_path, "whole")
    folder = stopped(mapping, tmp_path, 3, monkeypatch, StoppedError)
    assert files_of(resume(folder, quiet=True)) == files_of(expected)


@pytest.mark.parametrize(("args", "peft", "path"), [
    ({"reference_update_iterations": 2}, {"r": 2}, "reference_update_iterations"),
    ({"reference_mixing": 0.5}, None, "reference_mixing"),
    ({"reference_update_iterations": 0}, None, "reference_update_iterations"),
])  # fmt: skip
def test_what_is_refused(args, peft, path, tmp_path, tiny_gpt2_dir):
    mapping = blocks("dpo", tiny_gpt2_dir, written(tmp_path))
    mapping["alg"] |= {"args": args, "peft": peft}
    with raises_at(f"alg.args.{path}"):
        parse_config(mapping)


def test_another_shape_cannot_follow_the_model(tmp_path, tiny_gpt2_dir, tiny_tokenizer):
    larger = models.save_model(
        tmp_path / "larger", models.make_causal_lm("gpt2", tiny_tokenizer, n_layers=3), tiny_tokenizer
    )
    mapping = blocks("dpo", tiny_gpt2_dir, written(tmp_path))
    mapping["alg"]["args"] = {"reference_update_iterations": 2, "reference_model": str(larger)}
    with pytest.raises(ModelError, match="other shapes"):
        run(mapping, tmp_path)
