"""Specification of a benchmark: configs, changes to them, seeds, and the contents of the report.

    base    {train_evaluation.n_iters: 50}                  changes to every config
    runs    {ppo: {config: ppo.yml}, a2c: {config: ...}}    label -> config and its changes
    grid    {alg.args.learning_rate: [1e-4, 1e-3]}          each run with every combination
    seeds   3                                               each run with every seed

    2 runs x 2 values x 3 seeds = 12 jobs; labels `ppo,learning_rate=0.0001` ...

`load_benchmark` checks the file and every config with all its changes before anything starts, and reports all errors
in one `ConfigError`. It does not import torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import AnyConfig
from rl4lms_like.config.yaml_file import apply_values, read_yaml
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.numbers import Count, Whole
from rl4lms_like.system.schema import check_arguments, check_value
from rl4lms_like.system.secrets import without_values
from rl4lms_like.system.wording import shown

LABEL = re.compile(r"\w[\w.,=+ -]*")
SPLITS = ("train", "val", "test")
MAX_REPORTED = 3
"""Largest number of labels that are listed for the same error."""
Axis = Literal["iterations", "tokens", "seconds"]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Entry of `runs`.

    Args:
        config: YAML file of the run; default: the benchmark's `config`.
        set: changes to this config, such as `alg.args.learning_rate: 1e-3`; they are applied after `base`.
    """

    config: str | None = None
    set: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CurveSpec:
    """Entry of `curves`. A plain string is its `key`.

    Args:
        key: what to plot: a logged key of an iteration, or a metric as `val:METRIC` (or another split).
        title: title of the plot; default: the key.
        lines: dashed horizontal lines, such as a target or the best possible value: a mapping from label to value.
        log: use a logarithmic vertical axis.
    """

    key: str
    title: str | None = None
    lines: dict[str, float] = field(default_factory=dict)
    log: bool = False


def _curve(entry: Any) -> Any:
    """Convert a plain string to an entry with that key."""
    return {"key": entry} if isinstance(entry, str) else entry


@dataclass(frozen=True, kw_only=True)
class BenchmarkSpec:
    """Contents of a spec file.

    Args:
        name: title of the report and default name of the results folder; default: the name of the file.
        config: YAML file for the runs that have no `config` of their own.
        base: changes to the configs of all runs, such as `train_evaluation.n_iters: 50`.
        runs: mapping from label to `config` and `set` of the run.
        grid: mapping from a key to several values, such as `alg.args.gamma: [0.9, 1.0]`; each run is repeated with
            every combination.
        seeds: number of seeds (0, 1, 2 ...), or a list of seeds.
        processes: number of runs at the same time.
        threads: number of threads per run; it replaces `n_threads: auto` in the configs.
        resources: what one run reserves on a Ray cluster, such as `{GPU: 1}`; the default of `CPU` is `threads`.
        results: results folder; default: `benchmark_results/<name>` in the current folder.
        split: split of the `metrics` in the tables; they are measured after training.
        metrics: keys of the metrics in the tables; default: all metrics of the configs. `val:METRIC` selects another
            split.
        curves: learning curves to plot; default: reward, KL and the tabulated metrics on `val`.
        x: horizontal axis of the curves.
    """

    name: str | None = None
    config: str | None = None
    base: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Any]
    grid: dict[str, list[Any]] = field(default_factory=dict)
    seeds: Count | list[Whole] = 5
    processes: Count = 1
    threads: Count = 1
    resources: dict[str, float] = field(default_factory=dict)
    results: str | None = None
    split: Literal["train", "val", "test"] = "test"
    metrics: list[str] | None = None
    curves: list[Annotated[CurveSpec, BeforeValidator(_curve)]] = field(default_factory=list)
    x: Axis = "iterations"


@dataclass(frozen=True)
class Cell:
    """Run of the benchmark, for all seeds: its name, the config's file, the changes to it, and the validated config.

    The label is the name in tables, plots and folders. The seed of the config is a placeholder.
    """

    label: str
    config_path: Path
    changes: Mapping[str, Any]
    config: AnyConfig


@dataclass(frozen=True)
class Benchmark:
    """Validated spec: name, content of the file, parsed keys, runs in the order of the file, seeds, results folder."""

    name: str
    text: str
    spec: BenchmarkSpec
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    results: Path


def load_benchmark(
    path: str | Path, *, seeds: int | list[int] | None = None, results: str | Path | None = None
) -> Benchmark:
    """Read and validate a spec and all its configs.

    Args:
        path: spec file; paths in it are relative to its folder.
        seeds: seeds that override those of the spec.
        results: folder that overrides that of the spec, relative to the current folder.

    Raises:
        ConfigError: lists every error of the spec and of each config with its changes.
    """
    path = Path(path)
    mapping, issues = read_yaml(path, keys="runs, config, seeds")

    # Every check works with what the ones before could read, so that all errors are reported at once.
    fields, field_issues = check_arguments(BenchmarkSpec, mapping, "")
    runs, run_issues = _runs(fields.get("runs", {}))
    cells, cell_issues = _cells(fields, runs, path)
    issues += [*field_issues, *run_issues, *_wrong_values(fields, runs), *_wrong_seeds(seeds, "--seeds"), *cell_issues]
    if issues:
        raise ConfigError(without_values(mapping, issues), str(path))

    # Options of the command line come before the keys of the spec. A number of seeds means 0, 1, 2 ...
    spec = BenchmarkSpec(**fields)
    name = spec.name or path.stem
    if seeds is None:
        seeds = spec.seeds
    if isinstance(seeds, int):
        seeds = list(range(seeds))

    # A folder in the spec is relative to the file, one in the command line and the default to the current folder.
    folder = Path("benchmark_results") / name
    if results is not None:
        folder = Path(results)
    elif spec.results:
        folder = _relative_to(path, spec.results)
    text = path.read_text(encoding="utf-8")
    return Benchmark(name=name, text=text, spec=spec, cells=tuple(cells), seeds=tuple(seeds), results=folder)


def _runs(entries: Mapping[str, Any]) -> tuple[dict[str, RunSpec], list[ConfigIssue]]:
    """Return the valid entries of `runs`, and the errors of the others."""
    runs: dict[str, RunSpec] = {}
    issues: list[ConfigIssue] = []
    for label, entry in entries.items():
        # Labels are names of folders: `..` or `a/b` would be elsewhere.
        if not LABEL.fullmatch(str(label)):
            issues.append(ConfigIssue(f"runs.{label}", "expected a name of letters, digits, spaces and _ . , = + -"))
        run, run_issues = check_value(entry, RunSpec, f"runs.{label}")
        issues += run_issues
        if not run_issues:
            runs[str(label)] = run
    return runs, issues


def _wrong_values(fields: Mapping[str, Any], runs: Mapping[str, RunSpec]) -> Iterator[ConfigIssue]:
    """Yield the errors that the types do not cover."""
    if "runs" in fields and not fields["runs"]:
        yield ConfigIssue("runs", "expected at least one, as in {ppo: {config: ppo.yml}}")
    if fields.get("name") and not LABEL.fullmatch(fields["name"]):
        yield ConfigIssue("name", "expected a name of letters, digits, spaces and _ . , = + -")
    yield from _wrong_seeds(fields.get("seeds"), "seeds")
    for path, values in fields.get("grid", {}).items():
        if not values:
            yield ConfigIssue(f"grid.{path}", "expected at least one value")

    # As Ray counts: several whole GPUs, or a part of one.
    for name, amount in fields.get("resources", {}).items():
        if amount <= 0 or (amount > 1 and amount % 1):
            yield ConfigIssue(
                f"resources.{name}", f"expected a whole number of at least 1, or a part of 1, got {amount}"
            )
    yield from _seeds_among_changes(fields, runs)
    yield from _unknown_splits(fields)


def _seeds_among_changes(fields: Mapping[str, Any], runs: Mapping[str, RunSpec]) -> Iterator[ConfigIssue]:
    """Yield an error for each `seed` in the changes to configs: the benchmark sets it, and would replace that one."""
    changes = {"base": fields.get("base", {}), "grid": fields.get("grid", {})}
    for label, run in runs.items():
        changes[f"runs.{label}.set"] = run.set
    for path, values in changes.items():
        if "seed" in values:
            yield ConfigIssue(f"{path}.seed", "set the seeds of the runs with `seeds`")


def _unknown_splits(fields: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    """Yield an error for each key `split:metric` whose split does not exist. A wrong metric is seen after the runs."""
    keys = [("metrics", key) for key in fields.get("metrics") or []]
    keys += [("curves", curve.key) for curve in fields.get("curves") or []]
    for path, key in keys:
        split, colon, _ = key.partition(":")
        if colon and split not in SPLITS:
            yield ConfigIssue(path, f"{key!r}: expected {', '.join(SPLITS)} before the colon, got {split!r}")


def _wrong_seeds(seeds: int | list[int] | None, path: str) -> Iterator[ConfigIssue]:
    if isinstance(seeds, list) and (not seeds or len(set(seeds)) < len(seeds)):
        yield ConfigIssue(path, f"expected one or more different numbers, got {shown(seeds)}")


def _cells(fields: Mapping[str, Any], runs: Mapping[str, RunSpec], spec: Path) -> tuple[list[Cell], list[ConfigIssue]]:
    """Return the runs with every combination of the grid. An error shared by several is reported once."""
    cells: dict[str, Cell] = {}
    labels_of: dict[ConfigIssue, list[str]] = {}
    grid = {path: values for path, values in fields.get("grid", {}).items() if values}
    for (name, run), (suffix, point) in itertools.product(runs.items(), grid_points(grid)):
        file = run.config or fields.get("config")
        if file is None:
            issue = ConfigIssue("", "has no config, and the benchmark has no default config")
            labels_of.setdefault(issue, []).append(name)
            continue

        # From the general to the particular: a later change replaces an earlier one.
        label = name + suffix
        path = _relative_to(spec, file)
        changes = {**fields.get("base", {}), **run.set, **point}
        try:
            config = _load(path, changes, fields.get("threads", 1))
        except ConfigError as error:
            for issue in error.issues:
                file_and_key = f"{file} {issue.path}".rstrip()
                labels_of.setdefault(ConfigIssue(file_and_key, issue.message), []).append(label)
            continue

        # Values of a grid may have the same text: 1e-3 and 0.001.
        if label in cells:
            labels_of.setdefault(ConfigIssue("", "two runs have this label"), []).append(label)
        cells[label] = Cell(label, path, changes, config)

    # One error in a config that all runs use would otherwise be as many errors as there are runs.
    issues = []
    for issue, labels in labels_of.items():
        paths = [f"runs.{label}" for label in dict.fromkeys(labels)]
        more = f" and {len(paths) - MAX_REPORTED} more" if len(paths) > MAX_REPORTED else ""
        issues.append(ConfigIssue(", ".join(paths[:MAX_REPORTED]) + more, str(issue)))
    return list(cells.values()), issues


def grid_points(grid: Mapping[str, list[Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return all combinations of a grid's values, with their label suffixes such as `,learning_rate=0.001,gamma=1`."""
    names = [_short_name(path, list(grid)) for path in grid]
    points = []
    for values in itertools.product(*grid.values()):
        suffix = ""
        for name, value in zip(names, values, strict=True):
            # A label is a folder's name, so `{a: 1}` or `x/y` cannot stay as they are.
            value_text = re.sub(r"[^\w.+-]+", "_", str(shown(value)).strip("'\"")).strip("_")
            suffix += f",{name}={value_text}"
        points.append((suffix, dict(zip(grid, values, strict=True))))
    return points


def _short_name(path: str, paths: list[str]) -> str:
    """Return the last words of a path, as few as no other path ends with: `learning_rate`, or else `args.gamma`."""
    words = path.split(".")
    for n in range(1, len(words)):
        ending = words[-n:]
        paths_with_ending = [candidate for candidate in paths if candidate.split(".")[-n:] == ending]
        if len(paths_with_ending) == 1:
            return ".".join(ending)
    return path


def _load(path: Path, changes: Mapping[str, Any], threads: int) -> AnyConfig:
    """Return the validated config with changes."""
    mapping, issues = read_yaml(path)
    changed, change_issues = apply_values(mapping, changes, "set")
    config = parse_config(changed, source=str(path), issues=issues + change_issues)

    # `auto` would be all cores, for each of the runs at the same time.
    return dataclasses.replace(config, n_threads=threads) if config.n_threads == "auto" else config


def _relative_to(spec: Path, path: str) -> Path:
    return spec.parent / with_home(path)
