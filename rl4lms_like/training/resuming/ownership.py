"""Ownership of checkpoints: a run may delete all in its own folder, but behind a link only those with its mark.

run/checkpoints/iteration_00020                        the run's own, regardless of its content
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
"""Name of the folder that holds the checkpoints. Users may replace it by a link to another disk."""


def mark_in(base: Path) -> str:
    """Return the mark that a run writes into its checkpoints in `base`; empty if `base` is not a link.

    It is a digest of the run folder's path, so that a copy of the run deletes no checkpoint of the original.
    """
    if base.name != FOLDER or base.resolve().parent == base.parent.resolve():
        return ""
    return hashlib.sha256(os.fsencode(os.path.realpath(base.parent))).hexdigest()[:16]


def is_own(checkpoint: Path) -> bool:
    """Return True if a checkpoint belongs to the run in whose folder it is, so that the run may delete it."""
    mark = mark_in(checkpoint.parent)
    if not mark:
        return True
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("run") == mark
