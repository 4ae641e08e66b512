"""`learned_reward` and `reward_model`: pure, picklable, the same as the metric of that id, alone or in batches."""

from __future__ import annotations

import pytest

from rl4lms_like.metrics import METRICS
from rl4lms_like.rewards import REWARDS
from rl4lms_like.system.errors import ModelError
from rl4lms_like.system.schema import check_arguments
from rl4lms_like.testing.checkers import check_metric, check_reward_function
from tests.local_models import LOCAL_MODELS

PROMPTS = ["the film was", "count with me", "on the museum"]
TEXTS = [" good", " a joy from start to finish and a wonderful, sad story!", ""]
NO_REFERENCES: list[list[str]] = [[], [], []]


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("classifier", "regressor", "nli")}
    for name, folder in folders.items():
        LOCAL_MODELS[name](folder)
    return {
        "learned_reward": {"model_name": str(folders["classifier"]), "label_ix": 1},
        "reward_model": {"model_name": str(folders["regressor"])},
        "one_of_three": {"model_name": str(folders["nli"]), "label": "ENTAILMENT", "value": "probability"},
    }


@pytest.mark.parametrize("id", ["learned_reward", "reward_model"])
def test_they_pass_the_checkers(id, args):
    check_reward_function(REWARDS.get(id, args[id]))
    check_metric(METRICS.get(id, args[id]), keys=METRICS.entry(id).keys)


@pytest.mark.parametrize(
    ("id", "case"),
    [("learned_reward", "learned_reward"), ("reward_model", "reward_model"), ("reward_model", "one_of_three")],
)
def test_reward_and_metric_are_one_score_whatever_the_batch(id, case, args):
    (_, (scores, overall)) = METRICS.get(id, args[case]).compute(PROMPTS, TEXTS, NO_REFERENCES).popitem()
    assert overall == pytest.approx(sum(scores) / 3)
    assert max(scores) - min(scores) > 1e-3
    for batch_size in (1, 2, 32):
        reward = REWARDS.get(id, {**args[case], "batch_size": batch_size})
        assert reward(PROMPTS, TEXTS, NO_REFERENCES, [True] * 3) == pytest.approx(scores, abs=1e-5)


def test_rl4lms_arguments_by_position(args):
    folder = args["learned_reward"]["model_name"]
    reward = REWARDS.resolve("learned_reward")(folder, 1, False)
    metric = METRICS.resolve("learned_reward")(folder, 1, 100, False)
    scores, _ = metric.compute(PROMPTS, TEXTS, NO_REFERENCES)["semantic/learned_automodel_metric"]
    assert reward(PROMPTS, TEXTS, NO_REFERENCES, [True] * 3) == pytest.approx(scores, abs=1e-6)
    both = REWARDS.resolve("learned_reward")(folder, 1)(PROMPTS, TEXTS, NO_REFERENCES, [True] * 3)
    assert both != pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("registry", [REWARDS, METRICS], ids=["reward", "metric"])
def test_a_label_that_is_not_there_is_an_error_before_weights_are_loaded(registry, args):
    with pytest.raises(ModelError, match=r" 2;.* 0"):
        registry.get("learned_reward", {**args["learned_reward"], "label_ix": 2})
    with pytest.raises(ModelError):
        registry.get("learned_reward", {**args["reward_model"], "label_ix": 0})
    with pytest.raises(ModelError):
        registry.get("reward_model", {"model_name": args["one_of_three"]["model_name"]})


@pytest.mark.parametrize(
    ("argument", "value"),
    [("template", "chatty"), ("value", "odds"), ("clip", -1), ("batch_size", 0), ("label", -1), ("device", "tpu")],
)
def test_wrong_arguments_are_mistakes_in_the_config(argument, value):
    _, issues = check_arguments(REWARDS.signature("reward_model"), {"model_name": "m", argument: value}, "args")
    assert [issue.path for issue in issues] == [f"args.{argument}"]


@pytest.mark.parametrize("label", [2, "ENTAILMENT", None])
def test_labels_are_bound_as_they_are_written(label):
    bound, issues = check_arguments(REWARDS.signature("reward_model"), {"model_name": "m", "label": label}, "args")
    assert issues == [] and bound["label"] == label and type(bound["label"]) is type(label)
