"""Where the memory does not suffice, the message says in which part of the run, and what needs less there."""

from __future__ import annotations

import json
import mmap

import numpy as np
import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.policies.generation import TextGenerator
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import OutOfMemoryError
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from tests.configs import supervised_blocks

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1 GiB is free. "
    "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


def run(config, folder):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name="run", quiet=True)


@pytest.fixture
def full(monkeypatch):
    """Makes a method raise what torch raises on a GPU that is full, at its n-th call."""

    def make(owner, name, at_call=1):
        original, calls = getattr(owner, name), []

        def method(*args, **kwargs):
            calls.append(None)
            if len(calls) == at_call:
                raise torch.OutOfMemoryError(CUDA)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, method)

    return make


@pytest.mark.parametrize(
    ("owner", "method", "at_call", "part", "key"),
    [
        (TextGenerator, "generate", 1, "evaluation", "a smaller train_evaluation.eval_batch_size (is 4)"),
        (LMActorCriticPolicy, "generate", 5, "generation", "a smaller env.n_envs (is 4)"),
        (LMActorCriticPolicy, "score_sampled", 2, "scoring", "a smaller alg.args.micro_batch_size (now null)"),
        (LMActorCriticPolicy, "evaluate_actions", 3, "update", "alg.policy.args.gradient_checkpointing: true"),
        (torch.optim.AdamW, "step", 3, "update", "alg.policy.args.critic: shared"),
    ],
)
def test_the_part_is_named_with_what_needs_less_there(owner, method, at_call, part, key, full, tiny_config, tmp_path):
    full(owner, method, at_call)
    with pytest.raises(OutOfMemoryError) as error:
        run(tiny_config, tmp_path)
    first, *advice = str(error.value).splitlines()
    assert first == f"out of memory in the {part}: {CUDA[: CUDA.index(' If')]}"
    assert "estimate: update " in advice[0] and "optimizer state" in advice[0]
    assert advice[1].strip().startswith("memory of the machine: ")
    assert key in advice[2]
    assert isinstance(error.value.__cause__.__cause__, torch.OutOfMemoryError)
    assert f"out of memory in the {part}" in (tmp_path / "rl4lm_exps" / "run" / "log.txt").read_text()


def test_the_pass_that_records_the_credit_of_tokens_is_scoring(monkeypatch, tiny_config, tmp_path):
    original = LMActorCriticPolicy.evaluate_actions

    def full_without_gradients(self, *args, **kwargs):  # those of the update have gradients
        if not torch.is_grad_enabled():
            raise torch.OutOfMemoryError(CUDA)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LMActorCriticPolicy, "evaluate_actions", full_without_gradients)
    with pytest.raises(OutOfMemoryError, match="out of memory in the scoring") as error:
        run(tiny_config, tmp_path)
    assert "a smaller alg.args.micro_batch_size" in str(error.value)


def test_what_the_algorithm_refuses_is_not_advised(full, tiny_config, tmp_path):
    full(LMActorCriticPolicy, "action_scores")
    tiny_config["alg"] |= {"id": "grpo", "args": {"n_steps": 4, "group_size": 2}}
    with pytest.raises(OutOfMemoryError) as error:
        run(tiny_config, tmp_path)
    assert "peft" in str(error.value) and "critic: shared" not in str(error.value)


def test_what_is_set_already_is_not_advised(full, tiny_config, tmp_path):
    full(LMActorCriticPolicy, "evaluate_actions")
    tiny_config["alg"]["policy"]["args"] |= {"gradient_checkpointing": True, "critic": "shared"}
    tiny_config["alg"]["args"]["micro_batch_size"] = 1
    with pytest.raises(OutOfMemoryError) as error:
        run(tiny_config, tmp_path)
    advice = str(error.value).splitlines()[-1]
    assert "logits_budget_mb (is 512)" in advice
    assert not any(key in advice for key in ("checkpointing", "critic", "micro_batch_size"))


def test_a_model_that_does_not_fit_is_no_damaged_model(full, tiny_config, tmp_path):
    from transformers import AutoModelForCausalLM

    full(AutoModelForCausalLM, "from_pretrained", at_call=2)  # the first reads no weights
    with pytest.raises(OutOfMemoryError, match=r"(?s)CUDA.*kl_div.coeff: 0"):
        run(tiny_config, tmp_path)


def test_what_is_advised_of_the_reference_model_can_be_done(tiny_config):
    """A coefficient of 0 with a target would be refused."""
    tiny_config["alg"]["kl_div"] = {"coeff": 0}
    parse_config(tiny_config)


def test_a_gpu_that_cannot_even_say_how_full_it_is_hides_nothing(full, tiny_config, tmp_path, monkeypatch):
    full(LMActorCriticPolicy, "evaluate_actions", at_call=3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: torch.zeros(-1))
    with pytest.raises(OutOfMemoryError) as caught:
        run(tiny_config, tmp_path)
    assert caught.value.part == "update" and "2.00 GiB" in str(caught.value)


def test_such_a_run_goes_on_where_it_was(full, tiny_config, tmp_path):
    full(LMActorCriticPolicy, "evaluate_actions", at_call=4)  # the last of the first update
    with pytest.raises(OutOfMemoryError):
        run(tiny_config, tmp_path)
    run(tiny_config, tmp_path)
    lines = (tmp_path / "rl4lm_exps" / "run" / "training_info.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3]


def test_a_supervised_run_says_the_same(full, tiny_gpt2_dir, tmp_path):
    full(torch.optim.AdamW, "step", 2)
    blocks = supervised_blocks()
    blocks["tokenizer"]["model_name"] = blocks["alg"]["model_name"] = str(tiny_gpt2_dir)
    blocks["datapool"] = {"id": "tests.offline.supervised.test_trainer:Colours"}
    blocks["alg"] |= {"model_type": "causal", "training_args": {"per_device_train_batch_size": 8}}
    blocks["train_evaluation"]["metrics"] = []
    with pytest.raises(OutOfMemoryError) as error:
        run(blocks, tmp_path)
    assert error.value.part == "update"
    for key in ("alg.training_args.per_device_train_batch_size", "alg.logits_budget_mb (is 512", "alg.peft: {r: 8}"):
        assert key in str(error.value)


@pytest.mark.parametrize(
    "exhaust",
    [
        lambda: torch.empty(2**52, dtype=torch.uint8),
        lambda: np.zeros(2**52, dtype="u1"),
        lambda: b"x" * 2**60,
        lambda: mmap.mmap(-1, 2**60),
    ],
    ids=["torch", "numpy", "python", "system"],
)
def test_main_memory_runs_out_in_words_too(exhaust):
    with pytest.raises(OutOfMemoryError) as caught, blame_memory_errors_on("scoring"):
        exhaust()
    assert caught.value.part == "scoring"


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError), blame_memory_errors_on("update"):
        raise RuntimeError("shape '[2]' is invalid for input of size 3")
    with (
        pytest.raises(OutOfMemoryError) as caught,
        blame_memory_errors_on("update"),
        blame_memory_errors_on("generation"),
    ):
        raise torch.OutOfMemoryError(CUDA)
    assert caught.value.part == "generation"
