"""Search for the sample of a batch on which a reward fails.

    batch  x x x ! x     fails
    alone  . . . !       first text that fails with the same error class, provided that another text succeeds

No further text is tried after the time of the failed call or one second, whichever is longer. The state of a stateful
reward is restored afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rl4lms_like.core.remembering import load_state, state_of
from rl4lms_like.rewards.time_limit import TimeIsUp

_MOST = 64
"""Maximum number of texts tried."""

_LEAST_S = 1.0


def culprit(reward_fn: Any, alone: Callable[[int], Any], n: int, error: BaseException, seconds: float) -> int | None:
    """Return the index of a text on which the reward also fails alone, with an error of the same class.

    Args:
        reward_fn: the reward that failed on a batch.
        alone: calls the reward with the text at an index.
        n: number of texts in the batch.
        error: the exception raised for the batch.
        seconds: duration of the failed call.

    Returns:
        None if all texts tried fail or all succeed, since the failure is then not due to a single text.
    """
    try:
        state = state_of(reward_fn)
        found = _tried(alone, min(n, _MOST), error, time.monotonic() + max(_LEAST_S, seconds)) if n > 1 else None
        load_state(reward_fn, state)
    except (Exception, TimeIsUp):  # the caller reports the original error, not one of this search
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
