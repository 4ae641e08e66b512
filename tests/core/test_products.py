"""Products of many rows: torch's own result up to rounding, with first and second derivatives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from rl4lms_like.core import products
from rl4lms_like.core.products import linear

needs_onednn = pytest.mark.skipif(products.why_mkl() is not None, reason=str(products.why_mkl()))

ROWS, D, M = 260, 520, 530


def tensors(shape=(ROWS, D), is_transposed=False):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(D, M, generator=generator).t() if is_transposed else torch.randn(M, D, generator=generator)
    made = (torch.randn(shape, generator=generator), weight, torch.randn(M, generator=generator))
    return [each.requires_grad_() for each in made]


def relative(actual, expected):
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


@needs_onednn
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(ROWS, D), (2, ROWS, D)])
def test_product_and_gradients_are_those_in_float64(shape, is_transposed):
    x, weight, bias = tensors(shape, is_transposed)
    product = linear(x, weight, bias)
    assert type(product.grad_fn).__name__ == "_LinearBackward"
    factor = torch.randn_like(product)
    gradients = torch.autograd.grad((product * factor).sum(), [x, weight, bias])

    exact = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    expected = F.linear(*exact)
    assert relative(product, expected) < 1e-6
    for gradient, correct in zip(gradients, torch.autograd.grad((expected * factor).sum(), exact), strict=True):
        assert relative(gradient, correct) < 1e-6
    assert gradients[1].stride() == weight.stride()


@needs_onednn
@pytest.mark.parametrize("n_rows", [1, 4, 33])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_product_with_a_packed_weight_is_that_in_float64(n_rows, is_transposed):
    x, weight, bias = tensors((2, n_rows, D), is_transposed)
    packed = products.packed(weight)
    expected = F.linear(*(each.detach().double() for each in (x, weight, bias)))
    with torch.no_grad():
        assert relative(products.product_with_packed(x, packed, bias), expected) < 1e-6
        in_bfloat16 = products.product_with_packed(x.bfloat16(), products.packed(weight.bfloat16()))
    exact = F.linear(x.detach().bfloat16().double(), weight.detach().bfloat16().double())
    assert relative(in_bfloat16, exact) < 3e-3, "only the result is rounded"


@needs_onednn
def test_second_derivatives_are_those_of_torch():
    def second(function):
        x, weight, _ = tensors()
        (gradient,) = torch.autograd.grad(function(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, weight])

    for actual, expected in zip(second(linear), second(F.linear), strict=True):
        assert relative(actual, expected.double()) < 1e-5


@needs_onednn
def test_without_gradients_no_graph_is_stored():
    x, weight, bias = tensors()
    with torch.no_grad():
        assert linear(x, weight, bias).grad_fn is None


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((torch.ones(255, 1024), torch.ones(1024, 1024)), id="few rows"),
        pytest.param((torch.ones(512, 511), torch.ones(4096, 511)), id="narrow weight"),
        pytest.param((torch.ones(512, 4096), torch.ones(511, 4096)), id="short weight"),
        pytest.param((torch.ones(512, 1024).double(), torch.ones(1024, 1024).double()), id="float64"),
        pytest.param((torch.ones(512, 1024).bfloat16(), torch.ones(1024, 1024).bfloat16()), id="bfloat16"),
    ],
)
def test_all_others_are_torchs_own(arguments):
    x, weight = arguments
    product = linear(x.requires_grad_(), weight)
    assert type(product.grad_fn).__name__ != "_LinearBackward"
    assert torch.equal(product, F.linear(x, weight))


def test_autocast_keeps_its_dtype():
    x, weight, _ = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
