"""What the run doctor found, as the report shows it: each line of `alarms.jsonl`, and in which iterations it held.

alarms.jsonl          {"alarm": "entropy_collapse", "iteration": 12, "said": ..., "advice": ..., "examples": [...]}
training_info.jsonl   doctor/entropy_collapse: 1 or 0 in each iteration from the 12th on
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl4lms_like.core.errors import RL4LMsLikeError
from rl4lms_like.tracking.record import RunRecord
from rl4lms_like.tracking.run_folder import ALARMS_FILE


@dataclass(frozen=True)
class Told:
    """An alarm as it is shown.

    Args:
        title: its name in words.
        when: the iteration that it was told in, and how long it held.
        said: what was found.
        advice: what to change.
        examples: texts that show it, each with numbers beside it.
    """

    title: str
    when: str
    said: str
    advice: str
    examples: tuple[tuple[str, str, str], ...]


def findings(run: RunRecord) -> list[Told]:
    """All alarms of a run, in the order in which they were told.

    Raises:
        RL4LMsLikeError: the file is not what a run wrote.
    """
    try:
        return [_told(run, line) for line in run.alarms]
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        file = run.path / ALARMS_FILE
        raise RL4LMsLikeError(f"{file} is not what a run wrote: {type(error).__name__}: {error}") from error


def _told(run: RunRecord, line: Mapping[str, Any]) -> Told:
    return Told(
        title=str(line["alarm"]).replace("_", " "),
        when=_when(run, line),
        said=_sentence(str(line.get("said", ""))),
        advice=_sentence(str(line.get("advice", ""))),
        examples=tuple(_example(example) for example in line.get("examples", ())),
    )


def _when(run: RunRecord, line: Mapping[str, Any]) -> str:
    """`iteration 12; held in 9 of the 14 iterations since`."""
    held = [value for _, value in run.curve(f"doctor/{line['alarm']}") if value is not None]
    since = f"; held in {sum(held):g} of the {len(held)} iterations since" if len(held) > 1 else ""
    return f"iteration {line.get('iteration')}{since}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""


def _example(example: Mapping[str, Any]) -> tuple[str, str, str]:
    """Prompt, response, and what else is known of it."""
    known = [f"{name} {value:.4g}" for name, value in example.items() if isinstance(value, int | float)]
    return str(example.get("prompt", "")), str(example.get("response", "")), ", ".join(known)
