"""Generate the catalogue page of the documentation from the same tables and signatures as `rl4lms-like show`.

python -m rl4lms_like.training.catalogue_page docs/catalogue.md      regenerates the page
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rl4lms_like.core.errors import MissingExtraError
from rl4lms_like.core.registry import Registry
from rl4lms_like.training.catalogue import import_path, table_rows, text_and_excluded
from rl4lms_like.training.config.places import REGISTRIES

_OPENING = """\
# Catalogue

All components by id. A config gives the `id` of a component, and its arguments under `args`. `rl4lms-like list rewards`
prints the tables, `rl4lms-like show meteor` prints one entry. Your own component needs no id, only its import path:
`my_project.rewards:Short` ([extend](extend/reward.md)).

<!-- This page is generated: python -m rl4lms_like.training.catalogue_page docs/catalogue.md -->
"""


_KEYS_IN_ROW = 4
"""Number of result keys in a table row; the entry lists all of them."""


def page() -> str:
    """Return the whole page as Markdown."""
    tables = [_tables(kind, registry) for kind, registry in REGISTRIES.items()]
    entries = [
        _entry(registry, id, heading=f"{id} ({registry.kind})") for registry in REGISTRIES.values() for id in registry
    ]
    return "\n".join([_OPENING, *tables, "## Entries\n", *entries])


def _tables(kind: str, registry: Registry) -> str:
    """Return the table of one registry, one row per id."""
    rows = []
    reports = any(registry.entry(id).keys for id in registry)
    for id in registry:
        entry = registry.entry(id)
        cells = [f"[`{id}`](#{_anchor(f'{id} ({registry.kind})')})", _escaped(entry.summary), _escaped(entry.needs)]
        rows.append(" | ".join(cells + ([_keys(entry.keys[:_KEYS_IN_ROW], len(entry.keys))] if reports else [])))
    titles = ["id", "what it is", "needs", *(["reports"] if reports else [])]
    lines = [" | ".join(titles), " | ".join(["---"] * len(titles)), *rows]
    page = [f"## {kind.replace('_', ' ').capitalize()}", "", *(f"| {line} |" for line in lines), ""]
    if registry.kind == "reward":
        page += ["Every reward also takes `shaping_fn`: the id or `{id, args}` of a reward that is added to it.", ""]
    return "\n".join(page)


def _entry(registry: Registry, id: str, *, heading: str) -> str:
    """Return the entry of one component: import path, docstring and arguments."""
    entry = registry.entry(id)
    lines = [f"### {heading}", "", f"`{import_path(entry)}`", ""]
    try:
        target = registry.signature(id)
    except MissingExtraError as error:
        return "\n".join([*lines, str(error), ""])
    text, exclude = text_and_excluded(registry, id)
    lines += [text, ""] if text else []
    if rows := table_rows(target, exclude=exclude):
        lines += ["| argument | values | default | meaning |", "|---|---|---|---|", *rows, ""]
    if len(entry.keys) > _KEYS_IN_ROW:
        lines += [f"Reports {_keys(entry.keys, len(entry.keys))}.", ""]
    return "\n".join(lines)


def _keys(keys: Sequence[str], n_keys: int) -> str:
    more = f" and {n_keys - len(keys)} more" if n_keys > len(keys) else ""
    return ", ".join(f"`{key}`" for key in keys) + more


def _anchor(heading: str) -> str:
    """Return the anchor of a heading: lower case, spaces replaced by hyphens, punctuation dropped."""
    kept = "".join(character for character in heading.lower() if character.isalnum() or character in " -_")
    return kept.replace(" ", "-")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
