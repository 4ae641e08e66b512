"""Products with the Fisher matrix of a language model (arXiv 1502.05477, App. C.1).

    F v = 1/n Σ Jᵀ (diag p - p pᵀ) J v        J = ∂ logits / ∂ parameters, p = softmax(logits), over n tokens

F is the curvature of the mean KL at KL 0. J v is computed by a second derivative: Jᵀu is linear in u, so that its
gradient with respect to u, weighted with v, is J v. A product then costs one pass over the graph of Jᵀu and one over
the model's graph, for all parameters at once. It never differentiates the KL, whose gradient is 0 there.

The graph and the matrix p `[tokens, vocab]` are stored for one batch at a time. A single batch is reused for all
products; several batches are recomputed in every product, so that memory is limited to that of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.trust_region import curved


class FlatParameters:
    """Some parameters as one vector `[n]`.

    Args:
        parameters: parameters in the order of the vector.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)

    @torch.no_grad()
    def vector(self) -> Tensor:
        """Return a copy of the values."""
        return torch.cat([parameter.reshape(-1) for parameter in self.parameters])

    @torch.no_grad()
    def load(self, vector: Tensor) -> None:
        """Set the parameters to the values of a vector."""
        for parameter, values in zip(self.parameters, self.views(vector), strict=True):
            parameter.copy_(values)

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector in the shapes of the parameters."""
        views = []
        sections = vector.split([parameter.numel() for parameter in self.parameters])
        for section, parameter in zip(sections, self.parameters, strict=True):
            views.append(section.view_as(parameter))
        return views

    @contextmanager
    def at_offset(self, vector: Tensor) -> Iterator[None]:
        """Temporarily replace the values of the parameters by those of a vector, and restore them afterwards."""
        # `data` is replaced, not written to: the old tensors come back with their bits and their storage.
        data_before = [parameter.data for parameter in self.parameters]
        try:
            for parameter, values in zip(self.parameters, self.views(vector), strict=True):
                parameter.data = values
            yield
        finally:
            for parameter, values in zip(self.parameters, data_before, strict=True):
                parameter.data = values

    def gradient(self, outputs: Any, weights: Any = None, **options: Any) -> list[Tensor | None]:
        """Compute gradients of (weighted) outputs with respect to all parameters; None for unused parameters."""
        return list(torch.autograd.grad(outputs, self.parameters, weights, allow_unused=True, **options))

    def flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Concatenate gradients into one vector, with 0 in place of None."""
        sections = []
        for gradient, parameter in zip(gradients, self.parameters, strict=True):
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            sections.append(gradient.reshape(-1))
        return torch.cat(sections)


class FisherMatrix:
    """Fisher matrix over the tokens of some episodes, used as `fisher @ vector`.

    Args:
        logits_of: returns logits `[n_tokens, vocab]` of the actions of some episodes, twice differentiable.
        batches: the episodes, one batch per forward pass.
        parameters: parameters that correspond to the rows of the matrix.
        n_tokens: number of tokens of the mean; default: those of the batches.
    """

    def __init__(
        self,
        logits_of: Callable[[EpisodeBatch], Tensor],
        batches: Sequence[EpisodeBatch],
        parameters: FlatParameters,
        n_tokens: int | None = None,
    ) -> None:
        self._logits_of = logits_of
        self._batches = batches
        self._parameters = parameters
        self.n_tokens = sum(batch.n_tokens for batch in batches) if n_tokens is None else n_tokens
        self._single_product = self._product_over(batches[0]) if len(batches) == 1 else None

    def __matmul__(self, vector: Tensor) -> Tensor:
        if self._single_product is not None:
            return self._single_product(vector)

        # F is a mean over tokens, so the products of the batches add up. Each graph is freed before the next one.
        total = torch.zeros_like(vector)
        for batch in self._batches:
            total += self._product_over(batch)(vector)
        return total

    def _product_over(self, batch: EpisodeBatch) -> Callable[[Tensor], Tensor]:
        """Return the product over one batch as a function, which holds a reference to the batch's graph."""
        parameters = self._parameters
        logits = self._logits_of(batch)  # [n_tokens, vocab]
        probs = logits.detach().softmax(dim=-1)  # p

        # Jᵀu as a function of u, whose value is of no interest: an expanded 0 takes no memory. A parameter without an
        # effect on the logits has no row in J.
        u = torch.zeros((), device=logits.device, requires_grad=True).expand_as(logits)
        in_use = []
        transposed = []  # Jᵀu, in the shapes of the parameters
        for index, product_with_u in enumerate(parameters.gradient(logits, u, create_graph=True)):
            if product_with_u is not None:
                in_use.append(index)
                transposed.append(product_with_u)
        edge = get_gradient_edge(logits)  # replaces the logits, so that they can be freed
        scale = 1 / self.n_tokens

        def product(vector: Tensor) -> Tensor:
            # J v = d(vᵀ Jᵀu) / du, [n_tokens, vocab]
            views = parameters.views(vector)
            (tangent,) = torch.autograd.grad(transposed, u, [views[index] for index in in_use], retain_graph=True)

            # F v = 1/n Jᵀ (diag p - p pᵀ) J v
            gradients = parameters.gradient(edge, curved(probs, tangent).mul_(scale), retain_graph=True)
            return parameters.flat(gradients)

        return product
