"""TRPO takes the steps of SB3-contrib's TRPO, and its Fisher products are those of the matrix written out.

Three things are put aside, so that both do the same sums: SB3-contrib's conjugate gradient starts from noise; it
measures KL(new ‖ old) where the paper and we measure KL(old ‖ new); in float32 conjugate gradients drift.
"""

import pytest
import sb3_contrib
import torch
from sb3_contrib.trpo import trpo as theirs
from stable_baselines3.common.distributions import CategoricalDistribution

from rl4lms_like.algorithms.fisher import FisherMatrix, FlatParameters
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.policies.parity import probe_episodes
from rl4lms_like.policies.teacher_forcing import CausalReader, Seq2SeqReader
from rl4lms_like.rollouts.text_rollouts import with_text_rollouts
from rl4lms_like.testing.models import make_causal_lm, make_seq2seq_lm
from tests.builders import POLICIES, SAMPLING, episodes_of_lengths, make_env

SETTINGS = {"n_steps": 10, "batch_size": 30, "n_critic_updates": 2, "learning_rate": 1e-3, "cg_max_steps": 5}
BOLD = {"target_kl": 2.0, "cg_damping": 1e-3, "cg_max_steps": 8}


@pytest.fixture
def same_sums(monkeypatch):
    kl_divergence = theirs.kl_divergence
    monkeypatch.setattr(theirs.th, "randn_like", torch.zeros_like)
    monkeypatch.setattr(theirs, "kl_divergence", lambda new, old: kl_divergence(old, new))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def contrib_policy(family):
    """Our policy, with the methods that SB3-contrib's TRPO asks for."""

    class ContribPolicy(POLICIES[family]):
        def get_distribution(self, observations):
            logits = self.reader.logits(observations)
            return CategoricalDistribution(logits.shape[1]).proba_distribution(logits)

        def predict_values(self, observations):
            return self.evaluate_actions(observations)[0]

    return ContribPolicy


def trained(algorithm, policy, model_dir, tokenizer, critic, **arguments):
    """How far all parameters move in two iterations, and what is logged in each."""
    options = {"attn_implementation": "eager", "critic": critic, "weight_decay": 0.01, "value_head_init": "default"}
    built = algorithm(
        policy,
        make_env(tokenizer, model_dir, n_envs=4),
        policy_kwargs={"model_name": str(model_dir), "generation_kwargs": dict(SAMPLING), **options},
        seed=3,
        device="cpu",
        **{**SETTINGS, **arguments},
    )
    built.policy.double()
    everything = FlatParameters(built.policy.parameters())
    start, logged = everything.vector(), []
    for _ in range(2):
        built.learn(1, reset_num_timesteps=not logged)
        logged.append(dict(built.logger.name_to_value))
    return everything.vector() - start, logged


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
@pytest.mark.parametrize(
    ("family", "critic", "settings", "steps"),
    [
        ("causal", "separate", {}, [1, 1]),
        ("causal", "shared", {}, [1, 1]),
        ("seq2seq", "separate", {}, [1, 1]),
        ("seq2seq", "shared", {}, [1, 1]),
        ("causal", "separate", BOLD, [0.8, 1]),
        ("causal", "separate", {**BOLD, "line_search_max_iter": 1}, [0, 0]),
    ],
    ids=["causal", "causal-shared", "seq2seq", "seq2seq-shared", "one-step-shortened", "no-step-accepted"],
)
def test_parameters_are_equal_after_two_iterations(
    family, critic, settings, steps, same_sums, deeper_gpt2_dir, tiny_t5_dir, tiny_tokenizer
):
    model_dir = deeper_gpt2_dir if family == "causal" else tiny_t5_dir
    change, logged = trained(TRPO, POLICIES[family], model_dir, tiny_tokenizer, critic, **settings)
    contrib = with_text_rollouts(sb3_contrib.TRPO)
    expected, expected_log = trained(contrib, contrib_policy(family), model_dir, tiny_tokenizer, critic, **settings)
    assert [log["trpo/step_size"] for log in logged] == pytest.approx(steps)
    for ours, stock in zip(logged, expected_log, strict=True):
        assert ours["trpo/line_search_success"] == stock["train/is_line_search_success"]
        assert ours["trpo/kl"] == pytest.approx(stock["train/kl_divergence_loss"], rel=1e-3)
        assert ours["ppo/value_loss"] == pytest.approx(stock["train/value_loss"], rel=1e-4)
    assert float((change - expected).norm()) < 2e-5 * float(expected.norm())
    assert float(expected.norm()) > 0.1, "nothing was trained"


def mini_reader(family, tokenizer):
    """A language model of some hundred parameters, its policy's reader."""
    arguments = {"hidden_size": 4, "n_layers": 1, "n_heads": 2, "n_positions": 16, "scale": 10}
    if family == "t5":
        reader = Seq2SeqReader(make_seq2seq_lm(family, tokenizer, **arguments))
    else:
        reader = CausalReader(make_causal_lm(family, tokenizer, attn_implementation="eager", **arguments))
    reader.model.set_attn_implementation("eager")
    reader.probe_head(probe_episodes(len(tokenizer), reader.prompt_side))
    return reader


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "t5"])
def test_fisher_products_are_those_of_the_matrix_written_out(family, tiny_tokenizer):
    """F = mean over tokens of Σ_a p(a) ∇log p(a) ∇log p(a)ᵀ, with every gradient computed by itself."""
    reader = mini_reader(family, tiny_tokenizer)
    assert (reader.head_scale is None) == (family == "gemma2"), "one family of each kind"
    episodes = episodes_of_lengths([3, 1, 2], prompt_lengths=[2, 3, 1], vocab_size=300, side=reader.prompt_side)
    parameters = FlatParameters(p for p in reader.model.parameters() if p.requires_grad)
    log_probs = reader.action_logits(episodes).log_softmax(dim=-1)
    every = torch.eye(log_probs.numel()).view(-1, *log_probs.shape)
    gradients = torch.autograd.grad(
        log_probs, parameters.parameters, every, is_grads_batched=True, allow_unused=True, materialize_grads=True
    )
    scores = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)
    weights = log_probs.detach().exp().flatten() / len(log_probs)
    matrix = scores.T @ (weights[:, None] * scores)
    together = FisherMatrix(reader.action_logits, [episodes], parameters)
    parts = [episodes.select(torch.tensor(rows)) for rows in ([0], [1, 2])]
    apart = FisherMatrix(reader.action_logits, parts, parameters)
    for seed in range(2):
        vector = torch.randn(len(matrix), generator=torch.Generator().manual_seed(seed))
        expected = matrix @ vector
        assert float(expected.norm()) > 1e-3
        for fisher in (together, apart):
            assert float((fisher @ vector - expected).norm()) < 1e-4 * float(expected.norm())
