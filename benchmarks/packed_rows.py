"""Time of a supervised run with padded and with packed rows, on conversations of uneven, mixed and equal lengths.

    python -m benchmarks.packed_rows             # 3 tasks x 2 kinds of rows; about 2 minutes
    python -m benchmarks.packed_rows --quick     # one tiny task, nothing written

    uneven       lengths are log-normal with a standard deviation of 1 in the logarithm, as those of chats are
    mixed        lengths are uniform between a half and all of the longest
    equal        all conversations have one length, and no rows are packed

The numbers are of loss and gradient of the same batches: CPU seconds of one thread, the median of rounds in which both
kinds of rows take turns in one process, the numbers of positions that the model reads, and the largest differences of
the loss of a batch, relative, and of its gradient, relative in norm.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ppo_iteration import RESULTS, machine
from benchmarks.supervised_logits import assembled, config_of, first_batches
from rl4lms_like.offline.assemble_supervised import SupervisedRun
from rl4lms_like.testing.models import make_causal_lm, make_tokenizer, save_model

SIZES = {"width": 192, "layers": 3, "batch": 16, "batches": 2, "median": 64, "longest": 512}
QUICK = {"width": 32, "layers": 1, "batch": 8, "batches": 1, "median": 40, "longest": 160}
TASKS = ("uneven", "mixed", "equal")
FEWEST = 24
"""Characters of the shortest conversation, without its markers."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
ROUNDS = 3


def make_model(folder: Path, sizes: Mapping[str, int]) -> None:
    """Save a random Llama with a tokenizer of bytes."""
    tokenizer = make_tokenizer()
    positions = 2 * sizes["longest"]
    model = make_causal_lm(
        "llama", tokenizer, hidden_size=sizes["width"], n_layers=sizes["layers"], n_positions=positions
    )
    save_model(folder, model, tokenizer)


def n_characters(task: str, sizes: Mapping[str, int], rng: random.Random) -> int:
    """Return the length of a conversation."""
    if task == "equal":
        return sizes["longest"] // 4
    if task == "mixed":
        return rng.randint(sizes["longest"] // 4, sizes["longest"] // 2)
    length = round(sizes["median"] * rng.lognormvariate(0, 1))
    return min(max(length, FEWEST), sizes["longest"])


def make_conversations(file: Path, task: str, sizes: Mapping[str, int]) -> None:
    """Write conversations of a user and an assistant, who write about equally much in up to three turns each."""
    rng = random.Random(0)
    rows = []

    # Half of them are for evaluations.
    for _ in range(2 * sizes["batch"] * sizes["batches"]):
        n_all = n_characters(task, sizes, rng)
        n_messages = 2 if task == "equal" else 2 * rng.randint(1, 3)
        messages = []
        for number in range(n_messages):
            text = "".join(rng.choices("QXZJKVWY", k=n_all // n_messages))
            messages.append({"role": ("user", "assistant")[number % 2], "content": text})
        rows.append({"messages": messages})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def packing_run(folder: Path, task: str, sizes: Mapping[str, int]) -> SupervisedRun:
    """Return a run that packs its rows."""
    config = config_of(folder, task, sizes["batch"], packing="auto")
    config["tokenizer"]["chat_template"] = str(folder / "template.jinja")
    return assembled(config)


@contextmanager
def counted_positions(model: Any) -> Iterator[list[int]]:
    """Collect the number of positions of each pass of a model within the block."""
    counts: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].numel()))
    try:
        yield counts
    finally:
        hook.remove()


def loss_and_gradient(run: SupervisedRun, batch: Any) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of a batch."""
    run.model.zero_grad()
    loss = run.objective.loss(run.model, batch)
    loss.backward()
    gradient = torch.cat([weight.grad.flatten() for weight in run.model.parameters() if weight.grad is not None])
    return float(loss.detach()), gradient


def compared(run: SupervisedRun, n_batches: int, rounds: int) -> dict[str, Any]:
    """Return the times of both kinds of rows, and their differences."""
    run.model.train()
    batches = first_batches(run, n_batches)
    kinds = {"padded": None, "packed": run.objective.packing}  # type: ignore[attr-defined]

    # Differences first, which also is a round without a clock.
    differences = differences_of(run, batches, kinds)
    return {
        "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
        **differences,
        **times_of(run, batches, kinds, rounds),
    }


def differences_of(run: SupervisedRun, batches: Sequence[Any], kinds: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of positions that are read with each kind of rows, and the largest relative differences."""
    objective: Any = run.objective
    positions = {f"{kind}_positions": 0 for kind in kinds}
    loss_difference = gradient_difference = 0.0
    for batch in batches:
        results = []
        for kind, objective.packing in kinds.items():
            with counted_positions(run.model) as counts:
                results.append(loss_and_gradient(run, batch))
            positions[f"{kind}_positions"] += sum(counts)

        (padded_loss, padded_gradient), (packed_loss, packed_gradient) = results
        loss_difference = max(loss_difference, abs(packed_loss / padded_loss - 1))
        distance = float((packed_gradient - padded_gradient).norm() / padded_gradient.norm())
        gradient_difference = max(gradient_difference, distance)
    return {**positions, "loss_difference": loss_difference, "gradient_difference": gradient_difference}


def times_of(run: SupervisedRun, batches: Sequence[Any], kinds: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of each kind of rows, which take turns, and the median ratio of a round."""
    objective: Any = run.objective
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, objective.packing in kinds.items():
            start = time.process_time()
            for batch in batches:
                loss_and_gradient(run, batch)
            seconds[kind].append(time.process_time() - start)

    medians = {f"{kind}_s": statistics.median(measured) for kind, measured in seconds.items()}
    ratios = [packed / padded for padded, packed in zip(seconds["padded"], seconds["packed"], strict=True)]
    return {**medians, "ratio": statistics.median(ratios)}


def measure(tasks: Sequence[str], sizes: Mapping[str, int], rounds: int) -> list[dict[str, Any]]:
    """Return a row of results for each task."""
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", sizes)
        (folder / "template.jinja").write_text(TEMPLATE)
        for task in tasks:
            make_conversations(folder / f"{task}.jsonl", task, sizes)
            row = {"task": task, **compared(packing_run(folder, task, sizes), sizes["batches"], rounds)}
            results.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Measure all tasks, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one tiny task, nothing written")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else SIZES
    rows = measure(TASKS[:1] if arguments.quick else TASKS, sizes, 1 if arguments.quick else ROUNDS)

    table = Table("conversations", "tokens", "padded", "packed", "padded, CPU s", "packed", "ratio", "loss", "gradient")
    for row in rows:
        counts = [f"{row[key]:,}" for key in ("tokens", "padded_positions", "packed_positions")]
        seconds = [f"{row[key]:.2f}" for key in ("padded_s", "packed_s", "ratio")]
        differences = [f"{row[key]:.1e}" for key in ("loss_difference", "gradient_difference")]
        table.add_row(row["task"], *counts, *seconds, *differences)
    Console().print(table)
    if not arguments.quick:
        results = {"date": date.today().isoformat(), "machine": machine(), "sizes": sizes, "rows": rows}
        (RESULTS / "packed_rows.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
