"""A benchmark, as data: which configs, with which changes, for which seeds, and what to show of them.

    base    {train_evaluation.n_iters: 50}                  changes to every config
    runs    {ppo: {config: ppo.yml}, a2c: {config: ...}}    label -> config and changes of its own
    grid    {alg.args.learning_rate: [1e-4, 1e-3]}          every run with every combination
    seeds   3                                               every run with every seed

    2 runs x 2 values x 3 seeds = 12 jobs; labels `ppo,learning_rate=0.0001` ...

`load_benchmark` checks the file and every config with all its changes, and raises one `ConfigError` with every mistake
before anything starts. No torch is imported.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import ConfigError, Mistake
from rl4lms_like.core.numbers import Count, Whole
from rl4lms_like.core.schema import check_arguments, check_value
from rl4lms_like.core.secrets import without_values
from rl4lms_like.core.wording import shown
from rl4lms_like.training.config.overrides import apply_values
from rl4lms_like.training.config.run_config import AnyConfig, parse_config
from rl4lms_like.training.config.yaml_file import read_yaml

LABEL = re.compile(r"\w[\w.,=+ -]*")
SPLITS = ("train", "val", "test")
MAX_TOLD = 3
"""Labels that are named where more have the same mistake."""
Axis = Literal["iterations", "tokens", "seconds"]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One entry of `runs`.

    Args:
        config: YAML file of the run; default: the benchmark's `config`.
        set: changes to this config, as `alg.args.learning_rate: 1e-3`; they come after `base`.
    """

    config: str | None = None
    set: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CurveSpec:
    """One entry of `curves`; a text is its `key`.

    Args:
        key: what is drawn: a key of `metrics_explained`, or `val:METRIC`, a metric on a split.
        title: over the plot; default: the key.
        lines: label -> value, drawn as dashed lines: a target, a threshold, the best that can be reached.
        log: logarithmic axis.
    """

    key: str
    title: str | None = None
    lines: dict[str, float] = field(default_factory=dict)
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class BenchmarkSpec:
    """A spec file.

    Args:
        name: heading of the report and last folder of the results; default: the file's name.
        config: YAML file of the runs that name none.
        base: changes to the configs of all runs, as `train_evaluation.n_iters: 50`.
        runs: label -> `config` and `set`.
        grid: changes with several values each, as `alg.args.gamma: [0.9, 1.0]`; every run is done with every
            combination.
        seeds: how many (0, 1, 2 ...), or a list of them.
        processes: runs that go on side by side.
        threads: of each run; also `n_threads` where its config says `auto`.
        results: folder; default: `benchmark_results/<name>` in the current folder.
        split: on which `metrics` are tabulated, after training.
        metrics: keys to tabulate; default: all metrics of the configs. `val:METRIC` takes another split.
        curves: what is drawn; default: reward, KL and the tabulated metrics on `val`.
        x: axis of the curves.
    """

    name: str | None = None
    config: str | None = None
    base: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Any]
    grid: dict[str, list[Any]] = field(default_factory=dict)
    seeds: Count | list[Whole] = 5
    processes: Count = 1
    threads: Count = 1
    results: str | None = None
    split: Literal["train", "val", "test"] = "test"
    metrics: list[str] | None = None
    curves: list[CurveSpec] = field(default_factory=list)
    x: Axis = "iterations"


@dataclass(frozen=True)
class Cell:
    """A run of the benchmark, for any seed.

    Args:
        label: its name in tables, plots and folders.
        config_path: the file it came from.
        changes: what was changed in it.
        config: checked; its seed is a placeholder.
    """

    label: str
    config_path: Path
    changes: Mapping[str, Any]
    config: AnyConfig

    def with_seed(self, seed: int) -> AnyConfig:
        """The config of one job."""
        return dataclasses.replace(self.config, seed=seed)


@dataclass(frozen=True)
class Benchmark:
    """A spec that was checked.

    Args:
        name: of the benchmark.
        text: the spec file as it is.
        spec: its keys.
        cells: the runs, in the order of the file.
        seeds: each cell's.
        results: the folder.
    """

    name: str
    text: str
    spec: BenchmarkSpec
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    results: Path


def load_benchmark(
    path: str | Path, *, seeds: int | list[int] | None = None, results: str | Path | None = None
) -> Benchmark:
    """Reads and checks a spec and all its configs.

    Args:
        path: the spec; paths in it are relative to its folder.
        seeds: instead of the spec's.
        results: instead of the spec's, relative to the current folder.

    Raises:
        ConfigError: with every mistake of the spec and of every config with its changes.
    """
    path = Path(path)
    mapping, mistakes = read_yaml(path, keys="runs, config, seeds")
    fields, wrong = check_arguments(BenchmarkSpec, _with_plain_curves(mapping), "")
    runs, wrong_runs = _runs(fields.get("runs", {}))
    cells, wrong_cells = _cells(fields, runs, path)
    mistakes += [*wrong, *wrong_runs, *_wrong_values(fields, runs), *_wrong_seeds(seeds, "--seeds"), *wrong_cells]
    if mistakes:
        raise ConfigError(without_values(mapping, mistakes), str(path))
    spec = BenchmarkSpec(**fields)
    name = spec.name or path.stem
    chosen = spec.seeds if seeds is None else seeds
    folder = Path(results) if results is not None else _beside(path, spec.results) if spec.results else None
    return Benchmark(
        name=name,
        text=path.read_text(encoding="utf-8"),
        spec=spec,
        cells=tuple(cells),
        seeds=tuple(range(chosen)) if isinstance(chosen, int) else tuple(chosen),
        results=folder or Path("benchmark_results") / name,
    )


def _with_plain_curves(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A text in `curves` is the key of a curve."""
    curves = mapping.get("curves")
    if not isinstance(curves, list):
        return dict(mapping)
    return {**mapping, "curves": [{"key": curve} if isinstance(curve, str) else curve for curve in curves]}


def _runs(entries: Mapping[str, Any]) -> tuple[dict[str, RunSpec], list[Mistake]]:
    runs: dict[str, RunSpec] = {}
    mistakes: list[Mistake] = []
    for label, entry in entries.items():
        if not LABEL.fullmatch(str(label)):
            mistakes.append(Mistake(f"runs.{label}", "a label is a folder's name: letters, digits and _ . , = + -"))
        run, wrong = check_value(entry, RunSpec, f"runs.{label}")
        mistakes += wrong
        if not wrong:
            runs[str(label)] = run
    return runs, mistakes


def _wrong_values(fields: Mapping[str, Any], runs: Mapping[str, RunSpec]) -> Iterator[Mistake]:
    """What types do not say."""
    if "runs" in fields and not fields["runs"]:
        yield Mistake("runs", "expected at least one, as in {ppo: {config: ppo.yml}}")
    if fields.get("name") and not LABEL.fullmatch(fields["name"]):
        yield Mistake("name", "names a folder: letters, digits and _ . , = + -")
    yield from _wrong_seeds(fields.get("seeds"), "seeds")
    for path, values in fields.get("grid", {}).items():
        if not values:
            yield Mistake(f"grid.{path}", "expected at least one value")
    changes = {"base": fields.get("base", {}), "grid": fields.get("grid", {})}
    for place, values in {**changes, **{f"runs.{label}.set": run.set for label, run in runs.items()}}.items():
        if "seed" in values:
            yield Mistake(f"{place}.seed", "each run gets its seed from `seeds`")
    for name in fields.get("metrics") or []:
        yield from _wrong_split(name, "metrics")
    for curve in fields.get("curves") or []:
        yield from _wrong_split(curve.key, "curves")


def _wrong_seeds(seeds: int | list[int] | None, where: str) -> Iterator[Mistake]:
    if isinstance(seeds, list) and (not seeds or len(set(seeds)) < len(seeds)):
        yield Mistake(where, f"expected different numbers, at least one, got {shown(seeds)}")


def _wrong_split(key: str, where: str) -> Iterator[Mistake]:
    split, colon, _ = key.partition(":")
    if colon and split not in SPLITS:
        yield Mistake(where, f"{key!r}: expected {', '.join(SPLITS)} before the colon, got {split!r}")


def _cells(fields: Mapping[str, Any], runs: Mapping[str, RunSpec], spec: Path) -> tuple[list[Cell], list[Mistake]]:
    """The runs with every combination of the grid; a mistake that several share is told once, with their labels."""
    cells: dict[str, Cell] = {}
    told: dict[Mistake, list[str]] = {}
    for label, run in runs.items():
        file = run.config or fields.get("config")
        if file is None:
            told.setdefault(Mistake("", "names no config, and the benchmark has none for all"), []).append(label)
            continue
        for suffix, point in grid_points({path: values for path, values in fields.get("grid", {}).items() if values}):
            changes = {**fields.get("base", {}), **run.set, **point}
            try:
                config = _load(_beside(spec, file), changes, fields.get("threads", 1))
            except ConfigError as error:
                for mistake in error.mistakes:
                    where = f"{file} {mistake.path}".rstrip()
                    told.setdefault(Mistake(where, mistake.message), []).append(label + suffix)
                continue
            if label + suffix in cells:
                told.setdefault(Mistake("", "two runs have this label"), []).append(label + suffix)
            cells[label + suffix] = Cell(label + suffix, _beside(spec, file), changes, config)
    mistakes = [Mistake(_places(list(dict.fromkeys(labels))), str(mistake)) for mistake, labels in told.items()]
    return list(cells.values()), mistakes


def _places(labels: list[str]) -> str:
    """Where a mistake is; of a large grid not every label."""
    more = f" and {len(labels) - MAX_TOLD} more" if len(labels) > MAX_TOLD else ""
    return ", ".join(f"runs.{label}" for label in labels[:MAX_TOLD]) + more


def grid_points(grid: Mapping[str, list[Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Every combination of a grid's values, with what it adds to a label: `,learning_rate=0.001,gamma=1`."""
    names = _short_names(list(grid))
    points = []
    for values in itertools.product(*grid.values()):
        parts = [f",{names[path]}={_in_label(value)}" for path, value in zip(grid, values, strict=True)]
        points.append(("".join(parts), dict(zip(grid, values, strict=True))))
    return points


def _short_names(paths: list[str]) -> dict[str, str]:
    """The last word of each path, or more where two would be the same."""
    names = {}
    for path in paths:
        words = path.split(".")
        n_words = next(
            n for n in range(1, len(words) + 1)
            if n == len(words) or sum(other.split(".")[-n:] == words[-n:] for other in paths) == 1
        )  # fmt: skip
        names[path] = ".".join(words[-n_words:])
    return names


def _in_label(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "_", str(shown(value)).strip("'\"")).strip("_")


def _load(path: Path, changes: Mapping[str, Any], threads: int) -> AnyConfig:
    mapping, mistakes = read_yaml(path)
    changed, wrong = apply_values(mapping, changes, "set")
    config = parse_config(changed, source=str(path), mistakes=mistakes + wrong)
    return dataclasses.replace(config, n_threads=threads) if config.n_threads == "auto" else config


def _beside(spec: Path, path: str) -> Path:
    return spec.parent / with_home(path)
