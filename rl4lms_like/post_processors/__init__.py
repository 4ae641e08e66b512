"""Registry of the functions applied to generated texts before they are scored and saved, by id.

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
    """Functions by id; a config's `args` are a function's arguments besides the text."""

    def get(self, id: str, kwargs: Mapping[str, Any] | None = None) -> Callable[[str], str]:
        """Return the function with all arguments bound except the text (RL4LMs' `PostProcessorRegistry.get`)."""
        function = self.resolve(id)
        bound: Callable[[str], str] = functools.partial(function, **with_values(kwargs)) if kwargs else function
        return bound


def arguments_signature(function: Any) -> Any:
    """Return a callable with the signature of `function` without its first parameter, the text."""
    if not callable(function):
        return function

    @functools.wraps(function)
    def takes(**args: Any) -> Any:
        return function("", **args)

    signature = inspect.signature(function)
    takes.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return takes


def _misfit(function: Any) -> str | None:
    """Return why an object is no post-processor, or None: the first parameter of a post-processor is named `text`."""
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
            "first three sentences, one per line",
            needs="extra 'lexical', NLTK's punkt_tab",
        ),
    },
    signature_of=arguments_signature,
)
PostProcessorRegistry = POST_PROCESSORS
"""Alias with RL4LMs' name."""

__all__ = ["POST_PROCESSORS", "PostProcessorRegistry"]
