"""Tokens per second, MFU and peak memory of full runs on a GPU, in about ten minutes; next to TRL.

    sh benchmarks/gpu.sh                           makes what is missing, then runs all entries
    python -m benchmarks.gpu                       the same without TRL's environment
    python -m benchmarks.gpu --quick               tiny work, also without a GPU: does everything run?
    python -m benchmarks.gpu --entries grpo,sft    some entries

The model is a Llama with the shapes of Qwen2.5-0.5B and random weights, and all responses have full length. Each entry
is a run from a config, in a process of its own or one for each GPU; the time of an iteration is the median over all but
the first. An entry whose packages are missing is skipped with a line, and so are all that would start after
`--minutes`; those of this library are ended after `--limit_s`.

    tokens/s    RL: response tokens; on given texts: all tokens, without padding
    MFU         floating-point operations that the model needs for an iteration, per second, relative to the peak of
                all GPUs in bfloat16: of the data sheet (`PEAK_FLOPS`), else of a measured product of matrices
    peak        of tensors on a GPU; without one, of the process; the largest of all processes
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
import yaml
from rich.table import Table

from benchmarks.environments import ENVIRONMENTS, is_installed, python_of
from benchmarks.grpo_real import with_an_end_that_is_never_sampled
from benchmarks.ppo_iteration import RESULTS, console, machine
from benchmarks.vllm_server import served
from benchmarks.vllm_training import free_port
from benchmarks.workers import ROOT, SYSTEMS, WorkerError, running
from benchmarks.workload import Shape
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.testing.models import make_word_tokenizer

POLICY = "alg.policy.args"
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
PACKAGES_OF_ADAPTERS = ("peft",)
TRL = "trl_grpo"

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Name of a GPU -> its floating-point operations per second in bfloat16, dense, by NVIDIA's data sheets (SXM)."""


@dataclass(frozen=True)
class Work:
    """Sizes of the model and of an iteration.

    Args:
        width: of the model; heads are `width // n_heads` wide.
        n_layers: of the model.
        n_heads: of queries.
        n_kv_heads: of keys and values.
        inner: width of the feed-forward layers.
        n_words: tokens of the vocabulary, without three special ones.
        prompt_len: tokens of every prompt.
        response_len: tokens of every response; on given texts, of the longest one.
        episodes: responses of an iteration; on given texts, a quarter of it is the number of texts of a step.
        micro_batch_size: tokens of a forward pass.
        n_iters: iterations, of which the first is not counted.
        dtype: of computation.
    """

    width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    inner: int
    n_words: int
    prompt_len: int
    response_len: int
    episodes: int
    micro_batch_size: int
    n_iters: int
    dtype: str

    @property
    def batch_size(self) -> int:
        """Texts or pairs of a step of a run on given texts."""
        return max(self.episodes // 4, 2)


FULL = Work(896, 24, 14, 2, 4864, 151_933, 256, 256, 64, 16_384, 4, "bfloat16")
QUICK = Work(64, 2, 4, 2, 128, 253, 8, 8, 16, 256, 3, "float32")

GROUP_SIZE = 8
N_SPECIAL = 3
"""Tokens of the vocabulary before its words."""


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Args:
        algorithm: `alg.id`.
        packages: that it needs, besides those of a run.
        keys: keys of the config -> values.
        is_split: on all GPUs, with split weights; without a GPU on two processes.
        engine: vLLM generates.
    """

    algorithm: str
    packages: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)
    is_split: bool = False
    engine: bool = False

    @property
    def is_on_policy(self) -> bool:
        """True if responses are generated."""
        return self.algorithm in ("ppo", "grpo")

    @property
    def trains_adapters(self) -> bool:
        """True if the base is frozen, so that the backward pass computes no gradients of its weights."""
        return any(key.endswith(".peft") for key in self.keys)


ENTRIES: dict[str, Entry] = {
    "ppo": Entry("ppo"),
    "grpo": Entry("grpo"),
    "grpo_lora": Entry("grpo", PACKAGES_OF_ADAPTERS, {f"{POLICY}.peft": LORA}),
    "grpo_nf4": Entry(
        "grpo", ("peft", "bitsandbytes"), {f"{POLICY}.peft": LORA, f"{POLICY}.quantization": {"id": "nf4"}}
    ),
    "grpo_int8": Entry("grpo", ("peft", "torchao"), {f"{POLICY}.peft": LORA, f"{POLICY}.quantization": {"id": "int8"}}),
    "grpo_adamw_8bit": Entry("grpo", ("torchao",), {f"{POLICY}.optimizer": {"id": "adamw_8bit"}}),
    "grpo_offloaded": Entry("grpo", keys={f"{POLICY}.offload": "moments", f"{POLICY}.activation_offload": True}),
    "grpo_fsdp": Entry("grpo", keys={"distributed.strategy": "fsdp"}, is_split=True),
    "sft": Entry("supervised"),
    "sft_packed": Entry("supervised", keys={"alg.packing": "auto"}),
    "dpo": Entry("dpo"),
    "grpo_vllm": Entry("grpo", ("vllm",), engine=True),
}
OF_TRL = ("trl_grpo_lora", "trl_grpo_lora_vllm")
"""Entries that are measured in TRL's environment; the work is that of `grpo_lora`."""


# --- work -----------------------------------------------------------------------------------------------------------


def make_model(work: Work, folder: Path) -> None:
    """Save a Llama with random weights, and a tokenizer whose words are numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_word_tokenizer(map(str, range(work.n_words)))
    config = LlamaConfig(
        hidden_size=work.width,
        num_hidden_layers=work.n_layers,
        num_attention_heads=work.n_heads,
        num_key_value_heads=work.n_kv_heads,
        intermediate_size=work.inner,
        vocab_size=len(tokenizer),
        max_position_embeddings=2 * (work.prompt_len + work.response_len),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_texts(work: Work, folder: Path) -> dict[str, int]:
    """Write a step's texts of uneven lengths, and its pairs of equal ones.

    Returns:
        Number of tokens of the texts, of the pairs with each prompt once, and of the pairs' responses.
    """
    rng = random.Random(0)

    def text(n: int) -> str:
        return " ".join(str(rng.randrange(work.n_words)) for _ in range(n))

    # Lengths are uniform, as packing needs; each text ends with one more token.
    lengths = [rng.randint(1, work.response_len - 1) for _ in range(work.batch_size)]
    rows = [{"prompt": text(work.prompt_len // 4), "completion": " " + text(n)} for n in lengths]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    pairs = []
    for _ in range(work.batch_size):
        chosen, rejected = (" " + text(work.response_len - 1) for _ in range(2))
        pairs.append({"prompt": text(work.prompt_len), "chosen": chosen, "rejected": rejected})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    n_responses = 2 * work.response_len * work.batch_size
    return {
        "texts": sum(lengths) + work.batch_size * (1 + work.prompt_len // 4),
        "pairs": work.prompt_len * work.batch_size + n_responses,
        "responses of pairs": n_responses,
    }


def config_of(entry: Entry, work: Work, folder: Path, *, url: str = "") -> dict[str, Any]:
    """Return the config of an entry.

    Args:
        entry: what is measured.
        work: sizes.
        folder: with the model and the texts.
        url: of a vLLM server.
    """
    blocks = _on_policy(entry, work, folder) if entry.is_on_policy else _on_texts(entry, work, folder)
    blocks["tokenizer"] = {"model_name": str(folder / "model")}
    if not torch.cuda.is_available():
        blocks["n_threads"] = 1
    changed, issues = apply_values(blocks, entry.keys, "the entry")
    assert not issues, issues
    if url:
        args = {"url": url, "weights_dir": str(folder / "engine_weights"), "max_gap": 1.0}
        changed["alg"]["policy"]["args"]["engine"] = {"id": "vllm", "args": args}
        changed["alg"]["args"]["importance_correction"] = "tis"
    return changed


def _on_policy(entry: Entry, work: Work, folder: Path) -> dict[str, Any]:
    args: dict[str, Any] = {
        "n_episodes": work.episodes,
        "minibatch_episodes": work.episodes,
        "micro_batch_size": work.micro_batch_size,
        "n_epochs": 1,
        "learning_rate": 1e-6,
    }
    if entry.algorithm == "grpo":
        args["group_size"] = GROUP_SIZE
    lengths = {"max_prompt_length": work.prompt_len, "max_episode_length": work.response_len}
    prompt = " ".join(map(str, range(work.prompt_len)))
    return {
        "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": work.response_len}},
        "datapool": {"id": "dummy_pool", "args": {"n_samples": work.episodes, "prompt": prompt}},
        "env": {"n_envs": work.episodes, "args": {**lengths, "terminate_on_eos": False}},
        "alg": {
            "id": entry.algorithm,
            "args": args,
            "kl_div": {"coeff": 0.05},
            "policy": {
                "id": "causal_lm_actor_critic_policy",
                "args": {
                    "model_name": str(folder / "model"),
                    "dtype": work.dtype,
                    "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": work.response_len},
                },
            },
        },
        "train_evaluation": {
            "n_iters": work.n_iters,
            "eval_every": work.n_iters,
            "eval_batch_size": work.episodes,
            "max_eval_samples": 2 * work.batch_size,
            "save_model": False,
        },
        "doctor": {"enabled": False},
    }


def _on_texts(entry: Entry, work: Work, folder: Path) -> dict[str, Any]:
    is_supervised = entry.algorithm == "supervised"
    file = str(folder / ("texts.jsonl" if is_supervised else "pairs.jsonl"))
    return {
        "datapool": {
            "id": "jsonl" if is_supervised else "preferences",
            "args": {"data_files": {"train": file, "val": file, "test": file}},
        },
        "alg": {
            "id": entry.algorithm,
            "model_type": "causal",
            "model_name": str(folder / "model"),
            "training_args": {
                "per_device_train_batch_size": work.batch_size,
                "max_steps": work.n_iters,
                "bf16": work.dtype == "bfloat16",
                "eval_strategy": "no",
                "save_strategy": "no",
            },
        },
        "train_evaluation": {"eval_batch_size": work.batch_size, "generate": False, "save_model": False},
    }


# --- numbers --------------------------------------------------------------------------------------------------------


def n_flops(entry: Entry, work: Work, n_tokens: Mapping[str, int]) -> float:
    """Return the floating-point operations that the model needs for an iteration.

    A multiplication with a weight is 2 for each token, in the backward pass 4, and 2 if the weight is frozen. Prompts
    are counted once for each group or pair, and the output layer for responses only.
    """
    head_width = work.width // work.n_heads
    per_layer = 2 * work.width * (work.n_heads + work.n_kv_heads) * head_width + 3 * work.width * work.inner
    n_trained_parts = 2 if entry.trains_adapters else 3  # forward pass, gradients of inputs, gradients of weights

    def forward(n_read: int, n_responses: int, length: int) -> float:
        # Attention: scores and their mean of the values, each 2 for half of the positions of a text.
        attention = 2 * work.width * length * n_read
        return (
            work.n_layers * (2 * per_layer * n_read + attention)
            + 2 * work.width * (N_SPECIAL + work.n_words) * n_responses
        )

    if not entry.is_on_policy:
        n_read = n_tokens["texts" if entry.algorithm == "supervised" else "pairs"]
        n_responses = n_read if entry.algorithm == "supervised" else n_tokens["responses of pairs"]
        return n_trained_parts * forward(n_read, n_responses, work.prompt_len + work.response_len)

    # Generation, the scores of policy and reference, and the update; a critic has a score and an update.
    n_responses = work.episodes * work.response_len
    n_prompts = work.episodes // (GROUP_SIZE if entry.algorithm == "grpo" else 1)
    n_read = n_prompts * work.prompt_len + n_responses
    of_policy = forward(n_read, n_responses, work.prompt_len + work.response_len)
    of_critic = forward(n_read, 0, work.prompt_len + work.response_len) if entry.algorithm == "ppo" else 0
    return (3 + n_trained_parts) * of_policy + (1 + n_trained_parts) * of_critic


def tokens_of(entry: Entry, work: Work, n_tokens: Mapping[str, int]) -> int:
    """Return the tokens of an iteration: responses, or those of the texts."""
    if entry.is_on_policy:
        return work.episodes * work.response_len
    return n_tokens["texts" if entry.algorithm == "supervised" else "pairs"]


def peak_flops() -> tuple[float, str]:
    """Return the operations per second of the device in bfloat16, and where the number is from."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "this processor"
    for known, flops in PEAK_FLOPS.items():
        if known in name:
            return flops, f"{name}, data sheet"

    # The fastest of some products of square matrices.
    n = 8192 if device == "cuda" else 512
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    matrix = torch.ones(n, n, device=device, dtype=dtype)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        matrix @ matrix
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds), f"{name}, measured product"


# --- measurements ---------------------------------------------------------------------------------------------------


class EntryError(RuntimeError):
    """An entry cannot be measured: the message is its line in the table."""


def measure(entry: Entry, work: Work, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run an entry; return the seconds of an iteration, the peak memory in bytes and the number of devices.

    Raises:
        EntryError: a package is missing, or the run failed or took too long.
    """
    missing = [package for package in entry.packages if not is_installed(package)]
    if missing:
        raise EntryError(f"skipped: {', '.join(missing)} not installed")

    n_gpus = torch.cuda.device_count()
    n_processes = (n_gpus or 2) if entry.is_split else 1
    with tempfile.TemporaryDirectory(dir=folder) as results, ExitStack() as stack:
        url = ""
        if entry.engine:
            log = stack.enter_context((folder / "vllm.log").open("wb"))
            url = stack.enter_context(_vllm(folder / "model", work, log))
        config = Path(results) / "config.yml"
        config.write_text(yaml.safe_dump(config_of(entry, work, folder, url=url)))

        command = [sys.executable]
        if n_processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n_processes)]
        command += ["-m", "benchmarks.systems.measured_run", str(config), results]
        _run(command, limit_s)
        processes = [json.loads(file.read_text()) for file in Path(results).glob("measured_*.json")]
    assert len(processes) == n_processes
    ends = processes[0]["step_ends"]
    assert len(ends) == work.n_iters  # one optimizer step an iteration
    return {
        "seconds": median(end - start for start, end in pairwise(ends)),
        "peak_bytes": max(process["peak_bytes"] for process in processes),
        "n_devices": n_processes,
    }


def _run(command: Sequence[str], limit_s: float) -> None:
    """Run a command to its end.

    Raises:
        EntryError: it failed, or did not end within `limit_s` seconds; it and its children are ended then.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not torch.cuda.is_available():
        environment["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise EntryError(f"not finished after {limit_s:.0f} s") from None
        if code:
            log.seek(0)
            lines = log.read().strip().splitlines() or [""]
            console.print("\n".join(lines[-20:]), markup=False, style="dim")
            raise EntryError(f"failed: {lines[-1][:200]}")


def _vllm(model: Path, work: Work, log: IO[bytes]) -> AbstractContextManager[str]:
    """Return the context of a vLLM server of this interpreter that has a third of the GPU's memory."""
    length = str(work.prompt_len + work.response_len + 1)
    more = ("--gpu-memory-utilization", "0.33", "--max-model-len", length, "--dtype", work.dtype)
    return served(model, free_port(), log, more=more, python=sys.executable)


def measure_trl(work: Work, folder: Path, *, vllm: bool, creates: bool) -> dict[str, Any]:
    """Measure TRL's GRPO with LoRA; see `measure`.

    Args:
        work: sizes.
        folder: with the model.
        vllm: vLLM generates, in TRL's process.
        creates: make TRL's environment if it is not there.
    """
    requirements = SYSTEMS[TRL].requirements
    if not creates and not (ENVIRONMENTS / TRL.replace("_", "-")).exists() and not all(map(is_installed, requirements)):
        raise EntryError("skipped: TRL has no environment (--trl makes it)")
    python = python_of(TRL.replace("_", "-"), requirements)
    if vllm and subprocess.run([python, "-c", "import vllm"], capture_output=True).returncode:
        raise EntryError("skipped: vllm is not installed next to TRL")

    shape = Shape(
        "gpu",
        prompt_len=work.prompt_len,
        response_len=work.response_len,
        episodes=work.episodes,
        n_epochs=1,
        minibatch=work.episodes,
        n_layer=work.n_layers,
        n_embd=work.width,
        vocab_size=work.n_words,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = list(range(N_SPECIAL, N_SPECIAL + work.n_words))  # prompts have no special tokens
    job: dict[str, Any] = {"device": device, "policy": {"dtype": work.dtype}, "lora": LORA, "words": words}
    if vllm:
        job["vllm"] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.33}
    with tempfile.TemporaryDirectory(dir=folder) as model:
        with_an_end_that_is_never_sampled(folder / "model", Path(model))
        try:
            with running([TRL], shape, seed=0, threads=1, model=Path(model), **job) as (worker,):
                iterations = [worker.run_iteration() for _ in range(work.n_iters)]
        except WorkerError as error:
            raise EntryError(f"failed: {str(error).splitlines()[-1][:200]}") from error
    last = iterations[-1]
    peak_mb = last.get("gpu_peak_mb", last["peak_mb"])
    seconds = median(iteration["wall_s"] for iteration in iterations[1:])
    return {"seconds": seconds, "peak_bytes": int(peak_mb * 2**20), "n_devices": 1}


def results_of(
    names: Sequence[str], work: Work, options: argparse.Namespace, flops: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each entry with its numbers, or with the line that says why there are none; `flops` of a device."""
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(work, folder / "model")
        n_tokens = make_texts(work, folder)
        for name in names:
            try:
                if time.monotonic() > end:
                    raise EntryError(f"skipped: {options.minutes:g} minutes are over")
                entry = ENTRIES.get(name, ENTRIES["grpo_lora"])
                if name in OF_TRL:
                    measured = measure_trl(work, folder, vllm=name.endswith("vllm"), creates=options.trl)
                else:
                    measured = measure(entry, work, folder, options.limit_s)
            except EntryError as error:
                yield name, {"note": str(error)}
                continue
            # Without a GPU, all processes are on one processor.
            available = flops * (measured["n_devices"] if torch.cuda.is_available() else 1)
            yield (
                name,
                {
                    **measured,
                    "tokens_per_s": tokens_of(entry, work, n_tokens) / measured["seconds"],
                    "mfu": n_flops(entry, work, n_tokens) / measured["seconds"] / available,
                },
            )


def table(rows: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """Return the table of all entries."""
    made = Table(title=title)
    for heading in ("entry", "processes", "iteration s", "tokens/s", "MFU", "peak GiB", ""):
        made.add_column(heading, justify="left" if heading in ("entry", "") else "right")
    for name, row in rows.items():
        if "note" in row:
            made.add_row(name, *["-"] * 5, row["note"])
            continue
        numbers = (f"{row['seconds']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['mfu']:.1%}")
        made.add_row(name, str(row["n_devices"]), *numbers, f"{row['peak_bytes'] / 2**30:.2f}", "")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the entries, print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*ENTRIES, *OF_TRL]
    parser.add_argument("--quick", action="store_true", help="tiny work, nothing is kept")
    parser.add_argument("--entries", help="some entries, separated by commas; default: all")
    parser.add_argument("--minutes", type=float, default=8, help="no entry starts later (default %(default)s)")
    parser.add_argument(
        "--limit_s", type=float, default=100, help="most seconds of an entry of this library (default %(default)s)"
    )
    parser.add_argument("--trl", action="store_true", help="make TRL's environment if it is not there")
    parser.add_argument("--output", type=Path, help="file of the results; default: benchmarks/results/gpu.json")
    options = parser.parse_args(arguments)
    chosen = names if options.entries is None else options.entries.split(",")
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"there is no entry {unknown[0]!r}; entries are: {', '.join(names)}")
    if not options.quick and not torch.cuda.is_available():
        parser.error("there is no GPU; --quick runs tiny work on the processor")

    work = QUICK if options.quick else FULL
    rows: dict[str, dict[str, Any]] = {}
    flops, source = peak_flops()
    for name, row in results_of(chosen, work, options, flops):
        rows[name] = row
        console.print(f"{name}: {row.get('note') or '{:.2f} s'.format(row['seconds'])}", highlight=False)
    console.print(table(rows, f"peak of MFU: {source}"))
    if options.output is not None or not options.quick:
        file = options.output or RESULTS / "gpu.json"
        sizes = {"work": asdict(work), "peak of MFU": source, "entries": rows}
        file.write_text(json.dumps({"date": date.today().isoformat(), "machine": machine(), **sizes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
