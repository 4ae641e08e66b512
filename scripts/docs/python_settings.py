"""Write the tables of settings in docs/python.md, from the classes of the config.

    python -m scripts.docs.python_settings docs/python.md

The tables are between the lines `<!-- settings -->` and `<!-- end of settings -->` of the page.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.config.binding import RunKind
from rl4lms_like.python_api.setting_names import Paths, blocks_of, flat_names, is_ambiguous
from rl4lms_like.system.registry import Registry
from rl4lms_like.system.schema import REQUIRED, Argument, join
from rl4lms_like.system.wording import shown

BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->\n"

TRAINER = "alg.training_args"
"""Block of transformers' `TrainingArguments`, which the page names without listing them."""


OF_TRAINER = (
    "Besides these, every field of transformers' `TrainingArguments` that a run does not set itself, such as "
    "`learning_rate`, `num_train_epochs`, `max_steps` and `per_device_train_batch_size`."
)


def tables() -> str:
    """Return the tables of settings as Markdown."""
    rollouts = _table("on_policy", ALGORITHMS)
    preferences = _table("preference", OBJECTIVES)
    supervised = _table("supervised", None)
    offline = preferences + [row for row in supervised if row not in preferences]
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


def _as_markdown(rows: Sequence[tuple[str, ...]]) -> list[str]:
    head = ("setting", "key of a file", "values", "default", "of")
    lines = [_line(head), "|---|---|---|---|---|"]
    return lines + [_line(row) for row in sorted(rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _table(kind: RunKind, registry: Registry | None) -> list[tuple[str, ...]]:
    """Return name, paths, values, default and algorithms of each setting of a kind of run."""
    ids = ["supervised"] if registry is None else registry.ids()

    # A setting that several algorithms have may have another default for each of them.
    paths_of: dict[str, Paths] = {}
    arguments_of: dict[str, list[Argument]] = {}
    algorithms_of: dict[str, list[str]] = {}
    for id in ids:
        arguments = {}
        for block, of_block in blocks_of(kind, id).items():
            arguments |= {join(block, argument.name): argument for argument in of_block}
        for name, paths in flat_names(kind, id).items():
            if paths[0].startswith(f"{TRAINER}.") or is_ambiguous(name, paths):
                continue
            paths_of[name] = paths
            arguments_of.setdefault(name, []).append(arguments[paths[0]])
            algorithms_of.setdefault(name, []).append(id)

    rows = []
    for name, paths in paths_of.items():
        of_all = len(algorithms_of[name]) == len(ids)
        values = arguments_of[name][0].type_text
        keys = ", ".join(f"`{path}`" for path in paths)
        rows.append((f"`{name}`", keys, values, _default(arguments_of[name]), _algorithms(algorithms_of[name], of_all)))
    return rows


def _default(arguments: Sequence[Argument]) -> str:
    defaults = {repr(argument.default): argument.default for argument in arguments}
    if len(defaults) > 1:
        return "by algorithm"
    default = next(iter(defaults.values()))
    if default is REQUIRED:
        return "-"
    return f"`{shown(default)}`" if default is None or isinstance(default, str | int | float) else f"`{default}`"


def _algorithms(ids: Sequence[str], of_all: bool) -> str:
    if of_all:
        return "all"
    return ", ".join(ids) if len(ids) <= 4 else f"{', '.join(ids[:3])} and {len(ids) - 3} more"


def with_tables(page: str) -> str:
    """Return a page with the tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text(encoding="utf-8")), encoding="utf-8")
