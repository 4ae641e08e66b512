"""BLEURT is the plain forward pass of (reference, candidate), the best reference counts."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl4lms_like.metrics import METRICS
from rl4lms_like.rewards import REWARDS
from rl4lms_like.scoring.classifier import CHECKPOINTS, Bleurt
from rl4lms_like.system.errors import ModelError
from tests.local_models import LOCAL_MODELS
from tests.texts import texts

OPTIONS = {"batch_size": 4, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bleurt")
    LOCAL_MODELS["regressor"](path)
    return str(path)


@pytest.fixture(scope="module")
def forward(folder):
    """The model card's recipe, for one pair."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    def score(reference, candidate):
        with torch.no_grad():
            return float(model(**tokenizer([reference], [candidate], return_tensors="pt", truncation=True)).logits)

    return score


def test_it_is_the_plain_forward_pass_on_200_real_pairs(folder, forward, shared_dir):
    lines = (shared_dir / "data/commongen/commongen.dev.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][:60]
    responses, references = [row["reason"][0] for row in rows], [row["scene"] for row in rows]
    assert sum(map(len, references)) >= 200
    expected = [
        max(forward(reference, text) for reference in each) for text, each in zip(responses, references, strict=True)
    ]
    assert Bleurt(folder, **OPTIONS).per_text(texts(responses, references)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("text", ["", " ", "Привет, 世界", "the film was good", "good " * 400])
def test_texts_at_the_edges(folder, forward, text):
    references = ["the film was good", "", "a joy " * 300]
    (score,) = Bleurt(folder, **OPTIONS).per_text(texts([text], [references]))
    assert score == pytest.approx(max(forward(reference, text) for reference in references), abs=1e-5)


def test_several_references_are_never_one_text(folder, forward):
    references = ["the film was good", "on the museum"]
    (score,) = Bleurt(folder, **OPTIONS).per_text(texts(["a joy"], [references]))
    assert score == pytest.approx(max(forward(reference, "a joy") for reference in references), abs=1e-5)
    assert score != pytest.approx(forward(str(references), "a joy"), abs=1e-3)


def test_published_names_are_those_of_the_hub():
    assert CHECKPOINTS["bleurt-base-128"] == ("Elron/bleurt-base-128", 128)
    assert len(CHECKPOINTS) == 6
    default = Bleurt(**OPTIONS).classifier
    assert (default.model_name, default.max_length) == ("Elron/bleurt-base-128", 128)
    assert Bleurt("bleurt-tiny-512", **OPTIONS).classifier.model_name == "Elron/bleurt-tiny-512"
    assert Bleurt("someone/a-bleurt", **OPTIONS).classifier.model_name == "someone/a-bleurt"


def test_a_copy_of_a_published_checkpoint_cuts_pairs_where_it_does(folder):
    """Its BERT takes 512 tokens, whatever the length it was tuned with."""
    for args in ({"checkpoint": "Elron/bleurt-base-128"}, {"checkpoint": folder, "max_length": 128}):
        assert REWARDS.get("bleurt", args).classifier.max_length == 128
    assert METRICS.get("bleurt", {"config_name": folder, "max_length": 32}).classifier.max_length == 32
    assert Bleurt("bleurt-base-512", max_length=64, **OPTIONS).classifier.max_length == 64
    assert Bleurt(folder, **OPTIONS).classifier.max_length is None


def test_the_length_that_a_published_checkpoint_was_trained_with_is_kept(folder):
    whole, short = Bleurt(folder, **OPTIONS), Bleurt(folder, max_length=16, **OPTIONS)
    long, cut = "a joy from start to finish", "a joy from start to finish and a sad story of numbers"
    pair = texts([long], [[cut]])
    assert whole.per_text(pair) != pytest.approx(short.per_text(pair), abs=1e-3)


def test_another_architecture_is_an_error_that_names_those_there_are():
    with pytest.raises(ValueError):
        Bleurt("BLEURT-20-D12", **OPTIONS)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError):
        Bleurt(str(tmp_path / "nowhere"), **OPTIONS)


def test_a_classifier_of_several_labels_is_no_checkpoint(tmp_path):
    LOCAL_MODELS["classifier"](tmp_path)
    with pytest.raises(ModelError, match=str(tmp_path)):
        Bleurt(str(tmp_path), **OPTIONS)
