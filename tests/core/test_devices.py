"""Copies of tensors to a device."""

import pytest
import torch

from rl4lms_like.core.devices import to_device


class Recorded:
    """Stands for a tensor in main memory; a machine for tests has no GPU."""

    dtype = torch.float64

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.calls: list[tuple] = []

    def to(self, *args: object, **options: object) -> "Recorded":
        self.calls.append(("to", *args, *options.items()))
        return self

    def pin_memory(self) -> "Recorded":
        self.calls.append(("pin_memory",))
        return self


def test_a_gpu_copies_from_locked_memory_without_a_wait():
    tensor = Recorded()
    to_device(tensor, torch.device("cuda:1"), torch.float32)
    assert tensor.calls == [
        ("to", torch.float32),
        ("pin_memory",),
        ("to", torch.device("cuda:1"), ("non_blocking", True)),
    ]


@pytest.mark.parametrize(("source", "target"), [("cpu", "cpu"), ("cpu", "mps"), ("cuda", "cpu"), ("cuda:0", "cuda:1")])
def test_all_other_copies_are_plain(source, target):
    tensor = Recorded(source)
    to_device(tensor, torch.device(target))
    assert tensor.calls == [("to", torch.device(target), torch.float64)]


def test_on_the_cpu_nothing_is_copied():
    tensor = torch.ones(3)
    assert to_device(tensor, torch.device("cpu")) is tensor
