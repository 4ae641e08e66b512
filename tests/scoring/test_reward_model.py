"""Any reward model: how it reads prompt and response, and what becomes of its logits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from rl4lms_like.core.errors import ModelError
from rl4lms_like.scoring.classifier import classifier
from rl4lms_like.scoring.reward_model import RewardModelScorer
from tests.local_models import LOCAL_MODELS

PROMPTS, RESPONSES = ["the film", "count with me", "on the museum"], [" was good", "", " a joy from start to finish"]
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
    return RewardModelScorer(classifier(folder, batch_size=2), **options)


def test_one_logit_is_the_reward_as_it_is(regressor):
    logits = classifier(regressor, batch_size=8).logits([a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)])
    assert scorer(regressor).scores(PROMPTS, RESPONSES) == pytest.approx(logits[:, 0].tolist(), abs=1e-5)
    chances = scorer(regressor, value="probability").scores(PROMPTS, RESPONSES)
    assert chances == pytest.approx(logits[:, 0].sigmoid().tolist(), abs=1e-5)


def test_it_is_scaled_before_it_is_clipped(regressor):
    plain = scorer(regressor).scores(PROMPTS, RESPONSES)
    limit = max(map(abs, plain))
    clipped = scorer(regressor, scale=-2.0, clip=limit).scores(PROMPTS, RESPONSES)
    assert clipped == pytest.approx([max(-limit, min(limit, -2 * value)) for value in plain], abs=1e-5)
    assert limit in map(abs, clipped)


@pytest.mark.parametrize("label", [2, "CONTRADICTION"])
def test_one_label_of_several(nli, label):
    logits = classifier(nli, batch_size=8).logits([a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)])
    assert scorer(nli, label=label).scores(PROMPTS, RESPONSES) == pytest.approx(logits[:, 2].tolist(), abs=1e-5)
    chances = scorer(nli, label=label, value="probability").scores(PROMPTS, RESPONSES)
    assert chances == pytest.approx(logits.softmax(1)[:, 2].tolist(), abs=1e-5)


def test_several_labels_need_a_choice(nli):
    with pytest.raises(ModelError, match="say which label counts"):
        scorer(nli).scores(PROMPTS, RESPONSES)


def test_templates(regressor):
    model = classifier(regressor, batch_size=8)
    pairs = model.logits(PROMPTS, RESPONSES)[:, 0].tolist()
    assert scorer(regressor, template="pair").scores(PROMPTS, RESPONSES) == pytest.approx(pairs, abs=1e-5)
    responses = model.logits(RESPONSES)[:, 0].tolist()
    assert scorer(regressor, template="response").scores(PROMPTS, RESPONSES) == pytest.approx(responses, abs=1e-5)


def test_a_chat_is_put_as_the_tokenizer_of_the_model_says(tmp_path):
    LOCAL_MODELS["regressor"](tmp_path)
    with pytest.raises(ModelError, match="has no chat template"):
        scorer(str(tmp_path), template="chat").scores(PROMPTS, RESPONSES)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path)
    model = scorer(str(tmp_path), template="chat")
    got = model.scores(PROMPTS, RESPONSES)
    for value, prompt, response in zip(got, PROMPTS, RESPONSES, strict=True):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            expected = model.classifier.frozen.model(ids["input_ids"], ids["attention_mask"]).logits
        assert value == pytest.approx(float(expected), abs=1e-5)
