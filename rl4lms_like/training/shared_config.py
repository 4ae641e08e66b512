"""A run's config as others may read it: only the names of local files, and what a reader has to supply.

    datapool.args.path: private/client/q.jsonl                 q.jsonl
    reward_fn.id: /data/acme/rewards.py:score                    rewards.py:score
    alg.policy.args.model_name: ./models/mine                  mine

A path becomes a name whether the file still exists or not, so that a moved file changes no card.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl4lms_like.core.chat_template import CHATML
from rl4lms_like.small_models.embedded import is_embedded
from rl4lms_like.system.disk import with_home

_PATH_KEY = re.compile(r"(.*_)?(path|file|dir|folder)s?|cache|chat_template|tensorboard_log|training_texts|weights")
"""Keys whose values are files or folders; the first pattern includes those of users' own components."""

_NAME_KEYS = (
    *("checkpoint", "config_name", "critic_model", "dataset", "model_name", "model_type", "models"),
    *("reference_model", "teacher_model", "tokenizer_id"),
)
"""Keys whose values are names on the Hugging Face Hub, or local files or folders."""

_PATH_IS_NAME = ("hf_dataset", "hf_evaluate")
"""Components whose `path` is such a name."""

_WRITTEN_KEYS = ("cache", "tensorboard_log", "weights_dir")
"""Keys of files and folders that a run writes."""

_IMPORT_KEYS = ("id", "function", "object", "post_processing_fn", "reward", "reward_fn", "rewards", "shaping_fn")
_IMPORT_PATH = re.compile(r"[\w.]+:[\w.]+(@\w+)?")
_IMPORT_FROM_FILE = re.compile(r"(?P<file>.*\.py)(?P<name>:[\w.<>]+(@\w+)?)", re.DOTALL)
_ADDRESS = re.compile(r"\w+://")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

_ABSOLUTE_PATH = re.compile(r"(~\w*/|/[^/\s]+/)[^\s].*")
"""Of other keys: with a folder, as a text such as `/think` may be a pattern."""


def is_local(name: str) -> bool:
    """Return True if the name of a model or dataset is a path, or is that of an existing file or folder."""
    if is_embedded(name):
        return False
    return _HUB_ID.fullmatch(name) is None or with_home(name).is_absolute() or os.path.exists(with_home(name))


def is_on_hub(name: str) -> bool:
    """Return True if a name can only be that of a model or dataset on the hub."""
    return not is_embedded(name) and not is_local(name)


def local_name(path: str) -> str:
    """Return the last part of a path."""
    return Path(os.path.abspath(with_home(path))).name if path else path


def shared_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a config, or one of its blocks, in which local paths are names.

    Returns:
        The config, and the names of the local files, folders and Python code without which it cannot be trained.
    """
    supplied: dict[str, None] = {}
    shared = {key: _shared(value, str(key), str(config.get("id")), supplied) for key, value in config.items()}
    return shared, list(supplied)


def _shared(value: Any, key: str, component: str, supplied: dict[str, None]) -> Any:
    if isinstance(value, Mapping):
        component = str(value.get("id", component))

        # The files of several splits have the names of the splits as their keys.
        has_paths = _PATH_KEY.fullmatch(key) or key in _NAME_KEYS
        shared = {}
        for inner_key, item in value.items():
            shared[inner_key] = _shared(item, key if has_paths else str(inner_key), component, supplied)
        return shared
    if isinstance(value, list | tuple):
        return [_shared(item, key, component, supplied) for item in value]
    return _shared_text(value, key, component, supplied) if isinstance(value, str) else value


def _shared_text(text: str, key: str, component: str, supplied: dict[str, None]) -> str:
    # Own code. Ids of this library's components have no colon.
    if from_file := _IMPORT_FROM_FILE.fullmatch(text):
        name = local_name(from_file["file"]) + from_file["name"]
        supplied[name] = None
        return name
    if key in _IMPORT_KEYS and _IMPORT_PATH.fullmatch(text):
        supplied[text] = None
        return text

    if not _is_path(text, key, component):
        return text
    name = local_name(text)
    if key not in _WRITTEN_KEYS:
        supplied[name] = None
    return name


def _is_path(text: str, key: str, component: str) -> bool:
    if not text or _ADDRESS.match(text) or (key == "chat_template" and text == CHATML):
        return False
    if key in _NAME_KEYS or (key == "path" and component in _PATH_IS_NAME):
        return is_local(text)
    if _PATH_KEY.fullmatch(key):
        return True
    if _ABSOLUTE_PATH.fullmatch(text):
        return True
    return with_home(text).is_absolute() and os.path.exists(with_home(text))
