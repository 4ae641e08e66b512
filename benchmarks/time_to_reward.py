"""How much CPU time until the held-out reward is 0.7: this library and TRL on the quickstart's task, each tuned.

    python -m benchmarks.time_to_reward              about an hour of one core; the same command continues it
    python -m benchmarks.time_to_reward --table      the results so far
    python -m benchmarks.time_to_reward --quick      one setting, one seed, one iteration: does everything run?

    tuning      each system x every setting of its algorithm in `GRIDS` x 2 seeds, each with the same CPU time at most
    choice      of TRL's PPO and GRPO, the setting with the least CPU time to the target; of ours, for each of TRL's,
                the one with the least CPU time among those whose KL at the target is not above that of TRL's choice
    measuring   the chosen ones on 10 other seeds; the runs of a seed take turns, iteration by iteration

After each iteration the policy answers the prompts of the test split, always with the same random numbers. A run ends
when the mean reward of these responses is at least 0.7. The KL is that of the policy to the initial model on them, over
the whole vocabulary, in nats per token. Imports, loading and these evaluations are not in the time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.hyperparameters import half_width
from benchmarks.ppo_iteration import RESULTS, machine
from benchmarks.workers import SYSTEMS, System, WorkerError, WorkerProcess
from benchmarks.workload import Shape
from rl4lms_like.data_pools.film_opinions import FilmOpinions
from rl4lms_like.scoring.sentiment import sentiment
from rl4lms_like.small_models.warm_start import WarmStartSettings, make_warm_start

TARGET = 0.7
TUNING_SEEDS = (100, 101)
SEEDS = tuple(range(10))
MAX_CPU_S = {TUNING_SEEDS: 15.0, SEEDS: 60.0}
"""Seeds -> CPU time after which a run that has not reached the target ends."""
N_RESPONSES = 2
"""Responses to each of the 200 held-out prompts."""

SHAPE = Shape("sentiment", prompt_len=16, response_len=40, n_layer=2, n_embd=64, vocab_size=1024)
"""The quickstart's work; lengths and vocabulary are upper limits."""
TASK = {"kl_coef": 0.05, "clip_range": 0.2, "vf_coef": 0.5, "gamma": 1.0, "gae_lambda": 0.95}
N_MINIBATCHES = 4
MODELS = Path("results") / "time_to_reward"

OURS, TRL = ("ours_ppo", "ours_grpo"), ("trl_ppo", "trl_grpo")
CONTESTANTS = {
    "ours_ppo": System("sentiment_ours", job={"algorithm": "ppo", "critic_learning_rate": 1e-3}),
    "ours_grpo": System("sentiment_ours", job={"algorithm": "grpo"}),
    "trl_ppo": System("sentiment_trl_ppo", SYSTEMS["trl_ppo"].requirements, environment="trl-ppo"),
    "trl_grpo": System("sentiment_trl_grpo", SYSTEMS["trl_grpo"].requirements, environment="trl-grpo"),
}
SYSTEMS.update({f"sentiment_{name}": system for name, system in CONTESTANTS.items()})


@dataclass(frozen=True)
class Setting:
    """A point of a grid.

    Args:
        learning_rate: of the policy; TRL's PPO has one for policy and critic.
        episodes: of a rollout, in `N_MINIBATCHES` minibatches.
        n_epochs: passes over a rollout.
        group_size: responses to one prompt.
    """

    learning_rate: float
    episodes: int
    n_epochs: int = 1
    group_size: int = 1

    def __str__(self) -> str:
        groups = f" in groups of {self.group_size}" if self.group_size > 1 else ""
        return f"{self.learning_rate:g}, {self.episodes} episodes{groups}, epochs: {self.n_epochs}"

    @property
    def shape(self) -> Shape:
        """The work of an iteration."""
        return replace(SHAPE, episodes=self.episodes, minibatch=self.episodes // N_MINIBATCHES, n_epochs=self.n_epochs)


LEARNING_RATES = (1e-3, 2e-3, 3e-3)
EPISODES = (64, 128)
GRIDS = {
    "ppo": [Setting(rate, n, n_epochs=epochs) for n in EPISODES for epochs in (1, 2) for rate in LEARNING_RATES],
    "grpo": [Setting(rate, n, group_size=size) for n in EPISODES for size in (4, 8) for rate in LEARNING_RATES],
}
"""Algorithm -> settings, the same for both libraries."""


# --- one seed ---------------------------------------------------------------------------------------------------------


class HeldOut:
    """Responses of a policy to the prompts of the test split, always with the same random numbers.

    Args:
        start: folder of the initial model and its tokenizer.
    """

    def __init__(self, start: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(start, padding_side="left")
        self.start: Any = AutoModelForCausalLM.from_pretrained(start).eval()
        self.prompts = [sample.prompt_or_input_text for sample, _ in FilmOpinions.prepare("test")]

    @torch.no_grad()
    def measure(self, folder: Path) -> dict[str, float]:
        """Return mean reward and KL of the policy in a folder."""
        model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        sequences, prompt_mask = self.sampled(model)
        n_prompt = prompt_mask.shape[1]
        responses = sequences[:, n_prompt:]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        prompts = [prompt for prompt in self.prompts for _ in range(N_RESPONSES)]
        rewards = [sentiment(prompt + text) for prompt, text in zip(prompts, texts, strict=True)]

        # The first end token belongs to the response. Those after it are padding.
        is_end = (responses == self.tokenizer.eos_token_id).long()
        is_token = is_end.cumsum(dim=1) - is_end == 0  # [n, length]
        mask = torch.cat([prompt_mask, is_token.long()], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        log_p, log_start = (
            network(input_ids=sequences, attention_mask=mask, position_ids=positions)
            .logits[:, n_prompt - 1 : -1]
            .log_softmax(dim=-1)
            for network in (model, self.start)
        )
        kl = (log_p.exp() * (log_p - log_start)).sum(dim=-1)  # [n, length]
        return {"reward": statistics.fmean(rewards), "kl": float(kl[is_token].double().mean())}

    def sampled(self, model: Any) -> tuple[Tensor, Tensor]:
        """Return prompts with responses `[n, prompt + length]`, and the mask of the prompts, padded on the left."""
        encoded = self.tokenizer(self.prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
        torch.manual_seed(0)
        sequences = model.generate(  # whatever generation config was saved with the model
            **encoded,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=SHAPE.response_len,
            num_return_sequences=N_RESPONSES,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return sequences, encoded["attention_mask"].repeat_interleave(N_RESPONSES, dim=0)


def run_seed(
    seed: int, contestants: Mapping[str, tuple[str, Setting]], max_cpu_s: float
) -> dict[str, list[dict[str, float]]]:
    """Train contestants from one initial model, iteration by iteration in turn.

    Args:
        seed: of initial model, prompts, rollouts and minibatches.
        contestants: name -> system and setting.
        max_cpu_s: CPU time after which a contestant ends that has not reached the target.

    Returns:
        By name: CPU time, held-out reward, KL and rollout's reward of each iteration.

    Raises:
        WorkerError: a contestant died, or took another number of optimizer steps than its setting has.
    """
    start = MODELS / f"warm_start_seed_{seed}"
    make_warm_start(start, WarmStartSettings(seed=seed))
    held_out = HeldOut(start)
    curves: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        prompts = Path(folder) / "prompts.json"
        prompts.write_text(json.dumps([sample.prompt_or_input_text for sample, _ in FilmOpinions.prepare("train")]))
        workers = {}
        for i, (name, (system, setting)) in enumerate(contestants.items()):
            job = {
                "shape": asdict(setting.shape),
                "model": str(start.resolve()),
                "seed": seed,
                "threads": 1,
                "task": TASK,
                "prompts": str(prompts),
                "learning_rate": setting.learning_rate,
                "group_size": setting.group_size,
                "save_to": str(Path(folder) / str(i)),
            }
            workers[name] = WorkerProcess(f"sentiment_{system}", job, Path(folder) / f"{i}.log")
            stack.callback(workers[name].stop)

        while workers:
            for name in list(workers):
                iteration = workers[name].run_iteration()
                steps = contestants[name][1].shape.optimizer_steps
                if iteration["optimizer_steps"] != steps:
                    raise WorkerError(f"{name} took {iteration['optimizer_steps']} optimizer steps, not {steps}")
                measured = held_out.measure(Path(workers[name].job["save_to"]))
                kept = {key: iteration[key] for key in ("cpu_s", "rollout_cpu_s", "rollout_reward")} | measured
                curves[name].append({key: round(value, 4) for key, value in kept.items()})

                spent = math.fsum(row["cpu_s"] for row in curves[name])
                if spent >= max_cpu_s or measured["reward"] >= TARGET:
                    print(f"seed {seed}, {name}: {spent:.1f} CPU s, {reached(curves[name])}", flush=True)
                    workers.pop(name).stop()
    return curves


def reached(curve: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Return CPU time, iterations and KL of a run that has reached the target; None if it did not."""
    if not curve or curve[-1]["reward"] < TARGET:
        return None
    return {
        "CPU s": math.fsum(row["cpu_s"] for row in curve),
        "CPU s of rollouts": math.fsum(row["rollout_cpu_s"] for row in curve),
        "iterations": len(curve),
        "KL": curve[-1]["kl"],
    }


# --- choice -----------------------------------------------------------------------------------------------------------


def tuned(runs: Mapping[str, Sequence[Mapping[str, float]]], system: str) -> Iterator[tuple[Setting, float, float]]:
    """Yield the settings with which a system reached the target on all tuning seeds: mean CPU time, mean KL."""
    for setting in GRIDS[algorithm_of(system)]:
        ends = [reached(runs.get(key(system, setting, seed), ())) for seed in TUNING_SEEDS]
        times, kls = [[end[name] for end in ends if end is not None] for name in ("CPU s", "KL")]
        if len(times) == len(TUNING_SEEDS):
            yield setting, statistics.fmean(times), statistics.fmean(kls)


def choices(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, tuple[str, Setting]]:
    """Return what is measured: name -> system and setting. Ours is left out where its KL is always larger than TRL's.

    Raises:
        ValueError: one of TRL's reached the target with no setting.
    """
    chosen = {}
    for trl in TRL:
        setting, _, kl_limit = fastest(trl, list(tuned(runs, trl)))
        chosen[trl] = (trl, setting)
        for ours in OURS:
            if allowed := [row for row in tuned(runs, ours) if row[2] <= kl_limit]:
                chosen[f"{ours} for {trl}"] = (ours, fastest(ours, allowed)[0])
    return chosen


def algorithm_of(system: str) -> str:
    """Return the key of a system's grid."""
    return system.split("_")[1]


def fastest(system: str, rows: Sequence[tuple[Setting, float, float]]) -> tuple[Setting, float, float]:
    """Return the row with the least CPU time.

    Raises:
        ValueError: there is none.
    """
    if not rows:
        raise ValueError(f"{system}: no setting of the grid reached {TARGET} in time")
    return min(rows, key=lambda row: row[1])


def key(contestant: str, setting: Setting, seed: int) -> str:
    """Return the name of a run in the results file."""
    return f"{contestant} | {setting} | {seed}"


# --- output -----------------------------------------------------------------------------------------------------------


def tuning_table(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    """Return mean CPU seconds to the target, and mean KL there, of every setting; `-` if a seed did not reach it."""
    table = Table(title=f"tuning: CPU s to {TARGET} (KL there)", title_justify="left")
    for heading in ("algorithm", "setting", "ours", "TRL"):
        table.add_column(heading)
    for algorithm, grid in GRIDS.items():
        by_library = [
            {setting: (cpu_s, kl) for setting, cpu_s, kl in tuned(runs, f"{library}_{algorithm}")}
            for library in ("ours", "trl")
        ]
        for setting in grid:
            cells = [of_library.get(setting) for of_library in by_library]
            texts = ["-" if cell is None else f"{cell[0]:.2f} ({cell[1]:.3f})" for cell in cells]
            table.add_row(algorithm, str(setting), *texts)
    return table


def measured_table(
    chosen: Mapping[str, tuple[str, Setting]], runs: Mapping[str, Sequence[Mapping[str, float]]]
) -> Table:
    """Return means with 95 % intervals over seeds, and TRL's CPU times divided by those of the row."""
    table = Table(title=f"CPU time to {TARGET}, mean ± 95 % interval", title_justify="left")
    columns = ("CPU s", "CPU s of rollouts", "iterations", "KL")
    for heading in ("", "setting", "seeds", *columns, *(f"{trl} / it" for trl in TRL)):
        table.add_column(heading)
    ends = {
        name: {seed: end for seed in SEEDS if (end := reached(runs.get(key(name, setting, seed), ()))) is not None}
        for name, (_, setting) in chosen.items()
    }
    for name, (_, setting) in chosen.items():
        mine = ends[name]
        cells = [with_interval([end[column] for end in mine.values()]) for column in columns]
        for trl in TRL:
            both = mine.keys() & ends[trl].keys()
            cells.append(ratio([ends[trl][seed]["CPU s"] / mine[seed]["CPU s"] for seed in sorted(both)]))
        table.add_row(name, str(setting), str(len(mine)), *cells)
    return table


def with_interval(values: Sequence[float]) -> str:
    """Return the mean and half the width of its 95 % interval (Student's t), which one value has not."""
    if not values:
        return "-"
    mean = statistics.fmean(values)
    return f"{mean:.3g}" if len(values) == 1 else f"{mean:.3g} ± {half_width(list(values)):.2g}"


def ratio(values: Sequence[float]) -> str:
    """Return the geometric mean of ratios within seeds, and its 95 % interval (Student's t, of their logarithms)."""
    if not values:
        return "-"
    logs = [math.log(value) for value in values]
    mean = math.exp(statistics.fmean(logs))
    if len(logs) == 1:
        return f"{mean:.3g}"
    width = half_width(logs)
    return f"{mean:.2f} ({mean / math.exp(width):.2f} to {mean * math.exp(width):.2f})"


def write(path: Path, runs: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Write all runs so far; an interruption leaves the old file."""
    columns = {
        name: {column: [row[column] for row in curve] for column in curve[0]} for name, curve in sorted(runs.items())
    }
    document = {"machine": machine(), "target": TARGET, "task": TASK, "runs": columns}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".tmp")
    whole.write_text(json.dumps(document, indent=1) + "\n")
    whole.replace(path)


def read(path: Path) -> dict[str, list[dict[str, float]]]:
    """Return the runs of a results file; none if there is no file."""
    if not path.is_file():
        return {}
    runs = json.loads(path.read_text())["runs"]
    return {
        name: [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        for name, columns in runs.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, choose, measure, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one setting, one seed, one iteration; nothing is kept")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--output", type=Path, default=RESULTS / "time_to_reward.json", help="the JSON file")
    options = parser.parse_args(arguments)
    console = Console(width=200)
    if options.quick:
        first = {name: (name, GRIDS[algorithm_of(name)][0]) for name in CONTESTANTS}
        for name, curve in run_seed(0, first, max_cpu_s=0).items():
            console.print(name, curve)
        return

    runs = read(options.output)
    if not options.table:
        for of_ppo, of_grpo in zip(*GRIDS.values(), strict=True):
            settings = {"ppo": of_ppo, "grpo": of_grpo}
            run_missing(
                runs, {name: (name, settings[algorithm_of(name)]) for name in CONTESTANTS}, TUNING_SEEDS, options.output
            )
    console.print(tuning_table(runs))

    chosen = choices(runs)
    if not options.table:
        run_missing(runs, chosen, SEEDS, options.output)
    console.print(measured_table(chosen, runs))


def run_missing(
    runs: dict[str, list[dict[str, float]]],
    contestants: Mapping[str, tuple[str, Setting]],
    seeds: tuple[int, ...],
    output: Path,
) -> None:
    """Add the runs of these contestants and seeds that are not there yet, and write them seed by seed."""
    for seed in seeds:
        todo = {key(name, of_name[1], seed): of_name for name, of_name in contestants.items()}
        todo = {name: of_name for name, of_name in todo.items() if name not in runs}
        runs |= run_seed(seed, todo, MAX_CPU_S[seeds])
        write(output, runs)


if __name__ == "__main__":
    main()
