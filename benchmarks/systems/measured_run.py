"""A run of this library whose optimizer steps are timed; started by `benchmarks.gpu`, alone or by torchrun.

    python -m benchmarks.systems.measured_run CONFIG FOLDER

Each process writes `FOLDER/measured_RANK.json`: the times at which optimizer steps ended, and its peak memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.systems.worker import MIB, gpu_peak_mb, peak_mb
from rl4lms_like.config.load import load_config
from rl4lms_like.run import train_config


def main() -> None:
    """Train, and write the measurements."""
    config_file, folder = sys.argv[1:3]
    is_on_gpu = torch.cuda.is_available()
    ends: list[float] = []

    def on_step(*_: Any) -> None:
        if is_on_gpu:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    register_optimizer_step_post_hook(on_step)
    train_config(load_config(config_file), base_path_to_store_results=folder, experiment_name="run", quiet=True)

    peak_bytes = MIB * (gpu_peak_mb() if is_on_gpu else peak_mb())
    file = Path(folder) / f"measured_{os.environ.get('RANK', '0')}.json"
    file.write_text(json.dumps({"step_ends": ends, "peak_bytes": int(peak_bytes)}))


if __name__ == "__main__":
    main()
