"""Tiny random mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl4lms_like.testing import models

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 32},
    "olmoe": {"num_experts": 4},
}
"""Family -> what its config has besides `SIZE`."""
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SIZE |= {"num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "max_position_embeddings": 128}


def save_experts(folder: Path, family: str, tokenizer: Any, **config: Any) -> Path:
    """Save a mixture of experts, whose weights are so large that it is far from uniform."""
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "vocab_size": len(tokenizer)}
    fields = SIZE | FAMILIES[family] | special | {"initializer_range": 0.1} | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    return models.save_model(folder, model, tokenizer)
