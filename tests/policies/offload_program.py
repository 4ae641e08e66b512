"""Train on the second device with and without `offload: moments` and `activation_offload`; see where the moments are.

Prints as JSON for each optimizer: the devices of the moments while responses are generated in training, in each
optimizer step, and after the training; and how many weights and moments are those of the run without offloading, bit
for bit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.testing.models import make_tokenizer
from rl4lms_like.training.resuming.states import optimizer_state
from tests.builders import SAMPLING, make_env
from tests.policies.second_device import SECOND, register


def devices_of(optimizer: torch.optim.Optimizer) -> set[str]:
    moments = [moment for state in optimizer.state.values() for name, moment in state.items() if name != "step"]
    return {moment.device.type for moment in moments}


class Watched(CausalLMActorCriticPolicy):
    """A policy that records where its moments are while it generates, and in its optimizer's steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.in_generation: list[set[str]] = []
        self.in_steps: list[set[str]] = []
        self.optimizer.register_step_post_hook(lambda optimizer, *_: self.in_steps.append(devices_of(optimizer)))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.in_generation.append(devices_of(self.optimizer))
        return super().generate(*args, **kwargs)


def trained(folder: Path, **policy_kwargs: Any) -> PPO:
    policy_kwargs |= {"model_name": str(folder), "generation_kwargs": SAMPLING}
    env = make_env(make_tokenizer(), folder)
    options = {"n_steps": 10, "batch_size": 40, "n_epochs": 2, "seed": 0, "device": SECOND}
    algorithm = PPO(Watched, env, policy_kwargs=policy_kwargs, **options)
    algorithm.learn(200)
    return algorithm


def numbers(algorithm: PPO) -> dict[str, torch.Tensor]:
    state = algorithm.policy.training_state() | optimizer_state(algorithm.policy.optimizer)[0]
    return {name: tensor.cpu() for name, tensor in state.items()}


def compared(folder: Path, optimizer: dict[str, str]) -> dict[str, Any]:
    kwargs = {"fused": False} if optimizer["id"] == "adamw" else {}  # the second device has no fused step
    arguments = {"optimizer": optimizer, "optimizer_kwargs": kwargs}
    algorithm = trained(folder, **arguments)
    offloading = trained(folder, **arguments, offload="moments", activation_offload=True)
    expected = numbers(algorithm)
    offloaded = numbers(offloading)
    assert offloaded.keys() == expected.keys()
    are_equal = [torch.equal(offloaded[name], tensor) for name, tensor in expected.items()]
    watched = offloading.policy
    return {
        "in_generation": [sorted(devices) for devices in watched.in_generation],
        "in_steps": [sorted(devices) for devices in watched.in_steps],
        "at_the_end": sorted(devices_of(watched.optimizer)),
        "without": sorted(set().union(*algorithm.policy.in_generation)),
        "n_equal": are_equal.count(True),
        "n_different": are_equal.count(False),
    }


if __name__ == "__main__":
    register()
    torch.use_deterministic_algorithms(True)  # on a GPU, where the two runs could differ otherwise
    print(json.dumps({id: compared(Path(sys.argv[1]), {"id": id}) for id in sys.argv[2:]}))
