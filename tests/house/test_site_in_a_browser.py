"""Every page of the site fits a phone, and shows its pictures and its code, in headless Chromium."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.browser import CHROMIUM, needs_chromium
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, needs_chromium]

MEASURE = """<!doctype html><iframe style="width:{width}px;height:800px;border:0"></iframe><script>
const frame = document.querySelector("iframe"), pages = {pages}, measured = {{}};
const measure = page => {{
  const all = selector => [...page.querySelectorAll(selector)].filter(element => element.getClientRects().length);
  const right = page.defaultView.innerWidth + 1;
  const inABox = ".md-typeset__scrollwrap, .formula, pre, [class^=md-sidebar], .md-search, .md-tabs";
  const wide = all("body *").filter(element => element.getBoundingClientRect().right > right)
    .filter(element => !element.closest(inABox));
  const cut = all(".highlight pre > code").filter(code => code.scrollWidth > code.clientWidth + 1);
  return {{
    scroll: page.documentElement.scrollWidth, wide: wide.slice(0, 3).map(element => element.outerHTML.slice(0, 120)),
    broken: [...page.images].filter(image => !image.naturalWidth).map(image => image.src),
    cut: cut.map(code => code.textContent.split("\\n").reduce((one, other) => one.length > other.length ? one : other)),
  }};
}};
(async () => {{
  for (const page of pages) {{
    await new Promise(loaded => {{ frame.onload = loaded; frame.src = page; }});
    await new Promise(drawn => setTimeout(drawn, 300));
    measured[page] = measure(frame.contentDocument);
  }}
  document.body.dataset.measured = JSON.stringify(measured);
}})();
</script>"""
"""Shows one page after the other in a frame, and leaves what was measured in an attribute of the body."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(folder)))
    return folder


def measured(site: Path, width: int) -> dict[str, dict]:
    """Page -> its measures in a window of this width."""
    pages = [page.relative_to(site).as_posix() for page in sorted(site.rglob("index.html"))]
    frame = site / "frame.html"
    frame.write_text(MEASURE.format(width=width, pages=json.dumps(pages)))
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --allow-file-access-from-files --dump-dom"
    command = [str(CHROMIUM), *flags.split(), f"--user-data-dir={site / 'profile'}", "--window-size=1600,900"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=600000", frame.as_uri()], capture_output=True, text=True, timeout=600
    )
    result = re.search(r'data-measured="([^"]*)"', done.stdout)
    assert result is not None, done.stderr[-2000:]
    return json.loads(html.unescape(result[1]))


def test_no_page_is_wider_than_a_phone_and_every_picture_is_shown(site):
    pages = measured(site, 400)
    assert len(pages) > 80
    assert {page: measures["wide"] for page, measures in pages.items() if measures["scroll"] > 400} == {}
    assert {page: measures["wide"] for page, measures in pages.items() if measures["wide"]} == {}
    assert {page: measures["broken"] for page, measures in pages.items() if measures["broken"]} == {}


def test_lines_of_120_characters_fit_the_column_of_a_wide_window(site):
    cut = [line for measures in measured(site, 1400).values() for line in measures["cut"]]
    assert [line for line in cut if len(line) <= 120] == []
