"""BERTScore (Zhang et al., 2020): similarity of each token to its nearest neighbour in the other text.

The package `bert-score` computes it from a model's hidden states. Its scorer is loaded once and gets no empty texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rl4lms_like.core.devices import existing_device
from rl4lms_like.core.model_weights import cannot_load, check_complete, load_complete, place_of, pooler, require_folder
from rl4lms_like.scoring.frozen import ModelArguments, longest_input, require_finite, shared, version_of
from rl4lms_like.scoring.score import Score, Texts
from rl4lms_like.system.errors import ModelError, import_extra
from rl4lms_like.system.numbers import Count, Whole

_ROLE = "model of BERTScore"


@dataclass(eq=False)
class BERTScore(ModelArguments, Score):
    """BERTScore F1 (Zhang et al., 2020) against the best reference.

    An empty response and an empty reference score 0 before rescaling, as in `bert-score`.

    Args:
        language: selects the model if `model_type` is not set: `en` roberta-large, `zh` bert-base-chinese, `tr` a
            Turkish BERT, `en-sci` SciBERT, others bert-base-multilingual-cased.
        model_type: hub id or local folder of another model.
        num_layers: layer whose embeddings are compared; required for models that are not listed in `bert-score`.
        rescale_with_baseline: rescale linearly by the mean score of unrelated texts; `bert-score` ships these baselines
            for some models.
    """

    id = "bert_score"
    needs_references = True
    idf = False

    language: str = "en"
    model_type: str | None = None
    num_layers: Whole | None = None
    batch_size: Count = field(default=64, kw_only=True)
    rescale_with_baseline: bool = False

    def __post_init__(self) -> None:
        package = import_extra("bert_score", extra="semantic", needed_by=self.needed_by)
        self._language = self.language.lower()
        self.model_name = self.model_type or package.lang2model[self._language]
        require_folder(_ROLE, self.model_name)
        existing_device(self.device)

        # The package lists the layer whose similarities agree best with human ratings, which is rarely the last one.
        self.layer = package.model2layers.get(self.model_name) if self.num_layers is None else self.num_layers
        if self.layer is None:
            raise ValueError(f"num_layers is required: bert-score does not list a layer of {self.model_name!r}")

        baselines = Path(str(package.__file__)).parent / "rescale_baseline" / self._language
        if self.rescale_with_baseline and not (baselines / f"{self.model_name}.tsv").is_file():
            raise ValueError(f"bert-score has no baseline of {self.model_name!r} for the language {self._language!r}")
        self._require_weights(check_complete)

    def per_text(self, texts: Texts) -> list[float]:
        # The package would print a warning for each empty text; its score is known without a model.
        pairs = texts.pairs()
        comparable = [(text, reference) for text, reference in pairs if text.strip() and reference.strip()]

        # Weights of rare words: from the references of this call, one by one, as in the package.
        if self.idf and comparable:
            references: list[str] = []
            for sample_references in texts.references:
                references += filter(str.strip, sample_references)
            self._scorer._idf_dict = None  # avoids a warning that it is replaced
            self._scorer.compute_idf(references)

        score_of = dict(zip(comparable, self._scores(comparable), strict=True))
        for pair in pairs:
            if pair not in score_of:
                score_of[pair] = self._of_nothing
        return texts.best(score_of)

    def _scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        if not pairs:
            return []
        texts = [text for text, _ in pairs]
        references = [reference for _, reference in pairs]

        # With the most similar token of the other text (Zhang et al., section 3), and F = 2 P R / (P + R):
        #     P = mean over the text's tokens of max cos      R = mean over the reference's tokens of max cos
        precision, _, f1 = self._scorer.score(texts, references, batch_size=self.batch_size)

        # Of P, because the package replaces a NaN of F by 0. With idf, words that all references contain have the
        # weight 0, and 0 / 0 is no fault of the model.
        if not self.idf:
            require_finite(precision, _ROLE, self.model_name)
        return f1.tolist()

    @cached_property
    def _of_nothing(self) -> float:
        """Score of an empty text."""
        if not self.rescale_with_baseline:
            return 0.0

        # F' = (F - b) / (1 - b) of F = 0, with the baseline b of F, the third of P, R and F.
        baseline = float(self._scorer.baseline_vals[2])
        return -baseline / (1 - baseline)

    @cached_property
    def _scorer(self) -> Any:
        # Everything that makes a difference to the scorer, so that a reward and a metric share one only if they may.
        device = existing_device(self.device)
        settings = (self._language, self.model_name, self.layer, device, self.dtype, self.idf)
        return shared((*settings, self.rescale_with_baseline, version_of(self.model_name)), self._load)

    def _require_weights(self, read: Callable[..., object]) -> None:
        """Check that the weights are complete: the package does not report missing weights."""
        import transformers

        # The package loads only the encoder of a T5.
        auto_class = transformers.T5EncoderModel if "t5" in self.model_name else transformers.AutoModel
        read(auto_class, place_of(self.model_name), role=_ROLE, model_name=self.model_name, unused=pooler)

    def _load(self) -> Any:
        import torch
        from bert_score import BERTScorer

        # A folder was checked in the constructor.
        if not Path(place_of(self.model_name)).is_dir():
            self._require_weights(load_complete)

        # Unused weights that the checkpoint lacks are drawn at random: without the fork, loading a metric would change
        # the random numbers of a training.
        try:
            with torch.random.fork_rng(devices=[]):
                scorer = BERTScorer(
                    model_type=place_of(self.model_name),
                    num_layers=self.layer,
                    idf=self.idf,
                    nthreads=0,
                    device=existing_device(self.device),
                    lang=self._language,
                    rescale_with_baseline=self.rescale_with_baseline,
                )
        except Exception as error:
            raise ModelError(cannot_load(_ROLE, self.model_name, error)) from error

        # The package truncates at the tokenizer's limit, which may be missing or above the model's.
        scorer._model.to(getattr(torch, self.dtype)).requires_grad_(False)
        scorer._tokenizer.model_max_length = longest_input(scorer._model, scorer._tokenizer) or 10**6
        return scorer

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_scorer", "_of_nothing")}
