"""SummaC's parts by hand: chunks, images, histograms, labels; what is missing is said when a metric is built."""

from __future__ import annotations

import json

import cloudpickle
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rl4lms_like.metrics.consistency import SummaCConvMetric, SummaCZSMetric
from rl4lms_like.scoring import summac
from rl4lms_like.scoring.summac import CARDS, Head, Labels, NliModel, chunks, labels_of, zero_shot
from rl4lms_like.system.errors import MissingResourceError, ModelError
from rl4lms_like.testing.checkers import check_metric
from tests.oracles.test_summac import make_head, make_nli

TEXT = "The first sentence is here. Short one. The last sentence is here too.\n\nAnother paragraph, without an end"
DOCUMENTS = ["A dog runs in the field. It is a brown dog.", "The sea is calm today. Nobody swims in it."]
SUMMARIES = ["A brown dog is running.", "The sea is wild. Everybody swims."]


@pytest.fixture(scope="module")
def nli(tmp_path_factory) -> str:
    return str(make_nli(tmp_path_factory.mktemp("nli")))


@pytest.mark.usefixtures("language_data")
def test_chunks_of_up_to_ten_characters_are_left_out():
    assert chunks(TEXT, "document") == [TEXT]
    assert chunks(TEXT, "paragraph") == TEXT.split("\n\n")
    assert chunks("one line is long\n short \nanother is long", "paragraph") == ["one line is long", "another is long"]
    first, last, another = chunks(TEXT, "sentence")
    assert (first, another) == ("The first sentence is here.", "Another paragraph, without an end")
    assert chunks(TEXT, "2sents") == [f"{first} {last}", f"{last} {another}", another]
    assert chunks(TEXT, "mixed") == [first, last, another, *TEXT.split("\n\n")]
    assert chunks("", "sentence") == chunks("", "mixed") == []


def test_a_score_is_the_best_premise_of_each_hypothesis_on_average():
    image = np.array([[[0.9, 0.2], [0.1, 0.4]], [[0.0, 0.3], [0.5, 0.1]], [[0.1, 0.5], [0.4, 0.5]]])
    settings = {"op1": "max", "op2": "mean", "use_ent": True, "use_con": True}
    assert zero_shot(image, **settings) == pytest.approx(((0.9 - 0.5) + (0.4 - 0.3)) / 2)
    assert zero_shot(image, **{**settings, "use_con": False}) == pytest.approx((0.9 + 0.4) / 2)
    assert zero_shot(image, **{**settings, "use_ent": False}) == pytest.approx(1 - (0.5 + 0.3) / 2)
    assert zero_shot(image, **{**settings, "op1": "min", "op2": "max"}) == pytest.approx(0.2 - 0.1)


def test_histograms_count_entailments_and_can_be_normalised():
    image = np.stack([np.array([[0.1], [0.2], [0.95]]), np.zeros((3, 1)), np.ones((3, 1))])
    head = Head("none", 1, "even2", "e", "mean", norm_histo=False)
    assert head.histogram(image)[0].tolist() == [2, 1]
    assert not head.histogram(image)[1:].any()
    normalised = Head("none", 1, "even2", "en", "mean", norm_histo=True)
    assert normalised.histogram(image)[0] == pytest.approx([3, 1, 4 / 3, 2 / 3, 0, 2])
    assert normalised.n_columns == 6


def test_labels_are_read_from_the_names_of_a_checkpoint():
    assert labels_of({0: "CONTRADICTION", 1: "NEUTRAL", 2: "ENTAILMENT"}, "m") == Labels(2, 0, 1)
    with pytest.raises(ModelError):
        labels_of({0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, "m")


def test_cards_go_by_name_and_by_hub_id():
    assert {*CARDS} == {"snli-base", "snli-large", "mnli-base", "mnli", "anli", "vitc-base", "vitc", "vitc-only"}
    assert NliModel("vitc").labels == NliModel("tals/albert-xlarge-vitaminc-mnli").labels == Labels(0, 1, 2)
    assert NliModel("mnli").model_name == "roberta-large-mnli"
    assert NliModel("mnli").labels == Labels(2, 0, 1)
    assert NliModel("someone/else").labels is None


def test_batching_and_order_change_nothing(nli):
    pairs = [(premise, hypothesis) for premise in (TEXT, *DOCUMENTS) for hypothesis in (*SUMMARIES, "", TEXT * 30)]
    together = NliModel(nli, device="cpu", batch_size=5).probabilities(pairs)
    alone = np.concatenate([NliModel(nli, device="cpu").probabilities([pair]) for pair in pairs])
    assert together == pytest.approx(alone, abs=1e-5)
    assert together.sum(axis=1) == pytest.approx(np.ones(len(pairs)))


@pytest.mark.usefixtures("language_data")
def test_metrics_pass_their_checkers_and_leave_models_and_answers_behind_when_pickled(nli, tmp_path):
    start_file = tmp_path / "head.safetensors"
    save_file(torch.load(make_head(tmp_path / "head.bin", 50)), start_file)
    for metric in (
        SummaCZSMetric(nli, granularity="sentence", device="cpu"),
        SummaCConvMetric(models=[nli], start_file=str(start_file), device="cpu"),
    ):
        check_metric(metric)
        first = metric.compute(DOCUMENTS, SUMMARIES, [[], []])
        pickled = cloudpickle.dumps(metric)
        assert len(pickled) < 20_000
        ((scores, _),) = cloudpickle.loads(pickled).compute(DOCUMENTS, SUMMARIES, [[], []]).values()
        assert scores == pytest.approx(next(iter(first.values()))[0])


@pytest.mark.usefixtures("language_data")
def test_pairs_that_were_seen_cost_nothing_again_unless_they_are_not_kept(nli, monkeypatch):
    for use_cache, n_calls in ((True, 1), (False, 2)):
        metric = SummaCZSMetric(nli, granularity="sentence", use_cache=use_cache, device="cpu")
        asked = []
        answer = metric.imager.nli.probabilities
        monkeypatch.setattr(
            metric.imager.nli, "probabilities", lambda pairs, f=answer, n=asked: n.append(1) or f(pairs)
        )
        assert metric.compute(DOCUMENTS, SUMMARIES, []) == metric.compute(DOCUMENTS, SUMMARIES, [])
        assert len(asked) == n_calls


@pytest.mark.usefixtures("language_data")
def test_texts_without_chunks_are_defined(nli):
    for settings, expected in (({}, 0.0), ({"use_ent": False}, 1.0)):
        metric = SummaCZSMetric(nli, granularity="sentence", device="cpu", **settings)
        assert metric.compute(["", DOCUMENTS[0]], [SUMMARIES[0], ""], [])["consistency/summaczs"] == (
            [expected] * 2,
            expected,
        )


@pytest.mark.usefixtures("language_data")
def test_no_head_is_ever_made_up(tmp_path):
    """RL4LMs' scores came from random layers where `start_file` was not given (D-20)."""
    with pytest.raises(MissingResourceError):
        SummaCConvMetric()
    with pytest.raises(MissingResourceError, match=r"head\.bin"):
        SummaCConvMetric(start_file=str(tmp_path / "head.bin"))


@pytest.mark.usefixtures("language_data")
def test_a_head_of_another_form_says_what_fits(nli, tmp_path):
    head = make_head(tmp_path / "head.bin", 23)
    with pytest.raises(ModelError, match=r"vitc.*percentile"):
        SummaCConvMetric(models=[nli], start_file=str(head), device="cpu").compute(DOCUMENTS, SUMMARIES, [])
    head.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match=r"head.bin"):
        SummaCConvMetric(models=[nli], start_file=str(head), device="cpu").compute(DOCUMENTS, SUMMARIES, [])


@pytest.mark.usefixtures("language_data")
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"granularity": "word"}, "granularity"),
        ({"granularity": "sentence-document-mixed"}, "granularity"),
        ({"use_ent": False, "use_con": False}, "use_ent and use_con"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_settings_that_cannot_be_are_said_at_once(settings, key):
    with pytest.raises(ValueError, match=key):
        SummaCZSMetric(**settings)


@pytest.mark.usefixtures("language_data")
def test_a_folder_that_is_not_there_is_said_at_once(tmp_path):
    with pytest.raises(ModelError):
        SummaCZSMetric(str(tmp_path / "none"))
    for bins in ("even0", "odd50", "even"):
        with pytest.raises(ValueError):
            SummaCConvMetric(bins=bins)


def test_sentences_need_punkt_when_the_metric_is_built_and_paragraphs_do_not(monkeypatch):
    asked = []
    monkeypatch.setattr(summac, "require_data", lambda needed_by, name: asked.append(needed_by))
    SummaCZSMetric(granularity="paragraph")
    SummaCZSMetric(granularity="document-paragraph")
    assert asked == []
    SummaCZSMetric(granularity="document-sentence")
    assert asked == ["the metric 'summaCZS'"]


def test_a_model_that_breaks_down_is_an_error_and_no_score(tmp_path):
    """A histogram leaves NaN out without a word."""
    model = NliModel(str(make_nli(tmp_path)), device="cpu")
    with torch.no_grad():
        model.model.classifier.bias.fill_(float("nan"))
    with pytest.raises(ModelError):
        model.probabilities([(DOCUMENTS[0], SUMMARIES[0])])


@pytest.mark.usefixtures("language_data")
def test_labels_that_say_nothing_are_said_when_the_metric_is_built(tmp_path):
    folder = make_nli(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"0": "SUPPORTS", "1": "REFUTES", "2": "NOT ENOUGH INFO"}
    (folder / "config.json").write_text(json.dumps(config))
    assert SummaCZSMetric(str(folder)).imager.nli.labels == Labels(0, 1, 2)  # a local copy of `vitc`
    config["id2label"] = {"0": "a", "1": "b", "2": "c"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="'a'"):
        SummaCZSMetric(str(folder))
