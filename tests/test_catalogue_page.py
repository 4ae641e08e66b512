"""The page of the catalogue is made from the registries, and says what they say."""

from __future__ import annotations

import re

import pytest

from rl4lms_like.catalogue import page
from rl4lms_like.cli import main
from rl4lms_like.config.binding import REGISTRIES
from rl4lms_like.metrics import METRICS
from tests.conftest import REPOSITORY


def test_the_page_in_the_documentation_is_the_one_that_is_made_today():
    made, written = page(), (REPOSITORY / "docs/catalogue.md").read_text(encoding="utf-8")
    assert written == made, "run: python -m rl4lms_like.catalogue docs/catalogue.md"


def test_every_id_has_a_row_and_an_entry_that_the_row_leads_to():
    text = page()
    anchors = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^### (.+)$", text, re.MULTILINE)
    }
    for registry in REGISTRIES.values():
        for id in registry:
            ((anchor,),) = [re.findall(rf"^\| \[`{id}`\]\(#([\w-]+{registry.kind.replace(' ', '-')})\)", text, re.M)]
            assert anchor in anchors


@pytest.mark.parametrize("id", METRICS.ids())
def test_every_metric_says_what_it_reports_on_the_page_and_when_it_is_shown(id, capsys):
    keys = METRICS.entry(id).keys
    assert keys
    assert main(["show", id]) == 0
    shown = capsys.readouterr().out
    assert "reports:" in shown
    for key in keys:
        assert re.search(rf"^    {re.escape(key)}$", shown, re.MULTILINE)
        assert f"`{key}`" in page()


def test_what_an_id_needs_stands_on_the_page():
    (row,) = re.findall(r"^\| \[`hf_dataset`\].*$", page(), re.MULTILINE)
    assert "extra 'data'" in row


@pytest.mark.parametrize("id", ["grpo", "rloo", "opd"])
def test_arguments_of_a_critic_that_would_be_errors_are_not_shown(id, capsys):
    assert main(["show", id]) == 0
    shown = capsys.readouterr().out
    assert "group_size" in shown and "critic_learning_rate" not in shown and "gae_lambda" not in shown
    assert main(["show", "ppo"]) == 0
    assert "critic_learning_rate" in capsys.readouterr().out
