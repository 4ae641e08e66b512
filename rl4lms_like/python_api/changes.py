"""Changes that the user accepts on continuing: `train(change=...)`, by the names of settings or by config paths.

change=["reward"]                     reward_fn
change={"learning_rate": 1e-6}        alg.args.learning_rate
change={"peft.r": 4}                  alg.policy.args.peft.r
change=["alg.args"]                   itself, a block
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl4lms_like.config.run_config import AnyConfig
from rl4lms_like.python_api.argument_names import ArgumentNames
from rl4lms_like.python_api.given import argument_error
from rl4lms_like.python_api.setting_names import is_set
from rl4lms_like.system.wording import excerpt

WHOLE = {"reward": "reward_fn", "metrics": "train_evaluation.metrics", "prompts": "datapool", "data": "datapool"}
"""Arguments of `Run` that stand for a whole block -> its config path."""


@dataclass(frozen=True)
class Changes:
    """Changes that the user accepts.

    Args:
        paths_of: by the name that the user has given, config paths whose values may differ from those of the run.
        values: config path -> new value.
    """

    paths_of: Mapping[str, list[str]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, change: Any, config: AnyConfig, names: ArgumentNames) -> Changes:
        """Return what an argument `change` means.

        Args:
            change: new values by name, or names of what has changed.
            config: config of the run.
            names: names of its settings, as far as they were given as arguments of `Run`.

        Raises:
            ConfigError: it is neither, or names no setting.
        """
        if isinstance(change, str) or not isinstance(change, Iterable):
            example = f"change=[{change!r}]" if isinstance(change, str) else "change=['reward']"
            message = f"expected a list of names, {example}, or new values by name; got {excerpt(change)}"
            raise argument_error("change", message)

        listed = list(change)
        if not listed:
            return cls()
        known = {path: name for name, path in WHOLE.items()}
        known = ArgumentNames.of_config(config).of_path | names.of_path | known
        paths_of = {}
        values: dict[str, Any] = {}
        for name in listed:
            paths_of[name] = _paths_of(name, config, known)
            if isinstance(change, Mapping):
                values |= dict.fromkeys(paths_of[name], change[name])
        return cls(paths_of, values)

    def __bool__(self) -> bool:
        return bool(self.paths_of)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the user has given."""
        return tuple(self.paths_of)

    @property
    def paths(self) -> list[str]:
        """Config paths whose values may differ from those of the run."""
        return [path for paths in self.paths_of.values() for path in paths]


def _paths_of(name: Any, config: AnyConfig, known: Mapping[str, str]) -> list[str]:
    """Return the config paths of a setting, by its name or by a path.

    Args:
        name: what the user has named.
        config: config of the run.
        known: config path -> name.
    """
    if not isinstance(name, str):
        raise argument_error("change", f"expected names of settings, got {excerpt(name)}")
    if name in WHOLE:
        return [WHOLE[name]]
    if name in known or is_set(config.to_dict(), name):
        return [name]

    # A setting with a mapping may be changed in part.
    head, dot, rest = name.partition(".")
    paths = [path for path, of_path in known.items() if of_path == head]
    if paths:
        return [path + dot + rest for path in paths]

    names = sorted({*known.values()})
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "docs/python.md lists the names"
    raise argument_error("change", f"{name!r} is no setting of this run; {hint}")
