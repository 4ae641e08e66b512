"""The command line in forked processes, for tests of programs at work: nothing has to be imported again."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from rl4lms_like.cli import main


def forked(arguments: Sequence[str], folder: Path, output: Path) -> BaseProcess:
    """Start `rl4lms-like` with these arguments in `folder`; standard output and errors are added to `output`."""
    process = multiprocessing.get_context("fork").Process(target=_main, args=(arguments, folder, output))
    process.start()
    return process


def _main(arguments: Sequence[str], folder: Path, output: Path) -> None:
    os.chdir(folder)
    with output.open("a") as stream:
        sys.stdout = sys.stderr = stream  # in place of pytest's
        sys.exit(main(list(arguments)))
