"""Train and tune a small embedded model in about two minutes, without a network.

grammar ─ 20,000 film opinions ─ tokenizer, tiny GPT-2 ─ maximum likelihood ─ PPO towards positive sentiment
                                                                              └ table, sample pairs, report.html
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl4lms_like.training.config.run_config import load_config

STEPS = {"gpt2": 1600, "t5": 2400}
"""Optimizer steps of the supervised warm start."""

N_PAIRS = 5

ROWS = (
    ("sentiment (VADER compound)", "semantic/sentiment"),
    ("fraction of positive texts", "semantic/sentiment_positive"),
    ("perplexity under the warm start", "fluency_metrics/reference_perplexity"),
    ("distinct-1", "diversity_metrics/distinct-1"),
    ("distinct-2", "diversity_metrics/distinct-2"),
    ("fraction with the most frequent sentence", "diversity_metrics/top_sentence_share"),
    ("unique texts", "diversity_metrics/unique_texts"),
    ("words per continuation", "length/words"),
)
"""Rows of the table: label and metric key."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the quickstart with command-line options and return its exit status."""
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    start = time.perf_counter()
    result = quickstart(
        options.folder,
        seed=options.seed,
        family=options.family,
        overrides=options.overrides,
        new=options.new,
        console=console,
    )
    result["seconds"]["total"] = round(time.perf_counter() - start, 1)
    (Path(result["run_folder"]) / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(result, console)
    return 0


def quickstart(
    folder: str | Path,
    *,
    seed: int = 0,
    family: str = "gpt2",
    overrides: Sequence[str] = (),
    new: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train (or reuse) the warm start, tune it with PPO, and compare both models on held-out prompts.

    Args:
        folder: for the warm start and the runs.
        seed: of all random numbers.
        family: `gpt2`, or `t5` for the same task with an encoder-decoder model.
        overrides: of the config, `alg.args.n_epochs=2`.
        new: start a new run, even if an interrupted one can be resumed.
        console: shows progress; None prints nothing.

    Returns:
        `before` and `after` (metric key -> score on the test split), `kl` (nats per token, last iteration; None if not
        measured), `pairs`, `run_folder`, `report` and `seconds` by part.
    """
    from rl4lms_like.training.run import silence_libraries, train_config
    from rl4lms_like.training.small_models.warm_start import WarmStartSettings, make_warm_start

    silence_libraries()
    folder = Path(folder)
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    start = time.perf_counter()
    settings = WarmStartSettings(family=family, seed=seed, steps=STEPS[family])  # type: ignore[arg-type]
    model = folder / f"warm_start_{family}" / f"seed_{seed}"
    with nullcontext() if console is None else console.status("training the warm start on generated texts"):
        perplexity = make_warm_start(model, settings)
    warmed = time.perf_counter()
    file = Path(__file__).with_name(f"quickstart_{family}.yml")
    places = ["tokenizer.model_name", "alg.policy.args.model_name"]
    if family == "gpt2":  # fluency is measured with a causal model; T5 cannot compute the perplexity of whole texts
        places.append("train_evaluation.metrics.3.args.model_name")
    own = [f"seed={seed}", *(f"{place}={json.dumps(str(model))}" for place in places)]
    config = load_config(file, [*own, *overrides])
    run_folder = train_config(
        config,
        project_name=folder.name,
        experiment_name=f"{family}_ppo_seed_{seed}",
        base_path_to_store_results=folder.parent,
        quiet=console is None,
        new=new,
    )
    seconds = {"warm_start": round(warmed - start, 1), "training": round(time.perf_counter() - warmed, 1)}
    return _result(run_folder, seed, perplexity) | {"seconds": seconds}


def _result(run_folder: Path, seed: int, perplexity: float) -> dict[str, Any]:
    def lines(name: str) -> list[Any]:
        file = run_folder / name
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []

    evaluations = lines("test_split_metrics.jsonl")
    first, last = evaluations[0], evaluations[-1]
    files = [f"epoch_{evaluation['epoch']}_test_split_predictions.json" for evaluation in (first, last)]
    texts = [json.loads((run_folder / file).read_text("utf-8")) for file in files]
    rollouts = lines("rollout_info.jsonl")
    return {
        "seed": seed,
        "held_out_perplexity_of_warm_start": perplexity,
        "before": first["metrics"],
        "after": last["metrics"],
        "kl": rollouts[-1].get("rollout_info/kl_div_mean") if rollouts else 0.0,
        "pairs": [
            {"prompt": a["prompt_text"], "before": a["generated_text"], "after": b["generated_text"]}
            for a, b in list(zip(*texts, strict=True))[:N_PAIRS]
        ],
        "run_folder": str(run_folder),
        "report": str(run_folder / "report.html"),
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table, the sample pairs and the path of the report."""
    table = Table(title="Held-out prompts, before and after", title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for label, key in ROWS:
        if key in result["before"]:
            table.add_row(label, f"{result['before'][key]:.3f}", f"{result['after'][key]:.3f}")
    if result["kl"] is not None:  # without a KL penalty there is no reference model, so the KL is not measured
        table.add_row("KL to the warm start, nats per token", "0.000", f"{result['kl']:.3f}")
    console.print(table)
    for pair in result["pairs"]:
        console.print()
        console.print(Text(pair["prompt"], style="bold"))
        console.print(Text(f"  before  {pair['before'].strip()}", style="dim"))
        console.print(Text(f"  after   {pair['after'].strip()}"))
    console.print()
    seconds = ", ".join(f"{part.replace('_', ' ')} {value:.0f} s" for part, value in result["seconds"].items())
    console.print(f"Report: {result['report']}", soft_wrap=True)
    console.print(f"Time: {seconds}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl4lms-like quickstart", description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="results/quickstart", help="folder for all files (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    parser.add_argument("--family", choices=("gpt2", "t5"), default="gpt2", help="model family (%(default)s)")
    parser.add_argument("--new", action="store_true", help="start a new run, even if an interrupted one can be resumed")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", dest="overrides", help="change the config"
    )
    return parser
