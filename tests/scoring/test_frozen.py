"""Models that score: loaded when they are needed, never trained, never carried along."""

from __future__ import annotations

import json

import cloudpickle
import pytest
import torch

from rl4lms_like.core.devices import existing_device, is_device
from rl4lms_like.rewards import REWARDS
from rl4lms_like.scoring.frozen import FrozenModel, longest_input
from rl4lms_like.system.errors import ModelError
from rl4lms_like.system.schema import check_arguments
from tests.local_models import LOCAL_MODELS

CLASSIFIER = "AutoModelForSequenceClassification"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("classifier")
    LOCAL_MODELS["classifier"](path)
    return path


def test_it_is_loaded_at_first_use_in_evaluation_mode_and_without_gradients(folder):
    frozen = FrozenModel(str(folder), CLASSIFIER)
    assert "loaded" not in vars(frozen)
    assert not frozen.model.training
    assert not any(parameter.requires_grad for parameter in frozen.model.parameters())
    assert frozen.tokenizer.truncation_side == "left"


def test_two_of_one_checkpoint_hold_the_same_weights_while_both_live(folder):
    one, two = FrozenModel(str(folder), CLASSIFIER), FrozenModel(str(folder), CLASSIFIER, role="other")
    assert one.model is two.model
    assert FrozenModel(str(folder), CLASSIFIER, dtype="bfloat16").model is not one.model


def test_a_folder_that_is_written_anew_is_read_anew(tmp_path):
    LOCAL_MODELS["classifier"](tmp_path)
    before = FrozenModel(str(tmp_path), CLASSIFIER)
    assert before.model.config.num_labels == 2
    LOCAL_MODELS["intents"](tmp_path)
    assert FrozenModel(str(tmp_path), CLASSIFIER).model.config.num_labels == 4


def test_a_pickle_has_the_name_and_no_weights(folder):
    frozen = FrozenModel(str(folder), CLASSIFIER)
    before = cloudpickle.dumps(frozen)
    weights = frozen.model.state_dict()
    after = cloudpickle.dumps(frozen)
    assert len(after) == len(before) < 1000
    copied = cloudpickle.loads(after).model.state_dict()
    assert all(torch.equal(copied[name], weights[name]) for name in weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_precision_that_was_asked_for(folder, dtype):
    assert FrozenModel(str(folder), CLASSIFIER, dtype=dtype).model.dtype is getattr(torch, dtype)


@pytest.mark.parametrize("name", ["./nowhere", "~/no/where", "a/b/c", "owner/name"])
def test_a_folder_that_is_not_there_is_an_error_before_anything_is_loaded(name, tmp_path, monkeypatch):
    (tmp_path / "owner").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=rf"'{name}'.*judge"):
        FrozenModel(name, CLASSIFIER, role="judge")


def test_hub_ids_are_not_taken_for_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "owner/name"):
        FrozenModel(name, CLASSIFIER)


def test_what_cannot_be_loaded_is_named_with_the_reason(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"judge '{tmp_path}' .*config.json"):
        _ = FrozenModel(str(tmp_path), CLASSIFIER, role="judge").model


def test_a_model_without_a_head_is_no_classifier(tmp_path):
    """transformers would draw the head at random, and say so in passing."""
    LOCAL_MODELS["encoder"](tmp_path)
    with pytest.raises(ModelError, match=rf"judge '{tmp_path}' .*classifier.bias"):
        _ = FrozenModel(str(tmp_path), CLASSIFIER, role="judge").model


@pytest.mark.parametrize(
    ("family", "auto_class"), [("causal", "AutoModelForCausalLM"), ("seq2seq", "AutoModelForSeq2SeqLM")]
)
def test_tied_weights_are_not_missed_and_no_random_number_is_used_up(tmp_path, family, auto_class):
    LOCAL_MODELS[family](tmp_path)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert FrozenModel(str(tmp_path), auto_class).model is not None
    assert torch.rand(1) == expected


def test_code_that_a_checkpoint_brings_along_runs_only_when_asked_for(tmp_path, monkeypatch):
    folder, ran = tmp_path / "judge", tmp_path / "ran"
    folder.mkdir()
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    LOCAL_MODELS["classifier"](folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "of_its_own", "auto_map": {"AutoConfig": "code.Own", "AutoModel": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with pytest.raises(ModelError, match=str(folder)):
        _ = FrozenModel(str(folder), CLASSIFIER).model
    assert not ran.exists()
    with pytest.raises(ModelError, match=str(folder)):  # there is no class `Own` in that code, but it ran
        _ = FrozenModel(str(folder), CLASSIFIER, trust_remote_code=True).model
    assert ran.exists()


# --- devices ---------------------------------------------------------------------------------------------------------


def test_names_of_devices():
    assert all(map(is_device, ("auto", "cpu", "mps", "cuda", "cuda:0", "cuda:13")))
    assert not any(map(is_device, ("gpu", "cuda:", "cuda:-1", "cpu:0x", "", "CUDA")))


def test_a_device_that_is_no_device_is_a_mistake_in_the_config():
    args = {"model_name": "m", "label_ix": 1, "device": "gpu", "dtype": "float64"}
    _, issues = check_arguments(REWARDS.signature("learned_reward"), args, "args")
    assert [issue.path for issue in issues] == ["args.device", "args.dtype"]
    assert "expected 'auto', 'cpu', 'cuda', 'cuda:1'" in issues[0].message


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_device_that_is_not_here_is_an_error_when_the_component_is_built(folder):
    with pytest.raises(ValueError):
        FrozenModel(str(folder), CLASSIFIER, device="cuda:1")
    assert existing_device("auto") == "cpu"


# --- the longest input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "positions", "longest"), [("bert", 40, 40), ("roberta", 40, 38), ("gpt2", 40, 40)])
def test_the_longest_input_is_what_the_table_of_positions_holds(family, positions, longest):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = AutoConfig.for_model(family, max_position_embeddings=positions, vocab_size=20, pad_token_id=1, **size)
    model = AutoModelForSequenceClassification.from_config(config).eval()

    class Tokenizer:
        model_max_length = int(1e30)

    assert longest_input(model, Tokenizer()) == longest
    model(input_ids=torch.full((1, longest), 5))
    Tokenizer.model_max_length = 20
    assert longest_input(model, Tokenizer()) == 20


def test_a_device_and_auto_are_one_device(folder):
    auto, named = (
        FrozenModel(str(folder), CLASSIFIER),
        FrozenModel(str(folder), CLASSIFIER, device=existing_device("auto")),
    )
    assert auto.model is named.model
