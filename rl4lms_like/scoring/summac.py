"""SummaC: consistency of a summary with its document, by natural language inference (Laban et al., 2022).

chunks     a text's paragraphs, sentences, pairs of sentences ..., those of more than 10 characters
image      [3, n_document_chunks, n_summary_chunks]   entailment, contradiction, neutral of each pair of chunks
zero-shot  mean over the summary's chunks of the best document chunk's score                  -1 to 1
conv       a trained head on histograms of the image's columns, one per chunk of the summary   0 to 1

histogram  one row for each of the first 10 chunks of the summary: number of document chunks in each bin
head       a linear layer on each row, the mean (or min, max, all three) over rows, two logits, softmax
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from rl4lms_like.core.devices import existing_device
from rl4lms_like.scoring.classifier import Classifier
from rl4lms_like.scoring.nltk_data import require_data, sentences
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import MissingResourceError, ModelError

if TYPE_CHECKING:
    import numpy as np

MAX_LENGTH = 500  # maximum number of tokens of both texts together, as in SummaC
_TOKENIZED_AT_ONCE = 4096  # number of pairs; the tokens of all chunk pairs of a split would fill the memory
SHORTEST_CHUNK = 11  # minimum number of characters of a chunk; shorter chunks are left out
UNITS = ("paragraph", "sentence", "document", "2sents", "mixed")
Operation: TypeAlias = Literal["min", "mean", "max"]

_LARGEST_CACHE = 1000

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


class Labels(NamedTuple):
    """Index of the logit of each label."""

    entailment: int
    contradiction: int
    neutral: int


CARDS: Mapping[str, tuple[str, Labels]] = {
    "snli-base": ("boychaboy/SNLI_roberta-base", Labels(0, 2, 1)),
    "snli-large": ("boychaboy/SNLI_roberta-large", Labels(0, 2, 1)),
    "mnli-base": ("microsoft/deberta-base-mnli", Labels(2, 0, 1)),
    "mnli": ("roberta-large-mnli", Labels(2, 0, 1)),
    "anli": ("ynie/roberta-large-snli_mnli_fever_anli_R1_R2_R3-nli", Labels(0, 2, 1)),
    "vitc-base": ("tals/albert-base-vitaminc-mnli", Labels(0, 1, 2)),
    "vitc": ("tals/albert-xlarge-vitaminc-mnli", Labels(0, 1, 2)),
    "vitc-only": ("tals/albert-xlarge-vitaminc", Labels(0, 1, 2)),
}


class NliModel(Classifier):
    """NLI checkpoint, a key of `CARDS`, hub id or local folder; on a GPU the weights are float16, as published.

    Raises:
        ModelError: the name can only be a local folder, which does not exist, or its labels are not recognised.
        ValueError: there is no such device.
    """

    def __init__(self, name: str, *, device: str = "auto", batch_size: int = 20) -> None:
        # A published checkpoint may also be given by its id on the hub.
        checkpoint = CARDS[name][0] if name in CARDS else name
        self.labels = next((labels for card, labels in CARDS.values() if card == checkpoint), None)

        dtype = "float16" if existing_device(device).startswith("cuda") else "float32"
        super().__init__(
            checkpoint,
            batch_size=batch_size,
            max_length=MAX_LENGTH,
            role="NLI model",
            device=device,
            dtype=dtype,
            truncation_side="right",
        )

        # Names of another local checkpoint's labels are checked here; those of one on the hub when it is loaded.
        config = self.local_config() if self.labels is None else None
        if config is not None:
            self.labels = labels_of(config.id2label, checkpoint)

    def probabilities(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the probabilities of the `Labels` for pairs of premise and hypothesis, `[n, 3]` float64.

        In pairs that are too long, the end of the longer text is cut, then of both.

        Raises:
            ModelError: the checkpoint cannot be loaded, its labels are not these three, or it returns NaN.
        """
        import numpy as np

        # Columns of the logits in the order of `Labels`, which differs between checkpoints.
        order = list(self.labels or labels_of(self.model.config.id2label, self.model_name))
        probabilities = np.zeros((len(pairs), 3))
        for start in range(0, len(pairs), _TOKENIZED_AT_ONCE):
            end = start + _TOKENIZED_AT_ONCE
            premises, hypotheses = zip(*pairs[start:end], strict=True)
            logits = self.logits(premises, hypotheses)
            probabilities[start:end] = logits.softmax(dim=1)[:, order].double().numpy()
        return probabilities


def labels_of(id2label: Mapping[int, str], model_name: str) -> Labels:
    """Return the logit indices by the label names in a checkpoint's config; VitaminC has `SUPPORTS` and `REFUTES`."""
    # Keys of `id2label` are numbers, or texts in a config.json that was read as plain JSON.
    names = {int(index): label.lower() for index, label in id2label.items()}
    entailment = [index for index, label in names.items() if label.startswith(("entail", "support"))]
    contradiction = [index for index, label in names.items() if label.startswith(("contradict", "refute"))]
    if len(names) != 3 or len(entailment) != 1 or len(contradiction) != 1:
        raise ModelError(
            f"the NLI model {model_name!r} has the labels {list(id2label.values())}; expected 'entailment', "
            f"'contradiction' and a third: name them in id2label of its config.json, or use one of {', '.join(CARDS)}"
        )

    # The third label has several names, such as "neutral" and "NOT ENOUGH INFO".
    (neutral,) = set(names) - {entailment[0], contradiction[0]}
    return Labels(entailment[0], contradiction[0], neutral)


class Imager:
    """NLI model that computes the images of document-summary pairs; `settings` is the metric with its arguments.

    Raises:
        ValueError: unknown granularity or device.
        MissingResourceError: NLTK's `punkt_tab` is not installed.
        ModelError: the name can only be a local folder, which does not exist.
    """

    def __init__(self, model_name: str, settings: Any) -> None:
        units = settings.granularity.split("-")
        if len(units) > 2 or not set(units) <= set(UNITS):
            raise ValueError(f"granularity: expected one or two, as 'a-b', of {UNITS}, got {settings.granularity!r}")

        # `paragraph-sentence`: paragraphs of the document, sentences of the summary; `sentence`: of both.
        self.document_unit = units[0]
        self.summary_unit = units[-1]
        self.use_cache = settings.use_cache
        self.max_doc_sents = settings.max_doc_sents

        if set(units) & {"sentence", "2sents", "mixed"}:
            require_data(settings.needed_by, "punkt_tab")
        self.nli = NliModel(model_name, device=settings.device, batch_size=settings.batch_size)
        self._cache: dict[tuple[str, str], np.ndarray] = {}

    def images(self, documents: Sequence[str], summaries: Sequence[str]) -> list[np.ndarray]:
        """Return the image of each pair; zeros of shape `[3, 1, 1]` if a text has no chunk."""
        pairs = list(zip(documents, summaries, strict=True))
        distinct_pairs = list(dict.fromkeys(pairs))
        images = {pair: self._cache[pair] for pair in distinct_pairs if pair in self._cache}
        images |= self._computed([pair for pair in distinct_pairs if pair not in images])

        # The images of the newest pairs: an evaluation scores the same split again and again, of which only the
        # summaries that changed are new.
        if self.use_cache:
            self._cache = dict(list((self._cache | images).items())[-_LARGEST_CACHE:])
        return [images[pair] for pair in pairs]

    def _computed(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], np.ndarray]:
        """Compute the images; the chunk pairs of all texts go through the model together."""
        import numpy as np

        chunk_pairs: list[tuple[str, str]] = []
        shapes = []
        for document, summary in pairs:
            premises = chunks(document, self.document_unit)[: self.max_doc_sents]
            hypotheses = chunks(summary, self.summary_unit)
            shapes.append((len(premises), len(hypotheses)))
            chunk_pairs += product(premises, hypotheses)
        probabilities = self.nli.probabilities(chunk_pairs) if chunk_pairs else np.zeros((0, 3))

        # [n_premises x n_hypotheses, 3], with the hypotheses of a premise in a row -> [3, n_premises, n_hypotheses]. A
        # copy, because a view in the cache would keep the probabilities of all pairs.
        images = {}
        start = 0
        for pair, (n_premises, n_hypotheses) in zip(pairs, shapes, strict=True):
            size = n_premises * n_hypotheses
            if size:
                image = probabilities[start : start + size].T.reshape(3, n_premises, n_hypotheses).copy()
            else:
                image = np.zeros((3, 1, 1))
            images[pair] = image
            start += size
        return images

    def __getstate__(self) -> dict[str, Any]:
        # Without the cache, which can be large and belongs to this process's texts.
        return {**vars(self), "_cache": {}}


def zero_shot(image: np.ndarray, *, op1: Operation, op2: Operation, use_ent: bool, use_con: bool) -> float:
    """Return SummaC-ZS of an image: `op1` over the document's chunks, then `op2` over the summary's.

    The score of a chunk is entailment minus contradiction. If only one of the two is used, it is entailment, or 1 minus
    contradiction.
    """
    # With entailment E and contradiction C of the document's chunk d and the summary's chunk s:
    #     score = op2_s (op1_d E[d, s] - op1_d C[d, s])
    # Each is reduced alone: the chunk that supports a sentence best may not be the one that contradicts it most.
    by_chunk = getattr(image[:2], op1)(axis=1)  # [2, n_summary]
    entailment = by_chunk[0] if use_ent else 1.0
    scores = entailment - by_chunk[1] if use_con else entailment
    return float(getattr(scores, op2)())


def chunks(text: str, unit: str) -> list[str]:
    """Split a text into units; a `document` is the whole text, however short."""
    if unit == "document":
        return [text]

    # A text without empty lines has one paragraph per line.
    if unit == "paragraph":
        separator = "\n\n" if "\n\n" in text else "\n"
        paragraphs = [paragraph.strip() for paragraph in text.split(separator)]
        return [paragraph for paragraph in paragraphs if len(paragraph) >= SHORTEST_CHUNK]

    # The pairs of sentences overlap, and the last one is the last sentence alone.
    long_sentences = [sentence for sentence in sentences(text) if len(sentence) >= SHORTEST_CHUNK]
    if unit == "2sents":
        return [" ".join(long_sentences[index : index + 2]) for index in range(len(long_sentences))]
    if unit == "mixed":
        return long_sentences + chunks(text, "paragraph")
    return long_sentences


@dataclass(frozen=True)
class Head:
    """Trained head and the settings of its histograms, as in `SummaCConvMetric`; loaded at first use."""

    start_file: str
    n_models: int
    bins: str
    nli_labels: str
    agg: str
    norm_histo: bool

    def score(self, image: Sequence[np.ndarray]) -> float:
        """Return SummaC-Conv, the probability of `consistent`; `image` is `[3 per model, n_document, n_summary]`.

        Raises:
            ModelError: the weights in the file do not fit this head.
        """
        import numpy as np

        # One value for each chunk of the summary: a linear layer on its histogram. Rows of zeros are no chunks.
        weight, bias, final_weight, final_bias = self._weights
        rows = self.histogram(np.asarray(image))
        n_filled = int(np.count_nonzero(rows.sum(axis=1)))
        values = rows[:n_filled] @ weight[0] + bias[0]

        # The final layer was trained on three features, which are equal for a single reduction.
        if not n_filled:
            features = np.zeros(3)
        elif self.agg == "all":
            features = np.array([values.min(), values.mean(), values.max()])
        else:
            features = np.full(3, getattr(values, self.agg)())

        # softmax([l0, l1])[1] = 1 / (1 + exp(l0 - l1))
        logits = final_weight @ features + final_bias
        return float(1 / (1 + np.exp(logits[0] - logits[1])))

    def histogram(self, image: np.ndarray) -> np.ndarray:
        """Return `[10, n_columns]`: one row for each of the summary's first chunks; unused rows are zero."""
        import numpy as np

        # Layers of the image: entailment, contradiction and neutral of the first model, then of the second ...
        layers = [index for index in range(len(image)) if "ecn"[index % 3] in self.nli_labels]

        # A row: the numbers of chunks of document and summary, where densities lose them, then a histogram per layer of
        # the probabilities that the document's chunks have for this chunk of the summary.
        rows = np.zeros((N_ROWS, self.n_columns))
        for column in range(min(image.shape[2], N_ROWS)):
            histograms: list[Any] = [image.shape[1:]] if self.norm_histo else []
            for layer in layers:
                counts, _ = np.histogram(image[layer, :, column], bins=self.edges, density=self.norm_histo)
                histograms.append(counts)
            rows[column] = np.concatenate(histograms)
        return rows

    @cached_property
    def edges(self) -> list[float]:
        """Edges of the bins, from 0 to 1."""
        import numpy as np

        if self.bins == "percentile":
            return list(PERCENTILES)
        return [*np.arange(0, 1, 1 / n_even_bins(self.bins)), 1.0]

    @property
    def n_columns(self) -> int:
        """Number of columns of a histogram."""
        return self.n_models * len(self.nli_labels) * (len(self.edges) - 1) + 2 * self.norm_histo

    @cached_property
    def _weights(self) -> list[np.ndarray]:
        tensors = _read(with_home(self.start_file))

        # A head for other bins or labels has another number of columns; its scores would mean nothing.
        shapes = dict(zip(_KEYS, ((1, self.n_columns), (1,), (2, 3), (2,)), strict=True))
        shapes_in_file = {key: tuple(tensors[key].shape) for key in _KEYS if key in tensors}
        if shapes_in_file != shapes:
            raise ModelError(
                f"{self.start_file} does not fit: a head for {self.n_models} models, bins {self.bins!r}, nli_labels "
                f"{self.nli_labels!r} has the weights {shapes}, the file has {shapes_in_file or list(tensors)}; the "
                f"published {PUBLISHED} is for models: [vitc], bins: percentile, granularity: sentence, nli_labels: e"
            )
        return [tensors[key].double().numpy() for key in _KEYS]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_weights", "edges")}


def n_even_bins(bins: str) -> int:
    """Return the number in names like `even50`; other names are a `ValueError`."""
    name = bins[:4]
    number = bins[4:]
    if name != "even" or not number.isdecimal() or not int(number):
        raise ValueError(f"bins: expected 'percentile' or 'even' and a number, as in 'even50', got {bins!r}")
    return int(number)


def require_head(start_file: str | None, needed_by: str) -> str:
    """Return `start_file`, or raise a `MissingResourceError` with the URL of the published head."""
    if start_file is not None and with_home(start_file).is_file():
        return start_file

    # Not downloaded and not drawn at random: an untrained head returns numbers, too.
    problem = "none is given" if start_file is None else f"there is no file {with_home(start_file).absolute()}"
    raise MissingResourceError(
        f"a trained head in `start_file` ({problem})",
        needed_by=needed_by,
        command=f"curl -LO https://github.com/tingofurro/summac/raw/master/{PUBLISHED}, and set start_file: "
        f"{PUBLISHED}, models: [vitc], bins: percentile",
        offline="copy that file here from a machine that has it",
    )


def _read(file: Path) -> dict[str, Any]:
    """Return the tensors of a file by name, without running code from the file."""
    import torch
    from safetensors.torch import load_file

    # `weights_only` refuses pickles that contain anything but tensors.
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:
        raise ModelError(f"cannot read the head {str(file)!r}: {type(error).__name__}: {error}") from error
