"""All estimators of the KL are rows of one table, which says where each may be used."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from rl4lms_like.core.kl_estimators import KL_ESTIMATORS, Estimator, Placement, estimator_error
from rl4lms_like.core.losses import kl_estimate
from rl4lms_like.rollouts.kl import make_kl_controller

FITS = {
    "reward": {"k1", "k2", "k3"},
    "advantage": {"k1"},
    "loss": {"k2", "k3", "top_k", "full"},
}


def test_the_table_has_the_names_of_the_type():
    assert set(KL_ESTIMATORS) == set(get_args(Estimator))
    assert set(FITS) == set(get_args(Placement))


@pytest.mark.parametrize("placement", FITS)
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_an_estimator_is_refused_where_its_gradient_is_not_that_of_the_kl(name, placement):
    error = estimator_error(placement, name)
    assert (error is None) == (name in FITS[placement])
    if error is None:
        assert make_kl_controller(0.1, estimator=name, placement=placement).estimator == name
    else:
        with pytest.raises(ValueError, match=name):
            make_kl_controller(0.1, estimator=name, placement=placement)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"k4 .*k1, k2, k3, top_k, full"):
        make_kl_controller(0.1, estimator="k4")
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize("name", [name for name, row in KL_ESTIMATORS.items() if row.of_samples is not None])
def test_the_estimate_is_0_where_policy_and_reference_agree(name):
    log_prob = torch.tensor([-0.5, -3.0])
    assert torch.equal(kl_estimate(log_prob, log_prob, name), torch.zeros(2))
