"""Registries of components. A component can be selected in three ways.

    id            `rouge`                  a row of the registry's table, or `register`ed by the user
    import path   `my_project.rewards:Short`   no registration needed
    entry point   group `rl4lms_like.rewards` of an installed package

Rows name their target by import path, so that listing ids imports nothing. A component that is not in the table must
be in a location from which configs may import code (`system.import_paths`) and be of the registry's kind. Both are
checked before it is called.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from rl4lms_like.system.errors import ConfigError, ConfigIssue, MissingExtraError
from rl4lms_like.system.import_paths import RefusedImportError, imported
from rl4lms_like.system.secrets import with_values
from rl4lms_like.system.wording import raised

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One row of a registry.

    Args:
        target: the component, or its import path `package.module:Name`; in a registry's table also `.module:Name`,
            relative to the package with the name of the registry's group.
        summary: one line for `rl4lms-like list`.
        arguments: import path of the callable whose signature lists the component's `args`; default: the component
            itself. Heavy components describe their arguments in a dataclass that does not import torch.
        needs: requirements beyond the core installation, in words (`extra 'semantic'`, `Java 8`).
        keys: the result keys of a metric; `{n}` is a placeholder for a part that depends on its arguments.
    """

    target: Any
    summary: str
    arguments: str | None = None
    needs: str = ""
    keys: tuple[str, ...] = ()


class Registry:
    """Components of one kind, by id.

    Args:
        kind: the noun used in messages, `reward`.
        group: the entry-point group scanned for components of other packages.
        table: id -> `Entry`.
        signature_of: maps a component to the callable that receives its `args` (for a data pool, `prepare`).
        misfit: returns why an object at an import path is not a component of this kind; None if it is one.
    """

    def __init__(
        self,
        kind: str,
        *,
        group: str,
        table: Mapping[str, Entry],
        signature_of: Callable[[Any], Callable[..., Any]] = lambda component: component,
        misfit: Callable[[Any], str | None] = lambda component: None,
    ) -> None:
        self.kind = kind
        self.group = group
        self._signature_of = signature_of
        self._misfit = misfit
        self._entry_points: dict[str, EntryPoint] | None = None  # None until they are needed

        # The group has the name of the package whose modules the table lists: `rl4lms_like.rewards`.
        self._table: dict[str, Entry] = {}
        for id, entry in table.items():
            if isinstance(entry.target, str) and entry.target.startswith("."):
                entry = replace(entry, target=group + entry.target)
            self._table[id] = entry

    def register(self, id: str, *, summary: str | None = None) -> Callable[[T], T]:
        """Return a decorator that adds a component under `id`; default summary: the first line of its docstring."""

        def add(component: T) -> T:
            self.add(id, component, summary=summary)
            return component

        return add

    def add(self, id: str, component: Any, *, summary: str | None = None) -> None:
        """Add a component under `id` (RL4LMs' `Registry.add`). A later one replaces an earlier one."""
        first_line = (inspect.getdoc(component) or "").partition("\n")[0]
        self._table[id] = Entry(component, summary or first_line)

    def ids(self) -> list[str]:
        """Return all ids, first those of the table, then those of entry points."""
        return [*self._table, *(name for name in self._points() if name not in self._table)]

    def entry(self, id: str) -> Entry:
        """Return the row of `id`, also for entry points and import paths.

        Raises:
            ConfigError: unknown id; the message lists the known ids and suggests the nearest.
        """
        if id in self._table:
            return self._table[id]
        if id in self._points():
            import_path = self._points()[id].value
            return Entry(import_path, f"from {import_path}")
        if ":" in id:
            return Entry(id, f"from {id}")
        raise ConfigError([ConfigIssue("", self.unknown(id))], f"the {self.kind} id")

    def id_of(self, component: Any) -> str | None:
        """Return the id of a class or function of the table; None for any other."""
        import_path = f"{component.__module__}:{component.__qualname__}"
        for id, entry in self._table.items():
            if entry.target is component or entry.target == import_path:
                return id
        return None

    def unknown(self, id: str) -> str:
        """Return the message for an unknown id."""
        nearest = difflib.get_close_matches(id, self.ids(), n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        ids = ", ".join(sorted(self.ids()))
        return f"unknown {self.kind} {id!r}; {hint}known: {ids}; or give an import path 'package.module:Name'"

    def resolve(self, id: str) -> Any:
        """Return the component, imported if necessary.

        Raises:
            ConfigError: the id is unknown, its import path cannot be imported or refers to code that a config may not
                use, or the object is not a component of this kind.
            MissingExtraError: its module needs a package that is not installed.
        """
        target = self.entry(id).target
        component = _load(target, self.kind)

        # Rows of the table were written or registered in Python, where a component of any class may be used. Other ids
        # come from a config, which could name any object of an installed package and have it called.
        if isinstance(target, str) and id not in self._table:
            misfit = self._misfit(component)
            if misfit is not None:
                raise self._invalid(id, misfit)
        return component

    def signature(self, id: str) -> Callable[..., Any]:
        """Return the callable whose signature lists the `args` of the component.

        Raises:
            ConfigError: see `resolve`; or the object is not a component of this kind.
            MissingExtraError: see `resolve`.
        """
        entry = self.entry(id)
        if entry.arguments is not None:
            return _load(entry.arguments, self.kind)

        component = self.resolve(id)
        try:
            target = self._signature_of(component)
        except AttributeError as error:  # such as a data pool without `prepare`
            raise self._invalid(id, error) from error
        if not callable(target):
            raise self._invalid(id, repr(target))
        return target

    def arguments_class(self, id: str) -> Any:
        """Return the class or function that receives the `args` of a component; None if its package is not installed.

        Raises:
            ConfigError: see `signature`.
        """
        try:
            target = self.signature(id)
        except MissingExtraError:  # not an error in the config; building the component reports what to install
            return None
        return getattr(target, "arguments_class", target)

    def _invalid(self, id: str, reason: object) -> ConfigError:
        return ConfigError([ConfigIssue("", f"{id!r} is not a valid {self.kind}: {reason}")], f"the {self.kind} id")

    def get(self, id: str, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Build the component with `kwargs` (RL4LMs' `Registry.get`); a data pool is prepared.

        Values such as `${MY_KEY}` are replaced by the values of environment variables.
        """
        return self._signature_of(self.resolve(id))(**with_values(kwargs or {}))

    def _points(self) -> Mapping[str, EntryPoint]:
        # Read once: this searches the metadata of all installed packages.
        if self._entry_points is None:
            self._entry_points = {point.name: point for point in entry_points(group=self.group)}
        return self._entry_points

    def __contains__(self, id: str) -> bool:
        return id in self._table or id in self._points()

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids())


def derived_from(*bases: str, alternative: str = "") -> Callable[[Any], str | None]:
    """Return a `misfit` function for a registry whose components are classes derived from one of `bases`.

    Args:
        bases: `package.module:Name`; compared by name, so that nothing is imported.
        alternative: what else is accepted, for the message.
    """
    expected = " or ".join(base.rpartition(":")[2] for base in bases) + alternative
    hint = "derive it, or register it in Python under an id"

    def misfit(component: Any) -> str | None:
        if not inspect.isclass(component):
            return f"expected a class derived from {expected}, got a {type(component).__name__}; {hint}"
        names = {f"{base.__module__}:{base.__qualname__}" for base in component.__mro__}
        if names.isdisjoint(bases):
            return f"its class is not derived from {expected}; {hint}"
        return None

    return misfit


def _load(target: Any, kind: str) -> Any:
    """Return a component; one that is named by its import path is imported."""
    if not isinstance(target, str):
        return target

    # Both errors come with the other errors of the config, so they need the id. A `MissingExtraError` already says what
    # to install.
    try:
        return imported(target)
    except (MissingExtraError, KeyboardInterrupt):
        raise
    except RefusedImportError as error:
        raise ConfigError([ConfigIssue("", f"the {kind} {target!r} is refused: {error}")], f"the {kind} id") from error
    except BaseException as error:  # importing a user's module runs the user's code, which may exit
        issue = ConfigIssue("", f"cannot import the {kind} {target!r}: {raised(error)}")
        raise ConfigError([issue], f"the {kind} id") from error
