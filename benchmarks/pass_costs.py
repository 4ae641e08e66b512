"""Measures what fused layers and speculative decoding could save: CPU seconds of one thread.

    python -m benchmarks.pass_costs fused benchmarks/.models/smollm2      RMSNorm and SwiGLU as one function each
    python -m benchmarks.pass_costs tokens benchmarks/.models/smollm2     passes of k tokens next to one of 1 token
    python -m benchmarks.pass_costs acceptance                            tokens of a draft that a policy accepts

`fused` measures the layers of SmolLM2-135M alone, transformers' next to the fused ones in short turns, with the numbers
of rows that an iteration of `benchmarks.grpo_real` has, and multiplies the differences by the numbers of calls.

`tokens` measures decoding passes of SmolLM2-135M over k new tokens for each row of a batch.

`acceptance` trains the quickstart's policy and compares its distribution with that of a draft at each token of its own
responses: speculative sampling (arXiv 2211.17192) accepts a token with the probability sum_a min(p(a), q(a)).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from stable_baselines3.common.logger import Logger
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.fewer_passes import assembled, critic_folder, initial_model
from benchmarks.grpo_real import LORA, SHAPE
from benchmarks.ppo_iteration import machine

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


@contextmanager
def fused(model: nn.Module) -> Iterator[None]:
    """Replace the forward of a Llama's norms and MLPs within the block."""
    changed = []
    for module in model.modules():
        forward = {"LlamaRMSNorm": _fused_norm, "LlamaMLP": _fused_mlp}.get(type(module).__name__)
        if forward is not None:
            module.forward = partial(forward, module)
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward  # the instance's; that of the class is in use again


PROMPTS = 4
ROWS = {"decode": SHAPE.episodes, "pass": PROMPTS * SHAPE.prompt_len + SHAPE.episodes * SHAPE.response_len}
"""Rows of a decoding step, and of a pass over an iteration's tokens, where a prompt is computed once."""
N_PASSES = {"decode": SHAPE.response_len, "score": 2, "update": 1}
"""In an iteration: steps of generation, passes for old log-probs and for the reference, forward and backward passes."""


def cpu_seconds(part: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call."""
    start = time.process_time()
    part()
    return time.process_time() - start


def measure_fused(model: Path, rounds: int) -> dict[str, Any]:
    """Return the times of single layers, what fused ones save in an iteration, and the differences in numbers."""
    network: Any = AutoModelForCausalLM.from_pretrained(model)
    network.requires_grad_(False)
    network.add_adapter(LoraConfig(**LORA))
    first: Any = network.model.layers[0]
    norm, activation = first.input_layernorm, first.mlp.act_fn
    width, inner = network.config.hidden_size, network.config.intermediate_size
    n_layers = network.config.num_hidden_layers

    # Name -> number in the model, width of the inputs, number of inputs, transformers' function, the fused one.
    layers: dict[str, tuple[int, int, int, Any, Any]] = {
        "RMSNorm": (2 * n_layers + 1, width, 1, norm.forward, partial(_fused_norm, norm)),
        "SwiGLU": (n_layers, inner, 2, lambda gate, up: activation(gate) * up, SwiGLU.apply),
    }
    times: dict[str, Any] = {}
    saved_s = dict.fromkeys(layers, 0.0)
    for name, (n_calls, input_width, n_inputs, plain, replacement) in layers.items():
        for kind, n_passes in N_PASSES.items():
            rows = ROWS["decode" if kind == "decode" else "pass"]
            inputs = [torch.randn(rows, input_width, requires_grad=True) for _ in range(n_inputs)]
            grad = torch.randn(rows, input_width)
            columns: dict[str, list[float]] = {"transformers": [], "fused": []}
            for _ in range(rounds):
                for column, function in (("transformers", plain), ("fused", replacement)):
                    run = partial(_run, function, inputs, grad if kind == "update" else None)
                    columns[column].append(cpu_seconds(run))
            pairs = zip(columns["transformers"], columns["fused"], strict=True)
            saved_s[name] += n_passes * n_calls * statistics.median(before - after for before, after in pairs)
            milliseconds = {column: 1000 * statistics.median(values) for column, values in columns.items()}
            times[f"{name}, {kind}"] = {"rows": rows, "calls": n_passes * n_calls, "ms": milliseconds}
            print(f"{name}, {kind}: {milliseconds}", flush=True)

    iteration_s = json.loads((RESULTS.parent / "grpo_real.json").read_text())["summary"]["ours_grpo"]["cpu_s"]
    shares = {name: seconds / iteration_s for name, seconds in saved_s.items()}
    print(f"saved: {saved_s}, of an iteration: {shares}")
    return {"times": times, "saved_s": saved_s, "iteration_s": iteration_s, "saved_fraction": shares} | _exactness(
        network
    )


def _run(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor | None) -> None:
    """Run a layer once; with the gradient of its output also backward."""
    with torch.set_grad_enabled(grad is not None):
        output = function(*inputs)
    if grad is not None:
        torch.autograd.grad(output, inputs, grad)


def _exactness(network: Any) -> dict[str, float]:
    """Return the largest difference of log-probs in nats, and the relative one of the gradient of their mean."""
    ids = torch.randint(1000, 40000, (4, 78), generator=torch.Generator().manual_seed(0))
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    for weight in trained:  # PEFT's B is 0, so that A has no gradient
        nn.init.normal_(weight, std=0.02)
    numbers = []
    for layers_of_pass in (nullcontext(), fused(network)):
        with layers_of_pass:
            logits = network(input_ids=ids).logits[:, :-1]
        log_prob = logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None])
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(log_prob.mean(), trained)])
        numbers.append((log_prob.detach(), gradient))
    (log_prob, gradient), (fused_log_prob, fused_gradient) = numbers
    differences = {
        "log_prob_difference": float((fused_log_prob - log_prob).abs().max()),
        "gradient_difference": float((fused_gradient - gradient).norm() / gradient.norm()),
    }
    print(differences)
    return differences


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
                cache.crop(-k)
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
    parser.add_argument("--rounds", type=int, default=5, help="of `fused` and `tokens` (%(default)s)")
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
