"""Import paths `package.module:Name` of a config, and the locations from which code may be imported.

    this library, installed packages      yes, including editable ones
    modules already imported, __main__    yes: the program that uses the library chose them
    folders that the user names           yes: --code DIR, `use_code_from`, $RL4LMS_LIKE_CODE, $PYTHONPATH
    the current folder                    only if it is named
    Python's standard library             never: it has no components, and can start programs

A config may come from another user. It can select code that the user of the config already trusts, but not add code.
Code that comes with models, tokenizers and metrics needs another permission:

    config file that the user names         requires its keys `trust_remote_code`
    config.json in a run's folder           requires the same keys and the option --trust_remote_code
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import shlex
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pydantic import AfterValidator

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import ConfigError, ConfigIssue, MissingExtraError
from rl4lms_like.core.schema import join

CODE_VARIABLE = "RL4LMS_LIKE_CODE"
"""Environment variable with the folders named by the user; processes started by a run inherit it."""

TRUST = "trust_remote_code"
"""Key of a config that allows code to run that comes with a model, tokenizer or metric."""

_LIBRARY = __name__.partition(".")[0]


class RefusedImportError(ImportError):
    """An import path refers to code that a config may not use. The message says why, and what to do instead."""


def use_code_from(*folders: str | Path) -> None:
    """Allow configs to import modules from these folders, like `--code DIR`.

    If names are equal, installed packages take precedence. Processes that are started later inherit the folders.

    Raises:
        ConfigError: a folder does not exist.
    """
    known = [str(folder) for folder in code_folders()]
    for folder in folders:
        place = with_home(folder)
        if not place.is_dir():
            raise ConfigError([ConfigIssue("--code", f"there is no folder {str(folder)!r}")], "the command line")
        if (text := os.path.abspath(place)) not in known:
            known.append(text)
    if known:
        os.environ[CODE_VARIABLE] = os.pathsep.join(known)
    _put_on_path()


def code_folders() -> list[Path]:
    """Return the code folders named by the user, in order."""
    return [Path(os.path.abspath(folder)) for folder in os.environ.get(CODE_VARIABLE, "").split(os.pathsep) if folder]


def code_options() -> str:
    """Return the command-line options that name the same folders: ` --code /my/project`, or an empty string."""
    return "".join(f" --code {shlex.quote(str(folder))}" for folder in code_folders())


def imported(path: str) -> Any:
    """Return the object at an import path of a config.

    Raises:
        RefusedImportError: a config may not use its code.
        Exception: anything that importing its module raises, since this runs the user's code.
    """
    module, _, name = path.partition(":")
    _put_on_path()
    _require_place(module)
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
        if isinstance(found, ModuleType):
            raise RefusedImportError(f"{part!r} is a module; name it before the colon: '{found.__name__}:...'")
    _require_home(found, path)
    return found


def importable(path: str) -> str:
    """Return the import path if it can be imported. A text without a colon is left to the component's own checks.

    Raises:
        ValueError: it cannot be imported, or a config may not use its code.
    """
    if ":" not in path:
        return path
    try:
        imported(path)
    except MissingExtraError:  # building the component reports what to install
        return path
    except RefusedImportError as error:
        raise ValueError(f"{path!r} is refused: {error}") from error
    except Exception as error:  # importing a user's module runs the user's code
        raise ValueError(f"cannot import {path!r}: {type(error).__name__}: {error}") from error
    return path


ImportPath: TypeAlias = Annotated[str, AfterValidator(importable)]
"""Import path of a function; it is imported when a config is checked."""


def _put_on_path() -> None:
    """Append the code folders to `sys.path`, so that their `datasets.py` never shadows the package of that name."""
    sys.path += [str(folder) for folder in code_folders() if str(folder) not in sys.path]


def _require_place(module: str) -> None:
    """Raise `RefusedImportError` if a config may not name this module; import at most its parent packages."""
    _refuse_standard_library(module)
    if module.partition(".")[0] == _LIBRARY or module in sys.modules:
        return
    names = module.split(".")
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        if getattr(sys.modules.get(name), "__file__", None) is not None:
            return  # already imported, by the program or as a parent that was checked in this loop
        if name in sys.modules:
            continue
        spec = find_spec(name)
        if spec is None:
            raise _not_found(name)
        _require_allowed(spec)
        if spec.origin is not None and depth < len(names):
            return


def _not_found(name: str) -> ImportError:
    if "." not in name and PathFinder.find_spec(name, [os.getcwd()]) is not None:
        return RefusedImportError(_unnamed(name, Path.cwd()))
    return ModuleNotFoundError(f"No module named {name!r}; --code DIR names a folder of your own modules", name=name)


def _require_allowed(spec: ModuleSpec) -> None:
    if spec.origin in ("built-in", "frozen"):
        _refuse_standard_library(spec.name, known=True)
    if spec.origin is None:  # a namespace package, which has no code of its own
        return
    levels = spec.name.count(".") + (2 if spec.submodule_search_locations is not None else 1)
    root = Path(spec.origin).absolute().parents[levels - 1]
    if any(_is_same(root, folder) for folder in _named_folders()):  # deeper, the module has another name
        return
    if not any(_is_below(spec.origin, folder) for folder in _installed_folders()):
        raise RefusedImportError(_unnamed(spec.name, root))


def _unnamed(name: str, folder: Path) -> str:
    place = "the current folder" if folder == Path.cwd() else str(folder)
    option = "." if folder == Path.cwd() else shlex.quote(str(folder))
    return (
        f"the module {name!r} is in {place}, not in an installed package. If you trust the code there, name the "
        f"folder: --code {option}; in Python, import the module first, or call use_code_from({str(folder)!r})"
    )


def _refuse_standard_library(module: str, *, known: bool = False) -> None:
    top = module.partition(".")[0]
    if known or top in sys.stdlib_module_names or top in sys.builtin_module_names:
        raise RefusedImportError(f"{top!r} is part of Python's standard library, which a config may not use")


def _require_home(found: Any, path: str) -> None:
    """Refuse objects that an allowed module has imported from the standard library: `my_rewards:Popen`."""
    while isinstance(found, functools.partial):
        found = found.func
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return
    home = getattr(found, "__module__", None) or "builtins"
    if home.partition(".")[0] in sys.stdlib_module_names:
        name = getattr(found, "__qualname__", str(found))
        raise RefusedImportError(f"{path!r} is {home}.{name} of Python's standard library, which a config may not use")


def _named_folders() -> Iterator[Path]:
    yield from code_folders()
    if not sys.flags.ignore_environment:
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            if entry:  # an empty entry means the current folder, mostly by accident
                yield Path(os.path.abspath(entry))


@functools.cache
def _installed_folders() -> tuple[Path, ...]:
    """Return the folders of installed packages, including the sources of editable ones."""
    found = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    places = list(dict.fromkeys(Path(place) for place in found))
    return (*places, *(folder for place in places for folder in (*_editable_sources(place), *_path_files(place))))


def _editable_sources(place: Path) -> Iterator[Path]:
    for distribution in distributions(path=[str(place)]):
        text = distribution.read_text("direct_url.json")
        url = json.loads(text) if text else {}
        if url.get("dir_info", {}).get("editable") and url.get("url", "").startswith("file:"):
            yield Path(url2pathname(urlsplit(url["url"]).path))


def _path_files(place: Path) -> Iterator[Path]:
    for file in sorted(place.glob("*.pth")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.strip() and not line.startswith(("#", "import ", "import\t")):
                yield place / line.strip()


def _is_same(folder: Path, other: Path) -> bool:
    """Return whether two paths are the same folder, as written or after resolving symbolic links."""
    return folder == other or os.path.realpath(folder) == os.path.realpath(other)


def _is_below(origin: str, folder: Path) -> bool:
    """Return whether a file is in a folder, as written or after resolving symbolic links."""
    return any(Path(form(origin)).is_relative_to(form(folder)) for form in (os.path.abspath, os.path.realpath))


def trusting(value: Any, path: str = "") -> Iterator[str]:
    """Yield the config paths that allow code to run."""
    items = value if isinstance(value, Mapping) else dict(enumerate(value if isinstance(value, list) else ()))
    for key, item in items.items():
        if key == TRUST and item is True:
            yield join(path, key)
        yield from trusting(item, join(path, key))


def refuse_unless_trusted(config: Mapping[str, Any], is_trusted: bool, source: str, blocks: tuple[str, ...]) -> None:
    """Require the user's permission if one of these blocks of the config in a run's folder allows code to run.

    Raises:
        ConfigError: code would run without the user's permission.
    """
    message = "true in a run's folder, which may come from another user: if you trust the code, add --trust_remote_code"
    issues = [ConfigIssue(path, message) for path in trusting({key: config.get(key) for key in blocks})]
    if issues and not is_trusted:
        raise ConfigError(issues, source)


def trust_option(config: Mapping[str, Any]) -> str:
    """Return the option needed to resume a run of this config: ` --trust_remote_code`, or an empty string."""
    return f" --{TRUST}" if any(trusting(config)) else ""
