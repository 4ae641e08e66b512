"""Accuracy with uniform prompts and with the difficulty sampler, where half of the prompts cannot be answered.

    python -m benchmarks.difficulty_sampler                  # seeds 0-2

The runs are those of task_configs/reasoning/tiny_spell_backward_ppo.yml with a learning rate of 3e-4. The training
prompts are 400 words, and 400 other words whose expected answer is not a word's reversal. Needs the extra `reasoning`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rl4lms_like.core.sample import Sample
from rl4lms_like.training.assemble import build_datapool
from rl4lms_like.training.config.run_config import load_config
from rl4lms_like.training.run import train_config
from rl4lms_like.training.small_models.embedded import with_embedded_models

CONFIG = Path(__file__).parents[1] / "task_configs/reasoning/tiny_spell_backward_ppo.yml"
RESULTS = Path(__file__).parent / "results" / "difficulty_sampler.json"
N_PROMPTS = 400
SAMPLERS = {"uniform": None, "difficulty": {"id": "difficulty"}}


def write_rows(file: Path, samples: Sequence[Sample], answer: str | None = None) -> None:
    """Write prompts and answers as JSON lines; `answer` replaces all answers."""
    rows = [{"prompt": one.prompt_or_input_text, "answer": answer or one.references[0]} for one in samples]
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def accuracies(sampler: str, seed: int, folder: Path, model: str) -> dict[int, float]:
    """Train one run and return the accuracy on held-out words by iteration."""
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "val", "test")}
    pool = {"data_files": files, "prompt_column": "prompt", "reference_column": "answer"}
    overrides = {
        "datapool": {"id": "jsonl", "args": pool, "sampler": SAMPLERS[sampler]},
        "tiny_model": None,
        "tokenizer.model_name": model,
        "alg.policy.args.model_name": model,
        "alg.args.learning_rate": 3e-4,
        "train_evaluation.n_iters": 40,
        "train_evaluation.save_model": False,
        "seed": seed,
    }
    config = load_config(CONFIG, [f"{path}={json.dumps(value)}" for path, value in overrides.items()])
    run = train_config(
        config, base_path_to_store_results=folder, experiment_name=f"{sampler}_{seed}", quiet=True, new=True
    )
    lines = [json.loads(line) for line in (run / "val_split_metrics.jsonl").read_text().splitlines()]
    return {line["epoch"]: line["metrics"]["answers/reasoning_gym"] for line in lines}


def main() -> None:
    """Train all runs, print the means over seeds, and write all numbers to `results`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (%(default)s)")
    n_seeds = parser.parse_args().seeds
    config = load_config(CONFIG)
    samples = {split: build_datapool(config.datapool, split).samples for split in ("train", "val")}
    model = with_embedded_models(config).tokenizer.model_name
    found: dict[str, list[dict[int, float]]] = {sampler: [] for sampler in SAMPLERS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_rows(folder / "train.jsonl", samples["train"][:N_PROMPTS])
        write_rows(folder / "train.jsonl", samples["train"][N_PROMPTS : 2 * N_PROMPTS], answer="unknown")
        for split in ("val", "test"):
            write_rows(folder / f"{split}.jsonl", samples["val"])
        for seed in range(n_seeds):
            for sampler in SAMPLERS:
                found[sampler].append(accuracies(sampler, seed, folder, model))
                print(sampler, seed, found[sampler][-1], flush=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for sampler, runs in found.items():
        print(sampler, {epoch: round(fmean(run[epoch] for run in runs), 3) for epoch in runs[0]})


if __name__ == "__main__":
    main()
