"""Checkpoints that would run code when they are read: a pickle that acts, code that a config points to."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile

import pytest
import torch

from rl4lms_like.policies.loading import auto_class_of, load_model, load_model_config, load_tokenizer
from rl4lms_like.scoring.classifier import Classifier
from rl4lms_like.scoring.summac import Head
from rl4lms_like.system.errors import ModelError


class Act:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return open, (self.mark, "w")


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "was_run"


@pytest.fixture(params=["zip", "legacy"])
def weights(request, tmp_path, mark):
    """A weights file as torch writes it, which acts when it is unpickled carelessly."""
    file = tmp_path / "evil.bin"
    if request.param == "zip":
        torch.save({"x": Act(mark)}, file)
    else:
        file.write_bytes(pickle.dumps(Act(mark)))
    return file


def test_the_file_would_act(weights, mark):
    torch.load(weights, weights_only=False) if zipfile.is_zipfile(weights) else pickle.loads(weights.read_bytes())
    assert mark.exists()


def without_safetensors(folder, copy, weights, name):
    shutil.copytree(folder, copy)
    for file in copy.glob("*.safetensors"):
        file.unlink()
    shutil.copy(weights, copy / name)
    return str(copy)


def test_a_model_of_pickled_weights_runs_no_code(tiny_gpt2_dir, weights, mark, tmp_path):
    folder = without_safetensors(tiny_gpt2_dir, tmp_path / "model", weights, "pytorch_model.bin")
    with pytest.raises(ModelError):
        load_model(auto_class_of(load_model_config(folder)), folder)
    assert not mark.exists()


def test_a_scorer_of_pickled_weights_runs_no_code(tiny_gpt2_dir, weights, mark, tmp_path):
    folder = without_safetensors(tiny_gpt2_dir, tmp_path / "model", weights, "pytorch_model.bin")
    with pytest.raises(ModelError):
        Classifier(folder, batch_size=1).logits(["x"])
    head = Head(str(weights), 1, "percentile", "e", "mean", False)
    with pytest.raises(ModelError, match=weights.name):
        _ = head._weights
    assert not mark.exists()


def test_an_adapter_of_pickled_weights_runs_no_code(tiny_gpt2_dir, weights, mark, tmp_path):
    pytest.importorskip("peft")
    folder = tmp_path / "adapter"
    folder.mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(tiny_gpt2_dir), "target_modules": ["c_attn"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    shutil.copy(weights, folder / "adapter_model.bin")
    with pytest.raises((ModelError, pickle.UnpicklingError)):
        load_model(auto_class_of(load_model_config(str(folder))), str(folder))
    assert not mark.exists()


def test_a_model_whose_config_points_to_code_of_its_own_is_refused(tiny_gpt2_dir, mark, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    shutil.copytree(tiny_gpt2_dir, folder)
    (folder / "own.py").write_text(f"open({os.fspath(mark)!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_kind", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        load_model_config(str(folder))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError):
        load_tokenizer(str(folder))
    assert not mark.exists()
