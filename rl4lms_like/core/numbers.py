"""The numbers that configs take, as types: `schema` holds values against them, `wording` says them in words."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Interval
from pydantic import AllowInfNan

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
Finite = Annotated[float, AllowInfNan(False)]
