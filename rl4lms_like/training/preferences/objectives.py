"""Objectives of preference training: scores of the two responses of each row, and the loss of each pair.

    rows ─ collate ─> prompts [n], responses [2 n] ─ scores [n, 2] ─ terms ─> loss [n], logged numbers
                                                        └─ ref_log_prob [n, 2], computed before training

The responses of a batch are the first ones of all rows, then the second ones. The prompt of a row is computed once for
both (`EpisodeBatch.prompt_rows`), if this is exact for the model. A loss is a mean over the rows of the whole optimizer
step, so that micro-batches do not change it.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rl4lms_like.algorithms import preference_arguments as arguments
from rl4lms_like.algorithms.preference_arguments import LENGTH_CORRELATION, LOG_ODDS_RATIO, LOSS, REFERENCE_POINT
from rl4lms_like.core.disk import saving
from rl4lms_like.core.episodes import EpisodeBatch, padded
from rl4lms_like.core.errors import CheckpointError
from rl4lms_like.core.out_of_memory import blame_memory_errors_on
from rl4lms_like.core.preference_losses import (
    bradley_terry_loss,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    kto_loss,
    kto_reference_point,
    log_odds_ratio,
    orpo_loss,
    robust_dpo_loss,
    simpo_loss,
)
from rl4lms_like.policies.teacher_forcing import EpisodeReader
from rl4lms_like.training.doctor.alerts import Alert
from rl4lms_like.training.preferences.alerts import History
from rl4lms_like.training.preferences.pairs import Pairs, Row, token_ids
from rl4lms_like.training.resuming.states import weights_digest
from rl4lms_like.training.supervised.objective import Batch, TrainingObjective

REFERENCE_FILE = "reference_log_probs.safetensors"
"""File in the run folder with the log-probs of all responses under the reference model."""
_DIGESTS = "digests"
TINY = 1e-9

Terms = tuple[Tensor, dict[str, Tensor]]
"""Loss of each row `[n]`, and numbers by the key under which their mean is logged."""


@dataclass(eq=False)
class PreferenceObjective(TrainingObjective):
    """Base class of the objectives.

    Args:
        arguments: arguments of the objective.
        reader: scores episodes with the trained model.
        pad_token_id: padding of token ids; it has no effect on scores.
        eval_batch_size: rows per forward pass without gradients.
        dtype: data type of autocast; None for none.
        needs_training_mode: dropout or the recomputation of activations is on.
    """

    name = "preference"
    measures_loss = True

    arguments: Any
    reader: EpisodeReader
    pad_token_id: int
    eval_batch_size: int
    dtype: torch.dtype | None = None
    needs_training_mode: bool = False

    def __post_init__(self) -> None:
        self.history = History()
        self._sums: dict[str, list[float]] = {}
        self._of_step: dict[str, list[float]] = {}

    @abstractmethod
    def scores(self, batch: Batch) -> Tensor:
        """Compute the scores `[n, 2]` of both responses of each row."""

    @abstractmethod
    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        """Compute the loss of each row from the scores, and what is logged."""

    def collate(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        n, side = len(rows), self.reader.prompt_side
        responses = [row["responses"][index] for index in (0, 1) for row in rows]
        prompts = [row["prompt"] for row in rows] + [row.get("rejected_prompt", row["prompt"]) for row in rows]
        numbers = [*range(n), *(n + i if "rejected_prompt" in row else i for i, row in enumerate(rows))]
        prompt_ids, prompt_mask = padded(prompts, self.pad_token_id, side=side)
        response_ids, response_mask = padded(responses, self.pad_token_id)
        batch = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "prompt_rows": torch.tensor(numbers),
            "response_ids": response_ids,
            "response_mask": response_mask,
            "margin": torch.tensor([row.get("margin", 0.0) for row in rows]),
        }
        if "is_desirable" in rows[0]:
            batch["is_desirable"] = torch.tensor([row["is_desirable"] for row in rows])
        if "ref_log_prob" in rows[0]:
            batch["ref_log_prob"] = torch.tensor([row["ref_log_prob"] for row in rows])
        return batch

    def n_rows(self, batch: Batch) -> int:
        return len(batch["margin"])

    def n_tokens(self, batch: Batch) -> Tensor:
        return batch["response_mask"].sum()

    def episodes(self, batch: Batch, column: int | None = None) -> EpisodeBatch:
        """Return both responses of each row as episodes, or only the first or second ones."""
        device, n = self.reader.model.device, len(batch["margin"])
        part = slice(None) if column is None else slice(column * n, (column + 1) * n)
        fields = {name: batch[name][part].to(device) for name in _FIELDS}
        ended = fields["response_mask"][:, 0]
        return EpisodeBatch(**fields, terminated=ended, prompt_side=self.reader.prompt_side).trimmed()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which scores are computed."""
        device = self.reader.model.device.type
        return nullcontext() if self.dtype is None else torch.autocast(device, dtype=self.dtype)

    def begin_step(self, batches: Sequence[Batch], n_items: Any) -> Any:
        return sum(map(self.n_rows, batches))

    def loss(self, model: Any, batch: Batch, n_items: Any = None) -> Tensor:
        trained = self.reader.model
        # Without dropout both modes are equal, but only evaluation mode computes a shared prompt once.
        set_mode(trained, model.training and self.needs_training_mode)
        scores, batch = self._scored(batch)
        losses, logged = self.terms(scores, batch)
        add_to(self._of_step, logged)
        return losses.sum() / (n_items or len(losses))

    def end_step(self) -> None:
        for sums in self.ranks.gather(self._of_step):
            merge(self._sums, sums)
        self._of_step = {}

    def _scored(self, batch: Batch) -> tuple[Tensor, Batch]:
        """Return the scores of a batch, and the batch on the model's device."""
        batch = {name: tensor.to(self.reader.model.device) for name, tensor in batch.items()}
        with self.autocast():
            scores = self.scores(batch)
        return scores.float(), batch

    @torch.no_grad()
    def measure(self, rows: Sequence[Row]) -> dict[str, float]:
        if not rows:
            return {}
        self.reader.model.eval()
        sums: dict[str, list[float]] = {}
        every: list[tuple[Tensor, Tensor]] = []
        batches = list(self._batches(rows))
        with blame_memory_errors_on("evaluation"):
            self.begin_step(batches, None)
            for given in filter(self.n_rows, map(self.own, batches)):
                scores, batch = self._scored(given)
                losses, logged = self.terms(scores, batch)
                add_to(sums, {LOSS: losses, **logged})
                every.append((scores.cpu(), (self.lengths(given) + prompt_lengths(given)).cpu()))
        total: dict[str, list[float]] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for part_sums, part in self.ranks.gather((sums, every)):
            merge(total, part_sums)
            pairs += part
        return means_of(total) | self.overall(*map(torch.cat, zip(*pairs, strict=True)))

    def overall(self, scores: Tensor, lengths: Tensor) -> dict[str, float]:
        """Return what is measured on all scores of a split together.

        Args:
            scores: `[n, 1 or 2]`.
            lengths: `[n, 2]`, numbers of tokens of prompt and response.
        """
        return {}

    @staticmethod
    def lengths(batch: Batch) -> Tensor:
        """Return the numbers of tokens of the responses `[n, 2]`."""
        return in_columns(batch["response_mask"].sum(dim=1))

    def _batches(self, rows: Sequence[Row]) -> Iterator[dict[str, Tensor]]:
        starts = range(0, len(rows), self.eval_batch_size)
        return (self.collate(rows[start : start + self.eval_batch_size]) for start in starts)

    def averages(self) -> dict[str, float]:
        sums, self._sums = self._sums, {}
        return means_of(sums)

    def alerts(self, split: str, step: int, n_steps: int, numbers: Mapping[str, Any]) -> Mapping[str, Alert]:
        self.history.n_steps = n_steps
        return self.history.add(split, step, numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums, "history": self.history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = History(**state["history"])
        self._sums = {key: list(each) for key, each in state["sums"].items()}


def set_mode(model: nn.Module, is_training: bool) -> None:
    """Set training or evaluation mode, which visits all modules, if it is not set."""
    if model.training != is_training:
        model.train(is_training)


_FIELDS = ("prompt_ids", "prompt_mask", "prompt_rows", "response_ids", "response_mask")


def in_columns(flat: Tensor) -> Tensor:
    """Return values of the responses of a batch `[2 n]` as `[n, 2]`."""
    return flat.unflatten(0, (2, -1)).T


def prompt_lengths(batch: Batch) -> Tensor:
    """Return the numbers of tokens of the prompts `[n, 2]`."""
    return in_columns(batch["prompt_mask"].sum(dim=1))


def add_to(sums: dict[str, list[float]], numbers: Mapping[str, Tensor]) -> None:
    """Add the sum and the number of the values of each key."""
    merge(sums, {key: [float(each.detach().double().sum()), each.numel()] for key, each in numbers.items()})


def merge(sums: dict[str, list[float]], others: Mapping[str, list[float]]) -> None:
    """Add other sums and numbers of values."""
    for key, (total, n) in others.items():
        before, n_before = sums.get(key, (0.0, 0))
        sums[key] = [before + total, n_before + n]


def means_of(sums: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the mean of each key; the margin of good and bad responses is the difference of their mean rewards."""
    means = {key: total / n for key, (total, n) in sums.items() if n}
    if "rewards/margins" not in means and {"rewards/chosen", "rewards/rejected"} <= means.keys():
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means


def compared(chosen: Tensor, rejected: Tensor, prefix: str = "rewards") -> dict[str, Tensor]:
    """Return what is logged about the rewards `[n]` of pairs."""
    return {
        f"{prefix}/chosen": chosen,
        f"{prefix}/rejected": rejected,
        f"{prefix}/margins": chosen - rejected,
        f"{prefix}/accuracies": (chosen > rejected).float(),
    }


class RewardModel(PreferenceObjective):
    """Bradley-Terry model of preferences: a classifier with one output, read at the last token of a text."""

    arguments: arguments.RewardModelArguments
    head: nn.Linear | None = None
    """Layer that computes the reward from the hidden state after the last token; None: the model's own forward."""

    def scores(self, batch: Batch) -> Tensor:
        if self.head is None:
            mask = batch["response_mask"]
            rewards = self.reader.model(input_ids=batch["response_ids"], attention_mask=mask.long()).logits[:, 0]
        else:
            rewards = self.head(self.reader.final_states(self.episodes(batch)))[:, 0]
        return in_columns(rewards)

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        chosen, rejected = scores.unbind(dim=1)
        loss = bradley_terry_loss(chosen, rejected, batch["margin"], self.arguments.center_coef)
        return loss, compared(chosen, rejected)

    def overall(self, scores: Tensor, lengths: Tensor) -> dict[str, float]:
        both = torch.stack([scores.flatten(), lengths.flatten().float()])
        return {LENGTH_CORRELATION: float(torch.corrcoef(both)[0, 1].nan_to_num())}


class ResponseObjective(PreferenceObjective):
    """Base class of the objectives whose scores are log-probs of responses, `[n, 2]`, summed over tokens."""

    arguments: arguments.ResponseArguments

    def scores(self, batch: Batch) -> Tensor:
        return in_columns(self.log_probs(self.reader, self.episodes(batch)))

    def log_probs(self, reader: EpisodeReader, episodes: EpisodeBatch) -> Tensor:
        """Compute the log-prob of each response, the sum over its tokens `[n]`."""
        budget = int(self.arguments.logits_budget_mb * 2**20 / 4)
        return episodes.pad(reader.scores(episodes, logits_budget=budget).log_prob).sum(dim=1)


def log_probs_of(scores: Tensor) -> dict[str, Tensor]:
    """Return what is logged about the log-probs of pairs."""
    return {"logps/chosen": scores[:, 0], "logps/rejected": scores[:, 1]}


class ReferenceObjective(ResponseObjective):
    """Base class of the objectives that compare log-probs with those of a reference model.

    The reference is read once, before training; its log-probs are stored in the run folder.
    """

    arguments: arguments.ReferenceArguments
    reference: EpisodeReader | None = None
    """Scores episodes with the reference; None: with the trained model, before it is trained."""

    def prepare(self, folder: Path, examples: Mapping[str, Pairs]) -> None:
        reader = self.reference or self.reader
        reader.model.eval()
        file = folder / REFERENCE_FILE
        digests = {
            "weights of the reference model": weights_digest(reader.model.named_parameters()),
            "tokens of the preferences": _digest({split: token_ids(each.rows) for split, each in examples.items()}),
            "settings": _digest([str(self.dtype)]),
        }
        found = self.ranks.from_main(lambda: read_reference(file, digests) if file.is_file() else None)
        if found is None:
            found = {split: self._read_all(reader, each.rows) for split, each in examples.items() if each.rows}
            self.ranks.from_main(lambda: write_reference(file, found, digests))
        for split, each in examples.items():
            for row, log_probs in zip(each.rows, found.get(split, torch.zeros(0, 2)).tolist(), strict=True):
                row["ref_log_prob"] = log_probs
        self.reference = None

    @torch.no_grad()
    def _read_all(self, reader: EpisodeReader, rows: Sequence[Row]) -> Tensor:
        def of_this_process() -> Tensor:
            found, own = [torch.zeros(0, 2)], self.ranks.share([1] * len(rows))
            for batch in self._batches(rows[own.start : own.stop]):
                with self.autocast(), blame_memory_errors_on("scoring"):
                    log_probs = self.log_probs(reader, self.episodes(batch))
                found.append(in_columns(log_probs).float().cpu())
            return torch.cat(found)

        return torch.cat(self.ranks.gather_from(of_this_process))


class DPO(ReferenceObjective):
    """Direct preference optimization (arXiv 2305.18290) and its variants."""

    arguments: arguments.DPOArguments

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        given = self.arguments
        chosen, rejected = (scores - batch["ref_log_prob"]).unbind(dim=1)
        if given.loss == "robust":
            loss = robust_dpo_loss(chosen, rejected, given.beta, given.label_smoothing)
        elif given.loss == "hinge":
            loss = hinge_loss(chosen, rejected, given.beta)
        else:
            loss = dpo_loss(chosen, rejected, given.beta, given.label_smoothing)
        if given.sft_weight:
            loss = loss - given.sft_weight * scores[:, 0] / self.lengths(batch)[:, 0]
        rewards = given.beta * chosen.detach(), given.beta * rejected.detach()
        return loss, compared(*rewards) | log_probs_of(scores)


class IPO(ReferenceObjective):
    """Identity preference optimization (arXiv 2310.12036)."""

    arguments: arguments.IPOArguments

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        log_ratios = scores - batch["ref_log_prob"]
        if self.arguments.length_average:
            log_ratios = log_ratios / self.lengths(batch)
        chosen, rejected = log_ratios.unbind(dim=1)
        beta = self.arguments.beta
        loss = ipo_loss(chosen, rejected, beta)
        return loss, compared(beta * chosen.detach(), beta * rejected.detach()) | log_probs_of(scores)


class KTO(ReferenceObjective):
    """Kahneman-Tversky optimization (arXiv 2402.01306).

    The second response of a row belongs to another prompt. Its log-ratio only contributes to z0, the mean over the
    whole optimizer step (in evaluations: over the split).
    """

    arguments: arguments.KTOArguments
    z0: Tensor | float = 0.0

    def prepare(self, folder: Path, examples: Mapping[str, Pairs]) -> None:
        super().prepare(folder, examples)
        train, given = examples["train"], self.arguments
        good, bad = given.desirable_weight * (train.n_labels - train.n_bad), given.undesirable_weight * train.n_bad
        self.history.balance = good / max(bad, TINY)

    def scores(self, batch: Batch) -> Tensor:
        return self.log_probs(self.reader, self.episodes(batch, 0))[:, None]

    @torch.no_grad()
    def begin_step(self, batches: Sequence[Batch], n_items: Any) -> Any:
        set_mode(self.reader.model, False)
        mismatched = []
        for batch in filter(self.n_rows, map(self.own, batches)):
            with self.autocast():
                log_prob = self.log_probs(self.reader, self.episodes(batch, 1))
            mismatched.append(log_prob.float() - batch["ref_log_prob"][:, 1].to(log_prob.device))
        mismatched = [each for part in self.ranks.gather(mismatched) for each in part]
        if mismatched:
            self.z0 = kto_reference_point(torch.cat(mismatched))
        return super().begin_step(batches, n_items)

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        given, is_good = self.arguments, batch["is_desirable"]
        log_ratio = scores[:, 0] - batch["ref_log_prob"][:, 0]
        weights = torch.where(is_good, given.desirable_weight, given.undesirable_weight)
        loss = weights * kto_loss(log_ratio, is_good, self.z0, given.beta)
        reward = given.beta * log_ratio.detach()
        return loss, {
            "rewards/chosen": reward[is_good],
            "rewards/rejected": reward[~is_good],
            "logps/chosen": scores[is_good, 0],
            "logps/rejected": scores[~is_good, 0],
            REFERENCE_POINT: torch.as_tensor(self.z0).expand(len(reward)),
        }


class ORPO(ResponseObjective):
    """Odds ratio preference optimization (arXiv 2403.07691)."""

    arguments: arguments.ORPOArguments

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        chosen, rejected = (scores / self.lengths(batch)).unbind(dim=1)
        loss = orpo_loss(chosen, rejected, -chosen, self.arguments.odds_ratio_weight)
        logged = compared(chosen.detach(), rejected.detach(), "mean_logps") | log_probs_of(scores)
        return loss, logged | {LOG_ODDS_RATIO: log_odds_ratio(chosen, rejected).detach()}


class SimPO(ResponseObjective):
    """Simple preference optimization (arXiv 2405.14734)."""

    arguments: arguments.SimPOArguments

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        chosen, rejected = (scores / self.lengths(batch)).unbind(dim=1)
        loss = simpo_loss(chosen, rejected, self.arguments.beta, self.arguments.gamma)
        return loss, compared(chosen.detach(), rejected.detach(), "mean_logps") | log_probs_of(scores)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_reference(file: Path, log_probs: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
    """Write the reference's log-probs `[n, 2]` of each split, with digests of what they were computed from.

    Raises:
        RL4LMsLikeError: the file cannot be written.
    """
    described = {**digests, "log-probs": weights_digest(sorted(log_probs.items()))}
    part = file.with_suffix(".part")
    with saving(f"the reference's log-probs in {file}"):
        # one key, because safetensors does not keep the order of several
        tensors = {split: each.contiguous() for split, each in log_probs.items()}
        save_file(tensors, part, metadata={_DIGESTS: json.dumps(described, sort_keys=True)})
        os.replace(part, file)


def read_reference(file: Path, digests: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the stored log-probs of the reference.

    Raises:
        CheckpointError: the file is damaged, or its log-probs were computed from something else.
    """
    try:
        with safe_open(file, framework="pt") as stored:
            saved = json.loads((stored.metadata() or {})[_DIGESTS])
            found = {split: stored.get_tensor(split) for split in stored.keys()}  # noqa: SIM118  (not a mapping)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); start a new run") from error
    expected = {**digests, "log-probs": weights_digest(sorted(found.items()))}
    if wrong := [what for what, digest in expected.items() if saved.get(what) != digest]:
        text = f"{file} has log-probs of another reference: the {', the '.join(wrong)} differ"
        raise CheckpointError(f"{text}. Restore the model and the data of this run, or start a new run")
    return found
