"""A model is loaded with all of its weights, or not at all."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from rl4lms_like.core.model_weights import check_complete, load_complete, output_layer
from rl4lms_like.metrics.learned import BERTScoreMetric
from rl4lms_like.metrics.perplexity import ReferencePerplexity
from rl4lms_like.policies.loading import load_model
from rl4lms_like.rewards.learned import LearnedBatchedRewardFunction, RewardModel
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.builders import make_policy
from tests.local_models import LOCAL_MODELS

READ = {"loaded": load_complete, "checked": check_complete}
LOST = "transformer.h.1.mlp.c_fc.weight"


@pytest.fixture
def folder(tiny_tokenizer, tmp_path) -> Path:
    """A model of two layers."""
    return models.save_model(tmp_path / "model", models.make_causal_lm("gpt2", tiny_tokenizer), tiny_tokenizer)


def with_weights(folder: Path, *, lost: tuple[str, ...] = (), **new: torch.Tensor) -> Path:
    weights = load_file(folder / "model.safetensors")
    weights = {name: weight for name, weight in weights.items() if name not in lost} | new
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_config(folder: Path, **fields: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.fixture(params=READ.values(), ids=READ)
def read(request):
    """Loads a folder as a causal model, or compares names and shapes only."""

    def read(folder, auto_class=AutoModelForCausalLM, **options):
        return request.param(auto_class, str(folder), role="judge", model_name=str(folder), **options)

    return read


def test_a_weight_that_is_missing_is_named(folder, read):
    with pytest.raises(ModelError, match=LOST):
        read(with_weights(folder, lost=(LOST,)))


def test_a_weight_of_another_shape_is_named_with_both_shapes(folder, read):
    with pytest.raises(ModelError, match=r"transformer.ln_f.bias .*\[7\].*\[32\]"):
        read(with_weights(folder, **{"transformer.ln_f.bias": torch.ones(7)}))


def test_a_config_with_more_layers_than_the_weights_is_refused(folder, read):
    with pytest.raises(ModelError, match=r"transformer.h.\*.attn.c_attn.bias .*48"):
        read(with_config(folder, n_layer=50))


def test_a_config_with_fewer_layers_than_the_weights_is_refused(folder, read):
    with pytest.raises(ModelError, match=r"transformer.h.1.attn.c_attn.weight"):
        read(with_config(folder, n_layer=1))


def test_other_weights_are_left_aside_and_listed_once(folder, caplog):
    with_weights(folder, extra=torch.ones(2))
    with caplog.at_level(logging.WARNING):
        load_complete(AutoModelForCausalLM, str(folder), role="judge", model_name="mine")
    (record,) = [record for record in caplog.records if "extra" in record.getMessage()]
    assert "the judge 'mine'" in record.getMessage()


def test_a_head_may_only_be_missing_where_the_role_does_not_use_it(tmp_path, tiny_tokenizer, read):
    model = models.make_causal_lm("llama", tiny_tokenizer, tie_word_embeddings=False)
    folder = models.save_model(tmp_path / "trunk", model.model, tiny_tokenizer)
    with pytest.raises(ModelError, match=r"lm_head.weight"):
        read(folder)
    read(folder, unused=output_layer)


@pytest.mark.parametrize("family", [*models.CAUSAL_FAMILIES, *models.SEQ2SEQ_FAMILIES])
def test_a_whole_checkpoint_of_any_family_is_complete(family, tmp_path, tiny_tokenizer):
    """Tied weights, and what a family computes itself, are in no file."""
    make = models.make_causal_lm if family in models.CAUSAL_FAMILIES else models.make_seq2seq_lm
    model = make(family, tiny_tokenizer)
    folder = str(models.save_model(tmp_path, model, tiny_tokenizer))
    assert check_complete(type(model), folder, role="model", model_name=family)


def test_names_of_the_hub_are_compared_when_they_are_loaded():
    assert not check_complete(AutoModel, "gpt2", role="model", model_name="gpt2")


# --- every role ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["model_name", "reference_model", "critic_model"])
def test_networks_of_a_policy_are_complete(key, folder, tiny_gpt2_dir):
    with_weights(folder, lost=(LOST,))
    names = {"model_name": str(tiny_gpt2_dir), key: str(folder)}
    with pytest.raises(ModelError, match=LOST):
        make_policy("causal", Path(names.pop("model_name")), **names)


def test_a_critic_may_come_from_a_model_without_an_output_layer(tmp_path, tiny_gpt2_dir, tiny_tokenizer):
    model = models.make_causal_lm("llama", tiny_tokenizer, tie_word_embeddings=False)
    trunk = models.save_model(tmp_path / "trunk", model.model, tiny_tokenizer)
    make_policy("causal", tiny_gpt2_dir, critic_model=str(trunk))
    with pytest.raises(ModelError, match=r"lm_head.weight"):
        make_policy("causal", tiny_gpt2_dir, reference_model=str(trunk))


def test_the_base_of_an_adapter_is_complete(folder, tmp_path):
    pytest.importorskip("peft")
    policy = make_policy("causal", folder, peft={"r": 2})
    policy.save_model(tmp_path / "adapter")
    with_weights(folder, lost=(LOST,))
    with pytest.raises(ModelError, match=LOST):
        load_model(AutoModelForCausalLM, str(tmp_path / "adapter"))


SCORERS = {
    "reward model": ("regressor", lambda name: RewardModel(name)(["a"], ["b"], [[]], [True])),
    "classifier": ("classifier", lambda name: LearnedBatchedRewardFunction(name, label_ix=1).classifier.logits(["a"])),
    "perplexity": ("causal", lambda name: ReferencePerplexity(name).compute(["a"], ["b"], [[]])),
    "bert_score": (
        "encoder",
        lambda name: BERTScoreMetric("en", model_type=name, num_layers=2).compute(["a"], ["b"], [["c"]]),
    ),
}


@pytest.mark.parametrize("role", SCORERS)
def test_models_that_score_are_complete(role, tmp_path):
    if role == "bert_score":
        pytest.importorskip("bert_score")
    kind, score = SCORERS[role]
    LOCAL_MODELS[kind](tmp_path)
    score(str(tmp_path))
    lost = next(name for name in load_file(tmp_path / "model.safetensors") if ".1." in name and "weight" in name)
    with_weights(tmp_path, lost=(lost,))
    with pytest.raises(ModelError, match=lost):
        score(str(tmp_path))


def test_a_language_model_is_no_reward_model(folder):
    """Its scores would come from a head of random numbers."""
    with pytest.raises(ModelError, match=r"score.weight"):
        RewardModel(str(with_config(folder, id2label={"0": "score"})))


def test_a_classifier_may_be_saved_from_a_language_model(tiny_gpt2_dir, tmp_path, tiny_tokenizer):
    model = AutoModelForSequenceClassification.from_pretrained(tiny_gpt2_dir, num_labels=1)
    folder = models.save_model(tmp_path, model, tiny_tokenizer)
    assert RewardModel(str(folder))(["a"], ["b"], [[]], [True])
