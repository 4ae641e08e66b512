"""Kept rollouts of a run (`train_evaluation.save_rollouts`): which there are, and their texts.

rollouts/iteration_00003.safetensors   tensors, for `train_evaluation.replay`
rollouts/iteration_00003.jsonl         one object per episode: texts, reward, KL
rollouts/critic_00001.*                rollouts of the critic's pretraining
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.system.wording import printable
from rl4lms_like.tracking.charts import format_number
from rl4lms_like.tracking.record import RunRecord, dialogue_parts, lines_of, number, spaced, written_by_a_run
from rl4lms_like.tracking.run_folder import CONFIG_FILE, ROLLOUTS
from rl4lms_like.tracking.thumbnails import KEY, N_EMBEDDED, embedded

ITERATION = "iteration"
CRITIC = "critic"
TENSORS = ".safetensors"
TEXTS = ".jsonl"
N_ITERATIONS = 12
"""Maximum number of iterations in the report."""

N_EPISODES = 10
"""Maximum number of episodes of an iteration in the report."""


def rollout_file(run_folder: Path, kind: str, number: int, ending: str) -> Path:
    """Return the path of a file of a rollout; `kind` is `ITERATION` or `CRITIC`, numbers begin at 1."""
    return run_folder / ROLLOUTS / f"{kind}_{number:05d}{ending}"


def kept_rollouts(run_folder: Path, kind: str = ITERATION, ending: str = TENSORS) -> list[int]:
    """Return the numbers of the rollouts that a run has kept, in order."""
    names = (file.name[len(kind) + 1 : -len(ending)] for file in (run_folder / ROLLOUTS).glob(f"{kind}_*{ending}"))
    return sorted(int(name) for name in names if name.isdecimal())


def ranges(numbers: list[int]) -> str:
    """Return sorted numbers in short.

    Examples:
        >>> ranges([1, 2, 3, 7])
        '1-3, 7'
    """
    # Runs of consecutive numbers: [[1, 2, 3], [7]].
    groups: list[list[int]] = []
    for iteration in numbers:
        if groups and iteration == groups[-1][-1] + 1:
            groups[-1].append(iteration)
        else:
            groups.append([iteration])

    texts = []
    for group in groups:
        texts.append(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}")
    return ", ".join(texts)


def episodes_of(
    run_folder: Path,
    *,
    iteration: int | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    contains: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the episodes of kept rollouts that meet all conditions; `contains` is in the prompt or the response.

    Raises:
        RL4LMsLikeError: the run has kept no rollouts, or not this one; or a file was not written by a run.
    """
    if not (run_folder / CONFIG_FILE).is_file():
        raise RL4LMsLikeError(f"{run_folder} is not a run folder: it has no {CONFIG_FILE}")
    iterations = kept_rollouts(run_folder, ending=TEXTS)
    if not iterations:
        raise RL4LMsLikeError(f"{run_folder} has kept no rollouts: its train_evaluation.save_rollouts was false")
    if iteration is not None and iteration not in iterations:
        raise RL4LMsLikeError(f"{run_folder} has no rollout of iteration {iteration}, only of {ranges(iterations)}")

    # `yield` is outside of the `with`: an error in the caller's loop is not an error of this file.
    for kept_iteration in iterations if iteration is None else [iteration]:
        file = rollout_file(run_folder, ITERATION, kept_iteration, TEXTS)
        for episode in lines_of(file):
            with written_by_a_run(file):
                is_low = min_reward is not None and episode["reward"] < min_reward
                is_high = max_reward is not None and episode["reward"] > max_reward
                is_other = contains is not None and contains not in f"{episode['prompt']}\n{episode['response']}"
            if not (is_low or is_high or is_other):
                yield episode


def described(episode: Mapping[str, Any]) -> str:
    """Return an episode as one line of text."""
    facts = [
        f"iteration {episode.get('iteration')}, episode {episode.get('episode')}",
        f"reward {format_number(number(episode.get('reward')))}",
        f"{episode.get('length')} tokens",
    ]
    kl = number(episode.get("kl"))
    if kl is not None:  # without a reference model there is none
        facts.append(f"KL {format_number(kl)}")
    if episode.get(KEY):
        facts.append(", ".join(map(str, episode[KEY])))
    texts = [str(episode.get("response"))]
    if episode.get("turns"):  # a text of the environment has a mark before it
        texts = [f"env: {text}" if is_observed else text for is_observed, text in dialogue_parts(episode["turns"])]
    return printable(" | ".join([" · ".join(facts), str(episode.get("prompt")), *texts]).replace("\n", "⏎"))


def rollouts_of(run: RunRecord, credit: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what the report shows of the kept rollouts: iterations, their episodes, and links to their tokens.

    Episodes with recorded tokens (`credit_of`) are always shown. A file that no run wrote is an `RL4LMsLikeError`.
    """
    kept_iterations = kept_rollouts(run.path, ending=TEXTS)
    if not kept_iterations:
        return None

    # Iteration -> the numbers of its episodes with recorded tokens.
    with_tokens: dict[int, set[int | None]] = {}
    if credit is not None:
        for recorded in credit["iterations"]:
            with_tokens[recorded["iteration"]] = {episode["number"] for episode in recorded["episodes"]}

    # The iterations that the section on credit shows, so that its episodes can be linked.
    shown = [iteration for iteration in kept_iterations if iteration in with_tokens]
    iterations = []
    for iteration in shown or spaced(kept_iterations, N_ITERATIONS):
        file = rollout_file(run.path, ITERATION, iteration, TEXTS)
        with written_by_a_run(file):
            table = _table(run.path, lines_of(file), with_tokens.get(iteration, set()))
            iterations.append({"iteration": iteration, **table})
    return {"iterations": iterations, "n_kept": len(kept_iterations)}


def _table(folder: Path, episodes: list[dict[str, Any]], with_tokens: set[int | None]) -> dict[str, Any]:
    """Return the rows of a rollout's table, from the highest reward to the lowest."""
    ranked = sorted(episodes, key=lambda episode: -episode["reward"])
    spaced_episodes = spaced(ranked, N_EPISODES)

    # Episodes whose tokens are shown elsewhere on the page are always in the table, which links to them.
    rows: list[dict[str, Any]] = []
    for episode in ranked:
        has_tokens = episode["episode"] in with_tokens
        if not has_tokens and episode not in spaced_episodes:
            continue
        row = {
            "number": int(episode["episode"]),
            "prompt": str(episode["prompt"]).strip(),
            "response": str(episode["response"]).strip(),
            "dialogue": dialogue_parts(episode.get("turns")),
            "reward": format_number(number(episode["reward"])),
            "length": int(episode["length"]),
            "kl": format_number(number(episode["kl"])) if "kl" in episode else None,
            "has_tokens": has_tokens,
            "images": embedded(folder, episode) if len(rows) < N_EMBEDDED else [],
        }
        rows.append(row)
    return {"rows": rows, "n_episodes": len(episodes)}
