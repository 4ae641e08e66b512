"""Every task of RL4LMs, trained by the main script from its own file, with local paths put in by `--set`.

Models are tiny, and speak the commonest words of the task's references (numbers and dates where it has none), so that
scores are not all 0; data are excerpts of the published sets. What is computed is everything that the file names, but
for `NOT_HERE`.
"""

from __future__ import annotations

import collections
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rl4lms_like.config.yaml_file import read_yaml
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.metrics import METRICS
from rl4lms_like.testing.models import make_causal_lm, make_seq2seq_lm, make_word_tokenizer, save_model
from tests.catalogue import Places
from tests.conftest import REPOSITORY
from tests.local_data import LOCAL_DATA

SCRIPT = REPOSITORY / "scripts" / "training" / "train_text_generation.py"
N_WORDS = 40
N_EVAL = 4

TASKS = {
    "common_gen": ("t5_ppo", "t5_nlpo", "t5_supervised", "t5_ppo_on_supervised"),
    "dialog": ("gpt2_ppo", "gpt2_nlpo", "gpt2_supervised"),
    "imdb_text_continuation": ("gpt2_ppo", "gpt2_nlpo", "gpt2_a2c", "gpt2_supervised"),
    "iwslt2017": ("t5_ppo", "t5_nlpo", "t5_supervised"),
    "narrative_qa": ("t5_ppo", "t5_nlpo"),
    "summarization": ("t5_ppo", "t5_nlpo", "t5_supervised"),
    "synthetic_generate_dates": ("gpt2_ppo",),
    "synthetic_generate_increasing_numbers": ("gpt2_ppo", "gpt2_nlpo", "gpt2_a2c", "gpt2_trpo", "t5_ppo", "bart_ppo"),
    "totto": ("t5_ppo", "t5_nlpo", "t5_supervised"),
}
FILES = [f"{task}/{name}.yml" for task, names in TASKS.items() for name in names]

NOT_HERE = {"spice": "SPICE's CoreNLP, which cannot be fetched by a test"}
"""Metrics that the files name and that are taken out of their lists."""

UNDEFINED = re.compile(r"diversity_metrics/(msttr|cond_entropy|entropy).*")
"""Keys that are NaN for texts as short as these."""

LOCAL = {
    "bert_score": {"model_type": "encoder", "num_layers": 2},
    "learned_reward": {"model_name": "classifier"},
    "intent_accuracy": {"model_name": "intents"},
    "common_gen_preference_model": {"model_name": "seq2seq"},
    "causal_perplexity": {"tokenizer_id": None},
}
"""Arguments of rewards and metrics that name models: roles of tiny ones; None is the tiny policy's own folder."""

RL = {
    "env.n_envs": 16,
    "env.args.max_prompt_length": 40,
    "env.args.max_episode_length": 8,
    "alg.args.n_steps": 8,
    "alg.args.learning_rate": 1e-3,
    "alg.policy.args.generation_kwargs.max_new_tokens": 8,
    "train_evaluation.n_iters": 1,
    "train_evaluation.eval_every": 1,
    "train_evaluation.generation_kwargs.max_new_tokens": 8,
    "train_evaluation.save_every": 1,
}
SUPERVISED = {
    "tokenizer.max_length": 40,
    "alg.generation_kwargs.max_new_tokens": 8,
    "alg.training_args.max_steps": 2,
    "alg.training_args.logging_steps": 2,
    "alg.training_args.per_device_train_batch_size": 4,
}
ALL = {
    "train_evaluation.eval_batch_size": 4,
    "train_evaluation.max_eval_samples": N_EVAL,
    "device": "cpu",
    "n_threads": 1,
}


@pytest.fixture(scope="module")
def places(shared_dir, language_data, tmp_path_factory) -> Places:
    return Places(tmp_path_factory.mktemp("places"), shared_dir)


def policy_of(places: Places, blocks) -> str:
    """A tiny model whose vocabulary are the commonest words of the task's references, else numbers and dates."""
    pool, seq2seq = blocks["datapool"]["id"], "gpt2" not in blocks["tokenizer"]["model_name"]
    folder = places.root / f"policy_{pool}_{'seq2seq' if seq2seq else 'causal'}"
    if not folder.is_dir():
        args = {**blocks["datapool"].get("args", {}), **data_of(places, pool)}
        samples = DATA_POOLS.get(pool, {"split": "train", **args}).samples
        references = " ".join(reference for sample in samples for reference in sample.references)
        words = [word for word, _ in collections.Counter(references.split()).most_common(N_WORDS)]
        words = words or [*(f"2022-10-0{day}" for day in range(1, 6)), *map(str, range(N_WORDS))]
        tokenizer = make_word_tokenizer(words, append_eos=seq2seq)
        make = make_seq2seq_lm if seq2seq else make_causal_lm
        save_model(folder, make("t5" if seq2seq else "gpt2", tokenizer), tokenizer)
    return str(folder)


def data_of(places: Places, pool: str) -> dict:
    """Where the pool finds its texts; a dummy needs none."""
    return {"data_dir": places.data(pool)} if pool in LOCAL_DATA else {}


def local_arguments(places: Places, id: str, policy: str) -> dict:
    return {
        name: policy if value is None else places.model(value) if isinstance(value, str) else value
        for name, value in LOCAL.get(id, {}).items()
    }


def overrides(places: Places, blocks) -> dict:
    """What is put in by `--set`: folders, and sizes that make the run short."""
    policy = policy_of(places, blocks)
    data = data_of(places, blocks["datapool"]["id"])
    changes = {f"datapool.args.{key}": value for key, value in data.items()} | {"tokenizer.model_name": policy}
    if "reward_fn" in blocks:
        changes |= {"alg.policy.args.model_name": policy, **RL}
        if "batch_size" in blocks["alg"]["args"]:
            changes |= {"alg.args.batch_size": 32, "alg.args.n_epochs": 1}
        id = blocks["reward_fn"]["id"]
        changes |= {f"reward_fn.args.{key}": value for key, value in local_arguments(places, id, policy).items()}
    else:
        changes |= {"alg.model_name": policy, **SUPERVISED}
    metrics = [
        {"id": metric["id"], "args": {**metric.get("args", {}), **local_arguments(places, metric["id"], policy)}}
        for metric in blocks["train_evaluation"]["metrics"]
        if metric["id"] not in NOT_HERE
    ]
    return changes | ALL | {"train_evaluation.metrics": json.dumps(metrics)}


def command(name: str, changes: dict, results: Path) -> list[str]:
    sets = [argument for place, value in changes.items() for argument in ("--set", f"{place}={value}")]
    flags = ["--config_path", f"task_configs/{name}", "--base_path_to_store_results", str(results)]
    return [str(SCRIPT), *flags, "--experiment_name", "run", *sets]


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def expected_keys(blocks) -> list[re.Pattern[str]]:
    """What the metrics of a file report, by the catalogue; a place holder is any text."""
    ids = [metric["id"] for metric in blocks["train_evaluation"]["metrics"] if metric["id"] not in NOT_HERE]
    keys = [key for id in ids for key in METRICS.entry(id).keys]
    assert len(keys) >= len(set(ids))
    return [re.compile(re.sub(r"\\\{\w*\\\}", ".+", re.escape(key))) for key in keys]


def check_evaluations(folder: Path, blocks) -> None:
    """Every key of every metric, in the scores and in each prediction, for both splits."""
    patterns = expected_keys(blocks)
    for split in ("val", "test"):
        evaluations = lines(folder / f"{split}_split_metrics.jsonl")
        assert evaluations[0]["epoch"] == 0 and evaluations[-1]["epoch"] > 0
        for evaluation in evaluations:
            scores = evaluation["metrics"]
            assert all(any(pattern.fullmatch(key) for key in scores) for pattern in patterns)
            assert all(any(pattern.fullmatch(key) for pattern in patterns) for key in scores)
            labelled = split == "val" or blocks["datapool"]["id"] != "totto"  # whose test split has no references
            undefined = [key for key, score in scores.items() if score is None]  # JSON has no NaN
            assert not labelled or all(UNDEFINED.fullmatch(key) for key in undefined), undefined
        predictions = json.loads((folder / f"epoch_0_{split}_split_predictions.json").read_text(encoding="utf-8"))
        assert len(predictions) == N_EVAL
        for prediction in predictions:
            assert evaluations[0]["metrics"].keys() <= prediction.keys()
            assert isinstance(prediction["generated_text"], str)


def check_rollouts(folder: Path, blocks) -> None:
    """Rewards are numbers, differ between episodes, and each part of a shaped one is on its own."""
    rollouts = lines(folder / "rollout_info.jsonl")
    assert len(rollouts) == RL["train_evaluation.n_iters"] == len(lines(folder / "training_info.jsonl"))
    assert all(math.isfinite(line["rollout_info/ep_rew"]) for line in rollouts)
    assert any(line["rollout_info/ep_rew"] != 0 and line["rollout_info/ep_rew_std"] > 0 for line in rollouts)
    if shaping := blocks["reward_fn"].get("args", {}).get("shaping_fn"):
        for part in (blocks["reward_fn"]["id"], shaping):
            assert all(f"rollout_info/reward/{part}" in line for line in rollouts)


@pytest.fixture
def from_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("name", FILES)
def test_a_task_is_trained_from_its_file(name, places, tmp_path, monkeypatch, from_the_repository):
    blocks, _ = read_yaml(REPOSITORY / "task_configs" / name)
    monkeypatch.setattr(sys, "argv", command(name, overrides(places, blocks), tmp_path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not ended.value.code
    folder = tmp_path / "rl4lm_exps" / "run"
    check_evaluations(folder, blocks)
    assert (folder / "model").is_dir() and (folder / "report.html").is_file()
    if "reward_fn" in blocks:
        check_rollouts(folder, blocks)


def test_the_script_is_a_program_of_its_own(places, tmp_path, from_the_repository):
    name = "synthetic_generate_increasing_numbers/gpt2_ppo.yml"
    blocks, _ = read_yaml(REPOSITORY / "task_configs" / name)
    outcome = subprocess.run(
        [sys.executable, *command(name, overrides(places, blocks), tmp_path)], capture_output=True, text=True
    )
    assert outcome.returncode == 0, outcome.stderr
    check_rollouts(tmp_path / "rl4lm_exps" / "run", blocks)


def test_only_what_cannot_be_had_is_taken_out_of_a_list_of_metrics():
    named = {
        metric["id"]
        for name in FILES
        for metric in read_yaml(REPOSITORY / "task_configs" / name)[0]["train_evaluation"]["metrics"]
    }
    assert NOT_HERE.keys() <= named
    assert LOCAL.keys() - named == {"common_gen_preference_model"}
