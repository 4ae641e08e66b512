"""How long until the reward is there: this library's PPO and TRL's on the quickstart's task, from the same start.

    python -m benchmarks.time_to_reward             5 seeds; makes TRL's environment and the warm starts on first use
    python -m benchmarks.time_to_reward --quick     one seed, two iterations: does everything run?

    seed 0        warm start -> every contestant; the fastest learning rate of each system is its `best`
    seeds 1 ...   warm start -> ours, TRL, and the best of each where that is another rate
    one seed      iteration 0 of A B C ..., iteration 1 of A B C ..., so that all see the same weather

A target is reached in the iteration whose rollout and the one before it have a mean reward of at least the target.
Its time is that of all iterations until then; imports, loading and evaluation are not in it. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ppo_iteration import RESULTS, machine
from benchmarks.workers import SYSTEMS, System, WorkerError, WorkerProcess
from benchmarks.workload import Shape

TARGETS = (0.6, 0.7)
SHAPE = Shape(
    "sentiment",
    prompt_len=16,
    response_len=40,
    episodes=128,
    n_epochs=4,
    minibatch=32,
    n_layer=2,
    n_embd=64,
    vocab_size=1024,
)
"""The quickstart's work; lengths and vocabulary are upper limits."""

TASK = {"kl_coef": 0.05, "clip_range": 0.2, "vf_coef": 0.5, "gamma": 1.0, "gae_lambda": 0.95}
NO_CLIPPING = 1e6
LEARNING_RATES = (2e-4, 5e-4, 1e-3)
WARM_STARTS = Path("results") / "time_to_reward"

SYSTEMS.update(
    sentiment_ours=System("sentiment_ours"),
    sentiment_trl=System("sentiment_trl", ("trl==1.12.*", "vaderSentiment==3.3.*")),
)


@dataclass(frozen=True)
class Contestant:
    """A system with its learning rate.

    Args:
        system: key of `SYSTEMS`.
        learning_rate: of the policy; TRL has one for policy and critic.
        critic_learning_rate: of ours, the quickstart's.
        cliprange_value: of TRL; ours does not clip values.
    """

    system: str
    learning_rate: float
    critic_learning_rate: float = 1e-3
    cliprange_value: float = NO_CLIPPING


CONTESTANTS = {
    f"{name} {rate:g}": Contestant(f"sentiment_{name}", rate) for rate in LEARNING_RATES for name in ("ours", "trl")
}
OURS, TRL = "ours 0.0002", "trl 0.0002"


# --- one seed ---------------------------------------------------------------------------------------------------------


def run_seed(seed: int, names: Sequence[str], iterations: int, folder: Path) -> dict[str, dict[str, Any]]:
    """All contestants from one warm start, iteration by iteration in turn.

    Args:
        seed: of warm start, prompts, rollouts and minibatches.
        names: keys of `CONTESTANTS`.
        iterations: of each.
        folder: for what is passed around.

    Returns:
        By name: seed, versions, every iteration's measurements, and the final policy's reward on held-out prompts.

    Raises:
        WorkerError: a contestant died, or took another number of optimizer steps than the others.
    """
    from rl4lms_like.data_pools.film_opinions import FilmOpinions
    from rl4lms_like.training.warm_start import WarmStartSettings, make_warm_start

    warm_start = make_warm_start(WARM_STARTS / f"warm_start_seed_{seed}", WarmStartSettings(seed=seed))
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps([sample.prompt_or_input_text for sample, _ in FilmOpinions.prepare("train")]))
    job = {
        "shape": asdict(SHAPE),
        "model": str(warm_start.folder.resolve()),
        "seed": seed,
        "threads": 1,
        "task": TASK,
        "prompts": str(prompts),
    }
    runs: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in names:
            contestant = asdict(CONTESTANTS[name])
            own_job = {**job, **contestant, "save_to": str(folder / name)}
            workers[name] = WorkerProcess(contestant["system"], own_job, folder / f"{name}.log")
            stack.callback(workers[name].stop)
            runs[name] = {"seed": seed, **workers[name].loaded, "iterations": []}
        for number in range(iterations):
            for name, worker in workers.items():
                runs[name]["iterations"].append(worker.run_iteration())
                show_progress(seed, name, number, runs[name]["iterations"][-1])
    for name, run in runs.items():
        run["held_out_reward"] = held_out_reward(folder / name, warm_start.folder)
    return runs


def show_progress(seed: int, name: str, number: int, iteration: Mapping[str, Any]) -> None:
    """One iteration as one line, if it was the work that was asked for."""
    if iteration["optimizer_steps"] != SHAPE.optimizer_steps:
        raise WorkerError(f"{name} took {iteration['optimizer_steps']} optimizer steps, not {SHAPE.optimizer_steps}")
    print(
        f"seed {seed} {name:12} iteration {number:2}: reward {iteration['reward']:6.3f}  KL {iteration['kl']:6.3f}  "
        f"{iteration['response_tokens']:5} tokens  {iteration['wall_s']:5.2f} s  (CPU {iteration['cpu_s']:.2f} s)",
        flush=True,
    )


def held_out_reward(model_folder: Path, tokenizer_folder: Path) -> float:
    """Mean reward of sampled continuations of the test split's prompts, the same random numbers for every model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rl4lms_like.data_pools.film_opinions import FilmOpinions
    from rl4lms_like.scoring.sentiment import sentiments

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    prompts = [sample.prompt_or_input_text for sample, _ in FilmOpinions.prepare("test")]
    encoded = tokenizer(prompts, padding="longest", return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    sequences = model.generate(**encoded, do_sample=True, top_k=0, max_new_tokens=SHAPE.response_len)
    responses = tokenizer.batch_decode(sequences[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return statistics.fmean(sentiments(prompts, responses, include_prompt=True))


# --- numbers ----------------------------------------------------------------------------------------------------------


def reached(iterations: Sequence[Mapping[str, Any]], target: float) -> dict[str, float] | None:
    """When a run reached a target.

    Args:
        iterations: with `reward`, `kl` (nats per token), `wall_s` and `cpu_s`.
        target: mean reward of two consecutive rollouts.

    Returns:
        Seconds, CPU seconds and number of iterations until then, and the mean KL of the two; None if it did not.
    """
    for last in range(1, len(iterations)):
        pair = iterations[last - 1 : last + 1]
        if statistics.fmean(iteration["reward"] for iteration in pair) >= target:
            return {
                "wall_s": math.fsum(iteration["wall_s"] for iteration in iterations[: last + 1]),
                "cpu_s": math.fsum(iteration["cpu_s"] for iteration in iterations[: last + 1]),
                "iterations": last + 1,
                "kl": statistics.fmean(iteration["kl"] for iteration in pair),
            }
    return None


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean, half the width of its 95 % interval (Student's t; not with one value), and how many values there are."""
    from scipy import stats

    summary = {"mean": statistics.fmean(values), "n": len(values)}
    if len(values) > 1:
        summary["half_width"] = float(
            stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
        )
    return summary


def measures(run: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one run; those of targets that it did not reach are absent."""
    iterations = run["iterations"]
    last = iterations[-2:]
    numbers = {
        "reward, first iteration": iterations[0]["reward"],
        "reward, last 2 iterations": statistics.fmean(iteration["reward"] for iteration in last),
        "KL, last 2 iterations": statistics.fmean(iteration["kl"] for iteration in last),
        "reward, held-out prompts": run["held_out_reward"],
        "CPU s per iteration": statistics.fmean(iteration["cpu_s"] for iteration in iterations),
        "s per iteration": statistics.fmean(iteration["wall_s"] for iteration in iterations),
    }
    for target in TARGETS:
        for key, value in (reached(iterations, target) or {}).items():
            numbers[f"{key} to {target}"] = value
    return numbers


def summarise(runs: Mapping[str, Sequence[Mapping[str, Any]]], yardstick: str = OURS) -> dict[str, Any]:
    """Mean and interval over seeds of every measure, and of its ratio to the yardstick's run of the same seed."""
    by_seed = {name: {run["seed"]: measures(run) for run in of_name} for name, of_name in runs.items()}
    summary: dict[str, Any] = {}
    for name, seeds in by_seed.items():
        keys = dict.fromkeys(key for numbers in seeds.values() for key in numbers)
        summary[name] = {key: interval([n[key] for n in seeds.values() if key in n]) for key in keys}
        for key in [key for key in keys if "s to " in key]:
            pairs = [(n[key], by_seed[yardstick].get(seed, {}).get(key)) for seed, n in seeds.items() if key in n]
            ratios = [mine / theirs for mine, theirs in pairs if theirs is not None]
            if ratios and name != yardstick:
                summary[name][f"{key}, times ours"] = interval(ratios)
    return summary


def best(seed_runs: Mapping[str, Mapping[str, Any]], system: str) -> str:
    """The system's contestant with the least CPU time to the first target; if none reached it, with the most reward."""
    own = {name: run for name, run in seed_runs.items() if CONTESTANTS[name].system == system}

    def merit(name: str) -> tuple[float, float]:
        numbers = measures(own[name])
        return numbers.get(f"cpu_s to {TARGETS[0]}", math.inf), -numbers["reward, last 2 iterations"]

    return min(own, key=merit)


# --- output -----------------------------------------------------------------------------------------------------------


def table_of(summary: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """One column a contestant; the number of seeds stands behind a measure that not all of them have."""
    seeds = max(numbers["n"] for of_name in summary.values() for numbers in of_name.values())
    table = Table(title=f"time to reward, {seeds:.0f} seeds: mean ± 95 % interval", title_justify="left")
    table.add_column("")
    for name in summary:
        table.add_column(name, justify="right", no_wrap=True)
    for key in sorted({key for of_name in summary.values() for key in of_name}, key=_order):
        table.add_row(key, *(_cell(of_name.get(key), seeds) for of_name in summary.values()))
    table.caption = "a column's name is the system and its policy's learning rate; KL in nats per token"
    return table


def _order(key: str) -> tuple[float, str]:
    return (next((target for target in TARGETS if str(target) in key), 0.0), key)


def _cell(numbers: Mapping[str, float] | None, seeds: float) -> str:
    if numbers is None:
        return "-"
    text = f"{numbers['mean']:.3g}"
    if "half_width" in numbers:
        text += f" ± {numbers['half_width']:.2g}"
    return text if numbers["n"] == seeds else f"{text} ({numbers['n']:.0f})"


def write(path: Path, options: argparse.Namespace, runs: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Everything that was measured."""
    document = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "settings": {"iterations": options.iterations, "seeds": options.seeds, "shape": asdict(SHAPE), "task": TASK},
        "contestants": {name: asdict(CONTESTANTS[name]) for name in runs},
        "summary": summary,
        "runs": runs,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Seeds x contestants, the table and the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many (default 5)")
    parser.add_argument("--iterations", type=int, default=25, help="of each run (default 25)")
    parser.add_argument("--quick", action="store_true", help="one seed, two iterations, nothing written by default")
    parser.add_argument("--output", type=Path, help="the JSON file (default: in benchmarks/results)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.iterations = 1, 2
    names: Sequence[str] = (OURS, TRL) if options.quick else tuple(CONTESTANTS)
    output = options.output or (None if options.quick else RESULTS / "time_to_reward.json")
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            of_seed = run_seed(seed, names, options.iterations, Path(folder))
        for name, run in of_seed.items():
            runs.setdefault(name, []).append(run)
        if seed == 0 and not options.quick:
            names = tuple(dict.fromkeys((OURS, TRL, best(of_seed, "sentiment_ours"), best(of_seed, "sentiment_trl"))))
        if output:
            write(output, options, runs, summarise(runs))
    summary = summarise(runs)
    Console(width=160).print(table_of(summary))


if __name__ == "__main__":
    main()
