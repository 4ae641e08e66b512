"""One rollout and one update of an algorithm on a tiny model, for `check_algorithm`.

tiny model ─ policy ─ environment ─ algorithm ─ collect ─ train() ─> weights before and after, first ratio, classes
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from torch import Tensor

from rl4lms_like.algorithms.arguments import NLPOArguments
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.policies import POLICIES
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.rollouts.text_rollouts import with_text_rollouts
from rl4lms_like.system.schema import signature_of
from rl4lms_like.testing.models import make_causal_lm, make_seq2seq_lm, make_tokenizer, save_model

SMALL = {"n_steps": 16, "batch_size": 32, "n_epochs": 2, "learning_rate": 1e-3, "critic_only_iterations": 0}
"""Arguments for a fast update, used if the algorithm has them and the user did not set them."""

N_ENVS = 4
"""Number of episodes that are generated together; the size of a group, for algorithms with groups."""

MASKS = {"mask_type": "learned_top_k", "top_mask": 40, "target_update_iterations": 2}


class LowTokens(RewardFunction):
    """Reward of 0.1 for every token with a small id, so that every token has a learning signal."""

    def __call__(
        self, prev_observation: Any, action: int, current_observation: Any, done: bool, meta_info: Any = None
    ) -> float:
        return 0.1 * float(action < 30)


@dataclass(frozen=True)
class Update:
    """Observations of one rollout and one update.

    Args:
        before: the policy's weights after the rollout, by name.
        after: the policy's weights after the update, by name.
        ratio_gap: largest |ratio - 1| in the first minibatch, or None if it could not be observed.
        changed_classes: attributes of the model's and the policy's classes that were changed.
    """

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    ratio_gap: float | None
    changed_classes: list[str]

    def moved(self, part: str) -> float:
        """Return the largest change of a weight of a part, for instance `policy_model` or `ref_model`."""
        names = [name for name in self.before if name.startswith(part)]
        return max((float((self.after[name] - self.before[name]).abs().max()) for name in names), default=0.0)


def one_update(algorithm: type[OnPolicyAlgorithm], family: str, seed: int, args: Mapping[str, Any]) -> Update:
    """Build the algorithm on a tiny model, collect a rollout and train on it.

    Args:
        algorithm: any on-policy algorithm.
        family: `causal` or `seq2seq`.
        seed: random seed.
        args: the algorithm's own arguments.
    """
    # What kind of algorithm: its arguments say whether it needs masks, groups or a teacher.
    arguments_class = getattr(algorithm, "arguments_class", algorithm)
    has_masks = isinstance(arguments_class, type) and issubclass(arguments_class, NLPOArguments)
    defaults = {argument.name: argument.default for argument in signature_of(arguments_class).arguments}
    small = {name: value for name, value in SMALL.items() if name in defaults}
    if defaults.get("group_size", 1) > 1:
        small["group_size"] = N_ENVS

    policy = POLICIES.resolve(f"{'maskable_' if has_masks else ''}{family}_lm_actor_critic_policy")
    tokenizer = make_tokenizer(append_eos=family == "seq2seq")
    make = make_causal_lm if family == "causal" else make_seq2seq_lm
    architecture = "gpt2" if family == "causal" else "t5"
    model = make(architecture, tokenizer)

    # The files are needed until the policy has loaded them.
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, model, tokenizer)
        policy_kwargs: dict[str, Any] = {"model_name": folder, "generation_kwargs": {"do_sample": True, "top_k": 0}}
        if has_masks:
            policy_kwargs |= MASKS
        if getattr(arguments_class, "needs_teacher", False):
            teacher = make(architecture, tokenizer, seed=1)
            policy_kwargs["teacher_model"] = str(save_model(f"{folder}/teacher", teacher, tokenizer))

        # Weights that are in no file, such as the critic's output layer, must be equal in a second training.
        torch.manual_seed(derived_seed(seed, "weights"))
        text_algorithm: Any = with_text_rollouts(algorithm)
        built = text_algorithm(
            policy,
            _environment(tokenizer, model.config, family, seed),
            policy_kwargs=policy_kwargs,
            kl_controller=FixedKLController(0.05, placement=getattr(arguments_class, "kl_placement", "reward")),
            **{"seed": seed, "device": "cpu"} | small | dict(args),
        )

    # An algorithm that patches a method of transformers changes it for every other model of the process.
    methods_before = _attributes_of_classes(built.policy)
    observer = _UpdateObserver(built)
    built.learn(1)
    methods = _attributes_of_classes(built.policy)
    names = methods_before.keys() | methods.keys()
    changed = sorted(name for name in names if methods_before.get(name) is not methods.get(name))
    return Update(observer.before, _weights(built.policy), observer.ratio_gap(), changed)


def _environment(tokenizer: Any, config: Any, family: str, seed: int) -> TextVecEnv:
    env = TextVecEnv(
        N_ENVS,
        tokenizer,
        LowTokens(),
        [Sample(str(index), f"Count with me {'1 2 3 4 5 6'[: 2 * index]}") for index in range(7)],
        max_episode_length=8,
        max_prompt_length=14,
        terminate_on_eos=True,
        vocab_size=config.vocab_size,
        context_start_token=config.decoder_start_token_id if family == "seq2seq" else None,
    )
    env.seed(seed)
    return env


class _UpdateObserver:
    """Records the start of an update: the weights, the first minibatch and its log-probs."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm
        self.before: dict[str, Tensor] = {}
        self._minibatch: Any = None
        self._gap: float | None = None

        # The two calls that every algorithm of Stable-Baselines3 makes in `train`, whatever its loss is.
        self._get = algorithm.rollout_buffer.get
        self._evaluate = algorithm.policy.evaluate_actions
        algorithm.rollout_buffer.get = self._get_minibatches
        algorithm.policy.evaluate_actions = self._evaluate_actions

    def ratio_gap(self) -> float | None:
        """Return the gap logged by the algorithm, or else the observed one."""
        logged = self.algorithm.logger.name_to_value.get("train/ratio_gap")
        return self._gap if logged is None else float(logged)

    def _get_minibatches(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for minibatch in self._get(*args, **kwargs):
            if not self.before:  # the first minibatch: no step has been made
                self.before = _weights(self.algorithm.policy)
            self._minibatch = minibatch
            yield minibatch

    def _evaluate_actions(self, *args: Any, **kwargs: Any) -> Any:
        result = self._evaluate(*args, **kwargs)
        log_prob = result[1]

        # The first call only. Where an algorithm uses micro-batches, the shapes differ and the gap stays unknown.
        minibatch = self._minibatch
        if self._gap is None and minibatch is not None and log_prob.shape == minibatch.old_log_prob.shape:
            ratio = (log_prob.detach() - minibatch.old_log_prob).exp()
            self._gap = float((ratio - 1).abs().max())
        return result


def _weights(policy: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in policy.named_parameters()}


def _attributes_of_classes(policy: Any) -> dict[str, Any]:
    """Return the attributes of all classes of the policy and its modules, by full name."""
    owners: set[type] = set(type(policy).__mro__)
    for module in policy.modules():
        owners |= set(type(module).__mro__)

    # Methods and properties; other attributes, such as caches of transformers, may change.
    attributes: dict[str, Any] = {}
    for owner in owners - {object}:
        for name, value in vars(owner).items():
            if callable(value) or isinstance(value, property | classmethod | staticmethod):
                attributes[f"{owner.__module__}.{owner.__qualname__}.{name}"] = value
    return attributes
