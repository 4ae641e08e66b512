"""Losses and gradients of TRL's GRPO and RLOO trainers on a given batch; run in TRL's environment by `trl_losses`.

The first argument is a folder with a model, `batch.safetensors` and `variants.json` (name -> trainer and arguments).
For each variant, `<name>.safetensors` gets the loss and the gradient of every parameter.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

TRAINERS: dict[str, tuple[Any, Any]] = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    """A reward function is required, but not called."""
    return [0.0] * len(completions)


def loss_and_gradient(folder: Path, kind: str, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients by parameter name."""
    trainer_class, config_class = TRAINERS[kind]
    batch = load_file(folder / "batch.safetensors")
    n = len(batch["advantages"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as output:
        trainer = trainer_class(
            model=model,
            reward_funcs=no_reward,
            args=config_class(
                output_dir=output,
                per_device_train_batch_size=n,
                gradient_accumulation_steps=1,
                num_generations=arguments.pop("num_generations"),
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_dropout=True,
                **arguments,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * n}),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs: dict[str, Any] = {**batch, "num_items_in_batch": batch["completion_mask"].sum()}
    inputs["old_logps"] = (batch["old_per_token_logps"] * batch["completion_mask"]).sum(1)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().reshape(1), **gradients}


def main() -> None:
    """Write one file per variant."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name, (kind, arguments) in json.loads((folder / "variants.json").read_text()).items():
        save_file(loss_and_gradient(folder, kind, arguments), folder / f"{name}.safetensors")


if __name__ == "__main__":
    main()
