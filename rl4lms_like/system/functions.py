"""Python functions in configs: a text with the name and the digest of a function, which may carry the function itself.

    NamedFunction(score)                  'my_rewards:score@1f0c2a9b44de'

A config is plain data. The name of a function is therefore a text: it is copied, compared and written to `config.json`
like any other. In the process in which the function was given, the text carries it. Everywhere else the function is
imported, and must have the same digest; one that cannot be imported has to be given again.

The digest covers the source of a function, of its decorators, of functions in its closure, and of the class of an
object. Without source, or with a file that was edited since it was imported, it covers bytecode and constants. It does
not cover what a function reads at run time: other values in closures, globals, functions that it calls by a global
name, files, and the state of objects.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import json
import textwrap
from operator import attrgetter
from pathlib import Path
from types import CodeType, MethodType
from typing import Any

from rl4lms_like.system.import_paths import RefusedImportError, imported
from rl4lms_like.system.wording import raised

N_DIGITS = 12
"""Number of hexadecimal digits of a digest."""

GIVE_AGAIN = "give it again in Python: Run.from_folder(folder, {argument}={name})"
"""Way out for a function that a run folder only names."""


class NamedFunction(str):
    """Name and digest of a function or object, `module:name@digest`, which carries it.

    Args:
        value: a function, a partial function, or an object of a class.

    Raises:
        ValueError: it is a class, whose objects are meant.
    """

    value: Any

    def __new__(cls, value: Any) -> NamedFunction:
        if inspect.isclass(value):
            raise ValueError(f"expected a function or an object, got the class {value.__name__}; make an object of it")
        text = super().__new__(cls, f"{_path_of(value)}@{digest_of(value)}")
        text.value = value
        return text

    # A copy of a config has the same function, and not a copy of the object with its own state.
    def __copy__(self) -> NamedFunction:
        return self

    def __deepcopy__(self, memo: Any) -> NamedFunction:
        return self

    def __reduce__(self) -> Any:
        return _restored, (str(self), self.value)


def _restored(name: str, value: Any) -> NamedFunction:
    text = str.__new__(NamedFunction, name)
    text.value = value
    return text


def split_name(text: str) -> tuple[str, str | None]:
    """Return import path and digest of a function's name; the digest is None if the name has none.

    Examples:
        >>> split_name("my_rewards:score@1f0c2a9b44de")
        ('my_rewards:score', '1f0c2a9b44de')
    """
    path, _, digest = text.partition("@")
    return path, digest or None


def short_name(text: str) -> str:
    """Return the last part of a function's name.

    Examples:
        >>> [short_name(text) for text in ("my_rewards:score@1f0c2a9b44de", "__main__:make.<locals>.<lambda>@00")]
        ['score', 'lambda']
    """
    path, _ = split_name(text)
    return path.rpartition(":")[2].rpartition(".")[2].strip("<>")


def function_of(text: str) -> Any:
    """Return the function or object that a text names: the one that it carries, or an imported one.

    Raises:
        ValueError: it cannot be imported, may not be used by a config, cannot be called, or has changed.
    """
    if isinstance(text, NamedFunction):
        return text.value

    path, digest = split_name(text)
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ValueError(f"expected an import path 'package.module:name', got {path!r}")
    again = GIVE_AGAIN.format(argument="reward", name=short_name(path))
    if digest and (module == "__main__" or "<" in name):
        raise ValueError(f"{name!r} was given in Python and cannot be imported; {again}")

    # `BaseException`, because importing a user's module runs the user's code, which may call `sys.exit`.
    hint = f"; {again}" if digest else ""
    try:
        function = imported(path)
    except RefusedImportError as error:
        raise ValueError(f"{path!r} is refused: {error}{hint}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"cannot import {path!r}: {raised(error)}{hint}") from error

    if not callable(function):
        raise ValueError(f"{path!r} is {function!r}, which cannot be called")
    if digest and digest_of(function) != digest:
        raise ValueError(f"{path!r} has changed since the run began (digest {digest_of(function)}, then {digest})")
    return function


def imported_again(path: str) -> Any:
    """Return what `function_of` has validated in the parent process of this one, for an import path."""
    module, _, name = path.rpartition(":")
    if module.endswith(".py"):
        module = Path(module).stem
    return attrgetter(name)(importlib.import_module(module))  # a name may have dots, as that of a method


def _path_of(value: Any) -> str:
    """Return the import path of a function or of an object's class; it need not be importable."""
    inner = value
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner) if inspect.isroutine(inner) else type(inner)
    return f"{getattr(inner, '__module__', None) or 'builtins'}:{inner.__qualname__}"


def digest_of(value: Any) -> str:
    """Return the digest of a function, or of the class of an object."""
    sources = _sources(value, set())
    return hashlib.sha256(json.dumps(sources).encode(errors="backslashreplace")).hexdigest()[:N_DIGITS]


def _sources(value: Any, seen: set[int]) -> list[Any]:
    """Return the sources of a function and of the functions inside it, `seen` by their ids."""
    if id(value) in seen:
        return []
    seen.add(id(value))

    # The arguments of a partial function are a part of it; of those that are no plain data, only the class.
    if isinstance(value, functools.partial):
        arguments = [value.args, sorted(value.keywords.items())]
        return [json.dumps(arguments, default=lambda item: type(item).__qualname__), *_sources(value.func, seen)]
    if isinstance(value, MethodType):
        return _sources(value.__func__, seen)

    code = getattr(value, "__code__", None)
    if not isinstance(code, CodeType):
        return [value.__qualname__] if inspect.isbuiltin(value) else _sources_of_class(type(value), seen)

    # A decorator leaves the decorated function in the closure of its wrapper, or in `__wrapped__`.
    sources: list[Any] = [_source_of_lambda(code) if code.co_name == "<lambda>" else _source(code)]
    inner = [getattr(value, "__wrapped__", None)]
    for cell in value.__closure__ or ():
        try:
            inner.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            continue
    for function in inner:
        if inspect.isroutine(function) or isinstance(function, functools.partial):
            sources += _sources(function, seen)
    return sources


def _sources_of_class(kind: type, seen: set[int]) -> list[Any]:
    """Return the sources of the methods of a class and of its bases in the same package."""
    # Method by method: `inspect` finds the source of a function in a notebook, but not that of a class.
    sources: list[Any] = [kind.__qualname__]
    package = kind.__module__.partition(".")[0]
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != package:
            continue
        for name, member in sorted(vars(base).items()):
            function = getattr(member, "__func__", getattr(member, "fget", member))  # of class methods and properties
            if isinstance(getattr(function, "__code__", None), CodeType):
                sources += [name, *_sources(function, seen)]
            elif isinstance(member, (bool, int, float, str)) and not name.startswith("__"):
                sources.append([name, member])
    return sources


def _source(code: CodeType) -> Any:
    """Return the source of a function, or its bytecode if there is no source of the code that runs."""
    try:
        lines, _ = inspect.findsource(code)
        if not _is_code_of(code, "".join(lines)):
            return _bytecode(code)
        return textwrap.dedent(inspect.getsource(code)).rstrip()
    except (OSError, TypeError, SyntaxError, IndexError):  # typed into a prompt, or the file has changed
        return _bytecode(code)


def _source_of_lambda(code: CodeType) -> Any:
    """Return the text of a lambda; `inspect` returns the whole lines around it."""
    try:
        lines, _ = inspect.findsource(code)
        tree = ast.parse("".join(lines))
    except (OSError, TypeError, SyntaxError, IndexError):
        return _bytecode(code)
    on_line = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno]
    if len(on_line) != 1 or not _is_code_of(code, "".join(lines)):
        return _bytecode(code)
    return ast.unparse(on_line[0])


def _is_code_of(code: CodeType, file: str) -> bool:
    """Return True if a file still has the source of code that was compiled from it earlier.

    Raises:
        SyntaxError: the file cannot be compiled any more.
    """
    compiled = _compiled(file).get((code.co_name, code.co_firstlineno), ())
    return any(_bytecode(other) == _bytecode(code) for other in compiled)


@functools.lru_cache(maxsize=64)
def _compiled(file: str) -> dict[tuple[str, int], list[CodeType]]:
    """Return all code in a file by name and first line."""
    codes: dict[tuple[str, int], list[CodeType]] = {}
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # cells of a notebook may have it
    pending = [compile(file, "<source>", "exec", flags, dont_inherit=True)]
    while pending:
        code = pending.pop()
        codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return codes


def _bytecode(code: CodeType) -> list[Any]:
    constants = [_constant(constant) for constant in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames)]


def _constant(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return _bytecode(constant)
    if isinstance(constant, frozenset):  # its order depends on the process
        return sorted(map(repr, constant))
    return repr(constant)
