"""Decides which checkpoints a run may delete: all in its own folder; behind a link only those with its mark.

run/checkpoints/iteration_00020                        the run's own, whatever it holds
run/checkpoints -> /scratch/a/
    /scratch/a/iteration_00020                         the run's own if manifest.json has its mark as `run`
    /scratch/a/iteration_00030.<mark>.partial          the run's own
    /scratch/a/iteration_00030.partial                 another run's
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

MANIFEST = "manifest.json"
FOLDER = "checkpoints"
"""Name of the only folder of a run that holds several models, which a user may link to another disk."""


def mark_in(base: Path) -> str:
    """Mark that a run leaves on what it writes to `base`, its `checkpoints`; empty where `base` is no link.

    A digest of the place of the run's folder, so that a copy of the run deletes nothing of the original.
    """
    if base.name != FOLDER or base.resolve().parent == base.parent.resolve():
        return ""
    return hashlib.sha256(os.fsencode(os.path.realpath(base.parent))).hexdigest()[:16]


def is_own(checkpoint: Path) -> bool:
    """Return whether a checkpoint is of the run in whose folder it is found, so that the run may delete it."""
    mark = mark_in(checkpoint.parent)
    if not mark:
        return True
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("run") == mark
