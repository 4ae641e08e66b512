"""What `generation_kwargs` may hold, as far as numbers and switches go. Loads no torch.

transformers says what is wrong with a value in the middle of a rollout, or writes something else than was meant. Every
other argument is looked up when transformers is loaded (`policies.generation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from rl4lms_like.core.errors import Mistake
from rl4lms_like.core.numbers import Count, NonNegative, Positive, Share, Whole
from rl4lms_like.core.schema import check_value, join

TYPES: dict[str, Any] = {
    **dict.fromkeys(("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values"), bool),
    **dict.fromkeys(("max_new_tokens", "max_length", "num_beams", "num_beam_groups"), Count),
    **dict.fromkeys(("min_new_tokens", "min_length", "top_k"), Whole),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), Whole),
    **dict.fromkeys(("temperature", "repetition_penalty", "encoder_repetition_penalty"), Positive),
    **dict.fromkeys(("top_p", "min_p"), Share),
    "typical_p": Annotated[float, Gt(0), Interval(le=1)],
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), Annotated[float, Ge(0), Interval(lt=1)]),
    "penalty_alpha": NonNegative,
    "length_penalty": float,
    "early_stopping": bool | Literal["never"],
}
"""Arguments of transformers' `generate` -> the values that mean something; null leaves each at its default."""


def bind_generation(kwargs: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[Mistake]]:
    """The arguments with their numbers read, and the mistakes.

    Args:
        kwargs: what the config gives.
        path: where, `alg.policy.args.generation_kwargs`.
    """
    bound, mistakes = dict(kwargs), []
    for key, value in kwargs.items():
        if key in TYPES and value is not None:
            bound[key], wrong = check_value(value, TYPES[key], join(path, key))
            mistakes += wrong
        elif not isinstance(key, str):
            mistakes.append(Mistake(join(path, key), "keys are text"))
    return bound, mistakes
