"""A preference trainer of TRL that trains some steps; run in TRL's environment by `preference_speed`.

    python -m benchmarks.systems.preference_steps FOLDER

`FOLDER` has `model` and `job.json` (objective, pairs, settings of both trainers); the measurements are printed.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from transformers import TrainerCallback

from benchmarks.systems.worker import peak_mb, resident_mb

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch_fused",
    "gradient_checkpointing": False,  # TRL's default is True
    "bf16": False,  # TRL's default is True
    "logging_steps": 10,
    "save_strategy": "no",
}


class StepClock(TrainerCallback):
    """Measures the optimizer steps of transformers' Trainer.

    Args:
        n_warm_up: number of first steps that are not counted.
    """

    def __init__(self, n_warm_up: int) -> None:
        self.ends: list[float] = []
        self.n_warm_up = n_warm_up
        self.at_start_mb = resident_mb()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the CPU time of the process."""
        self.ends.append(time.process_time())

    def report(self) -> str:
        """Return the median CPU time of a step, and the memory at the start of training and at its peak, as JSON."""
        ends = self.ends[self.n_warm_up - 1 :]
        steps = [1000 * (after - before) for before, after in pairwise(ends)]
        found = {"cpu_ms": median(steps), "n_steps": len(steps), "start_mb": self.at_start_mb, "peak_mb": peak_mb()}
        return json.dumps(found)


def main() -> None:
    """Train, and print the measurements."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    trainer_class, config_class = {"dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig)}[job["id"]]
    rows = job["pairs"]
    if job["id"] == "kto":
        rows = [
            {"prompt": pair["prompt"], "completion": pair[column], "label": column == "chosen"}
            for pair in rows
            for column in ("chosen", "rejected")
        ]
    for row in rows:
        row.update({key: f" {text}" for key, text in row.items() if key in ("chosen", "rejected", "completion")})
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=config_class(
            output_dir=str(folder / "output"),
            per_device_train_batch_size=job["batch_size"],
            max_steps=job["n_steps"],
            precompute_ref_log_probs=True,
            disable_dropout=True,
            disable_tqdm=True,
            use_cpu=True,
            report_to="none",
            **SETTINGS,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    clock = StepClock(job["n_warm_up"])
    trainer.add_callback(clock)
    trainer.train()
    print(clock.report())


if __name__ == "__main__":
    main()
