"""Peak memory of two processes that load split weights, pass them to an engine and save them, each in two ways.

    python -m benchmarks.streamed_weights             # a Llama with 255 million parameters
    python -m benchmarks.streamed_weights --quick     # a tiny one, nothing written

    load          read a checkpoint in bfloat16, and split its weights in float32
    synchronise   write the weights as an engine loads them
    save          write the model as `from_pretrained` loads it

    at once       to load, each process reads the whole model and then splits it; to synchronise, each process gathers
                  all weights, as it does to generate; to save, the first one does
    streamed      to load, each process reads its rows of one tensor after the other; otherwise all processes gather one
                  tensor after the other, which the first one writes

Each number is that of a process of its own for each of the two ranks: the high-water mark in /proc/self/status, reset
before the work, above the memory before the model was made. It includes the process's own half of the weights. The
files, or logits, of both ways must be the same.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import socket
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
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from benchmarks.ppo_iteration import RESULTS, machine
from benchmarks.systems.worker import peak_mb
from rl4lms_like.policies.full_weights import FILE
from rl4lms_like.policies.loading import load_model, save_whole
from rl4lms_like.policies.parity import probe_episodes
from rl4lms_like.policies.sharding import ShardedNetwork, led_by_main, process_mesh, whole
from rl4lms_like.policies.teacher_forcing import CausalReader
from rl4lms_like.system.ranks import process_ranks

N_PROCESSES = 2
SIZES = {"vocabulary": 32000, "width": 1024, "inner": 2752, "layers": 15}
QUICK = {"vocabulary": 512, "width": 32, "inner": 64, "layers": 2}
WORKS = ("load", "synchronise", "save")
WAYS = ("at once", "streamed")


def make_model(sizes: dict[str, int]) -> LlamaForCausalLM:
    """Return a Llama with an output layer of its own, no two weights of which are the same."""
    config = LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["width"],
        intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=8,
    )
    with no_init_weights():
        model = LlamaForCausalLM(config)
    for number, weight in enumerate(model.parameters(), 1):
        weight.data = torch.linspace(-number, number, weight.numel()).view_as(weight)
    return model


def at_once(work: str, model: LlamaForCausalLM, network: ShardedNetwork, folder: Path, *, is_main: bool) -> None:
    """Write the weights after all of them have been gathered."""
    if work == "synchronise":
        with network.gathered():
            if is_main:
                weights = {name: weight.detach() for name, weight in model.named_parameters()}
                write_copy(model, weights, folder)
        return

    weights = {}
    for name, weight in model.named_parameters():
        gathered = whole(weight.detach())
        if is_main:
            weights[name] = gathered
    if is_main:
        write_copy(model, weights, folder)


def write_copy(model: LlamaForCausalLM, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a plain model with these weights."""
    with torch.device("meta"):
        copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(weights, assign=True)
    copy.save_pretrained(folder)


def streamed(work: str, model: LlamaForCausalLM, folder: Path, *, is_main: bool) -> None:
    """Write the weights one block after the other."""
    with led_by_main([model]):
        if is_main:
            save_whole(model, folder, {}, tied=work == "synchronise")


def reset_peak() -> None:
    """Let the high-water mark of this process begin with the memory that it has now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def load(way: str, checkpoint: Path) -> CausalReader:
    """Load a model and split its weights."""
    model, _ = load_model(AutoModelForCausalLM, str(checkpoint), unread=way == "streamed")
    reader = CausalReader(model)
    reader.split_weights(process_mesh("cpu"))
    return reader


@torch.no_grad()
def write_logits(reader: CausalReader, file: Path, *, is_main: bool) -> None:
    """Write the logits of two texts."""
    probe = probe_episodes(reader.model.config.vocab_size, reader.prompt_side)
    logits = reader.logits(probe)
    if is_main:
        save_file({"logits": logits}, file)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return what one of the processes needs, in MiB and CPU seconds."""
    with process_ranks(600) as ranks:
        mesh = process_mesh("cpu")
        nn.Linear(1, 1)(torch.ones(1, 1))  # memory that torch takes once
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job["checkpoint"]))  # imports the family
        reset_peak()
        start = peak_mb()

        if job["work"] == "load":
            seconds = time.process_time()
            reader = load(job["way"], Path(job["checkpoint"]))
            cpu_s = time.process_time() - seconds
            peak = peak_mb() - start
            write_logits(reader, Path(job["folder"]) / FILE, is_main=ranks.is_main)
            return {"before_mib": 0.0, "peak_mib": peak, "cpu_s": cpu_s}

        model = make_model(job["sizes"])
        network = ShardedNetwork(model, mesh)
        reset_peak()
        before = peak_mb() - start
        seconds = time.process_time()
        folder = Path(job["folder"])
        if job["way"] == "at once":
            at_once(job["work"], model, network, folder, is_main=ranks.is_main)
        else:
            streamed(job["work"], model, folder, is_main=ranks.is_main)
        cpu_s = time.process_time() - seconds
        return {"before_mib": before, "peak_mib": peak_mb() - start, "cpu_s": cpu_s}


def measured(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of the ranks, each a new process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(N_PROCESSES):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(N_PROCESSES)}
        command = [sys.executable, "-m", "benchmarks.streamed_weights", "--process", json.dumps(job)]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
    results = []
    for process in processes:
        output, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(errors[-3000:])
        results.append(json.loads(output.splitlines()[-1]))
    return results


def main() -> None:
    """Measure both works in both ways, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, nothing written")
    parser.add_argument("--process", metavar="JOB", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        print(json.dumps(measure(json.loads(arguments.process))))
        return

    sizes = QUICK if arguments.quick else SIZES
    with tempfile.TemporaryDirectory() as checkpoint:
        make_model(sizes).bfloat16().save_pretrained(checkpoint)
        rows = measured_works(sizes, checkpoint)

    table = Table("", "", "rank", "before, MiB", "peak, MiB", "CPU s")
    for row in rows:
        numbers = (f"{row['before_mib']:.0f}", f"{row['peak_mib']:.0f}", f"{row['cpu_s']:.1f}")
        table.add_row(row["work"], row["way"], str(row["rank"]), *numbers)
    Console().print(table)
    if not arguments.quick:
        results = {"date": date.today().isoformat(), "machine": machine(), "sizes": sizes, "rows": rows}
        (RESULTS / "streamed_weights.json").write_text(json.dumps(results, indent=1) + "\n")


def measured_works(sizes: dict[str, int], checkpoint: str) -> list[dict[str, Any]]:
    """Return the results of all works in both ways.

    Raises:
        RuntimeError: the ways of one have different results.
    """
    rows = []
    for work in WORKS:
        digests = set()
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                job = {"sizes": sizes, "work": work, "way": way, "folder": folder, "checkpoint": checkpoint}
                for rank, result in enumerate(measured(job)):
                    rows.append({"work": work, "way": way, "rank": rank, **result})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                with (Path(folder) / FILE).open("rb") as file:
                    digests.add(hashlib.file_digest(file, "sha256").hexdigest())
        if len(digests) > 1:
            raise RuntimeError(f"{work}: both ways have different results")
    return rows


if __name__ == "__main__":
    main()
