"""Measure how much the log-probs of a mixture of experts differ between generation and one forward pass.

    python -m benchmarks.expert_routing

Generation reads a token at a time, with a cache; training reads whole texts. Both compute the same numbers up to
rounding, but a router chooses: where two experts are almost equally probable, rounding decides. For tiny random models
in float32 and in bfloat16, this prints the largest difference of a token's log-prob and that of a response's mean,
which is what GSPO's ratio is made of, and the fraction of tokens that a layer sends to other experts.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rl4lms_like.testing.models import make_tokenizer

SIZE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SIZE |= {"intermediate_size": 128, "num_experts_per_tok": 2, "max_position_embeddings": 256, "initializer_range": 0.1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64},
    "olmoe": {"num_experts": 8},
}
"""Family -> what its config has besides `SIZE`; `llama`, which has no experts, to compare."""
N_RESPONSES = 32
N_PROMPT = 16
N_RESPONSE = 32


def main() -> None:
    """Print a row for each family and data type."""
    print("| model | type | token | response | other experts |")
    print("|---|---|---|---|---|")
    for family in FAMILIES:
        model = make_model(family)
        for dtype in (torch.float32, torch.bfloat16):
            token_gap, response_gap, changed = measured(model, dtype)
            name = str(dtype).removeprefix("torch.")
            print(f"| {family} | {name} | {token_gap:.2g} | {response_gap:.2g} | {changed:.3%} |", flush=True)


def make_model(family: str) -> PreTrainedModel:
    """Return a random model whose distributions are far from uniform."""
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "vocab_size": len(make_tokenizer())}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZE, **FAMILIES[family], **special))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def measured(model: PreTrainedModel, dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the largest gap of a token and of a response's mean, in nats, and the fraction of changed choices.

    Args:
        model: a causal model.
        dtype: data type of autocast, in which both passes are computed.
    """
    has_experts = hasattr(model.config, "num_experts_per_tok") and model.config.model_type != "llama"
    option = {"output_router_logits": True} if has_experts else {}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, (N_RESPONSES, N_PROMPT + N_RESPONSE), generator=generator)

    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        # One pass over prompts and responses, as in training.
        whole = model(input_ids=ids[:, :-1], use_cache=False, **option)
        log_probs = log_probs_of(whole.logits[:, N_PROMPT - 1 :], ids[:, N_PROMPT:])
        experts = chosen(whole, ids.shape[1] - 1, model)[:, :, N_PROMPT:]

        # The prompts, then one token after the other, as in generation.
        step = model.base_model(input_ids=ids[:, :N_PROMPT], use_cache=True)
        last_states = [step.last_hidden_state[:, -1:]]
        experts_of_steps = []
        for position in range(N_PROMPT, ids.shape[1] - 1):
            tokens = ids[:, position : position + 1]
            step = model.base_model(input_ids=tokens, past_key_values=step.past_key_values, use_cache=True, **option)
            last_states.append(step.last_hidden_state)
            experts_of_steps.append(chosen(step, 1, model))
        logits = model.get_output_embeddings()(torch.cat(last_states, dim=1))
        generated = log_probs_of(logits, ids[:, N_PROMPT:])

    gaps = generated - log_probs  # [n, response_len]
    changed = (torch.cat(experts_of_steps, dim=2) != experts).any(dim=-1).float().mean() if has_experts else 0.0
    return float(gaps.abs().max()), float(gaps.mean(dim=1).abs().max()), float(changed)


def log_probs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of tokens `[n, length]` under logits `[n, length, vocab]`."""
    return logits.float().log_softmax(dim=-1).gather(-1, tokens[..., None]).squeeze(-1)


def chosen(output: Any, length: int, model: PreTrainedModel) -> torch.Tensor:
    """Return the experts of each layer and token, in ascending order `[n_layers, n, length, n_chosen]`."""
    if "router_logits" not in output:
        return torch.zeros(1, N_RESPONSES, length, 1)
    logits = torch.stack(output.router_logits).unflatten(1, (-1, length)).float()
    return logits.topk(model.config.num_experts_per_tok, dim=-1).indices.sort(dim=-1).values


if __name__ == "__main__":
    main()
