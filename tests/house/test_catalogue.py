"""Every id of the catalogue passes its checker, and reports what it declares.

A new id needs a row in `tests/catalogue.py`.
"""

from __future__ import annotations

import functools

import pytest
from transformers import AutoModelForCausalLM

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.config.binding import ComponentConfig, build_component
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.run_reward import RewardMetric
from rl4lms_like.post_processors import POST_PROCESSORS
from rl4lms_like.rewards import REWARDS
from rl4lms_like.system.errors import MissingResourceError
from rl4lms_like.testing import (
    check_algorithm,
    check_data_pool,
    check_metric,
    check_post_processor,
    check_reward_function,
)
from tests import catalogue
from tests.catalogue import Places, Row
from tests.conftest import REPOSITORY

TABLES = (
    (REWARDS, catalogue.REWARDS),
    (METRICS, catalogue.METRICS),
    (DATA_POOLS, catalogue.POOLS),
    (ALGORITHMS, catalogue.ALGORITHMS),
    (POST_PROCESSORS, catalogue.POST_PROCESSORS),
)


@pytest.fixture(scope="session")
def all_places(tmp_path_factory) -> Places:
    shared = REPOSITORY.parent / "shared"
    return Places(tmp_path_factory.mktemp("places"), shared if shared.is_dir() else None)


@pytest.fixture
def places(all_places, request) -> Places:
    """Folders of data and models; the test skips where its component needs word lists or data that are not here."""
    id = request.node.callspec.params["id"]
    needs = " ".join(registry.entry(id).needs for registry, _ in TABLES if id in registry)
    if "NLTK" in needs or "WordNet" in needs:
        request.getfixturevalue("language_data")
    return all_places


@pytest.mark.parametrize(("registry", "table"), TABLES, ids=[registry.kind for registry, _ in TABLES])
def test_every_id_has_a_row_and_every_row_an_id(registry, table):
    assert sorted(table) == sorted(registry)


def rows(table: dict[str, Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("id", [id for id, row in table.items() if not row.missing])


def built(registry, table, id, places):
    config = ComponentConfig(id=id, args=table[id].built_with(places))
    return build_component(registry, config)


@rows(catalogue.REWARDS)
def test_a_reward_passes_its_checker(id, places):
    row = catalogue.REWARDS[id]
    reward = built(REWARDS, catalogue.REWARDS, id, places)
    check_reward_function(reward, row.samples(places), batch_independent=row.batch_independent)


@rows(catalogue.METRICS)
def test_a_metric_passes_its_checker_and_reports_what_it_declares(id, places):
    row = catalogue.METRICS[id]
    metric = built(METRICS, catalogue.METRICS, id, places)
    if isinstance(metric, RewardMetric):
        metric.rewards_of = catalogue.rewards_of_a_run
    model = AutoModelForCausalLM.from_pretrained(places.model(row.model)) if row.model else None
    check_metric(metric, row.samples(places), model=model, keys=METRICS.entry(id).keys)


@pytest.mark.parametrize(
    ("registry", "table", "id"),
    [(REWARDS, catalogue.REWARDS_NOT_HERE, id) for id in catalogue.REWARDS_NOT_HERE]
    + [(METRICS, catalogue.METRICS, id) for id, row in catalogue.METRICS.items() if row.missing],
)
def test_what_cannot_be_built_here_says_what_is_missing(registry, table, id, places):
    with pytest.raises(MissingResourceError, match=table[id].missing):
        built(registry, table, id, places)


@rows(catalogue.POOLS)
def test_a_data_pool_passes_its_checker(id, places):
    check_data_pool(DATA_POOLS.resolve(id), **catalogue.POOLS[id].built_with(places))


EXACT = ("grpo", "ppo")
"""One algorithm without a critic and one with one; tests/laws/test_exact_gradients.py has the gradients of all."""


@rows(catalogue.ALGORITHMS)
def test_an_algorithm_passes_its_checker(id, places):
    options = {"exact": id in EXACT, **catalogue.ALGORITHMS[id].built_with(places)}
    check_algorithm(ALGORITHMS.resolve(id), **options)


@rows(catalogue.POST_PROCESSORS)
def test_a_post_processor_passes_its_checker(id, places):
    function = POST_PROCESSORS.get(id)
    assert not isinstance(function, functools.partial)
    check_post_processor(function, **catalogue.POST_PROCESSORS[id].built_with(places))
