"""How long until the reward is there: this library's PPO and TRL's on the quickstart's task, from the same start.

    python -m benchmarks.time_to_reward             5 seeds; makes TRL's environment and the warm starts on first use
    python -m benchmarks.time_to_reward --quick     one seed, two iterations: does everything run?

    contestants   both systems, each with several learning rates of the policy
    one seed      warm start -> iteration 0 of A B C ... -> iteration 1 of A B C ... so that all see the same weather

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


OURS, TRL = "ours 0.0002", "trl 0.0002"
"""The quickstart's learning rate."""

RAW = ("wall_s", "rollout_s", "cpu_s", "rollout_cpu_s", "others_cores", "reward", "kl", "response_tokens")
"""What is kept of every iteration."""


def contestants_of(systems: Sequence[str], learning_rates: Sequence[float]) -> dict[str, Contestant]:
    """By name: the system and its policy's learning rate."""
    return {
        f"{system} {rate:g}": Contestant(f"sentiment_{system}", rate) for rate in learning_rates for system in systems
    }


# --- one seed ---------------------------------------------------------------------------------------------------------


def run_seed(
    seed: int, contestants: Mapping[str, Contestant], iterations: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """All contestants from one warm start, iteration by iteration in turn.

    Args:
        seed: of warm start, prompts, rollouts and minibatches.
        contestants: by name.
        iterations: of each.
        folder: for what is passed around.

    Returns:
        By name: seed, versions, every iteration's measurements, and the final policy's reward on held-out prompts.

    Raises:
        WorkerError: a contestant died, or took another number of optimizer steps than the others.
    """
    from rl4lms_like.data_pools.film_opinions import FilmOpinions
    from rl4lms_like.small_models.warm_start import WarmStartSettings, make_warm_start

    warm_start = WARM_STARTS / f"warm_start_seed_{seed}"
    make_warm_start(warm_start, WarmStartSettings(seed=seed))
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps([sample.prompt_or_input_text for sample, _ in FilmOpinions.prepare("train")]))
    job = {
        "shape": asdict(SHAPE),
        "model": str(warm_start.resolve()),
        "seed": seed,
        "threads": 1,
        "task": TASK,
        "prompts": str(prompts),
    }
    runs: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, contestant in contestants.items():
            own_job = {**job, **asdict(contestant), "save_to": str(folder / name)}
            workers[name] = WorkerProcess(contestant.system, own_job, folder / f"{name}.log")
            stack.callback(workers[name].stop)
            runs[name] = {"seed": seed, **workers[name].loaded, "iterations": []}
        for number in range(iterations):
            for name, worker in workers.items():
                runs[name]["iterations"].append(worker.run_iteration())
                show_progress(seed, name, number, runs[name]["iterations"][-1])
    before = held_out_reward(warm_start, warm_start)
    for name, run in runs.items():
        run["held_out_reward_before"] = before
        run["held_out_reward"] = held_out_reward(folder / name, warm_start)
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
    from rl4lms_like.scoring.sentiment import sentiment

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    prompts = [sample.prompt_or_input_text for sample, _ in FilmOpinions.prepare("test")]
    encoded = tokenizer(prompts, padding="longest", return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    sequences = model.generate(  # whatever generation config was saved with the model
        **encoded,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=SHAPE.response_len,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    responses = tokenizer.batch_decode(sequences[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return statistics.fmean(sentiment(prompt + text) for prompt, text in zip(prompts, responses, strict=True))


# --- numbers ----------------------------------------------------------------------------------------------------------


def reached(iterations: Sequence[Mapping[str, Any]], target: float) -> dict[str, float]:
    """When a run reached a target.

    Args:
        iterations: with `reward`, `kl` (nats per token), `wall_s` and `cpu_s`.
        target: mean reward of two consecutive rollouts.

    Returns:
        Seconds, CPU seconds and number of iterations until then, and the mean KL of the two; empty if it did not.
    """
    for last in range(1, len(iterations)):
        pair, until = iterations[last - 1 : last + 1], iterations[: last + 1]
        if statistics.fmean(iteration["reward"] for iteration in pair) >= target:
            return {
                f"s to {target}": math.fsum(iteration["wall_s"] for iteration in until),
                f"CPU s to {target}": math.fsum(iteration["cpu_s"] for iteration in until),
                f"iterations to {target}": last + 1,
                f"KL at {target}": statistics.fmean(iteration["kl"] for iteration in pair),
            }
    return {}


def measures(run: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one run; those of targets that it did not reach are absent."""
    iterations = run["iterations"]

    def mean(key: str, some: Sequence[Mapping[str, Any]] = iterations) -> float:
        return statistics.fmean(iteration[key] for iteration in some)

    numbers = {
        "reward, first iteration": iterations[0]["reward"],
        "reward, last 5 iterations": mean("reward", iterations[-5:]),
        "KL, last 5 iterations": mean("kl", iterations[-5:]),
        "reward, held-out prompts": run["held_out_reward"],
        "reward, held-out prompts, warm start": run["held_out_reward_before"],
        "s per iteration": mean("wall_s"),
        "CPU s per iteration": mean("cpu_s"),
        "CPU s per rollout": mean("rollout_cpu_s"),
        "CPU s per update": mean("cpu_s") - mean("rollout_cpu_s"),
    }
    for target in TARGETS:
        numbers |= reached(iterations, target)
    return numbers


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean, half the width of its 95 % interval (Student's t; not with one value), and how many values there are."""
    from scipy import stats

    summary = {"mean": statistics.fmean(values), "n": len(values)}
    if len(values) > 1:
        standard_error = statistics.stdev(values) / len(values) ** 0.5
        summary["half_width"] = float(stats.t.ppf(0.975, len(values) - 1)) * standard_error
    return summary


def summarise(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean and interval over seeds of every measure, and of the ratios to our runs of the same seed.

    Ratios are to our run with the same learning rate (`x ours`) and with the quickstart's (`x ours 0.0002`).
    """
    by_seed = {name: {run["seed"]: measures(run) for run in of_name} for name, of_name in runs.items()}
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for name, seeds in by_seed.items():
        keys = dict.fromkeys(key for numbers in seeds.values() for key in numbers)
        summary[name] = {key: interval([n[key] for n in seeds.values() if key in n]) for key in keys}
        for label, yardstick in (("x ours", f"ours {name.split()[1]}"), (f"x {OURS}", OURS)):
            if yardstick == name or yardstick not in by_seed:
                continue
            for key in [key for key in keys if "s to " in key or (label == "x ours" and "s per " in key)]:
                pairs = [(n[key], by_seed[yardstick].get(seed, {}).get(key)) for seed, n in seeds.items() if key in n]
                ratios = [mine / ours for mine, ours in pairs if ours is not None]
                if ratios:
                    summary[name][f"{key}, {label}"] = interval(ratios)
    return summary


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


def columns(iterations: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The raw curves, one list a quantity."""
    return {key: [round(iteration[key], 4) for iteration in iterations] for key in RAW}


def write(
    options: argparse.Namespace, contestants: Mapping[str, Contestant], runs: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Everything that was measured."""
    document = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "settings": {"iterations": options.iterations, "seeds": options.seeds, "shape": asdict(SHAPE), "task": TASK},
        "contestants": {name: asdict(contestant) for name, contestant in contestants.items()},
        "summary": summarise(runs),
        "runs": {name: [{**run, "iterations": columns(run["iterations"])} for run in runs[name]] for name in runs},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Seeds x contestants, the table and the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many (default 5)")
    parser.add_argument("--iterations", type=int, default=25, help="of each run (default 25)")
    parser.add_argument("--systems", default="ours,trl", help="default: ours,trl")
    parser.add_argument("--learning-rates", default="2e-4,5e-4,1e-3", help="of the policy; default: 2e-4,5e-4,1e-3")
    parser.add_argument("--quick", action="store_true", help="one seed, one rate, two iterations; nothing is written")
    parser.add_argument("--output", type=Path, default=RESULTS / "time_to_reward.json", help="the JSON file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.iterations, options.learning_rates = 1, 2, "2e-4"
    contestants = contestants_of(
        options.systems.split(","), [float(rate) for rate in options.learning_rates.split(",")]
    )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            for name, run in run_seed(seed, contestants, options.iterations, Path(folder)).items():
                runs[name].append(run)
        if not options.quick:
            write(options, contestants, runs)
    Console(width=170).print(table_of(summarise(runs)))


if __name__ == "__main__":
    main()
