"""Permission to run code that comes with models, tokenizers and metrics.

    config file that the user names         requires its keys `trust_remote_code`
    config.json in a run's folder           requires the same keys and the option --trust_remote_code

A run's folder may come from another user, with model, code and config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl4lms_like.core.errors import ConfigError, ConfigIssue
from rl4lms_like.core.schema import join

KEY = "trust_remote_code"


def trusting(value: Any, path: str = "") -> Iterator[str]:
    """Yield the config paths that allow code to run."""
    items = value if isinstance(value, Mapping) else dict(enumerate(value if isinstance(value, list) else ()))
    for key, item in items.items():
        if key == KEY and item is True:
            yield join(path, key)
        yield from trusting(item, join(path, key))


def refuse_unless_trusted(config: Mapping[str, Any], is_trusted: bool, source: str, blocks: tuple[str, ...]) -> None:
    """Require the user's permission if the config in a run's folder allows code to run.

    Args:
        config: of the folder.
        is_trusted: whether the user gave permission.
        source: name of the config in messages.
        blocks: the blocks of the config that are used.

    Raises:
        ConfigError: code would run without the user's permission.
    """
    message = "true in a run's folder, which may come from another user: if you trust the code, add --trust_remote_code"
    issues = [ConfigIssue(path, message) for path in trusting({key: config.get(key) for key in blocks})]
    if issues and not is_trusted:
        raise ConfigError(issues, source)


def trust_option(config: Mapping[str, Any]) -> str:
    """Return the option needed to resume a run of this config: ` --trust_remote_code`, or an empty string."""
    return f" --{KEY}" if any(trusting(config)) else ""
