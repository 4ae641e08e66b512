"""NarrativeQA: a sample a question, all its answers as references, in lower case and without apostrophes."""

from __future__ import annotations

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.narrative_qa import NarrativeQA
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.checkers import check_data_pool

LINES = (
    'Who is Tom\'s friend? \\n A "tale" of two.\t Huck. \n'
    'Where? \\n "There\tNA\n'
    "Who is Tom's friend? \\n A \"tale\" of two.\tIt's Jim's\n"
)


@pytest.fixture
def copy(lay):
    return lay({"train.tsv": LINES, "dev.tsv": LINES, "test.tsv": LINES})


def test_answers_of_a_question_are_its_references_without_apostrophes(copy, no_datasets):
    assert NarrativeQA.prepare("val", data_dir=copy).samples == [
        Sample("val_0", 'who is toms friend? \\n a "tale" of two.', ["huck.", "its jims"]),
        Sample("val_1", 'where? \\n "there', ["na"]),
    ]
    check_data_pool(NarrativeQA, data_dir=copy)
    assert NarrativeQA.prepare("val", data_dir=copy, max_size=1).samples[0].references == ["huck.", "its jims"]


def test_the_files_are_fetched_where_no_copy_is_named(hub, copy, tmp_path):
    url = "https://storage.googleapis.com/unifiedqa/data/narrativeqa/{}.tsv"
    hub.files = {url.format(name): tmp_path / "copy" / f"{name}.tsv" for name in ("train", "dev")}
    assert NarrativeQA.prepare("val").samples == NarrativeQA.prepare("val", data_dir=copy).samples
    assert hub.asked == [url.format("dev")]
    with pytest.raises(DataPoolError, match=r"test.tsv"):
        NarrativeQA.prepare("test")


@pytest.mark.parametrize("in_columns", [True, False])
def test_the_hub_s_columns_make_the_same_prompts(hub, in_columns):
    answers = ["Huck.", "It's Jim's"]
    row = {
        "document": {"summary": {"text": 'A "tale" of two.', "title": "Tom"}},
        "question": {"text": "Who is Tom's friend?"},
        "answers": {"text": answers} if in_columns else [{"text": answer} for answer in answers],
    }
    hub.serve("deepmind/narrativeqa", train=[row])
    assert NarrativeQA.prepare("train", hub_id="deepmind/narrativeqa").samples == [
        Sample("train_0", 'who is toms friend? \\n a "tale" of two.', ["huck.", "its jims"])
    ]


def test_what_is_wrong_is_named(lay):
    folder = lay({"train.tsv": "A?\tB\nA? B\n", "dev.jsonl": '{"question": "A?", "answers": 3}'})
    with pytest.raises(DataPoolError, match=r"train.tsv, line 2: .* 1 "):
        NarrativeQA.prepare("train", data_dir=folder)
    with pytest.raises(DataPoolError, match=r"dev.jsonl, line 1, column 'answers': .* 3$"):
        NarrativeQA.prepare("val", data_dir=folder)
