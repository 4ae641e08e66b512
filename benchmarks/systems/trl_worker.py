"""What TRL's two trainers share: stopping between iterations, and telling rollout from update, from the outside.

Nothing of TRL is changed. A callback sleeps at the end of an iteration until the driver wants the next one; an
`UpdateWatch` sees where the update begins and counts the steps that were really taken (gradient accumulation swallows
steps silently).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import TrainerCallback

from benchmarks import workload
from benchmarks.systems.worker import UpdateWatch, Worker

FOREVER = 10**6  # iterations: the driver says when to stop

TRAINING_ARGUMENTS: dict[str, Any] = {
    "learning_rate": workload.LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch_fused",
    "bf16": False,  # TRL's default is True
    "gradient_checkpointing": False,  # TRL's default is True
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": FOREVER,
}


def on_device(worker: Worker) -> dict[str, Any]:
    """The arguments of a job on a GPU, with bfloat16 where this library has `dtype: bfloat16`."""
    if worker.device == "cpu":
        return {}
    return {"use_cpu": False, "bf16": worker.job["policy"].get("dtype") == "bfloat16"}


def sentiment(text: str) -> float:
    """Return VADER's compound score as this library's `sentiment` reward does, whose package is not installed here."""
    return float(_analyzer().polarity_scores(text)["compound"])


@cache
def _analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


class IterationGate(TrainerCallback):
    """Turns a training loop that never stops into iterations on request.

    Args:
        worker: the protocol.
        trainer_steps: calls of `on_step_end` that make one iteration.
    """

    def __init__(self, worker: Worker, *, trainer_steps: int) -> None:
        self._worker = worker
        self._trainer_steps = trainer_steps
        self._done_steps = 0
        self.watch: UpdateWatch | None = None

    def _wait(self) -> None:
        assert self.watch is not None, "set gate.watch before training"
        self.watch.restart()
        if not self._worker.next_iteration():
            raise SystemExit(0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the first request."""
        self._wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report at the end of an iteration, then wait for the next request."""
        assert self.watch is not None
        self._done_steps += 1
        if self._done_steps % self._trainer_steps == 0:
            self._report(self.watch.optimizer_steps)
            self._wait()

    def _report(self, optimizer_steps: int) -> None:
        self._worker.iteration_done(optimizer_steps=optimizer_steps, response_tokens=self._worker.shape.response_tokens)
