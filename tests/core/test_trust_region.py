"""A trust-region step: conjugate gradients solve, the step has the KL it should, the search shortens it."""

import pytest
import torch

from rl4lms_like.core.trust_region import backtracking, categorical_kl, conjugate_gradient, curved, largest_step


def positive_definite(n, seed=0):
    root = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T + 0.1 * torch.eye(n, dtype=torch.float64)


def test_as_many_steps_as_unknowns_solve_the_system():
    matrix, b = positive_definite(6), torch.arange(1.0, 7.0, dtype=torch.float64)
    x, residual = conjugate_gradient(lambda v: matrix @ v, b, max_steps=6)
    torch.testing.assert_close(x, torch.linalg.solve(matrix, b))
    assert float(residual.norm()) < 1e-6


@pytest.mark.parametrize("max_steps", [0, 1, 3])
def test_fewer_steps_are_an_approximation_that_knows_its_residual(max_steps):
    matrix, b, products = positive_definite(6), torch.ones(6, dtype=torch.float64), []
    x, residual = conjugate_gradient(lambda v: products.append(v) or matrix @ v, b, max_steps=max_steps)
    assert len(products) == max_steps
    torch.testing.assert_close(residual, b - matrix @ x)


def test_without_a_gradient_there_is_no_step():
    solution = conjugate_gradient(lambda v: pytest.fail("no product is needed"), torch.zeros(3), max_steps=5)
    assert not largest_step(solution, torch.zeros(3), 0.01).any()


@pytest.mark.parametrize("max_steps", [1, 2, 6])
def test_the_step_is_as_long_as_the_quadratic_model_of_the_kl_allows(max_steps):
    matrix, b = positive_definite(6, seed=1), torch.arange(1.0, 7.0, dtype=torch.float64)
    step = largest_step(conjugate_gradient(lambda v: matrix @ v, b, max_steps=max_steps), b, 0.01)
    assert float(step @ matrix @ step) / 2 == pytest.approx(0.01)
    assert float(step @ b) > 0


def test_the_line_search_shortens_geometrically():
    assert list(backtracking(0.5, 4)) == [1.0, 0.5, 0.25, 0.125]


def test_curvature_and_divergence_of_categorical_distributions():
    logits, other, tangent = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs = logits.softmax(-1)
    for p, v, got in zip(probs, tangent, curved(probs, tangent), strict=True):
        torch.testing.assert_close(got, (p.diag() - p.outer(p)) @ v)
    distributions = torch.distributions.Categorical(logits=logits), torch.distributions.Categorical(logits=other)
    torch.testing.assert_close(categorical_kl(logits, other), torch.distributions.kl_divergence(*distributions))
