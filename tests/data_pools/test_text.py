"""Openings of plain texts as prompts."""

from __future__ import annotations

import pytest

from rl4lms_like.data_pools.files import TextPool
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.checkers import check_data_pool

LINES = 'Once upon  a time there was a cat. It slept!\n\nShort.\n"Hello." said Mr. Fox. He left.\n'


@pytest.fixture
def prepare(tmp_path):
    def of(text, **args):
        (tmp_path / "texts.txt").write_text(text)
        pool = TextPool.prepare("train", data_files={"train": str(tmp_path / "texts.txt")}, **args)
        return [(sample.prompt_or_input_text, sample.references) for sample in pool.samples]

    return of


def test_lines_are_whole_prompts_by_default(prepare):
    assert [prompt for prompt, _ in prepare(LINES)] == [line for line in LINES.splitlines() if line]
    assert all(references == [] for _, references in prepare(LINES))


def test_words_are_cut_as_they_stand_and_the_rest_is_the_reference(prepare):
    assert prepare(LINES, prompt_words=3) == [
        ("Once upon  a", ["time there was a cat. It slept!"]),
        ("Short.", []),
        ('"Hello." said Mr.', ["Fox. He left."]),
    ]


def test_sentences_may_end_in_a_quote(prepare):
    assert [prompt for prompt, _ in prepare(LINES, prompt_sentences=1)] == [
        "Once upon  a time there was a cat.",
        "Short.",
        '"Hello."',
    ]


def test_texts_may_be_separated_by_a_token_and_framed(prepare):
    text = "One two\nthree.<|endoftext|>\n Four five six.\n<|endoftext|>"
    assert prepare(text, separator="<|endoftext|>", prompt_words=2, prompt_prefix="> ", prompt_suffix=" ...") == [
        ("> One two ...", ["three."]),
        ("> Four five ...", ["six."]),
    ]


def test_both_kinds_of_cut_are_refused(prepare):
    with pytest.raises(DataPoolError):
        prepare(LINES, prompt_words=1, prompt_sentences=1)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataPoolError):
        TextPool.prepare("train", path=str(tmp_path / "nowhere.txt"))


def test_passes_the_checker_on_real_stories(shared_dir):
    path = str(shared_dir / "data/tinystories_sample/tinystories_sample.txt")
    args = {"path": path, "separator": "<|endoftext|>", "prompt_sentences": 1}
    check_data_pool(TextPool, **args)
    pool = TextPool.prepare("train", **args)
    assert len(pool) > 50 and all(sample.references for sample in pool.samples[:20])


def test_a_separator_of_line_ends_is_found_in_files_of_any_system(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"One.\r\nTwo.\r\n\r\nThree.\r\n")
    pool = TextPool.prepare("val", data_files={"val": str(tmp_path / "a.txt")}, separator="\n\n")
    assert [sample.prompt_or_input_text for sample in pool.samples] == ["One.\nTwo.", "Three."]
