"""The embedded default in small: warm start, tuning, table and files."""

import io
import json

import pytest
from rich.console import Console

from rl4lms_like import quickstart
from rl4lms_like.config.load import load_config

SMALL = [
    "env.n_envs=8",
    "alg.args.n_epochs=1",
    "alg.args.n_steps=1",
    "train_evaluation.n_iters=2",
    "train_evaluation.max_eval_samples=6",
]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(quickstart, "STEPS", {"gpt2": 8, "t5": 8})


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_quickstart_in_small(family, tmp_path):
    result = quickstart.quickstart(tmp_path, family=family, overrides=SMALL)
    assert set(result["before"]) == set(result["after"]) >= {"semantic/sentiment", "diversity_metrics/distinct-2"}
    assert len(result["pairs"]) == 5 and result["pairs"][0]["before"]
    screen = io.StringIO()
    quickstart.show(result | {"seconds": {"total": 3.0}}, Console(file=screen, width=100))
    for word in ("sentiment (VADER compound)", "before", "after", "report.html", result["pairs"][0]["prompt"]):
        assert word in screen.getvalue()


def test_the_command_writes_its_result_and_without_iterations_only_measures_the_warm_start(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal, where the path below must not contain colour codes
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    overrides = [part for override in [*SMALL, "train_evaluation.n_iters=0"] for part in ("--set", override)]
    assert quickstart.main(["--folder", str(tmp_path), "--seed", "3", *overrides]) == 0
    (file,) = tmp_path.glob("*/result.json")
    result = json.loads(file.read_text())
    assert result["seed"] == 3 and result["seconds"]["total"] > 0
    assert f"Report: {result['report']}" in capsys.readouterr().out.replace("\n", "")
    assert result["before"] == result["after"] and result["kl"] == 0.0


@pytest.mark.parametrize("name", ["gpt2_ppo", "t5_ppo"])
def test_its_config_also_stands_alone(name, repository, tiny_gpt2_dir):
    places = ("tokenizer.model_name", "alg.policy.args.model_name")
    file = repository / "task_configs" / "quickstart" / f"{name}.yml"
    config = load_config(file, [f"{place}={json.dumps(str(tiny_gpt2_dir))}" for place in places])
    assert config.reward_fn.id == "sentiment" and not config.notices
