"""Code that comes with models, tokenizers and metrics: whose word lets it run.

    a config that the user names            its keys `trust_remote_code`
    the config.json of a run's folder       the same keys, and the user besides: --trust_remote_code

A run's folder may be somebody else's, model, code and config together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl4lms_like.core.errors import ConfigError, Mistake
from rl4lms_like.core.schema import join

KEY = "trust_remote_code"


def trusting(value: Any, path: str = "") -> Iterator[str]:
    """The paths of a config that let code run which comes with what is named there."""
    items = value if isinstance(value, Mapping) else dict(enumerate(value if isinstance(value, list) else ()))
    for key, item in items.items():
        if key == KEY and item is True:
            yield join(path, key)
        yield from trusting(item, join(path, key))


def refuse_unless_trusted(config: Mapping[str, Any], is_trusted: bool, source: str, blocks: tuple[str, ...]) -> None:
    """Asks for the user's word where the config that lies in a run's folder lets code run.

    Args:
        config: of the folder.
        is_trusted: the user's word.
        source: the config's name.
        blocks: those of its blocks that are used.

    Raises:
        ConfigError: code would run, and the user has not said so.
    """
    said = "true in a run's folder, which may be somebody else's: if you trust what is named there, --trust_remote_code"
    mistakes = [Mistake(path, said) for path in trusting({key: config.get(key) for key in blocks})]
    if mistakes and not is_trusted:
        raise ConfigError(mistakes, source)


def trust_option(config: Mapping[str, Any]) -> str:
    """What a command line needs to go on with a run of this config: ` --trust_remote_code`, or nothing."""
    return f" --{KEY}" if any(trusting(config)) else ""
