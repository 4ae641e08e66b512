"""Measures settings that make fewer or cheaper passes: reward and CPU time on the quickstart's task, one thread.

    python -m benchmarks.fewer_passes --groups today,critic --seeds 0-3
    python -m benchmarks.fewer_passes --groups today,epochs --seeds 0-0             # a grid
    python -m benchmarks.fewer_passes --cells "2 epochs, 5e-4" --seeds 0-3          # one cell of it
    python -m benchmarks.fewer_passes --costs                                       # CPU time of an iteration
    python -m benchmarks.fewer_passes --table                                       # the results so far

Each cell is the quickstart's config with the changes of its row; a seed has one initial model for all cells. Before
each iteration the policy answers 200 held-out prompts, always with the same random numbers. Finished runs are not
repeated. The costs are measured apart: the cells take turns iteration by iteration, so that all see the same load.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.logger import Logger
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.critic_techniques import parsed
from benchmarks.hyperparameters import half_width
from rl4lms_like.config.load import load_config
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.on_policy.assemble import AssembledRun, assemble
from rl4lms_like.small_models.warm_start import WarmStartSettings, make_model, make_warm_start
from rl4lms_like.training.evaluation import Responder, evaluate_on_samples

QUICKSTART = Path(__file__).parents[1] / "rl4lms_like" / "quickstart_gpt2.yml"
RESULTS = Path(__file__).parent / "results" / "fewer_passes.json"
MODELS = Path("results") / "fewer_passes"

TARGET = 0.7
"""Held-out sentiment until which time is measured."""
KL_RANGE = (0.08, 0.12)
"""Around the quickstart's target of 0.1 nats per token: rewards of iterations with this KL are compared."""
N_FIRST = 10
"""Iterations in which the KL still grows; rewards at equal KL are those of later ones."""


def steps(n_epochs: int, learning_rate: float, **others: float) -> dict[str, Any]:
    """Return the changes of a cell with another number of epochs and another learning rate of the policy."""
    arguments = {"n_epochs": n_epochs, "learning_rate": learning_rate, **others}
    return {f"alg.args.{name}": value for name, value in arguments.items()}


def critic(kind: str) -> dict[str, Any]:
    """Return the changes of a cell whose critic is a smaller network of `critic_folder`."""
    return {"alg.policy.args.critic_model": kind}


GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "today": {"today": {}},
    "critic": {
        "first layer": critic("first layer"),
        "quarter width": critic("quarter width"),
        "quarter width, untrained": critic("quarter width, untrained"),
        "quarter width, critic 3e-3": critic("quarter width") | {"alg.args.critic_learning_rate": 3e-3},
        "critic_epochs 2": {"alg.args.critic_epochs": 2},
        "shared, vf_coef 0.1": {"alg.policy.args.critic": "shared", "alg.args.vf_coef": 0.1},
    },
    "epochs": {
        "2 epochs, 2e-4": steps(2, 2e-4),
        "2 epochs, 5e-4": steps(2, 5e-4),
        "2 epochs, 1e-3": steps(2, 1e-3),
        "1 epoch, 1e-3": steps(1, 1e-3),
        "4 epochs, 1e-3, target_kl 0.02": steps(4, 1e-3, target_kl=0.02),
    },
}


# --- models -----------------------------------------------------------------------------------------------------------


def initial_model(seed: int) -> Path:
    """Return the folder of the quickstart's initial model for a seed, which is trained on first use."""
    folder = MODELS / f"policy_seed_{seed}"
    make_warm_start(folder, WarmStartSettings(seed=seed))
    return folder


def critic_folder(kind: str, seed: int) -> Path:
    """Return the folder of a smaller network for the critic, which is made on first use.

    `first layer`: the initial model without its second layer. `quarter width`: a model of 2 layers x 16 instead of 64,
    trained on the same texts as the initial model, as a user would take a smaller model of the same family. `quarter
    width, untrained`: the same with random weights.
    """
    folder = MODELS / f"{kind.replace(', ', '_').replace(' ', '_')}_seed_{seed}"
    if kind == "quarter width":
        make_warm_start(folder, WarmStartSettings(seed=seed, n_embd=16, n_head=1))
        return folder

    policy_folder = initial_model(seed)
    if kind == "first layer":
        model: Any = AutoModelForCausalLM.from_pretrained(policy_folder, num_hidden_layers=1)
    else:
        tokenizer = AutoTokenizer.from_pretrained(policy_folder)
        model = make_model(tokenizer, n_embd=16, n_head=1, seed=seed)
    model.save_pretrained(folder)
    return folder


# --- one run ----------------------------------------------------------------------------------------------------------

KEYS = {
    "reward": "rollout_info/ep_rew",
    "kl": "rollout_info/kl_div_mean",
    "explained_variance": "ppo/explained_variance",
    "approx_kl": "ppo/approx_kl",
}


def assembled(changes: dict[str, Any], seed: int, n_iters: int) -> AssembledRun:
    """Build the quickstart's run with the changes of a cell."""
    model = str(initial_model(seed))
    model_keys = ("tokenizer.model_name", "alg.policy.args.model_name", "train_evaluation.metrics.3.args.model_name")
    values = {**dict.fromkeys(model_keys, model), "seed": seed, "train_evaluation.n_iters": n_iters, **changes}
    kind = values.get("alg.policy.args.critic_model")
    if kind is not None:
        values["alg.policy.args.critic_model"] = str(critic_folder(kind, seed))
    config: Any = load_config(QUICKSTART, [f"{key}={json.dumps(value)}" for key, value in values.items()])
    return assemble(config)


def held_out_sentiment(run: AssembledRun) -> float:
    """Return the mean sentiment of responses to the prompts of the test split, with the same random numbers always."""
    responder = Responder(
        run.policy,
        run.tokenizer,
        batch_size=200,
        max_prompt_length=run.max_prompt_length,
        eos_token_ids=run.env.get_attr("eos_token_ids", [0])[0],
        seed=derived_seed(0, "held out"),
    )
    scores = evaluate_on_samples(responder, run.samples["test"], run.metrics[:1], split_name="test").scores
    return scores["semantic/sentiment"]


def curves_of(changes: dict[str, Any], seed: int, n_iters: int) -> dict[str, list[float]]:
    """Train a cell; return a number per iteration: what it logged, and the held-out sentiment before it.

    `held_out` has one number more, that after the last iteration.
    """
    run = assembled(changes, seed, n_iters)
    algorithm: Any = run.algorithm
    algorithm.set_logger(Logger(None, []))
    curves: dict[str, list[float]] = {name: [] for name in (*KEYS, "held_out")}

    for iteration in range(n_iters):
        curves["held_out"].append(round(held_out_sentiment(run), 4))
        algorithm.learn_iteration(iteration, n_iters)
        for name, key in KEYS.items():
            curves[name].append(round(float(algorithm.logger.name_to_value.get(key, math.nan)), 5))
        algorithm.logger.name_to_value.clear()
        algorithm.update_progress = None
    curves["held_out"].append(round(held_out_sentiment(run), 4))
    return curves


# --- numbers ----------------------------------------------------------------------------------------------------------


def iterations_until(target: float, curves: dict[str, list[float]]) -> float:
    """Return the number of iterations until the first policy with this held-out sentiment; infinite if none."""
    for iteration, sentiment in enumerate(curves["held_out"]):
        if sentiment >= target:
            return iteration
    return math.inf


def rewards_at_equal_kl(curves: dict[str, list[float]]) -> list[float]:
    """Return the held-out sentiment of the policies, after the first iterations, whose KL is in `KL_RANGE`."""
    policies = list(zip(curves["held_out"], curves["kl"], strict=False))[N_FIRST:]
    return [sentiment for sentiment, kl in policies if KL_RANGE[0] <= kl <= KL_RANGE[1]]


def measures(runs: Sequence[dict[str, list[float]]], cost: float) -> dict[str, list[float]]:
    """Return one number per run of each measure; runs without the number are left out.

    Times are in iterations of today's settings: `cost` is the CPU time of an iteration relative to those.
    """
    columns: dict[str, list[float]] = {
        f"iterations to {TARGET}": [iterations_until(TARGET, run) for run in runs],
        f"time to {TARGET}": [cost * iterations_until(TARGET, run) for run in runs],
        "held-out, last 5": [statistics.fmean(run["held_out"][-5:]) for run in runs],
        "KL, last 5": [statistics.fmean(run["kl"][-5:]) for run in runs],
        "held-out at equal KL": [statistics.fmean(rewards_at_equal_kl(run) or [math.nan]) for run in runs],
        "explained variance, last 5": [statistics.fmean(run["explained_variance"][-5:]) for run in runs],
    }
    return {name: [value for value in column if math.isfinite(value)] for name, column in columns.items()}


def measure_costs(seed: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of iterations of all cells, one after the other in each round; a first one warms up."""
    algorithms: dict[str, Any] = {}
    for cells in GROUPS.values():
        for name, changes in cells.items():
            algorithms[name] = assembled(changes, seed, rounds + 1).algorithm
            algorithms[name].set_logger(Logger(None, []))
    seconds: dict[str, list[float]] = {name: [] for name in algorithms}
    for iteration in range(rounds + 1):
        for name, algorithm in algorithms.items():
            start = time.process_time()
            algorithm.learn_iteration(iteration, rounds + 1)
            if iteration:
                seconds[name].append(round(time.process_time() - start, 3))
    return seconds


def relative_costs(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the median ratio of the CPU times to those of `today` in the same round."""
    costs = {}
    for name, column in seconds.items():
        costs[name] = statistics.median(mine / base for mine, base in zip(column, seconds["today"], strict=True))
    return costs


def table(kept: dict[str, Any]) -> list[str]:
    """Return the rows of the table: means and half 95 % intervals over seeds."""
    costs = relative_costs(kept["costs"])
    rows = []
    for cells in kept["runs"].values():
        for name, runs in cells.items():
            columns = measures(list(runs.values()), costs[name])
            if not rows:
                rows = [f"| cell | seeds | cost | {' | '.join(columns)} |", "|---" * (len(columns) + 3) + "|"]
            numbers = []
            for values in columns.values():
                missing = f" ({len(values)} of {len(runs)})" if len(values) < len(runs) else ""
                numbers.append(f"{statistics.fmean(values):.3f} ± {half_width(values):.3f}{missing}" if values else "-")
            rows.append(f"| {name} | {len(runs)} | {costs[name]:.2f} | {' | '.join(numbers)} |")
    return rows


def main() -> None:
    """Run the cells that are asked for, and keep their curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"some of {', '.join(GROUPS)}")
    parser.add_argument("--cells", action="append", help="a cell of the groups, may be repeated (default: all)")
    parser.add_argument("--n_iters", type=int, default=25)
    parser.add_argument("--costs", action="store_true", help="measure the CPU time of iterations, and end")
    options, kept = parsed(parser, "0-3", RESULTS)
    torch.set_num_threads(1)
    if options.table:
        print("\n".join(table(kept)))
        return
    if options.costs:
        kept["costs"] = measure_costs(seed=0, rounds=2)
        print({name: round(cost, 3) for name, cost in relative_costs(kept["costs"]).items()})
        options.output.write_text(json.dumps(kept) + "\n")
        return

    first, last = map(int, options.seeds.split("-"))
    for seed in range(first, last + 1):
        for group in options.groups.split(","):
            for name, changes in GROUPS[group].items():
                if options.cells and name not in options.cells:
                    continue
                runs = kept["runs"].setdefault(group, {}).setdefault(name, {})
                if str(seed) in runs:
                    continue
                runs[str(seed)] = curves_of(changes, seed, options.n_iters)
                numbers = {key: round(values[0], 3) for key, values in measures([runs[str(seed)]], 1).items() if values}
                print(f"seed {seed}, {name}: {numbers}", flush=True)
                options.output.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
