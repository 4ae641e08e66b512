"""Metrics of the library `evaluate`: a folder of one's own is run for real, hub names say that they need the hub."""

from __future__ import annotations

import math
import textwrap

import pytest

from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.system.errors import MetricError, MissingResourceError
from rl4lms_like.testing.checkers import check_metric

SCRIPT = '''
    """Shares of common words."""

    import datasets
    import evaluate


    class WordOverlap(evaluate.Metric):
        def _info(self):
            return evaluate.MetricInfo(
                description="d", citation="c", inputs_description="i", features=datasets.Features({features})
            )

        def _compute(self, predictions, references, scale=1.0):
            shares = []
            for text, texts in zip(predictions, references):
                texts = [texts] if isinstance(texts, str) else texts
                words = set(text.split())
                shares.append(scale * max(len(words & set(t.split())) / max(len(words), 1) for t in texts))
            return {{"overlap": sum(shares) / len(shares), "per_text": shares, "note": "words"}}
'''
TRUSTED = {"trust_remote_code": True}
LISTS = '{"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}'
SINGLE = '{"predictions": datasets.Value("string"), "references": datasets.Value("string")}'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes a metric's script, and returns the folder as a text."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def write(name, features):
        path = tmp_path / name
        path.mkdir()
        script = textwrap.dedent(SCRIPT.replace("{{", "{").replace("}}", "}").replace("{features}", features))
        (path / f"{name}.py").write_text(script, encoding="utf-8")
        return str(path)

    return write


def test_a_script_is_run_only_if_the_config_says_so(folder):
    path = folder("overlap_untrusted", LISTS)
    with pytest.raises(ValueError, match="trust_remote_code"):
        METRICS.get("hf_evaluate", {"path": path})


def test_a_folder_of_ones_own_passes_the_checker_and_reports_the_keys_of_its_row(folder):
    check_metric(METRICS.get("hf_evaluate", {**TRUSTED, "path": folder("overlap_of_words", LISTS)}))


def test_numbers_and_lists_are_reported_and_texts_without_references_do_not_count(folder):
    metric = METRICS.get(
        "hf_evaluate", {**TRUSTED, "path": folder("overlap_lists", LISTS), "compute_args": {"scale": 10.0}}
    )
    results = compute_metric(metric, [""] * 3, ["a b", "x", "c d"], [["a", "a b"], [], ["c e"]])
    assert results["evaluate/overlap_lists/overlap"] == (None, 7.5)
    scores, overall = results["evaluate/overlap_lists/per_text"]
    assert (scores[0], scores[2], overall) == (10.0, 5.0, 7.5)
    assert math.isnan(scores[1])
    assert len(results) == 2


def test_a_list_of_references_is_never_handed_to_a_metric_that_takes_one_text(folder):
    """`evaluate`'s forerunner turned such a list into its text, brackets and all (D-03)."""
    path = folder("overlap_single", SINGLE)
    with pytest.raises(ValueError, match="'references'"):
        METRICS.get("hf_evaluate", {**TRUSTED, "path": path})
    inputs = {"predictions": "generated_texts", "references": "first_reference"}
    metric = METRICS.get("hf_evaluate", {**TRUSTED, "path": path, "inputs": inputs, "result_keys": ["overlap"]})
    results = compute_metric(metric, [""], ["a b"], [["a c", "a b"]])
    assert results == {"evaluate/overlap_single/overlap": (None, 0.5)}
    ((_, nothing),) = compute_metric(metric, [""], ["a b"], [[]]).values()
    assert math.isnan(nothing)


def test_wrong_names_of_inputs_and_results_are_said(folder):
    path = folder("overlap_names", LISTS)
    with pytest.raises(ValueError, match="sources"):
        METRICS.get("hf_evaluate", {**TRUSTED, "path": path, "inputs": {"sources": "prompt_texts"}})
    for key, data in (("f1", "'f1'.*'overlap'"), ("note", "'note'")):
        metric = METRICS.get("hf_evaluate", {**TRUSTED, "path": path, "result_keys": [key]})
        with pytest.raises(MetricError, match=data):
            compute_metric(metric, [""], ["a"], [["a"]])


def test_a_hub_metric_that_cannot_be_reached_is_named_with_the_way_without_a_network(monkeypatch):
    monkeypatch.setenv("HF_EVALUATE_OFFLINE", "1")
    with pytest.raises(MissingResourceError):
        METRICS.get("hf_evaluate", {**TRUSTED, "path": "no_such_metric_here"})
