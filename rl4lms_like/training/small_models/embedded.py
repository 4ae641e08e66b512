"""Models that need no hub: a config can use `embedded/<name>` as the name of any model or tokenizer.

    embedded/gpt2-numbers   embedded/t5-numbers    words: the numbers 0 to 49; briefly trained on often growing numbers
    embedded/gpt2-digits    embedded/t5-digits     characters: digits, hyphen, space; random weights
    embedded/gpt2-films     embedded/t5-films      English words; trained on film opinions for half a minute
    embedded/tiny_model                            trained on the config's data pool, as its block `tiny_model` says

A model is created when a run first needs it, and then stays in the cache: `$RL4LMS_LIKE_HOME`, else `rl4lms_like` in
`$XDG_CACHE_HOME` or `~/.cache`. A name always means bitwise the same model.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rl4lms_like.core.disk import share_permissions
from rl4lms_like.core.errors import ModelError
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.training.small_models.tiny_model import digest, make_tiny_model, pairs_of

PREFIX = "embedded/"
"""Prefix of the names of embedded models."""

NAMES = tuple(f"{PREFIX}{family}-{texts}" for texts in ("numbers", "digits", "films") for family in ("gpt2", "t5"))
"""Names of all embedded models."""

TINY_MODEL = f"{PREFIX}tiny_model"
"""Name of the model that a config's `tiny_model` block describes."""

VERSION = 1
"""Part of the folder names in the cache; to be increased when the weights of a model change."""

N_NUMBERS = 50
"""Number of words of the models of numbers."""

Config = TypeVar("Config")


def is_embedded(name: Any) -> bool:
    """Return whether a value of a config has the prefix of embedded models; the model need not exist."""
    return isinstance(name, str) and name.startswith(PREFIX)


def unknown_embedded_model(name: str) -> str:
    """Return the error message for a name that no embedded model has."""
    if name == TINY_MODEL:
        return f"{name!r} is described by the block `tiny_model` of an RL config, which is missing"
    known = [each.removeprefix(PREFIX) for each in (*NAMES, TINY_MODEL)]
    near = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1)
    hint = f"did you mean {PREFIX + near[0]!r}?" if near else f"there are {', '.join(NAMES)}"
    return f"no embedded model has the name {name!r}; {hint}"


def with_embedded_models(config: Config) -> Config:
    """Return a config, or any part of one, with the folder of the model in place of each `embedded/<name>`.

    Raises:
        DataPoolError: the config names `embedded/tiny_model`, and its data pool has no texts to train it on.
        ModelError: no embedded model has a name, or the cache cannot be read or written.
    """

    @functools.cache  # the data pool is prepared once
    def folder_of(name: str) -> str:
        if name == TINY_MODEL and getattr(config, "tiny_model", None) is not None:
            return str(_tiny_model(config))
        return str(embedded_model(name))

    return _replaced(config, folder_of)


def _replaced(value: Any, folder_of: Callable[[str], str]) -> Any:
    """Return a value with `folder_of(name)` in place of each name of an embedded model."""
    if is_embedded(value):
        return folder_of(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **_replaced(fields, folder_of))
    if isinstance(value, Mapping):
        return {key: _replaced(item, folder_of) for key, item in value.items()}
    return [_replaced(item, folder_of) for item in value] if isinstance(value, list) else value


def _tiny_model(config: Any) -> Path:
    """Return the folder of the model that a run's `tiny_model` block describes."""
    pool = DATA_POOLS.get(config.datapool.id, {"split": "train", **config.datapool.args})
    pairs = pairs_of(pool)
    folder = f"tiny_model-{digest(config.tiny_model, pairs)}"
    return _created(TINY_MODEL, folder, lambda place: make_tiny_model(place, config.tiny_model, pairs))


def embedded_model(name: str) -> Path:
    """Return the folder of an embedded model, which is created if it does not exist.

    Raises:
        ModelError: no embedded model has that name, or the cache cannot be read or written.
    """
    if name not in NAMES:
        raise ModelError(unknown_embedded_model(name))
    family, _, texts = name.removeprefix(PREFIX).partition("-")
    return _created(name, f"{family}-{texts}", lambda place: _make(family, texts, place))


def _created(name: str, folder_name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, created by `make` if it does not exist.

    Raises:
        ModelError: the cache cannot be read or written.
    """
    folder = cache_folder() / f"{folder_name}-v{VERSION}"
    try:
        if not (folder / "config.json").is_file():
            print(f"creating {name}, once, in {folder.parent}", file=sys.stderr, flush=True)
            _make_atomically(folder, make)
        for file in folder.iterdir():
            file.open("rb").close()  # files of another user may not be readable
    except OSError as error:
        message = f"cannot create or read {name} in {folder.parent}: {error}; set RL4LMS_LIKE_HOME to another folder"
        raise ModelError(message) from error
    return folder


def cache_folder() -> Path:
    """Return the folder of embedded models.

    Raises:
        ModelError: the folder is in a home directory that is unknown.
    """
    own = os.environ.get("RL4LMS_LIKE_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(own or Path(cache) / "rl4lms_like")
    try:
        return folder.expanduser() / "embedded"
    except RuntimeError as error:  # the user has no entry in the system, as in some containers
        message = f"no folder for embedded models: the home directory of {folder} is unknown; set RL4LMS_LIKE_HOME"
        raise ModelError(message) from error


def _make_atomically(folder: Path, make: Callable[[Path], None]) -> None:
    """Create a folder completely or not at all; if several processes create it at once, the first to finish wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as place:
        made = Path(place) / folder.name  # only the user can read `place` itself
        try:
            made.mkdir()
            make(made)
            share_permissions(made)
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise


def _make(family: Any, texts: str, folder: Path) -> None:
    from rl4lms_like.training.small_models.warm_start import (
        WarmStartSettings,
        make_model,
        make_warm_start,
        make_word_tokenizer,
        train_language_model,
    )

    if texts == "films":
        make_warm_start(folder, WarmStartSettings(family=family))
        return
    words = [str(number) for number in range(N_NUMBERS)] if texts == "numbers" else [*"0123456789-", " "]
    tokenizer = make_word_tokenizer(words, separated=texts == "numbers")
    model = make_model(tokenizer, family=family)
    if texts == "numbers":
        train_language_model(model, tokenizer, numbers_that_often_grow(6400), steps=400, lr=5e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def numbers_that_often_grow(n: int, seed: int = 0) -> list[str]:
    """Return texts of 24 numbers; with probability 0.6 a number is larger than the last by 1 to 4, else any number."""
    rng = random.Random(f"{seed}-numbers")
    texts = []
    for _ in range(n):
        numbers = [rng.randrange(N_NUMBERS)]
        while len(numbers) < 24:
            following = numbers[-1] + rng.randint(1, 4)
            grows = rng.random() < 0.6 and following < N_NUMBERS
            numbers.append(following if grows else rng.randrange(N_NUMBERS))
        texts.append(" ".join(map(str, numbers)))
    return texts
