"""How many pairs of text and references a score compares in a second: this library's beside its reference package.

    python -m benchmarks.scoring_speed              10,000 real pairs in five rounds
    python -m benchmarks.scoring_speed --quick      300 pairs in two rounds, nothing written: does everything run?

    one round     ours, theirs of score A; ours, theirs of score B; ...      so that both see the same weather; in every
                  other round theirs comes first. Each round has pairs of its own: no text is scored twice by a side
    ours          the reward, in batches of 128, one process
    theirs        the reference package in a plain loop, its scorer built once
    workers       the reward on episodes: in the process itself, and by two reward workers, which decode the tokens too

Both must give equal numbers for every pair, or the run stops. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.ppo_iteration import RESULTS, machine
from benchmarks.real_pairs import Pair, real_pairs

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
BATCH = 128
CLOSE = 1e-9
WORKERS = 2

Loop = Callable[[Sequence[Pair]], list[float]]

REWARDS_AND_ARGS: dict[str, tuple[str, dict[str, Any]]] = {
    "meteor": ("meteor", {}),
    "rouge1": ("rouge", {"rouge_type": "rouge1"}),
    "rougeL": ("rouge", {"rouge_type": "rougeL"}),
    "rougeL, best reference": ("rouge", {"rouge_type": "rougeL", "use_single_ref": False}),
    "rougeLsum": ("rouge", {"rouge_type": "rougeLsum"}),
    "rouge_combined": ("rouge_combined", {}),
    "bleu": ("bleu", {}),
    "sacre_bleu": ("sacre_bleu", {}),
    "ter": ("ter", {}),
    "chrf": ("chrf", {}),
    "rouge_l_max": ("rouge_l_max", {}),
}
"""Label -> the reward. py-rouge, the reference of `rouge_l_max`, cannot be imported today."""

FIRST_REFERENCE_ONLY = {"bleu"}
"""Where ours counts the shortest reference's length and theirs the nearest one's, pairs have one reference."""


def reference_loops() -> dict[str, Loop]:
    """By label: the reference package in a plain loop."""
    import sacrebleu
    from nltk import word_tokenize
    from nltk.translate.meteor_score import meteor_score
    from rouge_score.rouge_scorer import RougeScorer

    from rl4lms_like.scoring.nltk_data import wordnet

    reader = wordnet()
    combined = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    plain_bleu = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    bleu, ter, chrf = sacrebleu.BLEU(force=True), sacrebleu.TER(), sacrebleu.CHRF()

    def meteor(pairs: Sequence[Pair]) -> list[float]:
        return [
            meteor_score([word_tokenize(text) for text in texts], word_tokenize(generated), wordnet=reader)
            for generated, texts in pairs
        ]

    def rouge(kind: str) -> Loop:
        scorer = RougeScorer([kind], use_stemmer=True)
        return lambda pairs: [scorer.score(texts[0], generated)[kind].fmeasure for generated, texts in pairs]

    def best_rouge(pairs: Sequence[Pair]) -> list[float]:
        scorer = RougeScorer(["rougeL"], use_stemmer=True)
        return [scorer.score_multi(texts, generated)["rougeL"].fmeasure for generated, texts in pairs]

    def mean_of_three(pairs: Sequence[Pair]) -> list[float]:
        scores = (combined.score(texts[0], generated) for generated, texts in pairs)
        return [sum(score.fmeasure for score in three.values()) / 3 for three in scores]

    def shares(metric: Any) -> Loop:
        return lambda pairs: [
            metric.corpus_score([generated], [[text] for text in texts]).score / 100 for generated, texts in pairs
        ]

    return {
        "meteor": meteor,
        "rouge1": rouge("rouge1"),
        "rougeL": rouge("rougeL"),
        "rougeL, best reference": best_rouge,
        "rougeLsum": rouge("rougeLsum"),
        "rouge_combined": mean_of_three,
        "bleu": shares(plain_bleu),
        "sacre_bleu": shares(bleu),
        "ter": lambda pairs: [1 - fraction for fraction in shares(ter)(pairs)],
        "chrf": shares(chrf),
    }


def our_loop(label: str) -> Loop:
    """The reward, built once, on batches as a rollout has them."""
    from rl4lms_like.rewards import REWARDS

    id, args = REWARDS_AND_ARGS[label]
    reward = REWARDS.get(id, args)

    def score(pairs: Sequence[Pair]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(pairs), BATCH):
            texts, references = zip(*pairs[start : start + BATCH], strict=True)
            scores += reward([""] * len(texts), list(texts), list(references), [True] * len(texts))
        return scores

    return score


def timed(loop: Loop, pairs: Sequence[Pair]) -> tuple[dict[str, float], list[float]]:
    """Wall and CPU seconds of one pass, and its scores."""
    wall, cpu = time.perf_counter(), time.process_time()
    scores = loop(pairs)
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}, scores


def measure(rounds: Sequence[Sequence[Pair]], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By label: the rounds of ours and theirs, and the largest difference of a pair's two scores.

    Args:
        rounds: the pairs of each; the first is a warm-up and not kept.
        labels: what to measure.

    Raises:
        AssertionError: the two differ by more than rounding.
    """
    theirs = reference_loops()
    loops = {label: {"ours": our_loop(label), "theirs": theirs.get(label)} for label in labels}
    results: dict[str, dict[str, Any]] = {label: {"ours": [], "theirs": [], "difference": 0.0} for label in labels}
    for number, pairs in enumerate(rounds):
        for label, both in loops.items():
            chosen = [(text, refs[:1]) for text, refs in pairs] if label in FIRST_REFERENCE_ONLY else pairs
            scores, line = {}, f"round {number} {label:22}"
            for side in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
                loop = both[side]
                if loop is None:
                    continue
                seconds, scores[side] = timed(loop, chosen)
                line += f"  {side} {len(pairs) / seconds['cpu_s']:8.0f} pairs/s"
                if number:
                    results[label][side].append({"pairs": len(pairs), **seconds})
            if len(scores) == 2:
                difference = max(abs(a - b) for a, b in zip(scores["ours"], scores["theirs"], strict=True))
                assert difference < CLOSE, f"{label}: a pair's scores differ by {difference}"
                results[label]["difference"] = max(results[label]["difference"], difference)
            print(line, flush=True)
    return results


def measure_workers(pairs: Sequence[Pair], rounds: int, labels: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """By label: wall seconds of all episodes in the process itself and by reward workers, after one warm-up."""
    from rl4lms_like.core.observation import Observation, TextLayout
    from rl4lms_like.core.sample import Sample
    from rl4lms_like.envs.workers import RewardWorkers
    from rl4lms_like.rewards import REWARDS
    from rl4lms_like.rewards.call import score_episodes
    from rl4lms_like.testing.models import make_tokenizer

    tokenizer = make_tokenizer()
    written = [np.asarray(tokenizer(text + "<eos>", add_special_tokens=False)["input_ids"]) for text, _ in pairs]
    layout = TextLayout(tokenizer, max_prompt_length=4, max_context_length=max(map(len, written)))
    (prompt,) = layout.encode_all([""])

    def episodes() -> list[Any]:
        """Anew at every call, for they remember their decoded texts."""
        return [
            Observation(Sample("", "", texts), prompt, response, len(response), layout)
            for (_, texts), response in zip(pairs, written, strict=True)
        ]

    results: dict[str, dict[str, list[float]]] = {}
    for label in labels:
        id, args = REWARDS_AND_ARGS[label]
        reward = REWARDS.get(id, args)
        workers = RewardWorkers(reward, layout, WORKERS)
        process_s, workers_s = [], []
        for _ in range(rounds + 1):
            batch, start = episodes(), time.perf_counter()
            alone = score_episodes(reward, batch)
            process_s.append(time.perf_counter() - start)
            batch, start = episodes(), time.perf_counter()
            shared = workers.score(batch)
            workers_s.append(time.perf_counter() - start)
            assert np.array_equal(alone, shared.total), f"{label}: workers score differently"
        workers.close()
        results[label] = {"process_s": process_s[1:], "workers_s": workers_s[1:]}
        print(f"workers {label:22} {median(process_s[1:]):.2f} s -> {median(workers_s[1:]):.2f} s", flush=True)
    return results


def summary(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By label: pairs per CPU second (medians of the rounds), and the median ratio within a round."""
    rows: dict[str, dict[str, float]] = {}
    for label, result in results.items():
        ours, theirs = ([round_["pairs"] / round_["cpu_s"] for round_ in result[side]] for side in ("ours", "theirs"))
        rows[label] = {"ours_per_s": median(ours)}
        if theirs:
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            rows[label] |= {"theirs_per_s": median(theirs), "ratio": median(ratios)}
            rows[label] |= {"smallest_ratio": min(ratios), "largest_ratio": max(ratios)}
    return rows


def show(rows: dict[str, dict[str, float]], workers: dict[str, dict[str, list[float]]]) -> None:
    table = Table("score", "ours, pairs/s", "theirs, pairs/s", "ratio", "of rounds", "2 workers")
    for label, row in rows.items():
        theirs = ["-"] * 3
        if "ratio" in row:
            spread = f"{row['smallest_ratio']:.2f} to {row['largest_ratio']:.2f}"
            theirs = [f"{row['theirs_per_s']:.0f}", f"{row['ratio']:.2f}", spread]
        seconds = workers.get(label)
        gain = f"{median(seconds['process_s']) / median(seconds['workers_s']):.2f}x" if seconds else "-"
        table.add_row(label, f"{row['ours_per_s']:.0f}", *theirs, gain)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-workers", action="store_true")
    parser.add_argument("--quick", action="store_true", help="300 pairs in two rounds, nothing written")
    parser.add_argument("--data", type=Path, default=DATA)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs, arguments.rounds = 300, 2
    if (arguments.data / "nltk_data").is_dir():
        import nltk

        nltk.data.path.insert(0, str(arguments.data / "nltk_data"))
        os.environ["NLTK_DATA"] = str(arguments.data / "nltk_data")  # for the workers
    labels = list(REWARDS_AND_ARGS)
    size = arguments.pairs // arguments.rounds
    pairs = real_pairs(arguments.data, size * (arguments.rounds + 1))
    results = measure([pairs[start : start + size] for start in range(0, len(pairs), size)], labels)
    workers = {} if arguments.no_workers else measure_workers(pairs[size:], 3, labels)
    rows = summary(results)
    show(rows, workers)
    if arguments.quick:
        return
    found = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "settings": {"pairs": size * arguments.rounds, "rounds": arguments.rounds, "batch": BATCH, "workers": WORKERS},
        "packages": {package: version(package) for package in ("nltk", "rouge_score", "sacrebleu")},
        "summary": rows,
        "rounds": results,
        "workers": workers,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "scoring_speed.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
