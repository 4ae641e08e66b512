"""Chat templates that write today's date: the day is that of the start of the run, also where it resumes later."""

from __future__ import annotations

import copy
import json
from datetime import date

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import TokenizerConfig
from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.sample import Sample
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.run import resume, train_config
from rl4lms_like.sampled_pairs import write_pairs
from rl4lms_like.system.errors import CheckpointError, MetricError
from rl4lms_like.training.inputs import build_tokenizer
from rl4lms_like.training.resuming.states import check_frozen
from tests.chat_models import CHATML, MARKED, save_chat_model
from tests.config_errors import raises_at
from tests.robustness.killed_runs import files_of

TODAY = "{{ strftime_now('%d %B %Y') }} "
DAY = "2020-02-03"
TURNS = [{"role": "user", "content": "Who wrote it?"}, {"role": "assistant", "content": "Nobody."}]


class FailsOnce(BaseMetric):
    """Fails in its third call, the first evaluation of a trained model, while `fails`."""

    fails = True

    def __init__(self):
        self.n_calls = 0

    def state_dict(self):
        return {"n_calls": self.n_calls}

    def load_state_dict(self, state):
        self.n_calls = state["n_calls"]

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        if self.fails and self.n_calls == 2:
            raise ValueError("the disk is full")
        self.n_calls += 1
        return {"n": (None, float(len(generated_texts)))}


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"), TODAY + CHATML)


@pytest.fixture
def rl(tiny_config, chat_dir):
    tiny_config["tokenizer"] = {"model_name": str(chat_dir), "chat_template": True}
    tiny_config["datapool"] = {"id": "film_opinions", "args": {"n_train": 6, "n_eval": 2}}
    tiny_config["env"]["args"]["max_prompt_length"] = 100
    tiny_config["alg"]["policy"]["args"]["model_name"] = str(chat_dir)
    metric = {"id": "tests.training.test_template_dates:FailsOnce"}
    tiny_config["train_evaluation"] |= {"n_iters": 2, "eval_every": 1, "save_every": 1, "metrics": [metric]}
    return tiny_config


@pytest.fixture
def supervised(chat_dir):
    return {
        "tokenizer": {"model_name": str(chat_dir), "chat_template": True},
        "datapool": {"id": "film_opinions", "args": {"n_train": 6, "n_eval": 2}},
        "alg": {
            "id": "supervised",
            "model_type": "causal",
            "model_name": str(chat_dir),
            "generation_kwargs": {"max_new_tokens": 4},
            "training_args": {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 1},
        },
        "train_evaluation": {"eval_batch_size": 4, "metrics": [{"id": "tests.training.test_template_dates:FailsOnce"}]},
    }


def on_day(mapping, day=DAY):
    """The config of a run that has started on this day, as `config.json` stores it."""
    mapping = copy.deepcopy(mapping)
    mapping["tokenizer"]["template_date"] = day
    return mapping


def run(mapping, folder):
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name="run", quiet=True)


@pytest.mark.parametrize("kind", ["rl", "supervised"])
@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_run_that_is_resumed_on_another_day_ends_with_the_same_files(kind, command, request, tmp_path, monkeypatch):
    mapping = request.getfixturevalue(kind)
    monkeypatch.setattr(FailsOnce, "fails", False)
    uninterrupted = run(on_day(mapping), tmp_path / "uninterrupted")

    monkeypatch.setattr(FailsOnce, "fails", True)
    with pytest.raises(MetricError, match="the disk is full"):
        run(on_day(mapping), tmp_path)
    monkeypatch.setattr(FailsOnce, "fails", False)
    folder = tmp_path / "rl4lm_exps" / "run"
    resumed = run(mapping, tmp_path) if command == "train" else resume(folder, quiet=True)

    assert resumed == folder
    assert files_of(resumed) == files_of(uninterrupted)


def test_a_new_run_stores_the_day_of_its_start(rl, tmp_path, monkeypatch):
    monkeypatch.setattr(FailsOnce, "fails", False)
    rl["train_evaluation"]["n_iters"] = 0
    first_day = date.today().isoformat()
    config = json.loads((run(rl, tmp_path) / "config.json").read_text())
    assert config["tokenizer"]["template_date"] in (first_day, date.today().isoformat())


def test_without_a_template_no_day_is_stored(tiny_config, tmp_path):
    tiny_config["train_evaluation"]["n_iters"] = 0
    config = json.loads((run(tiny_config, tmp_path) / "config.json").read_text())
    assert config["tokenizer"].get("template_date") is None


def test_a_run_of_another_day_is_another_run(rl, tmp_path, monkeypatch):
    with pytest.raises(MetricError):
        run(on_day(rl), tmp_path)
    monkeypatch.setattr(FailsOnce, "fails", False)
    rl["train_evaluation"]["n_iters"] = 0
    assert run(on_day(rl, "2020-02-04"), tmp_path).name == "run_2"


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["spans", "marks"])
def test_prompts_and_whole_conversations_have_the_date_of_the_config(template, tmp_path):
    folder = save_chat_model(tmp_path, TODAY + template)
    tokenizer = build_tokenizer(TokenizerConfig(model_name=str(folder), chat_template=True, template_date=DAY))
    chat = ChatTemplate(tokenizer)
    assert chat.with_rendered_prompt(Sample("0", "Who?")).rendered_prompt.startswith("03 February 2020 ")
    ids, _ = chat.encode(TURNS)
    assert tokenizer.decode(ids).startswith("03 February 2020 ")


def test_the_date_is_not_saved_with_the_tokenizer(tmp_path, chat_dir):
    tokenizer = build_tokenizer(TokenizerConfig(model_name=str(chat_dir), chat_template=True, template_date=DAY))
    tokenizer.save_pretrained(tmp_path)
    assert DAY not in (tmp_path / "tokenizer_config.json").read_text()
    loaded = build_tokenizer(TokenizerConfig(model_name=str(tmp_path), chat_template=True))
    assert "2020" not in ChatTemplate(loaded).render(TURNS)


def test_evaluate_and_generate_answer_as_the_run_did(rl, tmp_path, monkeypatch):
    """Greedy answers of a far from uniform model depend on the prompt."""
    monkeypatch.setattr(FailsOnce, "fails", False)
    rl["train_evaluation"] |= {"n_iters": 0, "generation_kwargs": {"do_sample": False, "max_new_tokens": 8}}
    folder = run(on_day(rl), tmp_path)
    of_run = json.loads((folder / "epoch_0_val_split_predictions.json").read_text())

    evaluate_run(folder, split="val", output=tmp_path / "evaluation")
    evaluated = json.loads((tmp_path / "evaluation" / "epoch_0_val_split_predictions.json").read_text())
    assert [row["generated_text"] for row in evaluated] == [row["generated_text"] for row in of_run]

    texts = generate_texts(folder, [row["prompt_text"] for row in of_run], decoding="greedy")
    assert [answers[0] for answers in texts] == [row["generated_text"] for row in of_run]


def test_pairs_are_continued_with_the_date_of_their_start(rl, tmp_path):
    rl["train_evaluation"]["metrics"] = []
    out = tmp_path / "pairs.jsonl"
    write_pairs(parse_config(on_day(rl)), out, max_prompts=2, report=lambda line: None)
    assert write_pairs(parse_config(rl), out, max_prompts=2, report=lambda line: None).template_date == DAY
    with raises_at("--out"):
        write_pairs(parse_config(on_day(rl, "2020-02-04")), out, max_prompts=2, report=lambda line: None)


@pytest.mark.parametrize(("day", "has_hint"), [(None, True), (DAY, False)])
def test_other_samples_of_a_run_without_a_stored_day_are_refused_with_the_way_out(day, has_hint):
    block = TokenizerConfig(model_name="any", chat_template=True, template_date=day)
    with pytest.raises(CheckpointError) as caught:
        check_frozen({"samples of the data pool": "a"}, {"samples of the data pool": "b"}, block)
    assert ("--set tokenizer.template_date=" in str(caught.value)) == has_hint


@pytest.mark.parametrize("day", ["yesterday", "2020-13-01", "03.02.2020", 20200203])
def test_what_is_no_day_is_an_error_in_the_config(day, rl):
    with raises_at("tokenizer.template_date", mentions="2026-11-20"):
        parse_config(on_day(rl, day))


def test_a_date_without_a_template_is_an_error(tiny_config):
    with raises_at("tokenizer.template_date", mentions="chat_template"):
        parse_config(on_day(tiny_config))


def test_yaml_reads_a_day_without_quotes(rl):
    assert parse_config(on_day(rl, date(2020, 2, 3))).to_dict()["tokenizer"]["template_date"] == DAY
