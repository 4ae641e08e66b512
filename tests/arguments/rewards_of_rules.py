"""How each argument of the rewards acts that load no model: by id, then by argument."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rl4lms_like.rewards.synthetic import RewardSentencesWithDates
from rl4lms_like.system.errors import RewardError
from rl4lms_like.system.functions import NamedFunction
from tests.arguments import judge
from tests.arguments.rules import ANSWERS, NUMBERS, SHARED, Rows
from tests.arguments.seen import PAIRS, Acts, Sight, Texts, Tried, pairs
from tests.catalogue import Places

# --- functions of a user ---------------------------------------------------------------------------------------------


def share_of_spaces(*, prompts, responses, references, meta_infos, vowels):
    """Another function than the catalogue's."""
    return [text.count(" ") / max(len(text), 1) for text in responses]


def texts_of_a_call(
    *, references, vowels, prompts=(), responses=None, meta_infos=(), prompt="", response="", meta_info=None
):
    """How many texts it is called with, of all or of one."""
    return 1 if responses is None else [len(responses)] * len(responses)


_under_way: list[str] = []


async def calls_under_way(*, prompt, response, references, meta_info, vowels):
    """How many of its calls wait at the same time."""
    _under_way.append(response)
    await asyncio.sleep(0)
    found = len(_under_way)
    await asyncio.sleep(0)
    _under_way.remove(response)
    return found


async def takes_its_time(*, prompts, responses, references, meta_infos, vowels):
    """Ones, after a while."""
    await asyncio.sleep(0.1)
    return [1.0] * len(responses)


def vowels_of_steps(*, steps, factor=1.0):
    """Vowels of each step."""
    return [factor * sum(character in "aeiou" for character in step) for step in steps]


async def calls_for_steps_under_way(*, steps, response):
    """How many of its calls wait at the same time, for each step."""
    found = await calls_under_way(prompt="", response=response, references=[], meta_info=None, vowels="")
    return [found] * len(steps)


async def steps_take_their_time(*, steps):
    """Ones, after a while."""
    await asyncio.sleep(0.1)
    return [1.0] * len(steps)


# --- servers ---------------------------------------------------------------------------------------------------------


@dataclass
class Scorer:
    """A server, and what it was asked.

    Args:
        url: its address.
        asked: how many texts, of each request.
        headers: of each request.
        most_at_once: requests that it had at the same time.
    """

    url: str
    asked: list[int] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0


def started(
    *first: tuple[int, dict[str, str]], patience_s: float = 0.0, poll_s: float = 0.5
) -> tuple[ThreadingHTTPServer, Scorer]:
    """A server that gives a point for each letter.

    Args:
        first: status and headers of its first answers; then it scores.
        patience_s: seconds that its first request waits for a second.
        poll_s: seconds between its looks whether it is to end.
    """
    changed, answers, here = threading.Condition(), list(first), 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal here
            texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["responses"]
            with changed:
                here += 1
                scorer.asked.append(len(texts))
                scorer.headers.append(dict(self.headers))
                scorer.most_at_once = max(scorer.most_at_once, here)
                status, headers = answers.pop(0) if answers else (200, {})
                changed.notify_all()
                changed.wait_for(lambda: len(scorer.asked) > 1, patience_s)
                here -= 1
            body = json.dumps({"rewards": [len(text) for text in texts]}).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Nothing on the console."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scorer = Scorer(f"http://127.0.0.1:{server.server_port}/score")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": poll_s}, daemon=True).start()
    return server, scorer


@contextmanager
def scorer_of(*first: tuple[int, dict[str, str]], patience_s: float = 0.0) -> Iterator[Scorer]:
    """A server that is shut down."""
    server, scorer = started(*first, patience_s=patience_s, poll_s=0.01)
    try:
        yield scorer
    finally:
        server.shutdown()
        server.server_close()


def server_of_letters(places: Places) -> str:
    """The address of another scorer than the catalogue's, whose points are words."""
    return started()[1].url


def paid_by(tried: Tried, scorer: Scorer) -> Any:
    """The scores, asked of this server."""
    return replace(tried, args=tried.args | {"url": scorer.url}).scores()


def requests(tried: Tried) -> list[int]:
    """How many texts each request has."""
    with scorer_of() as scorer:
        paid_by(tried, scorer)
    return sorted(scorer.asked)


def requests_in_vain(tried: Tried) -> int:
    """How often a server is asked that is always busy."""
    with scorer_of(*[(503, {})] * 20) as scorer, pytest.raises(RewardError, match="503"):
        paid_by(tried, scorer)
    return len(scorer.asked)


def requests_at_once(tried: Tried) -> bool:
    """Whether a server has more than one request at the same time."""
    with scorer_of(patience_s=0.4) as scorer:
        paid_by(tried, scorer)
    return scorer.most_at_once > 1


def pauses_after(status: int, headers: Mapping[str, str]) -> Sight:
    """How long is waited before a server is asked again that answered so twice."""

    def pauses(tried: Tried) -> list[float]:
        slept: list[float] = []
        sleep = asyncio.sleep

        async def listed(seconds: float, *args: Any) -> Any:
            slept.append(seconds)
            return await sleep(0, *args)

        tried.patch.setattr(asyncio, "sleep", listed)
        with scorer_of((status, dict(headers)), (status, dict(headers))) as scorer:
            paid_by(tried, scorer)
        return [seconds for seconds in slept if seconds]

    return pauses


def header_of_a_request(tried: Tried) -> str | None:
    """What a server is told as who asks."""
    tried.patch.setenv("NAME_OF_WHO_ASKS", "somebody")
    with scorer_of() as scorer:
        paid_by(tried, scorer)
    return scorer.headers[0].get("X-Who")


# --- rows ------------------------------------------------------------------------------------------------------------

_HERE = f"{__name__}:"


def paid(texts: Callable[[Places], Texts]) -> dict[str, Acts]:
    """What right and wrong answers get, of texts with both."""
    return {"reward": Acts(3.0, texts=texts), "penalty": Acts(-2.0, texts=texts)}


_CONCEPTS = pairs(("generate a sentence with: say this: dog run.", [], "the dog run was good"))
_COMMON_GEN = {"prefix": Acts("say this: ", texts=_CONCEPTS)}

ROWS: Rows = {
    "increasing_numbers": SHARED["increasing_numbers"],
    "combine": {
        "rewards": Acts([{"id": "sentiment", "weight": 2.0}, {"id": "sentences_with_dates"}]),
    },
    "sentiment": SHARED["sentiment"],
    "rouge": {"rouge_type": Acts("rouge2"), **SHARED["rouge"]},
    "rouge_l_max": SHARED["rouge_l_max"],
    "sacre_bleu": SHARED["sacre_bleu"],
    "common_gen_repeat_penalty": _COMMON_GEN,
    "common_gen_repeat_penalty_batched": _COMMON_GEN,
    "exact_match": SHARED["exact_match"] | paid(ANSWERS),
    "math_equal": SHARED["math_equal"] | paid(NUMBERS),
    "reasoning_gym": SHARED["reasoning_gym"],
    "llm_judge": judge.ROWS,
    "regex": SHARED["regex"] | paid(pairs(*PAIRS)),
    "length_penalty": {
        "max_length": Acts(3),
        "unit": Acts("characters"),
        "penalty": Acts(0.1),
        "min_reward": Acts(-0.02),
    },
    "soft_overlong": {"max_length": Acts(40), "cache": Acts(2)},
    "repetition_penalty": {"ngram_size": Acts(1), "max_penalty": Acts(-3.0)},
    "python": {
        "function": Acts(f"{_HERE}share_of_spaces"),
        "batched": Acts(True, others={"function": f"{_HERE}texts_of_a_call"}),
        "kwargs": Acts({"vowels": "g"}),
        "max_concurrency": Acts(1, others={"function": f"{_HERE}calls_under_way", "batched": False}),
        "timeout_s": Acts(0.001, others={"function": f"{_HERE}takes_its_time"}, refused="no answer within 0.001 s"),
    },
    "step_function": {
        "function": Acts(f"{_HERE}vowels_of_steps"),
        "separator": Acts("o"),
        "aggregate": Acts("mean"),
        "kwargs": Acts({"factor": 2.0}, others={"function": f"{_HERE}vowels_of_steps"}),
        "max_concurrency": Acts(1, others={"function": f"{_HERE}calls_for_steps_under_way"}),
        "timeout_s": Acts(
            0.001, others={"function": f"{_HERE}steps_take_their_time"}, refused="no answer within 0.001 s"
        ),
    },
    "object": {"object": Acts(NamedFunction(RewardSentencesWithDates()))},
    "http": {
        "url": Acts(server_of_letters),
        "batch_size": Acts(2, requests),
        "timeout_s": Acts(1e-6, others={"retries": 0}, refused="did not answer within 1e-06 s"),
        "retries": Acts(1, requests_in_vain, others={"backoff_s": 0.0}, texts=pairs(PAIRS[0])),
        "backoff_s": Acts(0.5, pauses_after(503, {})),
        "max_wait_s": Acts(5.0, pauses_after(503, {"Retry-After": "7"}), refused="asks to wait 7 s"),
        "headers_from_env": Acts({"X-Who": "NAME_OF_WHO_ASKS"}, header_of_a_request),
        "max_response_bytes": Acts(10, refused="more than 10 bytes"),
        "max_connections": Acts(1, requests_at_once, others={"batch_size": 1}),
    },
}
