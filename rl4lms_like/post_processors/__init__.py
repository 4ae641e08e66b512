"""What is done to finished texts before they are scored and kept. `POST_PROCESSORS` has every function by id.

function(text, **args) -> text       `post_processing_fn: {id, args}` in a supervised run's `generation_kwargs`
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rl4lms_like.core.registry import Entry, Registry
from rl4lms_like.core.secrets import with_values


class PostProcessors(Registry):
    """The functions by id; a config's `args` are what a function takes beside the text."""

    def get(self, id: str, kwargs: Mapping[str, Any] | None = None) -> Callable[[str], str]:
        """The function with its arguments filled in, all but the text (RL4LMs' `PostProcessorRegistry.get`)."""
        function = self.resolve(id)
        bound: Callable[[str], str] = functools.partial(function, **with_values(kwargs)) if kwargs else function
        return bound


def beside_the_text(function: Any) -> Any:
    """What has the signature of `function` without its first parameter, the text."""
    if not callable(function):
        return function

    @functools.wraps(function)
    def takes(**args: Any) -> Any:
        return function("", **args)

    signature = inspect.signature(function)
    takes.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return takes


def _misfit(function: Any) -> str | None:
    """Any function could be called with a text first, so one that is meant to be says so by its parameter's name."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError):
        first = None
    is_text = first is not None and first.name == "text" and first.kind is not first.KEYWORD_ONLY
    return None if is_text and not inspect.isclass(function) else "expected a function whose first parameter is `text`"


POST_PROCESSORS = PostProcessors(
    "post-processor",
    group="rl4lms_like.post_processors",
    misfit=_misfit,
    table={
        "three_sentence_summary": Entry(
            "rl4lms_like.scoring.nltk_data:three_sentence_summary",
            "the first three sentences, one a line",
            needs="extra 'lexical', NLTK's punkt_tab",
        ),
    },
    signature_of=beside_the_text,
)
PostProcessorRegistry = POST_PROCESSORS
"""RL4LMs' name."""

__all__ = ["POST_PROCESSORS", "PostProcessorRegistry"]
