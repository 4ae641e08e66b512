"""AdamW with moments in 8 bits, by torchao.

Only imported for runs with `optimizer: {id: adamw_8bit}`, and for runs on given texts with `optim: adamw_torch_8bit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit as TorchaoAdamW8bit


class AdamW8bit(TorchaoAdamW8bit):
    """torchao's AdamW, whose learning rates stay plain numbers, and which is compiled on GPUs only.

    A moment with 4096 elements or more is stored as 8-bit codes, with one float32 scale for each block of `block_size`
    elements; smaller ones, and those of which the last block would be incomplete, are float32.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the learning rate as it is given."""
        learning_rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = learning_rate

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make a step."""
        # torchao multiplies with tensors. Schedules, logs and checkpoints have numbers.
        learning_rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)

        # It compiles one function for each shape. On a processor that needs a compiler of C++ and takes longer than all
        # steps of a small model.
        weight: Tensor = next(weight for group in self.param_groups for weight in group["params"])
        with torch.compiler.set_stance("force_eager" if weight.device.type == "cpu" else "default"):
            result = super().step(closure)
        for group, learning_rate in zip(self.param_groups, learning_rates, strict=True):
            group["lr"] = learning_rate
        return result
