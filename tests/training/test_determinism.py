"""The key `deterministic`, and that one seed gives one run: in this process or another, with or without workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.run import deterministic_operations, train_config
from rl4lms_like.system.errors import RL4LMsLikeError
from tests.config_errors import raises_at


class Watching(BaseMetric):
    """Reports whether torch was asked for deterministic operations, and uses one that has no such form."""

    def __init__(self, undetermined: bool = False) -> None:
        self.undetermined = undetermined

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        if self.undetermined:
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return {"own/deterministic": (None, float(torch.are_deterministic_algorithms_enabled()))}


def watched(config, **args):
    config["train_evaluation"] |= {"n_iters": 0, "save_model": False, "metrics": [{"id": f"{__name__}:Watching"}]}
    config["train_evaluation"]["metrics"][0]["args"] = args
    return config


@pytest.mark.parametrize("wanted", [True, False])
def test_torch_is_asked_during_the_run_and_left_as_it_was(tiny_config, tmp_path, wanted, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    config = parse_config(watched(tiny_config) | {"deterministic": wanted})
    folder = train_config(config, base_path_to_store_results=tmp_path)
    scores = json.loads((folder / "val_split_metrics.jsonl").read_text().splitlines()[0])["metrics"]
    assert scores["own/deterministic"] == float(wanted)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    (environment,) = json.loads((folder / "environment.json").read_text())
    assert environment["deterministic"] is wanted


def test_an_operation_without_a_deterministic_form_is_named_with_the_key(tiny_config, tmp_path):
    config = parse_config(watched(tiny_config, undetermined=True) | {"deterministic": True})
    with pytest.raises(RL4LMsLikeError, match=r"put_"):
        train_config(config, base_path_to_store_results=tmp_path)
    assert not torch.are_deterministic_algorithms_enabled()
    tiny_config["deterministic"] = False
    train_config(parse_config(tiny_config), base_path_to_store_results=tmp_path)


def test_other_errors_stay_what_they_are():
    with pytest.raises(ZeroDivisionError), deterministic_operations(True):
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()


def test_cublas_is_told_before_it_starts_and_as_before_afterwards(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with deterministic_operations(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with raises_at("deterministic"), deterministic_operations(True):
        pass
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic_operations(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_cudnn_tries_nothing_out_inside_and_all_is_as_it_was_outside(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_operations(True):
            assert not torch.backends.cudnn.benchmark
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.benchmark
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_run_s_threads_are_its_own(tiny_config, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train_config(parse_config(watched(tiny_config) | {"n_threads": 1}), base_path_to_store_results=tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    (environment,) = json.loads((tmp_path / "rl4lm_exps" / "rl4lm_experiment" / "environment.json").read_text())
    assert environment["threads"] == 1


def test_a_resumed_run_notes_only_what_changed(tiny_config, tmp_path):
    from rl4lms_like.tracking.run_folder import RunFolder

    folder = RunFolder(tmp_path)
    for threads in (1, 1, 2, 2):
        folder.log_environment({"threads": threads})
    assert json.loads((tmp_path / "environment.json").read_text()) == [{"threads": 1}, {"threads": 2}]


def same_files(folder):
    """What two runs of one config have in common: all but clock times and the log, which has them."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path.name in (".lock", "log.txt", "report.html", "manifest.json"):
            continue
        content = path.read_bytes()
        if path.name == "training_state.json":  # which knows how long files with clock times are
            content = {key: value for key, value in json.loads(content).items() if key != "files"}
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in content.splitlines()]
            content = [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]
        files[name] = content
    return files


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files_in_two_processes(tiny_config, tmp_path):
    pytest.importorskip("peft")
    tiny_config["alg"]["policy"]["args"]["peft"] = {"r": 2, "target_modules": "all-linear"}
    tiny_config["train_evaluation"] |= {"n_iters": 1, "save_every": 1}
    tiny_config |= {"deterministic": True, "seed": 5, "n_threads": 1}
    (tmp_path / "c.yml").write_text(dump_yaml(tiny_config))
    arguments = ["train", str(tmp_path / "c.yml"), "--base_path_to_store_results", str(tmp_path), "--experiment_name"]
    assert main([*arguments, "a"]) == 0
    program = f"import sys; from rl4lms_like.cli import main; sys.exit(main({[*arguments, 'b']!r}))"
    environment = os.environ | {"PYTHONHASHSEED": "2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    one, other = (same_files(tmp_path / "rl4lm_exps" / experiment) for experiment in "ab")
    del one["environment.json"], other["environment.json"]  # the hash seeds differ on purpose
    assert {name for name in one if one[name] != other.get(name)} == set() and one.keys() == other.keys()
    assert "model/adapter_model.safetensors" in one
