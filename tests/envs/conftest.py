"""Samples with prompts of many lengths, and random episodes that end as an environment would end them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.sample import Sample

MAX_EPISODE_LENGTH = 6
MAX_PROMPT_LENGTH = 8


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    prompts = ["", "a", "The film", "Count with me: 0 1 2 3 4 5 6 7 8 9 10 11 12", "Nobody knew, and nobody asked!"]
    return [
        Sample(f"sample_{index}", prompt, [f"reference {index}"] * (index % 3), {"index": index} if index % 2 else None)
        for index, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="session")
def batch_of():
    """Makes an `EpisodeBatch` of lists of response ids; its padding is garbage on purpose."""

    def make(responses: list[list[int]], eos_token_id: int = 1) -> EpisodeBatch:
        width = max(map(len, responses))
        mask = torch.tensor([[place < len(row) for place in range(width)] for row in responses])
        ids = torch.tensor([row + [7] * (width - len(row)) for row in responses])
        prompts = torch.zeros((len(responses), 1), dtype=torch.int64)
        ended = torch.tensor([row[-1] == eos_token_id for row in responses])
        return EpisodeBatch(prompts, prompts.bool(), ids, mask, ended)

    return make


@pytest.fixture(scope="session")
def random_responses():
    """Draws `n` responses that end with their first end token or at the length limit."""

    def draw(n: int, seed: int, n_ids: int, length: int = MAX_EPISODE_LENGTH, eos_token_id: int = 1) -> list[list[int]]:
        generator = np.random.default_rng(seed)
        rows = generator.integers(0, n_ids, (n, length))
        rows[generator.random((n, length)) < 0.2] = eos_token_id
        return [row[: row.index(eos_token_id) + 1] if eos_token_id in row else row for row in rows.tolist()]

    return draw
