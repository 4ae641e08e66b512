"""What several keys of a config say together, and what a name says of this machine. Loads no model, no torch.

Each check sees the whole raw mapping, bound already (`binding`), and returns the mistakes that it finds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl4lms_like.algorithms.arguments import (
    NLPOArguments,
    TRPOArguments,
    critic_mistakes,
    value_mistakes,
    without_second_derivatives,
)
from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import DataPoolError, Mistake
from rl4lms_like.core.schema import at, join, signature_of, unknown_key
from rl4lms_like.core.secrets import names_variable
from rl4lms_like.core.wording import shown
from rl4lms_like.data_pools.splits import SPLITS
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.named import named_key
from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.arguments import MaskablePolicyArguments, mask_mistakes
from rl4lms_like.policies.lora_arguments import lora_mistakes
from rl4lms_like.training.config.chosen_metrics import chosen_metric_mistakes
from rl4lms_like.training.config.places import GENERATION, POST_PROCESSING, targets
from rl4lms_like.training.small_models.embedded import NAMES, is_embedded, unknown_embedded_model


def cross_check(blocks: dict[str, Any]) -> list[Mistake]:
    """The mistakes that all checks find in a bound mapping."""
    return [mistake for check in CROSS_CHECKS for mistake in check(blocks)]


def _embedded_models(blocks: dict[str, Any]) -> list[Mistake]:
    """What begins as the name of an embedded model is the name of one, wherever it stands."""
    return [
        Mistake(path, unknown_embedded_model(value))
        for path, value in _values(blocks)
        if is_embedded(value) and value not in NAMES
    ]


def _values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every single value of nested mappings and lists, and its path."""
    if not isinstance(value, Mapping | list):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _values(item, join(path, key))


def _missing_folders(blocks: dict[str, Any]) -> list[Mistake]:
    """Model names that can only be local folders, and are not there."""
    places = ["tokenizer.model_name", "alg.model_name"]
    places += [f"alg.policy.args.{key}" for key in ("model_name", "reference_model", "critic_model")]
    names = ((path, at(blocks, path)) for path in places)
    return [
        Mistake(path, f"there is no folder {name!r}" + _where_from(name))
        for path, name in names
        if isinstance(name, str) and names_folder(name) and not with_home(name).is_dir()
    ]


def _missing_data(blocks: dict[str, Any]) -> list[Mistake]:
    """A `data_dir` that one of the library's own pools is to read, and that is not there."""
    module = str(getattr(targets(blocks).get("datapool"), "__module__", ""))
    folder = at(blocks, "datapool.args.data_dir")
    if not module.startswith("rl4lms_like.data_pools.") or not isinstance(folder, str) or names_variable(folder):
        return []
    if with_home(folder).is_dir():
        return []
    return [Mistake("datapool.args.data_dir", f"there is no folder {folder!r}" + _where_from(folder))]


def names_folder(name: str) -> bool:
    """Whether a model name means a local folder: hub ids are `name` or `owner/name`.

    `owner/name` means a folder only where a folder `owner` stands; `embedded/name` never does.
    """
    if is_embedded(name):
        return False
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        return True
    return "/" in name and Path(name).parent.is_dir()


def _where_from(name: str) -> str:
    return "" if with_home(name).is_absolute() else f" below {Path.cwd()}"


def _pool_files(blocks: dict[str, Any]) -> list[Mistake]:
    """One file for all splits or one for each, of the library's own pools."""
    args = at(blocks, "datapool.args")
    if file_pool(blocks) is None or (args.get("path") is None) != (args.get("data_files") is None):
        return []
    return [Mistake("datapool.args", "give either path (one file for all splits) or data_files (one file a split)")]


def file_pool(blocks: dict[str, Any]) -> Callable[..., Any] | None:
    """Return what prepares the run's data pool, if that is one of the library's own that read a file of the user's."""
    prepare = targets(blocks).get("datapool")
    if prepare is None or not str(prepare.__module__).startswith("rl4lms_like.data_pools."):
        return None
    optional = signature_of(prepare).defaults  # of `hf_dataset`, `path` is no file and required
    reads_files = {"path", "data_files"} <= optional.keys() and isinstance(at(blocks, "datapool.args"), Mapping)
    return prepare if reads_files else None


def data_mistakes(blocks: dict[str, Any]) -> list[Mistake]:
    """Files of the library's own pools that are not there, or whose first row has not the columns that are named.

    Args:
        blocks: a bound mapping without mistakes in `datapool`.
    """
    prepare, args = file_pool(blocks), at(blocks, "datapool.args")
    if prepare is None or any(map(names_variable, [*args.values(), *(args.get("data_files") or {}).values()])):
        return []  # a variable is looked up when the pool is prepared
    path, files = args.get("path"), args.get("data_files") or {}
    found = []
    for split in ("train",) if path is not None else SPLITS:
        place, file = ("path", path) if path is not None else (f"data_files.{split}", files.get(split))
        if isinstance(file, str) and not os.path.exists(with_home(file)):
            found.append(Mistake(f"datapool.args.{place}", f"there is no file {file!r}" + _where_from(file)))
            continue
        own = files if path is None else {split: path}
        try:
            prepare(split, **{**args, "path": None, "data_files": own, "max_size": 1})
        except DataPoolError as error:
            found.append(Mistake("datapool.args", str(error)))
    return found


def _post_processing(blocks: dict[str, Any]) -> list[Mistake]:
    """A supervised run's `post_processing_fn` is null or names a component; the texts of RL runs stay as they are."""
    post = at(blocks, POST_PROCESSING)
    found = []
    if post is not None and not (isinstance(post, Mapping) and isinstance(post.get("id"), str)):
        found = [Mistake(POST_PROCESSING, f"expected null or a mapping with id; got {shown(post)}")]
    elif post is not None:
        others = [key for key in post if key not in ("id", "args")]
        found = [Mistake(join(POST_PROCESSING, key), unknown_key(key, ("id", "args"))) for key in others]
    for place in ("alg.policy.args.generation_kwargs", "train_evaluation.generation_kwargs"):
        if at(blocks, f"{place}.post_processing_fn") is not None:
            said = "is of supervised runs; what the policy of an RL run writes is scored as it is"
            found.append(Mistake(f"{place}.post_processing_fn", said))
    return found


def _response_lengths(blocks: dict[str, Any]) -> list[Mistake]:
    """A `max_length` of a seq2seq model counts its start token: 1 leaves nothing to write."""
    return [
        Mistake(f"{place}.max_length", "counts a seq2seq model's start token: expected at least 2")
        for place in GENERATION
        if at(blocks, f"{place}.max_length") == 1 and at(blocks, f"{place}.max_new_tokens") is None
        if at(blocks, "alg.model_type") == "seq2seq" or "seq2seq" in str(at(blocks, "alg.policy.id"))
    ]


def _metric_keys(blocks: dict[str, Any]) -> list[Mistake]:
    """Two metrics that report the same keys: one would stand for both. The very same metric twice is computed once."""
    metrics = at(blocks, "train_evaluation.metrics")
    mistakes: list[Mistake] = []
    owners: dict[str, int] = {}
    for index, metric in enumerate(metrics if isinstance(metrics, list) else []):
        for key in () if metric in metrics[:index] else _keys_of(metric):
            if owners.setdefault(key, index) != index:
                other = f"train_evaluation.metrics.{owners[key]} ({metrics[owners[key]]['id']})"
                said = f"reports {key!r}, as {other} does; give one of them a name, which its keys then end in"
                mistakes.append(Mistake(f"train_evaluation.metrics.{index}", said))
                break
    return mistakes


def _keys_of(metric: Any) -> list[str]:
    """What a metric of the table reports; without the keys that depend on its arguments."""
    id = metric.get("id") if isinstance(metric, Mapping) else None
    if not isinstance(id, str) or id not in METRICS:
        return []
    name = metric.get("name")
    return [named_key(key, name) if name else key for key in METRICS.entry(id).keys if "{" not in key]


def _optimizer_arguments(blocks: dict[str, Any]) -> list[Mistake]:
    """Arguments of the optimizer that have a key of their own."""
    own = {"weight_decay": "alg.policy.args.weight_decay", "lr": "alg.args.learning_rate"}
    given = at(blocks, "alg.policy.args.optimizer_kwargs")
    return [
        Mistake(f"alg.policy.args.optimizer_kwargs.{key}", f"is set by {instead}")
        for key, instead in own.items()
        if isinstance(given, Mapping) and key in given
    ]


def _adapters(blocks: dict[str, Any]) -> list[Mistake]:
    """The fields of `peft`, and what has a meaning beside it only."""
    mistakes = []
    for place in ("alg.policy.args", "alg"):
        mistakes += lora_mistakes(at(blocks, f"{place}.peft"), f"{place}.peft")
        if at(blocks, f"{place}.merge_on_save") is True and at(blocks, f"{place}.peft") is None:
            mistakes.append(Mistake(f"{place}.merge_on_save", "there are no adapters to merge without peft"))
    return mistakes


def _hub_kernels(blocks: dict[str, Any]) -> list[Mistake]:
    """Attention of the hub, `owner/name`, is code that is downloaded and run."""
    args = "alg.policy.args"
    name = at(blocks, f"{args}.attn_implementation")
    if not isinstance(name, str) or "/" not in name or at(blocks, f"{args}.trust_remote_code") is True:
        return []
    said = f"{name!r} is code of the hub that would be run: if you trust it, {args}.trust_remote_code: true"
    return [Mistake(f"{args}.attn_implementation", said)]


def _whole_episodes(blocks: dict[str, Any]) -> list[Mistake]:
    """What only `vec_env: text` does, which plays whole episodes; the others call the reward where they step."""
    kind = at(blocks, "env.vec_env")
    if kind not in ("dummy", "subproc"):
        return []
    said = f"goes with vec_env 'text' only, got {kind!r}, which calls the reward where it steps"
    return [Mistake(f"env.{key}", said) for key in ("reward_workers", "reward_timeout") if at(blocks, f"env.{key}")]


def _critic(blocks: dict[str, Any]) -> list[Mistake]:
    """A shared critic has no network of its own; an algorithm that learns no values has no critic."""
    args = "alg.policy.args"
    given, takes = at(blocks, args), targets(blocks)
    if isinstance(given, Mapping) and "alg" in takes:
        id, own = blocks["alg"]["id"], blocks["alg"].get("args") or {}
        found = [mistake.below(args) for mistake in critic_mistakes(takes["alg"], given, id)]
        found += [mistake.below("alg.args") for mistake in value_mistakes(takes["alg"], own, id)]
        if found:
            return found
    if at(blocks, f"{args}.critic") != "shared" or at(blocks, f"{args}.critic_model") is None:
        return []
    return [
        Mistake(f"{args}.critic_model", "is the network of a separate critic; set critic to 'separate', or drop it")
    ]


def _masks(blocks: dict[str, Any]) -> list[Mistake]:
    """`nlpo` and the maskable policies need each other, and rollouts whose masks can be recorded."""
    alg = blocks.get("alg")
    takes = targets(blocks)
    if not isinstance(alg, dict) or not {"alg", "alg.policy"} <= takes.keys():
        return []
    masks, maskable = _is_kind(takes["alg"], NLPOArguments), _is_kind(takes["alg.policy"], MaskablePolicyArguments)
    id, policy = alg["id"], alg["policy"]["id"]
    if masks and not maskable:
        other = f"maskable_{policy}" if f"maskable_{policy}" in POLICIES else "a maskable policy"
        return [Mistake("alg.policy.id", f"{id} needs a policy with a mask model: {other}, not {policy}")]
    if maskable and not masks:
        plain = policy.removeprefix("maskable_")
        hint = f"; {id} takes {plain}" if plain != policy else ""
        return [Mistake("alg.policy.id", f"{policy} needs alg.id: nlpo, which refreshes its mask model{hint}")]
    args = alg["policy"].get("args")
    return mask_mistakes(args, "alg.policy.args") if maskable and isinstance(args, Mapping) else []


def _second_derivatives(blocks: dict[str, Any]) -> list[Mistake]:
    """`trpo` needs networks that can be differentiated twice."""
    args = at(blocks, "alg.policy.args")
    if not _is_kind(targets(blocks).get("alg"), TRPOArguments) or not isinstance(args, Mapping):
        return []
    found = without_second_derivatives(args)
    return [Mistake(join("alg.policy.args", mistake.path), mistake.message) for mistake in found]


def _is_kind(target: Any, kind: type) -> bool:
    """Whether what a component's `args` go to is a class of this kind."""
    return isinstance(target, type) and issubclass(target, kind)


CROSS_CHECKS = (
    _embedded_models,
    _missing_folders,
    _missing_data,
    _pool_files,
    _post_processing,
    _response_lengths,
    _metric_keys,
    chosen_metric_mistakes,
    _optimizer_arguments,
    _adapters,
    _hub_kernels,
    _whole_episodes,
    _critic,
    _masks,
    _second_derivatives,
)
"""What several keys say together."""
