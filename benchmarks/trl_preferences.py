"""Compares losses and gradients with those of TRL's preference trainers, on the same batch and weights.

    python -m benchmarks.trl_preferences

Rows, log-probs of the reference and weights are those of a run of this library. TRL's trainers compute the loss of the
same token ids. The results are differences of the loss and relative differences of the gradient (norm of the difference
/ norm). TRL's other definitions:

orpo                  its likelihood is a mean over all tokens of the batch, with those of the prompts; here a mean over
                      pairs of the mean over the tokens of a response. Only the term of the odds ratio is compared.
dpo with sft_weight   its likelihood is a mean over all tokens of the batch, which is equal for responses of one length.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.environments import python_of
from benchmarks.trl_losses import difference
from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.preference_objectives import ORPO, PreferenceObjective
from rl4lms_like.testing import models
from scripts.data.film_preferences import film_preferences

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "trl_preferences.json"
VARIANTS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "dpo": ("dpo", {}, "dpo", {"loss_type": "sigmoid"}),
    "dpo, hinge": ("dpo", {"loss": "hinge"}, "dpo", {"loss_type": "hinge"}),
    "dpo, robust": (
        "dpo",
        {"loss": "robust", "label_smoothing": 0.2},
        "dpo",
        {"loss_type": "robust", "label_smoothing": 0.2},
    ),
    "dpo with sft_weight": (
        "dpo",
        {"sft_weight": 0.5, "max_response_length": 6},
        "dpo",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "ipo": ("ipo", {}, "dpo", {"loss_type": "ipo"}),
    "kto": (
        "kto",
        {"desirable_weight": 1.0, "undesirable_weight": 1.5},
        "kto",
        {"desirable_weight": 1.0, "undesirable_weight": 1.5},
    ),
    "orpo": ("orpo", {"odds_ratio_weight": 0.5}, "orpo", {"beta": 0.5}),
    "simpo": (
        "simpo",
        {},
        "cpo",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
    ),
    "reward_model": ("reward_model", {}, "reward", {}),
    "reward_model, centred": (
        "reward_model",
        {"center_coef": 0.1},
        "reward",
        {"center_rewards_coefficient": 0.1},
    ),
}
"""Name -> objective here, its arguments, trainer there, its arguments."""


def build(folder: Path, id: str, args: dict[str, Any]) -> tuple[PreferenceObjective, list[Any]]:
    """Return an objective with the rows of 16 pairs; the model is saved in the folder."""
    tokenizer = models.make_tokenizer()
    names = {name: folder / name for name in ("start", "reference")}
    for seed, path in enumerate(names.values()):
        models.save_model(path, models.make_causal_lm("gpt2", tokenizer, scale=3.0, seed=seed), tokenizer)
    pairs = [{**pair, "margin": 0.1 * number} for number, pair in enumerate(film_preferences(16))]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    files = dict.fromkeys(("train", "val", "test"), str(folder / "pairs.jsonl"))
    has_reference = id in ("dpo", "ipo", "kto")
    config = {
        "tokenizer": {"model_name": str(names["start"])},
        "datapool": {"id": "preferences", "args": {"data_files": files, "margin_column": "margin"}},
        "alg": {
            "id": id,
            "args": args | ({"reference_model": str(names["reference"])} if has_reference else {}),
            "model_type": "causal",
            "model_name": str(names["start"]),
        },
        "train_evaluation": {"eval_batch_size": 16},
        "device": "cpu",
    }
    run = assemble_preferences(parse_config(config))  # type: ignore[arg-type]
    run.objective.prepare(folder, run.examples)
    run.model.save_pretrained(folder)
    run.tokenizer.save_pretrained(folder)
    assert isinstance(run.objective, PreferenceObjective)
    return run.objective, run.examples["train"].rows


def ours(objective: PreferenceObjective, rows: list[Any]) -> dict[str, torch.Tensor]:
    """Return the loss of all rows and its gradients; of ORPO only the term of the odds ratio."""
    model, batch = objective.reader.model, objective.collate(rows)
    objective.begin_step([batch], None)
    loss = objective.loss(model, batch)
    if isinstance(objective, ORPO):
        chosen = objective.scores(batch)[:, 0] / objective.lengths(batch)[:, 0]
        loss = loss + chosen.mean()
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach().reshape(1), **gradients}


def main() -> None:
    """Print and keep the differences."""
    torch.set_num_threads(1)
    python = python_of("trl-grpo", ("trl==1.16.*",))
    found: dict[str, dict[str, float]] = {}
    for name, (id, args, kind, arguments) in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            objective, rows = build(path, id, args)
            mine = ours(objective, rows)
            (path / "batch.json").write_text(json.dumps({"kind": kind, "arguments": arguments, "rows": rows}))
            subprocess.run([python, "-m", "benchmarks.systems.trl_preferences_worker", folder], check=True, cwd=ROOT)
            both = difference(mine, load_file(path / "result.safetensors"))
            found[name] = {key: both[key] for key in ("loss", "gradient")}
        print(name, {key: f"{value:.2e}" for key, value in found[name].items()}, flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
