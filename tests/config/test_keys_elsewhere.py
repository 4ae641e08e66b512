"""A key of another library is answered with the key here, and the page has the same table."""

from __future__ import annotations

import re

import pytest

from rl4lms_like.config.load import ELSEWHERE, HERE, parse_config
from rl4lms_like.system.errors import ConfigError
from tests.configs import run_blocks, supervised_blocks


def mistakes_of(blocks):
    with pytest.raises(ConfigError) as caught:
        parse_config(blocks)
    return {issue.path: issue.message for issue in caught.value.issues}


@pytest.mark.parametrize(("block", "key", "here"), [
    ("alg.args", "cliprange", "alg.args.clip_range"),
    ("alg.args", "num_ppo_epochs", "alg.args.n_epochs"),
    ("alg.args", "kl_coef", "alg.kl_div.coeff"),
    ("alg.kl_div", "init_kl_coef", "alg.kl_div.coeff"),
    ("alg.policy.args", "actor_learning_rate", "alg.args.learning_rate"),
    ("env", "rollout_batch_size", "env.n_envs"),
    ("", "vf_coef", "alg.args.vf_coef"),
    ("alg.policy.args", "lora", "alg.policy.args.peft"),
])  # fmt: skip
def test_a_key_of_another_library_is_answered_with_the_key_here(block, key, here):
    blocks = run_blocks()
    inner = blocks
    for name in filter(None, block.split(".")):
        inner = inner[name]
    inner[key] = 1
    ((path, message),) = mistakes_of(blocks).items()
    assert path == f"{block}.{key}".lstrip(".") and here in message


def test_arguments_of_components_and_supervised_runs_have_keys_of_their_own():
    blocks = run_blocks()
    blocks["reward_fn"]["args"]["target"] = 1
    assert "kl_div" not in mistakes_of(blocks)["reward_fn.args.target"]
    blocks = supervised_blocks() | {"learning_rate": 1e-5}
    assert "alg.args" not in mistakes_of(blocks)["learning_rate"]


@pytest.mark.parametrize("key", ["lora", "lora_config", "peft_config"])
def test_the_adapters_of_a_supervised_run_have_their_key_in_alg(key):
    blocks = supervised_blocks()
    blocks["alg"][key] = {"r": 4}
    assert "the equivalent is alg.peft " in mistakes_of(blocks)[f"alg.{key}"]


def test_the_keys_here_are_taken():
    """Each is given another type than it has: were it unknown, the answer would be that."""
    for place in ELSEWHERE:
        blocks = inner = run_blocks()
        *names, last = place.split(".")
        for name in names:
            inner = inner[name]
        inner[last] = object
        found = mistakes_of(blocks)
        assert not any("unknown" in message for message in found.values()), place
        assert any(path.startswith(place) for path in found), place


def test_the_page_has_the_same_table(repository):
    page = (repository / "docs/coming_from_trl.md").read_text().partition("\n| TRL |")[0]  # GRPOTrainer's table follows
    rows = re.findall(r"^\| (`.*`) \| `(.*)` \|$", page, re.MULTILINE)
    assert {name: here for names, here in rows for name in re.findall(r"`(\w+)`", names)} == HERE
