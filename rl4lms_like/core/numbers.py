"""The numbers that configs take, as types: `schema` holds values against them, `wording` says them in words.

`schema` lets no number be infinite or NaN, whatever its type; `Finite` says so where a component is called from Python.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Interval
from pydantic import AllowInfNan

from rl4lms_like.core.wording import InWords

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
Finite = Annotated[float, AllowInfNan(False)]
Processes = Annotated[int, Interval(ge=0, le=1024)]
Threads = Annotated[int, Interval(ge=1, le=1024)]
"""More than this is a slip of the finger, and stops a machine before anything can say so."""
Prompts = Annotated[int, Interval(ge=1, le=65_536)]
"""Generated together; each is an environment of its own."""
Seed = Annotated[int, Interval(ge=0, le=2**32 - 1), InWords("a whole number from 0 to 4294967295")]
"""What NumPy's and torch's generators both take."""
