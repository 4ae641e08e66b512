"""Import paths `package.module:Name` of a config, and where the code that they name may lie.

    this library, installed packages      yes, editable ones too
    what is imported already, __main__    yes: the program that uses the library chose it
    folders that the user names           yes: --code DIR, `use_code_from`, $RL4LMS_LIKE_CODE, $PYTHONPATH
    the current folder                    only where it is named
    Python's standard library             never: it has no components, and starts programs

A config may come from somebody else. It chooses among the code that its user trusts already, and brings none.
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
from collections.abc import Iterator
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
from rl4lms_like.core.errors import ConfigError, MissingExtraError, Mistake

CODE_VARIABLE = "RL4LMS_LIKE_CODE"
"""Environment variable with the folders that the user names; processes that a run starts inherit it."""

_LIBRARY = __name__.partition(".")[0]


class RefusedImportError(ImportError):
    """An import path leads to code that a config may not choose; says why, and the way out."""


def use_code_from(*folders: str | Path) -> None:
    """Names folders with modules of one's own, which configs may then name: what `--code DIR` does.

    Installed packages come first where names are the same. Processes that are started from now on know the folders too.

    Raises:
        ConfigError: there is no such folder.
    """
    known = [str(folder) for folder in code_folders()]
    for folder in folders:
        place = with_home(folder)
        if not place.is_dir():
            raise ConfigError([Mistake("--code", f"there is no folder {str(folder)!r}")], "the command line")
        if (text := os.path.abspath(place)) not in known:
            known.append(text)
    if known:
        os.environ[CODE_VARIABLE] = os.pathsep.join(known)
    _put_on_path()


def code_folders() -> list[Path]:
    """The folders that the user has named for code, in order."""
    return [Path(os.path.abspath(folder)) for folder in os.environ.get(CODE_VARIABLE, "").split(os.pathsep) if folder]


def code_options() -> str:
    """What a command line needs to name the same folders: ` --code /my/project`, or nothing."""
    return "".join(f" --code {shlex.quote(str(folder))}" for folder in code_folders())


def imported(path: str) -> Any:
    """The object at an import path of a config.

    Raises:
        RefusedImportError: its code is not among what a config may choose.
        Exception: whatever importing its module raises; that runs the user's code.
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
    """The import path, if it leads somewhere; a text without a colon is left to the component's own checks.

    Raises:
        ValueError: it leads nowhere, or to code that a config may not choose.
    """
    if ":" not in path:
        return path
    try:
        imported(path)
    except MissingExtraError:  # building the component says what to install
        return path
    except RefusedImportError as error:
        raise ValueError(f"{path!r} is refused: {error}") from error
    except Exception as error:  # importing a user's module runs the user's code
        raise ValueError(f"cannot import {path!r}: {type(error).__name__}: {error}") from error
    return path


ImportPath: TypeAlias = Annotated[str, AfterValidator(importable)]
"""The import path of a function; looked up when a config is checked."""


def _put_on_path() -> None:
    """Behind everything else, so that a folder's `datasets.py` never stands in for the package of that name."""
    sys.path += [str(folder) for folder in code_folders() if str(folder) not in sys.path]


def _require_place(module: str) -> None:
    """Nothing, or the reason why this module may not be named; imports its parent packages at most."""
    _refuse_standard_library(module)
    if module.partition(".")[0] == _LIBRARY or module in sys.modules:
        return
    names = module.split(".")
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        if getattr(sys.modules.get(name), "__file__", None) is not None:
            return  # a package that is imported already, or was found in a good place just now
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
    if any(_is_same(root, folder) for folder in _named_folders()):  # what lies deeper is of another name there
        return
    if not any(_is_below(spec.origin, folder) for folder in _installed_folders()):
        raise RefusedImportError(_unnamed(spec.name, root))


def _unnamed(name: str, folder: Path) -> str:
    place = "the current folder" if folder == Path.cwd() else str(folder)
    option = "." if folder == Path.cwd() else shlex.quote(str(folder))
    return (
        f"the module {name!r} lies in {place}, which is no place of installed packages. If the code there is yours, "
        f"name the folder: --code {option}; in Python, import the module before, or call use_code_from({str(folder)!r})"
    )


def _refuse_standard_library(module: str, *, known: bool = False) -> None:
    top = module.partition(".")[0]
    if known or top in sys.stdlib_module_names or top in sys.builtin_module_names:
        raise RefusedImportError(f"{top!r} is part of Python's standard library, which a config cannot call")


def _require_home(found: Any, path: str) -> None:
    """Refuses what a good module has only imported from the standard library: `my_rewards:Popen`."""
    while isinstance(found, functools.partial):
        found = found.func
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return
    home = getattr(found, "__module__", None) or "builtins"
    if home.partition(".")[0] in sys.stdlib_module_names:
        name = getattr(found, "__qualname__", str(found))
        raise RefusedImportError(f"{path!r} is {home}.{name} of Python's standard library, which a config cannot call")


def _named_folders() -> Iterator[Path]:
    yield from code_folders()
    if not sys.flags.ignore_environment:
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            if entry:  # an empty one means the current folder, mostly by accident
                yield Path(os.path.abspath(entry))


@functools.cache
def _installed_folders() -> tuple[Path, ...]:
    """Where installed packages lie, the sources of editable ones included."""
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
    """Whether two paths are of one folder, as both are written or with symbolic links followed."""
    return folder == other or os.path.realpath(folder) == os.path.realpath(other)


def _is_below(origin: str, folder: Path) -> bool:
    """Whether a file lies in a folder, as both are written or with symbolic links followed."""
    return any(Path(form(origin)).is_relative_to(form(folder)) for form in (os.path.abspath, os.path.realpath))
