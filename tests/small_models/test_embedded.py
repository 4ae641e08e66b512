"""`embedded/<name>` stands for a model wherever a config or a command names one, and nothing is fetched for it."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.preview import preview
from rl4lms_like.run import train_config
from rl4lms_like.small_models import embedded
from rl4lms_like.system.errors import ModelError
from tests.config_errors import raises_at
from tests.configs import run_blocks, supervised_blocks

NAMES = {"causal": "embedded/gpt2-digits", "seq2seq": "embedded/t5-digits"}
"""Models without any training, which are made in a moment."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def home(cache, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(cache))
    return cache


@pytest.fixture(params=["causal", "seq2seq"])
def kind(request):
    return request.param


@pytest.fixture
def rl(tiny_config, kind):
    """An RL run in which every model is an embedded one."""
    name = NAMES[kind]
    tiny_config["tokenizer"]["model_name"] = name
    tiny_config["datapool"]["args"]["prompt"] = "1"
    policy = tiny_config["alg"]["policy"]
    policy["id"] = f"{'causal' if kind == 'causal' else 'seq2seq'}_lm_actor_critic_policy"
    policy["args"] |= {"model_name": name, "reference_model": name, "critic_model": name}
    if kind == "seq2seq":
        tiny_config["env"]["args"]["context_start_token"] = 0
    tiny_config["train_evaluation"] |= {"n_iters": 1, "metrics": [
        {"id": "reference_perplexity", "args": {"model_name": NAMES["causal"], "device": "cpu"}},
    ]}  # fmt: skip
    return tiny_config


@pytest.fixture
def supervised(kind):
    """A supervised run of an embedded model."""
    return {
        "tokenizer": {"model_name": NAMES[kind], "max_length": 16},
        "datapool": {"id": "film_opinions", "args": {"n_train": 8, "n_eval": 2}},
        "alg": {
            "id": "supervised",
            "model_type": kind,
            "model_name": NAMES[kind],
            "generation_kwargs": {"do_sample": False, "max_new_tokens": 4},
            "training_args": {"num_train_epochs": 1, "logging_steps": 1},
        },
        "train_evaluation": {"eval_batch_size": 2, "metrics": [{"id": "length"}]},
    }


@pytest.mark.parametrize("run", ["rl", "supervised"])
def test_a_run_of_embedded_models_keeps_their_names(run, request, tmp_path, kind):
    blocks = request.getfixturevalue(run)
    folder = train_config(parse_config(blocks), base_path_to_store_results=tmp_path, quiet=True)
    written = json.loads((folder / "config.json").read_text())
    assert written["tokenizer"]["model_name"] == NAMES[kind]
    assert str(embedded.cache_folder()) not in (folder / "config.json").read_text()
    assert evaluate_run(folder, split="val")
    assert generate_texts(folder, ["1 2"])


def test_the_check_of_embedded_models_has_memory_and_plan(rl, supervised):
    assert estimate_memory(parse_config(rl)).parts["policy weights"]
    assert "no plan" not in "\n".join(preview(parse_config(supervised)))


def test_objects_can_be_assembled_without_a_run(rl):
    run = assemble(parse_config(rl))
    run.env.close()
    assert run.tokenizer("12", add_special_tokens=False)["input_ids"] == [2, 3]


def test_commands_take_embedded_models(kind, supervised, tmp_path):
    assert generate_texts(NAMES[kind], ["1 2"], max_new_tokens=3)
    (tmp_path / "run.yml").write_text(dump_yaml(supervised))
    assert evaluate_run(NAMES[kind], config_path=tmp_path / "run.yml", output=tmp_path, split="val")


@pytest.mark.parametrize("blocks", [run_blocks(), supervised_blocks()], ids=["rl", "supervised"])
def test_unknown_names_are_mistakes_wherever_they_stand(blocks, tmp_path, monkeypatch):
    (tmp_path / "embedded").mkdir()  # which does not make the names those of folders
    monkeypatch.chdir(tmp_path)
    blocks["tokenizer"]["model_name"] = "embedded/gpt2-film"
    blocks["train_evaluation"]["metrics"] = [
        {"id": "length"},
        {"id": "reference_perplexity", "args": {"model_name": "embedded/x"}},
    ]
    metric = "train_evaluation.metrics.1.args.model_name"
    with raises_at("tokenizer.model_name", metric, mentions="'embedded/gpt2-films'"):
        parse_config(blocks)
    blocks["tokenizer"]["model_name"] = "embedded/gpt2-films"
    with raises_at(metric, mentions="embedded/gpt2-numbers"):
        parse_config(blocks)


def test_an_unknown_model_of_a_command_is_named():
    with pytest.raises(ModelError, match="'embedded/gpt2-films'"):
        generate_texts("embedded/gpt2-film", ["1"])


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="RL4LMS_LIKE_HOME"):
        embedded.embedded_model(NAMES["causal"])


def test_a_model_that_another_user_keeps_to_himself_is_named_with_the_way_out(home, monkeypatch):
    folder = embedded.embedded_model(NAMES["causal"])
    refused = PermissionError(13, "Permission denied", str(folder / "model.safetensors"))
    original = Path.open

    def opened(path, *args, **kwargs):
        if path.name == "model.safetensors":
            raise refused
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(ModelError, match=r"Permission denied.*RL4LMS_LIKE_HOME"):
        embedded.embedded_model(NAMES["causal"])


def test_a_model_may_be_read_by_whom_other_new_files_may_be(tmp_path, monkeypatch):
    for mask, folder_mode, file_mode in ((0o022, 0o755, 0o644), (0o077, 0o700, 0o600)):
        monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / f"{mask:o}"))
        before = os.umask(mask)
        try:
            folder = embedded.embedded_model(NAMES["causal"])
        finally:
            os.umask(before)
        assert folder.stat().st_mode & 0o777 == folder_mode
        assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {file_mode}


def test_without_a_home_the_way_out_is_named(monkeypatch):
    monkeypatch.delenv("RL4LMS_LIKE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody_has_this_name/cache")
    with pytest.raises(ModelError, match="RL4LMS_LIKE_HOME"):
        embedded.embedded_model(NAMES["causal"])


def test_a_model_is_made_once_and_has_the_same_bits_everywhere(home, tmp_path, monkeypatch, capfd):
    here = embedded.embedded_model(NAMES["causal"])
    capfd.readouterr()
    assert embedded.embedded_model(NAMES["causal"]) == here and not capfd.readouterr().err
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path))
    there = embedded.embedded_model(NAMES["causal"])
    assert f"creating {NAMES['causal']}, once" in capfd.readouterr().err
    assert (here / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()


def test_names_are_found_in_any_place_of_a_config(home):
    @dataclasses.dataclass(frozen=True)
    class Anything:
        names: list
        others: dict

    found = embedded.with_embedded_models(Anything([NAMES["causal"], 3], {"a": {"b": NAMES["seq2seq"]}}))
    assert found.names == [str(embedded.embedded_model(NAMES["causal"])), 3]
    assert found.others == {"a": {"b": str(embedded.embedded_model(NAMES["seq2seq"]))}}
