"""The tutorials run as written, with few iterations; `python -m scripts.docs.tutorials` runs them in full."""

from __future__ import annotations

import shutil
import sys

import pytest

from rl4lms_like import cli
from scripts.docs.tutorials import PAGES, QUICK, run_page

TUTORIALS = sorted(page.stem for page in PAGES.glob("*.md"))


def test_there_are_eight():
    assert len(TUTORIALS) == 8


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs(name, tmp_path, monkeypatch, tiny_gpt2_dir):
    if name == "lora":
        pytest.importorskip("peft")
    shutil.copytree(tiny_gpt2_dir, tmp_path / "gpt2")  # commands may write into it
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RL4LMS_LIKE_CODE", str(tmp_path))

    def run(words: list[str]) -> None:
        if words[:2] == [sys.executable, "-c"]:
            exec(compile(words[2], name, "exec"), {"__name__": "__main__"})
        else:
            assert words[0] == "rl4lms-like"
            assert cli.main(words[1:]) == 0, words

    try:
        assert len(run_page(name, tmp_path, run, QUICK)) >= 2
    finally:
        for module in [module for module in sys.modules if module.partition(".")[0] == "my_project"]:
            del sys.modules[module]
