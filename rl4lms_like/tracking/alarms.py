"""Alarms of the run doctor in the report: each line of `alarms.jsonl`, with the iterations in which it was active.

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
    """Alarm as shown in the report.

    Args:
        title: name of the alarm.
        when: iteration in which it was raised, and number of iterations in which it was active.
        said: description of the problem.
        advice: suggested change.
        examples: example texts as (prompt, response, numbers).
    """

    title: str
    when: str
    said: str
    advice: str
    examples: tuple[tuple[str, str, str], ...]


def findings(run: RunRecord) -> list[Told]:
    """Return all alarms of a run, in the order in which they were raised.

    Raises:
        RL4LMsLikeError: the file was not written by a run.
    """
    try:
        return [_told(run, line) for line in run.alarms]
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        file = run.path / ALARMS_FILE
        raise RL4LMsLikeError(f"{file} was not written by a run: {type(error).__name__}: {error}") from error


def _told(run: RunRecord, line: Mapping[str, Any]) -> Told:
    return Told(
        title=str(line["alarm"]).replace("_", " "),
        when=_when(run, line),
        said=_sentence(str(line.get("said", ""))),
        advice=_sentence(str(line.get("advice", ""))),
        examples=tuple(_example(example) for example in line.get("examples", ())),
    )


def _when(run: RunRecord, line: Mapping[str, Any]) -> str:
    """Return for instance `iteration 12; active in 9 of the 14 iterations since`."""
    held = [value for _, value in run.curve(f"doctor/{line['alarm']}") if value is not None]
    since = f"; active in {sum(held):g} of the {len(held)} iterations since" if len(held) > 1 else ""
    return f"iteration {line.get('iteration')}{since}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""


def _example(example: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return prompt, response and the numbers of an example."""
    known = [f"{name} {value:.4g}" for name, value in example.items() if isinstance(value, int | float)]
    return str(example.get("prompt", "")), str(example.get("response", "")), ", ".join(known)
