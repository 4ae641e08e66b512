"""Train each config of a JSON file, with all networks on one device and with critic and reference on a second one.

Prints for each config, as JSON: the devices of policy, critic and reference in the second run, and the largest
differences of the trained weights and of the logged numbers (relative) between both runs, and of the trained weights
between the second run and one that was resumed from its first checkpoint.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.on_policy.assemble import AssembledRun, assemble
from rl4lms_like.on_policy.trainer import OnPolicyTrainer
from rl4lms_like.system.schema import at
from rl4lms_like.tracking.base import Tracker
from tests.policies.second_device import SECOND, register


def trained(config: dict, folder: Path, checkpoint: str | None = None) -> AssembledRun:
    run, given = assemble(parse_config(config)), copy.deepcopy(config)
    with Tracker(folder, given, "tests", "run", quiet=True, resume=checkpoint is not None) as tracker:
        state = None if checkpoint is None else folder / "tests" / "run" / "checkpoints" / checkpoint
        OnPolicyTrainer(run, tracker, resume_from=state).train_and_eval()
    return run


def weights(run: AssembledRun) -> torch.Tensor:
    return torch.cat([tensor.to("cpu").flatten() for tensor in run.policy.training_state().values()])


def numbers(folder: Path) -> dict[str, float]:
    found = {}
    for name in ("rollout_info", "training_info"):
        for index, line in enumerate((folder / "tests" / "run" / f"{name}.jsonl").open()):
            values = {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}
            found |= {f"{name} {index} {key}": v for key, v in values.items() if isinstance(v, float) and v == v}
    return found


def compare(config: dict, folder: Path) -> dict:
    run = trained(config, folder / "one")
    devices = {"alg.policy.args.reference_device": SECOND}
    if run.policy.value_model is not None:
        devices["alg.policy.args.critic_device"] = SECOND
    config, _ = apply_values(config, devices, "")
    other = trained(config, folder / "two")
    shutil.copytree(folder / "two", folder / "resumed")
    resumed = trained(config, folder / "resumed", "iteration_00001")
    models = (other.policy.model, other.policy.value_model, other.policy.ref_model)
    one, two = numbers(folder / "one"), numbers(folder / "two")
    gaps = {key: abs(one[key] - two[key]) / max(abs(one[key]), 1) for key in one.keys() & two.keys()}
    return {
        "id": at(config, "alg.id"),
        "devices": [None if model is None else str(model.device) for model in models],
        "weights": float((weights(run) - weights(other)).abs().max()),
        "only": sorted(one.keys() ^ two.keys()),
        "numbers": dict(sorted(gaps.items(), key=lambda gap: gap[1])[-3:]),  # the largest ones
        "n_numbers": len(one),
        "resumed": float((weights(resumed) - weights(other)).abs().max()),
    }


if __name__ == "__main__":
    register()
    try:
        torch.ones(2) + torch.ones(2, device=SECOND)
    except RuntimeError:
        found = []
        for each in json.loads(Path(sys.argv[1]).read_text()):
            with tempfile.TemporaryDirectory() as temporary:
                found.append(compare(each, Path(temporary)))
        print(json.dumps(found))
    else:
        raise AssertionError("tensors of several devices should not be added")
