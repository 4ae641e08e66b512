"""Teacher-forced log-probs are those that `generate` samples with, on every family, in float32 to 1e-5 nats."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rl4lms_like.core.token_scores import Head, scores_of_logits, token_scores
from rl4lms_like.policies.parity import parity_gap
from rl4lms_like.system.errors import ModelError, ParityError
from rl4lms_like.testing import models
from tests.builders import episodes_of_lengths, make_env, make_policy

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


SLIDING = {"mistral", "gemma2"}


def test_equal_prompts_are_computed_once_and_change_no_log_prob(policy, request):
    ids, mask = (field.repeat(3, 1) for field in prompts(policy))
    shapes = []
    hook = policy.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(kwargs.get("input_ids", ids).shape), with_kwargs=True
    )
    arguments = {"eos_token_ids": [1], "max_new_tokens": 9, "generation_kwargs": {"do_sample": True, "top_k": 7}}
    try:
        episodes = policy.generate(ids, mask, seed=3, record_log_prob=True, **arguments)
    finally:
        hook.remove()
    if not policy.reader.is_encoder_decoder:
        first = [ids.shape] if policy.model.config.model_type in SLIDING else [(6, ids.shape[1]), (18, 1)]
        assert shapes[: len(first)] == first
    chosen = policy.reader.logits(episodes).topk(7)
    expected = chosen.values.log_softmax(-1)[chosen.indices == episodes.actions[:, None]]
    torch.testing.assert_close(episodes.behavior_log_prob, expected, atol=EXACT, rtol=EXACT)
    greedy = {**arguments, "generation_kwargs": {"do_sample": False}}
    alone = policy.generate(ids[:6], mask[:6], **greedy)
    assert torch.equal(policy.generate(ids, mask, **greedy).response_ids, alone.response_ids.repeat(3, 1))


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
    with pytest.raises(ParityError):
        make_policy("causal", tiny_gpt2_dir, dtype=dtype)


# --- families that are refused, or warned of -------------------------------------------------------------------------


@pytest.fixture
def family(tmp_path, tiny_tokenizer):
    """Makes a random model of a family that `testing.models` does not have, and returns its folder."""

    def make(auto_class, name, **config):
        special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "vocab_size": len(tiny_tokenizer)}
        torch.manual_seed(0)
        model = auto_class.from_config(AutoConfig.for_model(name, **(special | config)))
        return models.save_model(tmp_path / name, model, tiny_tokenizer)

    return make


SIZE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
SEQ2SEQ_SIZE = {"d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 1} | {
    f"{side}_{field}": value
    for side in ("encoder", "decoder")
    for field, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()
}


def test_a_family_that_reads_padding_is_refused(family):
    """RecurrentGemma's recurrence runs over the padding before a prompt, in `generate` and in one pass alike."""
    folder = family(AutoModelForCausalLM, "recurrent_gemma", num_key_value_heads=1, lru_width=32, **SIZE)
    with pytest.raises(ParityError):
        make_policy("causal", folder)


def test_a_family_that_takes_a_pad_token_for_padding_must_never_write_one(family):
    """M2M100 counts the positions of its decoder from the pad token, which a policy may sample."""
    folder = family(AutoModelForSeq2SeqLM, "m2m_100", **SEQ2SEQ_SIZE)
    with pytest.raises(ParityError):
        make_policy("seq2seq", folder)
    policy = make_policy("seq2seq", folder, generation_kwargs={"do_sample": True, "suppress_tokens": [0]})
    assert not (responses(policy).actions == 0).any()


def test_a_family_that_takes_other_arguments_is_named(family):
    vocabulary = {"src_vocab_size": 320, "tgt_vocab_size": 320, "langs": ["en", "de"]}
    folder = family(AutoModelForSeq2SeqLM, "fsmt", **(SEQ2SEQ_SIZE | vocabulary))
    with pytest.raises(ModelError, match=r"FSMTForConditionalGeneration .*encoder_padding_mask"):
        make_policy("seq2seq", folder)


@pytest.mark.parametrize("role", ["model_name", "critic_model", "reference_model"])
def test_weights_that_are_not_finite_are_named(role, tiny_gpt2_dir, tmp_path, tiny_tokenizer):
    model = models.make_causal_lm("gpt2", tiny_tokenizer)
    model.transformer.h[1].mlp.c_fc.weight.data[3, 3] = float("nan")
    folders = {"model_name": tiny_gpt2_dir, role: models.save_model(tmp_path, model, tiny_tokenizer)}
    with pytest.raises(ModelError, match=rf"{tmp_path}.*transformer.h.1.mlp.c_fc.weight") as caught:
        make_policy("causal", folders.pop("model_name"), **{key: str(each) for key, each in folders.items()})
    assert not isinstance(caught.value, ParityError)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(("name", "rope", "limit"), [("llama", DYNAMIC, 64), ("phi3", LONG, 20), ("llama", None, None)])
def test_positions_that_depend_on_the_batch_are_refused(name, rope, limit, family, caplog, tiny_tokenizer):
    original = {"original_max_position_embeddings": 20} if name == "phi3" else {}
    folder = family(AutoModelForCausalLM, name, rope_parameters=rope, max_position_embeddings=64, **original, **SIZE)
    policy = make_policy("causal", folder)
    assert [f"more than {limit} tokens" in each for each in ours(caplog)] == [True] * (limit is not None)
    caplog.clear()
    env = make_env(tiny_tokenizer, folder, length=6)  # after prompts of 14 tokens
    type(policy)(env.observation_space, env.action_space, lambda _: 0.1, model_name=str(folder))
    assert not ours(caplog)
    if limit is not None:
        env = make_env(tiny_tokenizer, folder, length=limit - 14 + 1)
        with pytest.raises(ModelError, match=f"within {limit} tokens"):
            type(policy)(env.observation_space, env.action_space, lambda _: 0.1, model_name=str(folder))


def test_long_rotary_positions_depend_on_the_batch(family):
    """What is warned of: one long text changes the log-probs of all others."""
    config = {"rope_parameters": LONG, "max_position_embeddings": 64, "original_max_position_embeddings": 20}
    policy = make_policy("causal", family(AutoModelForCausalLM, "phi3", **config, **SIZE))
    with torch.no_grad():
        for weight in policy.policy_model.parameters():
            weight.mul_(5 if weight.ndim > 1 else 1)
    episodes = responses(policy, max_new_tokens=16, eos_token_ids=[])
    alone = policy.score(episodes.select(torch.tensor([0]))).log_prob
    together = policy.score(episodes).log_prob[: len(alone)]
    assert float((alone - together).abs().max()) > 1e-3


@pytest.mark.parametrize("role", ["critic_model", "reference_model"])
def test_positions_of_another_network_may_not_depend_on_the_batch(role, family, tiny_gpt2_dir, tiny_tokenizer):
    config = {"rope_parameters": LONG, "max_position_embeddings": 64, "original_max_position_embeddings": 20}
    folder = family(AutoModelForCausalLM, "phi3", **config, **SIZE)
    policy_class = type(make_policy("causal", tiny_gpt2_dir))
    names = {"model_name": str(tiny_gpt2_dir), role: str(folder)}
    for length, outcome in ((6, nullcontext()), (7, pytest.raises(ModelError, match=r"phi3.*within 20 tokens"))):
        env = make_env(tiny_tokenizer, tiny_gpt2_dir, length=length)
        with outcome:
            policy_class(env.observation_space, env.action_space, lambda _: 0.1, **names)


def test_padding_changes_gradients_of_linear_attention_by_rounding_only(family):
    """Those of the decay are small sums of terms that cancel, in float32 (in float64, they agree to 3e-13)."""
    heads = {"num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16}
    layers = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    folder = family(AutoModelForCausalLM, "qwen3_next", **SIZE, **heads, **experts, **layers)
    policy = make_policy("causal", folder)
    episodes = episodes_of_lengths([3, 9, 6], prompt_lengths=[2, 7, 4])

    gradients = []
    for batches in ([episodes], [episodes.select(torch.tensor([i])) for i in range(3)]):
        policy.policy_model.zero_grad()
        for batch in batches:
            policy.action_scores(batch).log_prob.sum().backward()
        weights = policy.policy_model.named_parameters()
        gradients.append({name: weight.grad.clone() for name, weight in weights if weight.grad is not None})
    together, alone = gradients
    assert together.keys() == alone.keys()
    for name, gradient in together.items():
        tolerance = 1e-3 if name.endswith(("A_log", "dt_bias")) else 2e-5
        assert (gradient - alone[name]).abs().max() <= tolerance * gradient.abs().max(), name


def ours(caplog):
    """The library's warnings."""
    own = [record for record in caplog.records if record.name.startswith("rl4lms_like")]
    return [record.getMessage() for record in own if record.levelname == "WARNING"]


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

    from rl4lms_like.policies.base import CausalLMActorCriticPolicy

    with pytest.raises(ModelError, match="vocab_size=320"):
        CausalLMActorCriticPolicy(spaces.Dict({}), spaces.Discrete(7), lambda _: 0.1, model_name=str(tiny_gpt2_dir))
