"""The benchmark of scores compares what it says it compares."""

from __future__ import annotations

import pytest

from benchmarks.real_pairs import real_pairs
from benchmarks.scoring_speed import measure, summary


def test_pairs_are_as_many_as_asked_for_real_and_always_the_same(shared_dir):
    pairs = real_pairs(shared_dir / "data", 60)
    assert pairs == real_pairs(shared_dir / "data", 60)
    assert len(pairs) == 60
    assert all(text and references and all(references) for text, references in pairs)
    assert len({len(references) for _, references in pairs}) > 1


def test_the_ratio_is_that_of_rounds_in_pairs_per_cpu_second():
    def rounds(*cpu_s):
        return [{"pairs": 100, "wall_s": 9.0, "cpu_s": seconds} for seconds in cpu_s]

    rows = summary({"a": {"ours": rounds(1, 2, 4), "theirs": rounds(2, 2, 12)}, "b": {"ours": rounds(1), "theirs": []}})
    assert rows["a"] == {
        "ours_per_s": 50,
        "theirs_per_s": 50,
        "ratio": 2,
        "smallest_ratio": 1,
        "largest_ratio": 3,
    }
    assert rows["b"] == {"ours_per_s": 100}


def test_both_sides_score_every_pair_and_the_warm_up_is_not_kept(shared_dir, language_data, capsys):
    pairs = real_pairs(shared_dir / "data", 12)
    results = measure([pairs[:4], pairs[4:]], ["bleu", "chrf"])
    for result in results.values():
        assert [round_["pairs"] for round_ in result["ours"] + result["theirs"]] == [8, 8]
        assert result["difference"] == pytest.approx(0, abs=1e-9)
