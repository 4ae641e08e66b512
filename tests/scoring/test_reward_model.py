"""Any reward model: how it reads prompt and response, and what becomes of its logits."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rl4lms_like.scoring.classifier import Classifier, RewardModelScore
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing.models import make_word_tokenizer, save_model
from tests.local_models import LOCAL_MODELS
from tests.texts import texts

PROMPTS, RESPONSES = ["the film", "count with me", "on the museum"], [" was good", "", " a joy from start to finish"]
TEXTS = texts(RESPONSES, prompts=PROMPTS)
CHAT = "{% for m in messages %}[SEP] {{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def regressor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("regressor")
    LOCAL_MODELS["regressor"](folder)
    return str(folder)


@pytest.fixture(scope="module")
def nli(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nli")
    LOCAL_MODELS["nli"](folder)
    return str(folder)


def scorer(folder, **options):
    return RewardModelScore(folder, batch_size=2, **options)


def test_one_logit_is_the_reward_as_it_is(regressor):
    logits = Classifier(regressor, batch_size=8).logits([a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)])
    assert scorer(regressor).per_text(TEXTS) == pytest.approx(logits[:, 0].tolist(), abs=1e-5)
    chances = scorer(regressor, value="probability").per_text(TEXTS)
    assert chances == pytest.approx(logits[:, 0].sigmoid().tolist(), abs=1e-5)


def test_it_is_scaled_before_it_is_clipped(regressor):
    plain = scorer(regressor).per_text(TEXTS)
    limit = max(map(abs, plain))
    clipped = scorer(regressor, scale=-2.0, clip=limit).per_text(TEXTS)
    assert clipped == pytest.approx([max(-limit, min(limit, -2 * value)) for value in plain], abs=1e-5)
    assert limit in map(abs, clipped)


@pytest.mark.parametrize("label", [2, "CONTRADICTION"])
def test_one_label_of_several(nli, label):
    logits = Classifier(nli, batch_size=8).logits([a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)])
    assert scorer(nli, label=label).per_text(TEXTS) == pytest.approx(logits[:, 2].tolist(), abs=1e-5)
    chances = scorer(nli, label=label, value="probability").per_text(TEXTS)
    assert chances == pytest.approx(logits.softmax(1)[:, 2].tolist(), abs=1e-5)


def test_several_labels_need_a_choice(nli):
    with pytest.raises(ModelError):
        scorer(nli).per_text(TEXTS)


def test_templates(regressor):
    model = Classifier(regressor, batch_size=8)
    pairs = model.logits(PROMPTS, RESPONSES)[:, 0].tolist()
    assert scorer(regressor, template="pair").per_text(TEXTS) == pytest.approx(pairs, abs=1e-5)
    responses = model.logits(RESPONSES)[:, 0].tolist()
    assert scorer(regressor, template="response").per_text(TEXTS) == pytest.approx(responses, abs=1e-5)


def test_a_chat_is_put_as_the_tokenizer_of_the_model_says(tmp_path):
    LOCAL_MODELS["regressor"](tmp_path)
    with pytest.raises(ModelError):
        scorer(str(tmp_path), template="chat").per_text(TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path)
    model = scorer(str(tmp_path), template="chat")
    got = model.per_text(TEXTS)
    for value, prompt, response in zip(got, PROMPTS, RESPONSES, strict=True):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            expected = model.classifier.model(ids["input_ids"], ids["attention_mask"]).logits
        assert value == pytest.approx(float(expected), abs=1e-5)


def test_a_chat_template_that_writes_today_needs_a_day(tmp_path):
    LOCAL_MODELS["regressor"](tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = "{{ strftime_now('%d') }} " + CHAT
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="set template_date of the reward"):
        scorer(str(tmp_path), template="chat").per_text(TEXTS)

    scored = scorer(str(tmp_path), template="chat", template_date="2026-11-20").per_text(TEXTS)
    tokenizer.chat_template = "20 " + CHAT
    tokenizer.save_pretrained(tmp_path)
    assert scored == scorer(str(tmp_path), template="chat").per_text(TEXTS)


# --- the end-of-text token -------------------------------------------------------------------------------------------

WORDS = ["film", *"abcdefghij"]


def pairs(n, seed):
    """Texts of eight letters; the first of each pair has one letter a more."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(n):
        both = torch.randint(1, 10, (2, 8), generator=generator)
        n_good = int(torch.randint(0, 7, (1,), generator=generator))
        for characters, count in zip(both, (n_good + 1, n_good), strict=True):
            characters[torch.randperm(8, generator=generator)[:count]] = 0
        made.append(tuple(" " + " ".join("abcdefghij"[i] for i in characters) for characters in both))
    return made


def accuracy(model, asked):
    chosen, rejected = (model.per_text(texts(side, prompts=["film"] * len(asked))) for side in zip(*asked, strict=True))
    return sum(one > two for one, two in zip(chosen, rejected, strict=True)) / len(asked)


@pytest.fixture(scope="module")
def trained_with_eos(tmp_path_factory):
    """A reward model (Bradley-Terry) of texts that all end with the end-of-text token, as other trainers make it."""
    tokenizer = make_word_tokenizer(WORDS)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = AutoConfig.for_model(
        "llama", vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, eos_token_id=1, **size
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(80):
        written = [
            f"film{text} {tokenizer.eos_token}" for side in zip(*pairs(32, 100 + step), strict=True) for text in side
        ]
        encoded = tokenizer(written, padding=True, return_tensors="pt")
        chosen, rejected = model(encoded["input_ids"], encoded["attention_mask"]).logits[:, 0].chunk(2)
        optimizer.zero_grad()
        (-torch.nn.functional.logsigmoid(chosen - rejected).mean()).backward()
        optimizer.step()
    return save_model(tmp_path_factory.mktemp("trained_with_eos"), model, tokenizer)


def test_a_reward_model_is_right_about_pairs_with_the_end_token_that_it_was_trained_with(trained_with_eos):
    asked = pairs(200, seed=1)
    folder = str(trained_with_eos)
    with_eos, without = (accuracy(scorer(folder, append_eos=append), asked) for append in (True, False))
    assert with_eos > 0.97
    assert without < with_eos - 0.05


def test_the_end_token_is_what_the_models_config_says_where_the_argument_does_not(trained_with_eos, tmp_path, caplog):
    folder = str(trained_with_eos)
    with_eos, without = (scorer(folder, append_eos=append).per_text(TEXTS) for append in (True, False))
    assert not caplog.records
    assert scorer(folder).per_text(TEXTS) == without
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "set append_eos" in record.getMessage()
    caplog.clear()
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.append_eos = True
    save_model(tmp_path, model, AutoTokenizer.from_pretrained(folder))
    assert json.loads((tmp_path / "config.json").read_text())["append_eos"] is True
    assert scorer(str(tmp_path)).per_text(TEXTS) == with_eos
    assert scorer(str(tmp_path), append_eos=False).per_text(TEXTS) == without
    assert not caplog.records


def test_the_end_token_is_written_once_and_survives_the_cut(tmp_path):
    LOCAL_MODELS["causal_regressor"](tmp_path)
    (text,) = RESPONSES[2:]
    for max_length in (None, 6):
        model = Classifier(str(tmp_path), batch_size=2, max_length=max_length)
        ended = text + model.tokenizer.eos_token
        assert torch.equal(model.logits([text], append_eos=True), model.logits([ended]))
    whole = Classifier(str(tmp_path), batch_size=2)
    assert torch.equal(whole.logits([ended], append_eos=True), whole.logits([ended]))


def test_a_tokenizer_without_an_end_token_cannot_append_one(regressor):
    with pytest.raises(ModelError):
        scorer(regressor, append_eos=True).per_text(TEXTS)
