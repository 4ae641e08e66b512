"""Arms of the study: for each, the configs of its runs, the commands that make its model, and how it answers.

All arms of a task see the same prompts, and train on about as many responses. The adapters, their learning rate and the
decoding are the same too, unless an arm is about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.real_model import format_task_run, tool_task_run
from benchmarks.study.tasks import STORY_TOKENS
from rl4lms_like.config.yaml_file import apply_values

TASKS = "benchmarks.study.tasks"
ADAPTERS = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
N_SAMPLES = 8
"""Responses to each prompt of a rollout, and from which pairs are made. PPO needs no groups; here it has those of the
others, so that all arms see the same prompts, and computes each prompt once for its 8 responses."""
MINIBATCH = 16
"""Episodes of an optimizer step, except for the tool task, whose episodes are long."""


@dataclass(frozen=True)
class Effort:
    """How much is trained and measured.

    Args:
        n_iters: iterations of runs with a reward; two thirds with long responses, half with tools.
        n_episodes: of an iteration.
        n_measured: prompts of `test` that each model answers.
        max_prompt_length: in tokens, instead of the task's own; that of a tiny model has few letters each.
    """

    n_iters: int = 20
    n_episodes: int = 64
    n_measured: int = 200
    max_prompt_length: int | None = None

    @property
    def n_prompts(self) -> int:
        """Prompts for pairs: those of an RL run, which answers each `N_SAMPLES` times."""
        return self.n_iters * self.n_episodes // N_SAMPLES


QUICK = Effort(n_iters=2, n_episodes=16, n_measured=8, max_prompt_length=1024)


@dataclass(frozen=True)
class Answers:
    """How a model answers when it is measured.

    Args:
        n: responses of which the one with the highest reward counts.
        top_p: nucleus of the sampling.
    """

    n: int = 1
    top_p: float = 1.0


@dataclass(frozen=True)
class Arm:
    """An arm of a task.

    Args:
        configs: name of a file in the folder of the arm's seed -> config.
        commands: of `rl4lms-like`, run one after the other in that folder; the last one trains the model in `run`.
            None of them: the initial model.
        answers: how its model answers.
    """

    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    commands: tuple[tuple[str, ...], ...] = ()
    answers: Answers = Answers()


def arms(task: str, model: str, effort: Effort) -> dict[str, Arm]:
    """Return the arms of a task by name, for an initial model."""
    run = rl_run(task, model, effort)
    if effort.max_prompt_length is not None:
        run["env"]["args"]["max_prompt_length"] = effort.max_prompt_length
    if task == "tool":
        return {"PPO": trained(run, PPO), "GRPO": trained(run, GRPO)}

    start = {"start": Arm()}
    if task != "film":
        changes = GRPO | KL_IN_LOSS if task == "story" else GRPO
        return start | {"PPO": trained(run, PPO), "GRPO": trained(run, changes)}
    return {
        **start,
        "PPO": trained(run, PPO),
        "PPO, shared critic": trained(run, {**PPO, "alg.policy.args.critic": "shared", "alg.args.vf_coef": 0.1}),
        "NLPO": trained(run, NLPO),
        "GRPO": trained(run, GRPO | KL_IN_LOSS),
        "RLOO": trained(run, RLOO),
        "DPO on sampled pairs": on_sampled(run, model, "dpo", effort),
        "SFT on the best of 8": on_sampled(run, model, "supervised", effort),
        "best of 4": Arm(answers=Answers(n=4)),
        "best of 16": Arm(answers=Answers(n=16)),
        "top-p 0.9": Arm(answers=Answers(top_p=0.9)),
    }


# --- runs with a reward -----------------------------------------------------------------------------------------------

OF_GROUPS = {"alg.args.group_size": N_SAMPLES, "alg.args.n_epochs": 1, "alg.args.learning_rate": 3e-4}
GRPO = {**OF_GROUPS, "alg.id": "grpo"}
RLOO = {**OF_GROUPS, "alg.id": "rloo"}
PPO = {**OF_GROUPS, "alg.id": "ppo"}
NLPO = {
    **PPO,
    "alg.id": "nlpo",
    "alg.policy.id": "maskable_causal_lm_actor_critic_policy",
    "alg.policy.args.mask_type": "learned_top_p",
    "alg.policy.args.top_mask": 0.9,
    "alg.policy.args.target_update_iterations": 5,
}
KL_IN_LOSS = {"alg.kl_div.coeff": 0.2, "alg.kl_div.estimator": "k2"}
"""For GRPO, whose KL is weighed against advantages of variance 1, not rewards; k2 has the gradient of the KL."""


def rl_run(task: str, model: str, effort: Effort) -> dict[str, Any]:
    """Return the config of a task without what belongs to an algorithm."""
    n_iters = {"story": effort.n_iters * 2 // 3, "tool": effort.n_iters // 2}.get(task, effort.n_iters)
    schedule = {"n_iters": n_iters, "eval_every": n_iters, "save_every": 5}
    if task in ("format", "tool"):
        config = format_task_run(model) if task == "format" else tool_task_run(model)
        config["train_evaluation"] |= schedule
        if task == "format":
            config["env"]["n_envs"] = effort.n_episodes
            config["alg"]["args"] = {"n_episodes": effort.n_episodes, "minibatch_episodes": MINIBATCH}
        else:
            config["env"]["n_envs"] = config["alg"]["args"]["n_episodes"] = effort.n_episodes // 2
            config["alg"]["args"]["minibatch_episodes"] = effort.n_episodes // 2
        return config

    n_tokens = 24 if task == "film" else STORY_TOKENS
    tokenizer: dict[str, Any] = {"model_name": model}
    reward: dict[str, Any] = {"id": "sentiment", "args": {"include_prompt": False}}
    if task == "story":
        tokenizer["chat_template"] = True
        reward = {"id": f"{TASKS}:StoryReward"}
    return {
        "tokenizer": tokenizer,
        "datapool": {"id": f"{TASKS}:{'FilmSentences' if task == 'film' else 'Stories'}"},
        "reward_fn": reward,
        "env": {
            "n_envs": effort.n_episodes,
            "args": {"max_prompt_length": 72, "max_episode_length": n_tokens, "terminate_on_eos": True},
        },
        "alg": {
            "id": "ppo",
            "args": {"n_episodes": effort.n_episodes, "minibatch_episodes": MINIBATCH},
            "kl_div": {"coeff": 0.05},
            "policy": {
                "id": "causal_lm_actor_critic_policy",
                "args": {
                    "model_name": model,
                    "peft": ADAPTERS,
                    "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": n_tokens},
                },
            },
        },
        "train_evaluation": {"eval_batch_size": 50, "max_eval_samples": 50, **schedule, "metrics": [{"id": "reward"}]},
        "device": "cpu",
        "n_threads": 1,
    }


def trained(run: Mapping[str, Any], changes: Mapping[str, Any]) -> Arm:
    """Return the arm of a run with these changes of its config."""
    config, issues = apply_values(run, changes, "the study")
    assert not issues
    return Arm({"run.yml": config}, (("train", "run.yml", "--experiment_name", "run"),))


# --- runs on given texts ----------------------------------------------------------------------------------------------


def on_sampled(run: Mapping[str, Any], model: str, id: str, effort: Effort) -> Arm:
    """Return the arm that learns from responses of the initial model: pairs of the best and the worst, or the best."""
    n_tokens = run["env"]["args"]["max_episode_length"]
    alg: dict[str, Any] = {
        "id": id,
        "model_type": "causal",
        "model_name": model,
        "peft": ADAPTERS,
        "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": n_tokens},
        "training_args": {
            "num_train_epochs": 5,
            "per_device_train_batch_size": 16,
            "learning_rate": 5e-4,
            "lr_scheduler_type": "cosine",
            "logging_steps": 5,
        },
    }
    if id == "dpo":
        alg["args"] = {"beta": 0.1}
    config = {
        "tokenizer": {"model_name": model, "max_length": run["env"]["args"]["max_prompt_length"]},
        "datapool": {"id": "preferences", "args": {"path": "pairs.jsonl", "split_ratios": [1.0, 0.0, 0.0]}},
        "alg": alg,
        "train_evaluation": {"eval_batch_size": 50},
        "device": "cpu",
        "n_threads": 1,
    }
    sample = ("pairs", "sampling.yml", "--out", "pairs.jsonl", "--n_samples", str(N_SAMPLES))
    return Arm(
        {"sampling.yml": run, "run.yml": config},
        ((*sample, "--max_prompts", str(effort.n_prompts)), ("train", "run.yml", "--experiment_name", "run")),
    )
