"""TRL 1.12's PPO (`trl.experimental.ppo`, the last release that has one), driven one iteration at a time.

Its batch arithmetic, and the trap in it: `gradient_accumulation_steps=4, num_mini_batches=4` looks like four
minibatches of a quarter each, but its Accelerator then steps the optimizer once in four. `per_device_train_batch_size`
= all episodes, no accumulation and `num_mini_batches` = episodes / minibatch gives one step a minibatch.

TRL's PPO does not clip gradients, computes logits for prompt positions too, and its statistics always include the
entropy. Dropout is 0.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    default_data_collator,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks import workload
from benchmarks.systems.trl_worker import FOREVER, TRAINING_ARGUMENTS, IterationGate
from benchmarks.systems.worker import UpdateWatch, Worker
from benchmarks.workload import Shape


class TokenIds(nn.Module):
    """A "network" whose hidden states `[n, length, 1]` are the token ids."""

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        """Return an output with `hidden_states`."""
        return SimpleNamespace(hidden_states=(input_ids.unsqueeze(-1),))


class RewardModel(nn.Module):
    """The workload's reward in the form that TRL's PPO wants: a backbone and a `score` of its hidden states."""

    base_model_prefix = "token_ids"

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token_ids = TokenIds()
        self._prompt_len = shape.prompt_len

    def score(self, hidden: Tensor) -> Tensor:
        """Scores `[n, length, 1]`; TRL reads the one at the last token."""
        rewards = workload.reward(hidden[:, self._prompt_len :, 0])
        return rewards[:, None, None].expand(-1, hidden.shape[1], 1)


def batches(worker: Worker) -> dict[str, Any]:
    """Return the arguments with which TRL does the work of the worker's shape; see above."""
    shape = worker.shape
    return {
        "seed": worker.seed,
        "total_episodes": FOREVER * shape.episodes,
        "per_device_train_batch_size": shape.episodes,
        "gradient_accumulation_steps": 1,
        "num_mini_batches": shape.episodes // shape.minibatch,
        "num_ppo_epochs": shape.n_epochs,
        "local_rollout_forward_batch_size": shape.episodes,
        "num_sample_generations": 0,
        "response_length": shape.response_len,
    }


def make_trainer(worker: Worker, gate: IterationGate, output_dir: str) -> PPOTrainer:
    """TRL's trainer for the worker's shape."""
    shape = worker.shape
    arguments = PPOConfig(
        output_dir=output_dir,
        **batches(worker),
        temperature=1.0,
        kl_coef=workload.KL_COEF,
        cliprange=workload.CLIP_RANGE,
        vf_coef=workload.VF_COEF,
        gamma=workload.GAMMA,
        lam=workload.GAE_LAMBDA,
        **TRAINING_ARGUMENTS,
    )
    prompt_ids = torch.cat([workload.prompts(shape, iteration, seed=worker.seed) for iteration in range(8)])
    return PPOTrainer(
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(worker.model),
        model=AutoModelForCausalLM.from_pretrained(worker.model),
        ref_model=AutoModelForCausalLM.from_pretrained(worker.model),
        value_model=AutoModelForSequenceClassification.from_pretrained(worker.model, num_labels=1),
        reward_model=RewardModel(shape),
        train_dataset=Dataset.from_dict({"input_ids": prompt_ids.tolist()}),
        data_collator=default_data_collator,
        callbacks=[gate],
    )


def main() -> None:
    """Serve the driver."""
    worker = Worker()
    gate = IterationGate(worker, trainer_steps=1)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(worker, gate, output_dir)
        gate.watch = UpdateWatch(worker, trainer.model, trainer.optimizer.optimizer)
        worker.ready("trl", "accelerate")
        trainer.train()


if __name__ == "__main__":
    main()
