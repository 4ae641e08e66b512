"""A judge on this machine: the answers are those of transformers' own greedy generation, one message at a time."""

from __future__ import annotations

import pickle
import re
import sqlite3

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.remote import LLMJudgeReward
from rl4lms_like.scoring.answering import AnsweringModel
from rl4lms_like.scoring.judge import LLMJudge
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import ModelError
from rl4lms_like.system.http_client import RemoteError
from rl4lms_like.testing import models
from tests.chat_models import CHATML, END, chat_tokenizer
from tests.expert_models import save_experts
from tests.local_models import JUDGED, LOCAL_MODELS

RATE = "{response}\n"
RESPONSES = [message.removesuffix("\n") for message in JUDGED[:3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("judge")
    LOCAL_MODELS["judge"](path)
    return str(path)


def texts_of(*responses: str, prompts=None) -> Texts:
    n = len(responses)
    return Texts(prompts or ["Say"] * n, list(responses), [["a reference"]] * n, [None] * n)


def plain_answer(folder, text, *, add_special_tokens=True, ends=None, n=16) -> str:
    """The greedy answer of plain transformers to one text, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(text, add_special_tokens=add_special_tokens, return_tensors="pt")["input_ids"]
    model.generation_config = GenerationConfig(eos_token_id=ends or tokenizer.eos_token_id, pad_token_id=0)
    with torch.no_grad():
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n)
    return tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


def test_scores_are_those_of_plain_greedy_answers(folder):
    answers = [plain_answer(folder, f"{response}\n") for response in RESPONSES]
    expected = [(float(re.search(r"Score: (\d)", answer)[1]) - 1) / 9 for answer in answers]
    assert expected == [1 / 9, 2 / 9, 3 / 9], answers
    for batch_size in (1, 2, 8):
        judge = LLMJudge(model_name=folder, template=RATE, batch_size=batch_size, max_new_tokens=16)
        assert judge.per_text(texts_of(*RESPONSES, RESPONSES[0])) == [*expected, expected[0]]


def test_comparisons_are_made_in_both_orders(folder):
    template = "A: {response_a} B: {response_b}\n"
    for first, second, winner in (("a film", "the sea", "A"), ("the sea", "a film", "B")):
        assert plain_answer(folder, f"A: {first} B: {second}\n") == f"Winner: {winner}"
    judge = LLMJudge(model_name=folder, template=template, compare_with="responses", max_new_tokens=16)
    assert judge.per_text(texts_of("the sea", "a film")) == [0.0, 1.0]


def test_chat_templates_and_their_end_of_turn(tmp_path):
    tokenizer = chat_tokenizer(CHATML)
    end_id = tokenizer.convert_tokens_to_ids(END)
    model = models.make_causal_lm("gpt2", tokenizer, scale=10.0, n_positions=256)
    model.generation_config.update(repetition_penalty=5.0, temperature=0.1, do_sample=True)
    path = models.save_model(tmp_path / "chat", model, tokenizer)

    answering = AnsweringModel(str(path), template_date=None, device="cpu")
    messages = ["Is it so?", "a longer message about the film", "x"]
    answers = {answer.index: answer for answer in answering.answers(messages, max_new_tokens=16, batch_size=2)}
    for index, message in enumerate(messages):
        rendered = f"<s><|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
        ends = [tokenizer.eos_token_id, end_id]
        assert answers[index].text == plain_answer(path, rendered, add_special_tokens=False, ends=ends)


def test_a_template_that_writes_the_date_needs_one(tmp_path):
    tokenizer = chat_tokenizer(
        "{{ strftime_now('%d') }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    path = models.save_model(tmp_path / "dated", models.make_causal_lm("gpt2", tokenizer), tokenizer)
    judge = LLMJudge(model_name=str(path), template=RATE)
    with pytest.raises(ModelError, match="set template_date to a day"):
        judge.per_text(texts_of("a"))
    dated = AnsweringModel(str(path), template_date="2026-11-20", device="cpu")
    assert dated.tokenizer.decode(dated._encoded("hello")) == "20hello<|im_end|>"


def test_a_mixture_of_experts_answers_also_if_it_was_trained_with_a_balancing_loss(tmp_path):
    tokenizer = models.make_tokenizer()
    answers = []
    for has_loss in (True, False):
        path = save_experts(tmp_path / str(has_loss), "mixtral", tokenizer, output_router_logits=has_loss)
        answering = AnsweringModel(str(path), template_date=None, device="cpu")
        answers.append(list(answering.answers(["Is it so?", "x"], max_new_tokens=4, batch_size=2)))
    assert answers[0] == answers[1]


def test_an_answer_that_is_cut_off_or_has_no_score_is_an_error(folder):
    with pytest.raises(ValueError, match=r"cut off its answers .*raise max_new_tokens"):
        LLMJudge(model_name=folder, template=RATE, max_new_tokens=1).per_text(texts_of(RESPONSES[0]))
    with pytest.raises(ValueError, match="answered 1 times without a valid score from 7 to 8"):
        LLMJudge(model_name=folder, template=RATE, score_range=(7.0, 8.0)).per_text(texts_of(RESPONSES[0]))
    with pytest.raises(ValueError, match="shorten the template or the responses, or lower max_new_tokens"):
        LLMJudge(model_name=folder, template=RATE).per_text(texts_of("a film " * 200))


def test_stored_answers_are_not_generated_again(folder, tmp_path):
    arguments = {"model_name": folder, "template": RATE, "cache": str(tmp_path), "max_new_tokens": 16}
    first = LLMJudge(**arguments).per_text(texts_of(*RESPONSES))
    limited = LLMJudge(**arguments, max_requests=1)
    assert limited.per_text(texts_of(*RESPONSES)) == first
    with sqlite3.connect(tmp_path / "answers.sqlite") as database:
        assert database.execute("SELECT count(*) FROM answers").fetchone() == (3,)
    with pytest.raises(RemoteError, match="2 requests are needed and 1 are left of max_requests: 1"):
        LLMJudge(model_name=folder, template=RATE, max_requests=1).per_text(texts_of(*RESPONSES[:2]))
    with pytest.raises(RemoteError, match="took longer than max_seconds"):
        LLMJudge(model_name=folder, template=RATE, max_seconds=1e-9).per_text(texts_of(RESPONSES[0]))


def test_a_pickled_judge_has_no_weights_and_the_same_scores(folder):
    judge = REWARDS.get("llm_judge", {"model_name": folder, "template": RATE})
    scores = judge.per_text(texts_of(*RESPONSES))
    content = pickle.dumps(judge)
    assert len(content) < 10_000
    assert pickle.loads(content).per_text(texts_of(*RESPONSES)) == scores


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "url, model: set both, or model_name"),
        ({"url": "http://127.0.0.1:1"}, "url, model: set both"),
        ({"url": "http://127.0.0.1:1", "model": "m", "model_name": "x"}, "url: is of a server.*model: is of a server"),
        ({"model_name": "x", "repeats": 0}, "repeats: is of a server"),
        ({"model_name": "x", "temperature": 1.0, "n_samples": 3}, "n_samples: is of a server.*temperature: is of a"),
        ({"url": "http://127.0.0.1:1", "model": "m", "max_new_tokens": 9}, "max_new_tokens: has no effect without"),
    ],
)
def test_arguments_of_a_server_and_of_a_model_exclude_each_other(arguments, message):
    with pytest.raises(ValueError, match=message):
        LLMJudge(**arguments)


def test_a_local_judge_is_local_and_its_folder_must_exist(folder):
    assert LLMJudgeReward(model_name=folder).is_local
    assert not LLMJudgeReward(url="http://127.0.0.1:1", model="m").is_local
    with pytest.raises(ModelError, match="no folder"):
        LLMJudge(model_name="./nowhere")
