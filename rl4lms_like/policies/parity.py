"""The check every policy passes when it is built: what it samples with is what is trained.

The first ratio of an update is 1 whenever two scorings agree with each other, also when both are wrong. Only the
comparison with the logits that `generate` itself saw tells; so a family nobody has tried fails here, loudly.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.errors import ParityError
from rl4lms_like.policies.generation import plain_generation, seeded
from rl4lms_like.policies.teacher_forcing import EpisodeReader

TOLERANCE = 1e-3
"""Largest difference in nats, in float32. Kernels of real checkpoints differ by about 1e-5, mistakes by 0.1 to 100."""

TOLERANCE_BFLOAT16 = 0.1
"""The same for attention kernels that know no float32."""

PROMPT_LENGTHS = (2, 5)
RESPONSE_LENGTH = 4


def probe_episodes(vocab_size: int, prompt_side: Literal["left", "right"]) -> EpisodeBatch:
    """Two short random episodes with prompts of unequal length."""
    generator = torch.Generator().manual_seed(0)
    width = max(PROMPT_LENGTHS)
    prompt_ids = torch.randint(0, vocab_size, (len(PROMPT_LENGTHS), width), generator=generator)
    lengths = torch.tensor(PROMPT_LENGTHS)[:, None]
    columns = torch.arange(width)
    mask = columns >= width - lengths if prompt_side == "left" else columns < lengths
    response_ids = torch.randint(0, vocab_size, (len(PROMPT_LENGTHS), RESPONSE_LENGTH), generator=generator)
    response_mask = torch.ones_like(response_ids).bool()
    return EpisodeBatch(prompt_ids, mask, response_ids, response_mask, response_mask[:, 0], prompt_side=prompt_side)


@torch.no_grad()
def parity_gap(reader: EpisodeReader, prompt_ids: Tensor, prompt_mask: Tensor, *, max_new_tokens: int) -> float:
    """Largest difference between teacher-forced log-probs and the raw logits of `generate`, in nats.

    Args:
        reader: a language model, its head probed, in evaluation mode.
        prompt_ids: `[n, prompt_len]`, padded on the side that the family wants.
        prompt_mask: `[n, prompt_len]`, bool.
        max_new_tokens: length of the responses; nothing ends them earlier.
    """
    device = prompt_ids.device
    model: Any = reader.model
    with plain_generation(model), seeded(0, device):
        output = model.generate(
            input_ids=prompt_ids,
            attention_mask=prompt_mask.long(),
            do_sample=True,
            top_k=0,
            max_new_tokens=max_new_tokens,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    response_ids = output.sequences[:, 1 if reader.is_encoder_decoder else prompt_ids.shape[1] :]
    everything = torch.ones_like(response_ids).bool()
    episodes = EpisodeBatch(
        prompt_ids, prompt_mask, response_ids, everything, ~everything[:, 0], prompt_side=reader.prompt_side
    )
    raw = torch.stack(output.logits, dim=1).float().log_softmax(dim=-1)
    sampled = raw.gather(2, response_ids[:, :, None]).squeeze(2)
    log_prob = reader.scores(episodes, logits_budget=sys.maxsize).log_prob
    return float((episodes.pad(log_prob) - sampled).abs().max())


def check_parity(reader: EpisodeReader, name: str, *, in_bfloat16: bool = False) -> float:
    """Measures `parity_gap` on two short random prompts, where the model is.

    Weights are float32 also where a run computes in bfloat16, so the check is exact; only kernels that know no float32
    are checked under autocast, roughly.

    Args:
        reader: a language model, its head probed, in evaluation mode.
        name: what to call it.
        in_bfloat16: check under bfloat16 autocast.

    Returns:
        The gap in nats.

    Raises:
        ParityError: it exceeds the tolerance.
    """
    device = reader.model.device
    vocab_size = int(reader.model.config.get_text_config().vocab_size)
    probe = probe_episodes(vocab_size, reader.prompt_side).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=in_bfloat16):
        gap = parity_gap(reader, probe.prompt_ids, probe.prompt_mask, max_new_tokens=RESPONSE_LENGTH)
    tolerance = TOLERANCE_BFLOAT16 if in_bfloat16 else TOLERANCE
    if not gap <= tolerance:
        raise ParityError(
            f"{type(reader.model).__name__} ({name!r}): teacher-forced log-probs differ from those of its own "
            f"generate() by {gap:.3g} nats (at most {tolerance:g} is rounding). Training on them would be silently "
            f"wrong. Likely causes: the model needs arguments that are not passed (positions, token types), its cache "
            f"is faulty, or its generate() alters logits. Try attn_implementation: eager, or report the family."
        )
    return gap
