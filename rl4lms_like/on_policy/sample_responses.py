"""Sample responses of the last rollout with their rewards, for the tables of tracking services.

The rewards are those of the rollout: the reward function is not called again, since it may be paid or have a state.
"""

from __future__ import annotations

from typing import Any

import torch

from rl4lms_like.core.episodes import real_ids
from rl4lms_like.on_policy.assemble import AssembledRun
from rl4lms_like.rollouts.buffer import EpisodeBuffer

N_RESPONSES = 16
"""Number of responses in a table."""


def sample_responses(run: AssembledRun) -> list[dict[str, Any]]:
    """Return the first responses of the last rollout: `sample_id`, `prompt_text`, `generated_text`, `reward`.

    The list is empty before the first rollout, and after a run was resumed until its next one.
    """
    buffer = getattr(run.algorithm, "rollout_buffer", None)
    if not isinstance(buffer, EpisodeBuffer) or buffer.episodes is None:
        return []
    infos = run.algorithm.collector.episode_infos[:N_RESPONSES]
    first = buffer.episodes.select(torch.arange(len(infos), device=buffer.episodes.response_ids.device))
    prompts = real_ids(first.prompt_ids, first.prompt_mask)
    responses = real_ids(first.response_ids, first.response_mask)
    texts = run.continuations.texts(prompts, responses)

    rows = []
    for info, prompt_ids, text in zip(infos, prompts, texts, strict=True):
        row = {"sample_id": info["sample_id"], "prompt_text": run.continuations.decode(prompt_ids)}
        rows.append({**row, "generated_text": text, "reward": info["r"]})
    return rows
