"""Every key of a config acts: another value makes another run.

The keys are those of the schema, so that one without a row here fails. A row has another value, what else both configs
must say so that the key can matter, and where the difference is seen. Arguments of rewards, metrics and data pools:
`tests/house/test_every_argument.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
import time
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rl4lms_like.algorithms.arguments import A2CArguments, NLPOArguments, PPOArguments, TRPOArguments
from rl4lms_like.algorithms.critic_free_arguments import CriticFreeArguments
from rl4lms_like.config.run_config import RunConfig, SupervisedConfig
from rl4lms_like.core.continuation import kept_ids
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.sampler import PromptSampler
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.estimates.memory import MemoryEstimate, estimate_memory, estimate_supervised_memory
from rl4lms_like.on_policy.replay import with_replay
from rl4lms_like.policies.arguments import (
    LoraArguments,
    MaskablePolicyArguments,
    PolicyArguments,
    VisionPolicyArguments,
)
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.system.schema import signature_of
from rl4lms_like.system.wording import help_of
from rl4lms_like.testing import models
from tests.training import observations as see
from tests.vision_models import save_vision_model

FOLDERS = "FOLDERS"
"""Stands for the folder of the tiny models."""


@dataclass(frozen=True)
class Row:
    """How a key is seen to act.

    Args:
        value: another value than the base's or the default.
        sees: where.
        beside: what both configs say besides, by dotted paths.
        also: what the other config says besides, where the key alone would be a mistake.
    """

    value: Any
    sees: see.Sight = see.weights
    others: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Silent:
    """A key without meaning in this kind of run; its help says so in these words."""

    words: str


# --- the configs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models: `gpt2` with dropout and two blocks, another one, one with three blocks, a T5, tokenizers."""
    base = tmp_path_factory.mktemp("models")
    tokenizer, other = models.make_tokenizer(), models.make_tokenizer(["a b c", "film films"])
    shape = {"hidden_size": 16, "n_heads": 2, "scale": 5.0}
    models.save_model(base / "gpt2", models.make_causal_lm("gpt2", tokenizer, **shape), tokenizer)
    models.save_model(base / "gpt2_other", models.make_causal_lm("gpt2", tokenizer, seed=1, **shape), tokenizer)
    models.save_model(base / "gpt2_deep", models.make_causal_lm("gpt2", tokenizer, n_layers=3, **shape), tokenizer)
    models.save_model(
        base / "t5", models.make_seq2seq_lm("t5", tokenizer, hidden_size=16, n_heads=2, n_layers=1), tokenizer
    )
    other.save_pretrained(base / "other_tokens")
    save_vision_model(base / "qwen2_vl", "qwen2_vl")
    (base / "texts.jsonl").write_text('{"text": "it is here and there"}\n' * 9, encoding="utf-8")
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    tokenizer.save_pretrained(base / "chat")
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y') }} " + tokenizer.chat_template
    tokenizer.save_pretrained(base / "dated")
    tokenizer.chat_template = None
    tokenizer.pad_token = None
    tokenizer.save_pretrained(base / "no_pad")
    return base


class Weighted(TextGenPool):
    """Two prompts, one of which counts for more."""

    @classmethod
    def prepare(cls, split: str, factor: float = 9.0) -> Weighted:
        pool = cls(
            [Sample(f"{split}_{i}", f"it is not {word}", ["yes"]) for i, word in enumerate(["here", "there"] * 4)]
        )
        pool._weights = [factor if i % 2 else 1.0 for i in range(8)]
        return pool

    def __iter__(self) -> Iterator[tuple[Sample, float]]:
        return iter(zip(self.samples, self._weights, strict=True))


class Backwards(PromptSampler):
    """The last prompts of the pool, in order."""

    def draw(self) -> int:
        return len(self) - 1 - super().draw() // 4


class Slow(RewardFunction):
    """Takes its time."""

    def __call__(self, *args: Any) -> float:
        time.sleep(0.05)
        return 1.0


@pytest.fixture(scope="module", autouse=True)
def components_of_ours(tmp_path_factory):
    DATA_POOLS.add("weighted", Weighted)
    REWARDS.add("slow", Slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL4LMS_LIKE_HOME", str(tmp_path_factory.mktemp("home")))
        yield
    del DATA_POOLS._table["weighted"], REWARDS._table["slow"]


def run_base(algorithm: str = "ppo", family: str = "causal") -> dict[str, Any]:
    model = f"{FOLDERS}/{'gpt2' if family == 'causal' else 't5'}"
    args: dict[str, Any] = {"n_steps": 5, "learning_rate": 1e-2}
    if algorithm != "a2c":
        args["batch_size"] = 12
    if algorithm in ("ppo", "nlpo"):
        args["n_epochs"] = 2
    if algorithm == "grpo":
        args["group_size"] = 2
    if algorithm == "trpo":
        args |= {"n_critic_updates": 2, "cg_max_steps": 3}
    policy: dict[str, Any] = {"model_name": model}
    policy["generation_kwargs"] = {"do_sample": True, "top_k": 0, "max_new_tokens": 6}
    if algorithm == "nlpo":
        policy |= {"top_mask": 20, "target_update_iterations": 1, "min_tokens_to_keep": 2}
    return {
        "tokenizer": {"model_name": model},
        "reward_fn": {"id": "length_penalty", "args": {"max_length": 1, "unit": "characters"}},
        "datapool": {"id": "film_opinions", "args": {"n_train": 8, "n_eval": 3}},
        "env": {"n_envs": 4, "args": {"max_prompt_length": 8, "max_episode_length": 6, "terminate_on_eos": True}},
        "alg": {
            "id": algorithm,
            "args": args,
            "kl_div": {"coeff": 0.1},
            "policy": {"id": f"{'maskable_' * (algorithm == 'nlpo')}{family}_lm_actor_critic_policy", "args": policy},
        },
        "train_evaluation": {"eval_batch_size": 2, "n_iters": 2, "eval_every": 1, "metrics": [{"id": "length"}]},
        "device": "cpu",
    }


def supervised_base(family: str = "causal") -> dict[str, Any]:
    model = f"{FOLDERS}/{'gpt2' if family == 'causal' else 't5'}"
    return {
        "tokenizer": {"model_name": model},
        "datapool": {"id": "film_opinions", "args": {"n_train": 6, "n_eval": 3}},
        "alg": {
            "id": "supervised",
            "model_type": family,
            "model_name": model,
            "generation_kwargs": {"max_new_tokens": 4},
            "training_args": {
                "max_steps": 2,
                "per_device_train_batch_size": 3,
                "logging_steps": 1,
                "learning_rate": 1e-2,
                "save_strategy": "no",
            },
        },
        "train_evaluation": {"eval_batch_size": 2, "metrics": [{"id": "length"}]},
        "device": "cpu",
    }


def vision_base() -> dict[str, Any]:
    blocks = run_base()
    model = f"{FOLDERS}/qwen2_vl"
    blocks["tokenizer"]["model_name"] = model
    blocks["datapool"] = {"id": "tests.vision_models:ColourPool", "args": {"n_train": 4, "n_eval": 2, "side": 112}}
    blocks["env"]["args"]["max_prompt_length"] = 64
    blocks["alg"]["policy"]["id"] = "vision_lm_actor_critic_policy"
    blocks["alg"]["policy"]["args"]["model_name"] = model
    return blocks


BASES = {
    "run": run_base,
    "vision": vision_base,
    **{
        algorithm: lambda algorithm=algorithm: run_base(algorithm)
        for algorithm in ("ppo", "nlpo", "grpo", "a2c", "trpo")
    },
    "seq2seq": lambda: run_base(family="seq2seq"),
    "supervised": supervised_base,
}


def with_values(blocks: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with other values at dotted paths; `metrics.id` is that of the first."""
    blocks = copy.deepcopy(blocks)
    for path, value in values.items():
        container: Any = blocks
        *parents, key = re.sub(r"\b(metrics|callbacks|held_out)\.", r"\1.0.", path).split(".")
        for parent in parents:
            container = container[int(parent)] if isinstance(container, list) else container.setdefault(parent, {})
        container[int(key) if isinstance(container, list) else key] = value
    return blocks


def placed(value: Any, folders: Path) -> Any:
    """The same with the folder of the models where its name stands."""
    if isinstance(value, dict):
        return {key: placed(item, folders) for key, item in value.items()}
    if isinstance(value, list):
        return [placed(item, folders) for item in value]
    return value.replace(FOLDERS, str(folders)) if isinstance(value, str) else value


# --- the keys of a run -----------------------------------------------------------------------------------------------

_SMALL_RATE = {"alg.args.learning_rate": 1e-3}
_FAR = {"alg.policy.args.reference_model": f"{FOLDERS}/gpt2_other"}
_TARGET = {**_FAR, "alg.kl_div.target_kl": 0.01}
_SICK = see.alarms()
_GROUPS = {"alg.id": "grpo", "alg.args.group_size": 2, "alg.args.learning_rate": 1e-2}
_PTX = {"alg.ptx": {"data": {"id": "film_opinions", "args": {"n_train": 8}}, "coeff": 0.5, "batch_size": 2}}
_HEAD = {"alg.policy.args.value_head_init": "default"}
_CHAT = {"tokenizer.model_name": f"{FOLDERS}/chat"}
_DATED = {"tokenizer.model_name": f"{FOLDERS}/dated"}
_TWO_METRICS = {"train_evaluation.metrics": [{"id": "length"}, {"id": "distinct_n"}]}
_STOPS_EARLY = {
    "train_evaluation.metrics": [{"id": "length"}],
    "train_evaluation.early_stopping": {"metric": "length/words", "mode": "max", "patience": 2},
}

CALLBACKS = "tests.callbacks.test_callbacks"
_CALLBACK = {"train_evaluation.callbacks": [{"id": f"{CALLBACKS}:Counting", "args": {"name": "n"}}]}

_AVERAGE = {"train_evaluation.average": {"decay": 0.5}}
_BEMA = {"train_evaluation.average": {"decay": None, "bias_power": 0.2}}
AVERAGES = {
    "train_evaluation.average.decay": Row(0.9, see.averaged, _AVERAGE),
    "train_evaluation.average.every": Row(2, see.averaged, {**_AVERAGE, "train_evaluation.n_iters": 2}),
    "train_evaluation.average.ema_power": Row(0.7, see.averaged, _BEMA),
    "train_evaluation.average.bias_power": Row(None, see.averaged, _BEMA),
    "train_evaluation.average.lag": Row(2.0, see.averaged, _BEMA),
}

_TINY = {
    "tiny_model": {"steps": 2, "batch_size": 2, "n_positions": 400},
    "tokenizer.model_name": "embedded/tiny_model",
    "alg.policy.args.model_name": "embedded/tiny_model",
}

DIALOGUE = {
    "env.dialogue": {"id": "tests.dialogues:Chatter", "args": {"end": 0.01}, "max_turns": 3, "max_turn_length": 6},
    "env.args.max_prompt_length": 60,
    "env.args.max_episode_length": 50,
    "alg.policy.args.generation_kwargs.max_new_tokens": None,
}
"""A run of dialogues."""

CHECKPOINT_IN_PARTS = Row(
    "split", lambda made: made.run.config.distributed.checkpoint, {"distributed.strategy": "fsdp"}
)
"""What it writes needs several processes: see `tests/distributed`."""

RUN: dict[str, Row | Silent] = {
    "tokenizer.model_name": Row(f"{FOLDERS}/other_tokens", see.prompts),
    "tokenizer.pad_token_as_eos_token": Row(
        False, lambda made: made.run.tokenizer.pad_token, {"tokenizer.model_name": f"{FOLDERS}/no_pad"}
    ),
    "tokenizer.padding_side": Row("right", see.saved_tokenizer),
    "tokenizer.truncation_side": Row("right", see.saved_tokenizer),
    "tokenizer.max_length": Silent("in a supervised run"),
    "tokenizer.trust_remote_code": Row(True, see.loaded_with("trust_remote_code", "AutoTokenizer")),
    "tokenizer.chat_template": Row(True, see.prompts, _CHAT),
    "tokenizer.system_prompt": Row(
        "Be.", see.prompts, {**_CHAT, "tokenizer.chat_template": True, "env.args.max_prompt_length": 100}
    ),
    "tokenizer.keep_special_tokens": Row(["a"], lambda made: sorted(kept_ids(made.run.tokenizer))),
    "tokenizer.add_tokens": Row(["<think>"], lambda made: len(made.run.tokenizer)),
    "tokenizer.template_date": Row(
        "2020-02-03", see.prompts, {**_DATED, "tokenizer.chat_template": True, "env.args.max_prompt_length": 100}
    ),
    "tokenizer.tools_in_system": Silent("without tools"),
    "reward_fn.id": Row("repetition_penalty", see.paid, also={"reward_fn.args": {"ngram_size": 1}}),
    "reward_fn.args": Row({"max_length": 2}, see.paid),
    "datapool.id": Row("dummy_pool", see.prompts, also={"datapool.args": {"prompt": "x"}}),
    "datapool.args": Row({"n_train": 8, "n_eval": 3, "seed": 1}, see.prompts),
    "datapool.sampler.id": Row(
        "tests.config.test_every_key:Backwards", see.prompts, {"datapool.sampler": {"id": "difficulty"}}
    ),
    "datapool.sampler.args": Row(
        {"hard_below": 0.6}, see.logged("rollout_info/sampler/useful"), {"datapool.sampler": {"id": "difficulty"}}
    ),
    "env.n_envs": Row(3, see.logged("rollout_info/n_episodes")),
    "env.vec_env": Row("dummy", lambda made: type(made.run.env).__name__),
    "env.reward_workers": Row(1, lambda made: made.run.env.scorer._workers is not None),
    "env.reward_timeout": Row(0.001, see.paid, {"reward_fn.id": "slow", "reward_fn.args": {}}),
    "env.dialogue.id": Row("guess_number", see.prompts, DIALOGUE, {"env.dialogue.args": {}}),
    "env.dialogue.args": Row({"end": 0.99}, see.texts, DIALOGUE),
    "env.dialogue.max_turns": Row(1, see.logged("rollout_info/environment/turns"), DIALOGUE),
    "env.dialogue.max_turn_length": Row(1, see.texts, DIALOGUE),
    "env.dialogue.threads": Row(2, lambda made: made.run.env.dialogues.settings.threads, DIALOGUE),
    "env.dialogue.timeout": Row(9.0, lambda made: made.run.env.dialogues.settings.timeout, DIALOGUE),
    "alg.id": Row("a2c", lambda made: type(made.algorithm).__name__, also={"alg.args": {"n_steps": 5}}),
    "alg.policy.id": Row(
        "seq2seq_lm_actor_critic_policy",
        lambda made: type(made.policy).__name__,
        also={"alg.policy.args.model_name": f"{FOLDERS}/t5"},
    ),
    "alg.ptx.data.id": Row("sums", see.weights, {"alg.ptx": {**_PTX["alg.ptx"], "data": {"id": "film_opinions"}}}),
    "alg.ptx.data.args": Row({"n_train": 3}, see.weights, _PTX),
    "alg.ptx.coeff": Row(2.0, see.weights, _PTX),
    "alg.ptx.batch_size": Row(5, see.weights, _PTX),
    "alg.ptx.max_length": Row(3, see.weights, _PTX),
    "alg.kl_div.coeff": Row(0.5, see.weights, _FAR),
    "alg.kl_div.target_kl": Row(0.01, see.kl_coefficient, _FAR),
    "alg.kl_div.norm_reward": Row(True),
    "alg.kl_div.controller": Row("fixed", see.kl_coefficient, _TARGET),
    "alg.kl_div.gain": Row(1.0, see.kl_coefficient, _TARGET),
    "alg.kl_div.horizon": Row(100, see.kl_coefficient, {**_TARGET, "alg.kl_div.controller": "horizon"}),
    "alg.kl_div.estimator": Row("k3", see.weights, _FAR),
    "alg.kl_div.placement": Row("reward", see.weights, {**_FAR, **_GROUPS}),
    "alg.kl_div.top_k": Row(2, see.weights, {**_FAR, **_GROUPS, "alg.kl_div.estimator": "top_k"}),
    "alg.kl_div.max_coeff": Row(0.05, see.logged("rollout_info/kl_coeff")),
    "train_evaluation.eval_batch_size": Row(1, see.whole_run),
    "train_evaluation.n_iters": Row(1, see.whole_run),
    "train_evaluation.eval_every": Row(2, see.whole_run),
    "train_evaluation.save_every": Row(1, see.whole_run),
    "train_evaluation.keep_last": Row(1, see.whole_run, {"train_evaluation.save_every": 1}),
    "train_evaluation.keep_best.metric": Row(
        "diversity_metrics/distinct-1",
        see.best,
        {**_TWO_METRICS, "train_evaluation.keep_best": {"metric": "length/words", "mode": "max"}},
    ),
    "train_evaluation.keep_best.mode": Row(
        "min",
        see.best,
        {
            **_TWO_METRICS,
            "train_evaluation.keep_best": {"metric": "diversity_metrics/distinct-1", "mode": "max"},
            "alg.args.learning_rate": 0.1,
        },
    ),
    "train_evaluation.early_stopping.metric": Row(
        "diversity_metrics/distinct-1",
        see.stops_after,
        {
            **_TWO_METRICS,
            "train_evaluation.early_stopping": {"metric": "length/words", "mode": "max", "patience": 1},
        },
    ),
    "train_evaluation.early_stopping.mode": Row("min", see.stops_after, _STOPS_EARLY),
    "train_evaluation.early_stopping.patience": Row(1, see.stops_after, _STOPS_EARLY),
    "train_evaluation.callbacks.id": Row(f"{CALLBACKS}:CountingMore", see.callbacks, _CALLBACK),
    "train_evaluation.callbacks.args": Row({"name": "m"}, see.callbacks, _CALLBACK),
    **AVERAGES,
    "train_evaluation.metrics.id": Row("distinct_n", see.evaluated),
    "train_evaluation.metrics.args": Row(
        {"pattern": "zzz"}, see.evaluated, {"train_evaluation.metrics": [{"id": "regex", "args": {"pattern": "."}}]}
    ),
    "train_evaluation.metrics.name": Row("mine", see.evaluated),
    "train_evaluation.generation_kwargs": Row({"max_new_tokens": 1}, see.whole_run),
    "train_evaluation.max_eval_samples": Row(1, see.evaluated),
    "train_evaluation.save_model": Row(False, see.whole_run),
    "train_evaluation.n_credit_episodes": Row(1, see.whole_run),
    "train_evaluation.save_rollouts": Row(True, see.whole_run),
    "train_evaluation.replay": Row("no/such/run", lambda made: with_replay(made.run.config)),
    "train_evaluation.accept_edited_rollouts": Row(
        True, see.replays_of_edited_rollouts, {"train_evaluation.replay": "no/such/run"}
    ),
    "seed": Row(1, see.texts),
    "device": Row("cuda:7", lambda made: made.policy.device.type),
    "n_threads": Row(
        2 if torch.get_num_threads() == 1 else 1,
        lambda made: torch.get_num_threads(),
        {"n_threads": torch.get_num_threads()},
    ),
    "deterministic": Row(True, see.deterministic),
    "distributed.strategy": Row("fsdp", lambda made: estimate_memory(made.run.config, 2).parts["policy weights"]),
    "distributed.reshard_after_forward": Row(
        False, lambda made: estimate_memory(made.run.config, 2).gathered, {"distributed.strategy": "fsdp"}
    ),
    "distributed.checkpoint": CHECKPOINT_IN_PARTS,
    "distributed.timeout": Row(60.0, see.waits),
    "tiny_model.family": Row(
        "t5",
        lambda made: type(made.policy).__name__,
        _TINY,
        also={"alg.policy.id": "seq2seq_lm_actor_critic_policy", "env.args.context_start_token": 0},
    ),
    "tiny_model.n_layer": Row(1, others=_TINY),
    "tiny_model.n_embd": Row(32, others=_TINY),
    "tiny_model.n_head": Row(2, others=_TINY),
    "tiny_model.n_positions": Row(401, lambda made: made.policy.policy_model.config.n_positions, _TINY),
    "tiny_model.steps": Row(1, others=_TINY),
    "tiny_model.batch_size": Row(3, others=_TINY),
    "tiny_model.lr": Row(1e-3, others=_TINY),
    "tiny_model.wrong_answers": Row(1.0, others=_TINY),
    "tiny_model.seed": Row(1, others=_TINY),
    "doctor.enabled": Row(
        False, lambda made: see.whole_run(made).get("alarms.jsonl"), {"doctor.min_entropy": 1e6, "doctor.patience": 1}
    ),
    "doctor.patience": Row(2, _SICK),
    "doctor.window": Row(5, see.alarms(value_loss=0.1)),
    "doctor.max_ratio_gap": Row(None, _SICK),
    "doctor.kl_times_target": Row(2.0, _SICK, {"alg.kl_div.target_kl": 0.1}),
    "doctor.max_kl": Row(3.0, _SICK),
    "doctor.max_negative_kl": Row(None, see.alarms(kl=-0.5)),
    "doctor.min_entropy": Row(None, see.alarms(entropy=1e-3)),
    "doctor.min_entropy_share": Row(0.1, see.alarms(entropy=[9.0] + [0.02] * 14)),
    "doctor.min_reward_spread": Row(None, _SICK),
    "doctor.min_differing_groups": Row(None, see.alarms(groups_differing=0.0, groups_kept=1.0)),
    "doctor.min_kept_groups": Row(None, see.alarms(groups_kept=0.05)),
    "doctor.max_value_loss_growth": Row(5.0, _SICK),
    "doctor.min_explained_variance": Row(None, see.alarms(value_loss=0.1, reward_spread=0.5)),
    "doctor.max_truncated_share": Row(None, _SICK),
    "doctor.max_equal_answer_share": Row(None, see.alarms(equal_answers=1.0)),
    "doctor.max_failed_calls": Row(None, see.alarms(calls=2.0, failed_calls=1.5)),
    "doctor.unused_tools": Row(False, see.alarms(**{"calls/search": 0.0})),
    "doctor.max_empty_share": Row(None, _SICK),
    "doctor.max_duplicate_share": Row(None, _SICK),
    "doctor.max_near_duplicate_share": Row(None, see.alarms(duplicates=0.0)),
    "doctor.max_length_correlation": Row(None, _SICK),
    "doctor.max_clip_fraction": Row(0.4, _SICK),
    "doctor.max_approx_kl": Row(0.1, see.alarms(clip_fraction=0.0)),
    "doctor.min_minibatch_episodes": Row(None, _SICK),
    "doctor.no_learning": Row(False, _SICK),
    "doctor.max_held_out_fall": Row(None, _SICK, {"doctor.held_out": [{"metric": "length/words", "mode": "max"}]}),
    "doctor.held_out.metric": Row(
        "diversity_metrics/distinct-1",
        _SICK,
        {
            "doctor.held_out": [{"metric": "length/words", "mode": "max"}],
            "train_evaluation.metrics": [{"id": "length"}, {"id": "distinct_n"}],
        },
    ),
    "doctor.held_out.mode": Row("min", _SICK, {"doctor.held_out": [{"metric": "length/words", "mode": "max"}]}),
}

ENV: dict[str, Row | Silent] = {
    "max_episode_length": Row(3, see.lengths),
    "max_prompt_length": Row(3, see.prompts),
    "terminate_on_eos": Row(False, lambda made: made.algorithm.collector.eos_token_ids),
    "prompt_truncation_side": Row("right", see.prompts, {"env.args.max_prompt_length": 3}),
    "priority_scale": Row(5.0, see.prompts, {"datapool.id": "weighted", "datapool.args": {}, "env.n_envs": 16}),
}

_MASKLESS = {"alg.policy.args.peft": {"r": 2}}

POLICY: dict[str, Row | Silent] = {
    "model_name": Row(f"{FOLDERS}/gpt2_other"),
    "optimizer": Row({"id": "adamw_8bit"}, lambda made: type(made.policy.optimizer)),
    "optimizer_kwargs": Row({"betas": [0.5, 0.5]}),
    "offload": Row("moments", lambda made: made.policy._offloads_moments),  # its effect: tests/policies/test_offload.py
    "weight_decay": Row(0.5),
    "apply_model_parallel": Silent("without an effect"),
    "generation_kwargs": Row({"do_sample": True, "top_k": 1, "max_new_tokens": 6}, see.texts),
    "engine": Row({"id": "tests.engines.constant:Constant", "args": {"token": 7}}, see.texts),
    "prompt_truncation_side": Row("right", see.cut_prompts, {"env.args.max_prompt_length": 3}),
    "critic": Row("shared", lambda made: made.policy.value_model is None),
    "critic_model": Row(f"{FOLDERS}/gpt2_other"),
    # tests/policies/test_devices.py sees the device itself
    "critic_device": Row("cpu", lambda made: made.policy.arguments.critic_device),
    "critic_frozen": Row(["mlp"]),
    "value_head_init": Row("default"),
    "reference_model": Row(f"{FOLDERS}/gpt2_other", see.logged("rollout_info/ref_log_prob")),
    "reference_device": Row("cpu", lambda made: made.policy.arguments.reference_device),
    "teacher_model": Row(
        f"{FOLDERS}/gpt2_other",
        see.logged("rollout_info/ref_log_prob"),
        also={"alg.id": "opd", "alg.args": {"n_steps": 5}},
    ),
    "dtype": Row("bfloat16", see.logged("rollout_info/log_prob")),
    "generation_dtype": Row(
        "bfloat16", see.logged("rollout_info/importance_weight"), {"alg.args.importance_correction": "tis"}
    ),
    "reference_dtype": Row("bfloat16", see.logged("rollout_info/ref_log_prob")),
    "attn_implementation": Row("eager", lambda made: made.policy.policy_model.config._attn_implementation),
    "gradient_checkpointing": Row(True, see.modules(lambda module: getattr(module, "gradient_checkpointing", None))),
    "activation_offload": Row(True, see.saved_in_main_memory),
    "compile": Row(True, lambda made: [name for name, _ in made.loaded].count("compile")),
    "dropout": Row(True),
    "peft": Row({"r": 2}, see.adapters),
    "merge_on_save": Row(True, see.saved_files, {"alg.policy.args.peft": {"r": 2}}),
    "quantization": Row({"id": "nf4"}, see.logged("rollout_info/log_prob"), {"alg.policy.args.peft": {"r": 2}}),
    "logits_budget_mb": Row(1, lambda made: made.policy._logits_budget),
    "packing": Row("auto", lambda made: made.policy.arguments.packing),  # its effect: tests/policies/test_packing.py
    # tests/policies/test_speedups.py has the effect of each of them
    "speedups": Row({"keep_freed_memory": False}, lambda made: made.policy.arguments.used_speedups),
    "trust_remote_code": Row(True, see.loaded_with("trust_remote_code", "AutoConfig")),
}

MASKS: dict[str, Row | Silent] = {
    "mask_type": Row("topk", lambda made: made.policy.mask_model is None),
    "top_mask": Row(5, see.logged("rollout_info/n_allowed")),
    "min_tokens_to_keep": Row(
        50,
        see.logged("rollout_info/n_allowed"),
        {"alg.policy.args.mask_type": "learned_top_p", "alg.policy.args.top_mask": 0.01},
    ),
    "target_update_iterations": Row(2, see.logged("nlpo/mask_updates")),
    "mask_ema": Row(0.5, see.weights_of_two),
}

VISION: dict[str, Row | Silent] = {
    "train_vision": Row("all"),
    "max_pixels": Row(3200, lambda made: made.run.policy.pictures.encode(made.run.samples["train"][0], 99).tolist()),
}

_DROPOUT = {"alg.policy.args.dropout": True}

LORA: dict[str, Row | Silent] = {
    "r": Row(3, see.adapters),
    "lora_alpha": Row(16, see.adapters),
    "lora_dropout": Row(0.5, see.modules(lambda module: getattr(module, "p", None)), _DROPOUT),
    "target_modules": Row("all-linear", see.adapters),
    "exclude_modules": Row(["c_attn"], see.adapters, {"alg.policy.args.peft.target_modules": "all-linear"}),
    "layers_to_transform": Row([0], see.adapters),
    "layers_pattern": Row(
        "no_such_list",
        see.adapters,
        {"alg.policy.args.peft.layers_to_transform": [0], "alg.policy.args.peft.target_modules": ["c_attn"]},
    ),
    "rank_pattern": Row({"c_attn": 5}, see.adapters),
    "alpha_pattern": Row({"c_attn": 5}, see.adapters),
    "use_rslora": Row(True, see.adapters),
    "use_dora": Row(True, see.adapters),
    "init_lora_weights": Row("gaussian", see.adapter_weights),
    "trainable_token_indices": Row([5], see.adapters),
}

_PRETRAIN = {"alg.args.critic_pretrain": {"max_rollouts": 3, "patience": 2, "min_gain": 9.0, "n_epochs": 2}}

ON_POLICY: dict[str, Row | Silent] = {
    "learning_rate": Row(1e-3),
    "critic_learning_rate": Row(1e-3),
    "learning_rate_schedule": Row("linear", see.weights_of_two),
    "warmup_iterations": Row(3),
    "n_steps": Row(12, see.logged("rollout_info/n_episodes")),
    "n_episodes": Row(4, see.logged("rollout_info/n_episodes"), {"alg.args": {"n_episodes": 8, "learning_rate": 1e-2}}),
    "group_size": Row(2, see.texts),
    "gamma": Row(0.5),
    "gae_lambda": Row(0.2),
    "value_gae_lambda": Row(0.2),
    "gae_length_alpha": Row(0.1),
    "critic_only_iterations": Row(1),
    "critic_pretrain.max_rollouts": Row(1, others=_PRETRAIN),
    "critic_pretrain.n_epochs": Row(1, others=_PRETRAIN),
    "critic_pretrain.learning_rate": Row(1e-3, others=_PRETRAIN),
    "critic_pretrain.patience": Row(1, others=_PRETRAIN),
    "critic_pretrain.min_gain": Row(0.0, lambda made: made.algorithm.pretraining.settings.min_gain, _PRETRAIN),
    "bootstrap_truncated": Row(True, others=_HEAD),
    "ent_coef": Row(0.5),
    "vf_coef": Row(2.0),
    "max_grad_norm": Row(0.01),
    "reference_update_iterations": Row(1, see.weights_of_two),
    "reference_mixing": Row(0.1, see.weights_of_two, {"alg.args.reference_update_iterations": 1}),
    "non_finite": Row("skip", see.after_a_nan),
    "micro_batch_size": Row(6, see.passes),
    "seed": Row(5, see.texts),
    "device": Row("cuda:7", lambda made: made.policy.device.type),
    "verbose": Row(1, see.table_lines),
    "tensorboard_log": Row("here", see.event_files),
    "create_eval_env": Silent("without an effect"),
}
_LONG = {
    "env.args.max_episode_length": 40,
    "env.n_envs": 16,
    "alg.args.batch_size": 1000,
    "alg.policy.args.generation_kwargs.max_new_tokens": 40,
}
_EPOCHS = {"alg.args.n_epochs": 2}
_SMALL_CLIP = {**_EPOCHS, "alg.args.clip_range": 1e-4}
_COOL = {"alg.policy.args.generation_kwargs.temperature": 0.5}
_IN_EPISODES = {"n_steps": 5, "learning_rate": 1e-2, "minibatch_episodes": 3}
_CORRECTION = {
    "importance_correction": Row("icepop", others=_COOL),
    "correction_range": Row([0.99, 1.01], others={**_COOL, "alg.args.importance_correction": "tis"}),
}
_MIXED = {"reward_fn": {"id": "regex", "args": {"pattern": "[a-e]"}}}
_LONG_STEP = {"alg.args.target_kl": 100.0, "alg.args.cg_max_steps": 15, **_HEAD}

# A2C's update is that of PPO's base class: only what it has of its own, or with another default, is looked at again.
ALGORITHMS: dict[str, tuple[type, dict[str, Row | Silent]]] = {
    "ppo": (
        PPOArguments,
        {
            **ON_POLICY,
            "batch_size": Row(6),
            "minibatch_episodes": Row(1, others={"alg.args": {**_IN_EPISODES, "n_epochs": 2}}),
            "n_epochs": Row(1),
            "critic_epochs": Row(3),
            "clip_range": Row(1e-3),
            "clip_range_high": Row(1e-6, others={"alg.args.learning_rate": 1e-4}),
            "dual_clip": Row(1.001),
            "ratio_band": Row([0.999, 1.001]),
            "nll_coef": Row(0.5, others={"alg.args.nll_coef": 0.1, "alg.args.nll_threshold": -100.0}),
            "nll_threshold": Row(-100.0, others={"alg.args.nll_coef": 0.5}),
            "clip_range_vf": Row(1e-3),
            "normalize_advantage": Row(True),
            "target_kl": Row(1e-9),
            "length_sorted_minibatches": Row(True, lambda made: made.algorithm.rollout_buffer.sort_by_length),
            "loss_aggregation": Row("seq_mean_token_mean", see.weights, _LONG),
            **_CORRECTION,
        },
    ),
    "grpo": (
        CriticFreeArguments,
        {
            "batch_size": Row(6),
            "minibatch_episodes": Row(
                4, others={"alg.args": {**_IN_EPISODES, "group_size": 2, "minibatch_episodes": 2}}
            ),
            "n_epochs": Row(2),
            "group_size": Row(4),
            "task_reward": Row(False),
            "gamma": Row(0.5, others={"alg.args.baseline": "none", "alg.args.scale": "none"}),
            "gae_lambda": Silent("lambda of generalized"),
            "baseline": Row("length_weighted"),
            "scale": Row("none"),
            "ratio_level": Row("sequence", others=_SMALL_CLIP),
            "surrogate": Row("cpgd", others=_SMALL_CLIP),
            "clip_range": Row(1e-6, others=_EPOCHS),
            "clip_range_high": Row(1e-6, others=_EPOCHS),
            "dual_clip": Row(1.000001, others=_EPOCHS),
            "drift_coef": Row(10.0, others=_EPOCHS),
            "loss_aggregation": Row("token_mean", see.weights, _LONG),
            "dynamic_sampling": Row(2, see.logged("rollout_info/groups_kept_share"), _MIXED),
            "overlong_buffer": Row(1.0),
            "first_token_temperature": Row(10.0, see.texts),
            "target_kl": Row(1e-9, others=_EPOCHS),
            "length_sorted_minibatches": Row(True, lambda made: made.algorithm.rollout_buffer.sort_by_length),
            **{key: ON_POLICY[key] for key in ("learning_rate", "n_steps", "max_grad_norm")},
        },
    ),
    "a2c": (
        A2CArguments,
        {
            **{key: ON_POLICY[key] for key in ("learning_rate", "n_steps", "gae_lambda")},
            **{"rms_prop_eps": Row(1.0), "use_rms_prop": Row(False), "normalize_advantage": Row(True)},
        },
    ),
    "trpo": (
        TRPOArguments,
        {
            **ON_POLICY,
            "batch_size": Row(6),
            "minibatch_episodes": Row(1, others={"alg.args": {**_IN_EPISODES, "n_critic_updates": 2}}),
            "normalize_advantage": Row(False),
            "target_kl": Row(1e-4),
            "cg_max_steps": Row(1),
            "cg_damping": Row(10.0),
            "line_search_shrinking_factor": Row(0.1, others=_LONG_STEP),
            "line_search_max_iter": Row(1, others=_LONG_STEP),
            "n_critic_updates": Row(1),
            "sub_sampling_factor": Row(4),
        },
    ),
}

_EVERY_STEP = {"alg.training_args.eval_strategy": "steps", "alg.training_args.eval_steps": 1}

_VISION = {
    "alg.model_type": "vision",
    "alg.model_name": f"{FOLDERS}/qwen2_vl",
    "tokenizer.model_name": f"{FOLDERS}/qwen2_vl",
    "datapool": {"id": "shapes", "args": {"n_train": 4, "n_eval": 2}},
}


def memory_of_two_processes(made: Any) -> MemoryEstimate:
    return estimate_supervised_memory(made.run.config, prompt_tokens=4, response_tokens=4, n_processes=2)


SUPERVISED: dict[str, Row | Silent] = {
    "tokenizer.model_name": Row(f"{FOLDERS}/other_tokens", see.examples),
    "tokenizer.pad_token_as_eos_token": Row(
        False, lambda made: made.run.tokenizer.pad_token, {"tokenizer.model_name": f"{FOLDERS}/no_pad"}
    ),
    "tokenizer.padding_side": Row("right", see.saved_tokenizer),
    "tokenizer.truncation_side": Row("right", see.cut_prompts, {"tokenizer.max_length": 3}),
    "tokenizer.max_length": Row(3, see.examples),
    "tokenizer.trust_remote_code": Row(True, see.loaded_with("trust_remote_code", "AutoTokenizer")),
    "tokenizer.chat_template": Row(True, see.examples, _CHAT),
    "tokenizer.system_prompt": Row("Be.", see.examples, {**_CHAT, "tokenizer.chat_template": True}),
    "tokenizer.keep_special_tokens": Row(["a"], lambda made: sorted(kept_ids(made.run.tokenizer))),
    "tokenizer.add_tokens": Row(["<think>"], lambda made: len(made.run.tokenizer)),
    "tokenizer.template_date": Row("2020-02-03", see.examples, {**_DATED, "tokenizer.chat_template": True}),
    "tokenizer.tools_in_system": Silent("without tools"),
    "datapool.id": Row("weighted", see.examples, also={"datapool.args": {}}),
    "datapool.args": Row({"n_train": 6, "n_eval": 3, "seed": 1}, see.examples),
    "alg.model_type": Row(
        "seq2seq", lambda made: made.run.generator.is_encoder_decoder, also={"alg.model_name": f"{FOLDERS}/t5"}
    ),
    "alg.train_vision": Row(
        "all",
        lambda made: sorted(name for name, weight in made.run.model.named_parameters() if weight.requires_grad),
        _VISION,
    ),
    "alg.max_pixels": Row(1000, see.examples, _VISION),
    "alg.model_name": Row(f"{FOLDERS}/gpt2_other", see.written, {"alg.generation_kwargs": {"max_new_tokens": 6}}),
    "alg.generation_kwargs": Row({"max_new_tokens": 1}, see.written),
    "alg.training_args": Row({"max_steps": 1, "save_strategy": "no"}, see.tuned),
    "alg.attn_implementation": Row("eager", lambda made: made.run.model.config._attn_implementation),
    "alg.separator": Row(" => ", see.examples),
    "alg.loss_on_prompt": Row(True, see.examples),
    "alg.logits_budget_mb": Row(1, lambda made: made.run.objective.logits_budget),
    "alg.packing": Row("auto", lambda made: made.run.objective.packing),
    "alg.activation_offload": Row(True, lambda made: see.saved_in_main_memory(made, see.tuned)),
    "alg.block_length": Row(
        3,
        see.examples,
        {
            "datapool": {"id": "jsonl", "args": {"path": f"{FOLDERS}/texts.jsonl", "format": "text"}},
            "train_evaluation.generate": False,
            "train_evaluation.metrics": [],
        },
    ),
    "alg.early_stopping_patience": Row(
        1,
        see.tuned,
        {
            "alg.training_args.learning_rate": 10.0,
            "alg.training_args.max_steps": 3,
            "alg.training_args.save_strategy": "best",
            "alg.training_args.metric_for_best_model": "loss",
            **_EVERY_STEP,
        },
    ),
    "alg.early_stopping_threshold": Row(
        100.0,
        see.tuned,
        {
            "alg.early_stopping_patience": 1,
            "alg.training_args.max_steps": 3,
            "alg.training_args.save_strategy": "best",
            **_EVERY_STEP,
        },
    ),
    "alg.peft": Row({"r": 2}, lambda made: sorted(name for name, _ in made.run.model.named_parameters())),
    "alg.merge_on_save": Row(True, see.tuned, {"alg.peft": {"r": 2}}),
    "alg.quantization": Row(
        {"id": "int8"},
        lambda made: sorted(name for name, _ in made.run.model.named_parameters()),
        {"alg.peft": {"r": 2}},
    ),
    "train_evaluation.eval_batch_size": Row(1, see.written_together),
    "train_evaluation.metrics.id": Row("distinct_n", see.written),
    "train_evaluation.metrics.args": Row(
        {"pattern": "zzz"}, see.written, {"train_evaluation.metrics": [{"id": "regex", "args": {"pattern": "."}}]}
    ),
    "train_evaluation.metrics.name": Row("mine", see.written),
    "train_evaluation.max_eval_samples": Row(1, see.written),
    "train_evaluation.generate": Row(False, see.written, {"train_evaluation.metrics": []}),
    "train_evaluation.save_model": Row(False, see.tuned),
    "train_evaluation.callbacks.id": Row(f"{CALLBACKS}:CountingMore", see.callbacks, _CALLBACK),
    "train_evaluation.callbacks.args": Row({"name": "m"}, see.callbacks, _CALLBACK),
    **AVERAGES,
    "train_evaluation.average.every": Row(2, see.averaged, _AVERAGE),
    "seed": Row(1, see.tuned),
    "device": Row("cuda:7", lambda made: made.run.model.device.type),
    "deterministic": Row(True, see.deterministic),
    "distributed.strategy": Row("fsdp", lambda made: memory_of_two_processes(made).parts["model weights"]),
    "distributed.reshard_after_forward": Row(
        False,
        lambda made: memory_of_two_processes(made).gathered,
        {"distributed.strategy": "fsdp", "alg.model_name": f"{FOLDERS}/gpt2_deep"},
    ),
    "distributed.checkpoint": CHECKPOINT_IN_PARTS,
    "distributed.timeout": Row(60.0, see.waits),
    "n_threads": RUN["n_threads"],
}


def keys_of(block: Any, without: tuple[str, ...] = ()) -> Iterator[str]:
    """The keys of a block, those of blocks inside it included; a key that takes one value only has nothing to show."""
    for argument in signature_of(block).arguments:
        if argument.name in without or argument.name == "notices":
            continue
        inner = [
            kind for kind in kinds_in(argument.annotation) if inspect.isclass(kind) and dataclasses.is_dataclass(kind)
        ]
        if inner:
            yield from (f"{argument.name}.{key}" for key in keys_of(inner[0]))
        elif (
            len(set(typing.get_args(argument.annotation))) != 1
            or typing.get_origin(argument.annotation) is not typing.Literal
        ):
            yield argument.name


def kinds_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in typing.get_args(annotation):
        yield from kinds_in(inner)


def own_keys(arguments: type) -> set[str]:
    """The arguments that a class defines itself, or with another default."""
    return {name for name, kind in arguments.__annotations__.items() if not str(kind).startswith("ClassVar")}


ELSEWHERE = {"env.args", "alg.args", "alg.policy.args"}
"""Keys whose own keys are enumerated from the class that takes them."""

TABLES: dict[str, tuple[str, str, set[str], dict[str, Row | Silent]]] = {
    "run": ("run", "", set(keys_of(RunConfig)) - ELSEWHERE, RUN),
    "env": ("run", "env.args.", set(keys_of(EnvArguments)) - {"context_start_token"}, ENV),
    "env of seq2seq": ("seq2seq", "env.args.", {"context_start_token"}, {"context_start_token": Row(7, see.contexts)}),
    "policy": ("run", "alg.policy.args.", set(keys_of(PolicyArguments)), POLICY),
    "masks": ("nlpo", "alg.policy.args.", set(keys_of(MaskablePolicyArguments)) - set(keys_of(PolicyArguments)), MASKS),
    "vision": (
        "vision",
        "alg.policy.args.",
        set(keys_of(VisionPolicyArguments)) - set(keys_of(PolicyArguments)),
        VISION,
    ),
    "lora": ("run", "alg.policy.args.peft.", set(keys_of(LoraArguments)), LORA),
    **{
        name: (name, "alg.args.", own_keys(arguments) if name in ("a2c", "grpo") else set(keys_of(arguments)), table)
        for name, (arguments, table) in ALGORITHMS.items()
    },
    "supervised": ("supervised", "", set(keys_of(SupervisedConfig)), SUPERVISED),
}
"""Name -> base, what stands before each key, the keys of the schema, the rows."""


@pytest.mark.parametrize("name", TABLES)
def test_every_key_of_the_schema_has_a_row(name):
    _, _, keys, rows = TABLES[name]
    assert keys == rows.keys()
    assert set(keys_of(NLPOArguments)) == set(keys_of(PPOArguments))


ROWS = [(name, key) for name, (_, _, _, rows) in TABLES.items() for key, row in rows.items() if isinstance(row, Row)]
SILENT = [(name, key) for name, (_, _, _, rows) in TABLES.items() for key in rows if (name, key) not in ROWS]


@pytest.fixture(scope="module")
def seen_before():
    """What bases show, each looked at once."""
    return {}


@pytest.mark.parametrize(("name", "key"), ROWS)
def test_another_value_makes_another_run(name, key, folders, tmp_path, monkeypatch, seen_before):
    base, prefix, _, rows = TABLES[name]
    row = rows[key]
    assert isinstance(row, Row)
    before = with_values(BASES[base](), row.others)
    after = with_values(before, {**row.also, f"{prefix}{key}": row.value})
    assert before != after

    def shown(blocks: dict[str, Any], folder: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            return see.observed(placed(blocks, folders), row.sees, folder, patch)

    same_look = repr((before, row.sees))
    if same_look not in seen_before:
        seen_before[same_look] = shown(before, tmp_path / "before")
    assert not isinstance(seen_before[same_look], see.Refused), seen_before[same_look]
    assert shown(after, tmp_path / "after") != seen_before[same_look]


@pytest.mark.parametrize(("name", "key"), SILENT)
def test_a_key_without_meaning_says_so(name, key):
    _, _, _, rows = TABLES[name]
    row = rows[key]
    assert isinstance(row, Silent)
    assert row.words in helps()[key.rpartition(".")[2]], "its help"


def helps() -> dict[str, str]:
    """Key -> help, of the keys without meaning."""
    from rl4lms_like.config.run_config import DistributedConfig, SupervisedAlgConfig, TokenizerConfig

    found: dict[str, str] = {}
    for block in (PPOArguments, PolicyArguments, TokenizerConfig, SupervisedAlgConfig, DistributedConfig):
        found |= help_of(block)
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_null_is_no_gradient_clipping_and_not_the_default(algorithm, folders, tmp_path):
    blocks = with_values(run_base(algorithm), {"alg.args.max_grad_norm": None})
    with pytest.MonkeyPatch.context() as patch:
        clipped_at = see.observed(placed(blocks, folders), lambda made: made.algorithm.max_grad_norm, tmp_path, patch)
    assert clipped_at == math.inf


def test_what_the_same_config_shows_is_the_same_twice(folders, tmp_path):
    for sight in (see.weights, see.whole_run):
        twice = []
        for name in "ab":
            with pytest.MonkeyPatch.context() as patch:
                folder = tmp_path / f"{sight.__name__}_{name}"
                twice.append(see.observed(placed(run_base(), folders), sight, folder, patch))
        assert twice[0] == twice[1]
