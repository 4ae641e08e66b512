"""Rewards on a game of TextArena and with a class for TRL's `environment_factory`, each trained from a YAML file.

    python -m benchmarks.adapted_environments                 # both; needs the extra `textarena`
    python -m benchmarks.adapted_environments --only trl

TextArena's game is `GuessTheNumber-v0` with a number from 1 to 7 and three guesses. The class is `CounterEnv`, whose
tool `add` brings a counter to the number in the prompt. A tiny GPT-2 first learns the turns of a scripted player, half
of which are random. PPO (TextArena) and GRPO (TRL) then start from that model. The reward is that of the 256 episodes
of `test`, at most 1.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4lms_like import ENVIRONMENTS
from rl4lms_like.config.load import load_config
from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.sample import Message, Sample
from rl4lms_like.core.turns import Answer
from rl4lms_like.run import train_config
from rl4lms_like.small_models.embedded import TinyModelConfig
from rl4lms_like.small_models.warm_start import make_tokenizer, train_and_save

RESULTS = Path(__file__).parent / "results" / "adapted_environments.json"
HIGH = 7
N_PLAYED = 1500
"""Episodes of the scripted player."""
N_POSITIONS = 450
"""Tokens of a first text and an episode."""
SEED_OF_PLAYER = 10**6

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:\n{{ message.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)

RUN = """\
tokenizer: {{model_name: {model}, chat_template: true, tools_in_system: {has_tools}}}
env:
  n_envs: 128
  args: {{max_prompt_length: 250, max_episode_length: 160, terminate_on_eos: true}}
  dialogue: {dialogue}
datapool: {datapool}
alg:
  id: {algorithm}
  args: {arguments}
  kl_div: {{coeff: 0}}
  policy:
    id: causal_lm_actor_critic_policy
    args: {{model_name: {model}, generation_kwargs: {{do_sample: true, top_k: 0}}}}
train_evaluation: {{eval_batch_size: 128, n_iters: {n_iters}, eval_every: {n_iters}, save_every: {n_iters}}}
seed: {seed}
device: cpu
n_threads: 1
"""


PPO = {
    "n_episodes": 128,
    "minibatch_episodes": 32,
    "n_epochs": 4,
    "learning_rate": 3e-4,
    "critic_learning_rate": 1e-3,
    "gamma": 1.0,
    "normalize_advantage": "rollout",
}
GRPO = {
    "n_episodes": 128,
    "group_size": 8,
    "minibatch_episodes": 64,
    "n_epochs": 2,
    "scale": "batch",
    "learning_rate": 3e-4,
}


class CounterEnv:
    """Environment as TRL's documentation writes them: `reset`, tools, `get_reward`."""

    def reset(self, target: int, **kwargs: Any) -> None:
        self.target = target
        self.value = 0

    def add(self, amount: int) -> int:
        """Add to the counter.

        Args:
            amount: how much is added.

        Returns:
            The value of the counter.
        """
        self.value += amount
        return self.value

    def get_reward(self) -> float:
        return float(self.value == self.target)


class Guesser:
    """Scripted player of the guessing game, who ignores the hints in half of the guesses."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lowest = 1
        self.highest = HIGH
        self.guess = 0

    def next_turn(self, text: str) -> str:
        """Return a guess after the last text of the game."""
        if "higher" in text:
            self.lowest = min(max(self.lowest, self.guess + 1), self.highest)
        elif "lower" in text:
            self.highest = max(min(self.highest, self.guess - 1), self.lowest)

        # A number that is possible after the hints, or any number that was not the last one.
        if self.rng.random() < 0.5:
            self.guess = self.rng.choice([number for number in range(1, HIGH + 1) if number != self.guess])
        else:
            self.guess = self.rng.randint(self.lowest, self.highest)
        return f"[{self.guess}]"


class Counter:
    """Scripted player of the counter, who adds a random amount in half of the episodes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def next_turn(self, text: str) -> str:
        """Return a call after the question, and a final answer after its result."""
        if not text.startswith("Count to"):
            return "done"
        is_right = self.rng.random() < 0.5
        amount = int(text.split()[-1].rstrip(".")) if is_right else self.rng.randint(1, HIGH)
        return f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'amount': amount}})}</tool_call>"


@dataclass(frozen=True)
class Task:
    """Environment and scripted player.

    Args:
        dialogue: block `env.dialogue` of the run.
        player: class of the player.
        has_tools: whether the environment has tools. Then its target is a column of a file.
        algorithm: `ppo` or `grpo`.
        arguments: of the algorithm.
        n_iters: number of iterations.
    """

    dialogue: dict[str, Any]
    player: type[Guesser] | type[Counter]
    has_tools: bool
    algorithm: str
    arguments: dict[str, Any]
    n_iters: int

    def datapool(self, folder: Path) -> dict[str, Any]:
        """Return the block `datapool`."""
        if not self.has_tools:
            return {"id": "episodes", "args": {"eval_episodes": 256}}
        file = folder / "targets.jsonl"
        rows = [{"prompt": question(i), "target": target(i)} for i in range(256)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {split: str(file) for split in ("train", "val", "test")}
        return {"id": "jsonl", "args": {"data_files": files, "prompt_column": "prompt", "meta_columns": ["target"]}}

    def played_turns(self) -> list[tuple[str, str]]:
        """Return pairs of the rendered text before a turn of the scripted player, and the turn."""
        env = ENVIRONMENTS.get(self.dialogue["id"], self.dialogue["args"])
        tokenizer = make_tokenizer([])
        tokenizer.chat_template = TEMPLATE
        template = ChatTemplate(tokenizer, tools_in_system=self.has_tools)
        rng = random.Random(0)
        pairs = []
        for number in range(N_PLAYED):
            player = self.player(rng)
            sample = Sample(str(number), question(number), meta_data={"target": target(number)})
            first, reset_info = env.reset(seed=SEED_OF_PLAYER + number, options={"sample": sample})
            messages = as_messages(first)
            is_over = False
            while not is_over:
                turn = player.next_turn(messages[-1]["content"])
                prompt = Sample.of_messages("", messages, tools=reset_info.get("tools"))
                pairs.append((template.with_rendered_prompt(prompt).rendered_prompt or "", turn))
                answer, _, is_over, _, _ = env.step(turn)
                messages += [{"role": "assistant", "content": turn}, *as_messages(answer)]
        return pairs


def question(number: int) -> str:
    """Return the prompt of a sample."""
    return f"Count to {target(number)}."


def target(number: int) -> int:
    """Return the target of a sample."""
    return 1 + number % HIGH


def as_messages(text: Answer) -> list[Message]:
    """Return what an environment returned as messages."""
    return [{"role": "user", "content": text}] if isinstance(text, str) else list(text)


TASKS = {
    "textarena": Task(
        {
            "id": "textarena",
            "args": {"game": "GuessTheNumber-v0", "args": {"min_number": 1, "max_number": HIGH, "max_turns": 2}},
            "max_turns": 4,
            "max_turn_length": 8,
        },
        Guesser,
        has_tools=False,
        algorithm="ppo",
        arguments=PPO,
        n_iters=30,
    ),
    "trl": Task(
        {
            "id": "trl_environment",
            "args": {"environment": "benchmarks.adapted_environments:CounterEnv"},
            "max_turns": 3,
            "max_turn_length": 24,
        },
        Counter,
        has_tools=True,
        algorithm="grpo",
        arguments=GRPO,
        n_iters=30,
    ),
}


def rewards(task: Task, folder: Path, seed: int) -> dict[str, float]:
    """Train a run, and return the mean reward on `test` before and after it."""
    # The tokens are the words that occur in the texts.
    pairs = task.played_turns()
    tokenizer = make_tokenizer([text for pair in pairs for text in pair])
    tokenizer.chat_template = TEMPLATE
    model = folder / "model"
    train_and_save(model, tokenizer, TinyModelConfig(n_positions=N_POSITIONS, steps=300, batch_size=32), pairs)

    file = folder / "run.yml"
    blocks = {
        "has_tools": task.has_tools,
        "dialogue": task.dialogue,
        "datapool": task.datapool(folder),
        "arguments": task.arguments,
    }
    values = {name: json.dumps(block) for name, block in blocks.items()}
    text = RUN.format(model=model, algorithm=task.algorithm, n_iters=task.n_iters, seed=seed, **values)
    file.write_text(text)
    run = train_config(load_config(file), base_path_to_store_results=folder, experiment_name="run")
    lines = [json.loads(line) for line in (run / "test_split_metrics.jsonl").read_text().splitlines()]
    before, after = (line["metrics"]["environment/reward"] for line in (lines[0], lines[-1]))
    return {"before": before, "after": after}


def main() -> None:
    """Train both tasks, print their rewards, and write them to `results`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=TASKS, help="one of the tasks")
    parser.add_argument("--seed", type=int, default=0, help="of the run (%(default)s)")
    options = parser.parse_args()

    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for name in [options.only] if options.only else TASKS:
        with tempfile.TemporaryDirectory() as folder:
            measured = rewards(TASKS[name], Path(folder), options.seed)
        results.setdefault(name, {})[f"seed {options.seed}"] = measured
        print(name, measured, flush=True)
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
