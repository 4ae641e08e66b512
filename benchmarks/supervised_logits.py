"""Peak memory and time of the supervised loss and its gradient, with whole logits and within `alg.logits_budget_mb`.

    python -m benchmarks.supervised_logits             # 2 tasks x 2 budgets; about 3 minutes
    python -m benchmarks.supervised_logits --quick     # one tiny task, nothing written

    texts        all tokens of a text are learned
    references   prompts of three quarters of the tokens, of which nothing is learned

Both are of loss and gradient of one batch. The peak is the high-water mark in /proc/self/status of a process of its own
for each number, above that with the model loaded. The time is in CPU seconds of one thread, the median of rounds in
which all budgets take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ppo_iteration import RESULTS, machine
from benchmarks.systems.worker import peak_mb
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import SupervisedConfig
from rl4lms_like.offline.assemble_supervised import SupervisedRun, assemble_supervised
from rl4lms_like.testing.models import make_word_tokenizer, save_model

MIB = 2**20
SIZES = {"vocabulary": 49152, "width": 256, "batch": 8, "length": 256}
QUICK = {"vocabulary": 8192, "width": 32, "batch": 64, "length": 64}
TASKS = ("texts", "references")
BUDGETS = (None, 64)
ROUNDS = 3


def make_model(folder: Path, sizes: dict[str, int]) -> None:
    """Save a random Llama of two layers, and a tokenizer whose tokens are numbers."""
    tokenizer = make_word_tokenizer(str(number) for number in range(sizes["vocabulary"] - 3))
    config = LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["width"],
        intermediate_size=2 * sizes["width"],
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2 * sizes["length"],
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    save_model(folder, LlamaForCausalLM(config), tokenizer)


def n_learned(task: str, sizes: dict[str, int]) -> int:
    """Return the number of learned tokens of an example, with its end."""
    return sizes["length"] if task == "texts" else sizes["length"] // 4


def make_data(file: Path, task: str, sizes: dict[str, int]) -> None:
    """Write examples of one length in tokens; some of them are for evaluations, and more than a batch for training."""
    numbers = torch.randint(0, sizes["vocabulary"] - 3, (2 * sizes["batch"], sizes["length"] - 1))
    rows = []
    for example in numbers.tolist():
        words = [str(number) for number in example]
        n_prompt = sizes["length"] - n_learned(task, sizes)
        prompt = " ".join(words[:n_prompt])
        reference = " ".join(words[n_prompt:])
        rows.append({"text": reference} if task == "texts" else {"prompt": prompt, "completion": reference})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(folder: Path, task: str, batch_size: int, **alg: Any) -> dict[str, Any]:
    """Return the config of a supervised run that evaluates and saves nothing; for other benchmarks, too.

    Args:
        folder: folder with the model, and a file of examples for each task.
        task: name of the file.
        batch_size: examples of a step.
        alg: further keys of the block `alg`.
    """
    return {
        "tokenizer": {"model_name": str(folder / "model")},
        "datapool": {"id": "jsonl", "args": {"path": str(folder / f"{task}.jsonl")}},
        "alg": {
            "id": "supervised",
            "model_type": "causal",
            "model_name": str(folder / "model"),
            "generation_kwargs": {"max_new_tokens": 1},
            "training_args": {
                "per_device_train_batch_size": batch_size,
                "eval_strategy": "no",
                "save_strategy": "no",
            },
            **alg,
        },
        "train_evaluation": {"eval_batch_size": 1, "generate": False, "save_model": False},
        "n_threads": 1,
        "device": "cpu",
    }


def assembled(config: dict[str, Any]) -> SupervisedRun:
    """Return the run of a config."""
    parsed = parse_config(config)
    assert isinstance(parsed, SupervisedConfig)
    return assemble_supervised(parsed)


def first_batches(run: SupervisedRun, n_batches: int) -> list[Any]:
    """Return the first batches of a run."""
    batch_size = run.config.alg.training_args["per_device_train_batch_size"]
    rows = run.examples["train"].rows
    return [run.objective.collate(rows[n * batch_size : (n + 1) * batch_size]) for n in range(n_batches)]


def peak(config: dict[str, Any]) -> dict[str, float]:
    """Return the memory that loss and gradient of a batch need, above that of the loaded model, in MiB."""
    run = assembled(config)
    [batch] = first_batches(run, 1)
    before = peak_mb()
    loss = run.objective.loss(run.model, batch)
    loss.backward()
    return {"peak_mib": peak_mb() - before, "loss": float(loss.detach())}


def times(config: dict[str, Any]) -> dict[str, float]:
    """Return the CPU seconds of loss and gradient of a batch, by budget."""
    run = assembled(config)
    [batch] = first_batches(run, 1)
    objective: Any = run.objective
    seconds: dict[str, list[float]] = {str(budget): [] for budget in BUDGETS}
    for _ in range(ROUNDS):
        for budget in BUDGETS:
            objective.logits_budget = None if budget is None else int(budget * MIB / 4)
            start = time.process_time()
            objective.loss(run.model, batch).backward()
            seconds[str(budget)].append(time.process_time() - start)
            run.model.zero_grad()
    return {budget: statistics.median(measured) for budget, measured in seconds.items()}


def measured(job: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.supervised_logits", "--process", json.dumps(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if process.returncode:
        raise RuntimeError(process.stderr[-3000:])
    return dict(json.loads(process.stdout.splitlines()[-1]))


def main() -> None:
    """Measure all budgets, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one tiny task, nothing written")
    parser.add_argument("--process", metavar="JOB", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        job = json.loads(arguments.process)
        print(json.dumps((peak if job["what"] == "peak" else times)(job["config"])))
        return

    sizes = QUICK if arguments.quick else SIZES
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", sizes)
        for task in TASKS[:1] if arguments.quick else TASKS:
            make_data(folder / f"{task}.jsonl", task, sizes)
            seconds = measured({"what": "times", "config": config_of(folder, task, sizes["batch"])})
            for budget in BUDGETS:
                config = config_of(folder, task, sizes["batch"], logits_budget_mb=budget)
                row: dict[str, Any] = {"task": task, "budget_mb": budget, "cpu_s": seconds[str(budget)]}
                row |= measured({"what": "peak", "config": config})
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)

    table = Table("task", "logits_budget_mb", "peak above the model, MiB", "CPU s", "loss")
    for row in rows:
        numbers = (f"{row['peak_mib']:.0f}", f"{row['cpu_s']:.2f}", f"{row['loss']:.6f}")
        table.add_row(row["task"], str(row["budget_mb"]), *numbers)
    Console().print(table)
    if not arguments.quick:
        results = {"date": date.today().isoformat(), "machine": machine(), "sizes": sizes, "rows": rows}
        (RESULTS / "supervised_logits.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
