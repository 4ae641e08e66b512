"""Names of checkpoints: a hub id (`name`, `owner/name`) or a local folder. This module loads no model."""

from __future__ import annotations

from pathlib import Path

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import ModelError


def place_of(model_name: str) -> str:
    """Return a name as transformers accepts it, with `~` expanded."""
    return str(with_home(model_name)) if model_name.startswith("~") else model_name


def require_folder(what: str, model_name: str) -> None:
    """Report a missing checkpoint early, where its name can only be that of a local folder.

    `owner/name` is taken for a folder only if a folder `owner` exists.

    Args:
        what: the role of the checkpoint, for the message: `classifier`.
        model_name: hub id or local folder.

    Raises:
        ModelError: the folder does not exist.
    """
    folder = Path(place_of(model_name))
    only_a_folder = model_name.startswith((".", "/", "~")) or model_name.count("/") > 1 or "\\" in model_name
    if (only_a_folder or ("/" in model_name and folder.parent.is_dir())) and not folder.is_dir():
        below = "" if folder.is_absolute() else f" below {Path.cwd()}"
        raise ModelError(f"there is no folder {model_name!r}{below}; it should contain the {what}")


def cannot_load(what: str, model_name: str, error: Exception) -> str:
    """Return the message for a checkpoint that cannot be loaded: its name, what was found there, and the error."""
    folder = Path(place_of(model_name))
    if folder.is_dir():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        hint = f"the folder contains: {found}"
    elif folder.is_absolute() or model_name.startswith((".", "~")):
        hint = "there is no such folder"
    else:
        hint = "neither a local folder nor a model found on the hub or in its cache"
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"cannot load the {what} {model_name!r} ({hint}): {type(error).__name__}: {reason}"
