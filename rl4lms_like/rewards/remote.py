"""Rewards from an HTTP server: a scoring server of your own, or a language model as a judge (`scoring.judge`).

    POST url   {"prompts": [n], "responses": [n], "references": [n][], "meta_infos": [n]}
    200        {"rewards": [n]}

If the prompts have images, a request also has `"images": [n][]`, PNG files as `data:` URLs.

`system.http_client` describes retries, errors and headers with secrets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl4lms_like.rewards.text import ScoreReward, TextReward
from rl4lms_like.scoring.judge import LLMJudge
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.event_loop import EventLoop, gathered
from rl4lms_like.system.http_client import HttpClient, RemoteError
from rl4lms_like.system.numbers import Count

_LARGEST = sys.float_info.max


@dataclass(eq=False, repr=False)
class HttpReward(HttpClient, TextReward):
    """Rewards of finished responses from a server: `POST {prompts, responses, references, meta_infos, images}`.

    The server answers `{"rewards": [one number per response]}`. Requests may be repeated, so scoring must have no side
    effects.

    Args:
        batch_size: texts per request.
    """

    batch_size: Count = 64

    is_local = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loop = EventLoop("http reward")

    def scores(self, texts: Texts) -> list[float]:
        """Return the server's rewards, in the order of the texts."""
        # Each picture is compressed once for all responses to its prompt.
        pictures = {picture for images in texts.images or () for picture in images}
        url_of = {picture: picture.png_url() for picture in pictures}
        requests = []
        for start in range(0, len(texts.responses), self.batch_size):
            end = start + self.batch_size
            batch: dict[str, list[Any]] = {
                "prompts": texts.prompts[start:end],
                "responses": texts.responses[start:end],
                "references": texts.references[start:end],
                "meta_infos": texts.metas[start:end],
            }
            if texts.images is not None:
                batch["images"] = [[url_of[picture] for picture in images] for images in texts.images[start:end]]
            requests.append(partial(self._rewards, batch))

        # The requests are sent at the same time, and their answers come in the order of the texts.
        rewards: list[float] = []
        for batch_rewards in self._loop.run(gathered(requests, self.max_connections)):
            rewards += batch_rewards
        return rewards

    async def _rewards(self, batch: Mapping[str, list[Any]]) -> list[float]:
        # `allow_nan=False`: the NaN that Python would write is no JSON, and few servers read it.
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

        # A bool is an int in Python, but no number in JSON. A whole number may be too large for a float.
        for index, reward in enumerate(rewards):
            is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
            if not is_number or not abs(reward) <= _LARGEST:
                detail = self.without_secrets(repr(reward))[:60]
                raise self.error(f"answered 200 with {detail} as reward {index}; expected a number", content)
        return [float(reward) for reward in rewards]


class LLMJudgeReward(LLMJudge, ScoreReward):
    """Score of each response by a language model, on a server or this machine, or how often it wins comparisons."""

    @property
    def is_local(self) -> bool:  # type: ignore[override]
        """False for a model on a server."""
        return self.model_name is not None
