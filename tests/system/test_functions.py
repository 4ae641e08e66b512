"""Names and digests of functions: what changes them, what does not, and functions that a file names."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import pickle
import subprocess
import sys

import pytest

from rl4lms_like.system.functions import NamedFunction, digest_of, function_of, short_name, split_name
from rl4lms_like.system.import_paths import RefusedImportError, imported, use_code_from


def plain(responses):
    return [1.0] * len(responses)


class Scaled:
    scale = 2.0

    def __call__(self, responses):
        return [self.scale] * len(responses)


def compiled(text, name="score"):
    """A function without source, as one that is typed into a prompt."""
    names: dict = {"__name__": "typed"}
    exec(text, names)
    return names[name]


def test_a_name_has_the_import_path_and_a_digest_and_carries_the_function():
    name = NamedFunction(plain)
    path, digest = split_name(name)
    assert path == f"{__name__}:plain" and len(digest) == 12 and function_of(name) is plain
    assert NamedFunction(Scaled()).startswith(f"{__name__}:Scaled@")
    assert NamedFunction(functools.partial(plain)).startswith(f"{__name__}:plain@")
    assert short_name(name) == "plain"


def test_a_name_is_plain_text_in_copies_and_files_and_keeps_its_function():
    name = NamedFunction(plain)
    assert json.loads(json.dumps(name)) == name
    assert copy.deepcopy({"function": name})["function"].value is plain
    assert pickle.loads(pickle.dumps(name)).value is plain and pickle.loads(pickle.dumps(name)) == name


def test_a_class_is_refused():
    with pytest.raises(ValueError, match="got the class Scaled; make an object of it"):
        NamedFunction(Scaled)


# --- digests ----------------------------------------------------------------------------------------------------------


METHOD = "class A:\n    k = {k}\n    def __call__(self, x):\n        return {value}\nscore = A()"
INHERITED = """
class B:
    def m(self):
        return {value}
class A(B):
    def __call__(self, x):
        return self.m()
score = A()
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("def score(x):\n    return 1", "def score(x):\n    return 2"),
        ("def score(x):\n    return x in {'a', 'b'}", "def score(x):\n    return x in {'a', 'c'}"),
        ("score = lambda x: x + 1", "score = lambda x: x + 2"),
        (METHOD.format(k=1, value=1), METHOD.format(k=1, value=2)),
        (METHOD.format(k=1, value="self.k"), METHOD.format(k=2, value="self.k")),
        (INHERITED.format(value=1), INHERITED.format(value=2)),
    ],
)
def test_an_edit_changes_the_digest_also_without_source(first, second):
    assert digest_of(compiled(first)) == digest_of(compiled(first)) != digest_of(compiled(second))


DECORATED = """
import functools
def twice(function):
    {wraps}
    def wrapper(x):
        return {factor} * function(x)
    return wrapper
@twice
def score(x):
    return x + {term}
"""


@pytest.mark.parametrize("wraps", ["@functools.wraps(function)", ""])
def test_decorators_and_decorated_functions_are_covered(wraps):
    def digest(factor, term):
        return digest_of(compiled(DECORATED.format(wraps=wraps, factor=factor, term=term)))

    assert len({digest(2, 1), digest(3, 1), digest(2, 5)}) == 3
    assert digest(2, 1) == digest(2, 1)


def test_two_lambdas_of_one_line_differ_and_their_line_may_change_around_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "two_lambdas.py").write_text("a, b = (lambda x: x + 1), (lambda x: x + 2)\nc = lambda x: x + 1\n")
    (tmp_path / "one_lambda.py").write_text("c = print(), (lambda x:   x + 1)  # a comment\nc = c[1]\n")
    two, one = importlib.import_module("two_lambdas"), importlib.import_module("one_lambda")
    assert digest_of(two.a) != digest_of(two.b)
    assert digest_of(two.c) == digest_of(one.c)


EDITED = """
class Score:
    def __call__(self, x):
        return super().__hash__() + {value}
def score(x):
    return {value}
shorter = lambda x: {value}
scores = [Score(), score, shorter]
"""


def test_the_digest_is_that_of_the_code_that_runs_also_after_its_file_was_edited(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_later.py"
    file.write_text(EDITED.format(value=1))
    running = importlib.import_module("edited_later").scores
    before = [digest_of(score) for score in running]

    file.write_text(EDITED.format(value=2222))
    after = [digest_of(score) for score in running]
    monkeypatch.delitem(sys.modules, "edited_later")
    edited = [digest_of(score) for score in importlib.import_module("edited_later").scores]
    assert not set(after) & set(edited) and not set(before) & set(edited)

    # From their sources, as long as the file is the one that was imported.
    file.write_text(EDITED.format(value=1))
    assert [digest_of(score) for score in running] == before


def test_arguments_of_partial_functions_are_covered():
    def digest(**arguments):
        return digest_of(functools.partial(plain, **arguments))

    assert digest(a=1) == digest(a=1) != digest(a=2)
    assert digest(a=Scaled()) == digest(a=Scaled())  # the state of objects is not


def test_closures_other_than_functions_globals_and_state_are_not_covered():
    def made(value):
        def score(x):
            return value

        return score

    other = Scaled()
    other.scale = 7
    assert digest_of(made(1)) == digest_of(made(2))
    assert digest_of(other) == digest_of(Scaled())


def test_a_recursive_decorator_and_builtins_have_digests():
    def score(x):
        return score(x - 1) if x else 0

    assert digest_of(score) == digest_of(score) and digest_of(len) != digest_of(max)


def test_the_digest_is_the_same_in_every_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from rl4lms_like.system.functions import digest_of\n"
        "names = {}\n"
        "exec(\"def score(x):\\n    return x in {'a', 'b', 'c', 'd', 'e'}\", names)\n"
        "print(digest_of(names['score']))\n"
    )
    digests = set()
    for seed in "123":
        environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=True)
        digests.add(run.stdout)
    assert len(digests) == 1


# --- import -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("RL4LMS_LIKE_CODE", str(tmp_path))
    (tmp_path / "given_rewards.py").write_text("def score(responses):\n    return [1.0] * len(responses)\n")
    yield tmp_path
    sys.modules.pop("given_rewards", None)


def test_a_function_that_only_has_a_name_is_imported_and_compared(folder):
    use_code_from(folder)
    digest = digest_of(importlib.import_module("given_rewards").score)
    assert function_of(f"given_rewards:score@{digest}")(["a"]) == [1.0]
    with pytest.raises(ValueError, match=rf"has changed since the run began \(digest {digest}, then 000000000000\)"):
        function_of("given_rewards:score@000000000000")
    with pytest.raises(ValueError, match="'score' was given in Python and cannot be imported; give it again"):
        function_of("__main__:score@000000000000")
    with pytest.raises(ValueError, match=r"cannot import 'gone:score'.*give it again"):
        function_of("gone:score@000000000000")


def test_a_file_is_loaded_itself(folder):
    assert imported(f"{folder}/given_rewards.py:score")(["a"]) == [1.0]
    assert imported(f"{folder}/given_rewards.py:score") is sys.modules["given_rewards"].score


def test_a_file_in_a_folder_that_nobody_named_is_refused(folder, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    (other / "unnamed_rewards.py").write_text("raise SystemExit('its code ran')\n")
    with pytest.raises(RefusedImportError, match=r"--code"):
        imported(f"{other}/unnamed_rewards.py:score")
    monkeypatch.chdir(other)
    with pytest.raises(RefusedImportError, match=r"--code \."):
        imported("unnamed_rewards.py:score")


def test_another_module_of_the_same_name_is_an_error(folder, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    (other / "given_rewards.py").write_text("def score(responses):\n    return [2.0] * len(responses)\n")
    monkeypatch.setenv("RL4LMS_LIKE_CODE", f"{folder}:{other}")
    imported(f"{folder}/given_rewards.py:score")
    with pytest.raises(RefusedImportError, match=r"another module 'given_rewards' is imported already"):
        imported(f"{other}/given_rewards.py:score")

    del sys.modules["given_rewards"]
    with pytest.raises(RefusedImportError, match=r"`import given_rewards` finds another module"):
        imported(f"{other}/given_rewards.py:score")

    (folder / "numpy.py").write_text("score = 1\n")
    with pytest.raises(RefusedImportError, match=r"another module 'numpy' is imported already"):
        imported(f"{folder}/numpy.py:score")


def test_a_file_that_is_missing_or_has_no_module_name_is_an_error(folder):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        imported(f"{folder}/missing.py:score")
    (folder / "my-rewards.py").write_text("score = 1\n")
    with pytest.raises(RefusedImportError, match=r"rename the file 'my-rewards\.py'"):
        imported(f"{folder}/my-rewards.py:score")
