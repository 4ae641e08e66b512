"""The supervised loss within a budget of logits is that of whole logits, and no tensor is larger than the budget."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.assemble_supervised import assemble_supervised
from rl4lms_like.offline.objective import CrossEntropy
from rl4lms_like.policies.head_inputs import has_linear_head
from rl4lms_like.policies.loading import load_model
from rl4lms_like.policies.lora import add_lora
from rl4lms_like.policies.routing import BalancingLoss
from rl4lms_like.run import resume
from rl4lms_like.testing.models import make_causal_lm, make_seq2seq_lm
from rl4lms_like.training.examples import ExampleCollator
from rl4lms_like.training.resuming.resume import find_unfinished, resumption
from tests.config_errors import raises_at
from tests.expert_models import save_experts
from tests.offline.supervised.test_resume import blocks, started, stopped
from tests.offline.supervised.test_trainer import six_steps, trainer_of  # noqa: F401  (a fixture)
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError

FAMILIES = {
    "gpt2": make_causal_lm,  # output layer tied to the embeddings
    "llama": make_causal_lm,
    "gpt_neox": make_causal_lm,  # an output layer of another name
    "t5": make_seq2seq_lm,  # scaled states
    "bart": make_seq2seq_lm,  # a bias outside of the output layer
}
PAD, START = 0, 1
EXAMPLES = [
    ([5, 6, 7, 8, 9], [2, 1]),
    ([9, 8], [4, 7, 5, 1]),
    ([3, 4, 5], []),  # nothing to learn: a conversation that was truncated
    ([11, 12, 13, 14, 15, 16, 17], [18, 1]),
    ([21], [22, 23, 24, 25, 1]),
]


def batch_of(examples, *, is_encoder_decoder):
    """Prompts, of which nothing is learned, and references, padded on the right."""
    rows = []
    for prompt, reference in examples:
        if is_encoder_decoder:
            rows.append({"input_ids": prompt, "labels": reference or [-100]})
        else:
            rows.append({"input_ids": [*prompt, *reference], "labels": [-100] * len(prompt) + reference})
    return ExampleCollator(PAD, START if is_encoder_decoder else None)(rows)


def objective_of(model, budget):
    is_encoder_decoder = model.config.is_encoder_decoder
    return CrossEntropy(
        ExampleCollator(PAD, START if is_encoder_decoder else None), is_encoder_decoder=is_encoder_decoder,
        label_smoothing=0.0, use_cache=False, logits_budget=budget, balancing=BalancingLoss.of(model),
    )  # fmt: skip


def gradient(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


@pytest.fixture(params=FAMILIES)
def model(request, tiny_tokenizer):
    scale = 1.0 if request.param == "t5" else 10.0
    return FAMILIES[request.param](request.param, tiny_tokenizer, scale=scale).eval()


@pytest.mark.parametrize("n_tokens_in_memory", [1, 4, 13, 30])
def test_loss_and_gradient_are_those_of_transformers(n_tokens_in_memory, model):
    is_encoder_decoder = model.config.is_encoder_decoder
    batch = batch_of(EXAMPLES, is_encoder_decoder=is_encoder_decoder)
    n_learned = sum(len(reference) for _, reference in EXAMPLES)
    assert batch["labels"].numel() > 30 or is_encoder_decoder

    model(**batch).loss.backward()
    expected = gradient(model)
    mean = float(model(**batch).loss.detach())

    # In micro-batches of unequal padding, of which one has nothing to learn.
    assert has_linear_head(model)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    objective = objective_of(model, n_tokens_in_memory * vocab_size)
    for parts in ([EXAMPLES], [EXAMPLES[:2], EXAMPLES[2:3], EXAMPLES[3:]]):
        model.zero_grad()
        total = 0.0
        for part in parts:
            loss = objective.loss(model, batch_of(part, is_encoder_decoder=is_encoder_decoder), n_learned)
            loss.backward()
            total += float(loss.detach())
        assert total == pytest.approx(mean, rel=1e-6)
        assert float((gradient(model) - expected).norm()) <= 1e-6 * float(expected.norm())


def test_nothing_to_learn_has_gradients_of_zero(model):
    """As with whole logits: an optimizer treats a gradient of zero and none differently."""
    batch = batch_of(EXAMPLES[2:3], is_encoder_decoder=model.config.is_encoder_decoder)
    objective_of(model, 1).loss(model, batch, 1).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and not weight.grad.any(), name


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_the_balancing_loss_of_experts_is_the_same(family, tmp_path, tiny_tokenizer):
    folder = save_experts(tmp_path, family, tiny_tokenizer, output_router_logits=True, router_aux_loss_coef=0.3)
    model, _ = load_model(AutoModelForCausalLM, str(folder), dropout=True)
    model.train()
    results = []
    for budget in (None, 500):
        objective = objective_of(model, budget)
        model.zero_grad()
        torch.manual_seed(0)  # of the dropout
        batches = [batch_of(part, is_encoder_decoder=False) for part in (EXAMPLES[:3], EXAMPLES[3:])]
        objective.begin_balancing(model, batches)
        total = 0.0
        for batch in batches:
            loss = objective.loss(model, batch, 13)
            loss.backward()
            total += float(loss.detach())
        assert float(objective.balancing.value) > 0.5
        results.append((total, gradient(model)))
    (whole, expected), (chunked, obtained) = results
    assert chunked == pytest.approx(whole, rel=1e-6)
    assert float((obtained - expected).norm()) <= 1e-6 * float(expected.norm())


class LargestWithVocabulary(TorchDispatchMode):
    """Records the largest number of rows of a tensor `[..., vocab]` that is not the transposed weight `[d, vocab]`."""

    def __init__(self, weight):
        super().__init__()
        self.vocab_size, self.width = weight.shape
        self.n_rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == self.vocab_size:
                n_rows = tensor.numel() // self.vocab_size
                self.n_rows = max(self.n_rows, 0 if n_rows == self.width else n_rows)
        return result


def test_no_tensor_of_logits_exceeds_the_budget(model):
    batch = batch_of(EXAMPLES, is_encoder_decoder=model.config.is_encoder_decoder)
    weight = model.get_output_embeddings().weight  # [vocab, d]
    sizes = []
    for n_tokens in (4, batch["labels"].numel()):
        with LargestWithVocabulary(weight) as largest:
            objective_of(model, n_tokens * len(weight)).loss(model, batch).backward()
        sizes.append(largest.n_rows)
    assert sizes == [4, batch["labels"].numel()]  # logits that fit are whole, those of prompts and padding included


@pytest.mark.parametrize("case", ["a cap of the logits", "a scale of the logits", "adapters of the output layer"])
def test_a_model_with_other_logits_keeps_its_own(case, tiny_tokenizer):
    if case == "a cap of the logits":
        model = make_causal_lm("gemma2", tiny_tokenizer)
    elif case == "a scale of the logits":
        model = make_causal_lm("gpt2", tiny_tokenizer)
        forward = model.forward

        def scaled(*arguments, **named):
            output = forward(*arguments, **named)
            output.logits = output.logits / 8
            return output

        model.forward = scaled
    else:
        pytest.importorskip("peft")
        model = make_causal_lm("llama", tiny_tokenizer)
        add_lora(model, {"r": 2, "target_modules": ["lm_head"]}, dropout=False)
    assert not has_linear_head(model)


# --- runs ------------------------------------------------------------------------------------------------------------


def budget_of(alg, model_dir):
    mapping = six_steps("causal", model_dir)
    mapping["alg"] |= alg
    return assemble_supervised(parse_config(mapping)).objective.logits_budget


def test_a_run_has_the_budget_of_its_config(tiny_gpt2_dir):
    assert budget_of({}, tiny_gpt2_dir) == 512 * 2**20 // 4
    assert budget_of({"logits_budget_mb": 1.5}, tiny_gpt2_dir) == 1.5 * 2**20 // 4
    assert budget_of({"logits_budget_mb": None}, tiny_gpt2_dir) is None
    assert budget_of({"training_args": {"label_smoothing_factor": 0.1}}, tiny_gpt2_dir) is None


@pytest.mark.parametrize("key", ["label_smoothing_factor", "torch_compile", "torch_compile_mode"])
def test_a_budget_without_effect_is_an_error(key, tiny_gpt2_dir):
    mapping = six_steps("causal", tiny_gpt2_dir)
    value = {"label_smoothing_factor": 0.1, "torch_compile": True, "torch_compile_mode": "default"}[key]
    mapping["alg"]["training_args"][key] = value
    mapping["alg"]["logits_budget_mb"] = 64
    with raises_at("alg.logits_budget_mb"):
        parse_config(mapping)
    mapping["alg"]["logits_budget_mb"] = None  # true of a run of an older version, too
    parse_config(mapping)


def test_in_bfloat16_the_states_are_those_of_the_trainers_autocast(tiny_gpt2_dir, trainer_of):  # noqa: F811
    losses = []
    for budget in (None, 100):
        mapping = six_steps("causal", tiny_gpt2_dir)
        mapping["alg"]["training_args"] = {"bf16": True, "max_steps": 1, "eval_strategy": "no"}
        trainer = trainer_of(mapping)
        trainer.run.objective.logits_budget = budget
        losses.append(trainer.trainer.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1] != losses[0]


@pytest.fixture
def small_budget(monkeypatch):
    """Budget of a few tokens: the smallest one of a config is too large for batches of tiny models."""
    monkeypatch.setattr("rl4lms_like.offline.assemble_supervised.logits_budget", lambda config, model: 2000)


def stop(*arguments, **named):
    raise StoppedError


@pytest.mark.usefixtures("small_budget")
def test_a_resumed_run_has_the_bytes_of_one_that_was_not_stopped(tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir)
    expected = started(mapping, tmp_path, "whole")
    folder = stopped(mapping, tmp_path, 3, monkeypatch)
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == files_of(expected)


def test_a_run_of_a_version_without_the_key_keeps_whole_logits(tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir)
    folder = stopped({**mapping, "alg": {**mapping["alg"], "logits_budget_mb": None}}, tmp_path, 3, monkeypatch)
    file = folder / "config.json"
    stored = json.loads(file.read_text())
    del stored["alg"]["logits_budget_mb"]
    file.write_text(json.dumps(stored))

    assert resumption(folder).config.alg.logits_budget_mb is None
    found, reasons = find_unfinished(parse_config(mapping), folder)
    assert found is not None and not reasons
    assert found.config.alg.logits_budget_mb is None
    found.lock.release()

    # Another one changes rounding, which the user has to accept.
    with raises_at("alg.logits_budget_mb"):
        resumption(folder, ["alg.logits_budget_mb=64"])
    other = {**mapping, "alg": {**mapping["alg"], "logits_budget_mb": 64}}
    found, reasons = find_unfinished(parse_config(other), folder)
    assert found is None and "logits_budget_mb" in reasons[0]

    # Once accepted, it stays, also for the command that started the run.
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(CrossEntropy, "loss", stop)
        resume(folder, overrides=["alg.logits_budget_mb=64"], accepted=["alg.logits_budget_mb"], quiet=True)
    found, _ = find_unfinished(parse_config(mapping), folder)
    assert found is not None and found.config.alg.logits_budget_mb == 64
    found.lock.release()
