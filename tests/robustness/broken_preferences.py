"""Preference files with errors: each is refused with its place, or read, and never ends in a traceback.

    python -m tests.robustness.broken_preferences                   # 300 files, about five minutes on one core
    python -m tests.robustness.broken_preferences --first 17 --n 1  # one file, with the messages

A file of pairs, of labels or of conversations is changed at random: bytes, lines, values or columns. Then `check` and,
if it accepts the file, `train` with two steps are called in this process.

    refused    `check` has the status 1 or 2, and its message names the file, the pool or a sample, without traceback
    ran        both have the status 0
    fault      anything else
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl4lms_like import cli
from rl4lms_like.testing import models

RESULTS = Path(__file__).parent / "results" / "broken_preferences.json"
Row = dict[str, Any]
KINDS: dict[str, tuple[str, Callable[[int], Row], Row]] = {
    "pairs": (
        "dpo",
        lambda i: {"prompt": f"The film {i}", "chosen": f" was good {i}.", "rejected": f" was bad {i}."},
        {},
    ),
    "beginnings": ("ipo", lambda i: {"chosen": f"The film {i} was good.", "rejected": f"The film {i} was bad."}, {}),
    "labels": (
        "kto",
        lambda i: {"prompt": f"The film {i}", "response": f" was {i}.", "label": bool(i % 2)},
        {"label_column": "label"},
    ),
    "conversations": (
        "simpo",
        lambda i: {
            side: [{"role": "user", "content": f"And {i}?"}, {"role": "assistant", "content": f"{side} {i}"}]
            for side in ("chosen", "rejected")
        },
        {},
    ),
    "margins": (
        "reward_model",
        lambda i: {"prompt": f"Film {i}", "chosen": f" good {i}", "rejected": f" bad {i}", "margin": i / 4},
        {"margin_column": "margin"},
    ),
}
"""Kind of a file -> objective that reads it, its rows, and arguments of the pool."""
VALUES: tuple[Any, ...] = (
    *(None, "", " ", "\n", "\u0000", "é" * 5, "a" * 20_000, "\ud800", True, 0, -1.5, float("nan"), float("inf")),
    *([], {}, [None], ["text"], [{}], [{"role": "user"}], {"text": "x"}, [{"role": "assistant", "content": 3}]),
    *([{"role": "assistant", "content": "alone"}], [{"role": "user", "content": "last"}], "maybe", 10**400),
)
"""Values that a cell is given."""
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}\n{% endfor %}"


def changed(kind: str, rng: random.Random) -> tuple[str, bytes]:
    """Return the name and the bytes of a changed file of this kind."""
    rows = [KINDS[kind][1](i) for i in range(8)]
    is_nested = kind == "conversations"
    ending = rng.choice(["jsonl", "jsonl", "json"] if is_nested else ["jsonl", "jsonl", "json", "csv", "tsv"])
    for _ in range(rng.choice([0, 1, 1, 2])):
        rows = _with_changed_rows(rows, rng)
    text = _written(rows, ending)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.4:
        data = _with_changed_bytes(data, rng)
    return f"pairs.{ending}", data


def _with_changed_rows(rows: list[Any], rng: random.Random) -> list[Any]:
    if not rows:
        return [rng.choice(VALUES)]
    place = rng.randrange(len(rows))
    row = rows[place]
    how = rng.choice(["value", "value", "value", "drop", "rename", "equal", "row", "empty", "everywhere", "one"])
    if how == "empty":
        return []
    if how == "one":
        return rows[:1]
    if how == "row" or not isinstance(row, dict) or not row:
        return [*rows[:place], rng.choice(VALUES), *rows[place + 1 :]]
    key = rng.choice(list(row))
    if how == "everywhere":
        value = rng.choice(VALUES)
        return [{**each, key: value} if isinstance(each, dict) else each for each in rows]
    changed_row = dict(row)
    if how == "value":
        changed_row[key] = rng.choice(VALUES)
    elif how == "equal":
        changed_row |= dict.fromkeys(("chosen", "rejected"), row[key])
    else:
        value = changed_row.pop(key)
        changed_row |= {f"{key} ": value} if how == "rename" else {}
    return [*rows[:place], changed_row, *rows[place + 1 :]]


def _written(rows: list[Any], ending: str) -> str:
    if ending == "json":
        return json.dumps(rows, ensure_ascii=False)
    if ending == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text = io.StringIO()
    keys = list(dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row))
    writer = csv.writer(text, delimiter="\t" if ending == "tsv" else ",")
    writer.writerow(keys)
    writer.writerows([[row.get(key) for key in keys] if isinstance(row, dict) else [row] for row in rows])
    return text.getvalue()


def _with_changed_bytes(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    how = rng.choice(["cut", "noise", "remove", "repeat", "bom", "zeros", "latin", "empty", "ends"])
    return {
        "cut": data[:place],
        "noise": data[:place] + rng.randbytes(3) + data[place:],
        "remove": data[:place] + data[place + 1 :],
        "repeat": data + data[place:],
        "bom": b"\xef\xbb\xbf" + data,
        "zeros": data[:place] + bytes(8) + data[place:],
        "latin": data.replace(b"good", "g\xfct".encode("latin-1"), 1),
        "empty": b"",
        "ends": data.replace(b"\n", b"\r\n"),
    }[how]


def config_of(kind: str, file: str, model: Path) -> dict[str, Any]:
    """Return the config of a run of two steps."""
    objective, _, args = KINDS[kind]
    has_text = objective != "reward_model"
    return {
        "tokenizer": {"model_name": str(model)}
        | ({"max_length": 16} if has_text else {})
        | ({"chat_template": str(model / "template.jinja")} if kind == "conversations" else {}),
        "datapool": {
            "id": "preferences",
            "args": {"data_files": dict.fromkeys(("train", "val", "test"), file), "max_size": 50, **args},
        },
        "alg": {
            "id": objective,
            "args": {"max_response_length": 12} if has_text else {},
            "model_type": "causal",
            "model_name": str(model),
            "generation_kwargs": {"max_new_tokens": 12} if has_text else {},
            "training_args": {"max_steps": 2, "per_device_train_batch_size": 2},
        },
        "train_evaluation": {"eval_batch_size": 4, "max_eval_samples": 2, "save_model": False},
        "device": "cpu",
    }


def made_model(folder: Path) -> Path:
    """Save a tiny GPT-2 and a chat template."""
    tokenizer = models.make_tokenizer()
    models.save_model(folder, models.make_causal_lm("gpt2", tokenizer, n_layers=1), tokenizer)
    (folder / "template.jinja").write_text(TEMPLATE)
    return folder


def tried(seed: int, folder: Path, model: Path) -> dict[str, Any]:
    """Return what the commands make of a file: `verdict`, and the messages."""
    rng = random.Random(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    name, data = changed(kind, rng)
    file, config = folder / f"{seed}_{name}", folder / f"{seed}.json"
    file.write_bytes(data)
    config.write_text(json.dumps(config_of(kind, str(file), model)))
    place = ["--base_path_to_store_results", str(folder), "--experiment_name", f"run_{seed}"]
    commands = {"check": [], "train": place}
    found: dict[str, Any] = {"kind": kind, "file": name, "verdict": "ran"}
    for command, options in commands.items():
        status, message = _called([command, str(config), *options])
        found[command] = message[-600:] if status else ""
        if status:
            names_it = file.name in message or "pool" in message or "sample '" in message
            is_refused = command == "check" and status in (1, 2) and "Traceback" not in message and names_it
            found["verdict"] = "refused" if is_refused else "fault"
            break
    return found


def _called(arguments: list[str]) -> tuple[Any, str]:
    """Return the status of a command, or the name of what it raised, and its messages."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
        try:
            return cli.main(arguments), output.getvalue()
        except SystemExit as error:
            return error.code, output.getvalue()
        except Exception as error:
            return type(error).__name__, f"{output.getvalue()}\n{type(error).__name__}: {error}"


def main() -> int:
    """Try the files, print the faults, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=300, help="number of files (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="first seed (%(default)s)")
    parser.add_argument("--output", type=Path, help="results; by default only of 300 files")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        model = made_model(Path(name) / "model")
        for seed in range(options.first, options.first + options.n):
            found = tried(seed, Path(name), model)
            counts[found["verdict"]] += 1
            if found["verdict"] == "fault" or options.n == 1:
                print(seed, json.dumps(found, indent=1), flush=True)
    print(dict(counts))
    output = options.output or (RESULTS if options.n == 300 else None)
    if output:
        output.write_text(json.dumps({"first": options.first, "n": options.n, **counts}, indent=1) + "\n")
    return int(counts["fault"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
