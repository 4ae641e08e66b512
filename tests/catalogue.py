"""One row for each id of the catalogue: with which arguments and samples it is checked, and what it cannot have here.

    Row(args, samples)                 built with these, its checker must pass
    Row(args, missing="CoreNLP")       cannot be built here; what it says must name this

Folders come from `Places`: local copies of data sets, and tiny models in the place of the hub's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.metrics.run_reward import EpisodeRewards
from rl4lms_like.metrics.synthetic import DateInText
from rl4lms_like.rewards.sentiment import SentimentReward
from rl4lms_like.system.functions import NamedFunction
from rl4lms_like.testing.checkers import SAMPLES
from tests.judge_server import JudgeServer
from tests.local_data import LOCAL_DATA
from tests.local_models import LOCAL_MODELS


class Places:
    """Folders by name, written when they are first asked for.

    Args:
        root: where they are put.
        shared: real data and models; None where they are absent.
    """

    def __init__(self, root: Path, shared: Path | None) -> None:
        self.root = root
        self.shared = shared
        self._judge: JudgeServer | None = None

    def data(self, pool: str) -> str:
        """A local copy of a pool's data set."""
        if self.shared is None:
            pytest.skip("needs the excerpts of published data sets beside the checkout, which are not there")
        return self._made(pool, lambda folder: LOCAL_DATA[pool](self.shared, folder))

    def model(self, role: str) -> str:
        """A tiny model."""
        return self._made(f"model_{role}", LOCAL_MODELS[role])

    def file(self, name: str, text: str) -> str:
        """A file of one's own."""
        path = self.root / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    def questions(self, **args: Any) -> dict[str, Any]:
        """Arguments of the pool `reasoning_gym`, where its package is installed."""
        pytest.importorskip("reasoning_gym", reason="needs the extra 'reasoning'")
        return {"dataset": "chain_sum", "config": {"max_digits": 1}, "size": 30, **args}

    def metric_script(self) -> str:
        """A metric as the library `evaluate` has them, in a folder."""
        return self._made("same_words", lambda folder: (folder / "same_words.py").write_text(_METRIC_SCRIPT))

    def data_set(self) -> str:
        """A data set of the library `datasets`, saved on disk."""

        def save(folder: Path) -> None:
            from datasets import Dataset

            Dataset.from_dict({"text": [f"one and {number}" for number in range(10)]}).save_to_disk(str(folder))

        return self._made("data_set", save)

    def head(self) -> str:
        """Weights of SummaC's head for one model and 50 bins."""
        import torch
        from safetensors.torch import save_file

        file = self.root / "head.safetensors"
        shapes = {"mlp.weight": (1, 50), "mlp.bias": (1,), "layer_final.weight": (2, 3), "layer_final.bias": (2,)}
        draw = torch.Generator().manual_seed(0)
        save_file({name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}, file)
        return str(file)

    def server(self) -> str:
        """The address of a scorer on this machine: a point a word."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Words)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/score"

    def judge(self) -> str:
        """The address of a chat endpoint on this machine."""
        if self._judge is None:
            self._judge = JudgeServer()
        return self._judge.url

    def samples(self, pool: str, split: str = "val", **args: Any) -> list[Sample]:
        """Three samples of a pool."""
        return DATA_POOLS.get(pool, {"split": split, "data_dir": self.data(pool), **args}).samples[:3]

    def _made(self, name: str, make: Callable[[Path], object]) -> str:
        folder = self.root / name
        if not folder.is_dir():
            folder.mkdir()
            make(folder)
        return str(folder)


class _Words(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["responses"]
        body = json.dumps({"rewards": [len(text.split()) for text in texts]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Nothing on the console."""


_METRIC_SCRIPT = """
import datasets
import evaluate


class SameWords(evaluate.Metric):
    def _info(self):
        texts = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Whether a text has a reference's first word.", citation="", inputs_description="",
            features=datasets.Features({"predictions": texts, "references": datasets.Sequence(texts)}),
        )

    def _compute(self, predictions, references):
        pairs = zip(predictions, references)
        same = [float(text.split()[:1] in [each.split()[:1] for each in refs]) for text, refs in pairs]
        return {"same_words": sum(same) / len(same)}
"""

OfPlaces = Callable[[Places], Any]


def default_samples(places: Places) -> Sequence[Sample]:
    return SAMPLES


@dataclass(frozen=True)
class Row:
    """How an id is checked.

    Args:
        args: what it is built with.
        samples: what it is tried on.
        batch_independent: of a reward; see `check_reward_function`.
        model: role of the tiny model that a metric is handed.
        missing: what the error names that says why it cannot be built here.
    """

    args: OfPlaces | Mapping[str, Any] = field(default_factory=dict)
    samples: OfPlaces = default_samples
    batch_independent: bool = True
    model: str | None = None
    missing: str = ""

    def built_with(self, places: Places) -> dict[str, Any]:
        """The arguments, places found."""
        return dict(self.args(places) if callable(self.args) else self.args)


def share_of_vowels(*, prompts, responses, references, meta_infos, vowels):
    """What a user names as a `python` reward."""
    return [sum(character in vowels for character in text) / max(len(text), 1) for text in responses]


def lengths_of_steps(steps):
    """What a user names as a `step_function`."""
    return [float(len(step)) for step in steps]


def rewards_of_a_run(generated):
    """What the run's own reward pays, in place of a run."""
    lengths = [float(len(item.text)) for item in generated]
    return EpisodeRewards(lengths, {"length": lengths})


def _summaries(places: Places) -> list[Sample]:
    return places.samples("cnn_daily_mail", prompt_prefix="Summarize: ")


def _tables(places: Places) -> list[Sample]:
    return places.samples("totto")


def _concepts(places: Places) -> list[Sample]:
    return places.samples("commongen", prefix="generate a sentence with: ", concept_end_token=".")


def _dialogues(places: Places) -> list[Sample]:
    return places.samples("daily_dialog", context_size=3)


def _with(**roles: str) -> OfPlaces:
    """Arguments that are tiny models, by their roles."""
    return lambda places: {name: places.model(role) for name, role in roles.items()}


def _and(first: OfPlaces, **others: Any) -> OfPlaces:
    return lambda places: {**first(places), **others}


def _local(pool: str, **args: Any) -> Row:
    return Row(lambda places: {"data_dir": places.data(pool), **args})


_BERT_SCORE = _and(_with(model_type="encoder"), num_layers=2)
_JUDGE = Row(lambda places: {"url": places.judge(), "model": "judge"})
_ROUGE_L_MAX = {"length_limit": 100, "length_limit_type": "words", "alpha": 0.5, "weight_factor": 1.2}

REWARDS: dict[str, Row] = {
    "increasing_numbers": Row({"min_tokens": 4}),
    "sentences_with_dates": Row(),
    "sentiment": Row(),
    "combine": Row({"rewards": [{"id": "sentiment", "weight": 0.5}, {"id": "sentences_with_dates"}]}),
    "meteor": Row(),
    "rouge": Row({"rouge_type": "rougeL"}),
    "rouge_combined": Row(),
    "rouge_l_max": Row(_ROUGE_L_MAX),
    "bleu": Row(),
    "sacre_bleu": Row({"tokenize": "intl"}),
    "ter": Row(),
    "chrf": Row(),
    "parent": Row(samples=_tables),
    "spider": Row({"spice_coeff": 0.0, "cider_coeff": 1.0}, batch_independent=False),
    "common_gen_repeat_penalty": Row(samples=_concepts),
    "common_gen_repeat_penalty_batched": Row(samples=_concepts),
    "learned_reward": Row(_and(_with(model_name="classifier"), label_ix=1)),
    "reward_model": Row(_with(model_name="regressor")),
    "bert_score": Row(_BERT_SCORE),
    "bleurt": Row(_with(checkpoint="regressor")),
    "intent_accuracy": Row(_with(model_name="intents"), samples=_dialogues),
    "common_gen_preference_model": Row(_with(model_name="seq2seq"), samples=_concepts),
    "exact_match": Row({"ignore_case": True}),
    "math_equal": Row(),
    "reasoning_gym": Row(),
    "regex": Row({"pattern": r"\d+"}),
    "length_penalty": Row({"max_length": 5}),
    "soft_overlong": Row({"max_length": 20, "cache": 10}),
    "repetition_penalty": Row({"ngram_size": 2}),
    "python": Row({"function": "tests.catalogue:share_of_vowels", "kwargs": {"vowels": "aeiou"}}),
    "environment": Row(),
    "object": Row({"object": NamedFunction(SentimentReward())}),
    "process_reward": Row(_and(_with(model_name="step_classifier"), separator=" ")),
    "step_function": Row({"function": "tests.catalogue:lengths_of_steps", "separator": " "}),
    "http": Row(lambda places: {"url": places.server(), "batch_size": 5}),
    "llm_judge": _JUDGE,
}

REWARDS_NOT_HERE: dict[str, Row] = {
    "spider": Row({"spice_coeff": 0.5, "cider_coeff": 0.5}, missing="CoreNLP"),
    "common_gen_preference_model": Row(missing="weights"),
}

METRICS: dict[str, Row] = {
    "reward": Row(),
    "python": Row({"function": "tests.catalogue:share_of_vowels", "kwargs": {"vowels": "aeiou"}}),
    "object": Row({"object": NamedFunction(DateInText())}),
    "increasing_numbers": Row({"min_tokens": 4}),
    "dates": Row(),
    "sentiment": Row(),
    "distinct_n": Row(),
    "length": Row(),
    "diversity": Row({"window_size": 5}),
    "novelty": Row(lambda places: {"training_texts": places.file("seen.txt", "The film was good.\n"), "max_n": 2}),
    "meteor": Row(),
    "rouge": Row({"use_single_ref": False}),
    "rouge_l_max": Row(_ROUGE_L_MAX),
    "bleu": Row(),
    "sacre_bleu": Row({"tokenize": "intl"}),
    "ter": Row(),
    "chrf": Row(),
    "hf_evaluate": Row(lambda places: {"path": places.metric_script(), "trust_remote_code": True}),
    "cider": Row(),
    "spice": Row(missing="CoreNLP"),
    "parent_totto": Row(samples=_tables),
    "bleu_totto": Row(samples=_tables),
    "summaCZS": Row(_with(model_name="nli"), samples=_summaries),
    "summaCConv": Row(lambda places: {"models": [places.model("nli")], "start_file": places.head()}, _summaries),
    "reference_perplexity": Row(_with(model_name="causal")),
    "causal_perplexity": Row(_and(_with(tokenizer_id="causal"), stride=16), model="causal"),
    "learned_reward": Row(_and(_with(model_name="classifier"), label_ix=1)),
    "reward_model": Row(_with(model_name="regressor")),
    "llm_judge": _JUDGE,
    "bert_score": Row(_BERT_SCORE),
    "bleurt": Row(_with(config_name="regressor")),
    "intent_accuracy": Row(_with(model_name="intents"), samples=_dialogues),
    "exact_match": Row({"ignore_case": True}),
    "math_equal": Row(),
    "reasoning_gym": Row(),
    "regex": Row({"pattern": r"\d+"}),
    "pass_at_k": Row({"k": [1]}),
    "maj_at_k": Row({"k": [1], "scorer": {"id": "math_equal"}}),
}

_FILE = {"prompt_column": "text", "seed": 3}

POOLS: dict[str, Row] = {
    "episodes": Row({"eval_episodes": 3}),
    "dummy_pool": Row({"prompt": "Count:", "n_samples": 4}),
    "film_opinions": Row({"n_train": 20, "n_eval": 5}),
    "reasoning_gym": Row(lambda places: places.questions()),
    "sums": Row({"limit": 20}),
    "shapes": Row({"n_train": 12, "n_eval": 4}),
    "gsm8k": Row(lambda places: {"path": places.file("problems.jsonl", _PROBLEMS), "seed": 3, "n_val": 2}),
    "jsonl": Row(lambda places: {"path": places.file("ten.jsonl", _JSON_LINES), "reference_column": "answer"} | _FILE),
    "csv": Row(lambda places: {"path": places.file("ten.csv", _CSV), "reference_column": "answer"} | _FILE),
    "text": Row(lambda places: {"path": places.file("ten.txt", _LINES), "prompt_words": 3}),
    "hf_dataset": Row(lambda places: {"path": places.data_set()} | _FILE),
    "preferences": Row(lambda places: {"path": places.file("pairs.jsonl", _PAIRS), "seed": 3}),
    "imdb": _local("imdb", seed=1),
    "imdb_seq2seq": _local("imdb_seq2seq", positive_ratio=0.5),
    "commongen": _local("commongen", prefix="generate a sentence with: ", concept_end_token="."),
    "totto": _local("totto", representation="fulltable"),
    "cnn_daily_mail": _local("cnn_daily_mail", prompt_prefix="Summarize: "),
    "narrative_qa": _local("narrative_qa"),
    "wmt16": _local("wmt16", source_language="en", target_language="de"),
    "wmt14_processed_en_de": _local("wmt14_processed_en_de"),
    "wmt16newsonly": _local("wmt16newsonly"),
    "iwslt2017en_de": _local("iwslt2017en_de", prompt_prefix="translate English to German: "),
    "crd3": _local("crd3", max_context_size=3),
    "daily_dialog": _local("daily_dialog", context_size=5),
}

ALGORITHMS: dict[str, Row] = {
    **{id: Row() for id in ("ppo", "nlpo", "a2c", "trpo", "vapo", "sao", "reinforce_pp", "reinforce_pp_baseline")},
    **{id: Row() for id in ("grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cpgd", "cispo", "rloo", "opo")},
    "maxrl": Row({"scale": "none"}),  # the checker's rewards are not binary
    "online_dpo": Row({"exact": False}),  # its loss is not that of the mean reward: tests/laws/test_exact_gradients.py
    "opd": Row({"exact": False}),  # has no rewards; tests/algorithms/test_opd.py has its exact gradients
}

POST_PROCESSORS: dict[str, Row] = {"three_sentence_summary": Row()}

_JSON_LINES = "".join(f'{{"text": "one and {number}", "answer": "{number + 1}"}}\n' for number in range(10))
_PAIRS = "".join(
    json.dumps({"prompt": f"one and {n}", "chosen": f"{n + 1}", "rejected": f"{n}", "other": "x", "is_good": n > 4})
    + "\n"
    for n in range(10)
)
_PROBLEMS = "".join(f'{{"question": "{n} and 1?", "answer": "Add. #### {n + 1}"}}\n' for n in range(10))
_CSV = "text,answer\n" + "".join(f"one and {number},{number + 1}\n" for number in range(10))
_LINES = "".join(f"a line of text with the number {number}\n" for number in range(10))
