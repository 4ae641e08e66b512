"""DailyDialog: the last utterances as prompt, the next one with its emotion and act; every form it was published in."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.daily_dialog import DailyDialog
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.checkers import check_data_pool

ROWS = [
    {"dialog": ["a ", " b", " c"], "act": [1, 2, 3], "emotion": [0, 4, 6]},
    {"dialog": ["d", "e"], "act": [4, 1], "emotion": [0, 0]},
]
EXPECTED = [
    Sample("train_1", "a  <EOU>", [" b<EOU>"], {"emotion": [4], "intent": [2]}),
    Sample("train_2", " b <EOU>", [" c<EOU>"], {"emotion": [6], "intent": [3]}),
    Sample("train_4", "d <EOU>", ["e<EOU>"], {"emotion": [0], "intent": [1]}),
]


def original(name):
    return {
        f"dialogues_{name}.txt": "a __eou__ b__eou__ c__eou__\nd__eou__e__eou__\n\n",
        f"dialogues_act_{name}.txt": "1 2 3 \n4 1 \n",
        f"dialogues_emotion_{name}.txt": "0 4 6 \n0 0 \n",
    }


def test_the_hub_s_dialogues(hub):
    hub.serve("li2017dailydialog/daily_dialog", train=ROWS, validation=ROWS, test=ROWS)
    assert DailyDialog.prepare("train", context_size=1).samples == EXPECTED
    assert hub.asked == [{"path": "li2017dailydialog/daily_dialog", "files": "default/train/*.parquet"}]
    (sample,) = DailyDialog.prepare("val", context_size=2).samples
    assert sample.prompt_or_input_text == f"a {DailyDialog.EOU_TOKEN} b {DailyDialog.EOU_TOKEN}"
    check_data_pool(DailyDialog, context_size=1)


@pytest.mark.parametrize("place", ["", "{}/"])
def test_the_project_s_own_files(lay, place, no_datasets):
    files = {}
    for name in ("train", "validation", "test"):
        files |= {place.format(name) + file: text for file, text in original(name).items()}
    folder = lay(files)
    assert DailyDialog.prepare("train", context_size=1, data_dir=folder).samples == EXPECTED
    check_data_pool(DailyDialog, context_size=2, data_dir=folder)
    assert len(DailyDialog.prepare("train", context_size=1, data_dir=folder, max_size=2)) == 2


@pytest.mark.parametrize(
    ("line", "context", "response"),
    [
        ("hello .,hi .", "hello .", "hi ."),
        ('"well , hello .",hi .', "well , hello .", "hi ."),
        ('hello .,"well , hi ."', "hello .", "well , hi ."),
        ('well , hello .","well , hi .', "well , hello .", "well , hi ."),
        ("it was NUM ,i see .", "it was NUM ", "i see ."),
    ],
)
def test_lines_of_context_and_response(lay, line, context, response):
    folder = lay({"train.txt": f"context,response\n{line}\n"})
    (sample,) = DailyDialog.prepare("train", context_size=1, data_dir=folder).samples
    assert (sample.prompt_or_input_text, sample.references) == (f"{context} <EOU>", [f"{response}<EOU>"])
    assert sample.meta_data is None


def test_pairs_in_tables_may_have_longer_contexts(lay):
    rows = [{"context": "a __eou__ b", "response": "c"}, {"context": "d", "response": None}]
    folder = lay({"test.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    assert [(sample.prompt_or_input_text, sample.references)
            for sample in DailyDialog.prepare("test", context_size=1, data_dir=folder).samples] == [
        (" b <EOU>", ["c<EOU>"]), ("d <EOU>", []),
    ]  # fmt: skip
    assert len(DailyDialog.prepare("test", context_size=2, data_dir=folder)) == 1


def test_contexts_that_are_too_short_are_an_error(lay):
    folder = lay({"train.txt": "hello .,hi .\n"})
    with pytest.raises(DataPoolError, match=r"'train' .* 5 .* 1:"):
        DailyDialog.prepare("train", context_size=5, data_dir=folder)


def test_what_is_wrong_is_named(lay):
    files = original("train") | {"dialogues_act_train.txt": "1 2\n4 1\n"}
    with pytest.raises(DataPoolError, match=r"dialogues_train.txt, line 1: 3 .* 2 .* 3 "):
        DailyDialog.prepare("train", context_size=1, data_dir=lay(files))
    files = original("train") | {"dialogues_emotion_train.txt": "0 4 6\n0 sad\n"}
    with pytest.raises(DataPoolError, match=r"dialogues_emotion_train.txt, line 2: .*'0 sad'"):
        DailyDialog.prepare("train", context_size=1, data_dir=lay(files))
    rows = {"val.jsonl": json.dumps(ROWS[0] | {"act": [1]})}
    with pytest.raises(DataPoolError, match=r"val.jsonl, line 1, column 'act': .*3"):
        DailyDialog.prepare("val", context_size=1, data_dir=lay(rows))


def test_the_real_files(shared_dir):
    args = {"data_dir": str(shared_dir / "data/dailydialog"), "context_size": 1}
    check_data_pool(DailyDialog, splits=("val", "test"), **args)
    val = DailyDialog.prepare("val", **args).samples
    assert len(val) == 7069
    assert all(len(sample.references) == 1 and len(sample.references[0]) > len("<EOU>") for sample in val)
    assert val[1].prompt_or_input_text == (
        "you are what you eat , and a healthy diet creates a body resistant to disease . <EOU>"
    )
    assert val[1].references == ["thanks for sharing your experience with me .<EOU>"]
    assert [len(sample.references) for sample in DailyDialog.prepare("test", **args).samples[:3]] == [0, 0, 0]
