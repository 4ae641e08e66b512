"""Decoder-only language models as actor-critic policies."""

from __future__ import annotations

from transformers import AutoModelForCausalLM

from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.policies.teacher_forcing import CausalReader


class CausalLMActorCriticPolicy(LMActorCriticPolicy):
    """Actor-critic policy of any `AutoModelForCausalLM`: GPT-2, OPT, GPT-NeoX, Llama, Qwen, Mistral, Gemma ..."""

    reader_class = CausalReader
    auto_class = AutoModelForCausalLM
