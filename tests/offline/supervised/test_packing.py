"""A supervised loss of packed rows is that of padded ones, and a run without the key is the run it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.packed_rows import PackedRows, RowPacking
from rl4lms_like.core.sample import Sample
from rl4lms_like.offline.assemble_supervised import assemble_supervised, packed_shape
from rl4lms_like.policies.loading import load_model
from rl4lms_like.run import resume
from rl4lms_like.testing.models import make_causal_lm, save_model
from rl4lms_like.training.examples import Examples
from rl4lms_like.training.resuming.resume import find_unfinished, other_computations, resumption
from tests.config_errors import raises_at
from tests.expert_models import save_experts
from tests.offline.supervised.test_logits_budget import EXAMPLES, batch_of, gradient, objective_of
from tests.offline.supervised.test_resume import blocks, started, stopped
from tests.offline.supervised.test_trainer import Colours
from tests.policies.test_packing import shapes_of_passes
from tests.robustness.killed_runs import files_of

EXACT = 1e-6
UNEVEN = [*EXAMPLES, ([31, 32, 33], [*range(40, 60), 1])]
N_LEARNED = sum(len(reference) for _, reference in UNEVEN)
SMALL_BUDGET = 5 * 320  # logits


def loss_and_gradient_of_step(objective, model, parts):
    """Of an optimizer step with these micro-batches."""
    model.zero_grad()
    batches = [batch_of(part, is_encoder_decoder=False) for part in parts]
    objective.begin_balancing(model, batches)
    total = 0.0
    for batch in batches:
        loss = objective.loss(model, batch, N_LEARNED)
        loss.backward()
        total += float(loss.detach())
    return total, gradient(model)


@pytest.mark.parametrize(("budget", "smoothing"), [(None, 0.0), (SMALL_BUDGET, 0.0), (None, 0.1)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_loss_and_gradient_are_those_of_padded_rows(family, budget, smoothing, tiny_tokenizer, tmp_path):
    if family == "mixtral":
        folder = save_experts(tmp_path, family, tiny_tokenizer, output_router_logits=True, router_aux_loss_coef=0.3)
        model, _ = load_model(AutoModelForCausalLM, str(folder))
        model.train()  # only then there is a balancing loss; the model has no dropout
    else:
        model = make_causal_lm(family, tiny_tokenizer, scale=5.0).eval()
    objective = replace(objective_of(model, budget), label_smoothing=smoothing)
    loss, expected = loss_and_gradient_of_step(objective, model, [UNEVEN])

    objective.packing = RowPacking(model.config.hidden_size)
    for parts in ([UNEVEN], [UNEVEN[4:], UNEVEN[:2], UNEVEN[2:3], UNEVEN[3:4]]):
        packed_loss, packed_gradient = loss_and_gradient_of_step(objective, model, parts)
        assert packed_loss == pytest.approx(loss, rel=EXACT)
        assert float((packed_gradient - expected).norm()) <= EXACT * float(expected.norm())
    batch = batch_of(UNEVEN, is_encoder_decoder=False)
    shapes = shapes_of_passes(model, lambda: objective.loss(model, batch, N_LEARNED))
    assert shapes == [(2, 28)]  # instead of 6 rows of 24


pack = PackedRows.pack


# --- runs ------------------------------------------------------------------------------------------------------------


class Uneven(Colours):
    """References of one word to eight."""

    @classmethod
    def prepare(cls, split: str):
        texts = [" ".join(["blue"] * (1 + i**2 % 8)) for i in range(24 if split == "train" else 3)]
        return cls([Sample(f"{split}_{i}", "The sea is", [text]) for i, text in enumerate(texts)])


def packed_blocks(model, **alg):
    mapping = blocks("causal", model, alg={"packing": "auto", **alg})
    mapping["tokenizer"]["max_length"] = 80
    mapping["datapool"] = {"id": f"{__name__}:Uneven"}
    return mapping


def test_a_family_that_reads_the_text_before_stays_padded(tmp_path, tiny_tokenizer, caplog):
    folder = save_model(tmp_path, make_causal_lm("opt", tiny_tokenizer, scale=5.0), tiny_tokenizer)
    run = assemble_supervised(parse_config(packed_blocks(folder)))
    assert run.objective.packing is None
    assert f"({str(folder)!r}): rows are padded" in caplog.text


def test_a_resumed_run_has_the_bytes_of_one_that_was_not_stopped(tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = packed_blocks(tiny_gpt2_dir)
    with monkeypatch.context() as patch:
        passes = []
        patch.setattr(PackedRows, "pack", lambda *args: passes.append(1) or pack(*args))
        expected = started(mapping, tmp_path, "whole")
    assert len(passes) >= 2 * 6  # ids and labels of each step, and of evaluations
    folder = stopped(mapping, tmp_path, 3, monkeypatch)
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == files_of(expected)


def test_check_estimates_the_packed_rows_of_the_longest_examples(tiny_gpt2_dir):
    config = parse_config(packed_blocks(tiny_gpt2_dir))
    examples = Examples([{"input_ids": [3] * n, "labels": [3] * n} for n in (5, 60, *[20] * 9, 4)])
    n_rows, width = packed_shape(config, examples)  # 60 and 7 times 20, in a batch of 8
    assert n_rows < 8 and width >= 60 and n_rows * width < 8 * 60
    assert packed_shape(config, Examples(examples.rows[2:-1])) is None
    assert packed_shape(parse_config(packed_blocks(tiny_gpt2_dir, packing=None)), examples) is None


def test_a_run_of_a_version_without_the_key_keeps_padded_rows(tmp_path, monkeypatch, tiny_gpt2_dir):
    folder = stopped(packed_blocks(tiny_gpt2_dir, packing=None), tmp_path, 2, monkeypatch)
    file = folder / "config.json"
    stored = json.loads(file.read_text())
    del stored["alg"]["packing"]
    file.write_text(json.dumps(stored))
    assert resumption(folder).config.alg.packing is None
    assert not other_computations(stored, json.loads(json.dumps(resumption(folder).config.to_dict())))

    # Another value changes rounding, which the user has to accept.
    with raises_at("alg.packing"):
        resumption(folder, ["alg.packing=auto"])
    found, reasons = find_unfinished(parse_config(packed_blocks(tiny_gpt2_dir)), folder)
    assert found is None and "packing" in reasons[0]
