"""SummaC-Conv: a trained head on the image of a document and its summary (Laban et al., 2022).

image       [3 per model, n_document_chunks, n_summary_chunks]
histogram   one row for each of the first 10 chunks of the summary: number of document chunks in each bin
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
"""File of the published head, for `models: [vitc]`, `bins: percentile`, sentences, `nli_labels: e`."""

PERCENTILES = (
    *(0.0, 0.01, 0.02, 0.03, 0.04, 0.07, 0.13, 0.37, 0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.955, 0.96, 0.965, 0.97),
    *(0.975, 0.98, 0.985, 0.99, 0.995, 1.0),
)
"""Edges of the bins `percentile`: percentiles of the entailment probability over many summaries."""

Aggregation: TypeAlias = Literal["mean", "min", "max", "all"]
NliLabels: TypeAlias = Literal["e", "c", "n", "ec", "en", "cn", "ecn"]

_KEYS = ("mlp.weight", "mlp.bias", "layer_final.weight", "layer_final.bias")


@dataclass(frozen=True)
class Head:
    """Trained head and the settings of its histograms; the weights are loaded at first use.

    Args:
        start_file: file of the weights, `.safetensors` or PyTorch's own format, with SummaC's names.
        n_models: number of NLI models whose images are stacked.
        bins: `percentile`, or `even` and the number of bins of equal width, as in `even50`.
        nli_labels: labels that are used: `e` entailment, `c` contradiction, `n` neutral.
        agg: reduction over the rows.
        norm_histo: densities instead of counts, preceded by the numbers of document and summary chunks.
    """

    start_file: str
    n_models: int
    bins: str
    nli_labels: str
    agg: str
    norm_histo: bool

    def score(self, image: np.ndarray) -> float:
        """Return SummaC-Conv of an image: the probability of `consistent`, from 0 to 1.

        Raises:
            ModelError: the weights in the file do not fit this head.
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
        """Return `[10, n_columns]`: one row for each of the summary's first chunks; unused rows are zero."""
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
        """Edges of the bins, from 0 to 1."""
        import numpy as np

        return list(PERCENTILES) if self.bins == "percentile" else [*np.arange(0, 1, 1 / n_even_bins(self.bins)), 1.0]

    @property
    def n_columns(self) -> int:
        """Number of columns of a histogram."""
        return self.n_models * len(self.nli_labels) * (len(self.edges) - 1) + 2 * self.norm_histo

    @cached_property
    def _weights(self) -> list[np.ndarray]:
        tensors = _read(with_home(self.start_file))
        shapes = dict(zip(_KEYS, ((1, self.n_columns), (1,), (2, 3), (2,)), strict=True))
        found = {key: tuple(tensors[key].shape) for key in _KEYS if key in tensors}
        if found != shapes:
            raise ModelError(
                f"{self.start_file} does not fit: a head for {self.n_models} models, bins {self.bins!r}, nli_labels "
                f"{self.nli_labels!r} has the weights {shapes}, the file has {found or list(tensors)}; the published "
                f"{PUBLISHED} is for models: [vitc], bins: percentile, granularity: sentence, nli_labels: e"
            )
        return [tensors[key].double().numpy() for key in _KEYS]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_weights", "edges")}


def n_even_bins(bins: str) -> int:
    """Return the number in names like `even50`.

    Raises:
        ValueError: the name has another form.
    """
    name, number = bins[:4], bins[4:]
    if name != "even" or not number.isdecimal() or not int(number):
        raise ValueError(f"bins: expected 'percentile' or 'even' and a number, as in 'even50', got {bins!r}")
    return int(number)


def require_head(start_file: str | None, needed_by: str) -> str:
    """Return `start_file`, or raise an error with the URL of the published head: random weights are no substitute.

    Raises:
        MissingResourceError: no file is given, or it does not exist.
    """
    if start_file is not None and with_home(start_file).is_file():
        return start_file
    named = "none is given" if start_file is None else f"there is no file {with_home(start_file).absolute()}"
    raise MissingResourceError(
        f"a trained head in `start_file` ({named})",
        needed_by=needed_by,
        command=f"curl -LO https://github.com/tingofurro/summac/raw/master/{PUBLISHED}, and set start_file: "
        f"{PUBLISHED}, models: [vitc], bins: percentile",
        offline="copy that file here from a machine that has it",
    )


def concatenated(images: Sequence[np.ndarray]) -> np.ndarray:
    """Stack the images of one pair by several models along the first axis."""
    import numpy as np

    return np.concatenate(images, axis=0)


def _read(file: Path) -> dict[str, Any]:
    """Return the tensors of a file by name, without running code from the file."""
    import torch
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:
        raise ModelError(f"cannot read the head {str(file)!r}: {type(error).__name__}: {error}") from error
