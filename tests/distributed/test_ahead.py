"""Two processes whose engine generates two rollouts ahead: which weights it uses, interruptions, and failures."""

from __future__ import annotations

import functools
import json
import multiprocessing
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl4lms_like.engines.vllm import VllmEngine
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.system.errors import EngineError, RankError
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.training.resuming.checkpoints import newest_checkpoint, read_checkpoint
from tests.distributed.cells import STATEFUL_AHEAD, process_in_group, run_cell
from tests.distributed.test_several_processes import free_port, logged
from tests.engines.vllm_server import VllmServer
from tests.engines.weight_versions import WeightVersions
from tests.training.resuming.test_interruption import After, at_call, at_minibatch

Patch = Callable[[pytest.MonkeyPatch], None]
STOPPED: dict[str, Patch] = {
    "in_the_first_update": lambda patch: at_minibatch(patch, After(1)),
    "in_the_third_update": lambda patch: at_minibatch(patch, After(3)),
    "in_the_fourth_rollout": lambda patch: at_call(patch, RolloutCollector, "generation_batch", After(7)),
}
"""Where the second process receives a signal."""


FAILED = {"failed_in_the_second_rollout": 1, "failed_in_the_third_rollout": 3}
"""Number of the batch ahead at which the engine of the second process fails; there are two in each rollout."""


def fail_in_background(patch: pytest.MonkeyPatch, n: int) -> None:
    """Let the engine fail when it generates the `n`-th batch ahead."""
    generate = VllmEngine.generate
    threads = []

    def failing(*args: Any, **arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        if threads[-1] == "generation" and threads.count("generation") == n:
            raise EngineError("out of order")
        return generate(*args, **arguments)

    patch.setattr(VllmEngine, "generate", failing)


def run_with_versions(models: Path, output: Path, ranks: Ranks) -> None:
    """Train without an interruption, and write which weights generated each rollout."""
    versions = WeightVersions()
    collect = RolloutCollector.collect

    def collected(collector: RolloutCollector, buffer: Any, *args: Any, **arguments: Any) -> Any:
        logged_numbers = collect(collector, buffer, *args, **arguments)
        versions.add_rollout(collector.policy.policy_model, buffer.episodes)
        return logged_numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutCollector, "collect", collected)
        run_cell(STATEFUL_AHEAD, models, output, ranks)
    (output / f"versions.{ranks.rank}.json").write_text(json.dumps(versions.of_rollouts))


def end_early(models: Path, output: Path, ranks: Ranks, patch_second: Patch, error: type[BaseException]) -> Path:
    """Train until the second process fails or receives a signal, and return the checkpoint that is left.

    Args:
        models: see `config_of`.
        output: folder of the run.
        ranks: the two processes.
        patch_second: makes the second process fail, or sends it a signal.
        error: how the run then ends in this process.
    """
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        if ranks.rank == 1:
            patch_second(patch)
        run_cell(STATEFUL_AHEAD, models, output, ranks)
    ranks.any(False)  # the main process has written its checkpoint
    return newest_checkpoint(output / "cells" / STATEFUL_AHEAD)


def ahead_in(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint has of the rollouts that are generated ahead."""
    state = read_checkpoint(checkpoint)
    first = state.numbers["ahead"]
    return {
        "checkpoint": checkpoint.name,
        "n_batches": [len(rollout["batches"]) for rollout in (first, *first["later"])],
        "with_responses": sorted({name.partition(".")[0] for name in state.part("ahead.")}),
    }


def train_in_group(rank: int, port: int, models: Path, output: Path) -> None:
    """Train all runs of this file, in one of two processes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with process_in_group(rank, 2, port) as ranks:
        run_with_versions(models, output / "whole", ranks)
        for name, patch in STOPPED.items():
            checkpoint = end_early(models, output / name, ranks, patch, KeyboardInterrupt)
            (output / f"{name}.txt").write_text(checkpoint.name)
            run_cell(STATEFUL_AHEAD, models, output / name, ranks, resume_from=checkpoint)

        for name, n in FAILED.items():
            error = EngineError if rank == 1 else RankError
            fail = functools.partial(fail_in_background, n=n)
            checkpoint = end_early(models, output / name, ranks, fail, error)
            if ranks.is_main:
                (output / f"{name}.json").write_text(json.dumps(ahead_in(checkpoint)))
            run_cell(STATEFUL_AHEAD, models, output / name, ranks, resume_from=checkpoint)


@pytest.fixture(scope="module")
def runs(tiny_gpt2_dir, tmp_path_factory) -> Path:
    models = tmp_path_factory.mktemp("models")
    output = tmp_path_factory.mktemp("runs")
    (models / "gpt2").symlink_to(tiny_gpt2_dir)
    for name in ("whole", *STOPPED, *FAILED):
        (output / name).mkdir()

    server = VllmServer(tiny_gpt2_dir)
    args = {"url": server.url, "weights_dir": str(models / "weights"), "max_gap": 1e-4, "retries": 0}
    (models / "engine.json").write_text(json.dumps({"id": "vllm", "args": args}))
    port = free_port()
    context = multiprocessing.get_context("fork")  # a new interpreter would import torch again
    processes = [context.Process(target=train_in_group, args=(rank, port, models, output)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    server.close()
    assert [process.exitcode for process in processes] == [0, 0]
    return output


def test_a_rollout_is_of_the_weights_two_updates_before(runs):
    for rank in range(2):
        assert json.loads((runs / f"whole/versions.{rank}.json").read_text()) == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(("name", "n_completed"), list(zip(STOPPED, (0, 2, 3), strict=True)))
def test_a_run_that_was_interrupted_equals_the_uninterrupted_one(name, n_completed, runs):
    assert (runs / f"{name}.txt").read_text() == f"interrupted_{n_completed:05}"
    for rank in range(2):
        whole, resumed = (
            load_file(runs / each / f"{STATEFUL_AHEAD}.rank{rank}.safetensors") for each in ("whole", name)
        )
        assert all(torch.equal(resumed[key], tensor) for key, tensor in whole.items())
    assert logged(runs / name / "cells") == logged(runs / "whole" / "cells")


@pytest.mark.parametrize(
    ("name", "checkpoint", "with_responses"),
    [
        ("failed_in_the_second_rollout", "interrupted_00001", []),
        ("failed_in_the_third_rollout", "iteration_00002", ["2", "3"]),
    ],
)
def test_if_one_process_fails_all_end_and_the_resumed_run_generates_what_is_missing(
    name, checkpoint, with_responses, runs
):
    saved = json.loads((runs / f"{name}.json").read_text())
    assert saved == {"checkpoint": checkpoint, "n_batches": [2, 2], "with_responses": with_responses}
    assert len((runs / name / "cells" / STATEFUL_AHEAD / "rollout_info.jsonl").read_text().splitlines()) == 5
