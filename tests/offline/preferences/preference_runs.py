"""Small preference runs, of which only the paths differ from one test to the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl4lms_like.config.load import parse_config
from rl4lms_like.run import train_config

OBJECTIVES = ("reward_model", "dpo", "ipo", "kto", "orpo", "simpo")
PAIRS = [
    {
        "prompt": f"The {thing} in town {number} was",
        "chosen": f"{good} and {'very ' * (number % 3)}dear",
        "rejected": bad,
    }
    for number, (thing, good, bad) in enumerate(
        [("film", "a wonderful story", "cold"), ("sea", "quiet", "slow and a little cold"), ("letter", "long", "lost")]
        * 4
    )
]


def written(folder: Path, rows: list[dict[str, Any]] | None = None) -> str:
    """A file of preferences, the twelve pairs by default."""
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows or PAIRS), encoding="utf-8")
    return str(file)


def blocks(id: str, model: Path | str, file: str, kind: str = "causal", **training_args: Any) -> dict[str, Any]:
    """Six steps of four pairs over the twelve pairs, which are also `val` and `test`."""
    name = str(model)
    mapping: dict[str, Any] = {
        "tokenizer": {"model_name": name},
        "datapool": {"id": "preferences", "args": {"data_files": {"train": file, "val": file, "test": file}}},
        "alg": {
            "id": id,
            "args": {},
            "model_type": kind,
            "model_name": name,
            "training_args": {
                "num_train_epochs": 2,
                "per_device_train_batch_size": 4,
                "learning_rate": 1e-2,
                "logging_steps": 2,
                **training_args,
            },
        },
        "train_evaluation": {"eval_batch_size": 12},
        "device": "cpu",
    }
    if id != "reward_model":
        mapping["alg"]["generation_kwargs"] = {"do_sample": True, "top_k": 0, "max_new_tokens": 8}
        mapping["train_evaluation"]["metrics"] = [{"id": "distinct_n"}]
    return mapping


def run(mapping: dict[str, Any], folder: Path, name: str = "run") -> Path:
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
