"""Measures what fused layers and speculative decoding could save: SmolLM2-135M with LoRA, CPU seconds of one thread.

    python -m benchmarks.pass_costs fused benchmarks/.models/smollm2          RMSNorm and SwiGLU as one function each
    python -m benchmarks.pass_costs tokens benchmarks/.models/smollm2         passes of k tokens next to one of 1 token
    python -m benchmarks.pass_costs acceptance                                tokens of a draft that a policy accepts

`fused` makes one iteration of GRPO (the work of `benchmarks.grpo_real`) and then repeats its parts on the same episodes
with each variant in turn: `transformers`, the layers as they are; `fused`; `omitted`, with one product in place of a norm
and a sum in place of SwiGLU, which is about the largest gain possible. What is saved is the median of the differences
within a round.

`acceptance` trains the quickstart's policy and compares its distribution with that of a draft at each token of its own
responses: speculative sampling (arXiv 2211.17192) accepts a token with the probability sum_a min(p(a), q(a)).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from stable_baselines3.common.logger import Logger
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.fewer_passes import assembled, critic_folder, initial_model
from benchmarks.grpo_real import LORA, SHAPE, with_an_end_that_is_never_sampled
from benchmarks.ppo_iteration import machine
from benchmarks.systems.ours import make_algorithm

RESULTS = Path(__file__).parent / "results" / "pass_costs.json"


# --- fused layers -----------------------------------------------------------------------------------------------------


class RMSNorm(torch.autograd.Function):
    """y = x r w with r = (mean(x²) + eps)^-1/2, and its analytic gradient.

    dx = r (g w - x r² mean(g w x)), dw = sum(g x r); only x and r are stored.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, r = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * x).mul_(r).flatten(0, -2).sum(0)
        scaled = grad * weight
        mean = torch.linalg.vecdot(scaled, x).unsqueeze(-1).div_(x.shape[-1])
        return scaled.mul_(r).addcmul_(x, mean.mul_(r.pow(3)), value=-1), grad_weight, None


class SwiGLU(torch.autograd.Function):
    """y = silu(gate) up; silu(gate) is recomputed in the backward pass and not stored."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def _fused_norm(module: Any, x: Tensor) -> Tensor:
    y: Tensor = RMSNorm.apply(x, module.weight, module.variance_epsilon)
    return y


def _fused_mlp(module: Any, x: Tensor) -> Any:
    return module.down_proj(SwiGLU.apply(module.gate_proj(x), module.up_proj(x)))


def _scaled(module: Any, x: Tensor) -> Tensor:
    # Without any norm the states of 30 layers would overflow, so the layers' outputs are made small.
    return x * 0.01


def _added(module: Any, x: Tensor) -> Any:
    # Both products stay, with their gradients: a sum has the cheapest backward pass of two inputs.
    return module.down_proj(module.gate_proj(x).add_(module.up_proj(x)))


VARIANTS: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "transformers": (None, None),
    "fused": (_fused_norm, _fused_mlp),
    "omitted": (_scaled, _added),
}
"""Name -> forward of an RMSNorm and of an MLP; None is that of transformers."""


@contextmanager
def layers(model: nn.Module, variant: str) -> Iterator[None]:
    """Replace the forward of a Llama's norms and MLPs within the block."""
    norm, mlp = VARIANTS[variant]
    changed = []
    for module in model.modules():
        forward = {"LlamaRMSNorm": norm, "LlamaMLP": mlp}.get(type(module).__name__)
        if forward is not None:
            module.forward = partial(forward, module)
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward  # the instance's; that of the class is in use again


def cpu_seconds(part: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call."""
    start = time.process_time()
    part()
    return time.process_time() - start


def measure_fused(model: Path, rounds: int) -> dict[str, Any]:
    """Return the times of the parts of an iteration with each variant, and the differences in numbers."""
    with tempfile.TemporaryDirectory() as folder:
        words = with_an_end_that_is_never_sampled(model, Path(folder))
        job = {"algorithm": "grpo", "words": words, "lora": LORA}
        worker: Any = SimpleNamespace(shape=SHAPE, job=job, seed=0, model=folder)
        algorithm: Any = make_algorithm(worker)
    algorithm.set_logger(Logger(None, []))
    policy = algorithm.policy

    # The second iteration is measured: in the first one memory is allocated. B of the adapters is no longer 0 then.
    iteration_s = [cpu_seconds(partial(algorithm.learn_iteration, index, 10**6)) for index in range(2)][1]
    episodes = algorithm.rollout_buffer.episodes
    prompts = (episodes.prompt_ids, episodes.prompt_mask)
    trained = [weight for weight in policy.policy_model.parameters() if weight.requires_grad]
    kept: dict[str, Tensor] = {}

    def generate() -> None:
        policy.generate(*prompts, eos_token_ids=[], seed=0)

    def score() -> None:
        with torch.no_grad():
            policy.action_scores(episodes)

    def update() -> None:
        policy.optimizer.zero_grad()
        kept["log_prob"] = policy.action_scores(episodes).log_prob
        kept["log_prob"].mean().backward()
        kept["gradient"] = torch.cat([weight.grad.flatten() for weight in trained])

    # Variants alternate within each part, so that little time passes between the two that are compared.
    parts = {"generate": generate, "score": score, "update": update}
    times: dict[str, dict[str, list[float]]] = {part: {name: [] for name in VARIANTS} for part in parts}
    numbers: dict[str, dict[str, Tensor]] = {}
    for _ in range(rounds):
        for part, call in parts.items():
            for name in VARIANTS:
                with layers(policy.policy_model, name):
                    times[part][name].append(cpu_seconds(call))
                numbers[name] = dict(kept)
                print(f"{part}, {name}: {times[part][name][-1]:.2f} s", flush=True)

    # An iteration scores twice: old log-probs and those of the reference.
    saved_s = dict.fromkeys(VARIANTS, 0.0)
    for part, columns in times.items():
        for name, column in columns.items():
            differences = [before - after for before, after in zip(columns["transformers"], column, strict=True)]
            saved_s[name] += statistics.median(differences) * (2 if part == "score" else 1)
    exact, fused = numbers["transformers"], numbers["fused"]
    return {
        "iteration_s": iteration_s,
        "times": times,
        "saved_s": saved_s,
        "saved_fraction": {name: seconds / iteration_s for name, seconds in saved_s.items()},
        "log_prob_difference": float((fused["log_prob"] - exact["log_prob"]).abs().max()),
        "gradient_difference": float((fused["gradient"] - exact["gradient"]).norm() / exact["gradient"].norm()),
    }


# --- speculative decoding ---------------------------------------------------------------------------------------------

BATCHES = (1, 32)
N_TOKENS = (1, 2, 3, 4, 5, 8)
CACHED = 62
"""Tokens in the cache: the prompt and half of the response."""


@torch.no_grad()
def measure_tokens(model: Path, rounds: int) -> dict[str, Any]:
    """Return the CPU seconds of a decoding pass over k new tokens of each row, with logits for all of them."""
    network: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    times: dict[str, dict[str, list[float]]] = {}
    for batch in BATCHES:
        ids = torch.randint(1000, 40000, (batch, CACHED + max(N_TOKENS)), generator=torch.Generator().manual_seed(0))
        cache = DynamicCache(config=network.config)
        network(input_ids=ids[:, :CACHED], past_key_values=cache, logits_to_keep=1)
        columns = times[f"batch {batch}"] = {str(k): [] for k in N_TOKENS}
        for _ in range(rounds):
            for k in N_TOKENS:
                decode = partial(network, input_ids=ids[:, CACHED : CACHED + k], past_key_values=cache)
                columns[str(k)].append(cpu_seconds(decode))
                cache.crop(CACHED)
        medians = {k: statistics.median(column) for k, column in columns.items()}
        print(
            f"batch {batch}: { ({k: round(seconds / medians['1'], 2) for k, seconds in medians.items()}) }", flush=True
        )
    return times


@torch.no_grad()
def measure_acceptance(seeds: int) -> dict[str, Any]:
    """Return the fraction of accepted tokens between the quickstart's policy after 25 iterations and drafts."""
    accepted: dict[str, list[float]] = {"initial model": [], "quarter width": []}
    for seed in range(seeds):
        run = assembled({}, seed, 25)
        algorithm: Any = run.algorithm
        algorithm.set_logger(Logger(None, []))
        for iteration in range(25):
            with torch.enable_grad():
                algorithm.learn_iteration(iteration, 25)

        # Responses of the last rollout [n, length]; the prompts are padded on the left, the responses on the right.
        episodes = algorithm.rollout_buffer.episodes
        ids = torch.cat([episodes.prompt_ids, episodes.response_ids], dim=1)
        mask = torch.cat([episodes.prompt_mask, episodes.response_mask], dim=1)
        drafts = {"initial model": initial_model(seed), "quarter width": critic_folder("quarter width", seed)}
        policy_probs = _response_probs(run.policy.policy_model, ids, mask, episodes)
        for name, folder in drafts.items():
            draft_probs = _response_probs(AutoModelForCausalLM.from_pretrained(folder).eval(), ids, mask, episodes)
            accepted[name].append(float(torch.minimum(policy_probs, draft_probs).sum(dim=-1).mean()))
        print(f"seed {seed}: { ({name: round(values[-1], 3) for name, values in accepted.items()}) }", flush=True)
    return accepted


def _response_probs(model: Any, ids: Tensor, mask: Tensor, episodes: Any) -> Tensor:
    """Return the distributions at all response tokens `[n_tokens, vocab]`."""
    positions = (mask.long().cumsum(dim=1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions).logits
    before_responses = logits[:, episodes.prompt_ids.shape[1] - 1 : -1]
    probs: Tensor = before_responses[episodes.response_mask].softmax(dim=-1)
    return probs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("fused", "tokens", "acceptance"))
    parser.add_argument("model", type=Path, nargs="?", help="folder of SmolLM2-135M, made by benchmarks.real_model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=2, help="of `acceptance`")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.model is None and options.part != "acceptance":
        parser.error(f"{options.part} needs the folder of the model")
    torch.set_num_threads(1)

    if options.part == "fused":
        results = measure_fused(options.model, options.rounds)
    elif options.part == "tokens":
        results = measure_tokens(options.model, options.rounds)
    else:
        results = measure_acceptance(options.seeds)
    kept = json.loads(options.output.read_text()) if options.output.exists() else {"machine": machine()}
    kept[options.part] = results
    options.output.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
