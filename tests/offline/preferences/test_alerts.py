"""A preference run reports each of its problems once, and healthy runs report none."""

from __future__ import annotations

import pytest

from rl4lms_like.offline.preference_alerts import ALERTS, PERPLEXITY, History
from tests.offline.preferences.preference_runs import PAIRS, blocks, lines, run, written

HEALTHY = [
    {"logps/chosen": -24.0, "rewards/margins": 0.0, "rewards/accuracies": 0.5, PERPLEXITY: 5.0},
    {"logps/chosen": -25.0, "rewards/margins": 0.2, "rewards/accuracies": 0.9, PERPLEXITY: 5.2},
    {"logps/chosen": -26.0, "rewards/margins": 0.4, "rewards/accuracies": 1.0, PERPLEXITY: 5.9},
    {"logps/chosen": -26.0, "rewards/margins": 0.5, "rewards/accuracies": 1.0, PERPLEXITY: 6.0},
]


def reported(val=(), train=(), **facts):
    history, names = History(n_steps=100, **facts), []
    for number, line in enumerate(train):
        names += history.add("train", number, line)
    for number, line in enumerate(val):
        names += history.add("val", 30 * number, line)
    return names


def test_a_healthy_run_has_no_alerts():
    z0 = [{"kto/z0": value} for value in (0.0, 0.0, 0.01, 0.0, 0.02, 0.0, 0.0)]
    assert reported(HEALTHY, z0, balance=1.3) == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("chosen_log_prob_falls", {"logps/chosen": -40.0}),
        ("margin_grows_while_perplexity_rises", {PERPLEXITY: 26.0}),
        ("reward_follows_length", {"rewards/length_correlation": -0.9}),
    ],
)
def test_a_problem_of_evaluations_is_reported_once(name, changes):
    assert reported([HEALTHY[0], *(line | changes for line in HEALTHY[1:])]) == [name]


def test_an_early_accuracy_of_one_is_reported():
    history = History(n_steps=100)
    history.add("val", 0, HEALTHY[0])
    assert list(history.add("val", 10, HEALTHY[2])) == ["accuracy_is_one_early"]


def test_a_reference_point_of_zero_and_unbalanced_labels_are_reported():
    assert reported(train=[{"kto/z0": 0.0}] * 9) == ["z0_stays_at_zero"]
    assert reported(HEALTHY, balance=3.0) == reported(HEALTHY, balance=0.2) == ["labels_are_unbalanced"]


def test_a_history_is_restored():
    history = History(n_steps=100, balance=3.0)
    history.add("val", 0, HEALTHY[0] | {"strange": float("nan")})
    again = History(**history.state_dict())
    assert again == history and again.reported == ["labels_are_unbalanced"]
    assert set(again.reported) <= set(ALERTS)


def test_alerts_of_a_run_are_in_its_folder(tmp_path, tiny_gpt2_dir):
    rows = [
        {"prompt": pair["prompt"], "response": pair["chosen"], "label": index > 1} for index, pair in enumerate(PAIRS)
    ]
    mapping = blocks("kto", tiny_gpt2_dir, written(tmp_path, rows), max_steps=2)
    mapping["datapool"]["args"]["label_column"] = "label"
    (alarm, *_) = lines(run(mapping, tmp_path) / "alarms.jsonl")
    assert (alarm["alarm"], alarm["iteration"]) == ("labels_are_unbalanced", 0)
    assert alarm["evidence"] == {"balance": 5.0}
