"""The run doctor: checks every iteration and reports each problem once, with its numbers and advice.

    iteration   ─ signs ─┐                           ┌─ a warning, on the console and in log.txt
    evaluation  ─ marks ─┴─ History ─ alerts ─ new? ─┴─ a line of alarms.jsonl, which report.html shows
                                         │
                                         └─ already reported: doctor/<alert> is 1 while it holds, else 0

A run without alerts logs nothing about them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from typing import Any

from rl4lms_like.algorithms.base import RATIO_TOLERANCE
from rl4lms_like.core.errors import ConfigError, Mistake
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.named import named_key
from rl4lms_like.rollouts.kl import HorizonKLController
from rl4lms_like.tracking.base import IN_SHORT, Tracker
from rl4lms_like.tracking.run_folder import ALARMS_FILE
from rl4lms_like.training.assemble import Run
from rl4lms_like.training.config.chosen_metrics import HELD_OUT, unknown_metric
from rl4lms_like.training.doctor import of_evaluations, of_rollouts, of_updates
from rl4lms_like.training.doctor.examples import Example, evaluation_examples, rollout_examples
from rl4lms_like.training.doctor.findings import Alarm, Case, Finding
from rl4lms_like.training.doctor.history import History, Mark, Trail
from rl4lms_like.training.doctor.of_evaluations import direction_of, mark_of
from rl4lms_like.training.doctor.signs import signs_of
from rl4lms_like.training.estimates.budget import plan_batches
from rl4lms_like.training.evaluation import Evaluation
from rl4lms_like.training.watchers import Watcher

logger = logging.getLogger(__name__)

ALARMS: dict[str, Alarm] = {
    alarm.__name__: alarm
    for alarm in (
        of_updates.ratio_gap,
        of_updates.non_finite,
        of_updates.kl_above_budget,
        of_updates.kl_negative,
        of_updates.entropy_collapse,
        of_updates.value_error,
        of_updates.large_updates,
        of_updates.no_learning,
        of_updates.small_minibatches,
        of_rollouts.reward_constant,
        of_rollouts.all_truncated,
        of_rollouts.all_empty,
        of_rollouts.duplicates,
        of_rollouts.reward_follows_length,
    )
}
"""Alerts that are checked after each iteration, in this order."""

HACKING = of_evaluations.reward_hacking.__name__
"""Alert that is checked after each evaluation on `val`."""

SPLIT = "val"


class Doctor(Watcher):
    """Monitors a run and reports problems. It draws no random numbers and does not change the run.

    Args:
        run: the run to monitor.
        tracker: tracker to which alerts are written.
    """

    def __init__(self, run: Run, tracker: Tracker) -> None:
        self.run = run
        self.tracker = tracker
        self.limits = run.config.doctor
        self.history = History()
        self.told: dict[str, int] = {}
        self._hacked = False
        self._has_failed = False
        self._case: Case | None = None
        if self.limits.enabled:
            run.algorithm.warns_of_ratio = False  # the doctor reports it, or its alert is switched off
            if self.limits.held_out and not run.samples[SPLIT]:
                message = f"the data pool has no samples for {SPLIT}, so no metric is held out; remove this key"
                raise ConfigError([Mistake(HELD_OUT, message)])

    @property
    def case(self) -> Case:
        """Properties of the run that its alerts need."""
        if self._case is None:
            self._case = case_of(self.run)
        return self._case

    def saw_iteration(self, iteration: int) -> None:
        """Compute the diagnostics of the iteration, report new alerts and record which alerts hold."""
        if not self.limits.enabled:
            return
        try:
            found = self._found(iteration)
        except Exception as error:  # a failure of the doctor must not end the run
            if not self._has_failed:
                logger.warning("the run doctor failed in iteration %d: %s: %s", iteration, type(error).__name__, error)
            self._has_failed = True
            return
        for name, (finding, examples) in found.items():
            if name not in self.told:
                self._tell(name, iteration, finding, examples)
        holding = found.keys() | ({HACKING} if self._hacked else set())
        for name in self.told:
            self.run.algorithm.logger.record(f"doctor/{name}", int(name in holding))

    def _found(self, iteration: int) -> dict[str, tuple[Finding, list[Example]]]:
        """Return the alerts that hold, with examples for new ones."""
        algorithm = self.run.algorithm
        episodes = algorithm.rollout_buffer.episodes
        assert episodes is not None
        rewards = [info["r"] for info in algorithm.collector.episode_infos]
        signs = signs_of(algorithm.logger.name_to_value, episodes, rewards)
        self.history.add({"iteration": iteration, **signs}, self.limits.patience + self.limits.window)
        findings = {name: alarm(self.history, self.case) for name, alarm in ALARMS.items()}
        return {
            name: (finding, [] if name in self.told else self._examples(name, rewards))
            for name, finding in findings.items()
            if finding is not None
        }

    def saw_evaluation(self, epoch: int, split: str, evaluation: Evaluation) -> None:
        """Record the held-out metrics on `val` and check that they do not get worse while the reward rises.

        Raises:
            ConfigError: `doctor.held_out` names a key that no metric reports.
        """
        if not self.limits.enabled or split != SPLIT:
            return
        self._check_held_out(evaluation)
        for key, mode in self.case.modes.items():
            score = evaluation.scores.get(key)
            if score is not None and math.isfinite(score):
                self._follow(epoch, key, mode, float(score), evaluation)
        finding = of_evaluations.reward_hacking(self.history, self.case)
        self._hacked = finding is not None
        if finding is not None and HACKING not in self.told:
            mode = self.case.modes[finding.metric]
            examples = evaluation_examples(finding.metric, mode, evaluation.predictions)
            self._tell(HACKING, epoch, finding, examples)

    def _follow(self, epoch: int, key: str, mode: str, score: float, evaluation: Evaluation) -> None:
        trail = self.history.held_out.get(key)
        since = trail.last[-1].epoch if trail else 0
        recent = [signs for signs in self.history.recent if (signs["iteration"] or 0) > since]
        mark: Mark = mark_of(epoch, key, score, evaluation.predictions, recent)
        if trail is None:
            self.history.held_out[key] = Trail(mark, [mark])
        else:
            trail.add(mark, mode)

    def _check_held_out(self, evaluation: Evaluation) -> None:
        mistakes = [
            unknown_metric(f"{HELD_OUT}.{index}.metric", held.metric, evaluation.scores)
            for index, held in enumerate(self.limits.held_out)
            if held.metric not in evaluation.scores
        ]
        if mistakes:
            raise ConfigError(mistakes)

    def _examples(self, name: str, rewards: list[float]) -> list[Example]:
        episodes = self.run.algorithm.rollout_buffer.episodes
        assert episodes is not None
        return rollout_examples(name, self.run.tokenizer, episodes, rewards)

    def _tell(self, name: str, iteration: int, finding: Finding, examples: list[Example]) -> None:
        self.told[name] = iteration
        logger.warning("iteration %d, %s: %s. %s", iteration, name, finding.said, finding.advice, extra=IN_SHORT)
        line = {"alarm": name, "iteration": iteration, "said": finding.said, "advice": finding.advice}
        self.tracker.log_line(ALARMS_FILE, {**line, "evidence": finding.evidence, "examples": examples})

    def state_dict(self) -> dict[str, Any]:
        """Return the state in JSON types, with a digest. Any number may be None, so types cannot show damage."""
        state = {"history": self.history.state_dict(), "told": dict(self.told), "hacked": self._hacked}
        return {**state, "sha256": digest_of(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`.

        Raises:
            ValueError: the state was changed since `state_dict` returned it.
        """
        if state["sha256"] != digest_of({key: value for key, value in state.items() if key != "sha256"}):
            raise ValueError("the doctor's numbers are not those that were saved")
        self.history = History.from_state(state["history"])
        self.told = {str(name): int(iteration) for name, iteration in state["told"].items()}
        self._hacked = bool(state["hacked"])


def digest_of(state: dict[str, Any]) -> str:
    """Return the SHA-256 of data in JSON types."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def case_of(run: Run) -> Case:
    """Return the properties of a run that its alerts need."""
    limits, algorithm = run.config.doctor, run.algorithm
    policy = run.policy.arguments
    gap = RATIO_TOLERANCE[policy.dtype] if limits.max_ratio_gap == "auto" else limits.max_ratio_gap
    controller = algorithm.kl_controller
    explains = hasattr(algorithm, "likely_ratio_cause")
    return Case(
        limits=limits,
        max_ratio_gap=gap,
        ratio_cause=algorithm.likely_ratio_cause if explains else "",
        target_kl=controller.target_kl,
        kl_per_sequence=isinstance(controller, HorizonKLController),
        estimates_kl=controller.estimator == "k1",
        is_masked=hasattr(policy, "top_mask"),
        norm_reward=run.config.alg.kl_div.norm_reward,
        has_batch_size=getattr(algorithm, "batch_size", None) is not None,
        rl4lms_steps=plan_batches(run.config).rl4lms_steps_per_iteration,
        can_end=bool(algorithm.collector.eos_token_ids) and algorithm.collector.max_episode_length > 1,
        step_keys=step_keys_of(algorithm),
        critic_keys=keys_of(algorithm, "critic_learning_rate", "vf_coef"),
        modes=held_out_modes(run),
    )


def step_keys_of(algorithm: Any) -> str:
    """Return the config keys that reduce an algorithm's updates; for TRPO only the size of its trust region."""
    is_trpo = hasattr(getattr(algorithm, "arguments", algorithm), "cg_damping")
    return keys_of(algorithm, *(("target_kl",) if is_trpo else ("learning_rate", "n_epochs")))


def keys_of(algorithm: Any, *names: str) -> str:
    """Join the names that are arguments of an algorithm, as in `alg.args.learning_rate or n_epochs`."""
    arguments = getattr(algorithm, "arguments", algorithm)
    return f"alg.args.{' or '.join(name for name in names if hasattr(arguments, name))}"


def held_out_modes(run: Run) -> dict[str, str]:
    """Return metric key -> `max` or `min`: those in the config, else all with a known direction except the reward's."""
    config = run.config
    if config.doctor.held_out:
        return {held.metric: held.mode for held in config.doctor.held_out}
    modes: dict[str, str] = {}
    for metric in config.train_evaluation.metrics:
        if metric.id == config.reward_fn.id or metric.id not in METRICS:
            continue
        for key in METRICS.entry(metric.id).keys:
            mode = direction_of(key)
            if mode is not None:
                modes[named_key(key, metric.name) if metric.name else key] = mode
    return modes
