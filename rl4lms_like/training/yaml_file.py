"""Text of a config -> plain mapping. Safe YAML, with two things YAML 1.1 gets wrong put right.

    1e-6         a number (YAML 1.1: text, for want of a dot)
    gamma: 1     reported when `gamma` already stands in the same block (YAML: the last one wins, silently)
    gamma: 0.9

Python's tags (`!!python/...`) are refused, as by `yaml.safe_load`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rl4lms_like.core.errors import ConfigError, Mistake
from rl4lms_like.core.schema import join
from rl4lms_like.core.wording import shown

RUN_KEYS = "tokenizer, reward_fn, datapool, env, alg, train_evaluation"
_FLOAT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)$")


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, plus floats with an exponent and no dot."""


class _Dumper(yaml.SafeDumper):
    """Its counterpart; what YAML has no notation for is written as Python shows it."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_str(repr(value)))


def read_yaml(path: str | Path, keys: str = RUN_KEYS) -> tuple[dict[str, Any], list[Mistake]]:
    """The mapping in a YAML file, and its repeated keys; `keys` are named where it holds something else.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds no mapping.
    """
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError([Mistake("", "there is no such file")], source) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Mistake("", "the file is not text in UTF-8")], source) from error
    except OSError as error:
        raise ConfigError([Mistake("", f"cannot read the file: {error.strerror}")], source) from error
    return parse_yaml(text, source, keys)


def parse_yaml(text: str, source: str, keys: str = RUN_KEYS) -> tuple[dict[str, Any], list[Mistake]]:
    """The mapping in a YAML text, and its repeated keys.

    Raises:
        ConfigError: the text is not YAML, or no mapping.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        repeated = list(_repeated_keys(node, "", set())) if node is not None else []
        value = loader.construct_document(node) if node is not None else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([Mistake("", _syntax(error))], source) from error
    finally:
        loader.dispose()
    if not isinstance(value, dict):
        raise ConfigError([Mistake("", f"expected a mapping with the keys {keys}; got {shown(value)}")], source)
    return value, repeated


def parse_value(text: str) -> Any:
    """A value as it would stand in the file: `1e-5`, `true`, `[1, 2]`, `{a: 1}`.

    Raises:
        ValueError: not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(_syntax(error)) from error


def dump_yaml(mapping: Mapping[str, Any]) -> str:
    """Text that `parse_yaml` reads back, keys in their order."""
    return yaml.dump(dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _repeated_keys(node: yaml.Node, path: str, seen: set[int]) -> Iterator[Mistake]:
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated_keys(item, join(path, index), seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            where, line = join(path, key.value), key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines and key.value != "<<":
                yield Mistake(where, f"given twice, on lines {lines[key.value]} and {line}")
            if isinstance(key, yaml.ScalarNode):
                lines.setdefault(key.value, line)
            yield from _repeated_keys(value, where, seen)


def _syntax(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).partition("\n")[0]
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"not valid YAML: {where}{what}"
