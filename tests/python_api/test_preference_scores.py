"""`Run.evaluate()` of a preference run has the scores of the preferences, as the run's own evaluations."""

from __future__ import annotations

import pytest

from rl4lms_like import Run
from rl4lms_like.tracking.run_folder import RunFolder
from tests.offline.preferences.preference_runs import PAIRS, lines

SETTINGS = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "device": "cpu"}


@pytest.mark.parametrize("given", [{}, {"peft": {"r": 2}}], ids=["weights", "adapters"])
@pytest.mark.parametrize("algorithm", ["dpo", "reward_model", "orpo"])
def test_the_scores_are_those_of_the_runs_own_evaluations(algorithm, given, tiny_gpt2_dir, tmp_path):
    if algorithm == "reward_model" and given:
        given = {**given, "merge_on_save": True}
    if algorithm != "reward_model":
        given = {**given, "max_new_tokens": 4}
    run = Run(
        tiny_gpt2_dir, algorithm=algorithm, data=PAIRS[:8], eval_data=PAIRS[6:], folder=tmp_path / "a" / "run",
        **SETTINGS, **given,
    )  # fmt: skip
    before = run.evaluate()
    run.train(quiet=True)
    after = run.evaluate()

    first, *_, last = lines(RunFolder(run.folder).path / "val_split_metrics.jsonl")
    for scores, line in ((before, first), (after, last)):
        assert ("rewards/accuracies" in scores) is (algorithm != "orpo")
        assert scores == pytest.approx(line["metrics"], abs=1e-5)
    assert after != before

    # Of the first pairs only; with metrics, these alone.
    few = run.evaluate(limit=2)
    assert set(few) == set(after) and few != after
    if algorithm == "dpo" and not given.get("peft"):
        assert set(run.evaluate(metrics=["length"])) & set(after) == set()
