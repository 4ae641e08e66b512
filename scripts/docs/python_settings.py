"""Write the tables of settings in docs/python.md, from the classes of the config.

    python -m scripts.docs.python_settings docs/python.md

The tables are between the lines `<!-- settings -->` and `<!-- end of settings -->` of the page. Values, defaults and
meanings are on the page of the configuration.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.config.binding import RunKind
from rl4lms_like.core.marked_parts import with_part
from rl4lms_like.python_api.setting_names import flat_names, is_ambiguous
from rl4lms_like.system.registry import Registry

TRAINER = "alg.training_args"
"""Block of transformers' `TrainingArguments`, which the page names without listing them."""


OF_TRAINER = (
    "Besides these, every field of transformers' `TrainingArguments` that a run does not set itself, such as "
    "`learning_rate`, `num_train_epochs`, `max_steps` and `per_device_train_batch_size`."
)


def tables() -> str:
    """Return the tables of settings as Markdown."""
    rollouts = set(_keys_by_name("on_policy", ALGORITHMS).items())
    # A name may be a key of two blocks, one for each kind of run.
    offline = set(_keys_by_name("supervised", None).items()) | set(_keys_by_name("preference", OBJECTIVES).items())
    return "\n".join(
        (
            "### Of runs with rollouts\n",
            *_as_markdown(rollouts),
            "\n### Of runs that learn from data\n",
            textwrap.fill(OF_TRAINER, 120) + "\n",
            *_as_markdown(offline),
            "",
        )
    )


def _keys_by_name(kind: RunKind, registry: Registry | None) -> dict[str, tuple[str, ...]]:
    """Return the keys of a file that each setting of a kind of run sets, of any algorithm."""
    keys = {}
    for id in ["supervised"] if registry is None else registry.ids():
        for name, paths in flat_names(kind, id).items():
            if not paths[0].startswith(f"{TRAINER}.") and not is_ambiguous(name, paths):
                keys[name] = tuple(paths)
    return keys


def _as_markdown(keys: set[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Return a table of names and keys, a row for each block; behind a name that is not that of its key is the key."""
    settings: dict[str, list[str]] = {}
    for name, paths in sorted(keys):
        blocks = ", ".join(f"`{path.rpartition('.')[0]}`" if "." in path else "top level" for path in paths)
        key = paths[0].rpartition(".")[2]
        settings.setdefault(blocks, []).append(f"`{name}`" if name == key else f"`{name}` (`{key}`)")
    rows = [f"| {blocks} | {', '.join(names)} |" for blocks, names in sorted(settings.items())]
    return ["| block of a file | settings |", "|---|---|", *rows]


def with_tables(page: str) -> str:
    """Return a page with the tables between its marks."""
    return with_part(page, "settings", f"\n{tables()}\n")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text(encoding="utf-8")), encoding="utf-8")
