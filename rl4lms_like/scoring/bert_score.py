"""BERTScore (Zhang et al., 2020): similarity of each token to its nearest neighbour in the other text.

The package `bert-score` computes it from a model's hidden states. Its scorer is loaded once and gets no empty texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rl4lms_like.core.devices import existing_device
from rl4lms_like.core.errors import ModelError, import_extra
from rl4lms_like.core.model_weights import cannot_load, check_complete, load_complete, place_of, pooler, require_folder
from rl4lms_like.scoring.frozen import longest_input, require_finite, shared, version_of

_ROLE = "model of BERTScore"


class BERTScoreModel:
    """`bert-score`'s scorer, loaded at first use and not pickled.

    Args:
        language: selects the default model: `en` roberta-large, `zh` bert-base-chinese, `tr` a Turkish BERT, `en-sci`
            SciBERT, all others bert-base-multilingual-cased.
        model_type: hub id or local folder of another model.
        num_layers: layer whose hidden states are compared; None: the best layer according to `bert-score`, which lists
            published models.
        batch_size: texts per forward pass.
        device: `auto`, `cpu`, `cuda:1` ...
        dtype: dtype of the weights.
        idf: weight tokens by their inverse document frequency in the references.
        rescale_with_baseline: rescale the scores by those of unrelated texts, which `bert-score` has for some models.
        needed_by: name of the component, for error messages.

    Raises:
        MissingExtraError: `bert-score` is not installed.
        ModelError: the model can only be a local folder, which does not exist.
        ValueError: the layer or the baseline is not known, or there is no such device.
    """

    def __init__(
        self,
        language: str,
        model_type: str | None = None,
        num_layers: int | None = None,
        *,
        batch_size: int = 64,
        device: str = "auto",
        dtype: str = "float32",
        idf: bool = False,
        rescale_with_baseline: bool = False,
        needed_by: str = "BERTScore",
    ) -> None:
        package = import_extra("bert_score", extra="semantic", needed_by=needed_by)
        self.language = language.lower()
        self.model_type = model_type or package.lang2model[self.language]
        require_folder(_ROLE, self.model_type)
        existing_device(device)
        known = package.model2layers.get(self.model_type)
        if num_layers is None and known is None:
            raise ValueError(
                f"num_layers is required: bert-score does not list the layer to compare for {self.model_type!r}"
            )
        self.num_layers = known if num_layers is None else num_layers
        self.batch_size = batch_size
        self.device = device
        self.dtype = dtype
        self.idf = idf
        self.rescale_with_baseline = rescale_with_baseline
        baselines = Path(str(package.__file__)).parent / "rescale_baseline" / self.language
        if rescale_with_baseline and not (baselines / f"{self.model_type}.tsv").is_file():
            raise ValueError(f"bert-score has no baseline of {self.model_type!r} for the language {self.language!r}")
        self._require_weights(check_complete)

    def f1(self, generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        """Return the best F1 over its references for each text, which has at least one.

        An empty text and an empty reference score 0 before rescaling, as in `bert-score`.

        Raises:
            ModelError: the model cannot be loaded, or its hidden states are NaN.
        """
        pairs = [(text, ref) for text, each in zip(generated_texts, references, strict=True) for ref in each]
        comparable = [(text, ref) for text, ref in dict.fromkeys(pairs) if text.strip() and ref.strip()]
        if self.idf and comparable:
            self._scorer._idf_dict = None  # avoids a warning that it is replaced
            self._scorer.compute_idf([ref for _, ref in pairs if ref.strip()])
        score_of = dict(zip(comparable, self._scores(comparable), strict=True))
        score_of.update((pair, self._of_nothing) for pair in pairs if pair not in score_of)
        return [
            max(score_of[text, ref] for ref in each) for text, each in zip(generated_texts, references, strict=True)
        ]

    def _scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        if not pairs:
            return []
        texts, references = [text for text, _ in pairs], [ref for _, ref in pairs]
        precision, _, f1 = self._scorer.score(texts, references, batch_size=self.batch_size)
        if not self.idf:  # with idf, words that all references contain give 0 / 0, which the package turns into 0
            require_finite(precision, _ROLE, self.model_type)
        return f1.tolist()

    @cached_property
    def _of_nothing(self) -> float:
        """Score of an empty text."""
        if not self.rescale_with_baseline:
            return 0.0
        baseline = float(self._scorer.baseline_vals[2])
        return -baseline / (1 - baseline)

    @cached_property
    def _scorer(self) -> Any:
        device = existing_device(self.device)
        setting = (self.language, self.model_type, self.num_layers, device, self.dtype, self.idf)
        return shared((*setting, self.rescale_with_baseline, version_of(self.model_type)), self._load)

    def _require_weights(self, read: Callable[..., object]) -> None:
        """Check that the weights are complete: the package does not report missing weights."""
        import transformers

        auto_class = transformers.T5EncoderModel if "t5" in self.model_type else transformers.AutoModel
        read(auto_class, place_of(self.model_type), role=_ROLE, model_name=self.model_type, unused=pooler)

    def _load(self) -> Any:
        import torch
        from bert_score import BERTScorer

        if not Path(place_of(self.model_type)).is_dir():  # a folder was checked in the constructor
            self._require_weights(load_complete)
        try:
            with torch.random.fork_rng(devices=[]):  # unused weights that the checkpoint lacks are random
                scorer = BERTScorer(
                    model_type=place_of(self.model_type),
                    num_layers=self.num_layers,
                    idf=self.idf,
                    nthreads=0,
                    device=existing_device(self.device),
                    lang=self.language,
                    rescale_with_baseline=self.rescale_with_baseline,
                )
        except Exception as error:
            raise ModelError(cannot_load(_ROLE, self.model_type, error)) from error
        scorer._model.to(getattr(torch, self.dtype)).requires_grad_(False)
        scorer._tokenizer.model_max_length = longest_input(scorer._model, scorer._tokenizer) or 10**6
        return scorer

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_scorer", "_of_nothing")}
