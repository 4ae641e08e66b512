"""Describe registered components: one line per id, one id in full, or all as a page of the documentation's site.

Reads tables and signatures, imports no torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rl4lms_like.algorithms.rules import OF_CRITICS
from rl4lms_like.config.binding import FILLED_IN, REGISTRIES, takes_shaping
from rl4lms_like.config.run_config import SupervisedAlgConfig
from rl4lms_like.rewards import EXPLAINED_FINDINGS, REWARDS
from rl4lms_like.system.errors import ConfigError, ConfigIssue, MissingExtraError
from rl4lms_like.system.registry import Entry, Registry
from rl4lms_like.system.schema import Argument, signature_of
from rl4lms_like.system.wording import shown, without_sections

WIDTH = 100
SHAPING_HELP = "as for every reward: shaping_fn, the id or {id, args} of a reward that is added to this one"

_OPENING = """\
# Catalogue

All components by id. A config gives the `id` of a component, and its arguments under `args`. `rl4lms-like list rewards`
prints the tables, `rl4lms-like show meteor` prints one entry. Your own component needs no id, only its import path:
`my_project.rewards:Short` ([extend](extend/reward.md)).
"""

_KEYS_IN_ROW = 4
"""Number of result keys in a table row; the entry lists all of them."""


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

    # One id may be in several registries: `rouge` is a reward and a metric.
    registries = [registry for registry in REGISTRIES.values() if id in registry]
    if registries:
        return "\n\n".join(_describe(registry, id, kind=registry.kind) for registry in registries)
    if ":" in id:
        return _describe(_fitting(id), id, kind="component")

    # Any registry could be meant. If the id is nearly one of theirs, the others would only list what they have.
    unknown = [ConfigIssue("", registry.unknown(id)) for registry in REGISTRIES.values()]
    near = [issue for issue in unknown if "did you mean" in issue.message]
    raise ConfigError(near or unknown, f"the id {id!r}")


def table_rows(
    target: Callable[..., Any], *, required: str = "required", exclude: Collection[str] = ("notices",)
) -> list[str]:
    """Return the arguments of a component or config block as rows of a Markdown table: key, type, default, meaning."""
    rows = []
    for argument in signature_of(target, exclude=exclude).arguments:
        values = argument.type_text
        default = required if argument.required else f"`{shown(argument.default)}`"

        # A dataclass is a nested block, which has a table of its own.
        if dataclasses.is_dataclass(argument.default) or dataclasses.is_dataclass(argument.annotation):
            values = "a block"
            default = ""
        rows.append(f"| `{argument.name}` | {values} | {default} | {argument.help} |")
    return rows


def _fitting(path: str) -> Registry:
    """Return the registry that accepts the component at an import path.

    Raises:
        ConfigError: no registry accepts it, or it cannot be imported.
    """
    # Rewards first, for a component that fits several kinds.
    for registry in sorted(REGISTRIES.values(), key=lambda registry: registry.kind != "reward"):
        try:
            registry.resolve(path)
        except ConfigError as error:
            if error.__cause__ is not None:  # it cannot be imported, which no other registry changes
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
    # The arguments are those of a dataclass, whose docstring does not describe the component.
    if registry.entry(id).arguments is not None:
        needs_critic = getattr(registry.signature(id), "needs_critic", True)
        return "", () if needs_critic else (*OF_CRITICS, "gae_lambda", "gae_length_alpha")
    return without_sections(inspect.getdoc(registry.signature(id)) or ""), FILLED_IN.get(registry.kind, ())


def _describe(registry: Registry, id: str, *, kind: str) -> str:
    entry = registry.entry(id)
    target = registry.signature(id)
    text, exclude = text_and_excluded(registry, id)
    signature = signature_of(target, exclude=exclude)

    lines = [f"{id} ({kind})", f"  {_summary(registry, id)}", f"  {import_path(entry)}"]
    if text:
        lines += ["", textwrap.indent(text, "  ")]
    if hasattr(target, "formula"):  # an objective of preference training
        lines += ["", "  with the defaults:", *(f"        {line}" for line in target().formula())]

    lines += ["", "  arguments:" if signature.arguments or signature.open else "  no arguments"]
    for argument in signature.arguments:
        lines += _argument(argument)
    if signature.open:  # the component has `**kwargs`
        lines.append("    any other keyword argument")
    if takes_shaping(registry, target):
        lines += ["", f"  {SHAPING_HELP}"]

    if entry.keys:
        lines += ["", "  reports:", *(f"    {key}" for key in entry.keys)]
    findings = _findings(registry, id)
    if findings:
        lines += ["", "  findings of `check --reward`:"]
    for finding, explanation in findings.items():
        lines += [f"    {finding}", *_wrapped(explanation)]
    return "\n".join(lines)


def _supervised() -> str:
    """Return the description of `supervised`, which is in no registry: a supervised run has its own `alg` block."""
    lines = [
        "supervised (alg.id)",
        "  trains on the references of a data pool with transformers' Trainer",
        "",
        "  keys of alg:",
    ]

    for key in signature_of(SupervisedAlgConfig).arguments:
        lines += _argument(key)
    return "\n".join(lines)


def _argument(argument: Argument) -> list[str]:
    value = "required" if argument.required else f"default {shown(argument.default)}"
    lines = [f"    {argument.name}: {argument.type_text} ({value})"]
    return lines + _wrapped(argument.help)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _summary(registry: Registry, id: str) -> str:
    entry = registry.entry(id)
    return entry.summary + (f" [needs {entry.needs}]" if entry.needs else "")


def page() -> str:
    """Return the whole page as Markdown."""
    tables = [_table(kind, registry) for kind, registry in REGISTRIES.items()]

    # The kind in the heading: an id of two registries has two entries, each with an anchor.
    entries = []
    for registry in REGISTRIES.values():
        for id in registry:
            entries.append(_entry(registry, id, heading=f"{id} ({registry.kind})"))
    return "\n".join([_OPENING, *tables, "## Entries\n", *entries])


def _table(kind: str, registry: Registry) -> str:
    """Return the table of one registry, one row per id."""
    titles = ["id", "what it is", "needs"]
    has_keys = any(registry.entry(id).keys for id in registry)  # only metrics report keys
    if has_keys:
        titles.append("reports")

    rows = []
    for id in registry:
        entry = registry.entry(id)
        anchor = _anchor(f"{id} ({registry.kind})")
        cells = [f"[`{id}`](#{anchor})", _escaped(entry.summary), _escaped(entry.needs)]
        if has_keys:
            cells.append(_keys(entry, _KEYS_IN_ROW))
        rows.append(" | ".join(cells))

    lines = [" | ".join(titles), " | ".join(["---"] * len(titles)), *rows]
    section = [f"## {kind.replace('_', ' ').capitalize()}", "", *(f"| {line} |" for line in lines), ""]
    if registry.kind == "reward":
        section += ["Every reward also takes `shaping_fn`: the id or `{id, args}` of a reward that is added to it.", ""]
    return "\n".join(section)


def _entry(registry: Registry, id: str, *, heading: str) -> str:
    """Return the entry of one component: import path, docstring and arguments."""
    entry = registry.entry(id)
    lines = [f"### {heading}", "", f"`{import_path(entry)}`", ""]

    # The page can be made without all extras: the entry then says which one the component needs.
    try:
        target = registry.signature(id)
    except MissingExtraError as error:
        return "\n".join([*lines, str(error), ""])

    text, exclude = text_and_excluded(registry, id)
    if text:
        lines += [text, ""]
    rows = table_rows(target, exclude=exclude)
    if rows:
        lines += ["| argument | values | default | meaning |", "|---|---|---|---|", *rows, ""]

    if len(entry.keys) > _KEYS_IN_ROW:
        lines += [f"Reports {_keys(entry, len(entry.keys))}.", ""]
    findings = _findings(registry, id)
    if findings:
        lines += ["Findings of its [audit](reward_audit.md):", ""]
        lines += [*(f"* `{finding}`: {explanation}" for finding, explanation in findings.items()), ""]
    return "\n".join(lines)


def _findings(registry: Registry, id: str) -> Mapping[str, str]:
    """Return the findings of a reward's audit with their explanations."""
    return EXPLAINED_FINDINGS.get(id, {}) if registry is REWARDS else {}


def _keys(entry: Entry, n_shown: int) -> str:
    keys = ", ".join(f"`{key}`" for key in entry.keys[:n_shown])
    n_more = len(entry.keys) - n_shown
    return f"{keys} and {n_more} more" if n_more > 0 else keys


def _anchor(heading: str) -> str:
    """Return the anchor of a heading: lower case, spaces replaced by hyphens, punctuation dropped."""
    # As MkDocs makes it from a heading.
    letters = "".join(character for character in heading.lower() if character.isalnum() or character in " -_")
    return letters.replace(" ", "-")


def _escaped(text: str) -> str:
    """Escape the character that separates the cells of a table."""
    return text.replace("|", "\\|")
