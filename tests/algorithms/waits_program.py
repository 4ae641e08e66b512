"""Make one rollout and one update of each algorithm of a JSON list on a second device; count where the process waits.

The list has `[id, family, arguments]`. Prints as JSON for each: waits by place of rollout and update, numbers of
generation batches, optimizer steps and forward passes of the update, and the largest difference of the weights after
the update to one on the CPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar

import rl4lms_like.testing.one_update as testing
from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.algorithms.ppo import PPO
from tests.policies.host_waits import HostWaits
from tests.policies.second_device import SECOND, register


class WaitingPPO(PPO):
    """PPO with what this test must find: a number and positions that are read from the device in every pass."""

    def loss(self, minibatch: Any) -> Any:
        objective = super().loss(minibatch)
        assert float(objective.policy.detach().mean()) != 0.5 and len(objective.policy[objective.log_ratio >= 0]) >= 0
        return objective


class Observed(testing._UpdateObserver):
    """Counts during the rollout and the update of an algorithm."""

    counts: ClassVar[dict[str, Any]] = {}

    def __init__(self, algorithm: Any) -> None:
        super().__init__(algorithm)
        train = algorithm.train
        collect = algorithm.collect_rollouts
        generate = algorithm.policy.generate
        scores = algorithm.policy.reader.scores
        counts: dict[str, Any] = {"batches": 0, "passes": 0}
        Observed.counts = counts

        def counted_generate(*args: Any, **kwargs: Any) -> Any:
            counts["batches"] += 1
            return generate(*args, **kwargs)

        def counted_scores(*args: Any, **kwargs: Any) -> Any:
            counts["passes"] += 1
            return scores(*args, **kwargs)

        def counted_collect(*args: Any, **kwargs: Any) -> Any:
            with HostWaits() as mode:
                result = collect(*args, **kwargs)
            counts["rollout"] = dict(mode.waits)
            return result

        def counted_train() -> None:
            counts["scoring_passes"] = counts["passes"]
            counts["passes"] = 0
            with HostWaits() as mode:
                train()
            counts["update"] = dict(mode.waits)
            counts["transfers"] = mode.transfers
            counts["steps"] = len(algorithm.update_progress.steps)

        algorithm.policy.generate = counted_generate
        algorithm.policy.reader.scores = counted_scores
        algorithm.collect_rollouts = counted_collect
        algorithm.train = counted_train


def counted(id: str, family: str, args: dict[str, Any]) -> dict[str, Any]:
    algorithm = WaitingPPO if id == "waiting" else ALGORITHMS.resolve(id)
    on_cpu = testing.one_update(algorithm, family, 3, args)
    observer = testing._UpdateObserver
    testing._UpdateObserver = Observed
    try:
        on_device = testing.one_update(algorithm, family, 3, {"device": SECOND, **args})
    finally:
        testing._UpdateObserver = observer
    gaps = [float((on_device.after[name].cpu() - weight).abs().max()) for name, weight in on_cpu.after.items()]
    return {"id": id, "gap": max(gaps), **Observed.counts}


if __name__ == "__main__":
    register()
    print(json.dumps([counted(*spec) for spec in json.loads(sys.argv[1])]))
