"""Blocks of a config from what is given to `Run` as objects.

algorithm     id                                kind of the run
model         name, folder, loaded model        names of model and tokenizer
prompts       texts, conversations, rows, pool  datapool: {id: jsonl, args: {data_files: ...}}
              file of rows                      the same, or {id: csv, ...}
data          rows with preferences, or a file  datapool: {id: preferences, args: {data_files: ...}}
reward        function, list, object, id        reward_fn: {id, args}
metrics       functions, objects, ids           train_evaluation.metrics
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.config.binding import RunKind
from rl4lms_like.core.pictures import KEYS_OF_PARTS, Picture, image_of_part, is_pil_image
from rl4lms_like.core.sample import Preference, Sample
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.formats import COMPLETION, MESSAGES, recognised
from rl4lms_like.data_pools.hf_dataset import as_stored
from rl4lms_like.data_pools.splits import SPLITS
from rl4lms_like.data_pools.tables import READERS, file_ending, first_row
from rl4lms_like.python_api.argument_names import SOURCE
from rl4lms_like.python_api.cached import cached_image, cached_model, cached_rows, cached_tokenizer
from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction, RewardPart
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError
from rl4lms_like.system.wording import excerpt

SUPERVISED = ("sft", "supervised")
"""Names of supervised training."""

SPLIT_NAMES = {"train": "train", "val": "val", "validation": "val", "valid": "val", "dev": "val", "test": "test"}
"""Names of splits in a dictionary -> this library's."""

PROMPT = "prompt"
REFERENCES = ("references", "reference", "completion")
"""Columns with references, in this order, unless `reference_column` names another one."""

DECODINGS = ("sampling", "greedy", "beam")
"""Methods of decoding, as `inference.decoding_arguments` has them."""

ENTRY = "a text, a list of messages with role and content, or a dictionary of columns"


def argument_error(argument: str, message: str) -> ConfigError:
    """Return an error about one argument of `Run`."""
    return ConfigError([ConfigIssue(argument, message)], SOURCE)


# --- algorithm ----------------------------------------------------------------------------------------------------


def kind_of(algorithm: Any) -> tuple[RunKind, str]:
    """Return the kind of run and the id of an algorithm.

    Raises:
        ConfigError: there is no such algorithm.
    """
    if isinstance(algorithm, str):
        if algorithm in SUPERVISED:
            return "supervised", "supervised"
        if algorithm in OBJECTIVES:
            return "preference", algorithm
        if algorithm in ALGORITHMS or ":" in algorithm:
            return "on_policy", algorithm

    known = sorted([*ALGORITHMS.ids(), *OBJECTIVES.ids(), "sft"])
    near = difflib.get_close_matches(algorithm, known, n=1) if isinstance(algorithm, str) else []
    hint = f"did you mean {near[0]!r}? " if near else ""
    ids = f"known: {', '.join(known)}; or give an import path 'package.module:Name'"
    raise argument_error("algorithm", f"expected the id of an algorithm, got {excerpt(algorithm)}; {hint}{ids}")


# --- model --------------------------------------------------------------------------------------------------------


def model_names(model: Any, tokenizer: Any) -> tuple[str, str]:
    """Return names or folders of model and tokenizer; loaded ones are written to the cache.

    Raises:
        ConfigError: one of them is missing, or cannot be trained.
    """
    tokenizer = os.fspath(tokenizer) if isinstance(tokenizer, os.PathLike) else tokenizer
    if tokenizer is not None and not isinstance(tokenizer, str) and not hasattr(tokenizer, "save_pretrained"):
        raise argument_error("tokenizer", f"expected a name, a folder or a loaded tokenizer, got {excerpt(tokenizer)}")

    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        if tokenizer is None:
            return name, name
        return name, tokenizer if isinstance(tokenizer, str) else str(cached_tokenizer(tokenizer))
    if model is None:
        raise argument_error("model", "missing; expected the name or folder of a model, or a loaded model")

    _check_loaded(model)
    if tokenizer is None:
        raise argument_error("tokenizer", "missing; a loaded model needs its tokenizer: Run(model, ..., tokenizer=...)")
    if isinstance(tokenizer, str):
        from rl4lms_like.policies.loading import load_tokenizer

        return str(cached_model(model, load_tokenizer(tokenizer))), tokenizer
    folder = str(cached_model(model, tokenizer))
    return folder, folder


def _check_loaded(model: Any) -> None:
    """Raise a `ConfigError` for a loaded object that is no model, or whose weights are not those of a checkpoint."""
    from transformers import PreTrainedModel

    kind = type(model)
    is_wrapped = any(base.__module__.partition(".")[0] == "peft" for base in kind.__mro__)
    if is_wrapped or getattr(model, "_hf_peft_config_loaded", False):
        way_out = "give its merge_and_unload(), or the base model with peft={'r': 8} for new adapters"
        raise argument_error("model", f"a {kind.__name__} with adapters of PEFT cannot be trained: {way_out}")
    if not isinstance(model, PreTrainedModel):
        raise argument_error("model", f"expected a name, a folder or a loaded PreTrainedModel, got a {kind.__name__}")
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None) is not None:
        way_out = "load it without quantization_config; peft={'r': 8} and quantization={'id': 'nf4'} quantize it"
        raise argument_error("model", f"a quantised model cannot be trained: {way_out}")


# --- data ---------------------------------------------------------------------------------------------------------


def data_block(
    data: Any, eval_data: Any, argument: str, columns: Mapping[str, Any], *, is_preference: bool, is_rl: bool
) -> dict[str, Any]:
    """Return the `datapool` block of prompts or of texts to learn from.

    Args:
        data: the id or block of a data pool, rows, or a file of rows; the last two also of several splits by name.
        eval_data: rows of the split `val`, or a file of them.
        argument: name of the argument with the data, for errors.
        columns: settings that name columns.
        is_preference: the rows are preferences.
        is_rl: the rows are prompts for rollouts.

    Raises:
        ConfigError: this is no data, or has values that cannot be written.
    """
    if data is None:
        raise argument_error(argument, f"missing; expected a list of entries, each {ENTRY}; or the id of a data pool")
    is_named = isinstance(data, str | os.PathLike) and not _is_file(data)
    if is_named or _is_block(data):
        if eval_data is not None:
            raise argument_error(
                f"eval_{argument}", f"is for rows; the data pool given as {argument} has its own splits"
            )
        return _named_pool(data, argument)

    data_by_split = dict(_splits(data, argument))
    if eval_data is not None:
        if "val" in data_by_split:
            raise argument_error(f"eval_{argument}", f"is given twice: {argument} has a split for it; keep one of them")
        data_by_split["val"] = eval_data
    if "train" not in data_by_split:
        raise argument_error(argument, f"has no split 'train'; it has {', '.join(data_by_split)}")

    # Rows are written to a file of the cache; of a file only the first row is read here. A split without a file is
    # empty, which a config has to say.
    files: dict[str, str | None] = dict.fromkeys(SPLITS)
    first: Mapping[str, Any] = {}
    images: dict[str, None] = {}
    for split in sorted(data_by_split, key=SPLITS.index):  # `train` first: its columns are those of all splits
        where = f"eval_{argument}" if split == "val" and eval_data is not None else argument
        file, rows = _file_and_rows(data_by_split[split], where)
        first = first or rows[0]
        _check_columns(rows, where, set(first))
        if file is None:
            image_columns = _image_columns(rows, columns.get("image_column"), where)
            images |= dict.fromkeys(image_columns)
            file = cached_rows(_with_image_files(rows, image_columns, where), where)
        files[split] = str(file)

    names = dict.fromkeys(name for name in first if name not in images)
    args: dict[str, Any] = {"data_files": files}
    if images and columns.get("image_column") is None:
        args["image_column"] = list(images)
    if is_preference:
        return {"id": "preferences", "args": args | _preference_columns(names, columns)}
    arguments = _prompt_columns(first, list(names), argument, columns, is_rl=is_rl)
    return {"id": _pool_of(files, argument), "args": args | arguments}


def _image_columns(rows: Sequence[Mapping[str, Any]], chosen: str | Sequence[str] | None, argument: str) -> list[str]:
    """Return the chosen columns with images; by default those that have images of PIL, `datasets` or this library.

    Raises:
        ConfigError: the rows lack a chosen column.
    """
    if chosen is not None:
        names = [chosen] if isinstance(chosen, str) else list(chosen)
        for name in names:
            if name not in rows[0]:
                columns = ", ".join(rows[0])
                raise argument_error(argument, f"image_column: there is no column {name!r}, the columns are {columns}")
        return names
    return [name for name in rows[0] if any(map(_has_image, (row[name] for row in rows)))]


def _has_image(cell: Any) -> bool:
    if isinstance(cell, list | tuple):
        return any(map(_has_image, cell))
    is_stored = isinstance(cell, Mapping) and set(cell) == {"bytes", "path"}  # as `datasets` stores images
    return is_stored or isinstance(cell, Picture) or is_pil_image(cell)


def _with_image_files(
    rows: Sequence[Mapping[str, Any]], image_columns: Sequence[str], argument: str
) -> Sequence[Mapping[str, Any]]:
    """Return rows with the absolute paths of image files in place of their images, which are written to the cache.

    They are in columns of images, and in the parts of messages.

    Raises:
        ConfigError: a cell is no image.
    """
    with_files = []
    for index, row in enumerate(rows):
        converted: dict[str, Any] = {}
        for name, cell in row.items():
            try:
                if name in image_columns:
                    entries = cell if isinstance(cell, list | tuple) else [cell]
                    converted[name] = [str(cached_image(Picture.of(entry))) for entry in entries if entry is not None]
                elif is_conversation(cell):
                    converted[name] = [_message_with_image_files(message) for message in cell]
            except DataPoolError as error:
                raise argument_error(argument, f"column {name!r} of entry {index}: {error}") from error
        with_files.append({**row, **converted})
    return with_files


def _message_with_image_files(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with paths in place of the images in its parts; one without images is unchanged."""
    if not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        is_image = isinstance(part, Mapping) and part.get("type") in KEYS_OF_PARTS
        image = image_of_part(part) if is_image else None
        parts.append(part if image is None else {"type": "image", "path": str(cached_image(Picture.of(image)))})
    return {**message, "content": parts}


def _is_file(data: Any) -> bool:
    return isinstance(data, str | os.PathLike) and with_home(os.fspath(data)).is_file()


def _file_and_rows(data: Any, argument: str) -> tuple[Path | None, list[dict[str, Any]]]:
    """Return the file of data and its first row; of data that are rows no file, and all of them."""
    if not isinstance(data, str | os.PathLike):
        rows = _rows(data, argument)
        if not rows:
            raise argument_error(argument, "is empty; expected at least one entry")
        return None, rows

    # An absolute path, so that the run can be continued from another folder.
    file = Path(os.path.abspath(with_home(os.fspath(data))))
    if not file.is_file():
        raise argument_error(argument, f"there is no file {os.fspath(data)!r}")
    if file_ending(file) not in READERS:
        endings = ", ".join(f".{ending}" for ending in READERS)
        block = f"{{'id': 'text', 'args': {{'path': {os.fspath(data)!r}}}}}"
        message = f"{os.fspath(data)!r} is no table, whose name ends with {endings}; the lines of a text file: {block}"
        raise argument_error(argument, message)
    try:
        return file, [dict(first_row(file))]
    except DataPoolError as error:
        raise argument_error(argument, str(error)) from error


def _pool_of(files: Mapping[str, str | None], argument: str) -> str:
    """Return the id of the pool that reads files of prompts; one pool reads all splits."""
    ids = {"csv" if file_ending(Path(file)) in ("csv", "tsv") else "jsonl" for file in files.values() if file}
    if len(ids) > 1:
        message = "has a split of comma-separated values and one of another format; give all splits in one format"
        raise argument_error(argument, message)
    return ids.pop()


def _check_columns(rows: Sequence[Mapping[str, Any]], argument: str, names: set[str]) -> None:
    """Raise a `ConfigError` if a row lacks a column of the first training row, or has a further one."""
    for index, row in enumerate(rows):
        if set(row) != names:
            name = sorted(names ^ set(row))[0]
            has = "has no column" if name in names else "has the column"
            other = "which other entries have" if name in names else "which other entries lack"
            raise argument_error(argument, f"entry {index} {has} {name!r}, {other}; None is an empty cell")


def _is_block(data: Any) -> bool:
    return isinstance(data, Mapping) and isinstance(data.get("id"), str) and {"id", "args", "sampler"}.issuperset(data)


def _named_pool(data: Any, argument: str) -> dict[str, Any]:
    """Return the block of a data pool that is given by its id or as a block."""
    if isinstance(data, Mapping):
        return dict(data)
    name = os.fspath(data)
    if name in DATA_POOLS or ":" in name:
        return {"id": name}
    if os.sep in name or file_ending(Path(name)) in READERS:
        raise argument_error(argument, f"there is no file {name!r}")
    raise argument_error(
        argument, f"{DATA_POOLS.unknown(name)}. A single text is a list too: {argument}=[{name!r:.40}]"
    )


def _splits(data: Any, argument: str) -> dict[str, Any]:
    """Return data by split; data that are not a dictionary are the split `train`."""
    if not isinstance(data, Mapping):
        return {"train": data}
    unknown = [key for key in data if key not in SPLIT_NAMES]
    if unknown:
        known = "train, validation, test"
        message = f"a dictionary has the splits {known} as keys, got {excerpt(unknown[0])}; one row is a list of one"
        raise argument_error(argument, message)

    by_split: dict[str, str] = {}
    for key in data:
        split = SPLIT_NAMES[key]
        if split in by_split:
            raise argument_error(argument, f"{by_split[split]!r} and {key!r} are names of one split; keep one of them")
        by_split[split] = key
    return {split: data[key] for split, key in by_split.items()}


def _rows(data: Any, argument: str) -> list[dict[str, Any]]:
    """Return the rows of data as dictionaries of columns."""
    if isinstance(data, TextGenPool):
        return _rows_of_pool(data, argument)
    if hasattr(data, "features") and hasattr(data, "with_format"):  # a `datasets.Dataset`
        data = as_stored(data)

    # A DataFrame iterates over the names of its columns, and has NaN in place of what is missing.
    if hasattr(data, "columns") and hasattr(data, "to_dict"):
        frame = data.astype(object)
        data = frame.where(frame.notna(), None).to_dict("records")
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise argument_error(argument, f"expected a list of entries, each {ENTRY}; got {excerpt(data)}")

    data = list(data)
    has_images = any(isinstance(entry, Sample) and entry.images for entry in data)
    rows = []
    for index, entry in enumerate(data):
        if isinstance(entry, str) or is_conversation(entry):
            rows.append({PROMPT: entry if isinstance(entry, str) else list(entry)})
        elif isinstance(entry, Sample):
            rows.append(_row_of_sample(entry, has_images=has_images))
        elif isinstance(entry, Mapping) and entry and all(isinstance(name, str) for name in entry):
            rows.append(dict(entry))
        else:
            raise argument_error(argument, f"entry {index} is {excerpt(entry)}; expected {ENTRY}")
    return rows


def is_conversation(value: Any) -> bool:
    """Return True for a list of messages."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in value)


def _rows_of_pool(pool: TextGenPool, argument: str) -> list[dict[str, Any]]:
    has_images = any(sample.images for sample in pool.samples)
    rows = []
    for sample, weight in pool:
        if weight != 1:
            message = "its samples have weights, which rows have not: give the import path of the data pool"
            raise argument_error(argument, message)
        rows.append(_row_of_sample(sample, has_images=has_images))
    return rows


def _row_of_sample(sample: Sample, *, has_images: bool) -> dict[str, Any]:
    row: dict[str, Any] = {PROMPT: sample.messages or sample.prompt_or_input_text}
    if has_images:
        row["images"] = list(sample.images)
    if isinstance(sample, Preference):
        return row | {"chosen": sample.chosen, "rejected": sample.rejected, "margin": sample.margin}
    return row | {"references": list(sample.references)} | (sample.meta_data or {})


def _prompt_columns(
    row: Mapping[str, Any], names: list[str], argument: str, columns: Mapping[str, Any], *, is_rl: bool
) -> dict[str, Any]:
    """Return the arguments of the pool that say which columns of rows are prompts, references and further data."""
    prompt = columns.get("prompt_column")
    has_prompt = PROMPT in names and not is_conversation(row.get(COMPLETION))
    is_dialogue = prompt is None and not has_prompt and MESSAGES in names and not is_rl
    if prompt is None and not has_prompt and not is_dialogue and recognised(row) != "columns":
        return {}  # a published format, which has its own columns, or completions that are messages

    if prompt is None:
        prompt = _default_prompt_column(names, argument, has_prompt=has_prompt, is_dialogue=is_dialogue)
    arguments: dict[str, Any] = {"prompt_column": prompt}
    reference = columns.get("reference_column")
    if is_dialogue:
        arguments["last_message_as_reference"] = True  # dialogues that end with the answer to learn
    if reference is None:
        is_needed = not is_rl and not is_dialogue
        reference = _default_reference_column(names, prompt, argument, is_needed=is_needed)
    if reference is not None:
        arguments["reference_column"] = reference

    # Rewards and metrics get all other columns, by name. Texts that a supervised run learns are no further data.
    left_out = [prompt, "references", "tools"]
    if not is_rl:
        left_out += reference if isinstance(reference, list | tuple) else [reference]
    others = [name for name in names if name not in left_out]
    if others:
        arguments["meta_columns"] = others
    return arguments


def _default_prompt_column(names: list[str], argument: str, *, has_prompt: bool, is_dialogue: bool) -> str:
    if has_prompt or is_dialogue:
        return PROMPT if has_prompt else MESSAGES
    known = ", ".join(names)
    raise argument_error(argument, f"no column is named 'prompt'; set prompt_column to one of {known}")


def _default_reference_column(names: list[str], prompt: str, argument: str, *, is_needed: bool) -> str | None:
    reference = next((name for name in REFERENCES if name in names and name != prompt), None)
    if reference is None and is_needed:
        known = ", ".join(names)
        message = f"no column is named 'completion', with the text to learn; set reference_column to one of {known}"
        raise argument_error(argument, message)
    return reference


def _preference_columns(names: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the pool for labelled responses, and for the margin of pairs."""
    if "chosen" in names and "margin" in names:
        return {"margin_column": "margin"}
    if "label" not in names or "chosen" in names or columns.get("label_column") is not None:
        return {}
    response = "completion" if "completion" in names else "response"
    return {"label_column": "label", "response_column": response}


def has_conversations(rows_file: str | None) -> bool:
    """Return True if the first row of a file has a conversation."""
    return any(map(is_conversation, _first_row(rows_file).values()))


def has_texts(rows_file: str | None) -> bool:
    """Return True if the rows of a file are texts without prompts."""
    return recognised(_first_row(rows_file)) == "text"


def _first_row(rows_file: str | None) -> Mapping[str, Any]:
    """Return the first row of a file; an empty one if there is none."""
    if rows_file is None:
        return {}
    try:
        return first_row(Path(rows_file))
    except DataPoolError:  # a file of a block, which is reported where the config is checked
        return {}


# --- rewards and metrics ------------------------------------------------------------------------------------------


def weighted_rewards(reward: Any, weights: Any) -> Any:
    """Return a reward, or the pairs of several rewards with their weights; both are what a config may have.

    Raises:
        ConfigError: there is no reward, or the weights do not fit.
    """
    kinds = "expected a function, a list of functions, a RewardFunction, or the id of a reward"
    if reward is None:
        raise argument_error("reward", f"missing; {kinds}")

    # The config checks what an id, a block or a function needs; here, only what it could not name.
    is_reward = isinstance(reward, str | Mapping | list | tuple | RewardFunction | BatchedRewardFunction)
    if not is_reward and not callable(reward):
        raise argument_error("reward", f"{kinds}; got {excerpt(reward)}")
    if isinstance(reward, list | tuple) and not reward:
        raise argument_error("reward", f"is an empty list; {kinds}")
    if weights is None:
        # Names alone are no list of functions: pairs with a weight are.
        if isinstance(reward, list | tuple) and all(isinstance(item, str | Mapping) for item in reward):
            return [(item, 1.0) for item in reward]
        return {"id": reward} if isinstance(reward, str) else reward

    # Weights are for several rewards, one for each.
    if not isinstance(reward, list | tuple):
        raise argument_error("reward_weights", "is for a list of rewards; there is one reward")
    if not isinstance(weights, Sequence) or isinstance(weights, str) or len(weights) != len(reward):
        n_weights = len(weights) if isinstance(weights, Sequence) else excerpt(weights)
        raise argument_error(
            "reward_weights", f"expected one number for each of {len(reward)} rewards, got {n_weights}"
        )
    return [reweighted(item, weight) for item, weight in zip(reward, weights, strict=True)]


def reweighted(reward: Any, weight: Any) -> Any:
    """Return one of several rewards with its weight."""
    if isinstance(reward, RewardPart | tuple):
        raise argument_error("reward_weights", "the rewards have weights of their own; give one of both")
    return (reward, weight)


def metric_list(metrics: Any) -> list[Any]:
    """Return one or several metrics as a list of what a config may have: functions, objects and blocks."""
    if isinstance(metrics, str | Mapping) or not isinstance(metrics, list | tuple):
        metrics = [metrics]
    return [{"id": metric} if isinstance(metric, str) else metric for metric in metrics]


# --- generation ---------------------------------------------------------------------------------------------------


def check_generation(prompts: Any, *, n: Any, max_new_tokens: Any, decoding: Any, temperature: Any, top_k: Any) -> None:
    """Raise a `ConfigError` that lists the arguments of `Run.generate` with other values than they may have."""
    issues = []
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        expected = "expected a text, a conversation (a list of messages) or a list of them"
        issues.append(ConfigIssue("prompts", f"{expected}; got {excerpt(prompts)}"))
    if decoding not in (None, *DECODINGS):
        issues.append(ConfigIssue("decoding", f"expected one of {', '.join(DECODINGS)}; got {excerpt(decoding)}"))

    counts = {"n": (n, 1), "max_new_tokens": (max_new_tokens, 1), "top_k": (top_k, 0)}
    for name, (value, smallest) in counts.items():
        is_default = value is None and name != "n"
        if not is_default and (type(value) is not int or value < smallest):
            message = f"expected a whole number of at least {smallest}, got {excerpt(value)}"
            issues.append(ConfigIssue(name, message))
    if temperature is not None and (type(temperature) not in (int, float) or not 0 < temperature < math.inf):
        issues.append(ConfigIssue("temperature", f"expected a number above 0, got {excerpt(temperature)}"))
    if issues:
        raise ConfigError(issues, "the arguments of generate")
