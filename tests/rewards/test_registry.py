"""Every reward of the table is a reward; nothing that users subclass loads torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.metrics import METRICS
from rl4lms_like.rewards import REWARDS, RewardFunctionRegistry
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers

LIGHT = """
import importlib, sys
for package, tables in (("rewards", "REWARDS"), ("metrics", "METRICS"), ("data_pools", "DATA_POOLS")):
    registry = getattr(importlib.import_module("rl4lms_like." + package), tables)
    for id in registry.ids():
        registry.resolve(id)
        registry.signature(id)
print(*({"torch", "transformers", "stable_baselines3", "datasets", "pandas", "vaderSentiment"} & set(sys.modules)))
"""


@pytest.mark.parametrize("registry", [REWARDS, METRICS, DATA_POOLS], ids=lambda registry: registry.kind)
def test_every_id_has_a_line_of_documentation(registry):
    for id in registry.ids():
        assert registry.entry(id).summary and registry.resolve(id).__doc__


def test_resolving_every_id_loads_no_torch():
    outcome = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert (outcome.stdout.strip(), outcome.stderr) == ("", "")


def test_rl4lms_names_lead_to_the_same_things():
    assert RewardFunctionRegistry is REWARDS
    assert isinstance(REWARDS.get("increasing_numbers", {"min_tokens": 3}), RewardIncreasingNumbers)
