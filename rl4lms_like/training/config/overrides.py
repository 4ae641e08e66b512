"""Apply overrides to a config before it is checked: `--set alg.args.learning_rate=1e-5`.

    alg.args.learning_rate=1e-5                 a key; missing blocks on the path are created
    train_evaluation.metrics.0.args.size=3      a list item by its index
    train_evaluation.metrics=[{id: diversity}]  any YAML value

The check of the whole config then reports invalid paths, as if they were in the file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from rl4lms_like.core.errors import Mistake
from rl4lms_like.core.schema import join
from rl4lms_like.core.wording import shown
from rl4lms_like.training.config.yaml_file import parse_value


def apply_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[Mistake]]:
    """Return a copy of the mapping with the overrides applied, and a mistake for each invalid override."""
    changed = copy.deepcopy(dict(mapping))
    mistakes = []
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        if not equals or not all(path.split(".")):
            mistakes.append(Mistake("--set", f"expected PATH=VALUE as in alg.args.gamma=1, got {override!r}"))
            continue
        try:
            _set(changed, path.split("."), parse_value(text))
        except ValueError as error:
            mistakes.append(Mistake(f"--set {path}", str(error)))
    return changed, mistakes


def apply_values(
    mapping: Mapping[str, Any], values: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], list[Mistake]]:
    """Apply parsed values, `{"alg.args.gamma": 1}`, like `apply_overrides`; mistakes begin with `where`."""
    changed = copy.deepcopy(dict(mapping))
    mistakes = []
    for path, value in values.items():
        try:
            _set(changed, str(path).split("."), copy.deepcopy(value))
        except ValueError as error:
            mistakes.append(Mistake(f"{where} {path}", str(error)))
    return changed, mistakes


def _set(container: Any, keys: list[str], value: Any) -> None:
    walked = ""
    for key in keys[:-1]:
        place = _place(container, key, walked)
        if isinstance(container, dict) and container.get(key) is None:
            container[key] = {}
        container, walked = container[place], join(walked, key)
    container[_place(container, keys[-1], walked)] = value


def _place(container: Any, key: str, walked: str) -> Any:
    if isinstance(container, dict):
        return key
    if isinstance(container, list):
        if key.isdecimal() and int(key) < len(container):
            return int(key)
        raise ValueError(f"{walked} is a list of {len(container)}; expected an index below that, got {key!r}")
    raise ValueError(f"{walked} is {shown(container)}, which has no keys to set")
