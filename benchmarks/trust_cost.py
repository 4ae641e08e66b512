"""What watching and saving cost: shares of an iteration's time at the 12-layer shape (GPT-2 small's size, PPO).

    python -m benchmarks.trust_cost                  # two iterations, about four minutes on one thread
    python -m benchmarks.trust_cost --quick          # tiny work: does everything run?

    doctor, token credit     what each callback takes for an iteration, its state included
    places                   what remembering a place to go on from takes, after each step and each iteration
    checkpoint               a whole one, on the disk: weights, optimizer, model; once in `save_every` iterations

Every iteration is followed by a checkpoint. Shares are of the iteration's time and of that of what is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import random_model, workload
from benchmarks.workload import SHAPES, Shape, quick

RESULTS = Path(__file__).parent / "results" / "trust_cost.json"
SAVE_EVERY = (20, 1)


class Clock:
    """Seconds by name; of calls within each other only the outermost counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._depth = 0

    def on(self, owner: Any, method: str, name: str) -> None:
        """From now on the calls of one object's method are timed."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, self._depth = time.perf_counter(), self._depth + 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds[name].append(time.perf_counter() - start)

        setattr(owner, method, timed)


def config_of(shape: Shape, model: Path, n_iters: int, threads: int) -> dict[str, Any]:
    """A run of that shape which saves after every iteration."""
    prompt = " ".join(str(number) for number in range(shape.prompt_len))
    generation = {"do_sample": True, "top_k": 0, "max_new_tokens": shape.response_len}
    lengths = {"max_prompt_length": shape.prompt_len, "max_episode_length": shape.response_len}
    return {
        "tokenizer": {"model_name": str(model)},
        "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": shape.response_len}},
        "datapool": {"id": "dummy_pool", "args": {"prompt": prompt, "n_samples": shape.episodes}},
        "env": {"n_envs": shape.episodes, "args": {**lengths, "terminate_on_eos": False}},
        "alg": {
            "id": "ppo",
            "args": {
                "n_steps": shape.response_len,
                "batch_size": shape.minibatch * shape.response_len,
                "n_epochs": shape.n_epochs,
                "learning_rate": workload.LEARNING_RATE,
            },
            "kl_div": {"coeff": workload.KL_COEF},
            "policy": {
                "id": "causal_lm_actor_critic_policy",
                "args": {"model_name": str(model), "generation_kwargs": generation},
            },
        },
        "train_evaluation": {
            "eval_batch_size": 1,
            "n_iters": n_iters,
            "eval_every": n_iters,
            "save_every": 1,
            "max_eval_samples": 1,
        },
        "device": "cpu",
        "n_threads": threads,
    }


def measure(shape: Shape, n_iters: int, threads: int, folder: Path) -> dict[str, Any]:
    """Runs it; medians of seconds by part, and their shares of an iteration."""
    from rl4lms_like.config.load import parse_config
    from rl4lms_like.on_policy.assemble import assemble
    from rl4lms_like.on_policy.trainer import OnPolicyTrainer
    from rl4lms_like.tracking.base import Tracker

    random_model.main(
        [
            str(folder / "model"),
            f"--layers={shape.n_layer}",
            f"--width={shape.n_embd}",
            f"--vocabulary={shape.vocab_size}",
        ]
    )
    run: Any = assemble(parse_config(config_of(shape, folder / "model", n_iters, threads)))  # type: ignore[arg-type]
    clock = Clock()
    with Tracker(folder, run.config.to_dict(), "benchmarks", "trust_cost") as tracker:
        trainer = OnPolicyTrainer(run, tracker)
        clock.on(trainer, "checkpoint", "checkpoint")
        for name, callback in trainer.callbacks.items():
            clock.on(callback, "saw_iteration", name)
            clock.on(callback, "state_dict", f"{name} state")
        clock.on(trainer.resume_point, "mark", "places")
        clock.on(trainer.resume_point, "mark_in_update", "places")
        trainer.train_and_eval()
    rollouts = (tracker.run_path / "rollout_info.jsonl").read_text().splitlines()
    iteration = statistics.median(json.loads(line)["time/iteration_s"] for line in rollouts)
    each = {name: sum(seconds) / n_iters for name, seconds in clock.seconds.items() if name != "checkpoint"}
    checkpoint = statistics.median(clock.seconds["checkpoint"])
    shares = {name: seconds / (iteration + seconds) for name, seconds in each.items()}
    for every in SAVE_EVERY:
        shares[f"checkpoint, save_every {every}"] = checkpoint / (every * iteration + checkpoint)
    newest = tracker.run_path / "checkpoints" / f"iteration_{n_iters:05d}"
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    together = shares["doctor"] + shares[f"checkpoint, save_every {SAVE_EVERY[0]}"]
    return {
        "iteration_s": iteration,
        "checkpoint_s": checkpoint,
        "checkpoint_mib": size / 2**20,
        "seconds_each_iteration": each,
        "shares": shares,
        "doctor_and_checkpoints_together": together,
        "calls": {name: [round(second, 6) for second in seconds] for name, seconds in clock.seconds.items()},
    }


def main() -> None:
    """Measures, prints the shares, writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=2, help="each with a checkpoint (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny work; nothing is written")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    shape = quick(SHAPES["iii"]) if options.quick else SHAPES["iii"]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(shape, options.iterations, options.threads, Path(folder))
    for name, fraction in found["shares"].items():
        print(f"{name:28} {fraction:8.3%}")
    print(f"{'together, save_every 20':28} {found['doctor_and_checkpoints_together']:8.3%}   target: under 3 %")
    if not options.quick:
        document = {"date": date.today().isoformat(), "threads": options.threads, "shape": vars(shape), **found}
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
