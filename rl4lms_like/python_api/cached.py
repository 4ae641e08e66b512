"""Cache for what is given to a run in Python: rows and loaded models, by digests of their content.

    rows          rows-<digest>.jsonl
    an image      images/<number of its pixels or bytes>.png
    a model       GPT2LMHeadModel-<digest>/         with its tokenizer
    a tokenizer   GPT2Tokenizer-<digest>/

A config then has a path in their place, so that it is plain data: it can be written, compared and resumed, and every
command works on the folder of the run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4lms_like.core.pictures import Picture
from rl4lms_like.small_models.embedded import cache_folder, digest_of_tokenizer, make_atomically
from rl4lms_like.system.disk import reason
from rl4lms_like.system.errors import ConfigError, ConfigIssue, RL4LMsLikeError
from rl4lms_like.system.wording import excerpt

CONTENT = "given_in_python"
"""Folder of the cache."""

N_DIGITS = 16
"""Number of hexadecimal digits of a digest in a name."""


def cached_rows(rows: Sequence[Mapping[str, Any]], argument: str) -> Path:
    """Return a file of JSON Lines with the rows, which is written unless the cache has it.

    Args:
        rows: columns by name; their values are what JSON can express.
        argument: argument of `Run` that has the rows, for errors.

    Raises:
        ConfigError: a column has other values; the message names it.
        RL4LMsLikeError: the cache cannot be written.
    """
    lines = []
    for index, row in enumerate(rows):
        for column, value in row.items():
            if change := _altered(value):
                message = f"column {column!r} of entry {index} has {change}; convert or remove it"
                raise ConfigError([ConfigIssue(argument, message)])
        try:
            lines.append(json.dumps(row, allow_nan=False, default=_plain) + "\n")
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError([ConfigIssue(argument, _why_not_json(row, index))]) from error
    content = "".join(lines).encode()

    file = cache_folder(CONTENT) / f"rows-{hashlib.sha256(content).hexdigest()[:N_DIGITS]}.jsonl"
    if not file.is_file():
        _write_to_cache(file, content)
    return file


def _write_to_cache(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete: another process may read it at the same time.
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}-", delete=False) as temporary:
            temporary.write(content)
        os.replace(temporary.name, file)
    except OSError as error:
        raise RL4LMsLikeError(f"cannot write {file.name} to the cache {file.parent}: {reason(error)}") from error


def cached_image(picture: Picture) -> Path:
    """Return a file with a picture, which is written unless the cache has it; the file of a picture that has one.

    Raises:
        DataPoolError: the picture cannot be read.
        RL4LMsLikeError: the cache cannot be written.
    """
    if picture.path is not None:
        return picture.path.absolute()

    # Pixels are compressed. What is written depends on the version of pillow, so an existing file is kept: the number
    # of a run's pictures is that of the file.
    file = cache_folder(CONTENT) / "images" / f"{picture.number:016x}.png"
    if not file.is_file():
        content = picture.read()
        if content.startswith(b"P6"):
            content = picture.png()
        _write_to_cache(file, content)
    return file


def _plain(value: Any) -> Any:
    """Return numbers and arrays of NumPy and torch as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)


def _altered(value: Any) -> str | None:
    """Return what JSON would silently restore as something else, or None: keys that are no texts, and tuples."""
    if isinstance(value, tuple):
        return f"{excerpt(value)}, a tuple, which JSON makes a list"
    items = value if isinstance(value, list) else []
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                return f"the key {excerpt(key)}, which JSON makes a text"
        items = list(value.values())
    return next(filter(None, map(_altered, items)), None)


def _why_not_json(row: Mapping[str, Any], index: int) -> str:
    """Name the first column of a row that is not JSON."""
    for column, value in row.items():
        try:
            json.dumps({column: value}, allow_nan=False, default=_plain)
        except (TypeError, ValueError, RecursionError):
            what = "NaN or an infinity" if _has_non_finite(value) else f"{excerpt(value)}, a {type(value).__name__}"
            return f"column {column!r} of entry {index} is {what}, which JSON cannot express; convert or remove it"
    raise AssertionError("unreachable: a row is JSON if all of its columns are")


def _has_non_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(_has_non_finite, value))
    return isinstance(value, float) and not math.isfinite(value)


def cached_model(model: Any, tokenizer: Any) -> Path:
    """Return a folder with a loaded model and its tokenizer, which is written unless the cache has it."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    if model.generation_config is not None:
        digest.update(model.generation_config.to_json_string().encode())
    for content in _weights(model):
        digest.update(content)
    digest.update(digest_of_tokenizer(tokenizer))

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return _cached_folder(model, digest.hexdigest(), save, "config.json")


def cached_tokenizer(tokenizer: Any) -> Path:
    """Return a folder with a loaded tokenizer, which is written unless the cache has it."""
    digest = digest_of_tokenizer(tokenizer).hex()
    return _cached_folder(tokenizer, digest, tokenizer.save_pretrained, "tokenizer_config.json")


def _weights(model: Any) -> Iterator[bytes]:
    """Yield name, type and content of each tensor of a model."""
    import torch

    for name, tensor in sorted(model.state_dict().items()):
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _cached_folder(value: Any, digest: str, save: Any, last_file: str) -> Path:
    what = type(value).__name__
    folder = cache_folder(CONTENT) / f"{what}-{digest[:N_DIGITS]}"
    try:
        if not (folder / last_file).is_file():
            make_atomically(folder, save, last_file)
    except OSError as error:
        raise RL4LMsLikeError(f"cannot write the {what} to the cache {folder.parent}: {reason(error)}") from error
    return folder
