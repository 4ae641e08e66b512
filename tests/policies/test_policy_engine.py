"""Responses of external engines whose tokens the policy does not have."""

from __future__ import annotations

import pytest
import torch

from rl4lms_like.policies.policy_engine import PolicyEngine
from rl4lms_like.system.errors import EngineError
from tests.builders import episodes_of_lengths
from tests.engines.constant import Constant


def responses(token):
    prompts = torch.ones(2, 4).long()
    return Constant(token).generate(prompts, prompts)


@pytest.mark.parametrize("token", [-1, 50, 10**6])
def test_tokens_of_an_external_engine_that_the_policy_does_not_have_are_refused(token):
    with pytest.raises(EngineError, match=rf"returned ids of tokens from {token} to {token}; the policy has 50 tokens"):
        PolicyEngine(Constant(token)).check_ids(responses(token), 50)


@pytest.mark.parametrize("token", [0, 49])
def test_tokens_of_the_policy_are_accepted(token):
    PolicyEngine(Constant(token)).check_ids(responses(token), 50)


@pytest.mark.parametrize("external", [None, Constant(7)], ids=["own model", "external"])
def test_responses_without_tokens_have_none_that_the_policy_lacks(external):
    episodes = responses(7)
    episodes.response_mask[:] = False
    PolicyEngine(external).check_ids(episodes, 50)


def test_padding_after_a_response_is_none_of_its_tokens():
    episodes = episodes_of_lengths([2, 4])
    episodes.response_ids[~episodes.response_mask] = -100
    PolicyEngine(Constant(7)).check_ids(episodes, 50)
