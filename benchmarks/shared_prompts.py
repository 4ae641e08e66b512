"""CPU time of scoring and of an epoch with prompts computed once for all of their responses, and once per response.

    python -m benchmarks.shared_prompts             # GPT-2, Llama, T5; prompts of 64 and of 256 tokens; 15 minutes
    python -m benchmarks.shared_prompts --quick     # one small round, nothing written

    separate   `prompt_rows` is None: minibatches in random order, each episode with its own prompt
    sorted     the same with `length_sorted_minibatches`
    shared     `prompt_rows` is set: the responses to a prompt are in one minibatch, which computes it once

A rollout has 8 responses of 4 to 48 tokens to each of 8 prompts. `score` computes log-probs without gradients, `train`
is one epoch of forward and backward passes. The three alternate in every round; ratios are within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from datetime import date
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ppo_iteration import RESULTS, machine
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.policies.parity import probe_episodes
from rl4lms_like.policies.teacher_forcing import CausalReader, EpisodeReader, Seq2SeqReader
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.testing import models

FAMILIES = ("gpt2", "llama", "t5")
PROMPT_LENGTHS = (64, 256)
N_PROMPTS, GROUP_SIZE, SHORTEST, LONGEST = 8, 8, 4, 48
BATCH_SIZE = 512
VOCABULARY = 2048
WAYS = ("separate", "sorted", "shared")


def make_reader(family: str, size: int, layers: int) -> EpisodeReader:
    """Return the reader of a random model, with its prompts shared."""
    tokenizer = models.make_word_tokenizer(str(number) for number in range(VOCABULARY - 3))
    reader: EpisodeReader
    if family in models.CAUSAL_FAMILIES:
        reader = CausalReader(
            models.make_causal_lm(family, tokenizer, hidden_size=size, n_layers=layers, n_positions=512)
        )
    else:
        reader = Seq2SeqReader(models.make_seq2seq_lm(family, tokenizer, hidden_size=size, n_layers=layers))
    reader.probe_head(probe_episodes(VOCABULARY, reader.prompt_side))
    reader.shares_prompts = True
    return reader


def rollout(reader: EpisodeReader, prompt_len: int, seed: int) -> EpisodeBatch:
    """Return random episodes; prompts have full length."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(N_PROMPTS).repeat_interleave(GROUP_SIZE)
    prompts = torch.randint(3, VOCABULARY, (N_PROMPTS, prompt_len), generator=generator)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (len(rows), 1), generator=generator)
    return EpisodeBatch(
        prompts[rows],
        torch.ones(len(rows), prompt_len).bool(),
        torch.randint(3, VOCABULARY, (len(rows), LONGEST), generator=generator),
        torch.arange(LONGEST) < lengths,
        torch.ones(len(rows)).bool(),
        prompt_side=reader.prompt_side,
        prompt_rows=rows,
    ).trimmed()


def measure(reader: EpisodeReader, episodes: EpisodeBatch, way: str) -> dict[str, Any]:
    """Return CPU seconds of scoring and of one epoch, the number of minibatches, log-probs and gradient."""
    if way != "shared":
        episodes = replace(episodes, prompt_rows=None)
    buffer = EpisodeBuffer(sort_by_length=way == "sorted")
    start = time.process_time()
    with torch.no_grad():
        log_prob = reader.scores(episodes, logits_budget=10**9).log_prob
    scored = time.process_time()
    buffer.add(episodes, torch.linspace(-1, 1, len(log_prob)), torch.zeros_like(log_prob), log_prob)
    buffer.compute_returns_and_advantage()
    reader.model.zero_grad()
    prepared, n_minibatches = time.process_time(), 0
    for minibatch in buffer.get(BATCH_SIZE):
        scores = reader.scores(minibatch.observations, logits_budget=10**9)
        (minibatch.advantages * scores.log_prob + 0.01 * scores.entropy).sum().backward()
        n_minibatches += 1
    end = time.process_time()
    gradient = torch.cat([p.grad.flatten() for p in reader.model.parameters() if p.grad is not None])
    return {
        "score_s": scored - start,
        "train_s": end - prepared,
        "minibatches": n_minibatches,
        "log_prob": log_prob,
        "gradient": gradient,
    }


def compare(family: str, prompt_len: int, rounds: int, size: int, layers: int) -> dict[str, Any]:
    """Return medians of the CPU seconds, ratios to those of shared prompts, and the largest differences."""
    reader = make_reader(family, size, layers)
    found: list[dict[str, dict[str, Any]]] = []
    for number in range(rounds + 1):
        episodes = rollout(reader, prompt_len, seed=number)
        found.append({way: measure(reader, episodes, way) for way in WAYS})
    row: dict[str, Any] = {"family": family, "prompt_len": prompt_len}
    differences = [
        (
            float((each["shared"]["log_prob"] - each["separate"]["log_prob"]).abs().max()),
            float(
                (each["shared"]["gradient"] - each["separate"]["gradient"]).norm() / each["shared"]["gradient"].norm()
            ),
        )
        for each in found
    ]
    row["log_prob_difference"], row["gradient_difference"] = (max(each) for each in zip(*differences, strict=True))
    for way in WAYS:
        row[f"{way}_minibatches"] = statistics.mean(each[way]["minibatches"] for each in found[1:])
    for part in ("score", "train"):
        for way in WAYS:  # the first round warms up
            row[f"{way}_{part}_s"] = statistics.median(each[way][f"{part}_s"] for each in found[1:])
        for way in WAYS[:2]:
            ratios = [each[way][f"{part}_s"] / each["shared"][f"{part}_s"] for each in found[1:]]
            row[f"{part}_{way}_by_shared"] = statistics.median(ratios)
            row[f"{part}_{way}_by_shared_range"] = [min(ratios), max(ratios)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round with a tiny model, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds, size, layers = (1, 16, 1) if arguments.quick else (arguments.rounds, 128, 4)
    table = Table("model", "prompt", "score", "train", "train, sorted", "gradient differs by")
    rows = []
    for family in FAMILIES:
        for prompt_len in PROMPT_LENGTHS:
            row = compare(family, prompt_len, rounds, size, layers)
            ratios = [f"{row[key]:.2f}" for key in ("score_separate_by_shared", "train_separate_by_shared")]
            difference = f"{row['gradient_difference']:.1e}"
            table.add_row(family, str(prompt_len), *ratios, f"{row['train_sorted_by_shared']:.2f}", difference)
            rows.append(row)
    Console(width=100).print(table)
    if not arguments.quick:
        settings = {"rounds": rounds, "group_size": GROUP_SIZE, "prompts": N_PROMPTS, "batch_size": BATCH_SIZE}
        results = {"date": date.today().isoformat(), "machine": machine(), "settings": settings, "rows": rows}
        (RESULTS / "shared_prompts.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
