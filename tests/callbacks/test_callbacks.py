"""Callbacks of users are called in all kinds of runs, have a state that is resumed, and fail by name."""

from __future__ import annotations

import json
import shutil

import pytest

from rl4lms_like import Callback, Run
from rl4lms_like.config.load import parse_config
from rl4lms_like.run import resume
from rl4lms_like.system.errors import ComponentError, ConfigError
from tests.config_errors import raises_at
from tests.offline.preferences import preference_runs
from tests.offline.supervised.test_resume import started, stopped
from tests.offline.supervised.test_trainer import six_steps
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError, stop_after

HERE = "tests.callbacks.test_callbacks"


class Counting(Callback):
    """Counts its calls, which are its state; logs and saves their number."""

    def __init__(self, name: str = "calls") -> None:
        self.name = name
        self.calls: list[str] = []

    def _counted(self, call: str) -> dict[str, float]:
        self.calls.append(call)
        return {self.name: len(self.calls)}

    def on_rollout_end(self, iteration, rollout):
        tokens = int(rollout.episodes.lengths.sum())
        assert tokens == rollout.n_tokens > 0 and rollout.rewards.shape == (tokens,)
        self._counted(f"rollout {iteration}")
        return {"tokens": tokens}

    def on_iteration_end(self, iteration):
        return self._counted(f"iteration {iteration}")

    def on_evaluation_end(self, epoch, split, evaluation):
        assert evaluation.scores
        self._counted(f"{split} {epoch}")

    def on_save(self, folder):
        assert (folder / "config.json").is_file() and self.run.is_main and self.run.folder in folder.parents
        (folder / "calls.json").write_text(json.dumps(self.calls))

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class CountingMore(Counting):
    """Another class."""


class Failing(Callback):
    """Fails in one call of one method."""

    def __init__(self, method: str, nth: int = 1) -> None:
        self.method = method
        self.left = nth

    def _maybe_fail(self, method):
        if method == self.method:
            self.left -= 1
            if self.left == 0:
                raise KeyError("the_missing_key")

    def on_rollout_end(self, iteration, rollout):
        self._maybe_fail("on_rollout_end")

    def on_iteration_end(self, iteration):
        self._maybe_fail("on_iteration_end")

    def on_evaluation_end(self, epoch, split, evaluation):
        self._maybe_fail("on_evaluation_end")

    def on_save(self, folder):
        self._maybe_fail("on_save")


class Returning(Callback):
    """Returns something else than numbers."""

    def on_iteration_end(self, iteration):
        return {"loss": "3"}


class Unsaved(Callback):
    def state_dict(self):
        return {"seen": {1, 2}}


COUNTING = {"id": f"{HERE}:Counting", "args": {"name": "n"}}


def lines_of(file):
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def preferences(model, tmp_path):
    made = preference_runs.blocks("dpo", model, preference_runs.written(tmp_path))
    made["alg"]["training_args"] |= {"save_steps": 2, "save_strategy": "steps", "eval_strategy": "epoch"}
    return made


def supervised(model, tmp_path):
    made = six_steps("causal", model)
    made["alg"]["training_args"] |= {"save_steps": 2, "logging_steps": 2, "eval_steps": 3}
    return made


OFFLINE = {"supervised": supervised, "preference": preferences}


def test_the_order_of_calls_in_an_rl_run(tiny_config, tmp_path):
    tiny_config["train_evaluation"]["callbacks"] = [COUNTING, COUNTING]
    folder = started(tiny_config, tmp_path)
    expected = [
        *("val 0", "test 0", "rollout 1", "iteration 1", "rollout 2", "iteration 2", "val 2"),
        *("rollout 3", "iteration 3"),
    ]
    assert json.loads((folder / "model" / "calls.json").read_text()) == expected
    checkpoint = folder / "checkpoints" / "iteration_00002"
    assert json.loads((checkpoint / "calls.json").read_text()) == expected[:7]

    # Numbers of the rollout and of the update are logged with those of the iteration; the second one has another name.
    logged = lines_of(folder / "training_info.jsonl") + lines_of(folder / "rollout_info.jsonl")
    assert [line["callback/Counting/n"] for line in logged if "callback/Counting/n" in line] == [4, 6, 9]
    tokens = [line["rollout_info/ep_lens"] * 4 for line in logged if "rollout_info/ep_lens" in line]
    counted = [line["callback/Counting_2/tokens"] for line in logged if "callback/Counting_2/tokens" in line]
    assert len(counted) == 3 and all(n >= least for n, least in zip(counted, tokens, strict=True))


@pytest.mark.parametrize("kind", OFFLINE)
def test_an_iteration_of_an_offline_run_is_an_optimizer_step(kind, tiny_gpt2_dir, tmp_path):
    mapping = OFFLINE[kind](tiny_gpt2_dir, tmp_path)
    mapping["train_evaluation"]["callbacks"] = [COUNTING]
    folder = started(mapping, tmp_path)
    calls = json.loads((folder / "model" / "calls.json").read_text())
    assert [call for call in calls if call.startswith("iteration")] == [f"iteration {step}" for step in range(1, 7)]
    assert calls[:2] == ["val 0", "test 0"] and "rollout" not in str(calls)
    assert calls.index("val 1") == calls.index("iteration 3") + 1

    logged = lines_of(folder / "training_info.jsonl")
    numbers = [line["callback/Counting/n"] for line in logged if "callback/Counting/n" in line]
    assert numbers == [calls.index(f"iteration {step}") + 1 for step in (2, 4, 6)]


@pytest.mark.parametrize("during", ["rollout", "files"])
def test_a_stopped_rl_run_goes_on_to_the_same_bytes(during, tiny_config, tmp_path, monkeypatch):
    tiny_config["train_evaluation"] |= {"callbacks": [COUNTING], "n_iters": 4}
    expected = started(tiny_config, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 2, during)
        started(tiny_config, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    for path in (folder / "checkpoints").glob("interrupted_*"):
        shutil.rmtree(path)
    assert files_of(resume(folder, quiet=True)) == files_of(expected)


@pytest.mark.parametrize("kind", OFFLINE)
def test_a_stopped_offline_run_goes_on_to_the_same_bytes(kind, tiny_gpt2_dir, tmp_path, monkeypatch):
    mapping = OFFLINE[kind](tiny_gpt2_dir, tmp_path)
    mapping["train_evaluation"]["callbacks"] = [COUNTING]
    expected = started(mapping, tmp_path, "whole")

    folder = stopped(mapping, tmp_path, 3, monkeypatch)
    assert files_of(resume(folder, quiet=True)) == files_of(expected)


@pytest.mark.parametrize(("method", "nth", "when", "n_done"), [
    ("on_rollout_end", 2, "of iteration 2", 1),
    ("on_iteration_end", 2, "2", 2),
    ("on_evaluation_end", 3, "of 'val' at epoch 2", 2),
    ("on_save", 1, "of iteration_00002.partial", 2),
])  # fmt: skip
def test_an_exception_names_the_callback_and_loses_nothing(method, nth, when, n_done, tiny_config, tmp_path):
    tiny_config["train_evaluation"]["save_every"] = 2
    expected = started(tiny_config, tmp_path, "without")
    failing = {"id": f"{HERE}:Failing", "args": {"method": method, "nth": nth}}
    tiny_config["train_evaluation"]["callbacks"] = [failing]
    with pytest.raises(ComponentError, match=rf"'Failing' failed in {method} {when}: KeyError.*the_missing_key"):
        started(tiny_config, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    iterations = lines_of(folder / "training_info.jsonl")
    assert len(iterations) == n_done

    # The run goes on from there without the callback, and generates nothing twice.
    resumed = resume(folder, overrides=["train_evaluation.callbacks=[]"], quiet=True)
    log = (folder / "log.txt").read_text()
    assert ("resuming in iteration 2" if method == "on_rollout_end" else f"resuming after {n_done}") in log
    assert (resumed / "model" / "model.safetensors").read_bytes() == (
        expected / "model" / "model.safetensors"
    ).read_bytes()
    for file in ("training_info.jsonl", "rollout_info.jsonl", "val_split_metrics.jsonl"):
        assert files_of(resumed)[file] == files_of(expected)[file], file


@pytest.mark.parametrize(("method", "nth", "step"), [("on_iteration_end", 3, 3), ("on_iteration_end", 6, 6)])
def test_an_exception_in_an_offline_run_loses_nothing(method, nth, step, tiny_gpt2_dir, tmp_path):
    mapping = supervised(tiny_gpt2_dir, tmp_path)
    expected = started(mapping, tmp_path, "without")
    mapping["train_evaluation"]["callbacks"] = [{"id": f"{HERE}:Failing", "args": {"method": method, "nth": nth}}]
    with pytest.raises(ComponentError, match=rf"'Failing' failed in {method} {step}: KeyError"):
        started(mapping, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    resume(folder, overrides=["train_evaluation.callbacks=[]"], quiet=True)
    assert f"resuming after step {step}" in (folder / "log.txt").read_text()
    for file in ("training_info.jsonl", "val_split_metrics.jsonl", "model/model.safetensors"):
        assert files_of(folder)[file] == files_of(expected)[file], file


@pytest.mark.parametrize(("name", "message"), [
    ("Returning", r"failed in on_iteration_end 1: TypeError.*expected a number as 'loss', got '3'"),
    ("Unsaved", r"state_dict\(\) of the callback 'Unsaved' cannot be saved: state\['seen'\] is of type set"),
])  # fmt: skip
def test_what_cannot_be_logged_or_saved_is_an_error(name, message, tiny_config, tmp_path):
    tiny_config["train_evaluation"]["callbacks"] = [{"id": f"{HERE}:{name}"}]
    with pytest.raises(ComponentError, match=message):
        started(tiny_config, tmp_path)


@pytest.mark.parametrize(("block", "path"), [
    ({"id": f"{HERE}:Counting", "args": {"nane": "x"}}, "train_evaluation.callbacks.0.args.nane"),
    ({"id": f"{HERE}:started"}, "train_evaluation.callbacks.0.id"),
    ({"id": f"{HERE}:Missing"}, "train_evaluation.callbacks.0.id"),
])  # fmt: skip
def test_a_wrong_callback_is_an_error_of_the_config(block, path, tiny_config):
    tiny_config["train_evaluation"]["callbacks"] = [block]
    with raises_at(path):
        parse_config(tiny_config)


@pytest.mark.parametrize(("value", "message"), [
    (Failing, r"Failing\(\) failed: TypeError: .*'method'.*give an object"),
    (StoppedError(), "derived from Callback; got StoppedError"),
    (started, "derived from Callback; got <function started"),
    (f"{HERE}:Counting", "expected a mapping with the keys id, args"),
])  # fmt: skip
def test_what_is_no_callback_in_python_is_an_error_of_its_argument(value, message, tiny_gpt2_dir):
    with pytest.raises(ConfigError, match=rf"callbacks\.0: .*{message}"):
        Run(str(tiny_gpt2_dir), data=[{"prompt": "a", "completion": "b"}], algorithm="sft", callbacks=[value])


def test_objects_and_classes_are_callbacks_of_a_run_in_python(tiny_gpt2_dir, tmp_path):
    counting = Counting()
    settings = {"algorithm": "sft", "max_steps": 2, "folder": tmp_path / "run", "callbacks": [counting, Counting]}
    data = [{"prompt": "The sea is", "completion": " blue"}] * 4
    run = Run(str(tiny_gpt2_dir), data=data, **settings)
    run.train(quiet=True)
    assert counting.calls == ["iteration 1", "iteration 2"]
    assert counting.run.folder == run.folder and counting.run.config.to_dict() == run.config.to_dict()

    # Without the objects, the model in the folder can be used; training needs them again.
    opened = Run.from_folder(run.folder)
    assert isinstance(opened.generate("The sea is", max_new_tokens=2), str)
    again = Run.from_folder(run.folder, callbacks=[counting])
    assert again.config.train_evaluation.callbacks[0].args["object"].value is counting
