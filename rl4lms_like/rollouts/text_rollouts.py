"""Text rollouts for any Stable-Baselines3 on-policy algorithm.

    TextPPO = with_text_rollouts(stable_baselines3.PPO)
    TextPPO(CausalLMActorCriticPolicy, env, policy_kwargs={"model_name": "gpt2"}).learn(100_000)

The algorithm keeps its own `train()`; only the collection of rollouts is replaced.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import configure_logger, get_device
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.policies import speedups
from rl4lms_like.policies.arguments import generates_ahead
from rl4lms_like.policies.speedups import all_speedups, has_speedups, stored_speedups
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.rollouts.kl import FixedKLController, KLController
from rl4lms_like.rollouts.progress import UpdateProgress, UpdateStage
from rl4lms_like.rollouts.rollout import RolloutOptions
from rl4lms_like.rollouts.supported import unsupported, unsupported_with
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.system.interruption import Interruption
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from rl4lms_like.system.ranks import Ranks

Algorithm = TypeVar("Algorithm", bound=OnPolicyAlgorithm)

# The mixin calls the methods of the algorithm that follows it in the bases; type checkers see them through this base.
if TYPE_CHECKING:
    _Mixin = OnPolicyAlgorithm
else:
    _Mixin = object


def _nothing() -> None:
    """Do nothing; the default of the hooks."""


@dataclass(frozen=True)
class RunHooks:
    """Calls of a training loop within an iteration.

    Args:
        interruption: handles Ctrl-C and SIGTERM; in a rollout they stop the run immediately.
        on_step: called at the start of an update and after each of its steps, if the algorithm can resume from there.
            An exception that it raises ends the update.
        on_rollout_end: called once for each rollout, when it has its rewards.
    """

    interruption: Interruption = field(default_factory=Interruption)
    on_step: Callable[[], None] = _nothing
    on_rollout_end: Callable[[], None] = _nothing


class TextRollouts(_Mixin):
    """Mixin that makes an `OnPolicyAlgorithm` collect whole episodes; it precedes the algorithm in the bases.

    Args:
        kl_controller: controller of the KL coefficient; default: no penalty, and no reference model is loaded.
        norm_reward: see `RolloutOptions`; ignored if there are `rollout_options`.
        rollout_options: options of the rollouts.
        ranks: the processes that train together, see `RolloutCollector`.

    Attributes:
        collector: collects the rollouts; None while there is no environment.
        hooks: those of the iteration that `learn_iteration` runs now; otherwise they do nothing.
        update_progress: of the update on the rollout in the buffer; None while the rollout is incomplete.
    """

    learns_off_policy: ClassVar[bool] = False
    """True if the update uses `Minibatch.weights`, which can correct for episodes of another policy."""
    checks_first_ratio: ClassVar[bool] = False
    """True if the update compares the log-probs of its first minibatch with those of the rollout."""
    pretraining: Any = None
    """Progress of the critic's pretraining, if the algorithm has one and it is requested."""
    collector: Any
    sampling_seed: int
    policy: Any
    rollout_buffer: Any

    def __init__(
        self,
        *args: Any,
        kl_controller: KLController | None = None,
        norm_reward: bool = False,
        rollout_options: RolloutOptions | None = None,
        ranks: Ranks | None = None,
        **kwargs: Any,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.kl_controller = kl_controller or FixedKLController(0.0)
        self.rollout_options = rollout_options or RolloutOptions(norm_reward=norm_reward)
        policy_kwargs = kwargs.get("policy_kwargs") or {}
        policy = args[0] if args else kwargs.get("policy")  # Stable-Baselines3's first argument
        if reason := self._unsupported(policy, policy_kwargs):
            raise RL4LMsLikeError(reason)

        self.hooks = RunHooks()
        self.update_progress: UpdateProgress | None = None
        self._continues_update = False

        kwargs["rollout_buffer_class"] = EpisodeBuffer
        kwargs["rollout_buffer_kwargs"] = {
            "sort_by_length": self.rollout_options.sort_by_length,
            "value_gae_lambda": self.rollout_options.value_gae_lambda,
            "gae_length_alpha": self.rollout_options.gae_length_alpha,
        }

        # A new dict: Stable-Baselines3 adds to it in place, which must not change the caller's. It names all speedups:
        # a file of `save` has them.
        kwargs["policy_kwargs"] = {
            "use_reference": self._needs_reference,
            "device": get_device(kwargs.get("device", "auto")),
            **policy_kwargs,
        }
        if has_speedups(getattr(policy, "arguments_class", None)):
            kwargs["policy_kwargs"][speedups.KEY] = all_speedups(policy_kwargs.get(speedups.KEY))
        super().__init__(*args, **kwargs)

    def _unsupported(self, policy: Any, policy_kwargs: Mapping[str, Any]) -> str | None:
        """Return why the algorithm cannot be trained with this policy in these processes; None if it can."""
        name = type(self).__name__
        is_of_this_library = hasattr(self, "arguments_class")
        if isinstance(policy, type) and (reason := unsupported_with(type(self), policy)):
            return f"{name} cannot be trained on text rollouts: {reason}"
        if policy_kwargs.get("critic") == "none" and not is_of_this_library:
            return f"{name} learns values: choose critic 'separate' or 'shared', or an algorithm without a critic"
        if self.ranks.size > 1 and not is_of_this_library:
            return f"{name} sums no gradients over processes: use an algorithm of this library, or one process"

        if generates_ahead(policy_kwargs) and not self.learns_off_policy:
            return f"{name} cannot correct for rollouts of older weights: remove ahead from the engine"
        return None

    @property
    def _needs_reference(self) -> bool:
        return self.kl_controller.coeff != 0

    def _setup_model(self) -> None:
        # `load` calls this with the attributes of its file. Version 0.2.0 had the options in two dictionaries.
        collector_options = self.__dict__.pop("_collector_options", None)
        if collector_options is not None:
            self.rollout_options = RolloutOptions(**collector_options, **self.rollout_buffer_kwargs)

        # A file of a version without some of the speedups continues without them.
        if has_speedups(getattr(self.policy_class, "arguments_class", None)):
            self.policy_kwargs[speedups.KEY] = stored_speedups(self.policy_kwargs.get(speedups.KEY))

        super()._setup_model()
        if self.seed is None:
            self.sampling_seed = int(np.random.SeedSequence().generate_state(1)[0])
        else:
            self.sampling_seed = self.seed
        self.rollout_buffer.seed(derived_seed(self.sampling_seed, "minibatches"))
        self.policy.engine.share(self.ranks)

        # `learn` makes these two on its first call; `learn_iteration` needs them without it.
        if self.ep_info_buffer is None:
            self.ep_info_buffer = deque(maxlen=self._stats_window_size)
            self.ep_success_buffer = deque(maxlen=self._stats_window_size)

        # Loaded without an environment, an algorithm gets its collector when it first learns.
        self.collector = None if self.env is None else self._make_collector(self.env)

    def _make_collector(self, env: VecEnv) -> RolloutCollector:
        return RolloutCollector(
            env,
            self.policy,
            kl=self.kl_controller,
            options=self.rollout_options,
            seed=self.sampling_seed,
            checks_ratio=self.checks_first_ratio,
            ranks=self.ranks,
        )

    def _use(self, env: VecEnv) -> None:
        """Collect rollouts in this environment from now on."""
        if self.collector is None:
            self.collector = self._make_collector(env)
        elif self.collector.env is not env:
            self.collector.use(env)

    # --- one iteration ----------------------------------------------------------------------------------------------

    def learn_iteration(self, iteration: int, n_iterations: int, hooks: RunHooks | None = None) -> None:
        """Run one rollout and one update; schedules receive `iteration / n_iterations` as progress.

        This is one turn of the loop in `learn`, without its callbacks.

        Args:
            iteration: number of completed iterations.
            n_iterations: number of all iterations of the run.
            hooks: of a training loop, see `RunHooks`.
        """
        env = self._known_environment()
        if not self._custom_logger:  # nobody has called `set_logger`
            is_first = self.num_timesteps == 0
            self.set_logger(configure_logger(self.verbose, self.tensorboard_log, type(self).__name__, is_first))

        self.hooks = hooks or RunHooks()
        try:
            with blame_memory_errors_on("update"):  # the parts of a rollout have their own `blame_memory_errors_on`
                # After `continue_update_next`, the rollout of the interrupted update is in the buffer.
                if not self._continues_update:
                    if self.num_timesteps == 0:
                        # So does `learn`. It uses up prompts, so without it the first ones would be others.
                        env.reset()
                    callback = self._init_callback(None)
                    self.collect_rollouts(env, callback, self.rollout_buffer, n_rollout_steps=self.n_steps)
                    self.hooks.on_rollout_end()
                self._continues_update = False

                self._current_progress_remaining = 1.0 - iteration / n_iterations
                self.train()
        finally:
            self.hooks = RunHooks()

    @property
    def has_unfinished_update(self) -> bool:
        """True if the rollout in the buffer has an update that can be resumed."""
        return self.update_progress is not None and self.update_progress.is_resumable

    def continue_update_next(self) -> None:
        """Let the next `learn_iteration` finish the unfinished update instead of collecting a rollout."""
        assert self.update_progress is not None
        self.update_progress.stage = UpdateStage.BETWEEN_STEPS
        self._continues_update = True

    def end_update(self) -> None:
        """Forget the update that is finished: from here on, a run that ends resumes with the next rollout."""
        self.update_progress = None

    def restore_update(self, state: dict[str, Any], logged: Mapping[str, Tensor]) -> None:
        """Restore the progress of the update on the rollout in the buffer, see `UpdateProgress.load_state_dict`."""
        self.update_progress = UpdateProgress()
        self.update_progress.load_state_dict(state, logged)

    def collect_rollouts(self, env: VecEnv, callback: BaseCallback, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        """Collect at least `n_rollout_steps * n_envs` tokens in whole episodes, in place of Stable-Baselines3's method.

        Callbacks are called once per rollout, so that their frequencies (`save_freq`, `eval_freq`) count rollouts.
        `num_timesteps` counts tokens.

        Returns:
            False if a callback asked to stop.
        """
        self.update_progress = None
        self.policy.set_training_mode(False)
        rollout_buffer.reset()
        callback.on_rollout_start()
        self._use(env)

        start = time.perf_counter()
        n_tokens = n_rollout_steps * self.collector.n_envs
        interruption = self.hooks.interruption
        with interruption.at_any_moment():
            info = self.collector.collect(rollout_buffer, n_tokens, on_batch=interruption.check)
        self.update_progress = UpdateProgress()
        info["time/rollout_s"] = time.perf_counter() - start

        self.num_timesteps += rollout_buffer.n_tokens
        assert self.ep_info_buffer is not None
        self.ep_info_buffer.extend(self.collector.episode_infos)
        for key, value in info.items():
            self.logger.record(key, value)

        callback.update_locals(locals())
        if not callback.on_step():
            return False
        callback.on_rollout_end()
        return True

    # --- Stable-Baselines3's loop -----------------------------------------------------------------------------------

    def _setup_learn(self, *args: Any, **kwargs: Any) -> Any:
        self._known_environment()
        return super()._setup_learn(*args, **kwargs)

    def _known_environment(self) -> VecEnv:
        """Return the environment of an algorithm that has one."""
        if self.env is None:
            message = "has no environment: pass env=... to `load`, or call `set_env` before `learn`"
            raise RL4LMsLikeError(f"{type(self).__name__} {message}")
        return self.env

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        # Use the progress at the start of the rollout: at its end, schedules would be 0 in the last update.
        start = min(num_timesteps - self.rollout_buffer.n_tokens, total_timesteps)
        super()._update_current_progress_remaining(start, total_timesteps)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "collector", "hooks", "ranks", "update_progress"]

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def has_sampled(self) -> bool:
        """True once the environment has been used."""
        return bool(self.num_timesteps)

    def training_state(self) -> dict[str, Any]:
        """Return the state that changes during a run, without the policy's, in JSON's types."""
        return {
            "num_timesteps": self.num_timesteps,
            "n_updates": self._n_updates,
            "collector": self.collector.state_dict(),
            "buffer": self.rollout_buffer.state_dict(),
        }

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `training_state`."""
        self.num_timesteps = state["num_timesteps"]
        self._n_updates = state["n_updates"]
        self.collector.load_state_dict(state["collector"])
        self.rollout_buffer.load_state_dict(state["buffer"])


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
