"""Record the credit of each token (advantage, KL, ratio, reward) for a few episodes in `token_credit.jsonl`.

    rollout's buffer    rewards, advantages, returns, values, log-probs, KL        inputs of the loss
    policy, after       one forward pass over the chosen episodes, no gradients    ratio, clipping
    one line            {"iteration": 5, "clip_range": 0.2, ..., "episodes": [{"tokens": [...], "advantages": [...]}]}

A line is written after the first iteration, after iterations that an evaluation on `val` follows, and after the last.
The choice depends only on the iteration number and the config. It draws no random numbers, so the run is unchanged.
Lists without a meaning are omitted: no KL without a reference, no clipping if the loss clips no ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl4lms_like.core.advantages import normalized
from rl4lms_like.core.episodes import EpisodeBatch, pack_episodes
from rl4lms_like.core.losses import kl_estimate
from rl4lms_like.core.token_masks import n_allowed
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.run_folder import CREDIT_FILE
from rl4lms_like.training.assemble import Run
from rl4lms_like.training.callbacks import Callback

DENSE = 16
"""Number of evaluations that are all recorded; later, 8 evaluations are recorded each time their number doubles."""

UNDECODABLE = "\ufffd"
"""Replacement by decoders for bytes that are not a complete character."""


class TokenCredit(Callback):
    """Record `train_evaluation.n_credit_episodes` episodes of selected iterations."""

    def __init__(self, run: Run, tracker: Tracker) -> None:
        self.run = run
        self.tracker = tracker
        self.n_episodes = run.config.train_evaluation.n_credit_episodes
        self._followed: str | None = None

    def on_iteration_end(self, iteration: int) -> None:
        """Write a line, if this iteration is recorded."""
        schedule = self.run.config.train_evaluation
        buffer = getattr(self.run.algorithm, "rollout_buffer", None)
        if not self.n_episodes or not isinstance(buffer, EpisodeBuffer) or buffer.episodes is None:
            return
        if is_recorded(iteration, eval_every=schedule.eval_every, n_iters=schedule.n_iters):
            self.tracker.log_line(CREDIT_FILE, {"iteration": iteration, **self._line(buffer, buffer.episodes)})

    def state_dict(self) -> dict[str, Any]:
        return {"followed": self._followed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._followed = state["followed"]

    def _line(self, buffer: EpisodeBuffer, episodes: EpisodeBatch) -> dict[str, Any]:
        algorithm = self.run.algorithm
        infos = algorithm.collector.episode_infos
        if self._followed is None:
            self._followed = infos[0]["sample_id"]
        chosen = chosen_episodes(infos, self.n_episodes, self._followed)
        advantages, normalization = advantages_of_the_loss(algorithm)
        index = torch.tensor([choice.episode for choice in chosen], device=episodes.response_ids.device)
        tokens = episodes.token_index(index)
        part = episodes.select(index)
        log_ratio = self._log_probs(part) - buffer.log_probs[tokens]
        limits = clip_range_of(algorithm)
        rewards, returns, values = (
            torch.as_tensor(field, device=tokens.device)[tokens]
            for field in (buffer.rewards, buffer.returns, buffer.values)
        )
        fields: dict[str, Tensor | None] = {
            "rewards": rewards,
            "kl_rewards": None,
            "advantages": advantages[tokens],
            "returns": returns,
            "values": values if self.run.policy.has_critic else None,
            "kl": None,
            "probs": buffer.log_probs[tokens].exp(),
            "ratios": log_ratio.exp(),
            "clipped": None if limits is None else clipping(log_ratio, advantages[tokens], *limits),
            "n_allowed": None if part.allowed is None else n_allowed(part.allowed),
        }
        head: dict[str, Any] = {"n_episodes": len(infos), "normalized": normalization}
        if limits is not None:
            head["clip_range"] = max(limits)
        if buffer.kl is not None:
            # The controller has changed its coefficient since; the rollout's own is among the logged values.
            head["kl_coeff"] = float(algorithm.logger.name_to_value["rollout_info/kl_coeff"])
            kl = buffer.kl[tokens]
            fields["kl"], controller = kl, algorithm.collector.kl
            if controller.placement == "reward":
                fields["kl_rewards"] = -head["kl_coeff"] * kl_estimate(kl, torch.zeros_like(kl), controller.estimator)
        known = {name: field for name, field in fields.items() if field is not None}
        return {**head, "episodes": list(self._described(chosen, infos, part, known))}

    @torch.no_grad()
    def _log_probs(self, episodes: EpisodeBatch) -> Tensor:
        """Return log-probs under the current policy, without dropout `[n_tokens]`."""
        policy = self.run.policy
        was_training = policy.training
        policy.set_training_mode(False)
        limit = self.run.algorithm.collector.options.score_batch_size or int(episodes.response_lengths.sum())
        groups = pack_episodes(episodes.response_lengths.tolist(), range(episodes.n_episodes), limit)
        parts = [episodes.select(torch.tensor(group, device=episodes.response_ids.device)) for group in groups]
        log_probs = torch.cat([policy.evaluate_actions(part, part.actions)[1] for part in parts])
        policy.set_training_mode(was_training)
        return log_probs

    def _described(
        self,
        chosen: Sequence[Choice],
        infos: Sequence[Mapping[str, Any]],
        episodes: EpisodeBatch,
        fields: Mapping[str, Tensor],
    ) -> Iterator[dict[str, Any]]:
        tokenizer, special = self.run.tokenizer, set(self.run.tokenizer.all_special_ids)
        numbers = {name: field.split(episodes.lengths.tolist()) for name, field in fields.items()}
        for row, choice in enumerate(chosen):
            ids = episodes.response_ids[row][episodes.action_mask[row]].tolist()
            names = tokenizer.convert_ids_to_tokens(ids)
            yield {
                "episode": choice.episode,
                "sample_id": infos[choice.episode]["sample_id"],
                "rank": choice.rank,
                "followed": choice.followed,
                "reward": infos[choice.episode]["r"],
                "terminated": bool(episodes.terminated[row]),
                "prompt": self._decode(episodes.prompt_ids[row][episodes.prompt_mask[row]].tolist()),
                "tokens": text_pieces(self._decode, ids),
                "token_ids": ids,
                "special": {str(i): names[i] for i, id in enumerate(ids) if id in special},
                **{name: listed(each[row]) for name, each in numbers.items()},
            }

    def _decode(self, ids: list[int]) -> str:
        return str(self.run.tokenizer.decode(ids, skip_special_tokens=True))


def is_recorded(iteration: int, *, eval_every: int, n_iters: int) -> bool:
    """Return whether an iteration is recorded: the first, the last, and those that an evaluation on `val` follows.

    A run of any length writes at most a few dozen lines: up to the 16th evaluation every one is recorded, then every
    second one, from the 32nd every fourth, and so on. Iterations count from 1.
    """
    if iteration in (1, n_iters):
        return True
    n_evaluations, rest = divmod(iteration, eval_every)
    return rest == 0 and n_evaluations % (1 << (n_evaluations // DENSE).bit_length()) == 0


class Choice(NamedTuple):
    """Index of an episode, its rank by reward (1 is best), and whether it is of the followed sample."""

    episode: int
    rank: int
    followed: bool


def chosen_episodes(infos: Sequence[Mapping[str, Any]], n: int, followed: str) -> list[Choice]:
    """Select `n` episodes evenly spaced by rank of task reward; with 3 these are the best, the median and the worst.

    The first episode of the followed sample is added if the rollout has one, whatever its reward.

    Args:
        infos: `r` and `sample_id` of each episode.
        n: at least 1; all episodes are selected if there are fewer.
        followed: id of a sample.
    """
    order = sorted(range(len(infos)), key=lambda i: (-infos[i]["r"], i))
    last = len(order) - 1
    steps = [last // 2] if n == 1 else [step * last // (n - 1) for step in range(n)]
    is_followed = next((i for i, info in enumerate(infos) if info["sample_id"] == followed), None)
    chosen = [Choice(order[step], step + 1, order[step] == is_followed) for step in dict.fromkeys(steps)]
    if is_followed is not None and not any(choice.followed for choice in chosen):
        chosen.append(Choice(is_followed, order.index(is_followed) + 1, True))
    return chosen


def advantages_of_the_loss(algorithm: Any) -> tuple[Tensor, str | None]:
    """Return the advantages in the loss `[n_tokens]` after an update, and how they are normalised.

    This is by `rollout`, by `minibatch`, or None. If each minibatch is normalised by its own mean and standard
    deviation, the advantage of a token differs between epochs. In that case the statistics of the whole rollout are
    used, around which those of the minibatches vary.
    """
    buffer, setting = algorithm.rollout_buffer, getattr(_settings(algorithm), "normalize_advantage", False)
    returns, values = (torch.as_tensor(field).to(buffer.advantages) for field in (buffer.returns, buffer.values))
    rounding = 1e-5 * float(torch.maximum(returns.abs(), values.abs()).max())
    is_replaced = float((buffer.advantages - (returns - values)).abs().max()) > rounding
    if getattr(_settings(algorithm), "scale", "whiten") != "whiten":  # compared within groups, not normalised
        return buffer.advantages, None
    if is_replaced or setting == "rollout":  # the update has replaced the estimates by normalised advantages
        return buffer.advantages, "rollout"
    if not setting:
        return buffer.advantages, None
    batch_size = getattr(algorithm, "batch_size", None)
    is_whole = batch_size is None or batch_size >= buffer.n_tokens
    return normalized(buffer.advantages, returns), "rollout" if is_whole else "minibatch"


def clip_range_of(algorithm: Any) -> tuple[float, float] | None:
    """Return the distances below and above 1 at which the loss clips a token's ratio; None if it does not."""
    settings = _settings(algorithm)
    low, high = getattr(settings, "clip_range", None), getattr(settings, "clip_range_high", None)
    if callable(low):  # Stable-Baselines3's may follow a schedule
        low = low(algorithm._current_progress_remaining)
    kind = getattr(settings, "surrogate", "clip"), getattr(settings, "ratio_level", "token")
    has_band, is_pairwise = getattr(settings, "ratio_band", None) is not None, getattr(settings, "is_pairwise", False)
    if low is None or has_band or is_pairwise or kind != ("clip", "token"):
        return None
    return float(low), float(low if high is None else high)


def clipping(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Mark tokens where min(r A, clip(r) A) is the clipped term, whose gradient is 0 (arXiv 1707.06347, eq. 7).

    Returns:
        `[n_tokens]`: 1 where r > 1 + `high` and A > 0, -1 where r < 1 - `low` and A < 0, else 0. With the opposite sign
        of A, a ratio outside the range is not clipped: its gradient moves it back towards 1.
    """
    ratio = log_ratio.exp()
    above = (ratio > 1 + high) & (advantages > 0)
    below = (ratio < 1 - low) & (advantages < 0)
    return above.long() - below.long()


def _settings(algorithm: Any) -> Any:
    """Return the object that holds an algorithm's settings; for Stable-Baselines3's this is the algorithm itself."""
    return getattr(algorithm, "arguments", algorithm)


def listed(field: Tensor) -> list[float] | list[int]:
    """Return a field's values as a list; floats have the shortest decimals that are read back as the same float32."""
    if not field.is_floating_point():
        return [int(value) for value in field.tolist()]
    return [float(str(value)) for value in field.float().cpu().numpy()]


def text_pieces(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """Return one piece of text for each token; empty for tokens that add nothing, such as special tokens.

        ids       464    8237  11   28053  228         220   50256
        pieces    "The"  " film" ","  ""     " 🎬"        " "   ""        joined: `decode` of all ids

    Decoding tokens one by one does not work in general: a byte-level token may be half a character, a SentencePiece
    decoder drops the first space, and clean-up changes text across tokens. A token's piece is what it adds to the
    decoded text. A character made of several tokens belongs to the token that completes it.

    Args:
        decode: the tokenizer's decode function; it must accept any prefix of `ids`.
        ids: `[n]`.

    Returns:
        `n` texts. Joined they are `decode(ids)` for every tokenizer.

    Example:
        >>> text_pieces(lambda ids: bytes(ids).decode(errors="replace"), [104, 105, 195, 188])
        ['h', 'i', '', 'ü']
    """
    ids = list(ids)
    whole = decode(ids)
    single = [decode([id]) for id in ids]
    if "".join(single) == whole and UNDECODABLE not in whole:
        return single
    pieces, begin = [], 0
    for n in range(1, len(ids) + 1):
        end = len(whole) if n == len(ids) else max(begin, _agreement(decode(ids[:n]), whole))
        pieces.append(whole[begin:end])
        begin = end
    return pieces


def _agreement(prefix: str, whole: str) -> int:
    """Return the length of the common prefix."""
    if whole.startswith(prefix):
        return len(prefix)
    return next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), len(whole))
