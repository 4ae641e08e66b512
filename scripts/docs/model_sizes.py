"""Write the table of model sizes in docs/scaling.md, from the memory estimates of configs.

    python -m scripts.docs.model_sizes docs/scaling.md

The table is between the lines `<!-- model sizes -->` and `<!-- end of model sizes -->` of the page. Its models have the
shapes of published ones, and no weights. Change `SETUPS` to calculate others.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.config.yaml_file import apply_overrides
from rl4lms_like.core.marked_parts import with_part
from rl4lms_like.estimates.memory import MemoryEstimate, estimate_memory

GPUS_PER_MACHINE = 8
GPU_BYTES = 80 * 10**9
"""Memory of a GPU that is sold as one of 80 GB; it has 85 billion bytes, of which CUDA and NCCL need some."""

POLICY = "alg.policy.args"
BLOCKS = (POLICY, "alg.args", "alg")
"""Blocks that the table leaves out of the names of keys."""

MICRO = "alg.args.micro_batch_size"
SPLIT = {"distributed.strategy": "fsdp"}
ADAPTERS = {f"{POLICY}.peft": {"r": 16, "target_modules": "all-linear"}}
NF4 = {**ADAPTERS, f"{POLICY}.quantization": {"id": "nf4", "double": True}}


def _qwen2(width: int, n_layers: int, n_heads: int, n_kv_heads: int, inner: int, vocab: int) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=width,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        intermediate_size=inner,
        vocab_size=vocab,
        tie_word_embeddings=width < 1000,
    )


SHAPES: dict[str, PretrainedConfig] = {
    "Qwen2.5 0.5B": _qwen2(896, 24, 14, 2, 4864, 151936),
    "Qwen2.5 7B": _qwen2(3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5 32B": _qwen2(5120, 64, 40, 8, 27648, 152064),
    "Llama 3.3 70B": LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
}
"""Model -> its shapes, as in its `config.json` on the Hugging Face Hub."""


@dataclass(frozen=True)
class Setup:
    """A run of one row of the table.

    Args:
        model: in `SHAPES`.
        machines: with `GPUS_PER_MACHINE` each.
        engine_gpus: of each machine, on which vLLM generates; 0: the policy's own model generates.
        keys: keys of the config -> values.
    """

    model: str
    machines: int
    engine_gpus: int
    keys: Mapping[str, Any]

    @property
    def processes_per_machine(self) -> int:
        """Number of processes that train on a machine, each with a GPU."""
        return GPUS_PER_MACHINE - self.engine_gpus

    @property
    def processes(self) -> int:
        """Number of processes that train."""
        return self.machines * self.processes_per_machine


SETUPS = (
    Setup("Qwen2.5 0.5B", 1, 0, {MICRO: 16384}),
    Setup("Qwen2.5 0.5B", 8, 0, {MICRO: 16384}),
    Setup("Qwen2.5 7B", 1, 1, {MICRO: 8192, **SPLIT}),
    Setup("Qwen2.5 7B", 8, 1, {MICRO: 8192, **SPLIT}),
    Setup("Qwen2.5 7B", 1, 1, {MICRO: 8192, **ADAPTERS}),
    Setup("Qwen2.5 32B", 1, 2, {MICRO: 4096, **NF4}),
    Setup("Qwen2.5 32B", 8, 2, {MICRO: 4096, **NF4}),
    Setup("Qwen2.5 32B", 8, 2, {MICRO: 4096, **SPLIT}),
    Setup("Llama 3.3 70B", 1, 4, {MICRO: 2048, **NF4}),
    Setup("Llama 3.3 70B", 8, 4, {MICRO: 2048, **NF4}),
    Setup("Llama 3.3 70B", 8, 4, {MICRO: 2048, **SPLIT, "alg.kl_div.coeff": 0}),
)


def config_of(setup: Setup, models: Path) -> RunConfig:
    """Return the config of a run: GRPO with prompts of 512 and responses of up to 1024 tokens, 64 for each process.

    Args:
        setup: a row of the table.
        models: folder with a folder of each model of `SHAPES`.
    """
    n_responses = 64 * setup.processes
    blocks: dict[str, Any] = {
        "tokenizer": {"model_name": str(models / setup.model)},
        "reward_fn": {"id": "math_equal"},
        "datapool": {"id": "gsm8k", "args": {"path": "problems.jsonl"}},
        "env": {"n_envs": n_responses, "args": {"max_prompt_length": 512, "max_episode_length": 1024}},
        "alg": {
            "id": "grpo",
            "args": {
                "n_episodes": n_responses,
                "minibatch_episodes": n_responses // 4,
                "group_size": 8,
                "importance_correction": "tis" if setup.engine_gpus else "none",
            },
            "kl_div": {"coeff": 0.001},
            "policy": {
                "id": "causal_lm_actor_critic_policy",
                "args": {
                    "model_name": str(models / setup.model),
                    "dtype": "bfloat16",
                    "gradient_checkpointing": True,
                    "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 1024},
                },
            },
        },
        "train_evaluation": {"n_iters": 1, "eval_every": 1, "eval_batch_size": n_responses},
    }
    if setup.engine_gpus:
        engine = {"id": "vllm", "args": {"url": "http://127.0.0.1:8000", "weights_dir": "weights"}}
        blocks["alg"]["policy"]["args"]["engine"] = engine

    overrides = [f"{key}={json.dumps(value)}" for key, value in setup.keys.items()]
    changed, issues = apply_overrides(blocks, overrides)
    config = parse_config(changed, issues=issues)
    assert isinstance(config, RunConfig)
    return config


def estimates(setups: Sequence[Setup] = SETUPS) -> list[tuple[MemoryEstimate, int]]:
    """Return for each setup the memory of one GPU, and the main memory in bytes that a machine needs to load."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        for name, shapes in SHAPES.items():
            shapes.save_pretrained(models / name)

        for setup in setups:
            config = config_of(setup, models)
            estimate = estimate_memory(config, setup.processes, gpu_bytes=GPU_BYTES)

            # Each process reads the networks in float32, its rows of them if they are split, else all; adapters share
            # one base.
            n_networks = 1
            if config.alg.kl_div.coeff > 0 and config.alg.policy.args.get("peft") is None:
                n_networks = 2
            n_parts = setup.processes if config.distributed.strategy == "fsdp" else 1
            loading = 4 * estimate.n_parameters * n_networks * setup.processes_per_machine // n_parts
            results.append((estimate, loading))
    return results


def rows(setups: Sequence[Setup] = SETUPS) -> list[str]:
    """Return a row of the table for each setup."""
    lines = []
    for setup, (estimate, loading) in zip(setups, estimates(setups), strict=True):
        keys = ", ".join(f"`{_written(key, value)}`" for key, value in setup.keys.items())
        memory = f"{_gigabytes(estimate.lower)} to {_gigabytes(estimate.upper)} GB"
        fits = "yes" if estimate.upper <= GPU_BYTES else f"no: {_largest_part(estimate)}"
        gpus = f"{setup.processes} + {setup.machines * setup.engine_gpus}"
        lines.append(f"| {setup.model} | {gpus} | {keys} | {memory} | {fits} | {_gigabytes(loading)} GB |")
    return lines


def table() -> str:
    """Return the table as Markdown."""
    heading = "| model | GPUs: training + vLLM | keys | memory of a GPU | fits 80 GB | main memory of a machine |"
    return "\n".join([heading, "|---|---|---|---|---|---|", *rows()]) + "\n"


def _written(key: str, value: Any) -> str:
    """Return a key without the blocks of `BLOCKS`, and its value, as in YAML."""
    for block in BLOCKS:
        key = key.removeprefix(f"{block}.")
    text = yaml.safe_dump({key: value}, default_flow_style=True, sort_keys=False, width=1000)
    return text.strip()[1:-1]


def _largest_part(estimate: MemoryEstimate) -> str:
    """Return in which part of the run the peak is."""
    peaks = {"the update": estimate.update, "the rollout": estimate.rollout}
    return max(peaks, key=lambda part: peaks[part])


def _gigabytes(size: int) -> str:
    return f"{size / 10**9:,.0f}"


def with_table(page: str) -> str:
    """Return a page with the table between its marks."""
    return with_part(page, "model sizes", f"\n{table()}\n")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_table(file.read_text(encoding="utf-8")), encoding="utf-8")
