"""Compare what two checkouts say of the same configs: which are refused, at which paths, and what the others mean.

    python -m tests.robustness.config_verdicts --write before.json   # the verdicts of this checkout
    python -m tests.robustness.config_verdicts --before before.json   # what has changed since
    python -m tests.robustness.config_verdicts --before ../old   # the same with a checkout of another commit

The configs are those of `task_configs`, mutated ones of all kinds (RL, supervised, preference, critic-free algorithms,
engines), and each option of the last three kinds on its own. Both checkouts load the same files; of the library only
`load_config` and `ConfigError` are used, which all versions have.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CASES = "cases.json"
"""File of the configs: name -> text and overrides."""

Verdict = dict[str, Any]


def verdict(file: str, overrides: Sequence[str]) -> Verdict:
    """Return the values of a config, or its errors (path and message), or the exception that loading it raises."""
    from rl4lms_like import ConfigError, load_config

    try:
        config = load_config(file, overrides)
        notices = sorted({notice.path for notice in config.notices})
        return {"config": json.loads(json.dumps(config.to_dict(), default=repr)), "notices": notices}
    except ConfigError as error:
        return {"issues": [[issue.path, issue.message] for issue in error.issues]}
    except Exception as error:
        return {"exception": f"{type(error).__name__} in {traceback.extract_tb(error.__traceback__)[-1].name}"}


def judge(folder: Path) -> dict[str, Verdict]:
    """Return the verdicts of the library that is imported here on all cases in a folder with their inputs."""
    cases = json.loads((folder / CASES).read_text())
    os.chdir(folder)
    verdicts = {}
    for name, (text, overrides) in cases.items():
        Path("case.yml").write_bytes(text.encode("latin-1"))
        verdicts[name] = verdict("case.yml", overrides)
    return verdicts


def judge_with(checkout: Path, folder: Path) -> dict[str, Verdict]:
    """Return the verdicts of the library in a checkout, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--folder", str(folder)]
    finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    verdicts: dict[str, Verdict] = json.loads(finished.stdout.splitlines()[-1].replace(str(folder), "FOLDER"))
    return verdicts


def write_cases(folder: Path, n: int) -> None:
    """Write all configs and the models and data that they name."""
    from rl4lms_like.config.yaml_file import dump_yaml
    from tests.robustness.config_cases import KINDS, PIPELINE, PREFERENCE_KINDS, RULE_KINDS, base_config
    from tests.robustness.config_mutations import case_of, single_changes
    from tests.robustness.fuzzed_configs import make_inputs

    make_inputs(folder)
    (folder / "models" / "teacher").symlink_to(folder / "models" / "causal")
    cases: dict[str, tuple[str, Sequence[str]]] = {}
    for file in sorted(ROOT.glob("task_configs/**/*.yml")):
        cases[str(file.relative_to(ROOT))] = (file.read_bytes().decode("latin-1"), ())

    # Half of them are of the first kinds, whose runs the fuzzer checks too.
    preference_kinds = [kind for kind in PREFERENCE_KINDS if kind != PIPELINE]
    for family, kinds, n_cases in (("", KINDS, n), ("preference ", preference_kinds, n // 4), ("rule ", RULE_KINDS, n)):
        for seed in range(n_cases):
            case = case_of(seed, kinds)
            cases[f"mutated {family}{seed}"] = (case.text.decode("latin-1"), case.overrides)

    for kind in (*RULE_KINDS, *preference_kinds):
        cases[f"{kind} as it is"] = (_text(dump_yaml(base_config(kind))), ())
        for change, mapping in single_changes(kind):
            cases[change] = (_text(dump_yaml(mapping)), ())
    (folder / CASES).write_text(json.dumps(cases))


def _text(yaml: str) -> str:
    # The bytes of a case need not be text, so that they are stored as latin-1, which has a character for each byte.
    return yaml.encode("utf-8", "surrogatepass").decode("latin-1")


def kind_of(one: Verdict) -> str:
    """Return `accepted`, `refused` or `crashed`."""
    return "refused" if "issues" in one else "accepted" if "config" in one else "crashed"


def summary(one: Verdict) -> Any:
    """Return what two verdicts are compared by: values and notices, or the paths of the errors, or the exception."""
    if "issues" in one:
        return sorted({path for path, _ in one["issues"]})
    return one.get("exception") or [one["config"], one["notices"]]


def described(before: Verdict, after: Verdict) -> str:
    """Return the difference of two verdicts in a few lines."""
    lines = []
    for label, one, other in (("before", before, after), ("after", after, before)):
        known = [issue for issue in one.get("issues", ()) if issue not in other.get("issues", ())]
        lines.append(f"    {label}: {one.get('exception') or kind_of(one)}")
        lines += [f"        {path}: {message}" for path, message in known]
    if kind_of(before) == kind_of(after) == "accepted":
        lines.append(
            f"        {[key for key in before['config'] if before['config'][key] != after['config'].get(key)]}"
        )
        lines.append(f"        {before['notices']} -> {after['notices']}")
    return "\n".join(lines)


def main() -> int:
    """Print the configs on which two checkouts differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the older commit, or a file of `--write`")
    parser.add_argument("--write", type=Path, help="write the verdicts of this checkout to a file")
    parser.add_argument("--messages", action="store_true", help="compare the messages of errors too")
    parser.add_argument("--n", type=int, default=2000, help="mutated configs of the first kinds (%(default)s)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:  # this process is one of `judge_with`
        print(json.dumps(judge(options.folder)))
        return 0

    with tempfile.TemporaryDirectory() as name:
        write_cases(Path(name), options.n)
        after = judge_with(ROOT, Path(name))
        before = after
        if options.before is not None:
            is_file = options.before.is_file()
            before = json.loads(options.before.read_text()) if is_file else judge_with(options.before, Path(name))
    if options.write is not None:
        options.write.write_text(json.dumps(after))

    changed = []
    kinds: Counter[str] = Counter()
    for name, new in after.items():
        old = before[name]
        kinds[f"{kind_of(old)} -> {kind_of(new)}"] += 1
        is_same = summary(old) == summary(new)
        if is_same and not (options.messages and old.get("issues") != new.get("issues")):
            continue
        changed.append(name)
        print(name, described(old, new), sep="\n")
    print(f"{len(after)} configs; {dict(kinds)}; {len(changed)} differ")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
