"""Loss and gradients of a preference trainer of TRL on given rows; run in TRL's environment by `trl_preferences`.

The first argument is a folder with a model and `batch.json` (trainer, its arguments, rows). `result.safetensors` gets
the loss and the gradient of every parameter.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TRAINERS: dict[str, tuple[Any, Any]] = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "cpo": (CPOTrainer, CPOConfig),
    "reward": (RewardTrainer, RewardConfig),
}
PAIR = {"prompt": "a film", "chosen": " good", "rejected": " bad"}
LABEL = {"prompt": "a film", "completion": " good"}


def texts(rows: list[Any], column: int, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return prompts with their responses, padded on the right, and the masks of the responses."""
    ids = [row["prompt"] + row["responses"][column] for row in rows]
    width = max(map(len, ids))
    padded = torch.tensor([each + [0] * (width - len(each)) for each in ids])
    real = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in ids])
    starts = torch.tensor([len(row["prompt"]) for row in rows])[:, None]
    answer = real * (torch.arange(width) >= starts)
    return {f"{prefix}input_ids": padded, f"{prefix}attention_mask": real, f"{prefix}completion_mask": answer}


def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return two batches as one, padded to the wider one."""
    width = max(first.shape[1], second.shape[1])
    return torch.cat([torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in (first, second)])


def batch_of(kind: str, rows: list[Any]) -> dict[str, torch.Tensor]:
    """Return the batch of a trainer."""
    first, second = texts(rows, 0), texts(rows, 1)
    if kind in ("dpo", "reward"):
        batch = {key: joined(first[key], second[key]) for key in first}
        if kind == "reward":
            del batch["completion_mask"]
            return {**batch, "margin": torch.tensor([row["margin"] for row in rows])}
        ref = torch.tensor([row["ref_log_prob"] for row in rows])
        return {**batch, "ref_chosen_logps": ref[:, 0], "ref_rejected_logps": ref[:, 1]}
    if kind == "kto":
        ref = torch.tensor([row["ref_log_prob"] for row in rows])
        labels = torch.tensor([row["is_desirable"] for row in rows])
        return {**first, **texts(rows, 1, "KL_"), "label": labels, "ref_logps": ref[:, 0], "ref_KL_logps": ref[:, 1]}
    batch = {}
    for name, part in (("chosen", first), ("rejected", second)):
        answer = part.pop("completion_mask")
        batch |= {f"{name}_{key}": each for key, each in part.items()}
        batch[f"{name}_labels"] = part["input_ids"].masked_fill(answer == 0, -100)
    return batch


def trainer_of(folder: Path, kind: str, arguments: dict[str, Any]) -> Any:
    """Return the trainer; the rows that it is given are not used."""
    trainer_class, config_class = TRAINERS[kind]
    auto_class = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    rows = [{**LABEL, "label": number % 2 == 0} for number in range(4)] if kind == "kto" else [PAIR] * 4
    if kind == "kto":
        arguments = {"per_device_train_batch_size": 4, **arguments}
    with tempfile.TemporaryDirectory() as output:
        trainer = trainer_class(
            model=auto_class.from_pretrained(folder),
            args=config_class(
                output_dir=output, report_to=[], use_cpu=True, bf16=False, disable_dropout=True, **arguments
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
    trainer.precompute_ref_logps = True
    return trainer


def main() -> None:
    """Write loss and gradients."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    given = json.loads((folder / "batch.json").read_text())
    kind = given["kind"]
    trainer, batch = trainer_of(folder, kind, given["arguments"]), batch_of(kind, given["rows"])
    trainer.model.train()
    if kind == "orpo":
        chosen, rejected = trainer.concatenated_forward(trainer.model, batch)[:2]
        loss = -trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    elif kind == "cpo":
        loss = trainer.get_batch_loss_metrics(trainer.model, batch)[0]
    else:
        loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {name: each.grad for name, each in trainer.model.named_parameters() if each.grad is not None}
    save_file({"loss": loss.detach().reshape(1), **gradients}, folder / "result.safetensors")


if __name__ == "__main__":
    main()
