"""Which text of a batch a reward fails on.

    batch  x x x ! x     fails
    alone  . . . !       the first text that fails in the same way, if there is one that does not

It costs at most as long as the failed call took, or a second, and a reward that remembers is given back its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rl4lms_like.core.remembering import load_state, state_of
from rl4lms_like.rewards.time_limit import TimeIsUp

_MOST = 64
"""Texts that are tried."""

_LEAST_S = 1.0


def culprit(reward_fn: Any, alone: Callable[[int], Any], n: int, error: BaseException, seconds: float) -> int | None:
    """The place of a text on which a reward fails alone too, with an error of the same class.

    Args:
        reward_fn: that failed on a batch.
        alone: calls it with the text at a place.
        n: texts of the batch.
        error: what it raised.
        seconds: that it took to.

    Returns:
        None if all of those tried fail, or none: then it is not the text.
    """
    try:
        state = state_of(reward_fn)
        found = _tried(alone, min(n, _MOST), error, time.monotonic() + max(_LEAST_S, seconds)) if n > 1 else None
        load_state(reward_fn, state)
    except (Exception, TimeIsUp):  # it is the first error that counts
        return None
    return found


def _tried(alone: Callable[[int], Any], n: int, error: BaseException, until: float) -> int | None:
    failed: int | None = None
    worked = False
    for place in range(n):
        if time.monotonic() > until:
            break
        try:
            alone(place)
        except (KeyboardInterrupt, TimeIsUp):
            raise
        except BaseException as other:
            if failed is None and type(other) is type(error):
                failed = place
        else:
            worked = True
        if worked and failed is not None:
            return failed
    return None
