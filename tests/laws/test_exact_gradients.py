"""The expected gradient of an algorithm's first step is the exact gradient of what it says that it optimizes.

All responses (or all batches of two) are enumerated on a tabular policy in float64. `docs/exact_gradients.md` has the
results.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from rl4lms_like.algorithms import ALGORITHMS as REGISTRY
from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.nlpo import NLPO
from rl4lms_like.algorithms.policy_gradient import (
    CISPO,
    CPGD,
    DAPO,
    GMPO,
    GRPO,
    GSPO,
    OPO,
    RLOO,
    DrGRPO,
    GroupPolicyGradient,
    MaxRL,
    OnlineDPO,
    ReinforcePP,
    ReinforcePPBaseline,
)
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.sao import SAO
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.algorithms.vapo import VAPO
from rl4lms_like.core.losses import policy_gradient
from rl4lms_like.policies.base import CausalLMActorCriticPolicy, Seq2SeqLMActorCriticPolicy
from rl4lms_like.testing.exact import gap, reward
from rl4lms_like.testing.models import make_causal_lm, make_seq2seq_lm, make_word_tokenizer, save_model
from rl4lms_like.testing.tabular import LENGTH, Enumeration, responses_of

RAW = {"normalize_advantage": False}
EXACT = {"gamma": 1.0, "gae_lambda": 1.0, **RAW}
ALGORITHMS = {
    "ppo": (PPO, {}),
    "a2c": (A2C, {}),
    "trpo": (TRPO, {}),
    "nlpo": (NLPO, {}),
    "vapo": (VAPO, {"gae_length_alpha": None, "nll_coef": 0.0}),
    "sao": (SAO, {}),
}


def gradient(value, table):
    return torch.autograd.grad(value, table)[0]


def assert_equal(found, expected, tolerance=1e-6):
    size = float(expected.abs().max())
    assert size > 1e-3
    assert float((found - expected).abs().max()) < tolerance * size


# --- the gradient of the objective ------------------------------------------------------------------------------------


@pytest.mark.parametrize("observed", [False, True], ids=["actions", "observed"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("id", ALGORITHMS)
def test_the_expected_gradient_is_that_of_the_reward_with_its_penalty(id, estimator, observed):
    """With lambda 1 the critic is a baseline. The penalty is a reward, so it has no gradient itself."""
    algorithm, arguments = ALGORITHMS[id]
    options = {"kl_coeff": 0.3, "estimator": estimator, "observed": observed}
    run = Enumeration(algorithm, reward, **options, **EXACT, **arguments)
    assert sum(probability for _, probability in run.batches()) == pytest.approx(1.0)
    expected = -gradient(run.objective(), run.policy.logits) / (LENGTH - observed)
    assert_equal(run.expected()["logits"], expected)


@pytest.mark.parametrize("observed", [False, True], ids=["actions", "observed"])
@pytest.mark.parametrize("id", ALGORITHMS)
def test_the_critic_learns_the_expected_return(id, observed):
    algorithm, arguments = ALGORITHMS[id]
    run = Enumeration(algorithm, reward, observed=observed, **EXACT, **arguments)
    total = 0.0
    for episodes, probability in run.batches():
        errors = (run.policy.predict_values(episodes) - reward(0, responses_of(episodes)[0])).square()
        total = total + probability * run.algorithm.arguments.vf_coef * errors.mean()
    assert_equal(run.expected()["values"], gradient(total, run.policy.values))


ALGORITHMS_OF_GROUPS = {id: cls for id in REGISTRY if issubclass(cls := REGISTRY.resolve(id), GroupPolicyGradient)}
WITHOUT_CRITIC = [id for id, cls in ALGORITHMS_OF_GROUPS.items() if not cls.arguments_class.needs_reference]
"""Those that learn from rewards; the exact gradients of `opd` are in tests/algorithms/test_opd.py."""
UNSCALED = {"scale": "none", "dynamic_sampling": None, "overlong_buffer": None}
PAIR = {"prompts": (0, 0)}
PENALTIES = {"reward": ["k1", "k2", "k3"], "loss": ["k2", "k3"]}


def assert_exact_up_to_a_factor_of_the_reward(algorithm, factor, **options):
    """The KL penalty in the loss does not have the factor of the reward's gradient."""
    arguments = {**UNSCALED, **(PAIR | {"group_size": 2} if algorithm is not ReinforcePP else {})}
    run = Enumeration(algorithm, reward, kl_coeff=0.3, **options, **arguments)
    controller, found = run.algorithm.kl_controller, run.expected()["logits"]
    both = gradient(run.objective(), run.policy.logits)
    controller.coeff = 0.0
    of_reward = gradient(run.objective(), run.policy.logits)
    of_penalty = (both - of_reward) * (factor if controller.placement == "reward" else 1.0)
    divisor = LENGTH if run.algorithm.loss_aggregation == "seq_mean_token_sum_norm" else 2
    assert_equal(found, -(factor * of_reward + of_penalty) / divisor)


@pytest.mark.parametrize("id", WITHOUT_CRITIC)
def test_the_expected_gradient_without_a_scale_is_exact(id):
    """The mean of a group of 2 contains the response itself, so that half of the gradient is left.

    `STATED` has the gradient of each with observed tokens.
    """
    algorithm = REGISTRY.resolve(id)
    options = algorithm.arguments_class
    factor = 1.0 if options.baseline in ("none", "leave_one_out") else 0.5
    penalty = {"placement": options.kl_placement}
    if options.kl_placement == "loss":
        penalty["estimator"] = options.kl_estimator
    assert_exact_up_to_a_factor_of_the_reward(algorithm, factor, length=2, **penalty)


@pytest.mark.parametrize(("placement", "estimator"), [(p, k) for p, names in PENALTIES.items() for k in names])
def test_the_expected_gradient_of_rloo_has_every_penalty(placement, estimator):
    assert_exact_up_to_a_factor_of_the_reward(RLOO, 1.0, observed=True, placement=placement, estimator=estimator)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_expected_gradient_of_a_penalty_in_the_loss(estimator):
    """Of k2 it is that of KL(policy ‖ reference) at each state, of k3 that of KL(reference ‖ policy)."""
    penalty = {"kl_coeff": 0.3, "placement": "loss", "estimator": estimator}
    run = Enumeration(ReinforcePP, lambda prompt, response: 0.0, **penalty, scale="none")
    found = run.expected()
    total = 0.0
    for episodes, probability in run.batches():
        states = run.policy.states(episodes)
        pi, reference = (table[states].log_softmax(-1) for table in (run.policy.logits, run.policy.ref_logits))
        kl = pi.exp() * (pi - reference) if estimator == "k2" else reference.exp() * (reference - pi)
        total = total + probability * kl.sum()
    assert_equal(found["logits"], 0.3 * gradient(total, run.policy.logits) / LENGTH)


def succeeds(prompt, response):
    return float(sum(response) >= 4)


@pytest.mark.parametrize("size", [2, 3])
def test_maxrl_is_the_gradient_of_the_success_rate_with_a_weight_that_approaches_its_inverse(size):
    """The weight is (1 - (1 - p)^(G - 1)) / p for groups of G, so that large groups maximize log p."""
    run = Enumeration(MaxRL, succeeds, (0,) * size, **FEW, ends=True, group_size=size)
    rate = run.objective()
    p = rate.item()
    weight = (1 - (1 - p) ** (size - 1)) / p
    assert 0.1 < p < 0.9
    assert_equal(run.expected()["logits"], -weight * gradient(rate, run.policy.logits) / LENGTH)


@pytest.mark.parametrize(("loss", "size"), [("sigmoid", 3), ("ipo", 2), ("hinge", 2)])
def test_online_dpo_is_the_gradient_of_the_loss_of_the_best_and_the_worst_response(loss, size):
    """The responses are constants. Groups with equal rewards, which have no pair, have the gradient 0."""
    run = Enumeration(OnlineDPO, reward, (0,) * size, **FEW, **IN_LOSS, ends=True, group_size=size, loss=loss)
    terms = {
        "sigmoid": lambda difference: -torch.nn.functional.logsigmoid(0.3 * difference),
        "ipo": lambda difference: (difference - 1 / 0.6) ** 2,
        "hinge": lambda difference: (1 - 0.3 * difference).clamp(min=0),
    }
    total, n_pairs = 0.0, 0
    for episodes, probability in run.batches():
        rewards = [reward(0, response) for response in responses_of(episodes)]
        if max(rewards) == min(rewards):
            continue
        n_pairs += 1
        states = run.policy.states(episodes)
        logits, references = (table[states].log_softmax(-1) for table in (run.policy.logits, run.policy.ref_logits))
        ratios = (logits - references).gather(-1, episodes.actions[:, None])[:, 0]
        best, worst = (
            ratios[episodes.token_index(torch.tensor([rewards.index(extreme(rewards))]))].sum()
            for extreme in (max, min)
        )
        total = total + probability * terms[loss](best - worst)
    assert n_pairs > 20
    assert_equal(run.expected()["logits"], gradient(total, run.policy.logits))


def test_two_responses_are_a_mean():
    run = Enumeration(PPO, reward, prompts=(0, 1), length=2, **EXACT)
    assert_equal(run.expected()["logits"], -gradient(run.objective(), run.policy.logits) / 4)


def test_a_rollout_of_several_generation_batches_is_one_batch():
    whole, parts = (Enumeration(PPO, reward, prompts) for prompts in ((0, 0), (0,)))
    short, long = (parts.episodes([0], [response]) for response in ((0,), (2, 1, 0)))
    found, expected = parts.gradients(short, long), whole.gradients(whole.episodes([0, 0], [(0,), (2, 1, 0)]))
    assert_equal(found["logits"], expected["logits"])


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_groups_of_several_generation_batches_stay_apart(scale):
    run = Enumeration(GRPO, reward, **PAIR, **FEW, ends=True, scale=scale, group_size=2)
    some = [episodes for episodes, _ in run.batches()][3::9]
    with float64():
        for first, second in itertools.pairwise(some):
            stated = Stated(run, of_groups=SCALED[scale], per_action=mean_of_means)
            total = stated.loss((0,) * 4, responses_of(first) + responses_of(second))
            assert_equal(run.gradients(first, second)["logits"], gradient(total, run.policy.logits))


def test_dynamic_sampling_leaves_out_groups_with_equal_rewards():
    """The left-out responses have no penalty either, and do not count in the mean."""
    run, every = (
        Enumeration(DAPO, reward, **PAIR, **IN_LOSS, group_size=2, dynamic_sampling=limit) for limit in (10, None)
    )
    equal, differing = (run.episodes((0, 0), [(1, 0, 2), other]) for other in ((1, 0, 2), (2, 2, 0)))
    alone = run.gradients(differing)["logits"]
    assert torch.equal(run.gradients(equal, differing)["logits"], alone)
    assert torch.equal(every.gradients(differing)["logits"], alone)
    assert float((every.gradients(equal, differing)["logits"] - alone).abs().max()) > 0.01


WIDE = {"importance_correction": "tis", "correction_range": (0.0, 1e9)}
HOT_START = {"temperatures": (1.5, 1.0, 1.0)}


class AnotherFirstTemperature(RLOO):
    """The log-prob of the first token's sampling is that at temperature 1."""

    def prepare_minibatch(self, minibatch):
        episodes = minibatch.observations
        first = episodes.pad(torch.ones_like(minibatch.old_log_prob)).cumsum(dim=1)[episodes.action_mask] == 1
        recorded = torch.where(first, minibatch.old_log_prob, episodes.behavior_log_prob)
        return super().prepare_minibatch(minibatch._replace(observations=replace(episodes, behavior_log_prob=recorded)))


def test_wide_limits_of_the_weights_make_the_gradient_of_the_first_token_exact():
    """Later tokens have a weight of 1, but follow first tokens of another distribution."""

    def found(algorithm, length, **arguments):
        run = Enumeration(algorithm, reward, **PAIR, **HOT_START, length=length, group_size=2, **arguments)
        result, expected = run.expected()["logits"], -gradient(exact_objective(run), run.policy.logits)
        return gap(result[:1], expected[:1]), gap(result, expected)

    assert max(found(RLOO, 1, **WIDE)) < 1e-6
    first, every = found(RLOO, 2, **WIDE)
    assert first < 1e-6 and every > 0.01
    assert found(RLOO, 2)[0] > 0.1
    assert found(AnotherFirstTemperature, 2, **WIDE)[0] > 0.1


class AtTemperature(PPO):
    """PPO's first step at the temperatures of the sampling."""

    temperatures = (0.7,) * LENGTH

    def loss(self, minibatch):
        log_prob = self.policy.sampling_log_prob(minibatch.observations, self.temperatures)
        return super().loss(minibatch)._replace(policy=policy_gradient(log_prob, minibatch.advantages))


class WithFirstTemperature(AtTemperature):
    temperatures = (1.5, 1.0, 1.0)


class Reweighted(PPO):
    """PPO's first step with the importance weights of whole responses, from the log-probs of the sampling."""

    def prepare_minibatch(self, minibatch):
        episodes = minibatch.observations
        log_weights = episodes.pad(minibatch.old_log_prob - episodes.behavior_log_prob).sum(dim=1)
        return minibatch._replace(weights=log_weights.exp().repeat_interleave(episodes.lengths))


def test_importance_weights_correct_the_temperature_of_the_sampling():
    run = Enumeration(Reweighted, reward, temperatures=(0.7,) * LENGTH, **EXACT)
    assert_equal(run.expected()["logits"], -gradient(exact_objective(run), run.policy.logits) / LENGTH)


@pytest.mark.parametrize("algorithm", [AtTemperature, WithFirstTemperature])
def test_a_loss_at_the_temperature_of_the_sampling_is_exact_and_a_missing_temperature_is_found(algorithm):
    def expected(algorithm, temperatures):
        run = Enumeration(algorithm, reward, temperatures=temperatures, **EXACT)
        return run.expected()["logits"], -gradient(run.objective(), run.policy.logits) / LENGTH

    assert_equal(*expected(algorithm, algorithm.temperatures))
    assert gap(*expected(PPO, algorithm.temperatures)) > 0.1


@pytest.mark.parametrize(
    ("policy", "make", "family"),
    [(CausalLMActorCriticPolicy, make_causal_lm, "gpt2"), (Seq2SeqLMActorCriticPolicy, make_seq2seq_lm, "t5")],
    ids=["causal", "seq2seq"],
)
def test_the_expected_gradient_of_a_language_model_is_exact(policy, make, family, tmp_path):
    """The model's own forward pass has the exact log-probs. Its numbers are float32."""
    tokenizer = make_word_tokenizer([])
    model = make(family, tokenizer, hidden_size=8, n_layers=1, n_heads=1)
    save_model(tmp_path, model, tokenizer)
    run = Enumeration(PPO, reward, (1,), policy=policy, policy_kwargs={"model_name": str(tmp_path)}, **EXACT)
    total, model = 0.0, run.policy.policy_model
    for (episodes, _), response in zip(run.batches(), run.responses, strict=True):
        ids = episodes.response_ids
        if family == "t5":
            logits = model(input_ids=episodes.prompt_ids, labels=ids).logits  # shifts the labels itself
        else:
            logits = model(input_ids=torch.cat([episodes.prompt_ids, ids], dim=1)).logits[:, :-1]
        log_prob = logits.log_softmax(dim=-1)[0, range(LENGTH), ids[0]].sum()
        total = total + log_prob.exp() * reward(1, response)
    found = run.expected()
    names, parameters = zip(*model.named_parameters(prefix="policy_model"), strict=True)
    exact = torch.autograd.grad(-total / LENGTH, parameters)
    assert_equal(torch.cat([found[name].flatten() for name in names]), torch.cat([g.flatten() for g in exact]), 1e-4)


# --- biases -----------------------------------------------------------------------------------------------------------


def exact_objective(run):
    """Return the expected reward minus the exact KL of whole responses, at temperature 1, with gradient."""
    total = 0.0
    for prompt, response in itertools.product(run.prompts, run.responses):
        episodes = run.episodes([prompt], [response])
        if episodes is not None:
            scores, policy = run.policy.score(episodes), run.policy
            logits = policy.logits[policy.states(episodes)]  # the KL is that of the full distributions
            log_prob = logits.log_softmax(dim=-1).gather(1, episodes.actions[:, None]).squeeze(1)
            value = (
                run.reward(prompt, response)
                - run.algorithm.kl_controller.coeff * (log_prob - scores.ref_log_prob).sum()
            )
            total = total + policy.action_scores(episodes).log_prob.sum().exp() * value
    return total


class SequenceMean(PPO):
    loss_aggregation = "seq_mean_token_mean"


class SequenceSum(PPO):
    loss_aggregation, loss_norm = "seq_mean_token_sum_norm", 3.0


def exact_values(run):
    """Return the table of the expected returns after each state."""
    total, weight = (torch.zeros_like(run.policy.values.detach()) for _ in range(2))
    for prompt, response in itertools.product(run.prompts, run.responses):
        episodes = run.episodes([prompt], [response])
        if episodes is not None:
            scores, states = run.policy.score(episodes), run.policy.states(episodes)
            rewards = -run.algorithm.kl_controller.coeff * (scores.raw_log_prob - scores.ref_log_prob)
            rewards[-1] += reward(prompt, response)
            probability = scores.log_prob.sum().exp()
            total[states] += probability * rewards.flip(0).cumsum(0).flip(0)
            weight[states] += probability
    return total / weight.clamp_min(1e-30)


FEW = {"observed": True}
IN_LOSS = {"kl_coeff": 0.3, "placement": "loss"}
OTHERS = {"prompts": (0, 1), "ends": True, **FEW}
GROUP = {**PAIR, "ends": True, **FEW}
SIZE = {"group_size": 2}
BIASES = {
    "k1": (PPO, {"kl_coeff": 0.3}, {}, 0.0, 0.0),
    "k2": (PPO, {"kl_coeff": 0.3, "estimator": "k2"}, {}, 0.375, 0.375),
    "k3": (PPO, {"kl_coeff": 0.3, "estimator": "k3"}, {}, 0.562, 0.562),
    "k1 with masks": (NLPO, {"kl_coeff": 0.3}, {}, 0.173, 0.173),
    "temperature 0.7": (PPO, {"temperatures": (0.7,) * LENGTH}, {}, 0.938, 0.188),
    "temperature 1.5 of the first token": (PPO, {"temperatures": (1.5, 1.0, 1.0)}, {}, 0.983, 0.227),
    "gae_lambda 0.95": (PPO, {}, {"gae_lambda": 0.95}, 0.378, 0.0),
    "gamma 0.99": (PPO, {}, {"gamma": 0.99}, 0.007, 0.007),
    "normalized": (PPO, OTHERS, {"normalize_advantage": "rollout"}, 0.903, 0.286),
    "token_mean": (PPO, OTHERS, {}, 0.082, 0.087),
    "seq_mean_token_mean": (SequenceMean, OTHERS, {}, 0.232, 0.254),
    "seq_mean_token_sum_norm": (SequenceSum, OTHERS, {}, 0.0, 0.0),
    "rloo": (RLOO, GROUP, SIZE, 0.0),
    "dr_grpo": (DrGRPO, GROUP, SIZE, 0.0),
    "reinforce_pp, no scale": (ReinforcePP, OTHERS, {"scale": "none"}, 0.013),
    "reinforce_pp": (ReinforcePP, OTHERS, {}, 0.069),
    "reinforce_pp_baseline": (ReinforcePPBaseline, GROUP, SIZE, 0.149),
    "grpo": (GRPO, GROUP, SIZE, 0.140),
    "grpo, no scale": (GRPO, GROUP, {"scale": "none", **SIZE}, 0.264),
    "gspo": (GSPO, GROUP, SIZE, 0.140),
    "gmpo": (GMPO, GROUP, SIZE, 0.140),
    "cpgd": (CPGD, GROUP, SIZE, 0.109),
    "cispo": (CISPO, GROUP, SIZE, 0.201),
    "dapo": (DAPO, GROUP, {"overlong_buffer": None, **SIZE}, 0.201),
    "opo": (OPO, GROUP, SIZE, 0.223),
    "opo, constant divisor": (OPO, GROUP, {"loss_aggregation": "seq_mean_token_sum_norm", **SIZE}, 0.115),
    "maxrl": (MaxRL, {"reward": succeeds, **GROUP}, SIZE, 0.0),
    "k2 in the loss": (RLOO, {**IN_LOSS, "estimator": "k2", **GROUP}, SIZE, 0.166),
    "k3 in the loss": (RLOO, {**IN_LOSS, **GROUP}, SIZE, 0.309),
    "hot first token": (RLOO, {**GROUP, **HOT_START}, SIZE, 0.202),
    "hot first token, tis": (RLOO, {**GROUP, **HOT_START}, {**WIDE, **SIZE}, 0.033),
}
"""Algorithm, options of the enumeration, arguments, and the sine of the angle between the expected gradient and that of
the exact objective: with random values, and with the exact ones. Without a critic it is one number."""


@pytest.mark.parametrize("case", BIASES)
def test_a_bias_has_the_stated_size(case):
    algorithm, options, arguments, *sizes = BIASES[case]
    neutral = EXACT if algorithm.arguments_class.needs_critic else {}
    run = Enumeration(algorithm, **{"reward": reward, **options, **neutral, **arguments})
    exact = -gradient(exact_objective(run), run.policy.logits)
    found = [gap(run.expected()["logits"], exact)]
    if run.policy.has_critic:
        run.policy.values.data = exact_values(run)
        found.append(gap(run.expected()["logits"], exact))
    assert found == pytest.approx(sizes, abs=0.001)


# --- what depends on the batch, or is biased: the exact expectation of the stated loss -------------------------------


def estimates(rewards, values, gamma, gae_lambda):
    """Advantages of one episode, by their definition."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    return [sum((gamma * gae_lambda) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def gain(ratio, advantages):
    return ratio * advantages


def clipped(ratio, advantages, low=0.8, high=1.2):
    return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def dual_clipped(ratio, advantages):
    usual = clipped(ratio, advantages)
    return torch.where(advantages < 0, torch.maximum(usual, 1.3 * advantages), usual)


def in_band(ratio, advantages, low=0.5, high=2.0):
    kept = ((ratio >= low) & (ratio <= high)).double()
    return ratio * advantages * kept / kept.mean().clamp_min(1e-30)


def adaptive_lambda(length):
    return max(0.0, 1 - 1 / (0.7 * length))


SCALED = {
    "none": lambda rewards, lengths: rewards - rewards.mean(1, keepdim=True),
    "group": lambda rewards, lengths: (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4),
    "batch": lambda rewards, lengths: (rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4),
    "leave one out": lambda rewards, lengths: 2 * (rewards - rewards.mean(1, keepdim=True)),
    "weighted": lambda rewards, lengths: (
        rewards - (rewards * lengths).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)
    ),
    "rate": lambda rewards, lengths: rewards / rewards.mean(1, keepdim=True).clamp_min(1e-9) - rewards.amax(1, True),
    "overlong": lambda rewards, lengths: SCALED["group"](
        # The limit is one of the text, with the observed token that follows the first one unless it is the last.
        rewards - ((lengths + (lengths > 1) - LENGTH) / (0.9 * LENGTH) + 1).clamp_min(0),
        lengths,
    ),
}
"""Advantages `[n_groups, 2]` from the rewards and the numbers of actions of groups of two."""


def mean_ratio(log_ratio, advantages):
    return log_ratio.mean().exp().expand_as(log_ratio)


def clipped_mean_ratio(log_ratio, advantages):
    return torch.where(advantages > 0, log_ratio.clamp(max=0.4), log_ratio.clamp(min=-0.4)).mean().exp() + 0 * log_ratio


def clipped_log(ratio, advantages):
    clipped = ratio.log().clamp(torch.tensor(0.8).log(), torch.tensor(1.2).log())
    drift = ratio - 1 - ratio.log()
    return torch.minimum(ratio.log() * advantages, clipped * advantages) - 0.1 * drift


def limited_weight(ratio, advantages):
    return ratio.detach().clamp(max=1.5) * advantages * ratio.log()


def of_kept_sequences(weights):
    return weights * (0.7 <= weights.log().mean().exp() <= 1.4)


def mean_of_means(n, length):
    return 1 / (n * length)


def mean_of_sums(n, length):
    return 1 / (n * 3.0 + 0 * length)


class Stated:
    """The stated loss of any batch, from the log-probs and values of each possible response.

    Args:
        run: its policy.
        of_groups: advantages of whole episodes, a function of rewards and lengths `[n_groups, 2]`; default: those of
            the critic.
        ratio: ratio of an episode's actions, a function of log-ratios and advantages; default: one for each action.
        correction: importance weights of an episode's actions, a function of the ratios of old policy and sampling;
            actions with weight 0 do not count in the mean.
        policy_lambda: lambda of the advantages, a function of an episode's length; default: `gae_lambda`.
        normalize: whether advantages are normalized over the batch.
        gain: what the policy maximizes per action, a function of ratios and advantages.
        per_action: weight of an action, a function of the number of episodes and the length of its own.
        vf_clip: largest change of a value.
    """

    def __init__(
        self, run, *, policy_lambda=None, of_groups=None, normalize=False, ratio=None, gain=gain, per_action=None,
        vf_clip=None, correction=torch.ones_like,
    ):  # fmt: skip
        self.options, self.normalize, self.gain = run.algorithm.arguments, normalize, gain
        self.per_action, self.parts, self.totals = per_action, {}, {}
        self.of_groups, self.ratio = of_groups, ratio or (lambda log_ratio, advantages: log_ratio.exp())
        penalty = run.algorithm.kl_controller
        in_loss = penalty.placement == "loss"
        options, own = self.options, self.options.gae_lambda
        of_values = own if options.value_gae_lambda is None else options.value_gae_lambda
        for prompt, response in itertools.product(run.prompts, run.responses):
            episodes = run.episodes([prompt], [response])
            if episodes is None:
                continue
            old, length = run.policy.score(episodes), episodes.n_tokens
            of_reward = 0.0 if in_loss else penalty.coeff
            rewards = [-of_reward * float(k) for k in old.raw_log_prob - old.ref_log_prob]
            rewards[-1] += run.reward(prompt, response)
            values = old.values.tolist()
            advantages = estimates(rewards, values, options.gamma, policy_lambda(length) if policy_lambda else own)
            targets = torch.tensor(estimates(rewards, values, options.gamma, of_values)) + old.values
            with run.moved():
                new_values, log_prob, entropy = run.policy.evaluate_actions(episodes)
            if vf_clip is not None:
                new_values = old.values + (new_values - old.values).clamp(-vf_clip, vf_clip)
            far = log_prob - old.ref_log_prob
            kl = far**2 / 2 if penalty.estimator == "k2" else (-far).exp() - 1 + far
            self.totals[prompt, response] = sum(rewards)
            self.parts[prompt, response] = {
                "log_ratio": log_prob - old.log_prob,
                "kl": penalty.coeff * in_loss * kl,
                "weight": correction((old.log_prob - episodes.behavior_log_prob).exp()),
                "advantages": torch.tensor(advantages),
                "errors": (new_values - targets).square(),
                "entropy": entropy,
                "log_prob": log_prob,
                "good": torch.full(log_prob.shape, reward(prompt, response) >= 1.0),
            }

    def loss(self, prompts, responses):
        parts = [self.parts[each] for each in zip(prompts, responses, strict=True)]
        x = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        advantages, options = x["advantages"], self.options
        sizes = [len(part["log_ratio"]) for part in parts]
        lengths, row = torch.tensor(sizes), torch.arange(len(parts)).repeat_interleave(torch.tensor(sizes))
        if self.of_groups:
            rewards = torch.tensor([self.totals[each] for each in zip(prompts, responses, strict=True)])
            advantages = self.of_groups(rewards.view(-1, 2), lengths.view(-1, 2)).flatten()[row]
        if self.normalize:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        of_episodes = zip(parts, advantages.split(sizes), strict=True)
        ratio = torch.cat([self.ratio(part["log_ratio"], each) for part, each in of_episodes])
        kept = x["weight"] > 0
        counts = torch.bincount(row[kept], minlength=len(parts))
        weights = 1 / kept.sum().clamp_min(1)
        if self.per_action:
            weights = self.per_action((counts > 0).sum(), counts[row][kept])
        terms = x["kl"] - self.gain(ratio, advantages)
        total = (weights * (x["weight"] * terms)[kept]).sum() + options.vf_coef * x["errors"].mean()
        total = total - options.ent_coef * x["entropy"].mean()
        nll = getattr(options, "nll_coef", 0.0)
        return total - nll * x["log_prob"][x["good"]].mean() if nll and bool(x["good"].any()) else total


LATER = {"distance": 1.0, **FEW}
AFTER = {"distance": 1.0, "placement": "loss"}
OF_GRPO = {"of_groups": SCALED["group"], "per_action": mean_of_means}
BAND = {"ratio_band": (0.5, 2.0), **RAW}
NORMAL = {"normalize": True}
STATED = {
    "ppo, lambda": (PPO, {"gae_lambda": 0.9, "gamma": 0.95, **RAW}, {}, {}),
    "ppo, normalized": (PPO, {}, NORMAL, {}),
    "ppo, normalized in minibatches": (PPO, {"normalize_advantage": True}, NORMAL, FEW),
    "ppo, separate lambdas": (PPO, {"gae_lambda": 0.5, "value_gae_lambda": 1.0, **RAW}, {}, FEW),
    "ppo, adaptive lambda": (PPO, {"gae_length_alpha": 0.7, **RAW}, {"policy_lambda": adaptive_lambda}, FEW),
    "ppo, mean over sequences": (SequenceMean, RAW, {"per_action": mean_of_means}, FEW),
    "ppo, sum over sequences": (SequenceSum, RAW, {"per_action": mean_of_sums}, FEW),
    "ppo, likelihood": (PPO, {"nll_coef": 0.5, "nll_threshold": 1.0, **RAW}, {}, FEW),
    "ppo, entropy": (PPO, {"ent_coef": 0.1, **RAW}, {}, FEW),
    "ppo, observed": (PPO, {"gamma": 0.9}, NORMAL, FEW),
    "ppo, clipped": (PPO, RAW, {"gain": clipped}, LATER),
    "ppo, clipped higher": (
        PPO,
        {"clip_range_high": 0.5, **RAW},
        {"gain": lambda ratio, advantages: clipped(ratio, advantages, high=1.5)},
        LATER,
    ),
    "ppo, dual clip": (PPO, {"dual_clip": 1.3, **RAW}, {"gain": dual_clipped}, LATER),
    "ppo, clipped values": (PPO, {"clip_range_vf": 0.2, **RAW}, {"gain": clipped, "vf_clip": 0.2}, LATER),
    "sao, band": (SAO, BAND, {"gain": in_band}, LATER),
    "sao, band in micro-batches": (SAO, {"micro_batch_size": 1, **BAND}, {"gain": in_band}, LATER),
    "nlpo, clipped": (NLPO, {"ent_coef": 0.1}, {"gain": clipped, **NORMAL}, LATER),
    "vapo": (
        VAPO,
        {"gae_length_alpha": 0.7, "nll_threshold": 1.0},
        {"policy_lambda": adaptive_lambda, **NORMAL},
        FEW,
    ),
    "a2c": (A2C, {"gae_lambda": 0.8, "normalize_advantage": True}, NORMAL, FEW),
    "trpo": (TRPO, {"ent_coef": 0.1}, NORMAL, FEW),
    "grpo": (GRPO, SIZE, OF_GRPO, {**PAIR, "placement": "loss"}),
    "grpo, k1 in the reward": (GRPO, SIZE, OF_GRPO, GROUP),
    "grpo, k2, entropy": (GRPO, {"ent_coef": 0.1, **SIZE}, OF_GRPO, {**GROUP, "placement": "loss", "estimator": "k2"}),
    "grpo, dual clip": (GRPO, {"dual_clip": 1.3, **SIZE}, {"gain": dual_clipped, **OF_GRPO}, {**AFTER, **GROUP}),
    "grpo, tis": (
        GRPO,
        {"importance_correction": "tis", "correction_range": (0.5, 1.1), **SIZE},
        {"correction": lambda weights: weights.clamp(0.5, 1.1), **OF_GRPO},
        {**GROUP, **HOT_START, "placement": "loss"},
    ),
    "grpo, icepop": (
        GRPO,
        {"importance_correction": "icepop", "correction_range": (0.8, 1.4), **SIZE},
        {"correction": lambda weights: weights * ((weights >= 0.8) & (weights <= 1.4)), **OF_GRPO},
        {**GROUP, **HOT_START, "placement": "loss"},
    ),
    "grpo, sequence_mask": (
        GRPO,
        {"importance_correction": "sequence_mask", "correction_range": (0.7, 1.4), **SIZE},
        {"correction": of_kept_sequences, **OF_GRPO},
        {**GROUP, "temperatures": (3.0,) * LENGTH, "placement": "loss"},
    ),
    "dr_grpo": (
        DrGRPO,
        SIZE,
        {"of_groups": SCALED["none"], "gain": clipped, "per_action": mean_of_sums},
        {**AFTER, **GROUP},
    ),
    "dapo": (
        DAPO,
        {"overlong_buffer": 0.9, "clip_range_high": 0.6, **SIZE},
        {"of_groups": SCALED["overlong"], "gain": lambda ratio, advantages: clipped(ratio, advantages, high=1.6)},
        {**AFTER, **GROUP},
    ),
    "gspo": (
        GSPO,
        {"clip_range": 0.2, "clip_range_high": 0.2, **SIZE},
        {"ratio": mean_ratio, "gain": clipped, **OF_GRPO},
        {**AFTER, **GROUP},
    ),
    "gmpo": (GMPO, SIZE, {"ratio": clipped_mean_ratio, **OF_GRPO}, {**AFTER, **GROUP}),
    "cpgd": (CPGD, SIZE, {"of_groups": SCALED["none"], "gain": clipped_log}, {**AFTER, **GROUP}),
    "cispo": (
        CISPO,
        {"clip_range_high": 0.5, **SIZE},
        {"of_groups": SCALED["group"], "gain": limited_weight},
        {**AFTER, **GROUP},
    ),
    "rloo": (
        RLOO,
        SIZE,
        {"of_groups": SCALED["leave one out"], "gain": clipped, "per_action": mean_of_sums},
        {"distance": 1.0, **GROUP},
    ),
    "reinforce_pp": (ReinforcePP, {"gamma": 0.9}, {"gain": clipped, **NORMAL}, LATER),
    "reinforce_pp_baseline": (
        ReinforcePPBaseline,
        SIZE,
        {"of_groups": SCALED["none"], "gain": clipped, **NORMAL},
        {**AFTER, **GROUP, "estimator": "k2"},
    ),
    "opo": (OPO, SIZE, {"of_groups": SCALED["weighted"], "gain": clipped}, {**AFTER, **GROUP}),
    "maxrl": (
        MaxRL,
        SIZE,
        {"of_groups": SCALED["rate"], "gain": clipped, "per_action": mean_of_sums},
        {"reward": succeeds, **AFTER, **GROUP},
    ),
}
"""Algorithm, arguments, stated loss, options of the enumeration."""


def differing(run, responses):
    return len({run.reward(*each) for each in zip(run.prompts, responses, strict=True)}) > 1


@contextmanager
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("case", STATED)
def test_the_expected_gradient_is_that_of_the_stated_loss(case):
    """Two responses of different lengths; the loss of a batch depends on both.

    With dynamic sampling, only batches with different rewards have a gradient.
    """
    algorithm, arguments, stated, options = STATED[case]
    options = {"reward": reward, "prompts": (0, 1), "ends": True, "kl_coeff": 0.3, **options}
    run = Enumeration(algorithm, **options, **arguments)
    filters = run.algorithm.collector.options.dynamic_sampling is not None
    with float64():
        loss, total, found = Stated(run, **stated).loss, 0.0, {"logits": 0.0, "values": 0.0}
        for episodes, probability in run.batches():
            if not filters or differing(run, responses_of(episodes)):
                total = total + probability * loss(run.prompts, responses_of(episodes))
                gradients = run.gradients(episodes)
                found = {name: found[name] + probability * gradients[name] for name in found}
        logits, values = torch.autograd.grad(total, [run.policy.logits, run.policy.values], materialize_grads=True)
    assert_equal(found["logits"], logits)
    if run.policy.has_critic:
        assert_equal(found["values"], values)
