"""TRL's current GRPO, for scale: no critic, so less work than PPO; otherwise the same tokens and optimizer steps.

An iteration is `n_epochs` passes over one generation batch (`num_iterations`), in minibatches of whole episodes
(`steps_per_generation` of them); the trainer counts each minibatch as a step. It clips gradients at norm 1.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks import workload
from benchmarks.systems.trl_worker import FOREVER, TRAINING_ARGUMENTS, IterationGate, on_device
from benchmarks.systems.worker import UpdateWatch, Worker

GENERATIONS = 8  # responses a prompt, TRL's default


def increasing_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The workload's reward as TRL's GRPO calls it."""
    return workload.reward(torch.tensor(completion_ids)).tolist()


def vowels(completions: list[str], **_: Any) -> list[float]:
    """The workload's reward for a model of natural language as TRL's GRPO calls it."""
    return workload.share_of_vowels(completions)


def batches(worker: Worker) -> dict[str, Any]:
    """Return the arguments with which TRL does the work of the worker's shape; see above."""
    shape = worker.shape
    return {
        "seed": worker.seed,
        "max_steps": FOREVER * shape.optimizer_steps,
        "per_device_train_batch_size": shape.minibatch,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": shape.episodes // shape.minibatch,
        "num_iterations": shape.n_epochs,
        "max_completion_length": shape.response_len,
    }


def make_trainer(worker: Worker, gate: IterationGate, output_dir: str) -> GRPOTrainer:
    """TRL's trainer for the worker's shape."""
    arguments = GRPOConfig(
        output_dir=output_dir,
        **batches(worker),
        num_generations=GENERATIONS,
        beta=workload.KL_COEF,
        epsilon=workload.CLIP_RANGE,
        **worker.job.get("vllm", {}),
        **TRAINING_ARGUMENTS | on_device(worker),
    )
    tokenizer = AutoTokenizer.from_pretrained(worker.model)
    words = worker.job.get("words")  # of a model of natural language
    prompt_ids = torch.cat([workload.prompts(worker.shape, k, seed=worker.seed, words=words) for k in range(8)])
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(worker.model),
        reward_funcs=increasing_share if words is None else vowels,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": tokenizer.batch_decode(prompt_ids)}),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", **worker.job["lora"]) if "lora" in worker.job else None,
        callbacks=[gate],
    )


def main() -> None:
    """Serve the driver."""
    worker = Worker()
    gate = IterationGate(worker, trainer_steps=worker.shape.optimizer_steps)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(worker, gate, output_dir)
        trainer.create_optimizer()
        gate.watch = UpdateWatch(worker, trainer.model, trainer.optimizer)
        worker.ready("trl", "accelerate")
        trainer.train()


if __name__ == "__main__":
    main()
