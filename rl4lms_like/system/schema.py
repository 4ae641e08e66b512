"""Make typed objects from the mappings of a config. All errors are returned, none is raised.

    signature    (limit: Annotated[int, Ge(1)] = 20, mode: Literal["mean", "max"] = "mean")
    mapping      {limt: 5, mode: sum}
    errors       limt: unknown key; did you mean 'limit'?
                 mode: expected 'mean' or 'max', got 'sum'

A signature belongs to a function, a class or a dataclass. A parameter whose type is a dataclass is a nested mapping, so
that a whole config is checked by the same code as the arguments of one reward. pydantic validates the values.

Types come first. The rules of a `Block` are its method `issues`; rules among several blocks are functions, whose
parameters name the blocks that they read (`broken_rules`). Both see only blocks whose values have the right types.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import (
    ConfigDict,
    PlainValidator,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)

from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.wording import describe, help_of, shown

Special: TypeAlias = Callable[[Any], "Callable[[Any], Any] | None"]
"""Function from a type to its validator, for types that pydantic does not support; None for all other types."""

Rule: TypeAlias = Callable[..., Iterable[ConfigIssue]]
"""Function of some blocks that yields what is wrong with them together; its parameters are the blocks' names."""

UNKNOWN_KEY = "unknown key"
"""Start of the message for an unknown key."""

REQUIRED: Any = inspect.Parameter.empty
"""Marker for an argument without a default."""

BlockType = TypeVar("BlockType")


@dataclasses.dataclass(frozen=True)
class ComponentOf:
    """Metadata of an `Annotated` type: the argument is a component of a class that must not be imported here.

    Args:
        name: name of the class, `BatchedRewardFunction`.
    """

    name: str


class RefusedError(ValueError):
    """Error of a validator, with all errors in the value. Their paths are relative to the value."""

    def __init__(self, *issues: ConfigIssue) -> None:
        super().__init__("; ".join(map(str, issues)))
        self.issues = issues


# --- blocks and rules -----------------------------------------------------------------------------------------------


class Block:
    """Base class of the dataclasses that describe one block of a config.

    Attributes:
        given: names of the fields that were written; the others have their defaults.
    """

    given: ClassVar[frozenset[str]] = frozenset()

    def issues(self) -> Iterator[ConfigIssue]:
        """Yield the errors of values that contradict each other, with paths relative to the block."""
        yield from ()


def read_block(
    block: type[BlockType], values: Mapping[str, Any], *, special: Special | None = None
) -> tuple[BlockType | None, list[ConfigIssue]]:
    """Make the dataclass that a mapping describes; None if a value has another type, with the errors."""
    fields, issues = check_arguments(block, values, "", special=special)
    if issues:
        return None, issues
    try:
        return make_block(block, fields), []
    except ValueError as error:  # of a user's dataclass, which validates itself
        return None, [ConfigIssue("", str(error))]


def make_block(block: type[BlockType], fields: Mapping[str, Any]) -> BlockType:
    """Make a dataclass from checked fields, and remember which were written.

    That can matter: a default without effect is no error, a setting without effect is one.
    """
    made = block(**fields)
    if isinstance(made, Block):
        object.__setattr__(made, "given", frozenset(fields))
    return made


def checked_block(block: type[BlockType], values: Mapping[str, Any], source: str) -> BlockType:
    """Make a block from keyword arguments in Python, with the types and rules of a config.

    Raises:
        ConfigError: lists all errors; `source` says what the values are.
    """
    made, issues = read_block(block, values)
    if isinstance(made, Block):
        issues = list(made.issues())
    if issues or made is None:
        raise ConfigError(issues, source)
    return made


def broken_rules(rules: Iterable[Rule], blocks: Mapping[str, Any]) -> list[ConfigIssue]:
    """Return what some rules find; a rule is skipped if one of the blocks that it reads is not among `blocks`."""
    issues: list[ConfigIssue] = []
    for rule in rules:
        names = inspect.signature(rule).parameters
        if blocks.keys() >= set(names):
            issues += rule(**{name: blocks[name] for name in names})
    return issues


def coerced_mapping(block: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass, coerced to their types, for a value that stays a mapping.

    Raises:
        RefusedError: lists all errors.
    """
    fields, issues = check_arguments(block, values, "")
    if issues:
        raise RefusedError(*issues)
    return fields


# --- signatures -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a component: its name, type, default (`REQUIRED` if none) and help."""

    name: str
    annotation: Any
    default: Any
    help: str = ""

    @property
    def required(self) -> bool:
        """True if a config must provide the argument."""
        return self.default is REQUIRED

    @property
    def type_text(self) -> str:
        """Description of the accepted values."""
        return describe(self.annotation)


@dataclasses.dataclass(frozen=True)
class Signature:
    """Arguments of a component, and whether it accepts further ones (`**kwargs`)."""

    arguments: tuple[Argument, ...]
    open: bool

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults by name, of the arguments that have one."""
        return {argument.name: argument.default for argument in self.arguments if not argument.required}


def signature_of(target: Callable[..., Any], *, exclude: Collection[str] = ()) -> Signature:
    """Return the named arguments of `target` (function, class or dataclass), without those in `exclude`."""
    # The cache would keep the object of a method alive, such as an environment with its client of a server.
    of_object = inspect.ismethod(target) and not inspect.isclass(target.__self__)
    try:
        parameters, hints, helps = (_words if of_object else _cached_words)(target)
    except ValueError:  # some built-in types have no signature
        return Signature((), open=True)
    except TypeError:  # a target that cannot be hashed
        parameters, hints, helps = _words(target)

    arguments = []
    is_open = False
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name not in exclude:
            default = _default(target, name, parameter)
            arguments.append(Argument(name, hints.get(name, Any), default, helps.get(name, "")))
    return Signature(tuple(arguments), is_open)


def _words(target: Callable[..., Any]) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any], dict[str, str]]:
    """Return parameters, types and help texts. Defaults of a `default_factory` are excluded: this result is cached."""
    return inspect.signature(target).parameters, _type_hints(target), help_of(target)


_cached_words = cache(_words)


def _default(target: Any, name: str, parameter: inspect.Parameter) -> Any:
    fields = getattr(target, "__dataclass_fields__", {}) if inspect.isclass(target) else {}
    if name in fields and fields[name].default_factory is not dataclasses.MISSING:
        return fields[name].default_factory()
    return parameter.default


def _type_hints(target: Any) -> dict[str, Any]:
    """Return the resolved annotations; those that cannot be resolved at run time become `Any`."""
    # The fields of a dataclass are resolved in the modules of the classes that define them.
    if inspect.isclass(target):
        owner = next(base for base in target.__mro__ if "__init__" in vars(base))
        target = owner if "__dataclass_fields__" in vars(owner) else vars(owner)["__init__"]
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, AttributeError, TypeError):
        parameters = inspect.signature(target).parameters
        return {name: _type_hint(target, parameter.annotation) for name, parameter in parameters.items()}


def _type_hint(target: Any, annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    holder = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, globalns=getattr(target, "__globals__", {}), include_extras=True)["it"]
    except (NameError, AttributeError, TypeError):
        return Any


# --- values ---------------------------------------------------------------------------------------------------------


def check_arguments(
    target: Callable[..., Any],
    args: Mapping[str, Any],
    path: str,
    *,
    exclude: Collection[str] = (),
    also: Collection[str] = (),
    special: Special | None = None,
) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Check `args` against the signature of `target`.

    Args:
        target: function, class or dataclass that will be called with `args`.
        args: arguments given in the config.
        path: path in the config, `reward_fn.args`; empty for the top level.
        exclude: parameters that the library sets itself; a config must not set them.
        also: further valid keys that are checked elsewhere, for the message on unknown keys.
        special: validators for types that pydantic does not support.

    Returns:
        The given arguments, coerced to their types (invalid ones are left out), and the errors.
    """
    signature = signature_of(target, exclude=exclude)
    known = {argument.name: argument for argument in signature.arguments}

    bound: dict[str, Any] = {}
    issues: list[ConfigIssue] = []
    for name, value in args.items():
        where = join(path, name)
        argument = known.get(name)
        if name in exclude:
            issues.append(ConfigIssue(where, "is filled in by the library and cannot be set here"))
        elif argument is None and signature.open and isinstance(name, str):
            bound[name] = value
        elif argument is None:
            issues.append(ConfigIssue(where, unknown_key(name, [*known, *also])))
        elif value is None and argument.default is None:
            bound[name] = None  # null is always valid where it is the default, whatever the type
        else:
            coerced, value_issues = check_value(value, argument.annotation, where, special=special)
            issues += value_issues
            if not value_issues:
                bound[name] = coerced

    return bound, issues + _missing(signature, args, path)


def _missing(signature: Signature, args: Mapping[str, Any], path: str) -> list[ConfigIssue]:
    issues = []
    for argument in signature.arguments:
        if argument.required and argument.name not in args:
            issues.append(ConfigIssue(join(path, argument.name), f"missing; expected {_expected(argument.annotation)}"))
    return issues


def check_value(
    value: Any, annotation: Any, path: str, *, special: Special | None = None
) -> tuple[Any, list[ConfigIssue]]:
    """Return a value coerced to its type, and the errors; ignore the value if there are errors.

    Null is accepted as an empty mapping or list, since a YAML key with nothing under it is null.
    """
    if value is None:
        container = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
        origin = typing.get_origin(container)
        if origin in (dict, list) and not (special and special(annotation)):
            value = origin()  # which its validators may refuse
    try:
        return _coerced(value, annotation, special), []
    except ValidationError as error:
        return None, _issues_of(error, value, annotation, path)


def check_block(block: type, value: Any, special: Special | None) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Return the fields of a dataclass from a mapping, and the errors with paths relative to the value."""
    if not isinstance(value, Mapping):
        return {}, [ConfigIssue("", f"expected {_expected(block)}; got {shown(value)}")]
    return check_arguments(block, value, "", special=special)


def _issues_of(error: ValidationError, value: Any, annotation: Any, path: str) -> list[ConfigIssue]:
    """Return pydantic's errors in one value as issues. For a union pydantic has one for each option."""
    ends = set()
    refused: list[ConfigIssue] = []
    messages = []
    for detail in error.errors():
        cause = detail.get("ctx", {}).get("error")
        ends.add(detail["loc"][-1:])
        if isinstance(cause, RefusedError):
            refused += [issue.below(_path(value, detail["loc"], path)) for issue in cause.issues]
        elif isinstance(cause, ValueError):
            messages.append(str(cause))

    # Validators know best: those of blocks, which have a path for each error, then those in an annotation.
    if refused:
        return refused
    if messages:
        return [ConfigIssue(path, messages[0])]

    # pydantic's location of an invalid key ends in `[key]`.
    if ("[key]",) in ends:
        other_keys = [key for key in value if not isinstance(key, str)]
        return [ConfigIssue(path, f"keys must be text: put {', '.join(map(shown, other_keys))} in quotes")]
    return [ConfigIssue(path, f"expected {describe(annotation)}, got {shown(value)}")]


def _path(value: Any, loc: Sequence[str | int], path: str) -> str:
    """Append pydantic's location in a value to its path, without the labels of the options of a union."""
    for key in loc:
        is_item = isinstance(key, int) and isinstance(value, list | tuple)
        if is_item or (isinstance(value, Mapping) and key in value):
            path = join(path, key)
            value = value[key]
    return path


def _coerced(value: Any, annotation: Any, special: Special | None) -> Any:
    """Validate strictly first: a boolean is not a number, bytes are not text. Then accept '1e-6', and 5.0 for 5."""
    try:
        adapter = _cached_adapter(annotation, special)
    except TypeError:  # an annotation with unhashable metadata
        adapter = _adapter(annotation, special)
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool | bytes) for item in items):
            raise
        if any(detail["type"] == "value_error" for detail in error.errors()):  # a validator is not called again
            raise
        return adapter.validate_python(value)


def _adapter(annotation: Any, special: Special | None) -> TypeAdapter[Any]:
    prepared = _prepared(annotation, special)
    try:
        return TypeAdapter(prepared, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))
    except PydanticUserError as error:
        if isinstance(error, PydanticSchemaGenerationError):
            return TypeAdapter(Any)
        return TypeAdapter(prepared)  # a type with its own pydantic config


_cached_adapter = cache(_adapter)


def _prepared(annotation: Any, special: Special | None) -> Any:
    """Return the type with our own validators for dataclasses and special types."""
    validate = special(annotation) if special else None
    if validate is None and dataclasses.is_dataclass(annotation):
        validate = partial(_validated_block, typing.cast(type, annotation), special)
    if validate is not None:
        return Annotated[Any, PlainValidator(validate)]

    # Types made of others: the same for each of these.
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is Annotated:
        return Annotated[(_prepared(args[0], special), *args[1:])]
    prepared = tuple(_prepared(item, special) for item in args)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[prepared]  # noqa: UP007
    if args and inspect.isclass(origin) and issubclass(origin, Sequence | Mapping):
        return typing.cast(Any, origin)[prepared]
    return annotation


def _validated_block(block: type, special: Special | None, value: Any) -> Any:
    """Make a dataclass from a mapping, or raise its errors; null is an empty mapping."""
    if isinstance(value, block):
        return value
    if value is not None and not isinstance(value, Mapping):
        raise RefusedError(ConfigIssue("", f"expected {_expected(block)}; got {shown(value)}"))
    made, issues = read_block(block, value or {}, special=special)
    if issues:
        raise RefusedError(*issues)
    return made


# --- words and paths ------------------------------------------------------------------------------------------------


def _expected(annotation: Any) -> str:
    """Describe the values of a type; for a dataclass, list its keys."""
    if not dataclasses.is_dataclass(annotation):
        return describe(annotation)
    names = ", ".join(argument.name for argument in signature_of(typing.cast(type, annotation)).arguments)
    return f"a mapping with the keys {names}"


def unknown_key(name: Any, known: Iterable[str]) -> str:
    """Return the message for an unknown key.

    Examples:
        >>> unknown_key("limt", ["limit", "mode"])
        "unknown key; did you mean 'limit'?"
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    if near:
        return f"{UNKNOWN_KEY}; did you mean {near[0]!r}?"
    return f"{UNKNOWN_KEY}; known: {', '.join(names)}" if names else f"{UNKNOWN_KEY}; nothing can be set here"


def join(path: str, key: Any) -> str:
    """Append a key to a dotted path; an empty key is written `''`.

    Examples:
        >>> join("alg.args", "gamma")
        'alg.args.gamma'
    """
    text = str(key) or "''"
    return f"{path}.{text}" if path else text


def at(blocks: Any, path: str) -> Any:
    """Return the value at a dotted path, None if there is none.

    Examples:
        >>> at({"alg": {"id": "ppo"}}, "alg.id")
        'ppo'
    """
    for key in path.split("."):
        blocks = blocks.get(key) if isinstance(blocks, Mapping) else None
    return blocks
