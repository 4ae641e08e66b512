"""Lines of Markdown and of code in it have at most 120 characters, except for tables, formulas, links and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.conftest import REPOSITORY

WIDTH = 120
PAGES = sorted(
    page.relative_to(REPOSITORY).as_posix()
    for folder, pattern in (("", "*.md"), ("docs", "**/*.md"), ("benchmarks", "*.md"), ("tests", "*/README.md"))
    for page in (REPOSITORY / folder).glob(pattern)
)
BLOCK = re.compile(r"^( *)(```+|\$\$)[^\n]*\n.*?^\1\2 *$", re.MULTILINE | re.DOTALL)
UNBROKEN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)|\]\([^)\s]+\)")


def long_lines(text: str) -> Iterator[str]:
    """Lines above the width that could be broken at a space."""
    without_blocks = BLOCK.sub("", text)
    for line in without_blocks.splitlines():
        if len(line) <= WIDTH or line.lstrip().startswith(("|", "#")):
            continue
        content = re.sub(r"^\s*(?:[*+-]|\d+[.)])?\s*", "", line)
        masked = UNBROKEN.sub(lambda match: "x" * len(match[0]), content)
        if " " in masked:
            yield line


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_long_lines(page):
    assert list(long_lines((REPOSITORY / page).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_code_fit_the_column(page):
    """Of 120 characters, the site's column shows all; blocks without a language are outputs of programs."""
    code = re.findall(r"^( *)```(?:python|yaml|sh|bash)\n(.*?)^\1```", (REPOSITORY / page).read_text(), re.M | re.S)
    lines = [line.removeprefix(indent) for indent, block in code for line in block.splitlines()]
    assert [line for line in lines if len(line) > WIDTH] == []


LONG = " ".join(["word"] * 30)


@pytest.mark.parametrize(
    "text", [LONG, f"* {LONG}", f"  {LONG}", f"```\ncode\n```\n{LONG}", f"[a link](docs/x.md) {LONG}"]
)
def test_the_search_finds_a_long_line(text):
    assert len(list(long_lines(text))) == 1


@pytest.mark.parametrize(
    "text",
    [f"| {LONG} |", f"```\n{LONG}\n```", f"$$\n{LONG}\n$$", f"`{LONG}`", f"* [text](https://example.org/{'x' * 120})"],
)
def test_tables_code_and_links_may_be_long(text):
    assert list(long_lines(text)) == []
