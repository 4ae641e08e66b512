"""The table of docs/features.md says what configs are accepted with each algorithm."""

from __future__ import annotations

from typing import Any

import pytest

from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES, policy_gradient
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.offline.training_arguments import make_training_arguments
from rl4lms_like.system.errors import ConfigError
from tests.configs import run_blocks, supervised_blocks
from tests.conftest import REPOSITORY

POLICY = "alg.policy.args"
VLLM: dict[str, Any] = {"id": "vllm", "args": {"url": "http://127.0.0.1:1", "weights_dir": "w"}}
SGLANG: dict[str, Any] = {**VLLM, "id": "sglang"}
CHAT_FORMAT = {"tokenizer.chat_template": "chatml", "tokenizer.add_tokens": ["<think>"]}
SPLIT_ADAPTERS = {"distributed.strategy": "fsdp", f"{POLICY}.peft": {"r": 8}}
IN_PARTS = {"distributed.strategy": "fsdp", "distributed.checkpoint": "split"}
KEPT_WHOLE = {"distributed.strategy": "fsdp", "distributed.reshard_after_forward": False}
QUANTIZED_ADAPTERS = {f"{POLICY}.peft": {"r": 8}, f"{POLICY}.quantization": {"id": "nf4"}}
ACTIVATIONS = {f"{POLICY}.activation_offload": True}
EIGHT_BITS = {f"{POLICY}.optimizer": {"id": "adamw_8bit"}}
CHANGES = {
    "`policy.args.peft`": {f"{POLICY}.peft": {"r": 8}},
    "`policy.args.quantization` with `policy.args.peft`": QUANTIZED_ADAPTERS,
    "the same with `distributed.strategy: fsdp`": {**QUANTIZED_ADAPTERS, "distributed.strategy": "fsdp"},
    "`policy.args.optimizer: {id: adamw_8bit}`": EIGHT_BITS,
    "the same with `distributed.strategy: fsdp` and `policy.args.peft`": {**SPLIT_ADAPTERS, **EIGHT_BITS},
    "`policy.args.offload: moments`": {f"{POLICY}.offload": "moments"},
    "`policy.args.offload: moments` with `distributed.strategy: fsdp`": {
        f"{POLICY}.offload": "moments",
        "distributed.strategy": "fsdp",
    },
    "`policy.args.dtype: bfloat16`": {f"{POLICY}.dtype": "bfloat16"},
    "`policy.args.generation_dtype: bfloat16`": {f"{POLICY}.generation_dtype": "bfloat16"},
    "the same with `args.importance_correction`": {
        f"{POLICY}.generation_dtype": "bfloat16",
        "alg.args.importance_correction": "tis",
    },
    "`policy.args.reference_dtype: bfloat16`": {f"{POLICY}.reference_dtype": "bfloat16"},
    "`policy.args.gradient_checkpointing`": {f"{POLICY}.gradient_checkpointing": True},
    "`policy.args.activation_offload`": ACTIVATIONS,
    "`policy.args.activation_offload` with `policy.args.compile`": {**ACTIVATIONS, f"{POLICY}.compile": True},
    "`policy.args.activation_offload` with `distributed.strategy: fsdp`": {
        **ACTIVATIONS,
        "distributed.strategy": "fsdp",
    },
    "`policy.args.compile`": {f"{POLICY}.compile": True},
    "`policy.args.attn_implementation: sdpa`": {f"{POLICY}.attn_implementation": "sdpa"},
    "`policy.args.packing: auto`": {f"{POLICY}.packing": "auto"},
    "the same with `policy.args.compile`": {f"{POLICY}.packing": "auto", f"{POLICY}.compile": True},
    "the same with `policy.id: vision_lm_actor_critic_policy`": {
        f"{POLICY}.packing": "auto",
        "alg.policy.id": "vision_lm_actor_critic_policy",
    },
    "the same with seq2seq models": {
        f"{POLICY}.packing": "auto",
        "alg.policy.id": "seq2seq_lm_actor_critic_policy",
    },
    "`policy.args.speedups`": {f"{POLICY}.speedups": {"keep_freed_memory": False}},
    "`policy.args.dropout`": {f"{POLICY}.dropout": True},
    "`policy.args.engine: {id: vllm}`": {f"{POLICY}.engine": VLLM},
    "the same with several servers": {
        f"{POLICY}.engine": {"id": "vllm", "args": {"url": ["http://127.0.0.1:1", "http://a:2"], "weights_dir": "w"}}
    },
    "the same with `sync: adapters` and `policy.args.peft`": {
        f"{POLICY}.engine": {"id": "vllm", "args": {**VLLM["args"], "sync": "adapters"}},
        f"{POLICY}.peft": {"r": 8},
    },
    "`policy.args.engine: {id: vllm}` with `sync: transfer`": {
        f"{POLICY}.engine": {"id": "vllm", "args": {"url": "http://127.0.0.1:1", "sync": "transfer"}},
    },
    "`policy.args.engine: {id: vllm, ahead: 1}`": {f"{POLICY}.engine": {**VLLM, "ahead": 1}},
    "`policy.args.engine: {id: vllm, ahead: 2}`": {f"{POLICY}.engine": {**VLLM, "ahead": 2}},
    "`policy.args.engine: {id: sglang}`": {f"{POLICY}.engine": SGLANG},
    "the same with `sync: adapters`": {
        f"{POLICY}.engine": {**SGLANG, "args": {**VLLM["args"], "sync": "adapters"}},
        f"{POLICY}.peft": {"r": 8},
    },
    "the same with `ahead: 1`": {f"{POLICY}.engine": {**SGLANG, "ahead": 1}},
    "`policy.args.critic: shared`": {f"{POLICY}.critic": "shared"},
    "`policy.id: vision_lm_actor_critic_policy`": {"alg.policy.id": "vision_lm_actor_critic_policy"},
    "seq2seq models": {"alg.policy.id": "seq2seq_lm_actor_critic_policy"},
    "`args.n_episodes` in place of `n_steps`": {"alg.args.n_episodes": 32},
    "`args.minibatch_episodes` in place of `batch_size`": {"alg.args.minibatch_episodes": 16},
    "`args.group_size` above 1": {"alg.args.group_size": 4},
    "`args.micro_batch_size`": {"alg.args.micro_batch_size": 512},
    "`args.importance_correction`": {"alg.args.importance_correction": "tis"},
    "`args.first_token_temperature`": {"alg.args.first_token_temperature": 10.0},
    "`args.reference_update_iterations`": {"alg.args.reference_update_iterations": 5},
    "`kl_div.placement: loss`": {"alg.kl_div.placement": "loss"},
    "`kl_div.norm_reward`": {"alg.kl_div.norm_reward": True},
    "`tokenizer.chat_template: chatml`, `tokenizer.add_tokens`": CHAT_FORMAT,
    "`tokenizer.tools_in_system`": {**CHAT_FORMAT, "tokenizer.tools_in_system": True},
    "`ptx`": {"alg.ptx": {"data": {"id": "film_opinions"}, "coeff": 0.5}},
    "rewards of steps without `aggregate`": {"reward_fn": {"id": "process_reward", "args": {"model_name": "prm"}}},
    "`env.reward_workers`": {"env.reward_workers": 2},
    "`env.dialogue`": {
        "env.dialogue": {"id": "guess_number", "max_turn_length": 8},
        f"{POLICY}.generation_kwargs.max_new_tokens": None,
    },
    "`env.vec_env: dummy` or `subproc`": {"env.vec_env": "dummy"},
    "`datapool.sampler: {id: difficulty}`": {"datapool.sampler": {"id": "difficulty"}},
    "`datapool.sampler: {id: shuffled}`": {"datapool.sampler": {"id": "shuffled"}},
    "`train_evaluation.save_rollouts`": {"train_evaluation.save_rollouts": True},
    "`train_evaluation.n_credit_episodes`": {"train_evaluation.n_credit_episodes": 3},
    "`train_evaluation.callbacks`": {"train_evaluation.callbacks": [{"id": "tests.callbacks.test_callbacks:Counting"}]},
    "`train_evaluation.average`": {"train_evaluation.average": {"decay": 0.9, "every": 2}},
    "`distributed.strategy: fsdp` with `policy.args.peft`": SPLIT_ADAPTERS,
    "the same with `policy.args.engine: {id: vllm}`": {**SPLIT_ADAPTERS, f"{POLICY}.engine": VLLM},
    "`distributed.reshard_after_forward: false` with `strategy: fsdp`": KEPT_WHOLE,
    "`distributed.checkpoint: split` with `strategy: fsdp`": IN_PARTS,
}


TRAINING = "alg.training_args"
VISION = {"alg.model_type": "vision", "alg.model_name": "vlm"}
PACKED = {"alg.model_type": "causal", "alg.packing": "auto"}
OFFLINE_CHANGES = {
    "`model_type: vision`": VISION,
    "`model_type: vision` with `train_vision`, `max_pixels`, `peft`": {
        **VISION,
        "alg.train_vision": "projector",
        "alg.max_pixels": 10_000,
        "alg.peft": {"r": 8},
        "alg.merge_on_save": True,
    },
    "`model_type: vision` with `training_args.gradient_checkpointing`": {
        **VISION,
        f"{TRAINING}.gradient_checkpointing": True,
    },
    "`model_type: vision` with `training_args.label_smoothing_factor`": {
        **VISION,
        f"{TRAINING}.label_smoothing_factor": 0.1,
    },
    "`attn_implementation: sdpa`": {"alg.attn_implementation": "sdpa"},
    "`attn_implementation: flash_attention_2` with `bf16`": {
        "alg.attn_implementation": "flash_attention_2",
        f"{TRAINING}.bf16": True,
    },
    "`quantization` with `peft`": {
        "alg.peft": {"r": 8},
        "alg.merge_on_save": True,
        "alg.quantization": {"id": "nf4"},
    },
    "`training_args.neftune_noise_alpha`": {f"{TRAINING}.neftune_noise_alpha": 5.0},
    "`training_args.torch_compile`": {f"{TRAINING}.torch_compile": True},
    "`training_args.label_smoothing_factor`": {f"{TRAINING}.label_smoothing_factor": 0.1},
    "`logits_budget_mb`": {"alg.logits_budget_mb": 64},
    "`logits_budget_mb` with `training_args.label_smoothing_factor`": {
        "alg.logits_budget_mb": 64,
        f"{TRAINING}.label_smoothing_factor": 0.1,
    },
    "`logits_budget_mb` with `training_args.torch_compile`": {
        "alg.logits_budget_mb": 64,
        f"{TRAINING}.torch_compile": True,
    },
    "`args.logits_budget_mb`": {"alg.args.logits_budget_mb": 64},
    "`packing: auto`": PACKED,
    "`packing: auto` with `model_type: vision`": {**PACKED, **VISION},
    "`packing: auto` with `model_type: seq2seq`": {**PACKED, "alg.model_type": "seq2seq"},
    "`packing: auto` with `training_args.neftune_noise_alpha`": {**PACKED, f"{TRAINING}.neftune_noise_alpha": 5.0},
    "`packing: auto` with `training_args.torch_compile`": {**PACKED, f"{TRAINING}.torch_compile": True},
    "`activation_offload`": {"alg.activation_offload": True},
    "`activation_offload` with `training_args.torch_compile`": {
        "alg.activation_offload": True,
        f"{TRAINING}.torch_compile": True,
    },
    "`activation_offload` with `distributed.strategy: fsdp`": {
        "alg.activation_offload": True,
        "distributed.strategy": "fsdp",
    },
    "`tokenizer.chat_template: chatml`, `tokenizer.add_tokens`": CHAT_FORMAT,
    "`tokenizer.tools_in_system`": {**CHAT_FORMAT, "tokenizer.tools_in_system": True},
    "`train_evaluation.callbacks`": CHANGES["`train_evaluation.callbacks`"],
    "`args.reference_update_iterations`": CHANGES["`args.reference_update_iterations`"],
    "`train_evaluation.average`": CHANGES["`train_evaluation.average`"],
    "`distributed.strategy: fsdp`": {"distributed.strategy": "fsdp"},
    "the same with `peft`": {"distributed.strategy": "fsdp", "alg.peft": {"r": 8}, "alg.merge_on_save": True},
    "the same with `quantization`": {
        "distributed.strategy": "fsdp",
        "alg.peft": {"r": 8},
        "alg.merge_on_save": True,
        "alg.quantization": {"id": "nf4"},
    },
    "`distributed.strategy: fsdp` with `model_type: vision`": {**VISION, "distributed.strategy": "fsdp"},
    "`distributed.strategy: fsdp` with `training_args.bf16`": {
        "distributed.strategy": "fsdp",
        f"{TRAINING}.bf16": True,
    },
    "`distributed.strategy: fsdp` with `training_args.optim: adamw_torch_8bit`": {
        "distributed.strategy": "fsdp",
        f"{TRAINING}.optim": "adamw_torch_8bit",
    },
    "`distributed.reshard_after_forward: false` with `strategy: fsdp`": KEPT_WHOLE,
    "`distributed.checkpoint: split` with `strategy: fsdp`": IN_PARTS,
}
"""Row of the table of runs on given texts -> its keys."""


def table(first_column: str = "`ppo`") -> tuple[list[str], dict[str, list[str]]]:
    """Return the ids of the columns, and the cells of each row, of the table with this first column."""
    parts = (REPOSITORY / "docs" / "features.md").read_text().split("\n\n")
    lines = next(part for part in parts if part.startswith(f"| | {first_column} |")).splitlines()
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return heads[1:], {name: cells for name, *cells in rows}


def test_every_row_is_tried():
    assert list(table()[1]) == list(CHANGES)
    assert list(table("`sft`")[1]) == list(OFFLINE_CHANGES)
    assert [head.strip("`") for head in table("`sft`")[0]] == ["sft", *OBJECTIVES]


IDS = [heading.strip("`") for heading in table()[0]]
OF_GRPO = [id for id in ALGORITHMS if ALGORITHMS.entry(id).target.startswith(policy_gradient.__name__)]
"""Those without a column have that of `grpo`."""


@pytest.mark.parametrize("id", dict.fromkeys([*IDS, *OF_GRPO]))
def test_the_table_says_what_is_accepted(id):
    place = IDS.index(id if id in IDS else "grpo")
    wrong = []
    for name, changes in CHANGES.items():
        blocks = run_blocks()
        blocks["env"]["n_envs"] = 16
        blocks["alg"] |= {"id": id, "args": {}, "kl_div": {"coeff": 0.1}}
        maskable = "maskable_" if id == "nlpo" else ""
        blocks["alg"]["policy"]["id"] = f"{maskable}causal_lm_actor_critic_policy"
        blocks["alg"]["policy"]["args"] |= {"top_mask": 20} if maskable else {}
        blocks["alg"]["policy"]["args"] |= {"teacher_model": "gpt2-large"} if id == "opd" else {}
        if name == "seq2seq models":
            changes = {"alg.policy.id": f"{maskable}seq2seq_lm_actor_critic_policy"}
        blocks, issues = apply_values(blocks, changes, "test")
        try:
            parse_config(blocks, issues=issues)
            found = "yes"
        except ConfigError:
            found = "no"
        stated = table()[1][name][place]
        if (id, name) == ("maxrl", "`kl_div.norm_reward`"):  # the text below the table says so
            stated = "no"
        if stated.split()[0] != found:
            wrong.append((name, stated, found))
    assert not wrong


@pytest.mark.parametrize("id", ["sft", *OBJECTIVES])
def test_the_table_says_what_is_accepted_on_given_texts(id):
    heads, rows = table("`sft`")
    place = heads.index(f"`{id}`")
    wrong = []
    for name, changes in OFFLINE_CHANGES.items():
        blocks = supervised_blocks()
        if id != "sft":
            blocks["alg"] = {"id": id, "args": {}, "model_type": "causal", "model_name": "gpt2", "training_args": {}}
            blocks["datapool"] = {"id": "preferences", "args": {"path": "pairs.jsonl"}}
            blocks["train_evaluation"]["metrics"] = []
            blocks["tokenizer"] = {"model_name": "gpt2"}
        blocks, issues = apply_values(blocks, changes, "test")
        try:
            make_training_arguments(parse_config(blocks, issues=issues), "out")
            found = "yes"
        except ConfigError:
            found = "no"
        if rows[name][place] != found:
            wrong.append((name, rows[name][place], found))
    assert not wrong
