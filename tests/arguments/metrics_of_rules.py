"""How each argument of the metrics acts that load no model: by id, then by argument."""

from __future__ import annotations

from tests.arguments import judge
from tests.arguments.rules import SHARED, Rows
from tests.arguments.seen import Acts, Tried, pairs
from tests.catalogue import Places

_SCRIPT = """
import datasets
import evaluate


class SameLetters(evaluate.Metric):
    def _info(self):
        texts = datasets.Value("string")
        return evaluate.MetricInfo(
            description="How many letters a text shares.", citation="", inputs_description="",
            features=datasets.Features({"predictions": texts, "references": datasets.Sequence(texts)}),
        )

    def _compute(self, predictions, references, scale=1.0):
        units = str.split if self.config_name == "words" else list
        shared = [
            scale * len(set(units(text)) & {unit for each in texts for unit in units(each)})
            for text, texts in zip(predictions, references)
        ]
        return {"shared": shared, "most": max(shared)}
"""


def script(places: Places) -> str:
    """Another metric as the library `evaluate` has them, with a configuration, an argument and two results."""
    return places.file("same_letters.py", _SCRIPT)


def training_texts(places: Places) -> str:
    """Texts that were trained on, other than the catalogue's."""
    return places.file("trained_on.txt", "it was bad and sad\n1 2 3\n")


def training_fields(places: Places) -> str:
    """Texts that were trained on, in two fields."""
    return places.file("trained_on.jsonl", '{"text": "it was bad", "others": ["the film", "1 2 3"]}\n')


def numbers(tried: Tried) -> list[tuple[list[float] | None, float]]:
    """A metric's scores without their names, which may repeat an argument."""
    return list(tried.scores().values())


_TWO_SAMPLES = pairs(("Name it.", ["the cat"], "the cat"), ("Name it.", ["the cat"], "The Cat"))

ROWS: Rows = {
    "increasing_numbers": SHARED["increasing_numbers"],
    "sentiment": SHARED["sentiment"],
    "diversity": {"window_size": Acts(3, numbers)},
    "novelty": {
        "training_texts": Acts(training_texts),
        "field": Acts("others", others={"training_texts": training_fields}),
        "max_n": Acts(3, numbers),
    },
    "rouge": SHARED["rouge"],
    "rouge_l_max": SHARED["rouge_l_max"],
    "sacre_bleu": SHARED["sacre_bleu"],
    "hf_evaluate": {
        "path": Acts(script, numbers),
        "config_name": Acts("words", others={"path": script}),
        "inputs": Acts({"predictions": "prompt_texts", "references": "reference_texts"}, others={"path": script}),
        "compute_args": Acts({"scale": 10.0}, others={"path": script}),
        "result_keys": Acts(["most"], others={"path": script}),
        "trust_remote_code": Acts(False, refused="set trust_remote_code: true"),
    },
    "exact_match": SHARED["exact_match"],
    "math_equal": SHARED["math_equal"],
    "reasoning_gym": SHARED["reasoning_gym"],
    "llm_judge": judge.ROWS,
    "regex": SHARED["regex"],
    "pass_at_k": {
        "k": Acts([2], numbers, texts=_TWO_SAMPLES),
        "scorer": Acts({"id": "exact_match", "args": {"ignore_case": True}}, texts=_TWO_SAMPLES),
        "correct_from": Acts(
            0.5, others={"scorer": {"id": "exact_match", "args": {"reward": 0.5}}}, texts=_TWO_SAMPLES
        ),
    },
    "maj_at_k": {
        "k": Acts([2], numbers, others={"scorer": "exact_match"}, texts=_TWO_SAMPLES),
        "scorer": Acts(
            {"id": "exact_match", "args": {"ignore_case": True}}, others={"scorer": "exact_match"}, texts=_TWO_SAMPLES
        ),
        "correct_from": Acts(
            0.5, others={"scorer": {"id": "exact_match", "args": {"reward": 0.5}}}, texts=_TWO_SAMPLES
        ),
    },
}
