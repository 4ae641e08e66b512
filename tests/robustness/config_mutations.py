"""Configs of tiny runs, made wrong, odd or merely different: one case for each seed.

    a valid config of one of the KINDS ─ 1 to 3 changes of its mapping ─ sometimes of its text ─ sometimes --set
                                         drop, rename, misspell, swap,    tabs, lost lines,
                                         another value, garbage           control characters

The same seed gives the same case in every process. Names of folders are relative to the folder a case runs in.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import yaml

from rl4lms_like.algorithms import OBJECTIVES
from tests.robustness.config_cases import (
    KINDS,
    OPTIONS,
    PIPELINE_OPTIONS,
    PREFERENCE_OPTIONS,
    RULE_KINDS,
    RULE_OPTIONS,
    SWAPPED_IDS,
    VALUES,
    base_config,
    with_placeholders,
)


@dataclass(frozen=True)
class Case:
    """What is given to the command.

    Args:
        seed: of the case.
        kind: of the config it started as, one of `KINDS` or `PREFERENCE_KINDS`.
        text: of the file; not always text in UTF-8.
        overrides: of `--set`.
        changes: what was done, in words.
    """

    seed: int
    kind: str
    text: bytes
    overrides: tuple[str, ...]
    changes: tuple[str, ...]


def single_changes(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config of a kind with one key changed, for each value of each of its options: the change, the config."""
    for path, values in options_of(base_config(kind)).items():
        for index, value in enumerate(values):
            mapping = base_config(kind)
            _set_path(mapping, path, value)
            yield f"{kind} {path} {index}", mapping


def case_of(seed: int, kinds: Sequence[str] = KINDS) -> Case:
    """The case of a seed, of one of these kinds."""
    rng = random.Random(f"config {seed}")
    kind = kinds[seed % len(kinds)]
    changes: list[str] = []
    mapping = base_config(kind)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
        change = rng.choices(list(_CHANGES), weights=list(_CHANGES.values()))[0]
        changes.append(change(mapping, rng))
    overrides = tuple(_override(mapping, rng) for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 2))))
    text = with_placeholders(yaml.safe_dump(mapping, sort_keys=False, allow_unicode=rng.random() < 0.5))
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        change = rng.choice(_TEXT_CHANGES)
        data = change(data, rng)
        changes.append(change.__name__.strip("_"))
    return Case(seed, kind, data, overrides, tuple(changes))


# --- changes of the mapping ----------------------------------------------------------------------------------------


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _paths(item, (*path, key))


def _pick(mapping: dict[str, Any], rng: random.Random) -> tuple[Any, Any, str]:
    """A container, a key of it, and the path in words."""
    paths = list(_paths(mapping))
    if not paths:
        return mapping, "seed", "seed"
    path = rng.choice(paths)
    container: Any = mapping
    for key in path[:-1]:
        container = container[key]
    return container, path[-1], ".".join(map(str, path))


def _set_path(mapping: dict[str, Any], path: str, value: Any) -> None:
    container = mapping
    *blocks, key = path.split(".")
    if path.startswith("models.0."):
        models = mapping.get("models")
        if not (isinstance(models, list) and models and isinstance(models[0], dict)):
            return
        container, blocks = models[0], []
    for block in blocks:
        if not isinstance(container.get(block), dict):
            container[block] = {}
        container = container[block]
    container[key] = copy.deepcopy(value)


_RULE_IDS = {kind.partition("/")[0] for kind in RULE_KINDS} - {"ppo", "a2c"}
_RL = ("env", "reward_fn", "alg.id", "alg.args", "alg.kl_div", "alg.policy", "train_evaluation.n_iters")
_BOTH = ("n_threads", "device", "seed", "tokenizer", "datapool", "train_evaluation")


def options_of(mapping: dict[str, Any]) -> dict[str, list[Any]]:
    """The keys and values for configs of this kind."""
    if not {"models", "post_training"}.isdisjoint(mapping):
        return PIPELINE_OPTIONS
    alg = mapping.get("alg")
    id = alg.get("id") if isinstance(alg, dict) else None
    if isinstance(id, str) and id in OBJECTIVES:
        return PREFERENCE_OPTIONS
    has_engine = isinstance(alg, dict) and "'engine'" in repr(alg.get("policy"))
    return RULE_OPTIONS if has_engine or (isinstance(id, str) and id in _RULE_IDS) else OPTIONS


def _option_path(mapping: dict[str, Any], rng: random.Random) -> str:
    """A key that one might set, mostly one of the config's own kind."""
    options = options_of(mapping)
    if rng.random() < 0.05:
        return rng.choice(list(OPTIONS))
    if options is PIPELINE_OPTIONS or options is RULE_OPTIONS:
        return rng.choice(list(options))
    if options is PREFERENCE_OPTIONS:
        names = {each.name for each in fields(OBJECTIVES.signature(mapping["alg"]["id"]))}
        known = {path for path in options if not path.startswith("alg.args.") or path.rpartition(".")[2] in names}
        return rng.choice(sorted(known))
    supervised = "reward_fn" not in mapping
    own = [path for path in OPTIONS if path.startswith(_BOTH) or path.startswith(_RL) != supervised]
    others = _OF_OTHERS.get(
        str((mapping.get("alg") or {}).get("id")) if isinstance(mapping.get("alg"), dict) else "", ()
    )
    pool = mapping.get("datapool")
    others = (*others, *_OF_OTHER_POOLS.get(str(pool.get("id")) if isinstance(pool, dict) else "", ()))
    return rng.choice([path for path in own if path.rpartition(".")[2] not in others])


_OF_OTHER_POOLS = {
    "dummy_pool": ("n_train", "n_eval", "max_size"),
    "film_opinions": ("n_samples", "max_size"),
    **dict.fromkeys(("jsonl", "csv", "text"), ("n_samples", "n_train", "n_eval")),
}
_PPO = ("target_kl", "clip_range_vf", "length_sorted_minibatches")
_MASKS = ("top_mask", "mask_type", "mask_ema")
_OF_OTHERS = {
    "ppo": (*_MASKS, "use_rms_prop", "sub_sampling_factor"),
    "nlpo": ("use_rms_prop", "sub_sampling_factor"),
    "a2c": (*_MASKS, *_PPO, "sub_sampling_factor"),
    "trpo": (*_MASKS, *_PPO[1:], "use_rms_prop", "dropout"),
    "supervised": ("n_iters", "eval_every", "save_every", "generation_kwargs"),
}
"""Last parts of keys that an algorithm does not have."""


def _option(mapping: dict[str, Any], rng: random.Random) -> str:
    path = _option_path(mapping, rng)
    _set_path(mapping, path, rng.choice(options_of(mapping).get(path) or OPTIONS[path]))
    return f"option {path}"


def _garbage_option(mapping: dict[str, Any], rng: random.Random) -> str:
    path = _option_path(mapping, rng)
    _set_path(mapping, path, rng.choice(VALUES))
    return f"garbage for {path}"


def _garbage(mapping: dict[str, Any], rng: random.Random) -> str:
    container, key, path = _pick(mapping, rng)
    container[key] = copy.deepcopy(rng.choice(VALUES))
    return f"garbage at {path}"


def _drop(mapping: dict[str, Any], rng: random.Random) -> str:
    container, key, path = _pick(mapping, rng)
    container.pop(key, None) if isinstance(container, dict) else container.pop(key)
    return f"drop {path}"


def _misspell(mapping: dict[str, Any], rng: random.Random) -> str:
    container, key, path = _pick(mapping, rng)
    if not isinstance(container, dict):
        return "nothing"
    name, at = str(key), rng.randrange(len(str(key)) + 1)
    other = rng.choice(
        (name[:at] + name[at + 1 :], name[:at] + "x" + name[at:], name.upper(), f" {name}", f"{name}\u200b")
    )
    container[other] = container.pop(key, None)
    return f"misspell {path}"


def _odd_key(mapping: dict[str, Any], rng: random.Random) -> str:
    container, _, path = _pick(mapping, rng)
    if isinstance(container, dict):
        container[
            rng.choice((1, None, True, 2.5, "", "a.b", "__class__", "self", "args", "id", "notices", "split"))
        ] = 1
    return f"odd key beside {path}"


def _stretch(mapping: dict[str, Any], rng: random.Random) -> str:
    """Another number, or the same as text."""
    container, key, path = _pick(mapping, rng)
    value = container.get(key) if isinstance(container, dict) else container[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        value = rng.choice((0, 1, 2))
    container[key] = rng.choice(
        (value * 2, -value, value + 1, str(value), float(value), value / 3, [value], value * 10**9)
    )
    return f"stretch {path}"


def _swap(mapping: dict[str, Any], rng: random.Random) -> str:
    one, first, path = _pick(mapping, rng)
    two, second, other = _pick(mapping, rng)
    if path.startswith(other) or other.startswith(path):
        return "nothing"
    one[first], two[second] = copy.deepcopy(
        (
            two.get(second) if isinstance(two, dict) else two[second],
            one.get(first) if isinstance(one, dict) else one[first],
        )
    )
    return f"swap {path} and {other}"


def _other_id(mapping: dict[str, Any], rng: random.Random) -> str:
    path = rng.choice(("reward_fn.id", "datapool.id", "alg.id", "alg.policy.id"))
    _set_path(mapping, path, rng.choice(SWAPPED_IDS))
    return f"other {path}"


_CHANGES: dict[Callable[[dict[str, Any], random.Random], str], float] = {
    _option: 24,
    _garbage_option: 3,
    _garbage: 3,
    _drop: 2,
    _misspell: 1,
    _odd_key: 1,
    _stretch: 4,
    _swap: 1,
    _other_id: 1,
}


def _override(mapping: dict[str, Any], rng: random.Random) -> str:
    """A `--set`, more often right than not."""
    path = _option_path(mapping, rng) if rng.random() < 0.9 else _pick(mapping, rng)[2]
    if rng.random() < 0.8:
        value = yaml.safe_dump(
            rng.choice(options_of(mapping).get(path) or OPTIONS.get(path, [1])), default_flow_style=True, width=10**6
        )
        return f"{path}={value.removesuffix('...' + chr(10)).strip()}"
    wrong = (
        "=",
        "seed",
        "seed==1",
        ".=1",
        "..a=1",
        f"{path}.x=1",
        f"{path}=[",
        f"{path}=&a [*a]",
        f"{path}={{",
        "a=1\t:",
    )
    return rng.choice((*wrong, f"{path}.0=1", f"{path}=!!python/name:os.system", "train_evaluation.metrics.99.id=x"))


# --- changes of the text -------------------------------------------------------------------------------------------


def _lines(change: Callable[[list[bytes], int, random.Random], None]) -> Callable[[bytes, random.Random], bytes]:
    def changed(data: bytes, rng: random.Random) -> bytes:
        lines = data.split(b"\n")
        change(lines, rng.randrange(len(lines)), rng)
        return b"\n".join(lines)

    changed.__name__ = change.__name__
    return changed


@_lines
def _repeated_line(lines: list[bytes], at: int, rng: random.Random) -> None:
    lines.insert(at, lines[at])


@_lines
def _lost_line(lines: list[bytes], at: int, rng: random.Random) -> None:
    del lines[at]


@_lines
def _shifted_line(lines: list[bytes], at: int, rng: random.Random) -> None:
    lines[at] = rng.choice((b"\t", b" ", b"  ", b"- ", b"#")) + lines[at]


def _other_byte(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    noise = rng.choice(
        (b"\x00", b"\xff", b"\x07", b"\xef\xbb\xbf", b":", b"{", b"]", b"'", b'"', b"*", b"&a ", b"!!set ", b"%", b"|")
    )
    return data[:at] + noise + data[at + rng.randrange(2) :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _another_document(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice(
        (b"---\nseed: 1\n", b"...\n", b"\n\t\n", b"<<: {seed: 5}\n", b"? [a]\n: 1\n", b"&x seed: 9\n")
    )


_TEXT_CHANGES = (_repeated_line, _lost_line, _shifted_line, _other_byte, _cut, _another_document)
