"""The check every policy passes when it is built: what it samples with is what is trained.

The first ratio of an update is 1 whenever two scorings agree with each other, also when both are wrong. Only the
comparison with the logits that `generate` itself saw tells; so a family nobody has tried fails here, loudly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.errors import ParityError

if TYPE_CHECKING:
    from rl4lms_like.policies.base import LMActorCriticPolicy

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference in nats. Float32 kernels of real checkpoints differ by about 1e-5, mistakes by 0.1 to 100."""

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
def parity_gap(policy: LMActorCriticPolicy, prompt_ids: Tensor, prompt_mask: Tensor, *, max_new_tokens: int) -> float:
    """Largest difference between teacher-forced log-probs and the raw logits of `generate`, in nats.

    Args:
        policy: the policy.
        prompt_ids: `[n, prompt_len]`, padded on the side that the policy's family wants.
        prompt_mask: `[n, prompt_len]`, bool.
        max_new_tokens: length of the responses; nothing ends them earlier.
    """
    policy.set_training_mode(False)
    with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []), policy._autocast():
        torch.manual_seed(0)
        model: Any = policy.policy_model
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
    start = 1 if policy.reader.is_encoder_decoder else prompt_ids.shape[1]
    response_ids = output.sequences[:, start:]
    everything = torch.ones_like(response_ids).bool()
    episodes = EpisodeBatch(
        prompt_ids, prompt_mask, response_ids, everything, ~everything[:, 0], prompt_side=policy.reader.prompt_side
    )
    raw = torch.stack(output.logits, dim=1).float().log_softmax(dim=-1)
    sampled = raw.gather(2, response_ids[:, :, None]).squeeze(2)
    _, log_prob, _ = policy.evaluate_actions(episodes)
    return float((episodes.pad(log_prob) - sampled).abs().max())


def check_parity(policy: LMActorCriticPolicy) -> float:
    """Measures `parity_gap` on two short random prompts.

    Returns:
        The gap in nats.

    Raises:
        ParityError: it exceeds the tolerance of the policy's dtype.
    """
    probe = probe_episodes(policy.vocab_size, policy.reader.prompt_side)
    gap = parity_gap(
        policy,
        probe.prompt_ids.to(policy.device),
        probe.prompt_mask.to(policy.device),
        max_new_tokens=RESPONSE_LENGTH,
    )
    tolerance = TOLERANCE[policy.arguments.dtype]
    if not gap <= tolerance:
        raise ParityError(
            f"{type(policy.policy_model).__name__} ({policy.arguments.model_name!r}): teacher-forced log-probs differ "
            f"from those of its own generate() by {gap:.3g} nats (at most {tolerance:g} is rounding). Training on them "
            f"would be silently wrong. Likely causes: the model needs arguments that are not passed (positions, token "
            f"types), its cache is faulty, or its generate() alters logits. Try attn_implementation: eager, or report "
            f"the family."
        )
    return gap
