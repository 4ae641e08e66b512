"""Run the tutorials of docs/tutorials as a reader does.

    python -m scripts.docs.tutorials                      # all of them in full, about five minutes on one thread
    python -m scripts.docs.tutorials first_run lora

The blocks of a page are executed in their order in an empty folder. YAML and Python that begin with a file's name in a
comment are saved under it; Python without a class is executed; commands are run, except `pip install` and `python FILE`
(the block of that file was executed). The last command block of `lora` needs another model and is run only where its
folder `smollm2` exists.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"
BLOCK = re.compile(r"^```(yaml|python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (?:a benchmark: )?([\w/]+\.(?:yml|py))\n")
QUICK = {
    r"n_iters: \d+": "n_iters: 1",
    r"eval_every: \d+": "eval_every: 1",
    r"n_train: \d+": "n_train: 40",
    r"n_eval: \d+": "n_eval: 4",
    r"n_envs: \d+": "n_envs: 4",
    r"eval_batch_size: \d+": "eval_batch_size: 4",
    r"eval_episodes: \d+": "eval_episodes: 4",
    r"seeds: \d+": "seeds: 1",
    r"\bsteps: \d+": "steps: 2",
    r"embedded/gpt2-films": "gpt2",
}
"""Replacements that make every tutorial take seconds; `gpt2` is then a folder with a tiny model."""

Command = Callable[[list[str]], None]


def run_page(name: str, folder: Path, command: Command, replacements: Mapping[str, str] | None = None) -> list[str]:
    """Execute the blocks of a tutorial.

    Args:
        name: of the page, `first_run`.
        folder: the working directory; Python files of the page are saved and imported from here.
        command: runs one command line.
        replacements: regular expression -> text, applied to all blocks.

    Returns:
        The commands that were run.
    """
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    for pattern, replacement in (replacements or {}).items():
        text = re.sub(pattern, replacement, text)
    done: list[str] = []
    for language, code in BLOCK.findall(text):
        file = FILE.match(code)
        if language != "sh" and file is not None:
            (folder / file[1]).parent.mkdir(exist_ok=True)
            (folder / file[1]).write_text(code, encoding="utf-8")
        if language == "python" and not (file is not None and "class " in code):
            command([sys.executable, "-c", code])
        for line in code.replace("\\\n", " ").splitlines() if language == "sh" else ():
            if line.startswith(("pip ", "python ")) or ("smollm2" in line and not (folder / "smollm2").exists()):
                continue
            command(shlex.split(line))
            done.append(line)
    return done


def in_a_process(folder: Path) -> Command:
    """A command in a process of its own; the first word `rl4lms-like` is this interpreter's."""

    def run(words: list[str]) -> None:
        if words[0] == "rl4lms-like":
            words = [sys.executable, "-m", "rl4lms_like", *words[1:]]
        print("$", " ".join(words)[:150], flush=True)
        path = os.pathsep.join([str(folder), str(PAGES.parent.parent)])
        subprocess.run(words, cwd=folder, check=True, env=os.environ | {"PYTHONPATH": path})

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Run tutorials and print the time of each."""
    names = sorted(page.stem for page in PAGES.glob("*.md"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tutorials", nargs="*", default=names, help=f"of {', '.join(names)}")
    seconds = {}
    for name in parser.parse_args(arguments).tutorials:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run_page(name, Path(folder), in_a_process(Path(folder)))
        seconds[name] = time.perf_counter() - start
    for name, taken in seconds.items():
        print(f"{name:12} {taken:6.0f} s")


if __name__ == "__main__":
    main()
