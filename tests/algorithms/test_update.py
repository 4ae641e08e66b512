"""One update: exact under micro-batches, safe at one token, early stopped, with the learning rates it was given."""

import dataclasses
import importlib
import math
import warnings

import pytest
import sb3_contrib
import stable_baselines3
import torch
from stable_baselines3.common.evaluation import evaluate_policy

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.schedules import learning_rate_schedule
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.settings import check_settings
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.rollouts.rollout import Rollout
from rl4lms_like.rollouts.text_rollouts import with_text_rollouts
from rl4lms_like.system.errors import ModelError, RL4LMsLikeError
from rl4lms_like.testing import models
from tests.builders import POLICIES, SAMPLING, make_env
from tests.config_errors import raises_at
from tests.configs import run_blocks


def build(
    algorithm, model_dir, tokenizer, family="causal", policy_kwargs=None, n_envs=8, length=10, reward=None, **arguments
):
    defaults = {"n_steps": 20, "learning_rate": 1e-3, "seed": 1, "device": "cpu"}
    if "n_episodes" in arguments:
        del defaults["n_steps"]
    if issubclass(algorithm, PPO):
        defaults |= {"batch_size": 80, "n_epochs": 2}
    return algorithm(
        POLICIES[family],
        make_env(tokenizer, model_dir, n_envs=n_envs, length=length, reward=reward),
        policy_kwargs={"model_name": str(model_dir), "generation_kwargs": SAMPLING, **(policy_kwargs or {})},
        **{**defaults, **arguments},
    )


def parameters(algorithm):
    return torch.cat([p.detach().flatten() for p in algorithm.policy.parameters()])


@pytest.mark.parametrize("algorithm", [PPO, A2C])
@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_micro_batches_never_change_the_gradient(algorithm, family, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    model_dir = tiny_gpt2_dir if family == "causal" else tiny_t5_dir
    gradients = []
    for micro_batch_size in (None, 30, 1):
        built = build(
            algorithm, model_dir, tiny_tokenizer, family, micro_batch_size=micro_batch_size, ent_coef=0.01,
            policy_kwargs={"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}},
        )  # fmt: skip
        before = parameters(built)
        built.learn_iteration(0, 1)
        gradients.append((parameters(built) - before) / 1e-3)
    assert float(gradients[0].norm()) > 1e-3
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other, atol=2e-3 * float(gradients[0].norm()), rtol=1e-3)


def test_micro_batches_keep_responses_to_one_prompt_together(tiny_gpt2_dir, tiny_tokenizer):
    """In scoring and in two epochs of updates, for 8 prompts of 3 responses."""
    options = {"micro_batch_size": 50, "batch_size": 80, "policy_kwargs": {"speedups": {"sampler_log_probs": False}}}
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, n_envs=24, n_steps=1, **options)
    policy, rows, seen = built.policy, torch.arange(24) // 3, []
    generate, scores = policy.generate, policy.reader.scores
    policy.generate = lambda ids, mask, **options: dataclasses.replace(
        generate(ids[rows * 3], mask[rows * 3], **options), prompt_rows=rows
    )
    policy.reader.scores = lambda episodes, **options: (seen.append(episodes), scores(episodes, **options))[1]
    built.learn_iteration(0, 1)
    lengths = built.rollout_buffer.episodes.response_lengths
    assert len(lengths) == 24 and max(int(lengths[rows == row].sum()) for row in range(8)) <= 50, "every group fits"
    assert sum(len(batch.prompt_rows) for batch in seen) == 3 * 24
    assert sum(len(batch.prompt_rows.unique()) for batch in seen) == 3 * 8


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_micro_batches_never_change_the_gradient_of_another_mean(
    aggregation, family, tiny_gpt2_dir, deeper_t5_dir, tiny_tokenizer
):
    model_dir = tiny_gpt2_dir if family == "causal" else deeper_t5_dir

    class Averaged(PPO):
        loss_norm = 7.0

        def loss(self, minibatch):
            objective = super().loss(minibatch)
            return objective._replace(kl=0.1 * objective.log_ratio.exp() * objective.policy)

        def clip_and_step(self, info):
            self.gradient = torch.cat([p.grad.flatten() for p in self.policy.parameters() if p.grad is not None])
            self.logged = {name: float(value) for name, value in info.items()}

    built = build(
        Averaged, model_dir, tiny_tokenizer, family,
        n_envs=4, length=40, n_steps=80, batch_size=10_000, n_epochs=1, loss_aggregation=aggregation, seed=2,
    )  # fmt: skip
    built.learn_iteration(0, 1)
    seen = [(built.gradient, built.logged)]
    for micro_batch_size in (30, 1):
        built.arguments = dataclasses.replace(built.arguments, micro_batch_size=micro_batch_size)
        built.train()
        seen.append((built.gradient, built.logged))
    lengths = built.rollout_buffer.episodes.lengths
    assert len(set(lengths.tolist())) > 1, "with equal lengths all means are the same"
    for gradient, logged in seen[1:]:
        assert float((gradient - seen[0][0]).norm() / seen[0][0].norm()) < 1e-5
        assert logged == pytest.approx(seen[0][1], rel=1e-4, abs=1e-6)


class Rollouts:
    """A recorder that keeps a rollout, and the source that returns it."""

    def record(self, rollout):
        self.batches = rollout.batches

    def next_rollout(self, *, updates_policy):
        return Rollout(self.batches, self.batches, updates_policy=updates_policy, is_replayed=True)


@pytest.mark.parametrize("algorithm", [PPO, A2C])
@pytest.mark.parametrize(
    ("log_ratio", "weight"), [(-math.log(2), 0.5), (math.log(8), 2.0)], ids=["within", "at the limit"]
)
@pytest.mark.parametrize("correction", [{}, {"importance_correction": "tis"}], ids=["replayed", "by argument"])
def test_actions_of_another_policy_are_weighted_in_its_loss(
    algorithm, log_ratio, weight, correction, tiny_gpt2_dir, tiny_tokenizer
):
    """`log_ratio` is the log of pi / mu; with such a constant, the whole gradient is scaled."""
    changes, recorder = [], Rollouts()
    for expected in (1.0, weight):
        built = build(
            algorithm, tiny_gpt2_dir, tiny_tokenizer, micro_batch_size=30, vf_coef=0.0, max_grad_norm=None,
            policy_kwargs={"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}, "value_head_init": "default"},
            **({"n_epochs": 1, "batch_size": 4000} if algorithm is PPO else {}), **correction,
        )  # fmt: skip
        if expected == 1:
            built.collector.attach(recorder=recorder)
        else:
            recorder.batches = [
                dataclasses.replace(
                    batch,
                    episodes=dataclasses.replace(batch.episodes, behavior_log_prob=batch.scores.log_prob - log_ratio),
                )
                for batch in recorder.batches
            ]
            recorder.is_off_policy = not correction
            built.collector.attach(replay=recorder)
        before = parameters(built)
        built.learn_iteration(0, 1)
        changes.append(parameters(built) - before)
    assert float(changes[0].norm()) > 1e-5
    torch.testing.assert_close(changes[1], weight * changes[0], atol=1e-3 * float(changes[0].norm()), rtol=1e-3)
    assert built.logger.name_to_value["rollout_info/importance_weight"] == pytest.approx(math.exp(log_ratio))


def test_a_minibatch_of_one_token_is_safe(tiny_gpt2_dir, tiny_tokenizer):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, n_envs=3, length=1, n_steps=1, batch_size=1)
    built.learn_iteration(0, 1)
    assert torch.isfinite(parameters(built)).all()


def test_the_update_stops_when_it_has_gone_too_far(tiny_gpt2_dir, tiny_tokenizer):
    far = build(PPO, tiny_gpt2_dir, tiny_tokenizer, n_epochs=8, learning_rate=1e-2, target_kl=1e-3)
    far.learn_iteration(0, 1)
    epochs = far.logger.name_to_value["train/epochs"]
    assert epochs < 8 and far.logger.name_to_value["train/n_updates"] < 8 * 3


def test_the_critic_has_its_own_learning_rate_and_both_follow_the_schedule(tiny_gpt2_dir, tiny_tokenizer):
    built = build(
        PPO, tiny_gpt2_dir, tiny_tokenizer, critic_learning_rate=5e-3, learning_rate_schedule="linear"
    )  # fmt: skip
    for iteration, remaining in ((0, 1.0), (1, 0.75)):
        built.learn_iteration(iteration, 4)
        rates = {group["role"]: group["lr"] for group in built.policy.optimizer.param_groups}
        assert rates == {"actor": pytest.approx(1e-3 * remaining), "critic": pytest.approx(5e-3 * remaining)}
    assert learning_rate_schedule(2.0, "cosine")(0.5) == pytest.approx(1.0)
    assert learning_rate_schedule(2.0, "cosine")(1.0) == 2.0 and learning_rate_schedule(2.0, "constant") == 2.0


def test_the_critic_learns_ten_times_as_fast_unless_it_has_a_rate(tiny_gpt2_dir, tiny_tokenizer):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer)
    built.learn_iteration(0, 1)
    rates = {group["role"]: group["lr"] for group in built.policy.optimizer.param_groups}
    assert rates == {"actor": pytest.approx(1e-3), "critic": pytest.approx(1e-2)}


def test_the_last_update_of_a_falling_learning_rate_still_learns(tiny_gpt2_dir, tiny_tokenizer):
    """`learn` counts tokens: progress is that of the start of a rollout, not of its end."""
    rates = []

    class Rates(PPO):
        def train(self):
            super().train()
            rates.append(self.policy.optimizer.param_groups[0]["lr"])

    built = build(Rates, tiny_gpt2_dir, tiny_tokenizer, learning_rate_schedule="linear")
    built.learn(total_timesteps=300)
    assert rates[0] == pytest.approx(1e-3) and rates == sorted(rates, reverse=True)
    assert len(rates) > 1 and rates[-1] > 0


def test_biases_and_normalisation_weights_do_not_decay(tiny_gpt2_dir, tiny_tokenizer):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"weight_decay": 0.1})
    for group in built.policy.optimizer.param_groups:
        assert {p.ndim >= 2 for p in group["params"]} == {group["weight_decay"] == 0.1}
    listed = sum(p.numel() for group in built.policy.optimizer.param_groups for p in group["params"])
    models = (built.policy.policy_model, built.policy.value_model, built.policy.value_head)
    assert listed == sum(p.numel() for model in models for p in model.parameters())
    assert built.policy.optimizer.defaults["fused"] is True


def test_the_reference_stays_and_the_shared_critic_trains_the_trunk(tiny_gpt2_dir, tiny_tokenizer):
    from rl4lms_like.rollouts.kl import FixedKLController

    built = build(
        PPO, tiny_gpt2_dir, tiny_tokenizer, kl_controller=FixedKLController(0.1), policy_kwargs={"critic": "shared"}
    )
    assert built.policy.value_model is None
    before = [p.clone() for p in built.policy.ref_model.parameters()]
    head = built.policy.value_head.weight.clone()
    built.learn_iteration(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, built.policy.ref_model.parameters(), strict=True))
    assert not torch.equal(head, built.policy.value_head.weight)
    assert all(parameter.grad is None for parameter in built.policy.parameters())


def test_dropout_is_off_unless_asked_for_and_its_ratio_is_explained(tiny_gpt2_dir, tiny_tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet = build(PPO, tiny_gpt2_dir, tiny_tokenizer)
        quiet.learn_iteration(0, 1)
    assert quiet.logger.name_to_value["train/ratio_gap"] < 1e-5
    noisy = build(PPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"dropout": True})
    with pytest.warns(UserWarning, match="dropout"):
        noisy.learn_iteration(0, 1)
    assert noisy.logger.name_to_value["train/ratio_gap"] > 1e-3


@pytest.mark.parametrize("option", [{"gradient_checkpointing": True}, {"attn_implementation": "eager"}])
@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_options_for_memory_and_attention_change_no_number(option, family, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    model_dir = tiny_gpt2_dir if family == "causal" else tiny_t5_dir
    changes, counts = [], []
    for policy_kwargs in ({}, option):
        built = build(
            PPO, model_dir, tiny_tokenizer, family,
            policy_kwargs={**policy_kwargs, "optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}},
        )  # fmt: skip
        before = parameters(built)
        if "attn_implementation" in policy_kwargs:
            assert built.policy.policy_model.config._attn_implementation == "eager"
        passes = count_block_passes(built.policy.policy_model)
        built.learn_iteration(0, 1)
        changes.append(parameters(built) - before)
        counts.append(len(passes))
    torch.testing.assert_close(*changes, atol=1e-6, rtol=1e-3)
    assert (counts[1] > counts[0]) == ("gradient_checkpointing" in option), "blocks are run again in the backward pass"


def count_block_passes(model):
    """A list that grows by one whenever the first block's first normalisation runs."""
    passes = []
    block = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))[0]
    norm = next(module for name, module in block.named_modules() if "norm" in name or name.startswith("ln"))
    norm.register_forward_hook(lambda *args: passes.append(1))
    return passes


def test_bfloat16_autocast_keeps_float32_weights_and_scores(tiny_gpt2_dir, tiny_tokenizer):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"dtype": "bfloat16"})
    built.learn_iteration(0, 1)
    assert all(p.dtype == torch.float32 for p in built.policy.parameters())
    assert built.logger.name_to_value["train/ratio_gap"] < 5e-2
    scores = built.policy.score(built.rollout_buffer.episodes)
    assert {field.dtype for field in scores} == {torch.float32}
    built.policy.arguments = dataclasses.replace(built.policy.arguments, dtype="float32")
    exact = built.policy.score(built.rollout_buffer.episodes)
    assert 0 < float((exact.log_prob - scores.log_prob).abs().max()) < 0.2


def test_many_tokens_times_a_large_vocabulary_stay_within_the_budget(tiny_gpt2_dir, tiny_tokenizer):
    """A budget below the rollout's logits changes memory, not numbers."""
    changes = []
    for budget in (512.0, 1.0):
        built = build(
            PPO, tiny_gpt2_dir, tiny_tokenizer, n_envs=64, n_steps=16, batch_size=100_000,
            policy_kwargs={"logits_budget_mb": budget, "optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}},
        )  # fmt: skip
        before = parameters(built)
        built.learn_iteration(0, 1)
        assert built.rollout_buffer.n_tokens * 320 * 4 > 2**19
        changes.append(parameters(built) - before)
    torch.testing.assert_close(*changes, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_compiled_networks_give_the_same_numbers(family, tiny_tokenizer, tmp_path, monkeypatch):
    """Traced by dynamo and run by torch's own kernels; generating code for them takes minutes and is torch's matter.

    Layers are traced one after the other, so that one is enough.
    """
    compiled = []
    original = torch.compile

    def traced(module, **options):
        compiled.append(module)
        return original(module, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", traced)
    make = models.make_causal_lm if family == "causal" else models.make_seq2seq_lm
    model = make("gpt2" if family == "causal" else "t5", tiny_tokenizer, n_layers=1)
    models.save_model(tmp_path, model, tiny_tokenizer)
    changes = []
    for compile in (False, True):
        built = build(
            PPO,
            tmp_path,
            tiny_tokenizer,
            family,
            group_size=2,  # two responses share the computation of their prompt
            policy_kwargs={"compile": compile, "optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}},
        )
        before = parameters(built)
        built.learn_iteration(0, 1)
        changes.append(parameters(built) - before)
    assert len(compiled) == (2 if family == "causal" else 4), "trunks of policy and critic"
    torch.testing.assert_close(*changes, atol=1e-6, rtol=1e-3)


def test_an_update_that_explodes_stops_and_leaves_the_weights(tiny_gpt2_dir, tiny_tokenizer):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer)
    built.learn_iteration(0, 2)
    built.rollout_buffer.returns.fill(float("inf"))
    before = parameters(built)
    with pytest.raises(ModelError):
        built.train()
    assert torch.equal(before, parameters(built))


class Tens(RewardFunction):
    """Ten points a token."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return 10.0


def test_another_environment_can_be_set(tiny_gpt2_dir, tiny_tokenizer):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer)
    built.set_env(make_env(tiny_tokenizer, tiny_gpt2_dir, reward=Tens(), terminate_on_eos=False))
    built.learn(1)
    assert set(built.rollout_buffer.rewards.tolist()) == {10.0}
    assert set(built.rollout_buffer.episodes.lengths.tolist()) == {10}


def test_stable_baselines3_saves_and_loads_it(tiny_gpt2_dir, tiny_tokenizer, tmp_path):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer)
    built.learn(1)
    built.save(tmp_path / "saved.zip")
    again = PPO.load(tmp_path / "saved.zip", env=make_env(tiny_tokenizer, tiny_gpt2_dir), device="cpu")
    assert torch.equal(parameters(built), parameters(again))
    assert again.arguments == built.arguments
    again.learn(1)
    assert not torch.equal(parameters(built), parameters(again))


@pytest.mark.parametrize("algorithm", [PPO, with_text_rollouts(stable_baselines3.PPO)], ids=["ours", "sb3"])
def test_loaded_without_an_environment_it_predicts_and_learns_once_it_has_one(
    algorithm, tiny_gpt2_dir, tiny_tokenizer, tmp_path
):
    env = make_env(tiny_tokenizer, tiny_gpt2_dir)
    built = build(algorithm, tiny_gpt2_dir, tiny_tokenizer)
    built.learn(1)
    built.save(tmp_path / "saved.zip")
    again = algorithm.load(tmp_path / "saved.zip", device="cpu")
    observation = env.reset()
    expected, _ = built.predict(observation, deterministic=True)
    assert (again.predict(observation, deterministic=True)[0] == expected).all()
    assert len(evaluate_policy(again, env, n_eval_episodes=3, return_episode_rewards=True)[0]) == 3
    with pytest.raises(RL4LMsLikeError, match="set_env"):
        again.learn(1)
    again.set_env(make_env(tiny_tokenizer, tiny_gpt2_dir))
    again.learn(1)
    assert not torch.equal(parameters(again), parameters(built))


@pytest.mark.parametrize(
    ("id", "reason"),
    [
        ("sb3_contrib:RecurrentPPO", "collect_rollouts"),
        ("sb3_contrib:MaskablePPO", "collect_rollouts"),
        ("stable_baselines3:DQN", "OnPolicyAlgorithm"),
    ],
)
def test_what_needs_more_than_text_has_is_refused_by_name(id, reason):
    module, name = id.split(":")
    with pytest.raises(RL4LMsLikeError, match=f"{name} .*{reason}"):
        with_text_rollouts(getattr(importlib.import_module(module), name))
    with raises_at("", mentions=reason):
        ALGORITHMS.resolve(id)


def test_what_needs_more_than_the_policy_has_is_refused_before_a_model_is_loaded(tiny_tokenizer, tiny_gpt2_dir):
    algorithm = with_text_rollouts(sb3_contrib.TRPO)
    with pytest.raises(RL4LMsLikeError, match=r"TRPO .*get_distribution"):
        algorithm(POLICIES["causal"], make_env(tiny_tokenizer, tiny_gpt2_dir), policy_kwargs={"model_name": "./none"})
    blocks = run_blocks()
    blocks["alg"] |= {"id": "sb3_contrib:TRPO", "args": {"n_steps": 8}}
    with raises_at("alg.id", mentions="get_distribution"):
        check_settings(parse_config(blocks))


def test_progress_stays_within_its_bounds_and_learn_is_free_of_earlier_iterations(tiny_gpt2_dir, tiny_tokenizer):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, learning_rate_schedule="cosine")
    built.learn_iteration(3, 4)
    assert built._current_progress_remaining == 0.25
    built.learn(70)
    assert built._current_progress_remaining == 1.0, "one rollout is all of it, and its schedules are at their start"


def test_without_a_seed_two_runs_differ(tiny_gpt2_dir, tiny_tokenizer):
    runs = [build(PPO, tiny_gpt2_dir, tiny_tokenizer, seed=None) for _ in range(2)]
    for run in runs:
        run.learn_iteration(0, 1)
    first, second = (run.rollout_buffer.episodes.actions for run in runs)
    assert len(first) != len(second) or not torch.equal(first, second)


class AtTheEnd(RewardFunction):
    """The share of tokens with a small id, paid at the end of the episode, times a factor."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return self.factor * float((current_observation.action_ids < 30).sum()) / 10 if done else 0.0


def test_the_size_of_rewards_does_not_change_the_step_of_the_actor(tiny_gpt2_dir, tiny_tokenizer):
    """The gradient of the critic grows with the rewards; clipped together, it would leave nothing of the actor's."""
    moves = []
    for factor in (1.0, 1e6):
        built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, reward=AtTheEnd(factor))
        before = torch.cat([p.detach().flatten() for p in built.policy.policy_model.parameters()])
        built.learn_iteration(0, 1)
        after = torch.cat([p.detach().flatten() for p in built.policy.policy_model.parameters()])
        moves.append(after - before)
        assert built.logger.name_to_value["train/critic_grad_norm"] > 0
    assert float(moves[0].norm()) > 1e-3
    torch.testing.assert_close(moves[1], moves[0], atol=1e-4, rtol=0.05)


# --- warmup ----------------------------------------------------------------------------------------------------------


def rates_of(algorithm, n_iterations=5):
    """The logged learning rate of each iteration, and that of the critic."""
    logged = []
    for iteration in range(n_iterations):
        algorithm.learn_iteration(iteration, n_iterations)
        groups = {group["role"]: group["lr"] for group in algorithm.policy.optimizer.param_groups}
        logged.append((algorithm.logger.name_to_value["train/learning_rate"], groups["critic"]))
    return logged


@pytest.mark.parametrize(("schedule", "decay"), [("constant", [1.0] * 5), ("linear", [1.0, 0.8, 0.6, 0.4, 0.2])])
def test_learning_rates_rise_in_the_first_iterations(schedule, decay, tiny_gpt2_dir, tiny_tokenizer):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, learning_rate_schedule=schedule, warmup_iterations=3)
    rates = rates_of(built)
    expected = [1e-3 * factor * warmup for factor, warmup in zip(decay, [0.25, 0.5, 0.75, 1, 1], strict=True)]
    assert [rate for rate, _ in rates] == pytest.approx(expected)
    assert [critic for _, critic in rates] == pytest.approx([10 * rate for rate in expected])


def test_without_warmup_the_rate_is_that_of_the_schedule(tiny_gpt2_dir, tiny_tokenizer):
    assert [rate for rate, _ in rates_of(build(PPO, tiny_gpt2_dir, tiny_tokenizer), 2)] == [1e-3, 1e-3]
