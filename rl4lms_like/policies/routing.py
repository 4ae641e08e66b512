"""Balancing loss of mixture-of-experts models, which does not depend on micro-batches and processes.

    loss = E sum_e f_e P_e      f_e   mean number of times that a token is sent to expert e; a count, without gradient
                                P_e   mean probability of expert e

Both are means over the layers and over all tokens of an optimizer step that choose another token: not padding, and not
the last token of a text. It is the loss of the Switch Transformer (arXiv 2101.03961) as `load_balancing_loss_func` of
transformers computes it for one batch. As a product of two means it is no mean over tokens, so that neither the sum nor
the mean of the losses of micro-batches is the loss of the step. But f has no gradient, and P is a mean: with the f of
the whole step, the gradients of micro-batches add up. So f is counted before the first backward pass; in a step of
several micro-batches or processes, by forward passes without gradients.

A model has this loss if its `config.json` has `output_router_logits: true`; the coefficient is `router_aux_loss_coef`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rl4lms_like.system.errors import ModelError

_SETTING = "output_router_logits"
"""Setting of a model's config by which transformers adds the balancing loss to its own."""
_COEFFICIENT = "_balancing_coefficient"
"""Attribute of a model in which that setting has been switched off."""


class Routing(NamedTuple):
    """Sums over tokens and layers of the choices and the probabilities of experts.

    Args:
        counts: `[n_experts]`, how often each expert was chosen.
        probs: `[n_experts]`, sums of the probabilities of the experts, with gradients.
        n: number of summands, tokens times layers.
    """

    counts: Tensor
    probs: Tensor
    n: Tensor

    @staticmethod
    def of_pass(router_logits: Sequence[Tensor], token_weights: Tensor, n_chosen: int) -> Routing:
        """Return the sums of a forward pass.

        Args:
            router_logits: `[n * length, n_experts]` of each layer.
            token_weights: `[n, length]`, how often each token counts.
            n_chosen: number of experts of a token.
        """
        weights = token_weights.flatten().float()  # [n * length]
        counts = torch.zeros_like(router_logits[0][0], dtype=torch.float32)
        probs = torch.zeros_like(counts)
        for logits in router_logits:
            layer_probs = logits.float().softmax(dim=-1)  # [n * length, n_experts]
            chosen = layer_probs.topk(n_chosen, dim=-1).indices.flatten()
            counts = counts.index_add(0, chosen, weights.repeat_interleave(n_chosen))
            probs = probs + (weights[:, None] * layer_probs).sum(dim=0)
        return Routing(counts, probs, len(router_logits) * weights.sum())

    @staticmethod
    def added(routings: Sequence[Routing]) -> Routing:
        """Return the sums over several forward passes."""
        return Routing(*(torch.stack(sums).sum(dim=0) for sums in zip(*routings, strict=True)))

    def detach(self) -> Routing:
        """Return the same sums without gradients."""
        return Routing(*(sums.detach() for sums in self))

    def loss(self, step: Routing) -> Tensor:
        """Return the part of these tokens in the loss of an optimizer step with the sums `step`."""
        return len(self.counts) * ((step.counts / step.n) * (self.probs / step.n)).sum()


class BalancingLoss:
    """Balancing loss of one optimizer step after another.

    Args:
        coefficient: weight of the loss.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self._step: Routing | None = None

    @classmethod
    def of(cls, model: Any) -> BalancingLoss | None:
        """Return the balancing loss of a model; None if it has none."""
        coefficient = balancing_coefficient(model)
        return cls(coefficient) if coefficient else None

    def begin_step(self, passes: Iterable[Routing] | None) -> None:
        """Begin an optimizer step.

        Args:
            passes: of all its forward passes, in all processes; None if it has only one.
        """
        self._step = None if passes is None else Routing.added([routing.detach() for routing in passes])

    def part(self, routing: Routing) -> Tensor:
        """Return what a forward pass adds to the loss of the step, with the coefficient."""
        if self._step is None:
            self._step = routing.detach()
        return self.coefficient * routing.loss(self._step)

    @property
    def value(self) -> Tensor:
        """The loss of the current step, without its coefficient; known after its first part."""
        assert self._step is not None
        return self._step.loss(self._step)


class RoutingRecord:
    """Recorder of the first forward pass of a block of code: what follows reads the same tokens again."""

    def __init__(self) -> None:
        self._passes: list[Routing] = []  # of the prompts and of the responses, if a prompt is shared
        self._is_complete = False

    def add(self, router_logits: Sequence[Tensor], token_weights: Tensor, n_chosen: int) -> None:
        """Add a part of the pass; see `Routing.of_pass`."""
        if not self._is_complete:
            self._passes.append(Routing.of_pass(router_logits, token_weights, n_chosen))

    def end_pass(self) -> None:
        """Ignore all further passes."""
        self._is_complete = True

    @property
    def routing(self) -> Routing:
        """The sums of the pass."""
        return Routing.added(self._passes)


# --- models -----------------------------------------------------------------------------------------------------------


def switch_off_router_logits(model: PreTrainedModel) -> None:
    """Switch off the balancing loss of a model's own forward, in place; its coefficient is kept with the model.

    With it, `generate` of transformers fails: it computes the loss of one token with the attention mask of all.

    Raises:
        ModelError: the loss is defined differently for this family.
    """
    config = model.config.get_text_config()
    if not getattr(config, _SETTING, False):
        return
    has_fields = all(hasattr(config, name) for name in ("router_aux_loss_coef", "num_experts_per_tok"))
    if config.is_encoder_decoder or not has_fields:
        raise ModelError(
            f"{model.name_or_path!r} has {_SETTING}: true, but the balancing loss of this family "
            f"({type(model).__name__}) is not supported: set it to false in the model's config.json, to train without"
        )
    config.output_router_logits = False
    setattr(model, _COEFFICIENT, float(config.router_aux_loss_coef))


def balancing_coefficient(model: Any) -> float:
    """Return the coefficient of a model's balancing loss; 0 if it has none."""
    return float(getattr(model, _COEFFICIENT, 0.0))


def has_balancing_loss(config: PretrainedConfig) -> bool:
    """Return whether a model with this config is trained with a balancing loss."""
    text_config = config.get_text_config()
    return bool(getattr(text_config, _SETTING, False) and getattr(text_config, "router_aux_loss_coef", 0))


def experts_per_token(model: Any) -> int:
    """Return the number of experts to which each layer sends a token."""
    return int(model.config.get_text_config().num_experts_per_tok)


@contextmanager
def with_saved_setting(model: PreTrainedModel) -> Iterator[None]:
    """Restore the setting of a model's checkpoint within the block, in which the model is saved."""
    if not hasattr(model, _COEFFICIENT):
        yield
        return
    config = model.config.get_text_config()
    config.output_router_logits = True
    try:
        yield
    finally:
        config.output_router_logits = False
