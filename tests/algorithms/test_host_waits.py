"""How often a process waits for the device in a rollout and an update: never within a loop over micro-batches."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.policies.second_device import SECOND

SPECS = [
    ("ppo", "causal", {"micro_batch_size": 40, "target_kl": 9.0}),
    ("grpo", "causal", {"micro_batch_size": 40}),
    ("nlpo", "causal", {"micro_batch_size": 40}),
    ("a2c", "seq2seq", {"micro_batch_size": 20}),
    ("trpo", "causal", {"micro_batch_size": 60}),
    ("gspo", "causal", {"micro_batch_size": 40, "importance_correction": "icepop"}),
    ("online_dpo", "causal", {"batch_size": 16}),
    ("waiting", "causal", {"micro_batch_size": 40}),
]
OTHER_RANDOM_NUMBERS = ("a2c", "supervised")
"""Those that draw on the device: seq2seq models sample there, and supervised training has dropout."""
OBJECTIVES = ("supervised", "dpo", "kto", "orpo", "reward_model")

PER_STEP = {
    "algorithms/base.py _is_accepted": 1,  # loss and gradient are finite
    "algorithms/base.py train": 1,  # target_kl
    "algorithms/base.py _action_weights": 1,  # the actions that an importance correction leaves out
    "algorithms/policy_gradient.py skip_minibatch": 1,  # online DPO: is there a pair?
    "algorithms/policy_gradient.py prepare_minibatch": 1,  # online DPO: its pairs
}
"""Waits of an update for each optimizer step."""
PER_UPDATE = {
    "rollouts/buffer.py returns": 2,  # normalisation of the advantages; explained variance
    "rollouts/buffer.py values": 1,
    "rollouts/buffer.py rewards": 1,
    "algorithms/base.py prepare_rollout": 1,
    "algorithms/base.py check_sampler": 1,
    "algorithms/base.py _record_means": 2,  # TRPO: of policy and critic
    "algorithms/base.py _log_update": 1,
    "algorithms/policy_gradient.py _padded_rewards": 1,
    "algorithms/policy_gradient.py prepare_rollout": 1,
    "core/advantages.py _numbered": 2,
    # TRPO takes one step. A product with the Fisher matrix and a try of the line search are passes over the rollout.
    "core/trust_region.py conjugate_gradient": 15,
    "core/trust_region.py largest_step": 1,
    "algorithms/trpo.py _policy_step": 1,
    "algorithms/trpo.py _line_search": 11,
    "algorithms/trpo.py train": 5,
}
"""Further waits of an update."""
PER_BATCH = {
    "core/episodes.py layout": 10,  # of a generation batch, and of the buffer
    "envs/vec_env.py _final_states": 2,
    "policies/decoding.py __call__": 1,  # whether all responses have ended, every eighth token
    "policies/decoding.py read_texts": 2,
    "policies/decoding.py recorded": 3,
    "policies/generation.py generate": 3,
    "policies/generation.py shared_prompt_inputs": 1,
    "policies/generation.py recorded": 2,
    "policies/masked.py recorded": 2,
    "policies/teacher_forcing.py aligned": 1,
    "rollouts/collector.py _scored": 1,
    "rollouts/rollout.py episode_infos": 2,
}
"""Waits of a rollout for each generation batch, whatever the number of tokens and of scoring passes."""
PER_ROLLOUT = {
    "core/episodes.py layout": 5,
    "core/advantages.py _numbered": 4,
    "core/losses.py effective_sample_size": 1,
    "rollouts/after_rollout.py update_sampler": 1,
    "rollouts/rollout.py rollout_statistics": 2,
    "rollouts/rollout.py _statistics_of_groups": 1,
    "rollouts/rollout.py _statistics_of_sampling": 1,
}
"""Further waits of a rollout."""
TRANSFERS_PER_PASS = 9
"""Copies of positions to the device for each forward pass over episodes."""


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "tests.algorithms.waits_program",
        json.dumps([*SPECS, *((id, "causal", {}) for id in OBJECTIVES)]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {counts["id"]: counts for counts in json.loads(done.stdout.splitlines()[-1])}


def excess(waits: dict[str, int], each: dict[str, int], n: int, once: dict[str, int]) -> dict[str, int]:
    """Return the places with more waits than allowed: those of other packages are not counted here."""
    places = {}
    for place, count in waits.items():
        if count > n * each.get(place, 0) + once.get(place, 0) and place != "transformers":
            places[place] = count
    return places


@pytest.mark.parametrize("id", [spec[0] for spec in SPECS if spec[0] != "waiting"])
def test_waits_do_not_grow_with_the_number_of_micro_batches(id, counted):
    counts = counted[id]
    assert excess(counts["update"], PER_STEP, counts["steps"], PER_UPDATE) == {}
    assert excess(counts["rollout"], PER_BATCH, counts["batches"], PER_ROLLOUT) == {}

    # One wait in each pass would exceed the limits: a step has several passes (TRPO's are not all counted here).
    if id not in ("trpo", "online_dpo"):
        assert counts["passes"] > counts["steps"] and counts["scoring_passes"] > counts["batches"] > 0
    if id != "trpo":
        assert counts["transfers"] <= TRANSFERS_PER_PASS * (counts["passes"] + counts["steps"])


def test_a_wait_in_the_loss_is_found(counted):
    counts = counted["waiting"]
    found = excess(counts["update"], PER_STEP, counts["steps"], PER_UPDATE)
    assert found == {"tests": 2 * counts["passes"]}


@pytest.mark.parametrize("id", OBJECTIVES)
def test_a_step_on_given_texts_reads_only_what_is_logged(id, counted):
    counts = counted[id]
    places = {} if id == "supervised" else {"offline/preference_objectives.py as_numbers": 1}
    assert excess(counts["update"], places, 1, {}) == {} and counts["transfers"] > 0


@pytest.mark.parametrize("id", [*(spec[0] for spec in SPECS), *OBJECTIVES])
def test_an_update_on_the_device_is_that_on_the_cpu(id, counted):
    if SECOND.startswith("cuda") and id in OTHER_RANDOM_NUMBERS:
        pytest.skip("a GPU has other random numbers for it")
    assert counted[id]["gap"] < 1e-4  # a tenth of the learning rate, which is the size of the first steps of Adam
