"""Runs that several processes train together, compared by `test_several_processes.py` with those of one process."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import PreferenceConfig, RunConfig, SupervisedConfig
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.assemble_supervised import SupervisedRun, assemble_supervised
from rl4lms_like.offline.reference_trainer import trained
from rl4lms_like.offline.trainer import SupervisedTrainer
from rl4lms_like.on_policy.assemble import AssembledRun, assemble
from rl4lms_like.on_policy.trainer import OnPolicyTrainer
from rl4lms_like.policies.loading import load_model
from rl4lms_like.policies.optimizers import optimizer_class_of
from rl4lms_like.policies.parity import probe_episodes
from rl4lms_like.policies.sharding import is_split, like, process_mesh, whole
from rl4lms_like.policies.teacher_forcing import CausalReader
from rl4lms_like.policies.unread_weights import UnreadTensor, tensors_in_parts, tensors_without_matrices
from rl4lms_like.system.ranks import Ranks, process_ranks
from rl4lms_like.tracking.base import SilentTracker, Tracker
from rl4lms_like.training.resuming.checkpoints import write_rows_of_processes
from rl4lms_like.training.resuming.states import load_optimizer, load_weights, optimizer_state
from tests.builders import LowTokens
from tests.offline.preferences.preference_runs import blocks

N_ENVS = 6
"""Divisible by two and by three processes; two processes also divide it in groups of three."""
STATEFUL = "stateful"
STATEFUL_OFFLINE = "dpo_with_dropout"
STATEFUL_SPLIT = "dpo_with_dropout_and_split_weights"
STATEFUL_FSDP = "stateful_fsdp"
STATEFUL_ADAPTERS = "stateful_adapters"
DIALOGUES = "dialogues"
STATEFUL_AHEAD = "stateful_ahead"
ENGINE_WITH_ADAPTERS = "fsdp_engine_with_adapters"
ENGINE_OF_ADAPTERS = "fsdp_engine_of_adapters"
MERGED_ON_SAVE = "fsdp_ppo_with_adapters_t5"
QUANTIZED = "fsdp_grpo_with_quantized_base"
PPO_IN_8_BITS = "fsdp_ppo_t5"
KTO_IN_8_BITS = "kto_t5_with_split_weights"
TOLERANCES = {PPO_IN_8_BITS: 1e-4, KTO_IN_8_BITS: 1e-4}
"""Largest difference from one process after more than ten steps, of cells for which it is not 1e-5: the rounding error
of a gradient that is summed in another order can change the code of a moment."""
CHECKPOINTS = {
    STATEFUL: "iteration_00002",
    STATEFUL_FSDP: "iteration_00001",
    STATEFUL_OFFLINE: "checkpoint-3",
    STATEFUL_SPLIT: "checkpoint-3",
    DIALOGUES: "iteration_00002",
    STATEFUL_AHEAD: "iteration_00002",
}
"""Runs whose processes draw numbers of their own -> checkpoint from which a copy is resumed."""

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
FSDP = {"distributed.strategy": "fsdp", "train_evaluation.n_iters": 2, "train_evaluation.save_every": 1}
IN_PARTS = {"distributed.checkpoint": "split"}
AVERAGED = {
    "train_evaluation.average": {"decay": 0.5},
    "train_evaluation.callbacks": [{"id": "tests.callbacks.test_callbacks:Counting"}],
}
SMALL_STEPS = {"alg.args.critic_learning_rate": 1e-4}
"""For a critic that diverges with the learning rate of the others: a change of its weights in the last bit would grow
to 1e-5 to 1e-3, also in one process."""
SEQ2SEQ = {"alg.policy.id": "seq2seq_lm_actor_critic_policy"}

AHEAD = {**GROUPS, "alg.id": "grpo", "datapool.sampler": {"id": "difficulty"}, f"{POLICY}.engine.ahead": 1}

ADAPTERS = {
    f"{POLICY}.peft": {"target_modules": "all-linear"},
    f"{POLICY}.speedups": {"merged_adapters": False},  # one process could merge them, several could not
}

CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("gpt2", {**SEPARATE, **MINIBATCHES, **SMALL_STEPS, "alg.args.critic_pretrain": {"max_rollouts": 1}}),
    "ppo_of_minibatches": (
        "gpt2",
        {
            **SEPARATE,
            **MINIBATCHES,
            **AVERAGED,
            "alg.args.normalize_advantage": True,
            "alg.args.micro_batch_size": 8,
            "alg.args.reference_update_iterations": 2,
            "alg.args.reference_mixing": 0.5,
        },
    ),
    "ppo_t5": (
        "t5",
        {**SEPARATE, **MINIBATCHES, **SEQ2SEQ, "alg.args.target_kl": 0.001, "alg.args.ratio_band": [0.8, 1.2]},
    ),
    "nlpo": ("gpt2", {**SEPARATE, **MINIBATCHES, **MASKS, f"{POLICY}.target_update_iterations": 2}),
    # with the learning rate of the others, its critic diverges, which multiplies rounding errors
    "a2c": (
        "gpt2",
        {**SEPARATE, "alg.id": "a2c", "alg.args.bootstrap_truncated": True, "alg.args.learning_rate": 1e-4},
    ),
    "trpo": ("gpt2", {**SEPARATE, "alg.id": "trpo", "alg.args.batch_size": 14, "alg.args.target_kl": 0.01}),
    "grpo": ("gpt2", {**GROUPS, **MINIBATCHES, "alg.id": "grpo"}),
    "grpo_in_episodes": (
        "gpt2",
        {
            **GROUPS,
            "alg.id": "grpo",
            "alg.args": {
                **{"learning_rate": 1e-3, "n_episodes": 2 * N_ENVS, "minibatch_episodes": 6, "n_epochs": 2},
                **{"group_size": 3, "dynamic_sampling": 2},
            },
            "datapool.sampler": {"id": "shuffled"},
        },
    ),
    "online_dpo": ("gpt2", {**GROUPS, "alg.id": "online_dpo", "alg.args.n_epochs": 2, "alg.kl_div.coeff": 0.1}),
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
    "ppo_with_experts_and_texts": (
        "mixtral",
        {**SEPARATE, **MINIBATCHES, "alg.args.micro_batch_size": 60, "alg.ptx": {"coeff": 0.5, "batch_size": 3}},
    ),
    "fsdp_ppo": (
        "gpt2",
        {
            **SEPARATE,
            **MINIBATCHES,
            **FSDP,
            "alg.args.normalize_advantage": True,
            "alg.args.micro_batch_size": 8,
            "alg.args.ratio_band": [0.8, 1.2],
            **IN_PARTS,
            "distributed.reshard_after_forward": False,
            "alg.args.n_epochs": 1,
            "alg.args.critic_pretrain": {"max_rollouts": 1, "n_epochs": 1},
            f"{POLICY}.critic_frozen": ["wpe"],
            f"{POLICY}.gradient_checkpointing": True,
            f"{POLICY}.offload": "moments",
        },
    ),
    PPO_IN_8_BITS: (
        "t5",
        {
            **SEPARATE,
            **MINIBATCHES,
            **SEQ2SEQ,
            **FSDP,
            **SMALL_STEPS,
            "alg.args.learning_rate": 3e-4,
            f"{POLICY}.optimizer": {"id": "adamw_8bit"},
            f"{POLICY}.offload": "moments",
        },
    ),
    "fsdp_grpo": (
        "gpt2",
        {
            **GROUPS,
            **MINIBATCHES,
            **FSDP,
            "alg.id": "grpo",
            "alg.args.importance_correction": "tis",
            "alg.args.n_epochs": 1,
            "alg.args.reference_update_iterations": 1,
            "alg.kl_div.estimator": "full",
        },
    ),
    "fsdp_grpo_with_adapters": (
        "gpt2",
        {**GROUPS, **MINIBATCHES, **FSDP, **ADAPTERS, "alg.id": "grpo", "alg.args.n_epochs": 1},
    ),
    "ppo_with_adapters": (
        "gpt2",
        {
            **SEPARATE,
            **MINIBATCHES,
            "alg.args.micro_batch_size": 40,
            f"{POLICY}.peft": {"target_modules": "all-linear"},
        },
    ),
    "ppo_with_quantized_base": (
        "gpt2",
        {
            **SEPARATE,
            **MINIBATCHES,
            f"{POLICY}.peft": {"target_modules": "all-linear"},
            f"{POLICY}.quantization": {"id": "nf4", "double": True},
            f"{POLICY}.merge_on_save": True,
        },
    ),
    "grpo_with_pictures": (
        "idefics3",
        {
            **GROUPS,
            **MINIBATCHES,
            "alg.id": "grpo",
            "alg.policy.id": "vision_lm_actor_critic_policy",
            "datapool": {"id": "tests.vision_models:ColourPool", "args": {"n_train": 6, "n_eval": 3}},
            "env.args.max_prompt_length": 32,
        },
    ),
    "engine": ("gpt2", {**GROUPS, "alg.id": "grpo", "alg.args.importance_correction": "tis"}),
    "engine_ahead": ("gpt2", AHEAD),
    "fsdp_engine_ahead": (
        "gpt2",
        {**AHEAD, **FSDP, f"{POLICY}.engine.ahead": 2, "train_evaluation.n_iters": 4},
    ),
}
"""Name -> family of the model, and changes of `BASE`."""
SPLIT_ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp_ppo_with_adapters": (
        "gpt2",
        {
            **SEPARATE,
            **MINIBATCHES,
            **FSDP,
            **ADAPTERS,
            "alg.args.micro_batch_size": 8,
            "alg.args.critic_pretrain": {"max_rollouts": 1, "n_epochs": 1},
            "alg.args.normalize_advantage": True,
            f"{POLICY}.gradient_checkpointing": True,
        },
    ),
    ENGINE_WITH_ADAPTERS: (
        "gpt2",
        {**GROUPS, **MINIBATCHES, **FSDP, **ADAPTERS, "alg.id": "grpo", "alg.args.importance_correction": "tis"},
    ),
    ENGINE_OF_ADAPTERS: (
        "gpt2",
        {**GROUPS, **FSDP, **ADAPTERS, "alg.id": "grpo", f"{POLICY}.engine.args.sync": "adapters"},
    ),
    MERGED_ON_SAVE: (
        "t5",
        {**SEPARATE, **MINIBATCHES, **SEQ2SEQ, **FSDP, **ADAPTERS, f"{POLICY}.merge_on_save": True},
    ),
    "fsdp_ppo_with_adapters_of_experts": ("mixtral", {**SEPARATE, **MINIBATCHES, **FSDP, **ADAPTERS}),
    "fsdp_grpo_with_adapters_and_rows": (
        "gpt2",
        {
            **GROUPS,
            **MINIBATCHES,
            **FSDP,
            **ADAPTERS,
            "alg.id": "grpo",
            f"{POLICY}.peft": {"target_modules": "all-linear", "use_dora": True, "trainable_token_indices": [5, 7]},
        },
    ),
    QUANTIZED: (
        "gpt2",
        {
            **GROUPS,
            **MINIBATCHES,
            **FSDP,
            **ADAPTERS,
            "alg.id": "grpo",
            f"{POLICY}.quantization": {"id": "nf4", "double": True},
            f"{POLICY}.merge_on_save": True,
        },
    ),
}
"""The same, of runs that split the weights of networks with adapters, for `test_split_adapters.py`."""
OF_ENGINE = (
    *("engine", "engine_ahead", "fsdp_engine_ahead", STATEFUL_AHEAD),
    *("fsdp_grpo", ENGINE_WITH_ADAPTERS, ENGINE_OF_ADAPTERS),
)
"""Cells whose responses come from a server."""
BFLOAT16 = "fsdp_bfloat16"
"""Cell of a single, small step."""
SPLIT = tuple(cell for cell in CELLS if cell.startswith("fsdp"))
FROM_ONE = "fsdp_ppo"
"""Cell that two processes also resume from the checkpoint of one, and the reverse; and three from that of two, which is
in parts."""

ELEVEN_PAIRS = "dpo_with_split_adapters"
PACKED_EXPERTS = "supervised_with_experts_and_split_packed_rows"
PACKED_PAIRS = "kto_with_split_packed_rows"
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
OFFLINE: dict[str, tuple[str, dict[str, Any]]] = {
    "supervised": ("gpt2", {}),
    "supervised_t5": ("t5", {"gradient_accumulation_steps": 2}),
    "reward_model": ("gpt2", {"gradient_accumulation_steps": 2}),
    "dpo": ("gpt2", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "kto_t5": ("t5", {}),
    "supervised_with_experts": ("mixtral", {"gradient_accumulation_steps": 2}),
    "orpo_with_experts": ("mixtral", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "supervised_with_split_adapters": (
        "gpt2",
        {
            "per_device_train_batch_size": 7,
            "per_device_eval_batch_size": 7,
            "gradient_checkpointing": True,
            "max_steps": 10,
            "eval_steps": 5,
            **BEST,
        },
    ),
    "supervised_t5_with_split_weights": ("t5", {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, **BEST}),
    "reward_model_with_split_adapters": ("gpt2", {"gradient_accumulation_steps": 2, **BEST}),
    "reward_model_t5_with_split_weights": ("t5", {}),
    "dpo_with_split_weights": ("gpt2", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    # The reference scores 6 pairs in two passes of one process, and 5 in one of the other.
    ELEVEN_PAIRS: (
        "gpt2",
        {"per_device_train_batch_size": 10, "per_device_eval_batch_size": 5, "max_steps": 10, "eval_steps": 10},
    ),
    KTO_IN_8_BITS: (
        "t5",
        {"per_device_train_batch_size": 11, "max_steps": 10, "num_train_epochs": 10, "optim": "adamw_torch_8bit"},
    ),
    "orpo_with_experts_and_split_weights": (
        "mixtral",
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ),
    PACKED_EXPERTS: ("mixtral", {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}),
    PACKED_PAIRS: ("gpt2", {"per_device_train_batch_size": 6}),
}
"""Name, which begins with the id of the algorithm -> family of the model, and training arguments."""
SPLIT_OFFLINE: dict[str, dict[str, Any]] = {
    "supervised_with_split_adapters": {"alg.peft": {"target_modules": "all-linear"}},
    "supervised_t5_with_split_weights": {"distributed.reshard_after_forward": False},
    "reward_model_with_split_adapters": {
        "alg.peft": {"target_modules": ["c_attn", "c_proj"]},
        "alg.merge_on_save": True,
        "alg.quantization": {"id": "int8"},
    },
    "reward_model_t5_with_split_weights": {},
    "dpo_with_split_weights": {"alg.args": {"reference_update_iterations": 2, "reference_mixing": 0.5}},
    ELEVEN_PAIRS: {
        "alg.peft": {"target_modules": "all-linear"},
        "alg.quantization": {"id": "nf4", "double": True},
    },
    KTO_IN_8_BITS: {},
    "orpo_with_experts_and_split_weights": {},
    PACKED_EXPERTS: {"alg.packing": "auto", "datapool.id": "tests.offline.supervised.test_packing:Uneven"},
    PACKED_PAIRS: {"alg.packing": "auto"},
    STATEFUL_SPLIT: {
        "alg.args": {"dropout": True, "reference_update_iterations": 2, "reference_mixing": 0.5},
        **IN_PARTS,
    },
}
"""Those of them, and another one, that split the weights over the processes -> further changes of their configs."""
OF_SPLIT_OFFLINE = tuple(cell for cell in OFFLINE if cell in SPLIT_OFFLINE)
BEST_LOADED = "supervised_with_split_adapters"
"""Cell that ends with its best model, and that two processes also resume from the checkpoint of one."""

SLOW = frozenset(
    [
        "a2c",
        "dialogues",
        "dpo_with_split_adapters",
        "fsdp_engine_ahead",
        "fsdp_grpo",
        "grpo_in_episodes",
        "kto_with_split_packed_rows",
        "online_dpo",
        "orpo_with_experts",
        "ppo_with_quantized_base",
        "reward_model",
        "reward_model_with_split_adapters",
        "stateful_ahead",
        "supervised_t5",
        "supervised_with_experts",
    ]
)
"""Cells that only `make test-all` trains; each is like another one in most respects."""
OF_THREE = ("ppo_of_minibatches", "ppo_t5", "trpo", "supervised", "dpo")
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
    """Return the config of a cell; `models` contains the models, and files of preferences and of texts."""
    if cell in OFFLINE or cell in (STATEFUL_OFFLINE, STATEFUL_SPLIT):
        return parse_config(offline_blocks(cell, models))
    stateful = {f"{POLICY}.dropout": True, "reward_fn.id": "tests.distributed.cells:Tired"}
    further = {
        STATEFUL: {**stateful, **AVERAGED},
        STATEFUL_FSDP: {
            **{**stateful, **FSDP, **IN_PARTS, f"{POLICY}.critic": "shared"},
            **{"alg.id": "a2c", "alg.args.use_rms_prop": False, f"{POLICY}.optimizer": {"id": "adamw_8bit"}},
        },
        DIALOGUES: {
            **GROUPS,
            "alg.id": "grpo",
            "reward_fn.id": "environment",
            "env.args.max_episode_length": 40,
            "env.dialogue": {"id": "tests.dialogues:Chatter", "max_turns": 4, "max_turn_length": 6},
        },
        STATEFUL_AHEAD: {
            **stateful,
            **AHEAD,
            "alg.args": {"learning_rate": 1e-3, "group_size": 3, "n_episodes": 2 * N_ENVS},
            f"{POLICY}.engine.ahead": 2,
            "train_evaluation.n_iters": 5,
        },
        STATEFUL_ADAPTERS: {**stateful, **FSDP, **SEPARATE, f"{POLICY}.peft": {"r": 4}},
        BFLOAT16: {**FSDP, f"{POLICY}.dtype": "bfloat16", "alg.args.learning_rate": 1e-7, "alg.args.n_epochs": 1},
    }
    cells = CELLS | SPLIT_ADAPTERS
    family, changes = cells[cell] if cell in cells else ("gpt2", further[cell])
    model = str(models / family)
    named: dict[str, Any] = {"tokenizer.model_name": model, f"{POLICY}.model_name": model}
    if cell in OF_ENGINE:
        named[f"{POLICY}.engine"] = json.loads((models / "engine.json").read_text())
    blocks, issues = apply_values(copy.deepcopy(BASE), {**named, **changes}, "the cell")
    if "ptx" in blocks["alg"]:
        blocks["alg"]["ptx"]["data"] = {"id": "jsonl", "args": {"data_files": {"train": str(models / "texts.jsonl")}}}
    return parse_config(blocks, issues=issues)


def offline_blocks(cell: str, models: Path) -> dict[str, Any]:
    """Return the config of a supervised or preference run; it has a step with a single pair."""
    family, training_args = OFFLINE.get(cell, ("gpt2", {"gradient_accumulation_steps": 2, "save_steps": 3}))
    id = cell.split("_t5")[0].split("_with")[0]
    file = str(models / ("eleven" if cell == ELEVEN_PAIRS else ".") / "pairs.jsonl")
    kind = "seq2seq" if family == "t5" else "causal"
    given = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "adam_epsilon": 1e-5, **training_args}
    has_dropout = id == "supervised" and family != "mixtral"
    model = models / (f"{family}_without_dropout" if has_dropout else family)
    mapping = blocks(id, model, file, kind, **{"num_train_epochs": 1, "max_steps": 4, **given})
    if id == "supervised":
        mapping["datapool"] = {"id": "tests.offline.supervised.test_trainer:Uneven"}
        del mapping["alg"]["args"]
    elif cell == STATEFUL_OFFLINE:
        mapping["alg"]["args"]["dropout"] = True
    if cell in SPLIT_OFFLINE:
        changes = {"distributed.strategy": "fsdp", **SPLIT_OFFLINE[cell]}
        mapping = apply_values(mapping, changes, "the cell")[0]
    elif id == "dpo":
        mapping["alg"]["args"] |= {"reference_update_iterations": 2, "reference_mixing": 0.5}
        mapping = apply_values(mapping, AVERAGED, "the cell")[0]
    mapping["train_evaluation"]["eval_batch_size"] = 5
    return mapping


def assembled_offline(config: SupervisedConfig | PreferenceConfig, ranks: Ranks) -> SupervisedRun:
    """Return the run of a config on given texts."""
    if isinstance(config, SupervisedConfig):
        return assemble_supervised(config, ranks)
    return assemble_preferences(config, ranks)


def run_cell(cell: str, models: Path, output: Path, ranks: Ranks, resume_from: Path | None = None) -> None:
    """Train a cell, and save the weights of each process."""
    config = config_of(cell, models)
    run: Any
    run = assemble(config, ranks) if isinstance(config, RunConfig) else assembled_offline(config, ranks)
    if cell in CELLS or cell in SPLIT_ADAPTERS:
        sample_by_episode(run)
    if cell in (*SPLIT, *SPLIT_ADAPTERS, *OF_SPLIT_OFFLINE) and ranks.size > 1:
        module = run.policy if isinstance(config, RunConfig) else run.model
        sizes = [(each.numel(), each.to_local().numel()) for each in module.parameters()]
        share = sum(own for _, own in sizes) / sum(every for every, _ in sizes)
        (output / f"{cell}.rank{ranks.rank}.share").write_text(str(share))
    data = config.to_dict()
    with ranks.main_first():  # the others find the run's folder
        if ranks.is_main:
            tracker = Tracker(output, data, "cells", cell, quiet=True, resume=resume_from is not None)
        else:
            tracker = SilentTracker(output / "cells" / cell, data)
    with tracker:
        trainer_class: Any = OnPolicyTrainer if isinstance(config, RunConfig) else SupervisedTrainer
        trainer_class(run, tracker, resume_from=resume_from).train_and_eval()
    state = run.policy.training_state() if isinstance(config, RunConfig) else trained(run.model)
    weights = {name: whole(tensor) for name, tensor in state.items()}
    save_file(weights, output / f"{cell}.rank{ranks.rank}.safetensors")


def run_and_resume(cell: str, checkpoint: str, models: Path, output: Path, ranks: Ranks) -> None:
    """Train a cell whose processes have random numbers and rewards of their own; resume a copy from a checkpoint."""
    whole, resumed = (output / f"{cell}_{name}" for name in ("whole", "resumed"))
    run_cell(cell, models, whole, ranks)
    # only what the first process writes: others may still save their weights
    ranks.from_main(lambda: shutil.copytree(whole / "cells", resumed / "cells"))
    run_cell(cell, models, resumed, ranks, resume_from=resumed / "cells" / cell / "checkpoints" / checkpoint)


def sample_by_episode(run: AssembledRun) -> None:
    """Draw each episode of a rollout with its own seed, so that the texts do not depend on the number of processes."""
    policy, ranks, collector = run.policy, run.ranks, run.algorithm.collector
    generate = policy.generate

    def seeds_of(n_batches: int, n_episodes: int) -> list[int]:
        first = ranks.rank * n_episodes
        return [derived_seed(n_batches, "episode", first + row) for row in range(n_episodes)]

    def by_episode(ids: Any, mask: Any, *, generation_kwargs: Any = None, **options: Any) -> EpisodeBatch:
        if "max_new_tokens" not in options:  # an evaluation, which has the same batches in any number of processes
            return generate(ids, mask, generation_kwargs=generation_kwargs, **options)
        n_batches = collector.seeds.drawn  # also counts those before the checkpoint of a resumed run
        rows = []
        for i, seed in enumerate(seeds_of(n_batches, len(ids))):
            of_row = {**options, "seed": seed}
            if "pictures" in options:
                of_row["pictures"] = options["pictures"][i : i + 1]
            rows.append(generate(ids[i : i + 1], mask[i : i + 1], **of_row))
        return EpisodeBatch.concatenated([replace(row, group_ids=None, prompt_rows=None) for row in rows])

    policy.generate = by_episode

    # What an engine generates ahead: several batches are drawn at once.
    engine = policy.engine
    generate_with_engine = engine.generate
    start = engine.generate_in_background

    def in_background(calls: Any) -> Any:
        first = collector.seeds.drawn - len(calls) + 1
        return start(
            [
                (ids, mask, {**options, "seed": seeds_of(n_batches, len(ids))})
                for n_batches, (ids, mask, options) in enumerate(calls, first)
            ]
        )

    def row_by_row(ids: Any, mask: Any, *, seed: Any, **options: Any) -> EpisodeBatch:
        if not isinstance(seed, list):
            return generate_with_engine(ids, mask, seed=seed, **options)
        rows = []
        for i, of_row in enumerate(seed):
            rows.append(generate_with_engine(ids[i : i + 1], mask[i : i + 1], seed=of_row, **options))
        return EpisodeBatch.concatenated(rows)

    engine.generate_in_background = in_background
    engine.generate = row_by_row


@contextmanager
def process_in_group(rank: int, n_ranks: int, port: int) -> Iterator[Ranks]:
    """Make this process a member of a group within the block."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with process_ranks(120) as ranks:
        yield ranks


def train_in_group(
    rank: int, n_ranks: int, port: int, models: Path, output: Path, by_fewer: Path, left_out: frozenset[str]
) -> None:
    """Train the cells of a group of processes, in one of them; starting a group takes longer than most cells.

    `by_fewer` has the runs of one process less, some of which the group resumes. `left_out` are cells not to train.
    """
    with process_in_group(rank, n_ranks, port) as ranks:
        for cell in (*CELLS, *OFFLINE) if n_ranks == 2 else OF_THREE:
            if cell not in left_out:
                run_cell(cell, models, output, ranks)
        for cell in CHECKPOINTS if n_ranks == 2 else ():
            if cell not in left_out:
                run_and_resume(cell, CHECKPOINTS[cell], models, output, ranks)
        if n_ranks == 2:
            run_cell(BFLOAT16, models, output, ranks)
            write_whole_blocks(models, output)
            resume_other(BEST_LOADED, "checkpoint-5", by_fewer, models, output / "by_fewer", ranks)
        resume_other(FROM_ONE, "iteration_00001", by_fewer, models, output / "by_fewer", ranks)
        step_in_8_bits(output, ranks, by_fewer)


def write_whole_blocks(models: Path, output: Path) -> None:
    """Write which weights of transformer blocks are whole after a pass of split weights that are not freed at once.

    Also write the logits of that model, of whose files each process has read its rows only.
    """
    model, _ = load_model(AutoModelForCausalLM, str(models / "gpt2"), unread=True)
    assert isinstance(model.lm_head.weight, UnreadTensor)
    reader = CausalReader(model)
    probe = probe_episodes(model.config.vocab_size, reader.prompt_side)
    reader.split_weights(process_mesh("cpu"), reshard_after_forward=False)

    def n_whole() -> int:
        return sum(not is_split(weight) for weight in model.transformer.h.parameters())

    with torch.no_grad():
        reader.states(probe)
    after_no_grad = n_whole()
    states = reader.states(probe)
    after_forward = n_whole()
    states.sum().backward()
    n_weights = len(list(model.transformer.h.parameters()))
    whole_blocks = {"no_grad": after_no_grad, "forward": after_forward, "backward": n_whole(), "all": n_weights}
    (output / "whole_blocks.json").write_text(json.dumps(whole_blocks))
    with torch.no_grad():
        logits = reader.logits(probe)
    save_file({"logits": logits}, output / f"logits.rank{torch.distributed.get_rank()}.safetensors")


SHAPES_IN_8_BITS = ((64, 128), (65, 256), (9, 512), (4096, 8), (100,))
"""Of weights whose moments are in 8 bits, but for the last one, and in three processes for the fourth: a process has
1366 of its rows, and a block 32."""


class StepsIn8Bits:
    """Weights, split if there are several processes, with an optimizer; all processes have the same gradients."""

    def __init__(self, ranks: Ranks) -> None:
        weights: list[Any] = [torch.ones(shape) for shape in SHAPES_IN_8_BITS]
        if ranks.size > 1:
            mesh = process_mesh("cpu")
            weights = [distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None) for weight in weights]
        self.weights = {f"optimizer.weight.{i}": weight for i, weight in enumerate(weights)}
        self.optimizer = optimizer_class_of("adamw_8bit")(weights, lr=0.01)

    def step(self, number: int) -> None:
        for weight in self.weights.values():
            gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.grad = like(weight, gradient)
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.weights | optimizer_state(self.optimizer)[0]

    def load(self, folder: Path) -> None:
        tensors = tensors_without_matrices(folder / "whole.safetensors", ("optimizer.",))
        if parts := sorted(folder.glob("training_state-*")):
            tensors |= tensors_in_parts(parts)
        load_weights(self.weights, {name: tensors.pop(name) for name in self.weights})
        moments = {name.removeprefix("optimizer."): tensor for name, tensor in tensors.items()}
        load_optimizer(self.optimizer, {"numbers": {}, "lr": [0.01]}, moments)


def step_in_8_bits(output: Path, ranks: Ranks, by_fewer: Path | None = None) -> None:
    """Write the state after three steps as a checkpoint in parts has it, and the weights after a fourth.

    Make the fourth also after the three steps of one process less.
    """
    folder = output / "in_8_bits"
    ranks.from_main(folder.mkdir)
    steps = StepsIn8Bits(ranks)
    for number in range(3):
        steps.step(number)
    tensors = steps.tensors()
    write_rows_of_processes(tensors, ranks, folder)
    if ranks.is_main:
        save_file(
            {name: tensor for name, tensor in tensors.items() if not is_split(tensor)}, folder / "whole.safetensors"
        )

    resumed = StepsIn8Bits(ranks)
    resumed.load(folder if by_fewer is None else by_fewer / "in_8_bits")
    for name, each in (("fourth", steps), ("resumed", resumed)):
        each.step(3)
        whole_weights = {key: whole(weight.detach()) for key, weight in each.weights.items()}
        if ranks.is_main:
            save_file(whole_weights, folder / f"{name}.safetensors")


def train_adapters_in_group(rank: int, n_ranks: int, port: int, models: Path, output: Path) -> None:
    """Train networks with adapters in a group of processes that split their weights, in one of them."""
    with process_in_group(rank, n_ranks, port) as ranks:
        for cell in SPLIT_ADAPTERS:
            run_cell(cell, models, output, ranks)
        run_and_resume(STATEFUL_ADAPTERS, "iteration_00001", models, output, ranks)


def resume_other(cell: str, checkpoint: str, other: Path, models: Path, output: Path, ranks: Ranks) -> None:
    """Resume a run of another number of processes, in a copy of its folder."""
    ranks.from_main(lambda: shutil.copytree(other / "cells" / cell, output / "cells" / cell))
    run_cell(cell, models, output, ranks, resume_from=output / "cells" / cell / "checkpoints" / checkpoint)
