"""CIDEr-D: what rare words are worth, and where that is known from."""

from __future__ import annotations

import json
import math
import os

import pytest

from rl4lms_like.scoring.captions import cider, frequencies_of_file, tokens

REFERENCES = [["A dog runs across the field.", "A dog is running."], ["A cat sits on the mat."], ["Birds fly."]]


def test_tokens_are_spacys_without_white_space():
    assert tokens("The dog's\n 3 balls  aren't red.") == ("The", "dog", "'s", "3", "balls", "are", "n't", "red", ".")
    assert tokens(" \n") == ()


def test_copies_are_best_rare_words_count_more_and_nothing_scores_nothing():
    copy, empty, foreign = cider(["A dog is running.", "", "日本語"], REFERENCES)
    assert 5 < copy <= 10
    assert empty == foreign == 0
    rare, common = (cider(["", word, ""], REFERENCES)[1] for word in ("cat", "A"))
    assert rare > common > 0


def test_a_text_without_references_is_nan_and_no_document():
    alone = cider(["A dog is running.", "Birds fly."], REFERENCES[::2])
    scores = cider(["A dog is running.", "a cat", "Birds fly."], [REFERENCES[0], [], REFERENCES[2]])
    assert math.isnan(scores[1])
    assert scores[::2] == alone


def test_one_text_alone_gets_zero_by_definition_and_its_score_with_a_file(tmp_path):
    file = tmp_path / "references.jsonl"
    rows = [REFERENCES[0], REFERENCES[1][0], {"references": REFERENCES[2], "id": 3}]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    text, references = ["A dog is running."], REFERENCES[:1]
    assert cider(text, references) == [0.0]
    assert cider(text, references, frequencies_of_file(str(file))) == pytest.approx(
        cider([*text, "", ""], REFERENCES)[:1]
    )


def test_a_text_file_has_a_reference_a_line_and_a_changed_file_is_read_again(tmp_path):
    file = tmp_path / "references.txt"
    file.write_text("A dog runs.\nA cat sits.\n", encoding="utf-8")
    assert frequencies_of_file(str(file)).weights["dog",] == pytest.approx(math.log(2))
    file.write_text("A dog runs.\nA dog sits.\n", encoding="utf-8")
    os.utime(file, ns=(1, 1))
    assert frequencies_of_file(str(file)).weights["dog",] == 0


def test_files_that_are_not_references_are_named_with_their_line(tmp_path):
    file = tmp_path / "wrong.jsonl"
    with pytest.raises(ValueError):
        frequencies_of_file(str(file))
    for content, datum in (
        ('["a"]\n{', "line 2: "),
        ("[1]", "line 1: "),
        ("\n", "wrong.jsonl"),
    ):
        file.write_text(content, encoding="utf-8")
        frequencies_of_file.__globals__["_frequencies_of_file"].cache_clear()
        with pytest.raises(ValueError, match=datum):
            frequencies_of_file(str(file))
