"""CIDEr, SPICE and their sum: keyed by position, never by prompt (D-22); what cannot be computed is said early."""

from __future__ import annotations

import math

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.metrics import lexical as metrics
from rl4lms_like.metrics.lexical import CIDERMetric, SpiceMetric
from rl4lms_like.rewards import lexical as rewards
from rl4lms_like.rewards.lexical import SpiderRewardFunction
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import MissingExtraError, MissingResourceError, RewardError
from rl4lms_like.testing.checkers import SAMPLES, check_metric, check_reward_function

TEXTS = ["A dog runs across the field.", "A cat sits.", "Birds fly over the sea."]
REFERENCES = [["A dog runs across the field."], ["A cat sits on a mat.", "The cat is sitting."], ["Birds are flying."]]


@pytest.fixture
def counted_spice(monkeypatch):
    """SPICE without Java: half the share of the text's words that the references have; counts its calls."""
    calls = []

    def stand_in(texts, references, **settings):
        calls.append(settings)
        words = [
            (set(text.split()), set(" ".join(group).split())) for text, group in zip(texts, references, strict=True)
        ]
        return [len(mine & theirs) / 20 if theirs else math.nan for mine, theirs in words]

    for module in (metrics, rewards):
        monkeypatch.setattr(module, "spice", stand_in)
        monkeypatch.setattr(module, "require_spice", lambda needed_by: None)
    return calls


def test_equal_prompts_do_not_collapse():
    """RL4LMs keyed texts by prompt: equal prompts had one entry, with the last one's score."""
    same = CIDERMetric().compute(["p"] * 3, TEXTS, REFERENCES)["lexical/cider"]
    other = CIDERMetric().compute(["p", "q", "r"], TEXTS, REFERENCES)["lexical/cider"]
    assert same == other
    assert len(set(same[0])) == 3


def test_metrics_pass_their_checkers(counted_spice):
    check_metric(CIDERMetric())
    check_metric(SpiceMetric())


@pytest.mark.parametrize("metric", [CIDERMetric, SpiceMetric])
def test_a_text_without_references_does_not_count(metric, counted_spice):
    ((scores, mean),) = metric().compute(["p"] * 2, TEXTS[:2], [REFERENCES[0], []]).values()
    assert math.isnan(scores[1])
    assert mean == scores[0]


def test_the_reward_passes_its_checker_with_a_file_and_as_dependent_on_its_batch_without(tmp_path):
    file = tmp_path / "references.txt"
    file.write_text("\n".join(text for sample in SAMPLES for text in sample.references), encoding="utf-8")
    check_reward_function(SpiderRewardFunction(0.0, 1.0, references_file=str(file)))
    check_reward_function(SpiderRewardFunction(0.0, 1.0), batch_independent=False)


def test_one_text_without_a_file_is_an_error_that_names_the_way_out():
    with pytest.raises(ValueError, match="references_file"):
        SpiderRewardFunction(0.0, 1.0)([""], TEXTS[:1], REFERENCES[:1], [True])


def test_spice_is_only_run_where_it_counts(counted_spice):
    texts = Texts(TEXTS, TEXTS, REFERENCES, [None] * 3)
    plain = SpiderRewardFunction(0.0, 1.0).scores(texts)
    assert counted_spice == []
    both = SpiderRewardFunction(2.0, 1.0, java_memory="1G", timeout=5).scores(texts)
    assert counted_spice == [{"java_memory": "1G", "timeout": 5}]
    assert [total - part for total, part in zip(both, plain, strict=True)] == pytest.approx([0.6, 0.2, 0.1])
    assert SpiderRewardFunction(2.0, 0.0).scores(texts.chosen([0])) == pytest.approx([0.6])


def test_a_sample_without_references_is_an_error_of_the_reward():
    without = (Sample("a", "Say it", []), Sample("b", "Say that", ["A cat."]))
    with pytest.raises(AssertionError, match=r"text 0 .*'Say it'") as caught:
        check_reward_function(SpiderRewardFunction(0.0, 1.0), without, batch_independent=False)
    assert isinstance(caught.value.__cause__, RewardError)


def test_what_is_missing_is_said_when_the_component_is_built(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    for build in (SpiceMetric, lambda: SpiderRewardFunction(0.5, 0.5)):
        with pytest.raises(MissingResourceError):
            build()
    with pytest.raises(ValueError):
        CIDERMetric(references_file=str(tmp_path / "none.txt"))
    monkeypatch.setitem(__import__("sys").modules, "spacy", None)
    for build in (CIDERMetric, lambda: SpiderRewardFunction(0.0, 0.5)):
        with pytest.raises(MissingExtraError) as caught:
            build()
        assert caught.value.extra == "captions"
