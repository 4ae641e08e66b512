"""Folder to which `Run.save` copies a model: never one with files that an earlier copy has not written."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from rl4lms_like.python_api.given import argument_error

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")

MODEL_FILES = (
    *WEIGHTS,
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "chat_template.*",
)
"""Files of a model and its tokenizer, as `save_pretrained` writes them."""

N_SHOWN = 3
"""Largest number of files that a refusal names."""


def check_save_target(target: Path, source: Path, run_folder: Path) -> None:
    """Raise a `ConfigError` if replacing a folder would delete anything but an earlier copy of a model.

    Args:
        target: the folder, as an absolute path.
        source: folder of the model that is to be copied.
        run_folder: folder of the run.
    """
    # Links are followed: another name of the run folder is the run folder, too.
    resolved = target.resolve()
    needed = {"the folder of this run": run_folder.resolve(), "the current folder": Path.cwd().resolve()}
    for description, folder in needed.items():
        if resolved == folder or resolved in folder.parents:
            what = description if resolved == folder else f"a folder around {description}"
            raise argument_error("folder", f"{target} is {what}, which would be replaced; name a new folder")
    if not target.exists():
        return
    if not target.is_dir():
        raise argument_error("folder", f"{target} is a file; name a new folder")

    names = sorted(entry.name for entry in target.iterdir())
    known = {entry.name for entry in source.iterdir()}
    has_weights = any(_is_of(name, WEIGHTS) for name in names)
    others = [name for name in names if not has_weights or (name not in known and not _is_of(name, MODEL_FILES))]
    if others:
        shown = ", ".join(others[:N_SHOWN]) + (" ..." if len(others) > N_SHOWN else "")
        raise argument_error("folder", f"{target} has files that would be deleted: {shown}; name a new folder")


def _is_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
