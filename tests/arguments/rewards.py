"""How each argument of the rewards is seen to act: by id, then by argument."""

from __future__ import annotations

from tests.arguments import rewards_of_models, rewards_of_rules
from tests.arguments.seen import Acts, Silent

ROWS: dict[str, dict[str, Acts | Silent]] = {**rewards_of_rules.ROWS, **rewards_of_models.ROWS}
