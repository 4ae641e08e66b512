"""CNN / DailyMail: articles and highlights from tables, stories and PreSumm's tokens."""

from __future__ import annotations

import csv
import hashlib
import io
import json

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.cnn_daily_mail import CNNDailyMail, article_and_highlights
from rl4lms_like.system.errors import DataPoolError, MissingResourceError
from rl4lms_like.testing.checkers import check_data_pool

ROWS = [{"id": str(n), "article": f"Don't worry, it's {n} p.m. All is well.", "highlights": f"It is {n} .\nWell .",}
        for n in range(3)]  # fmt: skip
STORY = "(CNN) -- First line.\n\nSecond line\n\n@highlight\n\nIt is so\n\n@highlight\n\nNews!\n"


def test_the_hub_s_articles(hub):
    hub.serve("abisee/cnn_dailymail", "3.0.0", train=ROWS, validation=ROWS, test=ROWS)
    pool = CNNDailyMail.prepare("train", prompt_prefix="Summarize: ", prompt_suffix=" TL;DR:")
    assert pool.samples[1] == Sample(
        "train_1", "Summarize: Don't worry, it's 1 p.m. All is well. TL;DR:", ["It is 1 .\nWell ."]
    )
    assert hub.asked == [{"path": "abisee/cnn_dailymail", "name": "3.0.0", "revision": None}]
    check_data_pool(CNNDailyMail)
    assert [len(CNNDailyMail.prepare(split, max_size=2)) for split in ("train", "val", "test")] == [2, 2, 2]


def test_articles_are_cut_after_nltk_s_words(lay, language_data):
    folder = lay({"train.jsonl": json.dumps(ROWS[1])})
    cut = CNNDailyMail.prepare("train", truncate_article=7, prompt_prefix="S: ", data_dir=folder).samples[0]
    assert cut.prompt_or_input_text == "S: Do n't worry , it 's 1"
    whole = CNNDailyMail.prepare("train", truncate_article=100, data_dir=folder).samples[0]
    assert whole.prompt_or_input_text == "Do n't worry , it 's 1 p.m. All is well ."


def test_a_missing_word_list_is_told_before_the_articles_are_read(monkeypatch, tmp_path):
    import nltk

    def not_there(text):
        raise LookupError("punkt_tab")

    monkeypatch.setattr(nltk.tokenize, "sent_tokenize", not_there)
    with pytest.raises(MissingResourceError):
        CNNDailyMail.prepare("train", truncate_article=7, data_dir=str(tmp_path))


def test_a_story_has_the_hub_s_columns():
    assert article_and_highlights(STORY) == {
        "article": "(CNN) -- First line. Second line .",
        "highlights": "It is so .\nNews!",
    }


def test_stories_in_folders_and_by_lists_of_addresses(lay, no_datasets):
    folder = lay({f"{name}/{n}.story": STORY for name in ("train", "val", "test") for n in (1, 2)})
    check_data_pool(CNNDailyMail, data_dir=folder)
    addresses = ["http://web/2", "http://web/1"]
    files = {f"cnn/stories/{hashlib.sha1(address.encode()).hexdigest()}.story": f"{address}\n{STORY}"
             for address in addresses}  # fmt: skip
    files |= {"urls/mapping_train.txt": "\n".join(addresses), "urls/mapping_valid.txt": addresses[1]}
    files["urls/all_test.txt"] = f"{addresses[0]}\nhttp://web/9\n"
    listed = lay(files, "listed")
    train = CNNDailyMail.prepare("train", data_dir=listed).samples
    assert [sample.prompt_or_input_text.split()[0] for sample in train] == addresses
    assert len(CNNDailyMail.prepare("val", data_dir=listed)) == 1
    with pytest.raises(DataPoolError, match=r"all_test.txt, line 2: .*\.story .* \(1 of 2"):
        CNNDailyMail.prepare("test", data_dir=listed)


def test_presumm_s_files_are_read_in_the_order_of_their_numbers(lay, no_datasets):
    def tokens(word):
        return json.dumps([{"src": [[word, "."], ["end", "."]], "tgt": [["so", word], ["it", "is"]]}])

    files = {f"cnndm.train.{n}.json": tokens(f"w{n}") for n in (0, 2, 10)}
    folder = lay(files | {"cnndm.valid.0.json": tokens("v"), "cnndm.test.0.json": tokens("t")})
    assert CNNDailyMail.prepare("train", data_dir=folder).samples[2] == Sample(
        "train_2", "w10 . end .", ["so w10\nit is"]
    )
    check_data_pool(CNNDailyMail, data_dir=folder)
    broken = lay({"a.train.0.json": '[{"src": [3], "tgt": []}]'}, "broken")
    with pytest.raises(DataPoolError, match=r"a.train.0.json, entry 0, column 'src'"):
        CNNDailyMail.prepare("train", data_dir=broken)


def test_tables_of_other_hosts(lay):
    table = io.StringIO()
    writer = csv.DictWriter(table, ["id", "article", "highlights"])
    writer.writeheader()
    writer.writerows(ROWS)
    folder = lay({f"{name}.csv": table.getvalue() for name in ("train", "validation", "test")})
    assert CNNDailyMail.prepare("val", data_dir=folder).samples[0].references == ["It is 0 .\nWell ."]
    nameless = lay({"train.jsonl": '{"article": "x", "highlight": "y"}'}, "nameless")
    with pytest.raises(DataPoolError, match=r"train.jsonl, line 1: .*'highlights'.*'highlight'"):
        CNNDailyMail.prepare("train", data_dir=nameless)


def test_the_real_file(shared_dir):
    args = {"data_dir": str(shared_dir / "data/cnndm_sample"), "prompt_prefix": "Summarize: "}
    check_data_pool(CNNDailyMail, splits=("train",), **args)
    samples = CNNDailyMail.prepare("train", **args).samples
    assert len(samples) == 6
    assert samples[0].prompt_or_input_text.startswith("Summarize: ( cnn ) -- that chris smith made an inspiring ,")
    assert samples[0].references[0].splitlines()[0] == "pov video has gone viral on youtube"


def test_only_line_ends_end_a_story_s_lines():
    story = "One\u2028two\r\n\r\n@highlight\r\n\r\nThree\x85four\r\n"
    assert article_and_highlights(story) == {"article": "One\u2028two .", "highlights": "Three\x85four ."}
