"""What a run scores with is built before data and weights are read, and all that is missing is said at once."""

from __future__ import annotations

import importlib.util
import json

import pytest

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.base import BaseMetric, NamedMetric
from rl4lms_like.metrics.call import compute_metrics
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.rewards import REWARDS
from rl4lms_like.system.errors import MetricError, MissingExtraError, MissingResourceError, NotReadyError
from rl4lms_like.training.components import build_components
from tests.config_errors import raises_at
from tests.configs import run_blocks, supervised_blocks


class NeedsWords:
    def __init__(self) -> None:
        raise MissingResourceError("the words", needed_by="x", command="get words", offline="copy words")


class NeedsPackage:
    def __init__(self, extra: str) -> None:
        raise MissingExtraError("pack", extra, "x")


@pytest.fixture
def lacking(monkeypatch):
    """A run whose reward and two metrics lack something."""
    for registry in (REWARDS, METRICS):
        monkeypatch.setattr(registry, "_table", dict(registry._table))
        registry.add("words", NeedsWords)
        registry.add("package", NeedsPackage)
    blocks = run_blocks()
    blocks["reward_fn"] = {"id": "words"}
    blocks["train_evaluation"]["metrics"] = [
        {"id": "length"}, {"id": "words"}, {"id": "package", "args": {"extra": "lexical"}},
        {"id": "package", "args": {"extra": "semantic"}},
    ]  # fmt: skip
    return blocks


def test_everything_that_is_missing_is_said_at_once_and_each_thing_once(lacking):
    with pytest.raises(NotReadyError) as caught:
        build_components(parse_config(lacking))
    paths = [f"train_evaluation.metrics.{index}" for index in (1, 2, 3)]
    assert list(caught.value.errors) == ["reward_fn", *paths]
    assert f"reward_fn, {paths[0]}: " in str(caught.value) and str(caught.value).count("get words") == 1
    assert "rl4lms_like[lexical,semantic]" in str(caught.value)


def test_one_thing_is_said_by_its_own_error(lacking):
    lacking["reward_fn"] = {"id": "sentiment"}
    del lacking["train_evaluation"]["metrics"][2:]
    with pytest.raises(MissingResourceError):
        build_components(parse_config(lacking))


def test_what_a_constructor_refuses_is_a_mistake_of_the_config(lacking):
    lacking["reward_fn"] = {"id": "regex", "args": {"pattern": "("}}
    with raises_at("reward_fn.args", among_others=True, mentions="'('") as caught:
        build_components(parse_config(lacking))
    assert len(caught.value.issues) > 1, "with all that is lacking"


def test_it_is_said_before_the_data_are_read(lacking, tmp_path):
    (tmp_path / "broken.jsonl").write_text("no JSON")
    lacking["datapool"] = {"id": "jsonl", "args": {"path": str(tmp_path / "broken.jsonl"), "prompt_column": "a"}}
    with pytest.raises(NotReadyError):
        assemble(parse_config(lacking))


def test_a_data_pool_says_what_it_lacks_with_the_others(lacking, monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find_spec(name))
    lacking["datapool"] = {"id": "commongen"}
    with pytest.raises(NotReadyError) as caught:
        build_components(parse_config(lacking))
    assert caught.value.errors["datapool"].extra == "data"
    lacking["datapool"]["args"] = {"data_dir": str(tmp_path)}  # a local copy needs no hub
    with pytest.raises(NotReadyError) as caught:
        build_components(parse_config(lacking))
    assert "datapool" not in str(caught.value)


def test_an_evaluation_needs_no_reward(lacking):
    del lacking["train_evaluation"]["metrics"][1:]
    components = build_components(parse_config(lacking), with_reward=False)
    assert components.reward_fn is None
    assert [type(metric).__name__ for metric in components.metrics] == ["Length"]


def test_check_says_it_after_everything_else(lacking, tmp_path, capsys):
    config = tmp_path / "config.yml"
    config.write_text(dump_yaml(json.loads(json.dumps(lacking))))
    assert main(["check", str(config)]) == 1
    written = capsys.readouterr()
    assert "# batches" in written.out and "# memory" in written.out
    assert "4 components cannot be built" in written.err and "Traceback" not in written.err


def test_a_supervised_run_builds_its_metrics_and_post_processor():
    blocks = supervised_blocks()
    blocks["train_evaluation"]["metrics"] = [{"id": "length"}]
    components = build_components(parse_config(blocks))
    assert components.reward_fn is None and components.post_processor is None
    assert len(components.metrics) == 1


def named(*metrics):
    blocks = run_blocks()
    blocks["train_evaluation"]["metrics"] = list(metrics)
    return blocks


def test_two_metrics_that_report_the_same_are_a_mistake_in_the_config():
    with raises_at("train_evaluation.metrics.2", mentions="train_evaluation.metrics.0"):
        parse_config(named({"id": "distinct_n"}, {"id": "length"}, {"id": "diversity"}))


def test_a_name_tells_them_apart():
    shorter = {"id": "sentiment", "args": {"include_prompt": False}, "name": "response"}
    components = build_components(parse_config(named({"id": "sentiment"}, shorter)))
    results = compute_metrics(components.metrics, ["A great"], [" day."], [[]])
    assert set(results) == {
        "semantic/sentiment", "semantic/sentiment_positive",
        "semantic/sentiment/response", "semantic/sentiment_positive/response",
    }  # fmt: skip
    assert results["semantic/sentiment"][1] > 0 == results["semantic/sentiment/response"][1]


def test_two_metrics_of_one_name_are_a_mistake_too():
    twice = [{"id": "sentiment", "args": {"include_prompt": value}, "name": "a"} for value in (True, False)]
    with raises_at("train_evaluation.metrics.1", mentions="semantic/sentiment/a"):
        parse_config(named(*twice))


def test_the_very_same_metric_twice_is_computed_once():
    config = parse_config(named({"id": "length"}, {"id": "length", "args": {}}))
    assert len(build_components(config).metrics) == 1


def test_metrics_of_ones_own_that_report_the_same_stop_the_evaluation():
    class Mine(BaseMetric):
        def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
            return {"mine/score": (None, 1.0)}

    with pytest.raises(MetricError, match=r"Mine .*Mine .*'mine/score'"):
        compute_metrics([Mine(), Mine()], ["a"], ["b"], [[]])
    assert set(compute_metrics([Mine(), NamedMetric(Mine(), "b")], ["a"], ["b"], [[]])) == {
        "mine/score",
        "mine/score/b",
    }
