"""Runs as tasks of a local Ray cluster, which is small and real; skipped without the extra."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from rl4lms_like.benchmarking.jobs import jobs_of, read_result, state_of
from rl4lms_like.benchmarking.ray_cluster import unreadable
from rl4lms_like.benchmarking.runner import benchmark
from rl4lms_like.benchmarking.spec import load_benchmark
from rl4lms_like.system.errors import MissingExtraError
from rl4lms_like.system.import_paths import CODE_VARIABLE
from tests.benchmarking.conftest import write_spec
from tests.benchmarking.test_runner import CLI, wait_for
from tests.config_errors import raises_at

FOLDERS = ("without", "with")


def test_without_ray_the_extra_is_named_and_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError) as caught:
        benchmark(write_spec(tmp_path), ray="local")
    assert (caught.value.package, caught.value.extra) == ("ray", "ray")
    assert not (tmp_path / "out").exists()


def test_resources_that_ray_refuses_are_errors_of_the_spec(tmp_path):
    with raises_at("resources.GPU", "resources.CPU"):
        load_benchmark(write_spec(tmp_path, resources={"GPU": 1.5, "CPU": 0}))


@pytest.mark.slow
def test_the_files_are_those_of_a_benchmark_without_ray(tmp_path, tiny_gpt2_dir, monkeypatch, capsys):
    pytest.importorskip("ray")
    broken = {"set": {"alg.policy.args.model_name": "no-such-owner/model"}}
    spec = write_spec(tmp_path, model=tiny_gpt2_dir, runs={"good": {}, "broken": broken}, seeds=1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rich.py").write_text("raise ImportError('a module of the current folder')")
    assert benchmark(spec, results="without") == 1
    without = capsys.readouterr().out
    assert benchmark(spec, results="with", ray="local", processes=1) == 1
    with_ray = capsys.readouterr().out
    for printed in (without, with_ray):
        assert "broken, seed 0: FAILED with status 1" in printed
    files = [{file.relative_to(folder) for file in folder.rglob("*")} for folder in map(tmp_path.joinpath, FOLDERS)]
    assert files[0] == files[1]
    one, other = (tmp_path / folder / "runs/good/seed_0" for folder in FOLDERS)
    assert read_result(one).scores == read_result(other).scores
    weights = "model/model.safetensors"
    assert (one / weights).read_bytes() == (other / weights).read_bytes()
    assert json.loads((other / "job.json").read_text()) == json.loads((one / "job.json").read_text())


def test_a_run_that_no_node_can_hold_is_an_error(tmp_path):
    pytest.importorskip("ray")
    with raises_at("resources", mentions="missing: unicorns"):
        benchmark(write_spec(tmp_path, resources={"unicorns": 2}), ray="local")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_an_address_without_a_cluster_is_an_error(tmp_path, address):
    pytest.importorskip("ray")
    with raises_at("--ray", mentions=address):
        benchmark(write_spec(tmp_path), ray=address)


def test_a_folder_that_a_node_does_not_have_is_named(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv(CODE_VARIABLE, str(tmp_path / "away"))  # a folder that exists on no node
    with raises_at("--ray", mentions=str(tmp_path / "away")):
        benchmark(write_spec(tmp_path), ray="local")
    assert list((tmp_path / "out").glob("visible_*")) == []


def test_files_of_another_content_are_not_those_of_this_machine(tmp_path):
    (tmp_path / "same.yml").write_text("seed: 1")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/ppo.yml").write_text("seed: 2")
    names = ("same.yml", "old/ppo.yml", "away/ppo.yml")
    files = {str(tmp_path / name): b"seed: 1" for name in names}
    assert unreadable(files, [str(tmp_path)]) == [f"folder {tmp_path / 'old'}", f"folder {tmp_path / 'away'}"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="signals as on POSIX")
def test_ctrl_c_saves_the_state_of_the_runs(tmp_path, tiny_gpt2_dir):
    pytest.importorskip("ray")
    keys = {"model": tiny_gpt2_dir, "runs": {"long": {}}, "seeds": 1}
    spec = write_spec(tmp_path, base={"train_evaluation.n_iters": 100_000}, **keys)
    command = [sys.executable, "-c", CLI, "benchmark", str(spec), "--ray", "local"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        folder = tmp_path / "out/runs/long/seed_0"
        wait_for(lambda: (folder / "training_info.jsonl").is_file(), 120)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130, printed
    assert "interrupted: saving the state of 1 run" in printed
    (job,) = jobs_of(load_benchmark(spec))
    assert state_of(job) == "stopped", printed
