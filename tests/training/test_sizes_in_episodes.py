"""Sizes of rollouts and minibatches in episodes: the same runs as in tokens, but of exact sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from stable_baselines3.common.logger import Logger

from rl4lms_like.algorithms.policy_gradient import GRPO
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.config.binding import with_defaults
from rl4lms_like.config.load import load_config, parse_config
from rl4lms_like.estimates.budget import plan_batches
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.on_policy.doctor.callback import context_of
from rl4lms_like.on_policy.token_credit import advantages_of_the_loss
from rl4lms_like.preview import resolved
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.rollouts.rollout import Rollout
from tests.algorithms.test_update import build
from tests.config_errors import raises_at

LENGTH = 8
PRETRAIN = {"max_rollouts": 2, "n_epochs": 2}

IN_BOTH_UNITS = {
    "ppo": ({"n_epochs": 2}, 2),
    "ppo that sorts": ({"n_epochs": 2, "length_sorted_minibatches": True}, 2),
    "ppo with a pretrained critic": ({"n_epochs": 1, "critic_pretrain": PRETRAIN}, 3),
    "nlpo": ({"n_epochs": 2}, 2),
    "a2c": ({}, None),
    "trpo": ({"n_critic_updates": 2, "cg_max_steps": 2}, 3),
    "grpo": ({"group_size": 2, "n_epochs": 2}, 2),
    "dapo": ({"group_size": 2, "dynamic_sampling": 3, "overlong_buffer": None}, 4),
    "online_dpo": ({"group_size": 4}, 4),
}
"""Algorithm -> arguments, and episodes of a minibatch; a rollout has 8 episodes."""


class PaysSome(RewardFunction):
    """One point for a third of the lengths, so that some groups have equal rewards."""

    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return float(len(current_observation.context_text) % 3 == 0)


class Rollouts:
    """Recorder that keeps the rollouts in memory."""

    def __init__(self) -> None:
        self.recorded: list[Rollout] = []

    def record(self, rollout: Rollout) -> None:
        self.recorded.append(rollout)


def episodes_config(tiny_config, algorithm: str = "ppo", **args):
    """The tiny run with responses of one length, if `terminate_on_eos` stays false."""
    blocks = copy.deepcopy(tiny_config)
    blocks["env"]["args"]["terminate_on_eos"] = False
    blocks["reward_fn"] = {"id": f"{__name__}:PaysSome"}
    blocks["alg"]["id"] = algorithm
    blocks["alg"]["kl_div"] = {"coeff": 0.1}
    blocks["alg"]["args"] = {"learning_rate": 1e-2, **args}
    policy = blocks["alg"]["policy"]
    if algorithm == "nlpo":
        policy["id"] = "maskable_causal_lm_actor_critic_policy"
        policy["args"]["top_mask"] = 20
    if algorithm in ("grpo", "dapo", "online_dpo"):
        del policy["args"]["value_head_init"]
    return blocks


def weights_after(blocks, n_iters: int = 2) -> tuple[torch.Tensor, list[int]]:
    """The trained weights, and the number of episodes of each rollout."""
    run = assemble(parse_config(blocks))
    algorithm = run.algorithm
    algorithm.set_logger(Logger(folder=None, output_formats=[]))
    for _ in algorithm.pretrain_critic():
        pass
    sizes = []
    for iteration in range(n_iters):
        algorithm.learn_iteration(iteration, n_iters)
        sizes.append(algorithm.rollout_buffer.episodes.n_episodes)
    return torch.cat([parameter.detach().flatten() for parameter in run.policy.parameters()]), sizes


@pytest.mark.parametrize("name", IN_BOTH_UNITS)
def test_sizes_in_either_unit_give_the_same_weights(name, tiny_config):
    args, minibatch = IN_BOTH_UNITS[name]
    algorithm = name.split()[0]
    in_tokens = {**args, "n_steps": 2 * LENGTH}
    in_episodes = {**args, "n_episodes": 8}
    if minibatch is not None:
        in_tokens["batch_size"] = minibatch * LENGTH
        in_episodes["minibatch_episodes"] = minibatch

    # With dynamic sampling, a rollout of at least so many tokens may have further groups, as its second one does here.
    n_iters = 1 if "dynamic_sampling" in args else 2
    expected, _ = weights_after(episodes_config(tiny_config, algorithm, **in_tokens), n_iters)
    weights, _ = weights_after(episodes_config(tiny_config, algorithm, **in_episodes), n_iters)
    assert torch.equal(weights, expected)

    smaller, _ = weights_after(episodes_config(tiny_config, algorithm, **{**in_episodes, "n_episodes": 4}), n_iters)
    assert not torch.equal(smaller, expected)


def test_rollouts_and_minibatches_have_exactly_their_sizes_whatever_the_lengths(tiny_config):
    blocks = episodes_config(tiny_config, n_episodes=12, minibatch_episodes=5, n_epochs=1)
    blocks["env"]["args"]["terminate_on_eos"] = True
    blocks["alg"]["policy"]["args"]["generation_kwargs"]["stop_strings"] = ["e"]  # some responses end early
    run = assemble(parse_config(blocks))
    run.algorithm.set_logger(Logger(folder=None, output_formats=[]))
    run.algorithm.learn_iteration(0, 1)
    buffer = run.algorithm.rollout_buffer
    assert buffer.episodes.n_episodes == 12
    assert len(set(buffer.episodes.lengths.tolist())) > 1
    assert [minibatch.observations.n_episodes for minibatch in buffer.get(1, 5)] == [5, 5, 2]
    (whole,) = buffer.get(None)
    assert whole.observations.n_episodes == 12


def test_dynamic_sampling_counts_episodes_and_drops_surplus_groups(tiny_config):
    blocks = episodes_config(tiny_config, "grpo", group_size=2, dynamic_sampling=6, n_episodes=4)
    run = assemble(parse_config(blocks))
    run.algorithm.set_logger(Logger(folder=None, output_formats=[]))
    rollouts = Rollouts()
    run.algorithm.collector.attach(recorder=rollouts)
    for iteration in range(12):
        run.algorithm.learn_iteration(iteration, 12)

    surplus = 0
    for rollout in rollouts.recorded:
        n_differing = sum(int(batch.groups_differ().sum()) for batch in rollout.generated)
        n_episodes = len(rollout.lengths)
        n_generated = sum(batch.episodes.n_episodes for batch in rollout.generated)
        assert n_generated <= 6 * 4
        if n_differing >= 4:
            assert n_episodes == 4
        if 0 < n_differing < 4:
            assert n_episodes == n_differing and n_generated == 24, "the limit was reached"
        surplus += n_differing > 4
        for batch in rollout.batches:
            _, sizes = batch.episodes.group_ids.unique(return_counts=True)
            assert set(sizes.tolist()) == {2}, "groups are whole"
    assert surplus, "no rollout had more groups than it needed"


@pytest.mark.parametrize(
    ("args", "path", "mentions"),
    [
        ({"n_episodes": 8, "n_steps": 16}, "alg.args.n_episodes", "n_steps"),
        ({"n_episodes": 8, "n_steps": 2048}, "alg.args.n_episodes", "n_steps"),
        ({"n_steps": 8, "minibatch_episodes": 2, "batch_size": 64}, "alg.args.minibatch_episodes", "batch_size"),
        ({"n_episodes": 6}, "alg.args.n_episodes", "env.n_envs, 4"),
        ({"n_episodes": 8, "minibatch_episodes": 9}, "alg.args.minibatch_episodes", "n_episodes: 8"),
        (
            {"n_episodes": 8, "group_size": 2, "minibatch_episodes": 3},
            "alg.args.minibatch_episodes",
            "multiple of group_size, 2",
        ),
        ({"n_episodes": 0}, "alg.args.n_episodes", "0"),
        ({"n_episodes": "many"}, "alg.args.n_episodes", "many"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(args, path, mentions, tiny_config):
    with raises_at(path, mentions=mentions):
        parse_config(episodes_config(tiny_config, **args))


def test_sizes_are_checked_in_python_too(tiny_gpt2_dir, tiny_tokenizer):
    with raises_at("n_episodes", mentions="n_steps"):
        build(PPO, tiny_gpt2_dir, tiny_tokenizer, n_episodes=16, n_steps=10)
    with raises_at("n_episodes", mentions="n_envs, 8"):
        build(GRPO, tiny_gpt2_dir, tiny_tokenizer, n_episodes=12, group_size=4)


def test_a2c_has_no_minibatches(tiny_config):
    with raises_at("alg.args.minibatch_episodes"):
        parse_config(episodes_config(tiny_config, "a2c", n_episodes=8, minibatch_episodes=4))


def test_the_resolved_config_has_one_unit_and_loads_again(tiny_config, tmp_path):
    config = parse_config(episodes_config(tiny_config, n_episodes=8, minibatch_episodes=4))
    args = with_defaults(config.to_dict())["alg"]["args"]
    assert (args["n_episodes"], args["minibatch_episodes"]) == (8, 4)
    assert not {"n_steps", "batch_size"} & args.keys()

    file = tmp_path / "resolved.yml"
    file.write_text(resolved(config))
    again = load_config(file)
    assert with_defaults(again.to_dict()) == with_defaults(config.to_dict())


def test_the_plan_is_in_episodes(tiny_config):
    plan = plan_batches(parse_config(episodes_config(tiny_config, n_episodes=12, minibatch_episodes=5, n_epochs=3)))
    assert (plan.episodes, plan.generation_batches, plan.minibatches, plan.steps_per_iteration) == (12, 3, 3, 9)
    lines = dict(plan.lines())
    assert lines["episodes per rollout"] == "12"
    assert lines["episodes in all"] == "36 in 3 iterations"
    assert "tokens in all" not in lines
    assert lines["optimizer steps"] == "9 per iteration, 27 in all", "RL4LMs has no such size"
    assert plan.tokens_per_rollout == 12 * LENGTH


def test_small_minibatches_are_noticed_in_episodes(tiny_config):
    config = parse_config(episodes_config(tiny_config, n_episodes=8, minibatch_episodes=2))
    (notice,) = [notice for notice in config.notices if "noisy" in notice.message]
    assert notice.path == "alg.args.minibatch_episodes"


def test_the_doctor_advises_in_the_unit_of_the_config(tiny_config):
    context = context_of(assemble(parse_config(episodes_config(tiny_config, n_episodes=8, minibatch_episodes=2))))
    assert (context.minibatch_key, context.rollout_key, context.rl4lms_steps) == (
        "minibatch_episodes",
        "n_episodes",
        None,
    )
    context = context_of(assemble(parse_config(episodes_config(tiny_config, n_steps=16, batch_size=16))))
    assert (context.minibatch_key, context.rollout_key) == ("batch_size", "n_steps")


@pytest.mark.parametrize(("minibatch", "scope"), [(8, "rollout"), (4, "minibatch")])
def test_token_credit_sees_whether_a_minibatch_is_the_whole_rollout(minibatch, scope, tiny_config):
    args = {"n_episodes": 8, "minibatch_episodes": minibatch, "n_epochs": 1, "normalize_advantage": True}
    run = assemble(parse_config(episodes_config(tiny_config, **args)))
    run.algorithm.set_logger(Logger(folder=None, output_formats=[]))
    run.algorithm.learn_iteration(0, 1)
    assert advantages_of_the_loss(run.algorithm)[1] == scope
