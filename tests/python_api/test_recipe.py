"""The recipe of the page on hyper-parameters: its Python is the same run as its file."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from rl4lms_like import Run
from rl4lms_like.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hyperparameters.md"
FILE = ROOT / "task_configs" / "film_opinions" / "smollm2_grpo.yml"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_settings_for_larger_models_are_accepted(tiny_gpt2_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(settings = .*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    settings = names["settings"] | {"max_new_tokens": 8, "micro_batch_size": 512}  # the tiny model has few positions
    run = Run(str(tiny_gpt2_dir), ["One", "Two"] * 8, "sentiment", algorithm="grpo", **settings)
    assert run.config.alg.id == "grpo" and run.config.alg.args["learning_rate"] == 1e-4


def test_the_recipe_in_python_is_that_of_the_file(tiny_gpt2_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if MODEL in block]
    names: dict = {}
    exec(code.replace(MODEL, str(tiny_gpt2_dir)).replace("run.train()", ""), names)

    values = [f"{path}={tiny_gpt2_dir}" for path in ("tokenizer.model_name", "alg.policy.args.model_name")]
    of_file = asdict(load_config(FILE, values))
    of_file["train_evaluation"]["metrics"] = []  # a run in Python is evaluated by its own reward
    assert asdict(names["run"].config) == of_file
