"""The table of model sizes is what its command prints, and its estimates are those of a run on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.docs.model_sizes import SETUPS, rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
FAST = [setup for setup in SETUPS if setup.model == "Qwen2.5 0.5B" or "distributed.strategy" in setup.keys][:3]


@pytest.mark.parametrize(
    "setups",
    [
        pytest.param(FAST, id="fast"),
        pytest.param([setup for setup in SETUPS if setup not in FAST], id="others", marks=pytest.mark.slow),
    ],
)
def test_the_page_has_the_rows_that_the_command_prints(setups):
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for row in rows(setups):
        assert row in lines, "python -m scripts.docs.model_sizes docs/scaling.md"


def test_each_model_has_a_row_for_one_machine_and_for_eight():
    covered = {(setup.model, setup.machines) for setup in SETUPS}
    assert covered == {(model, n) for model in {setup.model for setup in SETUPS} for n in (1, 8)}
