"""What a step of a preference run minimises is the formula, for any number of micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.preference_losses import (
    bradley_terry_loss,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    kto_loss,
    log_odds_ratio,
    orpo_loss,
    robust_dpo_loss,
    simpo_loss,
)
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.testing import models
from tests.offline.preferences.preference_runs import OBJECTIVES, PAIRS, blocks, lines, run, written

TWO_STEPS = {"optim": "sgd", "learning_rate": 0.3, "lr_scheduler_type": "constant", "max_grad_norm": 0, "max_steps": 2}


@pytest.fixture(scope="module")
def other_gpt2(tmp_path_factory, tiny_tokenizer):
    """A reference that differs from the trained model, so that z0 and all log-ratios differ from 0."""
    model = models.make_causal_lm("gpt2", tiny_tokenizer, seed=5, scale=3.0)
    return models.save_model(tmp_path_factory.mktemp("other"), model, tiny_tokenizer)


def with_other_reference(id, mapping, other_gpt2):
    if id in ("dpo", "ipo", "kto"):
        mapping["alg"]["args"]["reference_model"] = str(other_gpt2)
    return mapping


@pytest.mark.parametrize("id", OBJECTIVES)
def test_micro_batches_change_no_gradient(id, tmp_path, tiny_gpt2_dir, other_gpt2):
    mapping = with_other_reference(id, blocks(id, tiny_gpt2_dir, written(tmp_path)), other_gpt2)
    assembled = assemble_preferences(parse_config(mapping))
    assembled.objective.prepare(tmp_path, assembled.examples)
    rows = assembled.examples["train"].rows
    whole = gradient(assembled.objective, [rows])
    for size in (1, 4, 5):
        parts = gradient(assembled.objective, [rows[i : i + size] for i in range(0, len(rows), size)])
        for name, expected in whole.items():
            torch.testing.assert_close(parts[name], expected, atol=2e-6, rtol=1e-4)


def test_accumulation_changes_no_step(tmp_path, tiny_gpt2_dir, other_gpt2):
    """z0 of `kto` is that of the whole step, and its loss a mean over the whole step, in the Trainer too."""
    weights = []
    for size, n in ((8, 1), (2, 4)):
        mapping = blocks("kto", tiny_gpt2_dir, written(tmp_path), **TWO_STEPS)
        mapping["alg"]["training_args"] |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": n}
        folder = run(with_other_reference("kto", mapping, other_gpt2), tmp_path, f"run_{size}")
        weights.append(load_file(folder / "model" / "model.safetensors"))
        assert lines(folder / "training_info.jsonl")[-1]["kto/z0"] > 0.1
    initial = load_file(tiny_gpt2_dir / "model.safetensors")
    assert max(float((weight - initial[name]).abs().max()) for name, weight in weights[0].items()) > 1e-3
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("id", "kind"), [("dpo", "causal"), ("dpo", "seq2seq"), ("kto", "causal")])
def test_the_first_loss_is_that_of_equal_rewards(id, kind, tmp_path, tiny_gpt2_dir, tiny_t5_dir):
    model = tiny_gpt2_dir if kind == "causal" else tiny_t5_dir
    folder = run(blocks(id, model, written(tmp_path), kind, logging_steps=1), tmp_path)
    first = lines(folder / "training_info.jsonl")[0]
    expected = math.log(2) if id == "dpo" else 0.5
    assert first["preference/loss"] == pytest.approx(expected, abs=1e-6)
    assert abs(first["rewards/margins"]) < 1e-6
    (before, *_) = lines(folder / "val_split_metrics.jsonl")
    assert before["metrics"]["preference/loss"] == pytest.approx(expected, abs=1e-6)


def naive_log_probs(model, tokenizer, kind):
    """Sums and numbers of tokens of the responses' log-probs, one text at a time, from all logits."""
    found = []
    for pair in PAIRS:
        for column in ("chosen", "rejected"):
            prompt = tokenizer(pair["prompt"])["input_ids"]
            if kind == "causal":
                response = [*tokenizer(f" {pair[column]}")["input_ids"], tokenizer.eos_token_id]
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            else:
                response = tokenizer(pair[column])["input_ids"]
                logits = model(torch.tensor([prompt]), labels=torch.tensor([response])).logits[0]
            log_probs = F.log_softmax(logits.double(), dim=-1)[range(len(response)), response]
            found.append([float(log_probs.sum()), len(response)])
    return torch.tensor(found).view(len(PAIRS), 2, 2).unbind(dim=-1)


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_log_probs_and_losses_are_those_of_plain_forward_passes(kind, tmp_path, tiny_gpt2_dir, tiny_t5_dir):
    folder = tiny_gpt2_dir if kind == "causal" else tiny_t5_dir
    auto = AutoModelForCausalLM if kind == "causal" else AutoModelForSeq2SeqLM
    with torch.no_grad():
        sums, lengths = naive_log_probs(auto.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), kind)
    expected = {
        "dpo": dpo_loss(sums[:, 0], sums[:, 1], 0.1),
        "ipo": ipo_loss(*(sums / lengths).unbind(1), 0.1),
        "orpo": orpo_loss(*(sums / lengths).unbind(1), -(sums / lengths)[:, 0], 0.1),
        "simpo": simpo_loss(*(sums / lengths).unbind(1), 2.0, 1.0),
    }
    for id, losses in expected.items():
        objective, rows = objective_of(blocks(id, folder, written(tmp_path), kind))
        for row in rows:
            row["ref_log_prob"] = [0.0, 0.0]
        assert objective.reader.shares_prompts
        assert objective.measure(rows)["preference/loss"] == pytest.approx(float(losses.mean()), abs=1e-5)


def objective_of(mapping):
    assembled = assemble_preferences(parse_config(mapping))
    return assembled.objective, assembled.examples["train"].rows


def gradient(objective, parts):
    """The gradient of a step of several micro-batches."""
    model = objective.reader.model
    model.zero_grad()
    batches = [objective.collate(rows) for rows in parts]
    n_items = objective.begin_step(batches, None)
    for batch in batches:
        objective.loss(model, batch, n_items).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("id", ["reward_model", "dpo", "simpo"])
def test_a_shared_prompt_changes_no_gradient(id, tmp_path, tiny_gpt2_dir):
    objective, rows = objective_of(blocks(id, tiny_gpt2_dir, written(tmp_path)))
    for row in rows:
        row["ref_log_prob"] = [-20.0, -30.0]
    assert objective.reader.shares_prompts
    together = gradient(objective, [rows])
    objective.reader.shares_prompts = False
    for name, expected in gradient(objective, [rows]).items():
        torch.testing.assert_close(together[name], expected, atol=1e-6, rtol=1e-4)


def test_options_of_dpo_act(tmp_path, tiny_gpt2_dir):
    losses = {}
    for name, args in {
        "plain": {},
        "smoothed": {"label_smoothing": 0.3},
        "robust": {"loss": "robust", "label_smoothing": 0.3},
        "hinge": {"loss": "hinge"},
        "with sft": {"sft_weight": 0.5},
    }.items():
        mapping = blocks("dpo", tiny_gpt2_dir, written(tmp_path))
        mapping["alg"]["args"] = args
        objective, rows = objective_of(mapping)
        for row in rows:
            row["ref_log_prob"] = [-50.0, -20.0]
        losses[name] = objective.measure(rows)["preference/loss"]
    assert len({round(loss, 4) for loss in losses.values()}) == len(losses)


# --- probabilities of 0 and 1 -----------------------------------------------------------------------------------------

NEVER = -1e4  # a mean log-prob whose probability is rounded to 0
EDGES = [0.0, -1e-9, -1e-7, -1e-3, -0.5, -1.0, NEVER]

LOSSES = {
    "reward_model": lambda chosen, rejected: bradley_terry_loss(chosen, rejected, 1.0, 0.01),
    "dpo": lambda chosen, rejected: dpo_loss(chosen, rejected, 0.1, 0.1),
    "robust": lambda chosen, rejected: robust_dpo_loss(chosen, rejected, 0.1, 0.1),
    "hinge": lambda chosen, rejected: hinge_loss(chosen, rejected, 0.1),
    "ipo": lambda chosen, rejected: ipo_loss(chosen, rejected, 0.1),
    "kto": lambda chosen, rejected: kto_loss(chosen - rejected, torch.ones_like(chosen, dtype=torch.bool), 0.0, 0.1),
    "simpo": lambda chosen, rejected: simpo_loss(chosen, rejected, 2.0, 1.0),
    "orpo": lambda chosen, rejected: orpo_loss(chosen, rejected, -chosen, 1.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_finite_at_probabilities_of_0_and_1(name):
    scores = torch.cartesian_prod(torch.tensor(EDGES), torch.tensor(EDGES)).requires_grad_()  # chosen, rejected
    losses = LOSSES[name](*scores.unbind(dim=1))
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    assert losses.isfinite().all() and gradient.isfinite().all()
    assert gradient.abs().max() <= 2 / torch.finfo(torch.float32).eps


@pytest.mark.parametrize("rejected", [-1e-5, -0.1, -0.7, -1.0, -20.0])
@pytest.mark.parametrize("chosen", [-1e-5, -0.1, -0.7, -1.0, -20.0])
def test_log_odds_and_their_gradients_are_those_in_double_precision(chosen, rejected):
    def odds(log_prob):
        return log_prob - torch.log(-torch.expm1(log_prob))

    scores = torch.tensor([chosen, rejected], requires_grad=True)
    precise = torch.tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
    actual = log_odds_ratio(scores[0], scores[1])
    expected = odds(precise[0]) - odds(precise[1])
    torch.testing.assert_close(actual, expected.float(), atol=1e-6, rtol=1e-6)
    (gradient,) = torch.autograd.grad(actual, scores)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, precise)[0].float(), atol=1e-6, rtol=1e-5)
