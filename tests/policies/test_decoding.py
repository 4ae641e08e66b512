"""The decode loop samples from the distribution of transformers' `generate`, and gives its greedy texts."""

from __future__ import annotations

import functools

import pytest
import torch
from scipy.stats import chisquare

from rl4lms_like.core.episodes import padded, real_ids
from rl4lms_like.policies.decoding import BLOCK, Contexts, sampled
from rl4lms_like.policies.parity import check_decoding, decoding_gap
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.builders import MASKABLE, make_policy

EXACT = 1e-5
WITH_LOOP = ["gpt2", "opt", "gpt_neox", "llama", "qwen2", "gemma"]
WITHOUT = ["mistral", "gemma2"]  # sliding windows
SAMPLING = {"do_sample": True, "top_k": 0}
ENDS = list(range(40, 60))


def test_all_families_are_in_one_of_the_lists():
    assert sorted(WITH_LOOP + WITHOUT) == sorted(models.CAUSAL_FAMILIES)


@pytest.fixture(scope="module", params=WITH_LOOP)
def policy(request, tmp_path_factory, tiny_tokenizer):
    # Weights five times as large as at initialisation: logits far from uniform, as in a trained model.
    model = models.make_causal_lm(request.param, tiny_tokenizer, scale=5.0)
    return make_policy("causal", models.save_model(tmp_path_factory.mktemp(request.param), model, tiny_tokenizer))


@pytest.fixture(scope="module")
def gpt2(tiny_gpt2_dir):
    return make_policy("causal", tiny_gpt2_dir)


def prompts(policy, lengths=(1, 9, 4, 9, 1, 6)):
    """Padded prompts of unequal length; those of one token and the two longest are equal."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, policy.vocab_size, (len(lengths), max(lengths)), generator=generator)
    ids[4], ids[3] = ids[0], ids[1]
    return ids, torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]


def generated(policy, *, loop=True, rows=slice(None), contexts=None, **arguments):
    """Responses with the loop, or with the steps of transformers."""
    arguments = {"eos_token_ids": ENDS, "max_new_tokens": 12, "seed": 3, "record_log_prob": True, **arguments}
    ids, mask = (part[rows] for part in prompts(policy))
    policy.generator.uses_decode_loop = loop
    try:
        return policy.generate(ids, mask, **arguments)
    finally:
        policy.generator.uses_decode_loop = True


# --- the sampling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [7, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
def test_tokens_are_sampled_with_their_probabilities(vocab_size):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(vocab_size, generator=generator).pow(4)
    borders = [token for token in (0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, vocab_size - 1) if token < vocab_size]
    probs[1::2] = 0
    probs[borders] = 0.5
    n = 200 * vocab_size
    counts = torch.zeros(vocab_size)
    for uniforms in torch.rand(n, dtype=torch.float64, generator=generator).split(4096):
        counts += sampled(probs.expand(len(uniforms), -1), uniforms).bincount(minlength=vocab_size)

    # Tokens that are expected less than 5 times count together.
    assert counts[probs == 0].sum() == 0
    expected = probs.double() / probs.double().sum() * n
    groups = [[token] for token in range(vocab_size) if expected[token] >= 5]
    groups += [[token for token in range(vocab_size) if expected[token] < 5]] * bool((expected[probs > 0] < 5).any())
    sums = [[float(numbers[group].sum()) for group in groups] for numbers in (counts, expected)]
    assert chisquare(*sums, sum_check=False).pvalue > 1e-3


def test_a_token_is_that_of_a_plain_loop_over_the_cumulated_probability():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(50, 600, generator=generator).pow(8)
    uniforms = torch.rand(50, dtype=torch.float64, generator=generator)
    expected = []
    for row, uniform in zip(probs.tolist(), uniforms.tolist(), strict=True):
        cumulated, token = 0.0, -1
        while cumulated <= uniform * sum(row):
            token += 1
            cumulated += row[token]
        expected.append(token)
    assert sampled(probs, uniforms).tolist() == expected


@pytest.mark.parametrize("vocab_size", [5, BLOCK, 2 * BLOCK + 3])
def test_the_least_and_the_largest_number_give_the_first_and_last_possible_token(vocab_size):
    probs = torch.rand(3, vocab_size, generator=torch.Generator().manual_seed(0))
    probs[:, 0], probs[:, -1] = 0, 0
    probs[0, :] = 0
    probs[0, 2] = 1e-30  # one possible token
    probs[1, vocab_size // 2 :] = 0
    least, largest = torch.zeros(3).double(), torch.full((3,), 1 - 2**-53).double()
    for row, first, last in zip(range(3), sampled(probs, least), sampled(probs, largest), strict=True):
        possible = probs[row].nonzero()[:, 0]
        assert first == possible[0] and last == possible[-1]


# --- the texts ------------------------------------------------------------------------------------------------------


def test_greedy_texts_are_those_of_transformers(policy):
    greedy = {"generation_kwargs": {"do_sample": False}, "record_log_prob": False}
    ours, theirs = (generated(policy, loop=loop, **greedy) for loop in (True, False))
    assert torch.equal(ours.response_ids * ours.response_mask, theirs.response_ids * theirs.response_mask)
    assert torch.equal(ours.response_mask, theirs.response_mask)
    assert torch.equal(ours.terminated, theirs.terminated)


def test_log_probs_are_teacher_forced_ones(policy):
    episodes = generated(policy)
    assert len(set(episodes.lengths.tolist())) > 1
    log_prob = policy.evaluate_actions(episodes)[1].detach()
    torch.testing.assert_close(episodes.behavior_log_prob, log_prob, atol=EXACT, rtol=0)
    assert decoding_gap(policy.reader) < EXACT


SHAPED = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05, "temperature": 1.3},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 6},
    {"suppress_tokens": [3, 4]},
]


@pytest.mark.parametrize("shaped", SHAPED, ids=[next(iter(shaped)) for shaped in SHAPED])
def test_recorded_log_probs_are_those_of_the_steps_of_transformers(shaped, gpt2, monkeypatch):
    # Both sample with the loop's numbers, so that transformers' steps take the same tokens.
    episodes = generated(gpt2, generation_kwargs={**SAMPLING, **shaped})
    uniforms = iter(torch.rand(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).T)
    monkeypatch.setattr(torch, "multinomial", lambda probs, **_: sampled(probs, next(uniforms))[:, None])
    theirs = generated(gpt2, loop=False, generation_kwargs={**SAMPLING, **shaped})
    assert torch.equal(episodes.response_mask, theirs.response_mask)
    assert torch.equal(episodes.actions, theirs.actions)
    torch.testing.assert_close(episodes.behavior_log_prob, theirs.behavior_log_prob, atol=EXACT, rtol=0)


def test_the_first_tokens_temperature(gpt2):
    episodes = generated(gpt2, first_token_temperature=1e-4, max_new_tokens=1)
    greedy = generated(gpt2, generation_kwargs={"do_sample": False}, max_new_tokens=1, record_log_prob=False)
    assert torch.equal(episodes.actions, greedy.actions)


def test_a_text_depends_neither_on_other_rows_nor_on_ends(policy):
    episodes = generated(policy)
    some = generated(policy, rows=slice(4))
    assert torch.equal(some.actions, episodes.select(torch.arange(4)).actions)
    endless = generated(policy, eos_token_ids=[])
    assert torch.equal(endless.response_ids[episodes.pad(episodes.actions) > 0], episodes.actions[episodes.actions > 0])


def test_ended_responses_are_not_computed(gpt2):
    n_rows = []
    hook = gpt2.model.register_forward_pre_hook(
        lambda _, args, kwargs: n_rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        episodes = generated(gpt2)
    finally:
        hook.remove()
    assert n_rows[0] == 4  # different prompts
    alive = [int((episodes.lengths > step).sum()) for step in range(int(episodes.lengths.max()))]
    assert min(n_rows[1:]) < 6
    assert all(computed >= needed for computed, needed in zip(n_rows[1:], alive[1:], strict=True))
    assert sum(n_rows[1:]) < 2 * sum(alive)


def test_stop_strings_end_at_the_same_token(gpt2, tiny_tokenizer):
    stops = {"generation_kwargs": {**SAMPLING, "stop_strings": ["e", "a", "st"]}, "tokenizer": tiny_tokenizer}
    whole, cut = generated(gpt2, eos_token_ids=[]), generated(gpt2, eos_token_ids=[], **stops)
    assert len(set(cut.lengths.tolist())) > 2
    for row in range(6):
        n = int(cut.lengths[row])
        assert torch.equal(cut.response_ids[row, :n], whole.response_ids[row, :n])
        texts = [tiny_tokenizer.decode(whole.response_ids[row, :k], skip_special_tokens=True) for k in (n - 1, n)]
        assert [any(stop in text for stop in ("e", "a", "st")) for text in texts] == [False, bool(cut.terminated[row])]


@pytest.mark.parametrize("arguments", [{"num_beams": 2}, {"do_sample": True, "use_cache": False}])
def test_other_arguments_use_the_steps_of_transformers(arguments, gpt2):
    ours, theirs = (
        generated(gpt2, loop=loop, generation_kwargs=arguments, record_log_prob=False) for loop in (True, False)
    )
    assert torch.equal(ours.response_ids, theirs.response_ids)


@pytest.mark.parametrize("family", WITHOUT)
def test_sliding_windows_use_the_steps_of_transformers(family, tmp_path, tiny_tokenizer, caplog):
    caplog.set_level("INFO")
    folder = models.save_model(tmp_path, models.make_causal_lm(family, tiny_tokenizer, scale=5.0), tiny_tokenizer)
    policy = make_policy("causal", folder)
    assert not policy.generator.uses_decode_loop and policy.new_contexts() is None
    assert "its cache is not one of the keys and values of all tokens" in caplog.text


def test_a_model_whose_log_probs_differ_uses_the_steps_of_transformers(tiny_gpt2_dir, monkeypatch, caplog):
    caplog.set_level("INFO")
    policy = make_policy("causal", tiny_gpt2_dir)
    assert check_decoding(policy.reader, "name")
    forward = policy.model.forward

    @functools.wraps(forward)
    def without_positions(*, position_ids=None, **inputs):
        return forward(**inputs)

    monkeypatch.setattr(policy.model, "forward", without_positions)
    assert not check_decoding(policy.reader, "name")
    assert "outputs differ by" in caplog.text


def test_probabilities_that_are_not_numbers_are_an_error(tiny_gpt2_dir):
    policy = make_policy("causal", tiny_gpt2_dir)
    torch.nn.init.constant_(policy.model.transformer.ln_f.weight, torch.nan)
    for kwargs in (SAMPLING, {"do_sample": False}):
        with pytest.raises(ModelError, match="the policy has diverged: its token probabilities are invalid"):
            generated(policy, generation_kwargs=kwargs)


def test_masks_are_those_of_the_steps_of_transformers(tiny_gpt2_dir, monkeypatch):
    settings = {"mask_type": "learned_top_k", "top_mask": 30, "min_tokens_to_keep": 2}
    policy = make_policy("causal", tiny_gpt2_dir, policies=MASKABLE, generation_kwargs=SAMPLING, **settings)
    episodes = generated(policy)
    assert episodes.allowed is not None and len(set(episodes.lengths.tolist())) > 1
    uniforms = iter(torch.rand(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).T)
    monkeypatch.setattr(torch, "multinomial", lambda probs, **_: sampled(probs, next(uniforms))[:, None])
    theirs = generated(policy, loop=False)
    assert torch.equal(episodes.actions, theirs.actions) and torch.equal(episodes.allowed, theirs.allowed)


def test_adapters_and_bfloat16(tiny_gpt2_dir):
    policy = make_policy("causal", tiny_gpt2_dir, peft={"r": 4, "lora_alpha": 8}, dtype="bfloat16")
    assert policy.generator.uses_decode_loop
    episodes = generated(policy)
    log_prob = policy.evaluate_actions(episodes)[1].detach()
    torch.testing.assert_close(episodes.behavior_log_prob, log_prob, atol=0.1, rtol=0)


# --- dialogues ------------------------------------------------------------------------------------------------------


def test_kept_keys_give_the_same_turns_as_reading_everything_again(policy):
    ids, mask = prompts(policy)
    texts = real_ids(ids, mask)
    contexts = policy.new_contexts()
    n_read = []
    hook = policy.model.register_forward_pre_hook(
        lambda _, args, kwargs: n_read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for turn, rows in enumerate([[0, 1, 2, 3, 4, 5], [5, 1, 2, 0], [1, 0], [1, 0]]):
        texts = [texts[row] for row in rows]
        if turn:
            contexts.select(torch.tensor(rows))
        ids, mask = padded(texts, side="left")
        arguments = {"eos_token_ids": ENDS, "max_new_tokens": 5, "seed": turn, "record_log_prob": True}
        n_read.clear()
        kept = policy.generate(ids, mask, contexts=contexts, **arguments)
        first = n_read[0]
        again = policy.generate(ids, mask, **arguments)
        assert torch.equal(kept.actions, again.actions) and torch.equal(kept.response_mask, again.response_mask)
        torch.testing.assert_close(kept.behavior_log_prob, again.behavior_log_prob, atol=2e-6, rtol=0)

        # Only what is new was read: the last action and the answer of at most 3 tokens, which may be empty.
        assert turn == 0 or first <= 4
        answers = [[7] * (row % 4) for row in rows]
        responses = real_ids(kept.response_ids, kept.response_mask)
        texts = [text + response + answer for text, response, answer in zip(texts, responses, answers, strict=True)]
    hook.remove()


@torch.no_grad()
def test_keys_need_few_more_columns_than_the_longest_text(policy):
    """Also where each turn is long for another text: their holes do not add up."""
    texts, contexts, length = [[5, 6, 7], [8], [9, 10]], Contexts(policy.model), 9
    generator = torch.Generator().manual_seed(2)
    for turn in range(6):
        ids, mask = padded(texts, side="left")
        logits = contexts.read_texts(ids, mask, n_steps=length, once=False)
        expected = torch.stack([policy.model(torch.tensor([text])).logits[0, -1] for text in texts])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)

        # One text has a long turn, the others end after a token, and an observed token follows.
        tokens = torch.randint(0, policy.vocab_size, (len(texts), length), generator=generator)
        is_long = torch.arange(len(texts)) == turn % len(texts)
        for step in range(length - 1):
            contexts.read(tokens[:, step : step + 1], is_real=is_long)
        assert contexts.cache.layers[0].keys.shape[2] <= ids.shape[1] + 2 * length
        for row, text in enumerate(texts):
            text += [*tokens[row, : length if is_long[row] else 1].tolist(), 7]


def test_a_text_that_does_not_continue_what_was_read_is_an_error(gpt2):
    contexts = gpt2.new_contexts()
    ids, mask = padded([[5, 6, 7], [8, 9]], side="left")
    arguments = {"eos_token_ids": [], "max_new_tokens": 2, "seed": 0}
    gpt2.generate(ids, mask, contexts=contexts, **arguments)
    with pytest.raises(RuntimeError, match="does not continue"):
        gpt2.generate(ids.flip(0), mask.flip(0), contexts=contexts, **arguments)


def test_arguments_without_the_loop_read_everything_again(gpt2):
    contexts = gpt2.new_contexts()
    ids, mask = padded([[5, 6, 7], [8, 9]], side="left")
    arguments = {"eos_token_ids": [], "max_new_tokens": 2, "generation_kwargs": {"num_beams": 2}}
    for texts in (slice(2), slice(1)):
        gpt2.generate(ids[texts], mask[texts], contexts=contexts, **arguments)
        contexts.select(torch.tensor([0]))
