"""A run of a benchmark that was stopped goes on, to the same end; what cannot be known of it is not told."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from rl4lms_like.benchmarking import worker
from rl4lms_like.benchmarking.jobs import jobs_of, prepare_folder, read_result, state_of
from rl4lms_like.benchmarking.results import as_markdown, collect
from rl4lms_like.benchmarking.spec import load_benchmark
from tests.benchmarking.conftest import write_spec
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError, stop_after

EVERY = {"train_evaluation.save_every": 1, "train_evaluation.n_iters": 3}
OWN = ("job.json", "output.txt", "result.json")


@pytest.fixture(scope="module")
def spec(tmp_path_factory, tiny_gpt2_dir):
    return write_spec(tmp_path_factory.mktemp("spec"), model=tiny_gpt2_dir, base=EVERY, seeds=1)


@pytest.fixture(scope="module")
def stopped_once(spec, tmp_path_factory):
    """The folder of a run that was stopped in its third iteration. Only to be copied."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2, "rollout")
        (job,) = jobs_of(load_benchmark(spec, results=tmp_path_factory.mktemp("stopped")))
        prepare_folder(job)
        with pytest.raises(StoppedError):
            worker.main(job.folder)
    for path in (job.folder / "checkpoints").glob("interrupted_*"):
        shutil.rmtree(path)
    return job.folder


@pytest.fixture
def asked(spec, tmp_path):
    return load_benchmark(spec, results=tmp_path / "out")


@pytest.fixture
def job(asked, stopped_once):
    """A job that was stopped, as it is found when the benchmark is started again."""
    (job,) = jobs_of(asked)
    shutil.copytree(stopped_once, job.folder)
    return job


def without_own(folder):
    return {name: content for name, content in files_of(folder).items() if name not in OWN}


def test_it_goes_on_to_the_same_end_and_its_seconds_are_not_known(job, asked, spec, tmp_path):
    (whole,) = jobs_of(load_benchmark(spec, results=tmp_path / "whole"))
    prepare_folder(whole)
    assert worker.main(whole.folder) == 0
    assert read_result(whole.folder).resumed == 0 and read_result(whole.folder).seconds > 0

    assert state_of(job) == "stopped"
    prepare_folder(job)
    assert worker.main(job.folder) == 0
    assert state_of(job) == "done"
    result = read_result(job.folder)
    assert (result.resumed, result.seconds) == (1, None)
    assert result.scores == read_result(whole.folder).scores
    assert without_own(job.folder) == without_own(whole.folder)
    assert "ppo" in as_markdown(collect(asked))


@pytest.mark.parametrize("n_damaged", [1, 2])
def test_a_damaged_checkpoint_is_said_and_an_older_one_or_the_start_taken(n_damaged, job, capsys):
    for name in ["iteration_00002", "iteration_00001"][:n_damaged]:
        (job.folder / "checkpoints" / name / "training_state.json").write_text("{")
    prepare_folder(job)
    assert worker.main(job.folder) == 0
    message = capsys.readouterr().err
    assert "iteration_00002: training_state.json has 1 bytes" in message
    assert ("iteration_00001\n" in message and "resuming from" in message) == (n_damaged == 1)
    assert ("no checkpoint is intact: the run is restarted" in message) == (n_damaged == 2)
    assert read_result(job.folder).iterations == 3
    assert [line["iteration"] for line in lines(job.folder / "rollout_info.jsonl")] == [1, 2, 3]


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_whose_result_alone_is_missing_is_not_trained_again(job, monkeypatch):
    prepare_folder(job)
    assert worker.main(job.folder) == 0
    scores = read_result(job.folder).scores
    (job.folder / "result.json").unlink()
    assert state_of(job) == "stopped"
    monkeypatch.setattr("rl4lms_like.run.train_config", lambda *_, **__: pytest.fail("trained again"))
    prepare_folder(job)
    assert worker.main(job.folder) == 0
    assert (read_result(job.folder).scores, read_result(job.folder).resumed) == (scores, 2)


def test_another_config_or_no_checkpoint_starts_over(job):
    assert state_of(replace(job, config={**job.config, "device": "cpu"})) == "unfinished"
    assert state_of(job) == "stopped"
    shutil.rmtree(job.folder / "checkpoints")
    assert state_of(job) == "unfinished"
    prepare_folder(job)
    assert [path.name for path in job.folder.iterdir()] == ["job.json"]
    assert json.loads((job.folder / "job.json").read_text())["resumed"] == 0
