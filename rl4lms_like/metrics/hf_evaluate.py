"""Any metric of the `evaluate` library: by name on its hub, or from a local folder.

prompt_texts, generated_texts, reference_texts, first_reference
    -> `inputs`: the metric's names -> compute(**inputs, **compute_args) -> numbers, lists of one number per text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

from rl4lms_like.metrics.base import MetricResults, TextsMetric
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import MissingResourceError, import_extra

Column: TypeAlias = Literal["prompt_texts", "generated_texts", "reference_texts", "first_reference"]

_INPUTS: dict[str, Column] = {"predictions": "generated_texts", "references": "reference_texts"}


class EvaluateMetric(TextsMetric):
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
        inputs: dict[str, Column] | None = None,
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

        # Keys are known only if they are listed: what a script returns shows when it has run.
        self.name = Path(path).stem if path.endswith(".py") else Path(path).name
        self.keys = tuple(f"evaluate/{self.name}/{key}" for key in result_keys or ())

        self._metric = _loaded(path, config_name)
        _check_inputs(self._metric, self.inputs)

    def results(self, texts: Texts) -> MetricResults:
        """Compute `evaluate/<name>/<key>`."""
        # Without a need for references, samples may have none, and no input reads them.
        first_references = [references[0] for references in texts.references] if self.needs_references else []
        columns: dict[Column, list[Any]] = {
            "prompt_texts": texts.prompts,
            "generated_texts": texts.responses,
            "reference_texts": texts.references,
            "first_reference": first_references,
        }
        inputs = {name: columns[column] for name, column in self.inputs.items()}
        results = self._metric.compute(**inputs, **self.compute_args)
        scores = self._scores(results, len(texts.responses))
        return {f"evaluate/{self.name}/{key}": value for key, value in scores.items()}

    def _scores(self, results: Any, n_texts: int) -> MetricResults:
        """Return the numbers of a script's results, or of those in `result_keys`."""
        if not isinstance(results, Mapping):
            raise ValueError(f"{self.name!r} returned {type(results).__name__}; expected name -> number")
        keys = list(results) if self.result_keys is None else self.result_keys
        missing = [key for key in keys if key not in results]
        if missing:
            raise ValueError(f"{self.name!r} has no result {missing[0]!r}; it has {', '.join(map(repr, results))}")

        # Scripts also return texts, settings or counts per n-gram, which are left out; but not if the user selected
        # them, nor if nothing would be left.
        scores: MetricResults = {}
        others = []
        for key in keys:
            score = _number_or_list(results[key], n_texts)
            if score is None:
                others.append(key)
            else:
                scores[key] = score
        if others and (self.result_keys is not None or not scores):
            raise ValueError(f"{self.name!r}: the result {others[0]!r} is neither a number nor one number per text")
        return scores


def _number_or_list(value: Any, n_texts: int) -> tuple[list[float] | None, float] | None:
    """Return the scores and the overall score of a result; None if it is neither a number nor one number per text."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, (int, float)):
        return None, float(plain)

    # A list of another length, such as BLEU's precisions by order, has no scores of texts.
    is_list = isinstance(plain, Sequence) and all(isinstance(item, (int, float)) for item in plain)
    if not is_list or len(plain) != n_texts:
        return None
    scores = [float(item) for item in plain]
    return scores, fmean(scores)


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


def _check_inputs(metric: Any, inputs: Mapping[str, Column]) -> None:
    """Raise an error for unknown input names, and for lists of references where the metric takes one text.

    Without this check such a list would be compared as the text `['first reference', 'second reference']`.
    """
    from datasets import Value

    # A metric may accept several formats, such as one reference or a list of them; the names are those of each.
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
