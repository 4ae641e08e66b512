"""Objectives of training on given texts: what a batch is, its loss, and what it is a mean over.

                batch                    loss
CrossEntropy    references with labels   mean over the learned tokens of an optimizer step
preferences     pairs of responses       mean over the pairs of an optimizer step

References after prompts with pictures have an objective of their own (`offline.vision_objective`).

The balancing loss of a mixture of experts (`policies.routing`) is added to both in training, not in evaluations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from rl4lms_like.core.devices import to_device
from rl4lms_like.core.packed_rows import RowPacking
from rl4lms_like.core.token_scores import token_scores
from rl4lms_like.policies.head_inputs import without_logits
from rl4lms_like.policies.routing import BalancingLoss, Routing, experts_per_token
from rl4lms_like.policies.sharding import ShardedNetwork, led_by_main, loading_whole_weights
from rl4lms_like.policies.teacher_forcing import current_head
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.training.examples import NOT_LEARNED, ExampleCollator, n_learned

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
Batch = Mapping[str, Tensor]
"""Tensors of some examples, by name."""


BALANCING_LOSS = "balancing_loss"
"""Key of the mean balancing loss, after the name of the objective."""


class TrainingObjective(ABC):
    """Objective of a run on given texts.

    Attributes:
        name: prefix of the logged loss.
        measures_loss: `measure` returns the loss, `<name>/loss`; otherwise it is computed from the batches of `val`.
        ranks: the processes that share each batch.
        balancing: loss that balances the use of a model's experts; None if the model has none, or this objective.
        network: the trained model's weights if they are split over the processes.
    """

    name: ClassVar[str]
    measures_loss: ClassVar[bool] = False
    ranks: Ranks = Ranks()
    balancing: BalancingLoss | None = None
    network: ShardedNetwork | None = None

    # --- several processes ------------------------------------------------------------------------------------------

    def own_passes(self, batches: Iterable[Batch]) -> Iterator[tuple[dict[str, Tensor], bool]]:
        """Yield the rows of each batch that this process computes, and whether they count.

        A process without rows of a batch makes no pass. With split weights it makes one over the first row of the
        batch, which does not count: the weights are gathered from all processes, so that all make each pass.
        """
        for batch in batches:
            own_rows = self.own_rows(batch)
            if self.n_rows(own_rows):
                yield own_rows, True
            elif self.network is not None:
                yield self._selected(batch, range(1)), False

    def own_rows(self, batch: Batch) -> dict[str, Tensor]:
        """Return the rows of a batch that this process computes; there may be none."""
        if self.ranks.size == 1:
            return dict(batch)
        return self._selected(batch, self.ranks.share([1] * self.n_rows(batch)))

    def _selected(self, batch: Batch, rows: range) -> dict[str, Tensor]:
        """Return some rows of a batch."""
        n = self.n_rows(batch)
        positions = torch.tensor(rows, dtype=torch.long)

        # Several rows of a tensor may belong to one row of the batch: the first ones of all rows, then the second ones.
        selected = {}
        for name, tensor in batch.items():
            blocks = tensor.split(n)  # [n, ...] each
            selected[name] = torch.cat([block[positions] for block in blocks])
        return selected

    @abstractmethod
    def split_weights(self, model: PreTrainedModel, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
        """Split the weights of the trained model, and of others, over all processes; see `ShardedNetwork`."""

    @property
    def networks(self) -> list[ShardedNetwork]:
        """The networks whose weights are split, the trained one first."""
        return [] if self.network is None else [self.network]

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """Return the result of a function that calls modules of the trained model; see `ShardedNetwork.call`."""
        return work(*args) if self.network is None else self.network.call(work, *args)

    def reshard(self) -> None:
        """Free split weights that are whole since the last pass; required before they are read or changed."""
        for network in self.networks:
            network.reshard()

    def gathered(self) -> AbstractContextManager[None]:
        """Keep the split weights of the trained model whole within the block; see `ShardedNetwork.gathered`."""
        return nullcontext() if self.network is None else self.network.gathered()

    def led_by_main(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        works: Mapping[str, Callable[[], Any]] | None = None,
    ) -> AbstractContextManager[None]:
        """Let the main process read and save split weights within the block; see `sharding.led_by_main`.

        Args:
            optimizer: its moments can be read, too.
            works: works of the other processes.
        """
        if self.network is None:
            return nullcontext()
        self.reshard()
        return led_by_main([network.model for network in self.networks], optimizer, works)

    def loading(self) -> AbstractContextManager[None]:
        """Let the trained model load whole weights into split ones within the block; see `loading_whole_weights`."""
        return nullcontext() if self.network is None else loading_whole_weights(self.network.model)

    # --- batches and losses -----------------------------------------------------------------------------------------

    @abstractmethod
    def n_rows(self, batch: Batch) -> int:
        """Return the number of rows of a batch."""

    @abstractmethod
    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return the batch of some examples."""

    @abstractmethod
    def n_tokens(self, batch: Batch) -> Tensor:
        """Count the tokens that are learned in a batch, as a 0-dimensional tensor."""

    @abstractmethod
    def loss(self, model: Any, batch: Batch, n_items: Any = None) -> Tensor:
        """Compute the loss of a micro-batch: a sum, divided by `n_items`, or by the items of the batch."""

    def loss_without_weight(self, model: Any, batch: Batch) -> Tensor:
        """Return a loss of 0 from a pass over a batch that does not count; nothing of it is logged."""
        return 0.0 * self.loss(model, batch, 1)

    def begin_step(self, batches: Sequence[Batch], n_items: Any) -> Any:
        """Return the number of items of an optimizer step; called with all of its micro-batches before the first one.

        Args:
            batches: the micro-batches, with the rows of all processes.
            n_items: number of their labels; None if they have none.
        """
        return n_items

    def begin_balancing(self, model: Any, batches: Sequence[Batch]) -> None:
        """Count how the tokens of an optimizer step are sent to experts; called before its first micro-batch."""
        if self.balancing is None:
            return

        # A step of one micro-batch is counted by the forward pass of its loss.
        if len(batches) == 1 and self.ranks.size == 1:
            self.balancing.begin_step(None)
            return

        # In evaluation mode, so that no random numbers are drawn.
        passes = []
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for own_batch, counts in self.own_passes(batches):
                routing = self.routing(model, own_batch)
                if counts:
                    passes.append(routing)
        model.train(was_training)
        self.balancing.begin_step(chain.from_iterable(self.ranks.gather(passes)))

    def routing(self, model: Any, batch: Batch) -> Routing:
        """Return how the tokens of a batch are sent to experts; only of an objective with `balancing`."""
        raise NotImplementedError

    def prepare(self, folder: Path, examples: Mapping[str, Any]) -> None:  # noqa: B027  (optional)
        """Compute what the loss needs besides the batches of each split; called before training, also of a resumed run.

        Files are kept in the run's folder.
        """

    def measure(self, rows: Sequence[Any]) -> dict[str, float]:
        """Return metrics of some examples by key; called in evaluations."""
        return {}

    def end_step(self) -> None:  # noqa: B027  (optional)
        """Share what was computed since `begin_step` with the other processes."""

    def on_step_end(self, step: int) -> None:  # noqa: B027  (optional)
        """Called after optimizer step number `step`, from 1, in every process."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that change during the run, by name, for checkpoints. They are not copied."""
        return {}

    def averages(self) -> dict[str, float]:
        """Return the means of what was computed since the last call, by key."""
        return {}

    def alerts(self, split: str, step: int, n_steps: int, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return new alerts by name, after the numbers of `train` or `val` in optimizer step `step` of `n_steps`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `averages` and `alerts` need, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (optional)
        """Restore the state returned by `state_dict`."""


class TokenObjective(TrainingObjective):
    """Base class of the objectives of supervised runs, means over learned tokens."""

    name = "supervised"
    _balancing_sum = 0.0  # of the optimizer steps since the last log
    _n_steps = 0

    def split_weights(self, model: PreTrainedModel, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
        self.network = ShardedNetwork(model, mesh, reshard_after_forward=reshard_after_forward)

        # The methods that call the model become forward passes of torch: its hooks gather the weights.
        for name in ("loss", "routing"):
            setattr(self, name, partial(self.network.call, getattr(self, name)))

    def n_rows(self, batch: Batch) -> int:
        return len(batch["labels"])

    def n_tokens(self, batch: Batch) -> Tensor:
        return n_learned(batch["labels"])

    def end_step(self) -> None:
        if self.balancing is not None:
            self._balancing_sum += float(self.balancing.value)
            self._n_steps += 1

    def averages(self) -> dict[str, float]:
        if not self._n_steps:
            return {}
        mean = self._balancing_sum / self._n_steps
        self._balancing_sum = 0.0
        self._n_steps = 0
        return {f"{self.name}/{BALANCING_LOSS}": mean}

    def state_dict(self) -> dict[str, Any]:
        if self.balancing is None:
            return {}
        return {"balancing_sum": self._balancing_sum, "n_steps": self._n_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._balancing_sum = state.get("balancing_sum", 0.0)
        self._n_steps = state.get("n_steps", 0)


@dataclass
class CrossEntropy(TokenObjective):
    """Cross-entropy of the learned tokens.

    The losses of some models, such as T5, are means over a micro-batch and ignore the number of items of the step, so
    the loss is computed here. The logits `[n, length, vocab]` of a micro-batch exist only if they fit into the budget.
    Otherwise those of the learned tokens are computed from their hidden states, in chunks of at most the budget.
    """

    collator: ExampleCollator
    is_encoder_decoder: bool  # True for seq2seq models, whose labels are not shifted
    label_smoothing: float  # `label_smoothing_factor` of the Trainer
    use_cache: bool | None  # argument of the model's forward
    logits_budget: int | None  # largest number of logits in memory; None: no limit
    balancing: BalancingLoss | None = None
    packing: RowPacking | None = None  # None: rows are padded

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        return self.collator(rows)

    def loss(self, model: Any, batch: Batch, n_items: Any = None) -> Tensor:
        # Without labels, the model computes no loss of its own.
        inputs = self._inputs(model, batch)
        labels = inputs.pop("labels")
        is_balanced = self.balancing is not None and model.training
        router_option = {"output_router_logits": True} if is_balanced else {}
        options = {"use_cache": self.use_cache, **inputs, **router_option}

        # Softmax in float32, also if the model computes in bfloat16.
        if self._exceeds_budget(model, labels.shape):
            with without_logits(model) as passes:
                output = model(**options)
            states, labels = self._aligned(passes[0], labels)
            total = self._total_of_states(model, states, labels)
        else:
            output = model(**options)
            logits, labels = self._aligned(output.logits, labels)
            total = cross_entropy(
                logits.flatten(0, 1).float(),
                labels.flatten(),
                ignore_index=NOT_LEARNED,
                reduction="sum",
                label_smoothing=self.label_smoothing,
            )

        # A mean over the learned tokens of the optimizer step, not of the micro-batch: all tokens have equal weight.
        n_tokens = n_learned(labels) if n_items is None else n_items
        loss = total / torch.as_tensor(n_tokens).clamp_min(1)
        if self.balancing is not None and is_balanced:
            loss = loss + self.balancing.part(self._routing_of(model, output, inputs))
        return loss

    def _inputs(self, model: Any, batch: Batch) -> dict[str, Any]:
        """Return a batch on the model's device, in packed rows where that is faster."""
        packed = None
        if self.packing is not None:
            packed = self.packing.packed(batch["attention_mask"].sum(dim=1).cpu())
        if packed is None:
            return {name: to_device(tensor, model.device) for name, tensor in batch.items()}

        # The output before the first token of a text is that of another text: nothing is learned there.
        positions = packed.position_ids()
        labels = packed.pack(batch["labels"], NOT_LEARNED)
        labels = labels.masked_fill(to_device(positions == 0, labels.device), NOT_LEARNED)

        inputs = {
            "input_ids": packed.pack(batch["input_ids"], self.collator.pad_token_id),
            "position_ids": positions,
            "labels": labels,
        }

        # With a cache of keys and values, transformers would not derive from the positions that the rows are packed.
        return {name: to_device(tensor, model.device) for name, tensor in inputs.items()} | {"use_cache": False}

    def _aligned(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs `[n, length, ...]` of the model with the labels that are predicted there."""
        # The outputs at a token of a causal model are for the next token; the inputs of a seq2seq model's decoder are
        # already shifted.
        if self.is_encoder_decoder:
            return outputs, labels
        return outputs[:, :-1], labels[:, 1:]

    def _exceeds_budget(self, model: Any, shape: torch.Size) -> bool:
        """Return whether the logits of a pass over texts `[n, length]` do not fit into the budget."""
        if self.logits_budget is None:
            return False
        vocab_size = model.get_output_embeddings().weight.shape[0]
        return shape.numel() * vocab_size > self.logits_budget

    def _total_of_states(self, model: Any, states: Tensor, labels: Tensor) -> Tensor:
        """Compute the sum of the loss from the states `[n, length, d]` at which labels `[n, length]` are chosen."""
        assert self.logits_budget is not None
        is_learned = labels != NOT_LEARNED
        head = current_head(model, 1.0)
        log_prob, _ = token_scores(states[is_learned], head, labels[is_learned], logits_budget=self.logits_budget)
        return -log_prob.sum()

    def routing(self, model: Any, batch: Batch) -> Routing:
        inputs = self._inputs(model, batch)
        del inputs["labels"]
        options = {"use_cache": self.use_cache, **inputs, "output_router_logits": True}
        with nullcontext() if self.logits_budget is None else without_logits(model):  # no logits are read
            output = model(**options)
        return self._routing_of(model, output, inputs)

    def _routing_of(self, model: Any, output: Any, batch: Batch) -> Routing:
        """Return how the tokens of a forward pass were sent to experts."""
        # Right-padded or packed texts: a token counts if another one of its text follows it, which is never the first.
        continues = batch["position_ids"] > 0 if "position_ids" in batch else batch["attention_mask"]  # [n, length]
        is_followed = torch.nn.functional.pad(continues[:, 1:], (0, 1))
        return Routing.of_pass(output.router_logits, is_followed, experts_per_token(model))
