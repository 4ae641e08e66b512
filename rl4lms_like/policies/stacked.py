"""Adapters that were trained one after the other, as one adapter of their common base model.

    base                    W                                [out, in]
    after an adapter        W + s1 B1 A1                     A1 [r1, in], B1 [out, r1]
    after a second one      W + s1 B1 A1 + s2 B2 A2 = W + s2 [(s1 / s2) B1, B2] [A1; A2]        rank r1 + r2

DoRA divides each row by its norm and multiplies it by a trained magnitude m, so it scales the rows by d = m / |V|. The
sum is then one of rows that are scaled, and again a DoRA adapter of rank r1 + r2, whose magnitudes are the norms of its
rows:

    after DoRA              d (W + s1 B1 A1)
    after a second adapter  d (W + s1 B1 A1) + s2 B2 A2 = d (W + s2 [(s1 / s2) B1, B2 / d] [A1; A2])

Trained rows of the embeddings (`trainable_token_indices`) are whole rows in place of those of the base: of a row that
several adapters have trained, the last one counts.

PEFT and transformers load no adapter whose base is an adapter: transformers raises an error, and PEFT's
`AutoPeftModelForCausalLM` loads the last adapter alone. In memory, earlier adapters are merged into the frozen weights;
what they changed is kept with the model (`EarlierAdapters`) until it is saved.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rl4lms_like.policies.sharding import whole

_LORA_WEIGHT = re.compile(r"(.+)\.(lora_[AB]\.weight|lora_magnitude_vector(\.weight)?)")
"""Names of the weights that can be stacked: those of adapters in linear layers."""
ROWS = "token_adapter.trainable_tokens_delta"
"""End of the names of weights that are trained rows of embeddings or output layers."""
_KEEPS_BASE = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the weights of the base model unchanged."""
_PREFIX = "base_model.model."
"""Prefix of PEFT's wrapper in the names of saved weights."""


@dataclass(frozen=True)
class LayerChange:
    """Change of a layer's weight W by adapters, to `row_scale * (W + scale * up @ down)`.

    Args:
        down: `[r, in]`.
        up: `[out, r]`.
        scale: factor of the product.
        row_scale: `[out]`, factors of the rows; None without DoRA.
    """

    down: Tensor
    up: Tensor
    scale: float
    row_scale: Tensor | None = None

    @property
    def rank(self) -> int:
        """Number of rows of `down`."""
        return self.down.shape[0]

    def then(self, later: LayerChange) -> LayerChange:
        """Return this change and a later one, of the changed weight, as one change."""
        later_up = later.up if self.row_scale is None else later.up / self.row_scale[:, None]
        row_scale = later.row_scale
        if self.row_scale is not None:
            row_scale = self.row_scale if row_scale is None else self.row_scale * row_scale

        # The later factors keep their values, so that the adapter that is being trained is read again exactly.
        return LayerChange(
            down=torch.cat([self.down, later.down]),
            up=torch.cat([self.up * (self.scale / later.scale), later_up], dim=1),
            scale=later.scale,
            row_scale=row_scale,
        )


@dataclass(frozen=True)
class EarlierAdapters:
    """Adapters that are merged into the weights of a model.

    Args:
        base: the model without adapters, a hub id or an absolute path.
        changes: what they change, by names of layers.
        rows: rows `[d]` in place of those of the base, by names of layers and ids of tokens.
        obstacle: why they cannot be part of another adapter; empty if they can.
    """

    base: str
    changes: Mapping[str, LayerChange]
    rows: Mapping[str, Mapping[int, Tensor]]
    obstacle: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> EarlierAdapters:
        return self  # never changed, so that copies of the model share it

    def then(self, later: EarlierAdapters) -> EarlierAdapters:
        """Return these adapters followed by others; the base is that of the first."""
        changes = dict(self.changes)
        for name, change in later.changes.items():
            changes[name] = changes[name].then(change) if name in changes else change
        rows = dict(self.rows)
        for name, later_rows in later.rows.items():
            earlier_rows = rows.get(name, {})
            both = {**earlier_rows, **later_rows}

            # In ascending order, or in the descending one of a layer that PEFT must not tie: see `add_lora`.
            descends = any(list(ids) != sorted(ids) for ids in (earlier_rows, later_rows))
            rows[name] = {id: both[id] for id in sorted(both, reverse=descends)}
        return EarlierAdapters(self.base, changes, rows, self.obstacle or later.obstacle)


def earlier_adapters(model: nn.Module) -> EarlierAdapters | None:
    """Return the adapters that were merged into a model when it was loaded; None if there were none."""
    return getattr(model, "_earlier_adapters", None)


def remember_adapter(model: nn.Module, adapter: EarlierAdapters) -> None:
    """Record in a model that an adapter is merged into its weights, after those recorded before."""
    before = earlier_adapters(model)
    model._earlier_adapters = adapter if before is None else before.then(adapter)  # type: ignore[assignment]


def stacking_obstacle(config: Any, weight_names: Iterable[str]) -> str:
    """Return why an adapter cannot become part of another one, for a message; empty if it can.

    Args:
        config: PEFT's config of the adapter.
        weight_names: names of the weights that the adapter has.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        return f"it is an adapter of the type {kind}"
    if config.init_lora_weights not in _KEEPS_BASE:
        return f"its init_lora_weights {config.init_lora_weights!r} changes weights of the base"
    if getattr(config, "target_parameters", None):
        return "it has target_parameters"
    others = sorted(name for name in weight_names if not (_LORA_WEIGHT.fullmatch(name) or name.endswith(ROWS)))
    return f"it has trained {others[0].removeprefix(_PREFIX)!r}, which is no low-rank matrix" if others else ""


@torch.no_grad()
def layer_changes(model: nn.Module, adapter: str) -> dict[str, LayerChange]:
    """Return what an adapter changes in the linear layers of a model, by their names, in main memory.

    Args:
        model: a model with adapters in its layers.
        adapter: PEFT's name of the adapter.
    """
    changes = {}
    for name, layer in _adapted_linear(model, adapter):
        change = LayerChange(
            down=_copied(layer.lora_A[adapter].weight),
            up=_copied(layer.lora_B[adapter].weight),
            scale=float(layer.scaling[adapter]),
        )

        # DoRA: each row of V = W + s B A gets the length m.
        if adapter in layer.lora_magnitude_vector:
            magnitude = _copied(layer.lora_magnitude_vector[adapter].weight)
            rows = _rows(layer.get_base_layer()) + change.scale * (change.up @ change.down)
            change = replace(change, row_scale=magnitude / rows.norm(dim=1))
        changes[name] = change
    return changes


@torch.no_grad()
def row_changes(model: nn.Module, adapter: str) -> dict[str, dict[int, Tensor]]:
    """Return the rows that an adapter has trained, by names of layers and ids of tokens, in main memory.

    Args:
        model: a model with adapters in its layers.
        adapter: PEFT's name of the adapter.
    """
    changes = {}
    for name, layer in model.named_modules():
        # Layers that PEFT ties to another one have no rows of their own.
        rows: Any = getattr(layer, "token_adapter", None)
        if rows is not None and rows.tied_adapter is None and adapter in rows.trainable_tokens_delta:
            weight = _copied(rows.trainable_tokens_delta[adapter])
            changes[name] = dict(zip(rows.token_indices[adapter], weight, strict=True))
    return changes


@torch.no_grad()
def stacked(model: nn.Module, adapter: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return one adapter of the base model that has the earlier adapters of a model and the one it trains.

    Args:
        model: a model with adapters and with `earlier_adapters`, which can be stacked.
        adapter: PEFT's name of the adapter that it trains.

    Returns:
        The weights by their names in a saved adapter, and the fields of PEFT's config that differ from those of the
        adapter that it trains.
    """
    earlier = earlier_adapters(model)
    assert earlier is not None
    current = EarlierAdapters(earlier.base, layer_changes(model, adapter), row_changes(model, adapter))
    whole = earlier.then(current)
    changes = whole.changes

    # A critic has no output layer.
    layers = dict(model.named_modules())
    changes = {name: change for name, change in changes.items() if not isinstance(layers[name], nn.Identity)}

    weights: dict[str, Tensor] = {}
    for name, change in changes.items():
        weights[f"{_PREFIX}{name}.lora_A.weight"] = change.down.contiguous()
        weights[f"{_PREFIX}{name}.lora_B.weight"] = change.up.contiguous()

    token_indices = {}
    for name, rows in whole.rows.items():
        if not isinstance(layers[name], nn.Identity):
            token_indices[name] = list(rows)
            weights[f"{_PREFIX}{name}.{ROWS}"] = torch.stack(list(rows.values()))

    # With DoRA in one layer, PEFT adds it to all of them: a magnitude is the norm of its row, which changes nothing.
    uses_dora = any(change.row_scale is not None for change in changes.values())
    if uses_dora:
        for name, change in changes.items():
            weights[f"{_PREFIX}{name}.lora_magnitude_vector.weight"] = _magnitudes(model, adapter, name, change)

    # PEFT scales by alpha / r. Values that most layers have are those of the adapter, all others have patterns.
    ranks = {name: change.rank for name, change in changes.items()}
    alphas = {name: _whole_if_possible(change.scale * change.rank) for name, change in changes.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    fields = {
        "base_model_name_or_path": earlier.base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(changes),
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {re.escape(name): ranks[name] for name in sorted(ranks) if ranks[name] != rank},
        "alpha_pattern": {re.escape(name): alphas[name] for name in sorted(alphas) if alphas[name] != alpha},
        "use_rslora": False,
        "use_dora": uses_dora,
        "trainable_token_indices": token_indices or None,
    }
    return weights, fields


@torch.no_grad()
def last_adapter(
    model: nn.Module, weights: Mapping[str, Tensor], adapter: str, *, uses_dora: bool
) -> dict[str, Tensor]:
    """Return the part of a saved adapter that a model trains; the rest is in the model's frozen weights.

    Args:
        model: a model with adapters.
        weights: weights of an adapter that was saved by a run with the same `earlier_adapters`, named without PEFT's
            prefix.
        adapter: PEFT's name of the adapter that the model trains.
        uses_dora: that adapter has magnitudes; otherwise, those of the saved one come from an earlier adapter.
    """
    earlier = earlier_adapters(model)
    if earlier is None:
        return dict(weights)

    # Rows of A are those of the adapters in the order of their training. A file that was saved by version 0.2.0 or
    # before has only the last ones.
    trained = {name: layer.lora_A[adapter].weight.shape[0] for name, layer in _adapted_linear(model, adapter)}
    current = {}
    rows_by_layer = row_changes(model, adapter)
    whole = earlier.then(EarlierAdapters(earlier.base, {}, rows_by_layer))
    for name, rows in rows_by_layer.items():
        saved = weights[f"{name}.{ROWS}"]
        if len(saved) > len(rows):
            saved = saved[torch.tensor([id in rows for id in whole.rows[name]])]
        current[f"{name}.{ROWS}"] = saved
    for key, weight in weights.items():
        if key.endswith(ROWS):
            continue
        match = _LORA_WEIGHT.fullmatch(key)
        name = match[1] if match else ""
        if name not in trained:
            if name not in earlier.changes:
                current[key] = weight
            continue

        rank = trained[name]
        before = earlier.changes.get(name)
        is_stacked = weights[f"{name}.lora_A.weight"].shape[0] > rank
        row_scale = before.row_scale if before is not None and is_stacked else None
        if "lora_A" in key:
            current[key] = weight[-rank:]
        elif "lora_B" in key:
            up = weight[:, -rank:]
            current[key] = up if row_scale is None else up * row_scale[:, None]
        elif uses_dora:
            current[key] = weight if row_scale is None else weight * row_scale.sign()
    return current


def _adapted_linear(model: nn.Module, adapter: str) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers with an adapter of that name, with their names."""
    for name, layer in model.named_modules():
        down: Any = getattr(layer, "lora_A", None)
        if isinstance(down, nn.ModuleDict) and adapter in down and down[adapter].weight.ndim == 2:
            yield name, layer


def _magnitudes(model: nn.Module, adapter: str, name: str, change: LayerChange) -> Tensor:
    """Return DoRA's magnitudes of a layer `[out]`: the norms of its rows, with the signs of their factors."""
    layer: Any = model.get_submodule(name)
    current = layer_changes(layer, adapter).get("")

    # The magnitudes that are trained already are these norms; used themselves, they are read again exactly.
    if current is None:
        norms = _rows(layer).norm(dim=1)
    elif current.row_scale is not None:
        norms = _copied(layer.lora_magnitude_vector[adapter].weight).abs()
    else:
        rows = _rows(layer.get_base_layer()) + current.scale * (current.up @ current.down)
        norms = rows.norm(dim=1)
    return norms if change.row_scale is None else norms * change.row_scale.sign()


def _rows(layer: Any) -> Tensor:
    """Return the weight of a linear layer `[out, in]`, in main memory; GPT-2's is saved the other way round."""
    weight = whole(layer.weight.detach()).float().cpu()
    return weight.T if isinstance(layer, Conv1D) else weight


def _copied(weight: Tensor) -> Tensor:
    return whole(weight.detach()).float().cpu().clone()


def _whole_if_possible(number: float) -> float | int:
    """Return a whole number as `int`, which is the type that PEFT documents for `lora_alpha`."""
    return int(number) if float(number).is_integer() else number
