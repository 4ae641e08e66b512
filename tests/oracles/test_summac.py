"""SummaC's scores are those of the package `summac` 0.0.4 with the NLI model and the pairs made here.

The models' weights are a formula, the same ones everywhere. `summac_golden.json` holds, with 9 digits and on a CPU:

    model_map["vitc"]["model_card"] = make_nli(folder)     its tokenizer called as tokenizer(premises, hypotheses, ...)
    zs      SummaCZS(model_name="vitc", **SETTINGS[name]).score_one(document, summary)["score"]
    conv    SummaCConv(models=["vitc"], start_file=make_head(file, columns), **HEADS[name]).score([document], [summary])
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from rl4lms_like.metrics.consistency import SummaCConvMetric, SummaCZSMetric
from rl4lms_like.testing import models

GOLDEN = Path(__file__).with_name("summac_golden.json")
SETTINGS = {
    "sentence": {"granularity": "sentence"},
    "paragraph": {"granularity": "paragraph"},
    "2sents": {"granularity": "2sents", "use_con": False},
    "mixed": {"granularity": "mixed", "use_ent": False},
    "document-sentence": {"granularity": "document-sentence", "op1": "mean", "op2": "min"},
    "sentence-paragraph": {"granularity": "sentence-paragraph", "op1": "min", "op2": "max", "max_doc_sents": 3},
}
HEADS = {
    "published": {"bins": "percentile", "nli_labels": "e"},
    "even": {"bins": "even50", "nli_labels": "ec", "agg": "all"},
    "max": {"bins": "even10", "nli_labels": "n", "agg": "max", "granularity": "paragraph"},
}
N_OF_OTHER_SETTINGS = 60


def filled(parameter: torch.Tensor, seed: int, scale: float) -> torch.Tensor:
    values = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * 12.9898 + seed) * 43758.5453
    return ((values - values.floor() - 0.5) * scale).reshape(parameter.shape).float()


def make_nli(folder: Path) -> Path:
    """A tiny model of natural language inference, its labels in the order of `vitc`."""
    tokenizer = models.make_tokenizer(append_eos=True)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        id2label={0: "ENTAILMENT", 1: "CONTRADICTION", 2: "NEUTRAL"},
        label2id={"ENTAILMENT": 0, "CONTRADICTION": 1, "NEUTRAL": 2},
    )
    model = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if "LayerNorm" not in name:
                parameter.copy_(filled(parameter, seed, 4.0 if "classifier" in name else 2.0))
    return models.save_model(folder, model, tokenizer)


def make_head(file: Path, n_columns: int) -> Path:
    shapes = {"mlp.weight": (1, n_columns), "mlp.bias": (1,), "layer_final.weight": (2, 3), "layer_final.bias": (2,)}
    torch.save({name: filled(torch.zeros(shape), seed, 0.5) for seed, (name, shape) in enumerate(shapes.items())}, file)
    return file


def n_columns(bins: str, nli_labels: str) -> int:
    return (23 if bins == "percentile" else int(bins[4:])) * len(nli_labels)


def pairs(shared_dir: Path) -> list[tuple[str, str]]:
    data = shared_dir / "data"
    articles = json.loads((data / "cnndm_sample" / "cnndm_sample.train.0.json").read_text(encoding="utf-8"))
    sources = [[" ".join(words) for words in article["src"]] for article in articles]
    summaries = [" . ".join(" ".join(words) for words in article["tgt"]) + " ." for article in articles]
    documents = [" ".join(lines[:3]) + "\n\n" + " ".join(lines[3:length]) for lines in sources for length in (2, 5, 9)]
    stories = (data / "tinystories_sample" / "tinystories_sample.txt").read_text(encoding="utf-8")
    short = [story.strip()[:600] for story in stories.split("<|endoftext|>")[:51]]
    special = [
        *(
            ("", summaries[0]),
            (documents[0], ""),
            ("", ""),
            (documents[1], "no."),
            ("short", "a sentence of some length."),
        ),
        *((documents[1], documents[1]), (" ".join(sources[0]), " ".join(sources[0][:14])), (documents[2], short[0])),
        ("日本語の文章は、スペースなしで書かれます。東京は日本の首都です。", "東京は日本の首都で、とても大きい。"),
        ("Москва — столица России. Она очень большая.", "Столица России — Москва."),
    ]
    return [
        *special,
        *((document, summary) for document in documents for summary in summaries),
        *((story, story[-150:]) for story in short[:50]),
        *((story, other[:150]) for story, other in pairwise(short)),
    ]


@pytest.fixture(scope="module")
def nli(tmp_path_factory) -> Path:
    return make_nli(tmp_path_factory.mktemp("nli"))


def scored(metric, some: list[tuple[str, str]]) -> list[float]:
    documents, summaries = (list(texts) for texts in zip(*some, strict=True))
    ((scores, mean),) = metric.compute(documents, summaries, [[]] * len(some)).values()
    assert mean == pytest.approx(sum(scores) / len(scores))
    return scores


@pytest.mark.usefixtures("language_data")
@pytest.mark.parametrize("setting", SETTINGS)
def test_zero_shot_scores_are_those_of_the_package(setting, nli, shared_dir):
    expected = json.loads(GOLDEN.read_text())["zs"][setting]
    some = pairs(shared_dir)[: len(expected)]
    found = scored(SummaCZSMetric(str(nli), device="cpu", **SETTINGS[setting]), some)
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(found) - min(found) > 0.1
    assert setting != "sentence" or len(some) == len(pairs(shared_dir)) > 200


@pytest.mark.usefixtures("language_data")
@pytest.mark.parametrize("head", HEADS)
def test_scores_of_a_head_are_those_of_the_package(head, nli, shared_dir, tmp_path):
    expected = json.loads(GOLDEN.read_text())["conv"][head]
    start_file = make_head(tmp_path / "head.bin", n_columns(HEADS[head]["bins"], HEADS[head]["nli_labels"]))
    metric = SummaCConvMetric(models=[str(nli)], start_file=str(start_file), device="cpu", **HEADS[head])
    found = scored(metric, pairs(shared_dir)[: len(expected)])
    # A probability within rounding of a bin's edge may fall on either side of it.
    distances = sorted(abs(mine - theirs) for mine, theirs in zip(found, expected, strict=True))
    assert distances[-3] < 1e-6
    assert distances[-1] < 0.02
    assert max(found) - min(found) > 0.01
