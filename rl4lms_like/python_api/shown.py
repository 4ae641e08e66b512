"""A run in a notebook: its report inline, and a short table in place of its `repr`."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HEIGHT = 640
"""Height of the report in a notebook, in pixels."""


@dataclass(frozen=True)
class Report(os.PathLike[str]):
    """The report of a run: a file, which a notebook shows inline.

    Args:
        path: `report.html` in the folder of the run.
    """

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        # The page is self-contained. In a frame, its styles do not apply to the notebook.
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" width="100%" height="{HEIGHT}" style="border: 0"></iframe>'


def table_html(rows: Mapping[str, object]) -> str:
    """Return a table with a name and a value in each row."""
    lines = []
    for name, value in rows.items():
        head = f'<th style="text-align: left">{html.escape(name)}</th>'
        lines.append(f'<tr>{head}<td style="text-align: left">{html.escape(str(value))}</td></tr>')
    return f"<table>{''.join(lines)}</table>"
