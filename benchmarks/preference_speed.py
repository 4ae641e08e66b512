"""One optimizer step of DPO and KTO next to TRL's trainers: CPU time and memory.

    python -m benchmarks.preference_speed          # about 15 minutes

Both train the embedded GPT-2 on the same pairs of film opinions, in float32, without dropout, with log-probs of the
reference that are computed before the first step. A step has 16 pairs (of KTO, 16 responses). Each system is a process
on one thread; the systems alternate, and the medians over the rounds are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environments import python_of
from benchmarks.systems.preference_steps import SETTINGS, StepClock
from scripts.data.film_preferences import film_preferences

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "preference_speed.json"
VOCABULARIES = {778: 24, 50257: 6}
"""Size of the vocabulary -> number of measured steps of a process."""
BATCH_SIZE, N_WARM_UP = 16, 3


def save_model(folder: Path, vocab_size: int) -> None:
    """Save the embedded model for film opinions with a larger vocabulary, whose new tokens do not occur."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rl4lms_like.small_models.embedded import embedded_model

    name = embedded_model("embedded/gpt2-films")
    model = AutoModelForCausalLM.from_pretrained(name)
    model.resize_token_embeddings(vocab_size)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(name).save_pretrained(folder)


def ours(folder: Path) -> str:
    """Train with this library; return the measurements."""
    from rl4lms_like.config.load import parse_config
    from rl4lms_like.offline.assemble_preferences import assemble_preferences
    from rl4lms_like.offline.trainer import SupervisedTrainer
    from rl4lms_like.tracking.base import Tracker

    job = json.loads((folder / "job.json").read_text())
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in job["pairs"]))
    batches = {"per_device_train_batch_size": job["batch_size"], "max_steps": job["n_steps"]}
    blocks = {
        "tokenizer": {"model_name": str(folder / "model")},
        "datapool": {"id": "preferences", "args": {"path": str(folder / "pairs.jsonl"), "split_ratios": [1, 0, 0]}},
        "alg": {
            "id": job["id"],
            "model_type": "causal",
            "model_name": str(folder / "model"),
            "training_args": SETTINGS | batches,
        },
        "train_evaluation": {"eval_batch_size": 16, "generate": False},
        "device": "cpu",
        "n_threads": 1,
    }
    config = parse_config(blocks)
    tracker = Tracker(folder, config.to_dict(), "speed", job["id"], None, False, quiet=True)
    trainer = SupervisedTrainer(assemble_preferences(config), tracker)  # type: ignore[arg-type]
    clock = StepClock(job["n_warm_up"])
    trainer.trainer.add_callback(clock)
    trainer.trainer.train_or_resume()
    return clock.report()


def measured(system: str, folder: Path) -> dict[str, float]:
    """Return what a system measured in a process of its own."""
    python, module = sys.executable, ["benchmarks.preference_speed", "--worker"]
    if system == "trl":
        python, module = python_of("trl-grpo", ("trl==1.16.*",)), ["benchmarks.systems.preference_steps"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [python, "-m", *module, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Print and keep the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="processes of each system (%(default)s)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(ours(options.worker))
        return
    results: dict[str, Any] = {}
    for id in ("dpo", "kto"):
        for vocab_size, n_measured in VOCABULARIES.items():
            rounds: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
            n_steps = N_WARM_UP + n_measured
            job = {"id": id, "batch_size": BATCH_SIZE, "n_warm_up": N_WARM_UP, "n_steps": n_steps}
            for _ in range(options.rounds):
                for system, found in rounds.items():
                    with tempfile.TemporaryDirectory() as place:
                        folder = Path(place)
                        save_model(folder / "model", vocab_size)
                        pairs = film_preferences(BATCH_SIZE * n_steps)
                        (folder / "job.json").write_text(json.dumps({**job, "pairs": pairs}))
                        found.append(measured(system, folder))
            medians = {
                system: {key: median(each[key] for each in found) for key in found[0]}
                for system, found in rounds.items()
            }
            ratio = {key: medians["ours"][key] / medians["trl"][key] for key in ("cpu_ms", "peak_mb")}
            results[f"{id}, vocabulary {vocab_size}"] = {"medians": medians, "ratio": ratio, "rounds": rounds}
            print(
                f"{id}, vocabulary {vocab_size}: {json.dumps(medians)}\n    ours / TRL: {json.dumps(ratio)}", flush=True
            )
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
