"""Compares losses and gradients with those of TRL's GRPO and RLOO trainers, on the same batch and weights.

    python -m benchmarks.trl_losses

A tiny GPT-2 generates a rollout in groups of four, and is then changed by one update, so that ratios differ from 1.
Both libraries compute the loss of the whole rollout from the same old and reference log-probs and advantages. The
results are relative differences of loss and gradient (norm of the difference / norm).

RLOO is compared with ratios of 1, because TRL's ratio is one of a whole response. Its gradient differs by the factor
1 / `max_completion_length`, because it is a mean over responses of sums over tokens.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.environments import python_of
from rl4lms_like import CausalLMActorCriticPolicy, RewardFunction, Sample, TextVecEnv
from rl4lms_like.algorithms import policy_gradient
from rl4lms_like.algorithms.policy_gradient import GroupPolicyGradient
from rl4lms_like.rollouts.buffer import Minibatch
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.testing import models

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "trl_losses.json"
GROUP, LENGTH = 4, 10
GRPO = {"num_generations": GROUP, "max_completion_length": LENGTH, "use_bias_correction_kl": False, "epsilon": 0.2}
VARIANTS: dict[str, tuple[str, dict[str, Any], float, str, dict[str, Any]]] = {
    "grpo": ("GRPO", {}, 0.04, "grpo", {**GRPO, "loss_type": "grpo", "beta": 0.04}),
    "dr_grpo": ("DrGRPO", {}, 0.0, "grpo", {**GRPO, "loss_type": "dr_grpo"}),
    "dapo": (
        "DAPO",
        {"group_size": GROUP, "dynamic_sampling": None, "overlong_buffer": None},
        0.0,
        "grpo",
        {**GRPO, "loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "gspo": (
        "GSPO",
        {"clip_range": 0.02, "clip_range_high": 0.03},
        0.0,
        "grpo",
        {**GRPO, "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
    ),
    "cispo": ("CISPO", {"clip_range_high": 0.05}, 0.0, "grpo", {**GRPO, "loss_type": "cispo", "epsilon_high": 1.05}),
    "grpo with dual clip": (
        "GRPO",
        {"clip_range": 0.02, "dual_clip": 1.03},
        0.0,
        "grpo",
        {**GRPO, "loss_type": "grpo", "epsilon": 0.02, "delta": 1.03},
    ),
    "rloo": (
        "RLOO",
        {},
        0.0,
        "rloo",
        {"num_generations": GROUP, "max_completion_length": LENGTH, "beta": 0.0},
    ),
}
"""Name -> class here, its arguments, KL coefficient, trainer there, its arguments."""


class EvenTokens(RewardFunction):
    """The fraction of even token ids, paid at the end."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return float((current_observation.action_ids % 2 == 0).mean()) if done else 0.0


def build(folder: Path, name: str) -> GroupPolicyGradient:
    """Return an algorithm on the model of a folder."""
    class_name, arguments, kl_coeff, _, _ = VARIANTS[name]
    tokenizer = models.make_tokenizer()
    # All prompts fill the limit: TRL passes no position ids, and GPT-2's log-probs are wrong for padded prompts then.
    samples = [Sample(str(i), f"Count with me from {i} to a hundred, and then count back to {i}") for i in range(7)]
    env = TextVecEnv(16, tokenizer, EvenTokens(), samples, max_prompt_length=14, max_episode_length=LENGTH)
    env.seed(0)
    algorithm: GroupPolicyGradient = getattr(policy_gradient, class_name)(
        CausalLMActorCriticPolicy,
        env,
        policy_kwargs={"model_name": str(folder), "generation_kwargs": {"do_sample": True, "top_k": 0}},
        kl_controller=FixedKLController(kl_coeff, placement="loss" if kl_coeff else "reward"),
        **{"group_size": GROUP, "n_steps": 1, "batch_size": None, "learning_rate": 3e-4, "seed": 0, "device": "cpu"},
        **{key: value for key, value in arguments.items() if key != "group_size"},
    )
    return algorithm


def ours(folder: Path, name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the batch for TRL, with loss and gradients; the changed weights are saved in the folder."""
    algorithm = build(folder / "start", name)
    if name == "rloo":
        algorithm.policy.optimizer.step = lambda *_: None  # ratios of 1: they are defined differently
    algorithm.learn_iteration(0, 2)  # one rollout and one step
    model = algorithm.policy.policy_model
    model.save_pretrained(folder)
    models.make_tokenizer().save_pretrained(folder)
    gradients: dict[str, torch.Tensor] = {}
    (minibatch,) = algorithm.rollout_buffer.get(None)
    loss = step_loss(algorithm, minibatch)
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    episodes = minibatch.observations
    mask = episodes.action_mask
    batch = {
        "prompt_ids": episodes.prompt_ids,
        "prompt_mask": episodes.prompt_mask.long(),
        "completion_ids": episodes.response_ids.masked_fill(~mask, 0),
        "completion_mask": mask.long(),
        "old_per_token_logps": episodes.pad(minibatch.old_log_prob),
        "ref_per_token_logps": episodes.pad(minibatch.ref_log_prob),
        "advantages": episodes.pad(minibatch.advantages)[:, 0],
    }
    return {key: value.contiguous() for key, value in batch.items()}, {"loss": loss.reshape(1), **gradients}


def step_loss(algorithm: GroupPolicyGradient, minibatch: Minibatch) -> torch.Tensor:
    """Compute the loss of a minibatch and its gradient, as an update does."""
    algorithm.policy.optimizer.zero_grad()
    total = torch.zeros(())
    for loss, _ in algorithm.micro_losses(algorithm.prepare_minibatch(minibatch), None):
        loss.backward()
        total += loss.detach()
    return total


def difference(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative differences of loss and gradient; RLOO's gradient also up to a constant factor."""
    keys = sorted(mine.keys() - {"loss"})
    a, b = (torch.cat([found[key].flatten() for key in keys]).double() for found in (mine, other))
    factor = float((a @ b) / (b @ b))
    return {
        "loss": float((mine["loss"] - other["loss"]).abs() / other["loss"].abs()),
        "gradient": float((a - b).norm() / b.norm()),
        "factor": factor,
        "gradient up to the factor": float((a - factor * b).norm() / a.norm()),
    }


def main() -> None:
    """Print and keep the differences."""
    torch.set_num_threads(1)
    python = python_of("trl-grpo", ("trl==1.16.*",))
    found: dict[str, dict[str, float]] = {}
    for name, (*_, kind, arguments) in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            tokenizer = models.make_tokenizer()
            models.save_model(path / "start", models.make_causal_lm("gpt2", tokenizer, scale=5), tokenizer)
            batch, mine = ours(path, name)
            save_file(batch, path / "batch.safetensors")
            (path / "variants.json").write_text(json.dumps({name: [kind, arguments]}))
            subprocess.run([python, "-m", "benchmarks.systems.trl_losses_worker", folder], check=True, cwd=ROOT)
            found[name] = difference(mine, load_file(path / f"{name}.safetensors"))
        print(name, {key: f"{value:.2e}" for key, value in found[name].items()}, flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
