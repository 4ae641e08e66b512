"""TRL 1.12's PPO on the quickstart's task, for `time_to_reward`. See `trl_ppo` for its batch arithmetic.

What it needs here:

* A pad token that is not the end token, since its masks are `ids != pad`. An id one past the model's vocabulary can
  never be sampled; TRL replaces it by 0 before any model sees it.
* `stop_token="eos"`, or responses go on behind their end.
* A reward as a "network" whose `score` reads its hidden states: here these are the token ids, which are decoded.
* The critic's head starts at 0, as ours does (transformers would draw it at random), and its values are not clipped.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.systems.trl_ppo import batches
from benchmarks.systems.trl_worker import TRAINING_ARGUMENTS, IterationGate, sentiment
from benchmarks.systems.worker import UpdateWatch, Worker

PAD = "<|pad|>"
NO_CLIPPING = 1e6
"""Of values: ours are not clipped."""


class TokenIds(nn.Module):
    """A "network" whose hidden states `[n, length, 2]` are the token ids and the mask."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: object) -> SimpleNamespace:
        """Return an output with `hidden_states`."""
        return SimpleNamespace(hidden_states=(torch.stack([input_ids, attention_mask.long()], dim=-1),))


class SentimentModel(nn.Module):
    """VADER's compound score of prompt and response in the form that TRL's PPO wants.

    Args:
        tokenizer: decodes; 0, which TRL puts in the place of its pad token, is a special token of it.
        prompt_len: all prompts are padded to it.

    Attributes:
        mean_reward: of the last batch.
        response_tokens: of the last batch, end tokens included.
    """

    base_model_prefix = "token_ids"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_len: int) -> None:
        super().__init__()
        self.token_ids = TokenIds()
        self.mean_reward = float("nan")
        self.response_tokens = 0
        self._tokenizer, self._prompt_len = tokenizer, prompt_len

    def score(self, hidden: Tensor) -> Tensor:
        """Scores `[n, length, 1]`; TRL reads the one at the last token."""
        input_ids, mask = hidden.unbind(dim=-1)
        texts = self._tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        rewards = torch.tensor([sentiment(text) for text in texts])
        self.mean_reward = rewards.double().mean().item()
        self.response_tokens = int(mask[:, self._prompt_len :].sum())
        return rewards[:, None, None].expand(-1, hidden.shape[1], 1)


class SentimentGate(IterationGate):
    """Reports the reward of each iteration too, and saves the policy.

    Args:
        worker: the protocol.
        reward_model: knows the rewards.
    """

    def __init__(self, worker: Worker, reward_model: SentimentModel) -> None:
        super().__init__(worker, trainer_steps=1)
        self._reward_model = reward_model
        self._logs: dict[str, float] = {}
        self.policy: Any = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Keep TRL's statistics of the iteration."""
        self._logs = logs

    def _report(self, optimizer_steps: int) -> None:
        reward, tokens = self._reward_model.mean_reward, self._reward_model.response_tokens
        assert abs(self._logs["objective/scores"] - reward) < 1e-4, "TRL trained on other rewards"
        self._worker.iteration_done(
            optimizer_steps=optimizer_steps,
            response_tokens=tokens,
            rollout_reward=reward,
            save=self.policy.save_pretrained,
        )


def prompt_dataset(worker: Worker, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, int]:
    """The job's prompts, padded on the left to the longest of them, and that length."""
    prompts = json.loads(Path(worker.job["prompts"]).read_text())
    encoded = tokenizer(prompts, padding="longest", padding_side="left")["input_ids"]
    return Dataset.from_dict({"input_ids": encoded}), len(encoded[0])


def make_trainer(worker: Worker, output_dir: str) -> PPOTrainer:
    """TRL's trainer with the job's settings."""
    task = worker.job["task"]
    tokenizer = AutoTokenizer.from_pretrained(worker.model)
    tokenizer.add_special_tokens({"pad_token": PAD})
    model = AutoModelForCausalLM.from_pretrained(worker.model)
    assert tokenizer.pad_token_id >= model.config.vocab_size
    value_model = AutoModelForSequenceClassification.from_pretrained(worker.model, num_labels=1)
    nn.init.zeros_(value_model.score.weight)
    dataset, prompt_len = prompt_dataset(worker, tokenizer)
    reward_model = SentimentModel(tokenizer, prompt_len)
    arguments = PPOConfig(
        output_dir=output_dir,
        **batches(worker),
        stop_token="eos",
        missing_eos_penalty=None,
        temperature=1.0,
        whiten_rewards=False,
        kl_coef=task["kl_coef"],
        kl_estimator="k1",
        cliprange=task["clip_range"],
        cliprange_value=NO_CLIPPING,
        vf_coef=2 * task["vf_coef"],  # TRL's value loss has a factor 1/2, ours has not
        gamma=task["gamma"],
        lam=task["gae_lambda"],
        **{**TRAINING_ARGUMENTS, "learning_rate": worker.job["learning_rate"]},
    )
    return PPOTrainer(
        args=arguments,
        processing_class=tokenizer,
        model=model,
        ref_model=AutoModelForCausalLM.from_pretrained(worker.model),
        value_model=value_model,
        reward_model=reward_model,
        train_dataset=dataset,
        data_collator=default_data_collator,
        callbacks=[SentimentGate(worker, reward_model)],
    )


def main() -> None:
    """Serve the driver."""
    worker = Worker()
    set_seed(worker.seed)  # TRL draws its minibatches from numpy and does not seed it
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(worker, output_dir)
        (gate,) = [callback for callback in trainer.callbacks if isinstance(callback, SentimentGate)]
        gate.watch = UpdateWatch(worker, trainer.policy_model, trainer.optimizer.optimizer)
        gate.policy = trainer.policy_model
        worker.ready("trl", "accelerate")
        with suppress(SystemExit):  # the gate's way out of TRL's loop
            trainer.train()


if __name__ == "__main__":
    main()
