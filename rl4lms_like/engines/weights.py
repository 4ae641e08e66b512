"""The folder through which an engine gets the weights of a policy, with adapters merged, or its adapters alone.

Tied weights are written under each of their names. Engines that load weights into a running model may not tie them
again, and their embedding and output layer would then differ.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from rl4lms_like.system.disk import refuse_links_in, remove_path, saving, with_home
from rl4lms_like.system.errors import EngineError

MARKER = "engine_weights.txt"
"""File that shows that a folder has weights of an engine, and may be overwritten."""
ADAPTERS = "adapters-"
"""Beginning of the name of the folder of adapters within the folder of weights."""


def weights_folder(weights_dir: str) -> Path:
    """Return the absolute path of the folder of the weights, which need not exist.

    Raises:
        EngineError: it has files of another origin, which would be overwritten.
        RL4LMsLikeError: it is a file, cannot be read or written, or has a link, which would redirect the writing.
    """
    folder = with_home(weights_dir).resolve()
    with saving(f"the weights of the engine to {folder}"):
        # The folder is created when weights are first written. What can be known now is whether it could be.
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(nearest, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied", str(nearest))
        if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).is_file():
            raise EngineError(f"engine.args.weights_dir: {folder} has other files, which would be overwritten")
        refuse_links_in(folder)
    return folder


def save_weights(policy: Any, folder: Path) -> None:
    """Save the weights of a policy; create the folder.

    Raises:
        RL4LMsLikeError: the folder cannot be written.
    """
    with saving(f"the weights of the engine to {folder}"):
        _prepare(folder)
        policy.write_full_weights(folder)


def save_adapters(policy: Any, folder: Path, name: str) -> Path:
    """Save the adapters of a policy in a folder of this name within the folder of weights; return its path.

    Those of other names are removed.

    Raises:
        RL4LMsLikeError: the folder cannot be written.
    """
    with saving(f"the adapters of the engine to {folder}"):
        _prepare(folder)
        for earlier in folder.glob(f"{ADAPTERS}*"):
            remove_path(earlier)
        adapters = folder / f"{ADAPTERS}{name}"
        policy.write_adapters(adapters)
    return adapters


def _prepare(folder: Path) -> None:
    """Create the folder of weights, or check it once more: it may be one that others can write to."""
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links_in(folder)

    # Before any weights: a folder whose writing was interrupted may still be overwritten.
    (folder / MARKER).write_text("Weights of a policy in training, for its generation engine.\n")
