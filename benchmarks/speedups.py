"""CPU seconds and peak memory of an iteration with each of the speedups alone, with all, and without any.

    python -m benchmarks.speedups                                       PPO at the shapes i and ii
    python -m benchmarks.speedups --algorithm grpo --shapes i           GRPO
    python -m benchmarks.speedups --shapes iii --speedups onednn
    python -m benchmarks.speedups --model benchmarks/.models/smollm2    GRPO with LoRA on SmolLM2-135M
    python -m benchmarks.speedups --precision                           what is computed in bfloat16; with --model, too
    python -m benchmarks.speedups --products                            single products, by shape
    python -m benchmarks.speedups --quick                               does everything run? (nothing is written)

One process for each variant; they take turns, and a ratio is the median of ratios within a round. The shapes are those
of `benchmarks.ppo_iteration`, the model that of `benchmarks.grpo_real`. With `--precision`, all variants have all
speedups that apply, and the first one is float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks import grpo_real
from benchmarks.ppo_iteration import RESULTS, add_options, console, measure, write
from benchmarks.workers import SYSTEMS, System
from benchmarks.workload import SHAPES, quick
from rl4lms_like.policies.speedups import all_speedups, no_speedups

PARTS = {
    "generate": "rollout: generate",
    "score": "rollout: score (policy, critic, reference)",
    "forward": "update: forward",
    "backward": "update: backward",
}
"""Column -> part of an iteration."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "generation": {"generation_dtype": "bfloat16"},
    "reference": {"reference_dtype": "bfloat16"},
    "generation and reference": {"generation_dtype": "bfloat16", "reference_dtype": "bfloat16"},
    "everything": {"dtype": "bfloat16"},
    "everything except generation": {"dtype": "bfloat16", "generation_dtype": "float32"},
}
"""What is computed in bfloat16 -> arguments of the policy."""

WEIGHTS = ((256, 256), (512, 512), (768, 768), (2304, 768), (3072, 768), (768, 3072), (50257, 768))
ROWS = (128, 256, 512)
WEIGHTS_TO_GENERATE = ((128, 128), (512, 128), (256, 256), (576, 576), (768, 768), (3072, 768), (49152, 576))
ROWS_TO_GENERATE = (4, 16, 32, 64)
CACHE = 2**27
"""More bytes than a processor's cache holds."""


def speedup_variants(keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return arguments of the policy by variant: without speedups, with each of the keys alone, and with all."""
    variants = {"none": {"speedups": no_speedups()}}
    for key in keys:
        variants[key] = {"speedups": no_speedups() | {key: True}}
    return variants | {"all": {"speedups": all_speedups()}}


def summary(systems: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return medians of each variant, and the ratio of its CPU time to that of the first one within a round."""
    first = next(iter(systems.values()))
    rows = {}
    for name, system in systems.items():
        iterations = system["iterations"]
        pairs = zip(iterations, first["iterations"], strict=True)
        row = {
            "cpu_s": median(iteration["cpu_s"] for iteration in iterations),
            "cpu_times_first": median(iteration["cpu_s"] / base["cpu_s"] for iteration, base in pairs),
            "peak_mb": iterations[-1]["peak_mb"],
        }
        for column, part in PARTS.items():
            row[column] = median(iteration["parts"][part] for iteration in iterations)
        rows[name] = row
    return rows


def comparison(title: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table of a shape."""
    table = Table(title=f"{title}: CPU s of an iteration, medians")
    for heading in ("variant", "iteration", f"x {next(iter(rows))}", *PARTS, "peak MiB"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, row in rows.items():
        parts = [f"{row[column]:.2f}" for column in PARTS]
        table.add_row(name, f"{row['cpu_s']:.2f}", f"{row['cpu_times_first']:.2f}", *parts, f"{row['peak_mb']:.0f}")
    return table


def products(n_rounds: int) -> Table:
    """Return the time of oneDNN's product relative to MKL's: medians of ratios, for weights `[m, d]` and rows."""
    import torch

    from rl4lms_like.core.products import product_of_onednn

    table = Table(title="CPU time of oneDNN's product / MKL's")
    table.add_column("weight")
    for n_rows in ROWS:
        table.add_column(f"{n_rows} rows", justify="right")
    for m, d in WEIGHTS:
        weight, bias = torch.randn(m, d), torch.randn(m)
        ratios = []
        for n_rows in ROWS:
            # Each in turn, often enough for the resolution of the clock.
            x = torch.randn(n_rows, d)
            n_calls = max(1, 10**8 // (n_rows * m * d))
            seconds: list[list[float]] = [[], []]
            for _ in range(n_rounds):
                for compute, times in zip((torch.nn.functional.linear, product_of_onednn), seconds, strict=True):
                    start = time.process_time()
                    for _ in range(n_calls):
                        compute(x, weight, bias)
                    times.append(time.process_time() - start)

            pairs = zip(*seconds, strict=True)
            ratios.append(f"{median(onednn / mkl for mkl, onednn in pairs):.2f}")
        table.add_row(f"{m} x {d}", *ratios)
    return table


def packed_products(n_rounds: int) -> Table:
    """Return the time of a product with a packed weight relative to that with a plain one, in float32 and bfloat16.

    As in a step of generation, no weight is in the cache: each of several copies is read in turn.
    """
    import torch

    from rl4lms_like.core.products import packed, product_with_packed

    table = Table(title="CPU time of a product with a packed weight / a plain one: float32, bfloat16")
    table.add_column("weight")
    for n_rows in ROWS_TO_GENERATE:
        table.add_column(f"{n_rows} rows", justify="right")
    for m, d in WEIGHTS_TO_GENERATE:
        n_copies = max(2, min(100, CACHE // (4 * m * d)))
        cells: list[list[str]] = [[] for _ in ROWS_TO_GENERATE]
        for dtype in (torch.float32, torch.bfloat16):
            plain = [torch.randn(m, d).to(dtype) for _ in range(n_copies)]
            copies = [packed(weight) for weight in plain]
            for n_rows, cell in zip(ROWS_TO_GENERATE, cells, strict=True):
                x = torch.randn(n_rows, d).to(dtype)
                seconds: list[list[float]] = [[], []]
                for _ in range(n_rounds):
                    variants = ((torch.nn.functional.linear, plain), (product_with_packed, copies))
                    for (compute, weights), times in zip(variants, seconds, strict=True):
                        start = time.process_time()
                        for weight in weights:
                            compute(x, weight)
                        times.append(time.process_time() - start)
                pairs = zip(*seconds, strict=True)
                cell.append(f"{median(with_packed / with_plain for with_plain, with_packed in pairs):.2f}")
        table.add_row(f"{m} x {d}", *(", ".join(cell) for cell in cells))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="i,ii", help=f"of {','.join(SHAPES)} (default i,ii)")
    parser.add_argument("--algorithm", choices=("ppo", "grpo"), help="default: ppo, with --model grpo")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M, made by benchmarks.real_model")
    parser.add_argument("--speedups", default=",".join(no_speedups()), help="that are measured alone (default: each)")
    parser.add_argument("--precision", action="store_true", help="bfloat16 in parts of an iteration, not speedups")
    parser.add_argument("--products", action="store_true", help="only single products, of many shapes")
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.products:
        n_rounds = 2 if options.quick else 12
        console.print(products(n_rounds))
        console.print(packed_products(n_rounds))
        return

    # Each variant is a system of `ppo_iteration`, with arguments of its policy.
    algorithm = options.algorithm or ("ppo" if options.model is None else "grpo")
    variants = PRECISIONS if options.precision else speedup_variants(options.speedups.split(","))
    for name, policy in variants.items():
        SYSTEMS[name] = System("ours", job={"algorithm": algorithm, "policy": policy, "parts": True})

    if options.model is None:
        shapes = [SHAPES[name] for name in options.shapes.split(",")]
        shapes = [quick(shape) for shape in shapes] if options.quick else shapes
    else:
        shapes = [grpo_real.QUICK_SHAPE if options.quick else grpo_real.SHAPE]
    results: dict[str, Any] = {}
    with nullcontext({}) if options.model is None else grpo_real.job_with(options.model) as job:
        for shape in shapes:
            results[shape.name] = measure(shape, list(variants), options, **job)
            results[shape.name]["summary"] = summary(results[shape.name]["systems"])
            console.print(comparison(f"{algorithm}, shape {shape.name}", results[shape.name]["summary"]))
    if not options.quick:
        kind = "precision" if options.precision else "speedups"
        name = f"{kind}_{algorithm}" if options.model is None else f"{kind}_{algorithm}_smollm2"
        write(options.output or RESULTS / f"{name}.json", options, {"shapes": results})


if __name__ == "__main__":
    main()
