"""Calls of users' post-processors with validation of their results; any failure is raised as a `ComponentError`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rl4lms_like.core.errors import ComponentError, RL4LMsLikeError
from rl4lms_like.core.wording import excerpt, raised

TRIAL = "This is one sentence. This is another. Here comes a third. And this is the last."
"""Text on which a post-processor is tried before anything is loaded or written."""


def post_process(function: Callable[[str], str], texts: Sequence[str]) -> list[str]:
    """Return the function's result for each text.

    Raises:
        ComponentError: the function failed or did not return a text; the message has the text it was called with.
    """
    return [_processed(function, text) for text in texts]


def try_post_processor(function: Callable[[str], str]) -> None:
    """Call the function once, so that a missing requirement is reported before a model is loaded.

    Raises:
        RL4LMsLikeError: as in `post_process`; a missing package or word list has its own error.
    """
    post_process(function, [TRIAL])


def _processed(function: Callable[[str], str], text: str) -> str:
    name = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
    start = text if len(text) <= 60 else f"{text[:60]}..."
    try:
        result = function(text)
    except (RL4LMsLikeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # users' code may also raise SystemExit
        message = raised(error)
        raise ComponentError(f"the post-processor {name} failed on the text {start!r}: {message}") from error
    if not isinstance(result, str):
        raise ComponentError(f"the post-processor {name} returned {excerpt(result)} for {start!r}; expected a text")
    return result
