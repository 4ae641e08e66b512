"""Calls users' post-processors and vouches for what comes back: a text for a text, or a `ComponentError`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rl4lms_like.core.errors import ComponentError, RL4LMsLikeError
from rl4lms_like.core.wording import excerpt, raised

TRIAL = "This is one sentence. This is another. Here comes a third. And this is the last."
"""What a post-processor is tried on before anything is loaded or written."""


def post_process(function: Callable[[str], str], texts: Sequence[str]) -> list[str]:
    """What the function makes of each text.

    Raises:
        ComponentError: it failed, or returned something else than a text; says for which text.
    """
    return [_processed(function, text) for text in texts]


def try_post_processor(function: Callable[[str], str]) -> None:
    """Calls the function once, so that what it lacks is told before a model is loaded.

    Raises:
        RL4LMsLikeError: as `post_process`; a missing package or word list by its own error.
    """
    post_process(function, [TRIAL])


def _processed(function: Callable[[str], str], text: str) -> str:
    name = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
    start = text if len(text) <= 60 else f"{text[:60]}..."
    try:
        result = function(text)
    except (RL4LMsLikeError, KeyboardInterrupt):
        raise
    except BaseException as error:
        said = raised(error)
        raise ComponentError(f"the post-processor {name} failed on the text {start!r}: {said}") from error
    if not isinstance(result, str):
        raise ComponentError(f"the post-processor {name} made {excerpt(result)} of the text {start!r}; expected a text")
    return result
