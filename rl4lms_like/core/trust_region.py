"""Mathematics of a trust-region step, as pure functions over flat vectors (Schulman et al., arXiv 1502.05477, App. C).

    maximise  gᵀs   subject to   ½ sᵀ A s <= δ,   A = F + λI

    s = β x,   A x = g  by conjugate gradients,   β = sqrt(2δ / xᵀAx),   then backtracking on the true KL and surrogate

F is the Fisher matrix of the policy's distributions. It is never materialised: conjugate gradients only need products
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Solution(NamedTuple):
    """Approximate solution of A x = b, with `residual` = b - A x, both `[n]`."""

    x: Tensor
    residual: Tensor


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, *, max_steps: int, tolerance: float = 1e-10
) -> Solution:
    """Solve A x = b for a positive definite A, starting from x = 0.

    Args:
        product: v -> A v.
        b: `[n]`.
        max_steps: maximum number of products.
        tolerance: stop once the squared norm of the residual is below this.

    Example:
        >>> conjugate_gradient(lambda v: 2 * v, torch.tensor([2.0, 4.0]), max_steps=10).x.tolist()
        [1.0, 2.0]
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
    """Return the step s along x with ½ sᵀ A s = target_kl; 0 if x is 0.

    Example:
        >>> solution = Solution(x=torch.tensor([1.0]), residual=torch.tensor([0.0]))
        >>> largest_step(solution, torch.tensor([2.0]), target_kl=4.0).tolist()
        [2.0]
    """
    x, residual = solution
    curvature = x.dot(b - residual)
    return x * torch.sqrt(2 * target_kl / curvature) if curvature != 0 else torch.zeros_like(x)


def backtracking(shrinking_factor: float, max_tries: int) -> Iterator[float]:
    """Yield the fractions of a step that a line search tries: 1, c, c², ...

    Example:
        >>> list(backtracking(0.5, max_tries=3))
        [1.0, 0.5, 0.25]
    """
    fraction = 1.0
    for _ in range(max_tries):
        yield fraction
        fraction *= shrinking_factor


def curved(probs: Tensor, tangent: Tensor) -> Tensor:
    """Compute (diag p - p pᵀ) v, the Fisher matrix of a categorical distribution in terms of its logits, times v.

    Args:
        probs: p `[..., vocab]`.
        tangent: v `[..., vocab]`.

    Example:
        >>> curved(torch.tensor([0.5, 0.5]), torch.tensor([4.0, 0.0])).tolist()
        [1.0, -1.0]
    """
    weighted = probs * tangent
    return weighted.addcmul_(probs, weighted.sum(dim=-1, keepdim=True), value=-1)


@torch.no_grad()
def categorical_kl(logits: Tensor, new_logits: Tensor) -> Tensor:
    """Compute KL(p ‖ q) of each row from the logits of p and of q `[n, vocab]`, using two matrices of that size.

    With d the difference of the logits, the KL is E[d] + log E[exp(-d)] under p. No large numbers cancel in this form.

    Example:
        >>> round(float(categorical_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]]))), 3)
        0.12
    """
    probs, difference = logits.softmax(dim=-1)[:, None], logits - new_logits
    mean = torch.bmm(probs, difference[..., None])
    return (mean + torch.bmm(probs, difference.neg_().exp_()[..., None]).log()).view(-1)
