"""Rewards from an HTTP server: a scoring server of your own, or a language model as a judge (`scoring.judge`).

    POST url   {"prompts": [n], "responses": [n], "references": [n][], "meta_infos": [n]}
    200        {"rewards": [n]}

`core.http_client` describes retries, errors and headers with secrets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl4lms_like.core.event_loop import EventLoop, gathered
from rl4lms_like.core.http_client import HttpClient, RemoteError
from rl4lms_like.core.numbers import Count
from rl4lms_like.rewards.text import ScoreReward, TextReward
from rl4lms_like.scoring.judge import LLMJudge
from rl4lms_like.scoring.score import Texts

_LARGEST = sys.float_info.max


@dataclass(eq=False, repr=False)
class HttpReward(HttpClient, TextReward):
    """Rewards of finished responses from a server: `POST {prompts, responses, references, meta_infos}`.

    The server answers `{"rewards": [one number per response]}`. Requests may be repeated, so scoring must have no side
    effects.

    Args:
        batch_size: texts per request.
    """

    batch_size: Count = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loop = EventLoop("http reward")

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
        content = await self.answer(body)
        answer = self.decoded(content)
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            raise self.error('answered 200 without a list under "rewards"', content)
        if len(rewards) != len(batch["responses"]):
            n_texts = len(batch["responses"])
            raise self.error(f"answered 200 with {len(rewards)} rewards for {n_texts} texts", content)
        for place, reward in enumerate(rewards):
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= _LARGEST:
                detail = self.without_secrets(repr(reward))[:60]
                raise self.error(f"answered 200 with {detail} as reward {place}; expected a number", content)
        return [float(reward) for reward in rewards]


class LLMJudgeReward(LLMJudge, ScoreReward):
    """Score of each response by a language model on an OpenAI-compatible server, or how often it wins comparisons."""
