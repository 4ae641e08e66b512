"""Describe registered components: one line per id, or one id in full. Reads tables and signatures, imports no torch."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Collection
from typing import Any

from rl4lms_like.core.errors import ConfigError, ConfigIssue
from rl4lms_like.core.registry import Entry, Registry
from rl4lms_like.core.schema import Argument, signature_of
from rl4lms_like.core.wording import shown, without_sections
from rl4lms_like.training.config.binding import takes_shaping
from rl4lms_like.training.config.places import FILLED_IN, REGISTRIES
from rl4lms_like.training.config.run_config import SupervisedAlgConfig

WIDTH = 100
SHAPING_HELP = "as for every reward: shaping_fn, the id or {id, args} of a reward that is added to this one"


def listing(kind: str) -> str:
    """Return the ids of a registry (`rewards`), each with its summary and requirements."""
    registry = REGISTRIES[kind]
    ids = registry.ids()
    width = max(map(len, ids), default=0)
    return "\n".join(f"{id:<{width}}  {_summary(registry, id)}" for id in ids)


def description(id: str) -> str:
    """Return the full description of an id from every registry that has it.

    Raises:
        ConfigError: no registry has the id.
    """
    if id == "supervised":
        return _supervised()
    found = [registry for registry in REGISTRIES.values() if id in registry]
    if not found and ":" in id:
        return _describe(_fitting(id), id, kind="component")
    if not found:
        unknown = [ConfigIssue("", registry.unknown(id)) for registry in REGISTRIES.values()]
        near = [issue for issue in unknown if "did you mean" in issue.message]
        raise ConfigError(near or unknown, f"the id {id!r}")
    return "\n\n".join(_describe(registry, id, kind=registry.kind) for registry in found)


def table_rows(
    target: Callable[..., Any], *, required: str = "required", exclude: Collection[str] = ("notices",)
) -> list[str]:
    """Return the arguments of a component or config block as rows of a Markdown table: key, type, default, meaning."""
    rows = []
    for argument in signature_of(target, exclude=exclude).arguments:
        default = required if argument.required else f"`{shown(argument.default)}`"
        if dataclasses.is_dataclass(argument.default) or dataclasses.is_dataclass(argument.annotation):
            default, values = "", "a block"
        else:
            values = argument.type_text
        rows.append(f"| `{argument.name}` | {values} | {default} | {argument.help} |")
    return rows


def _fitting(path: str) -> Registry:
    """Return the registry that accepts the component at an import path.

    Raises:
        ConfigError: no registry accepts it, or it cannot be imported.
    """
    for registry in sorted(REGISTRIES.values(), key=lambda registry: registry.kind != "reward"):
        try:
            registry.resolve(path)
        except ConfigError as error:
            if error.__cause__ is not None:  # it cannot be imported
                raise
        else:
            return registry
    kinds = ", ".join(registry.kind for registry in REGISTRIES.values())
    raise ConfigError([ConfigIssue("", f"{path!r} is none of {kinds}")], f"the id {path!r}")


def import_path(entry: Entry) -> str:
    """Return the import path of a component."""
    target = entry.target
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"


def text_and_excluded(registry: Registry, id: str) -> tuple[str, Collection[str]]:
    """Return a component's docstring without sections, and its parameters that a config cannot set."""
    if registry.entry(id).arguments is not None:
        return "", ()
    return without_sections(inspect.getdoc(registry.signature(id)) or ""), FILLED_IN.get(registry.kind, ())


def _describe(registry: Registry, id: str, *, kind: str) -> str:
    entry, target = registry.entry(id), registry.signature(id)
    text, exclude = text_and_excluded(registry, id)
    signature = signature_of(target, exclude=exclude)
    lines = [f"{id} ({kind})", f"  {_summary(registry, id)}", f"  {import_path(entry)}"]
    lines += ["", textwrap.indent(text, "  ")] if text else []
    lines += ["", "  arguments:" if signature.arguments or signature.open else "  no arguments"]
    lines += [line for argument in signature.arguments for line in _argument(argument)]
    if signature.open:
        lines.append("    any other keyword argument")
    if takes_shaping(registry, target):
        lines += ["", f"  {SHAPING_HELP}"]
    if entry.keys:
        lines += ["", "  reports:", *(f"    {key}" for key in entry.keys)]
    return "\n".join(lines)


def _supervised() -> str:
    """Return the description of `supervised`, which is in no registry: a supervised run has its own `alg` block."""
    head = "supervised (alg.id)\n  trains on the references of a data pool with transformers' Trainer\n\n  keys of alg:"
    keys = signature_of(SupervisedAlgConfig).arguments
    return "\n".join([head, *(line for key in keys for line in _argument(key))])


def _argument(argument: Argument) -> list[str]:
    value = "required" if argument.required else f"default {shown(argument.default)}"
    lines = [f"    {argument.name}: {argument.type_text} ({value})"]
    return lines + textwrap.wrap(argument.help, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _summary(registry: Registry, id: str) -> str:
    entry = registry.entry(id)
    return entry.summary + (f" [needs {entry.needs}]" if entry.needs else "")
