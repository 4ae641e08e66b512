"""A Llama whose positions are scaled, and a GGUF file with its weights in 8 bits, as llama.cpp writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from rl4lms_like.testing import models

SCALED_POSITIONS = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
IN_8_BITS = gguf.GGMLQuantizationType.Q8_0


def save_llama(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a random Llama with fewer heads for keys than for queries, as `llama` and as `downloads/model.gguf`."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        initializer_range=0.2,
        rope_parameters=SCALED_POSITIONS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    models.save_model(folder / "llama", model, tokenizer)
    (folder / "downloads").mkdir()
    _write_gguf(model, tokenizer, folder / "downloads" / "model.gguf")


def _write_gguf(model: Any, tokenizer: Any, file: Path) -> None:
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("a llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)

    vocabulary = tokenizer.get_vocab()
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        # The two halves of a head, which are rotated together, become neighbouring rows.
        for projection, n_heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if projection in name:
                array = array.reshape(n_heads, 2, -1, config.hidden_size).swapaxes(1, 2).reshape(array.shape)
        stored = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        if array.ndim == 1:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(array, IN_8_BITS), raw_dtype=IN_8_BITS)
    # What llama.cpp divides the frequencies by. transformers does not read it.
    writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
