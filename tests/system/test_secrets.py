"""What counts as a secret, what a config may say instead, and what is struck out of messages."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.system.secrets import is_secret_name, masked, secret_in, secret_issues, with_values, without_secrets
from tests.config_errors import raises_at
from tests.configs import run_blocks

SECRET = "correct-horse-battery-staple"
RANDOM = "9f86d081884c7d659a2feaa0c55ad015"


@pytest.mark.parametrize(
    "name",
    [
        *("token", "api_key", "apiKey", "APIKey", "x-api-key", "hf_token", "HF_TOKEN", "WANDB_API_KEY", "auth_token"),
        *("Authorization", "password", "db_password", "passwd", "client_secret", "credentials", "secret-key", "Cookie"),
        *("private_key", "Ocp-Apim-Subscription-Key"),
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("max_new_tokens", "tokenizer", "pad_token_as_eos_token", "eos_token_id", "context_start_token", "stop_token"),
        *("n_tokens", "result_keys", "key", "special_tokens", "min_tokens_to_keep", "tokenizer_id", "author", "monkey"),
        *("keyword", "max_tokens", "num_secrets"),
    ],
)
def test_names_that_only_look_alike(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({"api_key": SECRET}, "api_key"),
        ({"pin": {"password": 471147114711}}, "pin.password"),
        ({"headers": {"Accept": "json", "X-Own": SECRET}}, "headers.X-Own"),
        ({"credentials": {"name": SECRET}}, "credentials.name"),
        ({"kwargs": {"judge": {"token": [SECRET]}}}, "kwargs.judge.token.0"),
        ({"headers_from_env": {"Authorization": f"Bearer {SECRET}"}}, "headers_from_env.Authorization"),
        ({"url": f"https://me:{SECRET}@host/score"}, "url"),
        ({"url": f"https://{SECRET}@host/score"}, "url"),
        ({"url": f"https://host/score?x=1&api_key={SECRET}"}, "url"),
        ({"other": "hf_abcdefghijklmnopqrstuvwxyzABCDEF"}, "other"),
        ({"other": f"Bearer {SECRET}"}, "other"),
        ({"bearer": SECRET}, "bearer"),
        ({"openai_key": SECRET}, "openai_key"),
        ({"key": RANDOM}, "key"),
        ({"judge_keys": ["answer", RANDOM]}, "judge_keys.1"),
        ({"url": f"https://host/score#access_token={SECRET}"}, "url"),
        ({"template": f"curl -H 'Authorization: Bearer {RANDOM}' host"}, "template"),
        ({"template": "first hf_abcdefghijklmnopqrstuvwxyzABCDEF then"}, "template"),
    ],
)
def test_a_secret_in_a_config_is_a_mistake_that_does_not_show_it(args, path):
    blocks = run_blocks() | {
        "reward_fn": {"id": "python", "args": {"function": "yaml:dump", "kwargs": args, "x": args}}
    }
    with raises_at(f"reward_fn.args.kwargs.{path}", among_others=True) as caught:
        parse_config(blocks)
    assert SECRET not in str(caught.value) and "471147114711" not in str(caught.value)
    assert "hf_abc" not in str(caught.value) and RANDOM not in str(caught.value)


@pytest.mark.parametrize("token", ["!", "<|assistant|>", "the end of a text", 50256, ["yes", "no"]])
def test_a_token_of_a_language_model_is_no_secret(token):
    config = {"reward_fn": {"id": "x", "args": {"token": token}}}
    assert secret_issues(config) == [] and masked(config) == config


@pytest.mark.parametrize(
    "args",
    [
        {"key": "choices.0.message.content"},
        {"key": "generated_summary_text_v2_2024"},
        {"sort_key": "meta_info.question_id_1234567"},
        {"keys": ["inputDocumentTextEnglish2", "data/train_v1.2/part_00001.jsonl"]},
        {"bearer": "the ring bearer"},
        {"url": "https://host/page#section=introduction"},
        {"prompt": "Bearer certificates of incorporation; sk-learn-compatible-estimators-of-text"},
    ],
    ids=lambda args: next(iter(args)),
)
def test_names_of_columns_and_plain_texts_are_no_secrets(args):
    config = {"reward_fn": {"id": "x", "args": args}}
    assert secret_issues(config) == [] and masked(config) == config


def test_an_own_token_is_recognised_within_a_longer_text(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", RANDOM)
    config = {"reward_fn": {"id": "x", "args": {"prompt": f"say {RANDOM} aloud"}}}
    assert [issue.path for issue in secret_issues(config)] == ["reward_fn.args.prompt"]
    assert RANDOM not in str(masked(config))


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"n": 1, "own": [{"x": f"<{SECRET}>"}]}, "state['own'][0]['x']"),
        ({SECRET: 1}, "a key of state"),
        ({"other": "hf_abcdefghijklmnopqrstuvwxyzABCDEF"}, "state['other']"),
        ({"n": 1, "text": "plain", "none": None}, None),
        ({"text": "how do I install postgresql?", "model": "models/sk-fine-tuned-gpt2-medium-v2"}, None),
        ({"password": "postgres"}, "state['password']"),
    ],
)
def test_a_secret_in_what_a_component_remembers_is_found(state, place, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("POSTGRES_PASSWORD", "postgres")
    assert secret_in(state) == place


def test_a_long_secret_is_not_shown_in_part_where_a_message_shortens_it():
    blocks = run_blocks()
    blocks["reward_fn"] = {"id": "increasing_numbers", "args": {"min_tokens": "hf_" + "abcdefghij" * 10}}
    with raises_at("reward_fn.args.min_tokens", among_others=True) as caught:
        parse_config(blocks)
    assert "abcdef" not in str(caught.value)


def test_the_value_of_an_own_token_is_recognised_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    blocks = run_blocks()
    blocks["datapool"]["args"]["prompt"] = SECRET
    with raises_at("datapool.args.prompt") as caught:
        parse_config(blocks)
    assert SECRET not in str(caught.value)


def test_a_variable_s_name_stays_in_the_config_and_its_value_reaches_the_component(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    args = {"api_key": "${JUDGE_KEY}", "more": {"list": ["${JUDGE_KEY}", 1]}, "price": "${5}", "text": "a ${JUDGE_KEY}"}
    config = {"reward_fn": {"id": "x", "args": args}}
    assert secret_issues(config) == [] and masked(config) == config
    assert with_values(args) == {
        "api_key": SECRET, "more": {"list": [SECRET, 1]}, "price": "${5}", "text": "a ${JUDGE_KEY}"
    }  # fmt: skip


def test_a_variable_that_is_not_set_is_named():
    with pytest.raises(RL4LMsLikeError, match=r"api_key.*NOT_SET_AT_ALL"):
        with_values({"api_key": "${NOT_SET_AT_ALL}"})


def test_a_variable_is_not_looked_up_just_anywhere():
    blocks = run_blocks()
    blocks["tokenizer"]["model_name"] = "${MODEL}"
    with raises_at("tokenizer.model_name"):
        parse_config(blocks)


def test_what_is_written_has_no_secret_whoever_made_the_config():
    config = {"reward_fn": {"args": {"api_key": SECRET, "n": 3, "url": f"https://me:{SECRET}@host", "key": "k"}}}
    assert masked(config) == {"reward_fn": {"args": {"api_key": "***", "n": 3, "url": "https://***@host", "key": "k"}}}


def test_messages_show_no_secret_of_the_process(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("SLACK_BOT_TOKEN", "another-secret-value")
    monkeypatch.setenv("JUDGE_PIN", "4711-0815")
    monkeypatch.setenv("PLAIN", "nothing-special")
    with_values({"pin": "${JUDGE_PIN}"})
    message = f"{SECRET} another-secret-value 4711-0815 nothing-special https://a:b@host/x?token=1&n=2"
    assert without_secrets(message) == "*** *** *** nothing-special https://***@host/x?token=***&n=2"


@pytest.mark.parametrize(
    "secret",
    ["a'\"b\\c-4711", "-----BEGIN KEY-----\nMIIE\n-----END KEY-----\n", "schlüssel-4711\n"],
    ids=["quotes", "lines", "letters"],
)
def test_a_secret_is_struck_out_however_a_message_writes_it(secret, monkeypatch):
    monkeypatch.setenv("OPENAI_KEY", secret)
    for message in (secret, secret.strip(), repr(secret), json.dumps(secret), str(KeyError(secret))):
        assert without_secrets(f"<{message}>").strip("<>'\"\n") == "***"


@pytest.mark.parametrize("text", ["git+ssh://git@github.com/x", "https://host:80/a@b", "s3://bucket/x?n=1", "a@b.c"])
def test_what_is_no_login_stays(text):
    assert without_secrets(text) == text
