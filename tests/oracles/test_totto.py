"""PARENT and BLEU of ToTTo equal the numbers of its published scripts, Perl detokenizer included.

`totto_golden.json` holds what the scripts of google-research/language (commit 09b33d1, language/totto) print for the
pairs made here, as shares of 1 with 13 digits:

    files           one line a pair, lower-cased: the text (`<null>` if blank, line breaks as spaces), three references
                    (`<null>` where there are fewer), the two tables of `table_to_text_utils.get_*_parent_format`
    all of them     detokenizer.perl -q -l en          (moses-smt/mosesdecoder, commit 07de444)
    parent          totto_parent_eval.py, without `lambda_weight`, pair by pair: precision, recall, F
    bleu            sacrebleu r0 r1 r2 -w 14 < texts   (2.6.0), a text for all tables: all, overlap, no overlap
    sample_bleu     the same of `output_sample.txt` for the five tables of `dev_sample.jsonl`
"""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path

import pytest

from rl4lms_like.metrics.lexical import BLEUToTTo, ParentToTTo
from rl4lms_like.rewards.lexical import PARENTRewardFunction
from rl4lms_like.scoring.score import Texts

GOLDEN = Path(__file__).with_name("totto_golden.json")
SPECIAL = (
    "",
    "   ",
    "<null>",
    "日本語の文章は、スペースなしで書かれます。",
    "Деметрий Красивый был царём Кирены в 250 году до н. э.",
    "ديميتريوس كان ملك برقة",
    "he said : \" it 's 5 % of $ 7,230 \" , and the jones ' house ( 2012 ) @-@ was & quot; big &amp;",
    "7,230",
    "....",
    "a line\nand another one",
)


def tables(shared_dir: Path) -> list[dict]:
    folder = shared_dir / "data" / "totto_sample"
    lines = [line for name in ("dev", "train") for line in (folder / f"{name}_sample.jsonl").open(encoding="utf-8")]
    return [{"overlap_subset": False, **json.loads(line)} for line in lines]


def texts(shared_dir: Path) -> list[str]:
    data = shared_dir / "data"
    written = (data / "totto_sample" / "output_sample.txt").read_text(encoding="utf-8").splitlines()
    finals = [note["final_sentence"] for table in tables(shared_dir) for note in table["sentence_annotations"]]
    spaced = [re.sub(r"([^\w ])", r" \1 ", text) for text in finals[::3]]
    german = gzip.decompress((data / "multi30k" / "val.de.gz").read_bytes()).decode("utf-8").splitlines()[:3]
    return [*written, *dict.fromkeys(finals), *spaced, *german, " ".join(finals * 20), *SPECIAL]


def pairs(shared_dir: Path) -> list[tuple[str, dict]]:
    """Every text for every table."""
    return [(text, table) for table in tables(shared_dir) for text in texts(shared_dir)]


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(GOLDEN.read_text())


def test_parent_of_each_pair_is_that_of_the_script(shared_dir, golden):
    generated, raw = zip(*pairs(shared_dir), strict=True)
    infos = [{"raw_table": table} for table in raw]
    assert len(generated) == len(golden["parent"]) > 200
    rewards = PARENTRewardFunction().scores(Texts([""] * len(raw), list(generated), [[]] * len(raw), infos))
    assert rewards == pytest.approx([f_score for _, _, f_score in golden["parent"]], abs=1e-9)
    results = ParentToTTo().compute([""] * len(raw), list(generated), [[]] * len(raw), infos)
    assert results["table_to_text/parent_overall_f_score"][0] == pytest.approx(rewards, abs=1e-12)
    for column, key in enumerate(("/precision", "/recall", "_f_score")):
        for name, wanted in (("overall", (0, 1)), ("overlap", (1,)), ("non_overlap", (0,))):
            chosen = [
                row[column]
                for row, table in zip(golden["parent"], raw, strict=True)
                if int(table["overlap_subset"]) in wanted
            ]
            key_of_subset = f"table_to_text/parent_{name}{key}"
            assert results[key_of_subset][1] == pytest.approx(math.fsum(chosen) / len(chosen), abs=1e-9)


def test_bleu_of_each_text_for_all_tables_is_that_of_the_command_line(shared_dir, golden):
    raw = tables(shared_dir)
    infos = [{"raw_table": table} for table in raw]
    for text, expected in zip(texts(shared_dir), golden["bleu"], strict=True):
        results = BLEUToTTo().compute([""] * len(raw), [text] * len(raw), [[]] * len(raw), infos)
        found = [results[f"table_to_text/bleu_{name}"][1] for name in ("overall", "overlap", "non_overlap")]
        assert found == pytest.approx(expected, abs=1e-9)


def test_the_published_sample_has_its_published_bleu(shared_dir, golden):
    raw = tables(shared_dir)[:5]
    written = texts(shared_dir)[:5]
    infos = [{"raw_table": table} for table in raw]
    results = BLEUToTTo().compute([""] * 5, written, [[]] * 5, infos)
    assert results["table_to_text/bleu_overall"][1] == pytest.approx(golden["sample_bleu"], abs=1e-9)
    assert round(100 * results["table_to_text/bleu_overall"][1], 1) == 45.5  # eval_pipeline_test.py
