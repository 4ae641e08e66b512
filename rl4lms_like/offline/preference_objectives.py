"""Objectives of preference training: scores of the two responses of each row, and the loss of each pair.

    rows ─ collate ─> prompts [n], responses [2 n] ─ scores [n, 2] ─ terms ─> loss [n], logged numbers
                                                        └─ ref_log_prob [n, 2], computed before training, or
                                                           before the step if the reference follows the model

The responses of a batch are the first ones of all rows, then the second ones. The prompt of a row is computed once for
both (`EpisodeBatch.prompt_rows`), if this is exact for the model. A loss is a mean over the rows of the whole optimizer
step, so that micro-batches do not change it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl4lms_like.algorithms import preference_arguments as arguments
from rl4lms_like.algorithms.preference_arguments import LENGTH_CORRELATION, LOG_ODDS_RATIO, LOSS, REFERENCE_POINT
from rl4lms_like.core.devices import to_device
from rl4lms_like.core.episodes import EpisodeBatch, padded
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
from rl4lms_like.offline.objective import BALANCING_LOSS, Batch, TrainingObjective
from rl4lms_like.offline.pairs import Pairs, Row, token_ids
from rl4lms_like.offline.preference_alerts import History
from rl4lms_like.policies.routing import BalancingLoss, Routing
from rl4lms_like.policies.sharding import ShardedNetwork
from rl4lms_like.policies.teacher_forcing import EpisodeReader
from rl4lms_like.system.disk import saving
from rl4lms_like.system.errors import CheckpointError, ModelError
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from rl4lms_like.system.regular_files import require_regular_file
from rl4lms_like.system.schema import checked_block
from rl4lms_like.training.alert import Alert
from rl4lms_like.training.resuming.states import weights_digest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REFERENCE_FILE = "reference_log_probs.safetensors"
"""File in the run folder with the log-probs of all responses under the reference model."""
_DIGESTS = "digests"
LABELS = "is_desirable"
"""Name of the labels of good and bad responses in a batch."""
_FIELDS = ("prompt_ids", "prompt_mask", "prompt_rows", "response_ids", "response_mask", "pictures")
TINY = 1e-9

Terms = tuple[Tensor, dict[str, Tensor]]
"""Loss of each row `[n]`, and numbers by the key under which their mean is logged."""
Sums = dict[str, list[Any]]
"""Key -> sum and number of its values. Sums of several batches or processes can be added; their means cannot.

In an optimizer step a sum is a tensor on the device; `as_numbers` reads all of them at its end.
"""


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
        values = {field.name: getattr(self.arguments, field.name) for field in fields(self.arguments)}
        checked_block(type(self.arguments), values, "the arguments of the objective")
        self.history = History()
        self._sums: Sums = {}  # since the last log, of all processes
        self._sums_of_step: Sums = {}  # of the current optimizer step, of this process

    # --- what an objective defines ----------------------------------------------------------------------------------

    @abstractmethod
    def scores(self, batch: Batch) -> Tensor:
        """Compute the scores `[n, 2]` of both responses of each row."""

    @abstractmethod
    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        """Compute the loss of each row from the scores, and what is logged."""

    def overall(self, scores: Tensor, lengths: Tensor) -> dict[str, float]:
        """Return what is measured on all scores of a split together.

        Args:
            scores: `[n, 1 or 2]`.
            lengths: `[n, 2]`, numbers of tokens of prompt and response.
        """
        return {}

    def split_weights(self, model: PreTrainedModel, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
        # A prompt that is computed once is a pass of its own, which the other processes may not need.
        self.reader.shares_prompts = False
        self.network = self.reader.split_weights(mesh, reshard_after_forward=reshard_after_forward)

    # --- batches ----------------------------------------------------------------------------------------------------

    def collate(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        n = len(rows)
        first = [row["responses"][0] for row in rows]
        second = [row["responses"][1] for row in rows]
        response_ids, response_mask = padded(first + second, self.pad_token_id)  # [2 n, response_len]

        # Both responses of a row have one prompt, and then equal numbers in `prompt_rows`, so that it is computed once.
        # Texts of a reward model without a common beginning have two.
        second_prompts = []
        second_numbers = []
        for i, row in enumerate(rows):
            second_prompts.append(row.get("rejected_prompt", row["prompt"]))
            second_numbers.append(n + i if "rejected_prompt" in row else i)
        prompts = [row["prompt"] for row in rows] + second_prompts
        prompt_ids, prompt_mask = padded(prompts, self.pad_token_id, side=self.reader.prompt_side)  # [2 n, prompt_len]

        batch = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "prompt_rows": torch.tensor([*range(n), *second_numbers]),  # [2 n]
            "response_ids": response_ids,
            "response_mask": response_mask,
            "margin": torch.tensor([row.get("margin", 0.0) for row in rows]),  # [n]
        }
        # Labels are of `kto` only, numbers of pictures of vision-language models; the reference's log-probs are missing
        # while they are computed.
        if LABELS in rows[0]:
            batch[LABELS] = torch.tensor([row["is_desirable"] for row in rows])  # [n]
        if "pictures" in rows[0]:
            batch["pictures"] = torch.tensor([row["pictures"] for row in rows] * 2)  # [2 n]
        if "ref_log_prob" in rows[0]:
            batch["ref_log_prob"] = torch.tensor([row["ref_log_prob"] for row in rows])  # [n, 2]
        return batch

    def n_rows(self, batch: Batch) -> int:
        return len(batch["margin"])

    def n_tokens(self, batch: Batch) -> Tensor:
        return batch["response_mask"].sum()

    @staticmethod
    def lengths(batch: Batch) -> Tensor:
        """Return the numbers of tokens of the responses `[n, 2]`."""
        return in_columns(batch["response_mask"].sum(dim=1))

    def episodes(self, batch: Batch, column: int | None = None) -> EpisodeBatch:
        """Return both responses of each row as episodes, or only the first or second ones."""
        n = self.n_rows(batch)
        rows = slice(None) if column is None else slice(column * n, (column + 1) * n)
        fields = {name: batch[name][rows] for name in _FIELDS if name in batch}

        # How a response ended has no effect on scores; the flag only has to be there.
        terminated = fields["response_mask"][:, 0]
        episodes = EpisodeBatch(**fields, terminated=terminated, prompt_side=self.reader.prompt_side)
        # The padding of a batch is that of its longest response, which may not be among these.
        return episodes.trimmed().to(self.reader.model.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which scores are computed."""
        device = self.reader.model.device.type
        return nullcontext() if self.dtype is None else torch.autocast(device, dtype=self.dtype)

    def _scored(self, batch: Batch) -> tuple[Tensor, Batch]:
        """Return the scores of a batch in main memory, and the batch on the model's device, without its labels."""
        with self.autocast():
            scores = self.scores(batch)
        # The losses are computed in float32, also if the model is not.
        moved = {name: to_device(tensor, self.reader.model.device) for name, tensor in batch.items()}
        if LABELS in batch:
            moved[LABELS] = batch[LABELS]  # stay in main memory: positions of good rows are found there
        return scores.float(), moved

    def _batches(self, rows: Sequence[Row]) -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(rows), self.eval_batch_size):
            yield self.collate(rows[start : start + self.eval_batch_size])

    # --- training ---------------------------------------------------------------------------------------------------

    def begin_step(self, batches: Sequence[Batch], n_items: Any) -> Any:
        return sum(map(self.n_rows, batches))

    def loss(self, model: Any, batch: Batch, n_items: Any = None) -> Tensor:
        # Without dropout both modes are equal, but only evaluation mode computes a shared prompt once.
        set_mode(self.reader.model, model.training and self.needs_training_mode)
        with self.reader.recorded_routing() if self.balancing is not None else nullcontext() as record:
            scores, batch = self._scored(batch)
        losses, logged = self.terms(scores, batch)
        self._sums_of_step = added(self._sums_of_step, sums_of(logged))

        # The mean over the rows of the whole optimizer step, of which this micro-batch adds its part.
        loss = losses.sum() / (n_items or len(losses))
        if self.balancing is not None and record is not None:
            loss = loss + self.balancing.part(record.routing)
        return loss

    def loss_without_weight(self, model: Any, batch: Batch) -> Tensor:
        sums = self._sums_of_step
        loss = super().loss_without_weight(model, batch)
        self._sums_of_step = sums
        return loss

    def routing(self, model: Any, batch: Batch) -> Routing:
        with self.reader.recorded_routing() as record:
            self._scored(batch)
        return record.routing

    def end_step(self) -> None:
        for sums in self.ranks.gather(as_numbers(self._sums_of_step)):
            self._sums = added(self._sums, sums)
        self._sums_of_step = {}

        # One number per step, which all processes have.
        if self.balancing is not None:
            of_step = sums_of({f"{self.name}/{BALANCING_LOSS}": self.balancing.value})
            self._sums = added(self._sums, as_numbers(of_step))

    def averages(self) -> dict[str, float]:
        sums = self._sums
        self._sums = {}
        return means_of(sums)

    # --- evaluation -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, rows: Sequence[Row]) -> dict[str, float]:
        if not rows:
            return {}
        self.reader.model.eval()
        sums: Sums = {}
        scored: list[tuple[Tensor, Tensor]] = []  # scores [n, 1 or 2] and lengths [n, 2] of each batch
        batches = list(self._batches(rows))

        with blame_memory_errors_on("evaluation"):
            # As an optimizer step with all rows of the split: kto's z0 is a mean over them.
            self.begin_step(batches, None)
            for own_batch, counts in self.own_passes(batches):
                scores, on_device = self._scored(own_batch)
                if not counts:
                    continue
                losses, logged = self.terms(scores, on_device)
                sums = added(sums, sums_of({LOSS: losses, **logged}))
                lengths = self.lengths(own_batch) + prompt_lengths(own_batch)
                scored.append((scores.cpu(), lengths.cpu()))

        # Of all processes, in the order of their ranks.
        total: Sums = {}
        all_scores: list[Tensor] = []
        all_lengths: list[Tensor] = []
        for rank_sums, rank_scored in self.ranks.gather((as_numbers(sums), scored)):
            total = added(total, rank_sums)
            for scores, lengths in rank_scored:
                all_scores.append(scores)
                all_lengths.append(lengths)
        return means_of(total) | self.overall(torch.cat(all_scores), torch.cat(all_lengths))

    def alerts(self, split: str, step: int, n_steps: int, numbers: Mapping[str, Any]) -> Mapping[str, Alert]:
        self.history.n_steps = n_steps
        return self.history.add(split, step, numbers)

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # Saved between two steps, when the sums of the current one are empty.
        return {"sums": self._sums, "history": self.history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = History(**state["history"])
        self._sums = {key: list(sum_and_n) for key, sum_and_n in state["sums"].items()}


def set_mode(model: nn.Module, is_training: bool) -> None:
    """Set training or evaluation mode, which visits all modules, if it is not set."""
    if model.training != is_training:
        model.train(is_training)


def in_columns(flat: Tensor) -> Tensor:
    """Return values of the responses of a batch `[2 n]` as `[n, 2]`."""
    return flat.unflatten(0, (2, -1)).T


def prompt_lengths(batch: Batch) -> Tensor:
    """Return the numbers of tokens of the prompts `[n, 2]`."""
    return in_columns(batch["prompt_mask"].sum(dim=1))


# --- logged numbers ---------------------------------------------------------------------------------------------------


def sums_of(numbers: Mapping[str, Tensor]) -> Sums:
    """Return the sum and the number of the values of each key; the sums are tensors on the device."""
    return {key: [values.detach().double().sum(), values.numel()] for key, values in numbers.items()}


def as_numbers(sums: Sums) -> Sums:
    """Return the same sums and numbers, all sums read from the device at once."""
    if not sums:
        return {}
    totals = torch.stack([total for total, _ in sums.values()]).tolist()
    return {key: [total, n] for (key, (_, n)), total in zip(sums.items(), totals, strict=True)}


def added(sums: Sums, others: Sums) -> Sums:
    """Return the sums and numbers of the values of both."""
    result = dict(sums)
    for key, (total, n) in others.items():
        total_before, n_before = sums.get(key, (0.0, 0))
        result[key] = [total_before + total, n_before + n]
    return result


def means_of(sums: Sums) -> dict[str, float]:
    """Return the mean of each key; the margin of good and bad responses is the difference of their mean rewards."""
    means = {key: total / n for key, (total, n) in sums.items() if n}
    # Responses with labels are no pairs, so there is no margin of each row.
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


def log_probs_of(scores: Tensor) -> dict[str, Tensor]:
    """Return what is logged about the log-probs of pairs."""
    return {"logps/chosen": scores[:, 0], "logps/rejected": scores[:, 1]}


# --- the objectives ---------------------------------------------------------------------------------------------------


class RewardModel(PreferenceObjective):
    """Bradley-Terry model of preferences: a classifier with one output, read at the last token of a text."""

    arguments: arguments.RewardModelArguments
    head: nn.Linear | None = None
    """Layer that computes the reward from the hidden state after the last token; None: the model's own forward."""

    def scores(self, batch: Batch) -> Tensor:
        # A seq2seq classifier has more than a linear layer, so its own forward is used. Rows for it have empty prompts:
        # the response is the whole text, and a common beginning is not shared.
        if self.head is None:
            device = self.reader.model.device
            ids = to_device(batch["response_ids"], device)
            mask = to_device(batch["response_mask"].long(), device)
            rewards = self.call(self._logits_of_model, ids, mask)[:, 0]
        else:
            rewards = self.head(self.reader.final_states(self.episodes(batch)))[:, 0]
        return in_columns(rewards)

    def _logits_of_model(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the outputs `[n, 1]` of the model's own forward."""
        logits: Tensor = self.reader.model(input_ids=ids, attention_mask=mask).logits
        return logits

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        # -log sigmoid(r_c - r_r - margin) + center_coef (r_c + r_r)^2
        chosen, rejected = scores.unbind(dim=1)
        loss = bradley_terry_loss(chosen, rejected, batch["margin"], self.arguments.center_coef)
        return loss, compared(chosen, rejected)

    def overall(self, scores: Tensor, lengths: Tensor) -> dict[str, float]:
        # Over all texts, better and worse ones. NaN if all have one length or one reward: then there is no correlation.
        both = torch.stack([scores.flatten(), lengths.flatten().float()])  # [2, 2 n]
        return {LENGTH_CORRELATION: float(torch.corrcoef(both)[0, 1].nan_to_num())}


class ResponseObjective(PreferenceObjective):
    """Base class of the objectives whose scores are log-probs of responses, `[n, 2]`, summed over tokens."""

    arguments: arguments.ResponseArguments

    def __post_init__(self) -> None:
        super().__post_init__()
        self.balancing = BalancingLoss.of(self.reader.model)

    def scores(self, batch: Batch) -> Tensor:
        return in_columns(self.log_probs(self.reader, self.episodes(batch)))

    def log_probs(self, reader: EpisodeReader, episodes: EpisodeBatch) -> Tensor:
        """Compute the log-prob of each response, the sum over its tokens `[n]`."""
        budget = int(self.arguments.logits_budget_mb * 2**20 / 4)  # in float32 numbers
        token_log_probs = reader.scores(episodes, logits_budget=budget).log_prob  # [n_tokens]
        return episodes.pad(token_log_probs).sum(dim=1)


class ReferenceObjective(ResponseObjective):
    """Base class of the objectives that compare log-probs with those of a reference model.

    A fixed reference is read once, before training; its log-probs are stored in the run folder. One that follows the
    model (`reference_update_iterations`) stays in memory and reads each batch before its optimizer step.
    """

    arguments: arguments.ReferenceArguments
    reference: EpisodeReader | None = None
    """Scores episodes with the reference; None: with the trained model, before it is trained."""

    def split_weights(self, model: PreTrainedModel, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
        # A copy of the model can be made before it is split only.
        if self._follows_model:
            self._keep_reference()
        if self.reference is not None:
            self.reference.shares_prompts = False
            self.reference.split_weights(mesh)
        super().split_weights(model, mesh, reshard_after_forward=reshard_after_forward)

    @property
    def networks(self) -> list[ShardedNetwork]:
        networks = super().networks
        if self.reference is not None and self.reference.network is not None:
            networks.append(self.reference.network)
        return networks

    def prepare(self, folder: Path, examples: Mapping[str, Pairs]) -> None:
        if self._follows_model:
            self._keep_reference()
            return

        # Evaluation mode: the reference has no dropout.
        reader = self.reference or self.reader
        reader.model.eval()

        # A resumed run uses the stored log-probs, if all that they depend on is the same.
        file = folder / REFERENCE_FILE
        digests = {
            "weights of the reference model": weights_digest(reader.model.named_parameters()),
            "tokens of the preferences": _digest({split: token_ids(pairs.rows) for split, pairs in examples.items()}),
            "settings": _digest([str(self.dtype)]),
        }
        log_probs = self.ranks.from_main(lambda: read_reference(file, digests) if file.is_file() else None)
        if log_probs is None:
            log_probs = {split: self._read_all(reader, pairs.rows) for split, pairs in examples.items() if pairs.rows}
            self.ranks.from_main(lambda: write_reference(file, log_probs, digests))

        # `collate` puts them into the batches, as [n, 2].
        for split, pairs in examples.items():
            of_split = log_probs.get(split, torch.zeros(0, 2))
            for row, of_row in zip(pairs.rows, of_split.tolist(), strict=True):
                row["ref_log_prob"] = of_row
        # Its memory is needed for training.
        self.reference = None

    # --- a reference that follows the model -------------------------------------------------------------------------

    @property
    def _follows_model(self) -> bool:
        return self.arguments.reference_update_iterations is not None

    def _keep_reference(self) -> None:
        """Keep the reference in memory: a copy of the initial model, or the given one.

        Raises:
            ModelError: the reference has weights of other shapes than the model.
        """
        if self.reference is None:
            self.reference = copy.deepcopy(self.reader)
        self.reference.model.requires_grad_(False).eval()
        shapes = [weight.shape for weight in self.reader.model.parameters()]
        if [weight.shape for weight in self.reference.model.parameters()] != shapes:
            raise ModelError("the reference model cannot be updated: its weights have other shapes than the model's")

    def begin_step(self, batches: Sequence[Batch], n_items: Any) -> Any:
        if self._follows_model:
            for batch in batches:
                assert isinstance(batch, dict)
                batch["ref_log_prob"] = self._read_rows_of_this_process(batch)
        return super().begin_step(batches, n_items)

    @torch.no_grad()
    def _read_rows_of_this_process(self, batch: Batch) -> Tensor:
        """Compute the reference's log-probs `[n, 2]` of a batch; 0 in the rows of other processes."""
        assert self.reference is not None
        n = self.n_rows(batch)
        log_probs = torch.zeros(n, 2)
        own_rows = self.ranks.share([1] * n)
        for own_batch, counts in self.own_passes([batch]):
            with self.autocast(), blame_memory_errors_on("scoring"):
                of_responses = self.log_probs(self.reference, self.episodes(own_batch))
            if counts:
                log_probs[own_rows.start : own_rows.stop] = in_columns(of_responses).float().cpu()
        return log_probs

    @torch.no_grad()
    def on_step_end(self, step: int) -> None:
        interval = self.arguments.reference_update_iterations
        if interval is None or step % interval:
            return
        # reference <- mixing * model + (1 - mixing) * reference
        assert self.reference is not None
        self.reshard()
        weights = zip(self.reference.model.parameters(), self.reader.model.parameters(), strict=True)
        for of_reference, of_model in weights:
            of_reference.lerp_(of_model, self.arguments.reference_mixing)

    def tensors(self) -> dict[str, Tensor]:
        if not self._follows_model:
            return {}
        assert self.reference is not None
        return {f"reference.{name}": weight.data for name, weight in self.reference.model.named_parameters()}

    # --- a fixed reference ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _read_all(self, reader: EpisodeReader, rows: Sequence[Row]) -> Tensor:
        """Compute the log-probs `[n, 2]` of the responses of all rows, each process those of some rows."""

        def of_this_process() -> Tensor:
            log_probs = [torch.zeros(0, 2)]
            own_rows = self.ranks.share([1] * len(rows))
            batches = self._batches(rows[own_rows.start : own_rows.stop])

            # One batch after the other: those of a whole data set are large. Split weights need all processes for each
            # pass, so that a process with fewer batches makes further passes, which do not count.
            n_further = self._n_further_passes(len(rows)) if reader.network is not None else 0
            for batch in chain(batches, map(self.collate, repeat(rows[:1], n_further))):
                with self.autocast(), blame_memory_errors_on("scoring"):
                    of_batch = self.log_probs(reader, self.episodes(batch))  # [2 n]
                log_probs.append(in_columns(of_batch).float().cpu())
            return torch.cat(log_probs)[: len(own_rows)]

        # Processes with split weights wait for one that fails in a pass; the others in an exchange, which reports it.
        if reader.network is not None:
            return torch.cat(self.ranks.gather(of_this_process()))
        return torch.cat(self.ranks.gather_from(of_this_process))

    def _n_further_passes(self, n_rows: int) -> int:
        """Return how many passes over its part of some rows this process makes less than the one that makes most."""
        n_passes = []
        for rank in range(self.ranks.size):
            n_of_rank = len(self.ranks.share([1] * n_rows, rank))
            n_passes.append(math.ceil(n_of_rank / self.eval_batch_size))
        return max(n_passes) - n_passes[self.ranks.rank]


class DPO(ReferenceObjective):
    """Direct preference optimization (arXiv 2305.18290) and its variants."""

    arguments: arguments.DPOArguments

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        # l = log pi - log pi_ref of a response; the loss is one of d = beta (l_c - l_r).
        beta = self.arguments.beta
        label_smoothing = self.arguments.label_smoothing
        chosen, rejected = (scores - batch["ref_log_prob"]).unbind(dim=1)
        if self.arguments.loss == "robust":
            loss = robust_dpo_loss(chosen, rejected, beta, label_smoothing)
        elif self.arguments.loss == "hinge":
            loss = hinge_loss(chosen, rejected, beta)
        else:
            loss = dpo_loss(chosen, rejected, beta, label_smoothing)

        # RPO (arXiv 2404.19733): + sft_weight (-log pi / length) of the better response. d alone can also grow while
        # both responses become less likely.
        if self.arguments.sft_weight:
            loss = loss - self.arguments.sft_weight * scores[:, 0] / self.lengths(batch)[:, 0]

        # The rewards that the policy implies are beta l.
        return loss, compared(beta * chosen.detach(), beta * rejected.detach()) | log_probs_of(scores)


class IPO(ReferenceObjective):
    """Identity preference optimization (arXiv 2310.12036)."""

    arguments: arguments.IPOArguments

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        # (l_c - l_r - 1 / (2 beta))^2: unlike DPO's, the loss has a minimum at a finite difference of the log-ratios.
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

        # For the alert about classes of unequal weight.
        train = examples["train"]
        good = self.arguments.desirable_weight * (train.n_labels - train.n_bad)
        bad = self.arguments.undesirable_weight * train.n_bad
        self.history.balance = good / max(bad, TINY)

    def scores(self, batch: Batch) -> Tensor:
        return self.log_probs(self.reader, self.episodes(batch, 0))[:, None]

    @torch.no_grad()
    def begin_step(self, batches: Sequence[Batch], n_items: Any) -> Any:
        n_rows = super().begin_step(batches, n_items)

        # z0 = max(0, mean of log pi(y'|x) - log pi_ref(y'|x)), y' a response to another prompt, with the weights before
        # the step. A constant: no gradient flows through it, and dropout must not change it.
        set_mode(self.reader.model, False)
        log_ratios = []
        for own_batch, counts in self.own_passes(batches):
            with self.autocast():
                log_prob = self.log_probs(self.reader, self.episodes(own_batch, 1))
            if not counts:
                continue
            log_ratios.append(log_prob.float() - to_device(own_batch["ref_log_prob"][:, 1], log_prob.device))

        # All processes have the same z0.
        of_all_ranks: list[Tensor] = []
        for of_rank in self.ranks.gather(log_ratios):
            of_all_ranks += of_rank
        if of_all_ranks:
            self.z0 = kto_reference_point(torch.cat(of_all_ranks))
        return n_rows

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        # weight (1 - sigmoid(beta (l - z0))) for good responses, weight (1 - sigmoid(beta (z0 - l))) for bad ones
        is_good = to_device(batch[LABELS], scores.device)
        log_ratio = scores[:, 0] - batch["ref_log_prob"][:, 0]
        weights = torch.where(is_good, self.arguments.desirable_weight, self.arguments.undesirable_weight)
        loss = weights * kto_loss(log_ratio, is_good, self.z0, self.arguments.beta)

        reward = self.arguments.beta * log_ratio.detach()
        good = to_device(batch[LABELS].nonzero()[:, 0], scores.device)  # rows [n_good]
        bad = to_device((~batch[LABELS]).nonzero()[:, 0], scores.device)
        return loss, {
            "rewards/chosen": reward[good],
            "rewards/rejected": reward[bad],
            "logps/chosen": scores[good, 0],
            "logps/rejected": scores[bad, 0],
            REFERENCE_POINT: torch.as_tensor(self.z0, device=reward.device).expand(len(reward)),
        }


class ORPO(ResponseObjective):
    """Odds ratio preference optimization (arXiv 2403.07691)."""

    arguments: arguments.ORPOArguments

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        # -m_c - weight log sigmoid(log(odds(p_c) / odds(p_r))), with m the mean log-prob per token and p = exp(m)
        chosen, rejected = (scores / self.lengths(batch)).unbind(dim=1)
        loss = orpo_loss(chosen, rejected, -chosen, self.arguments.odds_ratio_weight)

        # Without a reference there are no rewards: the mean log-probs are compared.
        logged = compared(chosen.detach(), rejected.detach(), "mean_logps") | log_probs_of(scores)
        return loss, logged | {LOG_ODDS_RATIO: log_odds_ratio(chosen, rejected).detach()}


class SimPO(ResponseObjective):
    """Simple preference optimization (arXiv 2405.14734)."""

    arguments: arguments.SimPOArguments

    def terms(self, scores: Tensor, batch: Batch) -> Terms:
        # -log sigmoid(beta (m_c - m_r) - gamma), with m the mean log-prob per token
        chosen, rejected = (scores / self.lengths(batch)).unbind(dim=1)
        loss = simpo_loss(chosen, rejected, self.arguments.beta, self.arguments.gamma)
        return loss, compared(chosen.detach(), rejected.detach(), "mean_logps") | log_probs_of(scores)


# --- the file of the reference's log-probs ----------------------------------------------------------------------------


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_reference(file: Path, log_probs: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
    """Write the reference's log-probs `[n, 2]` of each split, with digests of what they were computed from.

    Raises:
        RL4LMsLikeError: the file cannot be written.
    """
    all_digests = {**digests, "log-probs": weights_digest(sorted(log_probs.items()))}
    part = file.with_suffix(".part")
    with saving(f"the reference's log-probs in {file}"):
        # One key of the metadata, because safetensors does not keep the order of several: the bytes would differ.
        tensors = {split: of_split.contiguous() for split, of_split in log_probs.items()}
        save_file(tensors, part, metadata={_DIGESTS: json.dumps(all_digests, sort_keys=True)})
        # A killed process leaves no incomplete file under the final name.
        os.replace(part, file)


def read_reference(file: Path, digests: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the stored log-probs of the reference.

    Raises:
        CheckpointError: the file is damaged, or its log-probs were computed from something else.
    """
    require_regular_file(file)
    try:
        with safe_open(file, framework="pt") as stored:
            stored_digests = json.loads((stored.metadata() or {})[_DIGESTS])
            log_probs = {split: stored.get_tensor(split) for split in stored.keys()}  # noqa: SIM118  (not a mapping)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); start a new run") from error

    # The digest of the log-probs themselves detects a damaged file that can still be read.
    expected = {**digests, "log-probs": weights_digest(sorted(log_probs.items()))}
    wrong = [what for what, digest in expected.items() if stored_digests.get(what) != digest]
    if wrong:
        text = f"{file} has log-probs of another reference: the {', the '.join(wrong)} differ"
        raise CheckpointError(f"{text}. Restore the model and the data of this run, or start a new run")
    return log_probs
