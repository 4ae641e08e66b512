"""Rewards from an HTTP server: a scoring server of your own, or a language model as a judge (`scoring.judge`).

    POST url   {"prompts": [n], "responses": [n], "references": [n][], "meta_infos": [n]}
    200        {"rewards": [n]}

`core.http_client` describes retries, errors and headers with secrets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from rl4lms_like.core.event_loop import EventLoop, gathered
from rl4lms_like.core.http_client import HttpClient, RemoteError
from rl4lms_like.core.numbers import Count, NonNegative, Positive, Whole
from rl4lms_like.rewards.text import ScoreReward, TextReward
from rl4lms_like.scoring.judge import LLMJudge
from rl4lms_like.scoring.score import Texts

_LARGEST = sys.float_info.max


@dataclass(eq=False, repr=False)
class HttpReward(TextReward):
    """Rewards of finished responses from a server: `POST {prompts, responses, references, meta_infos}`.

    The server answers `{"rewards": [one number per response]}`. Requests may be repeated, so scoring must have no side
    effects.

    Args:
        url: `http://` or `https://`, without user name and password.
        batch_size: texts per request.
        timeout_s: time limit of a request in seconds, including its answer.
        retries: maximum number of retries of a request.
        backoff_s: seconds before the first retry; doubled with each retry.
        max_wait_s: maximum back-off in seconds; if the server asks for a longer wait (`Retry-After`), it has failed.
        headers_from_env: header -> name of the environment variable that holds its value.
        max_response_bytes: maximum size of an answer.
        max_connections: maximum number of concurrent requests.
    """

    url: str
    batch_size: Count = 64
    timeout_s: Positive = 30.0
    retries: Whole = 3
    backoff_s: NonNegative = 1.0
    max_wait_s: NonNegative = 60.0
    headers_from_env: dict[str, str] | None = None
    max_response_bytes: Count = 10_000_000
    max_connections: Count = 4

    def __post_init__(self) -> None:
        self._loop = EventLoop("http reward")
        own = ("batch_size",)
        self._client = HttpClient(
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name not in own}
        )

    def scores(self, texts: Texts) -> list[float]:
        """Return the server's rewards, in the order of the texts."""
        columns = zip(("prompts", "responses", "references", "meta_infos"), texts, strict=True)
        named: dict[str, list[Any]] = dict(columns)  # type: ignore[arg-type]
        parts = [slice(start, start + self.batch_size) for start in range(0, len(texts.responses), self.batch_size)]
        batches = [{name: values[part] for name, values in named.items()} for part in parts]
        waits = [partial(self._rewards, batch) for batch in batches]
        return [reward for rewards in self._loop.run(gathered(waits, self.max_connections)) for reward in rewards]

    async def _rewards(self, batch: Mapping[str, list[Any]]) -> list[float]:
        try:
            body = json.dumps(batch, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RemoteError(f"the samples' meta_data cannot be sent as JSON: {error}") from error
        content = await self._client.answer(body)
        answer = self._client.decoded(content)
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            raise self._client.error('answered 200 without a list under "rewards"', content)
        if len(rewards) != len(batch["responses"]):
            raise self._client.error(
                f"answered 200 with {len(rewards)} rewards for {len(batch['responses'])} texts", content
            )
        for place, reward in enumerate(rewards):
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= _LARGEST:
                detail = self._client.without_secrets(repr(reward))[:60]
                raise self._client.error(f"answered 200 with {detail} as reward {place}; expected a number", content)
        return [float(reward) for reward in rewards]


class LLMJudgeReward(LLMJudge, ScoreReward):
    """Score of each response by a language model on an OpenAI-compatible server, or how often it wins comparisons."""
