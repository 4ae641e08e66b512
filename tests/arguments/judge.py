"""How each argument of `llm_judge` acts, as a reward and as a metric."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.system.errors import MetricError, RewardError
from tests.arguments.model_sights import batches, devices, precisions, trusted
from tests.arguments.seen import Acts, Silent, Tried
from tests.catalogue import Places
from tests.judge_server import Answer, JudgeServer, judge_server, varied


def unreadable(body: dict[str, Any]) -> str:
    return "I cannot say."


def busy(body: dict[str, Any]) -> str:
    raise Answer(503, Retry_After="0")


def waiting_for_another() -> Callable[[dict[str, Any]], str]:
    """Answers of which the first waits up to a second for a second request."""
    both = threading.Barrier(2)

    def answer(body: dict[str, Any]) -> str:
        with suppress(threading.BrokenBarrierError):
            both.wait(1.0)
        return varied(body)

    return answer


def scored_by(tried: Tried, judge: JudgeServer, times: int = 1) -> None:
    """Compute the scores with this server."""
    asked = replace(tried, args=tried.args | {"url": judge.url})
    with suppress(RewardError, MetricError):
        for _ in range(times):
            asked.scores()


def n_requests(tried: Tried) -> int:
    """Number of requests for two calls with the same texts."""
    with judge_server() as judge:
        scored_by(tried, judge, times=2)
    return len(judge.bodies)


def n_requests_to(answer: Callable[[dict[str, Any]], str]) -> Callable[[Tried], int]:
    """Number of requests with the first text to a server with these answers, if only one is sent at a time."""

    def requests(tried: Tried) -> int:
        with judge_server(answer) as judge:
            scored_by(replace(tried, args=tried.args | {"concurrency": 1}), judge)
        # The one after it may be on its way before its error ends the others.
        return judge.bodies.count(judge.bodies[0])

    return requests


def sends_several_at_once(tried: Tried) -> bool:
    with judge_server(waiting_for_another()) as judge:
        scored_by(tried, judge)
    return judge.most_at_once > 1


def header(tried: Tried) -> str | None:
    tried.patch.setenv("NAME_OF_WHO_ASKS", "somebody")
    with judge_server() as judge:
        scored_by(tried, judge)
    return judge.headers[0].get("X-Who")


def of_an_alias(tried: Tried) -> str:
    def answer(body) -> str:
        raise Answer(content={"model": "alias", "choices": [{"message": {"content": "Score: 4"}}]})

    with judge_server(answer) as judge:
        try:
            tried_once = replace(tried, args=tried.args | {"url": judge.url})
            tried_once.scores()
        except (RewardError, MetricError):
            return "refused"
    return "accepted"


def day_of_template(tried: Tried) -> str:
    """What the template of the model's tokenizer writes as today."""
    tokenizer = tried.component._answering_model.tokenizer
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}"
    return ChatTemplate(tokenizer).render([{"role": "user", "content": "?"}])


def _model(role: str) -> Callable[[Places], str]:
    return lambda places: places.model(role)


_OF_MODEL: dict[str, Any] = {"model_name": _model("judge"), "template": "{response}\n"}
_HERE: dict[str, Any] = {"others": _OF_MODEL, "without": ("url", "model")}
"""A model on this machine in place of a server."""

ROWS: dict[str, Acts | Silent] = {
    "url": Acts(lambda places: JudgeServer(lambda body: "Score: 4").url),
    "model": Acts("another"),
    "template": Acts("Rate: {response}"),
    "compare_with": Acts("references"),
    "score_regex": Acts(r"other: (\d+)"),
    "score_json": Acts("score"),
    "score_range": Acts([0.0, 20.0]),
    "rescale": Acts(False),
    "n_samples": Acts(2, n_requests, others={"temperature": 1.0}),
    "temperature": Acts(0.7),
    "request": Acts({"top_p": 0.5}),
    "repeats": Acts(0, n_requests_to(unreadable)),
    "concurrency": Acts(1, sends_several_at_once),
    "timeout_s": Acts(1e-6, others={"retries": 0}, refused="did not answer within 1e-06 s"),
    "retries": Acts(1, n_requests_to(busy)),
    "max_requests": Acts(1, refused="max_requests"),
    "max_seconds": Acts(1e-6, refused="max_seconds"),
    "headers_from_env": Acts({"X-Who": "NAME_OF_WHO_ASKS"}, header),
    "answer_models": Acts(["alias"], of_an_alias),
    "model_name": Acts(_model("other_judge"), **_HERE),
    "max_new_tokens": Acts(1, refused="raise max_new_tokens", **_HERE),
    "batch_size": Acts(1, sees=batches, **_HERE),
    "device": Acts("cuda:1", sees=devices, **_HERE | {"others": _OF_MODEL | {"device": "cpu"}}),
    "dtype": Acts("bfloat16", sees=precisions, **_HERE),
    "template_date": Acts("2026-11-20", sees=day_of_template, **_HERE),
    "trust_remote_code": Acts(True, sees=trusted, **_HERE),
    "cache": Acts(lambda places: str(places.root / "judge"), n_requests),
}
