"""Calls of users' metrics with validation of their results; any failure is raised as a `MetricError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl4lms_like.core.generated import Generated
from rl4lms_like.metrics.base import BaseMetric, GeneratedMetric, MetricResults, NamedMetric
from rl4lms_like.system.errors import MetricError
from rl4lms_like.system.wording import excerpt, raised


def compute_metric(
    metric: BaseMetric,
    prompt_texts: list[str],
    generated_texts: list[str],
    reference_texts: list[list[str]],
    meta_infos: list[dict[str, Any] | None] | None = None,
    model: Any = None,
    split_name: str | None = None,
    generated: Sequence[Generated] | None = None,
) -> MetricResults:
    """Return the metric's results as plain floats; NaN is allowed and means "not defined for these texts".

    `generated` are the same responses with their samples and token ids, if they are known.

    Raises:
        MetricError: there is nothing to score, the metric failed, or its results are not a mapping of name to
            (one score per text or None, one score).
    """
    name = _name(metric)
    split = f"split {split_name!r}" if split_name else "the split"
    if not generated_texts:
        raise MetricError(f"{name}: {split} has no texts to score")

    # The message has the split and the number of texts: a metric may fail on a single strange text of many.
    try:
        texts = (prompt_texts, generated_texts, reference_texts, meta_infos, model, split_name)
        results = _computed(metric, texts, generated)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # users' code may also raise SystemExit
        where = f"{split} ({len(generated_texts)} texts)"
        raise MetricError(f"{name} failed on {where}: {raised(error)}") from error

    # Checked here, where the metric is known, and not when the scores are written to a file.
    if not isinstance(results, Mapping):
        raise MetricError(f"{name} returned {type(results).__name__}; expected name -> (scores or None, score)")
    return {key: _scores(f"{name}, result {key!r}", value, len(generated_texts)) for key, value in results.items()}


def _computed(metric: BaseMetric, texts: tuple[Any, ...], generated: Sequence[Generated] | None) -> Any:
    """Return the results of a metric from the texts, or from all that is known of the responses."""
    if generated is None:
        return metric.compute(*texts)
    if isinstance(metric, NamedMetric):
        return metric.renamed(_computed(metric.metric, texts, generated))
    return metric.results_of(generated) if isinstance(metric, GeneratedMetric) else metric.compute(*texts)


def compute_metrics(metrics: Sequence[BaseMetric], *arguments: Any, **named: Any) -> MetricResults:
    """Return the results of all metrics; the other arguments are those of `compute_metric`.

    Raises:
        MetricError: a metric failed, or two metrics report the same key.
    """
    results: MetricResults = {}
    name_by_key: dict[str, str] = {}
    for metric in metrics:
        name = _name(metric)
        metric_results = compute_metric(metric, *arguments, **named)

        # Two instances of one metric, such as two classifiers: the second would replace the scores of the first.
        for key in metric_results:
            if key in name_by_key:
                other = name_by_key[key]
                raise MetricError(f"{other} and {name} both report {key!r}; give one a `name` in the config")
            name_by_key[key] = name
        results |= metric_results
    return results


def _scores(where: str, value: Any, n_texts: int) -> tuple[list[float] | None, float]:
    """Return a result as (scores `[n_texts]` or None, score), or raise a `MetricError` that starts with `where`."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise MetricError(f"{where}: expected a pair (scores or None, score), got {excerpt(value)}")
    per_text, overall = value
    if per_text is None:
        return None, _number(where, overall)

    # Lists, arrays and tensors have a length; a text has one too, but its characters are no scores.
    if isinstance(per_text, (str, bytes)) or not hasattr(per_text, "__len__"):
        raise MetricError(f"{where}: expected a list of {n_texts} scores or None, got {excerpt(per_text)}")
    if len(per_text) != n_texts:
        raise MetricError(f"{where}: {len(per_text)} scores for {n_texts} texts")
    return [_number(where, score) for score in per_text], _number(where, overall)


def _name(metric: BaseMetric) -> str:
    if isinstance(metric, NamedMetric):
        return f"{_name(metric.metric)} ({metric.name})"
    return type(metric).__name__


def _number(where: str, value: Any) -> float:
    # `float` accepts the text "0.5", which a metric returns by mistake only. A RuntimeError is that of a tensor with
    # several elements.
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise MetricError(f"{where}: expected a number, got {excerpt(value)}")
