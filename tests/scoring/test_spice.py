"""SPICE's program: what is asked, what is read, and what is said where it cannot run. A stand-in plays Java.

The real program needs CoreNLP 3.6.0 and an old Java; where both are there, the last test runs it.
"""

from __future__ import annotations

import json
import math
import stat
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl4lms_like.scoring import captions as module
from rl4lms_like.scoring.captions import CORENLP_JARS, require_spice, spice
from rl4lms_like.system.errors import MissingExtraError, MissingResourceError

STAND_IN = """#!{python}
import json, sys, time
if "-version" in sys.argv:
    print('openjdk version "{version}" 2020-01-14', file=sys.stderr)
    sys.exit()
{action}
place = sys.argv.index("-out")
asked = json.load(open(sys.argv[place - 1]))
json.dump(sys.argv[1:], open("{folder}/command.json", "w"))
json.dump(asked, open("{folder}/asked.json", "w"))
scores = [{{"image_id": row["image_id"], "scores": {{"All": {{"f": len(row["test"]) / 100}}}}}} for row in asked]
json.dump(scores[::-1], open(sys.argv[place + 1], "w"))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes a `java` of a version that does `action`, in JAVA_HOME."""

    def make(version: str = "11.0.6", action: str = "") -> Path:
        java = tmp_path / "bin" / "java"
        java.parent.mkdir(exist_ok=True)
        java.write_text(STAND_IN.format(python=sys.executable, version=version, action=action, folder=tmp_path))
        java.chmod(java.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        module._java_version.cache_clear()
        return tmp_path

    yield make
    module._java_version.cache_clear()


@pytest.fixture
def with_jars(tmp_path, monkeypatch):
    package = tmp_path / "spice"
    (package / "lib").mkdir(parents=True)
    for name in CORENLP_JARS:
        (package / "lib" / name).touch()
    monkeypatch.setitem(sys.modules, "pycocoevalcap", SimpleNamespace(__path__=[str(tmp_path)]))
    return package


def test_texts_go_in_as_tokens_with_all_references_and_scores_come_back_in_order(stand_in):
    folder = stand_in()
    texts = ["A dog's ball.", "", "été", "A cat."]
    references = [["A dog runs.", "", "Dogs"], ["A cat."], ["summer"], []]
    scores = spice(texts, references, java_memory="2G")
    assert scores[:3] == [pytest.approx(0.15), 0.0, pytest.approx(0.03)]
    assert math.isnan(scores[3])
    asked = json.loads((folder / "asked.json").read_text())
    assert asked[0] == {"image_id": 0, "test": "A dog 's ball .", "refs": ["A dog runs .", "Dogs"]}
    assert [row["image_id"] for row in asked] == [0, 2]
    command = json.loads((folder / "command.json").read_text())
    assert command[:2] == ["-Xmx2G", "-jar"]
    assert Path(command[2]).name == "spice-1.0.jar"
    assert Path(command[2]).is_file()
    assert {"-cache", "-silent"} <= set(command)


def test_without_texts_to_score_nothing_is_started(stand_in):
    stand_in(action="sys.exit('started')")
    assert spice(["", "?"], [["A cat."], [""]]) == [0.0, 0.0]


def test_a_failing_program_says_what_it_said(stand_in):
    stand_in(action="sys.exit('java.lang.OutOfMemoryError: heap')")
    with pytest.raises(RuntimeError, match=r"1.: java.lang.OutOfMemoryError: heap"):
        spice(["A dog."], [["A dog."]])


def test_a_program_that_hangs_is_stopped(stand_in):
    stand_in(action="time.sleep(60)")
    with pytest.raises(RuntimeError, match=r"0.2 s"):
        spice(["A dog."], [["A dog."]], timeout=0.2)


@pytest.mark.parametrize("version", ["1.8.0_312", "11.0.6", "14"])
def test_java_8_to_14_will_do(version, stand_in, with_jars):
    stand_in(version)
    require_spice("the metric 'spice'")


@pytest.mark.parametrize("version", ["1.7.0_80", "15", "17.0.15"])
def test_other_javas_are_named(version, stand_in, with_jars):
    stand_in(version)
    with pytest.raises(MissingResourceError):
        require_spice("the metric 'spice'")


def test_everything_missing_is_said_at_once_with_the_offline_way(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pycocoevalcap", SimpleNamespace(__path__=[str(tmp_path)]))
    with pytest.raises(MissingResourceError) as caught:
        require_spice("the metric 'spice'")
    message = str(caught.value)
    assert "the metric 'spice' needs Java 8 to 14 (none is found) and CoreNLP 3.6.0" in message
    assert "get_stanford_models" in message
    zip_file = "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip"
    assert f"copy {' and '.join(CORENLP_JARS)} of {zip_file} to {tmp_path / 'spice' / 'lib'}" in message


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocoevalcap", None)
    with pytest.raises(MissingExtraError) as caught:
        require_spice("the metric 'spice'")
    assert caught.value.extra == "captions"


@pytest.mark.slow
def test_the_real_program_scores_a_copy_as_perfect():
    try:
        require_spice("the test")
    except MissingResourceError as error:
        pytest.skip(str(error))
    copy, other = spice(["A brown dog runs.", "A red car stops."], [["A brown dog runs."], ["A brown dog runs."]])
    assert copy == 1
    assert other == 0


def test_what_it_parsed_is_gone_with_the_process_that_asked(stand_in):
    """Workers of a pool end without `atexit`."""
    stand_in()
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        folder = pool.submit(module._parses).result()
    assert folder.startswith(tempfile.gettempdir())
    assert not Path(folder).exists()


def test_what_java_says_may_be_in_any_encoding(stand_in):
    stand_in(action=r"sys.stderr.buffer.write(b'\xff\xfe out of memory'); sys.exit(3)")
    with pytest.raises(RuntimeError, match=r"3.*out of memory"):
        spice(["A dog."], [["A dog."]])
