"""Post-processors: functions from text to text, by id or import path; what they do wrong is told with the text."""

from __future__ import annotations

import pytest

from rl4lms_like.post_processors import POST_PROCESSORS, PostProcessorRegistry, post_process, try_post_processor
from rl4lms_like.system.errors import ComponentError, MissingResourceError
from rl4lms_like.system.schema import signature_of
from tests.config_errors import raises_at


def first_words(text: str, limit: int = 2, *, mark: str = "") -> str:
    """The first words of a text.

    Args:
        text: what the model wrote.
        limit: words.
        mark: put behind them.
    """
    return " ".join(text.split()[:limit]) + mark


def fails(text):
    raise KeyError(text)


def drops(text):
    return None


def lacks(text):
    raise MissingResourceError("a word list", needed_by="it", command="get it", offline="copy it")


HERE = f"{__name__}:first_words"


def test_a_function_by_import_path_has_its_arguments_filled_in():
    assert POST_PROCESSORS.get(HERE)("a b c") == "a b"
    assert POST_PROCESSORS.get(HERE, {"limit": 1, "mark": "!"})("a b c") == "a!"
    assert post_process(POST_PROCESSORS.get(HERE, {"limit": 1}), ["a b", "", "c d"]) == ["a", "", "c"]


def test_its_arguments_are_those_beside_the_text():
    arguments = signature_of(POST_PROCESSORS.signature(HERE)).arguments
    assert [(argument.name, argument.default, argument.help) for argument in arguments] == [
        ("limit", 2, "words."),
        ("mark", "", "put behind them."),
    ]
    with raises_at("", mentions="HERE"):
        POST_PROCESSORS.signature(f"{__name__}:HERE")


def test_it_is_added_and_got_as_in_rl4lms():
    PostProcessorRegistry.add("first_words_of_a_test", first_words)
    try:
        assert PostProcessorRegistry.get("first_words_of_a_test") is first_words
    finally:
        del PostProcessorRegistry._table["first_words_of_a_test"]


@pytest.mark.parametrize(
    ("function", "error", "data"),
    [
        (fails, ComponentError, "fails .*'xxxx.*KeyError"),
        (drops, ComponentError, "drops .*None .*'xxxx"),
        (lacks, MissingResourceError, "word list"),
    ],
)
def test_what_goes_wrong_is_told_with_the_text(function, error, data):
    with pytest.raises(error, match=data):
        post_process(function, ["x" * 100])
    with pytest.raises(error):
        try_post_processor(function)
