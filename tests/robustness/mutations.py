"""Mutate the source at random and run the tests: does the suite catch each mutation?

    python -m tests.robustness.mutations --seeds 20                      # of this checkout
    python -m tests.robustness.mutations --seeds 20 --before ../old      # the same mutations in an older checkout too

A seed selects a line of code and one change of it (an operator, a number, a condition). With `--before` the line must
be in both checkouts. The nearest tests run first (`tests/a/test_b*.py` for `a/b.py`, its folder, `tests/oracles` and
`tests/laws`), and the full suite only for a mutation that they do not catch.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "rl4lms_like"
LIMIT_S = 1800
"""Time limit of a test run; the full suite takes about 20 minutes on one core."""
CHANGES = (
    (r" == ", " != "),
    (r" != ", " == "),
    (r" < ", " >= "),
    (r" <= ", " > "),
    (r" > ", " <= "),
    (r" >= ", " < "),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r" \* ", " / "),
    (r" and ", " or "),
    (r" or ", " and "),
    (r"\bnot ", ""),
    (r"\bmax\(", "min("),
    (r"\bmin\(", "max("),
    (r"\bTrue\b", "False"),
    (r"\bFalse\b", "True"),
    (r"\b1\b", "2"),
    (r"\b0\b", "1"),
)


def lines_of_code(root: Path) -> dict[str, list[Path]]:
    """Lines of function bodies without comments and texts -> the modules that have them."""
    found: dict[str, list[Path]] = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        source = file.read_text()
        inside = {
            number
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef)
            for statement in node.body
            for number in range(statement.lineno, (statement.end_lineno or 0) + 1)
        }
        with file.open() as stream:
            texts = {
                number
                for token in tokenize.generate_tokens(stream.readline)
                if token.type in (tokenize.STRING, tokenize.COMMENT)
                for number in range(token.start[0], token.end[0] + 1)
            }
        for number, line in enumerate(source.splitlines(), start=1):
            if number in inside - texts:
                found.setdefault(line, []).append(file)
    return found


def mutation(seed: int, roots: list[Path]) -> tuple[str, str, list[Path]]:
    """Return a line, its mutation, and the module that contains it in each checkout."""
    everywhere = [lines_of_code(root) for root in roots]
    once = [line for line, files in everywhere[0].items() if len(files) == 1]
    once = [line for line in once if all(len(each.get(line, ())) == 1 for each in everywhere)]
    rng = random.Random(seed)
    while True:
        line = rng.choice(once)
        pattern, new = rng.choice(CHANGES)
        places = list(re.finditer(pattern, line))
        if places:
            place = rng.choice(places)
            return line, line[: place.start()] + new + line[place.end() :], [each[line][0] for each in everywhere]


def caught_by(root: Path, file: Path, line: str, mutated: str, *, nearest: bool) -> str:
    """Return the first test that fails with a mutation; empty if all pass. `nearest`: without the full suite."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "checkout"
        shutil.copytree(
            root, copy, symlinks=True, ignore=shutil.ignore_patterns(".venv", ".git", "build", "__pycache__", ".envs")
        )
        if (root.parent / "shared").exists():
            (Path(scratch) / "shared").symlink_to((root.parent / "shared").resolve())
        within = file.relative_to(root)
        target = copy / within
        target.write_text(target.read_text().replace(f"\n{line}\n", f"\n{mutated}\n", 1))
        folder = copy / "tests" / within.relative_to(PACKAGE).parent
        while not folder.is_dir():
            folder = folder.parent
        own = [str(test) for test in sorted(folder.glob(f"test_{within.stem}*.py"))]
        others = [str(copy / part) for part in ("tests/oracles", "tests/laws", f"{PACKAGE}/core")]  # core: doctests
        everything = [] if nearest else [str(copy / "tests")]
        for tests in filter(None, (own, [str(folder)], others, everything)):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
            environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
            try:
                done = subprocess.run(
                    command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S
                )
            except subprocess.TimeoutExpired:  # the mutation makes a test wait forever
                return "timeout"
            if done.returncode not in (0, 5):
                failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
                return failed[0] if failed else "collection"
    return ""


def main() -> int:
    """Print each mutation and the first test that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="number of mutations (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="first seed (%(default)s)")
    parser.add_argument("--before", type=Path, help="an older checkout")
    parser.add_argument("--nearest", action="store_true", help="do not run the full suite")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    roots = [ROOT, *([options.before.resolve()] if options.before else [])]
    results = []
    for seed in range(options.first, options.first + options.seeds):
        line, mutated, files = mutation(seed, roots)
        places = zip(roots, files, strict=True)
        caught = [caught_by(root, file, line, mutated, nearest=options.nearest) for root, file in places]
        module = str(files[0].relative_to(ROOT))
        results.append(
            {"seed": seed, "module": module, "line": line.strip(), "mutated": mutated.strip(), "tests": caught}
        )
        print(
            f"{seed:3} {module}: {mutated.strip()}\n    {' | '.join(test or 'SURVIVED' for test in caught)}", flush=True
        )
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    return int(not all(all(result["tests"]) for result in results))


if __name__ == "__main__":
    sys.exit(main())
