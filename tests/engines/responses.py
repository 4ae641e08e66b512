"""Responses of a policy with an engine, and changes of its weights."""

from __future__ import annotations

import torch


def generate(policy, n=6, seed=3, **arguments):
    """Generate responses to one prompt, in the first row without its first three tokens."""
    ids = torch.randint(2, 250, (1, 5), generator=torch.Generator().manual_seed(0)).repeat(n, 1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    arguments = {"eos_token_ids": [1], "max_new_tokens": 8, "record_log_prob": True, **arguments}
    return policy.generate(ids, mask, seed=seed, **arguments)


def gaps(policy, episodes):
    """Compare the engine's log-probs of a rollout with the policy's."""
    return policy.engine.external.gaps(episodes, policy.score(episodes).log_prob)


@torch.no_grad()
def move(policy, by=0.05):
    """Change the weights, as an update does."""
    generator = torch.Generator().manual_seed(1)
    for weight in policy.policy_model.parameters():
        if weight.requires_grad:
            weight += by * torch.randn(weight.shape, generator=generator)
