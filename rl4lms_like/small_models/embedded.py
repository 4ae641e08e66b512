"""Models that need no hub: a config can use `embedded/<name>` as the name of any model or tokenizer.

    embedded/gpt2-numbers   embedded/t5-numbers    words: the numbers 0 to 49; briefly trained on often growing numbers
    embedded/gpt2-digits    embedded/t5-digits     characters: digits, hyphen, space; random weights
    embedded/gpt2-films     embedded/t5-films      English words; trained on film opinions for half a minute
    embedded/idefics3-shapes                       words of the pool `shapes`, and its pictures; random weights
    embedded/tiny_model                            trained on the config's data pool, as its block `tiny_model` says

A model is created when a run first needs it, and then stays in the cache: `$RL4LMS_LIKE_HOME`, else `rl4lms_like` in
`$XDG_CACHE_HOME` or `~/.cache`. A name always means bitwise the same model.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.envs import ENVIRONMENTS
from rl4lms_like.small_models.scripted_turns import has_player, turns_of_player
from rl4lms_like.system.disk import share_permissions
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError, ModelError, require_extra
from rl4lms_like.system.numbers import Count, Fraction, Positive, Seed

PREFIX = "embedded/"
"""Prefix of the names of embedded models."""

VISION_MODEL = f"{PREFIX}idefics3-shapes"

NAMES = (
    *(f"{PREFIX}{family}-{texts}" for texts in ("numbers", "digits", "films") for family in ("gpt2", "t5")),
    VISION_MODEL,
)
"""Names of all embedded models."""

TINY_MODEL = f"{PREFIX}tiny_model"
"""Name of the model that a config's `tiny_model` block describes."""

VERSION = 1
"""Part of the folder names in the cache; to be increased when the weights of a model change."""

N_NUMBERS = 50
"""Number of words of the models of numbers."""

Pair = tuple[str, str]
"""Prompt and response."""

Config = TypeVar("Config")


def is_embedded(name: Any) -> bool:
    """Return whether a value of a config has the prefix of embedded models; the model need not exist."""
    return isinstance(name, str) and name.startswith(PREFIX)


def unknown_embedded_model(name: str) -> str:
    """Return the error message for a name that no embedded model has."""
    if name == TINY_MODEL:
        return f"{name!r} is described by the block `tiny_model` of an RL config, which is missing"

    # Compared without the prefix, which would make all names alike.
    known = [known_name.removeprefix(PREFIX) for known_name in (*NAMES, TINY_MODEL)]
    close_matches = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1)
    hint = f"did you mean {PREFIX + close_matches[0]!r}?" if close_matches else f"there are {', '.join(NAMES)}"
    return f"no embedded model has the name {name!r}; {hint}"


def with_embedded_models(config: Config) -> Config:
    """Return a config, or any part of one, with the folder of the model in place of each `embedded/<name>`.

    Raises:
        DataPoolError: the config names `embedded/tiny_model`, and its data pool has no texts to train it on.
        ModelError: no embedded model has a name, or the cache cannot be read or written.
    """

    # Cached, so that the data pool is prepared once for all names of `embedded/tiny_model`.
    @functools.cache
    def folder_of(name: str) -> str:
        # Supervised and preference configs have no such block.
        if name == TINY_MODEL and getattr(config, "tiny_model", None) is not None:
            return str(_tiny_model(config))
        return str(embedded_model(name))

    return _replaced(config, folder_of)


def _replaced(value: Any, folder_of: Callable[[str], str]) -> Any:
    """Return a value with `folder_of(name)` in place of each name of an embedded model."""
    if is_embedded(value):
        return folder_of(value)

    # `replace` checks the values of a frozen dataclass again, as its constructor did.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **_replaced(fields, folder_of))
    if isinstance(value, Mapping):
        return {key: _replaced(item, folder_of) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, folder_of) for item in value]
    return value


def embedded_model(name: str) -> Path:
    """Return the folder of an embedded model, which is created if it does not exist.

    Raises:
        MissingExtraError: pillow is not installed, for a model that reads images.
        ModelError: no embedded model has that name, or the cache cannot be read or written.
    """
    if name not in NAMES:
        raise ModelError(unknown_embedded_model(name))
    if name == VISION_MODEL:
        require_extra("PIL", extra="vision", needed_by=f"the model {name!r}")
        return _created(name, name.removeprefix(PREFIX), _make_vision_model)
    family, _, texts = name.removeprefix(PREFIX).partition("-")
    return _created(name, f"{family}-{texts}", lambda folder: _make(family, texts, folder))


def _created(name: str, folder_name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, created by `make` if it does not exist.

    Raises:
        ModelError: the cache cannot be read or written.
    """
    folder = cache_folder() / f"{folder_name}-v{VERSION}"

    try:
        if not (folder / "config.json").is_file():
            print(f"creating {name}, once, in {folder.parent}", file=sys.stderr, flush=True)
            make_atomically(folder, make)
        # The cache may be another user's, whose files this user may not read: better an error here, with a way out.
        for file in folder.iterdir():
            file.open("rb").close()
    except OSError as error:
        message = f"cannot create or read {name} in {folder.parent}: {error}; set RL4LMS_LIKE_HOME to another folder"
        raise ModelError(message) from error
    return folder


def cache_folder(content: str = "embedded") -> Path:
    """Return the folder of the cache for a content: embedded models, or what was given to a run in Python.

    Raises:
        ModelError: the folder is in a home directory that is unknown.
    """
    configured = os.environ.get("RL4LMS_LIKE_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(configured or Path(cache) / "rl4lms_like")

    # In some containers, the user has no entry in the system, and so no home directory.
    try:
        return folder.expanduser() / content
    except RuntimeError as error:
        message = f"no folder for the cache: the home directory of {folder} is unknown; set RL4LMS_LIKE_HOME"
        raise ModelError(message) from error


def make_atomically(folder: Path, make: Callable[[Path], Any], last_file: str = "config.json") -> None:
    """Create a folder completely or not at all; if several processes create it at once, the first to finish wins.

    Args:
        folder: the folder.
        make: writes the files of a new folder.
        last_file: a file that a complete folder has.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        # A folder within it, because only its owner can read a temporary folder itself.
        new_folder = Path(temporary) / folder.name
        try:
            new_folder.mkdir()
            make(new_folder)
            share_permissions(new_folder)
            new_folder.rename(folder)
        except OSError:
            # It cannot replace a folder that is not empty: another process was faster, and its model is the same.
            if not (folder / last_file).is_file():
                raise


def digest_of_tokenizer(tokenizer: Any) -> bytes:
    """Return the digest of the files that a tokenizer saves, whatever it was last called with."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*")):
            if not file.is_file():
                continue
            content = file.read_bytes()

            # A call with `padding` or `truncation` leaves them in the tokenizer, and each call sets them again.
            if file.name == "tokenizer.json":
                state = json.loads(content) | {"padding": None, "truncation": None}
                content = json.dumps(state, sort_keys=True).encode()
            digest.update(file.name.encode() + b"\0" + content)
    return digest.digest()


def _make(family: Any, texts: str, folder: Path) -> None:
    from rl4lms_like.small_models import warm_start

    if texts == "films":
        warm_start.make_warm_start(folder, warm_start.WarmStartSettings(family=family))
        return

    # Vocabulary: the 50 numbers, or 12 characters, and the special token.
    has_numbers = texts == "numbers"
    words = [str(number) for number in range(N_NUMBERS)] if has_numbers else [*"0123456789-", " "]
    tokenizer = warm_start.make_word_tokenizer(words, separated=has_numbers)
    model = warm_start.make_model(tokenizer, family=family)
    if has_numbers:
        warm_start.train_language_model(model, tokenizer, numbers_that_often_grow(6400), steps=400, lr=5e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_vision_model(folder: Path) -> None:
    from rl4lms_like.small_models.tiny_vision import make_tiny_vision_model

    make_tiny_vision_model(folder)


def numbers_that_often_grow(n: int, seed: int = 0) -> list[str]:
    """Return texts of 24 numbers; with probability 0.6 a number is larger than the last by 1 to 4, else any number."""
    rng = random.Random(f"{seed}-numbers")
    texts = []
    for _ in range(n):
        numbers = [rng.randrange(N_NUMBERS)]
        while len(numbers) < 24:
            larger = numbers[-1] + rng.randint(1, 4)
            # The largest numbers have no larger word.
            grows = rng.random() < 0.6 and larger < N_NUMBERS
            numbers.append(larger if grows else rng.randrange(N_NUMBERS))
        texts.append(" ".join(map(str, numbers)))
    return texts


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    """The `tiny_model` block: architecture and training of the model `embedded/tiny_model`.

    It stands for a model that was pretrained: its answers have the right form and are right now and then, so that
    reinforcement learning has something to improve. It is trained on prompts of the data pool's split `train` with
    their first references, and created when it is first used. The loss is over the references only. Words without
    digits that occur in a tenth of the prompts are one token each; all others are spelled in characters.

    With an `env.dialogue` whose environment has a scripted player (the method `player`), it is trained on the turns of
    that player instead, each after all earlier texts of its episode.

    Args:
        family: `gpt2`, or `t5` with `n_layer` encoder and as many decoder layers.
        n_layer: number of layers.
        n_embd: width of the hidden states.
        n_head: number of attention heads; a divisor of `n_embd`.
        n_positions: maximum number of tokens of prompt and response together.
        steps: number of optimizer steps.
        batch_size: number of texts per step.
        lr: maximum learning rate.
        wrong_answers: fraction of the texts in which the reference is that of another, random prompt. The model is then
            less often right than without them.
        seed: seed of weights and texts; independent of the run's seed.
    """

    family: Literal["gpt2", "t5"] = "gpt2"
    n_layer: Count = 2
    n_embd: Count = 64
    n_head: Count = 4
    n_positions: Count = 96
    steps: Count = 600
    batch_size: Count = 128
    lr: Positive = 3e-3
    wrong_answers: Fraction = 0.5
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")


def _tiny_model(config: Any) -> Path:
    """Return the folder of the model that a run's `tiny_model` block describes.

    Raises:
        DataPoolError: no sample has a reference, and no environment a scripted player.
        ModelError: the environment plays messages.
    """
    pool = DATA_POOLS.get(config.datapool.id, {"split": "train", **config.datapool.args})
    samples = [sample for sample, _ in pool]
    pairs = [(sample.prompt_or_input_text, sample.references[0]) for sample in samples if sample.references]
    if config.env.dialogue is not None:
        env = ENVIRONMENTS.get(config.env.dialogue.id, config.env.dialogue.args)
        if has_player(env):
            pairs = turns_of_player(env, samples, config.env.dialogue.max_turns, config.tiny_model.seed)
        if callable(getattr(env, "close", None)):  # one that is no `gymnasium.Env` may have no `close`
            env.close()
    if not pairs:
        raise DataPoolError(
            "no sample of the split 'train' has a reference, on which tiny_model could be trained, and there is no "
            "environment with a method `player`"
        )

    # The folder has the digest of everything that determines the weights, so that a changed config gets another model.
    digest = hashlib.sha256(json.dumps([asdict(config.tiny_model), pairs]).encode()).hexdigest()[:16]
    return _created(
        TINY_MODEL, f"tiny_model-{digest}", lambda folder: _make_tiny_model(folder, config.tiny_model, pairs)
    )


def _make_tiny_model(folder: Path, settings: TinyModelConfig, pairs: Sequence[Pair]) -> None:
    """Train a model on pairs of prompt and answer, and save it with its tokenizer.

    Raises:
        ConfigError: the model has too few positions for them.
    """
    from rl4lms_like.small_models.warm_start import make_spelling_tokenizer, train_and_save

    # Tokens of prompt and answer, and the end token.
    tokenizer = make_spelling_tokenizer([prompt for prompt, _ in pairs])
    n_needed = 0
    for prompt, answer in pairs:
        n_tokens = len(tokenizer(prompt)["input_ids"]) + len(tokenizer(answer)["input_ids"]) + 1
        n_needed = max(n_needed, n_tokens)
    if n_needed > settings.n_positions:
        text = f"prompt, response and end token need up to {n_needed} positions, the model has {settings.n_positions}"
        raise ConfigError([ConfigIssue("tiny_model.n_positions", text)])
    texts = partly_wrong(pairs, settings.steps * settings.batch_size, settings.wrong_answers, settings.seed)
    train_and_save(folder, tokenizer, settings, texts)


def partly_wrong(pairs: Sequence[Pair], n: int, wrong: float, seed: int) -> list[Pair]:
    """Draw `n` pairs with replacement; each has the answer of another random pair with probability `wrong`."""
    rng = random.Random(f"{seed}-pairs")
    # All pairs first, then the wrong answers: another order would draw other numbers, and change the model of a seed.
    drawn = [rng.choice(pairs) for _ in range(n)]
    result = []
    for prompt, answer in drawn:
        if rng.random() < wrong:
            answer = rng.choice(pairs)[1]
        result.append((prompt, answer))
    return result
