"""Benchmarks of tiny runs, real ones and such that only look finished."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from rl4lms_like.benchmarking.jobs import Result, jobs_of, prepare_folder, write_result
from rl4lms_like.config.yaml_file import dump_yaml

RUN = {
    "tokenizer": {"model_name": "no-such-owner/gpt2"},
    "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": 8}},
    "datapool": {"id": "dummy_pool", "args": {"prompt": "Count with me:", "n_samples": 6}},
    "env": {"n_envs": 4, "args": {"max_prompt_length": 16, "max_episode_length": 8, "terminate_on_eos": True}},
    "alg": {
        "id": "ppo",
        "args": {"n_steps": 8, "batch_size": 16, "n_epochs": 1, "learning_rate": 1e-3},
        "kl_div": {"coeff": 0.01, "target_kl": 0.2},
        "policy": {
            "id": "causal_lm_actor_critic_policy",
            "args": {
                "model_name": "no-such-owner/gpt2",
                "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 8},
            },
        },
    },
    "train_evaluation": {"eval_batch_size": 4, "n_iters": 2, "eval_every": 1, "metrics": [{"id": "length"}]},
}


def write_spec(folder: Path, *, model: Path | None = None, **keys) -> Path:
    """A spec beside its config `ppo.yml`; relative results, so that a test never writes elsewhere."""
    run = copy.deepcopy(RUN)
    if model is not None:
        run["tokenizer"]["model_name"] = run["alg"]["policy"]["args"]["model_name"] = str(model)
    (folder / "ppo.yml").write_text(dump_yaml(run))
    keys = {"config": "ppo.yml", "runs": {"ppo": {}}, "seeds": 2, "results": "out", **keys}
    path = folder / "spec.yml"
    path.write_text(dump_yaml(keys))
    return path


def finish(job, score=0.5, tokens=(30, 70), rewards=(0.1, 0.2)) -> None:
    """Makes a job look done, with the two iterations that it would have logged."""
    prepare_folder(job)
    (job.folder / "config.json").write_text(json.dumps(job.config))
    lines = [
        {"iteration": i, "timesteps": n, "rollout_info/ep_rew": reward, "time/iteration_s": 2.0}
        for i, (n, reward) in enumerate(zip(tokens, rewards, strict=True), start=1)
    ]
    (job.folder / "rollout_info.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = [{"epoch": epoch, "metrics": {"length/words": score}} for epoch in (0, 2)]
    (job.folder / "val_split_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    result = Result(
        label=job.label,
        seed=job.seed,
        scores={"test:length/words": score, "val:length/words": score},
        iterations=2,
        tokens=tokens[-1],
        seconds=12.0,
        peak_memory_mb=400.0,
        peak_gpu_memory_mb=None,
        model_mb=0.2,
        versions={"python": "3.12.1"},
    )
    write_result(job.folder, result)


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A benchmark of two labels and four seeds that is done: `ppo` scores 1, 2, 3, 4 and `slow` 0, 1, 2, 3."""
    from rl4lms_like.benchmarking.spec import load_benchmark

    runs = {"ppo": {}, "slow": {"set": {"alg.args.learning_rate": 1e-5}}}
    spec = write_spec(tmp_path, runs=runs, seeds=4)
    for job in jobs_of(load_benchmark(spec)):
        score = float(job.seed + (job.label == "ppo"))
        finish(job, score, tokens=(30, 70 + job.seed), rewards=(0.1, score))
    return spec
