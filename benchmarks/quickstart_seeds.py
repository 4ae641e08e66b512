"""The embedded default over several seeds, and what each option costs or brings.

    python -m benchmarks.quickstart_seeds                        # the default, seeds 0-4
    python -m benchmarks.quickstart_seeds --variants all         # and every option beside it
    python -m benchmarks.quickstart_seeds --variants default,shared --seeds 0,1

Each run is a process of its own: the quickstart with one seed (warm start made once a seed and shared by the variants).
Runs go seed by seed, the variants of a seed in turn, so that all see the same weather.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy import stats

RESULTS = Path(__file__).parent / "results" / "quickstart_seeds.json"

VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "shared critic": ("alg.policy.args.critic=shared",),
    "bfloat16": ("alg.policy.args.dtype=bfloat16",),
    "compile": ("alg.policy.args.compile=true",),
    "length-sorted": ("alg.args.length_sorted_minibatches=true",),
    "no KL": ("alg.kl_div={coeff: 1.0e-9}",),  # too little to act, enough for the KL to be measured
    "T5": (),
}
"""Name -> overrides of the quickstart's config."""

MEASURES = {
    "sentiment before": ("before", "semantic/sentiment"),
    "sentiment after": ("after", "semantic/sentiment"),
    "positive before": ("before", "semantic/sentiment_positive"),
    "positive after": ("after", "semantic/sentiment_positive"),
    "perplexity before": ("before", "fluency_metrics/reference_perplexity"),
    "perplexity after": ("after", "fluency_metrics/reference_perplexity"),
    "distinct-2 before": ("before", "diversity_metrics/distinct-2"),
    "distinct-2 after": ("after", "diversity_metrics/distinct-2"),
    "top sentence after": ("after", "diversity_metrics/top_sentence_share"),
}


def run(variant: str, seed: int, folder: Path) -> dict[str, Any]:
    """One quickstart in a process of its own: its result, with the seconds of its iterations."""
    overrides = [part for override in VARIANTS[variant] for part in ("--set", override)]
    family = "t5" if variant == "T5" else "gpt2"
    command = [sys.executable, "-m", "rl4lms_like", "quickstart", "--folder", str(folder), "--seed", str(seed)]
    before = set(folder.glob("*/result.json"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--family", family, *overrides], check=True, stdout=subprocess.DEVNULL, env=environment)
    (file,) = set(folder.glob("*/result.json")) - before
    result: dict[str, Any] = json.loads(file.read_text())
    rollouts = [json.loads(line) for line in (file.parent / "rollout_info.jsonl").read_text().splitlines()]
    result["curve"] = {
        "reward": [line["rollout_info/ep_rew"] for line in rollouts],
        "kl": [line["rollout_info/kl_div_mean"] for line in rollouts],
        "kl_coeff": [line["rollout_info/kl_coeff"] for line in rollouts],
        "seconds": [line["time/iteration_s"] for line in rollouts],
        "update_seconds": [line["time/update_s"] for line in rollouts],
    }
    for name in ("run_folder", "report"):
        result.pop(name)
    return result


def interval(values: list[float]) -> str:
    """Mean and 95 % interval (Student's t) of a measure over seeds."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.3f} ± {half:.3f}"


def measures(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Every measure of one variant, over its seeds."""
    table = {
        name: [result[when][key] for result in results if key in result[when]] for name, (when, key) in MEASURES.items()
    }
    table["KL per token, last 5 iterations"] = [statistics.fmean(result["curve"]["kl"][-5:]) for result in results]
    table["seconds per iteration"] = [statistics.median(result["curve"]["seconds"][1:]) for result in results]
    table["seconds per update"] = [statistics.median(result["curve"]["update_seconds"][1:]) for result in results]
    table["seconds in all"] = [result["seconds"]["total"] for result in results]
    return table


def show(runs: dict[str, list[dict[str, Any]]]) -> None:
    """One column a variant: mean and 95 % interval of every measure."""
    console = Console(width=40 + 20 * len(runs))
    table = Table(title=f"The embedded default, {len(next(iter(runs.values())))} seeds: mean ± 95 % interval")
    table.add_column("")
    columns = {variant: measures(results) for variant, results in runs.items()}
    for variant in columns:
        table.add_column(variant, justify="right")
    for name in next(iter(columns.values())):
        table.add_row(name, *(interval(column[name]) if column[name] else "-" for column in columns.values()))
    console.print(table)


def main() -> None:
    """Runs variants x seeds, shows the table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--variants", default="default", help=f"all, or some of: {', '.join(VARIANTS)}")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    variants = list(VARIANTS) if options.variants == "all" else options.variants.split(",")
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory() as folder:
        for seed in map(int, options.seeds.split(",")):
            for variant in variants:
                runs[variant].append(run(variant, seed, Path(folder)))
                after = runs[variant][-1]["after"]["semantic/sentiment"]
                print(f"seed {seed}, {variant}: sentiment {after:.3f}", flush=True)
    show(runs)
    summary = {variant: {name: interval(v) for name, v in measures(r).items() if v} for variant, r in runs.items()}
    options.output.write_text(json.dumps({"summary": summary, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
