"""Small local copies of the published data sets, each in files that its pool reads, made of real excerpts.

LOCAL_DATA["commongen"](shared, folder)      writes the copy of a pool's data set into the folder

What no excerpt is there for (NarrativeQA, CRD3, the labels of DailyDialog, reviews as IMDb has them) is put together
from others: the files are right, the texts are real or nearly so, the numbers mean nothing.
"""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

SPLITS = ("train", "validation", "test")
N_ROWS = {"train": 30, "validation": 12, "test": 12}


def write_json_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def first_lines(file: Path, n: int) -> list[str]:
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        return [line.rstrip("\n") for line in itertools.islice(lines, n)]


def commongen(shared: Path, folder: Path) -> None:
    source = shared / "data" / "commongen"
    for ending in ("src_alpha.txt", "tgt.txt"):
        rows = first_lines(source / f"commongen.train.{ending}", N_ROWS["train"])
        (folder / f"commongen.train.{ending}").write_text("\n".join(rows) + "\n", encoding="utf-8")
    for split in ("dev", "test"):
        rows = first_lines(source / f"commongen.{split}.jsonl", 12)
        (folder / f"commongen.{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def totto(shared: Path, folder: Path) -> None:
    source = shared / "data" / "totto_sample"
    shutil.copy(source / "train_sample.jsonl", folder / "totto_train_data.jsonl")
    shutil.copy(source / "dev_sample.jsonl", folder / "totto_dev_data.jsonl")
    unlabelled = [json.loads(line) for line in first_lines(source / "dev_sample.jsonl", 5)]
    for row in unlabelled:
        row.pop("sentence_annotations")
    write_json_lines(folder / "unlabeled_totto_test_data.jsonl", unlabelled)


def cnn_daily_mail(shared: Path, folder: Path) -> None:
    texts = json.loads((shared / "data" / "cnndm_sample" / "cnndm_sample.train.0.json").read_text(encoding="utf-8"))
    articles = [
        {side: "\n".join(" ".join(sentence) for sentence in text[key]) for side, key in _SIDES.items()}
        for text in texts
    ]
    for split in SPLITS:
        write_json_lines(folder / f"{split}.jsonl", [{"id": str(i), **row} for i, row in enumerate(articles)])


_SIDES = {"article": "src", "highlights": "tgt"}


def parallel_texts(shared: Path, folder: Path) -> None:
    """Translations, line by line; image captions of Multi30k stand in for talks and news."""
    source = shared / "data" / "multi30k"
    for split, theirs in (("train", "train"), ("val", "val"), ("test", "test_2016_flickr")):
        for language in ("en", "de"):
            lines = first_lines(source / f"{theirs}.{language}.gz", 30 if split == "train" else 12)
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")


def reviews(shared: Path, folder: Path) -> None:
    """The folders of aclImdb; snippets of reviews, two to a text, by how people rated the first."""
    rows = _rated_snippets(shared / "data" / "vader_icwsm14" / "movieReviewSnippets_GroundTruth.txt")
    by_label = {"pos": rows(lambda rating: rating > 1), "neg": rows(lambda rating: rating < -1)}
    for split, label in itertools.product(("train", "test"), by_label):
        place = folder / split / label
        place.mkdir(parents=True)
        for index in range(16):
            text = f"{next(by_label[label])} {next(by_label[label])}"
            (place / f"{index}_{9 if label == 'pos' else 2}.txt").write_text(text, encoding="utf-8")


def _rated_snippets(file: Path) -> Callable[[Callable[[float], bool]], Iterator[str]]:
    rated = [line.split("\t", 2) for line in first_lines(file, 10_000)]
    return lambda wanted: (text for _, rating, text in rated if wanted(float(rating)))


def narrative_qa(shared: Path, folder: Path) -> None:
    """UnifiedQA's tables: question \\n story in one cell, answer in the other, a row for each answer."""
    stories = _stories(shared)
    for split, name in zip(SPLITS, ("train", "dev", "test"), strict=True):
        rows = []
        for story in itertools.islice(stories, N_ROWS[split] // 2):
            subject = " ".join(story.split()[:8])
            for answer in (subject.lower(), f"it is said that {subject.lower()}"):
                rows.append(f"what does the story say at its start? \\n {story.lower()}\t{answer}")
        (folder / f"{name}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _stories(shared: Path) -> Iterator[str]:
    text = (shared / "data" / "tinystories_sample" / "tinystories_sample.txt").read_text(encoding="utf-8")[:200_000]
    for story in text.split("<|endoftext|>"):
        if flat := " ".join(story.split()):
            yield flat[:600]


def daily_dialog(shared: Path, folder: Path) -> None:
    """Conversations of seven turns, as a table of the hub has them; acts and emotions are made up."""
    rows = first_lines(shared / "data" / "dailydialog" / "dev.txt", 4000)[1000:]
    turns = [turn for row in rows for turn in _two_turns(row)]
    starts = itertools.count(0, 7)
    for split in SPLITS:
        dialogues = [turns[start : start + 7] for start in itertools.islice(starts, N_ROWS[split] // 2)]
        table = [
            {"dialog": each, "act": [1 + i % 4 for i in range(7)], "emotion": [i % 7 for i in range(7)]}
            for each in dialogues
        ]
        write_json_lines(folder / f"{split}.jsonl", table)


def _two_turns(row: str) -> list[str]:
    import csv

    cells = next(csv.reader([row]), [])
    return [cell for cell in cells if cell.strip()] if len(cells) == 2 else []


def crd3(shared: Path, folder: Path) -> None:
    """Turns at a game table: lists of episodes, and an episode's turns in a file of its own."""
    lists, episodes = folder / "data" / "aligned data", folder / "data" / "cleaned data"
    for place in (lists, episodes):
        place.mkdir(parents=True)
    stories = _stories(shared)
    names = ("MATT", "LAURA", "TRAVIS")
    for number, split in enumerate(("train", "val", "test"), start=1):
        name = f"C1E00{number}"
        (lists / f"{split}_files").write_text(f"{name}\n", encoding="utf-8")
        turns = [
            {"NAMES": [names[turn % 3]], "UTTERANCES": [f"{line.strip()}." for line in story.split(".")[:2]]}
            for turn, story in enumerate(itertools.islice(stories, 8))
        ]
        (episodes / f"{name}.json").write_text(json.dumps({"TURNS": turns}), encoding="utf-8")


LOCAL_DATA: dict[str, Callable[[Path, Path], None]] = {
    "imdb": reviews,
    "imdb_seq2seq": reviews,
    "commongen": commongen,
    "totto": totto,
    "cnn_daily_mail": cnn_daily_mail,
    "narrative_qa": narrative_qa,
    "wmt16": parallel_texts,
    "wmt14_processed_en_de": parallel_texts,
    "wmt16newsonly": parallel_texts,
    "iwslt2017en_de": parallel_texts,
    "crd3": crd3,
    "daily_dialog": daily_dialog,
}
"""By the pool that reads it."""
