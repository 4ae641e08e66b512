"""The page of the command line names every command, and the arguments and defaults of each in its section."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from rl4lms_like.cli.commands import build_parser
from rl4lms_like.quickstart import _parser as quickstart_parser

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
EVERYWHERE = {"--help", "--traceback"}


def commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = [action.choices for action in build_parser()._actions if isinstance(action.choices, dict)]
    return {**choices, "quickstart": quickstart_parser()}


def section(command: str) -> str:
    """The text under the heading that names a command."""
    (text,) = [part for part in re.split(r"^## ", PAGE, flags=re.M)[1:] if command in part.partition("\n")[0].split()]
    return text


def row(command: str, name: str) -> str:
    """The line of the command's section that describes an argument."""
    lines = [line for line in section(command).splitlines() if re.search(rf"`{name}\b", line)]
    assert lines, f"docs/cli.md: {name} is not described under {command}"
    return lines[0]


@pytest.mark.parametrize("command", commands())
def test_the_page_has_every_argument_and_default_of_a_command(command):
    assert f"[`{command}`](#" in PAGE
    for action in commands()[command]._actions:
        option = action.option_strings[-1] if action.option_strings else None
        if option in EVERYWHERE:
            assert f"`{option}`" in PAGE.partition("\n## ")[0]
        elif option is not None:
            described = row(command, option)
            if action.default not in (None, False, []):
                assert re.search(rf"\| `?{re.escape(str(action.default))}`? \|", described), described


@pytest.mark.parametrize("command", commands())
def test_the_page_has_no_option_that_a_command_lacks(command):
    if command in ("compare", "show", "env"):
        return  # their sections are those of `benchmark`, `list` and `report`
    partner = {"benchmark": "compare", "list": "show", "report": "env"}.get(command)
    known = {option for name in (command, partner) if name for option in commands()[name]._option_string_actions}
    named = set(re.findall(r"`(--[\w-]+)", section(command)))
    assert named <= known
