"""A spec is checked as strictly as a config, and with it every config that it amounts to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rl4lms_like.benchmarking.jobs import jobs_of
from rl4lms_like.benchmarking.spec import BenchmarkSpec, CurveSpec, RunSpec, grid_points, load_benchmark
from rl4lms_like.catalogue import table_rows
from rl4lms_like.system.errors import ConfigError
from tests.benchmarking.conftest import write_spec
from tests.config_errors import raises_at
from tests.conftest import REPOSITORY


def mistakes_of(path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_benchmark(path)
    return [issue.path for issue in caught.value.issues]


def test_every_mistake_of_the_spec_and_of_its_configs_is_told_at_once(tmp_path):
    spec = write_spec(
        tmp_path,
        runz=3,
        base={"alg.args.clip_rnge": 3},
        runs={"a": {}, "b": {"set": {"env.n_envs": 0}}, "c": {"config": "nowhere.yml"}, "d/e": {"conf": 1}},
        metrics=["vall:x"],
        curves=["rollout_info/ep_rew", {"kex": 3}],
        seeds=0,
    )
    assert mistakes_of(spec) == [
        "seeds",
        "runz",
        "curves.1.kex",
        "curves.1.key",
        "runs.d/e",
        "runs.d/e.conf",
        "metrics",
        "runs.a, runs.b",
        "runs.b",
        "runs.c",
    ]
    for path, datum in (("runs.a, runs.b", "ppo.yml alg.args.clip_rnge"), ("runs.b", "ppo.yml env.n_envs"),
                        ("runs.c", "nowhere.yml")):  # fmt: skip
        with raises_at(path, among_others=True, mentions=datum):
            load_benchmark(spec)


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"runs": {1: {}}}, "runs"),
        ({"seeds": []}, "seeds"),
        ({"runs": {}}, "runs"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"grid": {"alg.args.gamma": []}}, "grid.alg.args.gamma"),
        ({"base": {"seed": 3}}, "base.seed"),
        ({"runs": {"a": {"set": {"seed": 3}}}}, "runs.a.set.seed"),
        ({"config": None}, "runs.ppo"),
        ({"base": {"reward_fn.id.x": 3}}, "runs.ppo"),
        ({"grid": {"datapool.args.prompt": ["a b", "a/b"]}}, "runs.ppo,prompt=a_b"),
    ],
)
def test_what_types_do_not_say_is_checked_too(tmp_path, keys, path):
    assert mistakes_of(write_spec(tmp_path, **keys)) == [path]


def test_seeds_from_the_command_line_are_checked_as_those_of_the_file(tmp_path):
    with raises_at("--seeds", mentions="[3, 3]"):
        load_benchmark(write_spec(tmp_path), seeds=[3, 3])


def test_wrong_seeds_are_told_beside_other_issues(tmp_path):
    assert mistakes_of(write_spec(tmp_path, seeds=[], runz=1)) == ["runz", "seeds"]


def test_a_mistake_of_a_large_grid_does_not_name_every_run(tmp_path):
    with raises_at(
        "runs.ppo,gama=0.1, runs.ppo,gama=0.2, runs.ppo,gama=0.3 and 2 more", mentions="ppo.yml alg.args.gama"
    ):
        load_benchmark(write_spec(tmp_path, grid={"alg.args.gama": [0.1, 0.2, 0.3, 0.4, 0.5]}))


def test_a_file_that_is_no_spec_is_told_what_a_spec_has(tmp_path):
    (tmp_path / "spec.yml").write_text("- ppo\n")
    with raises_at("", mentions="runs, config, seeds"):
        load_benchmark(tmp_path / "spec.yml")


def test_a_grid_is_every_combination_and_its_labels_are_short():
    points = grid_points({"alg.args.learning_rate": [1e-3, 1e-2], "alg.kl_div.coeff": [0, 0.1], "alg.id": ["ppo"]})
    assert [label for label, _ in points] == [
        ",learning_rate=0.001,coeff=0,id=ppo",
        ",learning_rate=0.001,coeff=0.1,id=ppo",
        ",learning_rate=0.01,coeff=0,id=ppo",
        ",learning_rate=0.01,coeff=0.1,id=ppo",
    ]
    assert points[1][1] == {"alg.args.learning_rate": 1e-3, "alg.kl_div.coeff": 0.1, "alg.id": "ppo"}
    assert [label for label, _ in grid_points({"reward_fn.id": ["x"], "alg.id": ["y"]})] == [",reward_fn.id=x,alg.id=y"]
    assert grid_points({}) == [("", {})]


def test_a_runs_changes_come_after_those_of_all_and_before_the_grids(tmp_path):
    spec = write_spec(
        tmp_path,
        base={"alg.args.gamma": 0.5, "train_evaluation.n_iters": 7, "env.n_envs": 2},
        runs={"a": {"set": {"alg.args.gamma": 0.6, "env.n_envs": 3}}, "b": {}},
        grid={"env.n_envs": [4]},
    )
    a, b = (cell.config for cell in load_benchmark(spec).cells)
    assert (a.alg.args["gamma"], b.alg.args["gamma"]) == (0.6, 0.5)
    assert a.env.n_envs == b.env.n_envs == 4
    assert a.train_evaluation.n_iters == 7


def test_paths_are_relative_to_the_spec_and_results_to_the_caller(tmp_path, monkeypatch):
    spec = write_spec(tmp_path, name="numbers")
    assert load_benchmark(spec).results == tmp_path / "out"
    assert load_benchmark(spec, results="elsewhere").results.as_posix() == "elsewhere"
    assert load_benchmark(write_spec(tmp_path, name="numbers", results=None)).results.as_posix() == (
        "benchmark_results/numbers"
    )


def test_jobs_go_seed_by_seed_and_differ_in_their_seed_alone(tmp_path):
    benchmark = load_benchmark(write_spec(tmp_path, runs={"a": {}, "b": {}}, seeds=[3, 5], threads=2))
    jobs = jobs_of(benchmark)
    assert [job.name for job in jobs] == ["a, seed 3", "b, seed 3", "a, seed 5", "b, seed 5"]
    assert [job.config["seed"] for job in jobs] == [3, 3, 5, 5]
    assert jobs[0].config["n_threads"] == 2
    assert {**jobs[0].config, "seed": 5} == jobs[2].config
    assert jobs[2].folder == tmp_path / "out/runs/a/seed_5"
    assert [job.label for job in jobs_of(benchmark, ["b"])] == ["b", "b"]
    with raises_at("--only", mentions="a; b"):
        jobs_of(benchmark, ["c"])


SUPERVISED = "benchmark_results/warm_start_supervised/runs/supervised"


@pytest.mark.parametrize("name", sorted(path.stem for path in (REPOSITORY / "benchmarks/specs").glob("*.yml")))
def test_the_specs_of_this_repository_pass_the_check(name, repository, tiny_gpt2_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task_configs").symlink_to(repository / "task_configs")  # data of the configs
    # Stands in for what benchmarks.random_model and warm_start_supervised.yml leave.
    for made_before in ("benchmarks/.models/gpt2_6x512", f"{SUPERVISED}/seed_0/model"):
        (tmp_path / made_before).parent.mkdir(parents=True)
        (tmp_path / made_before).symlink_to(tiny_gpt2_dir)
    assert load_benchmark(repository / f"benchmarks/specs/{name}.yml").name == name


def test_the_page_has_every_key_with_its_default(repository):
    page = (repository / "docs/benchmarking.md").read_text()
    for row in [row for block in (BenchmarkSpec, RunSpec, CurveSpec) for row in table_rows(block)]:
        assert row in page, row


def test_reading_a_spec_loads_nothing_heavy():
    heavy = ("torch", "transformers", "matplotlib", "scipy")
    code = f"import sys, rl4lms_like.benchmarking.runner; print(*(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_secret_in_a_grid_stands_in_no_label_that_is_shown(tmp_path):
    secret = "correct-horse-battery-staple"
    spec = write_spec(tmp_path, grid={"reward_fn.args.api_key": [f"{secret}-1", f"{secret}-2"]}, runs={"a": {}})
    with pytest.raises(ConfigError) as caught:
        load_benchmark(spec)
    assert "reward_fn.args.api_key" in str(caught.value) and secret not in str(caught.value)
