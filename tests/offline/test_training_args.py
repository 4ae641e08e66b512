"""Each key of `alg.training_args` that a run accepts has an effect, which is tried; all others are refused.

SEEN       another value changes the weights, the log, the evaluations of `val`, the files or the Trainer's saved state
REACHES    another value is an argument of what trains or loads: of torch, a data loader, or the model
NOT_TRIED  keys with an effect on a GPU or with a further package only, by name
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from transformers import TrainingArguments

from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.assemble_supervised import assemble_supervised
from rl4lms_like.offline.settable_arguments import (
    NOT_SETTABLE,
    SUPERVISED_ONLY,
    WITHOUT_EFFECT,
    without_unused_keys,
)
from rl4lms_like.offline.trainer import SupervisedTrainer
from rl4lms_like.preview import preview
from rl4lms_like.run import resume
from rl4lms_like.tracking.base import Tracker
from tests.config_errors import raises_at
from tests.offline.preferences import preference_runs
from tests.offline.preferences.preference_runs import lines, run, written

KINDS = ("sft", "dpo")


class Seen(NamedTuple):
    """A value, what it changes, and keys that the runs with and without it have besides."""

    value: Any
    where: str
    also: Mapping[str, Any] = MappingProxyType({})


_BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}

SEEN = {
    "per_device_train_batch_size": Seen(2, "weights"),
    "num_train_epochs": Seen(1, "weights"),
    "max_steps": Seen(4, "weights"),
    "learning_rate": Seen(0.1, "weights"),
    "lr_scheduler_type": Seen("cosine", "weights"),
    "lr_scheduler_kwargs": Seen({"num_cycles": 2}, "weights", {"lr_scheduler_type": "cosine"}),
    "warmup_steps": Seen(2, "weights"),
    "optim": Seen("sgd", "weights"),
    "optim_args": Seen("momentum=0.5", "weights", {"optim": "sgd"}),
    "weight_decay": Seen(0.5, "weights"),
    "adam_beta1": Seen(0.5, "weights"),
    "adam_beta2": Seen(0.5, "weights"),
    "adam_epsilon": Seen(0.1, "weights"),
    "gradient_accumulation_steps": Seen(3, "weights"),
    "max_grad_norm": Seen(0.01, "weights"),
    "bf16": Seen(True, "weights"),
    "accelerator_config": Seen({"use_seedable_sampler": False}, "weights"),
    "train_sampling_strategy": Seen("sequential", "weights"),
    "dataloader_drop_last": Seen(True, "weights", {"per_device_train_batch_size": 5}),
    "logging_strategy": Seen("epoch", "log"),
    "logging_steps": Seen(1, "log"),
    "logging_first_step": Seen(True, "log"),
    "eval_strategy": Seen("no", "val"),
    "eval_steps": Seen(2, "val"),
    "eval_delay": Seen(4, "val"),
    "eval_on_start": Seen(True, "log"),
    "per_device_eval_batch_size": Seen(2, "state"),
    "save_only_model": Seen(True, "files"),
    "save_strategy": Seen("no", "files"),
    "save_steps": Seen(2, "files"),
    "save_total_limit": Seen(1, "files", {"save_steps": 2}),
    "load_best_model_at_end": Seen(True, "weights", {"metric_for_best_model": "loss", "greater_is_better": True}),
    "metric_for_best_model": Seen("loss", "state"),
    "greater_is_better": Seen(True, "weights", _BEST),
    # Supervised runs only.
    "label_smoothing_factor": Seen(0.3, "weights"),
    "neftune_noise_alpha": Seen(5.0, "weights"),
    "include_num_input_tokens_seen": Seen("all", "state"),
}

_WORKER = {"dataloader_num_workers": 1}


def _loader(name: str) -> Callable[[Any], Any]:
    return lambda trainer: getattr(trainer.get_train_dataloader(), name)


def _start_method(trainer: Any) -> str | None:
    return getattr(trainer.get_train_dataloader().multiprocessing_context, "_name", None)


def _recomputation(trainer: Any) -> list[Any]:
    """Return the functions of the modules that recompute activations, with their arguments."""
    trainer.train()
    functions = [getattr(module, "_gradient_checkpointing_func", None) for module in trainer.model.modules()]
    return [function.keywords for function in functions if function is not None]


class Reaches(NamedTuple):
    """A value, how it is found in a trainer, what is found, and keys that are set besides."""

    value: Any
    read: Callable[[Any], Any]
    found: Any
    also: Mapping[str, Any] = MappingProxyType({})


REACHES = {
    "dataloader_num_workers": Reaches(1, _loader("num_workers"), 1),
    "dataloader_persistent_workers": Reaches(True, _loader("persistent_workers"), True, _WORKER),
    "dataloader_prefetch_factor": Reaches(3, _loader("prefetch_factor"), 3, _WORKER),
    "dataloader_in_order": Reaches(False, _loader("in_order"), False, _WORKER),
    "dataloader_multiprocessing_context": Reaches("forkserver", _start_method, "forkserver", _WORKER),
    "use_cache": Reaches(True, lambda trainer: trainer.objective.use_cache, True),
    "full_determinism": Reaches(True, lambda _: torch.are_deterministic_algorithms_enabled(), True),
    "gradient_checkpointing": Reaches(True, lambda trainer: bool(_recomputation(trainer)), True),
    "activation_checkpointing": Reaches(True, lambda trainer: bool(_recomputation(trainer)), True),
    "gradient_checkpointing_kwargs": Reaches(
        {"use_reentrant": True},
        lambda trainer: {keywords["use_reentrant"] for keywords in _recomputation(trainer)},
        {True},
        {"gradient_checkpointing": True},
    ),
    "activation_checkpointing_kwargs": Reaches(
        {"use_reentrant": True},
        lambda trainer: {keywords["use_reentrant"] for keywords in _recomputation(trainer)},
        {True},
        {"activation_checkpointing": True},
    ),
}

COMPILED = {
    "torch_compile": (True, "backend", "inductor"),
    "torch_compile_backend": ("eager", "backend", "eager"),
    "torch_compile_mode": ("reduce-overhead", "mode", "reduce-overhead"),
}
"""Key of supervised runs -> a value, an argument of `torch.compile`, and its value there."""

NOT_TRIED = {
    "dataloader_pin_memory": "pins memory from which a GPU copies",
    "fp16": "supervised runs on a CPU refuse it",
    "tf32": "transformers refuses it without a GPU",
    "torch_empty_cache_steps": "empties the cache of the GPU's memory",
    "use_liger_kernel": "needs liger-kernel, whose kernels are of GPUs",
    "liger_kernel_config": "arguments of these kernels",
    "optim_target_modules": "needs galore_torch or apollo_torch",
}

ACCEPTED = {field.name for field in dataclasses.fields(TrainingArguments) if field.init} - NOT_SETTABLE.keys()
OF_SUPERVISED = SUPERVISED_ONLY.keys() | {"label_smoothing_factor"}


def accepted(kind: str, table: dict[str, Any]) -> list[str]:
    """Return the keys of a table that a kind of run accepts in the installed version of transformers."""
    return [key for key in table if key in ACCEPTED and (kind == "sft" or key not in OF_SUPERVISED)]


def blocks(kind, model, file, **training_args):
    """Six steps of a run that evaluates the loss and the preferences alone."""
    mapping = preference_runs.blocks("dpo", model, file, **training_args)
    if kind == "sft":
        mapping["alg"]["id"] = "supervised"
        del mapping["alg"]["args"]
    del mapping["alg"]["generation_kwargs"]
    mapping["train_evaluation"] = {"eval_batch_size": 12, "generate": False}
    return mapping


@pytest.fixture(scope="module")
def seen_of(tmp_path_factory, tiny_gpt2_dir):
    """Function that trains a run with some keys and returns what can be seen of it; each run is trained once."""
    base = tmp_path_factory.mktemp("runs")
    file = written(base)
    done: dict[str, dict[str, Any]] = {}

    def observe(kind, given):
        training_args = dict(given)
        key = json.dumps([kind, training_args], sort_keys=True)
        if key not in done:
            folder = run(blocks(kind, tiny_gpt2_dir, file, **training_args), base / str(len(done)))
            done[key] = observed(folder)
            shutil.rmtree(folder)
        return done[key]

    return observe


def observed(folder):
    states = sorted(folder.glob("checkpoints/checkpoint-*/trainer_state.json"))
    val = folder / "val_split_metrics.jsonl"
    log = lines(folder / "training_info.jsonl")
    evaluations = [line for line in log if any(key.endswith("/val_loss") for key in line)]
    return {
        "weights": hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "log": [{key: value for key, value in line.items() if not key.startswith("time/steps")} for line in log],
        "val": [val.read_text() if val.is_file() else "", len(evaluations)],
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
        "state": [path.read_text() for path in states],
    }


@pytest.fixture
def trainer_of(tiny_gpt2_dir, tmp_path):
    """Function that returns the Trainer of a run that has not begun."""
    file = written(tmp_path)

    with ExitStack() as trackers:

        def make(kind, **training_args):
            config = parse_config(blocks(kind, tiny_gpt2_dir, file, **training_args))
            assembled = (assemble_supervised if kind == "sft" else assemble_preferences)(config)
            return SupervisedTrainer(
                assembled, trackers.enter_context(Tracker(tmp_path, {}, "p", "e", quiet=True))
            ).trainer

        # `full_determinism` changes settings of the whole process.
        with mock.patch.dict(os.environ):
            yield make
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def test_the_tables_have_all_accepted_keys():
    tables = (SEEN, REACHES, COMPILED, NOT_TRIED)
    named = [key for table in tables for key in table]

    # A new key of transformers: find out what it does in both kinds of runs, and add it to a table here or to those of
    # `offline/settable_arguments.py`.
    assert len(named) == len(set(named))
    assert set(named) >= ACCEPTED
    assert not set(named) & NOT_SETTABLE.keys()


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in KINDS for key in accepted(kind, SEEN)])
def test_another_value_of_an_accepted_key_is_seen(kind, key, seen_of):
    value, where, also = SEEN[key]
    assert seen_of(kind, {**also, key: value})[where] != seen_of(kind, also)[where]


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in KINDS for key in accepted(kind, REACHES)])
def test_an_accepted_key_reaches_what_trains(kind, key, trainer_of):
    value, read, found, also = REACHES[key]
    assert read(trainer_of(kind, **also)) != found
    assert read(trainer_of(kind, **also, **{key: value})) == found


@pytest.mark.parametrize("key", COMPILED)
def test_a_supervised_run_is_compiled(key, trainer_of, monkeypatch):
    value, argument, found = COMPILED[key]
    calls = []
    monkeypatch.setattr(torch, "compile", lambda model, **arguments: calls.append(arguments) or model)
    trainer_of("sft", max_steps=1, **{key: value}).train()
    assert calls[0][argument] == found


# --- what is refused ------------------------------------------------------------------------------------------------


REFUSED = {
    "sft": {
        **dict.fromkeys(WITHOUT_EFFECT, 1),
        "liger_kernel_config": {"rope": True},
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "dataloader_prefetch_factor": 2,
        "optim_args": "momentum=0.9",
        "optim_target_modules": "all-linear",
        "fp16": True,
    },
    "dpo": {
        **dict.fromkeys(WITHOUT_EFFECT, 1),
        "neftune_noise_alpha": 5.0,
        "torch_compile": True,
        "torch_compile_backend": "eager",
        "use_cache": True,
        "include_num_input_tokens_seen": "all",
        "dataloader_in_order": False,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_without_an_effect_are_refused_together_with_the_reason(kind, tiny_gpt2_dir, tmp_path):
    mapping = blocks(kind, tiny_gpt2_dir, written(tmp_path), **REFUSED[kind])
    with raises_at(*(f"alg.training_args.{key}" for key in REFUSED[kind])) as caught:
        list(preview(parse_config(mapping)))
    reasons = {issue.path: issue.message for issue in caught.value.issues}
    assert all(message.startswith("cannot be set: ") for message in reasons.values())


def test_a_default_that_is_written_down_is_no_error(tiny_gpt2_dir, tmp_path):
    given = {"torch_compile": False, "neftune_noise_alpha": None, "dataloader_in_order": True, "fp16": False}
    assert list(preview(parse_config(blocks("dpo", tiny_gpt2_dir, written(tmp_path), **given))))


@pytest.mark.parametrize(
    ("key", "value", "mentioned"),
    [
        ("optim_args", "momentun=0.9", "momentum"),
        ("optim_args", "weight_decay=0.9", "known: momentum"),
        ("optim_args", "momentum", "name=value"),
    ],
)
def test_arguments_that_the_optimizer_does_not_read_are_errors(key, value, mentioned, tiny_gpt2_dir, tmp_path):
    mapping = blocks("sft", tiny_gpt2_dir, written(tmp_path), optim="sgd", **{key: value})
    with raises_at(f"alg.training_args.{key}", mentions=mentioned):
        list(preview(parse_config(mapping)))


@pytest.mark.parametrize(
    ("key", "value", "module"),
    [
        ("optim", "adamw_bnb_8bit", "bitsandbytes"),
        ("optim", "galore_adamw_8bit", "galore_torch"),
        ("optim", "adamw_torch_8bit", "torchao"),
        ("use_liger_kernel", True, "liger_kernel"),
    ],
)
def test_a_missing_package_is_reported_by_the_check(key, value, module, tiny_gpt2_dir, tmp_path):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    mapping = blocks("dpo", tiny_gpt2_dir, written(tmp_path), save_only_model=True, **{key: value})
    with raises_at(f"alg.training_args.{key}", mentions=f"needs the package {module}"):
        list(preview(parse_config(mapping)))


@pytest.mark.parametrize(
    ("optimizer", "also", "mentioned"),
    [
        ("schedule_free_adamw", {"save_only_model": True}, "weights of training"),
        ("galore_adamw_layerwise", {"save_only_model": True}, "within the backward pass"),
        ("apollo_adamw_layerwise", {"save_only_model": True}, "within the backward pass"),
        ("adalomo", {"save_only_model": True}, "within the backward pass"),
        ("galore_adamw", {}, "save_only_model"),
        ("stable_adamw", {}, "save_only_model"),
        ("grokadamw", {}, "save_only_model"),
        ("adamw_torch_4bit", {}, "save_only_model"),
    ],
)
def test_an_optimizer_with_which_a_run_would_be_wrong_or_could_not_be_resumed_is_refused(
    optimizer, also, mentioned, tiny_gpt2_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)  # the packages are installed
    for kind in KINDS:
        mapping = blocks(kind, tiny_gpt2_dir, written(tmp_path), optim=optimizer, **also)
        with raises_at("alg.training_args.optim", mentions=mentioned):
            list(preview(parse_config(mapping)))


# --- runs of earlier versions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "key", "value"), [("sft", "ddp_bucket_cap_mb", 25), ("sft", "fp16", True), ("dpo", "torch_compile", True)]
)
def test_a_run_that_began_with_a_key_without_an_effect_is_resumed_to_the_same_weights(
    kind, key, value, seen_of, tiny_gpt2_dir, tmp_path, monkeypatch
):
    # An earlier version accepted the key. It was stopped after its checkpoint of step 4.
    with monkeypatch.context() as earlier:
        earlier.setattr("rl4lms_like.offline.training_arguments.settable_issues", lambda config: [])
        earlier.setattr("rl4lms_like.offline.assemble_supervised.float16_reason", lambda config: None)
        folder = run(blocks(kind, tiny_gpt2_dir, written(tmp_path), save_steps=4, **{key: value}), tmp_path)
    shutil.rmtree(folder / "checkpoints" / "checkpoint-6")
    (folder / "finished.json").unlink()

    resume(folder, quiet=True)
    assert observed(folder)["weights"] == seen_of(kind, {"save_steps": 4})["weights"]
    assert json.loads((folder / "config.json").read_text())["alg"]["training_args"][key] == value
    assert f"alg.training_args.{key} is ignored, as before" in (folder / "log.txt").read_text()


def test_names_that_an_optimizer_does_not_read_are_left_out_of_a_resumed_run(tmp_path):
    for given, kept in (("momentum=0.5, weight_decay=0.1", "momentum=0.5"), ("eps=1", None), ("momentum=0.5",) * 2):
        config = parse_config(blocks("sft", "gpt2", written(tmp_path), optim="sgd", optim_args=given))
        resumed, notices = without_unused_keys(config)
        assert resumed.alg.training_args["optim_args"] == kept
        assert len(notices) == (given != kept)
