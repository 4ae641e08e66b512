"""Every file in task_configs/ is a run that can be started; those named after RL4LMs' files keep their values."""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path

import pytest

from rl4lms_like.config.load import load_config
from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.config.yaml_file import read_yaml
from rl4lms_like.python_api.python_run import train
from rl4lms_like.small_models import warm_start
from rl4lms_like.small_models.embedded import cache_folder, is_embedded
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "task_configs"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*.yml"))
NUMBERS = "synthetic_generate_increasing_numbers"
TASKS = {"common_gen", "dialog", "imdb_text_continuation", "iwslt2017", "narrative_qa", "summarization", "totto"}
TINY = [name for name in FILES if name.startswith("synthetic_") and "/tiny_" in name and "supervised" not in name]

DROPPED = {"alg.policy.args.apply_model_parallel", "env.args.context_start_token"}
"""Keys of RL4LMs' files that may be left out: one is for its own way to several GPUs, the other for seq2seq."""
THEIR_NAMES = {f"{NUMBERS}/blenderbot_ppo.yml": f"{NUMBERS}/blendorbot_ppo.yml"}

ANSWER_LENGTH = {
    "alg.policy.args.generation_kwargs.max_new_tokens": 50,
    "train_evaluation.generation_kwargs.max_new_tokens": 50,
}
CUT_ON_THE_RIGHT = {"alg.policy.args.prompt_truncation_side": "right"}
DEFAULT_WRITTEN_OUT = {"alg.policy.args.min_tokens_to_keep": 100}
ADDED = {
    "common_gen/t5_nlpo.yml": DEFAULT_WRITTEN_OUT,
    "common_gen/t5_nlpo_on_supervised.yml": DEFAULT_WRITTEN_OUT,
    "imdb_text_continuation/gpt2_a2c.yml": {"datapool.args.seed": 42},
    "narrative_qa/t5_nlpo.yml": ANSWER_LENGTH | CUT_ON_THE_RIGHT | DEFAULT_WRITTEN_OUT,
    "narrative_qa/t5_nlpo_on_supervised.yml": ANSWER_LENGTH | CUT_ON_THE_RIGHT | DEFAULT_WRITTEN_OUT,
    "narrative_qa/t5_ppo.yml": ANSWER_LENGTH,
    "totto/t5_nlpo.yml": DEFAULT_WRITTEN_OUT,
    "totto/t5_nlpo_on_supervised.yml": DEFAULT_WRITTEN_OUT,
}
"""What RL4LMs' files lack: an argument that the pool needs, a length and a side without which the run is not what the
rest of the file says, and a default that is worth reading."""
METRICS_CHANGED = {
    **{f"iwslt2017/t5_{kind}.yml": "a metric that stood twice" for kind in ("nlpo", "nlpo_on_supervised", "ppo")},
    "iwslt2017/t5_ppo_on_supervised.yml": "a metric that stood twice",
    "iwslt2017/t5_supervised.yml": "a metric that stood twice, and an English score of German texts",
    "narrative_qa/t5_nlpo.yml": "a truth value that was a text",
    "narrative_qa/t5_ppo.yml": "a truth value that was a text",
}
"""Files whose list of metrics is not RL4LMs' own, and why."""

FEW = {
    "train_evaluation.n_iters": 1,
    "train_evaluation.eval_batch_size": 8,
    "train_evaluation.save_model": "false",
    "datapool.args.n_samples": 8,
    "env.n_envs": 8,
}


def overrides(values) -> list[str]:
    return [f"{path}={value}" for path, value in values.items()]


def flat(blocks, path="") -> dict:
    """`alg.args.n_steps` -> value."""
    if not isinstance(blocks, dict):
        return {path: blocks}
    return {
        place: value for key, item in blocks.items() for place, value in flat(item, f"{path}.{key}".lstrip(".")).items()
    }


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def home(cache, monkeypatch):
    """A cache of embedded models that were trained for two steps only."""
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(cache))
    train_language_model = warm_start.train_language_model

    @functools.wraps(train_language_model)
    def briefly(model, tokenizer, texts, *, steps, **keys):
        return train_language_model(model, tokenizer, texts, steps=min(steps, 2), **keys)

    monkeypatch.setattr(warm_start, "train_language_model", briefly)
    return cache


def made_before(name):
    """Places of a file that name what another run makes."""
    mapping, _ = read_yaml(FOLDER / name)
    return [
        place for place, value in flat(mapping).items()
        if isinstance(value, str) and value.startswith(("results/", "rl4lm_exps/"))
    ]  # fmt: skip


def write_chat_data(folder):
    """Conversations, prompts and preferences in place of the user's own."""
    question, answer = ({"role": role, "content": "1 and 1?"} for role in ("user", "assistant"))
    worse = {"role": "assistant", "content": "no"}
    rows = {
        "chat/train.jsonl": {"messages": [question, answer]},
        "chat/val.jsonl": {"messages": [question, answer]},
        "chat/prompts.jsonl": {"messages": [question]},
        "preferences/train.jsonl": {"prompt": [question], "chosen": [answer], "rejected": [worse]},
        "preferences/val.jsonl": {"prompt": [question], "chosen": [answer], "rejected": [worse]},
    }
    for name, row in rows.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text((json.dumps(row) + "\n") * 64)


@pytest.mark.parametrize("name", FILES)
def test_every_file_passes_the_check(name, tiny_gpt2_dir, tmp_path, monkeypatch):
    """No model is loaded or made for it; what a run before it makes, or its reader downloads, is stood in for."""
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task_configs").symlink_to(FOLDER)
    (tmp_path / "tinystories.txt").write_text("Once upon a time there was a cat.")
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text('{"question": "1 and 1?", "answer": "#### 2"}\n' * 201)
    write_chat_data(tmp_path)
    config = load_config(FOLDER / name, [f"{place}={json.dumps(str(tiny_gpt2_dir))}" for place in made_before(name)])
    assert not cache_folder().exists()
    if "/tiny_" in name:
        model = config.alg.policy.args["model_name"] if isinstance(config, RunConfig) else config.alg.model_name
        assert is_embedded(model) or "on_supervised" in name
        assert (config.seed, config.device, config.n_threads) == (0, "cpu", 1)
        assert {notice.path for notice in config.notices} <= {"env.args.terminate_on_eos"}  # which its comment explains


def test_minibatches_of_few_episodes_are_noticed_in_rl4lms_files_and_nowhere_else():
    """Their `batch_size: 64` keeps its value, and holds one to three responses."""
    noticed = {
        name
        for name in FILES
        for notice in load_config(FOLDER / name, [f"{place}=gpt2" for place in made_before(name)], data=False).notices
        if notice.path == "alg.args.batch_size" and "episode" in notice.message
    }
    assert noticed and not [
        name for name in noticed if "/tiny_" in name or name.startswith(("quickstart", "tinystories"))
    ]
    responses_of_33_tokens = {f"{task}/t5_ppo.yml" for task in ("iwslt2017", "narrative_qa", "summarization", "totto")}
    assert noticed >= responses_of_33_tokens | {"imdb_text_continuation/gpt2_ppo.yml"}


def test_files_with_rl4lms_names_have_its_values(shared_dir):
    theirs = json.loads((shared_dir / "spec/rl4lms_configs.json").read_text())
    both = [name for name in FILES if THEIR_NAMES.get(name, name) in theirs]
    assert len(both) == len(theirs) == 44
    for name in both:
        own, _ = read_yaml(FOLDER / name)
        original = flat(theirs[THEIR_NAMES.get(name, name)])
        metrics = original["train_evaluation.metrics"]
        original["train_evaluation.metrics"] = sound_metrics(metrics, name.partition("/")[0])
        assert (original["train_evaluation.metrics"] != metrics) == (name in METRICS_CHANGED), name
        kept = {place: value for place, value in original.items() if place not in DROPPED or place in flat(own)}
        assert not kept.keys() & ADDED.get(name, {}).keys() - {"train_evaluation.generation_kwargs.max_new_tokens"}
        assert flat(own) == kept | ADDED.get(name, {}), name
        assert original.keys() - kept.keys() <= DROPPED


def sound_metrics(metrics, task):
    """Each metric once, truth values that are none read as such, translations into German scored as German."""
    sound = json.loads(json.dumps(metrics).replace('"True,"', "true"))
    if task == "iwslt2017":
        sound = json.loads(json.dumps(sound).replace('"language": "en"', '"language": "de"'))
    return [metric for index, metric in enumerate(sound) if metric not in sound[:index]]


@pytest.mark.parametrize("name", sorted(ADDED.keys() | METRICS_CHANGED.keys()))
def test_what_is_not_as_in_rl4lms_file_stands_in_its_header(name):
    text = (FOLDER / name).read_text()
    assert "# Not as in RL4LMs' file: " in text
    for place in ADDED.get(name, {}):
        key = place.rpartition(".")[2]
        words = {"prompt_truncation_side": "evaluation cuts prompts on the right"}.get(key, f"`{key}")
        assert words in " ".join(text.replace("# ", "").split()), place


@pytest.mark.parametrize("name", FILES)
def test_the_header_says_what_the_run_is_and_how_to_start_it(name):
    lines = (FOLDER / name).read_text().splitlines()
    header = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    assert 1 <= len(header) <= 24 and len(header[0]) > 30
    for word in " ".join(header).split():
        if word.startswith("task_configs/") and word.endswith((".yml", ".jsonl")):
            assert (FOLDER.parent / word).is_file(), word
    if name.partition("/")[0] in TASKS:
        text = "\n".join(header)
        assert f"rl4lms-like train task_configs/{name}" in text
        mapping, _ = read_yaml(FOLDER / name)
        named = {place for line in header for place in re.findall(r"--set ([\w.]+)=", line)}
        assert "datapool.args.data_dir" in named and "tokenizer.model_name" in named
        for place in named - {"datapool.args.data_dir"}:
            load_places(mapping, place)


def load_places(mapping, place):
    """A place that a header names is one of the file, up to its last key."""
    *parents, _ = place.split(".")
    for key in parents:
        mapping = mapping[int(key)] if isinstance(mapping, list) else mapping.get(key) or {}
        assert isinstance(mapping, dict | list), place


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_file_trains(name, home, tmp_path):
    batch = {} if "a2c" in name or "grpo" in name else {"alg.args.batch_size": 40}
    folder = train(FOLDER / name, base_path_to_store_results=tmp_path, overrides=overrides(FEW | batch))
    (line,) = (folder / "rollout_info.jsonl").read_text().splitlines()
    assert json.loads(line)["rollout_info/n_episodes"] >= 8
    scores = [json.loads(line) for line in (folder / "test_split_metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in scores] == [0, 1]


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("reasoning/")])
def test_a_file_with_questions_trains(name, home, tmp_path):
    pytest.importorskip("reasoning_gym", reason="needs the extra 'reasoning'")
    few = FEW | {"datapool.args.size": 200, "alg.args.batch_size": 20, "tiny_model.batch_size": 8}
    del few["datapool.args.n_samples"]
    folder = train(FOLDER / name, base_path_to_store_results=tmp_path, overrides=overrides(few))
    scores = [json.loads(line) for line in (folder / "val_split_metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in scores] == [0, 1]
    assert all(0 <= line["metrics"]["answers/reasoning_gym"] <= 1 for line in scores)


def test_the_files_of_the_algorithms_spend_the_same_tokens():
    """51,200, as their first lines say; every response has the same length."""
    names = [name for name in TINY if name.startswith(NUMBERS)]
    assert len(names) == 10
    for name in names:
        config = load_config(FOLDER / name)
        length, args = config.env.args["max_episode_length"], config.alg.args
        n_tokens = args["n_episodes"] * length if "n_episodes" in args else args["n_steps"] * config.env.n_envs
        assert n_tokens == length * config.env.n_envs and not config.env.args["terminate_on_eos"]
        assert n_tokens * config.train_evaluation.n_iters == 51_200, name


def test_reinforcement_learning_starts_from_what_the_supervised_run_leaves(home, tmp_path, monkeypatch):
    """The two commands that stand in the files, from a folder of one's own."""
    monkeypatch.chdir(tmp_path)
    texts = {"datapool.args.path": FOLDER / NUMBERS / "growing_numbers.jsonl"}
    few = {"alg.training_args.max_steps": 2, "train_evaluation.max_eval_samples": 4}
    supervised = FOLDER / NUMBERS / "tiny_gpt2_supervised.yml"
    train(supervised, experiment_name="growing_numbers", overrides=overrides(texts | few))
    folder = train(
        FOLDER / NUMBERS / "tiny_gpt2_ppo_on_supervised.yml", overrides=overrides(FEW | {"alg.args.batch_size": 40})
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["alg"]["policy"]["args"]["model_name"] == "rl4lm_exps/growing_numbers/model"
    assert (folder / "rollout_info.jsonl").is_file()
