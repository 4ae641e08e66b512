"""Small things that several tests build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.policies.base import CausalLMActorCriticPolicy, Seq2SeqLMActorCriticPolicy
from rl4lms_like.policies.masked import MaskableCausalLMActorCriticPolicy, MaskableSeq2SeqLMActorCriticPolicy
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.testing.models import PAD_TOKEN

SAMPLING = {"do_sample": True, "top_k": 0}
POLICIES = {"causal": CausalLMActorCriticPolicy, "seq2seq": Seq2SeqLMActorCriticPolicy}
MASKABLE = {"causal": MaskableCausalLMActorCriticPolicy, "seq2seq": MaskableSeq2SeqLMActorCriticPolicy}


class LowTokens(RewardFunction):
    """A tenth of a point for every token with a small id: learnable in seconds, paid at every token."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return 0.1 * float(action < 30)


def episodes_of_lengths(
    lengths, *, prompt_lengths=None, vocab_size=50, side="left", prompt_padding=0, response_padding=0, seed=0
) -> EpisodeBatch:
    """Random episodes with given response (and prompt) lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.tensor(prompt_lengths or [3] * len(lengths))[:, None]
    prompt_len = int(prompt_lengths.max()) + prompt_padding
    response_len = max(lengths) + response_padding
    columns = torch.arange(prompt_len)
    return EpisodeBatch(
        torch.randint(0, vocab_size, (len(lengths), prompt_len), generator=generator),
        columns >= prompt_len - prompt_lengths if side == "left" else columns < prompt_lengths,
        torch.randint(0, vocab_size, (len(lengths), response_len), generator=generator),
        torch.arange(response_len) < torch.tensor(lengths)[:, None],
        torch.zeros(len(lengths)).bool(),
        prompt_side=side,
    )


def make_env(tokenizer: Any, model_dir: Path, *, reward=None, n_envs=8, seed=0, length=10, **arguments) -> TextVecEnv:
    """An environment that fits a tiny model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    if config.is_encoder_decoder:
        arguments.setdefault(
            "context_start_token", config.decoder_start_token_id or tokenizer.convert_tokens_to_ids(PAD_TOKEN)
        )
    env = TextVecEnv(
        n_envs,
        tokenizer,
        reward or LowTokens(),
        [Sample(str(i), f"Count with me {'1 2 3 4 5 6'[: 2 * i]}") for i in range(7)],
        max_episode_length=length,
        max_prompt_length=14,
        terminate_on_eos=arguments.pop("terminate_on_eos", True),
        vocab_size=config.vocab_size,
        **arguments,
    )
    env.seed(seed)
    return env


def make_policy(family: str, model_dir: Path, *, use_reference=True, policies=POLICIES, **arguments):
    """A policy on a tiny model, with a seeded value head."""
    from gymnasium import spaces
    from transformers import AutoConfig

    torch.manual_seed(0)
    vocabulary = spaces.Discrete(AutoConfig.from_pretrained(model_dir).vocab_size)
    arguments = {"generation_kwargs": dict(SAMPLING), **arguments}
    return policies[family](
        spaces.Dict({}), vocabulary, lambda _: 1e-3, use_reference=use_reference, model_name=str(model_dir), **arguments
    )
