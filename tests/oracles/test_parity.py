"""Teacher-forced log-probs are those that `generate` samples with, on every family, in float32 to 1e-5 nats."""

import pytest
import torch

from rl4lms_like.core.errors import ModelError, ParityError
from rl4lms_like.core.token_scores import Head, scores_of_logits, token_scores
from rl4lms_like.policies.parity import parity_gap
from rl4lms_like.testing import models
from tests.builders import make_policy

EXACT = 1e-5
FAMILIES = [("causal", name) for name in models.CAUSAL_FAMILIES] + [("seq2seq", n) for n in models.SEQ2SEQ_FAMILIES]


@pytest.fixture(scope="module", params=FAMILIES, ids=[name for _, name in FAMILIES])
def policy(request, tmp_path_factory, tiny_tokenizer):
    family, name = request.param
    # Weights five times as large as at initialisation: logits far from uniform, as in a trained model.
    make = models.make_causal_lm if family == "causal" else models.make_seq2seq_lm
    model = make(name, tiny_tokenizer, scale=1.0 if name == "t5" else 5.0)
    return make_policy(family, models.save_model(tmp_path_factory.mktemp(name), model, tiny_tokenizer))


def prompts(policy, n=6, width=12):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, policy.vocab_size, (n, width), generator=generator)
    lengths = torch.tensor([1, 12, 3, 7, 2, 9])[:n, None]
    columns = torch.arange(width)
    left = policy.reader.prompt_side == "left"
    return ids, columns >= width - lengths if left else columns < lengths


def responses(policy, **arguments):
    ends = torch.randperm(policy.vocab_size, generator=torch.Generator().manual_seed(2))[:25].tolist()
    arguments = {"eos_token_ids": ends, "max_new_tokens": 16, "seed": 3, **arguments}
    return policy.generate(*prompts(policy), **arguments)


def test_log_probs_are_those_of_generate(policy):
    ids, mask = prompts(policy)
    assert parity_gap(policy.reader, ids, mask, max_new_tokens=14) < EXACT


def test_padding_packing_and_order_never_change_a_number(policy):
    episodes = responses(policy)
    assert len(set(episodes.lengths.tolist())) > 1, "lengths should differ for this test to say anything"
    scores = policy.score(episodes)
    for name, field in policy.score(episodes.widened(17, 23))._asdict().items():
        torch.testing.assert_close(field, getattr(scores, name), atol=EXACT, rtol=EXACT, msg=f"wider: {name}")
    order = torch.tensor([4, 0, 5, 2])
    some = policy.score(episodes.select(order))
    for name, field in some._asdict().items():
        expected = getattr(scores, name)[episodes.token_index(order)]
        torch.testing.assert_close(field, expected, atol=EXACT, rtol=EXACT, msg=f"re-packed: {name}")


def test_the_first_ratio_is_one_and_the_first_kl_is_zero(policy):
    episodes = responses(policy)
    scores = policy.score(episodes)
    policy.set_training_mode(True)
    values, log_prob, _ = policy.evaluate_actions(episodes, episodes.actions)
    assert float((log_prob - scores.log_prob).exp().sub(1).abs().max()) < EXACT
    assert float((values - scores.values).abs().max()) < EXACT
    assert float((scores.log_prob - scores.ref_log_prob).abs().max()) < EXACT


def test_values_and_entropy_are_those_of_the_models_own_outputs(policy):
    episodes = responses(policy)
    logits = policy.reader.logits(episodes)
    log_probs = logits.log_softmax(-1)
    scores = policy.score(episodes)
    torch.testing.assert_close(scores.entropy, -(log_probs.exp() * log_probs).sum(-1), atol=5e-5, rtol=1e-5)
    states = policy.reader.states(episodes)
    torch.testing.assert_close(scores.values, policy.value_head(states).squeeze(1), atol=EXACT, rtol=EXACT)


def test_one_seed_one_text_and_the_global_generator_is_left_alone(policy):
    before = torch.get_rng_state()
    first, second, other = responses(policy), responses(policy), responses(policy, seed=4)
    assert torch.equal(first.response_ids, second.response_ids)
    assert first.response_ids.shape != other.response_ids.shape or not torch.equal(
        first.response_ids, other.response_ids
    )
    assert torch.equal(before, torch.get_rng_state())


def test_predict_uses_the_same_distribution(policy):
    """The next-token logits of an environment's observation are the teacher-forced ones."""
    episodes = responses(policy, max_new_tokens=5, eos_token_ids=[])
    n = episodes.n_episodes
    start = getattr(policy.reader, "start_token_id", None)
    taken = 3
    context = episodes.response_ids[:, :taken]
    if start is not None:
        context = torch.cat([torch.full((n, 1), start), context], dim=1)
    context_mask = torch.ones_like(context)
    prompt_mask = episodes.prompt_mask.long()
    pad = torch.zeros(n, 4, dtype=torch.long)
    observation = {
        "prompt_or_input_encoded_pt": episodes.prompt_ids,
        "prompt_or_input_attention_mask_pt": prompt_mask,
        "context_encoded_pt": torch.cat([pad, context], 1),
        "context_attention_mask_pt": torch.cat([pad, context_mask], 1),
    }
    packed = torch.cat([episodes.prompt_ids, context], 1)
    packed_mask = torch.cat([prompt_mask, context_mask], 1)
    order = packed_mask.sort(dim=1, stable=True).indices
    observation["input_encoded_pt"] = packed.gather(1, order)
    observation["input_attention_mask_pt"] = packed_mask.gather(1, order)
    with torch.no_grad():
        logits = policy.reader.next_token_logits(observation)
        expected = policy.reader.logits(episodes).view(n, 5, -1)[:, taken]
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_faulty_family_fails_loudly_when_the_policy_is_built(dtype, tiny_gpt2_dir, monkeypatch):
    from rl4lms_like.policies.teacher_forcing import CausalReader

    original = CausalReader._inputs

    def without_positions(self, episodes, *, drop_last):
        inputs = original(self, episodes, drop_last=drop_last)
        inputs.pop("position_ids")
        return inputs

    monkeypatch.setattr(CausalReader, "_inputs", without_positions)
    with pytest.raises(ParityError, match=r"differ\s+from those of its own generate"):
        make_policy("causal", tiny_gpt2_dir, dtype=dtype)


def test_another_reference_is_checked_as_well(tiny_gpt2_dir, tmp_path, tiny_tokenizer, monkeypatch):
    from rl4lms_like.policies import base

    checked = []
    original = base.check_parity
    monkeypatch.setattr(base, "check_parity", lambda *args, **kw: (checked.append(args[1]), original(*args, **kw)))
    other = models.save_model(tmp_path / "llama", models.make_causal_lm("llama", tiny_tokenizer), tiny_tokenizer)
    make_policy("causal", tiny_gpt2_dir, reference_model=str(other))
    assert checked == [str(tiny_gpt2_dir), str(other)]


def test_log_probs_are_exact_under_autocast_where_logits_share_a_large_offset():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 16, generator=generator), torch.randn(50, 16, generator=generator)
    hidden[:, 0], weight[:, 0] = 10.0, -10.0  # an offset of -100, as GPT-2 has
    actions = torch.randint(0, 50, (40,), generator=generator)
    expected, _ = scores_of_logits(hidden @ weight.T, actions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = token_scores(hidden, Head(weight), actions, logits_budget=10_000)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)


def test_a_policy_must_fit_its_action_space(tiny_gpt2_dir):
    from gymnasium import spaces

    from rl4lms_like.policies.causal import CausalLMActorCriticPolicy

    with pytest.raises(ModelError, match="vocab_size=320"):
        CausalLMActorCriticPolicy(spaces.Dict({}), spaces.Discrete(7), lambda _: 0.1, model_name=str(tiny_gpt2_dir))
