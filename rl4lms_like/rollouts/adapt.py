"""Text rollouts for any Stable-Baselines3 on-policy algorithm.

    TextPPO = with_text_rollouts(stable_baselines3.PPO)
    TextPPO(CausalLMActorCriticPolicy, env, policy_kwargs={"model_name": "gpt2"}).learn(100_000)

The algorithm keeps its own `train()`; only the collection of rollouts is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import get_device
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rl4lms_like.core.errors import RL4LMsLikeError
from rl4lms_like.core.interruption import Interruption
from rl4lms_like.core.out_of_memory import in_part
from rl4lms_like.core.ranks import Ranks
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.policies.arguments import generates_ahead
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.rollouts.kl import FixedKLController, KLController
from rl4lms_like.rollouts.progress import UpdateProgress
from rl4lms_like.rollouts.supported import unsupported, unsupported_with

Algorithm = TypeVar("Algorithm", bound=OnPolicyAlgorithm)


class TextRollouts:
    """Mixin that makes an `OnPolicyAlgorithm` collect whole episodes; it precedes the algorithm in the bases.

    Args:
        kl_controller: controller of the KL coefficient; default: no penalty, and no reference model is loaded.
        norm_reward: see `RolloutCollector`.
        bootstrap_truncated: see `RolloutCollector`.
        score_batch_size: see `RolloutCollector`.
        sort_by_length: see `EpisodeBuffer`.
        value_gae_lambda: see `EpisodeBuffer`.
        gae_length_alpha: see `EpisodeBuffer`.
        group_size: see `RolloutCollector`.
        dynamic_sampling: see `RolloutCollector`.
        first_token_temperature: see `RolloutCollector`.
        record_log_prob: see `RolloutCollector`.
        ranks: the processes that train together, see `RolloutCollector`.

    Attributes:
        interruption: handles Ctrl-C and SIGTERM; in a rollout they stop the run immediately.
        on_step: called at the start of an update and after each of its steps, if the algorithm can resume from there.
            An exception that it raises ends the update.
        update: progress of the update on the rollout in the buffer; None while the rollout is incomplete.
    """

    def __init__(
        self,
        *args: Any,
        kl_controller: KLController | None = None,
        norm_reward: bool = False,
        bootstrap_truncated: bool = False,
        score_batch_size: int | None = None,
        sort_by_length: bool = False,
        value_gae_lambda: float | None = None,
        gae_length_alpha: float | None = None,
        group_size: int = 1,
        dynamic_sampling: int | None = None,
        first_token_temperature: float | None = None,
        record_log_prob: bool = False,
        ranks: Ranks | None = None,
        **kwargs: Any,
    ) -> None:
        policy = args[0] if args else kwargs.get("policy")
        if isinstance(policy, type) and (reason := unsupported_with(type(self), policy)):
            raise RL4LMsLikeError(f"{type(self).__name__} cannot be trained on text rollouts: {reason}")
        if (kwargs.get("policy_kwargs") or {}).get("critic") == "none" and not hasattr(self, "arguments_class"):
            message = "learns values: choose critic 'separate' or 'shared', or an algorithm without a critic"
            raise RL4LMsLikeError(f"{type(self).__name__} {message}")
        self.ranks = ranks or Ranks()
        if self.ranks.size > 1 and not hasattr(self, "arguments_class"):
            message = "sums no gradients over processes: use an algorithm of this library, or one process"
            raise RL4LMsLikeError(f"{type(self).__name__} {message}")
        if generates_ahead(kwargs.get("policy_kwargs") or {}):
            if not getattr(self, "learns_off_policy", False):
                message = "cannot correct for rollouts of older weights: remove ahead from the engine"
                raise RL4LMsLikeError(f"{type(self).__name__} {message}")
            if self.ranks.size > 1:
                raise RL4LMsLikeError("an engine generates ahead for a single process only: remove ahead")
        self.kl_controller = kl_controller or FixedKLController(0.0)
        self._collector_options = {
            "norm_reward": norm_reward,
            "bootstrap_truncated": bootstrap_truncated,
            "score_batch_size": score_batch_size,
            "group_size": group_size,
            "dynamic_sampling": dynamic_sampling,
            "first_token_temperature": first_token_temperature,
            "record_log_prob": record_log_prob,
        }
        self._iteration: tuple[int, int] | None = None
        self.interruption = Interruption()
        self.on_step: Callable[[], None] = _nothing
        self.update: UpdateProgress | None = None
        self._continues_update = False
        kwargs["rollout_buffer_class"] = EpisodeBuffer
        kwargs["rollout_buffer_kwargs"] = {
            "sort_by_length": sort_by_length,
            "value_gae_lambda": value_gae_lambda,
            "gae_length_alpha": gae_length_alpha,
        }
        # A new dict: Stable-Baselines3 adds to it in place, which must not change the caller's.
        kwargs["policy_kwargs"] = {
            "use_reference": self._needs_reference,
            "device": get_device(kwargs.get("device", "auto")),
            **(kwargs.get("policy_kwargs") or {}),
        }
        super().__init__(*args, **kwargs)

    @property
    def _needs_reference(self) -> bool:
        return self.kl_controller.coeff != 0

    def _setup_model(self: Any) -> None:
        super()._setup_model()  # type: ignore[misc]
        seed = int(np.random.SeedSequence().generate_state(1)[0]) if self.seed is None else self.seed
        self.sampling_seed = seed
        self.rollout_buffer.seed(derived_seed(seed, "minibatches"))
        self.policy.updates_engine = self.ranks.is_main
        # Loaded without an environment, an algorithm gets its collector when it first learns.
        self.collector: Any = None if self.env is None else self._make_collector(self.env)

    def _make_collector(self: Any, env: VecEnv) -> RolloutCollector:
        options = {"kl": self.kl_controller, "seed": self.sampling_seed, **self._collector_options}
        return RolloutCollector(env, self.policy, ranks=self.ranks, **options)

    def _use(self: Any, env: VecEnv) -> None:
        """Collect rollouts in this environment from now on."""
        if self.collector is None:
            self.collector = self._make_collector(env)
        elif self.collector.env is not env:
            self.collector.use(env)

    def _setup_learn(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.env is None:
            message = "has no environment: pass env=... to `load`, or call `set_env` before `learn`"
            raise RL4LMsLikeError(f"{type(self).__name__} {message}")
        return super()._setup_learn(*args, **kwargs)  # type: ignore[misc]

    def collect_rollouts(
        self: Any, env: VecEnv, callback: BaseCallback, rollout_buffer: EpisodeBuffer, n_rollout_steps: int
    ) -> bool:
        """Collect at least `n_rollout_steps * n_envs` tokens in whole episodes, in place of Stable-Baselines3's method.

        Callbacks are called once per rollout, so that their frequencies (`save_freq`, `eval_freq`) count rollouts.
        `num_timesteps` counts tokens.

        Returns:
            False if a callback asked to stop.
        """
        if self._continues_update:  # the rollout of an interrupted update was restored
            self._continues_update = False
            self.num_timesteps += rollout_buffer.n_tokens
            return True
        self.update = None
        self.policy.set_training_mode(False)
        rollout_buffer.reset()
        callback.on_rollout_start()
        self._use(env)
        start = time.perf_counter()
        with self.interruption.at_any_moment():
            self.collector.on_batch = self.interruption.check
            info = self.collector.collect(rollout_buffer, n_rollout_steps * self.collector.n_envs)
        self.update = UpdateProgress()
        info["time/rollout_s"] = time.perf_counter() - start
        self.num_timesteps += rollout_buffer.n_tokens
        self.ep_info_buffer.extend(self.collector.episode_infos)
        for key, value in info.items():
            self.logger.record(key, value)
        callback.update_locals(locals())
        if not callback.on_step():
            return False
        callback.on_rollout_end()
        return True

    def learn_iteration(self: Any, iteration: int, n_iterations: int) -> None:
        """Run one rollout and one update; schedules receive `iteration / n_iterations` as progress."""
        self._iteration = (iteration, n_iterations)
        is_first = (
            self.num_timesteps == 0 and not self._continues_update
        )  # Stable-Baselines3 then resets the environment
        try:
            with in_part("update"):  # the parts of a rollout have their own `in_part`
                self.learn(total_timesteps=1, reset_num_timesteps=is_first, log_interval=None)
        finally:
            self._iteration = None
        self._custom_logger = True  # keep this logger instead of a new one in a new folder

    @property
    def has_sampled(self: Any) -> bool:
        """True once the environment has been used."""
        return bool(self.num_timesteps)

    def training_state(self: Any) -> dict[str, Any]:
        """Return the state that changes during a run, without the policy's, in JSON's types."""
        return {
            "num_timesteps": self.num_timesteps,
            "n_updates": self._n_updates,
            "collector": self.collector.state_dict(),
            "buffer": self.rollout_buffer.state_dict(),
        }

    def load_training_state(self: Any, state: dict[str, Any]) -> None:
        """Restore the state returned by `training_state`."""
        self.num_timesteps, self._n_updates = state["num_timesteps"], state["n_updates"]
        self.collector.load_state_dict(state["collector"])
        self.rollout_buffer.load_state_dict(state["buffer"])

    def update_state(self: Any, progress: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what resuming an update needs in addition to `training_state`: numbers in JSON's types, and tensors.

        Args:
            progress: `update.state_dict()` after the last finished step.
        """
        values = self.logger.name_to_value.items()
        recorded = [[key, value.item() if hasattr(value, "item") else value] for key, value in values]
        side = self.rollout_buffer.episodes.prompt_side
        steps = {f"step.{name}": value for name, value in self.update.logged(progress["n_steps"]).items()}
        rollout = {f"rollout.{name}": tensor for name, tensor in self.rollout_buffer.rollout().items()}
        return {"progress": progress, "recorded": recorded, "prompt_side": side}, steps | rollout

    def load_update_state(self: Any, numbers: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore the state returned by `update_state`; call `load_training_state` first."""
        parts: dict[str, dict[str, Tensor]] = {"step": {}, "rollout": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor.to(self.device)
        self.rollout_buffer.load_rollout(parts["rollout"], numbers["prompt_side"])
        self.update = UpdateProgress()
        self.update.load_state_dict(numbers["progress"], parts["step"])
        for key, value in numbers["recorded"]:
            self.logger.record(key, value)

    def continues_update(self: Any) -> bool:
        """Return whether an interrupted update can be resumed; if so, `learn_iteration` finishes it first."""
        if self.update is None or not self.update.can_go_on:
            return False
        self.update.is_over = False
        self.num_timesteps -= self.rollout_buffer.n_tokens  # `collect_rollouts` adds them again
        self._continues_update = True
        return True

    def _excluded_save_params(self: Any) -> list[str]:
        return [*super()._excluded_save_params(), "collector", "interruption", "on_step", "ranks", "update"]  # type: ignore[misc]

    def _update_current_progress_remaining(self: Any, num_timesteps: int, total_timesteps: int) -> None:
        if self._iteration is None:
            # Use the progress at the start of the rollout: at its end, schedules would be 0 in the last update.
            start = min(num_timesteps - self.rollout_buffer.n_tokens, total_timesteps)
            super()._update_current_progress_remaining(start, total_timesteps)  # type: ignore[misc]
        else:
            self._current_progress_remaining = 1.0 - self._iteration[0] / self._iteration[1]


def with_text_rollouts(algorithm: type[Algorithm]) -> type[Algorithm]:
    """Return a subclass of an on-policy algorithm that trains a language model; `train()` is not changed.

    Raises:
        RL4LMsLikeError: the algorithm requires features of its policy or rollouts that text does not support.
    """
    if reason := unsupported(algorithm):
        name = getattr(algorithm, "__name__", algorithm)
        raise RL4LMsLikeError(f"{name} cannot be trained on text rollouts: {reason}")
    if issubclass(algorithm, TextRollouts):
        return algorithm
    name = f"Text{algorithm.__name__}"
    doc = f"{algorithm.__name__} on whole episodes of text; see `TextRollouts`."
    return type(name, (TextRollouts, algorithm), {"__module__": algorithm.__module__, "__doc__": doc})


def _nothing() -> None:
    """Do nothing; the default of `on_step`."""
