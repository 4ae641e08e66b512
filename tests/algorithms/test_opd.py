"""On-policy distillation: golden values, exact gradients, learning from a trained teacher, and what is refused."""

import copy
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rl4lms_like.algorithms.critic_free_arguments import OPDArguments
from rl4lms_like.algorithms.policy_gradient import GRPO, OPD
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.core.token_scores import Distributions, Head, vocabulary_kl
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.system.errors import ConfigError, ModelError
from rl4lms_like.testing import models
from rl4lms_like.testing.exact import reward
from rl4lms_like.testing.tabular import LENGTH, Enumeration
from tests.algorithms.test_critic_free import Binary, observing
from tests.algorithms.test_update import build
from tests.builders import episodes_of_lengths
from tests.config_errors import raises_at
from tests.configs import run_blocks
from tests.laws.test_exact_gradients import assert_equal, gradient

TEACHER = {"n_prompts": 1, "teacher_model": "teacher"}
FORMS = [("advantage", "k1", None), ("loss", "full", None), ("loss", "top_k", 1)]


def enumeration(placement="advantage", estimator="k1", top_k=None, kl_coeff=1.0, **arguments):
    run = Enumeration(
        OPD, reward, group_size=1, kl_coeff=kl_coeff, estimator=estimator, placement=placement,
        policy_kwargs=TEACHER, **arguments,
    )  # fmt: skip
    run.algorithm.kl_controller.top_k = top_k
    return run


# --- golden values: a policy p, a teacher q, the response (0, 1, 2) ---------------------------------------------------

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
GRADIENTS = {  # of the loss of one token with respect to the logits of its state, for the tokens 0, 1, 2
    # log(p_a / q_a) (1[a] - p)
    "k1": [[0.45814537, -0.27488722, -0.18325815], [0.0, 0.0, 0.0], [0.45814537, 0.27488722, -0.73303259]],
    # p (log(p / q) - KL)
    "full": [[0.32070176, -0.08246617, -0.23823559]] * 3,
    # the same for the two outcomes "0" (0.5 and 0.2) and "1 or 2" (0.5 and 0.8)
    "top_k": [[0.34657359, -0.20794415, -0.13862944]] * 3,
}
LOSSES = {"k1": 0.0, "full": 0.5 * math.log(2.5) + 0.2 * math.log(0.4), "top_k": 0.5 * math.log(2.5 * 0.625)}


@pytest.mark.parametrize(("placement", "estimator", "top_k"), FORMS)
def test_golden_values(placement, estimator, top_k):
    run = enumeration(placement, estimator, top_k, kl_coeff=2.0)
    run.policy.logits.data[:] = torch.tensor(np.log(P))
    run.policy.ref_logits.data[:] = torch.tensor(np.log(Q))
    episodes = run.episodes([0], [(0, 1, 2)])
    found = run.gradients(episodes)["logits"]
    advantages = -2 * np.log(P / Q) if estimator == "k1" else [0.0] * 3
    np.testing.assert_allclose(run.algorithm.rollout_buffer.advantages, advantages, atol=1e-12)
    np.testing.assert_allclose(found[run.policy.states(episodes)], 2 * np.array(GRADIENTS[estimator]) / 3, atol=1e-8)
    assert run.algorithm.logger.name_to_value["ppo/loss"] == pytest.approx(2 * LOSSES[estimator], abs=1e-6)


def test_the_rewards_are_added_to_the_kl():
    """The returns of the rewards without a baseline, -1 times the KL of each token."""
    run = enumeration(task_reward=True, baseline="none", scale="none")
    run.gradients(run.episodes([0], [(0, 1, 2)]))
    buffer = run.algorithm.rollout_buffer
    np.testing.assert_allclose(buffer.advantages, reward(0, (0, 1, 2)) - buffer.kl, atol=1e-12)


# --- exact gradients --------------------------------------------------------------------------------------------------


def sum_of_kls(run, top_k=None):
    """Return the KL to the teacher, summed over the states that the policy visits; only the KL has a gradient."""
    total = 0.0
    for episodes, probability in run.batches():
        log_p, log_q = (
            table[run.policy.states(episodes)].log_softmax(dim=1)
            for table in (run.policy.logits, run.policy.ref_logits)
        )
        if top_k == 1:
            top = log_p.argmax(dim=1, keepdim=True)
            log_p, log_q = (
                torch.cat([each.gather(1, top), (1 - each.gather(1, top).exp()).log()], dim=1)
                for each in (log_p, log_q)
            )
        total = total + probability * (log_p.exp() * (log_p - log_q)).sum()
    return total


@pytest.mark.parametrize("observed", [False, True], ids=["actions", "observed"])
@pytest.mark.parametrize(("placement", "estimator", "top_k"), FORMS)
def test_the_expected_gradient_is_that_of_the_kl_in_each_state(placement, estimator, top_k, observed):
    run = enumeration(placement, estimator, top_k, kl_coeff=0.7, observed=observed)
    expected = 0.7 * gradient(sum_of_kls(run, top_k), run.policy.logits) / (LENGTH - observed)
    assert_equal(run.expected()["logits"], expected)


def test_with_the_rewards_it_is_the_sum_of_both_gradients():
    run = enumeration(task_reward=True, baseline="none", scale="none", kl_coeff=0.7)
    kl = gradient(sum_of_kls(run), run.policy.logits)
    run.algorithm.kl_controller.coeff = 0.0
    rewards = gradient(run.objective(), run.policy.logits)
    run.algorithm.kl_controller.coeff = 0.7
    assert_equal(run.expected()["logits"], (0.7 * kl - rewards) / LENGTH)


# --- the KL over the vocabulary ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [None, 4, 100])
@pytest.mark.parametrize("budget", [10**6, 200, 1])
def test_the_kl_over_the_vocabulary_is_that_of_the_distributions_in_every_chunking(top_k, budget):
    """The teacher's vocabulary has two further tokens, and its states another size."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((11, 6), (17, 6), (17,)))
    ref_hidden, ref_weight = torch.randn(11, 5, generator=generator), torch.randn(19, 5, generator=generator)
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    found = vocabulary_kl(
        Distributions(hidden, Head(weight, bias, 0.4)), Distributions(ref_hidden, Head(ref_weight)),
        top_k=top_k, logits_budget=budget,
    )  # fmt: skip
    p = (0.4 * hidden @ weight.T + bias).double().softmax(dim=1)
    q = (ref_hidden @ ref_weight.T).double().softmax(dim=1)[:, :17]
    if top_k == 4:
        kept = p >= p.detach().sort(dim=1).values[:, -4:-3]
        p, q = (
            torch.cat([each[kept].view(11, 4), each[~kept].view(11, 13).sum(dim=1, keepdim=True)], dim=1)
            for each in (p, q)
        )
    expected = (p * (p / q).log()).sum(dim=1)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(11, generator=generator)
    gradients = [torch.autograd.grad((kl * upstream).sum(), leaves) for kl in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


# --- language models --------------------------------------------------------------------------------------------------


def teacher_of(folder, family, model_dir, tokenizer):
    """Save a copy of a model that was trained on random texts of tokens with small ids."""
    auto = AutoModelForCausalLM if family == "causal" else AutoModelForSeq2SeqLM
    model = auto.from_pretrained(model_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        ids = torch.randint(2, 30, (16, 12), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return str(models.save_model(folder, model, tokenizer))


def with_further_tokens(tokenizer, n):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([f"further{index}" for index in range(n)])
    return tokenizer


@pytest.fixture(params=["causal", "seq2seq"])
def family(request):
    return request.param


@pytest.fixture
def model_dir(family, tiny_gpt2_dir, tiny_t5_dir):
    return tiny_gpt2_dir if family == "causal" else tiny_t5_dir


@pytest.fixture
def teacher(family, model_dir, tiny_tokenizer, tmp_path):
    return teacher_of(tmp_path / "teacher", family, model_dir, tiny_tokenizer)


@pytest.mark.parametrize(("placement", "estimator"), [("loss", "full"), ("loss", "top_k"), ("advantage", "k1")])
def test_micro_batches_never_change_the_gradient_and_the_first_ratio_is_one(
    placement, estimator, family, model_dir, teacher, tiny_tokenizer
):
    seen = []
    for micro_batch_size in (None, 60, 1):
        built = build(
            observing(OPD), model_dir, tiny_tokenizer, family, n_envs=16, length=40, batch_size=None, reward=Binary(),
            kl_controller=FixedKLController(1.0, placement=placement, estimator=estimator), task_reward=True,
            policy_kwargs={"teacher_model": teacher}, micro_batch_size=micro_batch_size,
        )  # fmt: skip
        built.learn_iteration(0, 1)
        assert built.logged["ratio_gap"] < 1e-5
        seen.append(built.gradient)
    assert float(seen[0].norm()) > 1e-3
    for gradient_of_parts in seen[1:]:
        assert float((gradient_of_parts - seen[0]).norm() / seen[0].norm()) < 1e-5


@pytest.mark.parametrize(
    ("placement", "estimator", "top_k"), [("advantage", "k1", None), ("loss", "top_k", 300), ("loss", "full", None)]
)
def test_the_kl_to_a_trained_teacher_falls_by_half(
    placement, estimator, top_k, family, model_dir, teacher, tiny_tokenizer
):
    """Of the 320 tokens of the untrained policy, 64 have too little probability for a quick test, 200 on some seeds."""
    built = build(
        OPD, model_dir, tiny_tokenizer, family, n_envs=32, n_steps=1, length=5, batch_size=80, learning_rate=1e-2,
        kl_controller=FixedKLController(1.0, placement=placement, estimator=estimator, top_k=top_k),
        policy_kwargs={"teacher_model": teacher},
    )  # fmt: skip
    frozen = copy.deepcopy(built.policy.ref_model.state_dict())
    kls = []
    for iteration in range(16):
        built.learn_iteration(iteration, 16)
        kls.append(built.logger.name_to_value["rollout_info/kl_div_mean"])
    assert np.mean(kls[:2]) > 0.3
    assert np.mean(kls[-4:]) < 0.5 * np.mean(kls[:2])
    assert all(torch.equal(frozen[name], weight) for name, weight in built.policy.ref_model.state_dict().items())


def test_a_model_without_a_linear_head_is_compared_by_its_logits(tiny_gpt2_dir, tiny_tokenizer, tmp_path):
    teacher = teacher_of(tmp_path, "causal", tiny_gpt2_dir, tiny_tokenizer)
    built = build(
        OPD, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"teacher_model": teacher},
        kl_controller=FixedKLController(1.0, placement="loss", estimator="full"),
    )  # fmt: skip
    episodes = episodes_of_lengths([3, 5])
    kls = []
    for head_scale in (built.policy.reader.head_scale, None):
        built.policy.reader.head_scale = head_scale
        kls.append(built.policy.reference_kl(episodes, built.policy.action_scores(episodes)))
    assert float(kls[0].detach().min()) > 1e-3
    torch.testing.assert_close(kls[0], kls[1], atol=1e-5, rtol=1e-5)


def test_a_teacher_of_another_size_and_architecture(tiny_gpt2_dir, tiny_tokenizer, tmp_path):
    """Its vocabulary is padded further, and adapters of the policy do not change it."""
    model = models.make_causal_lm("llama", with_further_tokens(tiny_tokenizer, 8), hidden_size=48, seed=3)
    folder = models.save_model(tmp_path, model, tiny_tokenizer)
    built = build(
        OPD, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"teacher_model": str(folder), "peft": {"r": 2}},
        kl_controller=FixedKLController(1.0, placement="loss", estimator="full"),
    )  # fmt: skip
    episodes = episodes_of_lengths([3, 5])
    scores = built.policy.score(episodes)
    ids = torch.cat([episodes.prompt_ids, episodes.response_ids], dim=1)
    expected = model(ids, attention_mask=torch.ones_like(ids)).logits[:, 2:-1].log_softmax(dim=-1)
    expected = expected[episodes.action_mask].gather(1, episodes.actions[:, None]).squeeze(1)
    torch.testing.assert_close(scores.ref_log_prob, expected.detach(), atol=1e-4, rtol=1e-4)
    built.learn(1)


# --- configs ----------------------------------------------------------------------------------------------------------


def opd_blocks():
    blocks = run_blocks()
    blocks["env"]["n_envs"] = 16
    blocks["alg"] |= {"id": "opd", "args": {}, "kl_div": {"coeff": 1.0}}
    blocks["alg"]["policy"]["args"]["teacher_model"] = "gpt2-large"
    return blocks


@pytest.mark.parametrize(("estimator", "placement"), [(None, "advantage"), ("full", "loss"), ("top_k", "loss")])
def test_the_placement_follows_from_the_estimator(estimator, placement):
    blocks = opd_blocks()
    blocks["alg"]["kl_div"]["estimator"] = estimator
    kl = parse_config(blocks).alg.kl_div
    assert (kl.placement, kl.estimator) == (placement, estimator or "k1")


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("alg.policy.args.teacher_model", {"alg.policy.args.teacher_model": None}),
        ("alg.policy.args.teacher_model", {"alg.policy.args.teacher_model": "gpt2"}),
        ("alg.policy.args.teacher_model", {"alg.policy.args.teacher_model": "models/that/are/not/there"}),
        ("alg.policy.args.teacher_model", {"alg.id": "grpo"}),
        ("alg.policy.args.teacher_model", {"alg.id": "ppo"}),
        ("alg.policy.args.reference_model", {"alg.policy.args.reference_model": "gpt2"}),
        ("alg.policy.id", {"alg.policy.id": "maskable_causal_lm_actor_critic_policy", "alg.policy.args.top_mask": 4}),
        ("alg.kl_div.coeff", {"alg.kl_div.coeff": 0}),
        ("alg.kl_div.coeff", {"alg.kl_div.coeff": 0, "alg.args.task_reward": True}),
        ("alg.kl_div.placement", {"alg.kl_div.placement": "reward"}),
        ("alg.kl_div.norm_reward", {"alg.kl_div.norm_reward": True}),
        ("alg.kl_div", {"alg.kl_div.estimator": "k3", "alg.kl_div.placement": "advantage"}),
        ("alg.kl_div", {"alg.kl_div.estimator": "full", "alg.kl_div.placement": "advantage"}),
        ("alg.kl_div", {"alg.kl_div.top_k": 8}),
        *(
            (f"alg.args.{key}", {f"alg.args.{key}": value})
            for key, value in {
                "baseline": "leave_one_out", "scale": "none", "dynamic_sampling": 3, "overlong_buffer": 0.2,
                "reference_update_iterations": 2,
            }.items()
        ),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused(path, changes):
    blocks = opd_blocks()
    parse_config(copy.deepcopy(blocks))
    blocks, issues = apply_values(blocks, changes, "test")
    with raises_at(path):
        parse_config(blocks, issues=issues)


def test_in_python_it_is_refused_too(tiny_gpt2_dir, tiny_tokenizer, tmp_path):
    with raises_at("policy_kwargs.teacher_model"):
        build(OPD, tiny_gpt2_dir, tiny_tokenizer, kl_controller=FixedKLController(1.0, placement="advantage"))
    with raises_at("kl_controller.coeff"):
        build(OPD, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"teacher_model": "gpt2"})
    with raises_at("policy_kwargs.teacher_model"):
        build(GRPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"teacher_model": "gpt2"})
    larger = with_further_tokens(tiny_tokenizer, 8)
    models.save_model(tmp_path, models.make_causal_lm("gpt2", larger), larger)
    with pytest.raises(ModelError):
        build(
            OPD, tmp_path, larger, policy_kwargs={"teacher_model": str(tiny_gpt2_dir)},
            kl_controller=FixedKLController(1.0, placement="advantage"),
        )  # fmt: skip


def test_the_formula_names_the_teacher():
    assert OPDArguments().formula()[1] == "A = - kl_div.coeff * k1(pi_old, teacher) of the token"
    with pytest.raises(ConfigError):
        OPD(None, None, task_reward=False)
