"""Exact expected gradients: a policy that is a table of logits, three tokens, responses of at most three tokens.

    logits[s]      of the next token after the prompt and the tokens s         3 numbers
    values[s]      value of this state                                         1 number
    E[gradient]    sum over all batches of n responses of P(batch) x gradient of the algorithm's first step

All numbers are float64. An algorithm runs as on a language model: rollout, buffer, update. Only `generate` and the
optimizer are replaced: every possible batch is returned once, and gradients are stored instead of applied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.logger import configure
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rl4lms_like.algorithms.arguments import NLPOArguments
from rl4lms_like.algorithms.fisher import FlatParameters
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.kl_estimators import Estimator, Placement
from rl4lms_like.core.losses import kl_estimate
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.token_masks import contains
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.rollouts.text_rollouts import with_text_rollouts
from rl4lms_like.system.schema import signature_of
from rl4lms_like.testing.tabular_policy import END, LENGTH, VOCABULARY, Recorder, TabularPolicy

Response = tuple[int, ...]
Reward = Callable[[int, Response], float]
"""Reward of a response to a prompt; a multiple of 1/8, which float32 represents exactly."""

Gradients = dict[str, Tensor]
"""Gradient of each of the policy's parameters by name, here `logits` `[n_prompts * 16, 3]` and `values`."""


class TabularEnv(VecEnv):
    """Environment of `n` prompts; the reward is paid for the last token of a response.

    Args:
        prompts: prompt of each episode.
        reward: reward of a response.
    """

    def __init__(self, prompts: Sequence[int], reward: Reward) -> None:
        self.prompts = list(prompts)
        self.reward = reward

        # What a collector reads of a `TextVecEnv`, by `get_attr`.
        self.attributes = {
            "max_episode_length": LENGTH,
            "terminate_on_eos": False,
            "eos_token_ids": [END],
            "stop_strings": (),
            "layout": SimpleNamespace(
                tokenizer=SimpleNamespace(all_special_ids=[END]),
                continuations=SimpleNamespace(follows_prompt=False),
                numbers=lambda samples: None,  # no pictures
            ),
            "render_mode": None,
        }
        box = spaces.Box(0, VOCABULARY, (LENGTH,), np.int64)
        super().__init__(len(prompts), spaces.Dict({"input_encoded_pt": box}), spaces.Discrete(VOCABULARY))

    def reset(self) -> Any:
        """Return the prompts."""
        prompts = np.asarray(self.prompts)[:, None]
        return {"prompt_or_input_encoded_pt": prompts, "prompt_or_input_attention_mask_pt": np.ones_like(prompts)}

    def play(self, episodes: EpisodeBatch) -> np.ndarray:
        """Return the rewards of all actions, flat `[n_tokens]`."""
        rewards = torch.zeros(episodes.response_ids.shape, dtype=torch.float64)  # [n, response_len]
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


def all_responses(length: int = LENGTH, *, ends: bool = False, observed: bool = False) -> list[Response]:
    """Return all responses of `length` tokens.

    Args:
        length: number of tokens, at most three.
        ends: responses stop at their first token 0.
        observed: the second token of longer responses is the environment's: 2 after the token 1, else 1.
    """
    # A set: responses that end early are the beginning of several full ones, and count once.
    responses: set[Response] = set()
    for tokens in itertools.product(range(VOCABULARY), repeat=length):
        n_tokens = tokens.index(END) + 1 if ends and END in tokens else length
        responses.add(tokens[:n_tokens])

    # The environment answers the first token: its own token is no choice of the policy.
    if observed:
        responses = {tokens for tokens in responses if len(tokens) == 1 or tokens[1] == 1 + tokens[0] % 2}
    return sorted(responses)


def episodes_of(prompts: Sequence[int], responses: Sequence[Response], *, observed: bool = False) -> EpisodeBatch:
    """Return episodes with these prompts and responses.

    Args:
        prompts: prompt of each episode.
        responses: response of each episode.
        observed: whether the second token of longer responses is the environment's.
    """
    width = max(map(len, responses))
    padded = [[*response, *[0] * (width - len(response))] for response in responses]
    lengths = torch.tensor([len(response) for response in responses])
    positions = torch.arange(width)
    response_mask = positions < lengths[:, None]  # [n, width]

    # All count as truncated, which has no effect: values after an episode are not used (`bootstrap_truncated`).
    prompt_ids = torch.tensor(prompts)[:, None]  # [n, 1]
    return EpisodeBatch(
        prompt_ids=prompt_ids,
        prompt_mask=torch.ones_like(prompt_ids).bool(),
        response_ids=torch.tensor(padded),
        response_mask=response_mask,
        terminated=torch.zeros(len(responses)).bool(),
        observed=response_mask & (positions == 1) if observed else None,
    )


def responses_of(episodes: EpisodeBatch) -> list[Response]:
    """Return the responses as tuples of tokens."""
    rows = zip(episodes.response_ids, episodes.response_mask, strict=True)
    return [tuple(ids[mask].tolist()) for ids, mask in rows]


class Enumeration:
    """All batches of an algorithm's rollout, each with its probability and the gradient of the first step.

    Args:
        algorithm: class of the algorithm. For NLPO and its subclasses, actions are chosen from the allowed tokens. For
            TRPO the gradient is that of its surrogate.
        reward: reward of a response.
        prompts: prompt of each episode of a batch; a batch has one response for each. For groups, repeat each prompt
            `group_size` times.
        length: number of tokens of a response, at most three.
        ends: whether responses end at their first token 0, so that they have different lengths.
        observed: whether the second token of longer responses is the environment's.
        distance: distance in standard deviations between the policy of the rollout and the one whose step is computed,
            as in later steps of an update; 0 = the first step, with ratios of 1.
        temperatures: temperatures of the sampling, one for each position.
        kl_coeff: coefficient of the KL penalty.
        placement: whether the penalty is in the `reward`, the `advantage` or the `loss`.
        estimator: estimator of the KL; default: k3 in the loss, else k1.
        policy: class of the policy; the tokens of other policies than `TabularPolicy` are not masked.
        policy_kwargs: its arguments.
        arguments: of the algorithm; one epoch of one minibatch, without clipping of the gradient. Dynamic sampling
            leaves out groups, but generates no further ones.
    """

    def __init__(
        self,
        algorithm: type[OnPolicyAlgorithm],
        reward: Reward,
        prompts: Sequence[int] = (0,),
        *,
        length: int = LENGTH,
        ends: bool = False,
        observed: bool = False,
        distance: float = 0.0,
        temperatures: Sequence[float] = (1.0,) * LENGTH,
        kl_coeff: float = 0.0,
        placement: Placement = "reward",
        estimator: Estimator | None = None,
        policy: type[LMActorCriticPolicy] = TabularPolicy,
        policy_kwargs: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.reward = reward
        self.prompts = list(prompts)
        self.observed = observed
        self.distance = distance
        self.temperatures = temperatures
        self.responses = all_responses(length, ends=ends, observed=observed)

        # The algorithm is built as by a user, but with a single step on the whole rollout (`_ONE_STEP`).
        arguments_class = getattr(algorithm, "arguments_class", algorithm)
        self.has_masks = isinstance(arguments_class, type) and issubclass(arguments_class, NLPOArguments)
        names = {argument.name for argument in signature_of(arguments_class).arguments} | arguments.keys()
        one_step = {name: value for name, value in _ONE_STEP.items() if name in names}
        if policy_kwargs is None:
            policy_kwargs = {"n_prompts": max(prompts) + 1, **_SAMPLING}
        text_algorithm: Any = with_text_rollouts(algorithm)
        self.algorithm: Any = text_algorithm(
            policy,
            TabularEnv(prompts, reward),
            policy_kwargs=dict(policy_kwargs),
            kl_controller=FixedKLController(kl_coeff, estimator=estimator, placement=placement),
            **{"seed": 0, "device": "cpu", **arguments, **one_step},
        )

        # No logs, and no warning where ratios differ from 1 on purpose. Float64, so that a tolerance can be small.
        self.algorithm.set_logger(configure(None, []))
        self.algorithm.warns_of_ratio = False
        self.algorithm.rollout_buffer.dtype = torch.float64

        # Groups with equal rewards are left out, but not replaced: a batch is one of the enumeration.
        collector = self.algorithm.collector
        if collector.options.dynamic_sampling is not None:
            collector.options = replace(collector.options, dynamic_sampling=1)

        # Log-probs of the sampling are kept where it has another distribution, as for a `temperature` of the policy.
        if any(temperature != 1.0 for temperature in temperatures):
            collector.options = replace(collector.options, record_log_prob=True)

        # The only two replacements: batches come from the enumeration, and gradients are stored instead of applied.
        self.policy: Any = self.algorithm.policy
        self.policy.optimizer = Recorder(self.policy.optimizer.param_groups)
        self.policy.generate = lambda *prompts, **options: next(self._generated)
        if issubclass(algorithm, TRPO):  # its step does not use the optimizer
            self.algorithm._policy_step = self._record_surrogate

    def episodes(self, prompts: Sequence[int], responses: Sequence[Response]) -> EpisodeBatch | None:
        """Return episodes with these prompts and responses; None if a mask does not allow one of them."""
        episodes = episodes_of(prompts, responses, observed=self.observed)
        if self.has_masks:
            masks = self.policy.masks(episodes)
            if not bool(contains(masks, episodes.actions).all()):
                return None
            episodes = replace(episodes, allowed=masks)

        # mu of importance weights pi / mu, as an engine returns it.
        return replace(episodes, behavior_log_prob=self.log_prob(episodes).detach())

    def log_prob(self, episodes: EpisodeBatch) -> Tensor:
        """Return the log-probs of all actions under the distribution of the sampling `[n_tokens]`, with gradient."""
        if isinstance(self.policy, TabularPolicy):
            return self.policy.sampling_log_prob(episodes, self.temperatures)
        log_prob: Tensor = self.policy.action_scores(episodes).log_prob
        return log_prob

    def batches(self) -> Iterator[tuple[EpisodeBatch, float]]:
        """Yield each batch of episodes with its probability under the policy."""
        # Responses are independent, so the probability of a batch is the product of those of all its tokens.
        for responses in itertools.product(self.responses, repeat=len(self.prompts)):
            episodes = self.episodes(self.prompts, responses)
            if episodes is not None:
                assert episodes.behavior_log_prob is not None
                yield episodes, float(episodes.behavior_log_prob.sum().exp())

    def gradients(self, *generated: EpisodeBatch) -> Gradients:
        """Return the gradients of the algorithm's first step on a rollout of these generation batches."""
        algorithm = self.algorithm
        self._generated = iter(generated)
        self.policy.optimizer.first.clear()
        algorithm.rollout_buffer.reset()

        # As many tokens as there are, so that `generate` is called once for each batch. The KL coefficient stays.
        n_tokens = sum(episodes.n_tokens for episodes in generated)
        algorithm.collector.collect(algorithm.rollout_buffer, n_tokens, updates_policy=False)
        with self.moved():
            algorithm.train()

        # A parameter that the loss does not contain has no gradient.
        first = self.policy.optimizer.first
        gradients: Gradients = {}
        for name, parameter in self.policy.named_parameters():
            if parameter.requires_grad:
                gradients[name] = first[parameter] if parameter in first else torch.zeros_like(parameter)
        return gradients

    def expected(self) -> Gradients:
        """Return the expected gradients."""
        total: Gradients = {}
        for episodes, probability in self.batches():
            for name, gradient in self.gradients(episodes).items():
                total[name] = total.get(name, 0.0) + probability * gradient
        return total

    def objective(self) -> Tensor:
        """Return the expected reward minus the KL penalty of a response, summed over the prompts, with gradient.

        Estimates of the KL in the reward have no gradient of their own. Those in the loss have, but the probabilities
        that they are weighted with have none.
        """
        total = torch.zeros((), dtype=torch.float64)
        controller: Any = self.algorithm.kl_controller
        for prompt, response in itertools.product(dict.fromkeys(self.prompts), self.responses):
            episodes = self.episodes([prompt], [response])
            if episodes is None:
                continue

            # With masks: actions are sampled from the allowed tokens, the KL is that of the whole distributions.
            log_prob = self.policy.action_scores(episodes).raw_log_prob
            kl = kl_estimate(log_prob, self.policy.score(episodes).ref_log_prob, controller.estimator).sum()
            probability = self.log_prob(episodes).sum().exp()

            # J = sum over responses of P(response) (reward - coeff KL); the gradient flows through P or through KL.
            is_reward = controller.placement == "reward"
            penalty = probability * kl.detach() if is_reward else probability.detach() * kl
            total = total + probability * self.reward(prompt, response) - controller.coeff * penalty
        return total

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Change the tables by random numbers of size `distance` within the context."""
        tables = [self.policy.logits, self.policy.values] if self.distance else []
        data_before = [table.data for table in tables]

        # The same numbers each time: all batches must be those of one moved policy.
        generator = torch.Generator().manual_seed(1)
        try:
            for table in tables:
                noise = torch.randn(table.shape, generator=generator, dtype=table.dtype)
                table.data = table.data + self.distance * noise
            yield
        finally:
            for table, data in zip(tables, data_before, strict=True):
                table.data = data

    def _record_surrogate(self, rollout: Any) -> dict[str, Tensor]:
        """Store the gradient of TRPO's surrogate in place of its step."""
        logits = self.policy.logits
        gradient, info = self.algorithm._gradient(rollout, FlatParameters([logits]))
        self.policy.optimizer.first[logits] = -gradient.view_as(logits)
        skipped: dict[str, Tensor] = self.algorithm._no_step(info)
        return skipped


_SAMPLING: Mapping[str, Any] = {"generation_kwargs": {"do_sample": True}}
"""Policy arguments that importance weights require; `Enumeration` replaces the sampling itself."""

_ONE_STEP: Mapping[str, Any] = {
    "n_epochs": 1,
    "critic_epochs": None,
    "n_critic_updates": 1,
    "n_steps": 10**6,
    "batch_size": 10**6,
    "max_grad_norm": 1e9,
    "learning_rate": 1.0,
    "critic_only_iterations": 0,
    "critic_pretrain": None,
    "bootstrap_truncated": False,
}
"""Arguments of a single step on the whole rollout, used if the algorithm has them."""
