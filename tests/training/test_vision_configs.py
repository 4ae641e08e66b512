"""The configs of tasks with images run with tiny models, without the hub."""

from __future__ import annotations

import io
import json

import datasets
import pytest
from PIL import Image

from rl4lms_like.cli import main
from rl4lms_like.python_api.python_run import train
from tests.conftest import REPOSITORY
from tests.training.test_task_configs import overrides
from tests.vision_models import TEMPLATE, save_vision_model

GEOMETRY = REPOSITORY / "task_configs" / "geometry3k" / "chat_grpo.yml"
SHAPES = {name: REPOSITORY / "task_configs" / "shapes" / f"tiny_idefics3_{name}.yml" for name in ("grpo", "ppo")}
"""Algorithm -> its config."""
OF_TEXTS = {
    name: REPOSITORY / "task_configs" / "shapes" / f"tiny_idefics3_{name}.yml"
    for name in ("dpo", "reward_model", "supervised")
}
"""Configs of runs on given texts."""

TINY = {
    "env.n_envs": 8,
    "env.args.max_prompt_length": 256,
    "env.args.max_episode_length": 6,
    "alg.args.n_episodes": 8,
    "alg.args.group_size": 4,
    "alg.args.minibatch_episodes": 8,
    "alg.args.micro_batch_size": 4000,
    "alg.policy.args.peft.r": 2,
    "alg.policy.args.dtype": "float32",
    "alg.policy.args.max_pixels": "null",  # the tiny model's own limit is lower
    "alg.policy.args.generation_kwargs.max_new_tokens": 6,
    "train_evaluation.n_iters": 1,
    "train_evaluation.eval_batch_size": 4,
    "train_evaluation.generation_kwargs.max_new_tokens": 6,
}


def figure(side: int) -> dict:
    stream = io.BytesIO()
    Image.new("RGB", (side, side), "white").save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": "figure.png"}


@pytest.fixture(scope="module")
def geometry(tmp_path_factory) -> dict[str, str]:
    """Settings of a tiny model of the family, and of a table in the form of Geometry3K."""
    folder = tmp_path_factory.mktemp("geometry")
    model = save_vision_model(folder / "qwen2_5_vl", "qwen2_5_vl")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    tables = {}
    for split, n in (("train", 6), ("validation", 3), ("test", 3)):
        rows = {
            "images": [[figure(40 + 4 * index)] for index in range(n)],
            "problem": [f"<image>Find {index}." for index in range(n)],
            "answer": [str(index) for index in range(n)],
        }
        tables[split] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(tables).save_to_disk(str(folder / "table"))
    names = ("tokenizer.model_name", "alg.policy.args.model_name")
    return dict.fromkeys(names, json.dumps(str(model))) | {"datapool.args.path": json.dumps(str(folder / "table"))}


def test_the_config_of_geometry_problems_passes_the_check(geometry, capsys):
    settings = [option for text in overrides(geometry | TINY) for option in ("--set", text)]
    assert main(["check", str(GEOMETRY), *settings]) == 0
    assert "train   6 samples; all prompts within 256 tokens" in (output := capsys.readouterr().out)
    assert output.count("all with images") == 3


def test_the_config_of_geometry_problems_trains_a_tiny_model(geometry, tmp_path):
    folder = train(GEOMETRY, base_path_to_store_results=tmp_path, overrides=overrides(geometry | TINY))
    predictions = json.loads((folder / "epoch_1_val_split_predictions.json").read_text())
    assert [row["prompt_text"] for row in predictions] == [f"<image>Find {index}." for index in range(3)]
    assert all(len(row["images"]) == 1 for row in predictions)


@pytest.mark.parametrize("algorithm", SHAPES)
def test_the_config_of_shapes_trains_the_embedded_model(algorithm, tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / "home"))
    few = {"train_evaluation.n_iters": 1, "datapool.args.n_train": 32, "datapool.args.n_eval": 8, "env.n_envs": 32}
    if algorithm == "grpo":
        few |= {"alg.args.n_episodes": 32, "alg.args.minibatch_episodes": 16}
    folder = train(SHAPES[algorithm], base_path_to_store_results=tmp_path, overrides=overrides(few))
    (_, scores) = [json.loads(line) for line in (folder / "test_split_metrics.jsonl").read_text().splitlines()]
    assert 0 <= scores["metrics"]["answers/exact_match"] <= 1


@pytest.mark.parametrize("algorithm", SHAPES)
def test_the_model_of_shapes_learns_colours_and_nothing_from_an_empty_picture(algorithm, tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / "home"))
    accuracy = {}
    for constant in (False, True):
        values = {"datapool.args.constant": json.dumps(constant)}
        folder = train(
            SHAPES[algorithm],
            base_path_to_store_results=tmp_path,
            experiment_name=f"constant_{constant}",
            overrides=overrides(values),
        )
        (*_, last) = (folder / "test_split_metrics.jsonl").read_text().splitlines()
        accuracy[constant] = json.loads(last)["metrics"]["answers/exact_match"]
    assert accuracy[False] >= 0.85 and accuracy[True] <= 0.35


def scores_of(folder) -> dict[str, float]:
    """The last scores on `test`."""
    (*_, last) = (folder / "test_split_metrics.jsonl").read_text().splitlines()
    return json.loads(last)["metrics"]


@pytest.mark.parametrize("name", OF_TEXTS)
def test_the_configs_of_shapes_train_the_embedded_model_on_given_texts(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / "home"))
    few = {"datapool.args.n_train": 16, "datapool.args.n_eval": 8, "alg.training_args.num_train_epochs": 1}
    folder = train(OF_TEXTS[name], base_path_to_store_results=tmp_path, overrides=overrides(few))
    assert (folder / "model" / "processor_config.json").is_file() and scores_of(folder)


@pytest.mark.parametrize(("name", "learned"), [("dpo", 0.95), ("reward_model", 0.9)])
def test_pairs_of_shapes_are_ranked_by_what_is_seen(name, learned, tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / "home"))
    accuracy = {}
    for constant in (False, True):
        folder = train(
            OF_TEXTS[name],
            base_path_to_store_results=tmp_path,
            experiment_name=f"constant_{constant}",
            overrides=overrides({"datapool.args.constant": json.dumps(constant)}),
        )
        accuracy[constant] = scores_of(folder)["rewards/accuracies"]
    assert accuracy[False] >= learned and 0.4 <= accuracy[True] <= 0.6


def test_a_supervised_run_learns_the_colours_of_shapes(tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / "home"))
    accuracy = {}
    for constant in (False, True):
        folder = train(
            OF_TEXTS["supervised"],
            base_path_to_store_results=tmp_path,
            experiment_name=f"constant_{constant}",
            overrides=overrides({"datapool.args.constant": json.dumps(constant)}),
        )
        accuracy[constant] = scores_of(folder)["answers/exact_match"]
    assert accuracy[False] >= 0.9 and accuracy[True] <= 0.35
