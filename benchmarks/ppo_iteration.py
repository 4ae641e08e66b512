"""One iteration of PPO on a language model, side by side: this library, TRL, and a bare torch loop.

    python -m benchmarks.ppo_iteration                         all shapes, all systems, 5 iterations after a warm-up
    python -m benchmarks.ppo_iteration --quick                 does everything run? (tiny work, no measurement)
    python -m benchmarks.ppo_iteration --shapes i,ii --systems ours,bare
    python -m benchmarks.ppo_iteration --before ../old         this library against an older checkout of it
        --systems ours,ours_grpo,bare                              (its GRPO, too)
    python -m benchmarks.ppo_iteration --scaling               cost over an 8x range of episodes and of tokens
    python -m benchmarks.ppo_iteration --profile               where our iteration's time goes, by part

Every system is a process that sleeps until it is its turn: A B C D A B C D ... See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

if __package__ is None:  # run as a file
    sys.path.insert(0, str(Path(__file__).parent.parent))

from rich.console import Console

from benchmarks import tables
from benchmarks.memory import available_mb, groups
from benchmarks.workers import SYSTEMS, System, check_work, running
from benchmarks.workload import SHAPES, Shape, quick

RESULTS = Path(__file__).parent / "results"
FEW_EPISODES = Shape("scaling", prompt_len=5, response_len=20, episodes=32)
FEW_TOKENS = Shape("scaling", prompt_len=5, response_len=12)
SCALES = (1, 2, 4, 8)

console = Console(width=None if sys.stdout.isatty() else 130)


def machine() -> dict[str, Any]:
    """What a reader must know of the machine; neither its name nor its folders."""
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if (cpuinfo.exists())
        else []
    )
    return {
        "cores": os.cpu_count(),
        "cpu": models[0] if models else platform.machine(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def measure(
    shape: Shape, names: Sequence[str], options: argparse.Namespace, *, n_warm_up: int = 1, **job: Any
) -> dict[str, Any]:
    """Interleaved iterations of several systems on one shape.

    Args:
        shape: of the work.
        names: of the systems, in the order of a round.
        options: iterations, seed, threads.
        n_warm_up: number of rounds before those that are measured.
        job: more entries for every worker's job.

    Returns:
        `{"shape": ..., "systems": {name: {what it said when loaded, "warm_up": [...], "iterations": [...]}}}`.
    """
    console.print(f"[bold]shape {shape.name}[/bold]: {tables.describe(shape)}")
    with running(names, shape, seed=options.seed, threads=options.threads, **job) as workers:
        systems = {worker.name: {**worker.loaded, "warm_up": [], "iterations": []} for worker in workers}
        for round_ in range(1 - n_warm_up, options.iterations + 1):  # warm-ups up to 0
            for worker in workers:
                iteration = worker.run_iteration()
                check_work(worker.name, shape, iteration)
                systems[worker.name]["iterations" if round_ > 0 else "warm_up"].append(iteration)
                console.print(tables.progress_line(worker.name, max(round_, 0), iteration), highlight=False)
    return {"shape": asdict(shape), "systems": systems}


def add_options(parser: argparse.ArgumentParser, *, n_warm_up: int = 1) -> None:
    """Add the options that `measure` and `write` read, and the path of the results."""
    warm_up = "one warm-up" if n_warm_up == 1 else f"{n_warm_up} warm-ups"
    parser.add_argument("--iterations", type=int, default=5, help=f"of each system, after {warm_up} (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="of torch in each system (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny work: does everything run?")
    parser.add_argument("--output", type=Path, help="the JSON file (default: in benchmarks/results)")


def write(path: Path, options: argparse.Namespace, results: Mapping[str, Any]) -> None:
    """Write the results of a run, raw timings included."""
    settings = {key: getattr(options, key) for key in ("iterations", "seed", "threads", "quick")}
    document = {"date": date.today().isoformat(), "machine": machine(), "settings": settings, **results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"written: {os.path.relpath(path)}")


def compare(options: argparse.Namespace) -> None:
    """The side-by-side table, one for each shape."""
    results: dict[str, Any] = {}
    for name in options.shapes:
        shape = quick(SHAPES[name]) if options.quick else SHAPES[name]
        if options.epochs:
            shape = replace(shape, n_epochs=options.epochs)
        measured = []
        for group in groups(options.systems, tables.YARDSTICK, shape, available_mb()):
            measured.append(measure(shape, group, options)["systems"])
        summary = tables.merged([tables.summary(shape, systems) for systems in measured])
        results[name] = {"shape": asdict(shape), "groups": measured, "summary": summary}
        console.print(tables.comparison(shape, summary))
        write(options.output or RESULTS / "ppo_iteration.json", options, {"shapes": results})


def scaling(options: argparse.Namespace) -> None:
    """Time per token over an 8x range of episodes, and over an 8x range of response tokens."""
    few_episodes, few_tokens = FEW_EPISODES, FEW_TOKENS
    if options.quick:
        few_episodes, few_tokens = quick(few_episodes), quick(few_tokens)
    episodes = [few_episodes.episodes * scale for scale in SCALES]
    tokens = [few_tokens.response_len * scale for scale in SCALES]
    axes = {
        "episodes": [replace(few_episodes, episodes=count, name=f"{count} episodes") for count in episodes],
        "tokens": [replace(few_tokens, response_len=length, name=f"{length} tokens") for length in tokens],
    }
    names = [name for name in options.systems if name in ("ours", "bare")]
    results: dict[str, Any] = {}
    for axis, shapes in axes.items():
        results[axis] = [measure(shape, names, options) for shape in shapes]
        for shape, result in zip(shapes, results[axis], strict=True):
            result["summary"] = tables.summary(shape, result["systems"])
        console.print(tables.scaling(axis, shapes, results[axis]))
    write(options.output or RESULTS / "scaling.json", options, {"scaling": results})


def profile(options: argparse.Namespace) -> None:
    """Where the time of our iteration goes."""
    results: dict[str, Any] = {}
    for name in options.shapes:
        shape = quick(SHAPES[name]) if options.quick else SHAPES[name]
        results[name] = measure(shape, ["ours"], options, profile=True)
        console.print(*tables.profile(shape, results[name]["systems"]["ours"]))
    write(options.output or RESULTS / "profile.json", options, {"shapes": results})


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def names_from(known: Mapping[str, Any]) -> Any:
        def split(text: str) -> list[str]:
            unknown = set(text.split(",")) - set(known)
            if unknown:
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
            return text.split(",")

        return split

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=names_from(SHAPES), default=["i", "ii", "iii"], help="default: i,ii,iii")
    parser.add_argument("--systems", type=names_from(SYSTEMS), default=list(SYSTEMS), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--epochs", type=int, help="instead of the shape's")
    parser.add_argument("--before", type=Path, help="a checkout of an older commit: `before`, `before_grpo`")
    add_options(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--scaling", dest="mode", action="store_const", const=scaling, help=scaling.__doc__)
    mode.add_argument("--profile", dest="mode", action="store_const", const=profile, help=profile.__doc__)
    parser.set_defaults(mode=compare)
    options = parser.parse_args(arguments)
    if options.before is not None:
        checkout = options.before.resolve()
        SYSTEMS["before"] = System("ours", checkout=checkout)
        SYSTEMS["before_grpo"] = System("ours", job={"algorithm": "grpo"}, checkout=checkout)
        options.systems = [
            *options.systems,
            *(tables.BEFORE[name] for name in options.systems if name in tables.BEFORE),
        ]
        options.before = str(options.before)
    return options


if __name__ == "__main__":
    chosen = parse()
    chosen.mode(chosen)
