"""DPO on pairs that the policy sampled, next to supervised training on the better responses of the same pairs.

    python -m benchmarks.on_policy_pairs                  # seeds 0-4, less than a minute each on one thread
    python -m benchmarks.on_policy_pairs --seeds 1

    embedded/gpt2-films ─ 4 responses to each of 480 prompts ─ reward `sentiment` ─> pairs (difference from 0.2)
    embedded/gpt2-films ─ dpo on the pairs, or supervised on their better responses ─> 200 held-out prompts

The perplexity is that of the responses under the initial model. The seed changes prompts, samples and training, but not
the initial model. All trainings have the same batches and number of steps. Learning rates, `beta` and `sft_weight` were
chosen with seed 7, for supervised training among 3e-4, 1e-3, 2e-3 and 4e-3.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.hyperparameters import half_width
from rl4lms_like.config.load import load_config, parse_config
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.inference import evaluate_run
from rl4lms_like.run import train_config
from rl4lms_like.sampled_pairs import write_pairs

CONFIG = Path(__file__).parents[1] / "task_configs/film_opinions/tiny_gpt2_ppo.yml"
RESULTS = Path(__file__).parent / "results" / "on_policy_pairs.json"
MODEL = "embedded/gpt2-films"
KEYS = {
    "sentiment": "semantic/sentiment",
    "positive": "semantic/sentiment_positive",
    "perplexity": "fluency_metrics/reference_perplexity",
    "distinct-2": "diversity_metrics/distinct-2",
}
TRAININGS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "supervised": ("supervised", 5e-4, {}),
    "supervised, best learning rate": ("supervised", 2e-3, {}),
    "dpo": ("dpo", 5e-4, {"beta": 0.5, "sft_weight": 0.5}),
}
"""Name -> id, learning rate and arguments of a training on the pairs."""


def blocks_of(name: str, files: dict[str, str], seed: int) -> dict[str, Any]:
    """Return the config of a training on the pairs; supervised ones learn the better responses."""
    id, learning_rate, args = TRAININGS[name]
    alg = {
        "id": id,
        "model_type": "causal",
        "model_name": MODEL,
        "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 40},
        "training_args": {
            "num_train_epochs": 2,
            "per_device_train_batch_size": 8,
            "learning_rate": learning_rate,
            "logging_steps": 10,
        },
    }
    return {
        "tokenizer": {"model_name": MODEL, "max_length": 24},
        "datapool": {"id": "preferences", "args": {"data_files": files}},
        "alg": alg | ({"args": args} if args else {}),
        "train_evaluation": {"eval_batch_size": 200},
        "seed": seed,
        "device": "cpu",
        "n_threads": 1,
    }


def scores_of_seed(seed: int, folder: Path) -> dict[str, dict[str, float]]:
    """Sample pairs, train all models, and return the scores on the prompts of `test` by model."""
    config = load_config(CONFIG, [f"seed={seed}", f"datapool.args.seed={seed}", "datapool.args.n_train=480"])
    rl = folder / "rl.yml"
    rl.write_text(dump_yaml(config.to_dict()), encoding="utf-8")
    start = time.process_time()
    progress = write_pairs(config, folder / "train.jsonl", min_difference=0.2)
    seconds = {"initial": time.process_time() - start}
    write_pairs(config, folder / "val.jsonl", split="val", max_prompts=60, min_difference=0.2)
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "val")} | {"test": str(folder / "val.jsonl")}
    runs: dict[str, str | Path] = {"initial": MODEL}
    for name in TRAININGS:
        start = time.process_time()
        config_of_run = parse_config(blocks_of(name, files, seed))
        runs[name] = train_config(config_of_run, base_path_to_store_results=folder, quiet=True, new=True)
        seconds[name] = time.process_time() - start
    found = {}
    for name, run in runs.items():
        scores = evaluate_run(run, config_path=rl, output=folder / "evaluation", seed=seed)
        found[name] = {short: scores[key] for short, key in KEYS.items()} | {"cpu_s": seconds[name]}
    found["initial"]["pairs"] = progress.counts["pairs"]
    return found


def with_interval(values: list[float]) -> str:
    """Return the mean of a value over seeds, with its 95 % interval."""
    mean = f"{fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {half_width(values):.3f}"


def main() -> None:
    """Run all seeds, print the means and intervals, and write all numbers to `results`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the numbers")
    options = parser.parse_args()
    found = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as place:
            found.append(scores_of_seed(seed, Path(place)))
    options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print("| model |", " | ".join([*KEYS, "CPU s"]), "|")
    for name in found[0]:
        print(
            f"| {name} |", " | ".join(with_interval([of[name][key] for of in found]) for key in [*KEYS, "cpu_s"]), "|"
        )
    for name in list(TRAININGS)[:-1]:
        for key in KEYS:
            differences = [of["dpo"][key] - of[name][key] for of in found]
            print(f"dpo - {name}, {key}: {with_interval(differences)}")
    print("pairs:", with_interval([of["initial"]["pairs"] for of in found]))


if __name__ == "__main__":
    main()
