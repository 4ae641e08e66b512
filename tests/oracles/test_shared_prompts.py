"""A prompt computed once for all of its responses: no log-prob, value or gradient changes, or it is not done."""

import logging
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl4lms_like.algorithms.fisher import FisherMatrix, FlatParameters
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.token_masks import pack, unpack
from rl4lms_like.policies import parity, teacher_forcing
from rl4lms_like.policies.generation import shared_prompt_inputs
from rl4lms_like.policies.teacher_forcing import CausalReader, Seq2SeqReader
from rl4lms_like.testing import models
from tests import expert_models
from tests.algorithms.test_update import build
from tests.builders import episodes_of_lengths, make_policy

EXACT = 1e-5
ROWS = [0, 1, 2, 1, 0, 2, 1, 1]
LENGTHS = [9, 4, 1, 7, 2, 9, 5, 9]
PROMPT_LENGTHS = [3, 12, 7]  # the windows of Mistral, Gemma 2 and Gemma 3 are shorter than the longest

SIZE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
WINDOWED = {"sliding_window": 8, "query_pre_attn_scalar": 8}
WINDOWED |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
OTHERS = {"qwen3": GROUPED, "gemma3_text": GROUPED | WINDOWED, "bloom": {"n_layer": 3, "n_head": 4}}
EXPERTS = {family: GROUPED | {"num_experts_per_tok": 2} | config for family, config in expert_models.FAMILIES.items()}
OTHERS |= EXPERTS
FAMILIES = [*models.CAUSAL_FAMILIES, *OTHERS, *models.SEQ2SEQ_FAMILIES]


def save_family(folder, name, tokenizer, **config):
    """A random model far from uniform, so that every token of a prompt counts."""
    if name in models.CAUSAL_FAMILIES:
        model = models.make_causal_lm(name, tokenizer, scale=5.0)
    elif name in models.SEQ2SEQ_FAMILIES:
        model = models.make_seq2seq_lm(name, tokenizer, scale=1.0 if name == "t5" else 5.0)
    else:
        special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "vocab_size": len(tokenizer)}
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **(SIZE | special | {"initializer_range": 0.1} | config))
        model = AutoModelForCausalLM.from_config(config)
    return models.save_model(folder, model, tokenizer)


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request, tmp_path_factory, tiny_tokenizer):
    folder = tmp_path_factory.mktemp(request.param)
    save_family(folder, request.param, tiny_tokenizer, **OTHERS.get(request.param, {}))
    family = "seq2seq" if request.param in models.SEQ2SEQ_FAMILIES else "causal"
    return make_policy(family, folder, value_head_init="default")


def grouped(policy, lengths=LENGTHS, rows=ROWS) -> EpisodeBatch:
    """Responses to three prompts of unequal length, mixed, with tokens of the environment in the middle."""
    side = policy.reader.prompt_side
    prompts = episodes_of_lengths([1] * 3, prompt_lengths=PROMPT_LENGTHS, vocab_size=300, side=side)
    written = episodes_of_lengths(lengths, vocab_size=300, seed=1)
    columns = torch.arange(written.response_ids.shape[1])
    return replace(
        prompts.select(torch.tensor(rows)),
        response_ids=written.response_ids,
        response_mask=written.response_mask,
        observed=(columns > 1) & (columns < 4) & (torch.arange(len(rows)) % 2 == 0)[:, None],
        terminated=written.terminated,
        prompt_rows=torch.tensor(rows),
    )


def separate(episodes):
    return replace(episodes, prompt_rows=None)


def gradients(policy, episodes):
    """Of a loss with every score, by all parameters of policy and critic."""
    policy.optimizer.zero_grad()
    values, log_prob, entropy = policy.evaluate_actions(episodes)
    weights = torch.linspace(-1, 2, len(values))
    (weights * (log_prob + 0.1 * entropy + values)).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def assert_same_gradients(policy, episodes):
    expected = gradients(policy, separate(episodes))
    assert float(expected.norm()) > 1e-2
    assert float((gradients(policy, episodes) - expected).norm()) < EXACT * float(expected.norm())


def assert_same_scores(policy, episodes):
    expected = policy.score(separate(episodes))
    for name, field in policy.score(episodes)._asdict().items():
        torch.testing.assert_close(field, getattr(expected, name), atol=EXACT, rtol=EXACT, msg=name)
    final_values = policy.final_values(separate(episodes))
    torch.testing.assert_close(policy.final_values(episodes), final_values, atol=EXACT, rtol=EXACT)


def n_embedded(policy, episodes):
    """Number of tokens that the policy's model reads, of seq2seq models only those of the encoder."""
    model = policy.policy_model.get_encoder() if policy.reader.is_encoder_decoder else policy.policy_model
    counts = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].numel()))
    policy.action_scores(episodes)
    hook.remove()
    return sum(counts)


def test_scores_and_gradients_are_those_of_separate_prompts(policy):
    episodes = grouped(policy)
    assert_same_scores(policy, episodes)
    assert_same_gradients(policy, episodes)


def test_every_prompt_is_computed_once(policy):
    episodes = grouped(policy)
    before, after = n_embedded(policy, separate(episodes)), n_embedded(policy, episodes)
    assert before - after == (len(ROWS) - len(PROMPT_LENGTHS)) * max(PROMPT_LENGTHS)


def test_responses_of_one_token_and_single_prompts(policy):
    assert_same_scores(policy, replace(grouped(policy, [1] * 8), observed=None))
    assert_same_scores(policy, grouped(policy, LENGTHS[:3], [2, 2, 2]))


def test_the_models_own_logits_are_the_same(policy):
    """Those of families without a linear head."""
    episodes = grouped(policy)
    with torch.no_grad():
        shared, expected = (policy.reader.logits(each).log_softmax(-1) for each in (episodes, separate(episodes)))
    torch.testing.assert_close(shared, expected, atol=2e-5, rtol=EXACT)


def test_distributions_over_allowed_tokens_are_the_same(policy):
    episodes = grouped(policy)
    allowed = torch.rand(episodes.n_tokens, policy.vocab_size, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[torch.arange(episodes.n_tokens), episodes.actions] = True
    episodes = replace(episodes, allowed=pack(allowed))
    assert torch.equal(unpack(episodes.allowed, policy.vocab_size), allowed)
    assert_same_scores(policy, episodes)
    assert_same_gradients(policy, episodes)


# --- one model of each kind ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "t5"])
def folder(request, tmp_path_factory, tiny_tokenizer):
    """A model's kind and its folder."""
    folder = save_family(tmp_path_factory.mktemp(request.param), request.param, tiny_tokenizer)
    return "seq2seq" if request.param == "t5" else "causal", folder


def test_a_shared_critic_and_adapters_have_the_same_gradients(folder):
    pytest.importorskip("peft")
    policy = make_policy(*folder, critic="shared", value_head_init="default", peft={"r": 4, "lora_alpha": 16})
    with torch.no_grad():
        for name, weight in policy.policy_model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    episodes = grouped(policy)
    assert n_embedded(policy, episodes) < n_embedded(policy, separate(episodes))
    assert_same_scores(policy, episodes)
    assert_same_gradients(policy, episodes)


@pytest.mark.parametrize("option", ["dropout", "gradient_checkpointing"])
def test_in_training_mode_every_response_has_its_own_prompt(option, folder):
    """Dropout is independent, and checkpointing, which disables the cache, is exact."""
    policy = make_policy(*folder, value_head_init="default", **{option: True})
    episodes = grouped(policy)
    policy.set_training_mode(True)
    assert n_embedded(policy, episodes) == n_embedded(policy, separate(episodes))
    if option == "gradient_checkpointing":
        assert_same_gradients(policy, episodes)
    assert_same_scores(policy, episodes)


def test_bfloat16_differs_by_its_rounding(folder):
    policy = make_policy(*folder, dtype="bfloat16")
    episodes = grouped(policy)
    log_prob, expected = (policy.score(each).log_prob for each in (episodes, separate(episodes)))
    exact = make_policy(*folder).score(episodes).log_prob
    rounding = float((expected - exact).abs().max())
    assert rounding > 0 and float((log_prob - exact).abs().max()) < 2 * rounding


def test_fisher_products_are_the_same(folder):
    kind, path = folder
    policy = make_policy(kind, path, attn_implementation="eager")
    reader, episodes = policy.reader, grouped(policy)
    assert isinstance(reader, CausalReader | Seq2SeqReader) and reader.shares_prompts
    parameters = FlatParameters(p for p in reader.model.parameters() if p.requires_grad)
    size = sum(p.numel() for p in parameters.parameters)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0))
    shared, expected = (
        FisherMatrix(reader.action_logits, [each], parameters) @ vector for each in (episodes, separate(episodes))
    )
    assert float((shared - expected).norm()) < 1e-4 * float(expected.norm())


@pytest.mark.parametrize("micro_batch_size", [None, 20, 1])
def test_a_step_of_ppo_is_the_same_in_any_micro_batches(micro_batch_size, folder, tiny_tokenizer):
    kind, path = folder
    steps = []
    for shared in (False, True):
        built = build(
            PPO, path, tiny_tokenizer, kind, ent_coef=0.01, micro_batch_size=micro_batch_size, batch_size=1000,
            n_epochs=1, policy_kwargs={"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}},
        )  # fmt: skip
        episodes = grouped(built.policy)
        rewards = torch.linspace(-1, 1, episodes.n_tokens)
        scores = built.policy.score(episodes)
        given = episodes if shared else separate(episodes)
        built.rollout_buffer.add(given, rewards, scores.values, scores.log_prob)
        built.rollout_buffer.compute_returns_and_advantage()
        before = torch.cat([p.detach().flatten() for p in built.policy.policy_model.parameters()])
        built._setup_learn(1)
        built.train()
        steps.append(torch.cat([p.detach().flatten() for p in built.policy.policy_model.parameters()]) - before)
    assert float(steps[0].norm()) > 0
    assert float((steps[0] - steps[1]).norm()) < 2e-3 * float(steps[0].norm()), "weights are rounded at 1e-7"


# --- models whose prompts cannot be shared ----------------------------------------------------------------------------


LFM2 = GROUPED | {"layer_types": ["conv", "full_attention", "conv"]}


LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
PHI3 = {"rope_parameters": LONG, "max_position_embeddings": 64, "original_max_position_embeddings": 20}


@pytest.mark.parametrize(("name", "config"), [("mamba", {"state_size": 4}), ("lfm2", LFM2), ("phi3", PHI3)])
def test_models_with_another_state_or_with_positions_of_the_batch_do_not_share(
    name, config, tmp_path, tiny_tokenizer, caplog
):
    caplog.set_level(logging.INFO)
    policy = make_policy("causal", save_family(tmp_path, name, tiny_tokenizer, **config), value_head_init="default")
    messages = [each.getMessage() for each in caplog.records if each.levelname == "INFO" and "prompt" in each.msg]
    assert len(messages) == 1 and str(tmp_path) in messages[0], "not again for critic and reference"
    episodes = grouped(policy)
    assert n_embedded(policy, episodes) == n_embedded(policy, separate(episodes))
    assert_same_scores(policy, episodes)


def test_a_model_whose_generation_fails_the_check_computes_all_prompts(tiny_gpt2_dir, monkeypatch):
    def of_other_rows(model, ids, mask):
        inputs = shared_prompt_inputs(model, ids, mask)
        others = shared_prompt_inputs(model, ids.flip(0), mask.flip(0))
        return {**inputs, "past_key_values": others["past_key_values"]}

    monkeypatch.setattr(parity, "shared_prompt_inputs", of_other_rows)
    assert not make_policy("causal", tiny_gpt2_dir).generator.shares_prompts


@pytest.mark.parametrize("role", ["model_name", "critic_model", "reference_model"])
def test_a_model_that_fails_the_check_computes_all_prompts(role, tiny_gpt2_dir, tmp_path, tiny_tokenizer, monkeypatch):
    """Each model by itself: only Llama's cache is wrong here, and only as one of the three models."""

    class Wrong(teacher_forcing.PromptCache):
        def update(self, key_states, *args, **kwargs):
            keys, values = super().update(key_states, *args, **kwargs)
            is_llama = key_states.shape[1] == 2  # grouped heads
            return keys, values.flip(0) if is_llama and self.rows is not None else values

    monkeypatch.setattr(teacher_forcing, "PromptCache", Wrong)
    folders = {"model_name": str(tiny_gpt2_dir), role: str(save_family(tmp_path, "llama", tiny_tokenizer))}
    if role == "model_name":
        folders |= {"critic_model": str(tiny_gpt2_dir), "reference_model": str(tiny_gpt2_dir)}
    policy = make_policy("causal", folders.pop("model_name"), value_head_init="default", **folders)
    readers = {"model_name": policy.reader, "critic_model": policy.value_reader, "reference_model": policy.ref_reader}
    assert {name: reader.shares_prompts for name, reader in readers.items()} == {name: name != role for name in readers}
    assert policy.generator.shares_prompts == (role != "model_name")
    assert_same_scores(policy, grouped(policy))
