"""Types of the numeric and boolean arguments in `generation_kwargs`. Does not import torch.

transformers reports an invalid value only during a rollout, or silently generates something else. All other arguments
are checked after transformers is loaded (`policies.generation`).
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
"""Arguments of transformers' `generate` -> valid values; null means the default."""


def bind_generation(kwargs: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[Mistake]]:
    """Return the arguments with their numbers parsed, and the errors.

    Args:
        kwargs: arguments from the config.
        path: their path in the config, `alg.policy.args.generation_kwargs`.
    """
    bound, mistakes = dict(kwargs), []
    for key, value in kwargs.items():
        if key in TYPES and value is not None:
            bound[key], wrong = check_value(value, TYPES[key], join(path, key))
            mistakes += wrong
        elif not isinstance(key, str):
            mistakes.append(Mistake(join(path, key), "keys must be text"))
    return bound, mistakes
