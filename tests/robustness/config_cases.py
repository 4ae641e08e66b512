"""The valid configs that cases start as, and the values that their keys are given instead.

KINDS               algorithm x family of the model, adapters, supervised runs     base_config(kind): a tiny run
PREFERENCE_KINDS    objective x family, and pipeline files
RULE_KINDS          critic-free algorithms, VAPO and SAO, engines: only loaded, since no server answers
OPTIONS             what a key may well be given, and what people confuse it with
VALUES              what no key expects
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Sequence
from typing import Any

PROMPTS = "prompts"
"""Name of the files that the file pools read, with `.jsonl`, `.csv` and `.txt`."""
PAIRS = "pairs.jsonl"

_STEPS = {"n_steps": 6, "batch_size": 12, "n_epochs": 2, "learning_rate": 1e-3}
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": _STEPS,
    "nlpo": _STEPS,
    "a2c": {"n_steps": 6, "learning_rate": 1e-3},
    "trpo": {"n_steps": 6, "batch_size": 12, "n_critic_updates": 2, "cg_max_steps": 4},
}
_PARTS = [{"id": "increasing_numbers", "weight": 2, "args": {"min_tokens": 4}}, {"id": "sentences_with_dates"}]
_REWARDS: list[dict[str, Any]] = [
    {"id": "increasing_numbers", "args": {"min_tokens": 4}},
    {"id": "sentiment", "args": {"shaping_fn": {"id": "length_penalty", "args": {"max_length": 2}}}},
    {"id": "combine", "args": {"rewards": _PARTS}},
    {"id": "repetition_penalty"},
]
_POOLS: list[dict[str, Any]] = [
    {"id": "dummy_pool", "args": {"prompt": "Count with me:", "n_samples": 5}},
    {"id": "film_opinions", "args": {"n_train": 8, "n_eval": 4}},
    {"id": "jsonl", "args": {"path": f"{PROMPTS}.jsonl", "prompt_column": "text", "reference_column": "rest"}},
    {"id": "csv", "args": {"path": f"{PROMPTS}.csv", "prompt_column": "text", "max_size": 4}},
    {"id": "text", "args": {"path": f"{PROMPTS}.txt", "prompt_words": 2}},
]
_METRICS: list[list[dict[str, Any]]] = [
    [{"id": "length"}, {"id": "increasing_numbers", "args": {"min_tokens": 4}}],
    [{"id": "distinct_n"}, {"id": "sentiment"}, {"id": "sentiment", "args": {"include_prompt": False}, "name": "own"}],
    [],
]
KINDS = [
    *(f"{algorithm}/{family}" for algorithm in _ALGORITHMS for family in ("causal", "seq2seq")),
    "ppo/causal/peft",
    "supervised/causal",
    "supervised/seq2seq",
]
"""Algorithm and family of the model; they take turns."""
_OBJECTIVES: dict[str, dict[str, Any]] = {
    "reward_model": {"center_coef": 0.01},
    "dpo": {"beta": 0.1, "loss": "sigmoid", "sft_weight": 0.1, "max_response_length": 6},
    "ipo": {"length_average": False},
    "kto": {"desirable_weight": 1.0, "max_response_length": 6},
    "orpo": {"odds_ratio_weight": 0.2},
    "simpo": {"beta": 2.0, "gamma": 0.5},
}
PIPELINE = "pipeline/causal"
PREFERENCE_KINDS = [
    *(f"{objective}/{family}" for objective in _OBJECTIVES for family in ("causal", "seq2seq")),
    "dpo/causal/peft",
    *[PIPELINE] * 5,
]
"""Objective and family of the model, and the second format of preference runs; they take turns."""
_CRITIC_FREE = ("grpo", "dapo", "gspo", "cispo", "cpgd", "rloo", "reinforce_pp", "opo", "maxrl", "online_dpo", "opd")
RULE_KINDS = [
    *(f"{algorithm}/causal" for algorithm in (*_CRITIC_FREE, "vapo", "sao")),
    "grpo/seq2seq",
    "grpo/causal/peft",
    *(f"{algorithm}/causal/engine" for algorithm in ("ppo", "a2c", "grpo", "online_dpo")),
]
"""Algorithm, family of the model, and what else is set; they take turns."""


def base_config(kind: str) -> dict[str, Any]:
    """The valid config that cases of a kind start as."""
    algorithm, family, *extra = kind.split("/")
    model = f"models/{family}"
    if kind in RULE_KINDS:
        return _for_rules(algorithm, family, extra)
    if kind == PIPELINE:
        return _pipeline(model)
    if algorithm in _OBJECTIVES:
        return _preferences(algorithm, family, model, has_adapters="peft" in extra)
    index = KINDS.index(kind)
    blocks: dict[str, Any] = {
        "tokenizer": {"model_name": model},
        "datapool": _POOLS[1 if algorithm == "supervised" else index % len(_POOLS)],
        "train_evaluation": {"eval_batch_size": 4, "metrics": _METRICS[index % len(_METRICS)]},
        "seed": index,
    }
    if algorithm == "supervised":
        training = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1}
        blocks["alg"] = {"id": "supervised", "model_type": family, "model_name": model, "training_args": training}
        blocks["alg"]["generation_kwargs"] = {"max_new_tokens": 5}
        return copy.deepcopy(blocks)
    policy = {"model_name": model, "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 6}}
    if algorithm == "nlpo":
        policy |= {"mask_type": "learned_top_p", "top_mask": 0.9, "target_update_iterations": 1}
    if "peft" in extra:
        policy["peft"] = {"r": 2, "lora_alpha": 4}
    blocks["reward_fn"] = _REWARDS[index % len(_REWARDS)]
    blocks["env"] = {"n_envs": 4, "args": {"max_prompt_length": 16, "max_episode_length": 6, "terminate_on_eos": True}}
    blocks["alg"] = {
        "id": algorithm,
        "args": _ALGORITHMS[algorithm],
        "kl_div": {"coeff": 0.1, "target_kl": 0.05},
        "policy": {"id": f"{'maskable_' * (algorithm == 'nlpo')}{family}_lm_actor_critic_policy", "args": policy},
    }
    blocks["train_evaluation"] |= {"n_iters": 2, "eval_every": 1, "save_every": 2}
    return copy.deepcopy(blocks)


def _for_rules(algorithm: str, family: str, extra: Sequence[str]) -> dict[str, Any]:
    """A config of an algorithm without a critic, or of an engine: that of PPO with other blocks `alg` and `env`."""
    blocks = base_config(f"ppo/{family}")
    is_paired = algorithm in ("vapo", "sao", "reinforce_pp")
    args: dict[str, Any] = {"n_steps": 6, "batch_size": 12, "learning_rate": 1e-3}
    if algorithm == "a2c":
        del args["batch_size"]
    if algorithm in _CRITIC_FREE and not is_paired:
        args["group_size"] = 2
    policy = blocks["alg"]["policy"]["args"]
    if algorithm == "opd":
        policy["teacher_model"] = "models/teacher"
    if "peft" in extra:
        policy["peft"] = {"r": 2, "lora_alpha": 4}
    if "engine" in extra:
        policy["engine"] = {"id": "vllm", "args": {"url": "http://127.0.0.1:8000", "weights_dir": "weights"}}
    blocks["alg"] |= {"id": algorithm, "args": args, "kl_div": {"coeff": 0.1}}
    return blocks


def _preferences(objective: str, family: str, model: str, *, has_adapters: bool) -> dict[str, Any]:
    training = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1}
    alg = {"id": objective, "args": _OBJECTIVES[objective], "model_type": family, "model_name": model}
    alg |= {"peft": {"r": 2, "lora_alpha": 4}} if has_adapters else {}
    alg |= {} if objective == "reward_model" else {"generation_kwargs": {"max_new_tokens": 6}}
    blocks: dict[str, Any] = {
        "tokenizer": {"model_name": model} | ({} if objective == "reward_model" else {"max_length": 16}),
        "datapool": {"id": "preferences", "args": {"path": PAIRS, "split_ratios": [0.6, 0.2, 0.2]}},
        "alg": {**alg, "training_args": training},
        "train_evaluation": {"eval_batch_size": 4},
        "seed": 3,
    }
    return copy.deepcopy(blocks)


def _pipeline(model: str) -> dict[str, Any]:
    training = {"output_dir": "outputs", "num_epochs": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    return {
        "models": [{"name": "tiny", "huggingface_id": model, "trust_remote_code": False}],
        "dataset": {"name": PAIRS, "validation_split": 0.2, "prompt_column": "prompt"},
        "post_training": {"method": "dpo", "beta": 0.1, "loss_type": "sigmoid", "use_ref_model": True},
        "lora": {"r": 2, "lora_alpha": 4, "lora_dropout": 0.05, "task_type": "CAUSAL_LM"},
        "training": {**training, "max_seq_length": 24, "max_prompt_length": 16, "logging_steps": 1, "eval_steps": 2},
        "gpu": {"device_ids": [0], "use_ddp": False},
        "finetuning": {"load_best_model_at_end": False},
        "logging": {"report_to": [], "log_level": "info"},
        "seed": 42,
    }


# --- values --------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 0.5, 0.0, -0.5, 1e-5, 1e308, 5.0),
    *(2**31, 2**31 - 1, 2**63, -(2**63), 10**9, 10**30),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "1e-5", "3", "auto", "left", "null", "true", "True,", "nan", "inf", "-1", "1_000", "0x10", "1:30"),
    *("x\u0000y", "\u202e\u0007é漢字🎬", "a\nb", "\ud800", "%s {x} {{}}", "../../etc", "cpu:9", "cuda:99", "meta"),
    *([], {}, [1], [None], {"a": 1}, {"id": "length"}, [[]], {1: 2}, {None: None}, [{"id": "length"}]),
    *(datetime.date(2022, 10, 4), b"bytes"),
    *("@@DEEP50@@", "@@DEEP300@@", "@@DEEP2000@@", "@@LOOP@@", "@@LAUGHS@@", "@@LONG@@"),
]
"""What any key may be given."""

_LAUGHS = ", ".join(f"&l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 12))
_PLACEHOLDERS = {
    "@@DEEP50@@": "[" * 50 + "]" * 50,
    "@@DEEP300@@": "{a: " * 300 + "1" + "}" * 300,
    "@@DEEP2000@@": "[" * 2000 + "]" * 2000,
    "@@LOOP@@": "&loop {a: [*loop]}",
    "@@LAUGHS@@": f"[&l0 [x], {_LAUGHS}]",
    "@@LONG@@": "x" * 1_000_000,
}

OPTIONS: dict[str, list[Any]] = {
    "n_threads": [1, 2, "auto"],
    "device": ["cpu", "auto", "cuda"],
    "seed": [0, 7, 2**32, 2**63],
    "tokenizer.padding_side": ["right", "left"],
    "tokenizer.truncation_side": ["right", "left"],
    "tokenizer.pad_token_as_eos_token": [True, False],
    "tokenizer.max_length": [4, 1],
    "tokenizer.add_tokens": [["<think>"], [""]],
    "tokenizer.chat_template": ["chatml"],
    "env.n_envs": [1, 2, 3, 7],
    "env.vec_env": ["dummy", "text", "single"],
    "env.args.terminate_on_eos": [True, False],
    "env.args.max_episode_length": [1, 3, 9, 200],
    "env.args.max_prompt_length": [1, 4, 64, 200],
    "env.args.prompt_truncation_side": ["left", "right"],
    "env.args.priority_scale": [0.0, 1.0],
    "env.args.context_start_token": [0, 1, None],
    "alg.id": ["ppo", "nlpo", "a2c", "trpo", "supervised", "reinforce"],
    "alg.args.gamma": [0, 0.5, 1],
    "alg.args.gae_lambda": [0, 1, 0.5],
    "alg.args.ent_coef": [0.01, 0, -0.01],
    "alg.args.vf_coef": [0, 1, 0.2],
    "alg.args.max_grad_norm": [None, 1.0, 0.1],
    "alg.args.learning_rate": [1e-5, "1e-4", 0.01],
    "alg.args.critic_learning_rate": [1e-2, None],
    "alg.args.learning_rate_schedule": ["linear", "cosine", "constant"],
    "alg.args.micro_batch_size": [1, 6, 100],
    "alg.args.group_size": [1, 2, 3],
    "alg.args.loss_aggregation": ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "mean"],
    "alg.args.normalize_advantage": [True, False, "rollout"],
    "alg.args.target_kl": [0.01, 1.0],
    "alg.args.clip_range_vf": [0.1, None],
    "alg.args.bootstrap_truncated": [True],
    "alg.args.length_sorted_minibatches": [True],
    "alg.args.use_rms_prop": [True, False],
    "alg.args.sub_sampling_factor": [2, 100],
    "alg.args.seed": [3, None],
    "alg.kl_div.coeff": [0, 0.5],
    "alg.kl_div.target_kl": [None, 0.5],
    "alg.kl_div.controller": ["adaptive", "horizon", "fixed", None],
    "alg.kl_div.estimator": ["k1", "k2", "k3"],
    "alg.kl_div.placement": ["reward", "loss", None],
    "alg.kl_div.max_coeff": [0.05, None],
    "alg.kl_div.norm_reward": [True],
    "alg.policy.id": ["causal_lm_actor_critic_policy", "seq2seq_lm_actor_critic_policy", "maskable_causal_policy"],
    "alg.policy.args.critic": ["shared", "separate"],
    "alg.policy.args.value_head_init": ["zero"],
    "alg.policy.args.dtype": ["bfloat16", "float32", "float16"],
    "alg.policy.args.generation_dtype": ["bfloat16", "float32", "float16", None],
    "alg.policy.args.reference_dtype": ["bfloat16", "float32", "int8"],
    "alg.policy.args.offload": ["moments", None, True, "weights"],
    "alg.policy.args.activation_offload": [True, False, "cpu"],
    "alg.policy.args.dropout": [True],
    "alg.policy.args.attn_implementation": ["eager", "sdpa", "flash_attention_2", "none"],
    "alg.policy.args.gradient_checkpointing": [True],
    "alg.policy.args.model_name": ["models/causal", "models/seq2seq", "models", "gpt2", "no/such/model"],
    "alg.policy.args.reference_model": ["models/causal", "models/seq2seq"],
    "alg.policy.args.critic_model": ["models/causal", "models/seq2seq"],
    "alg.policy.args.logits_budget_mb": [1, 64],
    "alg.policy.args.packing": ["auto", None, True],
    "alg.policy.args.speedups": [
        {"keep_freed_memory": False},
        {"merged_adapters": False},
        {"keep_freed_memory": "maybe"},
        {"keep": True},
        {},
    ],
    "alg.policy.args.peft": [{"r": 4}, {"r": 0}, {"target_modules": ["nowhere"]}, {"target_modules": "all-linear"}, {}],
    "alg.policy.args.merge_on_save": [True],
    "alg.policy.args.quantization": [{"id": "nf4"}, {"id": "nf4", "double": True}, {"id": "llm_int8"}, {"id": 8}, {}],
    "alg.policy.args.weight_decay": [0, 0.1],
    "alg.policy.args.optimizer_kwargs": [
        {"eps": 1e-6},
        {"betas": [0.8, 0.9]},
        {"lr": 1},
        {"momentum": 0.9},
        {"eps": "x"},
    ],
    "alg.policy.args.generation_kwargs.max_new_tokens": [1, 2, 20, 0, -1],
    "alg.policy.args.generation_kwargs.max_length": [3, 0],
    "alg.policy.args.generation_kwargs.min_length": [2, 50, -1],
    "alg.policy.args.generation_kwargs.top_k": [1, 50, None],
    "alg.policy.args.generation_kwargs.top_p": [0.9, 1.5, 0],
    "alg.policy.args.generation_kwargs.temperature": [0.7, 0, -1],
    "alg.policy.args.generation_kwargs.num_beams": [2, 0],
    "alg.policy.args.generation_kwargs.do_sample": [False, True, "yes"],
    "alg.policy.args.generation_kwargs.repetition_penalty": [1.2, 0],
    "alg.policy.args.top_mask": [5, 0.5, 1000],
    "alg.policy.args.mask_type": ["learned_top_k", "learned_top_p", "topk"],
    "alg.policy.args.mask_ema": [0.5, 1],
    "alg.generation_kwargs.num_beams": [2, 0],
    "alg.generation_kwargs.post_processing_fn": [{"id": "three_sentence_summary"}, {"id": "nothing"}],
    "alg.model_type": ["causal", "seq2seq", "vision"],
    "alg.train_vision": ["all", "none", "tower"],
    "alg.max_pixels": [None, 1000, 0],
    "alg.separator": [" => ", "\n", ""],
    "alg.loss_on_prompt": [True],
    "alg.logits_budget_mb": [1, None],
    "alg.packing": ["auto", None, False],
    "alg.activation_offload": [True, False, "cpu"],
    "alg.early_stopping_patience": [1, 2],
    "alg.peft": [{"r": 2}, {"lora_alpha": "x"}],
    "alg.training_args.max_steps": [1, 3],
    "alg.training_args.lr_scheduler_type": ["constant", "cosine", "wavy"],
    "alg.training_args.optim": ["adafactor", "sgd", "adam_of_eden"],
    "alg.training_args.save_strategy": ["no", "steps", "epoch"],
    "alg.training_args.metric_for_best_model": ["loss", "length/words", "lenght/words"],
    "alg.training_args.output_dir": ["elsewhere"],
    "alg.attn_implementation": ["eager", "sdpa", "flash_attention_2", "none"],
    "train_evaluation.n_iters": [0, 1, 3],
    "train_evaluation.eval_every": [1, 2, 5],
    "train_evaluation.save_every": [1, 7],
    "train_evaluation.eval_batch_size": [1, 100],
    "train_evaluation.save_model": [True, False],
    "train_evaluation.max_eval_samples": [1, 3],
    "train_evaluation.average": [{}, {"decay": 0.5, "every": 2}, {"decay": None, "bias_power": 0.2}, {"decay": 1.0}],
    "train_evaluation.callbacks": [
        [{"id": "tests.callbacks.test_callbacks:Counting"}],
        [{"id": "counting"}],
        "counting",
    ],
    "train_evaluation.generation_kwargs": [{"max_new_tokens": 3}, {"num_beams": 2, "max_new_tokens": 3}, {"beam": 1}],
    "train_evaluation.metrics": [[{"id": "length"}], [{"id": "length"}, {"id": "length"}], [{"id": "rouge"}], "length"],
    "reward_fn": [*_REWARDS, "sentiment", {"id": "increasing_numbers"}, {"id": "regex", "args": {"pattern": "("}}],
    "datapool": [*_POOLS, {"id": "jsonl", "args": {"path": "nowhere.jsonl"}}, {"id": "imdb"}],
    "datapool.args.n_samples": [1, 20, 0],
    "datapool.args.n_train": [1, 30],
    "datapool.args.n_eval": [0, 1, 3],
    "datapool.args.max_size": [1, 3],
}
"""What a key that may be there may well be given, and what people confuse it with."""

_OF_CRITICS = ("vf_coef", "gae_lambda", "clip_range_vf", "use_rms_prop", "sub_sampling_factor", "mask", "critic")
_ENGINE = {"id": "vllm", "args": {"url": "http://127.0.0.1:8000", "weights_dir": "weights"}}
RULE_OPTIONS: dict[str, list[Any]] = {
    **{path: values for path, values in OPTIONS.items() if not path.rpartition(".")[2].startswith(_OF_CRITICS)},
    "alg.id": [*_CRITIC_FREE, "ppo", "trpo", "nlpo", "a2c", "supervised"],
    "alg.args": ["text", 3, [], None, {}],
    "alg.args.group_size": [1, 2, 3, 4],
    "alg.args.task_reward": [False, True],
    "alg.args.baseline": ["mean", "leave_one_out", "length_weighted", "none", "median"],
    "alg.args.scale": ["group", "batch", "mean", "whiten", "none"],
    "alg.args.ratio_level": ["token", "sequence"],
    "alg.args.surrogate": ["clip", "geometric", "cispo", "cpgd"],
    "alg.args.clip_range": [0.2, 1.5, -1],
    "alg.args.clip_range_high": [0.3, None],
    "alg.args.dual_clip": [3, 1, None],
    "alg.args.drift_coef": [0.1, 0],
    "alg.args.dynamic_sampling": [10, None, 0],
    "alg.args.overlong_buffer": [0.2, None, 2],
    "alg.args.first_token_temperature": [10, None],
    "alg.args.reference_update_iterations": [1, None],
    "alg.args.reference_mixing": [0.5, 1.0],
    "alg.args.importance_correction": ["none", "tis", "icepop", "sequence_mask"],
    "alg.args.correction_range": [[0.5, 2], [2, 3], None, [1]],
    "alg.args.gamma": [0.9, 1],
    "alg.args.gae_lambda": [0.9, 1],
    "alg.args.gae_length_alpha": [0.05],
    "alg.args.critic_learning_rate": [1e-3],
    "alg.args.critic_pretrain": [{}, {"max_rollouts": 0}, None],
    "alg.args.critic_only_iterations": [0, 2],
    "alg.args.ratio_band": [[0.2, 4], [2, 3], None, "wide"],
    "alg.args.nll_threshold": [0.5, 1.0],
    "alg.args.nll_coef": [0, 0.1],
    "alg.args.loss": ["ipo", "hinge", "sigmoid"],
    "alg.args.label_smoothing": [0.1, 0.6],
    "alg.args.vf_coef": [0, 0.5],
    "alg.ptx": [{"data": {"id": "film_opinions"}, "coeff": 0.1}, {"coeff": 1}, None, 3],
    "alg.kl_div": [3, None, {"coeff": 0}, {"coeff": 0.1, "placement": "advantage"}],
    "alg.kl_div.placement": ["reward", "advantage", "loss", "lose"],
    "alg.kl_div.estimator": ["k1", "k2", "k3", "full", "top_k"],
    "alg.kl_div.top_k": [8, 0],
    "alg.policy.args": ["text", None, {"model_name": "models/causal"}],
    "alg.policy.args.critic": ["separate", "shared", "none"],
    "alg.policy.args.critic_model": ["models/causal"],
    "alg.policy.args.critic_device": ["cpu"],
    "alg.policy.args.critic_frozen": [["attn"], ["("], []],
    "alg.policy.args.reference_device": ["cpu"],
    "alg.policy.args.teacher_model": ["models/teacher", "models/causal", "./nowhere"],
    "alg.policy.args.engine": [
        {"id": "transformers"},
        _ENGINE,
        {**_ENGINE, "id": "sglang"},
        {"id": "vllm"},
        "vllm",
        {"id": "other"},
        {},
    ],
    "alg.policy.args.engine.ahead": [1, 0, 2, True],
    "alg.policy.args.engine.args.url": ["http://127.0.0.1:8000", "here", 8000],
    "alg.policy.args.engine.args.weights_dir": ["weights", "models/causal"],
    "alg.policy.args.engine.args.sync": ["weights", "adapters", "transfer"],
    "alg.policy.args.engine.args.sleep": [True, False],
    "alg.policy.args.engine.args.timeout": [0, 10],
    "alg.policy.args.generation_kwargs.typical_p": [0.9, 1],
    "alg.policy.args.generation_kwargs.stop_strings": [["."], "."],
    "train_evaluation.generation_kwargs": [{"max_new_tokens": 3, "num_beams": 2}, {"max_new_tokens": 3}, None],
    "train_evaluation.replay": ["folder"],
    "train_evaluation.keep_best": [{"metric": "length/words", "mode": "max"}, {"metric": "lenght", "mode": "max"}],
    "train_evaluation.keep_last": [2],
    "env.vec_env": ["text", "dummy", "subproc"],
    "env.reward_workers": [0, 2],
    "env.reward_timeout": [None, 5],
    "datapool.sampler": [{"id": "difficulty"}, {"id": "nothing"}, "difficulty"],
    "distributed": [
        *({"strategy": "fsdp"}, {"strategy": "ddp"}, {"strategy": "zero"}),
        *({"strategy": "fsdp", "reshard_after_forward": False}, {"reshard_after_forward": False}),
        *({"strategy": "fsdp", "checkpoint": "split"}, {"checkpoint": "split"}),
    ],
    "doctor": [{"held_out": [{"metric": "length/words", "mode": "max"}]}, {"held_out": [{"metric": "bleu"}]}, 3],
    "tiny_model": [{}, {"steps": 0}],
}
"""The same for the kinds that are only loaded."""

_SHARED = (
    *("n_threads", "device", "seed", "tokenizer", "alg.model_type", "alg.train_vision", "alg.max_pixels"),
    *("alg.early_stopping", "alg.peft"),
)
_OF_EVALUATION = ("eval_batch_size", "save_model", "max_eval_samples", "metrics")
PREFERENCE_OPTIONS: dict[str, list[Any]] = {
    **{path: values for path, values in OPTIONS.items() if path.startswith((*_SHARED, "alg.training_args"))},
    **{path: values for path, values in OPTIONS.items() if path.endswith(_OF_EVALUATION)},
    "alg.id": [*_OBJECTIVES, "ppo", "rlhf"],
    "alg.args.beta": [0.5, 0, -1],
    "alg.args.loss": ["hinge", "robust", "ipo"],
    "alg.args.label_smoothing": [0.1, 0.5, 0],
    "alg.args.sft_weight": [1.0, -1],
    "alg.args.length_average": [True, False],
    "alg.args.gamma": [0, 2],
    "alg.args.desirable_weight": [0, 2.0],
    "alg.args.center_coef": [0.1],
    "alg.args.append_eos": [True, False],
    "alg.args.dropout": [True, "adapters"],
    "alg.args.max_response_length": [1, 3, 500],
    "alg.args.reference_model": ["models/causal", "models/seq2seq", "nowhere"],
    "alg.model_name": ["models/causal", "models/seq2seq", "gpt2"],
    "alg.merge_on_save": [True],
    "alg.quantization": [{"id": "nf4"}, {"id": "int8", "double": True}, {"bits": 4}],
    "alg.generation_kwargs": [{"max_new_tokens": 3}, {"num_beams": 2}, {"beam": 1}],
    "alg.training_args.gradient_accumulation_steps": [2, 0],
    "alg.training_args.metric_for_best_model": ["loss", "rewards/accuracies", "rewards/acuracies"],
    "alg.training_args.load_best_model_at_end": [True],
    "alg.training_args.label_smoothing_factor": [0.1],
    "datapool": [{"id": "film_opinions"}, {"id": "preferences"}, {"id": "preferences", "args": {"dataset": "nowhere"}}],
    "datapool.args.prompt_column": ["prompt", "question", None],
    "datapool.args.chosen_column": ["rejected", "better"],
    "datapool.args.label_column": ["label"],
    "datapool.args.margin_column": ["margin", "prompt"],
    "datapool.args.split_ratios": [[1, 0, 0], [0.5, 0.5], [0.9, 0.1, 0.1]],
    "datapool.args.max_rows": [1, 4],
    "datapool.args.max_size": [1, 3],
    "train_evaluation.generate": [False],
}
PIPELINE_OPTIONS: dict[str, list[Any]] = {
    "models": [[], [{"name": "a", "huggingface_id": "models/causal"}, {"name": "b", "huggingface_id": "nowhere"}]],
    "models.0.name": ["a/b", "..", "a b"],
    "models.0.huggingface_id": ["models/seq2seq", "gpt2"],
    "models.0.trust_remote_code": [True],
    "models.0.task_type": ["SEQ_2_SEQ_LM", "causal"],
    "dataset.name": ["nowhere.jsonl", "nowhere"],
    "dataset.split": ["train", "test"],
    "dataset.prompt_column": ["question"],
    "dataset.chosen_column": ["better"],
    "dataset.max_samples": [1, 3],
    "dataset.validation_split": [0, 0.5, 1],
    "dataset.chat_template": [True],
    "post_training.method": ["ipo", "kto", "orpo", "ppo", None],
    "post_training.loss_type": ["ipo", "kto_pair", "hinge", "simpo"],
    "post_training.beta": [0.5, 0],
    "post_training.label_smoothing": [0.1, 0.6],
    "post_training.use_ref_model": [False],
    "post_training.ref_model_id": ["models/causal", "nowhere"],
    "lora": [None, {}, {"r": 0}],
    "lora.lora_dropout": [0, 1],
    "lora.bias": ["all"],
    "lora.target_modules": [["query_key_value"], "all-linear", ["c_attn"]],
    "lora.use_dora": [True],
    "lora.use_rslora": [True],
    "training.num_epochs": [2, 0.5, 0],
    "training.max_seq_length": [2, 8, 10_000],
    "training.max_prompt_length": [1, 100],
    "training.max_completion_length": [1, 4],
    "training.save_steps": [1, 2],
    "training.save_total_limit": [1, None],
    "training.fp16": [True],
    "training.bf16": [True],
    "training.gradient_checkpointing": [True, False],
    "training.optim": ["adafactor", "adam_of_eden"],
    "training.warmup_steps": [0, 5],
    "gpu.device_ids": [None, [1], "0"],
    "gpu.use_ddp": [True],
    "finetuning.load_best_model_at_end": [True],
    "finetuning.metric_for_best_model": ["eval_rewards/accuracies", "loss", "accuracy"],
    "finetuning.early_stopping_patience": [1, None],
    "finetuning.resume_from_checkpoint": [True, "latest"],
    "logging.report_to": [["tensorboard"], ["mlflow"], "wandb"],
    "logging.log_level": ["warning", "loud"],
    "seed": [0, -1, 2**32],
}
"""The same for pipeline files."""

SWAPPED_IDS = (
    "ppo",
    "rouge",
    "dummy_pool",
    "length",
    "causal_lm_actor_critic_policy",
    "os:getcwd",
    "nowhere:Thing",
    "",
)


def with_placeholders(text: str) -> str:
    """The text with what PyYAML cannot write in the place of its name."""
    for name, value in _PLACEHOLDERS.items():
        text = text.replace(f"'{name}'", value)
    return text
