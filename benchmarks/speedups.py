"""CPU seconds and peak memory of an iteration with each of the speedups alone, with all, and without any.

    python -m benchmarks.speedups                                       PPO at the shapes i and ii
    python -m benchmarks.speedups --shapes iii --speedups onednn
    python -m benchmarks.speedups --model benchmarks/.models/smollm2    GRPO with LoRA on SmolLM2-135M
    python -m benchmarks.speedups --products                            oneDNN's and MKL's products, by shape
    python -m benchmarks.speedups --quick                               does everything run? (tiny work)

One process for each variant; they take turns, and a ratio is the median of ratios within a round. The shapes are those
of `benchmarks.ppo_iteration`, the model that of `benchmarks.grpo_real`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import grpo_real, tables
from benchmarks.ppo_iteration import RESULTS, write
from benchmarks.workers import SYSTEMS, System, check_work, running
from benchmarks.workload import SHAPES, Shape, quick
from rl4lms_like.policies.speedups import all_speedups, no_speedups

NONE, ALL = "none", "all"
N_WARM_UP = 1
PARTS = {
    "generate": "rollout: generate",
    "score": "rollout: score (policy, critic, reference)",
    "forward": "update: forward",
    "backward": "update: backward",
}
"""Column -> part of an iteration."""

WEIGHTS = ((256, 256), (512, 512), (768, 768), (2304, 768), (3072, 768), (768, 3072), (50257, 768))
ROWS = (128, 256, 512)

console = Console(width=120)


def variants(keys: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Return the `speedups` block of each variant: of none, of each key alone, and of all."""
    blocks = {NONE: no_speedups()}
    for key in keys:
        blocks[key] = no_speedups() | {key: True}
    return blocks | {ALL: all_speedups()}


def measure(
    shape: Shape, blocks: Mapping[str, Mapping[str, bool]], options: argparse.Namespace, **job: Any
) -> dict[str, Any]:
    """Return what each variant's iterations took, in rounds of one iteration of each.

    Args:
        shape: of the work.
        blocks: variant -> its `speedups`.
        options: iterations, seed, threads.
        job: more entries for every worker's job.
    """
    console.print(tables.describe(shape))
    algorithm = {"algorithm": "grpo"} if "lora" in job else {}
    for name, block in blocks.items():
        SYSTEMS[name] = System("ours", job={"speedups": dict(block), "parts": True, **algorithm})
    with running(list(blocks), shape, seed=options.seed, threads=options.threads, **job) as workers:
        systems: dict[str, Any] = {worker.name: {**worker.loaded, "iterations": []} for worker in workers}
        for round_ in range(N_WARM_UP + options.iterations):
            for worker in workers:
                iteration = worker.run_iteration()
                check_work(worker.name, shape, iteration)
                if round_ >= N_WARM_UP:
                    systems[worker.name]["iterations"].append(iteration)
                console.print(tables.progress_line(worker.name, round_, iteration), highlight=False)
    return systems


def summary(systems: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return medians of each variant, and the ratio of its CPU time to that without speedups within a round."""
    rows = {}
    for name, system in systems.items():
        iterations = system["iterations"]
        pairs = zip(iterations, systems[NONE]["iterations"], strict=True)
        row = {
            "cpu_s": median(iteration["cpu_s"] for iteration in iterations),
            "times_none": median(mine["cpu_s"] / none["cpu_s"] for mine, none in pairs),
            "peak_mb": iterations[-1]["peak_mb"],
        }
        for column, part in PARTS.items():
            row[column] = median(iteration["parts"][part] for iteration in iterations)
        rows[name] = row
    return rows


def table(shape: Shape, rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table of a shape."""
    made = Table(title=f"shape {shape.name}: CPU s of an iteration, medians")
    for heading in ("speedup", "iteration", "x none", *PARTS, "peak MiB"):
        made.add_column(heading, justify="left" if heading == "speedup" else "right")
    for name, row in rows.items():
        parts = [f"{row[column]:.2f}" for column in PARTS]
        made.add_row(name, f"{row['cpu_s']:.2f}", f"{row['times_none']:.2f}", *parts, f"{row['peak_mb']:.0f}")
    return made


def products(n_rounds: int) -> Table:
    """Return the time of oneDNN's product relative to MKL's: medians of ratios, for weights `[m, d]` and rows."""
    import torch

    from rl4lms_like.core.products import product_of_onednn

    made = Table(title="CPU time of oneDNN's product / MKL's")
    made.add_column("weight")
    for n_rows in ROWS:
        made.add_column(f"{n_rows} rows", justify="right")
    for m, d in WEIGHTS:
        weight, bias = torch.randn(m, d), torch.randn(m)
        ratios = []
        for n_rows in ROWS:
            x = torch.randn(n_rows, d)
            n_calls = max(1, 10**8 // (n_rows * m * d))
            seconds: list[list[float]] = [[], []]
            for _ in range(n_rounds):
                for compute, times in zip((torch.nn.functional.linear, product_of_onednn), seconds, strict=True):
                    start = time.process_time()
                    for _ in range(n_calls):
                        compute(x, weight, bias)
                    times.append(time.process_time() - start)
            mkl, onednn = seconds
            ratios.append(f"{median(mine / theirs for mine, theirs in zip(onednn, mkl, strict=True)):.2f}")
        made.add_row(f"{m} x {d}", *ratios)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="i,ii", help=f"of {','.join(SHAPES)} (default i,ii)")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M, made by benchmarks.real_model")
    parser.add_argument("--speedups", default=",".join(no_speedups()), help="that are measured alone (default: each)")
    parser.add_argument("--iterations", type=int, default=5, help="of each, after a warm-up (default 5)")
    parser.add_argument("--products", action="store_true", help="only single products, of many shapes")
    parser.add_argument("--quick", action="store_true", help="tiny work: does everything run?")
    parser.add_argument("--threads", type=int, default=1, help="of torch in each process (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="the JSON file (default: in benchmarks/results)")
    options = parser.parse_args(arguments)
    if options.products:
        console.print(products(2 if options.quick else 12))
        return
    blocks = variants(options.speedups.split(","))

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        jobs: list[tuple[Shape, dict[str, Any]]] = [(SHAPES[name], {}) for name in options.shapes.split(",")]
        if options.model is not None:
            words = grpo_real.with_an_end_that_is_never_sampled(options.model, Path(folder))
            jobs = [(grpo_real.SHAPE, {"model": Path(folder), "words": words, "lora": grpo_real.LORA})]
        for shape, job in jobs:
            if options.quick:
                shape = replace(shape, response_len=4, episodes=8, minibatch=8) if job else quick(shape)
            systems = measure(shape, blocks, options, **job)
            rows = summary(systems)
            console.print(table(shape, rows))
            results[shape.name] = {"shape": asdict(shape), "systems": systems, "summary": rows}
    name = "speedups" if options.model is None else "speedups_smollm2"
    write(options.output or RESULTS / f"{name}.json", options, {"shapes": results})


if __name__ == "__main__":
    main()
