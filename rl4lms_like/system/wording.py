"""Describe types, values and docstrings in plain words, for messages and documentation.

Annotated[float, Gt(0)] | None    ->  a number above 0, or null
Literal["left", "right"]          ->  'left' or 'right'
{"a": True}                       ->  {'a': True}
"""

from __future__ import annotations

import inspect
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt

_PLAIN = {bool: "true or false", str: "text", type(None): "null", dict: "a mapping", list: "a list", tuple: "a list"}
_NUMBERS = {int: "a whole number", float: "a number"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SECTION = re.compile(r"^(Args|Arguments|Attributes|Returns|Yields|Raises|Example|Examples|Note|Notes):\s*$")


@dataclass(frozen=True)
class InWords:
    """Metadata that describes a type's values instead of its constraints: `Annotated[str, ..., InWords("...")]`."""

    text: str


def printable(text: str) -> str:
    r"""Escape characters that control a terminal (as `\x1b`) or the direction of writing (as `\u202e`).

    Line breaks and tabs are kept.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def accept_any_character(stream: Any) -> None:
    r"""Make a stream write a character that its encoding lacks as `\u65e5` instead of raising an error.

    Latin-1 and ASCII lack most characters and all table borders, UTF-8 lacks unpaired surrogates.
    """
    if getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")


def describe(annotation: Any) -> str:
    """Describe the values of a type; `anything` for types without constraints.

    Examples:
        >>> describe(list[int] | None)
        'a list, each a whole number, or null'
    """
    of_others = _describe_composite(annotation)
    if of_others is not None:
        return of_others

    # The others, from exact types to families: of a `dict[str, int]`, the origin says enough.
    kind = typing.get_origin(annotation) or annotation
    if kind in _NUMBERS:
        return _NUMBERS[kind]
    if kind in _PLAIN:
        return _PLAIN[kind]
    if annotation is Any or annotation is inspect.Parameter.empty:
        return "anything"
    if inspect.isclass(kind) and issubclass(kind, Mapping):
        return "a mapping"
    if is_dataclass(kind):
        return "a block"
    return f"a {getattr(kind, '__name__', str(kind))}"


def _describe_composite(annotation: Any) -> str | None:
    """Describe a type made of others, such as `list[int]` (origin `list`, arguments `(int,)`); None for other types."""
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _constrained(args[0], args[1:])
    if origin is typing.Literal:
        return _either([shown(value) for value in args])
    if origin in (typing.Union, types.UnionType):
        return _either([describe(arg) for arg in args], wide=True)
    if origin is tuple and args and args[-1] is not Ellipsis:
        items = [describe(arg) for arg in args]
        return f"a list of {len(items)}: {', '.join(items)}"
    if origin in (list, tuple, set, frozenset) or _is_sequence(origin):
        item = describe(args[0]) if args else "anything"
        return "a list" if item in ("anything", "a block") else f"a list, each {item}"
    return None


def shown(value: Any) -> str:
    """Return a value as written in a config, shortened.

    Examples:
        >>> [shown(value) for value in (None, True, 0.5, "mean")]
        ['null', 'true', '0.5', "'mean'"]
    """
    # As in YAML, whose `null` and `true` are None and True.
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return excerpt(value)


def raised(error: BaseException) -> str:
    """Describe an exception of a user's code.

    Examples:
        >>> raised(KeyError("topic"))
        "KeyError: 'topic'"
    """
    try:
        message = str(error)
    except Exception:  # `__str__` is the user's code too
        message = "(its message cannot be shown)"
    return f"{type(error).__name__}: {message}"


def excerpt(value: Any) -> str:
    """Return the shortened `repr` of a value, such as one returned by a user's code."""
    shortener = reprlib.Repr()
    # Characters of texts and of other objects, items of containers: one line of a message.
    shortener.maxstring = 60
    shortener.maxother = 60
    shortener.maxdict = 3
    shortener.maxlist = 4
    return shortener.repr(value)


def beginning(text: str) -> str:
    """Return the `repr` of the first 60 characters of a text."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def agreement(text: str, other: str) -> int:
    """Return the number of characters that two texts have in common at their beginnings."""
    if other.startswith(text):
        return len(text)
    for index, (character, other_character) in enumerate(zip(text, other, strict=False)):
        if character != other_character:
            return index
    return min(len(text), len(other))


def help_of(target: Any) -> dict[str, str]:
    """Return help texts by argument, from the `Args:` of Google-style docstrings, including those of base classes."""
    # From the base classes to the class itself, each with its constructor, so that the most derived text of an argument
    # wins. A class without a docstring must not repeat the inherited one here, hence `__dict__` instead of `__doc__`.
    docs: list[str] = []
    if inspect.isclass(target):
        for base in reversed(target.__mro__):
            if base is object:
                continue
            docs.append(base.__dict__.get("__doc__") or "")
            docs.append(getattr(base.__dict__.get("__init__"), "__doc__", None) or "")
    else:
        docs.append(inspect.getdoc(target) or "")

    helps: dict[str, str] = {}
    for doc in docs:
        helps |= _args_section(inspect.cleandoc(doc))
    return helps


def without_sections(doc: str) -> str:
    """Return a docstring without its `Args:`, `Returns:` ... sections."""
    lines = [line for section, line in _with_sections(doc) if not section]
    return "\n".join(lines).strip()


def _with_sections(doc: str) -> Iterator[tuple[str, str]]:
    """Yield each line of a docstring with the name of its section, without the lines that name the sections."""
    section = ""
    for line in doc.splitlines():
        if match := _SECTION.match(line):
            section = match[1]
            continue
        # A line that is not indented ends a section, also without a name of its own.
        if line and not line.startswith(" "):
            section = ""
        yield section, line


def _args_section(doc: str) -> dict[str, str]:
    """Return the help texts in the `Args:` of a docstring, by argument."""
    helps: dict[str, str] = {}
    name = ""
    for section, line in _with_sections(doc):
        if not section.startswith("Arg"):
            continue

        # `name: text`, `name (type): text` or `**name: text`. Deeper lines continue the text of the last argument.
        entry = re.match(r"^ {1,4}(\*{0,2}\w+)(?: \([^)]*\))?: (.*)$", line)
        if entry:
            name = entry[1].lstrip("*")
            helps[name] = entry[2].strip()
        elif name and line.strip():
            helps[name] += " " + line.strip()
    return helps


def _constrained(base: Any, metadata: Iterable[Any]) -> str:
    """Describe a number or text with limits: `a number above 0 and of at most 1`, `a whole number from 1 to 8`."""
    values = describe(base)
    lower = ""
    upper = ""
    for rule in _flat(metadata):
        if isinstance(rule, InWords):
            return rule.text
        if isinstance(rule, Gt):
            lower = f"above {_plain(rule.gt)}"
        elif isinstance(rule, Ge):
            lower = f"of at least {_plain(rule.ge)}"
        elif isinstance(rule, Lt):
            upper = f"below {_plain(rule.lt)}"
        elif isinstance(rule, Le):
            upper = f"of at most {_plain(rule.le)}"

    # Only where both limits are included: `from 0 to 1` would be wrong for numbers below 1.
    if lower.startswith("of at least") and upper.startswith("of at most"):
        return f"{values} from {lower.split()[-1]} to {upper.split()[-1]}"
    limits = " and ".join(filter(None, (lower, upper)))
    return f"{values} {limits}".rstrip()


def _plain(bound: Any) -> str:
    # `g` would shorten large whole numbers to `4.29497e+09`.
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _flat(metadata: Iterable[Any]) -> Iterable[Any]:
    """Yield single limits: `Interval(ge=0, le=1)` is a group of two, pydantic's `Field` holds a list."""
    for rule in metadata:
        if isinstance(rule, GroupedMetadata):
            yield from _flat(rule)
        elif isinstance(getattr(rule, "metadata", None), list):
            yield from _flat(rule.metadata)
        else:
            yield rule


def _either(options: list[str], *, wide: bool = False) -> str:
    """Return `a, b or c`; `a, or b` where the options are longer descriptions."""
    unique = list(dict.fromkeys(options))
    if len(unique) == 1:
        return unique[0]

    # The comma separates from the whole description: `a list, each a number, or null`.
    has_descriptions = wide and any(" " in option for option in unique[:-1])
    last = ", or " if has_descriptions else " or "
    return ", ".join(unique[:-1]) + last + unique[-1]


def _is_sequence(origin: Any) -> bool:
    return inspect.isclass(origin) and issubclass(origin, Sequence) and origin is not str
