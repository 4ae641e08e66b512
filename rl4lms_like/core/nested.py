"""Components inside components: what a signature says of an argument that is itself a reward.

    inner: RewardFunction                                     the type says it; a config gives {id, args}
    scorer: Annotated[Any, ComponentOf("batched reward")]     said in words, where the type's module must not be known
    part: a dataclass with
        reward: Annotated[AnyReward, Inline("name")]          id and args stand in the block itself, {id, args, weight}

Looked up and checked by `training.binding`, built by `training.building`, the inner ones first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ComponentOf:
    """In an `Annotated` type: the argument is a component.

    Args:
        kind: `reward` or `batched reward`.
    """

    kind: str


@dataclass(frozen=True)
class Inline:
    """In the `Annotated` type of a dataclass's field: the component's `id` and `args` stand beside the other fields.

    Args:
        name_field: the field that takes the id where it is left out; its values differ within a list.
    """

    name_field: str
