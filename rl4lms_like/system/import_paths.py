"""Import paths `package.module:Name` of a config, and the locations from which code may be imported.

    this library, installed packages      yes, including editable ones
    modules already imported, __main__    yes: the program that uses the library chose them
    folders that the user names           yes: --code DIR, `use_code_from`, $RL4LMS_LIKE_CODE, $PYTHONPATH
    the current folder                    only if it is named
    FILE.py:Name                          that file, if its folder is allowed and no other module has its name
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

from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ConfigError, ConfigIssue, MissingExtraError
from rl4lms_like.system.schema import join

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
    allowed = [str(folder) for folder in code_folders()]
    for folder in folders:
        path = with_home(folder)
        if not path.is_dir():
            raise ConfigError([ConfigIssue("--code", f"there is no folder {str(folder)!r}")], "the command line")
        absolute = os.path.abspath(path)  # the current folder may be another one when a module is imported
        if absolute not in allowed:
            allowed.append(absolute)

    # The environment is what workers, Ray's tasks and the runs of a benchmark inherit.
    if allowed:
        os.environ[CODE_VARIABLE] = os.pathsep.join(allowed)
    _append_to_search_path()


def code_folders() -> list[Path]:
    """Return the code folders named by the user, in order."""
    folders = os.environ.get(CODE_VARIABLE, "").split(os.pathsep)
    return [Path(os.path.abspath(folder)) for folder in folders if folder]


def code_options() -> str:
    """Return the command-line options that name the same folders: ` --code /my/project`, or an empty string."""
    return "".join(f" --code {shlex.quote(str(folder))}" for folder in code_folders())


def imported(path: str) -> Any:
    """Return the object at an import path of a config.

    Raises:
        RefusedImportError: a config may not use its code.
        Exception: anything that importing its module raises, since this runs the user's code.
    """
    # Checked before the import, which already runs the module's code.
    module, _, name = path.rpartition(":")
    _append_to_search_path()
    if module.endswith(".py"):
        module = _module_of_file(module)
    _require_allowed_module(module)
    target: Any = importlib.import_module(module)

    # `my_rewards:os.system` would reach a module that was not checked, through one that was.
    for attribute in name.split("."):
        target = getattr(target, attribute)
        if isinstance(target, ModuleType):
            raise RefusedImportError(f"{attribute!r} is a module; name it before the colon: '{target.__name__}:...'")
    _require_allowed_object(target, path)
    return target


def _module_of_file(file: str) -> str:
    """Return the name under which `import` finds a file.

    Raises:
        FileNotFoundError: there is no such file.
        RefusedImportError: its folder is not one that the user named, or another module has its name.
    """
    path = Path(os.path.abspath(with_home(file)))
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    if not path.stem.isidentifier():
        raise RefusedImportError(f"{path.stem!r} is not the name of a module; rename the file {path.name!r}")

    # The program itself, or a module that it has imported. Another module of the same name would be returned by
    # `import` in place of the file.
    for name in ("__main__", path.stem):
        if _is_file_of(getattr(sys.modules.get(name), "__file__", None), path):
            return name
    if path.stem in sys.modules:
        other = getattr(sys.modules[path.stem], "__file__", None) or "built into Python"
        raise RefusedImportError(f"another module {path.stem!r} is imported already ({other}); rename {path.name!r}")

    if not any(_is_same(path.parent, folder) for folder in _named_folders()):
        raise RefusedImportError(_refusal(path.stem, path.parent))
    importlib.invalidate_caches()  # the file may be new
    spec = find_spec(path.stem)
    origin = None if spec is None else spec.origin
    if not _is_file_of(origin, path):
        raise RefusedImportError(f"`import {path.stem}` finds another module ({origin}); rename {path.name!r}")
    return path.stem


def _is_file_of(file: str | None, path: Path) -> bool:
    return file is not None and os.path.realpath(file) == os.path.realpath(path)


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


def _append_to_search_path() -> None:
    """Append the code folders to `sys.path`, so that their `datasets.py` never shadows the package of that name."""
    sys.path += [str(folder) for folder in code_folders() if str(folder) not in sys.path]


def _require_allowed_module(module: str) -> None:
    """Raise `RefusedImportError` if a config may not name this module; import at most its parent packages."""
    _refuse_standard_library(module)
    if module.partition(".")[0] == _LIBRARY or module in sys.modules:
        return

    # From the outer package inwards: `find_spec("a.b")` imports `a`, so `a` is checked before.
    names = module.split(".")
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        if getattr(sys.modules.get(name), "__file__", None) is not None:
            return  # already imported, by the program or as a parent that was checked in this loop
        if name in sys.modules:  # a namespace package: its parts may be in several folders
            continue

        spec = find_spec(name)
        if spec is None:
            raise _not_found(name)
        _require_allowed_spec(spec)

        # A package with code of its own is the user's choice, and finds its own modules.
        if spec.origin is not None and depth < len(names):
            return


def _not_found(name: str) -> ImportError:
    """Return the error for a module that Python does not find. Perhaps it is in the current folder, unsearched."""
    if "." not in name and PathFinder.find_spec(name, [os.getcwd()]) is not None:
        return RefusedImportError(_refusal(name, Path.cwd()))
    return ModuleNotFoundError(f"No module named {name!r}; --code DIR names a folder of your own modules", name=name)


def _require_allowed_spec(spec: ModuleSpec) -> None:
    """Raise `RefusedImportError` unless a module is in a folder that the user named or in one of installed packages."""
    if spec.origin in ("built-in", "frozen"):
        _refuse_standard_library(spec.name, is_known=True)
    if spec.origin is None:  # a namespace package, which has no code of its own
        return

    # The folder from which the module is imported: for `a.b`, the parent of `a`, whether `b` is `b.py` or
    # `b/__init__.py`. It must be the named folder itself: a module deeper in it has another name.
    is_package = spec.submodule_search_locations is not None
    n_levels = spec.name.count(".") + (2 if is_package else 1)
    root = Path(spec.origin).absolute().parents[n_levels - 1]
    if any(_is_same(root, folder) for folder in _named_folders()):
        return
    if not any(_is_below(spec.origin, folder) for folder in _installed_folders()):
        raise RefusedImportError(_refusal(spec.name, root))


def _refusal(name: str, folder: Path) -> str:
    """Return the message for a module in a folder that the user has not named."""
    folder_name = str(folder)
    option = shlex.quote(folder_name)
    if folder == Path.cwd():
        folder_name = "the current folder"
        option = "."
    return (
        f"the module {name!r} is in {folder_name}, not in an installed package. If you trust the code there, name the "
        f"folder: --code {option}; in Python, import the module first, or call use_code_from({str(folder)!r})"
    )


def _refuse_standard_library(module: str, *, is_known: bool = False) -> None:
    top = module.partition(".")[0]
    if is_known or top in sys.stdlib_module_names or top in sys.builtin_module_names:
        raise RefusedImportError(f"{top!r} is part of Python's standard library, which a config may not use")


def _require_allowed_object(target: Any, path: str) -> None:
    """Refuse objects that an allowed module has imported from the standard library: `my_rewards:Popen`."""
    while isinstance(target, functools.partial):
        target = target.func
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        return

    # Some functions written in C have no module, such as methods of built-in types; they are taken for Python's own.
    module = getattr(target, "__module__", None) or "builtins"
    if module.partition(".")[0] in sys.stdlib_module_names:
        name = getattr(target, "__qualname__", str(target))
        raise RefusedImportError(
            f"{path!r} is {module}.{name} of Python's standard library, which a config may not use"
        )


def _named_folders() -> Iterator[Path]:
    """Yield the folders that the user named for this library, and for Python in general."""
    yield from code_folders()
    if not sys.flags.ignore_environment:  # `python -E` and `python -I`
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            if entry:  # an empty entry means the current folder, mostly by accident
                yield Path(os.path.abspath(entry))


@functools.cache
def _installed_folders() -> tuple[Path, ...]:
    """Return the folders of installed packages, including the sources of editable ones."""
    names = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        names.append(site.getusersitepackages())
    site_folders = list(dict.fromkeys(Path(name) for name in names))

    # An editable package is only a link in a site folder; its code is where it was checked out.
    folders = list(site_folders)
    for folder in site_folders:
        folders += _editable_sources(folder)
        folders += _folders_of_path_files(folder)
    return tuple(folders)


def _editable_sources(site_folder: Path) -> Iterator[Path]:
    """Yield the sources of editable packages, as pip records them (PEP 610)."""
    for distribution in distributions(path=[str(site_folder)]):
        content = distribution.read_text("direct_url.json")
        url = json.loads(content) if content else {}
        if url.get("dir_info", {}).get("editable") and url.get("url", "").startswith("file:"):
            yield Path(url2pathname(urlsplit(url["url"]).path))


def _folders_of_path_files(site_folder: Path) -> Iterator[Path]:
    """Yield the folders that `.pth` files add to `sys.path`: one in a line; lines with `import` are code instead."""
    for file in sorted(site_folder.glob("*.pth")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.strip() and not line.startswith(("#", "import ", "import\t")):
                yield site_folder / line.strip()


def _is_same(folder: Path, other: Path) -> bool:
    """Return whether two paths are the same folder, as written or after resolving symbolic links."""
    return folder == other or os.path.realpath(folder) == os.path.realpath(other)


def _is_below(origin: str, folder: Path) -> bool:
    """Return whether a file is in a folder, as written or after resolving symbolic links."""
    if Path(os.path.abspath(origin)).is_relative_to(os.path.abspath(folder)):
        return True
    return Path(os.path.realpath(origin)).is_relative_to(os.path.realpath(folder))


def trusting(value: Any, path: str = "") -> Iterator[str]:
    """Yield the config paths that allow code to run."""
    items: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        items = value
    elif isinstance(value, list):
        items = dict(enumerate(value))

    for key, item in items.items():
        if key == TRUST and item is True:
            yield join(path, key)
        yield from trusting(item, join(path, key))


def refuse_unless_trusted(config: Mapping[str, Any], is_trusted: bool, source: str, blocks: tuple[str, ...]) -> None:
    """Require the user's permission if one of these blocks of the config in a run's folder allows code to run.

    Raises:
        ConfigError: code would run without the user's permission.
    """
    if is_trusted:
        return
    message = "true in a run's folder, which may come from another user: if you trust the code, add --trust_remote_code"
    used = {key: config.get(key) for key in blocks}
    issues = [ConfigIssue(path, message) for path in trusting(used)]
    if issues:
        raise ConfigError(issues, source)


def trust_option(config: Mapping[str, Any]) -> str:
    """Return the option needed to resume a run of this config: ` --trust_remote_code`, or an empty string."""
    return f" --{TRUST}" if any(trusting(config)) else ""
