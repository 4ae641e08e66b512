"""Any metric of the `evaluate` library: by name on its hub, or from a local folder.

prompt_texts, generated_texts, reference_texts, first_reference
    -> `inputs`: the metric's names -> compute(**inputs, **compute_args) -> numbers, lists of one number per text
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import MissingResourceError, import_extra
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.references import mean, spread, with_references

Texts: TypeAlias = Literal["prompt_texts", "generated_texts", "reference_texts", "first_reference"]

_INPUTS: dict[str, Texts] = {"predictions": "generated_texts", "references": "reference_texts"}


class EvaluateMetric(BaseMetric):
    """Metric of the library `evaluate`; its numbers are reported as `evaluate/<name>/<key>`.

    It is a Python script that is run here, and downloaded first if it is on the hub. Use only scripts that you trust.

    Args:
        path: name on the hub, or a folder or file with the script.
        config_name: configuration of a metric that has several.
        inputs: name of each input of the metric -> the texts passed to it: `prompt_texts`, `generated_texts`,
            `reference_texts` (a list for each text) or `first_reference`. Default: predictions and references.
        compute_args: further arguments of the metric's `compute`.
        result_keys: results to report; default: all numbers, and all lists of one number per text with their mean.
        trust_remote_code: run the script; without it nothing is loaded.
    """

    def __init__(
        self,
        path: str,
        config_name: str | None = None,
        inputs: dict[str, Texts] | None = None,
        compute_args: dict[str, Any] | None = None,
        result_keys: list[str] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if not trust_remote_code:
            raise ValueError(f"{path!r} is a Python script: set trust_remote_code: true to run it if you trust it")
        self.inputs = inputs or _INPUTS
        self.needs_references = not {"reference_texts", "first_reference"}.isdisjoint(self.inputs.values())
        self.compute_args = compute_args or {}
        self.result_keys = result_keys
        self.name = Path(path).stem if path.endswith(".py") else Path(path).name
        self._metric = _loaded(path, config_name)
        _check_inputs(self._metric, self.inputs)

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `evaluate/<name>/<key>`; if it uses references, texts without any are NaN and excluded."""
        n_texts = len(generated_texts)
        indices = with_references(reference_texts) if self.needs_references else list(range(n_texts))
        if not indices:
            return {f"evaluate/{self.name}/{key}": (None, math.nan) for key in self.result_keys or ()}
        texts: dict[Texts, list[Any]] = {
            "prompt_texts": [prompt_texts[index] for index in indices],
            "generated_texts": [generated_texts[index] for index in indices],
            "reference_texts": [list(reference_texts[index]) for index in indices],
            "first_reference": [reference_texts[index][0] for index in indices] if self.needs_references else [],
        }
        given = {name: texts[kind] for name, kind in self.inputs.items()}
        results = self._metric.compute(**given, **self.compute_args)
        return {
            f"evaluate/{self.name}/{key}": (None if scores is None else spread(scores, indices, n_texts), overall)
            for key, (scores, overall) in self._numbers(results, len(indices)).items()
        }

    def _numbers(self, results: Any, n_texts: int) -> MetricResults:
        if not isinstance(results, Mapping):
            raise ValueError(f"{self.name!r} returned {type(results).__name__}; expected name -> number")
        wanted = list(results) if self.result_keys is None else self.result_keys
        missing = [key for key in wanted if key not in results]
        if missing:
            raise ValueError(f"{self.name!r} has no result {missing[0]!r}; it has {', '.join(map(repr, results))}")
        read = {key: _number_or_list(results[key], n_texts) for key in wanted}
        strange = [key for key, value in read.items() if value is None]
        if strange and (self.result_keys is not None or len(strange) == len(read)):
            raise ValueError(f"{self.name!r}: the result {strange[0]!r} is neither a number nor one number per text")
        return {key: value for key, value in read.items() if value is not None}


def _number_or_list(value: Any, n_texts: int) -> tuple[list[float] | None, float] | None:
    """Return the scores and the overall score of a result; None if it is neither a number nor one number per text."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, (int, float)):
        return None, float(plain)
    is_list = isinstance(plain, Sequence) and all(isinstance(each, (int, float)) for each in plain)
    if not is_list or len(plain) != n_texts:
        return None
    scores = [float(each) for each in plain]
    return scores, mean(scores)


def _loaded(path: str, config_name: str | None) -> Any:
    needed_by = "the metric 'hf_evaluate'"
    evaluate = import_extra("evaluate", extra="lexical", needed_by=needed_by)
    try:
        return evaluate.load(str(with_home(path)), config_name=config_name, keep_in_memory=True)
    except (FileNotFoundError, ConnectionError, TimeoutError) as error:
        raise MissingResourceError(
            f"the metric {path!r} of the library evaluate",
            needed_by=needed_by,
            command=f"python -c \"import evaluate; evaluate.load('{path}')\"",
            offline="copy the folder with its script here and give its path",
        ) from error


def _check_inputs(metric: Any, inputs: Mapping[str, Texts]) -> None:
    """Raise an error for unknown input names, and for lists of references where the metric takes one text.

    Without this check such a list would be compared as the text `['first reference', 'second reference']`.
    """
    from datasets import Value

    formats = metric.features if isinstance(metric.features, list) else [metric.features]
    known = list(formats[0])
    if set(inputs) != set(known):
        raise ValueError(f"{metric.name!r} takes the inputs {', '.join(known)}; `inputs` names {', '.join(inputs)}")
    for name, texts in inputs.items():
        takes_lists = any(not isinstance(features[name], Value) for features in formats)
        if texts == "reference_texts" and not takes_lists:
            raise ValueError(
                f"{metric.name!r} takes one text as {name!r}, not a list of references; "
                f"pass the first one: inputs: {{..., {name}: first_reference}}"
            )
