"""How each argument of the metrics that load models or start programs is seen to act."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rl4lms_like.core.sample import Sample
from tests.arguments.model_sights import batches, memory_of_java, passes_of_two, stopped
from tests.arguments.models import (
    BATCH_SIZE,
    BERT_SCORE,
    BLEURT,
    DEVICE,
    INTENT_ACCURACY,
    LEARNED_REWARD,
    REWARD_MODEL,
    other,
    references_file,
)
from tests.arguments.seen import Acts, Silent, Texts
from tests.catalogue import Places

_DOCUMENTS = (
    "The film opens with a quiet morning in a small town. Nobody asked who wrote the letter.\n"
    "The ending seemed slow and a little cold. I saw it with my sister, and we laughed.",
    "The museum bought 34 paintings on 12 March. Each was of the sea.\nA wonderful story, from start to finish.",
)
_SUMMARIES = (
    "A quiet morning by the sea. Nobody knew the letter.\nThe ending was a little cold.",
    "The museum bought the sea.\nThe paintings seemed wonderful. It was a comedy.",
)


def summaries(places: Places) -> Texts:
    """Documents and summaries of several paragraphs, which have several sentences."""
    return Texts([Sample(text[:8], text, []) for text in _DOCUMENTS], _SUMMARIES)


def with_metas(places: Places) -> Texts:
    """A text to read in `meta_data` besides the references."""
    samples = [Sample("one", "Say:", ["The film was good."], {"reference": "A wonderful story, slow and cold."})]
    return Texts(samples, ["The film"])


def head(n_columns: int, seed: int | None = 1) -> Callable[[Places], str]:
    """Weights of SummaC's head for histograms of so many columns; without a seed, all columns count alike."""

    def file(places: Places) -> str:
        draw = torch.Generator().manual_seed(seed or 0)
        weights = load_file(places.head())
        weights = {name: torch.randn(weight.shape, generator=draw) for name, weight in weights.items()}
        alike, drawn = torch.full((1, n_columns), 0.01), torch.randn((1, n_columns), generator=draw)
        weights["mlp.weight"] = alike if seed is None else drawn
        path = places.root / f"head_{n_columns}_{seed}.safetensors"
        save_file(weights, path)
        return str(path)

    return file


def _of_summaries(value: Any, **others: Any) -> Acts:
    return Acts(value, texts=summaries, **others)


_SUMMAC = {
    "imager_load_cache": Silent("has no effect"),
    "use_cache": _of_summaries(False, sees=passes_of_two),
    "max_doc_sents": _of_summaries(1),
    "device": _of_summaries("cuda:1", sees=DEVICE.sees, others=DEVICE.others),
    "batch_size": _of_summaries(3, sees=batches),
}

ROWS: dict[str, dict[str, Acts | Silent]] = {
    "reference_perplexity": {"model_name": Acts(other("causal")), "batch_size": BATCH_SIZE, "device": DEVICE},
    "causal_perplexity": {
        "stride": Acts(4),
        "tokenizer_id": Acts(lambda places: places.model("encoder")),
        "model_type": Silent("has no effect"),
        "use_text_from_meta_data": Acts(True, texts=with_metas),
        "max_length": Acts(24),
    },
    "learned_reward": LEARNED_REWARD,
    "reward_model": REWARD_MODEL,
    "bert_score": {"idf": Acts(True), **BERT_SCORE},
    "bleurt": {"config_name": Acts(other("regressor")), **BLEURT},
    "intent_accuracy": INTENT_ACCURACY,
    "cider": {"references_file": Acts(references_file)},
    "spice": {"java_memory": Acts("2G", sees=memory_of_java), "timeout": Acts(0.001, sees=stopped)},
    "summaCZS": {
        "model_name": _of_summaries(other("nli")),
        "granularity": _of_summaries("sentence"),
        "op1": _of_summaries("min"),
        "op2": _of_summaries("max"),
        "use_ent": _of_summaries(False),
        "use_con": _of_summaries(False),
        **_SUMMAC,
    },
    "summaCConv": {
        "models": _of_summaries(lambda places: [other("nli")(places)]),
        "bins": _of_summaries("percentile", others={"bins": "even23", "start_file": head(23)}),
        "granularity": _of_summaries("paragraph"),
        "nli_labels": _of_summaries("c"),
        "start_file": _of_summaries(head(50)),
        "agg": _of_summaries("max"),
        "norm_histo": _of_summaries(True, others={"start_file": head(50, None)}, also={"bins": "even48"}),
        **_SUMMAC,
    },
}
