"""The page of a benchmark in headless Chromium: light and dark, in a narrow window."""

from __future__ import annotations

import pytest

from rl4lms_like.benchmarking.runner import benchmark
from tests.browser import assert_readable, needs_chromium, opened

pytestmark = needs_chromium


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_readable_and_complete(finished, tmp_path, dark):
    assert benchmark(finished, report_only=True) == 0
    folder = tmp_path / "browser"
    folder.mkdir()
    page = opened(tmp_path / "out" / "report.html", folder, dark=dark)
    assert_readable(page, dark=dark)
    pictures = list((tmp_path / "out" / "figures").glob("*.png"))
    assert pictures and page.measured["charts"] >= len(pictures)
    assert "ppo" in page.dom and "slow" in page.dom
