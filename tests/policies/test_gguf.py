"""A GGUF file that is converted as docs/quantization.md shows is the model from which it was made, but for rounding."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl4lms_like.config.load import parse_config
from rl4lms_like.policies.loading import load_model_config
from rl4lms_like.system.errors import ModelError
from tests.config_errors import raises_at
from tests.configs import run_blocks, supervised_blocks
from tests.house.test_docs import run_python

IDS = torch.arange(2, 62).reshape(2, 30)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix in 8 bits: integers times the scale of each 32 numbers, which is stored in float16."""
    blocks = weight.reshape(-1, 32)
    scale = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127  # the embedding that pads has zeros
    integers = (blocks / scale).round()
    return (integers * scale.half().float()).reshape(weight.shape)


def test_a_converted_file_has_the_rounded_weights_and_their_log_probs(tiny_gguf_dir, tmp_path, monkeypatch):
    for name in ("llama", "downloads"):
        (tmp_path / name).symlink_to(tiny_gguf_dir / name)
    monkeypatch.chdir(tmp_path)
    run_python("docs/quantization.md")

    expected = AutoModelForCausalLM.from_pretrained("llama").eval()
    with torch.no_grad():
        for weight in expected.parameters():
            if weight.ndim == 2:
                weight.copy_(rounded(weight))
        log_probs = expected(IDS).logits.log_softmax(-1)
    converted = AutoModelForCausalLM.from_pretrained("converted").eval()
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(converted.state_dict()[name], weight, rtol=0, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(converted(IDS).logits.log_softmax(-1), log_probs, rtol=0, atol=1e-5)
    text = "The sea is blue, and  nobody knew."
    assert AutoTokenizer.from_pretrained("converted")(text) == AutoTokenizer.from_pretrained("llama")(text)


@pytest.mark.parametrize("name", ["downloads", "downloads/model.gguf"])
def test_a_file_that_is_not_converted_is_refused_with_the_way_out(name, tiny_gguf_dir):
    with pytest.raises(ModelError, match=r"docs/quantization\.md"):
        load_model_config(str(tiny_gguf_dir / name))


def test_the_key_of_transformers_is_refused_with_the_way_out():
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["gguf_file"] = "model.gguf"
    with raises_at("alg.policy.args.gguf_file", mentions="docs/quantization.md"):
        parse_config(blocks)
    blocks = supervised_blocks()
    blocks["alg"]["gguf_file"] = "model.gguf"
    with raises_at("alg.gguf_file", mentions="docs/quantization.md"):
        parse_config(blocks)
