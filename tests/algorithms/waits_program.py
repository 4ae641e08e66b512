"""Make one rollout and one update of each algorithm of a JSON list on a second device; count where the process waits.

The list has `[id, family, arguments]`. Prints as JSON for each: waits by place of rollout and update, numbers of
generation batches, of passes that score them, of optimizer steps and of forward passes of the update, and the largest
difference of the weights after the update to one on the CPU. An objective on given texts makes one optimizer step of
three micro-batches; the difference is then that of gradients.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch

import rl4lms_like.testing.one_update as testing
from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.assemble_supervised import assemble_supervised
from rl4lms_like.testing.models import make_causal_lm, make_tokenizer, save_model
from tests.offline.preferences.preference_runs import OBJECTIVES, blocks, written
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
        score = algorithm.policy.score
        score_sampled = algorithm.policy.score_sampled
        counts: dict[str, Any] = {"batches": 0, "passes": 0, "scoring_passes": 0}
        Observed.counts = counts

        def counted_generate(*args: Any, **kwargs: Any) -> Any:
            counts["batches"] += 1
            return generate(*args, **kwargs)

        def counted_scores(*args: Any, **kwargs: Any) -> Any:
            counts["passes"] += 1
            return scores(*args, **kwargs)

        def counted_scoring(compute: Any) -> Any:
            def counted(episodes: Any) -> Any:
                counts["scoring_passes"] += 1
                return compute(episodes)

            return counted

        def counted_collect(*args: Any, **kwargs: Any) -> Any:
            with HostWaits() as mode:
                result = collect(*args, **kwargs)
            counts["rollout"] = dict(mode.waits)
            return result

        def counted_train() -> None:
            counts["passes"] = 0
            with HostWaits() as mode:
                train()
            counts["update"] = dict(mode.waits)
            counts["transfers"] = mode.transfers
            counts["steps"] = len(algorithm.update_progress.steps)

        algorithm.policy.generate = counted_generate
        algorithm.policy.reader.scores = counted_scores
        algorithm.policy.score = counted_scoring(score)
        algorithm.policy.score_sampled = counted_scoring(score_sampled)
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


def assembled(id: str, folder: Path) -> Any:
    """Return a run on the twelve pairs of `preference_runs`, before its training."""
    tokenizer = make_tokenizer()
    model = save_model(folder / "model", make_causal_lm("gpt2", tokenizer), tokenizer)
    mapping = blocks("dpo" if id == "supervised" else id, model, written(folder))
    if id == "supervised":
        mapping["alg"]["id"] = id
        del mapping["alg"]["args"]
        return assemble_supervised(parse_config(mapping))
    run = assemble_preferences(parse_config(mapping))
    run.objective.prepare(folder, run.examples)
    return run


def step_gradient(id: str, folder: Path, device: str) -> tuple[torch.Tensor, HostWaits]:
    """Return the gradient of a step of three micro-batches, and what was counted in it."""
    torch.manual_seed(0)  # of a reward model's new layer
    run = assembled(id, folder)
    model = run.model.to(device).train()
    rows = run.examples["train"].rows
    batches = [run.objective.collate(rows[start : start + 4]) for start in (0, 4, 8)]

    with HostWaits() as mode:
        n_items = run.objective.begin_step(batches, torch.tensor(40))
        for batch in batches:
            run.objective.loss(model, batch, n_items).backward()
        run.objective.end_step()
    gradients = [weight.grad.cpu().flatten() for weight in model.parameters() if weight.grad is not None]
    return torch.cat(gradients), mode


def counted_objective(id: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        on_cpu, _ = step_gradient(id, Path(folder), "cpu")
        on_device, mode = step_gradient(id, Path(folder), SECOND)
    gap = float((on_cpu - on_device).abs().max() / on_cpu.abs().max())
    return {"id": id, "gap": gap, "update": dict(mode.waits), "steps": 1, "transfers": mode.transfers}


if __name__ == "__main__":
    register()
    all_counts = []
    for id, family, args in json.loads(sys.argv[1]):
        is_objective = id in (*OBJECTIVES, "supervised")
        all_counts.append(counted_objective(id) if is_objective else counted(id, family, args))
    print(json.dumps(all_counts))
