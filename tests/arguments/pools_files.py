"""How each argument is seen to act of the pools that read a user's own data, or make up theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.arguments.seen import Acts, Silent, Tried, samples
from tests.catalogue import Places

Place = Callable[[Places], Any]
"""What is written first."""


def written(name: str, text: str) -> Place:
    """A file."""
    return lambda places: places.file(name, text)


def of_train(file: Place) -> Place:
    """A file as that of the training split."""
    return lambda places: {"train": file(places)}


def saved(name: str, *splits: str) -> Place:
    """A folder in which `datasets` saved ten rows of every split, named in their texts."""

    def place(places: Places) -> str:
        from datasets import Dataset, DatasetDict

        folder = places.root / name
        if not folder.is_dir():
            tables = {
                split: Dataset.from_dict(
                    {"text": [f"{split} {row}" for row in range(10)], "answer": [f"{row + 1}" for row in range(10)]}
                )
                for split in splits
            }
            DatasetDict(tables).save_to_disk(str(folder))
        return str(folder)

    return place


def converted(tried: Tried) -> Any:
    """Samples of files that `datasets` converts, in a folder of the test's own."""
    import datasets

    tried.patch.setattr(datasets.config, "HF_DATASETS_CACHE", tried.places.root / "converted")
    return samples(tried)


def name_asked_for(tried: Tried) -> Any:
    """Samples of a hub whose texts are the names of configurations."""
    import datasets

    def load_dataset(path: str, name: str | None = None, **settings: Any) -> Any:
        columns = ("text", "prompt", "chosen", "rejected")
        return datasets.DatasetDict(train=datasets.Dataset.from_dict({each: [f"of {name}"] * 10 for each in columns}))

    tried.patch.setattr(datasets, "load_dataset", load_dataset)
    return samples(tried)


def table(ending: str, *rows: tuple[str, str]) -> str:
    """Texts and answers as JSON lines or CSV."""
    if ending == "jsonl":
        return "".join(json.dumps({"text": text, "answer": answer}) + "\n" for text, answer in rows)
    return "".join(f"{text},{answer}\n" for text, answer in (("text", "answer"), *rows))


_ANY_FILE: dict[str, Acts] = {
    "prompt_prefix": Acts("Say: ", samples),
    "prompt_suffix": Acts(" is", samples),
    "max_size": Acts(2, samples),
    "max_rows": Acts(6, samples),
    "split_ratios": Acts([0.5, 0.3, 0.2], samples),
    "seed": Acts(4, samples),
}

_ANY_TABLE: dict[str, Acts] = {
    **_ANY_FILE,
    "prompt_column": Acts("answer", samples),
    "reference_column": Acts(["answer", "text"], samples),
    "meta_columns": Acts(["answer"], samples),
    "last_message_as_reference": Acts(True, samples, refused="last_message_as_reference needs messages"),
    "tools_column": Acts("answer", samples, refused="expected a list of JSON objects"),
    "image_column": Acts("answer", samples, refused="cannot read the image"),
    "format": Acts("alpaca", samples, refused="not both"),
}


def instructions(name: str) -> Place:
    """A file or a folder with ten rows in the format of Alpaca."""
    rows = [{"instruction": f"Add {number}.", "input": "1", "output": f"{number + 1}"} for number in range(10)]

    def place(places: Places) -> str:
        if name.endswith(".csv"):
            lines = [",".join(row.values()) for row in [dict(zip(rows[0], rows[0], strict=True)), *rows]]
            return places.file(name, "\n".join(lines))
        if name.endswith(".json"):
            return places.file(name, json.dumps(rows))

        from datasets import Dataset, DatasetDict

        folder = places.root / name
        if not folder.is_dir():
            DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(str(folder))
        return str(folder)

    return place


def joined(name: str) -> Acts:
    """The template of inputs, of rows that have some."""
    names = ["prompt_column", "reference_column"]
    return Acts("{input}: {instruction}", samples, others={"path": instructions(name)}, without=names)


def _files(ending: str, first: str, second: str) -> dict[str, Acts | Silent]:
    one, other = written(f"one.{ending}", first), written(f"other.{ending}", second)
    return {
        "path": Acts(other, samples),
        "data_files": Acts(of_train(other), samples, others={"data_files": of_train(one)}, without=["path"]),
    }


def _tables(ending: str) -> dict[str, Acts | Silent]:
    ours = [(f"two and {number}", f"{number + 2}") for number in range(10)]
    return _ANY_TABLE | _files(ending, table(ending, *ours), table(ending, *((f"not {a}", b) for a, b in ours)))


def _problems(name: str) -> str:
    """Ten rows of GSM8K."""
    return "".join(json.dumps({"question": f"{name} {n}?", "answer": f"#### {n}"}) + "\n" for n in range(10))


_TWO_DELIMITERS = written("two_delimiters.csv", "text;n,text\n" + "".join(f"left {n};x,right {n}\n" for n in range(5)))
_SENTENCES = written("sentences.txt", "".join(f"It is {n}. It was {n}. It ends.\n" for n in range(10)))
_TWO_SPLITS = saved("two_splits", "train", "validation")
_TWO_COLUMNS = {"path": saved("two_columns", "train")}
_JSON = {"path": "json", "data_files": of_train(written("first.jsonl", table("jsonl", ("first", "1"), ("one", "2"))))}


def _pairs(name: str) -> str:
    """Ten preferences."""
    rows = ({"prompt": name, "chosen": f"{n}", "rejected": "x"} for n in range(10))
    return "".join(json.dumps(row) + "\n" for row in rows)


def saved_pairs(name: str, *splits: str) -> Place:
    """A folder in which `datasets` saved ten preferences of every split, named in their prompts."""

    def place(places: Places) -> str:
        from datasets import Dataset, DatasetDict

        folder = places.root / name
        if not folder.is_dir():
            rows = {split: [json.loads(line) for line in _pairs(split).splitlines()] for split in splits}
            DatasetDict({split: Dataset.from_list(each) for split, each in rows.items()}).save_to_disk(str(folder))
        return str(folder)

    return place


_SAVED_PAIRS = saved_pairs("saved_pairs", "train", "validation")

ROWS: dict[str, dict[str, Acts | Silent]] = {
    "episodes": {"eval_episodes": Acts(7, samples, others={"split": "val"})},
    "dummy_pool": {
        "prompt": Acts("Say:", samples),
        "n_samples": Acts(5, samples),
    },
    "film_opinions": {
        "n_train": Acts(21, samples),
        "n_eval": Acts(6, samples, others={"split": "val"}),
        "seed": Acts(1, samples),
        "prompt_words": Acts([6, 6], samples),
    },
    "sums": {"limit": Acts(21, samples)},
    "shapes": {
        "questions": Acts(["count"], samples),
        "n_train": Acts(5, samples),
        "n_eval": Acts(3, samples, others={"split": "val"}),
        "seed": Acts(4, samples),
        "side": Acts(32, samples),
        "constant": Acts(True, samples),
        "preferences": Acts(True, samples),
    },
    "gsm8k": {
        **_ANY_FILE,
        **_files("jsonl", _problems("first"), _problems("second")),
        "n_val": Acts(
            3, samples, others={"data_files": of_train(written("n.jsonl", _problems("n")))}, without=["path"]
        ),
    },
    "jsonl": {**_tables("jsonl"), "input_template": joined("instructions.json")},
    "csv": {
        **_tables("csv"),
        "input_template": joined("instructions.csv"),
        "delimiter": Acts(";", samples, others={"path": _TWO_DELIMITERS}, without=["reference_column"]),
    },
    "preferences": {
        **{name: _ANY_FILE[name] for name in ("max_size", "max_rows", "split_ratios", "seed")},
        **_files("jsonl", _pairs("first"), _pairs("second")),
        "dataset": Acts(saved_pairs("one_split", "train"), samples, others={"dataset": _SAVED_PAIRS}, without=["path"]),
        "name": Acts("small", name_asked_for, others={"dataset": "owner/set"}, without=["path"]),
        "split_names": Acts({"train": "validation"}, samples, others={"dataset": _SAVED_PAIRS}, without=["path"]),
        "divided_split": Acts("validation", samples, others={"dataset": _SAVED_PAIRS}, without=["path"]),
        "prompt_column": Acts("other", samples),
        "chosen_column": Acts("other", samples),
        "rejected_column": Acts("other", samples),
        "label_column": Acts("is_good", samples, others={"response_column": "chosen"}),
        "response_column": Acts("rejected", samples, others={"label_column": "is_good", "response_column": "chosen"}),
        "margin_column": Acts("chosen", samples),
        "tools_column": Acts("chosen", samples, refused="expected a list of JSON objects"),
        "image_column": Acts("chosen", samples, refused="cannot read the image"),
        "format": Acts("hh", samples, refused="in their common beginning"),
        "input_template": Acts(
            "{input}: {instruction}",
            samples,
            others={
                "path": written(
                    "instructions_pairs.jsonl",
                    '{"instruction": "Add 2.", "input": "1", "chosen": "3", "rejected": "4"}\n' * 10,
                )
            },
        ),
    },
    "text": {
        **_ANY_FILE,
        **_files("txt", "a text\nanother text\n" * 5, "not a text\nnor this text\n" * 5),
        "separator": Acts("number", samples),
        "prompt_words": Acts(4, samples),
        "prompt_sentences": Acts(
            2, samples, others={"path": _SENTENCES, "prompt_sentences": 1}, without=["prompt_words"]
        ),
    },
    "hf_dataset": {
        **{name: replace(row, others=_TWO_COLUMNS) for name, row in _ANY_TABLE.items()},
        "input_template": joined("instructions"),
        "path": Acts(saved("two_columns", "train"), samples),
        "name": Acts("small", name_asked_for, others={"path": "owner/set"}),
        "data_files": Acts(
            of_train(written("second.jsonl", table("jsonl", ("second", "1"), ("two", "2")))), converted, others=_JSON
        ),
        "split_names": Acts({"train": "validation"}, samples, others={"path": _TWO_SPLITS}),
    },
}
