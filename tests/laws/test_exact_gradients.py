"""The expected gradient of an algorithm's first step is the exact gradient of what it says that it optimizes.

All responses (or all batches of two) are enumerated on a tabular policy in float64. `docs/exact_gradients.md` has the
results.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch

from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.nlpo import NLPO
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


def test_two_responses_are_a_mean():
    run = Enumeration(PPO, reward, prompts=(0, 1), **EXACT)
    assert_equal(run.expected()["logits"], -gradient(run.objective(), run.policy.logits) / (2 * LENGTH))


def test_a_rollout_of_several_generation_batches_is_one_batch():
    whole, parts = (Enumeration(PPO, reward, prompts) for prompts in ((0, 0), (0,)))
    short, long = (parts.episodes([0], [response]) for response in ((0,), (2, 1, 0)))
    found, expected = parts.gradients(short, long), whole.gradients(whole.episodes([0, 0], [(0,), (2, 1, 0)]))
    assert_equal(found["logits"], expected["logits"])


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

    def _prepared(self, minibatch):
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
                reward(prompt, response) - run.algorithm.kl_controller.coeff * (log_prob - scores.ref_log_prob).sum()
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


PAIR = {"prompts": (0, 1), "ends": True, "observed": True}
BIASES = {
    "k1": (PPO, {"kl_coeff": 0.3}, {}, 0.0, 0.0),
    "k2": (PPO, {"kl_coeff": 0.3, "estimator": "k2"}, {}, 0.375, 0.375),
    "k3": (PPO, {"kl_coeff": 0.3, "estimator": "k3"}, {}, 0.562, 0.562),
    "k1 with masks": (NLPO, {"kl_coeff": 0.3}, {}, 0.173, 0.173),
    "temperature 0.7": (PPO, {"temperatures": (0.7,) * LENGTH}, {}, 0.938, 0.188),
    "temperature 1.5 of the first token": (PPO, {"temperatures": (1.5, 1.0, 1.0)}, {}, 0.983, 0.227),
    "gae_lambda 0.95": (PPO, {}, {"gae_lambda": 0.95}, 0.378, 0.0),
    "gamma 0.99": (PPO, {}, {"gamma": 0.99}, 0.007, 0.007),
    "normalized": (PPO, PAIR, {"normalize_advantage": "rollout"}, 0.903, 0.286),
    "token_mean": (PPO, PAIR, {}, 0.082, 0.087),
    "seq_mean_token_mean": (SequenceMean, PAIR, {}, 0.232, 0.254),
    "seq_mean_token_sum_norm": (SequenceSum, PAIR, {}, 0.0, 0.0),
}
"""Algorithm, options of the enumeration, arguments, and the sine of the angle between the expected gradient and that of
the exact objective: with random values, and with the exact ones."""


@pytest.mark.parametrize("case", BIASES)
def test_a_bias_has_the_stated_size(case):
    algorithm, options, arguments, *sizes = BIASES[case]
    run = Enumeration(algorithm, reward, **options, **{**EXACT, **arguments})
    exact = -gradient(exact_objective(run), run.policy.logits)
    found = [gap(run.expected()["logits"], exact)]
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


class Stated:
    """The stated loss of any batch, from the log-probs and values of each possible response.

    Args:
        run: its policy.
        policy_lambda: lambda of the advantages, a function of an episode's length; default: `gae_lambda`.
        normalize: whether advantages are normalized over the batch.
        gain: what the policy maximizes per action, a function of ratios and advantages.
        per_action: weight of an action, a function of the number of episodes and the length of its own.
        vf_clip: largest change of a value.
    """

    def __init__(self, run, *, policy_lambda=None, normalize=False, gain=gain, per_action=None, vf_clip=None):
        self.options, self.normalize, self.gain = run.algorithm.arguments, normalize, gain
        self.per_action, self.parts = per_action, {}
        options, own = self.options, self.options.gae_lambda
        of_values = own if options.value_gae_lambda is None else options.value_gae_lambda
        for prompt, response in itertools.product(run.prompts, run.responses):
            episodes = run.episodes([prompt], [response])
            if episodes is None:
                continue
            old, length = run.policy.score(episodes), episodes.n_tokens
            rewards = [-0.3 * float(k) for k in old.raw_log_prob - old.ref_log_prob]
            rewards[-1] += reward(prompt, response)
            values = old.values.tolist()
            advantages = estimates(rewards, values, options.gamma, policy_lambda(length) if policy_lambda else own)
            targets = torch.tensor(estimates(rewards, values, options.gamma, of_values)) + old.values
            with run.moved():
                new_values, log_prob, entropy = run.policy.evaluate_actions(episodes)
            if vf_clip is not None:
                new_values = old.values + (new_values - old.values).clamp(-vf_clip, vf_clip)
            self.parts[prompt, response] = {
                "ratio": (log_prob - old.log_prob).exp(),
                "advantages": torch.tensor(advantages),
                "errors": (new_values - targets).square(),
                "entropy": entropy,
                "log_prob": log_prob,
                "good": torch.full(log_prob.shape, reward(prompt, response) >= 1.0),
                "lengths": torch.full(log_prob.shape, float(length)),
            }

    def loss(self, prompts, responses):
        parts = [self.parts[each] for each in zip(prompts, responses, strict=True)]
        x = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        advantages, options = x["advantages"], self.options
        if self.normalize:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        weights = self.per_action(len(prompts), x["lengths"]) if self.per_action else 1 / len(advantages)
        total = -(weights * self.gain(x["ratio"], advantages)).sum() + options.vf_coef * x["errors"].mean()
        total = total - options.ent_coef * x["entropy"].mean()
        nll = getattr(options, "nll_coef", 0.0)
        return total - nll * x["log_prob"][x["good"]].mean() if nll and bool(x["good"].any()) else total


FEW = {"observed": True}
LATER = {"distance": 1.0, **FEW}
BAND = {"ratio_band": (0.5, 2.0), **RAW}
NORMAL = {"normalize": True}
STATED = {
    "ppo, lambda": (PPO, {"gae_lambda": 0.9, "gamma": 0.95, **RAW}, {}, {}),
    "ppo, normalized": (PPO, {}, NORMAL, {}),
    "ppo, normalized in minibatches": (PPO, {"normalize_advantage": True}, NORMAL, {}),
    "ppo, separate lambdas": (PPO, {"gae_lambda": 0.5, "value_gae_lambda": 1.0, **RAW}, {}, FEW),
    "ppo, adaptive lambda": (PPO, {"gae_length_alpha": 0.7, **RAW}, {"policy_lambda": adaptive_lambda}, FEW),
    "ppo, mean over sequences": (SequenceMean, RAW, {"per_action": lambda n, length: 1 / (n * length)}, {}),
    "ppo, sum over sequences": (SequenceSum, RAW, {"per_action": lambda n, length: 1 / (n * 3.0 + 0 * length)}, {}),
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
        {},
    ),
    "a2c": (A2C, {"gae_lambda": 0.8, "normalize_advantage": True}, NORMAL, FEW),
    "trpo": (TRPO, {"ent_coef": 0.1}, NORMAL, FEW),
}
"""Algorithm, arguments, stated loss, options of the enumeration."""


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
    """Two responses of different lengths; the loss of a batch depends on both."""
    algorithm, arguments, stated, options = STATED[case]
    run = Enumeration(algorithm, reward, (0, 1), ends=True, kl_coeff=0.3, **options, **arguments)
    with float64():
        loss = Stated(run, **stated).loss
        total = sum(p * loss(run.prompts, responses_of(episodes)) for episodes, p in run.batches())
        logits, values = torch.autograd.grad(total, [run.policy.logits, run.policy.values])
        found = run.expected()
    assert_equal(found["logits"], logits)
    assert_equal(found["values"], values)
