"""Functions applied to generated texts before they are scored and saved: their registry, and calls of them.

function(text, **args) -> text       `post_processing_fn: {id, args}` in a supervised run's `generation_kwargs`
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl4lms_like.system.errors import ComponentError, RL4LMsLikeError
from rl4lms_like.system.registry import Entry, Registry
from rl4lms_like.system.secrets import with_values
from rl4lms_like.system.wording import excerpt, raised

TRIAL = "This is one sentence. This is another. Here comes a third. And this is the last."
"""Text on which a post-processor is tried before anything is loaded or written."""


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

    # The signature is what a config's `args` are checked against; the text is not one of them.
    @functools.wraps(function)
    def without_text(**args: Any) -> Any:
        return function("", **args)

    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    without_text.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return without_text


def _misfit(function: Any) -> str | None:
    """Return why an object is no post-processor, or None: the first parameter of a post-processor is named `text`."""
    message = "expected a function whose first parameter is `text`"
    # Classes have a signature too, that of their constructor. Some functions in C have none.
    if inspect.isclass(function):
        return message
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError):
        return message

    # It is called as `function(text, **args)`, by position.
    is_text = first is not None and first.name == "text" and first.kind is not first.KEYWORD_ONLY
    return None if is_text else message


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
PostProcessorRegistry = POST_PROCESSORS  # alias with RL4LMs' name


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
    _processed(function, TRIAL)


def _processed(function: Callable[[str], str], text: str) -> str:
    # A function with bound arguments is a `partial`, whose `func` has the name.
    name = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
    start = text if len(text) <= 60 else f"{text[:60]}..."

    # This library's errors already say what is missing, such as a package or a word list.
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


__all__ = ["POST_PROCESSORS", "PostProcessorRegistry", "post_process", "try_post_processor"]
