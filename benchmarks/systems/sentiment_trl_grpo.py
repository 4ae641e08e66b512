"""TRL 1.16's GRPO on the quickstart's task, for `time_to_reward`. See `trl_grpo` for its batch arithmetic."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.systems.trl_grpo import batches
from benchmarks.systems.trl_worker import TRAINING_ARGUMENTS, IterationGate, sentiment
from benchmarks.systems.worker import UpdateWatch, Worker


class SentimentGate(IterationGate):
    """Scores the responses, reports their mean reward at the end of each iteration, and saves the policy.

    Args:
        worker: the protocol.
    """

    __name__ = "sentiment"  # TRL logs the reward under the name of its function

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, trainer_steps=worker.shape.optimizer_steps)
        self._rewards: list[float] = []
        self._n_tokens = 0
        self.policy: Any = None

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """Return the rewards of a rollout, as TRL asks for them."""
        self._rewards = [sentiment(prompt + text) for prompt, text in zip(prompts, completions, strict=True)]
        self._n_tokens = sum(map(len, completion_ids))
        return self._rewards

    def _report(self, optimizer_steps: int) -> None:
        self._worker.iteration_done(
            optimizer_steps=optimizer_steps,
            response_tokens=self._n_tokens,
            rollout_reward=fmean(self._rewards),
            save=self.policy.save_pretrained,
        )


def make_trainer(worker: Worker, gate: SentimentGate, output_dir: str) -> GRPOTrainer:
    """TRL's trainer with the job's settings."""
    task = worker.job["task"]
    arguments = GRPOConfig(
        output_dir=output_dir,
        **batches(worker),
        num_generations=worker.job["group_size"],
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=task["kl_coef"],
        epsilon=task["clip_range"],
        **{**TRAINING_ARGUMENTS, "learning_rate": worker.job["learning_rate"]},
    )
    prompts = json.loads(Path(worker.job["prompts"]).read_text())
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(worker.model),
        reward_funcs=gate,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(worker.model, padding_side="left"),
        callbacks=[gate],
    )


def main() -> None:
    """Serve the driver."""
    worker = Worker()
    gate = SentimentGate(worker)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(worker, gate, output_dir)
        trainer.create_optimizer()
        gate.watch, gate.policy = UpdateWatch(worker, trainer.model, trainer.optimizer), trainer.model
        worker.ready("trl", "accelerate")
        with suppress(SystemExit):  # the end of TRL's loop
            trainer.train()


if __name__ == "__main__":
    main()
