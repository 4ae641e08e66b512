"""GSM8K: questions with the answer after ####, from the two published files or from one."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.gsm8k import Gsm8k
from rl4lms_like.rewards import REWARDS
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.checkers import check_data_pool


@pytest.fixture
def write(tmp_path):
    def to_file(name, *answers):
        lines = [json.dumps({"question": f"{name} {index}?", "answer": text}) for index, text in enumerate(answers)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        return str(tmp_path / f"{name}.jsonl")

    return to_file


@pytest.fixture
def published(write):
    train = [f"So <<{n}*1000={n},000>>{n},000.\n#### {n},000" for n in range(1, 11)]
    return {"train": write("train", *train), "test": write("test", "#### then\n#### -3")}


def test_the_answer_is_the_reference_and_the_solution_is_kept(published):
    (sample,) = Gsm8k.prepare("test", data_files=published, prompt_prefix="Q: ", prompt_suffix="\nA:").samples
    assert sample == Sample("test_0", "Q: test 0?\nA:", ["-3"], {"solution": "#### then\n#### -3"})
    first = Gsm8k.prepare("train", data_files=published, n_val=3)[0][0]
    right = REWARDS.get("math_equal", {})([first.prompt_or_input_text], ["... = 1000"], [first.references], [True])
    assert list(right) == [1.0]


def test_the_end_of_the_training_file_is_held_out(published):
    check_data_pool(Gsm8k, data_files=published, n_val=3)
    train, val = (
        [sample.prompt_or_input_text for sample in Gsm8k.prepare(split, data_files=published, n_val=3).samples]
        for split in ("train", "val")
    )
    assert train == [f"train {n}?" for n in range(7)] and val == ["train 7?", "train 8?", "train 9?"]
    assert len(Gsm8k.prepare("train", data_files=published, n_val=3, max_size=2)) == 2
    own = published | {"val": published["test"]}
    assert len(Gsm8k.prepare("val", data_files=own)) == 1 and len(Gsm8k.prepare("train", data_files=own)) == 10


def test_one_file_is_divided(published):
    check_data_pool(Gsm8k, path=published["train"])
    assert [len(Gsm8k.prepare(split, path=published["train"])) for split in ("train", "val", "test")] == [8, 1, 1]


@pytest.mark.parametrize("answer", ["72", "", "so it is ####  "])
def test_a_row_without_a_final_answer_is_named(answer, write):
    with pytest.raises(DataPoolError, match=r"bad.jsonl, line 2, column 'answer'"):
        Gsm8k.prepare("test", data_files={"test": write("bad", "So.\n#### 1", answer)})


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("limits", [{}, {"max_rows": 3, "n_val": 3}], ids=["the default n_val", "max_rows"])
def test_a_file_that_is_held_out_as_a_whole_is_refused_with_the_numbers(published, split, limits):
    with pytest.raises(DataPoolError, match=f"n_val: {limits.get('n_val', 500)} .* {limits.get('max_rows', 10)} rows"):
        Gsm8k.prepare(split, data_files=published, **limits)
