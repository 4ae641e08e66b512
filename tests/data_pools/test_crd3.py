"""CRD3: the last turns and the next speaker's name as prompt, what is said as reference."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.crd3 import URL, CRD3DialogueGeneration
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.checkers import check_data_pool

TURNS = [
    {"NAMES": ["LAURA"], "UTTERANCES": ["Hi."], "NUMBER": 0},
    {"NAMES": ["SAM", "LIAM"], "UTTERANCES": ["Hello", "there."], "NUMBER": 1},
    {"NAMES": ["MATT"], "UTTERANCES": ["Hello everyone.", "Enjoy!"], "NUMBER": 2},
    {"NAMES": ["SAM"], "UTTERANCES": ["Yay."], "NUMBER": 3},
]
EXPECTED = [
    Sample("train_ep_0_turn_2", "LAURA: Hi.\nSAM: Hello there.\nMATT: ", ["Hello everyone. Enjoy!"]),
    Sample("train_ep_0_turn_3", "SAM: Hello there.\nMATT: Hello everyone. Enjoy!\nSAM: ", ["Yay."]),
]


@pytest.fixture
def repository(lay):
    files = {f"data/cleaned data/C1E00{n}.json": json.dumps({"TURNS": TURNS, "CHUNKS": []}) for n in (1, 2)}
    files |= {f"data/aligned data/{name}_files": "C1E001\nC1E002\n" for name in ("train", "val", "test")}
    return lay(files, "fetched/CRD3-master")


def test_turns_with_two_turns_before_them_are_samples(repository, no_datasets):
    pool = CRD3DialogueGeneration.prepare("train", max_context_size=2, data_dir=repository)
    assert pool.samples[:2] == EXPECTED
    assert [sample.id for sample in pool.samples[2:]] == ["train_ep_1_turn_2", "train_ep_1_turn_3"]
    check_data_pool(CRD3DialogueGeneration, max_context_size=2, data_dir=repository)


def test_the_folder_above_and_the_data_folder_do_as_well(repository, tmp_path):
    args = {"split": "val", "max_context_size": 5}
    expected = CRD3DialogueGeneration.prepare(data_dir=repository, **args).samples
    for folder in (tmp_path / "fetched", tmp_path / "fetched/CRD3-master/data"):
        assert CRD3DialogueGeneration.prepare(data_dir=str(folder), **args).samples == expected
    assert len(CRD3DialogueGeneration.prepare(data_dir=repository, max_size=3, **args)) == 3


def test_the_repository_is_fetched_where_no_copy_is_named(hub, repository, tmp_path):
    hub.files[URL] = tmp_path / "fetched"
    assert CRD3DialogueGeneration.prepare("train", max_context_size=2).samples[:2] == EXPECTED
    assert hub.asked == ["https://github.com/RevanthRameshkumar/CRD3/archive/refs/heads/master.zip"]


def test_tables_have_a_dialogue_a_row(hub):
    turns = [{name.lower(): value for name, value in turn.items()} for turn in TURNS]
    in_columns = {name: [turn[name] for turn in turns] for name in ("names", "utterances", "number")}
    hub.serve("me/games", train=[{"turns": turns}], test=[{"turns": in_columns}])
    assert CRD3DialogueGeneration.prepare("train", max_context_size=2, hub_id="me/games").samples == EXPECTED
    test = CRD3DialogueGeneration.prepare("test", max_context_size=2, hub_id="me/games").samples
    assert [sample.references for sample in test] == [sample.references for sample in EXPECTED]


def test_what_is_wrong_is_named(lay):
    folder = lay(
        {
            "data/aligned data/train_files": "C1E001\n",
            "data/cleaned data/C1E001.json": json.dumps({"TURNS": [{"NAMES": [], "UTTERANCES": []}]}),
            "data/aligned data/val_files": "C1E009\n",
        }
    )
    with pytest.raises(DataPoolError, match=r"C1E001.json, turn 0: .*'names'"):
        CRD3DialogueGeneration.prepare("train", max_context_size=2, data_dir=folder)
    with pytest.raises(DataPoolError, match=r"C1E009.json"):
        CRD3DialogueGeneration.prepare("val", max_context_size=2, data_dir=folder)


@pytest.mark.parametrize(
    ("episode", "data"),
    [
        ([1], r"C1E001.json: .*\[1\]"),
        ({"TURNS": None}, "C1E001.json: .*null"),
        ({"TURNS": ["Hi."]}, "C1E001.json, turn 0: .*'Hi.'"),
        ({"TURNS": [{"NAMES": ["SAM"], "UTTERANCES": [1]}]}, r"turn 0, column 'utterances': .*\[1\]"),
    ],
)
def test_an_episode_that_is_none_is_named(lay, episode, data):
    files = {"data/aligned data/train_files": "C1E001\n", "data/cleaned data/C1E001.json": json.dumps(episode)}
    with pytest.raises(DataPoolError, match=data):
        CRD3DialogueGeneration.prepare("train", max_context_size=2, data_dir=lay(files))


def test_one_name_without_a_list_is_a_name(lay):
    turns = [{"names": "SAM", "utterances": "Hi."}] * 3
    folder = lay({"train.jsonl": json.dumps({"turns": turns})})
    (sample,) = CRD3DialogueGeneration.prepare("train", max_context_size=1, data_dir=folder).samples
    assert (sample.prompt_or_input_text, sample.references) == ("SAM: Hi.\nSAM: ", ["Hi."])
