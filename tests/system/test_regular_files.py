"""Pipes, devices and huge files are refused before they are read, wherever a user names a file or a folder has one."""

from __future__ import annotations

import json
import os
import signal

import pytest

from rl4lms_like.core.model_weights import place_of
from rl4lms_like.data_pools.tables import table_rows
from rl4lms_like.metrics.diversity import read_texts
from rl4lms_like.on_policy.rollout_files import read_rollout
from rl4lms_like.system.errors import DataPoolError, ModelError, RL4LMsLikeError
from rl4lms_like.system.regular_files import read_json, read_small
from rl4lms_like.tracking.record import read_run
from rl4lms_like.tracking.run_folder import is_untrained
from rl4lms_like.training.resuming.checkpoints import read_checkpoint
from rl4lms_like.training.resuming.resume import own_config

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are Unix's")


@pytest.fixture(autouse=True)
def no_waiting():
    """End a test that waits for the content of a pipe."""

    def ring(number, frame):
        raise AssertionError("waited for the content of a pipe")

    handler = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


@pytest.fixture
def pipe(tmp_path):
    """Make a pipe without a writer in place of a file."""

    def make(name):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(tmp_path / name)
        return tmp_path / name

    return make


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json", "a.csv"])
def test_a_table_that_is_a_pipe_is_refused(name, pipe):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(DataPoolError, match=name):
        list(table_rows(pipe(name)))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "adapter_config.json"]
)
def test_a_model_with_a_pipe_is_refused_with_the_file(name, pipe, tmp_path):
    pipe(name)
    with pytest.raises(ModelError, match=name):
        place_of(str(tmp_path))


def test_a_rollout_and_texts_that_are_pipes_are_refused(pipe):
    with pytest.raises(RL4LMsLikeError, match=r"iteration_00001\.safetensors"):
        read_rollout(pipe("iteration_00001.safetensors"))
    with pytest.raises(RL4LMsLikeError, match=r"texts\.txt"):
        list(read_texts(pipe("texts.txt")))


@pytest.mark.parametrize("name", ["config.json", "rollout_info.jsonl", "val_split_metrics.jsonl", "log.txt"])
def test_a_run_folder_with_a_pipe_is_refused(name, pipe, tmp_path):
    pipe(name)
    if name == "config.json":
        with pytest.raises(RL4LMsLikeError, match=name):
            own_config(tmp_path)
    else:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RL4LMsLikeError, match=name):
        read_run(tmp_path)
    if name == "val_split_metrics.jsonl":
        with pytest.raises(RL4LMsLikeError, match=name):
            is_untrained(tmp_path)


def test_a_checkpoint_with_a_pipe_is_refused(pipe, tmp_path):
    pipe("manifest.json")
    with pytest.raises(RL4LMsLikeError, match=r"manifest\.json"):
        read_checkpoint(tmp_path)


def test_a_device_is_refused(tmp_path):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    for read in (own_config, lambda folder: place_of(str(folder)), read_run):
        with pytest.raises(RL4LMsLikeError, match=r"config\.json"):
            read(tmp_path)


def test_a_file_above_the_limit_is_refused_and_one_at_the_limit_is_read(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b" " * 98 + b"[]")
    assert read_json(file, limit=100) == [] and len(read_small(file, limit=100)) == 100
    file.write_bytes(b" " * 99 + b"[]")
    with pytest.raises(RL4LMsLikeError, match=r"a\.json is larger than 100 bytes"):
        read_json(file, limit=100)


def test_deep_json_is_a_value_error_with_the_file(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"a\.json"):
        read_json(file)
    file.write_text(json.dumps({"a": [1]}))
    assert read_json(file) == {"a": [1]}
