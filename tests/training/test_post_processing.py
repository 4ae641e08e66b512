"""`post_processing_fn` of a supervised run: checked with the config, tried before a model is loaded."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.inference import evaluate_run
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.offline import assemble_supervised as assembling
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import ComponentError
from tests.config_errors import raises_at
from tests.configs import run_blocks, supervised_blocks

PLACE = "alg.generation_kwargs.post_processing_fn"


def bracketed(text: str, width: int = 3) -> str:
    """The first characters of a text, in brackets."""
    return f"<{text[:width]}>"


def broken(text: str) -> str:
    raise ZeroDivisionError("no texts today")


class Bracketed(BaseMetric):
    """The share of texts in brackets, and the mean width inside."""

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        inside = [float(text[0] + text[-1] == "<>") for text in generated_texts]
        widths = [float(len(text) - 2) for text in generated_texts]
        return {
            "test/in_brackets": (inside, sum(inside) / len(inside)),
            "test/width": (widths, max(widths)),
        }


def blocks_with(post, model):
    return {
        "tokenizer": {"model_name": str(model), "max_length": 8},
        "datapool": {"id": "film_opinions", "args": {"n_train": 4, "n_eval": 3}},
        "alg": {
            "id": "supervised",
            "model_type": "causal",
            "model_name": str(model),
            "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 6, "post_processing_fn": post},
            "training_args": {"max_steps": 1},
        },
        "train_evaluation": {"eval_batch_size": 3, "metrics": [{"id": f"{__name__}:Bracketed"}]},
    }


def test_metrics_and_predictions_see_what_the_function_makes_of_the_texts(tiny_gpt2_dir, tmp_path):
    blocks = blocks_with({"id": f"{__name__}:bracketed", "args": {"width": "2"}}, tiny_gpt2_dir)
    folder = train_config(parse_config(blocks), base_path_to_store_results=tmp_path, quiet=True)
    for line in (folder / "test_split_metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["metrics"] == {"test/in_brackets": 1.0, "test/width": 2.0}
    predictions = json.loads((folder / "epoch_0_test_split_predictions.json").read_text())
    assert all(line["generated_text"][0] + line["generated_text"][-1] == "<>" for line in predictions)
    scores = evaluate_run(folder, split="val")
    assert scores == {"test/in_brackets": 1.0, "test/width": 2.0}


def test_a_function_that_fails_is_told_before_a_model_is_loaded(tiny_gpt2_dir, monkeypatch):
    monkeypatch.setattr(assembling, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    blocks = blocks_with({"id": f"{__name__}:broken"}, tiny_gpt2_dir)
    with pytest.raises(ComponentError, match=r"broken .*no texts today"):
        assembling.assemble_supervised(parse_config(blocks))


@pytest.mark.parametrize(
    ("post", "path"),
    [
        ({"id": "three_sentence_sumary"}, f"{PLACE}.id"),
        ({"id": "three_sentence_summary", "arg": {}}, f"{PLACE}.arg"),
        ({"id": f"{__name__}:bracketed", "args": {"widht": 3}}, f"{PLACE}.args.widht"),
        ({"id": f"{__name__}:bracketed", "args": {"text": "x"}}, f"{PLACE}.args.text"),
        ({"id": f"{__name__}:PLACE"}, f"{PLACE}.id"),
        ({"args": {}}, PLACE),
        ("three_sentence_summary", PLACE),
    ],
)
def test_mistakes_are_found_with_the_config(post, path):
    blocks = supervised_blocks()
    blocks["alg"]["generation_kwargs"]["post_processing_fn"] = post
    with raises_at(path):
        parse_config(blocks)


def test_the_catalogues_function_is_taken():
    blocks = supervised_blocks()
    blocks["alg"]["generation_kwargs"]["post_processing_fn"] = {"id": "three_sentence_summary"}
    assert parse_config(blocks).alg.generation_kwargs["post_processing_fn"]["id"] == "three_sentence_summary"


@pytest.mark.parametrize("path", ["alg.policy.args", "train_evaluation"])
def test_an_rl_run_has_none_and_says_so(path):
    blocks = run_blocks()
    holder = blocks["train_evaluation"] if path == "train_evaluation" else blocks["alg"]["policy"]["args"]
    holder["generation_kwargs"] = {"do_sample": True, "post_processing_fn": {"id": "three_sentence_summary"}}
    with raises_at(f"{path}.generation_kwargs.post_processing_fn"):
        parse_config(blocks)
