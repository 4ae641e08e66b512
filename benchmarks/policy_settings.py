"""CPU time of an iteration with and without some settings of the policy, in turns in one process.

    python -m benchmarks.policy_settings ii grpo sampler_log_probs      shape of benchmarks.ppo_iteration, algorithm
    python -m benchmarks.policy_settings smollm2 grpo generation_dtype reference_dtype
        --model benchmarks/.models/smollm2                              GRPO with LoRA, as benchmarks.grpo_real

The first system has all settings of the rows below off; the others have one each. A round is one iteration of each, and
the ratio is the median of the ratios within a round. One thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.grpo_real import LORA, SHAPE, with_an_end_that_is_never_sampled
from benchmarks.ppo_iteration import RESULTS, write
from benchmarks.systems.ours import FOREVER, make_algorithm
from benchmarks.workload import SHAPES, save_model

SETTINGS: dict[str, dict[str, Any]] = {
    "sampler_log_probs": {"speedups": {"sampler_log_probs": True}},
    "generation_dtype": {"generation_dtype": "bfloat16"},
    "reference_dtype": {"reference_dtype": "bfloat16"},
    "generation and reference": {"generation_dtype": "bfloat16", "reference_dtype": "bfloat16"},
    "dtype": {"dtype": "bfloat16"},
    "dtype, generation in float32": {"dtype": "bfloat16", "generation_dtype": "float32"},
}
BASE = {"speedups": {"sampler_log_probs": False}}


def measured(algorithm: Any, iteration: int) -> dict[str, float]:
    """Run an iteration; return its CPU seconds, and the distance of its first ratio from 1."""
    start = time.process_time()
    algorithm.learn_iteration(iteration, FOREVER)
    seconds = time.process_time() - start
    return {"cpu_s": seconds, "ratio_gap": float(algorithm.logger.name_to_value["train/ratio_gap"])}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="name of a shape, or smollm2")
    parser.add_argument("algorithm", choices=("ppo", "grpo"))
    parser.add_argument("settings", nargs="+", choices=SETTINGS)
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M, made by benchmarks.real_model")
    parser.add_argument("--iterations", type=int, default=5, help="of each, after one warm-up (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="the JSON file (default: in benchmarks/results)")
    parser.set_defaults(threads=1, quick=False)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as folder:
        job: dict[str, Any] = {"algorithm": options.algorithm}
        shape = SHAPE
        if options.shape == "smollm2":
            job |= {"words": with_an_end_that_is_never_sampled(options.model, Path(folder)), "lora": LORA}
        else:
            shape = SHAPES[options.shape]
            save_model(shape, Path(folder), seed=options.seed)

        systems: dict[str, Any] = {}
        for name in ("none", *options.settings):
            policy = {**BASE, **SETTINGS.get(name, {})}
            worker: Any = SimpleNamespace(shape=shape, job={**job, "policy": policy}, model=folder, seed=options.seed)
            systems[name] = make_algorithm(worker)

        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
        for round_ in range(1 + options.iterations):
            for name, algorithm in systems.items():
                iteration = measured(algorithm, round_)
                print(round_, name, {key: round(value, 5) for key, value in iteration.items()}, flush=True)
                if round_:
                    rounds[name].append(iteration)

    summary = {}
    for name, iterations in rounds.items():
        pairs = zip(iterations, rounds["none"], strict=True)
        ratio = statistics.median(mine["cpu_s"] / base["cpu_s"] for mine, base in pairs)
        medians = {key: statistics.median(one[key] for one in iterations) for key in iterations[0]}
        summary[name] = {**medians, "cpu_times_none": ratio}
        print(f"{name}: {medians['cpu_s']:.2f} CPU s, {ratio:.3f} of the first")
    output = options.output or RESULTS / f"policy_settings_{options.shape}_{options.algorithm}.json"
    write(output, options, {"systems": rounds, "summary": summary})


if __name__ == "__main__":
    main()
