"""Parse the text of a config to a plain mapping. Safe YAML, with three corrections of YAML 1.1.

    1e-6         a number (YAML 1.1: text, because it has no dot)
    017, 1:30    rejected (YAML 1.1: 15, in base 8, and 90, in base 60)
    gamma: 1     reported if `gamma` is already in the same block (YAML: the last one wins, silently)
    gamma: 0.9

Python's tags (`!!python/...`) are rejected, as by `yaml.safe_load`. So are endless nesting and an excessive number of
values, both of which anchors can produce.

Overrides are applied before a config is checked, so that invalid paths are reported as if they were in the file:

    alg.args.learning_rate=1e-5                 a key; missing blocks on the path are created
    train_evaluation.metrics.0.args.size=3      a list item by its index
    train_evaluation.metrics=[{id: diversity}]  any YAML value
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.schema import join
from rl4lms_like.system.wording import shown

RUN_KEYS = "tokenizer, reward_fn, datapool, env, alg, train_evaluation"
TASK_CONFIGS = "task_configs"
"""Folder of configs, here in the repository's root and in RL4LMs in `scripts/training`."""
DEEPEST = 50
"""Maximum nesting depth. Real configs have less than half of it; an anchor that contains itself is nested endlessly."""
_TOO_DEEP = f"nested more than {DEEPEST} deep"
MOST_VALUES = 20_000
"""Maximum number of values of a file, aliases counted each time; a check with as many errors takes a few seconds."""
LONGEST = 500_000
"""Maximum number of characters of a file."""
_OCTAL = re.compile(r"[-+]?0[0-7_]+$")
_INT, _REAL, _TEXT = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "str"))
_FLOAT = re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with floats such as `1e-6`."""


class _Dumper(yaml.SafeDumper):
    """Counterpart of the loader; objects that YAML cannot represent are written as their `repr`."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(_REAL, _FLOAT, list("-+0123456789."))
_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_str(repr(value)))


def read_yaml(path: str | Path, keys: str = RUN_KEYS) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Return the mapping in a YAML file, and the errors of `parse_yaml`; an error message lists `keys` as expected.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not contain a mapping.
    """
    source = str(path)
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
    except FileNotFoundError as error:
        raise ConfigError([ConfigIssue("", f"there is no such file{_place_here(Path(path))}")], source) from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError([ConfigIssue("", f"cannot read the file: {why}")], source) from error
    return parse_yaml(text, source, keys)


def _place_here(path: Path) -> str:
    """Return where a config of RL4LMs is in this repository, or an empty text for another path."""
    if TASK_CONFIGS not in path.parts:
        return ""
    here = Path(TASK_CONFIGS, *path.parts[path.parts.index(TASK_CONFIGS) + 1 :])
    if here.is_file():
        return f"; in this repository it is {here}"
    return f"; the configs of this repository are in {TASK_CONFIGS}/, see docs/coming_from_rl4lms.md"


def parse_yaml(text: str, source: str, keys: str = RUN_KEYS) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Return the mapping in a YAML text, and errors for repeated keys and numbers that YAML reads in another base.

    Raises:
        ConfigError: the text is not YAML, or not a mapping.
    """
    try:
        value, issues = _constructed(text)
    except ValueError as error:
        raise ConfigError([ConfigIssue("", str(error))], source) from error
    if not isinstance(value, dict):
        raise ConfigError([ConfigIssue("", f"expected a mapping with the keys {keys}; got {shown(value)}")], source)
    return value, issues


def parse_value(text: str) -> Any:
    """Parse a value as in a file: `1e-5`, `true`, `[1, 2]`, `{a: 1}`.

    Raises:
        ValueError: the text is not YAML, or has a repeated key or a number in another base.
    """
    value, issues = _constructed(text)
    if issues:
        raise ValueError("; ".join(map(str, issues)))
    return value


def _constructed(text: str) -> tuple[Any, list[ConfigIssue]]:
    """Return the value of a YAML text, and errors for repeated keys and numbers in other bases.

    Raises:
        ValueError: the text is not YAML, or is too large or nested too deep; the message has the position.
    """
    if len(text) > LONGEST:
        raise ValueError(f"more than {LONGEST:,} characters, the limit for configs")
    try:
        loader = _Loader(text)
        document = loader.get_single_node()
        if document is None:
            return None, []

        # Aliases are counted each time, before anything is built: few lines can describe billions of values.
        paths: dict[yaml.Node, str] = {}  # an alias has the path of its anchor
        for n_values, (node, path) in enumerate(_nodes(document, "", 1), start=1):
            if n_values > MOST_VALUES:
                raise yaml.MarkedYAMLError(problem=f"more than {MOST_VALUES:,} values", problem_mark=node.start_mark)
            paths.setdefault(node, path)

        # Before the document is built: numbers in another base become texts.
        issues = [issue for node, path in paths.items() for issue in _issues(node, path)]
        return loader.construct_document(document), issues
    except RecursionError as error:
        raise ValueError(f"not valid YAML: {_TOO_DEEP}") from error
    # For `!!int ''`, `!!bool x` and the like, PyYAML's constructors raise errors of other classes.
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(_syntax(error)) from error


def dump_yaml(mapping: Mapping[str, Any]) -> str:
    """Return text that `parse_yaml` reads back, with keys in their order."""
    return yaml.dump(dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _nodes(node: yaml.Node, path: str, depth: int) -> Iterator[tuple[yaml.Node, str]]:
    """Yield a node and those in it, each with its path; raise an error where they are nested too deep."""
    if depth > DEEPEST:
        raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=node.start_mark)
    yield node, path
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _nodes(item, join(path, index), depth + 1)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"  # the text of nested aliases may be endless
            for part in (key, value):
                yield from _nodes(part, join(path, name), depth + 1)


def _issues(node: yaml.Node, path: str) -> Iterator[ConfigIssue]:
    """Yield errors for repeated keys of a mapping, and for a number in base 8 or 60, which becomes a text."""
    lines: dict[str, int] = {}
    keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    for key in [key for key in keys if isinstance(key, yaml.ScalarNode)]:
        line = key.start_mark.line + 1
        if key.value in lines and key.value != "<<":
            yield ConfigIssue(join(path, key.value), f"given twice, on lines {lines[key.value]} and {line}")
        lines.setdefault(key.value, line)
    text = node.value
    if node.tag in (_INT, _REAL) and (":" in text or _OCTAL.match(text)):
        node.tag = _TEXT  # reading `1:1:1...` in base 60 takes quadratic time
        message = f"YAML reads {shown(text)} in base {60 if ':' in text else 8}"
        yield ConfigIssue(path, f"{message}; write a decimal number, or a text in quotes")


def _syntax(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).partition("\n")[0]
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"not valid YAML: {where}{what}"


def apply_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Return a copy of the mapping with the overrides applied, and an error for each invalid override."""
    assignments, issues = parse_assignments(overrides, "--set")
    changed = dict(mapping)
    for path, value in assignments:
        changed, value_issues = apply_values(changed, {path: value}, "--set")
        issues += value_issues
    return changed, issues


def parse_assignments(texts: Sequence[str], option: str) -> tuple[list[tuple[str, Any]], list[ConfigIssue]]:
    """Return config path and value of each `PATH=VALUE` of an option of the command line, and the errors."""
    assignments = []
    issues = []
    for assignment in texts:
        path, equals, text = assignment.partition("=")
        path = path.strip()
        if not equals or not all(path.split(".")):
            issues.append(ConfigIssue(option, f"expected PATH=VALUE as in alg.args.gamma=1, got {assignment!r}"))
            continue
        try:
            assignments.append((path, parse_value(text)))
        except ValueError as error:
            issues.append(ConfigIssue(f"{option} {path}", str(error)))
    return assignments, issues


def apply_values(
    mapping: Mapping[str, Any], values: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Apply parsed values, `{"alg.args.gamma": 1}`, like `apply_overrides`; errors begin with `where`."""
    changed = copy.deepcopy(dict(mapping))
    issues = []
    for path, value in values.items():
        try:
            _set(changed, str(path).split("."), copy.deepcopy(value))
        except ValueError as error:
            issues.append(ConfigIssue(f"{where} {path}", str(error)))
    return changed, issues


def _set(container: Any, keys: list[str], value: Any) -> None:
    walked = ""
    for key in keys[:-1]:
        key_or_index = _place(container, key, walked)
        # A block that is missing, or has nothing under it, is created.
        if isinstance(container, dict) and container.get(key) is None:
            container[key] = {}
        container = container[key_or_index]
        walked = join(walked, key)
    container[_place(container, keys[-1], walked)] = value


def _place(container: Any, key: str, walked: str) -> Any:
    if isinstance(container, dict):
        return key
    if isinstance(container, list):
        if key.isdecimal() and int(key) < len(container):
            return int(key)
        raise ValueError(f"{walked} is a list of {len(container)}; expected an index below that, got {key!r}")
    raise ValueError(f"{walked} is {shown(container)}, which has no keys to set")
