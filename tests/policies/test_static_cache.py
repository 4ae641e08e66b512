"""`generation_kwargs.cache_implementation: static`: a buffer of fixed size; transformers compiles decoding with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.policies.arguments import samples_other_distribution
from rl4lms_like.policies.generation import TextGenerator
from rl4lms_like.testing import models
from tests.algorithms.test_update import build

KWARGS = {"do_sample": True, "top_k": 0, "max_new_tokens": 12}
STATIC = {**KWARGS, "cache_implementation": "static", "max_cache_len": 40}
IDS = torch.randint(5, 60, (6, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[2, :4] = 0  # prompts of several lengths
MASK[4, :6] = 0
EXACT = 1e-5  # nats; the padded buffer is summed over in another order


def generator(architecture: str) -> TextGenerator:
    is_seq2seq = architecture in ("t5", "bart")
    make = models.make_seq2seq_lm if is_seq2seq else models.make_causal_lm
    return TextGenerator(make(architecture, models.make_tokenizer(append_eos=is_seq2seq)).eval())


def sampled(texts: TextGenerator, seed: int, n_columns: int = 9, **kwargs: Any) -> Any:
    ids, mask = IDS[:, -n_columns:], MASK[:, -n_columns:]
    return texts.generate(ids, mask, eos_token_ids=[1], generation_kwargs=kwargs, seed=seed, record_log_prob=True)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen2", "gemma2", "t5", "bart"])
def test_tokens_and_log_probs_are_those_of_the_usual_cache(architecture):
    texts = generator(architecture)
    for seed in (3, 4):
        usual = sampled(texts, seed, **KWARGS)
        static = sampled(texts, seed, **STATIC)
        assert torch.equal(usual.response_ids, static.response_ids)
        torch.testing.assert_close(static.behavior_log_prob, usual.behavior_log_prob, atol=EXACT, rtol=0)


@pytest.mark.parametrize("architecture", ["gpt2", "t5"])
def test_compiled_decoding_gives_the_same_also_after_an_update(architecture):
    """Traced by dynamo and run by torch's own kernels; on a CPU, transformers compiles only for tests."""
    texts = generator(architecture)
    compile_config = CompileConfig(mode=None, backend="eager")
    compile_config._compile_all_devices = True
    for seed in (3, 4):
        usual = sampled(texts, seed, **KWARGS)
        compiled = sampled(texts, seed, **STATIC, compile_config=compile_config)
        assert torch.equal(usual.response_ids, compiled.response_ids)
        torch.testing.assert_close(compiled.behavior_log_prob, usual.behavior_log_prob, atol=EXACT, rtol=0)
        assert hasattr(texts.model, "_compiled_call"), "decoding was not compiled"

        # Compiled code reads the weights when it runs: it must not keep those of before.
        with torch.no_grad():
            for weight in texts.model.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))


def test_a_batch_does_not_depend_on_those_before_it_if_the_length_is_given():
    """So a resumed run samples the same."""
    fresh = sampled(generator("llama"), 3, n_columns=3, **STATIC)
    texts = generator("llama")
    sampled(texts, 4, **STATIC)
    after_longer = sampled(texts, 3, n_columns=3, **STATIC)
    assert torch.equal(fresh.response_ids, after_longer.response_ids)
    assert torch.equal(fresh.behavior_log_prob, after_longer.behavior_log_prob)


def test_it_is_the_distribution_of_the_policy(tiny_gpt2_dir, tiny_tokenizer):
    assert not samples_other_distribution(STATIC)
    assert samples_other_distribution({**KWARGS, "cache_implementation": "quantized"})
    rewards = []
    for kwargs in (KWARGS, STATIC):
        # The decode loop, which no static cache uses, draws other texts.
        policy_kwargs = {"generation_kwargs": kwargs, "speedups": {"fast_decoding": False}}
        built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, "causal", policy_kwargs=policy_kwargs)
        built.learn_iteration(0, 1)
        rewards.append(built.rollout_buffer.rewards)
    assert (rewards[0] == rewards[1]).all()
