"""The page of the catalogue is made from the registries, says what they say, and is a page of the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from rl4lms_like.catalogue import page
from rl4lms_like.cli import main
from rl4lms_like.config.binding import REGISTRIES
from rl4lms_like.metrics import METRICS
from scripts.docs.catalogue_page import PAGE
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A site of the README and one page, with the hooks and extensions of the documentation's site."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "docs").mkdir()
    (folder / "docs/page.md").write_text("[Catalogue](catalogue.md)\n")
    folders = {"docs_dir": str(folder / "docs"), "site_dir": str(folder / "site")}
    build(load_config(str(REPOSITORY / "mkdocs.yml"), **folders, nav=None, theme="mkdocs", plugins=[]))
    return folder / "site"


def test_the_site_has_the_page_though_no_file_has_it(site):
    assert not (REPOSITORY / "docs" / PAGE).exists()
    assert 'href="../catalogue/"' in (site / "page/index.html").read_text(encoding="utf-8")
    html = (site / "catalogue/index.html").read_text(encoding="utf-8")
    for registry in REGISTRIES.values():
        for id in registry:
            assert f">{id} ({registry.kind})<" in html


def test_the_links_of_the_page_lead_to_its_headings(site):
    html = (site / "catalogue/index.html").read_text(encoding="utf-8")
    headings = set(re.findall(r'<h[1-6] id="([^"]+)"', html))
    linked = set(re.findall(r'<td><a href="#([^"]+)"', html))
    assert len(linked) == sum(len(registry.ids()) for registry in REGISTRIES.values())
    assert linked <= headings


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
