"""Nothing that the sources call runs code out of a file: no pickle from disk, no `eval`, no code of a hub unasked.

A finding is a call by name and by its arguments, read from the syntax tree; what is listed in `ALLOWED` is between our
own processes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "rl4lms_like").rglob("*.py"), *(ROOT / "scripts").rglob("*.py"), ROOT / "setup.py"])

PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "_pickle"}
RUNS_CODE = {
    "eval",
    "exec",
    "execfile",
    "__import__",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "runpy.run_path",
}
READS_PICKLES = {"read_pickle", "load_pickle", "from_pickle", "load_learner"}

ALLOWED = {
    ("rl4lms_like/envs/workers.py", "pickle.loads"),  # what the parent process sent
    ("rl4lms_like/testing/checkers.py", "cloudpickle.loads"),  # a reward that was pickled the line before
}


def name_of(node: ast.expr) -> str:
    """`torch.load` of the expression that is called; of what cannot be said, its last part."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


def keyword(call: ast.Call, name: str) -> object:
    """The constant that a call gives for a keyword; Ellipsis where it is not given, or is no constant."""
    for given in call.keywords:
        if given.arg == name:
            return given.value.value if isinstance(given.value, ast.Constant) else Ellipsis
    return Ellipsis


def findings(source: str) -> Iterator[tuple[str, str]]:
    """Called name and complaint."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = name_of(call.func)
        module, _, last = name.rpartition(".")
        if module in PICKLES and last in ("load", "loads", "Unpickler", "open"):
            yield name, "unpickles"
        if name in RUNS_CODE or last in READS_PICKLES:
            yield name, "runs code"
        if name in ("torch.load", "torch.jit.load", "torch.hub.load") and keyword(call, "weights_only") is not True:
            yield name, "without weights_only=True"
        if keyword(call, "allow_pickle") is True:
            yield name, "with allow_pickle=True"
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"):
            yield name, "builds what the text names"
        if keyword(call, "shell") is True:
            yield name, "with shell=True"
        if keyword(call, "trust_remote_code") is True:
            yield name, "trusts unasked"
        if name.endswith(("Tokenizer.from_pretrained", "Config.from_pretrained")) and name.startswith("Auto"):
            given = any(argument.arg in ("trust_remote_code", None) for argument in call.keywords)
            if not given:
                yield name, "asks at the terminal whether to run code: say trust_remote_code"


def test_no_source_runs_code_out_of_a_file():
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in SOURCES}
    found = [
        f"{file}: {name} {complaint}"
        for file, source in sources.items()
        for name, complaint in findings(source)
        if (file, name) not in ALLOWED
    ]
    assert found == []


def test_what_is_allowed_is_still_there():
    for file, name in ALLOWED:
        assert name in dict(findings((ROOT / file).read_text(encoding="utf-8"))), (
            f"{file} needs no exception for {name}"
        )


@pytest.mark.parametrize(
    "source",
    [
        *("pickle.load(f)", "joblib.load(p)", "dill.loads(b)", "pd.read_pickle(p)", "np.load(p, allow_pickle=True)"),
        *("torch.load(p)", "torch.load(p, weights_only=False)", "eval(x)", "os.system(x)", "run(x, shell=True)"),
        *("yaml.load(t, Loader=yaml.Loader)", "AutoTokenizer.from_pretrained(n)"),
        "AutoModel.from_pretrained(n, trust_remote_code=True)",
    ],
)
def test_the_search_finds(source):
    assert list(findings(source))
