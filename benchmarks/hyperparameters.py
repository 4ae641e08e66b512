"""Measures the settings that the defaults were chosen from: tiny models, five seeds, in one process.

    python -m benchmarks.hyperparameters                       all groups, about an hour of one core
    python -m benchmarks.hyperparameters --only critic,minibatches
    python -m benchmarks.hyperparameters --label before        in a checkout of another version, to compare with

The runs are those of `docs/quickstart.md` ("a run of your own") on `embedded/gpt2-films`, a GPT-2 of 200k parameters,
and of `task_configs` for numbers that grow. Numbers are means over seeds, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from scipy import stats
from stable_baselines3.common.logger import Logger

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.on_policy.assemble import assemble

RESULTS = Path(__file__).parent / "results" / "hyperparameters.json"
NUMBERS = Path(__file__).parents[1] / "task_configs" / "synthetic_generate_increasing_numbers" / "tiny_gpt2_ppo.yml"

RECIPE: dict[str, Any] = yaml.safe_load("""
tokenizer: {model_name: embedded/gpt2-films}
reward_fn: {id: sentiment, args: {include_prompt: false}}
datapool: {id: film_opinions, args: {n_train: 2000, n_eval: 200}}
env:
  n_envs: 32
  args: {max_prompt_length: 32, max_episode_length: 32, terminate_on_eos: true}
alg:
  id: ppo
  args: {n_steps: 16, batch_size: 256, n_epochs: 4}
  kl_div: {coeff: 0.1, target_kl: 0.1}
  policy:
    id: causal_lm_actor_critic_policy
    args:
      model_name: embedded/gpt2-films
      generation_kwargs: {do_sample: true, top_k: 0, max_new_tokens: 32}
train_evaluation: {eval_batch_size: 64, n_iters: 25, eval_every: 25}
device: cpu
n_threads: 1
""")
A2C = {"alg.id": "a2c", "alg.args": {"n_steps": 16}, "env.n_envs": 64}
LR, CRITIC, INIT = "alg.args.learning_rate", "alg.args.critic_learning_rate", "alg.policy.args.value_head_init"
BATCH, NORM = "alg.args.batch_size", "alg.args.normalize_advantage"
WITHIN = {NORM: True}
ROLLOUT = {NORM: "rollout"}


@dataclass(frozen=True)
class Row:
    """One setting.

    Args:
        changes: to the config.
        n_iters: iterations.
        numbers: whether it is the task of numbers that grow.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    n_iters: int = 25
    numbers: bool = False


GROUPS: dict[str, dict[str, Row]] = {
    "recipe": {
        "learning rate 1e-5": Row({LR: 1e-5}, 10),
        "learning rate 1e-4": Row({LR: 1e-4}, 10),
    },
    "critic": {
        f"policy 1e-4, head {init}, critic x {factor}": Row({LR: 1e-4, INIT: init, CRITIC: factor * 1e-4})
        for init, factor in (("default", 1), ("zero", 1), ("zero", 3), ("zero", 10))
    },
    "shared critic": {
        f"vf_coef {coef:g}": Row({LR: 1e-4, "alg.policy.args.critic": "shared", "alg.args.vf_coef": coef})
        for coef in (0.5, 0.1)
    },
    "minibatches": {
        f"batch_size {size}, normalised {'within' if norm is True else 'over the rollout'}": Row(
            {LR: 1e-4, BATCH: size, NORM: norm}, 15
        )
        for size in (32, 64, 256)
        for norm in (True, "rollout")
    },
    "growing numbers": {
        "normalised within the minibatch": Row({LR: 5e-4, BATCH: 13, **WITHIN}, 20, True),
        "normalised over the rollout": Row({LR: 5e-4, BATCH: 13, **ROLLOUT}, 20, True),
    },
    "ppo": {f"learning_rate {rate:g}": Row({LR: rate}, 15) for rate in (1e-5, 1e-4, 3e-4, 1e-3)},
    "a2c": {f"learning_rate {rate:g}": Row({**A2C, LR: rate}, 15) for rate in (5e-5, 7e-4, 2e-3)},
}


def config_of(row: Row, seed: int) -> RunConfig:
    """Return the config of a row."""
    blocks = yaml.safe_load(NUMBERS.read_text()) if row.numbers else copy.deepcopy(RECIPE)
    changes = {**row.changes, "seed": seed, "train_evaluation.n_iters": row.n_iters}
    blocks, issues = apply_values(blocks, changes, "row")
    config = parse_config(blocks, issues=issues)
    assert isinstance(config, RunConfig)
    return config


KEYS = {
    "reward": "rollout_info/ep_rew",
    "kl": "rollout_info/kl_div_mean",
    "explained_variance": "ppo/explained_variance",
    "approx_kl": "ppo/approx_kl",
}


def curve(row: Row, seed: int) -> dict[str, list[float]]:
    """Return what each iteration of a run logged."""
    algorithm = assemble(config_of(row, seed)).algorithm
    algorithm.set_logger(Logger(None, []))
    lines: dict[str, list[float]] = {name: [] for name in KEYS}
    for iteration in range(row.n_iters):
        algorithm.learn_iteration(iteration, row.n_iters)
        for name, key in KEYS.items():
            lines[name].append(float(algorithm.logger.name_to_value.get(key, float("nan"))))
        algorithm.logger.name_to_value.clear()
        algorithm.update_progress = None
    return lines


def measures(row: Row, lines: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the numbers of one run that are reported; iterations count from 1."""
    last = lines["reward"][row.n_iters // 2 :] if row.numbers else lines["reward"][-5:]
    return {
        "explained variance, iteration 1": lines["explained_variance"][0],
        "explained variance, 5-10": statistics.fmean(lines["explained_variance"][4:10]),
        "KL after one update": lines["kl"][1],
        "largest KL": max(lines["kl"]),
        "reward, first": lines["reward"][0],
        "reward, last": statistics.fmean(last),
    }


def half_width(values: list[float]) -> float:
    """Return half of the 95 % interval of the mean (Student's t)."""
    if len(values) < 2:
        return float("nan")
    return float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5


def main() -> None:
    """Run the rows that are asked for, print and keep their means."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(GROUPS), help=f"some of {', '.join(GROUPS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--label", default="today", help="under which name the results are kept")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    for group in options.only.split(","):
        for name, row in GROUPS[group].items():
            runs = [measures(row, curve(row, seed)) for seed in range(options.seeds)]
            columns = {key: [run[key] for run in runs] for key in runs[0]}
            kept.setdefault(options.label, {}).setdefault(group, {})[name] = columns
            shown = "  ".join(
                f"{key} {statistics.fmean(values):.3f} ± {half_width(values):.3f}" for key, values in columns.items()
            )
            print(f"{group} | {name} | {shown}", flush=True)
            options.output.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
