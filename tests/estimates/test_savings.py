"""The cheapest change with which a run fits: it fits, nothing cheaper does, and `check` prints what can be pasted."""

from __future__ import annotations

import re
import shlex
from math import prod

import pytest
from transformers import LlamaConfig

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import apply_overrides, apply_values
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.estimates.savings import advice, cheapest_change
from rl4lms_like.preview import preview
from tests.configs import run_blocks, supervised_blocks


@pytest.fixture
def blocks(tmp_path):
    """A PPO run of a model in which weights and activations need about the same."""
    shapes = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=2000,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    shapes.save_pretrained(tmp_path / "model")
    blocks = run_blocks()
    blocks["env"] = {"n_envs": 16, "args": {"max_prompt_length": 60, "max_episode_length": 60}}
    blocks["alg"]["args"] = {"n_steps": 60, "batch_size": 960, "n_epochs": 1}
    blocks["alg"]["policy"]["args"] |= {
        "model_name": str(tmp_path / "model"),
        "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 60},
    }
    return blocks


def with_memory(gpu_bytes):
    return lambda config, n_processes: estimate_memory(config, n_processes, gpu_bytes=gpu_bytes)


def search(blocks, fraction):
    """Return the cheapest change of a run, and the memory of the GPU, which is a fraction of what the run needs."""
    config = parse_config(blocks)
    needed = estimate_memory(config, gpu_bytes=1).upper
    estimate_of = with_memory(int(fraction * needed))
    return cheapest_change(config, estimate_of(config, 1), estimate_of), int(fraction * needed)


def test_smaller_passes_come_first_and_are_not_smaller_than_needed(blocks):
    trial, available = search(blocks, 0.95)
    assert trial.fits and list(trial.keys) == ["alg.args.micro_batch_size"]
    assert trial.keys["alg.args.micro_batch_size"] == 16 * 120 // 2  # half of the only pass
    assert trial.estimate.upper <= available


@pytest.mark.parametrize("fraction", [0.5, 0.12])
def test_the_changes_fit_and_each_is_needed(blocks, fraction):
    trial, available = search(blocks, fraction)
    assert trial.fits and trial.estimate.upper <= available

    # As the options of the command line change the config.
    changed = with_options(blocks, trial.options.partition(" on ")[0])
    assert estimate_memory(changed, trial.n_processes, gpu_bytes=available).upper == trial.estimate.upper
    for key in trial.keys:
        if not key.endswith("peft"):  # quantization needs it
            others = {other: value for other, value in trial.keys.items() if other != key}
            fewer = parse_config(with_values(blocks, others))
            assert estimate_memory(fewer, trial.n_processes, gpu_bytes=available).upper > available, key


def test_moments_leave_the_device_if_the_rollout_needs_the_most(blocks):
    blocks["env"]["n_envs"] = 256
    blocks["alg"]["args"]["micro_batch_size"] = 120
    trial, available = search(blocks, 0.95)
    assert trial.fits and trial.keys == {"alg.policy.args.offload": "moments"}
    assert trial.estimate.upper <= available


def with_values(blocks, values):
    changed, issues = apply_values(blocks, values, "test")
    assert not issues
    return changed


def with_options(blocks, options):
    """Return the config with options as a user pastes them into a shell."""
    words = shlex.split(options)
    assert set(words[::2]) == {"--set"}
    changed, issues = apply_overrides(parse_config(blocks).to_dict(), words[1::2])
    assert not issues
    return parse_config(changed)


def test_what_cannot_fit_is_reported_with_the_smallest(blocks):
    config = parse_config(blocks)
    estimate_of = with_memory(1000)
    line = advice(config, estimate_of(config, 1), estimate_of)
    assert line.startswith("no change fits; the least memory is needed with: --set ")
    assert "nproc_per_node 8" in line


def test_a_run_with_split_weights_needs_only_more_processes(blocks):
    config = parse_config(blocks | {"distributed": {"strategy": "fsdp"}})
    enough = estimate_memory(config, 8, gpu_bytes=1).upper

    def estimate_of(changed, n_processes):
        return estimate_memory(changed, n_processes, gpu_bytes=enough if n_processes == 8 else 1)

    line = advice(config, estimate_of(config, 1), estimate_of)
    assert line.startswith("cheapest change that fits: on 8 GPUs (torchrun --nproc_per_node 8): ")


def test_a_change_that_the_config_refuses_is_not_tried(blocks):
    blocks["alg"]["policy"]["args"]["compile"] = True  # not with split weights, nor with a quantized base
    config = parse_config(blocks)
    estimate_of = with_memory(1000)
    keys = cheapest_change(config, estimate_of(config, 1), estimate_of).keys
    assert "distributed.strategy" not in keys and "alg.policy.args.quantization" not in keys
    assert "alg.policy.args.peft" in keys


def test_check_prints_the_change(blocks):
    output = "".join(preview(parse_config(blocks), gpu_bytes=10**8))
    verdict, change = [line for line in output.splitlines() if "GPU memory" in line or "cheapest change" in line]
    assert verdict.startswith("does not fit: ") and change.startswith("cheapest change that fits: --set ")
    assert "cheapest" not in "".join(preview(parse_config(blocks), gpu_bytes=10**12))


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "80G"])
def test_a_memory_that_is_no_number_above_0_is_refused(size, capsys):
    with pytest.raises(SystemExit):
        main(["check", "run.yml", f"--gpu_memory={size}"])
    assert f"--gpu_memory: expected a number above 0, got '{size}'" in capsys.readouterr().err


def test_a_supervised_run_keeps_the_size_of_its_step(tiny_gpt2_dir):
    blocks = supervised_blocks()
    blocks["tokenizer"]["model_name"] = blocks["alg"]["model_name"] = str(tiny_gpt2_dir)
    blocks["alg"] |= {"model_type": "causal", "training_args": {"per_device_train_batch_size": 64}}
    blocks["datapool"] = {"id": "film_opinions", "args": {"n_train": 6, "n_eval": 3}}
    config = parse_config(blocks)
    whole = re.search(r"fits: .* to (\d+) MiB", "".join(preview(config, gpu_bytes=10**12)))
    output = "".join(preview(config, gpu_bytes=int(0.8 * int(whole[1]) * 2**20)))
    (change,) = re.findall(r"cheapest change that fits: (.*): ", output)
    step = dict(word.split("=") for word in shlex.split(change)[1::2])
    assert {name.rpartition(".")[2] for name in step} == {"per_device_train_batch_size", "gradient_accumulation_steps"}
    assert prod(int(value) for value in step.values()) == 64
