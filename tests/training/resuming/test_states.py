"""The states of optimizers and random generators, taken out and put back."""

from __future__ import annotations

import pytest
import torch

from rl4lms_like.training.resuming import states


class Accelerator:
    """torch's module for a kind of device: one generator each."""

    def __init__(self, n_devices: int) -> None:
        self.generators = [torch.Generator().manual_seed(index) for index in range(n_devices)]

    def get_rng_state(self, device: int = 0) -> torch.Tensor:
        return self.generators[device].get_state()

    def set_rng_state(self, state: torch.Tensor, device: int = 0) -> None:
        self.generators[device].set_state(state)

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized  # asked of `torch.backends.mps`

    def draws(self) -> list[float]:
        return [torch.rand(1, generator=generator).item() for generator in self.generators]


class SeveralDevices(Accelerator):
    """One that can have several devices, as CUDA; Apple's cannot."""

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.generators]


def use(device: Accelerator, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda name: device if name == kind else original(name))
    if kind == "mps":
        monkeypatch.setattr(torch, "mps", device)
        monkeypatch.setattr(torch.backends, "mps", device)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_the_generators_of_an_accelerator_go_on(kind, monkeypatch):
    device = Accelerator(1) if kind == "mps" else SeveralDevices(2)
    use(device, kind, monkeypatch)
    tensors, numbers = states.random_state()
    expected = device.draws()
    states.load_random(numbers, {name.removeprefix("random."): tensor for name, tensor in tensors.items()})
    assert device.draws() == expected
    assert {name for name in tensors if kind in name} == {
        f"random.{kind}.{index}" for index in range(len(device.generators))
    }


def test_a_state_of_another_machine_leaves_the_accelerator_as_it_is(monkeypatch):
    tensors, numbers = states.random_state()
    device = SeveralDevices(1)
    use(device, "cuda", monkeypatch)
    states.load_random(numbers, {name.removeprefix("random."): tensor for name, tensor in tensors.items()})
    assert device.draws() == SeveralDevices(1).draws()


class Wrapping(torch.optim.AdamW):
    """Has its moments in a mapping of their own, as the optimizers of bitsandbytes, and loads them with and without."""

    def state_dict(self):
        state = super().state_dict()
        for index, entries in state["state"].items():
            moments = {name: entries[name] for name in ("exp_avg", "exp_avg_sq")}
            state["state"][index] = {"step": entries["step"], "__bnb_optimizer_quant_state__": moments}
        return state


def test_moments_in_a_mapping_of_their_own_are_saved_and_restored():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Wrapping([weight])
    weight.grad = torch.tensor([1.0, 2.0, 3.0])
    optimizer.step()
    expected = torch.optim.AdamW.state_dict(optimizer)["state"][0]

    moments, numbers = states.optimizer_state(optimizer)
    assert set(moments) == {"optimizer.0.step", "optimizer.0.exp_avg", "optimizer.0.exp_avg_sq"}
    other = Wrapping([torch.nn.Parameter(torch.ones(3))])
    states.load_optimizer(other, numbers, {name.removeprefix("optimizer."): value for name, value in moments.items()})
    restored = torch.optim.AdamW.state_dict(other)["state"][0]
    assert restored.keys() == expected.keys()
    assert all(torch.equal(restored[name], value) for name, value in expected.items())
