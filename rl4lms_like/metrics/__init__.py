"""What to report. `METRICS` has every metric by id; the config's `train_evaluation.metrics` names some."""

from rl4lms_like.core.registry import Entry, Registry
from rl4lms_like.metrics.base import BaseMetric, MetricResults

METRICS = Registry(
    "metric",
    group="rl4lms_like.metrics",
    table={
        "increasing_numbers": Entry(
            "rl4lms_like.metrics.synthetic:IncreasingNumbersinText", "how much of each response is numbers that grow"
        ),
        "dates": Entry("rl4lms_like.metrics.synthetic:DateInText", "share of responses with a date like 2022-10-04"),
        "sentiment": Entry(
            "rl4lms_like.metrics.sentiment:SentimentMetric", "how positive the texts are by the VADER lexicon, -1 to 1"
        ),
        "distinct_n": Entry(
            "rl4lms_like.metrics.diversity:DistinctN", "distinct n-grams, the most frequent sentence, unique texts"
        ),
        "length": Entry("rl4lms_like.metrics.diversity:Length", "mean words of the responses"),
        "reference_perplexity": Entry(
            "rl4lms_like.metrics.perplexity:ReferencePerplexity",
            "perplexity of the responses under a frozen causal language model",
        ),
    },
)
MetricRegistry = METRICS
"""RL4LMs' name."""

__all__ = ["METRICS", "BaseMetric", "MetricRegistry", "MetricResults"]
