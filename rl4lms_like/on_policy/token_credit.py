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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl4lms_like.callbacks.base import Callback
from rl4lms_like.core.advantages import normalized
from rl4lms_like.core.continuation import UNDECODABLE
from rl4lms_like.core.episodes import EpisodeBatch, PassLimits, pack_passes, real_ids
from rl4lms_like.core.losses import kl_estimate
from rl4lms_like.core.token_masks import n_allowed
from rl4lms_like.on_policy.assemble import AssembledRun
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from rl4lms_like.system.wording import agreement
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.run_folder import CREDIT_FILE
from rl4lms_like.tracking.thumbnails import KEY, images_by_id

DENSE = 16
"""Number of evaluations that are all recorded; later, 8 evaluations are recorded each time their number doubles."""


class TokenCredit(Callback):
    """Record `train_evaluation.n_credit_episodes` episodes of selected iterations."""

    def __init__(self, run: AssembledRun, tracker: Tracker) -> None:
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

        # The sample of the run's first episode is followed, so that responses to one prompt can be compared over time.
        if self._followed is None:
            self._followed = infos[0]["sample_id"]
        choices = chosen_episodes(infos, self.n_episodes, self._followed)

        # Fields of the buffer are flat, over all episodes of the rollout; from here on, over the tokens of the chosen
        # ones `[n_tokens]`.
        index = torch.tensor([choice.episode for choice in choices], device=episodes.response_ids.device)
        tokens = episodes.token_index(index)
        chosen = episodes.select(index)
        old_log_prob = buffer.log_probs[tokens]
        all_advantages, normalization = advantages_of_the_loss(algorithm)
        advantages = all_advantages[tokens]
        rewards = torch.as_tensor(buffer.rewards, device=tokens.device)[tokens]
        returns = torch.as_tensor(buffer.returns, device=tokens.device)[tokens]
        values = torch.as_tensor(buffer.values, device=tokens.device)[tokens]

        # r = pi / pi_old, with pi after the update: how far the whole update has moved each token.
        log_ratio = self._log_probs(chosen) - old_log_prob
        head: dict[str, Any] = {"n_episodes": len(infos), "normalized": normalization}
        limits = clip_range_of(algorithm)
        clipped = None
        if limits is not None:
            head["clip_range"] = max(limits)
            clipped = clipping(log_ratio, advantages, *limits)

        # -coeff KL, if the penalty is a part of the reward. The controller has changed its coefficient since; the
        # rollout's own is among the logged values.
        kl = None
        kl_rewards = None
        if buffer.kl is not None:
            head["kl_coeff"] = float(algorithm.logger.name_to_value["rollout_info/kl_coeff"])
            kl = buffer.kl[tokens]
            controller = algorithm.collector.kl
            if controller.placement == "reward":
                kl_rewards = -head["kl_coeff"] * kl_estimate(kl, torch.zeros_like(kl), controller.estimator)

        fields: dict[str, Tensor | None] = {
            "rewards": rewards,
            "kl_rewards": kl_rewards,
            "advantages": advantages,
            "returns": returns,
            "values": values if self.run.policy.has_critic else None,
            "kl": kl,
            "probs": old_log_prob.exp(),
            "ratios": log_ratio.exp(),
            "clipped": clipped,
            "n_allowed": None if chosen.allowed is None else n_allowed(chosen.allowed),
        }
        known = {name: field for name, field in fields.items() if field is not None}
        return {**head, "episodes": list(self._described(choices, infos, chosen, known))}

    @torch.no_grad()
    def _log_probs(self, episodes: EpisodeBatch) -> Tensor:
        """Return log-probs under the current policy, without dropout `[n_tokens]`."""
        policy = self.run.policy
        was_training = policy.training
        policy.set_training_mode(False)

        # In passes of the size of the rollout's, which fit into memory; without a limit all at once.
        limits = PassLimits(self.run.algorithm.collector.options.score_batch_size, shares_prompts=policy.shares_prompts)
        log_probs = []
        for rows in pack_passes(episodes, limits):
            batch = episodes.select(torch.tensor(rows, device=episodes.response_ids.device))
            with blame_memory_errors_on("scoring"):
                log_probs.append(policy.evaluate_actions(batch, batch.actions)[1])

        policy.set_training_mode(was_training)
        return torch.cat(log_probs)

    def _described(
        self,
        choices: Sequence[Choice],
        infos: Sequence[Mapping[str, Any]],
        episodes: EpisodeBatch,
        fields: Mapping[str, Tensor],
    ) -> Iterator[dict[str, Any]]:
        """Yield the object of each chosen episode, with a list for each field `[response_len]`."""
        tokenizer = self.run.tokenizer
        special_ids = set(tokenizer.all_special_ids)
        lengths = episodes.lengths.tolist()
        fields_by_episode = {name: field.split(lengths) for name, field in fields.items()}

        continuations = self.run.continuations
        images = images_by_id(self.run.samples["train"])
        prompts = real_ids(episodes.prompt_ids, episodes.prompt_mask)
        responses = real_ids(episodes.response_ids, episodes.response_mask)
        for row, choice in enumerate(choices):
            ids = responses[row]
            names = tokenizer.convert_ids_to_tokens(ids)
            description = {
                "episode": choice.episode,
                "sample_id": infos[choice.episode]["sample_id"],
                "rank": choice.rank,
                "followed": choice.followed,
                "reward": infos[choice.episode]["r"],
                "terminated": bool(episodes.terminated[row]),
                "prompt": continuations.decode(prompts[row]),
                "tokens": text_pieces(partial(continuations.text, prompts[row]), ids),
                "token_ids": ids,
                # Their pieces of text are empty: the report shows their names.
                "special": {str(i): names[i] for i, id in enumerate(ids) if id in special_ids},
            }

            if description["sample_id"] in images:
                description[KEY] = self.tracker.keep_thumbnails(images[description["sample_id"]])

            # A field has a number for each action. Tokens of an environment have none: their place is None.
            is_action = episodes.action_mask[row][episodes.response_mask[row]].tolist()
            if not all(is_action):
                description["observed"] = [i for i, flag in enumerate(is_action) if not flag]
            for name, field_by_episode in fields_by_episode.items():
                numbers = iter(listed(field_by_episode[row]))
                description[name] = [next(numbers) if flag else None for flag in is_action]
            yield description


def is_recorded(iteration: int, *, eval_every: int, n_iters: int) -> bool:
    """Return whether an iteration is recorded: the first, the last, and those that an evaluation on `val` follows.

    A run of any length writes at most a few dozen lines: up to the 16th evaluation every one is recorded, then every
    second one, from the 32nd every fourth, and so on. Iterations count from 1.
    """
    if iteration in (1, n_iters):
        return True
    if iteration % eval_every:
        return False

    # Evaluations 1 to 15: each; 16 to 31: each second; 32 to 63: each fourth (`bit_length` of 1 is 1, of 2 and 3 is 2).
    n_evaluations = iteration // eval_every
    stride = 1 << (n_evaluations // DENSE).bit_length()
    return n_evaluations % stride == 0


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
    # By rank: the best first; of equal rewards, the earlier episode.
    order = sorted(range(len(infos)), key=lambda i: (-infos[i]["r"], i))
    last = len(order) - 1
    ranks = [last // 2] if n == 1 else [step * last // (n - 1) for step in range(n)]

    followed_episode = None
    for i, info in enumerate(infos):
        if info["sample_id"] == followed:
            followed_episode = i
            break

    # If there are fewer episodes than `n`, ranks repeat: `fromkeys` keeps each once, in order.
    choices = []
    for rank in dict.fromkeys(ranks):
        choices.append(Choice(order[rank], rank + 1, followed=order[rank] == followed_episode))
    if followed_episode is not None and not any(choice.followed for choice in choices):
        choices.append(Choice(followed_episode, order.index(followed_episode) + 1, followed=True))
    return choices


def advantages_of_the_loss(algorithm: Any) -> tuple[Tensor, str | None]:
    """Return the advantages in the loss `[n_tokens]` after an update, and how they are normalised.

    This is by `rollout`, by `minibatch`, or None. If each minibatch is normalised by its own mean and standard
    deviation, the advantage of a token differs between epochs. In that case the statistics of the whole rollout are
    used, around which those of the minibatches vary.
    """
    buffer = algorithm.rollout_buffer
    settings = _settings(algorithm)
    advantages = buffer.advantages
    returns = torch.as_tensor(buffer.returns).to(advantages)
    values = torch.as_tensor(buffer.values).to(advantages)

    # Compared within groups of responses to one prompt, not normalised over a batch.
    if getattr(settings, "scale", "whiten") != "whiten":
        return advantages, None

    # Estimates are returns - values, up to rounding. If they are not, the update has replaced them by normalised ones.
    scope = getattr(settings, "normalize_advantage", False)
    rounding = 1e-5 * float(torch.maximum(returns.abs(), values.abs()).max())
    is_replaced = float((advantages - (returns - values)).abs().max()) > rounding
    if is_replaced or scope == "rollout":
        return advantages, "rollout"
    if not scope:
        return advantages, None

    # A minibatch of all tokens is the rollout.
    minibatch_episodes = getattr(settings, "minibatch_episodes", None)
    if minibatch_episodes is not None:
        is_whole = minibatch_episodes >= buffer.episodes.n_episodes
    else:
        batch_size = getattr(algorithm, "batch_size", None)
        is_whole = batch_size is None or batch_size >= buffer.n_tokens
    return normalized(advantages, returns), "rollout" if is_whole else "minibatch"


def clip_range_of(algorithm: Any) -> tuple[float, float] | None:
    """Return the distances below and above 1 at which the loss clips a token's ratio; None if it does not."""
    settings = _settings(algorithm)
    low = getattr(settings, "clip_range", None)
    high = getattr(settings, "clip_range_high", None)
    if callable(low):  # Stable-Baselines3's may follow a schedule
        low = low(algorithm._current_progress_remaining)
    if low is None:
        return None

    # Other losses than PPO's use the range in another way, or not: surrogates that do not clip, ratios of whole
    # responses, a band outside of which tokens are left out, pairs of responses.
    clips_ratio = getattr(settings, "surrogate", "clip") == "clip"
    is_per_token = getattr(settings, "ratio_level", "token") == "token"
    has_band = getattr(settings, "ratio_band", None) is not None
    is_pairwise = getattr(settings, "is_pairwise", False)
    if not clips_ratio or not is_per_token or has_band or is_pairwise:
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

    Examples:
        >>> text_pieces(lambda ids: bytes(ids).decode(errors="replace"), [104, 105, 195, 188])
        ['h', 'i', '', 'ü']
    """
    ids = list(ids)
    whole = decode(ids)

    # The common case, in n short calls: each token is a text of its own.
    single = [decode([id]) for id in ids]
    if "".join(single) == whole and UNDECODABLE not in whole:
        return single

    # Otherwise a prefix of the ids for each token. What it has in common with the whole text is what is final: an
    # incomplete character at its end is decoded to a replacement, in which the two differ. `max`: text that is final
    # is not taken back, where clean-up changes it later.
    pieces = []
    begin = 0
    for n in range(1, len(ids) + 1):
        end = len(whole) if n == len(ids) else max(begin, agreement(decode(ids[:n]), whole))
        pieces.append(whole[begin:end])
        begin = end
    return pieces
