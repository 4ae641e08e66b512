"""Accuracy with uniform prompts and with the difficulty sampler, where most prompts cannot be answered.

    python -m benchmarks.difficulty_sampler                  # seeds 0-2

The runs are those of task_configs/reasoning/tiny_spell_backward_ppo.yml with smaller steps and 128 episodes per
iteration. The prompts are 100 words, and 300 other words whose expected answer no response equals. The accuracy is that
on the 100 words (`val`) and on 293 other words that can be answered (`test`). Needs the extra `reasoning`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rl4lms_like.config.load import load_config
from rl4lms_like.core.sample import Sample
from rl4lms_like.run import train_config
from rl4lms_like.small_models.embedded import with_embedded_models
from rl4lms_like.training.inputs import build_datapool

CONFIG = Path(__file__).parents[1] / "task_configs/reasoning/tiny_spell_backward_ppo.yml"
RESULTS = Path(__file__).parent / "results" / "difficulty_sampler.json"
N_POSSIBLE, N_IMPOSSIBLE = 100, 300
SAMPLERS = {"uniform": None, "difficulty": {"id": "difficulty"}}


def write_rows(file: Path, samples: Sequence[Sample], answer: str | None = None) -> None:
    """Write prompts and answers as JSON lines; `answer` replaces all answers."""
    rows = [{"prompt": one.prompt_or_input_text, "answer": answer or one.references[0]} for one in samples]
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def accuracies(sampler: str, seed: int, folder: Path, model: str) -> dict[str, float]:
    """Train one run and return the accuracy by split and iteration."""
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "val", "test")}
    pool = {"data_files": files, "prompt_column": "prompt", "reference_column": "answer"}
    overrides = {
        "datapool": {"id": "jsonl", "args": pool, "sampler": SAMPLERS[sampler]},
        "tiny_model": None,
        "tokenizer.model_name": model,
        "alg.policy.args.model_name": model,
        "env.n_envs": 128,
        "alg.args.learning_rate": 2e-4,
        "train_evaluation.n_iters": 60,
        "train_evaluation.save_model": False,
        "seed": seed,
    }
    config = load_config(CONFIG, [f"{path}={json.dumps(value)}" for path, value in overrides.items()])
    run = train_config(
        config, base_path_to_store_results=folder, experiment_name=f"{sampler}_{seed}", quiet=True, new=True
    )
    return {
        f"{split} {line['epoch']}": line["metrics"]["answers/reasoning_gym"]
        for split in ("val", "test")
        for line in map(json.loads, (run / f"{split}_split_metrics.jsonl").read_text().splitlines())
    }


def main() -> None:
    """Train all runs, print the means over seeds, and write all numbers to `results`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (%(default)s)")
    n_seeds = parser.parse_args().seeds
    config = load_config(CONFIG)
    samples = {split: build_datapool(config.datapool, split).samples for split in ("train", "val")}
    model = with_embedded_models(config).tokenizer.model_name
    found: dict[str, list[dict[str, float]]] = {sampler: [] for sampler in SAMPLERS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        possible, others = samples["train"][:N_POSSIBLE], samples["train"][N_POSSIBLE:]
        write_rows(folder / "train.jsonl", possible)
        write_rows(folder / "train.jsonl", others[:N_IMPOSSIBLE], answer="unknown")
        write_rows(folder / "val.jsonl", possible)
        write_rows(folder / "test.jsonl", samples["val"])
        for seed in range(n_seeds):
            for sampler in SAMPLERS:
                found[sampler].append(accuracies(sampler, seed, folder, model))
                print(sampler, seed, found[sampler][-1], flush=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for sampler, runs in found.items():
        print(sampler, {key: round(fmean(run[key] for run in runs), 3) for key in runs[0]})


if __name__ == "__main__":
    main()
