"""Draw the pictures of the documentation from the results of the benchmarks.

    python -m scripts.docs.pictures                    # writes docs/pictures/*.svg

This module says what each picture shows, and `scripts.docs.charts` draws it. `benchmarks.study.report` makes the
pictures of the study.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.study.report import pictures as study_pictures
from scripts.docs.charts import Curve, bars_picture, curves_picture

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"


def _results(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def verifiable_answers() -> str:
    """Learning curves on sums whose results are checked."""
    results = _results("learning_curves.json")
    curves = [
        Curve.of_seeds(label, seeds, results["responses_per_iteration"]) for label, seeds in results["rewards"].items()
    ]
    n_seeds = len(next(iter(results["rewards"].values())))
    subtitle = f"fraction of right results, mean ± std of {n_seeds} seeds"
    return curves_picture("A tiny GPT-2 learns to add", subtitle, "responses", curves, (0.2, 1.0))


def three_rewards() -> str:
    """Learning curves of PPO with rewards of three kinds."""
    runs = _results("critic_techniques.json")["runs"]
    labels = {"numbers": "numbers", "sentiment": "sentiment", "reasoning": "spelling"}
    curves = []
    for task, label in labels.items():
        seeds = [run["reward"] for run in runs[task]["today"].values()]
        curves.append(Curve.of_seeds(label, seeds, 100 / len(seeds[0])))
    return curves_picture("PPO on three tasks", "reward, mean ± std of ten seeds", "% of the run", curves, (0.0, 1.0))


def _ratios_to_trl(of_iteration: str, of_step: str) -> list[tuple[str, float]]:
    """Return this library's cost divided by TRL's, of GRPO by the length of prompt and response, of DPO and KTO."""
    shapes = _results("grpo_iteration.json")["shapes"]
    ratios = []
    for shape, label in (("i", "GRPO, 5 + 20 tokens"), ("ii", "GRPO, 64 + 48"), ("ii-long", "GRPO, 256 + 48")):
        ours, trl = (shapes[shape]["summary"][system][of_iteration] for system in ("ours_grpo", "trl_grpo"))
        ratios.append((label, ours["median"] / trl["median"] if isinstance(ours, dict) else ours / trl))

    steps = _results("preference_speed.json")
    for objective in ("dpo", "kto"):
        for size, label in ((778, "778"), (50257, "50k")):
            ratio = steps[f"{objective}, vocabulary {size}"]["ratio"][of_step]
            ratios.append((f"{objective.upper()}, vocabulary {label}", ratio))
    return ratios


def cpu_time() -> str:
    """CPU time of an iteration of GRPO, and of a step of DPO and KTO."""
    subtitle = "of an iteration or step; TRL = 1, less is better"
    return bars_picture("CPU time next to TRL 1.16", subtitle, _ratios_to_trl("cpu_s", "cpu_ms"))


def memory() -> str:
    """Peak memory of the same processes."""
    subtitle = "of the process; TRL = 1, less is better"
    return bars_picture("Peak memory next to TRL 1.16", subtitle, _ratios_to_trl("peak_mb", "peak_mb"))


def ppo_speed() -> str:
    """Time of an iteration of PPO, here and in TRL, next to a loop that does the necessary work only."""
    shapes = _results("ppo_iteration.json")["shapes"]
    bars = []
    for shape, result in shapes.items():
        for system, label in (("ours", "this library"), ("trl_ppo", "TRL 1.12")):
            bars.append((f"{shape}, {label}", result["summary"][system]["times_bare"]["median"]))
    return bars_picture("Time of a PPO iteration", "bare loop = 1, less is better", bars)


def _critic_free(family: str) -> str:
    summary = _results("critic_free/results.json")["summary"]
    bars = []
    for label, scores in summary.items():
        if label.endswith(family):
            bars.append((label.removesuffix(f" {family}"), scores["test:synthetic/increasing_numbers_in_text"]["mean"]))
    return bars_picture(f"Increasing numbers, tiny {family}", "reward after training; best: 1, before: 0.33", bars)


def critic_free_gpt2() -> str:
    """Reward of a tiny GPT-2 after training with each critic-free algorithm."""
    return _critic_free("GPT-2")


def critic_free_t5() -> str:
    """Reward of a tiny T5 after training with each critic-free algorithm."""
    return _critic_free("T5")


PICTURES_OF: dict[str, Callable[[], str]] = {
    "verifiable_answers.svg": verifiable_answers,
    "three_rewards.svg": three_rewards,
    "cpu_time.svg": cpu_time,
    "memory.svg": memory,
    "ppo_speed.svg": ppo_speed,
    "critic_free_gpt2.svg": critic_free_gpt2,
    "critic_free_t5.svg": critic_free_t5,
}


def drawn() -> Iterator[tuple[Path, str]]:
    """Yield file and content of each picture."""
    for name, draw in PICTURES_OF.items():
        yield PICTURES / name, draw()
    for name, content in study_pictures(RESULTS / "study"):
        yield PICTURES / name, content


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for file, content in drawn():
        file.write_text(content, encoding="utf-8")
        print(file.relative_to(ROOT))
