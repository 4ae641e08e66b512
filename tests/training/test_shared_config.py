"""The config that others read has names in place of paths, and says what they have to supply."""

from __future__ import annotations

import pytest

from rl4lms_like.training.shared_config import is_on_hub, shared_config


@pytest.mark.parametrize(("block", "shared", "supplied"), [
    ({"id": "jsonl", "args": {"path": "/data/acme/moved/q.jsonl"}}, {"path": "q.jsonl"}, ["q.jsonl"]),
    ({"id": "jsonl", "args": {"path": "private/client/q.jsonl"}}, {"path": "q.jsonl"}, ["q.jsonl"]),
    ({"id": "jsonl", "args": {"path": "q.jsonl"}}, {"path": "q.jsonl"}, ["q.jsonl"]),
    ({"id": "jsonl", "args": {"data_files": {"train": "a/t.jsonl", "val": None}}},
     {"data_files": {"train": "t.jsonl", "val": None}}, ["t.jsonl"]),
    ({"id": "hf_dataset", "args": {"path": "owner/data"}}, {"path": "owner/data"}, []),
    ({"id": "hf_dataset", "args": {"path": "./mine/data"}}, {"path": "data"}, ["data"]),
    ({"id": "text", "args": {"path": ["a/x.txt", "~/b/y.txt"]}}, {"path": ["x.txt", "y.txt"]}, ["x.txt", "y.txt"]),
    ({"id": "novelty", "args": {"training_texts": "private/t.txt"}}, {"training_texts": "t.txt"}, ["t.txt"]),
    ({"id": "ppo", "args": {"tensorboard_log": "/data/acme/tb"}}, {"tensorboard_log": "tb"}, []),
    ({"id": "x", "args": {"model_name": "/moved/models/m"}}, {"model_name": "m"}, ["m"]),
    ({"id": "x", "args": {"model_name": "a/client/m"}}, {"model_name": "m"}, ["m"]),
    ({"id": "x", "args": {"model_name": "owner/m"}}, {"model_name": "owner/m"}, []),
    ({"id": "x", "args": {"model_name": "embedded/gpt2-films"}}, {"model_name": "embedded/gpt2-films"}, []),
    ({"id": "x", "args": {"source": "/data/acme/client/s"}}, {"source": "s"}, ["s"]),
    ({"id": "x", "args": {"chat_template": "chatml"}}, {"chat_template": "chatml"}, []),
    ({"id": "x", "args": {"chat_template": "private/t.jinja"}}, {"chat_template": "t.jinja"}, ["t.jinja"]),
    ({"id": "regex", "args": {"pattern": "/think"}}, {"pattern": "/think"}, []),
    ({"id": "http", "args": {"url": "http://host/a/b", "path": "https://host/a/b"}},
     {"url": "http://host/a/b", "path": "https://host/a/b"}, []),
    ({"id": "python", "args": {"function": "/data/acme/r.py:score@1f0c2a9b44de"}},
     {"function": "r.py:score@1f0c2a9b44de"}, ["r.py:score@1f0c2a9b44de"]),
    ({"id": "python", "args": {"function": "my.rewards:score"}},
     {"function": "my.rewards:score"}, ["my.rewards:score"]),
    ({"id": "combine", "args": {"rewards": [{"id": "a/b/r.py:One", "args": {}}]}},
     {"rewards": [{"id": "r.py:One", "args": {}}]}, ["r.py:One"]),
])  # fmt: skip
def test_of_a_path_only_its_name_is_left(block, shared, supplied):
    assert shared_config(block) == ({"id": block["id"], "args": shared}, supplied)


def test_an_id_may_be_a_path(tmp_path):
    assert shared_config({"id": f"{tmp_path}/r.py:Reward"}) == ({"id": "r.py:Reward"}, ["r.py:Reward"])


def test_a_folder_is_not_on_the_hub_whether_it_exists_or_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert not any(map(is_on_hub, ("models/mine", "./other", "../other", "~/other", "/other", "a/b/c")))
    assert is_on_hub("models/other") and is_on_hub("gpt2")
