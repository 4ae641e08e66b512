"""Every argument of every reward, metric and data pool acts: another value makes other scores or samples.

The arguments are those of the signatures, so that one without a row in `tests/arguments/` fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.metrics import METRICS
from rl4lms_like.rewards import REWARDS
from rl4lms_like.system.registry import Registry
from rl4lms_like.system.schema import signature_of
from rl4lms_like.system.wording import help_of
from tests import catalogue
from tests.arguments import metrics, pools, rewards
from tests.arguments.seen import Acts, Refused, Silent, Tried, observed
from tests.catalogue import Places
from tests.conftest import REPOSITORY

TABLES: dict[str, tuple[Registry, Mapping[str, catalogue.Row], Mapping[str, Mapping[str, Acts | Silent]]]] = {
    "rewards": (REWARDS, catalogue.REWARDS, rewards.ROWS),
    "metrics": (METRICS, catalogue.METRICS, metrics.ROWS),
    "data_pools": (DATA_POOLS, catalogue.POOLS, pools.ROWS),
}


def arguments(row_type: type) -> pytest.MarkDecorator:
    """All that have a row of this type."""
    cases = [
        pytest.param(kind, id, argument, id=f"{kind}/{id}/{argument}")
        for kind, (_, _, rows) in TABLES.items()
        for id, of_id in rows.items()
        for argument, row in of_id.items()
        if isinstance(row, row_type)
    ]
    return pytest.mark.parametrize(("kind", "id", "argument"), cases)


@pytest.mark.parametrize(
    ("kind", "id"), [pytest.param(kind, id, id=f"{kind}/{id}") for kind, table in TABLES.items() for id in table[0]]
)
def test_every_argument_has_a_row(kind, id):
    registry, _, rows = TABLES[kind]
    named = {argument.name for argument in signature_of(registry.signature(id)).arguments} - {"split"}
    assert named == set(rows.get(id, {}))


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Places:
    shared = REPOSITORY.parent / "shared"
    return Places(tmp_path_factory.mktemp("places"), shared if shared.is_dir() else None)


@pytest.fixture(scope="module")
def seen_before():
    """What components show with the arguments of the catalogue, each looked at twice."""
    return {}


@arguments(Acts)
def test_another_value_acts(kind, id, argument, places, request, seen_before):
    registry, built_with, rows = TABLES[kind]
    row = rows[id][argument]
    assert isinstance(row, Acts)
    if any(data in registry.entry(id).needs for data in ("NLTK", "WordNet")):
        request.getfixturevalue("language_data")
    kept = {name: value for name, value in built_with[id].built_with(places).items() if name not in row.without}
    before = kept | placed(row.others, places)
    after = before | placed(row.also, places) | placed({argument: row.value}, places)
    assert before != after
    role = built_with[id].model
    model = AutoModelForCausalLM.from_pretrained(places.model(role)) if role else None

    def shown(args: dict[str, Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            return observed(Tried(registry, id, args, places, row.texts(places), patch, model), row.sees)

    same_look = repr((kind, id, before, row.sees, row.texts(places)))
    if same_look not in seen_before:
        seen_before[same_look] = shown(before)
        assert shown(before) == seen_before[same_look], "it is not the argument that makes the difference"
    first, second = seen_before[same_look], shown(after)
    assert not isinstance(first, Refused), first
    if row.refused:
        assert isinstance(second, Refused) and re.search(row.refused, second.message), second
    else:
        assert not isinstance(second, Refused), second
        assert second != first


def placed(args: Mapping[str, Any], places: Places) -> dict[str, Any]:
    return {name: value(places) if callable(value) else value for name, value in args.items()}


@arguments(Silent)
def test_an_argument_without_meaning_says_so(kind, id, argument):
    registry, _, rows = TABLES[kind]
    row = rows[id][argument]
    assert isinstance(row, Silent)
    assert row.words in help_of(registry.signature(id))[argument]
