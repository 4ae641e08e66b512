"""Six of RL4LMs' files learn: their sizes on tiny models, with the task's reward and with a random one.

    python -m benchmarks.rl4lms_files                    five seeds, about 80 minutes of one core
    python -m benchmarks.rl4lms_files --only common_gen  one of them

`batch_size`, `n_steps`, `n_envs`, `n_epochs`, the KL penalty and the lengths are those of the file. Changed are the
model (a GPT-2 or T5 of about 200k parameters, trained beforehand on the training split), the data (film opinions of the
library's grammar, written in the format of the task's data set), the reward where it needs a model or WordNet, the
learning rate and `n_iters`.

A file learns if the mean of the held-out score after training, over seeds, lies above the 95 % interval of the score
before training, and does not where the reward is random. The interval of the paired differences is reported beside it.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from scipy import stats

from rl4lms_like.benchmarking.runner import benchmark
from rl4lms_like.config.binding import ComponentConfig
from rl4lms_like.data_pools.film_opinions import film_opinions
from rl4lms_like.small_models.warm_start import make_model, make_tokenizer, train_language_model
from rl4lms_like.training.inputs import build_datapool

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "rl4lms_files"
WORK = Path(__file__).parent / ".models" / "rl4lms_files"

N_CELLS = 4
SPLITS = {"train": 3000, "val": 200, "test": 200}


@dataclass(frozen=True)
class Task:
    """Changes to one file.

    Args:
        file: in `task_configs`.
        metric: the key of the held-out score.
        learning_rate: of the tiny policy.
        n_iters: at most 20.
        changes: to the file's other values.
        supervised_steps: optimizer steps of the T5 that training starts from.
        supervised_data: what it learns, instead of the task's own data.
        size: of that T5, instead of two layers of width 64.
    """

    file: str
    metric: str
    learning_rate: float
    n_iters: int
    changes: dict[str, Any] = field(default_factory=dict)
    supervised_steps: int = 400
    supervised_data: str | None = None
    size: dict[str, int] = field(default_factory=dict)


SENTIMENT = {"reward_fn": {"id": "sentiment"}, "train_evaluation.metrics": [{"id": "sentiment"}, {"id": "length"}]}
ROUGE_L = [{"id": "rouge"}, {"id": "length"}]
TASKS = {
    "imdb_ppo": Task("imdb_text_continuation/gpt2_ppo.yml", "semantic/sentiment", 1e-4, 10, SENTIMENT),
    "imdb_nlpo": Task("imdb_text_continuation/gpt2_nlpo.yml", "semantic/sentiment", 1e-4, 10, SENTIMENT),
    "summarization": Task(
        "summarization/t5_ppo.yml",
        "lexical/rouge_rouge1",
        1e-4,
        6,
        {"train_evaluation.metrics": ROUGE_L},
        1000,
        "articles to repeat",
        size={"n_layer": 1, "n_embd": 64},
    ),
    "common_gen": Task(
        "common_gen/t5_ppo.yml",
        "lexical/rouge_rougeL",
        1e-4,
        12,
        {
            "reward_fn": {"id": "rouge", "args": {"rouge_type": "rougeL", "shaping_fn": "common_gen_repeat_penalty"}},
            "train_evaluation.metrics": ROUGE_L,
        },
        100,
    ),
    "totto": Task(
        "totto/t5_ppo.yml",
        "lexical/rouge_rougeL",
        1e-4,
        10,
        {
            "reward_fn": {"id": "rouge", "args": {"rouge_type": "rougeL"}},
            "train_evaluation.metrics": ROUGE_L,
        },
        100,
    ),
    "iwslt": Task(
        "iwslt2017/t5_ppo.yml",
        "lexical/ter",
        2e-4,
        4,
        {"train_evaluation.metrics": [{"id": "ter"}, {"id": "length"}]},
    ),
}


def random_reward(*, prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    """Return a number in [-1, 1) for each text that says nothing of it: its hash.

    The mean is 0, since a discounted reward (`gamma`) of positive mean favours short responses.
    """
    digests = [hashlib.sha256(f"{p}\0{r}".encode()).digest() for p, r in zip(prompts, responses, strict=True)]
    return [int.from_bytes(digest[:4], "big") / 2**31 - 1.0 for digest in digests]


# --- data, in the formats of the data sets ---------------------------------------------------------------------------


def opinions(split: str) -> list[str]:
    """Return the film opinions of a split."""
    return film_opinions(SPLITS[split], seed=0, split=split)


def write_imdb(folder: Path) -> None:
    """Reviews of three opinions; `val` is drawn from `train` by the pool."""
    for split in ("train", "test"):
        texts = opinions(split)
        rows = [{"text": " ".join(texts[i : i + 3]), "label": i % 2} for i in range(0, len(texts) - 2, 1)]
        write_lines(folder / f"{split}.jsonl", map(json.dumps, rows))


def write_articles(folder: Path, repeated: bool = False) -> None:
    """Articles of two to six opinions; the summary is the first sentence of the first two, or the article again."""
    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        texts = opinions(split)
        rows = []
        for i in range(len(texts) - 5):
            article = " ".join(texts[i : i + 2 + i % 5])
            summary = " ".join(text.split(".")[0] + "." for text in texts[i : i + 2])
            rows.append({"id": str(i), "article": article, "highlights": article if repeated else summary})
        write_lines(folder / f"{name}.jsonl", map(json.dumps, rows))


def write_concepts(folder: Path) -> None:
    """The longest words of an opinion's first sentence, sorted; the sentence is the reference."""
    for split, name in (("train", "train"), ("val", "dev"), ("test", "test")):
        sentences = [text.split(".")[0] + "." for text in opinions(split)]
        words = [sorted(set(s.rstrip(".").lower().split()), key=lambda word: (len(word), word)) for s in sentences]
        concepts = [sorted(each[-4:]) for each in words]
        write_lines(folder / f"commongen.{name}.src_alpha.txt", map(" ".join, concepts))
        write_lines(folder / f"commongen.{name}.tgt.txt", sentences)


def write_tables(folder: Path) -> None:
    """One-row tables whose cells are the first, third ... word of an opinion's first sentence."""
    for split, name in (("train", "train"), ("val", "dev"), ("test", "test")):
        rows = []
        for number, text in enumerate(opinions(split)):
            sentence = text.split(".")[0] + "."
            words = sentence.rstrip(".").split()[::2][:N_CELLS]
            cells = [
                [{"value": value, "is_header": header, "column_span": 1, "row_span": 1} for value in values]
                for header, values in ((True, [f"word {i}" for i in range(len(words))]), (False, words))
            ]
            annotation = dict.fromkeys(
                ("original_sentence", "sentence_after_deletion", "sentence_after_ambiguity", "final_sentence"), sentence
            )
            rows.append(
                {
                    "table": cells,
                    "highlighted_cells": [[1, i] for i in range(len(words))],
                    "example_id": number,
                    "table_page_title": "Films",
                    "table_section_title": "Opinions",
                    "table_webpage_url": "",
                    "table_section_text": "",
                    "sentence_annotations": [annotation],
                    "overlap_subset": False,
                }
            )
        write_lines(folder / f"totto_{name}_data.jsonl", map(json.dumps, rows))


def write_translations(folder: Path) -> None:
    """Opinions and the same in a made-up language: every word spelled backwards."""
    for split in SPLITS:
        texts = [text.split(".")[0] for text in opinions(split)]
        write_lines(folder / f"{split}.en", texts)
        write_lines(folder / f"{split}.de", (" ".join(word[::-1] for word in text.split()) for text in texts))


def write_lines(file: Path, lines: Iterator[str] | list[str] | map[str]) -> None:
    """Write one line a text."""
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


DATA = {
    "imdb": write_imdb,
    "cnn_daily_mail": write_articles,
    "articles to repeat": functools.partial(write_articles, repeated=True),
    "commongen": write_concepts,
    "totto": write_tables,
    "iwslt2017en_de": write_translations,
}


# --- models ----------------------------------------------------------------------------------------------------------


def make_data(name: str) -> Path:
    """Write the data of a pool, once."""
    folder = WORK / "data" / name.replace(" ", "_")
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        DATA[name](partial)
        partial.rename(folder)
    return folder


def make_start(name: str, task: Task, blocks: Mapping[str, Any]) -> Path:
    """Return the folder of the model that training starts from, which is made once."""
    pool = blocks["datapool"]["id"]
    folder = WORK / "models" / f"{pool}_{task.supervised_steps}"
    if (folder / "model" / "config.json").exists():
        return folder / "model"
    data = make_data(task.supervised_data or pool)
    if pool == "imdb":
        texts = [json.loads(line)["text"] for line in (data / "train.jsonl").read_text().splitlines()]
        tokenizer = make_tokenizer(texts)
        model = make_model(tokenizer, n_positions=160)
        train_language_model(model, tokenizer, texts, steps=1200)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        return folder / "model"
    pairs = build_datapool(
        ComponentConfig(id=pool, args={**blocks["datapool"]["args"], "data_dir": str(data)}), "train"
    )
    texts = [text for sample, _ in pairs for text in (sample.prompt_or_input_text, *sample.references)]
    tokenizer = make_tokenizer(texts)
    make_model(tokenizer, family="t5", **task.size).save_pretrained(folder / "random")
    tokenizer.save_pretrained(folder / "random")
    config = {
        "tokenizer": {"model_name": str(folder / "random"), "max_length": blocks["env"]["args"]["max_prompt_length"]},
        "datapool": {**blocks["datapool"], "args": {**blocks["datapool"]["args"], "data_dir": str(data)}},
        "alg": {
            "id": "supervised",
            "model_type": "seq2seq",
            "model_name": str(folder / "random"),
            "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 20},
            "training_args": {
                "max_steps": task.supervised_steps,
                "per_device_train_batch_size": 16,
                "learning_rate": 5e-3,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 50,
                "logging_steps": 100,
                "save_strategy": "no",
            },
        },
        "train_evaluation": {"eval_batch_size": 100, "metrics": [{"id": "length"}]},
        "seed": 0,
        "device": "cpu",
        "n_threads": 1,
    }
    file = folder / "supervised.yml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "rl4lms_like", "train", str(file), "--base_path_to_store_results", str(folder)]
    subprocess.run([*command, "--project_name", "runs", "--experiment_name", "supervised"], check=True)
    (folder / "runs" / "supervised" / "model").rename(folder / "model")
    return folder / "model"


# --- the benchmark ---------------------------------------------------------------------------------------------------


def write_spec(names: list[str], seeds: int, processes: int) -> Path:
    """Write the spec of `rl4lms-like benchmark`: every file with its reward and with a random one."""
    runs: dict[str, Any] = {}
    for name in names:
        task = TASKS[name]
        file = REPOSITORY / "task_configs" / task.file
        blocks = yaml.safe_load(file.read_text())
        model = str(make_start(name, task, blocks))
        own = {
            "tokenizer.model_name": model,
            "alg.policy.args.model_name": model,
            "alg.args.learning_rate": task.learning_rate,
            "datapool.args.data_dir": str(make_data(blocks["datapool"]["id"])),
            "train_evaluation.n_iters": task.n_iters,
            "train_evaluation.eval_batch_size": 100,
            "train_evaluation.generation_kwargs": None,
            **task.changes,
        }
        runs[name] = {"config": str(file), "set": own}
        noise = {"id": "python", "args": {"function": "benchmarks.rl4lms_files:random_reward"}}
        runs[f"{name} random"] = {"config": str(file), "set": {**own, "reward_fn": noise}}
    spec = {
        "name": "rl4lms_files",
        "processes": processes,
        "seeds": seeds,
        "base": {
            "train_evaluation.save_model": False,
            "train_evaluation.max_eval_samples": 200,
            "train_evaluation.n_credit_episodes": 0,
            "train_evaluation.eval_every": 1000,
            "device": "cpu",
            "n_threads": 1,
        },
        "runs": runs,
        "metrics": sorted({TASKS[name].metric for name in names}),
        "results": str(WORK / "runs"),
    }
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / "spec.yml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


def scores(label: str, metric: str) -> list[tuple[float, float]]:
    """Return the held-out score before and after training, for each seed that is done."""
    found = []
    for folder in sorted((WORK / "runs" / "runs" / label).glob("seed_*")):
        lines = [json.loads(line) for line in (folder / "test_split_metrics.jsonl").read_text().splitlines()]
        if (folder / "result.json").exists() and len(lines) > 1:
            found.append((lines[0]["metrics"][metric], lines[-1]["metrics"][metric]))
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean (Student's t)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return mean - half, mean + half


def summarize(names: list[str]) -> list[dict[str, Any]]:
    """Return a row for each run: score before and after, and whether it rose above the interval of the start."""
    rows = []
    for name in names:
        sign = -1 if TASKS[name].metric == "lexical/ter" else 1
        for label in (name, f"{name} random"):
            pairs = scores(label, TASKS[name].metric)
            if not pairs:
                continue
            before, after = ([pair[i] for pair in pairs] for i in (0, 1))
            low, high = interval(before)
            mean = statistics.fmean(after)
            rows.append(
                {
                    "run": label,
                    "metric": TASKS[name].metric,
                    "better": "lower" if sign < 0 else "higher",
                    "seeds": len(pairs),
                    "before": statistics.fmean(before),
                    "before_interval": [low, high],
                    "after": mean,
                    "after_by_seed": after,
                    "difference_interval": list(interval([sign * (new - old) for old, new in pairs])),
                    "has_learned": bool(mean > high if sign > 0 else mean < low),
                }
            )
    return rows


def main() -> int:
    """Make data and models, run what is not done, write `results/rl4lms_files/summary.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(TASKS), help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    names = options.only.split(",")
    os.chdir(REPOSITORY)
    status = benchmark(write_spec(names, options.seeds, options.processes))
    rows = summarize(names)
    for row in rows:
        (low, high), gain = row["before_interval"], row["difference_interval"]
        print(
            f"{row['run']:24} {row['metric']:22} {row['before']:.3f} [{low:.3f}, {high:.3f}] -> {row['after']:.3f}  "
            f"{'learned' if row['has_learned'] else 'no better'}; gain [{gain[0]:.3f}, {gain[1]:.3f}]"
        )
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
