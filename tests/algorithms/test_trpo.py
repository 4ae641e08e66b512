"""A TRPO update: within its trust region or not at all, the policy moved by no optimizer, memory bounded."""

import copy
import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl4lms_like.algorithms import trpo
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.core.trust_region import categorical_kl
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.system.errors import ModelError
from tests.builders import POLICIES, SAMPLING, make_env
from tests.config_errors import raises_at

BOLD = {"target_kl": 2.0, "cg_damping": 1e-3}
NEVER_ACCEPTED = {**BOLD, "line_search_max_iter": 1, "cg_max_steps": 8}


def build(model_dir, tokenizer, family="causal", policy_kwargs=None, n_envs=4, reward=None, **arguments):
    defaults = {"n_steps": 10, "batch_size": 30, "n_critic_updates": 1, "cg_max_steps": 4, "seed": 3, "device": "cpu"}
    return TRPO(
        POLICIES[family],
        make_env(tokenizer, model_dir, n_envs=n_envs, reward=reward),
        policy_kwargs={"model_name": str(model_dir), "generation_kwargs": SAMPLING, **(policy_kwargs or {})},
        **{**defaults, **arguments},
    )


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def logged(algorithm):
    return algorithm.logger.name_to_value


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
@pytest.mark.parametrize("settings", [{}, {**BOLD, "target_kl": 0.5}], ids=["calm", "bold"])
def test_the_new_policy_is_better_and_within_the_trust_region(
    settings, family, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer
):
    built = build(tiny_gpt2_dir if family == "causal" else tiny_t5_dir, tiny_tokenizer, family, **settings)
    old = copy.deepcopy(built.policy.policy_model)
    built.learn_iteration(0, 1)
    (rollout,) = built.rollout_buffer.get()
    with torch.no_grad():
        new_logits = built.policy.action_logits(rollout.observations)
        built.policy.reader.model = old
        reader = POLICIES[family].reader_class(old)
        reader.head_scale = built.policy.reader.head_scale
        logits = reader.action_logits(rollout.observations)
    kl = float(categorical_kl(logits, new_logits).mean())
    chosen = [matrix.log_softmax(-1).gather(1, rollout.actions[:, None]).squeeze(1) for matrix in (logits, new_logits)]
    gain = float(((chosen[1] - chosen[0]).exp() * rollout.advantages).mean() - rollout.advantages.mean())
    assert logged(built)["trpo/line_search_success"] == 1
    assert 1e-4 < kl < built.arguments.target_kl
    assert logged(built)["trpo/kl"] == pytest.approx(kl, rel=1e-3)
    assert logged(built)["trpo/surrogate_gain"] == pytest.approx(gain, rel=1e-3) and gain > 0
    assert logged(built)["train/ratio_gap"] < 1e-5


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_micro_batches_never_change_the_step(family, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    changes = []
    for micro_batch_size in (None, 15, 1):
        built = build(
            tiny_gpt2_dir if family == "causal" else tiny_t5_dir,
            tiny_tokenizer,
            family,
            micro_batch_size=micro_batch_size,
            policy_kwargs={"optimizer_class": torch.optim.SGD},
        )
        before = flat(built.policy)
        built.learn_iteration(0, 1)
        changes.append(flat(built.policy) - before)
    assert float(changes[0].norm()) > 0.1
    for other in changes[1:]:
        assert float((other - changes[0]).norm()) < 1e-3 * float(changes[0].norm())


@pytest.mark.parametrize("option", [{"gradient_checkpointing": True}, {"logits_budget_mb": 1}])
def test_options_for_memory_never_change_the_step(option, tiny_gpt2_dir, tiny_tokenizer):
    changes = []
    for policy_kwargs in ({}, option):
        built = build(tiny_gpt2_dir, tiny_tokenizer, n_envs=64, policy_kwargs=policy_kwargs)
        before = flat(built.policy)
        built.learn_iteration(0, 1)
        changes.append(flat(built.policy.policy_model) - before[: len(flat(built.policy.policy_model))])
    assert float((changes[1] - changes[0]).norm()) < 1e-3 * float(changes[0].norm())


def test_fisher_products_see_whole_episodes_of_the_rollout_drawn_anew(tiny_gpt2_dir, tiny_tokenizer):
    whole, again, sampled = (
        build(tiny_gpt2_dir, tiny_tokenizer, n_envs=20, n_steps=5, sub_sampling_factor=factor) for factor in (1, 4, 4)
    )
    for built in (whole, again, sampled):
        built.learn_iteration(0, 1)
    (rollout,) = sampled.rollout_buffer.get()
    everything = rollout.observations

    def written(episodes):
        return [
            tuple(ids[mask].tolist()) for ids, mask in zip(episodes.response_ids, episodes.response_mask, strict=True)
        ]

    draws = [sampled._fisher_episodes(rollout).observations for _ in range(2)]
    for fraction in draws:
        assert fraction.n_episodes == -(-everything.n_episodes // 4)
        assert set(written(fraction)) <= set(written(everything))
    assert written(draws[0]) != written(draws[1])
    assert torch.equal(flat(again.policy), flat(sampled.policy)), "the same seed draws the same shares"
    assert not torch.equal(flat(whole.policy), flat(sampled.policy))
    assert logged(sampled)["train/grad_norm"] == logged(whole)["train/grad_norm"], "the gradient sees all episodes"
    assert logged(sampled)["trpo/line_search_success"] == 1 and logged(sampled)["trpo/kl"] < 0.01


def test_where_no_step_is_accepted_the_policy_stays_bit_for_bit(tiny_gpt2_dir, tiny_tokenizer):
    built = build(tiny_gpt2_dir, tiny_tokenizer, **NEVER_ACCEPTED)
    before, critic = flat(built.policy.policy_model), flat(built.policy.value_model)
    storages = [p.data_ptr() for p in built.policy.policy_model.parameters()]
    built.learn_iteration(0, 1)
    assert torch.equal(before, flat(built.policy.policy_model))
    assert storages == [p.data_ptr() for p in built.policy.policy_model.parameters()]
    assert not torch.equal(critic, flat(built.policy.value_model)), "the critic learns all the same"
    steps = [logged(built)[f"trpo/{name}"] for name in ("line_search_success", "step_size", "kl", "surrogate_gain")]
    assert steps == [0, 0, 0, 0]


def test_a_step_that_makes_the_surrogate_worse_is_not_taken(tiny_gpt2_dir, tiny_tokenizer, monkeypatch):
    largest_step = trpo.largest_step
    monkeypatch.setattr(trpo, "largest_step", lambda *args: -largest_step(*args))
    built = build(tiny_gpt2_dir, tiny_tokenizer)
    before = flat(built.policy.policy_model)
    built.learn_iteration(0, 1)
    assert logged(built)["trpo/line_search_success"] == 0
    assert torch.equal(before, flat(built.policy.policy_model))


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_the_critics_updates_never_move_the_policy(critic, tiny_gpt2_dir, tiny_tokenizer):
    """Not by gradients, not by weight decay, not by what the optimizer remembers."""
    built = build(
        tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"critic": critic, "weight_decay": 0.5}, n_critic_updates=3
    )
    built.learn_iteration(0, 1)
    before, head = flat(built.policy.policy_model), built.policy.value_head.weight.clone()
    assert all(p.grad is None for p in built.policy.parameters())
    minibatches = [each for _ in range(3) for each in built.rollout_buffer.get(built.batch_size)]
    assert len([built.critic_step(minibatch) for minibatch in minibatches]) >= 3
    assert torch.equal(before, flat(built.policy.policy_model))
    assert not torch.equal(head, built.policy.value_head.weight)
    metric_state = set(built.policy.optimizer.state)
    assert metric_state and not metric_state & set(built.policy.policy_model.parameters())
    assert all(p.grad is None for p in built.policy.policy_model.parameters())


class Nothing(RewardFunction):
    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return 0.0


def test_without_advantages_there_is_no_step(tiny_gpt2_dir, tiny_tokenizer):
    built = build(tiny_gpt2_dir, tiny_tokenizer, reward=Nothing(), policy_kwargs={"value_head_init": "zero"})
    before = flat(built.policy.policy_model)
    built.learn_iteration(0, 1)
    assert torch.equal(before, flat(built.policy.policy_model))
    assert logged(built)["trpo/step_size"] == 0 and logged(built)["trpo/cg_residual"] == 0


@pytest.mark.parametrize("field", ["advantages", "returns"])
def test_an_update_that_explodes_stops_and_leaves_the_weights(field, tiny_gpt2_dir, tiny_tokenizer):
    built = build(tiny_gpt2_dir, tiny_tokenizer, normalize_advantage=False)
    built.learn_iteration(0, 2)
    torch.as_tensor(getattr(built.rollout_buffer, field)).fill_(float("inf"))  # shares its memory
    moves = built.policy.policy_model if field == "advantages" else built.policy.value_model
    before = flat(moves)
    with pytest.raises(ModelError):
        built.train()
    assert torch.equal(before, flat(moves))


def test_an_entropy_bonus_is_part_of_what_is_improved(tiny_t5_dir, tiny_tokenizer):
    silent = {"policy_kwargs": {"value_head_init": "zero"}, "reward": Nothing()}
    built = build(tiny_t5_dir, tiny_tokenizer, "seq2seq", ent_coef=1.0, **silent)
    built.learn_iteration(0, 1)
    entropy = float(built.policy.score(built.rollout_buffer.episodes).entropy.mean())
    assert entropy == pytest.approx(-logged(built)["ppo/entropy_loss"], rel=1e-5), "logged after the step"
    gain = entropy - logged(built)["rollout_info/entropy"]
    assert gain == pytest.approx(logged(built)["trpo/surrogate_gain"], rel=1e-3) and gain > 1e-3


@pytest.mark.parametrize("given", [{}, {"attn_implementation": None}, {"attn_implementation": "eager"}])
def test_attention_is_eager_unless_asked_otherwise(given, tiny_gpt2_dir, tiny_tokenizer):
    built = build(tiny_gpt2_dir, tiny_tokenizer, policy_kwargs=given)
    assert built.policy.policy_model.config._attn_implementation == "eager"


def test_what_has_no_second_derivatives_is_refused_all_at_once(tiny_gpt2_dir, tiny_tokenizer):
    kwargs = {"attn_implementation": "sdpa", "compile": True, "dropout": True}
    with raises_at(*(f"policy_kwargs.{key}" for key in kwargs)):
        build(tiny_gpt2_dir, tiny_tokenizer, policy_kwargs=kwargs)


class Widest(TorchDispatchMode):
    """Keeps the largest number of rows of the matrices over the vocabulary that operations make."""

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == self.vocab_size:
                self.rows = max(self.rows, tensor.numel() // self.vocab_size)
        return result


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
@pytest.mark.parametrize("bound", ["micro_batch_size", "logits_budget_mb"])
def test_no_matrix_of_all_tokens_and_the_vocabulary_is_ever_made(
    bound, family, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer
):
    by_micro_batch = bound == "micro_batch_size"
    built = build(
        tiny_gpt2_dir if family == "causal" else tiny_t5_dir, tiny_tokenizer, family, n_envs=128, cg_max_steps=1,
        micro_batch_size=200 if by_micro_batch else None, batch_size=300,
        policy_kwargs={} if by_micro_batch else {"logits_budget_mb": 1},
    )  # fmt: skip
    vocab_size = built.policy.vocab_size
    with Widest(vocab_size) as widest:
        built.learn_iteration(0, 1)
    allowed = 200 if by_micro_batch else 2**18 // vocab_size
    assert 100 < widest.rows <= allowed < 0.8 * built.rollout_buffer.n_tokens


def test_stable_baselines3_saves_and_loads_it(tiny_gpt2_dir, tiny_tokenizer, tmp_path):
    built = build(tiny_gpt2_dir, tiny_tokenizer, sub_sampling_factor=2)
    built.learn(1)
    built.save(tmp_path / "saved.zip")
    again = TRPO.load(tmp_path / "saved.zip", env=make_env(tiny_tokenizer, tiny_gpt2_dir), device="cpu")
    assert torch.equal(flat(built.policy), flat(again.policy))
    assert again.arguments == built.arguments and dataclasses.asdict(again.arguments)["sub_sampling_factor"] == 2
    again.learn(1)
    assert not torch.equal(flat(built.policy), flat(again.policy))
