"""CPU time of an iteration with dialogues of three turns, next to one with a single response of as many actions.

    python -m benchmarks.dialogue_turns             # three sizes; about ten minutes
    python -m benchmarks.dialogue_turns --quick     # to test that everything runs, nothing written

    one turn     a response of 48 tokens
    kept         3 turns of 16 tokens with answers of 16 tokens between them; keys and values are kept between turns
    read again   the same, where every turn reads the whole context

GRPO with groups of 8, the sampled tokens and optimizer steps are equal. The three take turns in one process; ratios are
within a round, medians over rounds. One thread. A dialogue reads 32 tokens more, also in the update.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.ppo_iteration import RESULTS, write
from benchmarks.systems.ours import FOREVER, GROUP_SIZE
from benchmarks.workload import KL_COEF, LEARNING_RATE, SHAPES, Shape, prompts, save_model
from rl4lms_like.algorithms.policy_gradient import GRPO
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.dialogue_vec_env import DialogueVecEnv
from rl4lms_like.envs.dialogues import DialogueSettings
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.rewards.environment import EnvironmentReward
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers
from rl4lms_like.rollouts.kl import FixedKLController

N_TURNS, TURN_LENGTH, ANSWER_LENGTH = 3, 16, 16
SIZES = {
    "small": replace(SHAPES["ii"], name="small", n_epochs=1, n_layer=2, n_embd=64, vocab_size=512),
    "medium": replace(SHAPES["ii"], name="medium", n_epochs=1),
    "large": replace(SHAPES["iv"], name="large", prompt_len=64, response_len=48, episodes=16, n_epochs=1, minibatch=8),
}
SYSTEMS = ("one turn", "kept", "read again")
PARTS = ("iteration", "rollout", "generation")


class Numbers:
    """Environment that answers with numbers; the reward of a turn is the share of numbers above their predecessor."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the prompt of the sample."""
        self.turn = 0
        return options["sample"].prompt_or_input_text, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return an answer of `ANSWER_LENGTH` words."""
        self.turn += 1
        numbers = [int(word) for word in text.split()]
        reward = sum(b > a for a, b in itertools.pairwise(numbers)) / len(numbers)
        answer = " ".join(str(self.turn + number) for number in range(ANSWER_LENGTH))
        return f" {answer} ", reward, self.turn == N_TURNS, False, {}


def make_algorithm(system: str, shape: Shape, folder: str) -> GRPO:
    """Return GRPO on the model of a folder, with one turn or with dialogues."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    samples = []
    for iteration in range(8):
        for row in prompts(shape, iteration):
            samples.append(Sample(str(len(samples)), tokenizer.decode(row)))
    arguments: dict[str, Any] = {"max_prompt_length": shape.prompt_len, "vocab_size": shape.vocab_size}

    env: TextVecEnv
    if system == "one turn":
        length = shape.response_len
        reward = RewardIncreasingNumbers(min_tokens=length)
        env = TextVecEnv(shape.episodes, tokenizer, reward, samples, max_episode_length=length, **arguments)
    else:
        length = TURN_LENGTH
        limit = N_TURNS * TURN_LENGTH + (N_TURNS - 1) * ANSWER_LENGTH
        settings = DialogueSettings("numbers", Numbers, N_TURNS, TURN_LENGTH, limit)
        env = DialogueVecEnv(shape.episodes, tokenizer, EnvironmentReward(), samples, settings=settings, **arguments)

    algorithm = GRPO(
        CausalLMActorCriticPolicy,
        env,
        policy_kwargs={
            "model_name": folder,
            "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": length},
        },
        kl_controller=FixedKLController(KL_COEF, placement="loss"),
        learning_rate=LEARNING_RATE,
        n_episodes=shape.episodes,
        minibatch_episodes=shape.minibatch,
        n_epochs=shape.n_epochs,
        group_size=GROUP_SIZE,
        device="cpu",
    )
    if system == "read again":
        algorithm.policy.new_contexts = lambda: None  # type: ignore[method-assign]
    return algorithm


def timed(owner: Any, name: str, seconds: dict[str, float], part: str) -> None:
    """Let a method add its CPU seconds to those of a part of the iteration."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[part] += time.process_time() - start

    setattr(owner, name, call)


def measure(shape: Shape, iterations: int) -> dict[str, Any]:
    """Return CPU seconds of each round's iterations, and medians with ratios to one turn."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(shape, Path(folder))
        algorithms = {system: make_algorithm(system, shape, folder) for system in SYSTEMS}

    # The iteration contains the rollout, and that the generation.
    seconds: dict[str, float] = {}
    for algorithm in algorithms.values():
        timed(algorithm, "learn_iteration", seconds, "iteration")
        timed(algorithm.collector, "collect", seconds, "rollout")
        timed(algorithm.policy, "generate", seconds, "generation")

    rounds: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for round_ in range(1 + iterations):  # the first one warms up
        for system, algorithm in algorithms.items():
            seconds.update(dict.fromkeys(PARTS, 0.0))
            algorithm.learn_iteration(round_, FOREVER)
            episodes = algorithm.rollout_buffer.episodes
            assert episodes is not None and episodes.n_tokens == shape.response_tokens
            n_observed = int(episodes.response_lengths.sum()) - episodes.n_tokens
            n_answers = 0 if system == "one turn" else (N_TURNS - 1) * shape.episodes
            assert n_observed == n_answers * ANSWER_LENGTH, n_observed
            if round_:
                rounds[system].append(dict(seconds))

    summary: dict[str, Any] = {}
    for system, mine in rounds.items():
        summary[system] = {}
        for part in PARTS:
            pairs = zip(mine, rounds["one turn"], strict=True)
            ratios = [iteration[part] / single[part] for iteration, single in pairs]
            summary[system][f"{part}_s"] = statistics.median(iteration[part] for iteration in mine)
            summary[system][f"{part}_ratio"] = statistics.median(ratios)
            summary[system][f"{part}_ratio_range"] = [min(ratios), max(ratios)]
    return {"shape": asdict(shape), "rounds": rounds, "summary": summary}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--iterations", type=int, default=5, help="of each, after one warm-up (default 5)")
    parser.add_argument("--quick", action="store_true", help="one round with a tiny model, nothing written")
    parser.set_defaults(threads=1, seed=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.quick:
        options.iterations = 1

    table = Table("size", "system", *(f"{part}, CPU s" for part in PARTS), *(f"{part} x one turn" for part in PARTS))
    results = {}
    for name in options.sizes:
        shape = SIZES[name]
        if options.quick:
            shape = replace(shape, prompt_len=8, episodes=16, minibatch=8, n_layer=1, n_embd=32)
        results[name] = measure(shape, options.iterations)
        for system, row in results[name]["summary"].items():
            times = [f"{row[f'{part}_s']:.2f}" for part in PARTS]
            table.add_row(name, system, *times, *(f"{row[f'{part}_ratio']:.2f}" for part in PARTS))
        if not options.quick:
            write(RESULTS / "dialogue_turns.json", options, {"sizes": results})
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
