"""Check that a script protects its main part, which processes that compute rewards would otherwise run again.

Such a process imports the script in order to find the reward. What is not below `if __name__ == "__main__":` runs
again there, the training included.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType


def unguarded_script() -> str | None:
    """Return the file of the script that is running outside of its guard; None in a guarded one or a notebook."""
    frame = _frame_of_main()
    if frame is None:
        return None
    file = frame.f_code.co_filename
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):  # no file: a notebook, or code of the command line
        return None

    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or "__name__" not in ast.unparse(node.test):
            continue
        if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno):
            return None
    return file


def _frame_of_main() -> FrameType | None:
    """Return the frame of the main module, if the current call comes from it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") in ("__main__", "__mp_main__"):
            return frame
        frame = frame.f_back
    return None
