"""Text generation as a Gymnasium environment: one episode, token by token.

    state    prompt + response so far       six int64 arrays, see `core.observation`
    action   the next token's id            Discrete(vocab_size)
    reward   one float for each token       of (previous state, action, state, done); a terminal one is 0 until `done`
    end      terminated: an end-of-text token, if `terminate_on_eos`, or the text contains one of `stop_strings`
             truncated: `max_episode_length` tokens, the last of which does not terminate the episode

The transition is deterministic: the action is appended to the response, and that is the next state. The reward receives
`done = terminated or truncated`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from rl4lms_like.core.observation import KEYS, Observation, PromptEncoder, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.stop_strings import contains_any
from rl4lms_like.data_pools.sampler import PrioritySampler, PromptSampler
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.rewards.base import AnyReward
from rl4lms_like.rewards.call import score_transition_in_parts
from rl4lms_like.rewards.python_function import column_issues, reward_of
from rl4lms_like.system.component_state import load_state, state_of
from rl4lms_like.system.errors import CheckpointError, ConfigError, ConfigIssue
from rl4lms_like.system.schema import checked_block

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_LIMIT = 1_000_000
"""Limits above this mean no limit: tokenizers without one report about 1e30 tokens."""

REWARD_PARTS = "reward_parts"
"""Key of `info`: the contribution of each part of a combined reward to the reward of the step."""

_CACHED_PROMPTS = 16_384
"""Maximum number of encoded prompts in the cache; 67 MB if each has 512 tokens."""


class TextGenEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """MDP of text generation as a Gymnasium environment.

    Args:
        tokenizer: encodes prompts and decodes responses; it is not modified.
        reward_function: a `RewardFunction` or `BatchedRewardFunction`; a function of texts or of tokens; or a list of
            these, also as pairs (reward, weight), which are added up.
        samples: source of the prompts: samples, or pairs of sample and weight (a pool).
        max_episode_length: T, tokens.
        max_prompt_length: P, tokens. Default: the tokenizer's `model_max_length`.
        terminate_on_eos: whether an end-of-text token ends an episode.
        context_start_token: first decoder token of an encoder-decoder model.
        prompt_truncation_side: side on which long prompts are truncated.
        priority_scale: exponent of the samples' weights; 0 draws uniformly.
        vocab_size: number of actions: the rows of the model's embedding. Default: `len(tokenizer)`.
        eos_token_ids: the tokens that end an episode. Default: the tokenizer's.
        make_sampler: returns the sampler of `samples`. Default: a `PrioritySampler` with `priority_scale`.
        stop_strings: texts that end an episode; the policy's `generation_kwargs` must have the same.
        is_encoder_decoder: whether responses are texts of their own instead of continuations of their prompts; always
            with a `context_start_token`.
        pictures: encodes prompts with pictures, the same as that of the policy; None if the model reads texts only.

    Raises:
        ConfigError: an argument has a wrong value, or one without a usable default is missing; a function cannot be a
            reward, or has a parameter that no sample has as a column.
        DataPoolError: there are no samples to draw.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (Gymnasium's declaration)

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reward_function: AnyReward | Callable[..., Any] | Sequence[Any],
        samples: Iterable[Sample | tuple[Sample, float]],
        max_episode_length: int = 512,
        max_prompt_length: int | None = None,
        terminate_on_eos: bool = False,
        context_start_token: int | None = None,
        prompt_truncation_side: Literal["left", "right"] = "left",
        priority_scale: float = 0.0,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        make_sampler: Callable[[Iterable[Sample | tuple[Sample, float]]], PromptSampler] | None = None,
        stop_strings: Sequence[str] = (),
        is_encoder_decoder: bool = False,
        pictures: PromptEncoder | None = None,
    ) -> None:
        arguments = {
            "max_episode_length": max_episode_length,
            "max_prompt_length": max_prompt_length,
            "terminate_on_eos": terminate_on_eos,
            "context_start_token": context_start_token,
            "prompt_truncation_side": prompt_truncation_side,
            "priority_scale": priority_scale,
        }
        checked_block(EnvArguments, arguments, "the arguments of the environment")

        self.layout = TextLayout(
            tokenizer,
            max_prompt_length=max_prompt_length or length_limit(tokenizer),
            max_context_length=max_episode_length,
            context_start_token=context_start_token,
            prompt_truncation_side=prompt_truncation_side,
            is_encoder_decoder=is_encoder_decoder,
            pictures=pictures,
        )
        self.reward_function = reward_of(reward_function)

        # Ends of an episode: the length limit truncates it, end-of-text tokens and stop strings terminate it.
        self.max_episode_length = max_episode_length
        self.terminate_on_eos = terminate_on_eos
        self.eos_token_ids = _end_tokens(tokenizer, eos_token_ids, terminate_on_eos)
        self.stop_strings = tuple(stop_strings)

        # An embedding may have more rows than the tokenizer has tokens (T5: 32128 and 32100), and the policy can choose
        # each of them. Observations hold both: prompts with the tokenizer's ids, responses with those of the embedding.
        self.action_space = spaces.Discrete(vocab_size or len(tokenizer))
        self.observation_space = _observation_space(self.layout, max(vocab_size or 0, len(tokenizer)))

        self.sampler = make_sampler(samples) if make_sampler else PrioritySampler(samples, priority_scale)
        if issues := column_issues(self.reward_function, self.sampler.samples, "reward_function"):
            raise ConfigError(issues, "the environment's arguments")
        self._prompt_ids: dict[int, np.ndarray] = {}  # index of the sample -> [prompt_length], not padded

        # State of the current episode; there is none before the first `reset`.
        self._observation: Observation | None = None
        self._actions = np.empty(0, dtype=np.int64)  # [max_episode_length] after `reset`
        self._over = True

    def sibling(self) -> TextGenEnv:
        """Return an environment with its own episode that shares sampler, prompts, reward and spaces with this one."""
        other = copy.copy(self)
        other._observation = None
        other._over = True
        return other

    @property
    def observation(self) -> Observation:
        """Current observation; after the end of the episode, its last one.

        Raises:
            gymnasium.error.ResetNeeded: no episode was started yet.
        """
        if self._observation is None:
            raise gymnasium.error.ResetNeeded("no episode was started; call reset() first")
        return self._observation

    @property
    def sample(self) -> Sample:
        """Sample of the current episode."""
        return self.observation.sample

    @property
    def over(self) -> bool:
        """True if the episode has ended or none was started, so that `reset` must be called next."""
        return self._over

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start an episode from the next sample, or from `options["sample"]`.

        Returns:
            Observation of the prompt and an empty response, as arrays `[P]`, `[T]` and `[P + T]`; and RL4LMs' `info`.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.sampler.seed(seed)

        if options and "sample" in options:
            sample = options["sample"]
            prompt_ids = self.layout.encode(sample)
        else:
            sample, prompt_ids = self._draw()

        # A new array for each episode: observations of the last one, which users may keep, are views of the old array.
        self._actions = np.empty(self.max_episode_length, dtype=np.int64)
        self._observation = Observation(sample, prompt_ids, self._actions, n_actions=0, layout=self.layout)
        self._over = False
        return self._observation.to_dict(), _info(self._observation, self._observation)

    def step(self, action: np.int64 | int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Append a token to the response.

        Returns:
            Observation, reward of this token, terminated, truncated, and RL4LMs' `info`.

        Raises:
            gymnasium.error.ResetNeeded: the episode has ended.
            RewardError: the reward failed, or did not return one finite number.
        """
        previous = self.observation
        if self._over:
            raise gymnasium.error.ResetNeeded("the episode has ended; call reset()")

        # s_{t+1} = (s_t, a_t). Both observations are views of one array of actions: the first t and t + 1 of them.
        token = int(action)
        self._actions[previous.n_actions] = token
        current = previous.after(previous.n_actions + 1)

        # Stop strings are searched in the text, because their tokens depend on what precedes them. An end-of-text token
        # at the length limit terminates: nothing is missing from such a response.
        terminated = self.terminate_on_eos and token in self.eos_token_ids
        if self.stop_strings:
            terminated = terminated or contains_any(current.context_text, self.stop_strings)
        truncated = current.n_actions == self.max_episode_length and not terminated

        # Before the reward, which may raise: the token is part of the episode all the same.
        self._observation = current
        self._over = terminated or truncated

        # r_t = r(s_t, a_t, s_{t+1}, done)
        reward, reward_parts = score_transition_in_parts(
            self.reward_function, previous=previous, action=token, current=current, done=self._over
        )
        info = _info(previous, current)
        if reward_parts:
            info[REWARD_PARTS] = reward_parts
        return current.to_dict(), reward, terminated, truncated, info

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position and the reward's state, in JSON types."""
        return {"sampler": self.sampler.state_dict(), "reward": state_of(self.reward_function)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`; takes effect at the next `reset`.

        Raises:
            CheckpointError: the state is that of a reward with other parts.
        """
        self.sampler.load_state_dict(state["sampler"])
        try:
            load_state(self.reward_function, state["reward"])
        except ValueError as error:
            message = f"the state of its reward does not fit the reward of now: {error}"
            way_out = "give a reward with the same parts, or start a new run from the model of this one"
            raise CheckpointError(f"{message}; {way_out}") from error

    def leave(self) -> None:
        """Mark the episode as ended because it was scored outside this environment; `reset` starts the next one."""
        self._over = True

    def _draw(self) -> tuple[Sample, np.ndarray]:
        """Return the next sample and its prompt ids `[prompt_length]`, which are encoded once."""
        index = self.sampler.draw()
        sample = self.sampler.samples[index]

        # `clear` keeps the dict, which siblings share.
        if index not in self._prompt_ids:
            if len(self._prompt_ids) >= _CACHED_PROMPTS:
                self._prompt_ids.clear()
            self._prompt_ids[index] = self.layout.encode(sample)
        return sample, self._prompt_ids[index]


def _info(previous: Observation, current: Observation) -> dict[str, Any]:
    """Return RL4LMs' `info` dict; it shares no objects with the environment."""
    return {
        "output": current.context_text,
        "action_history": list(current.action_history),
        "reference_text": list(current.target_or_reference_texts),
        "prompt_text": current.prompt_or_input_text,
        "prev_output": previous.context_text,
        "meta_info": copy.deepcopy(current.meta_info),
    }


def length_limit(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the default maximum prompt length: the tokenizer's `model_max_length`.

    Raises:
        ConfigError: the tokenizer has no length limit.
    """
    limit = int(tokenizer.model_max_length)
    if limit > _NO_LIMIT:
        message = "the tokenizer has no length limit to use as default; set the number of prompt tokens, e.g. 128"
        raise ConfigError([ConfigIssue("max_prompt_length", message)], "the environment's arguments")
    return limit


def _end_tokens(
    tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int] | None, terminate_on_eos: bool
) -> frozenset[int]:
    """Return the tokens that end an episode: `eos_token_ids`, by default the tokenizer's."""
    if eos_token_ids is None:
        eos_token_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    end_tokens = frozenset(int(token_id) for token_id in eos_token_ids)

    if terminate_on_eos and not end_tokens:
        message = "no token ends an episode: the tokenizer has no EOS token; set it to false or set eos_token_ids"
        raise ConfigError([ConfigIssue("terminate_on_eos", message)], "the environment's arguments")
    return end_tokens


def _observation_space(layout: TextLayout, n_ids: int) -> spaces.Dict:
    """Return the space of six int64 arrays: ids and mask of prompt `[P]`, response `[T]` and both joined `[P + T]`."""
    max_prompt = layout.max_prompt_length
    max_response = layout.max_context_length
    lengths = (max_prompt, max_response, max_prompt + max_response)

    boxes: dict[str, spaces.Space[Any]] = {}
    for key, length in zip(KEYS, lengths, strict=True):
        boxes[f"{key}_encoded_pt"] = spaces.Box(0, n_ids - 1, (length,), np.int64)
        boxes[f"{key}_attention_mask_pt"] = spaces.Box(0, 1, (length,), np.int64)
    return spaces.Dict(boxes)
