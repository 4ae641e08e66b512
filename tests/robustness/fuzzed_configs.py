"""Configs that are wrong, odd or merely different: each is refused by a message, or runs as it says.

    python -m tests.robustness.fuzzed_configs                       # 2,000 cases
    python -m tests.robustness.fuzzed_configs --first 17 --n 1      # one case, what was said included
    python -m tests.robustness.fuzzed_configs --preferences --n 300 # preference runs, in both formats

Every case is given to the real commands, `check` and then `train`, in a process of its own with bounded memory and
time. See `config_mutations` for what is changed, `config_facts` for how a run is held against its config.

    refused    status 2, a message, no traceback; `check` says the same mistakes
    named      status 1 for one of NAMED: what shows only when models and data are there
    ran        status 0, `check` accepts it too, and the run did as the file says
    goes on    asked for more than LONG_WORK tokens, and still at it when its time was over
    fault      anything else
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.robustness.config_cases import KINDS, PAIRS, PIPELINE, PREFERENCE_KINDS, PROMPTS
from tests.robustness.config_facts import asked_for, differences, faults_of_run, is_supervised, work
from tests.robustness.config_mutations import Case, case_of

RESULTS = Path(__file__).parent / "results" / "fuzzed_configs.json"
PREFERENCE_RESULTS = RESULTS.with_name("fuzzed_preference_configs.json")
TIME_LIMIT_S = 60.0
LONG_LIMIT_S = 6.0
LONG_WORK = 60_000
"""Tokens; whoever asks for more is given the shorter limit, and may not be done when it is over."""
MEMORY = 4 * 2**30
"""Bytes of address space beyond what is there before a case starts."""

NAMED = {
    "no such model": r"cannot load|there is no folder",
    "models that do not fit each other": r"tokens,( but)? the (model|policy)|could not be embedded",
    "no such layer": r"is not a layer of",
    "data": r"data pool|no samples|prompts of|\.(jsonl|csv|txt)\b",
    "diverged": r"diverged|not finite|the loss is|no finite step|rejects the generation_kwargs",
    "not installed here": r" needs ",
    "memory": r"out of memory|MemoryError",
}
"""Failures with status 1 that no config tells before models and data are there."""


FAILED = ": failed: "
"""In a line of post-train about a model that could not be trained; it trains the others."""

VERDICTS: dict[int | str, str] = {0: "ran", 1: "named", 2: "refused"}
"""Exit status of `train` -> verdict."""


@dataclass
class Outcome:
    """What became of a case.

    Args:
        verdict: `refused`, `named`, `ran`, `goes on` or `fault`.
        faults: what is wrong; empty but for the last.
        said: by `check` and by `train`.
    """

    verdict: str
    faults: list[str] = field(default_factory=list)
    message: dict[str, str] = field(default_factory=dict)


# --- in the process of a case ----------------------------------------------------------------------------------------


def play(case: Case, folder: Path) -> None:
    """Runs both commands in `folder` and writes what happened to `report.json`; does not return."""
    os.setsid()
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY,) * 2)
    Path("case.yml").write_bytes(case.text)
    report: dict[str, Any] = {"faults": []}
    options = [option for override in case.overrides for option in ("--set", override)]
    runs = remembered_runs()
    for name, command in commands_of(case).items():
        report[name] = _status(name, [*command, *options])
        Path("report.json").write_text(json.dumps(report))
    if report["train"] == 0 and case.kind not in PREFERENCE_KINDS:
        try:
            report["faults"] = faults_here(case, runs[-1])
        except BaseException:
            report["faults"] = [f"the run cannot be read: {traceback.format_exc()}"]
        Path("report.json").write_text(json.dumps(report))
    os._exit(0)


def commands_of(case: Case) -> dict[str, list[str]]:
    """Both commands for a config of this kind."""
    if case.kind == PIPELINE:
        train = ["post-train", "--config", "case.yml"]
        return {"check": [*train, "--dry-run"], "train": train}
    return {name: [name, "case.yml"] for name in ("check", "train")}


def faults_here(case: Case, run: Any) -> list[str]:
    """Everything in which the run in this folder is not what the case asks for."""
    from rl4lms_like.config.load import parse_config

    asked, folder = asked_for(case.text, case.overrides), Path("rl4lm_exps/rl4lm_experiment")
    usual = parse_config(_SAYS_LITTLE_SUPERVISED if is_supervised(asked) else _SAYS_LITTLE, components=False).to_dict()
    got = json.loads((folder / "config.json").read_text())
    return [*differences(asked, got, usual), *faults_of_run(asked, folder, run)]


_SAYS_LITTLE: dict[str, Any] = {
    "tokenizer": {"model_name": ""},
    "reward_fn": {"id": ""},
    "datapool": {"id": ""},
    "alg": {"id": "", "kl_div": {"coeff": 0}, "policy": {"id": ""}},
    "train_evaluation": {"eval_batch_size": 1, "n_iters": 1, "eval_every": 1},
}
_SAYS_LITTLE_SUPERVISED: dict[str, Any] = {
    "tokenizer": {"model_name": ""},
    "datapool": {"id": ""},
    "alg": {"id": "supervised", "model_type": "causal", "model_name": ""},
    "train_evaluation": {"eval_batch_size": 1},
}
"""Configs that leave everything to defaults."""


def _status(command: str, arguments: Sequence[str]) -> int | str:
    """What the command line ends with: its status, or the name of what was raised; its words go to a file."""
    from rl4lms_like import cli

    out = os.open(f"{command}.out", os.O_WRONLY | os.O_CREAT)
    error = os.open(f"{command}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(error, 2)
    status: int | str
    try:
        status = cli.main(arguments)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException as raised:
        status = type(raised).__name__
        with contextlib.suppress(BaseException):
            traceback.print_exc(limit=-25)
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def remembered_runs(set_attribute: Callable[[Any, str, Any], None] = setattr) -> list[Any]:
    """Every run that is assembled from now on."""
    from rl4lms_like.offline import assemble_supervised
    from rl4lms_like.on_policy import assemble

    runs: list[Any] = []

    def component_state(build: Any) -> Any:
        def built(*arguments: Any, **options: Any) -> Any:
            runs.append(build(*arguments, **options))
            return runs[-1]

        return built

    for module, name in ((assemble, "assemble"), (assemble_supervised, "assemble_supervised")):
        set_attribute(module, name, component_state(getattr(module, name)))
    return runs


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


# --- around it ------------------------------------------------------------------------------------------------------


def outcomes(
    seeds: Sequence[int], base: Path, *, parallel: int = 1, kinds: Sequence[str] = KINDS
) -> Iterator[tuple[Case, Outcome]]:
    """Plays the cases, each in a process forked from this one.

    Args:
        seeds: of the cases.
        base: a folder to work in; the tiny models are made there.
        parallel: cases at a time.
        kinds: of the configs that they start as.
    """
    prepare(base)
    waiting = list(reversed(seeds))
    running: dict[int, tuple[Case, float, Path]] = {}
    while waiting or running:
        while waiting and len(running) < parallel:
            case = case_of(waiting.pop(), kinds)
            folder = make_folder(base, case.seed)
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    play(case, folder)
                os._exit(99)
            running[pid] = (case, time.monotonic(), folder)
        time.sleep(0.005)
        for pid, (case, started, folder) in list(running.items()):
            limit = LONG_LIMIT_S if long_work(case) else TIME_LIMIT_S
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() - started < limit:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if not ended:
                os.waitpid(pid, 0)
            del running[pid]
            yield case, judged(case, folder, status if ended else None)
            shutil.rmtree(folder)


def long_work(case: Case) -> bool:
    """Whether the config asks for more than a moment's work, as far as it can be read."""
    try:
        return work(asked_for(case.text, case.overrides)) > LONG_WORK
    except Exception:  # whatever is no config asks for nothing
        return False


def judged(case: Case, folder: Path, status: int | None) -> Outcome:
    """The verdict; `status` is the process's, None if it was killed when its time was over."""
    report = json.loads((folder / "report.json").read_text()) if (folder / "report.json").exists() else {}
    message = {command: _said(folder, command) for command in ("check", "train")}
    faults = list(report.get("faults", []))
    for command, words in message.items():
        if "Traceback" in words:
            faults.append(f"{command}: a traceback")
        if len(words) > 20_000:
            faults.append(f"{command}: a message of {len(words)} characters")
    if status is None:
        if long_work(case) and "check" in report and not faults:
            return Outcome("goes on", [], message)
        return Outcome("fault", [*faults, f"hangs in {'train' if 'check' in report else 'check'}"], message)
    if status != 0 or "train" not in report:
        return Outcome("fault", [*faults, f"the process ended with {status}"], message)
    faults += faults_of_commands(report["check"], report["train"], message)
    return Outcome("fault" if faults else VERDICTS[report["train"]], faults, message)


def faults_of_commands(check: int | str, train: int | str, message: dict[str, str]) -> list[str]:
    """What is wrong with how both commands ended, and with what they said."""
    words = message["check"] + message["train"]
    faults = ["an error that nobody has named"] if "for a traceback" in words and "MemoryError" not in words else []
    said_by_dry_run = check != 0 and FAILED in message["check"] and FAILED in message["train"]
    if train not in VERDICTS or check not in VERDICTS:
        faults.append(f"check ended with {check}, train with {train}")
    elif train == 1 and not (said_by_dry_run or _name_of(message["train"])):
        faults.append("a failure that should have been told before")
    elif train in (1, 2) and not message["train"].strip():
        faults.append("no word of why")
    elif train == 2 and not (
        names_devices_only(message["train"]) or set(issues(message["train"])) <= set(issues(message["check"]))
    ):  # `check` goes on after mistakes, and also reports what is not installed
        faults.append("check does not say all mistakes that train says")
    elif train == 0 and check != 0:
        faults.append("check refuses what train takes")
    elif train == 1 and check == 2 and not said_by_dry_run:
        faults.append("check refuses what train fails at")
    return faults


def issues(message: str) -> list[str]:
    """The lines that name mistakes."""
    return [line for line in message.splitlines() if line.startswith("  ")]


def names_devices_only(message: str) -> bool:
    """Whether all that is wrong is a device of another machine, which `check` may be asked for."""
    return all(re.match(r"  (alg\.args\.)?device: .*is not available here", line) for line in issues(message))


def _name_of(message: str) -> str | None:
    return next((name for name, pattern in NAMED.items() if re.search(pattern, message)), None)


def _said(folder: Path, command: str) -> str:
    """The errors of a command; post-train prints those of a model with its results."""
    paths = (folder / f"{command}.{end}" for end in ("err", "out"))
    errors, output = (path.read_text(errors="replace") if path.exists() else "" for path in paths)
    return errors or (output if FAILED in output else "")


def prepare(base: Path) -> None:
    """Imports what runs need, once for all processes, and makes what their configs name."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RL4LMS_LIKE_HOME": str(base / "home")}
    import rl4lms_like.offline.assemble_supervised
    import rl4lms_like.offline.trainer
    import rl4lms_like.on_policy.trainer  # noqa: F401

    make_inputs(base)


def make_inputs(base: Path) -> None:
    """Tiny models, and files of prompts."""
    from tests.robustness.killed_runs import make_models

    make_models(base / "models")
    texts = [f"Film number {i}, which is {mood}. The end." for i, mood in enumerate(["good", "bad", "long", "odd"] * 3)]
    (base / f"{PROMPTS}.txt").write_text("\n".join(texts))
    rows = [{"text": text, "rest": "I liked it."} for text in texts]
    (base / f"{PROMPTS}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with open(base / f"{PROMPTS}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "rest"])
        writer.writeheader()
        writer.writerows(rows)
    pairs = [{"prompt": f"Film number {i}", "chosen": f" is good {i}.", "rejected": f" is bad {i}."} for i in range(20)]
    (base / PAIRS).write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))


def make_folder(base: Path, seed: int) -> Path:
    """Where a case runs; models and data are links."""
    folder = base / f"case_{seed}"
    folder.mkdir()
    for name in ("models", PAIRS, *(f"{PROMPTS}{suffix}" for suffix in (".jsonl", ".csv", ".txt"))):
        (folder / name).symlink_to(base / name)
    return folder


def main() -> int:
    """Plays the cases, prints what is at fault, writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=2000, help="cases (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first case (%(default)s)")
    parser.add_argument("--seeds", help="these cases instead, comma-separated")
    parser.add_argument("--preferences", action="store_true", help="configs of preference runs, in both formats")
    parser.add_argument("--parallel", type=int, default=1, help="cases at a time (%(default)s)")
    parser.add_argument("--output", type=Path, help="results; by default only of 2,000 cases, or 300 of preferences")
    parser.add_argument("--log", type=Path, help="one line for each case, with all that was said")
    options = parser.parse_args()
    seeds = list(range(options.first, options.first + options.n))
    if options.seeds:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    kinds = PREFERENCE_KINDS if options.preferences else KINDS
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    named: Counter[str] = Counter()
    faults: dict[int, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        for case, outcome in outcomes(seeds, Path(name), parallel=options.parallel, kinds=kinds):
            counts[case.kind][outcome.verdict] += 1
            if outcome.verdict == "named":
                named[_name_of(outcome.message["train"]) or "a model of a pipeline file"] += 1
            if outcome.faults:
                faults[case.seed] = outcome.faults
                print(case.seed, case.kind, outcome.faults, flush=True)
            if len(seeds) == 1:
                print(case.text.decode(errors="replace")[:20_000], case.overrides, case.changes, sep="\n")
                print(json.dumps(outcome.message, indent=1, ensure_ascii=False).replace("\\n", "\n"))
            if options.log:
                with open(options.log, "a") as file:
                    line = {"seed": case.seed, "kind": case.kind, "changes": case.changes, "overrides": case.overrides}
                    file.write(json.dumps({**line, **asdict(outcome)}) + "\n")
    total = sum(counts.values(), Counter())
    print(dict(total), dict(named))
    results = {
        "seeds": [min(seeds), max(seeds)],
        "n": len(seeds),
        "outcomes": dict(total),
        "by_kind": {kind: dict(count) for kind, count in counts.items() if count},
        "named": dict(named),
        "faults": faults,
        "limits": {"time_s": TIME_LIMIT_S, "memory_bytes": MEMORY, "long_work_tokens": LONG_WORK},
        "versions": {name: version(name) for name in ("torch", "transformers", "PyYAML", "pydantic")},
    }
    results_file, n_cases = (PREFERENCE_RESULTS, 300) if options.preferences else (RESULTS, 2000)
    output = options.output or (results_file if len(seeds) == n_cases else None)
    if output:
        output.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
