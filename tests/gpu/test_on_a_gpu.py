"""Runs on the first GPU of this machine; without a GPU every test is skipped.

    python -m pytest tests/gpu

Tests of other folders whose configs name no device use a GPU, too, if there is one, and so do the programs that count
waits and compare devices (`tests/policies/second_device.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from rl4lms_like.algorithms.policy_gradient import GRPO
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.policies.generation import TextGenerator
from rl4lms_like.run import resume, train_config
from rl4lms_like.testing import models
from tests.algorithms.test_update import build
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import PAIRS, blocks

DEVICE = "cuda"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for `deterministic`; CUDA reads it when it starts
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 12}
COMPILED = {**SAMPLED, "cache_implementation": "static", "max_cache_len": 40}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def trained(mapping: dict[str, Any], folder: Any) -> Any:
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name="run", quiet=True)


@pytest.mark.parametrize(("family", "algorithm"), PAIRS)
def test_a_resumed_run_has_the_bytes_of_the_whole_one(family, algorithm, tiny_gpt2_dir, tiny_t5_dir, tmp_path):
    mapping = blocks(family, tiny_gpt2_dir if family == "causal" else tiny_t5_dir, algorithm)
    mapping |= {"device": DEVICE, "deterministic": True}
    whole = trained(mapping, tmp_path / "whole")

    mapping["train_evaluation"] = {**mapping["train_evaluation"], "n_iters": 3}
    resumed = resume(trained(mapping, tmp_path / "stopped"), overrides=["train_evaluation.n_iters=5"], quiet=True)
    weights = "model/model.safetensors"
    assert files_of(whole)[weights] == files_of(resumed)[weights]


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen2", "gemma2"])
def test_log_probs_are_those_of_the_processor(architecture):
    model = models.make_causal_lm(architecture, models.make_tokenizer()).eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        on_processor = model(input_ids=ids).logits.log_softmax(-1)
        on_gpu = model.to(DEVICE)(input_ids=ids.to(DEVICE)).logits.log_softmax(-1)
    torch.testing.assert_close(on_gpu.cpu(), on_processor, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("options", [{}, {"generation_kwargs": COMPILED}, {"peft": LORA}], ids=["", "compiled", "lora"])
@pytest.mark.parametrize("algorithm", [PPO, GRPO])
def test_the_ratios_of_the_first_minibatch_are_one(algorithm, options, dtype, tolerance, tiny_gpt2_dir, tiny_tokenizer):
    arguments = {"n_episodes": 16, "minibatch_episodes": 8, "group_size": 4} if algorithm is GRPO else {}
    kwargs = {"generation_kwargs": SAMPLED, "dtype": dtype, **options}
    built = build(algorithm, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs=kwargs, device=DEVICE, length=12, **arguments)
    before = {name: weight.clone() for name, weight in built.policy.named_parameters() if weight.requires_grad}
    for iteration in range(2):
        built.learn_iteration(iteration, 2)
        assert built.logger.name_to_value["train/ratio_gap"] < tolerance
    assert all(weight.device.type == DEVICE for weight in before.values())
    assert any(
        not torch.equal(before[name], weight) for name, weight in built.policy.named_parameters() if name in before
    )


def test_compiled_decoding_samples_from_the_policy():
    texts = TextGenerator(models.make_causal_lm("llama", models.make_tokenizer()).eval().to(DEVICE))
    ids = torch.randint(5, 60, (6, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    greedy = []
    for kwargs in (SAMPLED, COMPILED):
        sampled = texts.generate(
            ids, torch.ones_like(ids), eos_token_ids=[1], generation_kwargs=kwargs, seed=3, record_log_prob=True
        )
        assert bool(sampled.behavior_log_prob.isfinite().all())
        kwargs = {**kwargs, "do_sample": False}
        greedy.append(
            texts.generate(ids, torch.ones_like(ids), eos_token_ids=[1], generation_kwargs=kwargs).response_ids
        )
    assert torch.equal(*greedy)


def test_a_model_that_was_trained_on_a_gpu_is_evaluated_without_one(tiny_gpt2_dir, tmp_path):
    run = trained(blocks("causal", tiny_gpt2_dir, "ppo") | {"device": "auto"}, tmp_path)
    command = [sys.executable, "-m", "rl4lms_like", "evaluate", str(run)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "length/words" in done.stdout
