"""A supervised run that was stopped and goes on ends as one that was not: weights, files, all but clock times."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.offline import trainer as supervised
from rl4lms_like.offline.reference_trainer import ReferenceTrainer
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import CheckpointError
from rl4lms_like.training.resuming.checkpoints import MANIFEST, TENSORS, newest_checkpoint, read_checkpoint
from rl4lms_like.training.resuming.resume import find_unfinished
from tests.config_errors import raises_at
from tests.offline.supervised.test_trainer import lines, six_steps
from tests.on_policy.test_best_model import Scripted
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError

SCRIPTED = {"metrics": [{"id": f"{Scripted.__module__}:Scripted"}], "eval_batch_size": 4}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "test/scripted"}


def blocks(kind, model, evaluation=None, alg=None, **arguments):
    """Six steps in two epochs, as in `test_supervised`, with a checkpoint every two and a loss logged every three."""
    made = six_steps(kind, model)
    training = {"save_steps": 2, "logging_steps": 3} | arguments
    training = {"eval_steps": training["logging_steps"]} | training
    made["alg"]["training_args"] |= training
    made["alg"] |= alg or {}
    made["train_evaluation"] |= evaluation or {}
    return made


def started(mapping, folder, name="run"):
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def stopped(mapping, folder, step, monkeypatch, how=StoppedError):
    """The folder of a run that ended within the step after `step`."""
    original = ReferenceTrainer.training_step

    def training_step(self, *arguments, **named):
        loss = original(self, *arguments, **named)
        if self.state.global_step == step:
            if isinstance(how, int):
                os.kill(os.getpid(), how)
            else:
                raise how
        return loss

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt if isinstance(how, int) else how):
        patch.setattr(ReferenceTrainer, "training_step", training_step)
        started(mapping, folder)
    return folder / "rl4lm_exps" / "run"


def model_of(kind, tiny_gpt2_dir, tiny_t5_dir):
    return tiny_gpt2_dir if kind == "causal" else tiny_t5_dir


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_gpt2_dir, tiny_t5_dir):
    """Runs that nothing stopped, by family. Only to be read or copied."""
    folders = {}

    def get(kind):
        if kind not in folders:
            mapping = blocks(kind, model_of(kind, tiny_gpt2_dir, tiny_t5_dir))
            folders[kind] = mapping, started(mapping, tmp_path_factory.mktemp("whole"))
        return folders[kind]

    return get


@pytest.mark.parametrize(("kind", "step"), [("causal", 2), ("seq2seq", 5)])
def test_a_stopped_run_goes_on_to_the_same_end(kind, step, whole, tmp_path, monkeypatch):
    mapping, expected = whole(kind)
    folder = stopped(mapping, tmp_path, step, monkeypatch)
    assert newest_checkpoint(folder).name == f"checkpoint-{step - step % 2}"
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == files_of(expected)
    assert not list((folder / "checkpoints").glob("interrupted_*"))


@pytest.mark.parametrize(
    ("arguments", "checkpoint"),
    [
        ({"eval_strategy": "epoch", "save_steps": 3}, 3),
        ({"eval_strategy": "epoch", "logging_strategy": "epoch", "save_steps": 3}, 3),
        ({"eval_strategy": "epoch", "max_steps": 5}, 5),
    ],
)
def test_a_checkpoint_of_the_last_step_of_an_epoch_comes_after_its_evaluation(
    arguments, checkpoint, tiny_gpt2_dir, tmp_path
):
    mapping = blocks("causal", tiny_gpt2_dir, logging_steps=2, eval_steps=None, **arguments)
    expected = started(mapping, tmp_path / "whole")
    folder = started(mapping, tmp_path)

    # Killed after this checkpoint: what came later is lost.
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("checkpoint-")) > checkpoint:
            shutil.rmtree(path)
    (folder / "finished.json").unlink()
    resume(folder, quiet=True)
    assert files_of(folder) == files_of(expected)

    evaluated = [
        line["time/iteration"] for line in lines(folder / "training_info.jsonl") if "supervised/val_loss" in line
    ]
    assert evaluated == [3, arguments.get("max_steps", 6)]


def test_the_same_command_goes_on_and_no_pickle_is_written(whole, tmp_path, monkeypatch):
    mapping, expected = whole("causal")
    folder = stopped(mapping, tmp_path, 4, monkeypatch)
    assert f"to resume after checkpoint-4: rl4lms-like train --resume {folder}" in (folder / "log.txt").read_text()
    monkeypatch.setattr(torch, "load", lambda *arguments, **named: pytest.fail("a pickle was read"))
    assert started(mapping, tmp_path) == folder
    assert files_of(folder) == files_of(expected)
    assert not [path for path in folder.rglob("*") if path.suffix in (".pt", ".pth", ".bin", ".pkl")]
    assert started({**mapping, "seed": 1}, tmp_path).name == "run_2"


@pytest.mark.parametrize("name", ["optimizer.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth"])
def test_a_pickle_in_a_checkpoint_is_refused(name, whole, tmp_path, monkeypatch):
    """transformers' Trainer reads these files if they are there."""
    mapping, _ = whole("causal")
    folder = stopped(mapping, tmp_path, 4, monkeypatch)
    (folder / "checkpoints" / "checkpoint-4" / name).write_bytes(b"pickle")
    monkeypatch.setattr(torch, "load", lambda *arguments, **named: pytest.fail("a pickle was read"))
    with pytest.raises(CheckpointError, match=rf"checkpoint-4 has pickles, .*remove {name}"):
        resume(folder, quiet=True)


@pytest.mark.parametrize("step", [0, 3])
def test_a_signal_saves_what_the_run_goes_on_from(step, whole, tmp_path, monkeypatch):
    """Step 0 and step 3 are the first ones of their epochs: the order of the examples is drawn already."""
    mapping, expected = whole("causal")
    folder = stopped(mapping, tmp_path, step, monkeypatch, signal.SIGTERM)
    saved = newest_checkpoint(folder)
    assert saved.name == f"interrupted_{step + 1:05d}"
    log = (folder / "log.txt").read_text()
    assert "to resume where it was interrupted: rl4lms-like train --resume" in log
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == files_of(expected)


def test_what_it_goes_on_from_stays_where_it_fails_or_is_stopped_before_there_is_more(whole, tmp_path, monkeypatch):
    mapping, expected = whole("causal")
    folder = stopped(mapping, tmp_path, 3, monkeypatch, signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(ReferenceTrainer, "training_step", fails)
        resume(folder, quiet=True)
    assert newest_checkpoint(folder).name == "interrupted_00004"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(supervised.Reporter, "on_train_begin", stops_after(supervised.Reporter.on_train_begin))
        resume(folder, quiet=True)
    assert newest_checkpoint(folder).name == "interrupted_00004"
    assert files_of(resume(folder, quiet=True)) == files_of(expected)


def fails(*arguments, **named):
    raise StoppedError


def stops_after(original):
    def called(*arguments, **named):
        original(*arguments, **named)
        os.kill(os.getpid(), signal.SIGTERM)

    return called


def test_activations_may_be_made_anew_from_some_step_on_and_that_is_said(whole, tmp_path, monkeypatch):
    mapping, expected = whole("causal")
    folder = stopped(mapping, tmp_path, 3, monkeypatch, signal.SIGTERM)
    resume(folder, overrides=["alg.training_args.gradient_checkpointing=true"], quiet=True)
    message = "alg.training_args.gradient_checkpointing changes from null to true: from here on, results may differ"
    assert message in (folder / "log.txt").read_text()
    losses = [
        [json.loads(line).get("supervised/loss") for line in (run / "training_info.jsonl").read_text().splitlines()]
        for run in (folder, expected)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


VARIANTS = {
    "evaluated after each epoch": {"eval_steps": None, "save_steps": 3},
    "evaluated and saved by epoch": {"eval_steps": None, "save_strategy": "epoch"},
    "adapters": {"alg": {"peft": {"r": 2, "lora_dropout": 0.1}}},
    "saved by epoch": {"save_strategy": "epoch"},
    "evaluated at the start": {"eval_on_start": True, "logging_steps": 2},
    "one checkpoint": {"save_total_limit": 1},
    "other options": {
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "optim": "adafactor",
        "train_sampling_strategy": "group_by_length", "lr_scheduler_type": "cosine", "label_smoothing_factor": 0.1,
    },
    "moments in 8 bits": {"optim": "adamw_torch_8bit"},
    "the best model": {"evaluation": SCRIPTED, "logging_steps": 1, **BEST},
    "the best of regular checkpoints": {
        "evaluation": SCRIPTED, "logging_steps": 2, "save_strategy": "steps", "save_total_limit": 1, **BEST,
    },
    "stopped early": {
        "evaluation": SCRIPTED, "alg": {"early_stopping_patience": 2}, "logging_steps": 1, "save_strategy": "steps",
        "save_steps": 1, "metric_for_best_model": "test/scripted",
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_is_asked_for_it_goes_on_to_the_same_end(variant, tmp_path, monkeypatch, tiny_gpt2_dir):
    Scripted.message = [0.1, 0.2, 0.5, 0.4, 0.3, 0.1, 0.2, 0.3]
    mapping = blocks("causal", tiny_gpt2_dir, **VARIANTS[variant])
    if variant == "adapters":
        pytest.importorskip("peft")
    if variant == "moments in 8 bits":
        pytest.importorskip("torchao")
    expected = started(mapping, tmp_path, "whole")
    folder = stopped(mapping, tmp_path, 3, monkeypatch)
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == files_of(expected)
    assert (folder / "finished.json").is_file()


@pytest.mark.parametrize("variant", ["the best of regular checkpoints", "stopped early"])
def test_stopped_after_its_last_step_it_only_ends(variant, tmp_path, monkeypatch, tiny_gpt2_dir):
    Scripted.message = [0.1, 0.2, 0.5, 0.4, 0.3, 0.1, 0.2, 0.3]
    mapping = blocks("causal", tiny_gpt2_dir, **VARIANTS[variant])
    expected = started(mapping, tmp_path, "whole")

    def failing(self):
        raise StoppedError

    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(ReferenceTrainer, "_finalize_training", lambda self, *arguments: failing(self))
        started(mapping, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    monkeypatch.setattr(ReferenceTrainer, "training_step", lambda *arguments: pytest.fail("trained on"))
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == files_of(expected)


def test_what_a_checkpoint_keeps_is_as_asked(tmp_path, tiny_gpt2_dir):
    folder = started(blocks("causal", tiny_gpt2_dir, save_steps=1), tmp_path, "states")
    found = sorted((folder / "checkpoints").iterdir())
    assert [path.name for path in found] == [f"checkpoint-{step}" for step in range(1, 7)]
    assert [(path / MANIFEST).is_file() for path in found] == [False] * 4 + [True] * 2
    assert all((path / "model.safetensors").is_file() for path in found)
    folder = started(blocks("causal", tiny_gpt2_dir, save_total_limit=2, save_only_model=True), tmp_path, "models")
    found = sorted((folder / "checkpoints").iterdir())
    assert [path.name for path in found] == ["checkpoint-4", "checkpoint-6"]
    assert not [path for path in found if (path / TENSORS).exists()]
    with pytest.raises(CheckpointError):
        resume(folder, quiet=True)


def test_at_its_end_a_run_deletes_no_checkpoints_of_another_run_behind_a_link(tmp_path, monkeypatch, tiny_gpt2_dir):
    """transformers' Trainer would remove all checkpoints but the best one from the folder."""
    other, folder = tmp_path / "other" / "checkpoint-1", tmp_path / "rl4lm_exps" / "run"
    other.mkdir(parents=True)
    (other / "model.safetensors").write_bytes(b"weights")
    folder.mkdir(parents=True)
    (folder / "checkpoints").symlink_to(other.parent)
    Scripted.message = [0.1, 0.2, 0.5, 0.4, 0.3, 0.1, 0.2, 0.3]
    started(blocks("causal", tiny_gpt2_dir, **VARIANTS["the best of regular checkpoints"]), tmp_path)
    left = sorted(path.name for path in other.parent.iterdir())
    assert len(left) == 2 and left[0] == "checkpoint-1"
    assert (other / "model.safetensors").read_bytes() == b"weights"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(whole, tmp_path):
    """A finished run, with checkpoints 4 and 6 to go on from."""
    return shutil.copytree(whole("causal")[1], tmp_path / "project" / "run")


def test_a_changed_config_is_refused_with_the_differences(run):
    changed = {"alg.training_args.learning_rate": 0.1, "alg.training_args.num_train_epochs": 4}
    with raises_at(*changed, mentions="0.01"):
        resume(run, overrides=[f"{path}={value}" for path, value in changed.items()])


def test_a_longer_run_needs_a_constant_learning_rate(tmp_path, tiny_gpt2_dir):
    constant = blocks("causal", tiny_gpt2_dir, lr_scheduler_type="constant")
    folder = started(constant, tmp_path, "short")
    longer = blocks("causal", tiny_gpt2_dir, lr_scheduler_type="constant", num_train_epochs=3)
    expected = files_of(started(longer, tmp_path, "longer"))
    found = files_of(resume(folder, overrides=["alg.training_args.num_train_epochs=3"], quiet=True))
    assert found["model/model.safetensors"] == expected["model/model.safetensors"]
    assert found["training_info.jsonl"] == expected["training_info.jsonl"]
    with raises_at("alg.training_args.num_train_epochs"):
        resume(folder, overrides=["alg.training_args.num_train_epochs=1"], quiet=True)


def test_another_base_under_the_adapters_is_refused(tmp_path, tiny_gpt2_dir, monkeypatch):
    pytest.importorskip("peft")
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(tiny_gpt2_dir, tmp_path / "model")
    folder = stopped(blocks("causal", model, alg={"peft": {"r": 2}}), tmp_path, 3, monkeypatch)
    weights = {name: weight + 0.01 for name, weight in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=folder.name):
        resume(folder, quiet=True)


def test_a_best_checkpoint_that_is_gone_is_said(tmp_path, tiny_gpt2_dir, monkeypatch):
    Scripted.message = [0.1, 0.9, 0.5, 0.4, 0.3, 0.1, 0.2, 0.3]
    variant = VARIANTS["the best of regular checkpoints"] | {"save_total_limit": None}
    folder = stopped(blocks("causal", tiny_gpt2_dir, **variant), tmp_path, 4, monkeypatch)
    shutil.rmtree(folder / "checkpoints" / "checkpoint-2")
    with pytest.raises(CheckpointError, match=r"checkpoint-2"):
        resume(folder, quiet=True)


def test_a_flipped_bit_is_refused_and_the_older_one_offered(run):
    weights = run / "checkpoints" / "checkpoint-6" / TENSORS
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    older = run / "checkpoints" / "checkpoint-4"
    with pytest.raises(CheckpointError, match=str(older)):
        resume(run, quiet=True)
    assert resume(older, quiet=True) == run
    read_checkpoint(run / "checkpoints" / "checkpoint-6")


def test_a_finished_run_is_not_begun_again(run, whole):
    found, reasons = find_unfinished(parse_config(whole("causal")[0]), run)
    assert found is None and reasons == [f"{run}: it is finished"]


def test_a_second_signal_saves_nothing_more(tmp_path, tiny_gpt2_dir, monkeypatch):
    def twice(self):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(supervised.SupervisedTrainer, "may_stop", twice)
    with pytest.raises(KeyboardInterrupt):
        started(blocks("causal", tiny_gpt2_dir), tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    assert not (folder / "checkpoints").exists() or not list((folder / "checkpoints").iterdir())
    assert "since the last checkpoint is lost" in (folder / "log.txt").read_text()
