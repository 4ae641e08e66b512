"""A config that is wrong, odd or merely different is refused by a message, or its run does as it says."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from tests.robustness.config_cases import KINDS, base_config
from tests.robustness.config_facts import asked_for, at, differences, same, work
from tests.robustness.config_mutations import Case, case_of
from tests.robustness.fuzzed_configs import (
    LONG_WORK,
    faults_here,
    faults_of_commands,
    make_folder,
    make_inputs,
    remembered_runs,
)

ROOT = Path(__file__).parents[2]
N_CONFIGS = 60
"""Of the 2,000 of `fuzzed_configs`; the seeds are 0, 1, 2 ..."""
N_TRAINED = 6
"""So many of those that `check` takes are run, too; those that it refuses all are."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    base = tmp_path_factory.mktemp("fuzzed")
    make_inputs(base)
    return base


@pytest.fixture(scope="module")
def trained():
    return []


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def said_by(command, case, capsys):
    """Its exit status and what it says of why."""
    options = [option for override in case.overrides for option in ("--set", override)]
    capsys.readouterr()
    status = 0
    with contextlib.suppress(SystemExit):
        status = main([command, "case.yml", *options])
    return status, capsys.readouterr().err


@pytest.mark.parametrize("seed", range(N_CONFIGS))
def test_a_changed_config_is_refused_or_runs_as_it_says(seed, inputs, trained, monkeypatch, capsys):
    case = case_of(seed)
    monkeypatch.chdir(make_folder(inputs, seed))
    Path("case.yml").write_bytes(case.text)
    runs = remembered_runs(monkeypatch.setattr)
    check, words = said_by("check", case, capsys)
    assert check in (0, 1, 2) and "Traceback" not in words
    if check == 0 and (len(trained) >= N_TRAINED or work(asked_for(case.text, case.overrides)) > LONG_WORK):
        return
    train, message = said_by("train", case, capsys)
    assert not faults_of_commands(check, train, {"check": words, "train": message})
    if train == 0:
        trained.append(seed)
        assert not faults_here(case, runs[-1])


@pytest.mark.skipif("RL4LMS_LIKE_CONFIGS" not in os.environ, reason="RL4LMS_LIKE_CONFIGS says how many")
def test_so_many_changed_configs_are_refused_or_run_as_they_say(tmp_path):
    command = [sys.executable, "-m", "tests.robustness.fuzzed_configs", "--n", os.environ["RL4LMS_LIKE_CONFIGS"]]
    done = subprocess.run([*command, "--output", str(tmp_path / "r.json")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- what the comparison itself is worth ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_starts_as_a_config_without_issues(kind, inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    assert parse_config(base_config(kind))


def test_a_seed_makes_the_same_case_again():
    assert case_of(11) == case_of(11)
    assert len({case_of(seed).text for seed in range(50)}) > 40


def test_a_run_that_is_not_what_was_asked_for_is_found():
    usual = {"seed": 0, "env": {"n_envs": 1}}
    assert not list(differences({"seed": "3", "env": None}, {"seed": 3, "env": {"n_envs": 1}}, usual))
    assert list(differences({"seed": 3}, {"seed": 4}, usual)) == ["seed is 4, asked for was 3"]
    assert list(differences({"sead": 3}, {"seed": 0}, usual)) == ["sead was asked for and is not in config.json"]
    assert list(differences({}, {"seed": 1}, usual)) == ["seed was not asked for: 1"]


@pytest.mark.parametrize(
    ("asked", "got", "expected"),
    [("1e-5", 1e-5, True), (5.0, 5, True), (True, 1, False), ("yes", True, True), (0, False, True), (2, True, False)],
)
def test_numbers_and_switches_mean_the_same_in_other_words(asked, got, expected):
    assert same(asked, got) is expected


def test_overrides_are_read_over_the_file():
    asked = asked_for(b"env: {n_envs: 2}\nlist: [{a: 1}]", ["env.n_envs=3", "list.0.a=[2]", "new.key=x"])
    assert asked == {"env": {"n_envs": 3}, "list": [{"a": [2]}], "new": {"key": "x"}}
    assert at(asked, "env.nothing", 7) == 7


def with_keyword(**changed):
    """The same function, deaf to some of its keyword arguments."""
    return lambda original: lambda *args, **kwargs: original(*args, **{**kwargs, **changed})


DEAF = {
    "gamma": ("rollouts.buffer:generalized_advantages", with_keyword(gamma=0.97), "returns"),
    "gae_lambda": ("rollouts.buffer:generalized_advantages", with_keyword(gae_lambda=1.0), "returns"),
    "estimator": (
        "rollouts.rollout:kl_estimate",
        lambda original: lambda a, b, _: original(a, b, "k1"),
        "task reward",
    ),
    "seed": ("rollouts.text_rollouts:RolloutCollector", with_keyword(seed=0), "seed of the rollouts"),
    "max_prompt_length": ("envs.vec_env:TextGenEnv", with_keyword(max_prompt_length=16), "tokens of the prompts"),
    "metrics": (
        "training.evaluation:compute_metrics",
        lambda original: lambda metrics, *rest, **named: original(metrics[:1], *rest, **named),
        "scores",
    ),
}
"""What a library may fail to hear -> where, how, and what is then found."""


def run_of_every_kind_of_fact(folder, monkeypatch):
    """The faults that are found in a run whose config asks for values that are no defaults."""
    blocks = base_config("ppo/causal")
    blocks["datapool"] = {"id": "film_opinions", "args": {"n_train": 8, "n_eval": 2}}
    blocks["env"]["args"]["max_prompt_length"] = 5
    blocks["alg"]["args"] |= {"gamma": 0.5, "gae_lambda": 0.5, "seed": 3, "learning_rate": 0.03}
    blocks["alg"]["kl_div"] |= {"coeff": 0.5, "estimator": "k2"}
    blocks["train_evaluation"] |= {"metrics": [{"id": "length"}, {"id": "distinct_n"}], "save_model": False}
    monkeypatch.chdir(folder)
    case = Case(0, "ppo/causal", yaml.safe_dump(blocks).encode(), (), ())
    Path("case.yml").write_bytes(case.text)
    runs = remembered_runs(monkeypatch.setattr)
    assert main(["train", "case.yml"]) == 0
    return faults_here(case, runs[-1])


def test_a_run_that_hears_everything_has_no_faults(inputs, monkeypatch):
    assert not run_of_every_kind_of_fact(make_folder(inputs, 10_000), monkeypatch)


@pytest.mark.parametrize("key", DEAF)
def test_a_library_that_is_deaf_to_a_key_is_found_out(key, inputs, monkeypatch):
    place, deafened, message = DEAF[key]
    module, _, name = place.partition(":")
    module = importlib.import_module(f"rl4lms_like.{module}")
    monkeypatch.setattr(module, name, deafened(getattr(module, name)))
    found = run_of_every_kind_of_fact(make_folder(inputs, 10_001 + [*DEAF].index(key)), monkeypatch)
    assert found and all(fault.startswith(message) for fault in found)
