"""The output layer of a reward model, which checkpoints with adapters have in a file of its own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from rl4lms_like.offline.assemble_supervised import load_head
from rl4lms_like.system.errors import ModelError


@pytest.fixture
def reward_model(tiny_gpt2_dir):
    return AutoModelForSequenceClassification.from_pretrained(tiny_gpt2_dir, num_labels=1)


def test_the_output_layer_is_loaded_and_nothing_else(reward_model, tmp_path):
    before = {name: tensor.clone() for name, tensor in reward_model.state_dict().items()}
    save_file({"score.weight": before["score.weight"] + 1}, tmp_path / "head.safetensors")
    load_head(reward_model, tmp_path / "head.safetensors")
    for name, tensor in reward_model.state_dict().items():
        expected = before[name] + 1 if name == "score.weight" else before[name]
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize(("saved", "named"), [({}, "score.weight"), ({"score.bias": torch.ones(1)}, "score.bias")])
def test_a_file_with_other_weights_is_refused(saved, named, reward_model, tmp_path):
    """Whether it lacks the layer, or has a weight that the model lacks."""
    if named != "score.weight":
        saved = {**saved, "score.weight": reward_model.score.weight.detach()}
    save_file(saved, tmp_path / "head.safetensors")
    with pytest.raises(ModelError, match=named):
        load_head(reward_model, tmp_path / "head.safetensors")
