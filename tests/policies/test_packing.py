"""Log-probs, values and gradients of packed rows are those of padded ones, or rows stay padded."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl4lms_like.core.packed_rows import RowPacking
from rl4lms_like.policies.parity import check_packing, packing_gap, probe_episodes
from rl4lms_like.policies.teacher_forcing import CausalReader
from rl4lms_like.testing import models
from tests.builders import episodes_of_lengths, make_policy
from tests.expert_models import save_experts

FAMILIES = ["llama", "qwen2", "gpt2", "gpt_neox", "mistral", "mixtral", "olmoe"]
EXACT = 1e-6
PROMPT_LENGTHS = [3, 12, 1, 7, 2, 4]  # the windows of Mistral and Gemma 2 are shorter than the longest
LENGTHS = [9, 2, 1, 3, 5, 2]


def dialogues():
    """Episodes of unequal length, half of them with tokens of the environment in the middle."""
    episodes = episodes_of_lengths(LENGTHS, prompt_lengths=PROMPT_LENGTHS, vocab_size=300)
    columns = torch.arange(episodes.response_ids.shape[1])
    is_dialogue = torch.arange(len(LENGTHS)) % 2 == 0
    return replace(episodes, observed=(columns > 0) & (columns < 3) & is_dialogue[:, None])


def reader_of(model):
    reader = CausalReader(model)
    reader.probe_head(probe_episodes(model.config.vocab_size, "left"))
    return reader


def packing_of(reader):
    return RowPacking(reader.model.config.hidden_size)


def shapes_of_passes(model, compute):
    """Shapes of the ids that the model reads."""
    shapes = []
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape)))
    compute()
    hook.remove()
    return shapes


def loss_and_gradient(reader, episodes):
    """Of all log-probs, entropies and last states, with different weights."""
    reader.model.zero_grad()
    scores = reader.scores(episodes, logits_budget=10_000)
    final_states = reader.final_states(episodes)
    weights = torch.linspace(-1, 2, len(scores.log_prob))
    loss = (weights * (scores.log_prob + 0.1 * scores.entropy)).sum() + 0.1 * final_states.sum()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in reader.model.parameters() if p.grad is not None])
    return scores.log_prob.detach(), gradient


@pytest.mark.parametrize(("family", "attention"), [
    *((family, "sdpa") for family in FAMILIES), ("llama", "eager"), ("mistral", "eager"), ("gemma2", "eager")
])  # fmt: skip
def test_log_probs_and_gradients_are_those_of_padded_rows(family, attention, tiny_tokenizer, tmp_path):
    if family in models.CAUSAL_FAMILIES:
        model = models.make_causal_lm(family, tiny_tokenizer, scale=5.0).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(save_experts(tmp_path, family, tiny_tokenizer)).eval()
    model.set_attn_implementation(attention)
    episodes = dialogues()
    reader = reader_of(model)
    expected, expected_gradient = loss_and_gradient(reader, episodes)

    packing = check_packing(reader, family, has_head=reader.head_scale is not None)
    assert packing is not None
    reader.packing = packing
    shapes = shapes_of_passes(model, lambda: reader.states(episodes))
    assert shapes == [(3, 16)]  # instead of 6 rows of 20

    log_prob, gradient = loss_and_gradient(reader, episodes)
    assert float((log_prob - expected).abs().max()) <= EXACT * float(expected.abs().max())
    assert float((gradient - expected_gradient).norm()) <= EXACT * float(expected_gradient.norm())


def test_a_family_that_reads_the_text_before_is_found(tiny_tokenizer, caplog):
    """OPT's mask ignores positions: its log-probs are off without an error."""
    model = models.make_causal_lm("opt", tiny_tokenizer, scale=5.0).eval()
    reader = reader_of(model)
    assert packing_gap(reader, packing_of(reader), has_head=True) > 0.1
    with caplog.at_level(logging.WARNING):
        assert check_packing(reader, "my/opt") is None
    assert "my/opt" in caplog.text and "rows are padded" in caplog.text

    # The same in a policy, whose rows stay padded.
    episodes = dialogues()
    assert shapes_of_passes(model, lambda: reader.states(episodes)) == [(6, 20)]


def test_a_cache_of_keys_would_be_found(tiny_tokenizer, monkeypatch):
    """With one, transformers does not see that rows are packed."""
    reader = reader_of(models.make_causal_lm("llama", tiny_tokenizer, scale=5.0).eval())
    original = CausalReader._last_hidden
    monkeypatch.setattr(
        CausalReader, "_last_hidden", lambda self, inputs, *rest: original(self, inputs | {"use_cache": True}, *rest)
    )
    assert check_packing(reader, "llama") is None


@pytest.mark.parametrize("family", ["mamba", "bloom"])
def test_families_without_positions_are_padded(family, tiny_tokenizer, caplog):
    size = {"mamba": {"num_hidden_layers": 2, "state_size": 4}, "bloom": {"n_layer": 2, "n_head": 4}}[family]
    config = AutoConfig.for_model(family, vocab_size=len(tiny_tokenizer), hidden_size=32, **size)
    reader = reader_of(AutoModelForCausalLM.from_config(config).eval())
    assert check_packing(reader, family) is None
    assert "positions" in caplog.text


def test_a_routing_record_counts_the_tokens_of_padded_rows(tiny_tokenizer, tmp_path):
    folder = save_experts(tmp_path, "mixtral", tiny_tokenizer)
    reader = reader_of(AutoModelForCausalLM.from_pretrained(folder).eval())
    routings = []
    for packing in (None, packing_of(reader)):
        reader.packing = packing
        with reader.recorded_routing() as record:
            reader.states(dialogues())
        routings.append(record.routing)
    for padded, packed in zip(*routings, strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-6)
    assert float(routings[0].n) == 2 * sum(a + b - 1 for a, b in zip(PROMPT_LENGTHS, LENGTHS, strict=True))


# --- policies --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("llama")
    return models.save_model(folder, models.make_causal_lm("llama", tiny_tokenizer, scale=5.0), tiny_tokenizer)


@pytest.fixture(scope="module")
def policies(llama):
    options = {"value_head_init": "default"}
    return make_policy("causal", llama, **options), make_policy("causal", llama, packing="auto", **options)


def gradient_of(policy, batches):
    policy.optimizer.zero_grad()
    for batch in batches:
        values, log_prob, entropy = policy.evaluate_actions(batch)
        (log_prob + 0.1 * entropy + values).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def test_every_network_of_a_policy_packs(policies):
    padded, packed = policies
    episodes = dialogues()
    expected = padded.score(episodes)
    for network in (packed.policy_model, packed.value_model, packed.ref_model):
        assert [rows < 6 for rows, _ in shapes_of_passes(network, lambda: packed.score(episodes))] == [True]
    for name, field in packed.score(episodes)._asdict().items():
        torch.testing.assert_close(field, getattr(expected, name), atol=5e-6, rtol=1e-6, msg=name)
    torch.testing.assert_close(packed.final_values(episodes), padded.final_values(episodes), atol=1e-6, rtol=1e-6)


def test_micro_batches_never_change_a_gradient(policies):
    padded, packed = policies
    episodes = dialogues()
    parts = [episodes.select(torch.tensor(rows)) for rows in ([0, 1, 4], [2], [3, 5])]
    expected = gradient_of(padded, [episodes])
    for batches in ([episodes], parts):
        assert float((gradient_of(packed, batches) - expected).norm()) <= 2e-6 * float(expected.norm())


def test_shared_prompts_are_not_packed(policies):
    _, packed = policies
    episodes = dialogues()
    episodes = replace(episodes.select(torch.tensor([0, 0, 1, 2, 3, 4])), prompt_rows=torch.tensor([0, 0, 1, 2, 3, 4]))
    assert packed.reader.shares_prompts
    assert len(shapes_of_passes(packed.policy_model, lambda: packed.action_scores(episodes))) == 2


def test_empty_prompts_are_not_packed(policies):
    _, packed = policies
    episodes = dialogues()
    no_prompt = torch.arange(6)[:, None] == 2
    episodes = replace(episodes, prompt_mask=episodes.prompt_mask & ~no_prompt)
    assert shapes_of_passes(packed.policy_model, lambda: packed.reader.states(episodes)) == [(6, 20)]


def test_another_critic_and_reference_are_checked_themselves(llama, tmp_path, tiny_tokenizer):
    opt = models.save_model(tmp_path / "opt", models.make_causal_lm("opt", tiny_tokenizer, scale=5.0), tiny_tokenizer)
    policy = make_policy("causal", llama, packing="auto", critic_model=str(opt))
    assert policy.reader.packing is not None and policy.ref_reader.packing is not None
    assert policy.value_reader.packing is None
    policy = make_policy("causal", llama, packing="auto", reference_model=str(opt), critic="none")
    assert policy.reader.packing is not None and policy.ref_reader.packing is None


def test_gradient_checkpointing_changes_nothing(llama, policies):
    _, packed = policies
    policy = make_policy("causal", llama, packing="auto", value_head_init="default", gradient_checkpointing=True)
    policy.value_head.load_state_dict(copy.deepcopy(packed.value_head.state_dict()))
    policy.set_training_mode(True)
    expected = gradient_of(packed, [dialogues()])
    assert float((gradient_of(policy, [dialogues()]) - expected).norm()) <= 2e-6 * float(expected.norm())
