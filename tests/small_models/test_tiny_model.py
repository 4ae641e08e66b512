"""`embedded/tiny_model` is trained on the data pool of the config that describes it, the same in every process."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl4lms_like.catalogue import table_rows
from rl4lms_like.config.load import parse_config
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.run import train_config
from rl4lms_like.small_models.embedded import TinyModelConfig, partly_wrong, with_embedded_models
from rl4lms_like.small_models.warm_start import make_model, make_spelling_tokenizer, perplexity, train_language_model
from rl4lms_like.system.errors import ConfigError, DataPoolError, ModelError
from tests.config_errors import raises_at
from tests.configs import run_blocks

NAME = "embedded/tiny_model"
PLACES = ("tokenizer.model_name", "alg.policy.args.model_name")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / "home"))


@pytest.fixture
def blocks(tiny_config, tmp_path):
    """A run whose prompts are a letter and whose right answers are the next one."""
    rows = [{"prompt": f"After {a} comes", "answer": b} for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    tiny_config["datapool"] = {
        "id": "jsonl",
        "args": {"path": str(tmp_path / "rows.jsonl"), "prompt_column": "prompt", "reference_column": "answer"},
    }
    tiny_config["reward_fn"] = {"id": "exact_match"}
    tiny_config["train_evaluation"]["metrics"] = [{"id": "exact_match"}]
    tiny_config["tiny_model"] = {"steps": 3, "batch_size": 4, "n_layer": 1, "n_embd": 16, "n_positions": 24}
    for block in (tiny_config["tokenizer"], tiny_config["alg"]["policy"]["args"]):
        block["model_name"] = NAME
    return tiny_config


def folder_of(blocks):
    return with_embedded_models(parse_config(blocks)).tokenizer.model_name


def test_a_run_trains_it_and_keeps_its_name(blocks, tmp_path):
    folder = train_config(parse_config(blocks), base_path_to_store_results=tmp_path, quiet=True)
    written = json.loads((folder / "config.json").read_text())
    assert written["alg"]["policy"]["args"]["model_name"] == NAME
    assert evaluate_run(folder, split="val") and generate_texts(folder, ["After b comes"])


def test_settings_and_texts_decide_on_the_weights(blocks, tmp_path, monkeypatch):
    first = folder_of(blocks)
    weights = AutoModelForCausalLM.from_pretrained(first).state_dict()
    assert folder_of(blocks) == first
    assert folder_of({**blocks, "seed": 5}) == first
    assert folder_of({**blocks, "tiny_model": {**blocks["tiny_model"], "seed": 5}}) != first
    changed = {**blocks["datapool"], "args": {**blocks["datapool"]["args"], "seed": 5}}
    assert folder_of({**blocks, "datapool": changed}) != first
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / "elsewhere"))
    again = AutoModelForCausalLM.from_pretrained(folder_of(blocks)).state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_words_of_the_instruction_are_tokens_and_the_rest_is_spelled(blocks):
    tokenizer = AutoTokenizer.from_pretrained(folder_of(blocks))
    assert tokenizer.tokenize("After z comes") == ["After", "Ġ", "z", "Ġcomes"]
    assert make_spelling_tokenizer(["add 12"] * 3).tokenize("add 12") == ["add", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer("Ünseen 7!")["input_ids"]) == "Ünseen 7!"


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_only_the_response_of_a_pair_is_learned(family):
    """A prompt that is followed by two answers leaves one bit; prompts, which nothing foretells, add nothing."""
    pairs = [(f"{prompt}:", answer) for prompt in "abcdefgh" for answer in "xy"]
    tokenizer = make_spelling_tokenizer([prompt for prompt, _ in pairs])
    model = make_model(tokenizer, family=family, n_layer=1, n_embd=16)
    train_language_model(model, tokenizer, pairs, steps=150, batch_size=16)
    # of the answer and the end token
    assert math.log(perplexity(model, tokenizer, pairs)) == pytest.approx(0.693 / 2, abs=0.08)


def test_a_fraction_of_the_answers_is_wrong():
    pairs = [(str(number), str(number)) for number in range(1000)]
    for fraction in (0.0, 0.3, 1.0):
        wrong = sum(prompt != answer for prompt, answer in partly_wrong(pairs, 5000, fraction, seed=0)) / 5000
        assert wrong == pytest.approx(fraction, abs=0.03)


@pytest.mark.parametrize("place", PLACES)
def test_the_name_needs_the_block_and_the_block_the_name(place, blocks):
    plain = run_blocks()
    with raises_at("tiny_model"):
        parse_config({**plain, "tiny_model": {}})
    del blocks["tiny_model"]
    with raises_at(*PLACES, mentions="tiny_model"):
        parse_config(blocks)
    with pytest.raises(ModelError, match="tiny_model"):
        generate_texts(NAME, ["1"])
    with pytest.raises(ModelError, match=f"did you mean '{NAME}'"):
        generate_texts("embedded/tiny-model", ["1"])


def test_what_it_cannot_be_trained_on_is_named(blocks):
    with raises_at("tiny_model.n_positions"):
        folder_of({**blocks, "tiny_model": {**blocks["tiny_model"], "n_positions": 3}})
    del blocks["datapool"]["args"]["reference_column"]
    with pytest.raises(DataPoolError, match="reference"):
        folder_of(blocks)
    with pytest.raises(ValueError, match="n_head"):
        TinyModelConfig(n_embd=10, n_head=4)
    with pytest.raises(ConfigError):
        parse_config({**blocks, "tiny_model": {"n_embd": 10, "n_head": 4}})


def test_the_page_on_configuration_has_every_key_with_its_default(repository):
    page = (repository / "docs/configuration.md").read_text()
    assert all(row in page for row in table_rows(TinyModelConfig))
