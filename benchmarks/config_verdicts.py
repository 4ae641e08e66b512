"""Compare what two commits say of the same configs: which are refused, at which paths, and what the others mean.

    python -m benchmarks.config_verdicts --before ../old      # a checkout of the older commit

The configs are those of `task_configs`, the 2,000 of `fuzzed_configs`, and those of `--also` (JSON: name -> config).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def verdict(load: Callable[[], Any]) -> dict[str, Any]:
    """What loading a config comes to: its values, or the paths of its mistakes."""
    from rl4lms_like import ConfigError

    try:
        return {"config": json.loads(json.dumps(load().to_dict(), default=repr))}
    except ConfigError as error:
        return {"paths": sorted({issue.path for issue in error.issues})}


def verdicts(n: int, folder: Path, also: Path | None) -> dict[str, dict[str, Any]]:
    """The verdicts of the library that is imported here.

    Args:
        n: mutated configs.
        folder: with the inputs that they name; the working directory meanwhile.
        also: a JSON file with further configs, by name.
    """
    from benchmarks.config_mutations import case_of
    from rl4lms_like import load_config

    parse_config = vars(sys.modules[load_config.__module__])["parse_config"]  # moved between commits

    os.chdir(ROOT)
    found = {str(file): verdict(lambda: load_config(file, data=False)) for file in Path("task_configs").rglob("*.yml")}  # noqa: B023
    for name, config in (json.loads(also.read_text()) if also else {}).items():
        found[f"{also}: {name}"] = verdict(lambda: parse_config(config))  # noqa: B023
    os.chdir(folder)
    for seed in range(n):
        case = case_of(seed)
        Path("case.yml").write_bytes(case.text)
        found[f"mutated {seed}"] = verdict(lambda: load_config("case.yml", case.overrides))  # noqa: B023
    return found


def main() -> int:
    """Print the configs on which the commits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the older commit")
    parser.add_argument("--n", type=int, default=2000, help="mutated configs (%(default)s)")
    parser.add_argument("--also", type=Path, help="JSON: name -> config")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    also = options.also.resolve() if options.also else None
    if options.folder is not None:  # this process is the one of the older commit
        print(json.dumps(verdicts(options.n, options.folder, also)))
        return 0
    from benchmarks.fuzzed_configs import make_inputs

    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name))
        environment = os.environ | {"PYTHONPATH": str(options.before.resolve()), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--folder", name, "--n", str(options.n)]
        command += ["--also", str(also)] if also else []
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        before, after = json.loads(done.stdout.splitlines()[-1]), verdicts(options.n, Path(name), also)
    different = [name for name in after if before[name] != after[name]]
    for name in different:
        print(name, *(str(one.get("paths", "accepted")) for one in (before[name], after[name])), sep="\n    ")
    refused = sum("paths" in one for one in after.values())
    print(f"{len(after)} configs, {refused} refused; {len(different)} differ")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
