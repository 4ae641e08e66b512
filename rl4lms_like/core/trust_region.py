"""The mathematics of a trust-region step. Pure functions over flat vectors (Schulman et al., arXiv 1502.05477, App. C).

    maximise  gᵀs   subject to   ½ sᵀ A s <= δ,   A = F + λI

    s = β x,   A x = g  by conjugate gradients,   β = sqrt(2δ / xᵀAx),   then shorter until the real KL and gain agree

F is the Fisher matrix of the policy's distributions. It is never made: conjugate gradients ask for products with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Solution(NamedTuple):
    """An approximate solution of A x = b, with `residual` = b - A x, both `[n]`."""

    x: Tensor
    residual: Tensor


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, *, max_steps: int, tolerance: float = 1e-10
) -> Solution:
    """Solves A x = b for a positive definite A, from x = 0.

    Args:
        product: v -> A v.
        b: `[n]`.
        max_steps: products at most.
        tolerance: stop once the residual's squared length is below.
    """
    x, residual = torch.zeros_like(b), b.clone()
    direction, length = b, b.dot(b)
    for _ in range(max_steps):
        if length < tolerance:
            break
        image = product(direction)
        alpha = length / direction.dot(image)
        x += alpha * direction
        residual -= alpha * image
        before, length = length, residual.dot(residual)
        direction = residual + (length / before) * direction
    return Solution(x, residual)


def largest_step(solution: Solution, b: Tensor, target_kl: float) -> Tensor:
    """The step s along x with ½ sᵀ A s = target_kl; 0 where x is 0."""
    x, residual = solution
    curvature = x.dot(b - residual)
    return x * torch.sqrt(2 * target_kl / curvature) if curvature != 0 else torch.zeros_like(x)


def backtracking(shrinking_factor: float, max_tries: int) -> Iterator[float]:
    """The shares of a step that a line search tries: 1, c, c², ..."""
    share = 1.0
    for _ in range(max_tries):
        yield share
        share *= shrinking_factor


def curved(probs: Tensor, tangent: Tensor) -> Tensor:
    """(diag p - p pᵀ) v: the Fisher matrix of a categorical distribution, by its logits, times v.

    Args:
        probs: p `[..., vocab]`.
        tangent: v `[..., vocab]`.
    """
    weighted = probs * tangent
    return weighted.addcmul_(probs, weighted.sum(dim=-1, keepdim=True), value=-1)


@torch.no_grad()
def categorical_kl(logits: Tensor, new_logits: Tensor) -> Tensor:
    """KL(p ‖ q) of each row, from the logits of p and of q `[n, vocab]`, in two matrices of that size.

    With d the difference of the logits it is E[d] + log E[exp(-d)] under p: no large numbers that cancel.
    """
    probs, difference = logits.softmax(dim=-1)[:, None], logits - new_logits
    mean = torch.bmm(probs, difference[..., None])
    return (mean + torch.bmm(probs, difference.neg_().exp_()[..., None]).log()).view(-1)
