"""AdamW with moments in 8 bits, by torchao, also of weights that are split over processes.

Only imported for runs with `optimizer: {id: adamw_8bit}`, and for runs on given texts with `optim: adamw_torch_8bit`.

    moment of a weight     in memory: `OptimState8bit`                    in a state: plain or split tensors
    [n, ...] float32       codes [n, ...] uint8                           `exp_avg.codes`  [n, ...]
                           scale [n_blocks] float32                       `exp_avg.scale`  [n / rows, blocks of rows]
                           qmap [256] float32, the values of the codes    `exp_avg.qmap`   [256]

`rows` is the smallest number of rows with whole blocks (`rows_of_blocks`). So a process that has rows of the codes has
as many rows of the scales as belong to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from rl4lms_like.policies.sharding import is_split, n_processes_of, own_part, rows_here, rows_of_blocks, split_as


class AdamW8bit(TorchaoAdamW8bit):
    """torchao's AdamW, whose learning rates stay plain numbers, and which is compiled on GPUs only.

    A moment with 4096 elements or more is stored as 8-bit codes, with one float32 scale for each block of `block_size`
    elements. It is float32 if its blocks would not be whole: the last one, or one in two processes. Its state has plain
    tensors, and tensors that are split as the weights are.
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

    def _new_buffer(self, weight: Tensor, signed: bool) -> Tensor:
        """Return a moment of zeros. torchao counts the elements of this process, so that blocks could be others."""
        zeros = torch.zeros_like(own_part(weight))
        if self._shape_of_scales(weight) is not None:
            zeros = OptimState8bit.zeros(zeros.shape, signed, self.block_size, zeros.device)
        return split_as(weight, zeros, weight.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; a moment in 8 bits is `<name>.codes`, `<name>.scale` and `<name>.qmap`."""
        state: dict[str, Any] = super().state_dict()
        state["state"] = {index: self._taken_apart(entries) for index, entries in state["state"].items()}
        return state

    def _taken_apart(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a weight without torchao's type."""
        plain: dict[str, Any] = {}
        for name, entry in entries.items():
            moment: Any = own_part(entry) if isinstance(entry, Tensor) else entry
            if not isinstance(moment, OptimState8bit):
                plain[name] = entry
                continue
            blocks = self._shape_of_scales(entry)
            assert blocks is not None
            plain[f"{name}.codes"] = split_as(entry, moment.codes, entry.shape)
            plain[f"{name}.scale"] = split_as(entry, moment.scale.view(-1, blocks[1]), blocks)
            plain[f"{name}.qmap"] = moment.qmap
        return plain

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state. Its codes are split as the weights are; its scales may be whole, and have any shape.

        If the codes were stored by another number of processes, and a block would now be in two of them, the moment is
        float32 from here on. One that was float32 stays so. No value changes.
        """
        weights: list[Tensor] = []
        for group in self.param_groups:
            weights += group["params"]
        entries = {index: self._joined(of_weight, weights[index]) for index, of_weight in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": entries})

    def _joined(self, entries: Mapping[str, Any], weight: Tensor) -> dict[str, Any]:
        """Return the entries of a weight, with moments of torchao's type."""
        joined = dict(entries)
        for name in [key.removesuffix(".codes") for key in entries if key.endswith(".codes")]:
            codes, scale, qmap = (joined.pop(f"{name}.{part}") for part in ("codes", "scale", "qmap"))
            own_codes = own_part(codes)
            scale, qmap = scale.to(own_codes.device), qmap.to(own_codes.device)  # files are read to main memory

            # Blocks that would now be in two processes: the moment is float32 from here on.
            blocks = self._shape_of_scales(weight)
            moment: Tensor
            if blocks is None:
                # Each number is the value of its code times the scale of its block.
                first = rows_here(weight, weight.shape[0])[0] * math.prod(weight.shape[1:])
                numbers = torch.arange(first, first + own_codes.numel(), device=codes.device)
                scales = scale.flatten()[numbers // self.block_size]
                moment = qmap[own_codes.long()] * scales.view(own_codes.shape)

            # Otherwise codes and the scales of their blocks, which are whole in files of earlier versions.
            else:
                start, end = rows_here(weight, blocks[0])
                own_scale = own_part(scale) if is_split(scale) else scale.view(blocks)[start:end]
                is_signed = bool(qmap.min() < 0)  # of the values of the codes: squares have no negative ones
                moment = OptimState8bit(own_codes, own_scale.flatten(), qmap, is_signed, dtype=torch.float32)
            joined[name] = split_as(codes, moment, codes.shape)
        return joined

    def _shape_of_scales(self, weight: Tensor) -> tuple[int, int] | None:
        """Return the shape of the scales of a weight's moments; None if these are float32."""
        n_rows = rows_of_blocks(weight.shape, self.block_size, n_processes_of(weight))
        if n_rows is None:
            return None
        return weight.shape[0] // n_rows, n_rows * math.prod(weight.shape[1:]) // self.block_size
