"""The run doctor: checks every iteration and reports each problem once, with its numbers and advice.

    iteration   ─ diagnostics ─┐                           ┌─ a warning, on the console and in log.txt
    evaluation  ─ marks ───────┴─ History ─ alerts ─ new? ─┴─ a line of alarms.jsonl, which report.html shows
                                               │
                                               └─ already reported: doctor/<alert> is 1 while it holds, else 0

A run without alerts logs nothing about them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from operator import itemgetter
from typing import Any

from rl4lms_like.algorithms.base import RATIO_TOLERANCE
from rl4lms_like.callbacks.base import Callback
from rl4lms_like.config.rules import HELD_OUT, unknown_metric
from rl4lms_like.estimates.budget import plan_batches
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.base import named_key
from rl4lms_like.on_policy.assemble import AssembledRun
from rl4lms_like.on_policy.doctor.alerts import ALERTS, Context, direction_of, reward_hacking
from rl4lms_like.on_policy.doctor.diagnostics import History, diagnostics_of, evaluation_examples, rollout_examples
from rl4lms_like.rollouts.kl import HorizonKLController
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.training.alert import Alert, report_alert
from rl4lms_like.training.evaluation import Evaluation

logger = logging.getLogger(__name__)

HACKING = reward_hacking.__name__
SPLIT = "val"


class Doctor(Callback):
    """Monitors a run and reports problems. It draws no random numbers and does not change the run."""

    def __init__(self, run: AssembledRun, tracker: Tracker) -> None:
        self.run = run
        self.tracker = tracker
        self.limits = run.config.doctor
        self.history = History()
        self.reported: dict[str, int] = {}
        self._hacked = False
        self._has_failed = False

        if not self.limits.enabled:
            return
        run.algorithm.warns_of_ratio = False  # the doctor reports it, or its alert is switched off
        if self.limits.held_out and not run.samples[SPLIT]:
            message = f"the data pool has no samples for {SPLIT}, so no metric is held out; remove this key"
            raise ConfigError([ConfigIssue(HELD_OUT, message)])

    @cached_property
    def context(self) -> Context:
        """Properties of the run that its alerts need."""
        return context_of(self.run)

    def on_iteration_end(self, iteration: int) -> None:
        """Compute the diagnostics of the iteration, report new alerts and record which alerts hold."""
        if not self.limits.enabled:
            return

        # A failure of the doctor must not end the run, and is reported once: it would repeat in each iteration.
        try:
            alerts = self._alerts(iteration)
        except Exception as error:
            if not self._has_failed:
                logger.warning("the run doctor failed in iteration %d: %s: %s", iteration, type(error).__name__, error)
            self._has_failed = True
            return

        for name, (alert, examples) in alerts.items():
            if name not in self.reported:
                self._report(name, iteration, alert, examples)

        # From its first report on, an alert is a curve: 1 in iterations in which it holds, 0 in others. That of hacking
        # keeps its value between two evaluations.
        for name in self.reported:
            holds = self._hacked if name == HACKING else name in alerts
            self.run.algorithm.logger.record(f"doctor/{name}", int(holds))

    def _alerts(self, iteration: int) -> dict[str, tuple[Alert, Any]]:
        """Return the alerts that hold after an iteration, by name; each with examples if it is new."""
        algorithm = self.run.algorithm
        episodes = algorithm.rollout_buffer.episodes
        assert episodes is not None
        rewards = [info["r"] for info in algorithm.collector.episode_infos]

        # The longest condition needs `patience` iterations and the `window` before them.
        diagnostics = diagnostics_of(algorithm.logger.name_to_value, episodes, rewards)
        self.history.add({"iteration": iteration, **diagnostics}, self.limits.patience + self.limits.window)

        alerts: dict[str, tuple[Alert, Any]] = {}
        for name, check in ALERTS.items():
            alert = check(self.history, self.context)
            if alert is None:
                continue
            # Decoding takes time, so examples are only decoded for the one report.
            examples: Sequence[Any] = ()
            if name not in self.reported:
                examples = rollout_examples(name, self.run.continuations, episodes, rewards)
            alerts[name] = (alert, examples)
        return alerts

    def on_evaluation_end(self, epoch: int, split: str, evaluation: Evaluation) -> None:
        """Record the held-out metrics on `val` and check that they do not get worse while the reward rises.

        Raises:
            ConfigError: `doctor.held_out` names a key that no metric reports.
        """
        if not self.limits.enabled or split != SPLIT:
            return
        scores = evaluation.scores
        predictions = evaluation.predictions

        # The keys of a user's own metric are only known once it has been computed.
        issues = []
        for index, held_out in enumerate(self.limits.held_out):
            if held_out.metric not in scores:
                issues.append(unknown_metric(f"{HELD_OUT}.{index}.metric", held_out.metric, scores))
        if issues:
            raise ConfigError(issues)

        # Scores of single texts give the standard error of the split's score; NaN is "no score", not a fall.
        for key, mode in self.context.modes.items():
            score = scores.get(key)
            if score is not None and math.isfinite(score):
                scores_of_texts = [prediction.get(key) for prediction in predictions]
                self.history.add_evaluation(epoch, key, mode, float(score), scores_of_texts=scores_of_texts)

        alert = reward_hacking(self.history, self.context)
        self._hacked = alert is not None
        if alert is not None and HACKING not in self.reported:
            examples = evaluation_examples(alert.metric, self.context.modes[alert.metric], predictions)
            self._report(HACKING, epoch, alert, examples)

    def _report(self, name: str, iteration: int, alert: Alert, examples: Sequence[Any]) -> None:
        self.reported[name] = iteration
        report_alert(self.tracker, "iteration", iteration, name=name, alert=alert, examples=examples)

    def state_dict(self) -> dict[str, Any]:
        return {"history": asdict(self.history), "told": dict(self.reported), "hacked": self._hacked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = History.from_state(state["history"])
        # In the order of the reports, in which they are logged: by iteration, within one by the order of the checks.
        # A checkpoint's JSON has its keys in alphabetical order.
        reported = {name: state["told"][name] for name in (*ALERTS, HACKING) if name in state["told"]}
        self.reported = dict(sorted(reported.items(), key=itemgetter(1)))
        self._hacked = state["hacked"]


def context_of(run: AssembledRun) -> Context:
    """Return the properties of a run that its alerts need."""
    limits = run.config.doctor
    algorithm = run.algorithm
    policy = run.policy.arguments
    controller = algorithm.kl_controller

    max_ratio_gap = limits.max_ratio_gap
    if max_ratio_gap == "auto":  # rounding differs by type: autocast in bfloat16 has 8 bits of precision
        max_ratio_gap = float(getattr(algorithm, "ratio_tolerance", RATIO_TOLERANCE[policy.dtype]))

    # TRPO solves for its step (`cg_damping` is of its conjugate gradients), so only its trust region limits it.
    # Stable-Baselines3's algorithms are their own arguments.
    arguments = getattr(algorithm, "arguments", algorithm)
    keys_of_step: tuple[str, ...] = ("learning_rate", "n_epochs")
    if hasattr(arguments, "cg_damping"):
        keys_of_step = ("target_kl",)

    # Advice is in the unit of the config.
    in_episodes = getattr(arguments, "n_episodes", None)
    minibatch_key = None
    if getattr(arguments, "minibatch_episodes", None) is not None:
        minibatch_key = "minibatch_episodes"
    elif getattr(algorithm, "batch_size", None) is not None:
        minibatch_key = "batch_size"

    dialogue = run.config.env.dialogue
    return Context(
        limits=limits,
        max_ratio_gap=max_ratio_gap,
        ratio_cause=getattr(algorithm, "likely_ratio_cause", ""),
        target_kl=controller.target_kl,
        kl_per_sequence=isinstance(controller, HorizonKLController),
        estimates_kl=controller.estimator == "k1",
        has_teacher=policy.teacher_model is not None,
        is_masked=hasattr(policy, "top_mask"),
        norm_reward=run.config.alg.kl_div.norm_reward,
        minibatch_key=minibatch_key,
        rollout_key="n_steps" if in_episodes is None else "n_episodes",
        rl4lms_steps=plan_batches(run.config).rl4lms_steps_per_iteration,
        can_end=bool(algorithm.collector.eos_token_ids) and algorithm.collector.max_episode_length > 1,
        has_dialogues=dialogue is not None,
        has_one_answer=dialogue is not None and dialogue.id == "reasoning_gym",
        step_keys=_keys_of(arguments, *keys_of_step),
        critic_keys=_keys_of(arguments, "critic_learning_rate", "vf_coef"),
        modes=_held_out_modes(run),
    )


def _keys_of(arguments: Any, *names: str) -> str:
    """Join the names that an algorithm has among its arguments, as in `alg.args.learning_rate or n_epochs`."""
    return f"alg.args.{' or '.join(name for name in names if hasattr(arguments, name))}"


def _held_out_modes(run: AssembledRun) -> dict[str, str]:
    """Return metric key -> `max` or `min`: those in the config, else all with a known direction except the reward's."""
    config = run.config
    if config.doctor.held_out:
        return {held_out.metric: held_out.mode for held_out in config.doctor.held_out}

    # The reward itself, as a metric, rises with the reward. A user's own metric has no entry with its keys.
    modes = {}
    for metric in config.train_evaluation.metrics:
        if metric.id == config.reward_fn.id or metric.id not in METRICS:
            continue
        for key in METRICS.entry(metric.id).keys:
            mode = direction_of(key)
            if mode is not None:
                modes[named_key(key, metric.name) if metric.name else key] = mode
    return modes
