"""Names of arguments of `Run` for config paths, in errors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rl4lms_like.config.binding import run_kind
from rl4lms_like.config.run_config import AnyConfig
from rl4lms_like.system.errors import ConfigError, ConfigIssue, Notice

_PATH = re.compile(r"[a-z]\w*(?:\.\w+)+")
_CACHED_ROW = re.compile(r"\S*/rows-[0-9a-f]+\.jsonl, line (\d+)")

SOURCE = "the arguments of Run"
"""Source of errors in messages."""

LENGTHS = {"env.args": "max_prompt_length, max_new_tokens"}
"""Path of an error about several settings together -> their names."""


@dataclass
class ArgumentNames:
    """Names of arguments for config paths, in errors.

    As a context, it renames the paths in a `ConfigError` that is raised within it.

    Args:
        of_path: config path -> name of the argument that sets it; empty for a config that is from a file.
    """

    of_path: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_config(cls, config: AnyConfig) -> ArgumentNames:
        """Return the names for a run that was opened from its folder."""
        # Imported here, because it needs transformers.
        from rl4lms_like.python_api.setting_names import flat_names

        names: dict[str, str] = {}
        for name, paths in flat_names(run_kind({"alg": {"id": config.alg.id}}), config.alg.id).items():
            names |= dict.fromkeys(paths, name)
        return cls(names | {"reward_fn": "reward", "train_evaluation.metrics": "metrics"})

    def __enter__(self) -> ArgumentNames:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, ConfigError) and self.of_path:
            raise self.renamed(error) from error.__cause__

    def renamed(self, error: ConfigError) -> ConfigError:
        """Return an error of a config with names of arguments in place of paths."""
        issues = [ConfigIssue(self._path(issue.path), self._message(issue.message)) for issue in error.issues]
        if not self.of_path:
            return error
        source = SOURCE if error.source == "the config" else error.source
        return ConfigError(list(dict.fromkeys(issues)), source)

    def renamed_notices(self, notices: Iterable[Notice]) -> tuple[Notice, ...]:
        """Return notices about a config with names of arguments in place of paths."""
        return tuple(Notice(self._path(notice.path), self._message(notice.message)) for notice in notices)

    def _path(self, path: str) -> str:
        """Return the name for a path, or for the nearest block around it with the rest of the path."""
        if path in LENGTHS:
            return LENGTHS[path]
        block = path
        while block:
            if block in self.of_path:
                return self.of_path[block] + path[len(block) :]
            block = block.rpartition(".")[0]
        return path

    def _message(self, message: str) -> str:
        message = _CACHED_ROW.sub(lambda match: f"entry {int(match[1]) - 1}", message)
        return _PATH.sub(lambda match: self.of_path.get(match[0], match[0]), message)
