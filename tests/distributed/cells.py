"""Runs that several processes train together, compared by `test_several_processes.py` with those of one process."""

from __future__ import annotations

import copy
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.ranks import Ranks, process_ranks
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.tracking.base import SilentTracker, Tracker
from rl4lms_like.training.assemble import Run, assemble
from rl4lms_like.training.config.run_config import parse_config
from rl4lms_like.training.config.yaml_file import apply_values
from rl4lms_like.training.trainer import OnPolicyTrainer
from tests.builders import LowTokens

N_ENVS = 6
"""Divisible by two and by three processes; two processes also divide it in groups of three."""
STATEFUL = "stateful"

BASE: dict[str, Any] = {
    "tokenizer": {"model_name": "gpt2"},
    "reward_fn": {"id": "tests.builders:LowTokens"},
    "datapool": {"id": "dummy_pool", "args": {"prompt": "Count with me:", "n_samples": 6}},
    "env": {
        "n_envs": N_ENVS,
        "args": {"max_prompt_length": 16, "max_episode_length": 6, "terminate_on_eos": True, "context_start_token": 0},
    },
    "alg": {
        "id": "ppo",
        "args": {"n_steps": 6, "learning_rate": 1e-3},
        "kl_div": {"coeff": 0.01, "target_kl": 0.2, "norm_reward": True},
        "policy": {
            "id": "causal_lm_actor_critic_policy",
            "args": {
                "model_name": "gpt2",
                "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 6},
                # AdamW's default turns the rounding errors of gradients that are 0 (biases of keys) into full steps.
                "optimizer_kwargs": {"eps": 1e-5},
            },
        },
    },
    "train_evaluation": {
        "eval_batch_size": 2,
        "n_iters": 3,
        "eval_every": 3,
        "save_every": 2,
        "max_eval_samples": 5,
        "metrics": [{"id": "increasing_numbers", "args": {"min_tokens": 8}}, {"id": "length"}],
    },
}
POLICY = "alg.policy.args"
SEPARATE = {f"{POLICY}.value_head_init": "default"}
MINIBATCHES = {"alg.args.batch_size": 14, "alg.args.n_epochs": 2}
MASKS = {"alg.id": "nlpo", f"{POLICY}.top_mask": 20, "alg.policy.id": "maskable_causal_lm_actor_critic_policy"}
GROUPS = {"alg.args.group_size": 3, "alg.kl_div.placement": "loss", "alg.kl_div.norm_reward": False}
SEQ2SEQ = {"alg.policy.id": "seq2seq_lm_actor_critic_policy"}

CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("gpt2", {**SEPARATE, **MINIBATCHES, "alg.args.critic_pretrain": {"max_rollouts": 1}}),
    "ppo_of_minibatches": (
        "gpt2",
        {**SEPARATE, **MINIBATCHES, "alg.args.normalize_advantage": True, "alg.args.micro_batch_size": 8},
    ),
    "ppo_t5": (
        "t5",
        {**SEPARATE, **MINIBATCHES, **SEQ2SEQ, "alg.args.target_kl": 0.001, "alg.args.ratio_band": [0.8, 1.2]},
    ),
    "nlpo": ("gpt2", {**SEPARATE, **MINIBATCHES, **MASKS, f"{POLICY}.target_update_iterations": 2}),
    "a2c": ("gpt2", {**SEPARATE, "alg.id": "a2c", "alg.args.bootstrap_truncated": True}),
    "trpo": ("gpt2", {**SEPARATE, "alg.id": "trpo", "alg.args.batch_size": 14, "alg.args.target_kl": 0.01}),
    "grpo": ("gpt2", {**GROUPS, **MINIBATCHES, "alg.id": "grpo"}),
    "dapo_t5": (
        "t5",
        {
            **GROUPS,
            **SEQ2SEQ,
            "alg.id": "dapo",
            "alg.args.batch_size": 14,
            "alg.args.group_size": 3,
            "alg.args.dynamic_sampling": 3,
            "alg.kl_div.coeff": 0.0,
            "alg.kl_div.target_kl": None,
            "alg.kl_div.placement": "reward",
        },
    ),
}
"""Name -> family of the model, and changes of `BASE`."""
OF_THREE = ("ppo_of_minibatches", "ppo_t5", "trpo")
"""Cells that three processes train too; a minibatch there may have fewer episodes than processes."""


class Tired(LowTokens):
    """A reward that depends on the number of its calls in this process, and on a global generator."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> float:
        self.calls += 1
        return super().__call__(*args) / self.calls + 0.01 * random.random()

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def config_of(cell: str, models: Path) -> Any:
    """Return the config of a cell; `models` contains the models `gpt2` and `t5`."""
    family, changes = CELLS.get(
        cell, ("gpt2", {f"{POLICY}.dropout": True, "reward_fn.id": "tests.distributed.cells:Tired"})
    )
    model = str(models / family)
    named = {"tokenizer.model_name": model, f"{POLICY}.model_name": model}
    blocks, issues = apply_values(copy.deepcopy(BASE), {**named, **changes}, "the cell")
    return parse_config(blocks, issues=issues)


def run_cell(cell: str, models: Path, output: Path, ranks: Ranks, resume_from: Path | None = None) -> None:
    """Train a cell, and save the weights of each process."""
    config = config_of(cell, models)
    run = assemble(config, ranks)
    if cell in CELLS:
        sample_by_episode(run)
    data = config.to_dict()
    if ranks.is_main:
        tracker = Tracker(output, data, "cells", cell, quiet=True, resume=resume_from is not None)
    else:
        tracker = SilentTracker(output / "cells" / cell, data)
    with tracker:
        OnPolicyTrainer(run, tracker, resume_from=resume_from).train_and_eval()
    save_file(run.policy.training_state(), output / f"{cell}.rank{ranks.rank}.safetensors")


def run_and_resume(models: Path, output: Path, ranks: Ranks) -> None:
    """Train a cell whose processes have random numbers and rewards of their own; resume a copy from its checkpoint."""
    run_cell(STATEFUL, models, output / "whole", ranks)
    ranks.from_main(lambda: shutil.copytree(output / "whole", output / "resumed"))
    checkpoint = output / "resumed" / "cells" / STATEFUL / "checkpoints" / "iteration_00002"
    run_cell(STATEFUL, models, output / "resumed", ranks, resume_from=checkpoint)


def sample_by_episode(run: Run) -> None:
    """Draw each episode of a rollout with its own seed, so that the texts do not depend on the number of processes."""
    policy, ranks, n_batches = run.policy, run.ranks, 0
    generate = policy.generate

    def by_episode(ids: Any, mask: Any, *, generation_kwargs: Any = None, **options: Any) -> EpisodeBatch:
        nonlocal n_batches
        if "max_new_tokens" not in options:  # an evaluation, which has the same batches in any number of processes
            return generate(ids, mask, generation_kwargs=generation_kwargs, **options)
        n_batches += 1
        first = ranks.rank * len(ids)
        seeds = [derived_seed(n_batches, "episode", first + row) for row in range(len(ids))]
        rows = [generate(ids[i : i + 1], mask[i : i + 1], **{**options, "seed": seed}) for i, seed in enumerate(seeds)]
        return EpisodeBatch.concatenated([replace(row, group_ids=None, prompt_rows=None) for row in rows])

    policy.generate = by_episode


def train_in_group(rank: int, n_ranks: int, port: int, models: Path, output: Path) -> None:
    """Train all cells of a group of processes, in one of them; starting a group takes longer than most cells."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with process_ranks(120) as ranks:
        for cell in CELLS if n_ranks == 2 else OF_THREE:
            run_cell(cell, models, output, ranks)
        if n_ranks == 2:
            run_and_resume(models, output, ranks)
