"""Train and tune a small built-in model in about two minutes, without a network.

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

from rl4lms_like.config.load import load_config

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

    # The total includes what the parts do not: imports, and reading the results.
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
    from rl4lms_like.run import silence_libraries, train_config
    from rl4lms_like.small_models.warm_start import WarmStartSettings, make_warm_start

    silence_libraries()
    folder = Path(folder)
    if folder.name in ("", ".."):  # the last part of the path becomes the project's name
        folder = folder.resolve()

    # Supervised, on texts of a grammar: PPO needs a model that writes sentences before it can prefer some of them. A
    # model of the same settings that is in the folder already is reused.
    start = time.perf_counter()
    settings = WarmStartSettings(family=family, seed=seed, steps=STEPS[family])  # type: ignore[arg-type]
    model = folder / f"warm_start_{family}" / f"seed_{seed}"
    with nullcontext() if console is None else console.status("training the warm start on generated texts"):
        perplexity = make_warm_start(model, settings)
    end_of_warm_start = time.perf_counter()

    # The config is a file next to this one, to be read and copied; only the seed and the model's folder are filled in.
    model_keys = ["tokenizer.model_name", "alg.policy.args.model_name"]
    if family == "gpt2":  # fluency is measured with a causal model; T5 cannot compute the perplexity of whole texts
        model_keys.append("train_evaluation.metrics.3.args.model_name")
    filled_in = [f"seed={seed}"]
    for key in model_keys:
        filled_in.append(f"{key}={json.dumps(str(model))}")
    config = load_config(Path(__file__).with_name(f"quickstart_{family}.yml"), [*filled_in, *overrides])

    run_folder = train_config(
        config,
        project_name=folder.name,
        experiment_name=f"{family}_ppo_seed_{seed}",
        base_path_to_store_results=folder.parent,
        quiet=console is None,
        new=new,
    )
    seconds = {
        "warm_start": round(end_of_warm_start - start, 1),
        "training": round(time.perf_counter() - end_of_warm_start, 1),
    }
    return _result(run_folder, seed, perplexity) | {"seconds": seconds}


def _result(run_folder: Path, seed: int, perplexity: float) -> dict[str, Any]:
    """Return the result from the files of the run, without the seconds."""
    evaluations = _lines(run_folder / "test_split_metrics.jsonl")
    before = evaluations[0]
    after = evaluations[-1]

    # Both evaluations have the same prompts in the same order, so the texts of a row belong together.
    pairs = []
    rows = zip(_predictions(run_folder, before["epoch"]), _predictions(run_folder, after["epoch"]), strict=True)
    for prediction_before, prediction_after in rows:
        pairs.append(
            {
                "prompt": prediction_before["prompt_text"],
                "before": prediction_before["generated_text"],
                "after": prediction_after["generated_text"],
            }
        )

    # Without a rollout the policy is still the warm start, from which the KL is measured.
    kl = 0.0
    rollouts = _lines(run_folder / "rollout_info.jsonl")
    if rollouts:
        kl = rollouts[-1].get("rollout_info/kl_div_mean")

    return {
        "seed": seed,
        "held_out_perplexity_of_warm_start": perplexity,
        "before": before["metrics"],
        "after": after["metrics"],
        "kl": kl,
        "pairs": pairs[:N_PAIRS],
        "run_folder": str(run_folder),
        "report": str(run_folder / "report.html"),
    }


def _lines(file: Path) -> list[Any]:
    """Return the objects in a file of JSON lines; none if the file does not exist."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def _predictions(run_folder: Path, epoch: int) -> list[Any]:
    """Return the predictions of an evaluation on the test split."""
    predictions: list[Any] = json.loads((run_folder / f"epoch_{epoch}_test_split_predictions.json").read_text("utf-8"))
    return predictions


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table, the sample pairs and the path of the report."""
    table = Table(title="Held-out prompts, before and after", title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for label, key in ROWS:
        if key in result["before"]:  # T5's config has no fluency
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

    # The path on one line, however narrow the console is: terminals then open it by a click.
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
