"""Check at construction of a model with a quantized base: the gradient of its adapters is that of its outputs.

A kernel whose forward pass is right can still lose the gradient of its input. No comparison of log-probs shows it:
adapters of the last layers learn, all others do not. Derivatives along random directions d are therefore compared with
differences of forward passes,

    <∇f(θ), d>  =  (f(θ + h d) - f(θ - h d)) / 2h        f: mean of random projections of the probe's hidden states

A gradient of which parts are missing differs in every direction. θ are adapters moved away from their first values,
where B = 0 and the gradient of A is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.policies.quantized_layers import QuantizedLinear
from rl4lms_like.policies.sharding import is_split, like, whole
from rl4lms_like.policies.teacher_forcing import EpisodeReader
from rl4lms_like.system.errors import ModelError

TOLERANCE = 0.1
"""Largest relative error of the derivatives. Steps and rounding give up to 0.02 (ReLU has the most), a gradient that is
lost 0.7 to 2."""
N_DIRECTIONS = 4
MOVED = 0.02
"""Standard deviation of the noise that moves the adapters."""
STEP = 5e-4
"""The step h."""


def check_gradients(reader: EpisodeReader, name: str, episodes: EpisodeBatch) -> None:
    """Check the gradient of all trained weights below the head of a model with quantized layers; it is not changed.

    Args:
        reader: reader of the model.
        name: name of the model in the message.
        episodes: of the probe.

    Raises:
        ModelError: the gradient differs from finite differences.
    """
    # Not their norm, which is a constant after a normalization layer.
    with torch.no_grad():
        states = reader.states(episodes)  # [n_tokens, d]
    projection = torch.randn(states.shape, generator=torch.Generator().manual_seed(1)).to(states.device)

    def mean_projection() -> Tensor:
        return (reader.states(episodes) * projection).sum(dim=1).mean()

    # Split weights are changed in parts, which are not read while whole ones of an earlier pass exist.
    def reshard() -> None:
        if reader.network is not None:
            reader.network.reshard()

    error = gradient_error(reader.model, mean_projection, before_change=reshard)
    if error <= TOLERANCE:
        return

    # Single layers can only be tried with whole weights.
    broken = broken_layers(reader.model) if reader.network is None else []
    layers = f", which {broken[0]} and {len(broken) - 1} other layers do not compute" if broken else ""
    raise ModelError(
        f"{type(reader.model).__name__} ({name!r}): the gradient of the adapters differs by {error:.2g} of its size "
        f"from finite differences of the hidden states, and rounding explains at most {TOLERANCE}. On this machine, a "
        f"kernel of quantized layers loses the gradient of its input{layers}: remove quantization, or use another id"
    )


def gradient_error(
    model: nn.Module, objective: Callable[[], Tensor], *, before_change: Callable[[], None] = lambda: None
) -> float:
    """Return the largest difference between derivatives and differences of values, relative to their size.

    Args:
        model: its trained weights are moved and restored; they have no gradients yet. If they are split over processes,
            all of these call this function together.
        objective: number that depends on the weights, in float32.
        before_change: called before weights are changed.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    n_processes = torch.distributed.get_world_size() if any(map(is_split, weights)) else 1

    # Random numbers of its own: the check must not change those of the run.
    generator = torch.Generator().manual_seed(0)

    def noise() -> list[Tensor]:
        return [torch.randn(weight.shape, generator=generator).to(weight.device) for weight in weights]

    @contextmanager
    def moved(direction: Sequence[Tensor], step: float) -> Iterator[None]:
        """Add a multiple of a direction to the weights; afterwards they have the same bits as before."""
        before_change()
        values = [weight.detach().clone() for weight in weights]
        try:
            for weight, part in zip(weights, direction, strict=True):
                weight.data.add_(like(weight, part), alpha=step)
            yield
        finally:
            before_change()
            for weight, value in zip(weights, values, strict=True):
                weight.data.copy_(value)

    derivatives = []
    differences = []
    with moved(noise(), MOVED):
        objective().backward()
        # Each process computes the same number, and split gradients are the sum over all.
        gradients = [None if weight.grad is None else whole(weight.grad) / n_processes for weight in weights]
        for _ in range(N_DIRECTIONS):
            direction = noise()
            derivative = 0.0
            for gradient, part in zip(gradients, direction, strict=True):
                if gradient is not None:
                    derivative += float((gradient * part).sum())
            derivatives.append(derivative)

            with torch.no_grad():
                with moved(direction, STEP):
                    above = float(objective())
                with moved(direction, -STEP):
                    below = float(objective())
            differences.append((above - below) / (2 * STEP))
    for weight in weights:
        weight.grad = None

    # Relative to all directions: the derivative along one of them may be near 0. NaN is an error too.
    errors = [abs(derivative - difference) for derivative, difference in zip(derivatives, differences, strict=True)]
    size = max(_root_mean_square(derivatives), _root_mean_square(differences))
    error = max(errors) / size if size else math.inf
    return math.inf if math.isnan(error) else error


def broken_layers(model: nn.Module) -> list[str]:
    """Return the names of the quantized layers whose gradient of the input is not that of their weight."""
    broken = []
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLinear):
            continue
        weight = layer.dequantized()
        inputs = torch.ones(2, 3, layer.in_features, device=weight.device, requires_grad=True)
        output = layer(inputs)
        if not output.requires_grad:
            broken.append(name)
            continue
        (gradient,) = torch.autograd.grad(output.sum(), inputs, allow_unused=True)
        expected = weight.sum(dim=0).expand_as(inputs)  # for a gradient of 1 of each output
        tolerance = 1e-3 * float(expected.abs().max())
        if gradient is None or not torch.allclose(gradient, expected, rtol=1e-2, atol=tolerance):
            broken.append(name)
    return broken


def _root_mean_square(numbers: Sequence[float]) -> float:
    return math.sqrt(sum(number**2 for number in numbers) / len(numbers))
