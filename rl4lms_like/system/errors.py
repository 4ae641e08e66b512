"""Exceptions of this library.

RL4LMsLikeError
├── ConfigError             a config is invalid; lists all errors at once; exit status 2
├── MissingExtraError       an optional dependency is missing; names the extra to install
├── MissingResourceError    a word list, program or model file is missing; gives the command, and the offline way
├── NotReadyError           several components of a run cannot be built; lists all of them at once
├── CheckpointError         a checkpoint is damaged, or belongs to another run
├── ModelError              a model or tokenizer cannot be loaded or used
│   ├── OutOfMemoryError    names the part of the run that ran out of memory
│   └── ParityError         teacher-forced log-probs differ from the ones `generate` samples with
├── EngineError             an external generation engine failed, or has other weights than the policy; names its URL
└── ComponentError          a user's component failed; names it, chained from the original exception
    ├── DataPoolError
    ├── RewardError
    ├── MetricError
    └── DialogueError       an environment failed; names it, the sample and the turn
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any


class RL4LMsLikeError(Exception):
    """Base class of all errors raised by this library."""


@dataclass(frozen=True)
class ConfigIssue:
    """One error in a config: where it is (`alg.args.clip_range`), what is wrong and how to correct it."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message

    def below(self, path: str) -> ConfigIssue:
        """Return the same error with `path` prepended to its path."""
        return ConfigIssue(".".join(filter(None, (path, self.path))), self.message)


class Notice(ConfigIssue):
    """Message about a config path (`alg.policy.args.generation_kwargs`) that is valid."""


class ConfigError(RL4LMsLikeError):
    """A config is invalid. The error lists every error found, not only the first."""

    def __init__(self, issues: Sequence[ConfigIssue], source: str = "the config") -> None:
        self.issues = list(issues)
        self.source = source

        plural = "error" if len(self.issues) == 1 else "errors"
        lines = [f"{len(self.issues)} {plural} in {source}:", *(f"  {issue}" for issue in self.issues)]
        super().__init__("\n".join(lines))


class MissingExtraError(RL4LMsLikeError, ImportError):
    """A component needs a package that is not part of the core installation."""

    def __init__(self, package: str, extra: str, needed_by: str) -> None:
        self.package = package
        self.extra = extra
        self.what = f"the package {package!r}: pip install 'rl4lms_like[{extra}]'"
        super().__init__(f"{needed_by} needs {self.what}")


class MissingResourceError(RL4LMsLikeError):
    """A component needs something outside Python packages: NLTK's data, Java, a checkpoint of another project.

    Args:
        resource: description of what is missing.
        needed_by: the component.
        command: the one command that installs it.
        offline: what to do on a machine without a network.
    """

    def __init__(self, resource: str, *, needed_by: str, command: str, offline: str) -> None:
        self.resource = resource
        self.command = command
        self.what = f"{resource}, which is missing: {command}. Without a network: {offline}"
        super().__init__(f"{needed_by} needs {self.what}")


class NotReadyError(RL4LMsLikeError):
    """Several components of a run cannot be built.

    Args:
        errors: path in the config -> error.
    """

    def __init__(self, errors: Mapping[str, RL4LMsLikeError]) -> None:
        self.errors = dict(errors)

        # Components that lack the same thing are in one line: what to install there is needed once.
        paths_of: dict[str, list[str]] = {}
        extras: set[str] = set()
        for path, error in self.errors.items():
            message = str(error)
            if isinstance(error, MissingExtraError | MissingResourceError):
                message = f"needs {error.what}"
            if isinstance(error, MissingExtraError):
                extras.add(error.extra)
            paths_of.setdefault(message, []).append(path)

        lines = [f"{len(self.errors)} components cannot be built:"]
        lines += [f"  {', '.join(paths)}: {message}" for message, paths in paths_of.items()]

        if len(extras) > 1:
            lines.append(f"  all packages at once: pip install 'rl4lms_like[{','.join(sorted(extras))}]'")
        super().__init__("\n".join(lines))


class RankError(RL4LMsLikeError):
    """Another process of a run with several processes failed, ended or did not answer."""


class CheckpointError(RL4LMsLikeError):
    """A run cannot be resumed from a checkpoint. The message says why, and what can be done instead."""


class ModelError(RL4LMsLikeError):
    """A model or tokenizer cannot be loaded, or does not fit its role."""


class OutOfMemoryError(ModelError):
    """A part of a run needs more memory than there is.

    Args:
        part: `generation`, `update` ...; see `system.out_of_memory`.
        text: the allocator's message.
        advice: ways to use less memory, one line each.
    """

    def __init__(self, part: str, text: str, advice: Sequence[str] = ()) -> None:
        self.part = part
        self.text = text
        super().__init__("\n  ".join([f"out of memory in the {part}: {text}", *advice]))


class ParityError(ModelError):
    """The policy's teacher-forced log-probs differ from the ones that its `generate` samples with."""


class EngineError(RL4LMsLikeError):
    """An external generation engine failed, or has other weights than the policy. The message names its URL."""


class ComponentError(RL4LMsLikeError):
    """A component given by the user failed; the original exception is chained as the cause.

    Attributes:
        texts: inputs of the failed call, one JSON-serialisable mapping per text. A run writes them to a file.
    """

    texts: Sequence[Mapping[str, Any]] = ()


class DataPoolError(ComponentError):
    """A data pool could not be prepared."""


class RewardError(ComponentError):
    """A reward function raised, or returned something that is not one finite number per request."""


class MetricError(ComponentError):
    """A metric raised, or returned something that is not a mapping of name to (sentence scores, corpus score)."""


class DialogueError(ComponentError):
    """An environment of `env.dialogue` raised, blocked, or returned something that is not a result of its method."""


def require_extra(module: str, *, extra: str, needed_by: str) -> None:
    """Check that an optional dependency is installed, without importing it.

    Raises:
        MissingExtraError: it is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(module, extra, needed_by)


def import_extra(module: str, *, extra: str, needed_by: str) -> ModuleType:
    """Import an optional dependency where it is used.

    Raises:
        MissingExtraError: it is not installed; the message contains the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The package is there, but one that it imports is not: to install the extra again would not help.
        package = module.split(".")[0]
        if error.name is not None and error.name.split(".")[0] != package:
            raise
        raise MissingExtraError(package, extra, needed_by) from error


@cache
def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is missing or used from its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
