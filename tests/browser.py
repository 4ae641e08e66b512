"""Pages opened in headless Chromium, where it is installed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

FRAME = """<!doctype html><iframe src="page.html" style="width:{width}px;height:800px;border:0"></iframe>
<script>
const measure = window_ => {{
  const page = window_.document, root = page.documentElement;
  const all = selector => [...page.querySelectorAll(selector)].filter(element => element.getClientRects().length);
  const wide = all("body *").filter(element => element.getBoundingClientRect().right > window_.innerWidth + 1
    && !element.closest(".scroll, pre, table, svg"));
  const sizes = all("p, li, td, th, .prose").map(element => parseFloat(window_.getComputedStyle(element).fontSize));
  return {{
    inner: window_.innerWidth, scroll: root.scrollWidth, charts: all("svg, img").length,
    ink: window_.getComputedStyle(root).color, paper: window_.getComputedStyle(root).backgroundColor,
    wide: wide.slice(0, 5).map(element => element.outerHTML.slice(0, 120)), smallest: Math.min(...sizes),
    broken: all("img").filter(image => !image.naturalWidth).length,
  }};
}};
addEventListener("load", () => setTimeout(() => {{
  const inner = document.querySelector("iframe").contentWindow;
  document.body.dataset.dom = inner.document.documentElement.outerHTML;
  document.body.dataset.measured = JSON.stringify(measure(inner));
}}, 500));
</script>
"""
"""Shows a page in a narrow frame, measures it from outside, and leaves both in attributes of the body."""


@dataclass(frozen=True)
class Opened:
    """A page in the browser: its DOM, what was measured in it, and the errors on its console."""

    dom: str
    measured: dict
    errors: list[str]


def opened(page: Path, folder: Path, *, width: int = 400, dark: bool = False) -> Opened:
    """Open a page in a window of this width."""
    shutil.copytree(page.parent, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model", "checkpoints"))
    shutil.copy(page, folder / "page.html")
    (folder / "frame.html").write_text(FRAME.format(width=width))
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    command = [str(CHROMIUM), *flags.split(), "--disable-component-update", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1280,900", "--virtual-time-budget=4000"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--enable-logging=stderr", "--v=0"]
    done = subprocess.run(
        [*command, "--dump-dom", (folder / "frame.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    fields = {name: re.search(rf'data-{name}="([^"]*)"', done.stdout) for name in ("dom", "measured")}
    assert all(fields.values()), done.stderr[-2000:]
    dom, measured = (html.unescape(found[1]) for found in fields.values() if found)
    return Opened(dom, json.loads(measured), [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def brightness(color: str) -> float:
    """0 for black to 1 for white."""
    red, green, blue = map(float, re.findall(r"[\d.]+", color)[:3])
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


def assert_readable(page: Opened, *, dark: bool, width: int = 400) -> None:
    """No error on the console, nothing wider than the window, letters large enough, and enough contrast."""
    assert page.errors == []
    assert page.measured["inner"] == width
    assert page.measured["wide"] == [] and page.measured["scroll"] <= width
    assert page.measured["broken"] == 0
    assert page.measured["smallest"] >= 10
    ink, paper = brightness(page.measured["ink"]), brightness(page.measured["paper"])
    assert (ink - paper if dark else paper - ink) > 0.5
