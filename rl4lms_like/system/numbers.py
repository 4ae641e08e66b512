"""Constrained types of numbers and days for configs. `schema` validates values against them, `wording` describes them.

`schema` rejects infinite and NaN numbers of any type; `Finite` also does so where a component is called from Python.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval
from pydantic import AllowInfNan, BeforeValidator

from rl4lms_like.system.wording import InWords

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
BlockLength = Annotated[int, Ge(2)]
"""Tokens of a text of which the first one is not predicted."""
Fraction = Annotated[float, Interval(ge=0, le=1)]
AboveZero = Annotated[float, Interval(gt=0, le=1)]
Finite = Annotated[float, AllowInfNan(False)]
Processes = Annotated[int, Interval(ge=0, le=1024)]
Threads = Annotated[int, Interval(ge=1, le=1024)]
"""The limit catches typing errors, which would exhaust the machine before any message could be shown."""
Prompts = Annotated[int, Interval(ge=1, le=65_536)]
"""Number of prompts that are generated together; each is a separate environment."""
Seed = Annotated[int, Interval(ge=0, le=2**32 - 1), InWords("a whole number from 0 to 4294967295")]
"""Range that both NumPy's and torch's generators accept."""


def _iso_day(value: Any) -> Any:
    # YAML reads an unquoted day as a date. JSON has no dates, so that configs store days as texts.
    try:
        return value.isoformat() if isinstance(value, date) else date.fromisoformat(value).isoformat()
    except (TypeError, ValueError):
        raise ValueError(f"expected {_DAY.text}, got {value!r}") from None


_DAY = InWords("a day such as 2026-11-20")
Day = Annotated[str, BeforeValidator(_iso_day), _DAY]
