"""Progress of a run in the cell of a notebook: one widget, in place of a line for each iteration."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rich.text import Text

SECONDS_BETWEEN = 0.25
"""Shortest time between two changes of the widget, each of which is a message to the browser."""


class WidgetBar:
    """Progress bar with the remaining time and a line of numbers.

    Args:
        widgets: the package ipywidgets.
        below: returns the line of numbers.
    """

    def __init__(self, widgets: ModuleType, below: Callable[[], Text]) -> None:
        self._below = below
        self._bar: Any = widgets.IntProgress()
        self._left: Any = widgets.HTML()
        self._numbers: Any = widgets.HTML()
        self._box: Any = widgets.VBox([widgets.HBox([self._bar, self._left]), self._numbers])
        self._is_shown = False
        self._changed_at = 0.0

    def begin(self, name: str, total: int, completed: int) -> None:
        """Show the widget."""
        from IPython.display import display

        self._bar.description = name
        self._bar.max = max(total, 1)
        self._is_shown = True
        self._change(completed, "")
        display(self._box)

    def move(self, completed: int, left: str) -> bool:
        """Show progress and the remaining time; return False if the widget is not shown."""
        is_due = time.monotonic() - self._changed_at >= SECONDS_BETWEEN or completed >= self._bar.max
        if self._is_shown and is_due:
            self._change(completed, f", {left} left")
        return self._is_shown

    def stop(self) -> None:
        """Show the last numbers, and change the widget no more."""
        if self._is_shown:
            self._change(self._bar.value, "")
        self._is_shown = False

    def _change(self, completed: int, left: str) -> None:
        self._changed_at = time.monotonic()
        self._bar.value = completed
        self._left.value = html.escape(f"{completed}/{self._bar.max}{left}")
        self._numbers.value = f"<pre>{html.escape(self._below().plain)}</pre>"


def is_notebook() -> bool:
    """Return True in the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")


def widget_bar(below: Callable[[], Text]) -> WidgetBar | None:
    """Return a widget in the cell of a notebook; None elsewhere, or without the package ipywidgets."""
    if not is_notebook():
        return None
    try:
        import ipywidgets
    except ImportError:
        return None
    return WidgetBar(ipywidgets, below)
