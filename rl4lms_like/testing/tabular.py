"""Exact expected gradients: a policy that is a table of logits, three tokens, responses of at most three tokens.

    logits[s]      of the next token after the prompt and the tokens s         3 numbers
    values[s]      value of this state                                         1 number
    E[gradient]    sum over all batches of n responses of P(batch) x gradient of the algorithm's first step

All numbers are float64. An algorithm runs as on a language model: rollout, buffer, update. Only `generate` is replaced:
it returns each possible batch once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.logger import configure
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.sample import Sample
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.teacher_forcing import ActionScores, EpisodeScores
from rl4lms_like.rollouts.kl import FixedKLController

VOCABULARY = 3
LENGTH = 3
END = 0
"""Token that ends a response, if responses have different lengths."""

_STATES = 16
"""Prefixes of at most two tokens as numbers in base 4, whose digits are the tokens plus 1."""

Response = tuple[int, ...]
Reward = Callable[[int, Response], float]
"""Reward of a response to a prompt; a multiple of 1/8, which float32 represents exactly."""


class Gradients(NamedTuple):
    """Gradients of a loss: `[n_prompts * 16, 3]` for the logits and `[n_prompts * 16]` for the values."""

    logits: Tensor
    values: Tensor


class TabularPolicy(BasePolicy):
    """Actor-critic policy whose logits and values are tables.

    Args:
        observation_space: of the environment.
        action_space: of the environment.
        lr_schedule: ignored.
        n_prompts: number of prompts.
        seed: seed of the tables.
        ignored: arguments of language-model policies.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Any,
        *,
        n_prompts: int = 1,
        seed: int = 0,
        **ignored: Any,
    ) -> None:
        super().__init__(observation_space, action_space)
        generator = torch.Generator().manual_seed(seed)
        size = n_prompts * _STATES

        def table(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.logits, self.values = table(size, VOCABULARY), table(size)
        self.ref_logits = table(size, VOCABULARY).requires_grad_(False)
        self.arguments = PolicyArguments(model_name="tabular")
        self.has_reference = self.has_critic = True
        self.samples_other_distribution = False
        self.next_episodes: EpisodeBatch | None = None
        self.recorder = _Recorder(
            [{"params": [self.logits], "role": "actor"}, {"params": [self.values], "role": "critic"}]
        )
        self.optimizer = self.recorder

    def set_training_mode(self, mode: bool) -> None:
        """Do nothing: a table has no dropout."""

    def generate(self, *prompts: Tensor, **options: Any) -> EpisodeBatch:
        """Return the episodes that were set as `next_episodes`."""
        assert self.next_episodes is not None
        return self.next_episodes

    def states(self, episodes: EpisodeBatch) -> Tensor:
        """Return the state of each action, flat `[n_tokens]`."""
        digits = (episodes.response_ids + 1) * 4 ** torch.arange(episodes.response_ids.shape[1])
        return (_STATES * episodes.prompt_ids[:, :1] + digits.cumsum(1) - digits)[episodes.action_mask]

    def action_scores(self, observations: EpisodeBatch) -> ActionScores:
        """Return log-probs and entropies of all actions."""
        log_probs = self.logits[self.states(observations)].log_softmax(dim=-1)
        log_prob = log_probs.gather(1, observations.actions[:, None]).squeeze(1)
        return ActionScores(log_prob, -(log_probs.exp() * log_probs).sum(dim=-1), log_prob, None)

    def predict_values(self, observations: EpisodeBatch) -> Tensor:
        """Return the values of all actions' states."""
        return self.values[self.states(observations)]

    def evaluate_actions(self, observations: EpisodeBatch, actions: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return values, log-probs and entropies of all actions."""
        scores = self.action_scores(observations)
        return self.predict_values(observations), scores.log_prob, scores.entropy

    @torch.no_grad()
    def score(self, episodes: EpisodeBatch) -> EpisodeScores:
        """Return what a rollout stores."""
        values, log_prob, entropy = self.evaluate_actions(episodes)
        reference = self.ref_logits[self.states(episodes)].log_softmax(dim=-1)
        ref_log_prob = reference.gather(1, episodes.actions[:, None]).squeeze(1)
        return EpisodeScores(values, log_prob, entropy, ref_log_prob, log_prob)

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        raise NotImplementedError


class _Recorder(torch.optim.Optimizer):
    """Stores the gradients of each step and changes no parameter."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1.0})
        self.steps: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.steps.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters])


class TabularEnv(VecEnv):
    """Environment of `n` prompts; the reward is paid for the last token of a response.

    Args:
        prompts: prompt of each episode.
        reward: reward of a response.
    """

    def __init__(self, prompts: Sequence[int], reward: Reward) -> None:
        self.prompts, self.reward = list(prompts), reward
        box = spaces.Box(0, VOCABULARY, (LENGTH,), np.int64)
        super().__init__(len(prompts), spaces.Dict({"input_encoded_pt": box}), spaces.Discrete(VOCABULARY))
        self.attributes = {"max_episode_length": LENGTH, "terminate_on_eos": False, "eos_token_ids": [END]}

    def reset(self) -> Any:
        """Return the prompts."""
        prompts = np.asarray(self.prompts)[:, None]
        return {"prompt_or_input_encoded_pt": prompts, "prompt_or_input_attention_mask_pt": np.ones_like(prompts)}

    def play(self, episodes: EpisodeBatch) -> np.ndarray:
        """Return the rewards of all actions, flat `[n_tokens]`."""
        rewards = torch.zeros(episodes.response_ids.shape, dtype=torch.float64)
        for row, (prompt, response) in enumerate(zip(self.prompts, responses_of(episodes), strict=True)):
            rewards[row, len(response) - 1] = self.reward(prompt, response)
        return rewards[episodes.action_mask].numpy()

    def get_attr(self, name: str, indices: Any = None) -> list[Any]:
        """Return an attribute, as `TextVecEnv` does."""
        if name == "sample":
            return [Sample(str(index), str(prompt)) for index, prompt in enumerate(self.prompts)]
        return [self.attributes[name]]

    def step_async(self, actions: np.ndarray) -> None:
        """Not used."""

    def step_wait(self) -> Any:
        """Not used."""

    def close(self) -> None:
        """Do nothing."""

    def set_attr(self, name: str, value: Any, indices: Any = None) -> None:
        """Not used."""

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Not used."""
        return []

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Return False for each episode."""
        return [False] * self.num_envs


def all_responses(*, ends: bool = False) -> list[Response]:
    """Return all responses of three tokens; with `ends`, those that stop at their first token 0."""
    whole = itertools.product(range(VOCABULARY), repeat=LENGTH)
    if not ends:
        return list(whole)
    return sorted({each[: each.index(END) + 1] if END in each else each for each in whole})


def episodes_of(prompts: Sequence[int], responses: Sequence[Response]) -> EpisodeBatch:
    """Return episodes with these prompts and responses."""
    width = max(map(len, responses))
    ids = torch.tensor([[*response, *[0] * (width - len(response))] for response in responses])
    lengths = torch.tensor(list(map(len, responses)))
    prompt_ids = torch.tensor(prompts)[:, None]
    mask = torch.arange(width) < lengths[:, None]
    return EpisodeBatch(prompt_ids, torch.ones_like(prompt_ids).bool(), ids, mask, torch.zeros(len(responses)).bool())


def responses_of(episodes: EpisodeBatch) -> list[Response]:
    """Return the responses as tuples of tokens."""
    return [tuple(ids[mask].tolist()) for ids, mask in zip(episodes.response_ids, episodes.response_mask, strict=True)]


class Enumeration:
    """All batches of an algorithm's rollout, each with its probability and the gradient of the first step.

    Args:
        algorithm: class of the algorithm.
        reward: reward of a response.
        prompts: prompt of each episode of a batch; a batch has one response for each.
        ends: whether responses end at their first token 0, so that they have different lengths.
        kl_coeff: coefficient of the KL penalty in the reward.
        estimator: estimator of the KL.
        arguments: of the algorithm; one epoch of one minibatch, without clipping of the gradient.
    """

    def __init__(
        self,
        algorithm: type[OnPolicyTextAlgorithm],
        reward: Reward,
        prompts: Sequence[int] = (0,),
        *,
        ends: bool = False,
        kl_coeff: float = 0.0,
        estimator: Any = "k1",
        **arguments: Any,
    ) -> None:
        self.prompts, self.ends = list(prompts), ends
        known = algorithm.arguments_class.__dataclass_fields__
        one_step: Mapping[str, Any] = {"n_epochs": 1, "critic_epochs": 1, "batch_size": 10**6, "max_grad_norm": None}
        fixed = {name: value for name, value in one_step.items() if name in known}
        self.algorithm: Any = algorithm(
            TabularPolicy,  # type: ignore[arg-type]
            TabularEnv(prompts, reward),
            policy_kwargs={"n_prompts": max(prompts) + 1},
            kl_controller=FixedKLController(kl_coeff, estimator=estimator),
            **{"n_steps": 1, "learning_rate": 1.0, "seed": 0, "device": "cpu", **fixed, **arguments},
        )
        self.algorithm.set_logger(configure(None, []))
        self.algorithm.rollout_buffer.dtype = torch.float64
        self.policy: TabularPolicy = self.algorithm.policy  # type: ignore[assignment]

    def batches(self) -> Iterator[tuple[EpisodeBatch, float]]:
        """Yield each batch of episodes with its probability under the policy."""
        for responses in itertools.product(all_responses(ends=self.ends), repeat=len(self.prompts)):
            episodes = episodes_of(self.prompts, responses)
            yield episodes, float(self.policy.action_scores(episodes).log_prob.detach().sum().exp())

    def gradients(self, episodes: EpisodeBatch) -> Gradients:
        """Return the gradients of the algorithm's first step on a rollout of these episodes."""
        algorithm = self.algorithm
        self.policy.next_episodes, self.policy.recorder.steps = episodes, []
        algorithm.rollout_buffer.reset()
        algorithm.collector.collect(algorithm.rollout_buffer, 1, adapt_kl=False)
        algorithm.train()
        return Gradients(*self.policy.recorder.steps[0])

    def expected(self) -> Gradients:
        """Return the expected gradients."""
        total = Gradients(torch.zeros_like(self.policy.logits), torch.zeros_like(self.policy.values))
        for episodes, probability in self.batches():
            found = self.gradients(episodes)
            total = Gradients(*(a + probability * b for a, b in zip(total, found, strict=True)))
        return total
