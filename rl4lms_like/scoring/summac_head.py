"""SummaC's convolution: a trained head that reads an image of a document and its summary (Laban et al., 2022).

image       [3 per model, n_document_chunks, n_summary_chunks]
histogram   a row for each of the first 10 chunks of the summary: how many chunks of the document lie in each bin
head        a linear layer on each row, the mean (or min, max, all three) over rows, two logits, softmax
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import MissingResourceError, ModelError

if TYPE_CHECKING:
    import numpy as np

N_ROWS = 10
PUBLISHED = "summac_conv_vitc_sent_perc_e.bin"
"""The head that its authors publish, of `models: [vitc]`, `bins: percentile`, sentences, `nli_labels: e`."""

PERCENTILES = (
    *(0.0, 0.01, 0.02, 0.03, 0.04, 0.07, 0.13, 0.37, 0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.955, 0.96, 0.965, 0.97),
    *(0.975, 0.98, 0.985, 0.99, 0.995, 1.0),
)
"""Edges of the bins `percentile`, of entailments over many summaries."""

Aggregation: TypeAlias = Literal["mean", "min", "max", "all"]
NliLabels: TypeAlias = Literal["e", "c", "n", "ec", "en", "cn", "ecn"]

_KEYS = ("mlp.weight", "mlp.bias", "layer_final.weight", "layer_final.bias")


@dataclass(frozen=True)
class Head:
    """A trained head and the histograms it reads; its weights are loaded at first use.

    Args:
        start_file: its weights, `.safetensors` or torch's own format, in SummaC's names.
        n_models: how many NLI models' images lie above each other.
        bins: `percentile`, or `even50`: so many of equal width.
        nli_labels: which of entailment, contradiction and neither are read.
        agg: how the rows become one.
        norm_histo: shares in place of counts, and the two numbers of chunks before them.
    """

    start_file: str
    n_models: int
    bins: str
    nli_labels: str
    agg: str
    norm_histo: bool

    def score(self, image: np.ndarray) -> float:
        """SummaC-Conv of an image: the probability of `consistent`, from 0 to 1.

        Raises:
            ModelError: the file's weights are not those of such a head.
        """
        import numpy as np

        weight, bias, final_weight, final_bias = self._weights
        rows = self.histogram(image)
        n_filled = int(np.count_nonzero(rows.sum(axis=1)))
        values = rows[:n_filled] @ weight[0] + bias[0]
        if not n_filled:
            features = np.zeros(3)
        elif self.agg == "all":
            features = np.array([values.min(), values.mean(), values.max()])
        else:
            features = np.full(3, getattr(values, self.agg)())
        logits = final_weight @ features + final_bias
        return float(1 / (1 + np.exp(logits[0] - logits[1])))

    def histogram(self, image: np.ndarray) -> np.ndarray:
        """`[10, n_columns]`: a row for each of the summary's first chunks, zeros below the last."""
        import numpy as np

        depths = [index for index in range(len(image)) if "ecn"[index % 3] in self.nli_labels]
        rows = np.zeros((N_ROWS, self.n_columns))
        for column in range(min(image.shape[2], N_ROWS)):
            parts: list[Any] = [image.shape[1:]] if self.norm_histo else []
            for depth in depths:
                parts.append(np.histogram(image[depth, :, column], bins=self.edges, density=self.norm_histo)[0])
            rows[column] = np.concatenate(parts)
        return rows

    @cached_property
    def edges(self) -> list[float]:
        """Of the bins, from 0 to 1."""
        import numpy as np

        return list(PERCENTILES) if self.bins == "percentile" else [*np.arange(0, 1, 1 / n_even_bins(self.bins)), 1.0]

    @property
    def n_columns(self) -> int:
        """Of a histogram."""
        return self.n_models * len(self.nli_labels) * (len(self.edges) - 1) + 2 * self.norm_histo

    @cached_property
    def _weights(self) -> list[np.ndarray]:
        tensors = _read(with_home(self.start_file))
        shapes = dict(zip(_KEYS, ((1, self.n_columns), (1,), (2, 3), (2,)), strict=True))
        found = {key: tuple(tensors[key].shape) for key in _KEYS if key in tensors}
        if found != shapes:
            raise ModelError(
                f"{self.start_file} does not fit: a head of {self.n_models} models with bins {self.bins!r}, nli_labels "
                f"{self.nli_labels!r} has the weights {shapes}, the file has {found or list(tensors)}; the published "
                f"{PUBLISHED} is of models: [vitc], bins: percentile, granularity: sentence, nli_labels: e"
            )
        return [tensors[key].double().numpy() for key in _KEYS]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_weights", "edges")}


def n_even_bins(bins: str) -> int:
    """The number in `even50`.

    Raises:
        ValueError: there is none.
    """
    name, number = bins[:4], bins[4:]
    if name != "even" or not number.isdecimal() or not int(number):
        raise ValueError(f"bins: expected 'percentile' or 'even' and a number, as in 'even50', got {bins!r}")
    return int(number)


def require_head(start_file: str | None, needed_by: str) -> str:
    """The file itself, or an error that says where the published one is: scores of random weights mean nothing.

    Raises:
        MissingResourceError: none is named, or it is not there.
    """
    if start_file is not None and with_home(start_file).is_file():
        return start_file
    named = "none is named" if start_file is None else f"there is no file {with_home(start_file).absolute()}"
    raise MissingResourceError(
        f"a trained head in `start_file` ({named})",
        needed_by=needed_by,
        command=f"curl -LO https://github.com/tingofurro/summac/raw/master/{PUBLISHED}, then start_file: {PUBLISHED}, "
        "models: [vitc], bins: percentile",
        offline="copy that file here from a machine that has it",
    )


def concatenated(images: Sequence[np.ndarray]) -> np.ndarray:
    """The images of several models of one pair, above each other."""
    import numpy as np

    return np.concatenate(images, axis=0)


def _read(file: Path) -> dict[str, Any]:
    """Tensors by name; no code in the file is run."""
    import torch
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:
        raise ModelError(f"cannot read the head {str(file)!r}: {type(error).__name__}: {error}") from error
