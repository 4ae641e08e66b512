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

    Examples:
        >>> conjugate_gradient(lambda v: 2 * v, torch.tensor([2.0, 4.0]), max_steps=10).x.tolist()
        [1.0, 2.0]
    """
    # x_0 = 0, so r_0 = b and the first direction p_0 is b.
    x = torch.zeros_like(b)
    residual = b.clone()  # r = b - A x, kept up to date instead of computed again: one product per step
    direction = b  # p
    squared_norm = b.dot(b)  # rᵀr
    for _ in range(max_steps):
        # Waits for the device, once per product: a product is a pass over many episodes.
        if squared_norm < tolerance:
            break

        # alpha = rᵀr / pᵀAp;  x += alpha p;  r -= alpha A p
        image = product(direction)
        alpha = squared_norm / direction.dot(image)
        x += alpha * direction
        residual -= alpha * image

        # p = r + (rᵀr / that of the step before) p, conjugate to all directions so far: pᵀA p' = 0
        squared_norm_before = squared_norm
        squared_norm = residual.dot(residual)
        direction = residual + (squared_norm / squared_norm_before) * direction
    return Solution(x, residual)


def largest_step(solution: Solution, b: Tensor, target_kl: float) -> Tensor:
    """Return the step s along x with ½ sᵀ A s = target_kl; 0 if x is 0.

    Examples:
        >>> solution = Solution(x=torch.tensor([1.0]), residual=torch.tensor([0.0]))
        >>> largest_step(solution, torch.tensor([2.0]), target_kl=4.0).tolist()
        [2.0]
    """
    # s = x sqrt(2 delta / xᵀAx). A x is b - residual, also if the solution is not exact: no product is needed.
    x, residual = solution
    curvature = x.dot(b - residual)  # xᵀAx
    if curvature == 0:
        return torch.zeros_like(x)
    return x * torch.sqrt(2 * target_kl / curvature)


def backtracking(shrinking_factor: float, max_tries: int) -> Iterator[float]:
    """Yield the fractions of a step that a line search tries: 1, c, c², ...

    Examples:
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

    Examples:
        >>> curved(torch.tensor([0.5, 0.5]), torch.tensor([4.0, 0.0])).tolist()
        [1.0, -1.0]
    """
    # p ∘ v - p (pᵀv): the matrix `[vocab, vocab]` of each row is never there
    weighted = probs * tangent
    return weighted.addcmul_(probs, weighted.sum(dim=-1, keepdim=True), value=-1)


@torch.no_grad()
def categorical_kl(logits: Tensor, new_logits: Tensor) -> Tensor:
    """Compute KL(p ‖ q) of each row from the logits of p and of q `[n, vocab]`, using two matrices of that size.

    With d the difference of the logits, the KL is E[d] + log E[exp(-d)] under p. No large numbers cancel in this form.

    Examples:
        >>> round(float(categorical_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]]))), 3)
        0.12
    """
    probs = logits.softmax(dim=-1)[:, None]  # p, [n, 1, vocab]
    difference = logits - new_logits  # d, [n, vocab]

    # KL = Σ p (log p - log q) = E[d] - log Z_p + log Z_q, and Z_q / Z_p = E[exp(-d)]. The mean comes first: the second
    # term is computed in place of d.
    mean = torch.bmm(probs, difference[..., None])  # E[d], [n, 1, 1]
    return (mean + torch.bmm(probs, difference.neg_().exp_()[..., None]).log()).view(-1)
