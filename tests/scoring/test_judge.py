"""Language models as judges: a real server on this machine that answers, fails, waits and repeats secrets."""

from __future__ import annotations

import json
import pickle
import re
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import date

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.sample import Sample
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.call import score_episodes
from rl4lms_like.scoring.judge import AnswerCache, LLMJudge, json_value
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import RewardError
from rl4lms_like.system.http_client import RemoteError
from rl4lms_like.training.components import build_components
from tests.arguments.seen import Texts as Written
from tests.arguments.seen import episodes
from tests.config_errors import raises_at
from tests.configs import run_blocks
from tests.judge_server import Answer, judge_server

SECRET = "s3cr3t-t0ken"
WORDS = re.compile(r"\[Response\]\n(.*)\n\n", re.DOTALL)


def n_words(body) -> str:
    """Rate a response by its number of words, after another number that is not the rating."""
    words = len(WORDS.search(body["messages"][0]["content"])[1].split())
    return f"Not Score: 1, since it is longer.\n**Score:** {words}"


def longer_wins(body) -> str:
    """Prefer the longer response in both orders."""
    a, b = re.search(
        r"Response A\]\n(.*)\n\n\[Response B\]\n(.*)\n\n", body["messages"][0]["content"], re.DOTALL
    ).groups()
    return f"Winner: {'A' if len(a) > len(b) else 'B'}"


@pytest.fixture
def server():
    with judge_server(n_words) as judge:
        yield judge


@pytest.fixture
def judge(server):
    return lambda **args: REWARDS.get("llm_judge", {"url": server.url, "model": "judge", **args})


def scores(judge, *responses, prompts=None, references=None):
    n = len(responses)
    texts = Texts(prompts or ["Say"] * n, list(responses), references or [["one reference"]] * n, [None] * n)
    return judge.per_text(texts)


def failure(judge, *responses) -> str:
    with pytest.raises(RemoteError) as caught:
        scores(judge, *(responses or ["a", "b c", "d e f"]))
    return str(caught.value)


# --- scores -----------------------------------------------------------------------------------------------------------


def test_scores_are_mapped_to_0_to_1_in_the_order_of_the_texts(judge, server):
    responses = [" ".join("abcdefghij"[:length]) for length in (10, 1, 4, 7)]
    assert scores(judge(), *responses) == [1.0, 0.0, pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert all(body["model"] == "judge" and body["temperature"] == 0 for body in server.bodies)


def test_scores_can_be_kept_and_bounded(judge):
    assert scores(judge(rescale=False), "a b", "c") == [2.0, 1.0]
    assert scores(judge(score_range=None), "a " * 70) == [70.0]
    assert scores(judge(score_range=[0, 4]), "a b") == [0.5]
    assert "without a valid score from 1 to 10" in failure(judge(), "a " * 11)


@pytest.mark.parametrize(
    ("answer", "args", "value"),
    [
        ("Rating: [[7]]", {"score_regex": r"\[\[(\d+)\]\]"}, 7),
        ("first Score: 2, then Score: -3.5", {}, -3.5),
        ('{"score": 3, "why": "{short}"}', {"score_json": "score"}, 3),
        ('```json\n{"score": "4.5"}\n```', {"score_json": "score"}, 4.5),
    ],
)
def test_a_score_is_read_by_a_regex_or_from_json(answer, args, value, server, judge):
    server.answer = lambda body: answer
    assert scores(judge(score_range=None, **args), "a") == [value]


def test_the_last_object_with_the_key_counts():
    assert json_value('{"score": 1} {"score": 2} {"other": 3}', "score") == 2
    assert json_value('{"other": {"score": 1}} and {not json}', "score") is None
    assert json_value("{" * 50_000, "score") is None
    assert json_value('{"a": ' * 50_000 + '{"score": 2}', "score") is None
    assert json_value('{"score": 1} ' + '{"' * 900 + ' {"score": 2}', "score") == 2
    assert json_value('{"score": 1} ' + '{"' * 50_000, "score") is None, "no score of an answer that is not read whole"


@pytest.mark.parametrize("answer", ["Score: none", "Score: 11", "Score: 0.9", "", None, '{"score": true}'])
def test_an_unreadable_answer_is_asked_for_again_and_never_replaced(answer, server, judge):
    answers = [answer, answer, "Score: 10"]
    server.answer = lambda body: answers.pop(0)
    assert scores(judge(), "a") == [1.0] and len(server.bodies) == 3
    server.answer = lambda body: answer
    detail = failure(judge(repeats=1), "a")
    assert len(server.bodies) == 5
    assert (
        detail.startswith(server.url)
        and "answered 2 times" in detail
        and "score:" in detail
        and (answer or "") in detail
    )


@pytest.mark.parametrize("value", ["true", "null", "[1]", '"good"', "1e400", "NaN"])
def test_only_a_finite_number_is_a_score(value, server, judge):
    server.answer = lambda body: f'{{"score": {value}}}'
    assert "the key 'score'" in failure(judge(score_json="score", score_range=None), "a")


def test_an_answer_that_was_cut_off_has_no_score(server, judge, tmp_path):
    reasons = ["length", "stop"]

    def answer(body):
        message = {"content": "Score: 1" if reasons[0] == "length" else "Score: 10"}
        raise Answer(content={"choices": [{"message": message, "finish_reason": reasons.pop(0)}]})

    server.answer = answer
    assert scores(judge(cache=str(tmp_path)), "a") == [1.0], "the complete answer, of the second request"
    reasons = ["length"] * 3
    assert "cut off its answers (finish_reason: length)" in failure(judge(), "a")


@pytest.mark.parametrize(
    ("requested", "answers", "accepted"),
    [
        ("gpt-4o", "gpt-4o", True),
        ("gpt-4o", "gpt-4o-2024-08-06", True),
        ("judge-latest", "judge-2512", True),
        ("gpt-4o", "gpt-4o-mini", False),
        ("gpt-4o", "other", False),
        ("gpt-4o", None, True),
    ],
)
def test_an_answer_of_another_model_is_an_error_with_its_name(requested, answers, accepted, server, judge):
    def answer(body):
        raise Answer(content={"model": answers, "choices": [{"message": {"content": "Score: 10"}}]})

    server.answer = answer
    if accepted:
        assert scores(judge(model=requested), "a") == [1.0]
    else:
        assert f"answered as the model {answers!r} instead of 'gpt-4o'" in failure(judge(model=requested), "a")
        assert scores(judge(model=requested, answer_models=[answers]), "a") == [1.0]


@pytest.mark.parametrize("text", ['{"a": ' * 1_500_000, "score: " * 1_000_000], ids=["JSON", "words"])
def test_a_very_long_answer_is_an_error_within_the_limit_of_time(text, server, judge):
    server.answer = lambda body: text
    start = time.monotonic()
    assert "of at most" in failure(judge(timeout_s=3.0), "a") or "more than" in failure(judge(timeout_s=3.0), "a")
    server.answer = lambda body: text[:100_000]
    failure(judge(timeout_s=3.0, repeats=0, score_json="score"), "a")
    assert time.monotonic() - start < 10, "three answers, each within its limit"


def test_several_answers_are_averaged(server, judge):
    answers = iter([2, 4, 9, 10, 1, 1])
    server.answer = lambda body: f"Score: {next(answers)}"
    mine = judge(n_samples=3, temperature=1.0, rescale=False, concurrency=1)
    assert scores(mine, "a", "b") == [5.0, 4.0]
    assert {body["temperature"] for body in server.bodies} == {1.0}


def test_the_template_has_the_texts_as_they_are(server, judge):
    server.answer = lambda body: "Score: 5"
    mine = judge(template='{prompt}|{response}|{reference}|{"json": 1}', temperature=None, request={"max_tokens": 9})
    assert mine.needs_references and not judge().needs_references
    scores(mine, "{prompt} é\ud800", prompts=["{response}"], references=[["one", "two"]])
    assert server.messages == ['{response}|{prompt} é\ud800|one\ntwo|{"json": 1}']
    assert set(server.bodies[0]) == {"model", "messages", "max_tokens"}


def test_equal_texts_are_sent_once(server, judge):
    assert scores(judge(rescale=False), "a b", "c", "a b") == [2.0, 1.0, 2.0]
    assert len(server.bodies) == 2


def test_the_metric_is_the_mean_of_the_same_scores(server):
    metric = METRICS.get("llm_judge", {"url": server.url, "model": "judge", "rescale": False})
    results = compute_metric(metric, ["Say", "Say"], ["a b c", "d"], [[], []], [None, None], None, "val")
    assert results == {"semantic/llm_judge": ([3.0, 1.0], 2.0)}


def test_a_metric_with_references_leaves_out_texts_without_any(server):
    args = {"url": server.url, "model": "judge", "compare_with": "references"}
    server.answer = longer_wins
    results = compute_metric(METRICS.get("llm_judge", args), ["Say"] * 2, ["a b c", "d"], [["a"], []], [None] * 2)
    each, overall = results["semantic/llm_judge"]
    assert each[0] == overall == 1.0 and each[1] != each[1]


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_a_win_needs_both_orders(server, judge):
    mine = judge(compare_with="responses")
    for winner, expected in (("A", [0.5, 0.5]), ("B", [0.5, 0.5]), ("tie", [0.5, 0.5])):
        server.answer = lambda body, winner=winner: f"Winner: {winner}"
        assert scores(mine, "short", "much longer") == expected
    server.answer = longer_wins
    server.bodies.clear()
    assert scores(mine, "short", "much longer") == [0.0, 1.0]
    first, second = (message.split("[Response A]")[1] for message in sorted(server.messages, key=len))
    assert (first.index("short") < first.index("longer")) != (second.index("short") < second.index("longer"))


def test_a_response_is_compared_with_all_others_to_its_prompt(server, judge):
    server.answer = longer_wins
    responses, prompts = ["a", "aaa", "aa", "b", "bb", "aa"], ["x", "x", "x", "y", "y", "x"]
    assert scores(judge(compare_with="responses"), *responses, prompts=prompts) == [0, 1, 0.5, 0, 1, 0.5]
    assert len(server.bodies) == 2 * (3 + 1)  # equal texts are not compared, equal comparisons are made once


def test_a_response_is_compared_with_its_references(server, judge):
    server.answer = longer_wins
    mine = judge(compare_with="references")
    assert mine.needs_references
    assert scores(mine, "aaa", "a", references=[["a", "aaaa", "aa", "aaa"], ["aa"]]) == [(1 + 0 + 1 + 0.5) / 4, 0]


def test_the_order_of_a_comparison_is_averaged_over_samples(server, judge):
    answers = iter(["A", "tie", "A", "B", "B", "tie", "A", "B", "B", "A", "B", "B"])
    server.answer = lambda body: f"Winner: {next(answers)}"
    mine = judge(compare_with="responses", n_samples=3, temperature=1.0, concurrency=1)
    assert scores(mine, "a", "b") == [1.0, 0.0]
    assert scores(mine, "a", "c") == [0.5, 0.5]


def test_a_single_response_has_nothing_to_be_compared_with(judge):
    with pytest.raises(ValueError, match="single response to the prompt 'y'"):
        scores(judge(compare_with="responses"), "a", "b", "c", prompts=["x", "x", "y"])


# --- requests ---------------------------------------------------------------------------------------------------------


def test_concurrency_is_limited_and_keeps_the_order(server, judge):
    def late(body):
        time.sleep(0.05 if len(body["messages"][0]["content"]) % 2 else 0.0)
        return n_words(body)

    server.answer = late
    responses = ["a " * (1 + i % 10) + "b" * i for i in range(12)]
    expected = [float(len(text.split())) for text in responses]
    for limit in (1, 3):
        server.most_at_once = 0
        assert scores(judge(concurrency=limit, score_range=None), *responses) == expected
        assert server.most_at_once <= limit
    assert server.most_at_once > 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_temporary_failures_are_retried(status, server, judge):
    left = [Answer(status, Retry_After="0"), Answer(status, Retry_After="0")]

    def answer(body):
        if left:
            raise left.pop()
        return n_words(body)

    server.answer = answer
    assert scores(judge(retries=2, rescale=False), "a b") == [2.0] and len(server.bodies) == 3
    left += [Answer(status, Retry_After="0"), Answer(status, Retry_After="0")]
    assert f"answered {status}" in failure(judge(retries=1), "a b")


def test_a_late_answer_and_wrong_formats_are_errors(server, judge):
    server.answer = lambda body: time.sleep(0.5) or "Score: 1"
    assert "did not answer within 0.1 s" in failure(judge(timeout_s=0.1, retries=0), "a")
    for content in ({"choices": []}, {"error": "none"}, [1], {"choices": [{"text": "Score: 1"}]}):

        def answer(body, content=content):
            raise Answer(200, content)

        server.answer = answer
        assert "choices[0].message.content" in failure(judge(), "a")
    server.answer = lambda body: (_ for _ in ()).throw(Answer(401, "no key"))
    assert failure(judge(), "a").endswith("answered 401: 'no key'")


def test_the_number_of_requests_is_limited(server, judge):
    mine = judge(max_requests=4)
    scores(mine, "a", "b c", "d e f")
    assert "2 requests are needed and 1 are left" in failure(mine, "g", "h i")
    assert len(server.bodies) == 3
    server.answer = lambda body: "no idea"
    assert "max_requests: 2" in failure(judge(max_requests=2), "a") and len(server.bodies) == 5


def test_the_time_is_limited_over_all_calls(server, judge):
    server.answer = lambda body: time.sleep(0.6) or n_words(body)
    mine = judge(max_seconds=3.0)
    scores(mine, "a")
    server.answer = lambda body: time.sleep(8) or n_words(body)
    start = time.monotonic()
    assert "max_seconds" in failure(mine, "b") and time.monotonic() - start < 2.7
    server.bodies.clear()
    assert "max_seconds" in failure(mine, "c") and server.bodies == []


def test_secrets_are_sent_but_never_shown_or_stored(server, judge, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_AUTHORIZATION", f"Bearer {SECRET}")
    mine = judge(headers_from_env={"Authorization": "JUDGE_AUTHORIZATION"}, cache=str(tmp_path), repeats=0)
    server.answer = lambda body: f"your key is {SECRET}. Score: 10"
    assert scores(mine, "a") == [1.0]
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert all(SECRET.encode() not in file.read_bytes() for file in tmp_path.iterdir())
    assert SECRET.encode() not in pickle.dumps(mine)
    server.answer = lambda body: f"your key is {SECRET}"
    assert SECRET not in failure(mine, "b")

    def refuse(body):
        raise Answer(403, f"not {SECRET}")

    server.answer = refuse
    assert failure(mine, "b").endswith("answered 403: 'not ***'")


# --- cache ------------------------------------------------------------------------------------------------------------


def test_stored_answers_need_no_request_in_a_later_process(server, judge, tmp_path):
    args = {"cache": str(tmp_path / "new" / "folder"), "n_samples": 2, "temperature": 1.0}
    first = scores(judge(**args), "a b", "c")
    assert len(server.bodies) == 4
    assert scores(judge(**args), "c", "a b") == first[::-1]
    code = f"""
from rl4lms_like.rewards import REWARDS
from rl4lms_like.scoring.score import Texts
judge = REWARDS.get("llm_judge", {{"url": {server.url!r}, "model": "judge", **{args!r}}})
print(judge.per_text(Texts(["Say"] * 2, ["a b", "c"], [[], []], [None, None])))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == first and len(server.bodies) == 4
    scores(judge(**args | {"n_samples": 3}), "c")
    assert len(server.bodies) == 5  # the third sample
    for changed in ({"model": "other"}, {"template": "Rate [Response]\n{response}\n\n"}, {"temperature": 0.5}):
        scores(judge(**args | changed), "c")
    assert len(server.bodies) == 5 + 3 * 2


def test_stored_answers_are_read_again_with_another_regex(server, judge, tmp_path):
    server.answer = lambda body: "Score: 3, quality: 9"
    args = {"cache": str(tmp_path), "rescale": False}
    assert scores(judge(**args), "a") == [3.0]
    assert scores(judge(**args, score_regex=r"quality: (\d)"), "a") == [9.0]
    assert len(server.bodies) == 1
    server.answer = lambda body: "style: 7"
    assert scores(judge(**args, score_regex=r"style: (\d)"), "a") == [7.0]
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    "stored", ["not JSON", "5", "null", b"\xff", "[" * 100_000], ids=lambda stored: repr(stored)[:9]
)
def test_a_cache_with_an_answer_that_no_judge_stored_is_an_error_with_the_file(stored, server, judge, tmp_path):
    scores(judge(cache=str(tmp_path)), "a")
    with closing(sqlite3.connect(tmp_path / "answers.sqlite")) as database, database:
        database.execute("UPDATE answers SET answer = ?", (stored,))
    with pytest.raises(ValueError, match=r"answers\.sqlite was changed"):
        scores(judge(cache=str(tmp_path)), "a")


def test_answers_before_a_failure_are_kept(server, judge, tmp_path):
    def answer(body):
        if "bad" in body["messages"][0]["content"]:
            raise Answer(400)
        return n_words(body)

    server.answer = answer
    failure(judge(cache=str(tmp_path), concurrency=1), "a", "b c", "bad", "d")
    server.answer = lambda body: "Score: 9"
    mine = judge(cache=str(tmp_path), rescale=False)
    assert scores(mine, "a", "b c") == [1.0, 2.0] and scores(mine, "bad") == [9.0]


def test_several_writers_share_a_cache(tmp_path):
    caches = [AnswerCache(str(tmp_path)) for _ in range(4)]

    def write(number):
        for index in range(10):
            caches[number].write(f"{number}/{index}", f"answer {index}\ud800")
            caches[number].write("same", "value")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys = [f"{number}/{index}" for number in range(4) for index in range(10)]
    found = AnswerCache(str(tmp_path)).read([*keys, "same", "missing"])
    assert set(found) == {*keys, "same"} and found["3/9"] == "answer 9\ud800"


# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "mentions"),
    [
        ({"url": "localhost:8000"}, "url"),
        ({"template": "Rate {answer} and {response}"}, "{answer}"),
        ({"template": "Rate {prompt}"}, "{response}"),
        ({"template": "{response}", "compare_with": "responses"}, "{response_b}"),
        ({"score_regex": "Score: [0-9"}, "Score: [0-9"),
        ({"score_regex": r"\d+"}, "one group"),
        ({"score_regex": r"(\d)", "score_json": "score"}, "score_json"),
        ({"score_range": [1, 1]}, "score_range"),
        ({"compare_with": "responses", "rescale": False}, "rescale"),
        ({"n_samples": 2}, "temperature"),
        ({"request": {"messages": []}}, "messages"),
        ({"request": {"since": date(2026, 1, 1)}}, "request"),
        ({"template": ""}, "{response}"),
        ({"score_regex": ""}, "score_regex"),
        ({"headers_from_env": {"Authorization": "NOT_SET_ANYWHERE"}}, "NOT_SET_ANYWHERE"),
        ({"cache": "FILE/folder"}, "cache"),
    ],
)
def test_wrong_arguments_are_config_errors_before_a_model_is_loaded(args, mentions, tmp_path):
    (tmp_path / "FILE").write_text("not a folder")
    args = {key: str(tmp_path / value) if key == "cache" else value for key, value in args.items()}
    blocks = run_blocks()
    blocks["reward_fn"] = {"id": "llm_judge", "args": {"url": "http://127.0.0.1:9/v1", "model": "judge", **args}}
    with raises_at("reward_fn.args", mentions=mentions):
        build_components(parse_config(blocks))


def test_all_wrong_arguments_are_reported_together():
    with pytest.raises(ValueError) as caught:
        LLMJudge("ftp://host", "judge", template="{x}", score_regex="x", score_range=(2.0, 1.0), n_samples=2)
    assert all(
        name in str(caught.value) for name in ("url", "{x}", "{response}", "score_regex", "score_range", "temper")
    )


def test_a_failure_in_a_run_names_reward_and_sample(server, judge):
    server.answer = lambda body: "no idea"
    written = episodes(Written([Sample("one", "Say")], ["well"]))
    with pytest.raises(RewardError, match=r"LLMJudgeReward .*'one'.*no idea"):
        score_episodes(judge(), written)
