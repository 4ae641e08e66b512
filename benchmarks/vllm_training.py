"""PPO and GRPO with a vLLM server, and servers with wrong weights.

    python -m benchmarks.vllm_training

Trains a tiny GPT-2 (tied weights), the same with adapters, and a tiny Llama against servers that it starts
(`benchmarks.vllm_server`), all in float32. The largest difference of log-probs must stay below 1e-5. Afterwards a
synchronisation is skipped and another model is served; both must be reported as errors.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gymnasium import spaces

from benchmarks.vllm_server import REQUIREMENTS, served
from rl4lms_like.config.load import parse_config
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import EngineError
from rl4lms_like.testing.models import make_causal_lm, make_tokenizer, save_model

RESULTS = Path(__file__).parent / "results" / "vllm_training.json"
LIMIT = 1e-5
ITERATIONS = 12
SAMPLING = {"do_sample": True, "top_k": 0, "max_new_tokens": 10}
RUNS = [
    ("gpt2", "ppo", {}),
    ("gpt2", "grpo", {}),
    ("llama", "ppo", {}),
    ("llama", "grpo", {"peft": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}),
]
"""Family, algorithm, and arguments of the policy."""


class LowTokens(RewardFunction):
    """A tenth of a point for each token with a small id."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:  # type: ignore[no-untyped-def]
        """Return the reward of one token."""
        return 0.1 * float(action < 30)


def config_of(model: Path, url: str, weights_dir: Path, id: str, policy: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a run."""
    rate = 1e-2 if policy else 3e-3  # adapters need a higher one
    args: dict[str, Any] = {"n_steps": 20, "batch_size": 160, "learning_rate": rate, "importance_correction": "tis"}
    args |= {"n_epochs": 4} if id == "ppo" else {"group_size": 8, "n_epochs": 2}
    engine = {"id": "vllm", "args": {"url": url, "weights_dir": str(weights_dir), "max_gap": LIMIT}}
    of_policy = {"model_name": str(model), "generation_kwargs": SAMPLING, "engine": engine, **policy}
    return {
        "tokenizer": {"model_name": str(model)},
        "reward_fn": {"id": "benchmarks.vllm_training:LowTokens"},
        "datapool": {"id": "dummy_pool", "args": {"prompt": "Count with me:", "n_samples": 16}},
        "env": {"n_envs": 32, "args": {"max_prompt_length": 16, "max_episode_length": 10, "terminate_on_eos": True}},
        "alg": {
            "id": id,
            "args": args,
            "kl_div": {"coeff": 0.0},
            "policy": {"id": "causal_lm_actor_critic_policy", "args": of_policy},
        },
        "train_evaluation": {
            "n_iters": ITERATIONS,
            "eval_batch_size": 16,
            "eval_every": 100,
            "save_model": False,
            "metrics": [{"id": "length"}],
        },
    }


def trained(model: Path, url: str, folder: Path, id: str, policy: dict[str, Any]) -> dict[str, Any]:
    """Run an experiment and return its figures."""
    start = time.perf_counter()
    config = parse_config(config_of(model, url, folder / "weights", id, policy))
    run = train_config(config, base_path_to_store_results=folder, experiment_name="run", quiet=True)
    lines = [json.loads(line) for line in (run / "rollout_info.jsonl").read_text().splitlines()]
    gap, sync = "rollout_info/engine/max_gap", "rollout_info/engine/sync_s"
    return {
        "model": f"{model.name}{' with adapters' if policy else ''}",
        "algorithm": id,
        "largest gap": max(line[gap] for line in lines),
        "mean gap": sum(line["rollout_info/engine/mean_gap"] for line in lines) / len(lines),
        "sync_s, median": median(line[sync] for line in lines[1:]),  # the first includes the server's first request
        "reward before": lines[0]["rollout_info/ep_rew"],
        "reward after": lines[-1]["rollout_info/ep_rew"],
        "generate_s, median": median(line["time/generate_s"] for line in lines),
        "seconds": time.perf_counter() - start,
    }


def error_with(model: Path, engine: dict[str, Any], *, skips: bool) -> str:
    """Return the error of a policy whose engine has other weights; empty if there is none."""
    vocabulary = spaces.Discrete(make_causal_lm("gpt2", make_tokenizer()).config.vocab_size)
    policy = CausalLMActorCriticPolicy(
        *(spaces.Dict({}), vocabulary, lambda _: 1e-3),
        use_reference=False,
        model_name=str(model),
        critic="none",
        generation_kwargs=SAMPLING,
        engine={"id": "vllm", "args": engine},
    )
    prompts = torch.randint(2, 250, (8, 5), generator=torch.Generator().manual_seed(0))

    def generate() -> None:
        policy.generate(prompts, torch.ones_like(prompts), eos_token_ids=[1], seed=0, record_log_prob=True)

    try:
        generate()
        if skips:
            post = policy.engine.external._post  # type: ignore[attr-defined]
            policy.engine.external._post = lambda path, body=None: path == "/collective_rpc" or post(path, body)  # type: ignore[attr-defined]
            with torch.no_grad():
                for weight in policy.model.parameters():
                    weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            generate()
    except EngineError as error:
        return str(error)
    return ""


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Train, and write the figures."""
    os.environ.setdefault("RL4LMS_LIKE_CODE", str(Path(__file__).parents[1]))
    torch.set_num_threads(1)
    rows, errors = [], {}
    with tempfile.TemporaryDirectory() as place, open(Path(place) / "server.log", "wb") as log:
        folder, tokenizer = Path(place), make_tokenizer()
        for family in ("gpt2", "llama"):  # heads of 32: vLLM's attention on a CPU has none of 8
            model = make_causal_lm(family, tokenizer, hidden_size=128, scale=3.0)
            save_model(folder / family, model, tokenizer)
        for family, other in (("gpt2", "llama"), ("llama", "gpt2")):
            with served(folder / family, free_port(), log, more=("--max-model-len", "128")) as url:
                for number, (of, id, policy) in enumerate(RUNS):
                    if of == family:
                        rows.append(trained(folder / of, url, folder / str(number), id, policy))
                        print(json.dumps(rows[-1], indent=1), flush=True)
                args = {"url": url, "weights_dir": str(folder / f"weights_{family}"), "retries": 0}
                errors[f"skipped synchronisation, {family}"] = error_with(folder / family, args, skips=True)
                wrong = {**args, "weights_dir": str(folder / f"weights_wrong_{family}")}
                errors[f"{other} on a server of {family}"] = error_with(folder / other, wrong, skips=False)
    errors = {name: error.replace(place, "DIR").split(" (")[0] for name, error in errors.items()}
    print(json.dumps(errors, indent=1))
    found = {"server": REQUIREMENTS[0], "torch": version("torch"), "limit": LIMIT, "runs": rows, "errors": errors}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    assert all(row["largest gap"] < LIMIT for row in rows), "the log-probs differ"
    assert all(row["reward after"] > row["reward before"] for row in rows), "the reward did not rise"
    assert all(errors.values()), "wrong weights were not detected"


if __name__ == "__main__":
    main()
